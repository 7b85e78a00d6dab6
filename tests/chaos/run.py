"""`python -m tests.chaos.run [NAME ...]`: inject each fault whose name contains a NAME; print a table."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.chaos.faults import FAULTS, may_mount
from tests.chaos.harness import Row, measure, prepare, undisturbed_run


def main(names: Sequence[str]) -> int:
    """Print the table row by row; return 1 if any row is not green."""
    chosen = [fault for fault in FAULTS if not names or any(name in fault.name for name in names)]
    if any(fault.mounts for fault in chosen) and not may_mount():
        print("left out, as nothing may be mounted here:", *(fault.name for fault in chosen if fault.mounts))
        chosen = [fault for fault in chosen if not fault.mounts]
    with tempfile.TemporaryDirectory(prefix="megarl-chaos-") as scratch:
        folder = Path(scratch)
        prepare(folder)
        print(
            f"{'fault':<42} {'detected after':>14}  {'lost work':<22} {'orphans':>7}  equal at the end",
            flush=True,
        )
        rows = []
        for fault in chosen:
            rows.append(measure(fault, folder, undisturbed_run(folder, fault)))
            print(line(rows[-1]), flush=True)
    bad = sum(not row.green for row in rows)
    print(f"{len(rows) - bad} of {len(rows)} faults: no orphan, no hang, the promised end")
    return int(bad > 0)


def line(row: Row) -> str:
    """Format a row of the table."""
    detected = "the run goes on" if row.detected is None else f"{row.detected:.1f} s"
    lost = "nothing" if row.detected is None else f"{row.lost} steps + interrupted"
    verdict = "yes" if row.green else f"NO: {'; '.join(row.remarks) or 'other weights or records'}"
    return f"{row.fault:<42} {detected:>14}  {lost:<22} {row.orphans:>7}  {verdict}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
