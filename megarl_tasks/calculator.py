"""Word problems and a calculator.

The model writes `Call: calc(214 + 377)`, reads `Result: 591`, and ends with `Answer: 591`."""

from __future__ import annotations

import ast
import json
import operator
import random
import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from megarl.agents.episode import Policy, ToolError
from megarl.data.prompts import Prompt

TRAIN_ROWS, EVAL_ROWS = 2048, 96
NAMES = ("Anna", "Ben", "Chloe", "David", "Emma", "Farid", "Grace", "Hugo", "Ines", "Jack", "Kira", "Leo")
THINGS = ("apples", "marbles", "stamps", "books", "coins", "cards", "pens", "shells", "stickers", "beads")
WORDINGS = {
    "addition": (
        "{name} has {a} {things} and gets {b} more. How many {things} does {name} have now?",
        "{name} has {a} {things} and {other} has {b}. How many {things} do they have together?",
        "There are {a} {things} in the kitchen and {b} in the hall. How many are there in total?",
        "{name} sold {a} {things} in May and {b} in June. How many did {name} sell altogether?",
    ),
    "subtraction": (
        "{name} has {a} {things} and gives {b} of them to {other}. How many are left?",
        "A shop had {a} {things} and sold {b}. How many {things} does it still have?",
        "{name} has {a} {things}, {other} has {b}. How many more does {name} have?",
        "Of {a} {things} {b} are broken. How many are not broken?",
    ),
}
SIGNS = {"addition": "+", "subtraction": "-"}
SHOWN = (
    ("Tom has 214 marbles and finds 377 more. How many marbles does he have now?", "214 + 377", "591"),
    ("Nora has 845 sweets and eats 231 of them. How many sweets are left?", "845 - 231", "614"),
)
OPERATIONS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
CALL = re.compile(r"Call:\s*calc\((.*)\)\s*$")


class Problem(NamedTuple):
    source: str
    question: str
    call: str
    answer: str

    @property
    def operands(self) -> tuple[str, ...]:
        """Return the source and the numbers; a + b and b + a have the same."""
        a, _, b = self.call.split()
        return self.source, *sorted((a, b))


def problems(seed: int) -> Iterator[Problem]:
    """Yield problems with different calls; sums may recur with swapped operands."""
    rng = random.Random(seed)
    known_calls = set[str]()
    while True:
        source = rng.choice(list(WORDINGS))
        a, b = rng.sample(range(101, 1000), 2)
        if source == "subtraction":
            a, b = max(a, b), min(a, b)
        call = f"{a} {SIGNS[source]} {b}"
        name, other_name = rng.sample(NAMES, 2)
        things = rng.choice(THINGS)
        question = rng.choice(WORDINGS[source]).format(a=a, b=b, name=name, other=other_name, things=things)
        if call not in known_calls:
            known_calls.add(call)
            yield Problem(source, question, call, calc(call))


def format_prompt(question: str, *, calls: bool) -> str:
    """Return a problem after examples. calls: they use the calculator."""
    examples = ""
    for example_question, call, answer in SHOWN:
        tool_lines = f"Call: calc({call})\nResult: {answer}\n" if calls else ""
        examples += f"Question: {example_question}\n{tool_lines}Answer: {answer}\n\n"
    return f"{examples}Question: {question}\n"


def write_task(folder: Path, seed: int) -> None:
    """Write train.jsonl, eval.jsonl (other operands) and without_tool.jsonl (eval without calculator)."""
    rows = problems(seed)
    eval_problems = [next(rows) for _ in range(EVAL_ROWS)]
    held_out = {problem.operands for problem in eval_problems}
    train_problems = [*islice((row for row in rows if row.operands not in held_out), TRAIN_ROWS)]
    for name, file_problems, calls in (
        ("eval", eval_problems, True),
        ("without_tool", eval_problems, False),
        ("train", train_problems, True),
    ):
        lines = [
            json.dumps(
                {
                    "prompt": format_prompt(problem.question, calls=calls),
                    "answer": problem.answer,
                    "data_source": problem.source,
                    "extra_info": {"calls": calls},
                }
            )
            + "\n"
            for problem in file_problems
        ]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def calc(expression: str) -> str:
    """Return a sum, difference, product or quotient, to six decimals. Raises ValueError."""
    try:
        expression_node = ast.parse(expression.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        expression_node = None
    match expression_node:
        case ast.BinOp(ast.Constant(int() | float() as a), op, ast.Constant(int() | float() as b)) if (
            type(op) in OPERATIONS and max(abs(a), abs(b)) < 1e12
        ):
            if isinstance(op, ast.Div) and b == 0:
                raise ValueError("division by zero")
            value = OPERATIONS[type(op)](*(Fraction(str(x)) for x in (a, b)))
            return str(value) if value.denominator == 1 else f"{float(value):.6f}".rstrip("0").rstrip(".")
    raise ValueError("write calc(a op b) with two numbers and one of + - * /")


async def episode(prompt: Prompt, policy: Policy) -> None:
    """Answer the policy's calls; any other line ends the episode."""
    while True:
        turn = await policy.generate(stop=("\n",))
        line = turn.text.strip()
        if not line.startswith("Call:") or "\n" not in turn.text:  # the response ended without a newline
            return
        call = CALL.match(line)
        try:
            if not prompt.extra.get("calls", True):
                raise ToolError("no calculator")
            if call is None:
                raise ToolError("write calc(a op b)")
            result = await policy.call("megarl_tasks.calculator:calc", call[1])
        except ToolError as error:
            result = f"error: {error}"
        policy.observe(f"Result: {result}\n")
