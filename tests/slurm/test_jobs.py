"""slurm/demo.sbatch on a real Slurm with two nodes: it trains, and whatever happens to it, it ends in the
same bits.

All in one file and one fixture: a cluster takes a second, each start of a job's ranks ten.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from tests.slurm.cluster import Cluster, missing, wait_for

ROOT = Path(__file__).parents[2]
# seconds for one job, its requeues included; a busy machine takes ten times as long as an idle one
LIMIT = 1200.0
SMALL = (
    "rollout.prompts=4",
    "update.mini_batch=32",
    "value_pretraining.steps=1",
    "evaluation.max_problems=8",
    "log.report=false",
)
STEPS = 6

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("slurm")) as started:
        yield started


class Job:
    """A submitted demo."""

    def __init__(
        self,
        cluster: Cluster,
        folder: Path,
        *overrides: str,
        options: tuple[str, ...] = (),
        **environment: str,
    ) -> None:
        self.cluster, self.folder, self.log = cluster, folder, folder / "slurm.out"
        folder.mkdir(parents=True, exist_ok=True)
        settings = {
            "MEGARL_PYTHON": sys.executable,
            "MEGARL_HOME": str(ROOT),
            "DEMO_FOLDER": str(folder / "demo"),
        }
        settings |= {
            "MEGARL_LOGS": str(folder / "logs"),
            "MEGARL_GRACE": "3",
            "MEGARL_LIMIT": "300",
            "DEMO_WARM_START": "5",
        }
        command = [
            "sbatch",
            "--parsable",
            f"--output={self.log}",
            f"--chdir={ROOT}",
            *options,
            str(ROOT / "slurm" / "demo.sbatch"),
        ]
        self.number = cluster.run(
            *command, *SMALL, f"steps={STEPS}", "checkpoint.every=1", *overrides, **(settings | environment)
        ).strip()

    @property
    def run_dir(self) -> Path:
        return self.folder / "demo" / "vapo"

    @property
    def text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def ended(self) -> str:
        """Waits for the end; the job's last state."""
        states = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        try:
            wait_for(f"job {self.number}", lambda: self.cluster.job(self.number)["JobState"] in states, LIMIT)
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.cluster.job(self.number)}\n{self.text}") from None
        return self.cluster.job(self.number)["JobState"]

    def wait_for_checkpoint(self) -> None:
        """Until it has one, and is not done."""
        checkpoints = self.run_dir / "checkpoints"
        wait_for(f"a checkpoint\n{self.text}", lambda: list(checkpoints.glob("step-*/manifest.json")), LIMIT)
        assert not (checkpoints / f"step-{STEPS:06d}").exists(), "it was done before anything happened to it"

    def ranks(self) -> dict[int, psutil.Process]:
        found = {}
        for process in psutil.process_iter():
            try:
                command, environment = process.cmdline(), process.environ()
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue
            if (
                environment.get("SLURM_JOB_ID") == self.number
                and "RANK" in environment
                and command[1:4] == ["-u", "-m", "megarl"]
            ):
                found[int(environment["RANK"])] = process
        return found


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Job:
    job = Job(cluster, tmp_path_factory.mktemp("undisturbed"))
    assert job.ended() == "COMPLETED", job.text
    return job


def disturbed(cluster: Cluster, undisturbed: Job, folder: Path, **environment: str) -> Job:
    """Another job with the same data and warm start, in training."""
    shutil.copytree(undisturbed.folder / "demo", folder / "demo", ignore=shutil.ignore_patterns("vapo"))
    job = Job(cluster, folder, f"model.path={undisturbed.folder}/demo/sft/hf", **environment)
    job.wait_for_checkpoint()
    return job


def assert_same(job: Job, undisturbed: Job) -> None:
    assert job.ended() == "COMPLETED", job.text
    assert "continues from" in job.text
    one, other = (load_file(each.run_dir / "hf" / "model.safetensors") for each in (job, undisturbed))
    assert one.keys() == other.keys() and all(tensor.equal(other[name]) for name, tensor in one.items())
    before = load_file(undisturbed.folder / "demo" / "sft" / "hf" / "model.safetensors")
    assert any(not tensor.equal(one[name]) for name, tensor in before.items())


def test_the_demo_trains_on_two_nodes(undisturbed: Job) -> None:
    assert "preflight: 2 nodes over gloo: all-reduce" in undisturbed.text
    logs = sorted(
        str(path.relative_to(undisturbed.folder / "logs"))
        for path in (undisturbed.folder / "logs").rglob("stderr.log")
    )
    assert [Path(log).parts[:2] for log in logs] == [("attempt-0", "node1")] * 2 + [
        ("attempt-0", "node2")
    ] * 2


def test_a_signal_before_the_time_limit(cluster: Cluster, undisturbed: Job, tmp_path: Path) -> None:
    job = disturbed(cluster, undisturbed, tmp_path, MEGARL_GRACE="200")
    cluster.run("scancel", "--batch", "--signal=USR1", job.number)  # what --signal=B:USR1@N has Slurm do
    assert_same(job, undisturbed)
    assert "signal USR1: the ranks have 200 s to save and leave" in job.text
    assert re.search(
        r"megarl: stopped by SIGUSR1: step \d of train is saved in \S+; the same command continues", job.text
    )
    assert "the ranks are still there" not in job.text
    assert cluster.job(job.number)["Restarts"] == "1"


def test_a_job_of_a_partition_that_comes_first(cluster: Cluster, undisturbed: Job, tmp_path: Path) -> None:
    job = disturbed(cluster, undisturbed, tmp_path, MEGARL_GRACE="200")
    options = ("--partition=urgent", "--nodes=2", "--exclusive", f"--output={tmp_path}/urgent.out")
    urgent = cluster.run("sbatch", "--parsable", *options, "--wrap=sleep 1").strip()
    wait_for("the urgent job", lambda: cluster.job(urgent)["JobState"] == "COMPLETED")
    assert_same(job, undisturbed)
    assert int(cluster.job(job.number)["Restarts"]) >= 1


def test_nodes_that_are_not_fit(cluster: Cluster, undisturbed: Job, tmp_path: Path) -> None:
    """No rank is started, nothing is queued again, and the nodes are named."""
    shutil.copytree(undisturbed.folder / "demo", tmp_path / "demo", ignore=shutil.ignore_patterns("vapo"))
    job = Job(cluster, tmp_path, MEGARL_HOST_MEMORY="1000000")
    assert job.ended() == "FAILED"
    assert (
        all(f"preflight: {name}: " in job.text for name in ("node1", "node2"))
        and "the run needs 1000000.0" in job.text
    )
    assert cluster.job(job.number)["Restarts"] == "0" and not (job.run_dir / "metrics.jsonl").exists()


def test_a_rank_that_is_killed(cluster: Cluster, undisturbed: Job, tmp_path: Path) -> None:
    job = disturbed(cluster, undisturbed, tmp_path)
    job.ranks()[1].kill()
    assert_same(job, undisturbed)
    assert "requeue after a failure, newest checkpoint: step-" in job.text
    assert cluster.job(job.number)["Restarts"] == "1"


def test_a_node_that_is_lost(cluster: Cluster, undisturbed: Job, tmp_path: Path) -> None:
    job = disturbed(cluster, undisturbed, tmp_path)
    cluster.kill_node("node2")
    wait_for(
        "the node's end to be noticed", lambda: any(state.startswith("down") for state in cluster.states())
    )
    cluster.start_node("node2")
    assert_same(job, undisturbed)
    assert int(cluster.job(job.number)["Restarts"]) >= 1
