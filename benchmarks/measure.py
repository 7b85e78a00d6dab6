"""Shared code of the benchmarks.

It has the machine description, process memory, measurements in separate processes, and the verdicts `met` /
`not met` that `make bench` collects."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

LIMIT = 1800  # seconds that one measurement may take
MARKS = ("met", "not met", "WRONG")
# Phases that pass a step's batch through a model; those with a backward pass; those with a token head.
PASSES = ("old_logprobs", "reference_logprobs", "values", "critic_update", "actor_update")
BACKWARD, ACTORS = ("critic_update", "actor_update"), ("old_logprobs", "reference_logprobs", "actor_update")


def machine() -> str:
    """Return date, cores, load and versions in one line."""
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    load = f"load {os.getloadavg()[0]:.1f}"
    threads = f"{torch.get_num_threads()} torch thread(s)"
    return f"{datetime.date.today()}, {os.cpu_count()} cores, {load}, {threads}, {versions}"


class Verdicts:
    """Print each measured figure with its target.

    A missed target is `not met`, which a busy machine can cause. A missed bound on correctness (must=True) is
    `WRONG` and sets `exit_code` to 1."""

    def __init__(self) -> None:
        self.exit_code = 0
        self.rows: list[dict[str, str]] = []  # the printed fields: mark, what, figure, target

    def at_most(self, what: str, figure: float, bound: float, unit: str = "", must: bool = False) -> None:
        self._print(what, figure <= bound, f"{_text(figure)}{unit}", f"at most {_text(bound)}{unit}", must)

    def at_least(self, what: str, figure: float, bound: float, unit: str = "", must: bool = False) -> None:
        self._print(what, figure >= bound, f"{_text(figure)}{unit}", f"at least {_text(bound)}{unit}", must)

    def holds(self, what: str, held: bool) -> None:
        self._print(what, held, "yes" if held else "no", "yes", must=True)

    def _print(self, what: str, held: bool, figure: str, target: str, must: bool) -> None:
        mark = MARKS[0] if held else MARKS[2] if must else MARKS[1]
        self.exit_code |= mark == MARKS[2]
        self.rows.append({"mark": mark, "what": what, "figure": figure, "target": target})
        print(f"{mark:7} | {what}: {figure} | target: {target}", flush=True)


def _text(figure: float) -> str:
    return f"{figure:,.0f}" if abs(figure) >= 1000 else f"{figure:.4g}"


def in_fresh_process(script: str, *arguments: str) -> dict[str, Any]:
    """Run a script in a new process and return the JSON object on its last line.

    A new process has no memory of earlier measurements."""
    command = [sys.executable, script, *arguments]
    # CUDA libraries also print bytes that are not UTF-8.
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=LIMIT)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def phase_flops(sizes: Any, record: Mapping[str, float], group: int) -> dict[str, float]:
    """Count the FLOPs, on all ranks, of rollout and model passes of a recorded step (`time/<phase>`).

    Counted are the matrix products of the layers, and of the head at response tokens. A backward pass counts
    twice as much as the forward pass, and a shared prompt counts once. Attention is omitted: at these lengths
    it is a few percent.

    sizes: megarl.weights.families.Sizes of a dense model; group: responses of a prompt"""
    layer = sizes.hidden * (2 * sizes.q + 2 * sizes.kv + 3 * sizes.ffn)
    per_token = 2 * layer * sizes.layers
    passes = [name for name in PASSES if f"time/{name}" in record]
    sequences = record["train/tokens"] / max(1, len(passes))  # of one pass, if each phase has one epoch
    packed = sequences * (1 - record.get("train/shared_tokens", 0.0))
    responses = record["rollout/tokens"]
    head = 2 * sizes.hidden * sizes.vocab * responses
    prompts = (sequences - responses) / group
    work = {"rollout": per_token * (prompts + responses) + head}
    for name in passes:
        forward = per_token * packed + (head if name in ACTORS else 0.0)
        work[name] = forward * (3 if name in BACKWARD else 1)
    return work


class PeakMemory:
    """Growth of this process's peak resident memory since the creation of this object, bytes. Linux only."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak to the current resident memory
        self.before = _status("VmRSS")

    def growth(self) -> int:
        return _status("VmHWM") - self.before


def _status(key: str) -> int:
    [line] = [
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key + ":")
    ]
    return int(line.split()[1]) * 1024


def cpu_seconds(pids: list[int]) -> float:
    """Return the CPU seconds that these processes have used so far. Linux only."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(user) + int(system) for *_, user, system in (each[:13] for each in fields)) / os.sysconf(
        "SC_CLK_TCK"
    )
