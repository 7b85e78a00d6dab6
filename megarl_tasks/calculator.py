"""The demo of a model that acts: word problems of one step, and a calculator that the policy may call.

The model is shown two problems with their calls and results. It writes `Call: calc(214 + 377)`, reads
`Result: 591`, and ends with `Answer: 591`. Numbers have three digits and more: without the tool it is right
next to never.
"""

from __future__ import annotations

import ast
import json
import operator
import random
import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

from megarl.data.prompts import Prompt
from megarl.rollout.episode import Policy, ToolError

TRAIN_ROWS, EVAL_ROWS = 2048, 128
NAMES = ("Anna", "Ben", "Chloe", "David", "Emma", "Farid", "Grace", "Hugo", "Ines", "Jack", "Kira", "Leo")
THINGS = ("apples", "marbles", "stamps", "books", "coins", "cards", "pens", "shells", "stickers", "beads")
BOXES = ("boxes", "bags", "crates", "drawers", "baskets", "jars")
# How each operation is asked for, and the sign by which it is called.
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
    "multiplication": (
        "{name} has {a} {boxes} with {b} {things} in each. How many {things} is that?",
        "One of the {boxes} holds {b} {things}. How many {things} do {a} of them hold?",
        "{a} children get {b} {things} each. How many {things} is that in total?",
        "{name} packs {b} {things} every day. How many does {name} pack in {a} days?",
    ),
    "division": (
        "{name} shares {a} {things} equally among {b} children. How many does each child get?",
        "{a} {things} are packed into {b} {boxes}, the same number into each. How many are in each?",
        "{name} needs {b} days for {a} {things}, as many every day. How many {things} is that a day?",
        "A machine sorts {a} {things} into {b} equal heaps. How many {things} are in a heap?",
    ),
}
SIGNS = {"addition": "+", "subtraction": "-", "multiplication": "*", "division": "/"}
SHOWN = (
    ("Tom has 214 marbles and finds 377 more. How many marbles does he have now?", "214 + 377", "591"),
    ("There are 412 rows with 153 seats in each. How many seats are there?", "412 * 153", "63036"),
)
OPERATIONS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
CALL = re.compile(r"Call:\s*calc\((.*)\)\s*$")


class Problem(NamedTuple):
    """A word problem of one step. source: the operation that it takes."""

    source: str
    question: str
    call: str
    answer: str


def problems(seed: int) -> Iterator[Problem]:
    """Yield problems without end, no two with the same operation and operands."""
    rng = random.Random(seed)
    seen = set[str]()
    while True:
        source = rng.choice(list(WORDINGS))
        a, b = rng.sample(range(101, 1000), 2)
        if source == "subtraction":
            a, b = max(a, b), min(a, b)
        if source == "division":
            a = rng.randint(11, 99) * b
        call = f"{a} {SIGNS[source]} {b}"
        name, other = rng.sample(NAMES, 2)
        said = {"name": name, "other": other, "things": rng.choice(THINGS), "boxes": rng.choice(BOXES)}
        question = rng.choice(WORDINGS[source]).format(a=a, b=b, **said)
        if call not in seen:
            seen.add(call)
            yield Problem(source, question, call, calc(call))


def prompt_to(question: str, *, calls: bool) -> str:
    """Return the problem behind the two that are shown. calls: with the calculator's calls."""
    shown = ""
    for asked, call, answer in SHOWN:
        used = f"Call: calc({call})\nResult: {answer}\n" if calls else ""
        shown += f"Question: {asked}\n{used}Answer: {answer}\n\n"
    return f"{shown}Question: {question}\n"


def write_task(folder: Path, seed: int) -> None:
    """Write train.jsonl, eval.jsonl, and without_tool.jsonl, which asks the same as eval.jsonl of a policy
    that has no calculator. No held-out problem has operands and operation of one that is trained on."""
    rows = problems(seed)
    held_out, trained = ([next(rows) for _ in range(count)] for count in (EVAL_ROWS, TRAIN_ROWS))
    for name, some, calls in (
        ("eval", held_out, True),
        ("without_tool", held_out, False),
        ("train", trained, True),
    ):
        lines = [
            json.dumps(
                {
                    "prompt": prompt_to(one.question, calls=calls),
                    "answer": one.answer,
                    "data_source": one.source,
                    "extra_info": {"calls": calls},
                }
            )
            + "\n"
            for one in some
        ]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def calc(expression: str) -> str:
    """Return the value of a sum, difference, product or quotient of two numbers, to six decimals.

    Raises ValueError for anything else."""
    try:
        parsed = ast.parse(expression.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        parsed = None
    match parsed:
        case ast.BinOp(ast.Constant(int() | float() as a), op, ast.Constant(int() | float() as b)) if (
            type(op) in OPERATIONS and max(abs(a), abs(b)) < 1e12
        ):
            if isinstance(op, ast.Div) and b == 0:
                raise ValueError("division by zero")
            value = OPERATIONS[type(op)](*(Fraction(str(x)) for x in (a, b)))
            return str(value) if value.denominator == 1 else f"{float(value):.6f}".rstrip("0")
    raise ValueError("write calc(a op b) with two numbers and one of + - * /")


async def episode(prompt: Prompt, policy: Policy) -> None:
    """Let the policy write line after line until it answers; a line that calls is followed by the result, or
    by what is wrong with the call."""
    while True:
        turn = await policy.generate(stop=("\n",))
        line = turn.text.strip()
        if line.startswith("Answer:") or "\n" not in turn.text:  # the last: its end-of-sequence token
            return
        if not line.startswith("Call:"):
            continue
        call = CALL.match(line)
        try:
            if call is None or not prompt.extra.get("calls", True):
                raise ToolError("write calc(a op b)" if prompt.extra.get("calls", True) else "no calculator")
            result = await policy.call("megarl_tasks.calculator:calc", call[1])
        except ToolError as error:
            result = f"error: {error}"
        policy.observe(f"Result: {result}\n")
