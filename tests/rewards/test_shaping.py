"""The soft overlong punishment against DAPO eq. 13 in exact arithmetic."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.rewards.verdict import soft_overlong_punishment


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
