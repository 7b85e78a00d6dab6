"""Run a worker's multi-turn episodes."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

from megarl.agents.chat import check_template, opening_tokens, play, schemas, tool_calls
from megarl.agents.chat_turns import ChatTurns
from megarl.agents.endpoint import Endpoint
from megarl.agents.episode import EpisodeFunction, EpisodeTruncated, Policy, ToolError
from megarl.agents.loop_watch import LoopWatch
from megarl.agents.tools import ToolPool, describe_error, import_environment
from megarl.config.errors import ConfigError, EngineError, MegarlError
from megarl.config.schema import Config
from megarl.data.response_text import check_end_of_turn
from megarl.rewards.verdict import UnusableError, Verdict, as_verdict, import_object
from megarl.rollout.episode import EpisodeAborted, EpisodeInputs

PATIENCE = 0.8  # of parallel.timeout, when other ranks give up

# Unfinished tasks of the current episode.
_tasks: ContextVar[set[asyncio.Task[Any]]] = ContextVar("_tasks")


class AgentRunner:
    def __init__(self, config: Config, tokenizer: Any) -> None:
        rollout, turns = config.rollout, config.rollout.turns
        options = "environment", "agent", "tools"
        self.key = "rollout." + next((option for option in options if getattr(rollout, option)), "episode")
        self.config, self.tokenizer = config, tokenizer
        self.endpoint: Endpoint | None = None
        if rollout.agent:
            variables = config.data.chat_template_kwargs
            self.endpoint = Endpoint(tokenizer, turns.seconds, rollout.stop, variables)
        self.function = _load_function(config, tokenizer, self.endpoint)
        limits = turns.calls, turns.seconds, turns.memory, turns.observation
        self.tools = ToolPool(*limits, rollout.environment, rollout.environment_arguments, turns.sandbox)
        self._warned: set[str] = set()

    @property
    def depths(self) -> Mapping[str, Callable[[], int | str]]:
        return {
            "calls of tools and environments": lambda: len(self.tools.waiting),
            "is the oldest of them": lambda: self.tools.oldest,
        }

    def start(self, inputs: EpisodeInputs) -> AgentEpisode:
        return AgentEpisode(
            inputs.prompt,
            inputs.client,
            inputs.seed,
            inputs.params,
            inputs.prefix,
            self.tokenizer,
            self.config.rollout.turns,
            self.tools,
            self.config.update.share_prompts,
            key=self.key,
            notify=inputs.notify,
            function=self.function,
            warned=self._warned,
        )

    @contextmanager
    def supervise(self, rank: int) -> Iterator[None]:
        """Record episodes' tasks, and report blocking user code."""
        asyncio.get_running_loop().set_task_factory(_create_task)
        rollout, max_seconds = self.config.rollout, PATIENCE * self.config.parallel.timeout
        path = rollout.agent or rollout.episode
        if path is None:
            watch: Any = nullcontext()
        else:
            module_file = getattr(sys.modules[path.partition(":")[0]], "__file__", None)
            watch = LoopWatch(self.key, f"engine rank {rank}", module_file, rollout.turns.hold, max_seconds)
        with watch:
            yield

    def forget(self, seed: int) -> None:
        self.tools.forget(seed)

    async def disconnect(self) -> None:
        if self.endpoint is not None:
            await self.endpoint.close()

    def close(self) -> None:
        self.tools.close()


@dataclass
class AgentEpisode(Policy):
    """A coroutine's episode. warned: reported texts, shared by the worker's episodes."""

    function: EpisodeFunction = field(kw_only=True)
    warned: set[str] = field(default_factory=set, kw_only=True)
    windowed = False  # rollout.window is single-turn
    prefix_tokens = 0

    async def run(self) -> Verdict | None:
        _tasks.set(set())
        verdict = await self._run_graded()
        if not self.turns and not self.aborted:
            if verdict is None or verdict.graded:
                verdict = self._ungraded("it ended, or had no room left, before the policy wrote anything")
            await self.give_up()
        return verdict

    async def _run_graded(self) -> Verdict | None:
        try:
            return await self._call()
        except EpisodeTruncated:
            return None
        except asyncio.CancelledError:
            if self.aborted or asyncio.current_task().cancelling():  # type: ignore[union-attr]
                raise
            return self._ungraded("it was cancelled by itself")
        except ToolError as error:
            return Verdict(False, error=f"{self.key}: a tool failed: {error}")
        except (MegarlError, EpisodeAborted, KeyboardInterrupt, GeneratorExit):
            raise
        # Other errors, perhaps wrapped by a task group, leave the response ungraded.
        except BaseException as error:
            cause = error.split(EpisodeTruncated)[1] if isinstance(error, BaseExceptionGroup) else error
            while isinstance(cause, BaseExceptionGroup):
                cause = cause.exceptions[0]
            if isinstance(cause, MegarlError):
                raise cause from error
            return None if cause is None else self._ungraded(describe_error(cause).split("\n")[0])

    async def _call(self) -> Verdict | None:
        try:
            result = await self.function(self.prompt, self)
        except BaseException as error:
            if not isinstance(error, MegarlError | GeneratorExit):
                await self._cancel_leftovers()
            raise
        leftover_names = await self._cancel_leftovers()
        verdict = None if result is None else as_verdict(result, "it")
        if verdict is not None and not verdict.graded:
            verdict = replace(verdict, error=f"{self.key}: {verdict.error or 'no verdict'}")
        if leftover_names and not self.lenient:
            raise UnusableError(f"it returned before these tasks that it created had ended: {leftover_names}")
        return verdict

    def _ungraded(self, why: str) -> Verdict:
        return Verdict(False, error=f"{self.key}: {why}", graded=False)

    async def _cancel_leftovers(self) -> str:
        """Cancel and name tasks that the coroutine left running. Raises EngineError if one stays."""
        if all(task.done() for task in _tasks.get()):
            return ""
        await asyncio.sleep(0)
        tasks = {task for task in _tasks.get() if not task.done()}
        names, limit = ", ".join(sorted({_describe(task) for task in tasks})), self.limits.seconds
        for task in tasks:
            task.cancel()
        if tasks and (await asyncio.wait(tasks, timeout=limit))[1]:
            what = f"tasks that it left behind have not ended {limit:g} s after they were cancelled: {names}"
            raise EngineError(f"{self.key}: {what} (let CancelledError through)")
        for task in tasks:
            if not task.cancelled():
                task.exception()
        if names and self.lenient and names not in self.warned:
            self.warned.add(names)
            what = f"it returned before these tasks that it created had ended; they are cancelled: {names}"
            print(f"megarl: {self.key}: {what}", file=sys.stderr, flush=True)
        return names


def _create_task(loop: asyncio.AbstractEventLoop, job: Any, **options: Any) -> asyncio.Task[Any]:
    task = asyncio.Task(job, loop=loop, **options)
    if (episode_tasks := _tasks.get(None)) is not None:
        episode_tasks.add(task)
        task.add_done_callback(episode_tasks.discard)
    return task


def _describe(task: asyncio.Task[Any]) -> str:
    coroutine = task.get_coro()
    code = getattr(coroutine, "cr_code", None)
    name = getattr(coroutine, "__qualname__", type(coroutine).__name__)
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code else name


def _load_function(config: Config, tokenizer: Any, endpoint: Endpoint | None) -> EpisodeFunction:
    """Import the episode's function. Raises ConfigError if it or the template is unsuitable."""
    rollout, variables = config.rollout, config.data.chat_template_kwargs
    if rollout.environment:
        import_environment(rollout.environment, rollout.environment_arguments)
        if config.data.template != "chat":
            return play(None)
        check_template(tokenizer, stop=rollout.stop, variables=variables)
        return play(ChatTurns(tokenizer, variables=variables))
    if rollout.agent:
        assert endpoint is not None
        return endpoint.episode(_import_coroutine("rollout.agent", rollout.agent, "base_url, api_key, row"))
    if config.data.template == "chat":
        check_end_of_turn(tokenizer, rollout.stop, variables)
    if rollout.episode:
        function: EpisodeFunction = _import_coroutine("rollout.episode", rollout.episode, "prompt, policy")
        return function
    schemas_by_path = schemas(rollout.tools)
    check_template(tokenizer, [*schemas_by_path.values()], ("tool",), rollout.stop, variables)
    paths = {schema["function"]["name"]: path for path, schema in schemas_by_path.items()}
    return tool_calls(ChatTurns(tokenizer, [*schemas_by_path.values()], variables), paths)


def _import_coroutine(key: str, path: str, parameters: str) -> Any:
    function = import_object(key, path)
    if not inspect.iscoroutinefunction(function):
        what = f"is no coroutine function (write `async def {path.partition(':')[2]}({parameters})`)"
        raise ConfigError(f"{key}: {path} {what}")
    return function


def prompt_options(config: Config, tokenizer: Any) -> dict[str, Any]:
    """Return `tools` and `opening` for megarl.data.prompts.read_prompts. Raises ConfigError."""
    rollout, variables = config.rollout, config.data.chat_template_kwargs
    opening = opening_tokens(tokenizer, variables) if rollout.agent else ()
    return {"tools": list(schemas(rollout.tools).values()), "opening": opening}
