"""The judge of reward.judge against a real HTTP server: scores, failures, votes, cache, limits, budget."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import threading
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest

from megarl.config.errors import ConfigError
from megarl.config.schema import JudgeConfig
from megarl.rewards import judge as judge_module
from megarl.rewards.judge import Judge, Opinion, ScoreCache, check_judge, combine, parse_retry_after
from megarl.rewards.judge_text import Unscored, ends_in_thought, parse_score, render
from tests.judge_server import Reply, completion, get_code, right_if_reference, serve, split_quotes

QUESTION, REFERENCE = "What is 2 + 2?", "4"


def ask(judge: Judge, responses: Sequence[str], **options: Any) -> list[Opinion]:
    async def run() -> list[Opinion]:
        try:
            return await asyncio.gather(
                *(judge.score(QUESTION, REFERENCE, response, **options) for response in responses)
            )
        finally:
            await judge.close()

    return asyncio.run(run())


def scored(number: float) -> Callable[[dict[str, Any]], str]:
    return lambda body: f"Because.\nScore {get_code(body)}: {number}"


def test_scores_and_costs() -> None:
    with serve(right_if_reference) as endpoint:
        right, wrong = ask(Judge(endpoint.config(), seed=3), ["It is 4.", "It is 5."])
        assert ask(Judge(endpoint.config(), seed=3), ["It is 4."])[0].score == 1.0
    assert (right.score, right.error) == (1.0, None) and wrong.score == 0.2
    assert right.verdict(0.5).correct and not wrong.verdict(0.5).correct and wrong.verdict(0.2).correct
    assert right.costs.pop("seconds") > 0
    assert right.costs == {"calls": 1, "retries": 0, "prompt_tokens": 100, "completion_tokens": 10}
    first, _, again = sorted(endpoint.bodies, key=lambda body: "5." in split_quotes(body)[1]["response"])[
        ::-1
    ]
    outside, quotes = split_quotes(again)
    assert quotes == {"question": QUESTION, "reference": REFERENCE, "response": "It is 4."}
    assert "from 0 (worst) to 10 (best)" in outside and again["temperature"] == 0
    assert get_code(first) != get_code(again)
    # The same response is asked in the same words and with the same seed, also by another process.
    assert [body for body in endpoint.bodies if body == again] == [again, again]


def test_seed_of_the_run_and_vote() -> None:
    with serve(scored(5)) as endpoint:
        for seed in (0, 1):
            ask(Judge(endpoint.config(votes=2, temperature=0.7), seed), ["x"])
    assert len({body["seed"] for body in endpoint.bodies}) == 4


@pytest.mark.parametrize(
    ("answer", "reason", "error"),
    [
        ((401, {}, {"error": {"message": "bad key sk-secret"}}), "http", "the endpoint answers HTTP 401"),
        ((429, {}, {}), "rate_limit", "the endpoint answers HTTP 429"),
        ((307, {"Location": "http://127.0.0.1:9/"}, {}), "http", "the endpoint answers HTTP 307"),
        ((200, {}, b"not json"), "protocol", "an answer is no chat completion"),
        ((200, {}, {"choices": []}), "protocol", "an answer has no choice"),
        ((200, {}, completion("", refusal="I cannot")), "refusal", "the model refuses"),
        ((200, {}, completion("", "content_filter")), "refusal", "the model refuses"),
        (
            (200, {}, completion("Score: 1", "length")),
            "length",
            "a reply is cut off (reward.judge.max_completion_tokens)",
        ),
        ("It is good.", "parse", "the last line of a reply is no score line"),
        ("", "parse", "the last line of a reply is no score line"),
    ],
)
def test_failures_are_ungraded(answer: Reply, reason: str, error: str) -> None:
    with serve(lambda body: answer) as endpoint:
        [opinion] = ask(Judge(endpoint.config(), 0), ["4"])
    assert opinion.score is None and opinion.error == f"reward.judge: {error}"
    assert opinion.costs[f"ungraded_{reason}"] == 1
    verdict = opinion.verdict(0.0)
    assert not verdict.graded and not verdict.correct and verdict.error == opinion.error


@pytest.mark.parametrize("number", ["11", "-1", "10.01"])
def test_scores_outside_the_range_are_ungraded(number: str) -> None:
    with serve(lambda body: f"Score {get_code(body)}: {number}") as endpoint:
        [opinion] = ask(Judge(endpoint.config(), 0), ["4"])
    assert opinion.score is None and opinion.error == "reward.judge: a score is outside 0 to 10"


def test_no_server_and_a_slow_one() -> None:
    with serve(scored(1)) as endpoint:
        config = endpoint.config()
    [opinion] = ask(Judge(config, 0), ["4"])
    assert opinion.error is not None and opinion.costs["ungraded_connection"] == 1
    hang = threading.Event()
    with serve(lambda body: str(hang.wait(60))) as endpoint:
        [opinion] = ask(Judge(endpoint.config(timeout=0.2), 0), ["4"])
        hang.set()
    assert opinion.error == "reward.judge: no answer within 0.2 s (reward.judge.timeout)"
    assert opinion.costs["ungraded_timeout"] == 1


def test_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    sleep = asyncio.sleep

    async def note(seconds: float) -> None:
        waits.append(seconds)
        await sleep(0)

    answers = iter([(503, {}, {}), (429, {"Retry-After": "7"}, {}), (200, {}, b"cut")])
    with serve(lambda body: next(answers, scored(8)(body))) as endpoint:
        judge = Judge(endpoint.config(retries=4), 0)
        monkeypatch.setattr(judge_module.asyncio, "sleep", note)
        [opinion] = ask(judge, ["4"])
        assert opinion.error == "reward.judge: an answer is no chat completion"  # no other call would help
        assert opinion.costs["calls"] == 3 and opinion.costs["retries"] == 2
        [opinion] = ask(judge, ["4"])
    assert opinion.score == 0.8 and 0.25 <= waits[0] <= 0.5 and waits[1:] == [7.0]


def test_retries_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    async def no_wait(_: float) -> None:
        return None

    with serve(lambda body: (429, {"Retry-After": "3600"}, {})) as endpoint:
        ask(Judge(endpoint.config(retries=4), 0), ["4"])
        assert len(endpoint.bodies) == 1  # the server asks for more than LONGEST_WAIT
    monkeypatch.setattr(judge_module.asyncio, "sleep", no_wait)
    with serve(lambda body: (500, {}, {})) as endpoint:
        ask(Judge(endpoint.config(retries=3), 0), ["4"])
        assert len(endpoint.bodies) == 4


def test_retry_after() -> None:
    later = format_datetime(datetime.now(UTC) + timedelta(seconds=100), usegmt=True)
    assert 90 < (parse_retry_after(later) or 0) <= 100
    assert parse_retry_after("2.5") == 2.5 and parse_retry_after("-3") == 0
    assert [parse_retry_after(value) for value in (None, "soon", "nan", "inf")] == [None] * 4


def test_votes() -> None:
    numbers = itertools.cycle([0, 6, 9])
    with serve(lambda body: scored(next(numbers))(body)) as endpoint:
        votes = {"votes": 3, "temperature": 1.0}
        [mean] = ask(Judge(endpoint.config(**votes), 0), ["4"])
        [majority] = ask(Judge(endpoint.config(**votes, combine="majority"), 0), ["4"])
        assert len(endpoint.bodies) == 6 and mean.costs["calls"] == 3
    assert mean.score == pytest.approx(0.5) and majority.score == 1.0
    config = JudgeConfig(votes=4, temperature=1.0, combine="majority")
    assert combine(config, [0.5, 0.5, 0.4, 0.0]) == 0.0  # a tie is not a majority


def test_one_failed_vote_leaves_the_response_ungraded() -> None:
    answers = itertools.chain([scored(9), lambda body: "no score"], itertools.repeat(scored(9)))
    with serve(lambda body: next(answers)(body)) as endpoint:
        [opinion] = ask(Judge(endpoint.config(votes=3, temperature=1.0), 0), ["4"])
    assert opinion.score is None and opinion.costs["calls"] == 3


def test_equal_responses_cost_one_call() -> None:
    with serve(right_if_reference) as endpoint:
        judge = Judge(endpoint.config(), 0)
        opinions = ask(judge, ["It is 4."] * 8) + ask(judge, ["It is 4."])
        assert len(endpoint.bodies) == 1
    assert {opinion.score for opinion in opinions} == {1.0}
    assert sum(opinion.costs.get("cached", 0) for opinion in opinions) == 8


def test_failures_are_not_cached() -> None:
    answers = iter(["nothing"])
    with serve(lambda body: next(answers, scored(4)(body))) as endpoint:
        judge = Judge(endpoint.config(), 0)
        assert [ask(judge, ["x"])[0].score for _ in range(2)] == [None, 0.4]


def test_scores_survive_a_restart(tmp_path: Path) -> None:
    with serve(right_if_reference) as endpoint:
        for model, calls in (("judge", 2), ("judge", 2), ("other", 4)):
            judge = Judge(endpoint.config().model_copy(update={"model": model}), 0)
            judge.cache.open(tmp_path / "judge", 1)
            assert [opinion.score for opinion in ask(judge, ["4", "5"])] == [1.0, 0.2]
            assert len(endpoint.bodies) == calls
    [file] = (tmp_path / "judge").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600


def test_cache_file_is_bounded_and_survives_a_torn_line(tmp_path: Path) -> None:
    cache = ScoreCache(3)
    cache.open(tmp_path, 0)
    for number in range(8):
        cache.add(f"k{number}", number)
    assert [cache.get(f"k{number}") for number in range(8)] == [None] * 5 + [5, 6, 7]
    with (tmp_path / "rank-00000.jsonl").open("a") as file:
        file.write('\n["torn", 0.')
    other = ScoreCache(100)
    other.open(tmp_path, 0)
    other.add("next", 1.0)
    again = ScoreCache(100)
    again.open(tmp_path, 1)
    assert again.get("next") == 1.0 and again.get("torn") is None and again.get("k7") == 7
    assert sum(len(path.read_text().split("\n")) - 1 for path in tmp_path.iterdir()) <= 2 * 3 + 2


def test_concurrency_is_limited_and_needs_no_processes() -> None:
    gate = threading.Barrier(6)

    def together(body: dict[str, Any]) -> str:
        gate.wait(60)  # returns only if six calls run at the same time
        return scored(5)(body)

    with serve(together) as endpoint:
        opinions = ask(Judge(endpoint.config(concurrency=6), 0), [str(i) for i in range(18)])
    assert all(opinion.score == 0.5 for opinion in opinions) and endpoint.most == 6


def test_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(scored(5)) as endpoint:
        judge = Judge(endpoint.config(max_calls=5, concurrency=1), 0, engines=2)
        opinions = ask(judge, [str(i) for i in range(5)])
        assert [opinion.score for opinion in opinions] == [0.5] * 3 + [
            None
        ] * 2  # the first engine has the remainder
        assert opinions[-1].error == "reward.judge: the step's calls are used up (reward.judge.max_calls)"
        assert opinions[-1].costs["ungraded_budget"] == 1 and len(endpoint.bodies) == 3
        assert ask(judge, ["3"], has_budget=False)[0].score == 0.5
        judge.start_step()
        assert ask(judge, ["4"])[0].score == 0.5
        judge = Judge(endpoint.config(max_tokens=200, concurrency=1), 0)
        assert [opinion.score for opinion in ask(judge, ["a", "b", "c"])] == [0.5, 0.5, None]


def test_budget_counts_tokens_without_usage() -> None:
    def silent(body: dict[str, Any]) -> Reply:
        content = completion(scored(5)(body))
        del content["usage"]
        return 200, {}, content

    with serve(silent) as endpoint:
        [opinion] = ask(Judge(endpoint.config(), 0), ["4"])
        [body] = endpoint.bodies
    assert opinion.costs["prompt_tokens"] == math.ceil(len(body["messages"][0]["content"].encode()) / 4)


def test_json_replies() -> None:
    with serve(lambda body: '{"score": 7}') as endpoint:
        [opinion] = ask(Judge(endpoint.config(format="json"), 0), ["4"])
        [body] = endpoint.bodies
    assert opinion.score == 0.7
    schema = body["response_format"]["json_schema"]["schema"]
    assert schema["properties"]["score"] == {"type": "integer", "enum": [*range(11)]}
    config = JudgeConfig(format="json", highest=1.0)
    assert parse_score(config, '<think>{"score": 0}</think>{"score": 0.25}', "c") == 0.25
    for reply in (
        '{"score": true}',
        '{"score": "1"}',
        "[1]",
        "1",
        '{"score": 0, "score": 1}',
        'x {"score": 1}',
        "{}",
    ):
        with pytest.raises(Unscored, match="no JSON object"):
            parse_score(config, reply, "c")
    for number in ("NaN", "Infinity", "1" + "0" * 400, "-0.1"):
        with pytest.raises(Unscored, match="outside 0 to 1"):
            parse_score(config, f'{{"score": {number}}}', "c")


def test_own_pattern_and_template() -> None:
    config = JudgeConfig(template="Q: {question} {x} R: {response}", pattern=r"grade=(\d)", highest=5.0)
    message, code = render(config, "q{response}", "ref", "a{question}")
    assert f"Q: [begin question {code}]\nq{{response}}\n[end question {code}] {{x}} R: [begin" in message
    assert "a{question}" in message and "ref" not in message and "Score" not in message
    assert parse_score(config, "fine\ngrade=4\n", code) == 4


def test_reasoning_and_long_responses() -> None:
    config = JudgeConfig(max_response_chars=100)
    message, code = render(config, "q", "r", "<think>secret</think>" + "a" * 60 + "b" * 70)
    assert "secret" not in message
    assert f"{'a' * 50}\n[{code}: 30 characters are left out here]\n{'b' * 50}\n[end response" in message
    shown, _ = render(config.model_copy(update={"reasoning": True}), "q", "r", "<think>secret</think>x")
    assert "secret" in shown
    # A thought that has not ended is no answer: the lowest score, without a call.
    opinion = ask(Judge(JudgeConfig(url="http://127.0.0.1:1/v1", model="m"), 0), ["<think>4"])[0]
    assert (opinion.score, opinion.error, opinion.costs) == (0.0, None, {})


def test_key_goes_into_the_header_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MY_KEY", "sk-secret-value\n")
    echo = (401, {}, {"error": {"message": "Incorrect API key: sk-secret-value"}})
    with serve(lambda body: echo) as endpoint:
        config = endpoint.config(key_variable="MY_KEY")
        judge = Judge(config, 0)
        judge.cache.open(tmp_path, 0)
        [opinion] = ask(judge, ["4"])
        with pytest.raises(ConfigError) as refused:
            check_judge(config, [(QUESTION, REFERENCE, "4")])
    assert endpoint.headers[0]["Authorization"] == "Bearer sk-secret-value"
    texts = [str(opinion), str(refused.value), json.dumps(endpoint.bodies), config.model_dump_json()]
    texts += [path.read_text() for path in tmp_path.iterdir()]
    assert not any("sk-secret" in text for text in texts)
    assert "HTTP 401" in str(refused.value) and "\n" not in str(refused.value)
    monkeypatch.delenv("MY_KEY")
    with pytest.raises(ConfigError, match=r"^reward.judge.key_variable: .* MY_KEY is not set"):
        check_judge(config, [])


def test_harmful_answers_leave_the_response_ungraded() -> None:
    usage = [{"prompt_tokens": int("9" * 400)}, {"prompt_tokens": -5}]
    answers: list[Reply] = [
        (200, {}, b'{"x":' + b"[" * 5000 + b"]" * 5000 + b',"choices":[]}'),
        *((200, {}, completion("Score: 1") | {"usage": counts}) for counts in usage),
        (503, {"Retry-After": "Mon, 01 Jan 2024 00:00:00 +99999999999999999"}, {}),
    ]
    for answer, reason in zip(answers, ["protocol"] * 3 + ["http"], strict=True):
        with serve(lambda body, answer=answer: answer) as endpoint:
            [opinion] = ask(Judge(endpoint.config(), 0), ["4"])
        assert opinion.score is None and opinion.costs[f"ungraded_{reason}"] == 1


def test_engines_share_the_budget_exactly() -> None:
    config = JudgeConfig(url="http://127.0.0.1:1/v1", model="m", max_calls=10)
    assert sum(Judge(config, 0, 8, engine)._budget.calls for engine in range(8)) == 10


def test_a_node_without_the_key_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MY_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"^reward.judge.key_variable: .* MY_KEY is not set on "):
        Judge(JudgeConfig(url="http://127.0.0.1:1/v1", model="m", key_variable="MY_KEY"), 0)


def test_an_evaluation_does_not_share_a_budget_failure() -> None:
    async def run(judge: Judge) -> list[Opinion]:
        judge._budget.calls = 0
        try:
            training = judge.score(QUESTION, REFERENCE, "4")
            evaluation = judge.score(QUESTION, REFERENCE, "4", has_budget=False)
            return await asyncio.gather(training, evaluation)
        finally:
            await judge.close()

    with serve(scored(5)) as endpoint:
        opinions = asyncio.run(run(Judge(endpoint.config(max_calls=1), 0)))
    assert [opinion.score for opinion in opinions] == [None, 0.5]


@pytest.mark.parametrize("filler", ["\n", " "])
def test_long_replies_are_read_in_linear_time(filler: str) -> None:
    with pytest.raises(Unscored):
        parse_score(JudgeConfig(), f"Score c{filler * 200_000}x", "c")


def test_thought_that_the_template_opens() -> None:
    assert ends_in_thought("<|im_start|>assistant\n<think>\n")
    assert not ends_in_thought("assistant\n<think>\n\n</think>\n\n")


def test_a_retry_takes_the_budget_of_the_step_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Reply] = [(503, {}, {})]
    with serve(lambda body: answers.pop() if answers else scored(5)(body)) as endpoint:
        judge = Judge(endpoint.config(retries=1, max_calls=1), 0)

        async def next_step(_: float) -> None:
            judge.start_step()

        monkeypatch.setattr(judge_module.asyncio, "sleep", next_step)
        assert ask(judge, ["4"])[0].score == 0.5
