"""The result of an ablation: scores over seeds, paired comparisons with an honest verdict, and the table that says so.

Runs of one seed share the warm start, the data and the order of prompts. What differs between two rows is therefore measured per
seed, and the spread of these differences, not that of the scores, decides.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megarl.observe.runs import Points

LEVEL = 0.05  # of the tests; intervals are of 1 - LEVEL


@dataclass(frozen=True)
class RowResult:
    """The finished runs of a row. paper: points at 32B; curves: seed -> step -> accuracy; seconds: seed -> wall time of the run."""

    name: str
    paper: float | None
    curves: Mapping[int, Points]
    seconds: Mapping[int, float] = field(default_factory=dict)

    def scores(self, last: int) -> dict[int, float]:
        """seed -> mean accuracy of the last `last` evaluations."""
        return {seed: statistics.fmean([curve[step] for step in sorted(curve)][-last:]) for seed, curve in self.curves.items() if curve}


@dataclass(frozen=True)
class Comparison:
    """A row against another over the seeds that both have: mean difference of scores, its standard error, the paired t-test.

    low, high: the 95 % confidence interval; p: two-sided; holm: p after Holm's correction for the comparisons of the table. They are
    None where one seed, or differences that are all the same, say nothing of the spread."""

    against: str
    seeds: int
    mean: float
    error: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    holm: float | None = None

    @property
    def verdict(self) -> str:
        """worse or better where the corrected test says so, or only the single one; else within the spread."""
        if self.p is None or self.holm is None:
            return "no spread to judge by" if self.mean else "the same"
        if self.p >= LEVEL:
            return "within the spread"
        direction = "better" if self.mean > 0 else "worse"
        return direction if self.holm < LEVEL else f"{direction}, not after Holm"


@dataclass(frozen=True)
class Result:
    """A table as measured. kinds: `full`, `previous`, in the order of their columns; facts: what is said of the protocol."""

    title: str
    full: str
    kinds: tuple[str, ...]
    last: int
    rows: tuple[RowResult, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)

    def comparisons(self, kind: str) -> dict[str, Comparison]:
        """row -> its comparison with the full system or with the row above, corrected over all of this kind."""
        by_name = {row.name: row for row in self.rows}
        found = {}
        for i, row in enumerate(self.rows):
            other = by_name[self.full] if kind == "full" else self.rows[i - 1] if i else row
            if other is not row and (compared := compare(row.scores(self.last), other.scores(self.last), other.name)):
                found[row.name] = compared
        return dict(zip(found, holm(list(found.values())), strict=True))

    def record(self) -> dict[str, Any]:
        """All of it as JSON can hold it."""
        compared = {kind: self.comparisons(kind) for kind in self.kinds}
        rows = []
        for row in self.rows:
            scores = row.scores(self.last)
            against = {k: {**vars(c), "verdict": c.verdict} for k in self.kinds if (c := compared[k].get(row.name))}
            mean, deviation = spread(scores)
            rows.append(
                {"name": row.name, "paper": row.paper, "mean": mean, "std": deviation, "scores": scores, "comparisons": against,
                 "curves": row.curves, "seconds": row.seconds}
            )  # fmt: skip
        return {"title": self.title, "full": self.full, "last": self.last, **self.facts, "rows": rows}


def spread(scores: Mapping[int, float]) -> tuple[float | None, float | None]:
    """Mean and sample standard deviation; None where there are too few."""
    values = list(scores.values())
    return statistics.fmean(values) if values else None, statistics.stdev(values) if len(values) > 1 else None


def compare(scores: Mapping[int, float], others: Mapping[int, float], against: str) -> Comparison | None:
    """The paired t-test of scores - others over the seeds that both have; None without such a seed."""
    differences = [scores[seed] - others[seed] for seed in scores if seed in others]
    n = len(differences)
    if not n:
        return None
    mean = statistics.fmean(differences)
    error = statistics.stdev(differences) / math.sqrt(n) if n > 1 else None
    if not error:
        return Comparison(against, n, mean, error)
    half = t_quantile(1 - LEVEL, n - 1) * error
    return Comparison(against, n, mean, error, mean - half, mean + half, p=1 - t_within(abs(mean) / error, n - 1))


def holm(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """The same with Holm's step-down correction: the i-th smallest of m p-values times m - i + 1, never less than the one before."""
    order = sorted((c.p, i) for i, c in enumerate(comparisons) if c.p is not None)
    corrected: dict[int, float] = {}
    least = 0.0
    for rank, (p, i) in enumerate(order):
        least = corrected[i] = max(least, min(1.0, p * (len(order) - rank)))
    return [Comparison(**{**vars(c), "holm": corrected.get(i)}) for i, c in enumerate(comparisons)]


def t_within(t: float, df: int) -> float:
    """P(|T| <= t) of Student's t with a whole number of degrees of freedom (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan2(t, math.sqrt(df))
    term = math.cos(angle) if df % 2 else 1.0
    total = term if df > 1 else 0.0
    for k in range(3 if df % 2 else 2, df - 1, 2):
        term *= math.cos(angle) ** 2 * (k - 1) / k
        total += term
    return 2 / math.pi * (angle + math.sin(angle) * total) if df % 2 else math.sin(angle) * total


def t_quantile(share: float, df: int) -> float:
    """t with P(|T| <= t) = share, by bisection."""
    low, high = 0.0, 1.0
    while t_within(high, df) < share:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if t_within(middle, df) < share else (low, middle)
    return high


def markdown(result: Result) -> str:
    """The table with its protocol and the rule of its verdicts."""
    heads, rows = table_cells(result)
    lines = [f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows)]
    return "\n".join([*lines, "", *(f"- {line}" for line in protocol(result))]) + "\n"


def table_cells(result: Result) -> tuple[list[str], list[list[str]]]:
    """The heads and the rows of the table, as text."""
    heads = ["row", "paper: AIME 2024, 32B", "accuracy here"]
    for kind in result.kinds:
        heads += [f"difference to {against(kind)}", "p", "p, Holm", "verdict"]
    compared = {kind: result.comparisons(kind) for kind in result.kinds}
    rows = []
    for row in result.rows:
        cells = [row.name, "-" if row.paper is None else f"{row.paper:g}", score_text(row.scores(result.last))]
        rows.append([*cells, *(cell for kind in result.kinds for cell in comparison_cells(compared[kind].get(row.name)))])
    return heads, rows


def against(kind: str) -> str:
    """What a kind of comparison compares with, in words."""
    return "the full system" if kind == "full" else "the row above"


def score_text(scores: Mapping[int, float]) -> str:
    """Mean and standard deviation over seeds."""
    mean, deviation = spread(scores)
    if mean is None:
        return "-"
    return f"{mean:.3f}" + (f" ± {deviation:.3f}" if deviation is not None else "") + f" (n = {len(scores)})"


def comparison_cells(compared: Comparison | None) -> list[str]:
    """Difference with its interval, p, corrected p, verdict."""
    if compared is None:
        return ["", "", "", ""]
    interval = f" [{compared.low:+.3f}, {compared.high:+.3f}]" if compared.low is not None else ""
    return [f"{compared.mean:+.3f}{interval}", *("" if p is None else p_text(p) for p in (compared.p, compared.holm)), compared.verdict]


def p_text(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def protocol(result: Result) -> list[str]:
    """What was measured and how it is judged, one sentence each."""
    lines = [str(fact) for fact in result.facts.get("said", ())]
    seconds = [s for row in result.rows for s in row.seconds.values()]
    if seconds:
        lines.append(f"{len(seconds)} runs of {statistics.median(seconds):.0f} s (median), {sum(seconds) / 60:.0f} min of them in all.")
    what = "the last evaluation" if result.last == 1 else f"the mean of the last {result.last} evaluations"
    tests = " and ".join(f"{len(result.comparisons(kind))} with {against(kind)}" for kind in result.kinds)
    return [
        *lines,
        f"Accuracy: {what}; mean ± standard deviation over n seeds.",
        "Difference: mean over seeds of the difference between the two runs of one seed, which share warm start, data and order of "
        "prompts, with the 95 % interval of the paired t-test (n - 1 degrees of freedom); p is that test's, two-sided.",
        f"Verdict: worse or better if p < 0.05 after Holm's correction for the comparisons made ({tests}); `not after Holm` if only the "
        "uncorrected p is below 0.05, which among so many comparisons can happen by chance; else within the spread.",
    ]
