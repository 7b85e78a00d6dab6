"""Misbehaving episodes: their responses are ungraded and the rollout continues, or the run ends."""

from __future__ import annotations

import asyncio
import gc
import inspect
import io
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from megarl.agents.episode import Policy, make_row
from megarl.agents.tools import ToolPool
from megarl.config.errors import ConfigError, EngineError
from megarl.config.schema import Config, DataConfig, RolloutConfig, TurnsConfig
from megarl.data.prompts import Prompt
from megarl.data.sample import TokenData
from megarl.rewards.verdict import Verdict
from megarl.rollout.engines.transformers_engine import TransformersEngine
from megarl.rollout.episode import EpisodeAborted, load_runner
from megarl.rollout.rank import RolloutRank
from megarl.rollout.sampling import SamplingParams
from tests.agents.talk import ScriptedPolicy, encode, merging_tokenizer, prompt_of
from tests.engines import load_folder
from tests.rollout.conftest import TINIEST, threads
from tests.rollout.test_streaming import OutOfOrder
from tests.tiny_models import make_tiny_model


async def cancels_itself(prompt: Prompt, policy: Policy) -> None:
    await policy.generate()
    raise asyncio.CancelledError


async def returns_a_list(prompt: Prompt, policy: Policy) -> Any:
    await policy.generate()
    return [1]


async def says_what_no_message_holds(prompt: Prompt, policy: Policy) -> Any:
    """Return a number as the answer, or half of a surrogate pair, which JSON can spell."""
    await policy.generate()
    return Verdict(False, "\ud83d" * 2000, "\udfff") if prompt.uid else (True, 42)


async def raises(prompt: Prompt, policy: Policy) -> None:
    await policy.generate(max_tokens=2)
    raise KeyError("row")


async def says_nothing(prompt: Prompt, policy: Policy) -> bool:
    return True


async def shows_too_much(prompt: Prompt, policy: Policy) -> None:
    policy.observe([5] * 30)
    await policy.generate()


async def raises_in_a_group(prompt: Prompt, policy: Policy) -> None:
    await policy.generate(max_tokens=2)
    async with asyncio.TaskGroup() as group:
        group.create_task(raises(prompt, policy))


async def without_room_in_a_group(prompt: Prompt, policy: Policy) -> None:
    """Run out of tokens: the response is truncated, and the verifier grades it."""
    await policy.generate(max_tokens=2)
    policy.observe([5] * 30)
    async with asyncio.TaskGroup() as group:
        group.create_task(policy.generate())


class Stop(BaseException):
    """An exception that `except Exception` does not catch."""


async def exits(prompt: Prompt, policy: Policy) -> None:
    await policy.generate(max_tokens=2)
    sys.exit("bye")


async def raises_what_is_no_exception(prompt: Prompt, policy: Policy) -> None:
    await policy.generate(max_tokens=2)
    raise Stop("here")


CANCELLED: list[str] = []


async def poll(policy: Policy) -> None:
    try:
        await asyncio.sleep(600)
    except asyncio.CancelledError:
        CANCELLED.append("poll")
        raise


async def ends_at_once() -> None:
    pass


async def leaves_tasks_behind(prompt: Prompt, policy: Policy) -> bool:
    """Leave tasks: one created another task, one requests a turn after the end of the episode."""

    async def another() -> None:
        asyncio.create_task(poll(policy))  # noqa: RUF006
        await asyncio.sleep(600)

    tasks = [asyncio.create_task(another())]
    await policy.generate(max_tokens=2)
    tasks += [asyncio.create_task(policy.generate()), asyncio.create_task(ends_at_once())]
    return bool(tasks)


async def stays(*_: Any) -> None:
    while True:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            continue


async def leaves_one_that_stays(prompt: Prompt, policy: Policy) -> bool:
    task = asyncio.create_task(stays())
    await policy.generate()
    return not task.done()


async def stays_while_another_fails(prompt: Prompt, policy: Policy) -> None:
    await policy.generate(max_tokens=2)
    if prompt.uid == 0:
        policy.reward(float("nan"))
    await stays()


async def stays_in_a_call(prompt: Prompt, policy: Policy) -> float:
    """Hang in a tool call, except for the first two prompts, which are enough for the step."""
    await policy.generate()
    if prompt.uid >= 2:
        await policy.call(stays)
    return float(policy.seed % 1_000_003)


WAIT: list[int] = []
TOGETHER: list[asyncio.Barrier] = []


async def waits_for_something_else(prompt: Prompt, policy: Policy) -> float:
    """Wait for an unknown event, except for the first two prompts, which are enough for the step.

    Those two end once the others wait."""
    await policy.generate()
    if prompt.uid >= 2:
        WAIT.append(policy.seed)
        await asyncio.sleep(600)
    while len(WAIT) < 4:
        await asyncio.sleep(0.01)
    return float(policy.seed % 1_000_003)


async def is_graded_late(prompt: Prompt, policy: Policy) -> float:
    """End the first two prompts together, and the others once verification has started, which takes long."""
    await policy.generate()
    if prompt.uid < 2:
        await TOGETHER[0].wait()
    while prompt.uid >= 2 and not WAIT:
        await asyncio.sleep(0.01)
    return float(policy.seed % 1_000_003)


async def generates_twice_at_once(prompt: Prompt, policy: Policy) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(policy.generate())
        group.create_task(policy.generate())


async def exits_in_a_task(prompt: Prompt, policy: Policy) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(exits(prompt, policy))


async def observes_while_it_generates(prompt: Prompt, policy: Policy) -> None:
    turn = asyncio.ensure_future(policy.generate())
    await asyncio.sleep(0)
    try:
        policy.observe([5])
    finally:
        await turn


async def takes_a_turn_back(prompt: Prompt, policy: Policy) -> bool:
    turn = asyncio.ensure_future(policy.generate())
    await asyncio.sleep(0)
    turn.cancel()
    await asyncio.wait([turn])
    policy.observe([9])
    await policy.generate(max_tokens=3)
    return turn.cancelled()


async def one_turn_behind_nine(prompt: Prompt, policy: Policy) -> bool:
    policy.observe([9])
    await policy.generate(max_tokens=3)
    return True


async def asks_from_a_thread(prompt: Prompt, policy: Policy) -> bool:
    """Block a thread until the engine answers, like a client without coroutines."""
    loop = asyncio.get_running_loop()

    def ask() -> bool:
        return bool(asyncio.run_coroutine_threadsafe(policy.generate(), loop).result(10))

    return await asyncio.to_thread(ask)


def hold(what: str) -> None:
    """Block the event loop until stderr contains `what`."""
    end = time.monotonic() + 60
    while what not in getattr(sys.stderr, "getvalue", str)():
        assert time.monotonic() < end, f"nobody has said {what!r} within 60 s"
        time.sleep(0.01)


async def holds_the_loop(prompt: Prompt, policy: Policy) -> bool:
    await policy.generate()
    hold("has blocked the event loop")
    return True


async def yields(prompt: Prompt, policy: Policy) -> AsyncIterator[bool]:
    yield True


def is_plain(prompt: Prompt, policy: Policy) -> bool:
    return True


BROKEN = """
class Broken:
    def reset(self, row, seed):
        return "?" if row["uid"] else row["question"]

    def step(self, text):
        raise ConnectionError("closed")

    def verdict(self):
        return True


class Ungraded(Broken):
    def step(self, text):
        return "", 0.0, True

    def verdict(self):
        raise ConnectionError("closed")
"""

# All groups are accepted, and twice the needed number is started.
DYNAMIC = {"enabled": True, "by": "score", "max_batches": 4, "oversample": 2.0}


class Right:
    def verify(self, items: list[Any]) -> list[Verdict]:
        return [Verdict(True) for _ in items]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), "qwen3", **TINIEST)


def drawn(
    folder: Path,
    episode: str,
    engine_class: type[TransformersEngine] = TransformersEngine,
    turns: dict[str, Any] | None = None,
    **sections: Any,
) -> list[Any]:
    """Return the responses of a step; all of them may be ungraded."""
    rollout = {"prompts": 2, "group_size": 2, "max_response_tokens": 8, "turns": turns or {}}
    if engine_class is OutOfOrder:
        rollout["engine"] = "sglang"  # OutOfOrder stands for its continuous batching
    settings: dict[str, Any] = {"reward": {"max_ungraded": 1.0}, **sections}
    settings["rollout"] = rollout | {"episode": f"{__name__}:{episode}"} | sections.get("rollout", {})
    config = Config(recipe="grpo", run_dir="runs/x", steps=1, model={"path": folder}, **settings)
    engine = engine_class(folder)
    engine.start()
    load_folder(engine, version=1)
    prompts = iter([Prompt(i, "", (5, 6 + i), "") for i in range(9)])
    rank = RolloutRank(
        config,
        threads(1)[0],
        engine,
        Right(),  # type: ignore[arg-type]
        AutoTokenizer.from_pretrained(folder),
        take_prompts=lambda n: [next(prompts) for _ in range(n)],
    )
    try:
        responses = rank.collect(1).samples
        assert not engine.running
        return responses
    finally:
        rank.close()


@pytest.mark.parametrize(
    ("episode", "error", "length"),
    [
        ("cancels_itself", "cancelled by itself", 8),
        ("returns_a_list", "it returned list", 8),
        ("raises", "KeyError: 'row'", 2),
        ("says_nothing", "before the policy wrote anything", 1),
        ("shows_too_much", "before the policy wrote anything", 1),
        ("raises_in_a_group", "KeyError: 'row'", 4),
        ("exits", "SystemExit: bye", 2),
        ("raises_what_is_no_exception", "Stop: here", 2),
    ],
)
def test_nobody_has_graded(folder: Path, episode: str, error: str, length: int) -> None:
    for response in drawn(folder, episode):
        assert not response.graded and not response.correct
        assert response.error.startswith("rollout.episode: ") and error in response.error
        assert response.num_sampled == response.num_tokens == length


@pytest.mark.parametrize(("name", "where"), [("Broken", "ToolUnavailable: step: "), ("Ungraded", "")])
def test_errors_begin_with_the_key_that_was_set(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, where: str
) -> None:
    (tmp_path / "broken_environment.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(tmp_path)
    rollout = {"episode": None, "environment": f"broken_environment:{name}"}
    settings: dict[str, Any] = {"turns": {"max_tokens": 20}, "rollout": rollout, "data": {"template": "raw"}}
    error = f"rollout.environment: {where}broken_environment:{name}: ConnectionError: closed"
    for response in drawn(folder, "", **settings):
        assert (response.graded, response.error) == (False, error)
    with pytest.raises(EngineError, match=r"^rollout\.environment: it shows something before the policy's"):
        drawn(folder, "", **settings, update={"share_prompts": True})


def test_what_ran_out_of_room_in_a_group_is_truncated(folder: Path) -> None:
    for response in drawn(folder, "without_room_in_a_group"):
        assert response.graded and response.correct and response.is_truncated and response.num_sampled == 2


def test_the_run_ends_where_too_many_are_not_graded(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"reward.max_ungraded: 4 of 4 .*KeyError: 'row'"):
        drawn(folder, "raises", reward={"max_ungraded": 0.5})


@pytest.mark.parametrize("graded", [False, True])
def test_terms_that_fail_count_where_an_episode_judges_itself(
    folder: Path, monkeypatch: pytest.MonkeyPatch, graded: bool
) -> None:
    """The response is ungraded, or wrong if it caused the failure itself, as with a verifier."""
    failed = Verdict(False, error="reward.terms.brevity: what happened", graded=graded)
    monkeypatch.setattr(Right, "verify", lambda _, items: [failed for _ in items])
    terms = {"brevity": {"function": "m:f", "weight": 1.0}}
    reward = {"max_ungraded": 1.0, "terms": terms, "incorrect": -1.0}
    for response in drawn(folder, "asks_from_a_thread", reward=reward):
        assert (response.error, response.graded, response.correct) == (failed.error, graded, False)
        assert response.reward == -1.0 and response.terms == {}
    for response in drawn(folder, "asks_from_a_thread"):
        assert response.error is None and response.graded and response.correct


def test_what_an_episode_says_is_text(folder: Path) -> None:
    found = {(r.correct, r.extracted, r.error) for r in drawn(folder, "says_what_no_message_holds")}
    assert found == {(True, "42", None), (False, "?" * 1000, "?")}


def test_tasks_that_are_left_behind_are_named_and_cancelled(folder: Path) -> None:
    CANCELLED.clear()
    for response in drawn(folder, "leaves_tasks_behind"):
        assert not response.graded and response.num_sampled == 2
        said, names = response.error.split(" had ended: ")
        assert said == "rollout.episode: UnusableError: it returned before these tasks that it created"
        for name in ("leaves_tasks_behind.<locals>.another (", "Policy.generate (", f"poll ({__file__}:"):
            assert name in names and "ends_at_once" not in names
    assert CANCELLED == ["poll"] * 4


@pytest.mark.parametrize(
    ("episode", "error", "options"),
    [
        ("leaves_one_that_stays", r"tasks that it left behind have not ended .*: stays \(", {}),
        ("stays_while_another_fails", "the reward of turn 0 is nan", {}),
        (
            "stays_in_a_call",
            r"4 episodes have not ended 0.1 s after they were aborted: response . to prompt 2, .* in stays,",
            {"engine_class": OutOfOrder, "rollout": {"dynamic_sampling": DYNAMIC}},
        ),
        ("exits_in_a_task", r"one of its tasks has called sys.exit\(bye\)", {}),
        ("generates_twice_at_once", "generate was called while a turn was being written", {}),
        ("observes_while_it_generates", "observe was called while a turn was being written", {}),
    ],
)
def test_the_run_ends_and_does_not_hang(
    folder: Path, episode: str, error: str, options: dict[str, Any]
) -> None:
    with pytest.raises(EngineError, match=f"rollout.episode: {error}"):
        drawn(folder, episode, turns={"seconds": 0.1, "max_tokens": 20}, **options)


def test_what_waits_for_something_of_its_own_is_ended_with_the_rollout(folder: Path) -> None:
    WAIT.clear()
    rollout = {"dynamic_sampling": DYNAMIC}
    turns = {"seconds": 10.0}
    assert len(drawn(folder, "waits_for_something_else", OutOfOrder, turns, rollout=rollout)) == 4


@pytest.mark.parametrize("goes_on", [False, True])
def test_environments_are_forgotten_with_their_episodes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, goes_on: bool
) -> None:
    """Episodes that continue in a later rollout keep their environment."""
    gc.collect()  # remove the episodes of earlier tests
    WAIT.clear()
    forgotten: list[int] = []
    monkeypatch.setattr(ToolPool, "forget", lambda _, key: forgotten.append(key))
    rollout = {"dynamic_sampling": DYNAMIC, "continue_partial": goes_on}
    drawn(folder, "waits_for_something_else", OutOfOrder, rollout=rollout)
    assert len(forgotten) == len(set(forgotten)) == (4 if goes_on else 8)
    assert set(WAIT).isdisjoint(forgotten) == goes_on


def test_who_waits_for_verdicts_at_an_abort_is_not_silent(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def verify(_: Any, items: list[Any]) -> list[Verdict]:
        WAIT.append(0)
        time.sleep(0.3 if len(WAIT) == 1 else 7.0)
        return []

    WAIT.clear()
    TOGETHER[:] = [asyncio.Barrier(4)]
    monkeypatch.setattr(Right, "verify", verify)
    monkeypatch.setattr("megarl.rollout.messages.KEEP_ALIVE_SECONDS", 0.5)
    rollout = {"dynamic_sampling": DYNAMIC}
    assert len(drawn(folder, "is_graded_late", OutOfOrder, rollout=rollout, parallel={"timeout": 6.0})) == 4
    assert len(WAIT) > 1


def test_a_turn_that_was_taken_back_was_never_written(folder: Path) -> None:
    taken = drawn(folder, "takes_a_turn_back", turns={"max_tokens": 20})
    for one, other in zip(
        taken, drawn(folder, "one_turn_behind_nine", turns={"max_tokens": 20}), strict=True
    ):
        assert one.graded and one.correct and one.num_sampled == 3
        assert one.data.tokens.tolist() == other.data.tokens.tolist()
        assert one.data.logprobs.tolist() == other.data.logprobs.tolist()


def test_threads_that_wait_for_the_engine_do_not_keep_it_from_answering(folder: Path) -> None:
    """34 threads wait, more than a loop has for `asyncio.to_thread`."""
    responses = drawn(folder, "asks_from_a_thread", OutOfOrder, rollout={"group_size": 17})
    assert len(responses) == 34 and all(response.correct for response in responses)


def test_who_holds_the_loop_is_named_once_and_the_rollout_goes_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = io.StringIO()
    monkeypatch.setattr(sys, "stderr", said)
    responses = drawn(folder, "holds_the_loop", turns={"hold": 0.2})
    assert len(responses) == 4 and all(response.correct for response in responses)
    line = inspect.getsourcelines(hold)[1]
    places = [f"rollout.episode: hold ({__file__}:{line + i}) has blocked the event loop" for i in range(6)]
    (text,) = said.getvalue().splitlines()
    assert any(place in text for place in places) and "of engine rank 0 for" in text


@pytest.mark.parametrize("episode", ["is_plain", "yields"])
def test_an_episode_is_a_coroutine(episode: str) -> None:
    rollout = RolloutConfig(episode=f"{__name__}:{episode}")
    with pytest.raises(ConfigError, match=rf"rollout\.episode: \S+:{episode} is no coroutine function"):
        config: Any = SimpleNamespace(rollout=rollout, data=DataConfig(template="raw"))
        load_runner(config, None)


@pytest.mark.parametrize("within", ["a task", "the loop"])
def test_ctrl_c_leaves_nothing_that_speaks_later(
    folder: Path, within: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A rollout ends its tasks before its connections close."""
    said: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", said.append)

    class Interrupted(OutOfOrder):
        def poll(self, seconds: float) -> list[tuple[int, TokenData]]:
            if within == "the loop":
                asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGINT)
                return []
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        # The test's engine decodes inside the event loop, which may take seconds on a busy machine.
        drawn(folder, "waits_for_something_else", Interrupted, turns={"hold": 600.0})
    gc.collect()
    assert not said and capfd.readouterr().err == ""


def test_a_tools_own_timeout_is_not_the_limit() -> None:
    async def refuses() -> None:
        raise TimeoutError("no table is free")

    async def errors() -> list[str]:
        policy = ScriptedPolicy(prompt_of([5]), merging_tokenizer(), [])
        policy.limits = TurnsConfig(seconds=0.05)
        calls = policy.call(refuses), policy.call(asyncio.Event().wait)
        return list(map(str, await asyncio.gather(*calls, return_exceptions=True)))

    assert asyncio.run(errors()) == ["TimeoutError: no table is free", "timeout after 0.05 s"]


def test_a_tools_limit_counts_no_time_in_which_the_loop_is_blocked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight transfer blocks the loop. The tool's answer comes in that time."""
    monkeypatch.setattr("megarl.agents.episode.TICK", 0.01)

    async def look_up() -> str:
        loop, has_answer = asyncio.get_running_loop(), asyncio.Event()
        loop.call_soon(time.sleep, 0.3)
        loop.call_later(0.05, has_answer.set)
        await has_answer.wait()
        return "12"

    async def call() -> str:
        policy = ScriptedPolicy(prompt_of([5]), merging_tokenizer(), [])
        policy.limits = TurnsConfig(seconds=0.2)
        return await policy.call(look_up)

    assert asyncio.run(call()) == "12"


def test_what_is_aborted_while_it_is_run_again_loses_nothing() -> None:
    """The first run had two turns; the second is aborted after one or both of them."""
    script, prompt = ["one", "two"], prompt_of([5])
    first = ScriptedPolicy(prompt, merging_tokenizer(), script)

    async def act(policy: Policy, turns: int) -> TokenData:
        for _ in range(turns):
            await policy.generate()
        policy.aborted = True
        with pytest.raises(EpisodeAborted):
            await policy.generate()
        return policy.result(ended=False)

    written = asyncio.run(act(first, 2))
    again = [ScriptedPolicy(prompt, first.tokenizer, script, earlier=written) for _ in range(2)]
    assert [asyncio.run(act(policy, turns)) for policy, turns in zip(again, (1, 2), strict=True)] == [
        written
    ] * 2
    assert len(written.journal) == 2 and not any(policy.said for policy in again)


def test_a_first_turn_goes_on_behind_what_was_shown_before_it() -> None:
    """It continues up to its token limit, which excludes the observed tokens."""

    class Client:
        async def generate(
            self, tokens: Any, seed: int, params: SamplingParams, prefix: Any, max_tokens: int
        ) -> TokenData:
            made = [*(prefix.tokens if prefix else ()), 20, 21, 22]
            finish: Any = "length" if len(made) == max_tokens else "abort"
            return TokenData(made, [-1.0] * len(made), finish, [3] * len(made))

    def policy_of(begun: TokenData | None) -> Policy:
        client: Any = Client()
        limits = TurnsConfig(max_tokens=20)
        policy = Policy(prompt_of([5, 6]), client, 5, SamplingParams(6), begun, limits=limits)
        policy.observe([7, 8, 9, 10])
        return policy

    first = policy_of(None)
    with pytest.raises(EpisodeAborted):
        asyncio.run(first.generate())
    again = policy_of(first.result(ended=False))
    turn = asyncio.run(again.generate())
    assert (turn.tokens, turn.finish) == ((20, 21, 22) * 2, "length")
    written = again.result()
    assert (written.tokens.tolist(), written.finish_reason) == ([7, 8, 9, 10, *turn.tokens], "length")
    assert written.is_sampled.tolist() == [False] * 4 + [True] * 6


@pytest.mark.parametrize("lenient", [False, True])
@pytest.mark.parametrize("shown", [[7, 8], [7, 8, 9, 20], [7, 9, 9]])
def test_an_earlier_turn_is_not_replayed_after_another_observation(shown: list[int], lenient: bool) -> None:
    """An observation with the same first tokens but another length is a different one."""

    class Client:
        async def generate(self, *_: Any, **__: Any) -> TokenData:
            return TokenData([20, 21], [-1.0] * 2, "stop", [3] * 2)

    async def act(policy: Policy, observed: list[int]) -> TokenData:
        policy.lenient = lenient
        for tokens in ([], observed):
            policy.observe(tokens)
            await policy.generate()
        return policy.result(ended=False)

    client: Any = Client()
    earlier = asyncio.run(act(Policy(prompt_of([5, 6]), client, 5, SamplingParams(20)), [7, 8, 9]))
    again = Policy(prompt_of([5, 6]), client, 5, SamplingParams(20), earlier)
    if not lenient:
        with pytest.raises(EngineError, match="shows the policy something else"):
            asyncio.run(act(again, shown))
        return
    written = asyncio.run(act(again, shown))
    assert written.tokens.tolist() == [20, 21, *shown, 20, 21]
    assert written.is_sampled.tolist() == [True] * 2 + [False] * len(shown) + [True] * 2


@pytest.mark.parametrize("aborted_again", [False, True])
def test_a_stop_text_is_found_wherever_an_abort_has_split_it(aborted_again: bool) -> None:
    """Like SGLang, the stub engine searches for stop texts only in the tokens that it generates itself."""
    tokenizer = merging_tokenizer()
    whole = encode(tokenizer, "a b STOP and on and on")
    end = len(encode(tokenizer, "a b STOP"))
    params = SamplingParams(100, stop=("STOP", "never seen"))

    class Client:
        async def generate(
            self, tokens: Any, seed: int, params: SamplingParams, prefix: Any, max_tokens: int
        ) -> TokenData:
            first, last = len(prefix.tokens), len(whole)
            for stop in range(first + 1, len(whole)):
                if "STOP" in tokenizer.decode(whole[first:stop]):
                    last = stop
                    break
            routing = np.zeros((len(tokens) + last, 1, 1), dtype=np.uint8)
            finish: Any = "abort" if aborted_again else "stop"
            logprobs = [-float(i) for i in range(last)]
            versions, sets = [3] * first + [4] * (last - first), np.array(whole, np.int32)[:last, None]
            return TokenData(whole[:last], logprobs, finish, versions, routing, sampling_sets=sets)

    for split in range(1, end):
        begun = TokenData(whole[:split], [-float(i) for i in range(split)], "abort", [3] * split)
        begun.sampling_sets = np.array(whole, np.int32)[:split, None]
        client: Any = Client()
        policy = Policy(prompt_of([5, 6]), client, 5, params, begun, tokenizer, aborted=False)
        turn = asyncio.run(policy.generate())
        assert (list(turn.tokens), turn.finish) == (whole[:end], "stop"), split
        written = policy.result()
        assert (
            written.logprobs.tolist() == [-float(i) for i in range(end)] and written.finish_reason == "stop"
        )
        assert written.policy_versions.tolist() == [3] * split + [4] * (end - split)
        assert written.routed_experts is not None and len(written.routed_experts) == 2 + end
        assert written.sampling_sets is not None and written.sampling_sets.tolist() == [
            [token] for token in whole[:end]
        ]


def test_a_rows_own_columns_hide_nothing() -> None:
    """`extra_info` of GSM8K as made by verl has the question without its instruction, and the solution."""
    extra = {"answer": "6 - 2 = 4\n#### 4", "question": "How many?", "index": 3}
    row = make_row(Prompt(7, "text", (1,), "4", "gsm8k", extra, "How many? Think.", ""))
    assert row == {"uid": 7, "prompt": "text", "question": "How many? Think.", "answer": "4", "index": 3,
                   "data_source": "gsm8k", "entry": ""}  # fmt: skip


def test_who_waits_is_not_seated() -> None:
    """An episode is out of the engine while any of its two calls runs, except during a generation."""
    seen: list[tuple[str, bool]] = []
    opened = asyncio.Event()

    class Client:
        engine = None

        async def generate(self, *_: Any, **__: Any) -> TokenData:
            seen.append((policy.waiting, policy.in_engine))
            return TokenData([5], [0.0], "stop", [1])

    async def first() -> str:
        while policy.calls < 2:
            await asyncio.sleep(0)
        return "1"

    async def second() -> str:
        await opened.wait()
        return "2"

    async def act() -> None:
        calls = asyncio.gather(policy.call(first), policy.call(second))
        while policy.calls < 2 or len(policy.written.journal[0]) < 5:
            await asyncio.sleep(0)
        seen.append((policy.waiting, policy.in_engine))
        await policy.generate()
        opened.set()
        await calls
        seen.append((policy.waiting, policy.in_engine))

    told: list[bool] = []
    client: Any = Client()
    policy = Policy(Prompt(1, "", (3,), ""), client, 0, SamplingParams(9))
    policy.notify = lambda: told.append(policy.in_engine)
    asyncio.run(asyncio.wait_for(act(), 60))
    assert seen == [("second", False), ("second", True), ("", True)]
    assert told == [False, False, False, True, False, True]
