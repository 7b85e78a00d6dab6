"""Runs and sweeps by NeMo-Run (extra `launch`): configurations x seeds, on this machine or on Slurm.

    python tools/launch.py configs/vapo_32b.yaml --executor slurm --nodes 16 --account A --partition P
    python tools/launch.py configs/ablations/dapo_*.yaml steps=100 --seeds 0 1 --executor slurm --nodes 16

A Slurm job does what slurm/*.sbatch do, by the same slurm/common.sh: preflight, logs per rank, requeue with
resume.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megarl.config import check_config, load_config
from megarl.config.errors import MegarlError
from megarl.config.load import set_key

ROOT = Path(__file__).resolve().parents[1]
SIGNAL = 600  # seconds before the time limit, as in slurm/*.sbatch


class Job(NamedTuple):
    """One run of the sweep."""

    name: str
    arguments: list[str]  # of `megarl train`


def jobs(given: argparse.Namespace) -> Iterator[Job]:
    """Check and yield each configuration with each seed. Several seeds get separate folders in run_dir."""
    for path in given.configs:
        for seed in given.seeds or [None]:
            overrides = list(given.overrides)
            if seed is not None:
                folder = load_config(path, overrides).run_dir / f"seed{seed}"
                overrides += [
                    set_key("seed", seed),
                    *([set_key("run_dir", folder)] if len(given.seeds) > 1 else []),
                ]
            check_config(load_config(path, overrides), str(path))
            yield Job(path.stem if seed is None else f"{path.stem}-seed{seed}", [str(path), *overrides])


def local(given: argparse.Namespace) -> Any:
    """Return an executor on this machine, where megarl starts the ranks."""
    import nemo_run

    return nemo_run.LocalExecutor(ntasks_per_node=1, env_vars={"OMP_NUM_THREADS": "1"})


def slurm(given: argparse.Namespace, job: Job) -> Any:
    """Return a Slurm executor whose set-up lines do all the work and exit.

    The rest of NeMo-Run's sbatch template has no trap for the signal, and no preflight."""
    import nemo_run

    arguments = shlex.join(job.arguments)
    lines = [
        f"export MEGARL_HOME={shlex.quote(str(ROOT))} MEGARL_GRACE={SIGNAL - 60}",
        *(f"export {shlex.quote(setting)}" for setting in given.env),
        "set +evx",
        '. "$MEGARL_HOME/slurm/common.sh"',
        f"megarl_prepare {arguments}",
        f"megarl_train {arguments}",
        "exit $?",
    ]
    # NeMo-Run passes these options to sbatch unchanged.
    options = {"requeue": True, "open_mode": "append", "signal": f"B:USR1@{SIGNAL}"}
    return nemo_run.SlurmExecutor(
        account=given.account,
        partition=given.partition,
        nodes=given.nodes,
        ntasks_per_node=1,
        gpus_per_node=given.gpus or None,
        # Whole nodes: else Slurm may give a task one CPU and a share of the memory.
        exclusive=True if given.gpus else None,
        mem="0" if given.gpus else None,
        time=given.time,
        container_image=None,
        packager=nemo_run.Packager(),
        tunnel=nemo_run.LocalTunnel(job_dir=""),  # its files go to NEMORUN_HOME, like a local run's
        setup_lines="\n".join(lines),
        additional_parameters=options,
    )


def launch(given: argparse.Namespace) -> None:
    """Submit the sweep to NeMo-Run, or print it."""
    import nemo_run

    job_list = list(jobs(given))
    with nemo_run.Experiment(given.name or job_list[0].name) as experiment:
        for job in job_list:
            task = nemo_run.Script(
                path="megarl", m=True, entrypoint=sys.executable, args=["train", *job.arguments]
            )
            executor = local(given) if given.executor == "local" else slurm(given, job)
            experiment.add(task, executor=executor, name=job.name, tail_logs=given.executor == "local")
        if given.dryrun:
            experiment.dryrun()
        else:
            experiment.run(detach=given.executor == "slurm", sequential=given.executor == "local")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="launch.py", description="Runs and sweeps by NeMo-Run.")
    parser.add_argument(
        "configs", nargs="+", metavar="CONFIG|key=value", help="YAML files, then overrides for all of them"
    )
    parser.add_argument("--seeds", type=int, nargs="+", metavar="N", help="seeds of each configuration")
    parser.add_argument("--executor", choices=("local", "slurm"), default="local")
    parser.add_argument("--dryrun", action="store_true", help="print the jobs, and submit nothing")
    parser.add_argument("--name", help="name of the experiment; default: the first job's")
    parser.add_argument("--nodes", type=int, default=1, help="nodes of a Slurm job (default: %(default)s)")
    parser.add_argument("--gpus", type=int, default=8, help="GPUs of a node, 0: CPUs (default: %(default)s)")
    parser.add_argument("--account", default="none", help="account, if the Slurm cluster uses accounts")
    parser.add_argument("--partition")
    parser.add_argument("--time", default="24:00:00", help="time limit of a Slurm job (default: %(default)s)")
    parser.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="MEGARL_X=VALUE",
        help="setting of slurm/common.sh; may be repeated",
    )
    options = parser.parse_args(arguments)
    options.overrides = [text for text in options.configs if "=" in text]
    options.configs = [Path(text) for text in options.configs if "=" not in text]
    if not options.configs:
        parser.error("at least one configuration is needed")
    return options


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    try:
        launch(options)
    except MegarlError as error:
        print(f"launch.py: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        print(f"launch.py: {error.name} is not installed (pip install 'megarl[launch]')", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
