"""Names of the hub in `megarl data show`, `plan`, `config check`, `convert`, `eval` and `train`."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.cli.main import main
from megarl.config import load_config
from megarl.config.hub import RECORD, local_inputs
from megarl.training.checkpoint import list_fixed_settings
from tests.cli.scene import Scene
from tests.hub_server import HubServer, Repository, folder_files, serve_hub, use_hub

ROOT = Path(__file__).parents[2]
NAMES = ("model.path=Tiny/Qwen", "data.train=[owner/sums]", "data.eval=['owner/sums:train']")


@pytest.fixture
def hub(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[HubServer]:
    with serve_hub() as server:
        server.models["Tiny/Qwen"] = model = Repository()
        model.push(folder_files(scene.folder / "model"))
        server.datasets["owner/sums"] = sums = Repository()
        sums.push({"train.jsonl": (scene.folder / "train.jsonl").read_bytes()})
        use_hub(monkeypatch, server.url, tmp_path / "cache")
        yield server


def printed(scene: Scene, *arguments: str) -> str:
    assert scene.capsys is not None
    scene.capsys.readouterr()
    assert main(arguments) == 0
    return scene.capsys.readouterr().out


def test_commands_that_only_read(scene: Scene, hub: HubServer, tmp_path: Path) -> None:
    config = str(scene.config)
    text = printed(scene, "config", "check", config, *NAMES)
    assert "the configuration is valid; without a download its files were not checked: " in text
    assert "config.json" in printed(scene, "plan", config, *NAMES)
    assert hub.downloads() == ["config.json"]
    text = printed(scene, "data", "show", config, *NAMES, "--rows", "1")
    assert text.startswith("data: 9 of 9 rows used") and "What is 0 + 0?" in text
    assert not [name for name in hub.downloads() if name.endswith(".safetensors")]
    printed(scene, "convert", "to-megatron", "Tiny/Qwen", str(tmp_path / "converted"))
    assert len([name for name in hub.downloads() if name.endswith(".safetensors")]) == 1
    assert (tmp_path / "converted" / ".metadata").is_file()
    assert printed(scene, "config", "check", config, *NAMES).endswith("the configuration is valid\n")
    line = scene.refused("convert", "to-megatron", "Tiny/None", str(tmp_path / "other"))
    assert line.startswith("HF_DIR: Tiny/None: no such folder, and the hub has no public model of that name")
    assert not (scene.folder / "run").exists()


def test_example(scene: Scene, hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The names of examples/hub_names.yaml, in a repository with GSM8K's folders."""
    monkeypatch.chdir(tmp_path)
    hub.models["Qwen/Qwen2.5-0.5B-Instruct"] = hub.models["Tiny/Qwen"]
    hub.datasets["openai/gsm8k"] = gsm8k = Repository()
    rows = (scene.folder / "train.jsonl").read_bytes()
    reordered = b"".join(reversed(rows.splitlines(keepends=True)))  # equal files are downloaded once
    splits = {"train": rows, "test": reordered}
    gsm8k.push({f"main/{split}-00000-of-00001.jsonl": content for split, content in splits.items()})
    example = str(ROOT / "examples" / "hub_names.yaml")
    for options, needed in (((), ["train"]), (("--eval",), ["train", "test"])):
        text = printed(scene, "data", "show", example, *options, "--rows", "1")
        assert text.startswith("data: 9 of 9 rows used") and "within \\boxed{}." in text
        downloads = [name for name in hub.downloads() if name.endswith(".jsonl")]
        assert downloads == [f"main/{split}-00000-of-00001.jsonl" for split in needed]
    readme = (ROOT / "examples" / "README.md").read_text()
    assert "megarl train examples/hub_names.yaml" in readme


def test_plan_of_a_known_model_needs_no_hub(
    scene: Scene, hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_hub(monkeypatch, hub.url, tmp_path / "cache", offline=True)
    sizes = ("model.path=Qwen/Qwen2.5-0.5B-Instruct@v1", "parallel.device=cuda", "parallel.tp=1")
    assert "known sizes of Qwen2.5-0.5B" in printed(scene, "plan", str(scene.config), *sizes)


def test_settings_of_a_checkpoint_have_the_commit(
    scene: Scene, hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are the same for a cache in another place."""
    settings = []
    for cache in ("cache", "moved"):
        use_hub(monkeypatch, hub.url, tmp_path / cache)
        settings.append(list_fixed_settings(local_inputs(load_config(scene.config, NAMES))))
    assert settings[0] == settings[1]
    commit = hub.models["Tiny/Qwen"].revisions["main"]
    assert settings[0]["model.path"] == f"Tiny/Qwen@{commit}"
    assert settings[0]["data.train"] == [
        f"owner/sums@{hub.datasets['owner/sums'].revisions['main']}:train.jsonl"
    ]


@pytest.mark.slow
def test_eval_downloads_only_what_it_reads(scene: Scene, hub: HubServer, tmp_path: Path) -> None:
    """It needs no other model than the actor, and no training data."""
    model = folder_files(scene.folder / "model")
    hub.models["Tiny/Teacher"] = teacher = Repository()
    teacher.push({**model, "config.json": model["config.json"] + b"\n"})
    hub.datasets["owner/tests"] = tests = Repository()
    tests.push({"test.jsonl": (scene.folder / "train.jsonl").read_bytes()})
    names = (*NAMES[:2], "data.eval=[owner/tests]", "teacher.path=Tiny/Teacher", "parallel.tp=1")
    hub.requests.clear()
    printed(scene, "eval", str(scene.config), *names, "evaluation.samples=1", f"run_dir={tmp_path}/run")
    downloads = hub.downloads()
    assert "test.jsonl" in downloads and "train.jsonl" not in downloads
    assert (downloads.count("config.json"), downloads.count("model.safetensors")) == (1, 1)
    assert not [path for _, path, _ in hub.requests if "Teacher" in path]


@pytest.mark.slow
def test_each_node_downloads_after_the_nodes_have_met(scene: Scene, hub: HubServer, tmp_path: Path) -> None:
    """Each has a separate cache: a download longer than --limit does not end the check of the nodes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = (f"--port={port}", "--nodes=2", "--limit=120", "parallel.device=cpu")
    nodes = []
    for i in range(2):
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / f"home{i}")}
        environment |= {"HF_HUB_DISABLE_XET": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
        command = ("preflight", str(scene.config), *NAMES, *options, f"--node={i}")
        nodes.append(
            subprocess.Popen(
                [sys.executable, "-m", "megarl", *command],
                env=environment,
                cwd=tmp_path,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    for i, process in enumerate(nodes):
        _, error = process.communicate(timeout=300)
        assert process.returncode == 0, error
        [weights] = (tmp_path / f"home{i}").glob("hub/models--*/snapshots/*/model.safetensors")
        assert weights.parent.name == hub.models["Tiny/Qwen"].revisions["main"]


@pytest.mark.slow
def test_train_resumes_at_its_commit(scene: Scene, hub: HubServer, tmp_path: Path) -> None:
    """Newer commits of both repositories do not change a run; nor does `megarl eval` use them."""
    run = scene.folder / "run"
    command = ("train", str(scene.config), *NAMES, "parallel.tp=1", "checkpoint.every=1", "log.report=false")
    printed(scene, *command)
    record = json.loads((run / RECORD).read_text())
    commit = hub.models["Tiny/Qwen"].revisions["main"]
    assert record["model Tiny/Qwen"]["commit"] == commit
    assert f"path: Tiny/Qwen@{commit}" in (run / "config.yaml").read_text()
    hub.models["Tiny/Qwen"].push({"config.json": b"{}", "model.safetensors": b""})
    hub.datasets["owner/sums"].push({"train.jsonl": b""})
    asked = len(hub.requests)
    printed(scene, *command, "steps=2")
    assert len(hub.requests) == asked
    printed(scene, "eval", str(run / "config.yaml"), "--checkpoint", str(run))
    line = scene.refused(
        "train", str(scene.config), *NAMES, "model.path=Tiny/Qwen@main", "parallel.tp=1", "steps=1"
    )
    assert "has done 2 already" in line
