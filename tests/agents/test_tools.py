"""Tools and environments in real processes.

A call that hangs, dies or is killed affects at most itself. A replayed environment equals a continued one."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.agents.tools import (
    Answer,
    Result,
    State,
    ToolPool,
    build_schema,
    format_observation,
    import_environment,
)
from megarl.config.errors import ConfigError
from megarl.rewards import Verdict

T = TypeVar("T")
TOOLS = '''
import os, random, sys, time
from pathlib import Path
from megarl.rewards.verdict import Verdict


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    print("noise")
    print("noise", file=sys.stderr)
    return a + b


def undocumented(a: int) -> int:
    return a


def untyped(a):
    """Does something.

    Args:
        a: what
    """


def many(*numbers: int) -> int:
    """Adds.

    Args:
        numbers: what
    """


async def later(a: int) -> int:
    """Waits.

    Args:
        a: what
    """


def once(file, how):
    """Misbehaves at its first call."""
    path = Path(file)
    first = not path.exists()
    with path.open("a") as out:
        print(os.getpid(), file=out, flush=True)
    if first:
        misbehave(how)
    return "done"


def misbehave(how):
    if how == "hang": time.sleep(600)
    if how == "exit": os._exit(3)
    if how == "leave": sys.exit(4)
    if how == "memory": return len(bytearray(4 << 30))
    if how == "deep": return misbehave(how)
    if how == "kill": os.kill(os.getpid(), 9)
    if how == "pipe":
        for fd in range(3, 20):
            try: os.write(fd, b"nonsense\\n")
            except OSError: pass
    if how == "child":
        import subprocess
        child = subprocess.Popen(["sleep", "600"])
        with open("child", "w") as out: out.write(str(child.pid))
        child.wait()
    raise KeyError(how)


def large(kind, size):
    if kind == "text": return "x" * size
    if kind == "wide": return "é" * size
    if kind == "list": return [1] * size
    if kind == "bytes": return b"\\xff" * size
    raise ValueError("y" * size)


def give(kind):
    texts = {"surrogate": "a\\ud800b", "bytes": b"a\\xffb"}
    return {**texts, "none": None, "set": {1}, "object": {"a": [1.5, "é"]}}[kind]


def draw():
    return random.random()


def modules():
    return ",".join(sys.modules)


def pid(seconds=0.0):
    time.sleep(seconds)
    return os.getpid()


class Walk:
    """A walk that chance, which nobody seeded but the pool, and the policy decide."""

    def reset(self, row, seed):
        self.row, self.seed, self.at, self.steps = row, seed, 0.0, 0
        row["start"] = "changed"
        return f"walk {seed} {random.random()}"

    def step(self, text):
        if text == "raise": raise ConnectionError("the shop is closed")
        if text == "memory": bytearray(4 << 30)
        if text == "hang": time.sleep(600)
        if text == "exit": os._exit(5)
        if text == "pair": return "a", 1.0
        if text == "nothing": return None
        if text == "number": return 5, 1.0, False
        if text == "reward": return "a", "much", False
        if text == "nan": return "a", float("nan"), False
        if text == "slow": time.sleep(0.25)
        if text == "wait":
            Path(self.row["file"]).write_text(str(os.getpid()))
            time.sleep(0.3)
        self.steps += 1
        self.at = self.at * 1.5 + len(text) + random.random() + sum(map(ord, text)) % 7
        return f"{self.steps} {self.at!r}", self.at / 3, self.steps >= 6

    def verdict(self):
        if self.row.get("verdict") == "text": return "yes"
        return Verdict(self.at > 10, str(self.at), score=self.at)


class Kept(Walk):
    """A walk whose steps are counted in a file, and which can be restored."""

    def step(self, text):
        with open(self.row["file"], "a") as out: print(text, file=out)
        return super().step(text)

    def state(self):
        return {"at": self.at, "steps": self.steps}

    def restore(self, state):
        self.at, self.steps = state["at"], state["steps"]


class Big(Kept):
    def state(self):
        return "x" * (2 << 20)


class Mortal(Walk):
    def __del__(self):
        with open(self.row["file"], "a") as out: print(os.getpid(), file=out)


class NoStep:
    def reset(self, row, seed): return ""
    def verdict(self): return True


class HalfKept(Walk):
    def state(self): return 0


class Async(Walk):
    async def step(self, text): return "", 0.0, False


class Sized(Walk):
    def __init__(self, size, pace=1): pass


class FailsToBegin(Walk):
    def reset(self, row, seed): raise OSError("no such server")
'''


@pytest.fixture(scope="module", autouse=True)
def user_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("tools")
    (folder / "tool_test_module.py").write_text(TOOLS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield folder


M = "tool_test_module"


def run(job: Callable[[ToolPool], Awaitable[T]], **settings: Any) -> T:
    """Run `job` with a pool in a new event loop."""

    async def whole() -> T:
        # Most of these tools write files for the test and report their pids, so the sandbox is off.
        pool = ToolPool(**{"workers": 1, "seconds": 60.0, "sandbox": "off", **settings})
        try:
            return await job(pool)
        finally:
            pool.close()
            await asyncio.sleep(0)

    return asyncio.run(whole())


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def until(what: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not what():
            await asyncio.sleep(0.01)


def test_what_a_tool_returns() -> None:
    async def job(pool: ToolPool) -> list[Result[str]]:
        assert pool.pids == [] and pool.waiting == []
        calls = [
            pool.call(f"{M}:add", [2], {"b": 3}),
            pool.call(f"{M}:add", [2]),
            *(pool.call(f"{M}:give", [kind]) for kind in ("surrogate", "bytes", "none", "object", "set")),
            pool.call(f"{M}:misbehave", ["leave"]),
            pool.call(f"{M}:misbehave", ["deep"]),
            pool.call(f"{M}:ad", [2]),
            pool.call("no_such_module:f"),
        ]
        found = await asyncio.gather(*calls)
        assert len(pool.pids) == 1
        modules = (await pool.call(f"{M}:modules")).value or ""
        assert not {"torch", "numpy", "transformers"} & set(modules.split(","))
        with pytest.raises(TypeError):
            await pool.call(f"{M}:add", [object()])
        assert await pool.call(f"{M}:add", [1, 1]) == Result("2")
        return found

    sums, missing, surrogate, raw, none, nested, unholdable, left, deep, absent, unknown = run(job)
    assert (sums, surrogate, raw) == (Result("5"), Result("a\ufffdb"), Result("a\ufffdb"))
    assert (none, nested) == (Result("null"), Result('{"a": [1.5, "é"]}'))
    assert missing.error and missing.error.startswith("TypeError: add() missing") and missing.graded
    assert unholdable == Result(error="TypeError: Object of type set is not JSON serializable")
    assert left == Result(error="SystemExit: 4") and deep == Result(error="it ran out of stack")
    assert absent == Result(error=f"rollout.tools: {M} has no function ad (did you mean add?)", graded=False)
    assert unknown.error and "cannot be imported" in unknown.error and not unknown.graded


def test_large_results_are_cut_where_they_arise() -> None:
    size = 100_000_000

    async def job(pool: ToolPool) -> list[Result[str]]:
        found = [await pool.call(f"{M}:large", [kind, size]) for kind in ("text", "bytes", "error")]
        found += [await pool.call(f"{M}:large", [kind, 1000]) for kind in ("wide", "list", "text")]
        assert len(pool.pids) == 1
        return found

    # A result longer than the pool's message limit would be an error.
    text, raw, error, wide, numbers, fits = run(job, observation_bytes=1001)
    mark = "\n[cut at 1001 bytes]"
    kept = 1001 - len(mark)
    assert text == Result("x" * kept + mark)
    assert raw == Result("\ufffd" * (kept // 3) + mark)
    assert error.error == f"ValueError: {'y' * 9999}"[:kept] + mark and error.graded
    assert wide == Result("é" * (kept // 2) + mark)
    assert numbers.value == json.dumps([1] * 1000)[:kept] + mark
    assert fits == Result("x" * 1000)


@given(st.text(st.characters(), max_size=40) | st.binary(max_size=40), st.integers(1, 60))
def test_observations_are_what_utf_8_holds(value: str | bytes, size: int) -> None:
    found = format_observation(value, size)
    mark = f"\n[cut at {size} bytes]"
    if isinstance(value, bytes):
        whole = value.decode("utf-8", "replace")
    else:
        whole = "".join("\ufffd" if 0xD800 <= ord(one) < 0xE000 else one for one in value)
    if found != whole:
        assert found.endswith(mark) and len(whole.encode()) > size
        kept = found.removesuffix(mark)
        assert whole.startswith(kept) and len(kept.encode()) <= max(0, size - len(mark))
        assert len(whole[: len(kept) + 1].encode()) > size - len(mark)  # the cut is as late as possible
    else:
        assert len(found.encode()) <= size


@pytest.mark.parametrize(
    ("how", "error", "graded"),
    [
        ("hang", "timeout after 1 s", True),
        ("exit", "tool died (exit code 3)", True),
        ("memory", "it ran out of memory", True),
        ("kill", "tool died (signal 9)", True),
        ("pipe", "its process answered no JSON", True),
    ],
)
def test_what_counts_the_second_time_only(tmp_path: Path, how: str, error: str, graded: bool) -> None:
    """Two separate processes try the call, and the slot is free afterwards."""

    async def job(pool: ToolPool) -> tuple[Result[str], ...]:
        mended = await pool.call(f"{M}:once", [str(tmp_path / how), how])
        failed = await pool.call(f"{M}:misbehave", [how])
        return mended, failed, await pool.call(f"{M}:add", [1, 1])

    assert run(job, seconds=1.0, memory_mib=512) == (
        Result("done"),
        Result(error=error, graded=graded),
        Result("2"),
    )
    first, second = (tmp_path / how).read_text().split()
    assert first != second


def test_killed_in_the_middle_of_a_step(tmp_path: Path) -> None:
    """Another process gives the same answers if the first is killed from outside during a step."""
    said, file = ["a", "bc", "wait", "d"], tmp_path / "pid"

    async def job(pool: ToolPool, kill: bool) -> list[Any]:
        row = {"file": str(file)}
        found: list[Any] = [await pool.step(1, row, 5, said[:n]) for n in range(3)]
        file.unlink(missing_ok=True)
        waits = asyncio.create_task(pool.step(1, row, 5, said[:3]))
        await until(lambda: file.exists() and file.read_text() != "")
        pid = int(file.read_text())
        if kill:
            os.kill(pid, signal.SIGKILL)
        found.append(await waits)
        assert (pid in pool.pids) != kill
        return [*found, await pool.step(1, row, 5, said), await pool.verdict(1, row, 5, said)]

    whole = run(lambda pool: job(pool, False), environment=f"{M}:Walk")
    assert run(lambda pool: job(pool, True), environment=f"{M}:Walk") == whole
    assert all(step.error is None for step in whole[:-1]) and whole[-1].error is None


def test_no_process_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    result = run(lambda pool: pool.call(f"{M}:add", [1, 1]))
    died = "3 tool processes died at their start (exit code 1; it wrote no reason)"
    assert result == Result(error=died, graded=False)
    monkeypatch.setattr("sys.executable", "/no/such/python")
    result = run(lambda pool: pool.call(f"{M}:add", [1, 1]))
    died = "3 tool processes died at their start (FileNotFoundError: "
    assert result.error and result.error.startswith(died)
    assert not result.graded


def test_what_a_tool_started_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(lambda pool: pool.call(f"{M}:misbehave", ["child"]), seconds=1.0)
    assert result == Result(error="timeout after 1 s")
    assert not alive(int((tmp_path / "child").read_text()))


def test_a_tool_and_what_it_started_end_when_their_rank_is_killed(tmp_path: Path) -> None:
    """Both end by themselves, long before the call's time limit."""
    code = (
        "import asyncio, sys\n"
        "from megarl.agents.tools import ToolPool\n"
        "async def call(): await ToolPool(1, 3600.0, sandbox='off').call(sys.argv[1], ['child'])\n"
        "asyncio.run(call())\n"
    )
    rank = subprocess.Popen(
        [sys.executable, "-c", code, f"{M}:misbehave"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    file = tmp_path / "child"

    async def killed() -> None:
        try:
            await until(lambda: file.exists() and file.read_text() != "")
            child = int(file.read_text())
            tool = os.getpgid(child)
            assert tool != os.getpgid(rank.pid) and alive(tool) and alive(child)
        finally:
            rank.kill()
            rank.wait(60)
        await until(lambda: not alive(tool) and not alive(child))

    asyncio.run(killed())


def test_the_queue_keeps_its_order() -> None:
    async def job(pool: ToolPool) -> list[int]:
        ended: list[int] = []

        async def numbered(number: int) -> None:
            await pool.call(f"{M}:add", [1, 1])
            ended.append(number)

        await asyncio.gather(*(numbered(number) for number in range(9)))
        return ended

    assert run(job) == list(range(9))


def test_seats(tmp_path: Path) -> None:
    """At most `workers` jobs run at once.

    A cancelled job is skipped in the queue; in a process, it leaves the slot to others."""

    async def job(pool: ToolPool) -> None:
        await asyncio.gather(*(pool.call(f"{M}:pid", [0.2]) for _ in range(2)))
        before = set(pool.pids)
        ended: list[int] = []

        async def numbered(number: int) -> None:
            assert (await pool.call(f"{M}:pid", [0.1])).error is None
            ended.append(number)

        jobs = [asyncio.create_task(numbered(number)) for number in range(8)]
        await until(lambda: len(pool.waiting) == 8)
        assert [one.running for one in pool.waiting] == [True] * 2 + [False] * 6
        assert {one.what for one in pool.waiting} == {f"{M}:pid"}
        assert pool.oldest == f"{M}:pid in a process, for 0 s"
        for number in (0, 3, 4):  # one running, two waiting
            jobs[number].cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
        assert sorted(ended) == [1, 2, 5, 6, 7]
        assert pool.waiting == [] and pool.oldest == "none" and set(pool.pids) == before
        files = [tmp_path / "first", tmp_path / "second"]
        hanging = [asyncio.create_task(pool.call(f"{M}:once", [str(file), "hang"])) for file in files]
        await until(lambda: all(file.exists() and file.read_text() for file in files))
        for one in hanging:
            one.cancel()
        after = await asyncio.gather(*(pool.call(f"{M}:add", [n, n]) for n in range(6)))
        assert [one.value for one in after] == [str(2 * n) for n in range(6)]
        assert not before & set(pool.pids)  # killed at the time limit; their cancelled jobs are not retried
        assert [len(file.read_text().split()) for file in files] == [1, 1]

    run(job, workers=2, seconds=2.0)


def test_cancelled_as_its_turn_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    async def job(pool: ToolPool) -> None:
        free = pool._release_slot

        def freed(slot: int) -> None:
            free(slot)
            waits.cancel()

        monkeypatch.setattr(pool, "_release_slot", freed)
        runs = asyncio.create_task(pool.call(f"{M}:add", [1, 1]))
        waits = asyncio.create_task(pool.call(f"{M}:add", [1, 1]))
        results = await asyncio.gather(runs, waits, return_exceptions=True)
        assert results[0] == Result("2") and isinstance(results[1], asyncio.CancelledError)
        async with asyncio.timeout(60):
            assert await pool.call(f"{M}:add", [1, 2]) == Result("3")

    run(job)


def test_a_loop_that_ends_takes_its_jobs_with_it() -> None:
    """After `close`, another event loop can use the pool."""
    pool = ToolPool(workers=1, seconds=60, sandbox="off")

    async def leaves() -> None:
        asyncio.create_task(pool.call(f"{M}:misbehave", ["hang"]))  # noqa: RUF006 (it is left on purpose)
        await until(lambda: [one.running for one in pool.waiting] == [True] and len(pool.pids) == 1)

    asyncio.run(leaves())
    assert pool.pids == [] and pool.waiting == []
    pool.close()
    assert asyncio.run(pool.call(f"{M}:add", [1, 1])) == Result("2")
    pool.close()
    assert pool.pids == []


def test_a_loop_that_rests_between_jobs() -> None:
    """Processes survive while the event loop does not run, as in a rollout rank."""
    loop, pool = asyncio.new_event_loop(), ToolPool(workers=1, seconds=60, sandbox="off")
    pids = [loop.run_until_complete(pool.call(f"{M}:pid")).value for _ in range(2)]
    assert pids[0] == pids[1]
    cancelled = loop.create_task(pool.call(f"{M}:misbehave", ["hang"]))
    loop.run_until_complete(until(lambda: [one.running for one in pool.waiting] == [True]))
    cancelled.cancel()
    pool.close()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    assert pool.pids == [] and not alive(int(pids[0] or 0))


TEXTS = st.lists(st.sampled_from(["", "a", "bb", "\ud800", "é\x00", "word " * 9]), max_size=5)


def test_replay_is_going_on() -> None:
    """Steps of a continued episode equal those of processes that never saw it and replay it."""
    loop = asyncio.new_event_loop()
    going = ToolPool(workers=1, seconds=60, environment=f"{M}:Walk", sandbox="off")
    fresh = ToolPool(workers=1, seconds=60, environment=f"{M}:Walk", sandbox="off")
    keys = iter(range(10**6))

    async def compare(said: list[str], seed: int) -> None:
        key, row = next(keys), {"start": 1}
        for n in range(len(said) + 1):
            step = await going.step(key, row, seed, said[:n])
            assert step.error is None and step.value is not None
            again = await fresh.step(next(keys), row, seed, said[:n])
            assert again == step
            await going.call(f"{M}:draw")  # other calls in between change nothing
            assert await going.step(key, row, seed, said[:n]) == step  # repeated request
        assert await going.verdict(key, row, seed, said) == await fresh.verdict(next(keys), row, seed, said)
        for other in (seed + 1, seed):  # the same key for another episode, from its middle
            other_said = [*said[:-1], "other"]
            expected = await fresh.step(next(keys), row, other, other_said)
            assert await going.step(key, row, other, other_said) == expected

    @settings(max_examples=30, deadline=None)
    @given(TEXTS, st.integers(0, 2**63 - 1))
    def check(said: list[str], seed: int) -> None:
        loop.run_until_complete(compare(said, seed))

    try:
        check()
        assert len(going.pids) == 1
    finally:
        going.close()
        fresh.close()
        loop.close()


def test_any_number_of_processes_gives_the_same() -> None:
    """Concurrent episodes mix tools and environments."""

    async def episode(pool: ToolPool, key: int) -> list[Any]:
        rng, said, found = random.Random(key), list[str](), list[Any]()
        for _ in range(4):
            step = await pool.step(key, {"k": key}, key * 7, said)
            found.append(step)
            drawn = await pool.call(f"{M}:draw", seed=hash((key, len(said))))
            found.append(drawn)
            said.append(f"{drawn.value} {rng.random()}")
        return [*found, await pool.verdict(key, {"k": key}, key * 7, said)]

    async def all_of_them(pool: ToolPool) -> list[list[Any]]:
        return await asyncio.gather(*(episode(pool, key) for key in range(9)))

    one, three = (run(all_of_them, workers=n, environment=f"{M}:Walk") for n in (1, 3))
    assert one == three
    assert len({result.value for found in one for result in found[1:-1:2]}) == 36  # seeds differ


def test_an_environment_goes_on_where_it_is_kept(tmp_path: Path) -> None:
    """Each step runs once, with idle or busy processes; after a kill, a saved state replaces the replay."""
    file = tmp_path / "steps"

    async def job(pool: ToolPool) -> list[Result[Answer]]:
        row, texts, busy = {"file": str(file)}, ["a", "b", "c"], True
        await asyncio.gather(*(pool.call(f"{M}:pid", [0.3]) for _ in range(3)))
        assert len(pool.pids) == 3

        async def others() -> None:
            while busy:
                await pool.call(f"{M}:pid", [0.01])

        for key in range(4):
            file.unlink(missing_ok=True)
            if key == 1:
                running = [asyncio.create_task(others()) for _ in range(6)]
            found = [await pool.step(key, row, 1, texts[:n]) for n in range(4)]
            assert file.read_text().split() == texts
        busy = False
        await asyncio.gather(*running)
        for pid in pool.pids:
            os.kill(pid, signal.SIGKILL)
        await until(lambda: pool.pids == [])
        state = found[-1].value and found[-1].value.state
        found.append(await pool.step(3, row, 1, [*texts, "d"], state))
        assert file.read_text().split() == [*texts, "d"]
        return found

    steps = run(job, workers=3, environment=f"{M}:Kept")
    values = [step.value for step in steps if step.value]
    assert [value.state and value.state.texts for value in values] == [0, 1, 2, 3, 4]

    async def replayed(pool: ToolPool) -> Result[Answer]:
        return await pool.step(1, {"file": str(file)}, 1, ["a", "b", "c", "d"])

    assert run(replayed, environment=f"{M}:Kept") == steps[-1]
    big = run(replayed, environment=f"{M}:Big")
    assert big.value and big.value[:3] == values[-1][:3] and big.value.state is None

    async def restored(pool: ToolPool) -> Verdict:
        return await pool.verdict(1, {"file": "/nowhere"}, 1, ["a"], State(1, {"at": 12.0, "steps": 1}))

    assert run(restored, environment=f"{M}:Kept") == Verdict(True, "12.0", score=12.0)


def test_an_environment_that_moves_leaves_nothing_behind(tmp_path: Path) -> None:
    """It may have a session at a server, so it also ends in the process that it left."""
    file = tmp_path / "ended"

    async def job(pool: ToolPool) -> None:
        row = {"file": str(file)}
        await pool.step(1, row, 1, [])
        (first,) = pool.pids
        busy = asyncio.create_task(pool.call(f"{M}:pid", [1.0]))  # occupies the only process
        await until(lambda: len(pool.waiting) == 1 and pool.waiting[0].running)
        await pool.step(1, row, 1, ["a"])
        assert (await busy).value == str(first) and len(pool.pids) == 2
        await pool.step(1, row, 1, ["a", "b"])  # in its new process
        assert (await pool.call(f"{M}:pid")).value == str(first)  # it has handled all earlier messages
        assert file.read_text().split() == [str(first)]

    run(job, workers=2, environment=f"{M}:Mortal")


@pytest.mark.parametrize(
    ("text", "error", "graded"),
    [
        ("raise", "ConnectionError: the shop is closed", False),
        ("pair", "step returned tuple of 2, not (observation, reward, done)", False),
        ("nothing", "step returned NoneType, not (observation, reward, done)", False),
        ("number", "step returned int as its observation, not text", False),
        ("reward", "step returned a reward: str, not a number", False),
        ("nan", "step returned a reward: nan, which is not finite", False),
        ("memory", "it ran out of memory", True),
    ],
)
def test_environments_that_fail(text: str, error: str, graded: bool) -> None:
    """The step fails, and the episode can still be replayed up to the step before."""

    async def job(pool: ToolPool) -> tuple[Any, ...]:
        before = await pool.step(1, {}, 1, ["a"])
        failed = await pool.step(1, {}, 1, ["a", text])
        assert await pool.step(1, {}, 1, ["a"]) == before
        return failed, await pool.verdict(1, {}, 1, ["a", text])

    error = f"{M}:Walk: {error}"
    failed, verdict = run(job, environment=f"{M}:Walk", memory_mib=512)
    assert failed == Result(error=error, graded=graded)
    assert verdict == Verdict(False, error=error, graded=graded)


@pytest.mark.parametrize(
    ("text", "error"), [("hang", "timeout after 1 s"), ("exit", "environment died (exit code 5)")]
)
def test_environments_that_hang_or_die(text: str, error: str) -> None:
    failed = run(lambda pool: pool.step(1, {}, 1, [text]), environment=f"{M}:Walk", seconds=1.0)
    assert failed == Result(error=error)


def test_a_replay_of_many_slow_steps_is_no_timeout() -> None:
    """The time limit applies to each step."""

    async def job(pool: ToolPool) -> tuple[Any, ...]:
        slow = ["slow"] * 5
        return await pool.step(2, {}, 1, slow), await pool.verdict(2, {"verdict": "text"}, 1, slow)

    slow, unusable = run(job, environment=f"{M}:Walk", seconds=1.0)
    assert slow.error is None
    assert unusable.error and not unusable.graded
    assert unusable.error.endswith("verdict returned str, not bool, number, (right, answer) or Verdict")


def test_classes_that_are_no_environment() -> None:
    for name, words in [
        ("NoStep", "has no step (it needs reset, step, verdict)"),
        ("HalfKept", "has state without restore"),
        ("Async", ".step is async"),
        ("add", "is function, not a class"),
        ("Wolk", f"{M} has no Class Wolk (did you mean Walk?)"),
    ]:
        with pytest.raises(ConfigError, match=r"^rollout\.environment: ") as caught:
            import_environment(f"{M}:{name}")
        assert words in str(caught.value) and "\n" not in str(caught.value)
    assert import_environment(f"{M}:Kept", {}).__name__ == "Kept"
    for arguments, words in [
        ({}, "missing a required argument: 'size' (it is Sized(size, pace=1))"),
        ({"size": 1, "sise": 2}, "got an unexpected keyword argument 'sise' (it is Sized(size, pace=1))"),
    ]:
        with pytest.raises(ConfigError) as caught:
            import_environment(f"{M}:Sized", arguments)
        assert str(caught.value) == f"rollout.environment_arguments: {M}:Sized: {words}"
    assert import_environment(f"{M}:Sized", {"size": 1}) == import_environment(f"{M}:Sized")

    result = run(lambda pool: pool.step(1, {}, 1, []), environment=f"{M}:NoStep")
    assert result.error and "has no step" in result.error and not result.graded
    result = run(lambda pool: pool.step(1, {}, 1, []), environment=f"{M}:FailsToBegin")
    assert result == Result(error=f"{M}:FailsToBegin: OSError: no such server", graded=False)
    result = run(lambda pool: pool.step(1, {}, 1, []), environment=f"{M}:Walk", arguments={"size": 1})
    assert result.error and "TypeError" in result.error and not result.graded


def test_schemas() -> None:
    assert build_schema(f"{M}:add") == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "the first"},
                    "b": {"type": "integer", "description": "the second"},
                },
                "required": ["a", "b"],
            },
            "return": {"type": "integer"},
        },
    }
    for name, words in [
        ("undocumented", "has no docstring"),
        ("untyped", "missing a type hint"),
        ("many", "*numbers: int cannot be given by name"),
        ("later", "is async, which a tool cannot be"),
        ("Walk", "is type, not a function"),
        ("ad", f"{M} has no function ad (did you mean add?)"),
    ]:
        with pytest.raises(ConfigError, match=r"^rollout\.tools: ") as caught:
            build_schema(f"{M}:{name}")
        assert words in str(caught.value) and "\n" not in str(caught.value)
    for path in ("add", f"{M}:", "no_such_module:f"):
        with pytest.raises(ConfigError, match=r"^rollout\.tools: "):
            build_schema(path)


@pytest.mark.parametrize(
    "given", [{"workers": 0}, {"seconds": 0.0}, {"memory_mib": 1}, {"observation_bytes": 0}]
)
def test_settings_are_checked(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        ToolPool(**given)


@pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="reasoning-gym is not installed")
def test_reasoning_gym() -> None:
    from megarl.config.schema import GymConfig
    from megarl_tasks.gym import generate

    config = GymConfig.model_validate({"tasks": ["lcm"], "size": 1})
    [made] = generate({"data.train[0].gym": config})
    row, right = {"question": made.question, "entry": made.entry}, f"<answer>{made.answer}</answer>"
    wrong = "<answer>zero</answer>"

    async def job(pool: ToolPool) -> list[Any]:
        said = [wrong, "no tags", right]
        steps = [await pool.step(1, row, 0, said[:n]) for n in range(4)]
        steps.append(await pool.step(2, row, 0, [wrong, wrong, wrong]))
        values = [step.value and step.value[:3] for step in steps]
        assert [step.error for step in steps] == [None] * 5
        return [*values, await pool.verdict(1, row, 0, said), await pool.verdict(2, row, 0, [wrong] * 3)]

    again = ("wrong, try again", 0.0, False)
    *steps, solved, failed = run(
        job, environment="megarl_tasks.gym_environment:GymEnvironment", arguments={"tries": 3}
    )
    assert steps == [(made.question, 0.0, False), again, again, ("", 0.0, True), ("", 0.0, True)]
    assert (solved.correct, solved.score, solved.extracted) == (True, 1.0, made.answer)
    assert (failed.correct, failed.graded, failed.extracted) == (False, True, "zero")
