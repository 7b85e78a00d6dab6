"""The report about a hang: where every rank stands, and who keeps the others waiting."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

# Frames of these files are a wait for other ranks; whoever called them says what for.
WAITS = ("torch/distributed/distributed_c10d.py", "megatron/core/pipeline_parallel/p2p_communication.py")


@dataclass(frozen=True)
class Report:
    """A rank's part. phases: begun so far; seconds: in the present one; waits_in: the collective in which its main thread stands, if it
    does; last_collective: the last in which the watchdog saw it; depths: what waits in its queues; stack: of all threads."""

    rank: int
    host: str
    pid: int
    stage: str
    step: int
    phase: str
    phases: int
    seconds: float
    waits_in: str | None
    last_collective: str | None
    depths: dict[str, int]
    stack: str

    def to_json(self) -> str:
        """Undone by `from_json`."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Report:
        return Report(**json.loads(text))

    @property
    def innermost(self) -> str:
        """The line in which the main thread stands."""
        lines = [line.strip() for line in self.stack.split("\n\n")[0].splitlines() if line.lstrip().startswith("File ")]
        return lines[-1] if lines else "nobody knows where"


def collective_of(frame: FrameType | None) -> str | None:
    """`all_reduce, called in file.py:12 function`: the wait for other ranks in which a thread with this innermost frame stands, if any."""
    name = None
    while frame is not None:
        inside = any(frame.f_code.co_filename.endswith(path) for path in WAITS)
        if inside and frame.f_code.co_name != "wrapper":
            name = frame.f_code.co_name
        elif name is not None and "torch/" not in frame.f_code.co_filename and not inside:
            return f"{name}, called in {Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return name


def format_stack(name: str, frame: FrameType | None) -> str:
    """The stack of a thread, outermost first."""
    return f"thread {name}:\n{''.join(traceback.format_stack(frame))}" if frame is not None else f"thread {name}: has just ended\n"


def culprit(reports: Mapping[int, Report], beats: Mapping[int, Mapping[str, Any] | None]) -> str:
    """One line about the rank that the others wait for: one that does not answer; else one that is not waiting while others are; else one
    that is behind."""
    for rank, beat in beats.items():
        if rank not in reports:
            seen = f"was last seen in phase {beat['phase']} of {beat['stage']} step {beat['step']}" if beat else "never said where it was"
            return f"rank {rank} does not answer (it is stopped, holds the interpreter, or its machine is gone) and {seen}"
    waiting = [report for report in reports.values() if report.waits_in is not None]
    working = [report for report in reports.values() if report.waits_in is None]
    if waiting and working:
        first = min(working, key=lambda report: report.phases)
        others = f"{len(waiting)} rank{'s wait' if waiting[1:] else ' waits'} in {waiting[0].waits_in}"
        return f"rank {first.rank} is in phase {first.phase}, at {first.innermost}, while {others}"
    behind = min(reports.values(), key=lambda report: report.phases)
    if behind.phases < max(report.phases for report in reports.values()):
        return f"rank {behind.rank} is behind the others, in phase {behind.phase} ({behind.waits_in or behind.innermost})"
    if not waiting:
        return f"rank {behind.rank} and all others are in phase {behind.phase}, at {behind.innermost}"
    return f"all ranks wait for each other in {behind.waits_in}: what connects them is at fault"


def write_report(
    run_dir: Path,
    why: str,
    reports: Mapping[int, Report],
    beats: Mapping[int, Mapping[str, Any] | None],
    stacks: Mapping[int, str],
) -> tuple[Path, str]:
    """Writes run_dir/hang-<time>.txt; gives it and the line about the culprit. stacks: faulthandler's, of ranks without a report."""
    line = culprit(reports, beats)
    parts = [f"culprit: {line}", f"why now: {why}", ""]
    parts += [
        f"rank {rank}: {r.stage} step {r.step}, phase {r.phase} for {r.seconds:.0f} s; waits in: {r.waits_in or 'no collective'}; "
        f"last collective seen: {r.last_collective or 'none'}; waiting: "
        + (", ".join(f"{depth} {name}" for name, depth in r.depths.items()) or "nothing known")
        for rank, r in sorted(reports.items())
    ]
    parts += [f"rank {rank}: no answer; last heartbeat: {beats.get(rank)}" for rank in sorted(stacks)]
    parts += [f"\n==== rank {rank}, {r.host}, pid {r.pid}\n{r.stack}" for rank, r in sorted(reports.items())]
    silent = "no stack: the process did not answer a signal either"
    parts += [f"\n==== rank {rank}\n{text or silent}" for rank, text in sorted(stacks.items())]
    path = run_dir / time.strftime("hang-%Y%m%d-%H%M%S.txt")
    path.write_text("\n".join(parts) + "\n", encoding="utf-8")
    return path, line
