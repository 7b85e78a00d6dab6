"""tools/launch.py on SkyPilot and Kubeflow: the jobs that NeMo-Run would submit.

No test reaches a cluster. Nothing here imports torch, which the environment of `make test-clouds` lacks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from megarl.config.errors import ConfigError
from tests.launch.tool import ROOT, load_tool

needs_clouds = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("nemo_run", "sky", "kubernetes")),
    reason="NeMo-Run, SkyPilot and Kubernetes' client are not installed: make test-clouds",
)
KUBEFLOW = ["--executor", "kubeflow", "--image", "registry/megarl", "--namespace", "team"]
SKYPILOT = ["--executor", "skypilot", "--image", "registry/megarl", "--gpu-type", "H100"]
RUN_DIR = "run_dir=/runs/vapo"
VOLUME = ["--volume", "megarl:/runs"]
# Prints what SkyPilot reads from a task.
READ_TASK = """
import json, sys
from sky.task import Task
task = Task.from_yaml_config(json.load(sys.stdin))
print(task.num_nodes, next(iter(task.resources)).accelerators)
"""
KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: test
clusters: [{name: test, cluster: {server: "https://127.0.0.1:1"}}]
users: [{name: test, user: {token: none}}]
contexts: [{name: test, context: {cluster: test, user: test}}]
"""


def start(
    folder: Path, *arguments: str, program: tuple[str, ...] = (), given: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the tool as a user does, or another program, with a temporary home and cluster address.

    Nobody listens at the address."""
    (folder / "kubeconfig").write_text(KUBECONFIG)
    home = {"HOME": str(folder), "NEMORUN_HOME": str(folder / "nemo"), "PYTHONPATH": str(ROOT)}
    launch = (sys.executable, str(ROOT / "tools" / "launch.py"), "configs/vapo_32b.yaml")
    return subprocess.run(
        [*(program or launch), *arguments],
        cwd=ROOT,
        env={"KUBECONFIG": str(folder / "kubeconfig"), **os.environ, **home, "PYTHON": sys.executable},
        input=given,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def dry_run(folder: Path, *arguments: str) -> list[Any]:
    done = start(folder, *arguments, "--dryrun")
    assert done.returncode == 0, done.stdout + done.stderr
    return list(YAML(typ="safe").load_all(done.stdout.partition("---\n")[2]))


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([RUN_DIR, *SKYPILOT[:4], *VOLUME], "--gpu-type: SkyPilot needs one"),
        ([RUN_DIR, *KUBEFLOW[:2], *VOLUME], "--image: kubeflow needs one"),
        ([RUN_DIR, *KUBEFLOW[:4], *VOLUME], "--namespace: Kubeflow needs one"),
        (
            [RUN_DIR, *KUBEFLOW, "--volume", "s3://bucket:/runs"],
            "--volume: s3://bucket cannot be mounted here",
        ),
        ([RUN_DIR, *SKYPILOT, "--infra", "aws", *VOLUME], "--volume: megarl cannot be mounted here"),
        (["run_dir=/other", *KUBEFLOW, *VOLUME], "run_dir: /other is on no volume"),
        (KUBEFLOW, "run_dir: runs/vapo_32b is on no volume that all nodes share (volumes: none"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_no_job_could_use_is_one_line(
    arguments: list[str], problem: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tool = load_tool()
    monkeypatch.setattr(tool, "PACKAGES", dict.fromkeys(tool.PACKAGES, "json"))
    monkeypatch.chdir(ROOT)
    assert tool.main(["configs/vapo_32b.yaml", *arguments]) == 2
    line = capsys.readouterr().err
    assert line.startswith(f"launch.py: {problem}") and line.count("\n") == 1


def test_a_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    tool = load_tool()
    monkeypatch.setattr(tool, "PACKAGES", {"kubeflow": "no_such_package"})
    with pytest.raises(ConfigError, match=r"no_such_package is not installed \(make test-clouds"):
        tool.check_cloud(tool.parse(["configs/vapo_32b.yaml", RUN_DIR, *KUBEFLOW, *VOLUME]))


@needs_clouds
def test_a_train_job_has_the_fields_of_kubeflows_api(tmp_path: Path) -> None:
    """The models that Kubeflow generates from its API drop nothing."""
    from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob

    given = [RUN_DIR, *KUBEFLOW, *VOLUME, "--nodes", "16", "--env", "MEGARL_RETRIES=5", "--seeds", "0", "1"]
    first, second = dry_run(tmp_path, *given)
    for job in (first, second):
        assert TrainerV1alpha1TrainJob.from_dict(job).to_dict() == job
        name = job["metadata"]["name"]
        assert job["metadata"]["namespace"] == "team" and re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", name)
        trainer = job["spec"]["trainer"]
        assert (trainer["numNodes"], trainer["numProcPerNode"]) == (16, 8)
        assert trainer["image"] == "registry/megarl"
        assert trainer["resourcesPerNode"]["limits"] == {"nvidia.com/gpu": "8"}
        environment = {entry["name"]: entry["value"] for entry in trainer["env"]}
        assert environment == {"MEGARL_HOME": "/opt/megarl", "MEGARL_GRACE": "540", "MEGARL_RETRIES": "5"}
        [patch] = job["spec"]["runtimePatches"]
        [node] = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
        pod = node["template"]["spec"]["template"]["spec"]
        assert pod["terminationGracePeriodSeconds"] > int(environment["MEGARL_GRACE"])
        assert pod["volumes"] == [{"name": "megarl-0", "persistentVolumeClaim": {"claimName": "megarl"}}]
        assert pod["containers"][0]["volumeMounts"] == [{"name": "megarl-0", "mountPath": "/runs"}]
    words = first["spec"]["trainer"]["command"]
    assert words[:3] == ["bash", "/opt/megarl/tools/node.sh", "configs/vapo_32b.yaml"]
    assert words[3:] == ["run_dir=/runs/vapo", "seed=0", 'run_dir="/runs/vapo/seed0"']


@needs_clouds
@pytest.mark.parametrize("on", ["k8s/test", "aws/us-east-1"])
def test_a_task_is_one_that_skypilot_accepts(tmp_path: Path, on: str) -> None:
    """SkyPilot reads the task again. A shell gives the node's script the words that were given here."""
    volume = "megarl:/runs" if on.startswith("k8s") else "s3://bucket/megarl:/runs"
    overrides = [RUN_DIR, "data.train=[/runs/two words.jsonl]"]
    options = ["--infra", on, "--volume", volume, "--nodes", "16"]
    [task] = dry_run(tmp_path, *overrides, *SKYPILOT, *options)
    read = start(tmp_path, program=(sys.executable, "-c", READ_TASK), given=json.dumps(task))
    assert read.stdout.splitlines()[-1] == "16 {'H100': 8}", read.stderr
    assert list(task["resources"]["image_id"].values()) == ["docker:registry/megarl"]
    assert task["envs"] == {"MEGARL_HOME": "/nemo_run/code", "MEGARL_GRACE": "540"}
    if on.startswith("k8s"):
        pod = task["resources"]["_cluster_config_overrides"]["kubernetes"]["pod_config"]["spec"]
        assert pod["volumes"][0]["persistentVolumeClaim"] == {"claimName": "megarl"}
        assert pod["containers"] == [{"volumeMounts": [{"name": "megarl-0", "mountPath": "/runs"}]}]
    else:
        assert task["file_mounts"]["/runs"]["source"] == "s3://bucket/megarl"
    line = task["run"].strip().splitlines()[-1]
    script = "bash() { printf '%s\\n' \"$@\"; }\n" + line
    words = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    assert words[:-1] == ["/nemo_run/code/tools/node.sh", "configs/vapo_32b.yaml", *overrides]


@needs_clouds
def test_the_example_prints_both_jobs(tmp_path: Path) -> None:
    done = start(tmp_path, program=("bash", "examples/launch.sh"))
    assert done.returncode == 0, done.stdout + done.stderr
    task, train_job = (next(YAML(typ="safe").load_all(text)) for text in done.stdout.split("---\n")[1:])
    assert (task["num_nodes"], task["resources"]["infra"]) == (16, "kubernetes")
    assert (train_job["kind"], train_job["spec"]["trainer"]["numNodes"]) == ("TrainJob", 16)


@needs_clouds
def test_without_a_cluster_there_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    done = start(tmp_path, RUN_DIR, *KUBEFLOW, *VOLUME)
    assert done.returncode == 2
    assert "launch.py: --executor kubeflow: no cluster: " in done.stderr.splitlines()[-1]
