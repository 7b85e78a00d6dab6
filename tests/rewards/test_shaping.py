"""The soft overlong punishment against DAPO eq. 13 in exact arithmetic; terms for length and format."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.rewards.shaping import boxed_or_answer_line, cosine_length, matches, soft_overlong_punishment
from megarl.rewards.verdict import GradedResponse, Verdict


def equation_13(length: int, l_max: int, l_cache: int) -> Fraction:
    if length <= l_max - l_cache:
        return Fraction(0)
    if length <= l_max:
        return Fraction((l_max - l_cache) - length, l_cache)
    return Fraction(-1)


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (0, 0.0),
        (16_383, 0.0),
        (16_384, 0.0),
        (16_385, -1 / 4096),
        (18_432, -0.5),
        (20_479, -4095 / 4096),
        (20_480, -1.0),
        (20_481, -1.0),
        (10**9, -1.0),
    ],
)
def test_the_papers_numbers(length: int, expected: float) -> None:
    assert soft_overlong_punishment(length, 20_480, 4096) == expected


@given(st.integers(1, 10**6), st.data())
def test_equation_13(l_max: int, data: st.DataObject) -> None:
    l_cache = data.draw(st.integers(1, l_max))
    lengths = data.draw(st.lists(st.integers(0, 2 * l_max), max_size=20))
    expected = [float(equation_13(length, l_max, l_cache)) for length in lengths]
    assert [soft_overlong_punishment(length, l_max, l_cache) for length in lengths] == expected


@pytest.mark.parametrize("buffer", [0, -1, 81])
def test_a_buffer_outside_its_bounds_is_refused(buffer: int) -> None:
    with pytest.raises(ValueError, match="buffer"):
        soft_overlong_punishment(5, 80, buffer)


def graded(
    text: str = "", length: int = 1, *, correct: bool = True, truncated: bool = False
) -> GradedResponse:
    return GradedResponse(text, "7", length, 100, truncated, Verdict(correct))


def test_the_cosine_rewards_ends_and_middles() -> None:
    """The paper's numbers: correct 2 to 1, wrong -10 to 0, truncated -10.

    The cosine is halfway in the middle, and at a third it has covered a quarter of the range."""
    right = [cosine_length(graded(length=n)) for n in (0, 50, 100)]
    assert right == pytest.approx([2.0, 1.5, 1.0])
    wrong = [cosine_length(graded(length=n, correct=False)) for n in (0, 50, 100)]
    assert wrong == pytest.approx([-10.0, -5.0, 0.0])
    third = GradedResponse("", "7", 30, 90, False, Verdict(True))
    assert cosine_length(third, correct_short=4.0, correct_long=0.0) == pytest.approx(3.0)
    assert [cosine_length(graded(truncated=True, correct=c)) for c in (True, False)] == [-10.0, -10.0]


@given(st.integers(0, 100), st.booleans(), *[st.floats(-20, 20)] * 4)
def test_the_cosine_reward_is_the_papers(length, correct, c0, c_long, w0, w_long) -> None:
    # CosFn(t, T, eta_min, eta_max) = eta_min + (eta_max - eta_min) (1 + cos(t pi / T)) / 2
    low, high = (c_long, c0) if correct else (w_long, w0)
    expected = low + 0.5 * (high - low) * (1.0 + math.cos(length * math.pi / 100))
    found = cosine_length(graded(length=length, correct=correct), c0, c_long, w0, w_long)
    assert found == pytest.approx(expected, abs=1e-12)
    assert min(low, high) - 1e-12 <= found <= max(low, high) + 1e-12


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>a\nb</think>\n<answer>7</answer>", 1.0),
        ("  <think></think><answer></answer>\n", 1.0),
        ("<think>a</think> so <answer>7</answer>", 0.0),
        ("<think>a</think><answer>7</answer> it is", 0.0),
        ("<answer>7</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_the_format_of_r1(text: str, expected: float) -> None:
    assert matches(graded(text)) == expected


def test_a_pattern_of_ones_own_is_searched_for_across_lines() -> None:
    assert matches(graded("x START\n\nEND y"), pattern="START.*END") == 1.0
    assert matches(graded("START"), pattern="^START.+") == 0.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Answer: 5", 1.0),
        ("so \\boxed{5} it is", 1.0),
        ("Answer:", 0.0),
        ("it is 5", 0.0),
        ("\\boxed{5", 0.0),
    ],
)
def test_an_answer_where_verifiers_look(text: str, expected: float) -> None:
    assert boxed_or_answer_line(graded(text)) == expected
