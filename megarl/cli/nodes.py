"""`megarl preflight`."""

from __future__ import annotations

import platform
import sys
from typing import Annotated

from typer import Option

from megarl.cli.arguments import ConfigFile, Overrides
from megarl.cli.ranks import checks_packages
from megarl.config import Config, load_config
from megarl.config.hub import RECORD, describe_models, find_names, local_inputs

PLANNED = "0: on GPUs the estimate of `megarl plan`"


@checks_packages
def preflight(
    path: ConfigFile,
    overrides: Overrides,
    *,
    node: Annotated[int, Option(metavar="N", help="number of this node, from 0")] = 0,
    nodes: Annotated[int, Option(metavar="N", help="number of nodes of the job")] = 1,
    ranks: Annotated[int, Option(metavar="N", help="ranks (GPUs) of a node")] = 1,
    host: Annotated[str, Option(metavar="NAME", help="name or address of the first node")] = "127.0.0.1",
    port: Annotated[int, Option(metavar="N", help="free port on the first node")] = 29400,
    limit: Annotated[float, Option(metavar="SECONDS", help="longest wait for any node")] = 60.0,
    host_memory: Annotated[
        float, Option(metavar="GiB", help=f"memory that must be free on a node; {PLANNED}")
    ] = 0.0,
    disk: Annotated[float, Option(metavar="GiB", help=f"disk space that run_dir must have; {PLANNED}")] = 0.0,
    bandwidth: Annotated[float, Option(metavar="GB/s", help="least speed from another node")] = 0.0,
) -> int:
    """Check the nodes of a job before its ranks start: run on each of them, as slurm/ does.

    The first one also checks the configuration. The exit code is 2 if there is a problem."""
    from megarl.parallel.machine import GIB
    from megarl.parallel.node_checks import NodeNeeds, NodePlace, check_nodes
    from megarl.parallel.runtime import choose_device
    from megarl.schedule.preflight import preflight as check_run

    config = load_config(path, overrides)
    place = NodePlace(node, nodes, host, port, limit)
    # Nodes need different times for a download, so it follows the checks in which they meet.
    has_names = bool(find_names(config))
    notes = check_run(config, str(path), world=nodes * ranks) if node == 0 and not has_names else []
    cuda = choose_device(config.parallel.device).type == "cuda"
    # The plan assumes the processes of a GPU job.
    host_bytes, disk_bytes = planned_needs(describe_models(config), nodes * ranks) if cuda else (0.0, 0.0)
    needs = NodeNeeds(
        folder=config.run_dir,
        devices=ranks if cuda else 0,
        host_bytes=host_memory * GIB or host_bytes,
        disk_bytes=disk * GIB or disk_bytes,
        bandwidth=bandwidth,
    )
    findings = check_nodes(place, needs, node_versions(cuda), problems=broken_packages(config, cuda))
    if has_names and not findings.problems:
        config = local_inputs(config, config.run_dir / RECORD, first=node == 0)
        notes = check_run(config, str(path), world=nodes * ranks) if node == 0 else []
    if node == 0 or any(line.startswith(f"{place.name}: ") for line in findings.problems):
        for line in findings.problems:
            print(f"preflight: {line}", file=sys.stderr, flush=True)
    if node == 0 and not findings.problems:
        for line in (*notes, *findings.notes, "all nodes are fit"):
            print(f"preflight: {line}", flush=True)
    return 2 if findings.problems else 0


def broken_packages(config: Config, cuda: bool) -> list[str]:
    """Return problems of packages, which would stop the ranks only after all have started."""
    from megarl.parallel.machine import broken_transformer_engine, cudnn_problem, engine_import_problem

    problems = (
        engine_import_problem(config.rollout.engine),
        broken_transformer_engine(),
        cudnn_problem() if cuda and config.model.layers != "portable" else None,
    )
    return [line for line in problems if line]


def planned_needs(config: Config, world: int) -> tuple[float, float]:
    """Return the bytes of a node's memory and of disk that a run needs."""
    from megarl.plan.disk import disk_bytes
    from megarl.plan.host import node_bytes
    from megarl.plan.inputs import make_plan_inputs
    from megarl.weights.known_models import planning_config

    inputs = make_plan_inputs(config, planning_config(config.model.path)[1], world=world)
    return sum(node_bytes(inputs).values()), disk_bytes(inputs)


def node_versions(cuda: bool) -> dict[str, str]:
    """Return versions that must be equal on all nodes."""
    import torch

    from megarl.schedule.identity import checksum_code
    from megarl.schedule.preflight import versions

    code_checksum = checksum_code()
    version_by_name = {**versions(), "python": platform.python_version(), "megarl's files": code_checksum}
    if cuda:
        version_by_name["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        version_by_name["GPU"] = torch.cuda.get_device_name(0)
    return version_by_name
