"""The result of an ablation: scores, paired comparisons and a Markdown table.

Runs of a seed share warm start, data and order of prompts, so rows are compared seed by seed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megarl_experiments.paired import holm, paired_t

LEVEL = 0.05  # of the tests; intervals are of 1 - LEVEL
AGAINST = {"full": "the full system", "previous": "the row above"}  # kind of comparison -> in words
Curve = Mapping[int, float]  # step -> accuracy


@dataclass(frozen=True)
class RowResult:
    """A row's finished runs."""

    name: str
    paper: float | None  # points at 32B
    curves: Mapping[int, Curve]  # by seed
    seconds: Mapping[int, float] = field(default_factory=dict)  # wall time, by seed

    def scores(self, last: int) -> dict[int, float]:
        """Return seed -> mean accuracy of the last `last` evaluations."""
        return {
            seed: statistics.fmean([curve[step] for step in sorted(curve)][-last:])
            for seed, curve in self.curves.items()
            if curve
        }


@dataclass(frozen=True)
class Comparison:
    """The paired t-test of two rows over common seeds.

    Without spread (one seed, or equal differences) interval and p are None."""

    against: str
    seeds: int
    mean: float
    error: float | None = None  # standard error of the mean
    low: float | None = None  # 95 % confidence interval
    high: float | None = None
    p: float | None = None  # two-sided
    holm: float | None = None  # p after Holm's correction over comparisons of one kind

    @property
    def verdict(self) -> str:
        """Return the verdict in words."""
        if self.p is None or self.holm is None:
            return "no spread to judge by" if self.mean else "the same"
        if self.p >= LEVEL:
            return "within the spread"
        direction = "better" if self.mean > 0 else "worse"
        return direction if self.holm < LEVEL else f"{direction}, not after Holm"


@dataclass(frozen=True)
class Result:
    """A table as measured."""

    title: str
    full: str
    kinds: tuple[str, ...]  # keys of AGAINST, in the order of their columns
    last: int
    rows: tuple[RowResult, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)  # `notes`: sentences about the runs

    @property
    def full_row(self) -> RowResult:
        return next(row for row in self.rows if row.name == self.full)

    def comparisons(self, kind: str) -> dict[str, Comparison]:
        """Return row -> comparison of this kind, corrected by Holm."""
        comparison_by_row = {}
        for i, row in enumerate(self.rows):
            other_row = self.full_row if kind == "full" else self.rows[i - 1] if i else row
            comparison = compare(row.scores(self.last), other_row.scores(self.last), other_row.name)
            if other_row is not row and comparison:
                comparison_by_row[row.name] = comparison
        return dict(zip(comparison_by_row, correct_by_holm([*comparison_by_row.values()]), strict=True))

    def record(self) -> dict[str, Any]:
        """Return the result as a JSON object."""
        comparisons_by_kind = {kind: self.comparisons(kind) for kind in self.kinds}
        rows = []
        for row in self.rows:
            scores = row.scores(self.last)
            mean, deviation = spread(scores)
            tests = {
                kind: comparisons[row.name]
                for kind, comparisons in comparisons_by_kind.items()
                if row.name in comparisons
            }
            rows.append(
                {"name": row.name, "paper": row.paper, "mean": mean, "std": deviation, "scores": scores}
                | {"comparisons": {kind: {**vars(c), "verdict": c.verdict} for kind, c in tests.items()}}
                | {"curves": row.curves, "seconds": row.seconds}
            )
        return {"title": self.title, "full": self.full, "last": self.last, **self.facts, "rows": rows}

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return heads and rows as text."""
        heads = ["row", "paper: AIME 2024, 32B", "accuracy here"]
        for kind in self.kinds:
            heads += [f"difference to {AGAINST[kind]}", "p", "p, Holm", "verdict"]
        comparisons_by_kind = [self.comparisons(kind) for kind in self.kinds]
        rows = []
        for row in self.rows:
            paper = "-" if row.paper is None else f"{row.paper:g}"
            cells = [row.name, paper, score_text(row.scores(self.last))]
            for comparisons in comparisons_by_kind:
                if test := comparisons.get(row.name):
                    interval = f" [{test.low:+.3f}, {test.high:+.3f}]" if test.low is not None else ""
                    cells.append(f"{test.mean:+.3f}{interval}")
                    for p in (test.p, test.holm):
                        cells.append("" if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}")
                    cells.append(test.verdict)
                else:
                    cells += [""] * 4
            rows.append(cells)
        return heads, rows

    def protocol(self) -> list[str]:
        """Return notes on runs and verdicts."""
        lines = [str(note) for note in self.facts.get("notes", ())]
        seconds = [s for row in self.rows for s in row.seconds.values()]
        if seconds:
            median, minutes = statistics.median(seconds), sum(seconds) / 60
            lines.append(f"{len(seconds)} runs of {median:.0f} s (median), {minutes:.0f} min of them in all.")
        what = "the last evaluation" if self.last == 1 else f"the mean of the last {self.last} evaluations"
        tests = " and ".join(f"{len(self.comparisons(kind))} with {AGAINST[kind]}" for kind in self.kinds)
        return [
            *lines,
            f"Accuracy: {what}; mean ± standard deviation over n seeds.",
            "Difference: mean over seeds of the difference between the two runs of a seed. They share warm "
            "start, data and order of prompts. Interval (95 %) and two-sided p: paired t-test.",
            f"Verdict: worse or better if p < 0.05 after Holm's correction for all comparisons ({tests}). "
            "`not after Holm`: only the uncorrected p is below 0.05, which can happen by chance. "
            "Else within the spread.",
        ]


def markdown(result: Result) -> str:
    """Return table and notes as Markdown."""
    heads, rows = result.table()
    lines = [f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows)]
    return "\n".join([*lines, "", *(f"- {line}" for line in result.protocol())]) + "\n"


def score_text(scores: Mapping[int, float]) -> str:
    """Return mean and standard deviation over seeds as text."""
    mean, deviation = spread(scores)
    if mean is None:
        return "-"
    return f"{mean:.3f}" + (f" ± {deviation:.3f}" if deviation is not None else "") + f" (n = {len(scores)})"


def spread(scores: Mapping[int, float]) -> tuple[float | None, float | None]:
    """Return mean and sample standard deviation; None with too few scores."""
    values = list(scores.values())
    return statistics.fmean(values) if values else None, statistics.stdev(values) if len(values) > 1 else None


def compare(scores: Mapping[int, float], others: Mapping[int, float], against: str) -> Comparison | None:
    """Return the paired t-test of scores - others; None without common seeds."""
    differences = [scores[seed] - others[seed] for seed in scores if seed in others]
    n = len(differences)
    if not n:
        return None
    mean = statistics.fmean(differences)
    error = statistics.stdev(differences) / math.sqrt(n) if n > 1 else None
    if not error:
        return Comparison(against, n, mean, error)
    low, high, p = paired_t(differences, LEVEL)
    return Comparison(against, n, mean, error, low, high, p=p)


def correct_by_holm(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Apply Holm's correction to comparisons with a p."""
    ps = iter(holm([c.p for c in comparisons if c.p is not None]))
    return [c if c.p is None else replace(c, holm=next(ps)) for c in comparisons]
