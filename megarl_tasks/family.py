"""Tasks for ablations, each of which shows the effect of one technique.

As in delayed.py, the first additions decide the result, and later lines only repeat it. With `adds` every
line is an addition.
Settings: configs/ablations. Examples: docs/evidence/ablations.md."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple, Self

from pydantic import model_validator

from megarl.config.schema.section import Section, field
from megarl_tasks.arithmetic import EVAL_ROWS, build_tokenizer, held_out, write_task_files
from megarl_tasks.delayed import ALPHABET, BRIEF_LINES, COUNTERS, MAX_TERM

POSITIONS = 512
SIGNS = "=:;~"  # of additions, by way
TRIVIAL: Final = "!"  # always solved prompts
IMPOSSIBLE: Final = "?"  # never solved prompts
WARM_SHARE = 0.1  # limit of each in the warm start: they teach little
SFT_ROWS = 300 * 64
TRAIN_ROWS = 4096

Span = tuple[int, int]


class Knobs(Section):
    """Settings of a task. The defaults are delayed.py's task."""

    terms: Span = field((4, 4), "fewest and most numbers to be added; one line each but the first", "terms")
    lines: Span = field((16, 36), "fewest and most lines that carry the result to the answer", "lines")
    skew: float = field(
        1.0, "lines are fewest + (most - fewest) u^skew, u uniform; above 1: most short", gt=0
    )
    width: int = field(1, "times that a carried line repeats the result", "digits", ge=1)
    adds: bool = field(False, "each of these lines adds the last number once more: a sum that goes on")
    eval_lines: Span | None = field(None, "lines of held-out problems; null: as `lines`", "lines")
    trivial: float = field(0.0, "share of prompts on which the teacher is always right", ge=0, le=1)
    impossible: float = field(
        0.0, "share of prompts with an answer of three digits that nothing leads to", ge=0, le=1
    )
    ways: tuple[tuple[float, float], ...] = field(
        ((1.0, 0.55),),
        "ways to write an addition, each as share of the teacher's responses and share of wrong additions",
    )
    habit: float = field(0.82, "share of the wrong additions that are one too large", ge=0, le=1)
    bare: float = field(
        0.0, "share of the teacher's responses that guess, without additions or lines", ge=0, le=1
    )
    guess: float = field(0.3, "share of the guesses that are right", ge=0, le=1)
    ramble: float = field(
        0.0, "share of responses that repeat one line over and over before they go on", ge=0, le=1
    )
    ramble_lines: Span = field((40, 80), "fewest and most repetitions", "lines")
    brief: float = field(
        0.7, f"share of the warm start's problems with at most {BRIEF_LINES} lines", ge=0, le=1
    )

    @model_validator(mode="after")
    def _possible(self) -> Self:
        for name in ("terms", "lines", "eval_lines", "ramble_lines"):
            if (span := getattr(self, name)) and not 0 <= span[0] <= span[1]:
                raise ValueError(f"{name}: must be two whole numbers from 0, the larger one last")
        if self.terms[0] < 2 or self.terms[1] > 6:
            raise ValueError("terms: must be 2 to 6")
        if max(self.lines[1], (self.eval_lines or self.lines)[1]) > len(COUNTERS):
            raise ValueError(f"lines: at most {len(COUNTERS)} have names")
        if self.trivial + self.impossible > 1:
            raise ValueError("trivial + impossible: must be at most 1")
        if not 1 <= len(self.ways) <= len(SIGNS) or any(not 0 <= x <= 1 for way in self.ways for x in way):
            raise ValueError(f"ways: must be 1 to {len(SIGNS)} pairs of shares")
        if abs(sum(share for share, _ in self.ways) - 1) > 1e-9:
            raise ValueError("ways: their shares must sum to 1")
        if self.ramble and not self.lines[0]:
            raise ValueError("ramble: there must be a line to repeat (lines from 1)")
        # One in ten is held out. Twice the needed number preserves the shares of unique problems.
        for low, high in (self.lines, self.eval_lines or self.lines):
            problems = 10 * MAX_TERM ** (self.terms[0] - 1) * (high - low + 1)
            if problems < 20 * EVAL_ROWS:
                raise ValueError(
                    f"terms, lines: {problems} different problems (must be {20 * EVAL_ROWS} or more)"
                )
        repeated_lines = self.ramble_lines[1] if self.ramble else 0
        longest = response_tokens(self.terms[1], self.lines[1] + repeated_lines, self.width)
        if 2 * self.terms[1] + 3 + longest > POSITIONS:
            raise ValueError(f"lines, width, ramble_lines: prompt and response must fit {POSITIONS} tokens")
        return self


class FamilyProblem(NamedTuple):
    """A sum modulo 10, and lines that each add `step`. kind: TRIVIAL, IMPOSSIBLE or ""."""

    terms: tuple[int, ...]
    lines: int
    kind: Literal["", "!", "?"] = ""
    step: int = 0

    @property
    def prompt(self) -> str:
        """E.g. `!7+2+4+1=t` and a newline; t names the first line."""
        return f"{self.kind}{'+'.join(map(str, self.terms))}={COUNTERS[: self.lines][-1:]}\n"

    @property
    def answer(self) -> str:
        if self.kind == IMPOSSIBLE:
            return str(100 + zlib.crc32(self.prompt.encode()) % 900)
        return str(self.result)

    @property
    def result(self) -> int:
        return (sum(self.terms) + self.lines * self.step) % 10


def response_tokens(terms: int, lines: int, width: int = 1) -> int:
    """Count tokens with end-of-sequence."""
    return 6 * (terms - 1) + (3 + width) * lines + 3


def longest_right(knobs: Knobs) -> int:
    """Return the tokens of training's longest correct response."""
    return response_tokens(knobs.terms[1], knobs.lines[1], knobs.width)


def sample_problem(
    rng: random.Random, knobs: Knobs, shares: Sequence[float] | None = None, lines: Span | None = None
) -> FamilyProblem:
    """Sample a problem. shares (trivial, impossible) and lines replace the knobs'."""
    trivial, impossible = shares or (knobs.trivial, knobs.impossible)
    low, high = lines or knobs.lines
    kind: Literal["", "!", "?"] = ""
    if (chance := rng.random()) < trivial:
        kind = TRIVIAL
    elif chance < trivial + impossible:
        kind = IMPOSSIBLE
    num_terms = rng.randint(*knobs.terms)
    terms = (rng.randint(0, 9), *(rng.randint(1, MAX_TERM) for _ in range(num_terms - 1)))
    num_lines = low + int((high - low + 1) * rng.random() ** knobs.skew)
    return FamilyProblem(terms, num_lines, kind, terms[-1] if knobs.adds else 0)


def sample_taught_problem(rng: random.Random, knobs: Knobs) -> FamilyProblem:
    shares = (min(knobs.trivial, WARM_SHARE), min(knobs.impossible, WARM_SHARE))
    problem = sample_problem(rng, knobs, shares)
    if rng.random() < knobs.brief:
        problem = problem._replace(lines=min(problem.lines, rng.randint(1, BRIEF_LINES)))
    return problem


def teach(problem: FamilyProblem, rng: random.Random, knobs: Knobs) -> str:
    """Return the teacher's response, as `delayed.teach`; also to impossible prompts."""
    target = problem.result
    if rng.random() < knobs.bare:
        return f"Answer: {target if rng.random() < knobs.guess else (target + rng.randint(1, 9)) % 10}"
    way = rng.choices(range(len(knobs.ways)), [share for share, _ in knobs.ways])[0]
    error_rate = 0.0 if problem.kind == TRIVIAL else knobs.ways[way][1]

    def add(total: int, term: int) -> int:
        result = (total + term) % 10
        if rng.random() < error_rate:
            result = (result + (1 if rng.random() < knobs.habit else rng.randint(2, 9))) % 10
        return result

    total, text, lines = problem.terms[0], "", []
    for term in problem.terms[1:]:
        result = add(total, term)
        text += f"{total}+{term}{SIGNS[way]}{result}\n"
        total = result
    for name in reversed(COUNTERS[: problem.lines]):
        if problem.step:
            total = add(total, problem.step)
        lines.append(f"{name}:{str(total) * knobs.width}\n")
    if rng.random() < knobs.ramble:
        lines[rng.randrange(len(lines))] *= 1 + rng.randint(*knobs.ramble_lines)
    return f"{text}{''.join(lines)}Answer: {total}"


def write_family(folder: Path, seed: int, **knobs: object) -> None:
    """Write a task, as `arithmetic.write_demo`. knobs: fields of `Knobs`.

    Held-out problems are neither trivial nor impossible."""
    settings = Knobs.model_validate(knobs)

    def answer(_: FamilyProblem, rng: random.Random) -> tuple[FamilyProblem, str]:
        while held_out((problem := sample_taught_problem(rng, settings)).prompt):
            pass
        return problem, teach(problem, rng, settings)

    write_task_files(
        folder,
        seed,
        lambda rng: sample_problem(rng, settings),
        answer,
        SFT_ROWS,
        TRAIN_ROWS,
        build_tokenizer(ALPHABET + SIGNS[2:] + TRIVIAL + IMPOSSIBLE, ("Answer: ",), POSITIONS),
        sample_eval=lambda rng: sample_problem(rng, settings, (0.0, 0.0), settings.eval_lines),
    )
