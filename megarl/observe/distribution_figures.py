"""The figures of distributions.jsonl: lambda by length, value error by position, trainer against engine.

Of one run, or of several seeds, early beside late; of several kinds of run the late part of each."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.observe.distributions import Part, Table, added, thirds
from megarl.observe.plots import COLOURS, Drawing, Line, Stairs, draw_lines, draw_stairs, run_colour
from megarl.observe.runs import Run, families

EARLY, LATE = COLOURS[9], COLOURS[1]


def parts(runs: Sequence[Run], name: str) -> list[tuple[str, str, Table]]:
    """(colour, legend, table) of everything that is drawn of table `name`, the latest or the last run's at the end."""
    related = families(runs)
    found = []
    for number, family in enumerate(related):
        stages = [next((stage for stage in ("train", "value_pretraining") if thirds(run.distributions, name, stage)), "") for run in family]
        of_runs = [thirds(run.distributions, name, stage) for run, stage in zip(family, stages, strict=True) if stage]
        if of_runs and len(related) > 1:
            found.append((run_colour(number), "", added(own[-1].table for own in of_runs)))
        elif of_runs:
            at = (0, -1) if all(len(own) > 1 for own in of_runs) else (-1,)
            found += [
                (colour, _steps(of_runs[0][i]), added(own[i].table for own in of_runs))
                for colour, i in zip((EARLY, LATE)[-len(at) :], at, strict=True)
            ]
    return found


def _steps(part: Part) -> str:
    return f"steps {part.first} to {part.last}" if part.last > part.first else f"step {part.first}"


def _legend(found: Sequence[tuple[str, str, Table]]) -> tuple[tuple[str, str], ...]:
    return tuple((colour, text) for colour, text, _ in found if text)


def _shares(counts: Sequence[float]) -> list[float]:
    return [count / max(sum(counts), 1.0) for count in counts]


def draw_lambda(runs: Sequence[Run]) -> Drawing | None:
    """Shares of the responses by their length, and the mean lambda of each length."""
    found = parts(runs, "lambda")
    if not found:
        return None
    longest = max((run.setting("rollout", "max_response_tokens", default=0) or 0 for run in runs), default=0)
    stairs, lines = [], []
    for colour, _, table in found:
        bins = len(table["responses"])
        width = (longest or bins) / bins
        stairs.append(Stairs([i * width for i in range(bins + 1)], _shares(table["responses"]), colour, filled=True))
        lines.append(
            (
                [(i + 0.5) * width for i, n in enumerate(table["responses"]) if n],
                [x / n for x, n in zip(table["lambda"], table["responses"], strict=True) if n],
                colour,
            )
        )
    return Drawing(draw_stairs(stairs, "response length, tokens", lines=lines), _legend(found))


def draw_value_error(runs: Sequence[Run]) -> Drawing | None:
    """Mean |V - R|, and of one kind of run the mean of V - R, by the part of the response."""
    found = parts(runs, "value_error")
    lines = []
    for number, (colour, _, table) in enumerate(found):
        bins = len(table["tokens"])
        for row, label, style in (("absolute", "|V-R|", 0), ("error", "V-R", 2)):
            points = {round((i + 0.5) * 100 / bins): x / n for i, (x, n) in enumerate(zip(table[row], table["tokens"], strict=True)) if n}
            last = number == len(found) - 1 and not any(not text for _, text, _ in found)
            if points and (row == "absolute" or last):
                lines.append(Line(points, colour, label if last else "", style, noisy=False))
    return Drawing(draw_lines(lines, "part of the response, %", (0, None)), _legend(found)) if lines else None


def draw_mismatch(runs: Sequence[Run]) -> Drawing | None:
    """Shares of the tokens by the difference of their log-probabilities."""
    found = [part for part in parts(runs, "mismatch") if sum(part[2]["tokens"])]
    if not found:
        return None
    bins = len(found[0][2]["tokens"])
    middle = bins // 2
    ticks = {middle + 0.5: "0"}
    for decade in (-5, -3, -1, 1):
        at = 1 + 2 * (decade + 6)  # the edges are half decades from 1e-6 on (algorithms/histograms.py); the first is after the middle bin
        text = f"{10.0**decade:g}" if decade > -3 else f"1e{decade}"
        ticks |= {middle + at: text, middle + 1 - at: f"-{text}"}
    stairs = [
        Stairs(list(range(bins + 1)), _shares(table["tokens"]), colour, filled=i == len(found) - 1 and bool(text))
        for i, (colour, text, table) in enumerate(found)
        if len(table["tokens"]) == bins
    ]
    return Drawing(draw_stairs(stairs, "difference, nats", ticks=ticks, log=True), _legend(found))
