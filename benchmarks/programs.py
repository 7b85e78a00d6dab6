"""Measure programs per second of the verifier `code`, used as in training.

The reference runs `python -I -c PROGRAM` by subprocess, one thread per worker, without limits or sandbox.
A script has one case. A function has three calls, and assertions are three."""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from measure import Verdicts, machine

from megarl.rewards.pool import VerifierPool

TARGET = 50  # programs per second on two cores
Item = tuple[str, str]


def make(kind: str, count: int) -> list[tuple[Item, bool]]:
    """Return answers with their references, and whether they are right: about half of them."""
    rng, items = random.Random(kind), []
    for _ in range(count):
        number, right = rng.randrange(1000), rng.random() < 0.5
        shift = number if right else number + 1
        if kind == "scripts":
            program = f"a, b = map(int, input().split())\nprint(a + b + {shift})"
            reference = json.dumps({"inputs": ["1 2\n"], "outputs": [f"{3 + number}\n"]})
        else:
            program = f"def f(a, b):\n    return a + b + {shift}"
            calls = [[1, 2], [3, 4], [5, 6]]
            results = [a + b + number for a, b in calls]
            reference = json.dumps(
                {"fn_name": "f", "inputs": calls, "outputs": results}
                if kind == "functions"
                else [f"assert f({a}, {b}) == {c}" for (a, b), c in zip(calls, results, strict=True)]
            )
        items.append(((f"It is:\n```python\n{program}\n```", reference), right))
    return items


def run_alone(item: Item) -> bool:
    program = item[0].partition("```python\n")[2].rpartition("\n```")[0]
    tests = json.loads(item[1])
    done = subprocess.run(
        [sys.executable, "-I", "-c", program], input=tests["inputs"][0], capture_output=True, text=True
    )
    return done.stdout == tests["outputs"][0]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=2, help="verifier processes (default %(default)s)")
    parser.add_argument("--programs", type=int, default=400, help="of one count (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="the fastest of so many (default %(default)s)")
    args = parser.parse_args()
    print(f"{machine()}\n{args.workers} verifier processes")
    verdicts, wrong = Verdicts(), 0
    scripts = make("scripts", args.programs)
    alone = 0.0
    with ThreadPoolExecutor(args.workers) as threads:
        for _ in range(args.repeats):
            start = time.perf_counter()
            found = list(threads.map(run_alone, [item for item, _ in scripts]))
            alone = max(alone, args.programs / (time.perf_counter() - start))
            wrong += found != [right for _, right in scripts]
    print(f"          reference, python -I -c by subprocess: {alone:,.0f} scripts /s")
    with VerifierPool("megarl_tasks.code_verifier:verify", args.workers) as pool:
        pool.verify([item for item, _ in scripts[: 64 * args.workers]])  # starts the processes
        for kind in ("scripts", "functions", "assertions"):
            rows, best = make(kind, args.programs), 0.0
            for _ in range(args.repeats):
                start = time.perf_counter()
                results = pool.verify([item for item, _ in rows])
                best = max(best, len(rows) / (time.perf_counter() - start))
                wrong += sum(
                    one.correct != right or one.error is not None
                    for one, (_, right) in zip(results, rows, strict=True)
                )
            verdicts.at_least(f"code, programs: {kind}", best, TARGET, " /s")
    verdicts.at_most("code, wrong verdicts", wrong, 0, must=True)
    return verdicts.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
