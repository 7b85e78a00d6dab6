"""The DAPO protocol on answers as models write them, right and wrong, and on hostile text."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megarl_verifier.answer import MAX_ANSWER, find_answer, last_boxed, normalise, verify_dapo

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"

RIGHT = [
    ("Answer: 540", "540"),
    ("so it is.\n\nAnswer: 540\n", "540"),
    ("answer:540", "540"),
    ("ANSWER : 540", "540"),
    ("**Answer:** 540", "540"),
    ("**Answer: 540**", "540"),
    ("**Answer**: **540**", "540"),
    ("# Final Answer: `540`", "540"),
    ("Answer: $540$", "540"),
    ("Answer: $540$.", "540"),
    ("Answer: $540.$", "540"),
    ("Answer: \\(540\\)", "540"),
    ("Answer: \\[540\\]", "540"),
    ("Answer:\n\n540", "540"),
    ("Answer:\n$$\n540\n$$", "540"),
    ("Answer:\n\\[\n\\boxed{540}\n\\]", "540"),
    ("Answer: \\boxed{540}", "540"),
    ("Answer: The final answer is $\\boxed{540}$", "540"),
    ("Answer: the answer is $540$ dollars", "540"),
    ("Answer: 540.", "540"),
    ("Answer: 540.0", "540"),
    ("Answer: +540", "540"),
    ("Answer: 0073", "73"),
    ("Answer: 73", "073"),
    ("Answer: 000", "0"),
    ("Answer: -0", "0"),
    ("Answer: \u22127", "-7"),
    ("Answer: $-7$", "-7"),
    ("Answer: 1,234,567", "1234567"),
    ("Answer: $1{,}234$", "1234"),
    ("Answer: $1\\,234$", "1234"),
    ("Answer: $1,\\!234$", "1234"),
    ("Answer: 1 234", "1234"),
    ("Answer: 1234", "1,234"),
    ("Answer: \\$1,234", "1234"),
    ("Answer: $5", "5"),
    ("Answer: 12 units", "12"),
    ("Answer: 12cm", "12"),
    ("Answer: $12\\text{ cm}^2$", "12"),
    ("Answer: $12\\text{ m}$", "12"),
    ("Answer: $12\\,\\mathrm{cm}^{2}$", "12"),
    ("Answer: 12 square units", "12"),
    ("Answer: $90^\\circ$", "90"),
    ("Answer: $90^{\\circ}$", "90"),
    ("Answer: 90\u00b0", "90"),
    ("Answer: 50%", "50"),
    ("Answer: $50\\%$", "50"),
    ("Answer: x = 5", "5"),
    ("Answer: $m+n = 3+4 = 7$", "7"),
    ("Answer: $f(1, 2) = 5$", "5"),
    ("Answer: \\text{540}", "540"),
    ("Answer: $\\frac12$", "1/2"),
    ("Answer: $\\dfrac{1}{2}$", "\\frac{1}{2}"),
    ("Answer: $\\sqrt2$", "\\sqrt{2}"),
    ("Answer: 3\nno, wait.\nAnswer: 4", "4"),
    ("Answer: " + "9" * 500, "9" * 500),
    ("\ud800\u0130\u0130 Answer: 7", "7"),
]

WRONG = [
    ("", "5"),
    ("540", "540"),
    ("\\boxed{540}", "540"),
    ("The result is 540.", "540"),
    ("Answers: 540", "540"),
    ("Answer 540", "540"),
    ("Answer:", "540"),
    ("Answer:", ""),
    ("Answer: $$", ""),
    ("Answer: 4\nno, wait.\nAnswer: 3", "4"),
    ("Answer: 540\nAnswer:", "540"),
    ("Answer: 541", "540"),
    ("Answer: 54", "540"),
    ("Answer: -540", "540"),
    ("Answer: 540.5", "540"),
    ("Answer: 5 or 6", "6"),
    ("Answer: 5, 6", "6"),
    ("Answer: $5$ or $6$", "6"),
    ("Answer: a = 3, b = 4", "4"),
    ("Answer: a=3 and b=4", "4"),
    ("Answer: x >= 5", "5"),
    ("Answer: 1,2,3", "123"),
    ("Answer: 12 34", "1234"),
    ("Answer: 1,23", "123"),
    ("Answer: 10\u00b2", "102"),
    ("Answer: 10^2", "102"),
    ("Answer: 1e2", "100"),
    ("Answer: 9**2", "81"),
    ("Answer: 40+41", "81"),
    ("Answer: 0.\\overline{3}", "0.3"),
    ("Answer: $Answer (without quotes)", "5"),
    ('Remember to put your answer on its own line after "Answer:".', "540"),
    ("Answer: None", "540"),
    ("Answer: " + "1" * (MAX_ANSWER + 1), "1"),
]


@pytest.mark.parametrize(("response", "answer"), RIGHT)
def test_right(response: str, answer: str) -> None:
    verdict = verify_dapo(response, answer)
    assert verdict.correct
    assert verdict.extracted == normalise(answer)


@pytest.mark.parametrize(("response", "answer"), WRONG)
def test_wrong(response: str, answer: str) -> None:
    assert not verify_dapo(response, answer).correct


@settings(deadline=None)
@given(st.integers(-(10**30), 10**30), st.integers(-(10**30), 10**30), st.integers(0, 5), st.booleans())
def test_integers_compare_as_integers(a: int, b: int, zeros: int, grouped: bool) -> None:
    digits = f"{abs(a):,}" if grouped else "0" * zeros + str(abs(a))
    written = ("\u2212" if a < 0 else "") + digits
    for other in (a, b):
        assert verify_dapo(f"Thus.\n**Answer:** ${written}$", str(other)).correct == (a == other)
    assert normalise(written) == str(a)


@settings(deadline=None)
@given(st.text(st.characters(codec="utf-16", exclude_characters="\ud800"), max_size=80))
@example("\\ ")  # a space of LaTeX's, of which the response's line loses one half
def test_any_text_has_a_form_that_equals_itself(text: str) -> None:
    form = normalise(text)
    line = " ".join(text.splitlines())
    assert verify_dapo(f"Answer: {line}", line).correct == bool(verify_dapo(f"Answer: {line}", "").extracted)
    if form.lstrip("-").isdecimal() and form.isascii():
        assert normalise(form) == form


@settings(deadline=None)
@given(st.text(max_size=200), st.integers(0, 10**6))
def test_what_stands_before_the_last_answer_line_does_not_matter(before: str, value: int) -> None:
    assert verify_dapo(f"{before}\nAnswer: {value}", str(value)).correct


@pytest.mark.parametrize(
    "text",
    [
        "answer" * 200_000,
        "answer:" * 200_000,
        "answer" + " " * 1_000_000 + ":5",
        "Answer: " + "{" * 1_000_000,
        "Answer: " + "$" * 1_000_000,
        "Answer: " + "1," * 499,
        "Answer: " + " 1" * 499,
        "Answer: " + "\\text{" * 150 + "}" * 90,
        "Answer:" + "\n" * 1_000_000,
        "\\boxed{" * 200_000,
        "\\boxed" + " " * 1_000_000,
        "9**9**9\n" * 100_000,
    ],
    ids=range(12),
)
def test_hostile_text_costs_little(text: str) -> None:
    start = time.process_time()
    assert not verify_dapo(text, "5").correct
    last_boxed(text)
    assert time.process_time() - start < 2.0


def test_answer_text_is_never_run(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    assert not verify_dapo(f"Answer: __import__('pathlib').Path('{marker}').touch()", "0").correct
    assert not marker.exists()


def test_boxed() -> None:
    assert last_boxed(r"\boxed{1} and \boxed {\frac{1}{2}} and \boxed{3") == r"\frac{1}{2}"
    assert last_boxed("none") is None
    assert last_boxed("\\boxed{" * 1000) is None


def test_find_answer_positions_survive_text_whose_lower_case_is_longer() -> None:
    assert find_answer("\u0130" * 50 + "Answer: 17 apples\nAmen") == "17 apples"


def test_every_real_reference_answer_is_right_against_itself_and_wrong_against_the_next() -> None:
    file = SHARED / "gsm8k_test_200.jsonl"
    if not file.exists():
        pytest.skip(f"{file} is not on this machine")
    answers = [
        json.loads(line)["answer"].rpartition("####")[2].strip() for line in file.read_text().splitlines()
    ]
    assert len(answers) == 200
    for answer in answers:
        number = int(answer.replace(",", ""))
        assert verify_dapo(f"... \n**Answer:** \\${number:,}", answer).correct
        assert not verify_dapo(f"Answer: {number + 1}", answer).correct
