"""The figures of earlier runs of `make bench`, and which have become worse.

    python benchmarks/history.py     # figures whose last run is worse than those before, by more than a tenth

Each run appends one line for each of its figures to history.jsonl, with date, commit, kind of machine and its
load before. A figure is compared with the median of the last five before it on machines of its kind, by the
same arguments. The file is committed with the change that was measured; git joins what two branches appended.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

FILE = Path(__file__).with_name("history.jsonl")
BEFORE, FEWEST = 5, 2  # runs that a figure is compared with: at most, at least
WORSE = 1.1
# A line of measure.Verdicts with a number; what only holds or does not has none.
VERDICT = re.compile(r"(?:met|not met|WRONG) *\| (.*): ([\d,.e+-]+).* \| target: at (most|least) ")


def machine_kind() -> str:
    """Return what of a machine makes its figures comparable: processor, instructions for matrices, cores."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    told = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = set(told.get("flags", "").split())
    widest = next((one for one in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if one in flags), "no AVX2")
    return f"{told.get('model name', 'unknown')}, {widest}, {os.cpu_count()} cores"


def commit() -> str:
    """Return the commit that is measured, with "-dirty" where tracked files are not as it has them; but for
    the history itself, to which the run before has appended."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(FILE.parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ":/", f":(exclude){FILE.name}")
    return git("rev-parse", "--short", "HEAD") + ("-dirty" if changed else "")


def records(
    benchmark: str, verdicts: Iterable[str], load: float, arguments: str = ""
) -> Iterator[dict[str, Any]]:
    """Yield a run's figures, of the verdicts that a benchmark printed. load: of the machine, before it."""
    common = {"date": f"{datetime.date.today()}", "commit": commit(), "machine": machine_kind()}
    for found in filter(None, map(VERDICT.match, verdicts)):
        what, figure, bound = found.groups()
        value, asked = float(figure.replace(",", "")), {"benchmark": benchmark, "arguments": arguments}
        yield {**common, "load": round(load, 1), **asked, "what": what, "figure": value, "at": bound}


def worse(history: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield a line for each figure whose last run is worse than the median before, by more than a tenth."""
    series: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    same = ("machine", "benchmark", "arguments", "what")
    for record in history:
        series.setdefault(tuple(record[key] for key in same), []).append(record)
    for (machine, benchmark, _, what), runs in series.items():
        *before, last = [run["figure"] for run in runs[-BEFORE - 1 :]]
        if len(before) < FEWEST or min(last, *before) <= 0:
            continue
        usual = median(before)
        if (last / usual if runs[-1]["at"] == "most" else usual / last) > WORSE:
            at = f"{last:.4g} at {runs[-1]['commit']} and load {runs[-1]['load']}"
            said = f"{at}, {usual:.4g} in the {len(before)} runs before"
            yield f"worse   | {benchmark}, {what}: {said} ({machine})"


def read() -> list[dict[str, Any]]:
    """Return all figures, the oldest first."""
    return (
        [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()] if FILE.exists() else []
    )


def main() -> int:
    history = read()
    print(f"{len(history)} figures of `make bench` in {FILE.name}")
    print("\n".join(worse(history)) or "none has become worse by more than a tenth")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
