"""The simulator, compared with token-by-token loops and with results worked out by hand."""

from __future__ import annotations

import json
import math
import random
import re
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.cli.main import main
from megarl.config import load_config
from megarl.config.errors import DataError
from megarl.data.batch import TrainBatch, write_batch
from megarl.plan.fit import find_problem
from megarl.plan.inputs import PlanInputs, make_plan_inputs
from megarl.plan.search import replace_keys, search
from megarl.plan.simulate import (
    BATCHES,
    Costs,
    RolloutWork,
    Split,
    make_costs,
    make_log_normal,
    make_rollout_work,
    recorded,
    simulate,
    simulate_rollout,
)
from megarl.plan.sizes import Shape, find_device
from megarl.plan.splits import compare_splits, find_best_split
from megarl.plan.text import clock, lines
from megarl.plan.times import Lengths, default_lengths, estimate, replace_deviation, rollout_seconds
from megarl.sync.plan import engine_targets
from megarl.weights.known_models import KNOWN_MODELS
from tests.plan.test_published import ROOT, TABLE


def decode(count: float, tokens: float) -> float:
    return 0.01 + 0.002 * count + 1e-5 * tokens


def costs(at_once: int = 1000, transfer: float = 0.5, **phases: float) -> Costs:
    return Costs(decode, 0.0, at_once, lambda tokens: phases, transfer)


def token_by_token(lengths: list[int], prompt: float, at_once: int) -> float:
    """Return an engine's seconds, simulated step by step with the token count in the middle of each step."""
    waiting, running, seconds = list(lengths), [], 0.0
    while waiting or running:
        while waiting and len(running) < at_once:
            running.append([waiting.pop(0), prompt])
        seconds += decode(len(running), sum(tokens + 0.5 for _, tokens in running))
        running = [[left - 1, tokens + 1] for left, tokens in running if left > 1]
    return seconds


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 30), min_size=2, max_size=2), min_size=1, max_size=12),
    st.integers(1, 4),
    st.integers(1, 6),
)
def test_equal_stretches_token_by_token(groups: list[list[int]], engines: int, at_once: int) -> None:
    drawn = iter(groups)
    work = RolloutWork(len(groups), 2, 7.0, lambda chance, n: next(drawn), balance="equal")
    found = simulate_rollout(work, costs(at_once), engines, random.Random(0))
    flat = [length for group in groups for length in group]
    parts = [flat[e * len(flat) // engines : (e + 1) * len(flat) // engines] for e in range(engines)]
    each = [token_by_token(part, 7.0, at_once) for part in parts]
    assert found.seconds == pytest.approx(max(each))
    busy = [sum(end - begin for begin, end in spans) for spans in found.busy]
    assert busy == pytest.approx(each)
    assert found.generated == pytest.approx(sum(flat))
    assert found.tokens == pytest.approx(sum(flat) + 7 * len(flat))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 5), st.sampled_from(["queue", "longest"]))
def test_no_engine_idles_while_another_has_requests_that_have_not_begun(
    seed: int, engines: int, balance: str
) -> None:
    """With one response at a time this is a list schedule, for which Graham's bound (1969) holds."""
    work = RolloutWork(9, 2, 0.0, make_log_normal(Lengths(50, 400, 0, 1.0)), balance=balance)  # type: ignore[arg-type]
    cost = Costs(lambda count, tokens: 1.0, 0.0, 1, lambda tokens: {}, 0.0)
    found = simulate_rollout(work, cost, engines, random.Random(seed))
    busy = [sum(end - begin for begin, end in spans) for spans in found.busy]
    assert sum(busy) == pytest.approx(found.generated)
    longest = 400.0
    assert found.seconds <= sum(busy) / engines + longest * (1 - 1 / engines) + 1e-6


def test_dynamic_sampling_draws_until_there_are_enough() -> None:
    def draw(chance: random.Random, n: int) -> list[float]:
        return [10.0] * n

    for streams in (True, False):
        work = RolloutWork(40, 4, 0.0, draw, kept_share=0.25, streams=streams)
        drawn = [simulate_rollout(work, costs(), 2, random.Random(seed)) for seed in range(20)]
        assert all(found.tokens == 40 * 4 * 10 for found in drawn)
        assert 3.5 < median(found.generated / found.tokens for found in drawn) < 5.5
        assert min(found.generated for found in drawn) > drawn[0].tokens


def constant(seconds: float) -> tuple[RolloutWork, float]:
    """Make work of one response that takes about `seconds` on one engine, and return its exact seconds."""
    length = round(seconds / 0.01)
    return RolloutWork(1, 1, 0.0, lambda chance, n: [float(length)]), length * 0.01


@pytest.mark.parametrize(("rollout", "train"), [(6.0, 4.0), (3.0, 5.0), (4.0, 4.0)])
def test_steps_as_they_are_worked_out_by_hand(rollout: float, train: float) -> None:
    work, rollout = constant(rollout)
    # One decoding step takes 0.01 s, whatever the batch.
    before, update = 0.25 * train, 0.75 * train
    cost = Costs(
        lambda count, tokens: 0.01, 0.0, 1, lambda tokens: {"old": before, "actor_update": update}, 0.5
    )
    in_turn = simulate(work, cost, Split(1))
    assert in_turn.step == pytest.approx(rollout + train + 0.5) and in_turn.idle == pytest.approx(0)
    apart = simulate(work, cost, Split(1, trainers=1))
    assert apart.step == pytest.approx(rollout + train + 0.5)
    assert apart.idle == pytest.approx((rollout + train) / 2 / (rollout + train + 0.5))
    for ahead in (1, 2):
        beside = simulate(work, cost, Split(1, 1, ahead))
        assert beside.step == pytest.approx(max(rollout, train) + 0.5)
        shorter = "trainers" if train < rollout else "engine 0"
        waited = beside.wait_shares(shorter)
        assert sum(waited.values()) == pytest.approx(abs(rollout - train) / beside.step)
        assert beside.idle == pytest.approx(sum(waited.values()) / 2)


def test_what_is_drawn_waits_for_its_weights() -> None:
    """A batch is generated between the two weight transfers that bound its version, and trained on later.

    The batch of step k starts after the transfer of version k - 1 - ahead and ends before the next
    transfer."""
    for ahead in (0, 1, 2):
        work = RolloutWork(3, 2, 0.0, make_log_normal(Lengths(60, 900, 0, 1.2)))
        course = simulate(work, costs(old=0.3, actor_update=0.9), Split(2, 1, ahead), seed=ahead)
        transfers = {s.step: s for s in course.rows["trainers"] if s.phase == "weight_transfer"}
        first = {s.step: s.begin for s in course.rows["trainers"][::-1] if s.phase == "old"}
        update = {s.step: s for s in course.rows["trainers"] if s.phase == "actor_update"}
        for name in ("engine 0", "engine 1"):
            for span in course.rows[name]:
                version = span.step - 1 - ahead
                if span.phase != "rollout":
                    continue
                assert version <= 0 or span.begin >= transfers[version].end - 1e-9
                assert (
                    max(version, 0) + 1 not in transfers
                    or span.end <= transfers[max(version, 0) + 1].begin + 1e-9
                )
                assert span.step > BATCHES or first[span.step] >= span.end - 1e-9
        for version, transfer in transfers.items():
            assert transfer.begin >= update[version].end - 1e-9
            if version < BATCHES:  # the weights do not change before they are sent
                assert transfer.end <= update[version + 1].begin + 1e-9
            # A transfer occupies trainers and engines at the same time.
            assert any(
                s.phase == "weight_transfer" and s.begin == transfer.begin for s in course.rows["engine 0"]
            )


def test_lengths_are_those_that_were_asked_for() -> None:
    lengths = replace_deviation(Lengths(3000, 20480, 100), 3000)
    draw, chance = make_log_normal(lengths), random.Random(1)
    groups = [draw(chance, 16) for _ in range(3000)]
    drawn = [n for group in groups for n in group]
    assert fmean(drawn) == pytest.approx(3000, rel=0.05) and max(drawn) == 20480
    # Responses to a prompt have similar lengths: group means vary more than those of independent responses.
    means = [fmean(map(math.log, group)) for group in groups]
    variance = fmean((m - fmean(means)) ** 2 for m in means)
    assert variance == pytest.approx(lengths.spread**2 * (0.5 + 0.5 / 16), rel=0.15)


@pytest.fixture(scope="module")
def plan() -> PlanInputs:
    config = load_config(ROOT / "configs/vapo_7b.yaml", [])
    return make_plan_inputs(config, KNOWN_MODELS["Qwen2.5-7B"])


def test_the_best_split_is_one_that_the_layout_allows(plan: PlanInputs) -> None:
    lengths = default_lengths(plan)
    small = replace_keys(plan, rollout__prompts=32, update__mini_batch=512)
    work = make_rollout_work(small.config, lengths, "queue")
    found = find_best_split(small, work, lengths, 16)
    assert found is not None
    assert found.layout.world + found.config.parallel.rollout_ranks == 16 and found.layout.world % 2 == 0
    # No other split is much faster in a simulation of a few steps.
    tried = {}
    for dp in range(1, 8):
        made = replace_keys(small, parallel__dp=dp, parallel__rollout_ranks=16 - 2 * dp)
        if find_problem(made) is None:
            tried[dp] = simulate(work, make_costs(made, lengths), Split(16 - 2 * dp, 2 * dp, 1)).step
    assert tried[found.layout.dp] <= 1.1 * min(tried.values())


def test_the_engines_of_a_split_divide_its_trainers_too(plan: PlanInputs) -> None:
    """The engine size divides the trainers, else an engine would lie on two nodes.

    An example: 6 trainers and 4 more ranks with an engine of 4."""
    small = replace_keys(plan, rollout__prompts=32, update__mini_batch=512, rollout__engine_tp=4)
    lengths = default_lengths(small)
    for world in (10, 12, 16):
        found = find_best_split(small, make_rollout_work(small.config, lengths, "queue"), lengths, world)
        assert (found is None) == (world == 10)
        assert found is None or engine_targets(found.config, found.actor.config, found.layout.world)


@pytest.mark.parametrize(
    ("dp", "apart", "ahead"), [(2, 4, 0), (2, 4, 1), (2, 4, 2), (3, 2, 1), (1, 6, 1), (4, 0, 0)]
)
def test_a_step_ahead_is_estimated_as_it_is_simulated(
    plan: PlanInputs, dp: int, apart: int, ahead: int
) -> None:
    """With responses of one length, the simulated step time equals the estimate.

    The estimate of an asynchronous step is the longer of rollout and training, plus the transfer."""
    keys = {"parallel__dp": dp, "parallel__rollout_ranks": apart, "schedule__ahead": ahead}
    made = replace_keys(plan, **keys, rollout__prompts=64)
    lengths = replace(default_lengths(made), spread=0.01)
    found, work = estimate(made, lengths), make_rollout_work(made.config, lengths, "queue")
    course = simulate(work, make_costs(made, lengths), Split.from_plan(made, ahead))
    assert found.total == pytest.approx(course.step, rel=0.03)
    assert (found.total < 0.99 * sum(found.parts.values())) == (ahead > 0)


def test_a_job_that_cannot_be_split_is_shown_in_turn(plan: PlanInputs) -> None:
    one = replace_keys(plan, parallel__tp=8, parallel__dp=1, rollout__prompts=16)
    lengths = default_lengths(one)
    assert len(compare_splits(one, make_rollout_work(one.config, lengths, "queue"), lengths)) == 1


def test_one_step_ahead_as_published() -> None:
    """The simulated step is within a factor of 1.5 of the 200 s that NeMo-RL v0.5 published.

    Source: docs/about/performance-summary.md, Qwen3-32B on 64 H100, one step off-policy; 32 H100 without
    overlap take 376 s. Half of the GPUs for each side is our assumption."""
    row = next(row for row in TABLE["rows"] if row["name"] == "Qwen3-32B on 32 H100")
    source = TABLE["sources"][row["source"]]
    config = load_config(ROOT / TABLE["base"], [*source["set"], *row["set"]])
    config = config.model_copy(update={"parallel": config.parallel.model_copy(update=row["layout"])})
    shape = Shape(KNOWN_MODELS[row["model"]], config.model.dtype)
    one = PlanInputs(config, shape, shape, find_device(config.cluster))
    lengths = Lengths(row["length"], config.rollout.max_response_tokens, source["prompt"])
    work, apart = make_rollout_work(config, lengths, "queue"), replace_keys(one, parallel__rollout_ranks=32)
    beside = simulate(work, make_costs(apart, lengths), Split(8, 32, 1, engine_tp=4))
    assert 200 / 1.5 < beside.step < 200 * 1.5, beside.step


def test_lengths_of_a_run(tmp_path: Path) -> None:
    chance, true = random.Random(0), Lengths(400, 4000, 20, 0.8)
    draw = make_log_normal(true)
    records = []
    for step in range(1, 31):
        lengths = [n for _ in range(16) for n in draw(chance, 8)]
        records.append(
            {
                "stage": "train",
                "step": step,
                "response/length_mean": fmean(lengths),
                "response/length_max": max(lengths),
                "response/length_min": min(lengths),
                "reward/truncated": fmean(n >= 4000 for n in lengths),
                "rollout/prompts": 16,
            }
        )
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "config.yaml").write_text("rollout: {group_size: 8}\n")
    fitted, _, where = recorded(tmp_path, Lengths(1, 4000, 20))
    assert fitted.mean == pytest.approx(400, rel=0.2) and fitted.spread == pytest.approx(0.8, rel=0.25)
    assert "10 steps" in where

    # Recorded rollouts replace the fitted lengths.
    batch = TrainBatch.build([[1, 2, 3]] * 4, [[5] * 10, [5] * 27, [5] * 300, [5] * 310])
    # seven tokens of an observation between two turns, which the policy did not generate
    batch.response_mask[20:27] = False
    batch["group_ids"] = torch.tensor([7, 7, 9, 9])
    folder = tmp_path / "rollouts" / "step-000030"
    write_batch(folder / "rank-00000.safetensors", batch.select([0, 1, 2]))  # from two engines
    write_batch(folder / "rank-00001.safetensors", batch.select([3]))
    going_on = TrainBatch.build([[1, 2, 3]], [[5] * 50])  # unfinished, so its length is not known yet
    going_on["group_ids"], going_on["unfinished"] = torch.tensor([9]), torch.tensor([True])
    write_batch(folder / "rank-00002.safetensors", going_on)
    assert "10 steps" in recorded(tmp_path, Lengths(1, 4000, 20))[2]  # the recording is not complete yet
    (folder / "manifest.json").write_text("")
    fitted, draw, where = recorded(tmp_path, Lengths(1, 4000, 20))
    assert fitted.mean == 160 and fitted.prompt == 3 and "4 responses" in where
    assert {tuple(sorted(set(draw(chance, 50)))) for _ in range(20)} == {(10.0, 20.0), (300.0, 310.0)}


@pytest.mark.parametrize(("mean", "truncated"), [(16.0, 1.0), (14.0, 0.7)])
def test_lengths_of_a_run_that_was_mostly_cut(tmp_path: Path, mean: float, truncated: float) -> None:
    record = {"stage": "train", "step": 1, "response/length_mean": mean, "response/length_max": 16}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record | {"reward/truncated": truncated}) + "\n")
    for limit in (16, 4000):
        fitted, draw, _ = recorded(tmp_path, Lengths(1, limit, 20))
        assert fitted.mean == mean
        assert fmean(draw(random.Random(0), 1000)) == pytest.approx(mean, rel=0.01)


def test_a_run_without_lengths_is_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"stage": "sft", "step": 1}\n')
    with pytest.raises(DataError, match="no step of training with response lengths"):
        recorded(tmp_path, Lengths(1, 2, 3))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("configs/demos/sft.yaml --simulate", "recipe: sft generates no responses"),
        ("configs/demos/dapo.yaml --simulate --model Qwen2.5-0.5B", "its times are those of GPUs"),
        ("configs/vapo_7b.yaml --kept 0.5", "--kept: has no effect without --simulate (add it"),
        ("configs/vapo_7b.yaml --balance queue", "--balance: has no effect without --simulate (add it"),
        ("configs/vapo_7b.yaml --mean-length 20481", "--mean-length: must be above 0 and at most 20480"),
        ("configs/vapo_7b.yaml --simulate --kept 1.5", "--kept: must be above 0 and at most 1"),
        ("configs/vapo_7b.yaml --simulate --length-deviation 0", "--length-deviation: must be above 0"),
        ("configs/vapo_7b.yaml --simulate --lengths nowhere", "nowhere"),
    ],
)
def test_bad_input_is_one_line(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(["plan", *arguments.split()]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_split_as_it_is_configured_is_simulated(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    split = "parallel.dp=2 parallel.rollout_ranks=4 schedule.ahead=1 rollout.prompts=32"
    assert main(["plan", "configs/vapo_7b.yaml", *split.split(), "--simulate"]) == 0
    printed = capsys.readouterr().out
    assert "4 train, 4 generate, ahead 1" in printed.split("<- the configuration")[0]
    assert "8 ranks in turn" in printed


def test_a_split_as_it_is_configured_is_planned(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The header counts all ranks, and every part of the output shows the same step time."""
    monkeypatch.chdir(ROOT)
    split = ["parallel.dp=2", "parallel.rollout_ranks=4", "schedule.ahead=1", "rollout.prompts=64"]
    command = ["plan", "configs/vapo_7b.yaml", *split, "cluster.gpus_per_node=4"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "tp 2, pp 1, dp 2, and 4 ranks that generate: 8 x H100 (79.2 GiB) on 2 nodes\n" in printed
    made = make_plan_inputs(load_config("configs/vapo_7b.yaml", split), KNOWN_MODELS["Qwen2.5-7B"])
    step = clock(estimate(made, default_lengths(made)).total)
    assert f"a step takes about {step}, " in printed
    [row] = (line for line in printed.splitlines() if line.endswith("<- the configuration"))
    assert step in row.split()
    assert main([*command, "--best"]) == 0
    assert f"the configuration as it is: {step}, and as good\n" in capsys.readouterr().out
    times = [one.estimate for one in search(made, default_lengths(made)) if one.estimate]
    totals = [max(one.parts["rollout"], one.training) + one.parts["weight_transfer"] for one in times]
    assert totals == sorted(totals) and totals == [one.total for one in times]


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["sglang", "sglang_url", "transformers"]),
    st.integers(1, 600),
    st.floats(100, 20000),
    st.integers(1, 64),
)
def test_no_engine_decodes_more_at_once_than_it_is_started_with(
    plan: PlanInputs, engine: str, most: int, mean: float, prompts: int
) -> None:
    """`max_batch` bounds the batch even if the KV cache holds more; one at a time takes longest."""
    urls = ("http://a:1", "http://b:1") if engine == "sglang_url" else ()
    keys = {"rollout__engine": engine, "rollout__urls": urls, "rollout__prompts": prompts}
    made, alone = (replace_keys(plan, **keys, rollout__max_batch=n) for n in (most, 1))
    lengths = replace(default_lengths(plan), mean=mean)
    assert 1 <= make_costs(made, lengths).at_once <= most
    assert rollout_seconds(alone, lengths) >= rollout_seconds(made, lengths) * (1 - 1e-9)
    printed = "\n".join(lines(made, "here", lengths, estimate(made, lengths)))
    [shown] = re.findall(r"at once by an engine  ([\d,]+) of full length, ([\d,]+) of mean", printed)
    assert all(int(count.replace(",", "")) <= most for count in shown)


def test_a_critic_of_prompts_takes_its_share_of_the_tokens() -> None:
    """A critic of prompts processes a prompt and one token: 512 + 1 of 7,340 tokens.

    Its phases shrink by that share, within 20 %, since an update's communication does not shrink."""
    whole, alone = (
        make_plan_inputs(load_config(ROOT / "configs/vapo_7b.yaml", changes), KNOWN_MODELS["Qwen2.5-7B"])
        for changes in ([], ["algorithm.advantage=prompt_value", "algorithm.lambda_policy=1"])
    )
    lengths = default_lengths(whole)
    share = (lengths.prompt + 1) / (lengths.prompt + lengths.mean)
    before, after = estimate(whole, lengths), estimate(alone, lengths)
    for phase in ("values", "critic_update"):
        assert 0.8 * share < after.parts[phase] / before.parts[phase] < 1.2 * share
    rest = {
        name: seconds for name, seconds in before.parts.items() if name not in ("values", "critic_update")
    }
    assert {name: after.parts[name] for name in rest} == rest and after.tokens == before.tokens
