"""Where tools and environments run: in processes of their own, under limits, for many episodes at once.

A job is a function of what it is sent. A tool's is one call; an environment's is its row, its seed and all
that the policy has said so far, so that any process can do it, and one that was killed loses nothing. A
process keeps the environments that it served last, and goes on with one where it can. `ToolPool` is the
side of the episodes, on their event loop; `work` the process's.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import random
import re
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import Context
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, cast

from megarl.agents.mcp_tools import MCP as MCP
from megarl.agents.mcp_tools import ServerError, connect_tool
from megarl.config.errors import ConfigError
from megarl.rewards.process import (
    FAILED_STARTS,
    FROM_OUTSIDE,
    START_LIMIT,
    LimitedProcess,
    serve,
)
from megarl.rewards.sandbox import STRICT, Supervised
from megarl.rewards.verdict import MAX_TEXT, UnusableError, Verdict, as_verdict, finite, imported, short

_KEPT = 256  # environments that one process keeps
_MAX_STATE = 1 << 20  # bytes of an environment's state as JSON; a larger one is not kept, but replayed
_SURROGATES = re.compile("[\ud800-\udfff]")
_METHODS, _OPTIONAL = ("reset", "step", "verdict"), ("state", "restore")

T = TypeVar("T")


class Environment(Protocol):
    """What an episode acts on. It is made anew for each episode, and must depend on its row, its seed and
    what the policy said alone: an episode whose process ended goes on in another by `reset` and the same
    texts once more. (`random` and numpy's generator are seeded before each call.)

    One that also has `state()`, what JSON can hold, and `restore(state)`, called behind `reset`, goes on
    without these texts."""

    def reset(self, row: dict[str, Any], seed: int) -> str:
        """Begin, and return what the policy is shown first."""
        ...

    def step(self, text: str) -> tuple[str, float, bool]:
        """Return what the policy is shown of what it said, the turn's reward, and whether this is the end."""
        ...

    def verdict(self) -> Verdict | bool | float:
        """Judge what has been said so far; changes nothing."""
        ...


@dataclass(frozen=True)
class Result(Generic[T]):
    """The outcome of a job.

    error   why there is none; of a tool, a text that the policy may be shown
    judged  False where neither the policy nor what it called has brought the error about: a process that was
            killed or does not start, an environment that raises"""

    value: T | None = None
    error: str | None = None
    judged: bool = True


class State(NamedTuple):
    """What an environment's `state` gave behind the first `texts` texts of the policy."""

    texts: int
    state: Any


class Answer(NamedTuple):
    """An environment's answer to what the policy said last; at the beginning reset's, with 0.0 and False.

    state  to be given with later jobs; None: the environment has none"""

    observation: str
    reward: float
    done: bool
    state: State | None = None


class ToolPool:
    """At most `workers` processes that call tools and environments, each started when it is first needed.

    seconds            that one call may take; of an environment, each of its methods
    memory_mib         data memory of one process, MiB
    observation_bytes  of UTF-8 that come back of a call; the rest is cut off, and a mark says so
    environment        `module:Class`, made with `arguments`
    sandbox            what the calls may reach, as `rollout.sandbox` says

    A job that takes too long, that runs out of memory or whose process dies is tried once more, in a new
    process, before that counts and is `judged`: the policy can have brought it about. A process that does not
    start is not. More jobs than processes wait in their order; only a job whose environment is kept by a
    process that is busy lets later ones pass.

    For one event loop until `close`, without threads. The processes end with that, or when this process
    dies."""

    def __init__(
        self,
        workers: int = 2,
        seconds: float = 30.0,
        memory_mib: int = 2048,
        observation_bytes: int = 8192,
        environment: str | None = None,
        arguments: Mapping[str, Any] = MappingProxyType({}),
        sandbox: str = STRICT,
    ) -> None:
        if workers < 1 or seconds <= 0 or memory_mib < 64 or observation_bytes < 1:
            given = f"{workers}, {seconds}, {memory_mib}, {observation_bytes}"
            wanted = "workers >= 1, seconds > 0, memory_mib >= 64 and observation_bytes >= 1"
            raise ValueError(f"{wanted} expected (got {given})")
        self.seconds, self.environment, self._sandbox = seconds, environment, sandbox
        self._settings = {
            "timeout": seconds,
            "memory_mib": memory_mib,
            "observation_bytes": observation_bytes,
            "environment": environment,
            "arguments": dict(arguments),
        }
        # A byte is six characters as JSON at most.
        self._longest = 6 * (observation_bytes + MAX_TEXT) + _MAX_STATE + 4096
        self._loop: asyncio.AbstractEventLoop | None = None
        self._slots: list[_ToolProcess | None] = [None] * workers
        self._idle = set(range(workers))
        self._queue: deque[tuple[asyncio.Future[int], int | None]] = deque()
        self._tasks: set[asyncio.Task[dict[str, Any]]] = set()
        self._jobs: dict[int, _Job] = {}

    @property
    def pids(self) -> list[int]:
        """The processes that run now."""
        return [one.pid for one in self._slots if one is not None and one.pid is not None and one.alive]

    @property
    def waiting(self) -> list[_Job]:
        """The jobs that episodes wait for, the oldest first; may be asked from another thread."""
        return list(self._jobs.values())

    @property
    def oldest(self) -> str:
        """Return the job that was asked for first, for reports about a hang."""
        for job in self.waiting[:1]:
            what = f"{job.what} in a process" if job.running else f"{job.what}, which waits for a process"
            return f"{what}, for {time.monotonic() - job.since:.0f} s"
        return "none"

    async def call(
        self,
        function: str,
        arguments: Sequence[Any] = (),
        keywords: Mapping[str, Any] = MappingProxyType({}),
        seed: int = 0,
    ) -> Result[str]:
        """Return what the plain function `module:function`, or a tool of an MCP server, returns: a text as it
        is, bytes as UTF-8, and anything else as JSON.

        seed: of `random` and of numpy's generator. What the function raises is an error that is judged. The
        arguments must be what JSON can hold (TypeError)."""
        sent = {"function": function, "arguments": list(arguments), "keywords": dict(keywords), "seed": seed}
        answer = await self._do(_Job(function, sent))
        return Result(answer.get("value"), answer.get("error"), answer.get("judged", True))

    async def step(
        self, key: int, row: Mapping[str, Any], seed: int, said: Sequence[str], state: State | None = None
    ) -> Result[Answer]:
        """Return the environment's answer to the last of `said`, what the policy said in each of its turns.

        key    the episode's number
        state  of an earlier answer, to go on from where no process keeps the environment"""
        answer = await self._do(self._job("step", key, row, seed, said, state))
        if "value" not in answer:
            return Result(None, answer["error"], answer.get("judged", True))
        observation, reward, done, after = answer["value"]
        return Result(Answer(observation, reward, done, after and State(*after)))

    async def verdict(
        self, key: int, row: Mapping[str, Any], seed: int, said: Sequence[str], state: State | None = None
    ) -> Verdict:
        """Return the environment's verdict behind `said`, or one with the error that kept it from that. As
        `step`; the environment is not kept."""
        answer = await self._do(self._job("verdict", key, row, seed, said, state))
        if "value" not in answer:
            return Verdict(False, error=answer["error"], judged=answer.get("judged", True))
        correct, extracted, error, score, judged = answer["value"]
        return Verdict(correct, extracted, error, score, judged=judged)

    def forget(self, key: int) -> None:
        """Have an environment dropped, which nobody goes on with: it may hold a session at a server. Its
        process does so behind what it is doing."""
        for process in filter(None, self._slots):
            if key in process.keys:
                del process.keys[key]
                process.send({"forget": key})

    def close(self) -> None:
        """End the processes, and the jobs that they have. A later job starts new ones."""
        tasks = list(self._tasks)
        for job in tasks:
            if self._loop is not None and not self._loop.is_closed():
                job.cancel()
        for future, _ in self._queue:
            future.cancel()
        for process in filter(None, self._slots):
            process.end()
        if self._loop is not None and not self._loop.is_closed() and not self._loop.is_running():

            async def settle() -> None:
                """Let cancelled tasks and closed pipes come to their end."""
                await asyncio.gather(*tasks, return_exceptions=True)
                await asyncio.sleep(0)

            self._loop.run_until_complete(settle())
        self._slots = [None] * len(self._slots)
        self._idle, self._loop = set(range(len(self._slots))), None
        self._queue, self._tasks, self._jobs = deque(), set(), {}

    def _job(self, method: str, key: int, row: Any, seed: int, said: Sequence[str], state: Any) -> _Job:
        if self.environment is None:
            raise ValueError("this pool has no environment")
        sent = {"method": method, "key": key, "row": row, "seed": seed, "said": list(said), "state": state}
        return _Job(f"{self.environment}.{method}", sent, key)

    async def _do(self, job: _Job) -> dict[str, Any]:
        """Have a process do a job. Where the caller is cancelled, the process comes to its end with it, or is
        killed at the limit, and then does others."""
        loop = self._loop = asyncio.get_running_loop()
        self._jobs[id(job)] = job
        try:
            slot = await self._seat(job.key)
            job.running = True
            # It may outlive whoever asks: it is none of the episode's tasks, which its context would say.
            task = Context().run(loop.create_task, self._done_by(slot, job))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            return await asyncio.shield(task)
        finally:
            job.wanted = False
            self._jobs.pop(id(job), None)

    async def _seat(self, key: int | None) -> int:
        """Wait for a process's turn and return its slot."""
        if self._idle:  # nobody waits
            home = self._home(key)
            if home not in self._idle:  # one that runs, and has the fewest environments to lose
                home = min(self._idle, key=lambda slot: (self._slots[slot] is None, self._kept(slot), slot))
            self._idle.remove(home)
            return home
        turn: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._queue.append((turn, key))
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._free(turn.result())
            elif (turn, key) in self._queue:
                self._queue.remove((turn, key))
            raise

    def _free(self, slot: int) -> None:
        """Give a slot to who waits for it, first to those whose environment no other process keeps. The
        others are not passed over for ever: when their own process comes free, they are among the first."""
        while self._queue:
            near = (one for one in self._queue if self._home(one[1]) in (None, slot))
            turn, _ = chosen = next(near, self._queue[0])
            self._queue.remove(chosen)
            if not turn.done():
                turn.set_result(slot)
                return
        self._idle.add(slot)

    def _home(self, key: int | None) -> int | None:
        """Return the slot of the process that keeps this environment."""
        for slot, process in enumerate(self._slots):
            if process is not None and key in process.keys:
                return slot
        return None

    def _kept(self, slot: int) -> int:
        process = self._slots[slot]
        return len(process.keys) if process is not None else 0

    async def _done_by(self, slot: int, job: _Job) -> dict[str, Any]:
        """Have the process of a slot, and a second one where that fails, do the job."""
        slots = self._slots  # after `close` others
        try:
            problem = await self._tried(slot, job)
            if "lost" in problem and job.wanted:
                problem = await self._tried(slot, job)
                if problem.get("killed"):  # twice, in a process of its own: the job has brought it about
                    problem["judged"] = True
            return problem
        except BaseException:
            if (process := slots[slot]) is not None:
                process.end()
                slots[slot] = None
            raise
        finally:
            if slots is self._slots:
                self._free(slot)

    async def _tried(self, slot: int, job: _Job) -> dict[str, Any]:
        """Return a process's answer, with `lost` where it has ended with the job."""
        process = await self._process(slot)
        if isinstance(process, str):
            return {"error": process, "judged": False}
        if not job.wanted:
            return {}
        if job.key is not None:
            process.keys.pop(job.key, None)
            self.forget(job.key)  # in another process, whose copy is told nothing from now on
            process.keys[job.key] = None
        process.send(job.sent)
        limit, importing = START_LIMIT, True
        try:
            while (answer := await process.receive(limit)) is None:  # it goes on
                limit, importing = self.seconds, False
            if not isinstance(answer, dict):
                raise ValueError
        except TimeoutError:
            await process.finish()
            what = f"{job.what} was not ready within" if importing else "timeout after"
            return {"error": f"{what} {limit:g} s", "judged": not importing, "lost": True}
        except EOFError:
            how = await process.finish()
            error = f"{'tool' if job.key is None else 'environment'} died ({how})"
            return {"error": error, "judged": how not in FROM_OUTSIDE, "lost": True, "killed": True}
        except ValueError:  # its pipe was written to by who has no business there
            await process.finish()
            return {"error": "its process answered no JSON", "judged": False, "lost": True, "killed": True}
        if "lost" in answer:
            await process.finish()
        elif not answer.get("kept"):
            process.keys.pop(cast(int, job.key), None)
        elif len(process.keys) > _KEPT:
            process.keys.popitem(last=False)
        return cast(dict[str, Any], answer)

    async def _process(self, slot: int) -> _ToolProcess | str:
        """Return the process of a slot, or the reason why none starts."""
        process, why = self._slots[slot], ""
        if process is not None and process.alive:
            return process
        if process is not None:
            await process.finish()
        for _ in range(FAILED_STARTS):
            self._slots[slot] = process = None
            try:
                process = self._slots[slot] = _ToolProcess(self._sandbox, self._longest)
                await process.connect(self._settings)
                return process
            except (OSError, EOFError) as error:  # OSError: TimeoutError is one, and a machine that is full
                why = described(error)
                if process is not None:
                    why = f"{await process.finish()}; {process.last_line}"
                if isinstance(error, TimeoutError):
                    return f"a process for tools was not ready within {START_LIMIT:g} s ({why})"
        return f"{FAILED_STARTS} processes for tools died at their start ({why})"


class _Job:
    """A message for a process, and who waits for its answer.

    what     the tool, or the environment's class and method
    key      of the environment; None: a tool's
    since    time.monotonic() of the request
    running  whether a process has it; False: all have others"""

    def __init__(self, what: str, sent: dict[str, Any], key: int | None = None) -> None:
        self.what, self.sent, self.key = what, sent, key
        self.since, self.running, self.wanted = time.monotonic(), False, True


class _ToolProcess(LimitedProcess):
    """One process, and the keys of the environments that it has, the newest last."""

    def __init__(self, sandbox: str, longest: int) -> None:
        super().__init__(__name__, sandbox, longest)
        self.keys: OrderedDict[int, None] = OrderedDict()


def work(process: Supervised) -> None:
    """Be a process for tools and environments."""
    serve(process, lambda settings: _Inside(**settings).answers)


class _Inside:
    """What such a process does.

    kept: environments by their episodes, the newest last"""

    def __init__(self, observation_bytes: int, environment: str | None, arguments: Any, **_: Any) -> None:
        self.observation_bytes, self.environment, self.arguments = observation_bytes, environment, arguments
        self.kept: OrderedDict[int, _Going] = OrderedDict()

    def answers(self, job: dict[str, Any]) -> Iterator[dict[str, Any] | None]:
        """Yield None each time that the next limit begins, and then the answer: value or error; judged; lost
        where this process is not to go on; kept where it keeps the environment. Nothing where it is only to
        forget one."""
        if "forget" in job:
            self.kept.pop(job["forget"], None)
            return
        is_tool = "function" in job
        try:
            if is_tool:
                path = job["function"]
                function = connect_tool(path) if path.startswith(MCP) else imported("rollout.tools", path)
            else:
                assert self.environment is not None
                made = partial(environment_class(self.environment), **self.arguments)
        except ConfigError as error:
            yield {"error": str(error), "judged": False}
            return
        yield None
        where = "" if is_tool else f"{self.environment}: "
        try:
            if is_tool:
                _seed(job["seed"], 0)
                value = function(*job["arguments"], **job["keywords"])
                yield {"value": observation(value, self.observation_bytes)}
            else:
                yield from self._environment(made, **job)
        except ServerError as error:
            text = observation(str(error), self.observation_bytes)
            yield {"error": text, "judged": False, "lost": True} if error.gone else {"error": text}
        except MemoryError:  # not this job's alone, maybe: others have left things behind
            self.kept.clear()
            yield {"error": f"{where}it ran out of memory", "lost": True}
        except RecursionError:
            yield {"error": f"{where}it ran out of stack"}
        except UnusableError as error:
            yield {"error": f"{where}{error}", "judged": False}
        except (Exception, SystemExit) as error:  # noqa: BLE001 (recorded: the policy's, or the environment's)
            text = described(error)
            if is_tool:
                yield {"error": observation(text, self.observation_bytes)}
            else:
                yield {"error": f"{where}{text}".split("\n")[0][:MAX_TEXT], "judged": False}

    def _environment(
        self, made: Callable[[], Any], method: str, key: int, row: Any, seed: int, said: list[str], state: Any
    ) -> Iterator[dict[str, Any] | None]:
        going = self.kept.pop(key, None)
        if going is None or not going.leads_to(row, seed, said):
            going = _Going(made(), row, seed, self.observation_bytes)
            yield None
            if state is not None and state[0] + (method == "step") <= len(said):
                going.restore(said[: state[0]], state[1])
        for text in said[len(going.said) :]:
            yield None
            going.step(text)
        if method == "verdict":
            yield None
            v = going.verdict()
            yield {"value": [v.correct, short(v.extracted), short(v.error), v.score, v.judged]}
            return
        self.kept[key] = going
        if len(self.kept) > _KEPT:
            self.kept.popitem(last=False)
        yield {"value": going.last, "kept": True}


class _Going:
    """An environment that was reset, what it was told since, and its last answer."""

    def __init__(self, environment: Any, row: Any, seed: int, observation_bytes: int) -> None:
        self.environment, self.row, self.seed, self.size = environment, row, seed, observation_bytes
        self.said: list[str] = []
        _seed(seed, 0)
        # The environment may change its row; the next job's is compared with the one that came.
        shown = environment.reset(json.loads(json.dumps(row)), seed)
        self._note(shown, 0.0, False, "reset")

    def leads_to(self, row: Any, seed: int, said: list[str]) -> bool:
        """Return whether it is the one of this row and seed, and has been told nothing else."""
        return self.row == row and self.seed == seed and self.said == said[: len(self.said)]

    def step(self, text: str) -> None:
        self.said.append(text)
        _seed(self.seed, len(self.said))
        result = self.environment.step(text)
        if not isinstance(result, tuple | list) or len(result) != 3:
            what = (
                f"{type(result).__name__}{f' of {len(result)}' if isinstance(result, tuple | list) else ''}"
            )
            raise UnusableError(f"step returned {what}, not (observation, reward, done)")
        shown, reward, done = result
        self._note(shown, reward, done, "step")

    def _note(self, shown: Any, reward: Any, done: Any, method: str) -> None:
        if not isinstance(shown, str | bytes):
            raise UnusableError(f"{method} returned {type(shown).__name__} as its observation, not text")
        state = None
        if hasattr(self.environment, "state"):
            found = json.dumps(self.environment.state())
            if len(found) <= _MAX_STATE:
                state = [len(self.said), json.loads(found)]
        reward = finite(reward, f"{method} returned a reward:", "not a number")
        self.last = [observation(shown, self.size), reward, bool(done), state]

    def restore(self, said: list[str], state: Any) -> None:
        """Go on behind `said`. Whoever restores wants no answer to the last of them."""
        if hasattr(self.environment, "restore"):
            self.environment.restore(state)
            self.said = list(said)

    def verdict(self) -> Verdict:
        _seed(self.seed, len(self.said) + 1)
        return as_verdict(self.environment.verdict(), "verdict")


def _seed(seed: int, index: int) -> None:
    """Seed the generators that code may take without asking, so that no result depends on what this process
    did before."""
    number = int.from_bytes(blake2b(f"{seed}/{index}".encode(), digest_size=4).digest(), "little")
    random.seed(number)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(number)


def observation(value: Any, size: int) -> str:
    """Return a value as text of at most `size` bytes of UTF-8 (and a mark where it was cut): a text as it is,
    bytes decoded, else JSON. What is no UTF-8 is replaced. Raises TypeError for what JSON cannot hold."""
    if isinstance(value, bytes | bytearray):
        long, text = len(value) > size, bytes(value[: size + 4]).decode("utf-8", "replace")
    else:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        long, text = len(text) > size, _SURROGATES.sub("\ufffd", text[: size + 1])
    encoded = text.encode()
    if not long and len(encoded) <= size:
        return text
    mark = f"\n[cut at {size} bytes]"
    return encoded[: max(0, size - len(mark))].decode("utf-8", "ignore") + mark


def described(error: BaseException) -> str:
    """Return type and text of an exception, of which the latter may raise itself."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001
        return type(error).__name__


def schema(function: str) -> dict[str, Any]:
    """Return the JSON schema of the tool `module:function`, as chat templates take it, from its signature and
    docstring. Raises ConfigError where it is no plain function, or one of them lacks what is needed."""
    from transformers.utils import get_json_schema  # a process for tools needs it not

    tool = imported("rollout.tools", function)
    at = f"rollout.tools: {function}"
    if not inspect.isroutine(tool):
        raise ConfigError(f"{at} is {type(tool).__name__}, not a function")
    if _is_async(tool):
        remedy = "write a plain function: it runs in a process of its own"
        raise ConfigError(f"{at} is async, which a tool cannot be ({remedy})")
    try:
        for name, parameter in inspect.signature(tool).parameters.items():
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise ConfigError(f"{at}: {parameter} cannot be given by name (name each parameter: {name})")
        return cast(dict[str, Any], get_json_schema(tool))
    except ConfigError:
        raise
    except Exception as error:  # a type hint may be any expression
        remedy = "it needs a type for each parameter, and a docstring that describes each under `Args:`"
        raise ConfigError(f"{at}: {described(error)} ({remedy})") from error


def environment_class(path: str, arguments: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """Return the class `module:Class` that `rollout.environment` names. Raises ConfigError where it cannot be
    imported, is no Environment or, if they are given, does not take these arguments."""
    found = imported("rollout.environment", path, "Class")
    at = f"rollout.environment: {path}"
    if not isinstance(found, type):
        raise ConfigError(f"{at} is {type(found).__name__}, not a class")
    absent = [name for name in _METHODS if not callable(getattr(found, name, None))]
    if absent:
        raise ConfigError(f"{at} has no {' and no '.join(absent)} (it needs {', '.join(_METHODS)})")
    if len(there := [name for name in _OPTIONAL if hasattr(found, name)]) == 1:
        raise ConfigError(f"{at} has {there[0]} without {'restore' if there == ['state'] else 'state'}")
    for name in (*_METHODS, *there):
        if _is_async(getattr(found, name)):
            raise ConfigError(f"{at}.{name} is async (write a plain method: it runs in a process of its own)")
    if arguments is not None:
        signature = inspect.signature(found)
        try:
            signature.bind(**arguments)
        except TypeError as error:
            takes = f"it is {found.__name__}{signature.replace(return_annotation=signature.empty)}"
            raise ConfigError(f"rollout.environment_arguments: {path}: {error} ({takes})") from error
    return found


def _is_async(function: Any) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)
