"""Symbolic equivalence on pairs whose relation is known, against exact arithmetic, and on text that must be
bounded."""

from __future__ import annotations

import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl_verifier.symbolic import verify_math

EQUAL = [
    ("\\boxed{\\frac{1}{2}}", "0.5"),
    ("Answer: (x+1)^2", "x^2+2x+1"),
    ("Answer: (x+1)**2", "x^2+2x+1"),
    ("Answer: $2\\sqrt{2}$", "\\sqrt{8}"),
    ("Answer: $\\{1,2\\}$", "\\{2,1\\}"),
    ("Answer: (1,2)", "(1, 2)"),
    ("Answer: $\\frac{\\pi}{2}$", "\\pi/2"),
    ("Answer: x=5", "5"),
    ("Answer: 3 apples", "3"),
    ("Answer: 4", "2+2"),
    ("Answer: $50\\%$", "0.5"),
    ("The result is 5.", "5"),
    ("thus \\boxed{1} or rather \\boxed{\\sqrt{2}/2}", "\\frac{1}{\\sqrt{2}}"),
    ("Answer: $[0,1)$", "[0,1)"),
    ("Answer: \\text{A}", "A"),
    ("Answer: $(x+1)^2 - x^2 - 2x$", "1"),
    ("Answer: $\\infty$", "\\infty"),
]
UNEQUAL = [
    ("", "5"),
    ("I do not know", "5"),
    ("Answer: 5 or 6", "6"),
    ("Answer: (x+1)^2", "x^2+1"),
    ("Answer: $[0,1)$", "(0,1)"),
    ("Answer: (2,1)", "(1,2)"),
    ("Answer: B", "A"),
    ("Answer: $\\sqrt{2}$", "1.41"),
    ("Answer: 0.33", "1/3"),
    ("Answer: $x + 1$", "5"),
    ("Answer: $(x+3)(x+4)$", "\\sqrt{7}"),
    ("Answer: $\\infty$", "5"),
    ("Answer: $-\\infty$", "\\infty"),
    ("\\boxed{5}\nAnswer: 6", "5"),
    ("Answer: __import__('os')", "5"),
    ("Answer: " + "{" * 299, "5"),
    ("Answer: " + "(" * 290, "\\sqrt{7}"),
    ("\\boxed{" * 100_000, "5"),
    ("Answer: " + "1+" * 400 + "1", "401"),
]


@pytest.mark.parametrize(("response", "answer"), EQUAL)
def test_equal(response: str, answer: str) -> None:
    assert verify_math(response, answer).correct


@pytest.mark.parametrize(("response", "answer"), UNEQUAL)
def test_unequal_and_quickly_so(response: str, answer: str) -> None:
    start = time.process_time()
    assert not verify_math(response, answer).correct
    assert time.process_time() - start < 5.0


@settings(deadline=None, max_examples=25)
@given(
    st.integers(-50, 50),
    st.integers(1, 20),
    st.integers(-50, 50),
    st.integers(1, 20),
    st.sampled_from(["{}/{}", "\\frac{{{}}}{{{}}}"]),
)
def test_fractions_agree_with_exact_arithmetic(a: int, b: int, c: int, d: int, form: str) -> None:
    assert verify_math(f"\\boxed{{{form.format(a, b)}}}", f"{c}/{d}").correct == (
        Fraction(a, b) == Fraction(c, d)
    )
    assert verify_math(f"Answer: ${form.format(a, b)}$", form.format(3 * a, 3 * b)).correct


@settings(deadline=None, max_examples=15)
@given(st.integers(-9, 9), st.integers(-9, 9), st.integers(-9, 9), st.integers(-9, 9))
def test_products_agree_with_their_coefficients(a: int, b: int, c: int, d: int) -> None:
    expanded = f"x^2 + ({c + d})x + ({c * d})"
    assert verify_math(f"Answer: (x+({a}))(x+({b}))", expanded).correct == ((a + b, a * b) == (c + d, c * d))


@pytest.mark.parametrize(
    "forms",
    [
        ("\\boxed{\\frac{2}{4}}", "Answer: $1/2$", "so \\boxed{2/4}", "Answer: 0.5"),
        ("Answer: 0.054", "Answer: $\\frac{27}{500}$", "Answer: $5.4 \\times 10^{-2}$", "Answer: 5.4e-2"),
    ],
)
def test_equal_forms_give_one_vote(forms: tuple[str, ...]) -> None:
    assert len({verify_math(form, "7").extracted for form in forms}) == 1


@settings(deadline=None, max_examples=25)
@given(st.integers(100, 998), st.integers(-40, 25), st.integers(-1, 1))
def test_scientific_notation_agrees_with_exact_arithmetic(digits: int, exponent: int, off: int) -> None:
    """Also where both round to zero in math-verify's six places."""
    value = digits * Fraction(10) ** exponent
    mantissa = (digits + off) / 100
    assert verify_math(f"Answer: ${mantissa:.2f} \\times 10^{{{exponent + 2}}}$", str(value)).correct == (
        off == 0
    )
