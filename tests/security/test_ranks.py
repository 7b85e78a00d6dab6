"""Another local user, or a stranger on the network, against the ranks of a job: nothing of theirs is trusted,
and none of their bytes run."""

from __future__ import annotations

import ast
import asyncio
import os
import pickle
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
import zmq
import zmq.asyncio

from megarl.config.errors import ConfigError, MessageError, WaitTimeout
from megarl.data.sample import TokenData
from megarl.parallel import comm, objects, secret
from megarl.parallel.runtime import Runtime
from megarl.parallel.secret import SignedStore, agree_on_secret, make_secret, open_store, read_secret
from megarl.rollout import messages as m
from megarl.rollout.state import RolloutShare, pack_journal, unpack_journal
from tests.cli.processes import Job
from tests.cli.scene import Scene
from tests.ranks import RankPool

ROOT = Path(__file__).parents[2]
NOBODY = 65534  # a user id that owns nothing
OURS = bytes(range(32))
ENDLESS = ("steps=100000", "rollout.dynamic_sampling.max_batches=1", "data.eval=[]")
# What unpickles. `pickle` may be imported for the names of its errors, and to look into a file for what it
# would do: where that is, is listed.
UNPICKLES = {"loads", "load", "Unpickler"}
OBJECT_COLLECTIVES = {
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
}
ALLOWED = {"megarl/weights/index.py"}  # looks into a checkpoint's index and refuses what is foreign


class Exploit:
    """Makes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def secret_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secret, "_secret", OURS)


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that every user may enter and list, as /tmp is."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="megarl-public-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def as_nobody(code: str, *arguments: object) -> str:
    """What a program of another user prints."""
    if os.geteuid():
        pytest.skip("only root may start a process of another user")
    started = f"import os, sys; os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})\n{code}"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", started, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={},
    )
    return done.stdout + done.stderr


# A real run


@pytest.mark.slow
def test_a_run_of_two_ranks_has_nothing_for_other_users(
    tmp_path: Path, public: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No socket of it listens beyond loopback, and another user can open neither the store nor the secret."""
    monkeypatch.setenv("TMPDIR", str(public))
    scene = Scene.make(tmp_path)
    with Job(scene.config, *ENDLESS, forked=False) as job:
        job.ranks(2)
        job.wait_for_steps()
        family = [psutil.Process(job.process.pid), *psutil.Process(job.process.pid).children(recursive=True)]
        listening = [
            one.laddr.ip
            for process in family
            for one in process.net_connections("inet")
            if one.status == psutil.CONN_LISTEN
        ]
        (folder,) = public.glob("megarl-ranks-*")
        mode, there = stat.S_IMODE(folder.stat().st_mode), {path.name for path in folder.iterdir()}
        (public / "control").touch()
        found = as_nobody(
            "for name in sys.argv[1:]:\n"
            "    try: open(name, 'rb'); print('opened', name)\n"
            "    except PermissionError: print('refused')",
            folder / "store",
            folder / "secret",
            public / "control",
        )
    assert listening and set(listening) <= {"127.0.0.1", "::1"}, listening
    assert mode == 0o700
    assert "store" in there and "secret" not in there  # nobody needs it once all ranks have read it
    assert found.split() == ["refused", "refused", "opened", str(public / "control")]


# A rank that is none


def gathers(runtime: Runtime, mark: str, wrong: str) -> str:
    """Rank 1 says something that no rank of this job would."""
    if runtime.rank == 1:
        blob = pickle.dumps(Exploit(Path(mark)))
        if wrong == "stranger":
            comm.sign = lambda *parts: bytes(32)
        elif wrong == "replayed":
            comm._next_number = lambda group: 0
            comm.gather_to_rank_0(runtime, "an earlier message", str)
        original, comm.encode = comm.encode, lambda value: blob if wrong != "replayed" else original(value)
    elif wrong == "replayed":
        comm.gather_to_rank_0(runtime, "an earlier message", str)
    try:
        comm.gather_to_rank_0(runtime, "hello", str)
    except MessageError as error:
        return str(error)
    return ""


@pytest.fixture
def pair() -> Iterator[RankPool]:
    """Two ranks of their own: what is done to them stays."""
    pool = RankPool(1, 1, 2)
    yield pool
    pool.close()


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ("stranger", "a message of rank 1: is not from a rank of this job ("),
        ("replayed", "a message of rank 1: is not from a rank of this job ("),
        ("pickle", "rank 1 has sent "),
    ],
)
def test_nothing_that_is_sent_to_a_rank_is_run(
    pair: RankPool, tmp_path: Path, wrong: str, expected: str
) -> None:
    mark = tmp_path / "mark"
    said = pair.run(gathers, mark=str(mark), wrong=wrong)[0]
    assert said.startswith(expected) and "\n" not in said
    assert not mark.exists()


def gathers_objects_of_torch(runtime: Runtime, mark: str) -> str:
    """Megatron's and torch's own collectives of objects unpickle: a stranger takes rank 1's place."""
    import torch.distributed.distributed_c10d as distributed

    if runtime.rank == 1:
        pickled = pickle.dumps(Exploit(Path(mark)))
        data = torch.frombuffer(bytearray(bytes(32) + pickled), dtype=torch.uint8)
        distributed._object_to_tensor = lambda *_: (data, torch.tensor([data.numel()]))
    found: list[Any] = [None, None]
    try:
        dist.gather_object("hello", found if runtime.rank == 0 else None)
    except MessageError as error:
        return str(error)
    return ""


def test_collectives_of_torch_open_only_what_a_rank_has_signed(pair: RankPool, tmp_path: Path) -> None:
    assert pair.run(shares)[0] == [{"rank": 0}, {"rank": 1}]
    said = pair.run(gathers_objects_of_torch, mark=str(tmp_path / "mark"))[0]
    assert said.startswith("an object of another rank: is not from a rank of this job (")
    assert not (tmp_path / "mark").exists()


def shares(runtime: Runtime) -> list[Any]:
    found: list[Any] = [None, None]
    dist.all_gather_object(found, {"rank": runtime.rank})
    return found


# One of two ranks that meet in torch's store, at a port that anybody may connect to. Rank 1 is a stranger: it
# has the program and the port, and another secret.
JOINS = """
import os, pickle, sys
from pathlib import Path
from megarl.config.errors import MegarlError
from megarl.config.schema import ParallelConfig
from megarl.parallel import comm
from megarl.parallel.runtime import start

class Exploit:
    def __reduce__(self):
        return os.mkdir, (sys.argv[2],)

secret = Path(sys.argv[1])
runtime = start(ParallelConfig(dp=2, device="cpu", timeout=60), seed=0, secret=secret)
if runtime.rank == 1:
    comm.encode = lambda value: pickle.dumps(Exploit())
try:
    print("heard", comm.gather_objects(runtime, "hello", str), flush=True)
except MegarlError as error:
    print("megarl:", error, flush=True)
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("same", [True, False])
def test_a_stranger_that_joins_the_store_before_a_rank_does(tmp_path: Path, same: bool) -> None:
    """Under torchrun, or a launcher of the user's own, the store is a port. (Two ranks of one job: the
    control.)"""
    mark, program = tmp_path / "mark", tmp_path / "joins.py"
    program.write_text(JOINS.replace("if runtime.rank == 1:", "if False:") if same else JOINS)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = []
    for rank in (0, 1):
        file = tmp_path / ("secret" if same else f"secret-{rank}")
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        }
        if not same:
            make_secret(file)
        command = [sys.executable, str(program), str(file), str(mark)]
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True))
    try:
        said, errors = started[0].communicate(timeout=120)
    finally:
        for process in started:
            process.kill()
        started[1].communicate()
    assert not mark.exists()
    if same:
        assert said == "heard ['hello', 'hello']\n", errors
        assert not (tmp_path / "secret").exists()
    else:
        assert said.startswith("megarl: a message of rank 1: is not from a rank of this job ("), errors
        assert len(said.splitlines()) == 1


def test_a_store_listens_at_one_address() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    store = open_store("127.0.0.1", port, 1, 10, first=True)
    addresses = {
        one.laddr.ip
        for one in psutil.Process().net_connections("tcp")
        if one.status == psutil.CONN_LISTEN and one.laddr.port == port
    }
    store.set("key", "value")
    assert addresses == {"127.0.0.1"}


def test_a_message_may_not_be_of_any_length() -> None:
    head = torch.zeros(8 + secret.SIZE + comm.INLINE, dtype=torch.uint8)
    head[:8] = 255
    with pytest.raises(MessageError, match="a message of rank 3: 18446744073709551615 bytes, the longest"):
        comm._read_head(head, 3)


@pytest.mark.parametrize(
    ("sent", "kind"),
    [
        (["os.system", ["id"], {}], ConfigError),
        (["float32", [2**40], b"1234"], torch.Tensor),
        (["load", [1], b"1234"], torch.Tensor),
        (["|O", [1], b"12345678"], np.ndarray),
        ("text", int),
    ],
)
def test_only_known_types_come_out_of_bytes(sent: Any, kind: Any) -> None:
    try:
        found = objects.decode(objects.encode(sent), kind, "rank 1")
    except MessageError as error:
        assert str(error).startswith("rank 1 has sent ")
    else:
        pytest.fail(f"{found!r}")


def test_what_a_rank_adds_to_a_snapshot_arrives_whole() -> None:
    """An environment's state may hold integers of any size, and msgpack has 64 bits."""
    journal = [["call", "step", {"rng": 2**127}, None, True]]
    body = TokenData(np.arange(3, dtype=np.int32), np.zeros(3, np.float32), journal=journal)
    own = {
        "graded": {5: pack_journal(body), 6: None},
        "partials": {7: pack_journal(TokenData([1], [0.5], journal=journal))},
    }
    sent = objects.decode(objects.encode(own), RolloutShare, "rank 1")
    assert unpack_journal(sent["graded"][5]).journal == journal and sent["graded"][6] is None
    assert sent["graded"][5].tokens.tolist() == [0, 1, 2]
    assert unpack_journal(sent["partials"][7]) == TokenData([1], [0.5], journal=journal)


# The store


def test_a_value_of_the_store_that_no_rank_has_set(secret_of_ours: None) -> None:
    raw = dist.HashStore()
    store = SignedStore(raw)
    store.set("controller", "tcp://127.0.0.1:1")
    assert store.get("controller") == "tcp://127.0.0.1:1"
    signed = raw.get("controller")
    for key, value in (
        ("controller", "tcp://10.0.0.1:1"),  # of a stranger
        ("controller", signed[:-1] + b"2"),
        ("controller", b""),
        ("facts/1", signed),  # said of something else
    ):
        raw.set(key, value)
        with pytest.raises(MessageError, match=f"store: {key}: is not from a rank of this job") as caught:
            store.get(key)
        assert "\n" not in str(caught.value)


# The secret


def test_the_secret_is_made_once_and_for_this_user_alone(
    tmp_path: Path, public: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secret, "_secret", None)
    (public / "run").mkdir(mode=0o755)
    file = public / "run" / ".secret"
    agree_on_secret(file, 1.0, first=True)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and secret._secret == read_secret(file)
    assert len(set(file.read_bytes())) > 1
    with pytest.raises(FileExistsError):
        make_secret(file)
    with pytest.raises(WaitTimeout, match=r"the job's secret has not appeared there within 0\.1 s"):
        agree_on_secret(tmp_path / "none", 0.1, first=False)
    said = as_nobody("print('opened', len(open(sys.argv[1], 'rb').read()))", file)
    assert "PermissionError" in said and "opened 32" not in said


@pytest.mark.parametrize("wrong", ["mode", "link", "folder", "owner"])
def test_a_secret_that_another_user_may_know_is_refused(tmp_path: Path, wrong: str) -> None:
    file = tmp_path / "secret"
    file.write_bytes(bytes(32))
    file.chmod(0o644 if wrong == "mode" else 0o600)
    if wrong == "link":
        file.rename(tmp_path / "other")
        file.symlink_to(tmp_path / "other")
    elif wrong == "folder":
        file.unlink()
        file.mkdir()
    elif wrong == "owner":
        if os.geteuid():
            pytest.skip("only root may give a file away")
        os.chown(file, NOBODY, NOBODY)
    with pytest.raises(
        ConfigError, match=r"secret: (is not a file that this user alone|the job's secret)"
    ) as e:
        read_secret(file)
    assert "\n" not in str(e.value)


# The controller


def test_the_controller_obeys_nobody_but_the_ranks_it_knows(
    secret_of_ours: None, capfd: pytest.CaptureFixture[str]
) -> None:
    """Strangers do not get in; a rank may not speak for another one, nor give a trainer's orders; the run
    goes on."""

    foreign = "a message whose sender's key is not that of the rank it names"

    async def talk() -> tuple[list[Any], dict[str, int]]:
        context = zmq.asyncio.Context()
        hub = m.Hub(context, "127.0.0.1", 2)
        stranger, thief = zmq.curve_keypair(), m.curve_keys("1")
        others = []
        for identity, (public, private) in ((b"0", stranger), (b"0", thief), (b"5", thief), (b"x", thief)):
            one = context.socket(zmq.DEALER)
            one.setsockopt(zmq.LINGER, 0)
            one.setsockopt(zmq.IDENTITY, identity)
            one.curve_serverkey = m.curve_keys("controller")[0]
            one.curve_publickey, one.curve_secretkey = public, private
            one.connect(hub.address)
            for data in (m.encode_message(m.Shutdown()), b"no message"):
                await one.send(data)
            others.append(one)
        links = [m.Link(context, hub.address, number) for number in (1, m.TRAINER)]
        found: list[Any] = []
        await links[0].send(m.Shutdown())  # an order, of a rank with an engine
        await links[0].send(m.ToolWaitCount(1))
        await links[1].send(m.RankReady())  # what an engine's rank says, of the trainer
        await links[1].send(m.TransferWeights(3))
        for _ in range(60):
            found += await hub.receive(0.5)
            if len(found) == 2 and len(hub.dropped) == 4 and hub.dropped[foreign] == 6:
                break
        await hub.send(1, m.KeepAlive())  # the right one has the connection
        answer = await links[0].receive(10)
        for one in (*links, hub):
            one.close()
        for one in others:
            one.close()
        await asyncio.sleep(0)
        context.destroy(linger=0)
        return [*found, answer], dict(hub.dropped)

    found, dropped = asyncio.run(talk())
    assert sorted(found[:2], key=lambda pair: pair[0]) == [
        (m.TRAINER, m.TransferWeights(3)),
        (1, m.ToolWaitCount(1)),
    ]
    assert found[2] == m.KeepAlive()
    assert dropped == {
        "a connection without a key of this job": dropped["a connection without a key of this job"],
        foreign: 6,
        "Shutdown from engine rank 1, which may not send it": 1,
        "RankReady from the first trainer, which may not send it": 1,
    }
    lines = capfd.readouterr().err.splitlines()
    assert all(line.startswith("megarl: rollout: dropped ") for line in lines)
    assert len(lines) == len(set(lines)) == len(dropped)  # each is said once


# The sources


def pickles(path: Path) -> Iterator[str]:
    """Where a file of megarl's unpickles, or has torch do it."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name) | ast.Name(id=name) if name in OBJECT_COLLECTIVES:
                yield f"{path}:{node.lineno}: {name}"
            case ast.Attribute(value=ast.Name(id="pickle" | "cPickle" | "dill"), attr=name) if (
                name in UNPICKLES
            ):
                yield f"{path}:{node.lineno}: pickle.{name}"
            case ast.ImportFrom(module="pickle" | "dill"):
                yield f"{path}:{node.lineno}: from pickle"
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="load"), keywords=keywords):
                if not any(
                    k.arg == "weights_only" and isinstance(k.value, ast.Constant) and k.value.value is True
                    for k in keywords
                ):
                    yield f"{path}:{node.lineno}: torch.load"


def test_no_code_of_ours_unpickles() -> None:
    found = [
        line
        for path in sorted((ROOT / "megarl").rglob("*.py"))
        if str(path.relative_to(ROOT)) not in ALLOWED
        for line in pickles(path)
    ]
    assert found == []
