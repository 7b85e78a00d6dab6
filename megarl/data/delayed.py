"""The ablations' task: a sum that is decided early in a response and judged late, warm-started by a teacher with a bad habit.

Four numbers are added modulo 10 in three lines; then the result is carried along a forced countdown of 16 to 36 lines to the
answer. Right and wrong part at three tokens, 60 to 170 tokens before the reward, so that it matters how advantages reach back.
"""

from __future__ import annotations

import random
import string
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megarl.config.errors import DataError
from megarl.data.arithmetic import EVAL_ROWS, build_tokenizer, held_out, write_jsonl, write_model

TERMS, MAX_TERM = 4, 4
SHORTEST, LONGEST = 16, 36
COUNTERS = string.ascii_lowercase + string.ascii_uppercase
"""Names of the countdown's lines: a is the last one."""

HABIT = 0.45
"""Share of additions that are one too large. As frequent as right ones: a policy that merely sharpens what it does most gains nothing."""
SLIP = 0.10
"""Share of additions with any other wrong digit. Three right ones in a row are then rare: a tenth of the responses are right."""
BRIEF, BRIEF_LINES = 0.7, 4
"""Most of the warm start's countdowns are brief: they are quickly learned, unlike the additions."""

SFT_ROWS = 600 * 64
TRAIN_ROWS = 4096
ALPHABET = "0123456789+=\n :" + COUNTERS


@dataclass(frozen=True)
class Problem:
    """terms: digits to be added modulo 10. lines: length of the countdown."""

    terms: tuple[int, ...]
    lines: int

    @property
    def prompt(self) -> str:
        """As the model reads it, e.g. `7+2+4+1=t` and a newline; t is the countdown's first name."""
        return "+".join(map(str, self.terms)) + f"={COUNTERS[self.lines - 1]}\n"

    @property
    def answer(self) -> str:
        return str(sum(self.terms) % 10)


def draw_problem(rng: random.Random) -> Problem:
    """A digit and three numbers in 1..4: few facts of addition, which a small model learns well."""
    terms = (rng.randint(0, 9), *(rng.randint(1, MAX_TERM) for _ in range(TERMS - 1)))
    return Problem(terms, rng.randint(SHORTEST, LONGEST))


def draw_problems(rng: random.Random, *, evaluation: bool) -> Iterator[Problem]:
    """Endless problems, from the held-out tenth or from the rest."""
    while True:
        problem = draw_problem(rng)
        if held_out(problem.prompt) == evaluation:
            yield problem


def teach(problem: Problem, rng: random.Random, habit: float = HABIT, slip: float = SLIP) -> str:
    """A response of the teacher, without its end-of-sequence token; each addition goes wrong by itself, and the mistake carries on."""
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


def sft_rows(seed: int) -> Iterator[dict[str, str]]:
    """The teacher's text for the warm start, no prompt of it held out."""
    rng = random.Random(f"{seed}/sft")
    for problem, _ in zip(draw_problems(rng, evaluation=False), range(SFT_ROWS), strict=False):
        if rng.random() < BRIEF:
            problem = Problem(problem.terms, rng.randint(1, BRIEF_LINES))
        yield {"prompt": problem.prompt, "response": teach(problem, rng), "answer": problem.answer}


def problem_rows(rng: random.Random, count: int, *, evaluation: bool) -> Iterator[dict[str, str]]:
    """`count` different problems with their right answers."""
    seen: set[Problem] = set()
    for problem in draw_problems(rng, evaluation=evaluation):
        if problem not in seen:
            seen.add(problem)
            yield {"prompt": problem.prompt, "answer": problem.answer}
        if len(seen) == count:
            return


def write_task(folder: Path, seed: int) -> None:
    """Writes what the ablations start from into `folder`, the same bytes for the same seed.

    model/       Hugging Face folder: untrained model and tokenizer
    sft.jsonl    38,400 rows prompt, response, answer: 600 steps of 64
    train.jsonl  4,096 different problems (prompt, answer), none held out
    eval.jsonl   512 held-out problems, the same for every seed

    Raises DataError where the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_jsonl(folder / "sft.jsonl", sft_rows(seed))
        write_jsonl(folder / "train.jsonl", problem_rows(random.Random(f"{seed}/train"), TRAIN_ROWS, evaluation=False))
        write_jsonl(folder / "eval.jsonl", problem_rows(random.Random("eval"), EVAL_ROWS, evaluation=True))
        write_model(folder / "model", seed, build_tokenizer(ALPHABET, ("Answer: ",)))
    except OSError as error:
        raise DataError(f"{folder}: cannot be written: {error.strerror or error} (choose another folder)") from error
