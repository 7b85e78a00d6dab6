"""Small functions to write in Python, described in words and graded by running them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

TRAIN_ROWS, EVAL_ROWS = 2048, 96
CALLS = 4  # of a function, to test it
# Words -> Python, by data source, hardest last. {x} and {y} are arguments, {k} is a number.
PHRASES: dict[str, dict[str, str]] = {
    "one operation": {
        "{x} plus {y}": "{x} + {y}",
        "the sum of {x} and {y}": "{x} + {y}",
        "{x} minus {y}": "{x} - {y}",
        "{x} times {y}": "{x} * {y}",
        "the product of {x} and {y}": "{x} * {y}",
    },
    "a number": {
        "{k} more than {x}": "{x} + {k}",
        "{k} less than {x}": "{x} - {k}",
        "{k} times {x}": "{k} * {x}",
        "{x} divided by {k}, rounded down": "{x} // {k}",
        "the remainder of {x} divided by {k}": "{x} % {k}",
        "the square of {x}, plus {k}": "{x} * {x} + {k}",
    },
    "two operations": {
        "{x} plus {y}, times {k}": "({x} + {y}) * {k}",
        "{x} minus {y}, plus {k}": "{x} - {y} + {k}",
        "{x} times {y}, minus {k}": "{x} * {y} - {k}",
        "{k} more than the sum of {x} and {y}": "{x} + {y} + {k}",
        "the larger of {x} and {y}, plus {k}": "max({x}, {y}) + {k}",
        "the smaller of {x} and {y}, times {k}": "min({x}, {y}) * {k}",
    },
}
ASKED = "Write a function f({names}) that returns {words}."
SHOWN = (
    {"role": "system", "content": "You write Python."},
    {"role": "user", "content": ASKED.format(names="p, q", words="4 times p, minus q")},
    {"role": "assistant", "content": "```python\ndef f(p, q):\n    return 4 * p - q\n```"},
)
NAMES = ("a", "b", "c", "m", "n", "s", "t", "u", "v", "x", "y", "z")


class Problem(NamedTuple):
    """A function. names: of its arguments; expression: the teacher's, in Python."""

    source: str
    names: tuple[str, str]
    words: str
    expression: str

    @property
    def prompt(self) -> list[dict[str, str]]:
        return [
            *SHOWN,
            {"role": "user", "content": ASKED.format(names=", ".join(self.names), words=self.words)},
        ]

    def tests(self, rng: random.Random) -> str:
        """Return the reference answer: calls, and what they return."""
        function: Callable[[int, int], int] = eval(f"lambda {', '.join(self.names)}: {self.expression}")
        calls = [[rng.randrange(2, 100), rng.randrange(2, 100)] for _ in range(CALLS)]
        return json.dumps({"fn_name": "f", "inputs": calls, "outputs": [function(*call) for call in calls]})


def problems(rng: random.Random) -> Iterator[Problem]:
    """Yield different problems, each source as often."""
    known = set[Problem]()
    while True:
        source = rng.choice(list(PHRASES))
        words, expression = rng.choice(list(PHRASES[source].items()))
        first, second = rng.sample(NAMES, 2)
        values = {"x": first, "y": second, "k": rng.randrange(2, 20)}
        problem = Problem(source, (first, second), words.format(**values), expression.format(**values))
        if problem not in known:
            known.add(problem)
            yield problem


def write_task(folder: Path, seed: int) -> None:
    """Write eval.jsonl and train.jsonl, which share no problem."""
    rng = random.Random(seed)
    rows = problems(rng)
    for name, count in (("eval", EVAL_ROWS), ("train", TRAIN_ROWS)):
        lines = [
            json.dumps(
                {"prompt": problem.prompt, "answer": problem.tests(rng), "data_source": problem.source}
            )
            + "\n"
            for problem in (next(rows) for _ in range(count))
        ]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
