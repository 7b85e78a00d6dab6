"""Start runs and sweeps with NeMo-Run: on this machine, Slurm, SkyPilot or Kubeflow.

A sweep is configurations x seeds. It needs the extra `launch`; for SkyPilot and Kubeflow the environment
.venv-clouds, which `make test-clouds` makes.

    python tools/launch.py configs/vapo_32b.yaml --executor slurm --nodes 16 --account A --partition P
    python tools/launch.py configs/ablations/dapo_*.yaml steps=100 --seeds 0 1 --executor slurm --nodes 16

A Slurm job does what slurm/*.sbatch do, by the same slurm/common.sh: preflight, logs per rank, requeue with
resume. SkyPilot and Kubeflow run tools/node.sh on each node, which does the same there.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from megarl.config import check_config, load_config
from megarl.config.errors import ConfigError, MegarlError
from megarl.config.load import set_key

ROOT = Path(__file__).resolve().parents[1]
SIGNAL = 600  # seconds before the time limit, as in slurm/*.sbatch
IMAGE_HOME = "/opt/megarl"  # of docker/Dockerfile
CODE = "/nemo_run/code"  # where NeMo-Run puts the commit's files on SkyPilot's nodes
PACKAGES = {"skypilot": "sky", "kubeflow": "kubernetes"}  # executor -> module that NeMo-Run needs for it


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
            config = load_config(path, overrides)
            check_config(config, str(path))
            if given.executor in PACKAGES:
                check_storage(config.run_dir, given)
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


class Volume(NamedTuple):
    """Storage that all nodes of a job share."""

    source: str  # a Kubernetes volume claim, or a bucket's URL for SkyPilot
    path: str  # where nodes see it

    @classmethod
    def parse(cls, text: str) -> Volume:
        source, _, path = text.rpartition(":")
        if not source or not path.startswith("/"):
            raise argparse.ArgumentTypeError(f"{text} is not CLAIM:/path")
        return cls(source, path)

    @property
    def is_bucket(self) -> bool:
        return "://" in self.source


def check_storage(run_dir: Path, given: argparse.Namespace) -> None:
    """Raise ConfigError unless run_dir is on a volume: a new attempt continues from its checkpoints."""
    if not any(PurePosixPath(run_dir).is_relative_to(volume.path) for volume in given.volume):
        volumes = ", ".join(volume.path for volume in given.volume) or "none"
        remedy = "give --volume CLAIM:/path, and run_dir=/path/..."
        raise ConfigError(
            f"run_dir: {run_dir} is on no volume that all nodes share (volumes: {volumes}; {remedy})"
        )


def check_cloud(given: argparse.Namespace) -> None:
    """Raise ConfigError for options without which the executor cannot work."""
    executor = given.executor
    if find_spec(PACKAGES[executor]) is None:
        problem = f"{PACKAGES[executor]} is not installed (make test-clouds makes .venv-clouds, which has it)"
        raise ConfigError(f"--executor {executor}: {problem}")
    if not given.image:
        raise ConfigError(f"--image: {executor} needs one (docker/Dockerfile makes it)")
    if executor == "kubeflow" and not given.namespace:
        raise ConfigError("--namespace: Kubeflow needs one (that of your team on the cluster)")
    if executor == "skypilot" and given.gpus and not given.gpu_type:
        raise ConfigError("--gpu-type: SkyPilot needs one, such as H100 (sky show-gpus lists them)")
    on_kubernetes = executor == "kubeflow" or (given.infra or "").split("/")[0] in ("k8s", "kubernetes")
    for volume in given.volume:
        if volume.is_bucket == on_kubernetes:
            wanted = "a volume claim's name" if on_kubernetes else "a bucket's URL, or --infra k8s"
            raise ConfigError(f"--volume: {volume.source} cannot be mounted here (give {wanted})")


def settings(given: argparse.Namespace) -> dict[str, str]:
    """Return the environment of tools/node.sh, by default with the grace that a pod has to end."""
    named = dict(setting.partition("=")[::2] for setting in given.env)
    return {"MEGARL_GRACE": str(SIGNAL - 60)} | named


def pod_storage(given: argparse.Namespace) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the volumes of a pod, and where its container mounts them."""
    names = [f"megarl-{number}" for number in range(len(given.volume))]
    volumes = [
        {"name": name, "persistentVolumeClaim": {"claimName": volume.source}}
        for name, volume in zip(names, given.volume, strict=True)
    ]
    mounts = [
        {"name": name, "mountPath": volume.path} for name, volume in zip(names, given.volume, strict=True)
    ]
    return volumes, mounts


def skypilot(given: argparse.Namespace) -> Any:
    """Return a SkyPilot executor. NeMo-Run copies the files of the commit to its nodes."""
    import nemo_run

    buckets = {
        volume.path: {"source": volume.source, "mode": "MOUNT"} for volume in given.volume if volume.is_bucket
    }
    pod: dict[str, Any] = {"terminationGracePeriodSeconds": SIGNAL}
    volumes, mounts = pod_storage(given)
    if volumes and not buckets:
        pod |= {"volumes": volumes, "containers": [{"volumeMounts": mounts}]}
    return nemo_run.SkypilotExecutor(
        container_image=f"docker:{given.image.removeprefix('docker:')}",
        infra=given.infra,
        gpus=given.gpu_type if given.gpus else None,
        gpus_per_node=given.gpus or None,
        num_nodes=given.nodes,
        setup=given.setup,
        storage_mounts=buckets or None,
        cluster_config_overrides=None if buckets else {"kubernetes": {"pod_config": {"spec": pod}}},
        packager=nemo_run.GitArchivePackager(),
        env_vars={"MEGARL_HOME": CODE} | settings(given),
    )


def kubeflow(given: argparse.Namespace) -> Any:
    """Return a Kubeflow executor for Trainer 2.2 or later, whose jobs patch their runtime's pods.

    NeMo-Run's own volumes are `podTemplateOverrides`, which only Trainer 2.0 and 2.1 know."""
    import nemo_run
    from kubernetes.config import ConfigException

    volumes, mounts = pod_storage(given)
    pod = {
        "terminationGracePeriodSeconds": SIGNAL,
        "volumes": volumes,
        "containers": [{"name": "node", "volumeMounts": mounts}],
    }
    job = {"name": "node", "template": {"spec": {"template": {"spec": pod}}}}
    patch = {"template": {"spec": {"replicatedJobs": [job]}}}
    try:
        return nemo_run.KubeflowExecutor(
            runtime_ref=given.runtime,
            namespace=given.namespace,
            image=given.image,
            num_nodes=given.nodes,
            gpus_per_node=given.gpus or None,
            env_vars={"MEGARL_HOME": given.home} | settings(given),
            spec_kwargs={"runtimePatches": [{"manager": "megarl.launch", "trainingRuntimeSpec": patch}]},
        )
    except ConfigException as error:
        raise ConfigError(f"--executor kubeflow: no cluster: {error} (set KUBECONFIG)") from None


def manifest(executor: Any, request: Any) -> dict[str, Any]:
    """Return what NeMo-Run submits: a SkyPilot task, or a TrainJob."""
    if hasattr(request, "task"):
        return dict(request.task.to_yaml_config())
    return dict(executor.get_job_body(executor._trainjob_name(request.name), request.cmd))


def script(given: argparse.Namespace, job: Job) -> Any:
    """Return the command of a job: megarl, or a node's script."""
    import nemo_run

    if given.executor in PACKAGES:
        home = CODE if given.executor == "skypilot" else given.home
        # NeMo-Run joins SkyPilot's words into a line of a shell. Kubernetes starts no shell.
        words = map(shlex.quote, job.arguments) if given.executor == "skypilot" else job.arguments
        return nemo_run.Script(path=f"{home}/tools/node.sh", args=list(words))
    return nemo_run.Script(path="megarl", m=True, entrypoint=sys.executable, args=["train", *job.arguments])


def launch(given: argparse.Namespace) -> None:
    """Submit the sweep to NeMo-Run, or print it."""
    if given.executor in PACKAGES:
        check_cloud(given)
    job_list = list(jobs(given))
    import nemo_run

    make = {"local": local, "skypilot": skypilot, "kubeflow": kubeflow}
    with nemo_run.Experiment(given.name or job_list[0].name) as experiment:
        for job in job_list:
            executor = slurm(given, job) if given.executor == "slurm" else make[given.executor](given)
            is_local = given.executor == "local"
            experiment.add(script(given, job), executor=executor, name=job.name, tail_logs=is_local)
        if not given.dryrun:
            experiment.run(detach=not is_local, sequential=is_local)
        elif given.executor in PACKAGES:
            # NeMo-Run 0.11 prints a summary of Kubeflow's jobs, and fails to print those of newer SkyPilots.
            experiment.dryrun(log=False)
            for task in experiment.jobs:
                print("---")
                dump_yaml(manifest(task.executor, task._dryrun_info.request))
        else:
            experiment.dryrun()


def dump_yaml(content: Mapping[str, Any]) -> None:
    from ruamel.yaml import YAML

    yaml = YAML()
    yaml.width = 1000
    yaml.dump(dict(content), sys.stdout)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="launch.py", description="Runs and sweeps by NeMo-Run.")
    parser.add_argument(
        "configs", nargs="+", metavar="CONFIG|key=value", help="YAML files, then overrides for all of them"
    )
    parser.add_argument("--seeds", type=int, nargs="+", metavar="N", help="seeds of each configuration")
    parser.add_argument("--executor", choices=("local", "slurm", *PACKAGES), default="local")
    parser.add_argument("--dryrun", action="store_true", help="print the jobs, and submit nothing")
    parser.add_argument("--name", help="name of the experiment; default: the first job's")
    parser.add_argument("--nodes", type=int, default=1, help="nodes of a job (default: %(default)s)")
    parser.add_argument("--gpus", type=int, default=8, help="GPUs of a node, 0: CPUs (default: %(default)s)")
    parser.add_argument("--account", default="none", help="account, if the Slurm cluster uses accounts")
    parser.add_argument("--partition")
    parser.add_argument("--time", default="24:00:00", help="time limit of a Slurm job (default: %(default)s)")
    parser.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="MEGARL_X=VALUE",
        help="setting of slurm/common.sh or tools/node.sh; may be repeated",
    )
    cloud = parser.add_argument_group("SkyPilot and Kubeflow")
    cloud.add_argument("--image", help="container image, from docker/Dockerfile")
    cloud.add_argument(
        "--volume",
        action="append",
        default=[],
        type=Volume.parse,
        metavar="CLAIM:/path",
        help="Kubernetes volume claim, or for SkyPilot on VMs a bucket's URL, and its path; may be repeated",
    )
    cloud.add_argument("--infra", help="SkyPilot: where, such as k8s/CONTEXT or aws/us-east-1")
    cloud.add_argument("--gpu-type", help="SkyPilot: name of the GPU, such as H100")
    cloud.add_argument("--setup", help="SkyPilot: commands to run on each node before the job")
    cloud.add_argument("--namespace", help="Kubeflow: namespace of the TrainJob")
    cloud.add_argument(
        "--runtime",
        default="torch-distributed",
        help="Kubeflow: ClusterTrainingRuntime (default: %(default)s)",
    )
    cloud.add_argument(
        "--home",
        default=IMAGE_HOME,
        help="Kubeflow: checkout of megarl in the container (default: %(default)s)",
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
