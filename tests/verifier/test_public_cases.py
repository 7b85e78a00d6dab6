"""Cases from public reports of people who train with verifiers, and properties that generalise them.

public_cases.yaml: [response, reference] by verdict and by rule of docs/verifiers.md.
"""

from __future__ import annotations

import json
import time
from fractions import Fraction
from pathlib import Path

import pytest
import yaml
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from megarl_verifier.answer import verify_dapo
from megarl_verifier.symbolic import verify_math

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
CASES = yaml.safe_load((Path(__file__).parent / "public_cases.yaml").read_text())

SPELLINGS = [
    "Answer: {}",
    "Answer: ${}$",
    "Answer: \\({}\\)",
    "**Answer:** {}.",
    "So \\boxed{{{}}}.",
    "Answer: $\\boxed{{{}}}$",
    "<think>Answer: 17</think><answer>{}</answer>",
    "\u7b54\u6848\uff1a{}\u3002",
]


def cases(verdict: str) -> list[tuple[str, str]]:
    return [(response, answer) for rows in CASES[verdict].values() for response, answer in rows]


@pytest.mark.parametrize(("response", "answer"), cases("wrong"))
def test_wrong(response: str, answer: str) -> None:
    start = time.process_time()
    assert not verify_math(response, answer).correct
    assert time.process_time() - start < 4


@pytest.mark.parametrize(("response", "answer"), cases("right"))
def test_right(response: str, answer: str) -> None:
    verdict = verify_math(response, answer)
    assert verdict.correct and verdict.extracted


@pytest.mark.parametrize(("response", "answer"), cases("right"))
def test_every_reference_equals_itself(response: str, answer: str) -> None:
    for spelling in SPELLINGS:
        if "$" not in spelling or "$" not in answer.replace("\\$", ""):
            assert verify_math(spelling.format(answer), answer).correct, spelling


def test_an_answer_that_is_cut_off_or_thought_has_no_vote() -> None:
    for response in ("\\boxed{5} \\boxed{7", "<think>\\boxed{5}", "<answer>5", "Answer: \\boxed{7"):
        assert verify_math(response, "5") == (False, None)


def test_dapo_reads_other_stops_and_labels_and_no_thoughts() -> None:
    for response in (
        "Answer: 5\u3002",
        "Answer\uff1a5",
        "\u7b54\u6848\uff1a5",
        "<think>6</think>\nAnswer: 5",
    ):
        assert verify_dapo(response, "5") == (True, "5")
    for response in ("<think>\nAnswer: 5", "<think>\nAnswer: 5\n</think>\nSo \\boxed{7}"):
        assert verify_dapo(response, "5") == (False, None)
    assert not verify_dapo("<answer>5</answer>", "5").correct  # its protocol is the line


HUGE = [
    "9^{9^9}", "9^9^9", "9**9**9", "(9^9)!", "((9!)!)!", "10^{10^{10}}!", "5!!!!", "1e1000000",
    "10^{-1000000}", "0^{9^{9^9}}", "x^{9^{9^9}}", "\\sqrt[9^{9^9}]{2}", "\\binom{1000000000}{500000000}",
    "\\gcd(9^{9^9}, 3)", "\\sin(9^{9^9})", "\\exp(\\exp(\\exp(10)))", "(x+y+z)^{1000}", "f(9^{9^9})",
    "10^{4000} n!", "10^{2000}\\Gamma(1/3)",
    "\\Gamma(10^9)", "(1, 9^{9^9})", "\\{9^{9^9}\\}", "\\begin{pmatrix} 9^{9^9} \\\\ 1 \\end{pmatrix}",
    "\\sum_{n=1}^{10^9} \\frac{1}{n}", "\\prod_{n=1}^{1000000} n", "\\operatorname{eye}(100000)",
    "\\gcd((x+y)^{300},(x-y)^{300})",
    "x = y^{9^{9^9}}", "x + 9^{9^9} y = 1", "9" * 299 + "!", "9" * 2000, "\u0663" * 300, "\uff19" * 300,
    "1e" + "9" * 280, "1 2/3 " * 40, "1:" * 140 + "1", "|x|" * 60, "x^" * 100 + "1", "\\ln\\sin " * 30,
    "\\lim_{x\\to 1} " * 20, "\\int " * 50, "\\sum_{n=1}^{2} " * 20, "(" * 150 + ")" * 150,
    "\\frac{1}{" * 14 + "2" + "}" * 14, "\\sqrt{" * 14 + "2" + "}" * 14, "\\mathrm{" * 15 + "x" + "}" * 15,
    "<think>" * 1000, "<answer>" * 1000, "</think>" * 10**5 + "<think>", "Answer: " * 10**5 + "6",
    "\u7b54\u6848" * 10**5,
]  # fmt: skip


@pytest.mark.parametrize("text", HUGE, ids=range(len(HUGE)))
def test_what_is_too_large_ends_soon_as_wrong(text: str) -> None:
    """In responses and in a reference, in nine verdicts: sympy alone would compute for hours."""
    start = time.process_time()
    for reference in ("5", "x + 2y = 3", "\\sqrt{7}", "(1, 2)"):
        for response in (f"Answer: ${text}$", f"\\boxed{{{text}}}"):
            assert not verify_math(response, reference).correct
    assert not verify_math("Answer: 5", text).correct
    assert time.process_time() - start < 6


@settings(deadline=None, max_examples=50)
@given(st.integers(-(10**40), 10**40), st.sampled_from(SPELLINGS))
@example(10**40, "Answer: {}")
def test_an_integer_is_never_the_next(number: int, spelling: str) -> None:
    forms = [
        str(number),
        f"{number}.0",
        f"\\frac{{{2 * number}}}{{2}}",
        f"{number}\\text{{ cm}}",
        f"{number} \\cdot 1",
    ]
    if number > 0:
        forms += [f"{number:,}", f"{number}^{{1}}", f"x = {number}"]
    for form in forms:
        assert verify_math(spelling.format(form), str(number)).correct, form
        assert not verify_math(spelling.format(form), str(number + 1)).correct, form
        assert not verify_math(spelling.format(number + 1), form).correct, form


@settings(deadline=None, max_examples=30)
@given(
    st.text("abcdefghijklmnopqrstuvwxyz", min_size=2, max_size=9), st.randoms(), st.booleans(), st.booleans()
)
def test_letters_in_another_order_are_another_word(
    word: str, random: object, blanks: bool, text: bool
) -> None:
    letters = list(word)
    random.shuffle(letters)  # type: ignore[attr-defined]
    other = "".join(letters)
    written = " ".join(other) if blanks else other
    written = f"\\text{{{written}}}" if text else written
    for spelling in SPELLINGS:
        assert verify_math(spelling.format(written), word).correct == (other == word)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 50), st.integers(1, 30), st.integers(2, 31), st.booleans(), st.booleans())
def test_mixed_numbers_agree_with_exact_arithmetic(
    whole: int, above: int, below: int, negative: bool, latex: bool
) -> None:
    assume(above < below)
    sign = -1 if negative else 1
    value = sign * (whole + Fraction(above, below))
    mixed = f"{'-' * negative}{whole} " + (f"\\frac{{{above}}}{{{below}}}" if latex else f"{above}/{below}")
    assert verify_math(f"\\boxed{{{mixed}}}", str(value)).correct
    assert verify_math(f"Answer: {value}", mixed).correct
    product, difference = sign * whole * Fraction(above, below), sign * (whole - Fraction(above, below))
    assert not verify_math(f"Answer: {product}", mixed).correct
    assert not verify_math(f"Answer: {difference}", mixed).correct


def digits_in(number: int, base: int) -> str:
    digits = ""
    while number:
        number, digit = divmod(number, base)
        digits = str(digit) + digits
    return digits


@settings(deadline=None, max_examples=40)
@given(st.integers(2, 10**6), st.integers(2, 9), st.integers(2, 9), st.integers(-1, 1))
def test_bases_agree_with_exact_arithmetic(number: int, base: int, other: int, off: int) -> None:
    mine = f"{digits_in(number + off, other)}_{{{other}}}"
    assert verify_math(f"\\boxed{{{mine}}}", f"{digits_in(number, base)}_{base}").correct == (off == 0)


@settings(deadline=None, max_examples=20)
@given(
    st.sampled_from(
        ["{}^{{{}}}", "\\frac{{1}}{{{}^{{{}}}}}", "\\frac{{\\pi}}{{{}^{{{}}}}}", "\\{{{}^{{-{}}}\\}}"]
    ),
    st.integers(2, 9),
    st.integers(30, 300),
    st.sampled_from([-1, 1]),
)
def test_powers_differ_from_the_next(form: str, base: int, exponent: int, off: int) -> None:
    """However small or large they are."""
    reference = form.format(base, exponent)
    assert verify_math(f"Answer: ${reference}$", reference).correct
    assert not verify_math(f"Answer: ${form.format(base, exponent + off)}$", reference).correct
    assert not verify_math("Answer: 0", reference).correct


ROOTS = ["\\sqrt{{{0}{1}}}", "\\sqrt{{{0}}}\\sqrt{{{1}}}", "({0}{1})^{{1/2}}"]
LOGARITHMS = ["\\ln({0}{1})", "\\ln {0}+\\ln {1}", "\\ln {1} - \\ln\\frac{{1}}{{{0}}}"]


@settings(deadline=None, max_examples=30)
@given(st.sampled_from([ROOTS, LOGARITHMS]), st.permutations("abgLxyR"), st.data())
def test_letters_are_positive_where_both_formulas_need_it(
    forms: list[str], letters: list[str], data: st.DataObject
) -> None:
    first, second = (data.draw(st.sampled_from(forms)) for _ in range(2))
    a, b, c = letters[:3]
    assert verify_math(f"Answer: ${first.format(a, b)}$", second.format(a, b)).correct
    assert not verify_math(f"Answer: ${first.format(a, c)}$", second.format(a, b)).correct


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gsm8k_test.jsonl", "aime-2024.parquet"])
def test_references_of_real_data(name: str) -> None:
    """Each equals itself in every spelling, and none the next one."""
    file = SHARED / name
    if not file.exists():
        pytest.skip(f"{file} is not on this machine")
    if file.suffix == ".jsonl":
        solutions = [json.loads(line)["answer"] for line in file.read_text().splitlines()]
        answers = [solution.rpartition("####")[2].strip() for solution in solutions]
    else:
        table = pytest.importorskip("pyarrow.parquet").read_table(file)
        answers = [str(row["reward_model"]["ground_truth"]) for row in table.to_pylist()]
    for answer in answers:
        number = int(answer.replace(",", ""))
        for spelling in SPELLINGS:
            for form in (answer, str(number), f"\\${number}", f"{number}.00", f"{number} dollars"):
                assert verify_math(spelling.format(form), answer).correct, (spelling, form)
                assert not verify_math(spelling.format(form), str(number + 1)).correct, (spelling, form)
