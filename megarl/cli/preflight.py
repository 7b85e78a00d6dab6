"""`megarl preflight`: one process on every node of a job, before its ranks start; what stands in the way, each line with its node."""

from __future__ import annotations

import hashlib
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

from megarl.config import load_config
from megarl.parallel.nodes import GIB, Needs, Place, check_nodes


def preflight(path: Path, overrides: Sequence[str], place: Place, ranks: int, host_gib: float, disk_gib: float, bandwidth: float) -> int:
    """Checks the configuration on the first node and the nodes on all of them. ranks: processes that each node is to run."""
    from megarl.parallel.runtime import choose_device
    from megarl.schedule.preflight import preflight as check_run

    config = load_config(path, overrides)
    if place.node == 0:
        check_run(config, str(path), world=place.nodes * ranks)
    cuda = choose_device(config.parallel.device).type == "cuda"
    needs = Needs(
        folder=config.run_dir,
        devices=ranks if cuda else 0,
        host_bytes=host_gib * GIB,
        disk_bytes=disk_gib * GIB,
        bandwidth=bandwidth,
    )
    verdict = check_nodes(place, needs, _versions(cuda))
    if place.node == 0 or any(line.startswith(f"{place.name}: ") for line in verdict.problems):
        for line in verdict.problems:
            print(f"preflight: {line}", file=sys.stderr, flush=True)
    if place.node == 0 and not verdict.problems:
        print("\n".join(f"preflight: {line}" for line in (*verdict.notes, "all nodes are fit")), flush=True)
    return 2 if verdict.problems else 0


def _versions(cuda: bool) -> dict[str, str]:
    """What must be the same on all nodes: packages, Python, and megarl's own files."""
    import torch

    from megarl.schedule.preflight import versions

    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(file.relative_to(package).as_posix().encode() + file.read_bytes())
    found = {**versions(), "python": platform.python_version(), "megarl's files": digest.hexdigest()[:12]}
    if cuda:
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["GPU"] = torch.cuda.get_device_name(0)
    return found
