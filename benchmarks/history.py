"""Keep the figures of `make bench`, and report those that have become worse.

    python benchmarks/history.py     # figures whose last run is worse than those before, by more than a tenth

Each run appends one line per figure to history.jsonl, with date, commit, kind of machine and load before the
run. A figure is compared with the median of the previous five with the same arguments on the same kind of
machine. The file is committed with the measured change; git merges lines appended by two branches.
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
BEFORE, FEWEST = 5, 2  # number of earlier runs to compare with: maximum, minimum
WORSE = 1.1
# A line of measure.Verdicts with a number. Yes/no checks (`holds`) have none.
VERDICT = re.compile(r"(?:met|not met|WRONG) *\| (.*): ([\d,.e+-]+).* \| target: at (most|least) ")


def machine_kind() -> str:
    """Return the properties that make figures comparable: processor, vector instructions, cores."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    told = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = set(told.get("flags", "").split())
    widest = next((one for one in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if one in flags), "no AVX2")
    return f"{told.get('model name', 'unknown')}, {widest}, {os.cpu_count()} cores"


def commit() -> str:
    """Return the measured commit, with "-dirty" if tracked files differ from it.

    The history file is ignored, because an earlier run may have appended to it."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(FILE.parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ":/", f":(exclude){FILE.name}")
    return git("rev-parse", "--short", "HEAD") + ("-dirty" if changed else "")


def records(
    benchmark: str, verdicts: Iterable[str], load: float, arguments: str = ""
) -> Iterator[dict[str, Any]]:
    """Yield one record per figure from the verdicts that a benchmark printed.

    load: the machine's load before the run"""
    common = {"date": f"{datetime.date.today()}", "commit": commit(), "machine": machine_kind()}
    for found in filter(None, map(VERDICT.match, verdicts)):
        what, figure, bound = found.groups()
        value, asked = float(figure.replace(",", "")), {"benchmark": benchmark, "arguments": arguments}
        yield {**common, "load": round(load, 1), **asked, "what": what, "figure": value, "at": bound}


def worse(history: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield a line for each figure whose last run is more than a tenth worse than the earlier median."""
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
