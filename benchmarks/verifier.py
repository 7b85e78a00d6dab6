"""Measure answers per second of a VerifierPool used as in training.

One call has the responses of a generation batch, in groups of 16 responses to one prompt, about half of them
correct. Every verdict is checked, because correctness is known by construction.

Each answer follows 4,000 characters of reasoning. Integer answers go to the `dapo` verifier, and to `math`.
Symbolic answers go to `math`. Their form differs from the reference's, so that comparing texts or numbers
decides none of them.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable

from measure import Verdicts, cpu_seconds, machine

from megarl.rewards.pool import VerifierPool

GROUP = 16
Item = tuple[str, str, bool]  # response, reference answer, whether it is right
REASONING = (
    "We multiply both sides by 7 and collect what is left: $7x + 14 = 35$, hence $x = 3$. "
    "So far the answer is not complete. "
)


def integer(rng: random.Random) -> list[Item]:
    """Make a group of responses to a problem with an integer answer, in the formats that models use."""
    number = rng.randrange(-99, 100_000)
    forms: list[Callable[[int], str]] = [
        str,
        "${}$".format,
        "\\boxed{{{}}}".format,
        "$\\boxed{{{:,}}}$".format,
        "{}.".format,
    ]
    group = []
    for _ in range(GROUP):
        given = number if rng.random() < 0.5 else number + rng.choice((-10, -1, 1, 2))
        group.append(
            (f"{REASONING * 33}\n\nAnswer: {rng.choice(forms)(given)}", str(number), given == number)
        )
    return group


def symbolic(rng: random.Random) -> list[Item]:
    """Make a group of responses to a problem with a formula as answer.

    A response has another form of the reference, or of a similar formula. A correct response never has the
    reference's text. Two groups of a kind have the same formula only if they have the same numbers."""
    a, b, n = rng.randrange(1, 60), rng.randrange(2, 60), rng.choice((2, 3, 5, 7, 11, 13))
    kinds: list[tuple[str, Callable[[int], str]]] = [
        (f"{a}\\sqrt{{{n}}}", lambda d: f"\\sqrt{{{n * (a + d) ** 2}}}"),
        (f"x^2+{a + b}x+{a * b}", lambda d: f"(x+{a + d})(x+{b})"),
        (f"\\frac{{{a}\\pi}}{{{b}}}", lambda d: f"{a + d}\\pi/{b}"),
        (f"({a}, \\frac{{{b}}}{{2}})", lambda d: f"({a + d},{b / 2})"),
        (f"\\{{{a}, {a + b}\\}}", lambda d: f"\\{{{a + b},{a + d}\\}}"),
        (f"[\\frac{{{a}}}{{2}}, \\infty)", lambda d: f"[{(a + d) / 2},\\infty)"),
        (f"{a}+{b}\\sqrt{{{n}}}", lambda d: f"{b}\\sqrt{{{n}}}+{a + d}"),
        (f"\\frac{{{a}}}{{\\sqrt{{{n}}}}}", lambda d: f"\\frac{{{a + d}\\sqrt{{{n}}}}}{{{n}}}"),
        (f"\\frac{{{a}x}}{{x+{b}}}", lambda d: f"{a}-\\frac{{{a * b + d}}}{{x+{b}}}"),
    ]
    reference, form = rng.choice(kinds)
    group = []
    for _ in range(GROUP):
        off = 0 if rng.random() < 0.5 else rng.randrange(1, 9)
        answer = form(off)
        end = rng.choice((f"Answer: ${answer}$", f"Therefore the result is $\\boxed{{{answer}}}$."))
        group.append((f"{REASONING * 33}\n\n{end}", reference, off == 0))
    return group


def per_second(verifier: str, calls: list[list[Item]], workers: int) -> tuple[float, float, int]:
    """Verify all calls.

    Returns: answers per second of the fastest call; the same by the workers' CPU time, as on an idle machine;
    the number of wrong verdicts"""
    best, cpu, wrong = 0.0, 0.0, 0
    with VerifierPool(verifier, workers) as pool:
        # Start the workers and their imports.
        pool.verify([("Answer: $x^2$", "x^3")] * 64 * workers)
        for items in calls:
            start, used = time.perf_counter(), cpu_seconds(pool.pids)
            verdicts = pool.verify([(response, reference) for response, reference, _ in items])
            best = max(best, len(items) / (time.perf_counter() - start))
            cpu = max(cpu, workers * len(items) / (cpu_seconds(pool.pids) - used))
            wrong += sum(
                v.correct != right or v.error is not None
                for v, (_, _, right) in zip(verdicts, items, strict=True)
            )
    return best, cpu, wrong


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--workers", type=int, default=2, help="verifier processes, one a core (default %(default)s)"
    )
    parser.add_argument(
        "--integers", type=int, default=8192, help="integer answers of one call (default %(default)s)"
    )
    parser.add_argument(
        "--symbolic", type=int, default=1024, help="symbolic answers of one call (default %(default)s)"
    )
    parser.add_argument(
        "--repeats", type=int, default=3, help="the fastest of so many counts (default %(default)s)"
    )
    args = parser.parse_args()
    print(f"{machine()}\n{args.workers} verifier processes")
    rng, verdicts = random.Random(0), Verdicts()
    for name, verifier, make, count, target in (
        ("integer", "dapo", integer, args.integers, 2000),
        ("integer (by the symbolic verifier)", "math", integer, args.integers, 2000),
        ("symbolic", "math", symbolic, args.symbolic, 150),
    ):
        calls = [[item for _ in range(count // GROUP) for item in make(rng)] for _ in range(args.repeats)]
        figure, cpu, wrong = per_second(verifier, calls, args.workers)
        verdicts.at_least(f"verifier, {name} answers", figure, target, " /s")
        print(f"          by CPU time, as on idle cores: {cpu:,.0f} /s")
        verdicts.at_most(
            f"verifier, {name} answers, wrong verdicts of {sum(map(len, calls)):,}", wrong, 0, must=True
        )
    return verdicts.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
