"""Attacks by hostile code inside the processes of verifiers and tools.

They run on this kernel as it is, and with its layers of protection taken away one by one."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from megarl.agents.tools import Result, ToolPool
from megarl.config import load_config
from megarl.config.check import _episode_problems
from megarl.config.errors import ConfigError
from megarl.rewards import VerifierPool, sandbox

HOSTILE = '''
import ctypes, json, os, resource, signal, socket, subprocess, sys
from pathlib import Path

C = ctypes.CDLL(None, use_errno=True)


def environment(pid): return Path(f"/proc/{pid}/environ").read_text()
def memory(pid): return open(f"/proc/{pid}/mem", "rb").close()
def descriptors(pid): return os.listdir(f"/proc/{pid}/fd")
def send(pid): return os.kill(pid, signal.SIGURG)
def limit(pid): return resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))
def affinity(pid): return os.sched_setaffinity(pid, {0})
def write(path): return Path(path).write_text("taken")
def read(path): return Path(path).read_text()
def connect(port): return socket.create_connection(("127.0.0.1", port), 5).close()
def datagram(port): return socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", port))
def mode(path): os.chmod(path, 0o666)
def times(path): os.utime(path)
def attribute(path): os.setxattr(path, "user.x", b"1")
def cut(path): os.truncate(path, 0)
def unix_datagram(path): socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b"x", path)
def unix_stream(path): socket.socket(socket.AF_UNIX).connect(path)
def pipes_of_parent(_):
    """What a program that it starts can open of its own pipes, by which verdicts leave it."""
    opened = "import os\\nfor n in range(64):\\n"
    opened += " try: open(f'/proc/{os.getppid()}/fd/{n}', 'wb'); print(n)\\n except OSError: pass"
    found = subprocess.run([sys.executable, "-c", opened], capture_output=True, text=True)
    if found.returncode or not found.stdout: raise PermissionError(found.stderr)
    return found.stdout
def nest(_):
    """More folders in each other than a recursive removal can follow."""
    os.chdir(os.environ["TMPDIR"])
    for _ in range(1500): os.mkdir("a"); os.chdir("a")
    return os.environ["TMPDIR"]
def own_folder(_):
    import tempfile
    with tempfile.NamedTemporaryFile("w") as file: file.write("mine")
    return tempfile.gettempdir()
def program(path): return subprocess.run(["touch", path], stderr=subprocess.DEVNULL).returncode
def attach(pid):
    if C.ptrace(16, pid, None, None): raise OSError(ctypes.get_errno(), "ptrace")
def fork(_):
    if not os.fork(): os._exit(0)
def namespace(_):
    if C.unshare(0x10000000): raise OSError(ctypes.get_errno(), "unshare")
def survive(name):
    """As a daemon: a session of its own, and no parent."""
    if not os.fork():
        os.setsid()
        if not os.fork(): os.execvp("sleep", ["sleep", name])
        os._exit(0)
    os.wait()
    return "left"
def multiply(name):
    """Daemons that make daemons."""
    for _ in range(5): survive(name)
    if not os.fork():
        os.setsid()
        for _ in range(5): survive(name)
        os.execvp("sleep", ["sleep", name])
    return "left"
def leave_and_die(name):
    survive(name)
    os._exit(3)
def variables(_): return sorted(os.environ)
def verifier(response, answer):
    name, argument = json.loads(response)
    from megarl.rewards.verdict import Verdict
    return Verdict(True, str(globals()[name](argument)))
'''


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "hostile_test_module.py").write_text(HOSTILE)
    monkeypatch.syspath_prepend(str(tmp_path / "code"))
    return "hostile_test_module"


def call(path: str, *arguments: Any, kind: str = "strict") -> Result[str]:
    (result,) = call_all([(path, arguments)], kind)
    return result


def call_all(calls: Sequence[tuple[str, Sequence[Any]]], kind: str = "strict") -> list[Result[str]]:
    """Call functions one after the other in one confined process, which then ends."""

    async def one_by_one() -> list[Result[str]]:
        pool = ToolPool(workers=1, seconds=60.0, sandbox=kind)
        try:
            return [await pool.call(path, arguments) for path, arguments in calls]
        finally:
            pool.close()
            await asyncio.sleep(0)

    return asyncio.run(one_by_one())


def running(name: str) -> list[str]:
    """The processes with this argument."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if name in file.read_text().split("\0"):
                found.append(file.parent.name)
        except OSError:
            continue
    return found


def appears(name: str) -> bool:
    end = time.monotonic() + 20
    while not running(name) and time.monotonic() < end:
        time.sleep(0.02)
    return bool(running(name))


def all_gone(name: str) -> bool:
    end = time.monotonic() + 20
    while running(name) and time.monotonic() < end:
        time.sleep(0.05)
    return not running(name)


def unique() -> str:
    return f"600.{uuid.uuid4().int % 10**12}"


@pytest.mark.parametrize("kind", ["strict", "network"])
def test_a_tool_reaches_neither_the_trainer_nor_its_files(
    hostile: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    secret = Path.home() / f".megarl-test-{uuid.uuid4().hex}"
    secret.write_text("key")
    secret.chmod(0o600)
    marker, listener, of_trainer = tmp_path / "marker", tmp_path / "listener", os.getpid()
    attempts: list[tuple[str, Any]] = [
        *((name, of_trainer) for name in ("environment", "memory", "descriptors", "send", "limit")),
        *(("affinity", of_trainer), ("attach", of_trainer), ("namespace", 0)),
        *(("write", str(marker)), ("read", str(secret)), ("pipes_of_parent", 0)),
        *((name, str(secret)) for name in ("mode", "times", "attribute", "cut")),
        *((name, str(listener)) for name in ("unix_datagram", "unix_stream")),
    ]
    allowed: list[tuple[str, Any]] = [("program", str(marker)), ("variables", 0), ("own_folder", 0)]
    calls = [(f"{hostile}:{name}", [argument]) for name, argument in (*attempts, *allowed)]
    try:
        *refused, program, printed, own = call_all(calls, kind)
        for (name, _), result in zip(attempts, refused, strict=True):
            assert result.value is None, (name, result)
            assert re.match("(Permission|ProcessLookup|FileNotFound|OS)Error", result.error or ""), result
        assert secret.read_text() == "key" and secret.stat().st_mode & 0o777 == 0o600
        assert program.value not in (None, "0") and not marker.exists()  # it starts, and may do no more
    finally:
        secret.unlink()
    variables = json.loads(printed.value or "")
    assert {"PATH", "TMPDIR"} <= set(variables) and "WANDB_API_KEY" not in variables
    folder = own.value
    assert folder is not None and "megarl-worker-" in folder and not Path(folder).exists()


def test_unix_sockets_of_other_services_are_out_of_reach(hostile: str, tmp_path: Path) -> None:
    """As docker's, which runs programs outside."""
    for kind, name in ((socket.SOCK_DGRAM, "unix_datagram"), (socket.SOCK_STREAM, "unix_stream")):
        path = tmp_path / name
        with socket.socket(socket.AF_UNIX, kind) as service:
            service.bind(str(path))
            if kind == socket.SOCK_STREAM:
                service.listen()
            for sandbox_kind in ("strict", "network"):
                said = call(f"{hostile}:{name}", str(path), kind=sandbox_kind)
                assert (said.error or "").startswith("PermissionError"), said


def test_a_folder_of_any_depth_is_removed(hostile: str) -> None:
    folder = call(f"{hostile}:nest", 0).value
    assert folder is not None and not Path(folder).exists()


def test_temporary_folders_are_hidden_though_the_run_starts_in_one(
    hostile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = Path(f"/tmp/megarl-test-{uuid.uuid4().hex}")
    file.write_text("of another process")
    try:
        for folder in ("/tmp", "/"):
            monkeypatch.chdir(folder)
            assert (call(f"{hostile}:read", str(file)).error or "").startswith("PermissionError")
    finally:
        file.unlink()


def test_a_message_that_is_no_verdict_is_a_wrong_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "forging_module.py").write_text(
        """
import os
def verifier(response, answer):
    for number in range(3, 64):
        try: os.write(number, response.encode() + b"\\n")
        except OSError: pass
    return True
"""
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with VerifierPool("forging_module:verifier", timeout=30) as pool:
        for text in ("[" * 60_000, '[true, "x", null, "abc", {}, true]', "[true, null, null, NaN, {}, true]"):
            (verdict,) = pool.verify([(text, "")])
            assert not verdict.correct and verdict.graded


def test_keys_in_the_home_folder_are_hidden_from_there_too(
    hostile: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Though the current folder may be read, in which relative paths lie."""
    (tmp_path / "data").write_text("public")
    monkeypatch.chdir(tmp_path)
    assert call(f"{hostile}:read", "data") == Result("public")
    monkeypatch.chdir(Path.home())
    monkeypatch.syspath_prepend(str(Path.home()))
    secret = Path.home() / f".megarl-test-{uuid.uuid4().hex}"
    secret.write_text("key")
    try:
        assert (call(f"{hostile}:read", secret.name).error or "").startswith("PermissionError")
    finally:
        secret.unlink()


def test_the_network_is_there_when_it_is_allowed(hostile: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        port = server.getsockname()[1]
        for name in ("connect", "datagram"):
            assert (call(f"{hostile}:{name}", port).error or "").startswith("PermissionError")
        with pytest.raises(TimeoutError):
            server.accept()
        assert call(f"{hostile}:connect", port, kind="network") == Result("null")


def test_without_a_sandbox_a_tool_may_do_what_its_user_may(hostile: str, tmp_path: Path) -> None:
    assert call(f"{hostile}:write", str(tmp_path / "marker"), kind="off") == Result("5")
    assert (tmp_path / "marker").exists()


@pytest.mark.parametrize("kind", ["strict", "off"])
@pytest.mark.parametrize("way", ["survive", "multiply", "leave_and_die"])
def test_nothing_outlives_a_pool(hostile: str, kind: str, way: str) -> None:
    name = unique()
    result = call(f"{hostile}:{way}", name, kind=kind)
    assert result.value == ("left" if way != "leave_and_die" else None) and all_gone(name)


@pytest.mark.parametrize("kind", ["strict", "off"])
def test_nothing_outlives_a_trainer_that_is_killed(hostile: str, kind: str, tmp_path: Path) -> None:
    name = unique()
    code = (
        f"import asyncio, sys; sys.path.insert(0, {str(tmp_path / 'code')!r})\n"
        "from megarl.agents.tools import ToolPool\n"
        f"pool = ToolPool(1, 3600.0, sandbox={kind!r})\n"
        "async def work():\n"
        f"    print((await pool.call('{hostile}:multiply', [{name!r}])).value, *pool.pids, flush=True)\n"
        "    await asyncio.sleep(3600)\n"
        "asyncio.run(work())\n"
    )
    trainer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    said, pid = trainer.stdout.readline().split()
    assert said == "left" and appears(name)
    trainer.kill()
    trainer.wait(10)
    trainer.stdout.close()
    assert all_gone(name)
    end = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()


def test_a_verifier_of_the_users_is_confined_alike(hostile: str, tmp_path: Path) -> None:
    marker, name = tmp_path / "marker", unique()
    answers = [["write", str(marker)], ["environment", os.getpid()], ["connect", 1], ["survive", name]]
    with VerifierPool(f"{hostile}:verifier", timeout=30) as pool:
        *refused, left = pool.verify([(json.dumps(answer), "") for answer in answers])
        assert not any(one.correct for one in refused) and left.extracted == "left" and appears(name)
    assert all_gone(name) and not marker.exists()


# ---- the layers, one by one, as root and as an ordinary user ----

WITHOUT: dict[str, dict[str, Any]] = {
    "as it is": {},
    "no namespaces": {"_can_enter_namespaces": lambda: False},
    "Landlock 5": {"_can_enter_namespaces": lambda: False, "landlock_version": lambda: 5},
    "Landlock 1": {"_can_enter_namespaces": lambda: False, "landlock_version": lambda: 1},
    "no Landlock": {"landlock_version": lambda: 0},
    "seccomp alone": {"_can_enter_namespaces": lambda: False, "landlock_version": lambda: 0},
    "nothing": {
        "_can_enter_namespaces": lambda: False,
        "landlock_version": lambda: 0,
        "_filter_calls": lambda *_: False,
    },
}
NOBODY = 65534


def confined(
    work: Callable[[], Any], kind: str, without: dict[str, Any], user: int = 0, hidden: bool = True
) -> Any:
    """Return the JSON of what `work(trainer)` gives in a confined process of a trainer of its own, which
    hides its memory."""
    read, write = os.pipe()
    if not (trainer := os.fork()):
        try:
            os.setsid()  # else a signal to its group would be one to pytest's
            os.chdir("/")
            if user:
                os.setgroups([])
                os.setgid(user)
                os.setuid(user)
                sandbox._call(sandbox._LIBC.prctl, 4, 1, 0, 0, 0)  # PR_SET_DUMPABLE, which setuid takes away
            if hidden:
                sandbox.hide_memory()
            if not os.fork():
                sandbox._call(sandbox._LIBC.prctl, 4, 1, 0, 0, 0)  # as after an exec
                os.dup2(write, 1)
                for name, value in without.items():
                    setattr(sandbox, name, value)
                sandbox.restrict(process := sandbox.supervise(kind))
                os.write(1, json.dumps(work(*process.protected)).encode())
                os._exit(0)
            os.close(write)
            os.wait()
        finally:
            os._exit(1)
    os.close(write)
    os.waitpid(trainer, 0)
    with os.fdopen(read) as said:
        return json.loads(said.read().split("\n", 1)[1])


def outcome(attempt: Callable[[], Any]) -> str:
    try:
        attempt()
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return "done"


def attacks(supervisor: int, trainer: int) -> dict[str, str]:
    import resource

    def raw(name: str, *arguments: int) -> Callable[[], Any]:
        return lambda: sandbox._call(getattr(sandbox._LIBC, name), *arguments)

    return {
        "environment": outcome(Path(f"/proc/{trainer}/environ").read_bytes),
        "memory": outcome(lambda: open(f"/proc/{trainer}/mem", "rb").close()),
        "signal": outcome(lambda: os.kill(trainer, signal.SIGURG)),
        "signal to the supervisor": outcome(lambda: os.kill(supervisor, signal.SIGURG)),
        "signal to its group": outcome(lambda: os.killpg(trainer, signal.SIGURG)),
        # PTRACE_SEIZE, which does not stop it.
        "ptrace": outcome(raw("ptrace", 0x4206, trainer, 0, 0)),
        "limits": outcome(lambda: resource.prlimit(trainer, resource.RLIMIT_CORE, (0, 0))),
        "priority": outcome(lambda: os.setpriority(os.PRIO_PROCESS, trainer, 19)),
        "affinity": outcome(lambda: os.sched_setaffinity(trainer, {0})),
        "socket": outcome(lambda: socket.socket().close()),
        "raw socket": outcome(lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW).close()),
        "namespace": outcome(raw("unshare", 0x10000000)),
        "own limits": outcome(lambda: resource.prlimit(0, resource.RLIMIT_CORE, (0, 0))),
        "own signal": outcome(lambda: os.kill(os.getpid(), signal.SIGURG)),
        "pair": outcome(lambda: [one.close() for one in socket.socketpair()]),
        "thread": outcome(run_thread),
        "child": outcome(run_child),
    }


def run_thread() -> None:
    import threading

    try:
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()
    except RuntimeError as error:
        raise PermissionError(errno.EPERM, "thread") from error


def run_child() -> None:
    if not (child := os.fork()):
        time.sleep(60)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


OWN = ("own limits", "own signal", "pair", "thread", "child")


@pytest.mark.parametrize("user", [0, NOBODY], ids=["root", "user"])
@pytest.mark.parametrize("without", [name for name in WITHOUT if name != "nothing"])
def test_each_layer_that_is_left_holds(without: str, user: int) -> None:
    if os.getuid() != 0:
        if user == 0:
            pytest.skip("needs root")
        user = 0  # an ordinary user already
    found = confined(attacks, "strict", WITHOUT[without], user)
    assert {name for name, result in found.items() if result == "done"} == set(OWN), found
    online = confined(attacks, "network", WITHOUT[without], user)
    assert {name for name, result in online.items() if result == "done"} == {*OWN, "socket"}, online
    calculating = confined(attacks, "calculate", WITHOUT[without], user)
    assert {name for name, result in calculating.items() if result == "done"} == {*OWN} - {"child"}


def test_these_attacks_work_where_nothing_holds() -> None:
    """Else they would show nothing."""
    user = NOBODY if os.getuid() == 0 else 0  # root's processes lose their rights over others in any case
    found = confined(attacks, "strict", WITHOUT["nothing"], user, hidden=False)
    expected = {
        "environment",
        "memory",
        "signal",
        "signal to the supervisor",
        "signal to its group",
        "limits",
    }
    assert expected | {"affinity", "socket", *OWN} <= {name for name, one in found.items() if one == "done"}


@pytest.mark.parametrize("without", ["as it is", "no namespaces", "nothing"])
def test_the_probe_tells_what_holds(without: str) -> None:
    file = Path(f"/tmp/megarl-test-{uuid.uuid4().hex}")
    file.touch()
    code = f"import megarl.rewards.sandbox as s; s.try_to_escape({str(file)!r})"
    if without != "as it is":
        code = code.replace("; ", "; s._can_enter_namespaces = lambda: False; ", 1)
    if without == "nothing":
        code = code.replace("; ", "; s.landlock_version = lambda: 0; s._filter_calls = lambda *_: False; ", 1)
    try:
        said = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, timeout=30, check=True)
    finally:
        file.unlink()
    layers, held = json.loads(said.stdout.splitlines()[1])
    assert all(held.values()) == (without != "nothing") and bool(layers) == (without != "nothing")


# ---- the filter of system calls, for the architecture that this machine has not too ----


def evaluate(program: bytes, architecture: int, number: int, *arguments: int) -> int:
    """Run a program of classic BPF as the kernel would, and return what it decides."""
    data = struct.pack(
        "=IIQ6Q",
        number,
        architecture,
        0,
        *(one & (1 << 64) - 1 for one in arguments),
        *[0] * (6 - len(arguments)),
    )
    accumulator, at = 0, 0
    while True:
        code, if_true, if_false, value = struct.unpack_from("=HBBI", program, 8 * at)
        at += 1
        if code == 0x06:
            return value
        if code == 0x20:
            (accumulator,) = struct.unpack_from("=I", data, value)
            continue
        holds = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: bool(accumulator & value)}[
            code
        ]
        at += if_true if holds else if_false


ALLOWED, DENIED = 0x7FFF0000, 0x50000 | errno.EPERM


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_on_both_architectures(machine: str) -> None:
    column, architecture = sandbox._MACHINES[machine]
    process = sandbox.Supervised("strict", Path("/tmp"), (os.getpid(), os.getpid()))
    number = {
        name: both[column]
        for name, both in (sandbox._ALWAYS | sandbox._SOMETIMES | sandbox._ATTRIBUTES).items()
    }
    strict = sandbox.filter_program(sandbox.rules(process, False, False), machine)
    assert len(strict) // 8 < 4096  # BPF_MAXINSNS

    def decided(name: str, *arguments: int, program: bytes = strict) -> int:
        return evaluate(program, architecture, number[name], *arguments)

    for name in sandbox._ALWAYS:
        assert not number[name] or decided(name) == DENIED, name
    for name in sandbox._ATTRIBUTES:
        assert not number[name] or decided(name) == DENIED, name
    assert decided("fcntl", 3, 8) == decided("socketpair", 1, 2) == decided("truncate") == DENIED
    assert decided("fcntl", 3, 1) == decided("socketpair", 1, 0x80001) == ALLOWED
    assert decided("socket", 2) == DENIED and decided("execve") == decided("kill", 1) == ALLOWED
    assert decided("kill", os.getpid()) == decided("kill", -1) == DENIED
    assert decided("clone", 0x11) == ALLOWED and decided("clone", 0x10000000) == DENIED
    assert decided("clone3") == 0x50000 | errno.ENOSYS
    assert decided("prlimit64", 0) == ALLOWED and decided("prlimit64", 1) == DENIED
    assert evaluate(strict, architecture ^ 1, 0) == DENIED
    assert evaluate(strict, architecture, 0x40000000 + 1) == DENIED
    assert evaluate(strict, architecture, {"x86_64": 0, "aarch64": 63}[machine]) == ALLOWED  # read
    online = sandbox.filter_program(sandbox.rules(process._replace(sandbox="network"), True, True), machine)
    assert decided("socket", 2, program=online) == decided("socket", 10, program=online) == ALLOWED
    assert decided("chmod", program=online) == ALLOWED  # all but the folder is read-only there
    assert decided("socket", 1, program=online) == DENIED  # docker's, for one
    assert decided("socket", 17, program=online) == decided("socket", 40, program=online) == DENIED
    calculate = process._replace(sandbox="calculate")
    alone = sandbox.filter_program(sandbox.rules(calculate, False, False), machine)
    assert decided("execve", program=alone) == decided("clone", 0x11, program=alone) == DENIED
    assert decided("clone", 0x3D0F00, program=alone) == ALLOWED  # a thread
    assert decided("kill", os.getpid(), program=alone) == ALLOWED
    assert decided("kill", os.getpid() + 1, program=alone) == DENIED


@pytest.mark.parametrize(
    ("column", "header", "pattern"),
    [
        (0, "/usr/include/x86_64-linux-gnu/asm/unistd_64.h", r"#define __NR_(\w+)\s+(\d+)"),
        (1, "/usr/include/asm-generic/unistd.h", r"#define __NR(?:3264)?_(\w+)\s+(\d+)"),
    ],
)
def test_numbers_of_system_calls(column: int, header: str, pattern: str) -> None:
    """Against Linux's own list; aarch64's is the generic one."""
    if not Path(header).exists():
        pytest.skip(f"{header} is not installed (linux-libc-dev)")
    known = {name: int(number) for name, number in re.findall(pattern, Path(header).read_text())}
    newest = max(known.values())
    for name, numbers in (sandbox._ALWAYS | sandbox._SOMETIMES | sandbox._ATTRIBUTES).items():
        if name in known or numbers[column] <= newest:  # a call of a later Linux is not in the list yet
            assert numbers[column] == known.get(name, 0), name


@pytest.mark.parametrize(
    "given",
    [
        ["rollout.tools=['mcp:http://127.0.0.1:9/mcp']"],
        ["rollout.environment=a:B", "rollout.environment_arguments={url: 'https://x'}"],
    ],
)
def test_a_server_without_the_network_is_refused_before_the_run(given: list[str]) -> None:
    path = Path(__file__).parents[2] / "configs" / "demos" / "dapo.yaml"

    def refused(*more: str) -> bool:
        found = list(_episode_problems(load_config(path, [*given, *more])))
        return any(
            one.startswith("rollout.turns.sandbox: strict has no network, which http") for one in found
        )

    assert refused() and not refused("rollout.turns.sandbox=network")
    with pytest.raises(ConfigError, match=r"rollout\.turns\.sandbox"):
        load_config(path, [*given, "rollout.turns.sandbox=open"])
