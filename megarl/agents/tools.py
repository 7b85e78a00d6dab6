"""Run episodes' tools and environments in separate processes with limits.

A job's result depends only on its message, so any process can run it, and a killed one loses nothing."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
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

from megarl.agents.mcp_tools import MCP, ServerError, connect_tool
from megarl.config.errors import ConfigError
from megarl.rewards.process import FAILED_STARTS, FROM_OUTSIDE, START_LIMIT, LimitedProcess, serve
from megarl.rewards.sandbox import STRICT, Supervised
from megarl.rewards.verdict import MAX_TEXT, UnusableError, Verdict, as_verdict, finite, import_object, short

_MAX_ENVIRONMENTS = 256
_MAX_STATE = 1 << 20  # characters of JSON; beyond, turns are replayed
_SURROGATES = re.compile("[\ud800-\udfff]")
_METHODS, _OPTIONAL = ("reset", "step", "verdict"), ("state", "restore")

T = TypeVar("T")


class Environment(Protocol):
    """A user's environment (docs/episodes.md).

    It must depend only on row, seed and texts, because another process may replay them. `random` and numpy
    are seeded before each call. An optional `restore(state)` is called after `reset`."""

    def reset(self, row: dict[str, Any], seed: int) -> str: ...

    def step(self, text: str) -> tuple[str, float, bool]:
        """Return observation, reward and done."""
        ...

    def verdict(self) -> Verdict | bool | float:
        """Grade the episode so far, without changing it."""
        ...


@dataclass(frozen=True)
class Result(Generic[T]):
    """The outcome of a job.

    error   why there is no value; the policy may see it
    graded  False: neither the policy nor the called code caused the error"""

    value: T | None = None
    error: str | None = None
    graded: bool = True


class State(NamedTuple):
    texts: int
    state: Any


class Answer(NamedTuple):
    """An environment's answer. state: for later jobs."""

    observation: str
    reward: float
    done: bool
    state: State | None = None


class ToolPool:
    """Up to `workers` processes that call tools and environments, for one event loop.

    seconds            limit of one call
    memory_mib         data memory of one process, MiB
    observation_bytes  limit of a result, UTF-8 bytes
    environment        `module:Class`

    A job that exceeds limits or loses its process is retried once. A second failure is the policy's
    (`graded`), unless a start, an import or an MCP server failed."""

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
            actual = f"{workers}, {seconds}, {memory_mib}, {observation_bytes}"
            expected = "workers >= 1, seconds > 0, memory_mib >= 64 and observation_bytes >= 1"
            raise ValueError(f"{expected} expected (got {actual})")
        self.seconds, self.environment, self._sandbox = seconds, environment, sandbox
        self._settings = {
            "memory_mib": memory_mib,
            "observation_bytes": observation_bytes,
            "environment": environment,
            "arguments": dict(arguments),
        }
        # JSON needs up to six characters a byte.
        self._longest = 6 * (observation_bytes + MAX_TEXT) + _MAX_STATE + 4096
        self._loop: asyncio.AbstractEventLoop | None = None
        self._slots: list[_ToolProcess | None] = [None] * workers
        self._idle = set(range(workers))
        self._queue: deque[tuple[asyncio.Future[int], int | None]] = deque()
        self._tasks: set[asyncio.Task[dict[str, Any]]] = set()
        self._jobs: dict[int, _Job] = {}

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in filter(None, self._slots) if process.pid and process.alive]

    @property
    def waiting(self) -> list[_Job]:
        """Unfinished jobs; readable from any thread."""
        return list(self._jobs.values())

    @property
    def oldest(self) -> str:
        """Description of the oldest unfinished job."""
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
        """Call `module:function` or an MCP tool. Raises TypeError if an argument is no JSON value."""
        call = {"function": function, "arguments": list(arguments), "keywords": dict(keywords), "seed": seed}
        answer = await self._run_job(_Job(function, call))
        return Result(answer.get("value"), answer.get("error"), answer.get("graded", True))

    async def step(
        self, key: int, row: Mapping[str, Any], seed: int, texts: Sequence[str], state: State | None = None
    ) -> Result[Answer]:
        """Return the environment's answer to the last of the policy's `texts`.

        key: the episode's. state: an earlier answer's, to avoid a replay."""
        answer = await self._run_job(self._job("step", key, row, seed, texts, state))
        if "value" not in answer:
            return Result(None, answer["error"], answer.get("graded", True))
        observation, reward, done, new_state = answer["value"]
        return Result(Answer(observation, reward, done, new_state and State(*new_state)))

    async def verdict(
        self, key: int, row: Mapping[str, Any], seed: int, texts: Sequence[str], state: State | None = None
    ) -> Verdict:
        """Grade and discard the environment."""
        answer = await self._run_job(self._job("verdict", key, row, seed, texts, state))
        if "value" not in answer:
            return Verdict(False, error=answer["error"], graded=answer.get("graded", True))
        correct, extracted, error, score, graded = answer["value"]
        return Verdict(correct, extracted, error, score, graded=graded)

    def forget(self, key: int) -> None:
        """Discard an environment, which may hold a server's session."""
        for process in filter(None, self._slots):
            if key in process.keys:
                del process.keys[key]
                process.send({"forget": key})

    def close(self) -> None:
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
                await asyncio.gather(*tasks, return_exceptions=True)
                await asyncio.sleep(0)

            self._loop.run_until_complete(settle())
        self._slots = [None] * len(self._slots)
        self._idle, self._loop = set(range(len(self._slots))), None
        self._queue, self._tasks, self._jobs = deque(), set(), {}

    def _job(self, method: str, key: int, row: Any, seed: int, texts: Sequence[str], state: Any) -> _Job:
        if self.environment is None:
            raise ValueError("this pool has no environment")
        message = {
            "method": method,
            "key": key,
            "row": row,
            "seed": seed,
            "texts": list(texts),
            "state": state,
        }
        return _Job(f"{self.environment}.{method}", message, key)

    async def _run_job(self, job: _Job) -> dict[str, Any]:
        """Run a job, which a process finishes even if the caller is cancelled."""
        loop = self._loop = asyncio.get_running_loop()
        self._jobs[id(job)] = job
        try:
            slot = await self._acquire_slot(job.key)
            job.running = True
            # A new context: the task may outlive its episode.
            task = Context().run(loop.create_task, self._run_with_retry(slot, job))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            return await asyncio.shield(task)
        finally:
            job.wanted = False
            self._jobs.pop(id(job), None)

    async def _acquire_slot(self, key: int | None) -> int:
        if self._idle:  # so the queue is empty
            slot = self._find_slot(key)
            if slot not in self._idle:  # a running process, with the fewest environments to lose
                num_environments = {
                    index: len(process.keys)
                    for index, process in enumerate(self._slots)
                    if process is not None
                }
                slot = min(self._idle, key=lambda slot: (num_environments.get(slot, math.inf), slot))
            self._idle.remove(slot)
            return slot
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._queue.append((future, key))
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self._release_slot(future.result())
            elif (future, key) in self._queue:
                self._queue.remove((future, key))
            raise

    def _release_slot(self, slot: int) -> None:
        """Pass a slot to the first job whose environment no other process has, else to the first.

        Skipped jobs come first when their own process is idle."""
        while self._queue:
            fitting = (waiter for waiter in self._queue if self._find_slot(waiter[1]) in (None, slot))
            future, _ = waiter = next(fitting, self._queue[0])
            self._queue.remove(waiter)
            if not future.done():
                future.set_result(slot)
                return
        self._idle.add(slot)

    def _find_slot(self, key: int | None) -> int | None:
        for slot, process in enumerate(self._slots):
            if process is not None and key in process.keys:
                return slot
        return None

    async def _run_with_retry(self, slot: int, job: _Job) -> dict[str, Any]:
        slots = self._slots  # `close` replaces the list
        try:
            answer = await self._try_job(slot, job)
            if "lost" in answer and job.wanted:
                answer = await self._try_job(slot, job)
                if answer.get("killed"):  # twice: the job caused it
                    answer["graded"] = True
            return answer
        except BaseException:
            if (process := slots[slot]) is not None:
                process.end()
                slots[slot] = None
            raise
        finally:
            if slots is self._slots:
                self._release_slot(slot)

    async def _try_job(self, slot: int, job: _Job) -> dict[str, Any]:
        """Return the answer; `lost`: the process has ended."""
        process = await self._ensure_process(slot)
        if isinstance(process, str):
            return {"error": process, "graded": False}
        if not job.wanted:
            return {}
        if job.key is not None:
            process.keys.pop(job.key, None)
            self.forget(job.key)  # other copies would miss this job
            process.keys[job.key] = None
        process.send(job.sent)
        limit, is_importing = START_LIMIT, True
        try:
            while (answer := await process.receive(limit)) is None:
                limit, is_importing = self.seconds, False
            if not isinstance(answer, dict):
                raise ValueError
        except TimeoutError:
            await process.finish()
            what = f"{job.what} was not ready within" if is_importing else "timeout after"
            return {"error": f"{what} {limit:g} s", "graded": not is_importing, "lost": True}
        except EOFError:
            exit_reason = await process.finish()
            error = f"{'tool' if job.key is None else 'environment'} died ({exit_reason})"
            return {"error": error, "graded": exit_reason not in FROM_OUTSIDE, "lost": True, "killed": True}
        except ValueError:  # user code wrote to the pipe
            await process.finish()
            return {"error": "its process answered no JSON", "graded": False, "lost": True, "killed": True}
        if "lost" in answer:
            await process.finish()
        elif not answer.get("kept"):
            process.keys.pop(cast(int, job.key), None)
        elif len(process.keys) > _MAX_ENVIRONMENTS:
            process.keys.popitem(last=False)
        return cast(dict[str, Any], answer)

    async def _ensure_process(self, slot: int) -> _ToolProcess | str:
        process, reason = self._slots[slot], ""
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
            except (OSError, EOFError) as error:  # OSError includes TimeoutError
                reason = describe_error(error)
                if process is not None:
                    reason = f"{await process.finish()}; {process.last_line}"
                if isinstance(error, TimeoutError):
                    return f"a tool process was not ready within {START_LIMIT:g} s ({reason})"
        return f"{FAILED_STARTS} tool processes died at their start ({reason})"


class _Job:
    """wanted: the caller still waits."""

    def __init__(self, what: str, sent: dict[str, Any], key: int | None = None) -> None:
        self.what, self.sent, self.key = what, sent, key
        self.since, self.running, self.wanted = time.monotonic(), False, True


class _ToolProcess(LimitedProcess):
    def __init__(self, sandbox: str, longest: int) -> None:
        super().__init__(__name__, sandbox, longest)
        self.keys: OrderedDict[int, None] = OrderedDict()


def work(process: Supervised) -> None:
    serve(process, lambda settings: _JobHandler(**settings).handle)


class _JobHandler:
    def __init__(self, observation_bytes: int, environment: str | None, arguments: Any, **_: Any) -> None:
        self.observation_bytes, self.environment, self.arguments = observation_bytes, environment, arguments
        self.environments: OrderedDict[int, _LiveEnvironment] = OrderedDict()

    def handle(self, job: dict[str, Any]) -> Iterator[dict[str, Any] | None]:
        """Yield None when a time limit starts, then the answer, except for "forget".

        Its keys: `value` or `error`; `graded`; `lost`: end this process; `kept`: it has the environment."""
        if "forget" in job:
            self.environments.pop(job["forget"], None)
            return
        is_tool = "function" in job
        try:
            if is_tool:
                path = job["function"]
                is_mcp = path.startswith(MCP)
                function = connect_tool(path) if is_mcp else import_object("rollout.tools", path)
            else:
                assert self.environment is not None
                make_environment = partial(import_environment(self.environment), **self.arguments)
        except ConfigError as error:
            yield {"error": str(error), "graded": False}
            return
        yield None
        where = "" if is_tool else f"{self.environment}: "
        try:
            if is_tool:
                _seed(job["seed"], 0)
                value = function(*job["arguments"], **job["keywords"])
                yield {"value": format_observation(value, self.observation_bytes)}
            else:
                yield from self._run_environment(make_environment, **job)
        except ServerError as error:
            text = format_observation(str(error), self.observation_bytes)
            yield {"error": text, "graded": False, "lost": True} if error.gone else {"error": text}
        except MemoryError:  # perhaps earlier jobs' fault
            self.environments.clear()
            yield {"error": f"{where}it ran out of memory", "lost": True}
        except RecursionError:
            yield {"error": f"{where}it ran out of stack"}
        except UnusableError as error:
            yield {"error": f"{where}{error}", "graded": False}
        except (Exception, SystemExit) as error:  # noqa: BLE001 (recorded as the answer)
            text = describe_error(error)
            if is_tool:
                yield {"error": format_observation(text, self.observation_bytes)}
            else:
                yield {"error": f"{where}{text}".split("\n")[0][:MAX_TEXT], "graded": False}

    def _run_environment(
        self,
        make: Callable[[], Any],
        method: str,
        key: int,
        row: Any,
        seed: int,
        texts: list[str],
        state: Any,
    ) -> Iterator[dict[str, Any] | None]:
        environment = self.environments.pop(key, None)
        if environment is None or not environment.can_continue(row, seed, texts):
            environment = _LiveEnvironment(make(), row, seed, self.observation_bytes)
            yield None
            if state is not None and state[0] + (method == "step") <= len(texts):
                environment.restore(texts[: state[0]], state[1])
        for text in texts[len(environment.texts) :]:
            yield None
            environment.step(text)
        if method == "verdict":
            yield None
            verdict = environment.verdict()
            explanation = short(verdict.extracted), short(verdict.error)
            yield {"value": [verdict.correct, *explanation, verdict.score, verdict.graded]}
            return
        self.environments[key] = environment
        if len(self.environments) > _MAX_ENVIRONMENTS:
            self.environments.popitem(last=False)
        yield {"value": environment.last, "kept": True}


class _LiveEnvironment:
    def __init__(self, environment: Any, row: Any, seed: int, observation_bytes: int) -> None:
        self.environment, self.row, self.seed, self.size = environment, row, seed, observation_bytes
        self.texts: list[str] = []
        _seed(seed, 0)
        # A copy, which the environment may change.
        observation = environment.reset(json.loads(json.dumps(row)), seed)
        self._record(observation, 0.0, False, "reset")

    def can_continue(self, row: Any, seed: int, texts: list[str]) -> bool:
        """Return whether row and seed are equal, and `texts` extends its own."""
        return self.row == row and self.seed == seed and self.texts == texts[: len(self.texts)]

    def step(self, text: str) -> None:
        self.texts.append(text)
        _seed(self.seed, len(self.texts))
        result = self.environment.step(text)
        if not isinstance(result, tuple | list) or len(result) != 3:
            size = f" of {len(result)}" if isinstance(result, tuple | list) else ""
            what = f"{type(result).__name__}{size}"
            raise UnusableError(f"step returned {what}, not (observation, reward, done)")
        observation, reward, done = result
        self._record(observation, reward, done, "step")

    def _record(self, shown: Any, reward: Any, done: Any, method: str) -> None:
        if not isinstance(shown, str | bytes):
            raise UnusableError(f"{method} returned {type(shown).__name__} as its observation, not text")
        state = None
        if hasattr(self.environment, "state"):
            state_json = json.dumps(self.environment.state())
            if len(state_json) <= _MAX_STATE:
                state = [len(self.texts), json.loads(state_json)]
        reward = finite(reward, f"{method} returned a reward:", "not a number")
        self.last = [format_observation(shown, self.size), reward, bool(done), state]

    def restore(self, texts: list[str], state: Any) -> None:
        """Skip the replay of `texts`. `last` is outdated until the next step."""
        if hasattr(self.environment, "restore"):
            self.environment.restore(state)
            self.texts = list(texts)

    def verdict(self) -> Verdict:
        _seed(self.seed, len(self.texts) + 1)
        return as_verdict(self.environment.verdict(), "verdict")


def _seed(seed: int, index: int) -> None:
    """Make results independent of earlier jobs."""
    number = int.from_bytes(blake2b(f"{seed}/{index}".encode(), digest_size=4).digest(), "little")
    random.seed(number)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(number)


def format_observation(value: Any, size: int) -> str:
    """Format as valid text or JSON of at most `size` UTF-8 bytes, with a mark if cut. Raises TypeError."""
    if isinstance(value, bytes | bytearray):
        is_too_long, text = len(value) > size, bytes(value[: size + 4]).decode("utf-8", "replace")
    else:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        is_too_long, text = len(text) > size, _SURROGATES.sub("\ufffd", text[: size + 1])
    encoded = text.encode()
    if not is_too_long and len(encoded) <= size:
        return text
    mark = f"\n[cut at {size} bytes]"
    return encoded[: max(0, size - len(mark))].decode("utf-8", "ignore") + mark


def describe_error(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 (raised by the error's `__str__`)
        return type(error).__name__


def build_schema(function: str) -> dict[str, Any]:
    """Build a tool's JSON schema from its signature and docstring. Raises ConfigError."""
    from transformers.utils import get_json_schema  # slow to import

    tool = import_object("rollout.tools", function)
    where = f"rollout.tools: {function}"
    if not inspect.isroutine(tool):
        raise ConfigError(f"{where} is {type(tool).__name__}, not a function")
    if _is_async(tool):
        remedy = "write a plain function: it runs in a separate process"
        raise ConfigError(f"{where} is async, which a tool cannot be ({remedy})")
    try:
        for name, parameter in inspect.signature(tool).parameters.items():
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                what = f"{parameter} cannot be given by name (name each parameter: {name})"
                raise ConfigError(f"{where}: {what}")
        return cast(dict[str, Any], get_json_schema(tool))
    except ConfigError:
        raise
    except Exception as error:  # a type hint may be any expression
        remedy = "it needs a type for each parameter, and a docstring that describes each under `Args:`"
        raise ConfigError(f"{where}: {describe_error(error)} ({remedy})") from error


def import_environment(path: str, arguments: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """Import an environment's class. Raises ConfigError, also if it does not take `arguments`."""
    environment_class = import_object("rollout.environment", path, "Class")
    where = f"rollout.environment: {path}"
    if not isinstance(environment_class, type):
        raise ConfigError(f"{where} is {type(environment_class).__name__}, not a class")
    missing_methods = [name for name in _METHODS if not callable(getattr(environment_class, name, None))]
    if missing_methods:
        missing = " and no ".join(missing_methods)
        raise ConfigError(f"{where} has no {missing} (it needs {', '.join(_METHODS)})")
    optional_methods = [name for name in _OPTIONAL if hasattr(environment_class, name)]
    if len(optional_methods) == 1:
        other = "restore" if optional_methods == ["state"] else "state"
        raise ConfigError(f"{where} has {optional_methods[0]} without {other}")
    for name in (*_METHODS, *optional_methods):
        if _is_async(getattr(environment_class, name)):
            remedy = "write a plain method: it runs in a separate process"
            raise ConfigError(f"{where}.{name} is async ({remedy})")
    if arguments is not None:
        signature = inspect.signature(environment_class)
        try:
            signature.bind(**arguments)
        except TypeError as error:
            expected = f"{environment_class.__name__}{signature.replace(return_annotation=signature.empty)}"
            raise ConfigError(f"rollout.environment_arguments: {path}: {error} (it is {expected})") from error
    return environment_class


def _is_async(function: Any) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)
