"""Answers turned into integers: by a list that was worked out by hand, by forms that are made here, and in
files."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from math import gcd
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.config.errors import DataError
from megarl.config.schema import DataConfig
from megarl.data.prompts import prompt_uid, read_prompts
from megarl_tasks.integer_files import convert, write_rows
from megarl_verifier.integers import IntegerAnswer, Refused, integer_answer
from tests.data.test_reader import NO_ANSWER, byte_tokenizer, jsonl

ROWS = yaml.safe_load((Path(__file__).parent / "integer_answers.yaml").read_text())
# A principal root to one and a real one to another.
NOT_TURNED = {r"\sqrt[3]{-8}"}
PAPER = "Let $x$ and $y$ be real numbers such that $x^2 + y^2 - 22x - 16y + 113 = 0$. What is the least $x$?"


def turned(answer: str, question: str = "") -> IntegerAnswer | str:
    try:
        return integer_answer(question, answer)
    except Refused as refused:
        return refused.reason


def test_the_list_is_turned_or_refused_rightly() -> None:
    assert len(ROWS) >= 200 and len({row[0] for row in ROWS}) == len(ROWS)
    differ = {}
    for answer, expected, *question in ROWS:
        found = turned(answer, *question)
        value = found.value if isinstance(found, IntegerAnswer) else found
        if value != expected:
            differ[answer] = (expected, value)
    assert differ.keys() <= NOT_TURNED, differ


def test_the_sentence_is_the_papers() -> None:
    found = integer_answer(PAPER, r"11 - 2\sqrt{6}")
    assert found.value == 19 and found.back == r"11 - 2\sqrt{6}"
    assert found.asked == (
        r"The original answer is in the form $k - m\sqrt{n}$, where $k$, $m$ and $n$ are positive integers "
        r"and $n$ is not divisible by the square of any prime. Please find the value of $k + m + n$."
    )
    asked = {
        r"-\frac{2}{3}": r"$-\frac{m}{n}$, where $m$ and $n$ are relatively prime positive integers. "
        "Please find the value of $m + n$.",
        r"\frac{5 - 2\sqrt{3}}{6}\text{ cm}": r"$\frac{k - m\sqrt{n}}{p}\text{ cm}$, where $k$, $m$, $n$ and "
        "$p$ are positive integers, the greatest common divisor of $k$, $m$ and $p$ is 1 and $n$ is not "
        "divisible by the square of any prime. Please find the value of $k + m + n + p$.",
        r"\frac{-3-\sqrt{21}}{6}": r"$-\frac{k + \sqrt{m}}{n}$, where $k$, $m$ and $n$ are positive integers "
        "and $m$ is not divisible by the square of any prime. Please find the value of $k + m + n$.",
        "30^\\circ": r"$n^\circ$, where $n$ is an integer. Please find the value of $n$.",
    }
    for answer, sentence in asked.items():
        assert integer_answer("", answer).asked == f"The original answer is in the form {sentence}"
    assert integer_answer("", "2^{10}").asked == "The answer is an integer. Please give it in decimal digits."
    assert integer_answer("", "1,024").asked == ""


def test_the_letters_are_not_the_questions() -> None:
    asked = integer_answer(
        "Integers $m$ and $nk$ with \\(p_1 = \\text{for us}\\); let s be ...", "2\\sqrt{3}"
    ).asked
    assert "$q\\sqrt{r}$" in asked
    with pytest.raises(Refused):
        integer_answer("$abcdefghijklmnopqrstuvwxyz$", "1/2")


def free_of_powers(n: int, degree: int) -> bool:
    return all(n % p**degree for p in range(2, 100))


def conditions_hold(asked: str, at: dict[str, int]) -> None:
    """Check what the sentence says of the integers."""
    said = asked.partition(", where ")[2].rpartition(". Please")[0]
    for letter, value in at.items():
        assert value > 0 or f"${letter}$ is an integer" in said
    groups = re.findall(r"((?:\$[a-z]\$(?:, | and )?)+) (are|is) ([^$]*)", said)
    if "relatively prime" in said:
        assert gcd(*at.values()) == 1
    for letters in re.findall(r"greatest common divisor of ([^0-9]*) is 1", said):
        assert gcd(*(at[letter] for letter in re.findall(r"\$(.)\$", letters))) == 1
    for letters, _, what in groups:
        for letter in re.findall(r"\$(.)\$", letters):
            power = re.search(r"by the (square|cube|4th power)", what)
            if power:
                assert free_of_powers(at[letter], {"square": 2, "cube": 3, "4th power": 4}[power[1]])
            if "perfect power" in what:
                assert all(root**k != at[letter] for root in range(2, 40) for k in range(2, 12))


def test_what_the_sentences_say_is_true() -> None:
    checked = 0
    for answer, _, *question in ROWS:
        found = turned(answer, *question)
        if isinstance(found, IntegerAnswer) and found.asked.startswith("The original"):
            form = re.search(r"in the form \$(.*?)(?<!\\)\$, where", found.asked)
            letters = re.findall(r"[a-z]", found.asked.rpartition("the value of ")[2])
            values = [int(x) for x in re.findall(r"-?[0-9]+", constants_out(found.back))]
            assert form and len(values) == len(letters), (answer, found)
            values = values if "is an integer" in found.asked else [abs(value) for value in values]
            assert sum(values) == found.value, (answer, found)
            conditions_hold(found.asked, dict(zip(letters, values, strict=True)))
            checked += 1
    assert checked > 120


def constants_out(back: str) -> str:
    r"""Remove the numbers that are no letters of the form: degrees of roots, powers of pi and e."""
    return re.sub(r"\\sqrt\[\d\]|(?<=\\pi)\^\{\d\}|(?<=e)\^\{\d\}", r"\\sqrt", back)


WHOLE = st.integers(-60, 60)


@settings(max_examples=150, deadline=None)
@given(a=WHOLE, b=WHOLE, c=st.integers(2, 120), d=st.integers(1, 40), form=st.integers(0, 3))
def test_sums_with_a_root_have_one_form(a: int, b: int, c: int, d: int, form: int) -> None:
    r"""(a + b sqrt c)/d, written in several ways, against a reduction by trial division."""
    texts = (
        rf"\frac{{{a} + {b}\sqrt{{{c}}}}}{{{d}}}",
        rf"\frac{{{a}}}{{{d}}} + \frac{{{b}}}{{{d}}}\sqrt{{{c}}}",
        rf"\left({b}\sqrt{{{c}}} + {a}\right)/{d}",
        rf"\frac{{{2 * a} - {-2 * b}\cdot\sqrt{{{c}}}}}{{{2 * d}}}".replace("--", "+").replace("- -", "+ "),
    )
    found = turned(texts[form])
    root = max(k for k in range(1, 12) if c % k**2 == 0)
    c //= root**2
    b *= root
    if c == 1:
        a, b = a + b, 0
    if b == 0:
        below = gcd(a, d)
        expected = a // d if d == below else abs(a) // below + d // below
    else:
        shared = gcd(a, b, d)
        a, b, d = abs(a) // shared, abs(b) // shared, d // shared
        expected = a + (b if b > 1 else 0) + c + (d if d > 1 else 0)
    assert isinstance(found, IntegerAnswer) and found.value == expected, (texts[form], found)


def test_hostile_answers_are_refused_in_a_moment() -> None:
    started = time.monotonic()
    hostile: Sequence[str] = (
        "9^{9^{9^{9}}}",
        "9999999999!",
        "((((((" * 40,
        "{" * 299,
        "".join(rf"(1+\sqrt{{{n}}})" for n in range(2, 26)),
        r"(1+\sqrt{2}+\sqrt{3}+\sqrt{5})^{99}",
        r"\sqrt{" * 15 + "2" + "}" * 15,
        r"\sqrt{" * 8 + "2" + "+1}" * 8,
        r"\sqrt{10^{600}+7}",
        r"\binom{10^9}{10^8}",
        r"\frac{1}{" + "+".join(rf"\sqrt{{{n}}}" for n in (2, 3, 5, 7, 11, 13)) + "}",
        "1e999999999",
        "\\",
        "^",
        r"\frac",
        "1" * 5000,
        "__import__('os').system('touch CANARY')",
        "(1,234)",
        "\ud800",
    )
    for answer in hostile:
        assert isinstance(turned(answer), str), answer
    assert time.monotonic() - started < 30


MATH = {"problem": "Find $x$.", "level": "Level 5", "type": "Algebra"}
FILE: list[tuple[Any, int | str]] = [
    ({"question": "q1", "answer": "42"}, 42),
    ({"question": "q2 ", "answer": r"11 - 2\sqrt{6}"}, 19),
    ({"question": "q3", "answer": "so\n#### 1,234"}, 1234),
    ({**MATH, "solution": r"First \boxed{1}, then \boxed{\frac{3}{4}}."}, 7),
    ({"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}],
      "reward_model": {"ground_truth": "2.5", "style": "rule"}, "extra_info": {"index": 3}}, 7),
    ("{not json", "malformed JSON"),
    ({"question": "q4", "answer": "(1, 2)"}, "several values"),
    ({"question": "q5"}, NO_ANSWER),
    ({"question": "q6", "answer": "1.5e-3"}, "not equal to its form by the symbolic verifier"),
    ({"question": "q7", "answer": -7.0}, -7),
]  # fmt: skip


def test_a_file(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "in.jsonl", *[row for row, _ in FILE])
    done = convert(source, DataConfig())
    assert [int(one) if one[-1].isdigit() else one for one in map(answer_in, done.kept)] == [
        expected for _, expected in FILE if isinstance(expected, int)
    ]
    reasons = [
        (number, expected) for number, (_, expected) in enumerate(FILE, 1) if isinstance(expected, str)
    ]
    assert [(row["refused_row"], row["refused"]) for row in done.refused] == reasons
    assert [(row.row, row.reason) for row in done.report.rejected] == reasons
    assert done.report.kept == 6 and done.turned == 3
    # Nothing is lost: every row is kept with its columns, or refused as it was.
    assert done.refused[1] == {**FILE[6][0], "refused": "several values", "refused_row": 7}
    assert done.kept[0] == {"question": "q1", "answer": "42", "original_answer": "42"}
    assert done.kept[1]["question"].startswith(
        "q2 The original answer is in the form $k - m\\sqrt{n}$, where"
    )
    assert done.kept[2]["original_answer"] == "so\n#### 1,234"
    assert done.kept[3].items() >= {**MATH, "solution": FILE[3][0]["solution"]}.items() - {
        ("problem", MATH["problem"])
    }
    messages = done.kept[4]["prompt"]
    assert messages[0]["content"] == "s" and messages[1]["content"].startswith("u The original answer is in")
    assert done.kept[4]["reward_model"] == {"ground_truth": "7", "style": "rule"}
    assert FILE[4][0]["reward_model"]["ground_truth"] == "2.5"
    # The reader takes what is written.
    write_rows(tmp_path / "a.jsonl", done.kept)
    prompts, report = read_prompts([tmp_path / "a.jsonl"], DataConfig(template="raw"), byte_tokenizer())
    assert [prompt.answer for prompt in prompts] == ["42", "19", "1234", "7", "7", "-7"]
    assert not report.rejected and prompts[0].uid == prompt_uid("q1", "42")
    # What was turned once stays as it is.
    again = convert(tmp_path / "a.jsonl", DataConfig())
    assert again.turned == 0 and again.kept == done.kept


def answer_in(row: dict[str, Any]) -> str:
    return row["reward_model"]["ground_truth"] if "reward_model" in row else row["answer"]


def test_a_parquet_file(tmp_path: Path) -> None:
    rows = [
        {"prompt": [{"role": "user", "content": f"u{i}"}], "reward_model": {"ground_truth": answer}, "n": i}
        for i, answer in enumerate(("3", r"\frac{1}{2}", "x+1", "5"))
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "in.parquet")
    done = convert(tmp_path / "in.parquet", DataConfig())
    write_rows(tmp_path / "out.parquet", done.kept)
    table = pq.read_table(tmp_path / "out.parquet")
    assert table.column_names == ["prompt", "reward_model", "n", "original_answer"]
    assert [row["reward_model"]["ground_truth"] for row in table.to_pylist()] == ["3", "3", "5"]
    assert done.refused == [{**rows[2], "refused": "letters in it", "refused_row": 3}]
    prompts, _ = read_prompts([tmp_path / "out.parquet"], DataConfig(template="raw"), byte_tokenizer())
    assert prompts[1].text.startswith(r"u1 The original answer is in the form $\frac{m}{n}$")
    with pytest.raises(DataError, match="no row can be used: 1 x letters in it"):
        convert(jsonl(tmp_path / "none.jsonl", {"question": "q", "answer": "x"}), DataConfig())


@pytest.mark.slow
def test_the_list_by_way_of_a_file(tmp_path: Path) -> None:
    """At least 95 % of the rows, after the round trip by the symbolic verifier."""
    rows = [{"question": (question or ["?"])[0], "answer": answer} for answer, _, *question in ROWS]
    done = convert(jsonl(tmp_path / "list.jsonl", *rows), DataConfig(), workers=2)
    got: dict[int, int | str] = {row["refused_row"]: row["refused"] for row in done.refused}
    kept = iter(done.kept)
    write_rows(tmp_path / "a.jsonl", done.kept)
    write_rows(tmp_path / "b.jsonl", convert(tmp_path / "list.jsonl", DataConfig(), workers=1).kept)
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    differ = []
    for number, (answer, expected, *_) in enumerate(ROWS, 1):
        found = got[number] if number in got else int(next(kept)["answer"])
        if found != expected:
            differ.append((answer, expected, found))
    assert len(differ) <= 0.05 * len(ROWS), differ
    assert {answer for answer, _, _ in differ} == NOT_TURNED, differ
