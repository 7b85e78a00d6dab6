"""`megarl preflight`: one process on every node of a job, before its ranks start; what stands in the way, each line with its node."""

from __future__ import annotations

import hashlib
import platform
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from megarl.config import Config, load_config
from megarl.parallel.machine import SGLANG_IMPORT, broken_transformer_engine, import_problem
from megarl.parallel.nodes import GIB, Needs, Place, check_nodes
from megarl.plan.memory import plan_of
from megarl.weights.cost import planning_config


def preflight(path: Path, overrides: Sequence[str], place: Place, ranks: int, host_gib: float, disk_gib: float, bandwidth: float) -> int:
    """Checks the configuration on the first node and the nodes on all of them. ranks: processes that each node is to run."""
    from megarl.parallel.runtime import choose_device
    from megarl.schedule.preflight import preflight as check_run

    config = load_config(path, overrides)
    notes = check_run(config, str(path), world=place.nodes * ranks) if place.node == 0 else []
    cuda = choose_device(config.parallel.device).type == "cuda"
    planned = planned_needs(config, place.nodes * ranks) if cuda else (0.0, 0.0)  # the plan's processes are those of GPU jobs
    needs = Needs(
        folder=config.run_dir,
        devices=ranks if cuda else 0,
        host_bytes=host_gib * GIB or planned[0],
        disk_bytes=disk_gib * GIB or planned[1],
        bandwidth=bandwidth,
    )
    verdict = check_nodes(place, needs, _versions(cuda), problems=_broken(config))
    if place.node == 0 or any(line.startswith(f"{place.name}: ") for line in verdict.problems):
        for line in verdict.problems:
            print(f"preflight: {line}", file=sys.stderr, flush=True)
    if place.node == 0 and not verdict.problems:
        print("\n".join(f"preflight: {line}" for line in (*notes, *verdict.notes, "all nodes are fit")), flush=True)
    return 2 if verdict.problems else 0


def _broken(config: Config) -> list[str]:
    """Packages of this node that are there and cannot be imported, which the ranks would find when they have all started."""
    engine = import_problem("sglang", SGLANG_IMPORT) if config.rollout.engine == "sglang" and find_spec("sglang") else None
    return [line for line in (engine, broken_transformer_engine()) if line]


def planned_needs(config: Config, world: int) -> tuple[float, float]:
    """Bytes of a node's memory and of the disk that a run of so many ranks needs: as `megarl plan` says, and one checkpoint more than are
    kept, as the oldest goes when the newest is whole."""
    parallel = config.parallel
    parallel = parallel.model_copy(update={"dp": world // (parallel.tp * parallel.pp)})
    made = plan_of(config.model_copy(update={"parallel": parallel}), planning_config(config.model.path)[1])
    checkpoints = config.checkpoint.keep + 1 if config.checkpoint.every else 0
    return sum(made.host().values()), made.checkpoint() * checkpoints


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
