"""Names of the Hub work in place of paths: commands against a local hub, through the real client."""

from __future__ import annotations

import io
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megarl.config import load_config
from megarl.parallel.hub import PINS
from tests.hub import Files, Hub
from tests.tiny_models import make_tiny_model

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "hub_names.yaml"
MODEL, DATA = "Qwen/Qwen2.5-0.5B-Instruct", "openai/gsm8k"
CARD = b"""---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train-*}
  - {split: test, path: main/test-*}
- config_name: socratic
  data_files: [{split: train, path: socratic/train-*}]
---
"""
# The example at the size of a test.
SMALL = (
    *("steps=1", "model.dtype=fp32", "parallel.device=cpu", "data.max_prompt_tokens=200"),
    *("rollout.prompts=4", "rollout.group_size=2", "rollout.max_response_tokens=8", "update.mini_batch=8"),
    *("evaluation.max_problems=2", "checkpoint.every=1", "log.report=false", "checkpoint.export_hf=true"),
)


def gsm8k(first: int) -> Files:
    files: Files = {"README.md": CARD, ".gitattributes": b"*.parquet filter=lfs\n"}
    for split, start in (("main/train", first), ("main/test", 50), ("socratic/train", 80)):
        rows = [{"question": f"{i} + 1?", "answer": f"Add.\n#### {i + 1}"} for i in range(start, start + 8)]
        file = io.BytesIO()
        pq.write_table(pa.Table.from_pylist(rows), file)
        files[f"{split}-00000-of-00001.parquet"] = file.getvalue()
    return files


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny_model(folder, "qwen2", max_positions=256)
    with Hub() as server:
        server.push_folder(
            MODEL, folder, {"pytorch_model.bin": b"pickle", "modeling_x.py": b"raise SystemExit"}
        )
        server.push(f"datasets/{DATA}", gsm8k(0))
        yield server


def megarl(hub: Hub, folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "megarl", *arguments],
        env=hub.environment(folder / "home", **variables),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )


def manifest(folder: Path, step: int) -> dict[str, Any]:
    path = folder / "runs" / "hub_names" / "checkpoints" / f"step-{step:06d}" / "manifest.json"
    return dict(json.loads(path.read_text()))


@pytest.mark.slow
def test_a_run_keeps_its_revisions(hub: Hub, tmp_path: Path) -> None:
    """A run continues offline, and from its revision after `main` has moved."""
    done = megarl(hub, tmp_path, "train", str(EXAMPLE), *SMALL)
    assert done.returncode == 0, done.stderr
    pins = json.loads((tmp_path / "runs" / "hub_names" / PINS).read_text())
    model, data = hub.repositories[MODEL], hub.repositories[f"datasets/{DATA}"]
    old = model.branches["main"], data.branches["main"]
    assert pins == {
        MODEL: old[0],
        f"datasets/{DATA}:main/train": old[1],
        f"datasets/{DATA}:main/test": old[1],
    }
    assert set(hub.downloads.values()) == {1}
    got = {name for _, name in hub.downloads}
    assert not {name for name in got if name.startswith("socratic") or name.endswith((".bin", ".py"))}
    settings = manifest(tmp_path, 1)["settings"]
    assert old[0] in settings["model.path"] and old[1] in str(settings["data.train"])

    try:
        hub.push(MODEL, {**model.commits[old[0]], "README.md": b"new"})
        hub.push(f"datasets/{DATA}", gsm8k(20))
        requests = hub.requests
        more = (*SMALL, "steps=2")
        done = megarl(hub, tmp_path, "train", str(EXAMPLE), *more)
        assert done.returncode == 0, done.stderr
        assert hub.requests == requests
        assert manifest(tmp_path, 2)["settings"]["model.path"] == settings["model.path"]
        done = megarl(hub, tmp_path, "train", str(EXAMPLE), *more, "steps=3", HF_HUB_OFFLINE="1")
        assert done.returncode == 0, done.stderr
        assert json.loads((tmp_path / "runs" / "hub_names" / PINS).read_text()) == pins
        # The run's own configuration has local paths.
        recorded = load_config(tmp_path / "runs" / "hub_names" / "config.yaml")
        assert recorded.model.path.is_dir() and recorded.data.train[0].path.is_file()  # type: ignore[union-attr]
    finally:
        model.branches["main"], data.branches["main"] = old


@pytest.mark.slow
def test_the_other_commands(hub: Hub, tmp_path: Path) -> None:
    hub.downloads.clear()
    done = megarl(hub, tmp_path, "plan", str(EXAMPLE), "parallel.device=cuda")
    assert (
        done.returncode in (0, 2) and f"snapshots/{hub.repositories[MODEL].branches['main']}" in done.stdout
    )
    assert set(hub.downloads) == {(MODEL, "config.json")}
    done = megarl(hub, tmp_path, "data", "show", str(EXAMPLE), *SMALL)
    assert done.returncode == 0 and "reference answer: 1\n" in done.stdout, done.stderr
    assert (MODEL, "model.safetensors") not in hub.downloads
    assert {name for _, name in hub.downloads if "test" in name} == set()
    done = megarl(hub, tmp_path, "eval", str(EXAMPLE), *SMALL)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / "hub_names" / "eval" / PINS).is_file()
    done = megarl(hub, tmp_path, "convert", "to-megatron", MODEL, "out")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / ".metadata").is_file()
    done = megarl(hub, tmp_path, "config", "check", str(EXAMPLE), *SMALL, HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_two_ranks_of_torchrun_download_once(hub: Hub, tmp_path: Path) -> None:
    hub.downloads.clear()
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [sys.executable, *launcher, "-m", "megarl", "train", str(EXAMPLE), *SMALL]
    environment = hub.environment(tmp_path / "home", GLOO_SOCKET_IFNAME="lo")
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert set(hub.downloads.values()) == {1}


@pytest.mark.slow
def test_every_node_of_a_job_downloads_before_its_ranks_start(hub: Hub, tmp_path: Path) -> None:
    """Two nodes with caches of their own take the commit of the first."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = (f"--port={port}", "--nodes=2", "--limit=120")
    nodes = [
        subprocess.Popen(
            [sys.executable, "-m", "megarl", "preflight", str(EXAMPLE), *SMALL, *options, f"--node={i}"],
            env=hub.environment(tmp_path / f"home{i}", GLOO_SOCKET_IFNAME="lo"),
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    for i, process in enumerate(nodes):
        _, error = process.communicate(timeout=300)
        assert process.returncode == 0, error
        [weights] = (tmp_path / f"home{i}").glob("hub/models--*/snapshots/*/model.safetensors")
        assert weights.parent.name == hub.repositories[MODEL].branches["main"]


@pytest.mark.slow
def test_a_wrong_name_is_one_line_before_ranks_start(hub: Hub, tmp_path: Path) -> None:
    for override, line in (
        ("model.path=Qwen/absent", "model.path: Qwen/absent: no such folder, and no such model at http"),
        ("data.train=[openai/gsm8k:main/dev]", "data.train[0]: openai/gsm8k:main/dev: has no split"),
    ):
        done = megarl(hub, tmp_path, "train", str(EXAMPLE), *SMALL, override)
        assert done.returncode == 2
        [said] = done.stderr.splitlines()
        assert line in said
