"""The ablations' task: a sum that is decided early in a response and graded late.

A teacher with a bad habit adds four numbers modulo 10. A countdown repeats the result, so advantages
must reach 60 to 170 tokens back."""

from __future__ import annotations

import random
import string
from pathlib import Path
from typing import NamedTuple

from megarl_tasks.arithmetic import build_tokenizer, write_task_files

TERMS, MAX_TERM = 4, 4
SHORTEST, LONGEST = 16, 36
COUNTERS = string.ascii_lowercase + string.ascii_uppercase  # names of the countdown's lines

# Share of additions that are one too large. Correct ones have the same share, so a policy that only becomes
# more certain gains nothing.
HABIT = 0.45
# Share of other errors. A tenth of responses have only correct additions.
SLIP = 0.10
# Share and length of brief countdowns in the warm start, which are learned quickly.
BRIEF, BRIEF_LINES = 0.7, 4

SFT_ROWS = 600 * 64
TRAIN_ROWS = 4096
ALPHABET = "0123456789+=\n :" + COUNTERS


class DelayedSum(NamedTuple):
    """A sum modulo 10. lines: of the countdown."""

    terms: tuple[int, ...]
    lines: int

    @property
    def prompt(self) -> str:
        """E.g. `7+2+4+1=t` and a newline; t names the first line."""
        return "+".join(map(str, self.terms)) + f"={COUNTERS[self.lines - 1]}\n"

    @property
    def answer(self) -> str:
        return str(sum(self.terms) % 10)


def sample_problem(rng: random.Random) -> DelayedSum:
    """Sample a problem, of few different additions, which a small model learns."""
    terms = (rng.randint(0, 9), *(rng.randint(1, MAX_TERM) for _ in range(TERMS - 1)))
    return DelayedSum(terms, rng.randint(SHORTEST, LONGEST))


def teach(problem: DelayedSum, rng: random.Random, habit: float = HABIT, slip: float = SLIP) -> str:
    """Return the teacher's response, without end-of-sequence token. Errors carry over to later lines."""
    total, text = problem.terms[0], ""
    for term in problem.terms[1:]:
        result, chance = (total + term) % 10, rng.random()
        if chance < slip:
            result = (result + rng.randint(2, 9)) % 10
        elif chance < slip + habit:
            result = (result + 1) % 10
        text += f"{total}+{term}={result}\n"
        total = result
    text += "".join(f"{name}:{total}\n" for name in reversed(COUNTERS[: problem.lines]))
    return f"{text}Answer: {total}"


def write_task(folder: Path, seed: int) -> None:
    """Write the task, as `arithmetic.write_demo`."""

    def answer(problem: DelayedSum, rng: random.Random) -> tuple[DelayedSum, str]:
        if rng.random() < BRIEF:
            problem = DelayedSum(problem.terms, rng.randint(1, BRIEF_LINES))
        return problem, teach(problem, rng)

    tokenizer = build_tokenizer(ALPHABET, ("Answer: ",))
    write_task_files(folder, seed, sample_problem, answer, SFT_ROWS, TRAIN_ROWS, tokenizer)
