"""Episodes in the planner: engine time, prefilled tokens, and the tokens and memory of a step.

The references are a token-by-token loop and a sum over turns."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.cli.main import main
from megarl.config import load_config
from megarl.plan import text
from megarl.plan.inputs import make_plan_inputs
from megarl.plan.times import (
    DecodeCost,
    Lengths,
    _decode_seconds,
    decode_batch_size,
    default_lengths,
    estimate,
)
from megarl.weights.known_models import KNOWN_MODELS
from tests.plan.test_published import ROOT

VAPO = ROOT / "configs/vapo_7b.yaml"
EPISODE = [
    *("rollout.episode=megarl_tasks.calculator:episode", "rollout.max_response_tokens=4096"),
    *("rollout.turns.max=16", "rollout.turns.max_tokens=12288"),
]
COSTS = DecodeCost(0.01, 0.002, 0.003, 0.0, 1e-6, 0.0, 0.0, 1e-4)


def plan(*changes: str):
    config = load_config(VAPO, list(changes))
    return make_plan_inputs(config, KNOWN_MODELS["Qwen2.5-7B"])


def by_the_token(each: int, at_once: int, lengths: Lengths, parts: int = 100) -> float:
    """Simulate an engine's seconds with a clock that advances by 1 / `parts` of a token.

    The running requests determine a step's duration. Turns are multiples of these parts, and tools wait on
    the clock."""
    mean = (fmean(lengths.quantiles) + lengths.all_observed) / 2 + lengths.prompt
    quantiles = lengths.quantiles
    waiting = [
        [quantiles[(i * 37) % len(quantiles)] / lengths.turns, lengths.turns] for i in range(each)
    ]  # tokens per turn, turns left
    running: list[list[float]] = []  # tokens left of the turn, and both of the above
    called: list[list[float]] = []  # time of return, and both of the above
    clock = 0.0
    while waiting or running or called:
        back = sorted(one for one in called if one[0] <= clock + 1e-12)
        waiting += [one[1:] for one in back]
        called = [one for one in called if one[0] > clock + 1e-12]
        while waiting and len(running) < at_once:
            tokens, left = waiting.pop()
            running.append([tokens, tokens, left])
        if not running:
            clock = min(one[0] for one in called)
            continue
        clock += COSTS.step(len(running), len(running) * mean) / parts
        for one in running:
            one[0] -= 1 / parts
        for one in [one for one in running if one[0] < 1e-9]:
            running.remove(one)
            if one[2] > 1:
                called.append([clock + lengths.idle, one[1], one[2] - 1])
    return clock


@settings(max_examples=25, deadline=None)
@given(
    each=st.integers(1, 8),
    at_once=st.integers(1, 4),
    turns=st.integers(1, 4),
    idle=st.sampled_from([0.0, 0.05, 1.0]),
)
def test_turns_by_the_token(each: int, at_once: int, turns: int, idle: float) -> None:
    lengths = Lengths(24.0, 60, 10, turns=turns, observed=5.0, idle=idle)
    assert _decode_seconds(COSTS, each, at_once, lengths) == pytest.approx(
        by_the_token(each, at_once, lengths), rel=0.03
    )


def test_one_response_waits_and_many_do_not() -> None:
    """A single response takes its tools' time in addition.

    If other responses use the free slot of one that waits, only the last tool call costs time."""
    one = Lengths(24.0, 60, 10, turns=5, observed=5.0)
    slow = replace(one, idle=0.5)
    assert _decode_seconds(COSTS, 1, 1, slow) - _decode_seconds(COSTS, 1, 1, one) == pytest.approx(4 * 0.5)
    busy, free = (_decode_seconds(COSTS, 64, 1, lengths) for lengths in (slow, one))
    assert free <= busy < free + 4 * 0.5 + 1e-9
    assert busy / free < 1.05


@given(st.integers(1, 9), st.integers(1, 50), st.integers(1, 50), st.integers(0, 50))
def test_what_is_prefilled(turns: int, prompt: int, written: int, observed: int) -> None:
    """The reference is a loop over turns, with all tokens prefilled again or only the new ones."""
    lengths = Lengths(written * turns, 10**6, prompt, turns=turns, observed=observed)
    context, again, new = prompt, prompt, prompt
    for _ in range(turns - 1):
        context += written + observed
        again += context
        new += observed
    assert lengths.count_prefilled(cached=False) == pytest.approx(again)
    assert lengths.count_prefilled(cached=True) == new
    assert lengths.all_observed == context - prompt - (turns - 1) * written


def test_episodes_of_one_turn_are_as_before() -> None:
    made = plan()
    lengths = default_lengths(made)
    assert (lengths.turns, lengths.all_observed, lengths.count_prefilled(cached=False)) == (
        1,
        0,
        lengths.prompt,
    )
    assert text.describe_turns(lengths) == ""


def test_a_step_of_episodes() -> None:
    """Sequences include observations, memory fits the longest, and tool time adds to the rollout only."""
    one, made = plan("rollout.max_response_tokens=4096"), plan(*EPISODE)
    assert made.longest - one.longest == 12288 - 4096
    lengths = default_lengths(made)
    assert (lengths.turns, lengths.idle) == (4, 1.0)
    assert lengths.all_observed == pytest.approx((12288 - 4096) / 3)
    short = replace(lengths, turns=1)
    with_turns, without = estimate(made, lengths), estimate(made, short)
    assert with_turns.tokens - without.tokens == pytest.approx(made.config.responses * lengths.all_observed)
    for part in ("old_logprobs", "actor_update", "rollout"):
        assert with_turns.parts[part] > without.parts[part]
    patient = estimate(made, replace(lengths, idle=120.0))
    assert patient.parts["rollout"] > with_turns.parts["rollout"] + 120
    same = {name: s for name, s in with_turns.parts.items() if name != "rollout"}
    assert {name: s for name, s in patient.parts.items() if name != "rollout"} == same
    roomy = plan(*EPISODE, "rollout.max_batch=4096")
    assert decode_batch_size(roomy, lengths) < decode_batch_size(roomy, short)


def test_the_command_says_what_is_assumed(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", str(VAPO), *EPISODE]
    said = "in 8 turns, 200 tokens shown and 2.5 s of a tool between two"
    assert main([*command, "--turns", "8", "--observed", "200", "--tool-seconds", "2.5"]) == 0
    assert said in capsys.readouterr().out
    assert main([*command, "--simulate", "--turns", "8", "--observed", "200", "--tool-seconds", "2.5"]) == 0
    assert said in capsys.readouterr().out
    assert main(["plan", str(VAPO), "--turns", "8"]) == 2
    assert "--tool-seconds: have no effect on responses of one turn" in capsys.readouterr().err
