"""Non-finite numbers end a step, and several such steps the run; thresholds log one line each."""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megarl.config.errors import ConfigError, NumericalError
from megarl.config.schema import GuardConfig, RolloutConfig
from megarl.data.prompts import Prompt
from megarl.data.sample import Sample, SampleGroup
from megarl.observe.runs import read_metrics
from megarl.rollout.metrics import length_error, response_stats
from megarl.schedule.guards import Guards
from tests.chaos.harness import make_config, prepare
from tests.ranks import RankPool
from tests.schedule.jobs import train_with_bad_losses, train_without_room


def test_the_run_stops_after_so_many_in_a_row() -> None:
    guards = Guards(GuardConfig(skipped_steps=2))
    for number in (1, 2):
        assert f"({number} of at most 2 in a row)" in guards.count_failure(NumericalError("loss is nan"))
    guards.count_success({}, 1)
    assert "(1 of at most 2 in a row)" in guards.count_failure(NumericalError("loss is nan"))
    resumed = Guards(GuardConfig(skipped_steps=2))
    resumed.load_state_dict(guards.state_dict())
    resumed.count_failure(NumericalError("loss is nan"))
    with pytest.raises(NumericalError, match=r"^loss is nan$"):
        resumed.count_failure(NumericalError("loss is nan"))


def test_a_bad_weight_stops_at_once() -> None:
    error = NumericalError("weights")
    error.fatal = True
    with pytest.raises(NumericalError):
        Guards(GuardConfig()).count_failure(error)


def test_the_run_stops_after_so_many_steps_without_a_verdict() -> None:
    """Only steps in a row count, also across a resumption. One graded response resets the count.

    A step of recipe sft has no responses and does not count.
    """
    guards = Guards(GuardConfig(unverified_steps=2))
    errors = {"ValueError: odd": 2, "TypeError: getcwd() takes no arguments": 6}
    (line,) = guards.count_ungraded({"reward/unverified": 1.0}, errors)
    assert (
        line == "every response has an error; the most frequent: TypeError: getcwd() takes no arguments "
        "(1 of at most 2 steps in a row)"
    )
    assert guards.count_ungraded({"reward/unverified": 7 / 8, "reward/ungraded": 0.0}, errors) == []
    (line,) = guards.count_ungraded({"reward/unverified": 7 / 8, "reward/ungraded": 0.125}, errors)
    assert line.startswith(
        "12.5% of the responses could not be graded and are left out; the most frequent failure: "
    )
    assert (
        len(guards.count_ungraded({"reward/unverified": 1.0}, {})) == 1
        and guards.count_ungraded({}, {}) == []
    )
    guards.check_graded()
    resumed = Guards(GuardConfig(unverified_steps=2))
    resumed.load_state_dict(guards.state_dict())
    (line,) = resumed.count_ungraded({"reward/unverified": 1.0}, errors)
    with pytest.raises(
        ConfigError, match=r"^guard\.unverified_steps: every response of 2 steps in a row had an error"
    ):
        resumed.check_graded()
    # a checkpoint from before this count existed
    resumed.load_state_dict({"skipped": 0, "length": None})
    resumed.check_graded()


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ({"policy/entropy": 0.04}, "policy/entropy 0.04 is below guard.entropy_low 0.05"),
        ({"response/length_mean": 31.0}, "response/length_mean 31 is more than guard.length_growth 1.5 x 20"),
        (
            {"policy/clip_fraction_high": 0.31},
            "policy/clip_fraction_high 0.31 is above guard.clip_fraction 0.3",
        ),
        ({"policy/clip_fraction_low": 0.31}, "policy/clip_fraction_low 0.31 is above"),
    ],
)
def test_alarms(metrics: dict[str, float], words: str) -> None:
    guards = Guards(GuardConfig(entropy_low=0.05, length_growth=1.5, clip_fraction=0.3))
    calm = {
        "policy/entropy": 0.06,
        "response/length_mean": 20.0,
        "policy/clip_fraction_high": 0.29,
        "policy/clip_fraction_low": 0.29,
    }
    assert guards.count_success(calm, 1) == []
    (line,) = guards.count_success({**calm, **metrics}, 2)
    assert line.startswith(f"alarm: {words}")
    assert (
        Guards(GuardConfig(entropy_low=None, length_growth=None, clip_fraction=None)).count_success(
            {**calm, **metrics}, 1
        )
        == []
    )


@pytest.mark.parametrize(
    ("key", "limit", "share", "course", "alarms"),
    [
        # An early rise is the new maximum; a slow fall is found like a steep one.
        ("policy/entropy", "entropy_collapse", 0.1, [0.2, 0.5, 0.3, 0.1, 0.051, 0.049, 0.03], [5]),
        # One alarm, and another after a recovery.
        ("response/length_mean", "length_collapse", 0.5, [90.0, 100.0, 49.9, 40.0, 50.0, 45.0], [2, 5]),
        ("response/length_mean", "length_collapse", 0.5, [100.0, 60.0, 50.0, 55.0], []),
    ],
)
def test_collapse(key: str, limit: str, share: float, course: list[float], alarms: list[int]) -> None:
    """This holds for the default limit, also with a resumption after any step."""
    found = []
    guards = Guards(GuardConfig())
    for step, value in enumerate(course):
        lines = guards.count_success({key: value}, step + 1)
        found += [step] if lines else []
        for line in lines:
            assert line.startswith(f"alarm: {key} {value:.4g} has fallen below guard.{limit} {share} x ")
        resumed = Guards(GuardConfig())
        resumed.load_state_dict(json.loads(json.dumps(guards.state_dict())))
        guards = resumed
        guards.count_success({"value/loss": 1.0}, step + 1)  # a step without the metric changes nothing
    assert found == alarms
    off = Guards(GuardConfig(**{limit: None}))
    assert [off.count_success({key: value}, 1) for value in course] == [[]] * len(course)


def test_windows_of_responses_are_no_change_of_length() -> None:
    """With partial rollout windows, short responses finish first; that raises no alarm.

    The policy is constant. Responses span up to three windows of 16 tokens, after complete ones in value
    pretraining.
    """
    guards = Guards(GuardConfig(), RolloutConfig(max_response_tokens=48, window=16).windows)
    whole = [guards.count_success({"response/length_mean": 30.0}, number) for number in (1, 2, 3)]
    ended = enumerate([7.0, 22.0, 40.0, 31.0], 1)
    assert whole + [guards.count_success({"response/length_mean": mean}, n) for n, mean in ended] == [[]] * 7
    (line,) = guards.count_success({"response/length_mean": 67.0}, 5)
    assert "guard.length_growth 2 x 33" in line


def drawn(rng: random.Random, scale: float, prompts: int, size: int, between: float) -> dict[str, float]:
    """Return metrics of `size` responses for each of `prompts` prompts, with lengths of about `scale`."""
    groups = []
    for uid in range(prompts):
        of_prompt = scale * rng.lognormvariate(0, between)
        lengths = [max(1, round(of_prompt * rng.lognormvariate(0, 0.6))) for _ in range(size)]
        responses = [
            Sample(0, length, "stop", True, None, None, reward=1.0, overlong_penalty=0.0)
            for length in lengths
        ]
        groups.append(SampleGroup(Prompt(uid, str(uid), (1,), ""), responses, 0))
    every = [response for group in groups for response in group.samples]
    return response_stats(every) | length_error(groups)


@pytest.mark.parametrize(
    ("prompts", "size", "between"), [(8, 4, 0.6), (8, 4, 1.0), (32, 1, 0.6), (16, 16, 1.0)]
)
def test_noise_of_few_responses_is_no_alarm_and_a_change_is_one(
    prompts: int, size: int, between: float
) -> None:
    """A constant policy over 1,000 steps: a limit without standard errors is crossed tens of times.

    Responses of four times or a sixth of the length are found within six steps in at least nine of ten cases.
    """
    rng = random.Random(0)

    def step(scale: float = 300.0) -> dict[str, float]:
        return drawn(rng, scale, prompts, size, between)

    guards, blind = Guards(GuardConfig()), Guards(GuardConfig())
    lines, of_blind = list[str](), list[str]()
    for number in range(1, 1001):
        metrics = step()
        lines += guards.count_success(metrics, number)
        of_blind += blind.count_success({"response/length_mean": metrics["response/length_mean"]}, number)
    for limit in ("length_growth", "length_collapse"):
        cried, alone = (sum(limit in line for line in some) for some in (lines, of_blind))
        assert cried <= (12 if limit == "length_growth" else alone), (cried, alone)
        assert between < 1 or limit == "length_collapse" or cried < alone / 4, (cried, alone)
    for scale in (1200.0, 50.0):
        found = 0
        for _ in range(60):
            guards = Guards(GuardConfig())
            for number in range(1, 7):
                guards.count_success(step(), number)
            resumed = Guards(GuardConfig())
            resumed.load_state_dict(json.loads(json.dumps(guards.state_dict())))
            found += any(resumed.count_success(step(scale), number) for number in range(7, 13))
        assert found >= 54, (scale, found)


def test_the_standard_error_of_lengths_by_hand() -> None:
    """The standard error is over prompts, not responses.

    With one response per prompt it is that of an ordinary mean. Equal responses to one prompt add nothing.
    """

    def of(*lengths: tuple[int, ...]) -> float | None:
        made = [
            SampleGroup(
                Prompt(uid, str(uid), (1,), ""),
                [Sample(0, n, "stop", True, None, None, reward=1.0, overlong_penalty=0.0) for n in some],
                0,
            )
            for uid, some in enumerate(lengths)
        ]
        return length_error(made).get("response/length_error")

    single = [3, 8, 1, 20, 7]
    expected = statistics.stdev(single) / math.sqrt(5)
    assert of(*((n,) for n in single)) == pytest.approx(expected)
    assert of(*((n,) * 16 for n in single)) == pytest.approx(expected)
    assert of((3, 5)) is None and of() is None and of((3, 5), ()) is None


def test_a_record_that_finds_no_room_ends_the_run_on_every_rank(
    tmp_path: Path, ranks: Callable[[int, int, int], RankPool]
) -> None:
    """Only rank 0 writes the first evaluation's record; no other rank may wait for it."""
    prepare(tmp_path)
    config = make_config(tmp_path, "run")
    expected = f"{config.run_dir}/metrics.jsonl: cannot be written: File too large (make room; "
    messages = ranks(2, 1, 1).run(train_without_room, config=config, rank=0, size=64)
    assert [message.startswith(expected) for message in messages] == [True, True], messages
    assert (config.run_dir / "metrics.jsonl").read_bytes() == b""


@pytest.mark.slow
def test_a_run_leaves_out_what_is_not_finite(
    tmp_path: Path, ranks: Callable[[int, int, int], RankPool]
) -> None:
    """Step 2's loss is NaN on one rank. Both ranks skip the update and save the batch; the run continues."""
    prepare(tmp_path)
    keys = {"steps": 3, "evaluation": {"every": 0}, "value_pretraining": {"steps": 1}}
    config = make_config(tmp_path, "once", **keys)
    for message, changed in ranks(2, 1, 1).run(train_with_bad_losses, config=config, bad=(2,)):
        assert (message, changed) == ("", [False, True, False])
    steps = [record for record in read_metrics(config.run_dir).records if record["stage"] == "train"]
    assert [record["guard/skipped"] for record in steps] == [0.0, 1.0, 0.0]
    assert (
        "step 2, phase actor_update: actor update, rank 1: loss of micro-batch 0 is nan; "
        "the update was not applied" in steps[1]["events"][0]
    )
    assert steps[1]["events"][0].endswith("the rest of the step is skipped (1 of at most 3 in a row)")
    for rank in range(2):
        kept = torch.load(config.run_dir / f"failed/train-000002-rank{rank}.pt", weights_only=True)
        assert kept["tokens"].numel() == kept["advantages"].numel() > 0
    config = make_config(tmp_path, "twice", **keys, guard={"skipped_steps": 1})
    config.run_dir.mkdir()
    (config.run_dir / "failed").write_text("in the way")
    for message, _ in ranks(2, 1, 1).run(train_with_bad_losses, config=config, bad=(2, 3)):
        assert message.startswith(
            "step 3, phase actor_update: actor update, rank 1: loss of micro-batch 0 is nan"
        )
        assert message.endswith(f"the batch could not be written to {config.run_dir / 'failed'}")
