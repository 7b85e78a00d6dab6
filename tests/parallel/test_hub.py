"""Names of the Hub become local files, through the real client and a local hub."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.config.errors import ConfigError, WaitTimeout
from megarl.parallel.hub import PINS, parse_name, read_pins, wait_for_pins, write_pins
from tests.hub import Hub

CONFIG = json.dumps({"model_type": "qwen2"}).encode()
MODEL = {"config.json": CONFIG, "tokenizer.json": b'{"t": 1}', "README.md": b"x", "evil.py": b"raise"}
ROWS = b'{"question": "1 + 1?", "answer": "2"}\n'
# Prints `folder` or `Error: line` for each name: the client reads its environment at import.
CLIENT = """
import sys
from pathlib import Path
from megarl.config.errors import MegarlError
from megarl.parallel import hub
for text in sys.argv[1:]:
    kind, _, text = text.partition("=")
    name = hub.parse_name(Path(text), "key", kind)
    try:
        found = hub.fetch_model(name, None) if kind == "model" else hub.fetch_split(name, None)[0][0]
        print(found)
    except MegarlError as error:
        print(f"{error.code}: {error}")
"""


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with Hub() as server:
        server.push("org/tiny", {**MODEL, "model.safetensors": b"a" * 3_000_000})
        index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
        sharded = {"model.safetensors.index.json": json.dumps(index).encode(), "model-1.safetensors": b"1"}
        server.push(
            "org/sharded", {**MODEL, **sharded, "model-2.safetensors": b"2", "other.safetensors": b"3"}
        )
        server.push("org/half", {**MODEL, **sharded})
        server.push("org/pickle", {**MODEL, "pytorch_model.bin": b"x"})
        server.push("org/gated", {**MODEL, "model.safetensors": b"x"})
        server.repositories["org/gated"].gated = True
        server.push("datasets/org/csv", {"README.md": b"x", "all.csv": b"x"})
        server.push("datasets/org/csv", {"default/train/0000.jsonl": ROWS}, "refs/convert/parquet")
        server.push("datasets/org/image", {"README.md": b"---\n- [\n---\n", "a.png": b"x"})
        yield server


def start(hub: Hub, home: Path, *names: str, **variables: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CLIENT, *names]
    return subprocess.Popen(
        command,
        env=hub.environment(home, **variables),
        cwd=home,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def fetched(hub: Hub, home: Path, *names: str, **variables: str) -> list[str]:
    out, error = start(hub, home, *names, **variables).communicate(timeout=60)
    assert "Traceback" not in error, error
    return out.splitlines()


def test_what_is_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    name = parse_name(Path("Qwen/Qwen2.5-0.5B@refs/pr/1"), "model.path", "model")
    assert name is not None and (name.repo, name.revision) == ("Qwen/Qwen2.5-0.5B", "refs/pr/1")
    name = parse_name(Path("openai/gsm8k@v1:main/train"), "data.train[0]", "dataset")
    assert name is not None and (name.revision, name.split) == ("v1", "main/train")
    assert name.pin == "datasets/openai/gsm8k@v1:main/train"
    for path in ("/a/b", "a", "a/b/c", "./a/b", "a/b.jsonl", "models/Qwen2.5-32B", "runs/x", "../b", "a/b:c"):
        assert parse_name(Path("../a/b" if path == "./a/b" else path), "model.path", "model") is None, path
    (tmp_path / "Qwen" / "local").mkdir(parents=True)  # a path that exists wins
    assert parse_name(Path("Qwen/local"), "model.path", "model") is None


def test_pins_must_be_commits(tmp_path: Path) -> None:
    assert read_pins(tmp_path) == {}
    (tmp_path / PINS).write_text('{"a/b": "main"}')
    with pytest.raises(ConfigError, match="must be a commit of 40"):
        read_pins(tmp_path)


def test_a_wait_for_commits_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = parse_name(Path("a/b"), "model.path", "model")
    assert name is not None
    monkeypatch.setattr("megarl.parallel.hub.AGREED", 0.1)
    monkeypatch.setattr("megarl.parallel.hub._REPORT", 0.0)
    monkeypatch.setattr("megarl.parallel.hub._PATIENCE", -1.0)
    with pytest.raises(WaitTimeout, match="has not been written within 0"):
        wait_for_pins([name], tmp_path)
    assert "waiting for the first rank" in capsys.readouterr().err
    write_pins(tmp_path, {"a/b": "0" * 40})
    assert wait_for_pins([name], tmp_path) == {"a/b": "0" * 40}


def test_only_what_is_needed_is_downloaded(hub: Hub, tmp_path: Path) -> None:
    hub.downloads.clear()
    folder, data = map(Path, fetched(hub, tmp_path, "model=org/sharded", "dataset=org/csv"))
    assert folder.name == hub.repositories["org/sharded"].branches["main"]
    assert {path.name for path in folder.iterdir()} == {
        *("config.json", "tokenizer.json", "model.safetensors.index.json"),
        *("model-1.safetensors", "model-2.safetensors"),
    }
    assert data.read_bytes() == ROWS and data.parts[-3:] == ("default", "train", "0000.jsonl")


def test_offline_with_and_without_the_cache(hub: Hub, tmp_path: Path) -> None:
    [online] = fetched(hub, tmp_path, "model=org/tiny")
    requests = hub.requests
    cached, absent = fetched(hub, tmp_path, "model=org/tiny", "model=org/other", HF_HUB_OFFLINE="1")
    assert hub.requests == requests and cached == online
    assert absent.startswith("2: key: org/other: no such folder, and not in the cache ")
    assert "HF_HUB_OFFLINE is set (unset it" in absent
    # Without a network the cache serves, and a name that it lacks is one line.
    cached, absent = fetched(
        hub, tmp_path, "model=org/tiny", "model=org/other", HF_ENDPOINT="http://127.0.0.1:1"
    )
    assert cached == online and "http://127.0.0.1:1 cannot be read: " in absent


def test_two_processes_download_once(hub: Hub, tmp_path: Path) -> None:
    hub.downloads.clear()
    processes = [start(hub, tmp_path, "model=org/tiny") for _ in range(2)]
    # A second rank of a node downloads nothing, and waits for the first.
    processes.append(start(hub, tmp_path, "model=org/tiny", LOCAL_RANK="1"))
    outputs = {process.communicate(timeout=60)[0] for process in processes}
    assert len(outputs) == 1 and "snapshots" in outputs.pop()
    assert set(hub.downloads.values()) == {1}


def test_each_problem_is_one_line_with_what_to_do(hub: Hub, tmp_path: Path) -> None:
    names = {
        "model=org/absent": "no such folder, and no such model at http",
        "dataset=org/absent": "no such file, and no such dataset at http",
        "model=org/tiny@v9": "has no revision v9 (give a branch, a tag or a commit",
        "model=org/gated": "is gated, and this account may not read it (accept its terms at http",
        "model=org/pickle": "has no *.safetensors (pickles are never read",
        "model=org/half": "lacks files of model.safetensors.index.json (",
        "dataset=org/csv:test": "has no split 'test' (it has default/train)",
        "dataset=org/image": "not valid YAML",
    }
    for line, expected in zip(fetched(hub, tmp_path, *names), names.values(), strict=True):
        assert line.startswith("2: key: org/") and expected in line
    [line] = fetched(hub, tmp_path, "model=org/gated", HF_TOKEN="hf_wrong")
    assert "is gated" in line
    [folder] = fetched(hub, tmp_path, "model=org/gated", HF_TOKEN=hub.token)
    assert Path(folder, "model.safetensors").is_file()
