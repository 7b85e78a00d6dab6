"""What the sbatch files decide, without Slurm: its commands are scripts that write down what they were
asked."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from megarl.config import check_config, load_config

ROOT = Path(__file__).parents[2]


@pytest.fixture
def bin_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, body in (
        ("scontrol", '[ "$2" = hostnames ] && echo node1; echo "scontrol $*" >>"$CALLS"'),
        ("srun", 'echo "srun $*" >>"$CALLS"; while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"'),
        (
            "apptainer",
            'echo "apptainer $*" >>"$CALLS"; while [ "$1" != image.sif ]; do shift; done; shift; exec "$@"',
        ),
        ("scancel", 'echo "scancel $*" >>"$CALLS"'),
        ("sleep", "true"),
    ):
        (folder / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (folder / name).chmod(0o755)
    return folder


def script(bin_folder: Path, code: str, **settings: str) -> tuple[int, str, str]:
    """Runs code after common.sh: exit code, output, calls."""
    calls = bin_folder.parent / "calls"
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "MEGARL"))}
    environment |= {
        "PATH": f"{bin_folder}:{environment['PATH']}",
        "CALLS": str(calls),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "node[1-2]",
    }
    environment |= {
        "SLURM_JOB_NUM_NODES": "2",
        "MEGARL_HOME": str(ROOT),
        "MEGARL_LOGS": str(bin_folder.parent / "logs"),
        **settings,
    }
    done = subprocess.run(
        ["bash", "-c", f". {ROOT}/slurm/common.sh\n{code}"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr, calls.read_text() if calls.exists() else ""


def test_without_a_container(bin_folder: Path) -> None:
    code, output, calls = script(bin_folder, 'megarl_srun echo "in $PWD"')
    assert (code, output) == (0, f"in {ROOT}\n")
    assert "--nodes=2 --ntasks=2 --ntasks-per-node=1 --kill-on-bad-exit=1 echo" in calls


def test_with_apptainer(bin_folder: Path) -> None:
    code, output, calls = script(
        bin_folder, "megarl_srun echo inside", MEGARL_CONTAINER="image.sif", MEGARL_MOUNTS="/data:/data"
    )
    assert (code, output) == (0, "inside\n")
    assert f"apptainer exec --nv --bind {ROOT}:{ROOT},/data:/data --pwd {ROOT} image.sif echo inside" in calls


def test_with_pyxis(bin_folder: Path) -> None:
    _, _, calls = script(bin_folder, "megarl_srun true", MEGARL_CONTAINER="org/megarl:1")
    assert (
        f"--container-image=org/megarl:1 --container-mounts={ROOT}:{ROOT} --container-workdir={ROOT} true"
        in calls
    )


@pytest.mark.parametrize(
    ("steps", "codes", "requeues"),
    [
        ("'' ''", [1], 1),  # a first failure is tried again
        ("step-000005 step-000005", [1, 1], 1),  # a second one at the same place is not
        ("step-000005 step-000010", [1, 1, 1, 1], 4),  # progress is
    ],
    ids=["first", "same place", "progress"],
)
def test_failures_without_progress_end_the_job(
    bin_folder: Path, steps: str, codes: list[int], requeues: int
) -> None:
    for expected in codes:
        code, output, calls = script(bin_folder, f"megarl_failed 1 {steps}")
        assert code == expected, output
    assert calls.count("scontrol requeue 7") == requeues
    assert ("given up" in output) == (requeues < len(codes))


def test_the_newest_complete_checkpoint(bin_folder: Path, tmp_path: Path) -> None:
    for name in ("step-000002", "step-000010"):
        (tmp_path / "run/checkpoints" / name).mkdir(parents=True)
        (tmp_path / "run/checkpoints" / name / "manifest.json").touch()
    (tmp_path / "run/checkpoints/step-000020").mkdir()
    assert (
        script(bin_folder, f"megarl_newest {tmp_path}/run; megarl_newest {tmp_path}/none")[1]
        == "step-000010\n"
    )


def test_cancelled_is_not_queued_again(bin_folder: Path) -> None:
    code, _, calls = script(bin_folder, "megarl_signal=TERM; megarl_stopped")
    assert code == 143 and "scontrol requeue" not in calls


@pytest.mark.parametrize("recipe", ["vapo", "dapo"])
def test_the_large_jobs_have_the_nodes_that_their_layout_needs(recipe: str) -> None:
    text = (ROOT / "slurm" / f"{recipe}_32b.sbatch").read_text()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", text, flags=re.M))
    path = ROOT / "configs" / f"{recipe}_32b.yaml"
    config = load_config(path)
    check_config(config, str(path))
    assert f"configs/{recipe}_32b.yaml" in text
    parallel = config.parallel
    assert int(options["nodes"]) * int(options["gpus-per-node"]) == parallel.tp * parallel.pp * (
        parallel.dp or 0
    )
    grace = re.search(r"MEGARL_GRACE:-(\d+)", text)
    assert grace and int(grace[1]) + 30 <= int(options["signal"].split("@")[1])
    assert config.checkpoint.every > 0


@pytest.mark.parametrize("job", [1, 7, 123456, 999983])
@pytest.mark.parametrize("attempt", [0, 1, 9])
def test_the_jobs_ports_are_nobody_elses(bin_folder: Path, job: int, attempt: int) -> None:
    """D14: an SGLang engine takes one between 22000 and 29999 (get_free_port_below_ephemeral), the kernel
    those from 32768 on."""
    settings = {"SLURM_JOB_ID": str(job), "SLURM_RESTART_COUNT": str(attempt)}
    code, output, _ = script(bin_folder, 'echo "$megarl_port"', **settings)
    assert code == 0 and 10000 < int(output) < int(output) + 1 < 22000


def test_the_locked_environment_comes_first(bin_folder: Path, tmp_path: Path) -> None:
    for name in (".venv", ".venv-gpu"):
        (tmp_path / name / "bin").mkdir(parents=True)
        (tmp_path / name / "bin" / "python").symlink_to("/bin/true")
        _, output, _ = script(bin_folder, 'echo "$MEGARL_PYTHON"', MEGARL_HOME=str(tmp_path))
        assert output.strip() == f"{tmp_path}/{name}/bin/python"
    _, output, _ = script(
        bin_folder, 'echo "$MEGARL_PYTHON"', MEGARL_HOME=str(tmp_path), MEGARL_CONTAINER="image.sif"
    )
    assert output.strip() == "python"
