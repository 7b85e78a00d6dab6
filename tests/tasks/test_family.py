"""The task family: that every knob does what it says, that the real verifier judges as the teacher does, and
no leaks."""

from __future__ import annotations

import json
import random
from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from megarl_tasks import family
from megarl_tasks.arithmetic import build_tokenizer, held_out
from megarl_tasks.family import SIGNS, FamilyProblem, Knobs
from megarl_verifier.answer import verify_dapo

DRAWS = 3000
TOKENIZER = build_tokenizer(family.ALPHABET + ";~!?", ("Answer: ",), family.POSITIONS)
# Settings far apart, each a legal one.
KNOBS = [
    Knobs(),
    Knobs(lines=(1, 46), width=5, brief=0.85),
    Knobs(terms=(5, 6), lines=(2, 6), ways=((0.5, 0.9), (0.3, 0.5), (0.15, 0.1), (0.05, 0.0))),
    Knobs(lines=(2, 20), skew=3.0, bare=0.3, ramble=0.5, ramble_lines=(20, 60)),
    Knobs(lines=(0, 20), trivial=0.4, impossible=0.4),
    Knobs(lines=(2, 52), skew=3.0, adds=True),
]
knobs_and_seed = st.tuples(st.sampled_from(KNOBS), st.integers(0, 2**32))


def texts(knobs: Knobs, draws: int = DRAWS) -> list[tuple[FamilyProblem, str]]:
    rng = random.Random(7)
    problems = [family.sample_problem(rng, knobs) for _ in range(draws)]
    return [(problem, family.teach(problem, rng, knobs)) for problem in problems]


def right(problem: FamilyProblem, response: str) -> bool:
    return verify_dapo(response, problem.answer).correct


def additions(response: str) -> list[tuple[str, int]]:
    """The sign of each addition and by how much its result is off."""
    found = []
    for line in response.splitlines():
        if "+" in line:
            sign = next(c for c in line if c in SIGNS)
            left, result = line.split(sign)
            found.append((sign, (int(result) - sum(map(int, left.split("+")))) % 10))
    return found


def carried(response: str) -> list[str]:
    """The lines between the additions and the answer."""
    return [line for line in response.splitlines() if line[0].isalpha() and line[1] == ":"]


def near(share: float, expected: float, draws: int = DRAWS) -> bool:
    """Within four standard errors."""
    return abs(share - expected) <= 4 * (expected * (1 - expected) / draws) ** 0.5 + 1e-12


@given(knobs_and_seed)
def test_lengths_are_those_of_the_tokenizer(drawn: tuple[Knobs, int]) -> None:
    knobs, rng = drawn[0], random.Random(drawn[1])
    problem = family.sample_problem(rng, knobs)
    response = family.teach(problem, rng, knobs)
    ids = TOKENIZER(response).input_ids
    assert TOKENIZER.decode(TOKENIZER(problem.prompt).input_ids) == problem.prompt
    assert TOKENIZER.decode(ids) == response
    plain = family.teach(problem, rng, knobs.model_copy(update={"bare": 0.0, "ramble": 0.0}))
    whole = family.response_tokens(len(problem.terms), problem.lines, knobs.width)
    assert len(TOKENIZER(plain).input_ids) + 1 == whole <= family.longest_right(knobs)
    assert len(TOKENIZER(problem.prompt).input_ids) <= 16, "data.max_prompt_tokens of the ablations"
    assert len(TOKENIZER(problem.prompt).input_ids) + len(ids) + 1 <= family.POSITIONS


@given(knobs_and_seed)
def test_work_without_mistakes_is_graded_right(drawn: tuple[Knobs, int]) -> None:
    knobs = drawn[0].model_copy(update={"ways": ((1.0, 0.0),), "bare": 0.0, "ramble": 0.0})
    rng = random.Random(drawn[1])
    problem = family.sample_problem(rng, knobs)
    response = family.teach(problem, rng, knobs)
    assert right(problem, response) == (problem.kind != "?")
    assert {off for _, off in additions(response)} == {0}
    assert len(additions(response)) == len(problem.terms) - 1
    assert [line[0] for line in carried(response)] == list(family.COUNTERS[: problem.lines])[::-1]
    step = problem.terms[-1] if knobs.adds else 0
    results = [(sum(problem.terms) + step * n) % 10 for n in range(1, problem.lines + 1)]
    assert [line[1:] for line in carried(response)] == [f":{str(one) * knobs.width}" for one in results]


def test_shares_of_difficulty_and_what_the_kinds_mean() -> None:
    drawn = texts(Knobs(trivial=0.45, impossible=0.3, ways=((1.0, 0.6),)))
    kinds = Counter(problem.kind for problem, _ in drawn)
    assert near(kinds["!"] / DRAWS, 0.45) and near(kinds["?"] / DRAWS, 0.3)
    solved = {kind: [right(p, text) for p, text in drawn if p.kind == kind] for kind in ("", "!", "?")}
    assert all(solved["!"]) and not any(solved["?"])
    assert 0.04 < sum(solved[""]) / len(solved[""]) < 0.12, "0.4^3 and what cancels"
    answers = {problem.answer for problem, _ in drawn if problem.kind == "?"}
    assert len(answers) > 400 and all(len(answer) == 3 for answer in answers)
    assert {p.kind for p, _ in texts(Knobs(), 200)} == {""}
    assert {p.kind for p, _ in texts(Knobs(impossible=1.0), 200)} == {"?"}


@pytest.mark.parametrize("skew", [0.5, 1.0, 4.0])
def test_lines_and_skew(skew: float) -> None:
    lines = [problem.lines for problem, _ in texts(Knobs(lines=(3, 43), skew=skew))]
    assert min(lines) in (3, 4) and max(lines) == 43
    assert sum(lines) / DRAWS == pytest.approx(3 + 40 / (skew + 1), abs=1.0)


def test_terms_and_width() -> None:
    drawn = texts(Knobs(terms=(4, 6), width=3))
    assert {len(p.terms) for p, _ in drawn} == {4, 5, 6} == {len(additions(text)) + 1 for _, text in drawn}
    assert all(len(line) == 5 for _, text in drawn for line in carried(text))


def test_ways_have_their_shares_and_mistakes() -> None:
    ways = ((0.7, 0.5), (0.2, 0.1), (0.1, 0.0))
    drawn = texts(Knobs(ways=ways, habit=0.8))
    used: Counter[str] = Counter()
    offs: dict[str, Counter[int]] = {sign: Counter() for sign in SIGNS}
    for _, text in drawn:
        signs = {sign for sign, _ in additions(text)}
        assert len(signs) == 1, "one way a response"
        used += Counter(signs)
        for sign, off in additions(text):
            offs[sign][off] += 1
    for sign, (share, error) in zip(SIGNS, ways, strict=False):
        assert near(used[sign] / DRAWS, share)
        assert near(1 - offs[sign][0] / offs[sign].total(), error, offs[sign].total())
    wrong = offs["="].total() - offs["="][0]
    assert near(offs["="][1] / wrong, 0.8, wrong)
    rare = [right(p, text) for p, text in drawn if ";" in text]
    assert all(rare), "the rare way is the reliable one: exploring pays"


def test_lines_that_add_go_wrong_as_additions_do() -> None:
    drawn = texts(Knobs(lines=(2, 52), skew=3.0, adds=True, ways=((1.0, 0.2),), habit=0.8), 300)
    offs: Counter[int] = Counter()
    for problem, text in drawn:
        total = int(text.split("\n")[len(problem.terms) - 2][-1])
        for line in carried(text):
            offs[(int(line[2]) - total - problem.terms[-1]) % 10] += 1
            total = int(line[2])
        assert text.endswith(f"Answer: {total}")
    wrong = offs.total() - offs[0]
    assert near(wrong / offs.total(), 0.2, offs.total()) and near(offs[1] / wrong, 0.8, wrong)


def test_bare_guesses() -> None:
    drawn = texts(Knobs(bare=0.3, guess=0.4))
    bare = [right(p, text) for p, text in drawn if text.startswith("Answer")]
    assert near(len(bare) / DRAWS, 0.3) and near(sum(bare) / len(bare), 0.4, len(bare))


def test_rambling_repeats_one_line_and_is_as_often_right() -> None:
    drawn = texts(Knobs(lines=(2, 20), ramble=0.25, ramble_lines=(30, 90)))
    repeated = [max(len(list(same)) for _, same in groupby(text.splitlines())) - 1 for _, text in drawn]
    rambles = [count for count in repeated if count]
    assert near(len(rambles) / DRAWS, 0.25)
    assert min(rambles) == 30 and max(rambles) == 90
    share = {
        long: [right(p, text) for (p, text), n in zip(drawn, repeated, strict=True) if bool(n) == long]
        for long in (True, False)
    }
    assert sum(share[True]) / len(share[True]) == pytest.approx(
        sum(share[False]) / len(share[False]), abs=0.05
    )


def test_the_warm_start_is_brief_and_mostly_learnable() -> None:
    rng, knobs = random.Random(3), Knobs(lines=(20, 40), brief=0.6, trivial=0.5, impossible=0.05)
    drawn = [family.sample_taught_problem(rng, knobs) for _ in range(DRAWS)]
    kinds = Counter(problem.kind for problem in drawn)
    assert near(kinds["!"] / DRAWS, family.WARM_SHARE) and near(kinds["?"] / DRAWS, 0.05)
    assert near(sum(problem.lines <= family.BRIEF_LINES for problem in drawn) / DRAWS, 0.6)


REFUSED: dict[str, dict[str, Any]] = {
    "terms: must be 2 to 6": {"terms": (2, 7)},
    "lines: must be two whole numbers": {"lines": (9, 3)},
    "lines: at most 52": {"lines": (1, 60)},
    "terms, lines: 3200 different problems": {"lines": (2, 6)},
    "trivial + impossible": {"trivial": 0.6, "impossible": 0.6},
    "ways: their shares must sum to 1": {"ways": ((0.5, 0.1), (0.4, 0.1))},
    "ways: must be 1 to 4 pairs": {"ways": ()},
    "ramble: there must be a line": {"lines": (0, 20), "ramble": 0.1},
    "must fit 512 tokens": {"width": 20},
    "Extra inputs are not permitted": {"nosuch": 1},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_is_refused(message: str) -> None:
    with pytest.raises(ValidationError, match=message.replace("+", r"\+")):
        Knobs.model_validate(REFUSED[message])


def read(folder: Path, name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


HARD: dict[str, Any] = {
    "lines": (4, 40),
    "eval_lines": (4, 20),
    "trivial": 0.4,
    "impossible": 0.2,
    "ways": ((1.0, 0.3),),
}


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("family")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(family, "SFT_ROWS", 2000)  # of 38,400: enough for shares
        family.write_family(folder / "a", 0, **HARD)
        family.write_family(folder / "again", 0, **HARD)
        family.write_family(folder / "other", 1, **HARD)
    return folder


def test_files(task: Path) -> None:
    sft, train, evaluation = (read(task / "a", name) for name in ("sft", "train", "eval"))
    assert (len(sft), len(train), len(evaluation)) == (2000, family.TRAIN_ROWS, 512)
    prompts = {row["prompt"] for row in evaluation}
    assert len(prompts) == 512 and len({row["prompt"] for row in train}) == family.TRAIN_ROWS
    assert prompts.isdisjoint(row["prompt"] for row in (*sft, *train))
    assert all(map(held_out, prompts))
    kinds = Counter(row["prompt"][0] for row in train)
    assert near(kinds["!"] / len(train), 0.4, len(train)) and near(kinds["?"] / len(train), 0.2, len(train))
    assert not {"!", "?"} & {prompt[0] for prompt in prompts}, "all held-out problems can be learned"
    names = Counter(prompt[-2] for prompt in prompts)
    assert set(names) <= set(family.COUNTERS[3:20]), "eval_lines"
    assert max(Counter(row["answer"] for row in evaluation).values()) < 0.2 * 512, "guessing would pay"
    for row in sft:
        assert verify_dapo(row["response"], row["answer"]).correct == row["response"].endswith(
            f": {row['answer']}"
        )


def test_the_seed_decides_and_evaluation_is_fixed(task: Path) -> None:
    files = sorted(path.relative_to(task / "a") for path in (task / "a").rglob("*") if path.is_file())
    differing = set()
    for file in files:
        assert (task / "a" / file).read_bytes() == (task / "again" / file).read_bytes(), file
        if (task / "a" / file).read_bytes() != (task / "other" / file).read_bytes():
            differing.add(str(file))
    assert differing == {"sft.jsonl", "train.jsonl", "model/model.safetensors"}
    described = json.loads((task / "a" / "model" / "config.json").read_text())
    assert described["max_position_embeddings"] == family.POSITIONS
