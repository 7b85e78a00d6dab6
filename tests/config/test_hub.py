"""Names of the hub in place of paths, through the real client and a local server."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megarl.config import hub, load_config
from megarl.config.errors import ConfigError
from megarl.config.hub import RECORD, HubName, local_folder, local_inputs, parse_name, pin_names, pinned
from megarl.config.hub_splits import choose_files, find_splits
from megarl.config.schema import Config
from megarl.data.columns import columns_to_read, find_answer, find_prompt
from megarl.data.readers import file_rows
from megarl.weights.tensor_files import CARRIED
from tests.hub_server import TOKEN, HubServer, Repository, folder_files, serve_hub, use_hub
from tests.tiny_models import make_tiny_model

ROOT = Path(__file__).parents[2]
COMMIT = "0123456789" * 4
CARD = b"""---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train-*}
  - {split: test, path: main/test-*}
- config_name: socratic
  data_files:
  - {split: train, path: socratic/train-*}
---
# Grade school math
"""


def parquet(*rows: dict[str, str]) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(list(rows)), sink)
    return bytes(sink.getvalue())


@pytest.fixture(scope="module")
def model_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = make_tiny_model(tmp_path_factory.mktemp("hub") / "model", "qwen2", max_shard_bytes=100_000)
    files = folder_files(folder)
    never = (
        "pytorch_model.bin",
        "modeling_own.py",
        "tokenizer_own.py",
        "consolidated.safetensors",
        "README.md",
    )
    return files | dict.fromkeys(never, b"import this")


@pytest.fixture
def server(model_files: dict[str, bytes]) -> Iterator[HubServer]:
    with serve_hub() as server:
        server.models["Tiny/Qwen2.5-0.5B"] = model = Repository()
        model.push(model_files)
        server.datasets["openai/gsm8k"] = gsm8k = Repository()
        row = {"question": "1 + 1?", "answer": "#### 2"}
        names = ("main/train-00000-of-00002", "main/train-00001-of-00002", "main/test-00000-of-00001")
        tables = {f"{name}.parquet": parquet(row | {"question": name}) for name in names}
        gsm8k.push({"README.md": CARD, **tables, "socratic/train-00000-of-00001.parquet": parquet(row)})
        yield server


@pytest.fixture
def cache(server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    use_hub(monkeypatch, server.url, tmp_path / "cache")
    return tmp_path / "cache"


def make_config(tmp_path: Path, *overrides: str, train: str = "openai/gsm8k:main/train") -> Config:
    file = tmp_path / "x.yaml"
    file.write_text(
        f"{{recipe: dapo, run_dir: {tmp_path}/run, steps: 1, model: {{path: Tiny/Qwen2.5-0.5B}}, "
        f"data: {{train: ['{train}'], eval: [{{path: 'openai/gsm8k:main', name: gsm8k}}]}}}}"
    )
    return load_config(file, overrides)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", ("Qwen/Qwen2.5-0.5B-Instruct", "main", "")),
        ("Qwen/Qwen3-4B@refs/pr/1", ("Qwen/Qwen3-4B", "refs/pr/1", "")),
        ("openai/gsm8k:main/train", ("openai/gsm8k", "main", "main/train")),
        ("openai/gsm8k@v1:main/x.parquet", ("openai/gsm8k", "v1", "main/x.parquet")),
        *((text, None) for text in ("a/b.jsonl", "a/b.gguf", "/a/b", "a", "a/b/c", "../a", "a/..")),
        *((text, None) for text in ("models/Qwen2.5-7B", "data/x", "here/is", "o/n:../../x.jsonl")),
    ],
)
def test_names_and_paths(
    text: str, found: tuple[str, str, str] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Existing files and folders are paths."""
    monkeypatch.chdir(tmp_path)
    Path("here/is").mkdir(parents=True)
    name = parse_name(Path(text), "dataset", "key")
    assert (name and (name.repository, name.revision, name.part)) == found
    if name:
        assert parse_name(Path(name.text), "dataset", "key") == name


def test_downloads_only_what_a_run_reads(server: HubServer, cache: Path, tmp_path: Path) -> None:
    given = make_config(tmp_path)
    config = local_inputs(given, given.run_dir / RECORD)
    commit = server.models["Tiny/Qwen2.5-0.5B"].revisions["main"]
    assert config.model.path == cache / "models--Tiny--Qwen2.5-0.5B" / "snapshots" / commit
    found = {path.name for path in config.model.path.iterdir()}
    assert {"config.json", "tokenizer.json", "model.safetensors.index.json"} < found
    assert len([name for name in found if name.endswith(".safetensors")]) > 1
    assert not [name for name in found if name.endswith((".bin", ".py", ".md")) or "consolidated" in name]
    rows = [row for entry in config.data.train for _, row in file_rows(entry.path or Path())]
    assert [row["question"] for row in rows if isinstance(row, dict)] == [
        "main/train-00000-of-00002",
        "main/train-00001-of-00002",
    ]
    [held_out] = config.data.eval
    assert (held_out.name, str(held_out.path).endswith("main/test-00000-of-00001.parquet")) == ("gsm8k", True)
    assert not [name for name in server.downloads() if "socratic" in name]
    # Its own configuration file is pinned to the commits, and a second start asks the hub nothing.
    written = pin_names(config)
    assert local_inputs(written) == config
    assert str(written.model.path) == f"Tiny/Qwen2.5-0.5B@{commit}"
    assert "main/train-00001-of-00002.parquet" in str(written.data.train[1].path)
    asked = len(server.requests)
    assert local_inputs(given, given.run_dir / RECORD) == config
    assert len(server.requests) == asked


def test_a_run_keeps_its_revision(server: HubServer, cache: Path, tmp_path: Path) -> None:
    given = make_config(tmp_path)
    first = local_inputs(given, given.run_dir / RECORD)
    newer = server.models["Tiny/Qwen2.5-0.5B"].push({"config.json": b"{}", "model.safetensors": b""})
    assert local_inputs(given, given.run_dir / RECORD) == first
    assert local_inputs(given, None, first=False).model.path.name == newer
    older = first.model.path.name
    chosen = make_config(tmp_path, f"model.path=Tiny/Qwen2.5-0.5B@{older}")
    assert local_inputs(chosen).model.path == first.model.path
    record = json.loads((given.run_dir / RECORD).read_text())
    assert record["model Tiny/Qwen2.5-0.5B"]["commit"] == older
    name = given.model.path
    folder = local_folder(name, "--checkpoint", given.run_dir / RECORD, first=False)
    assert folder == first.model.path and local_folder(name, "--checkpoint").name == newer


def test_other_ranks_wait_for_the_record(
    server: HubServer, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = make_config(tmp_path)
    monkeypatch.setattr(hub, "RECORD_LIMIT", 0.1)
    with pytest.raises(hub.WaitTimeout, match=r"rank 0 has not written it within 0\.1 s"):
        local_inputs(given, given.run_dir / RECORD, first=False)
    first = local_inputs(given, given.run_dir / RECORD)
    assert local_inputs(given, given.run_dir / RECORD, first=False) == first


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            "model.path=Tiny/None",
            "model.path: Tiny/None: no such folder, and the hub has no public model of that",
        ),
        (
            "model.path=Tiny/Qwen2.5-0.5B@v9",
            "model.path: Tiny/Qwen2.5-0.5B@v9: has no revision v9 (name a branch",
        ),
        (
            "model.path=Tiny/Gated",
            "model.path: Tiny/Gated: is gated (accept its terms at {url}/Tiny/Gated, and set",
        ),
        (
            "model.path=Tiny/Pickle",
            "model.path: Tiny/Pickle: has neither model.safetensors nor model.safetens",
        ),
        (
            "model.path=Tiny/x:y",
            "model.path: Tiny/x:y: a model has no part after a colon (write owner/name or",
        ),
        (
            "data.train=['openai/gsm8k:main/dev']",
            "data.train[0]: openai/gsm8k:main/dev: has no main/dev (write one of",
        ),
        (
            "data.train=[openai/none]",
            "data.train[0]: openai/none: no such file, and the hub has no public dataset",
        ),
    ],
)
def test_errors(overrides: str, line: str, server: HubServer, cache: Path, tmp_path: Path) -> None:
    server.models["Tiny/Gated"] = gated = Repository(gated=True)
    server.models["Tiny/Pickle"] = pickle = Repository()
    gated.push({"config.json": b"{}", "model.safetensors": b""})
    pickle.push({"config.json": b"{}", "pytorch_model.bin": b""})
    with pytest.raises(ConfigError) as error:
        local_inputs(make_config(tmp_path, overrides))
    assert str(error.value).startswith(line.format(url=server.url))


def test_without_the_hub(
    server: HubServer,
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The cache suffices, with HF_HUB_OFFLINE and if the hub cannot be reached."""
    given = make_config(tmp_path)
    use_hub(monkeypatch, server.url, cache, offline=True)
    with pytest.raises(ConfigError, match=r"it is not in the hub's cache .* HF_HUB_OFFLINE is set"):
        local_inputs(given)
    use_hub(monkeypatch, server.url, cache)
    first = local_inputs(given)
    asked = len(server.requests)
    use_hub(monkeypatch, server.url, cache, offline=True)
    assert local_inputs(given) == first == local_inputs(given, cached_only=True)
    assert len(server.requests) == asked
    use_hub(monkeypatch, "http://127.0.0.1:9", cache)  # the port of discard
    capsys.readouterr()
    assert local_inputs(given) == first
    assert "http://127.0.0.1:9 cannot be reached" in capsys.readouterr().err
    with pytest.raises(
        ConfigError, match=r"model.path: a/b: .* cannot be reached.* \(connect, give a local path"
    ):
        local_inputs(make_config(tmp_path, "model.path=a/b"))
    use_hub(monkeypatch, server.url, cache, offline=True)
    next(first.model.path.glob("*.safetensors")).unlink()
    with pytest.raises(ConfigError, match="safetensors is not in the hub's cache"):
        local_inputs(given)


def test_a_broken_download_continues(
    server: HubServer, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1 << 16)
    content = bytes(range(256)) * 4096
    server.models["Tiny/Large"] = large = Repository()
    large.push({"config.json": b"{}", "model.safetensors": content})
    server.broken.add("model.safetensors")
    config = local_inputs(make_config(tmp_path, "model.path=Tiny/Large"))
    assert (config.model.path / "model.safetensors").read_bytes() == content
    ranges = [
        range for method, path, range in server.requests if method == "GET" and path.endswith("l.safetensors")
    ]
    assert len(ranges) == 2 and ranges[1] is not None and int(ranges[1].split("=")[1].split("-")[0]) > 0


SCRIPT = """
import sys
from pathlib import Path
from megarl.config.hub import local_folder
print(local_folder(Path(sys.argv[1]), "model.path"))
"""


def test_two_processes_download_once(server: HubServer, tmp_path: Path) -> None:
    """Each reads HF_ENDPOINT, HF_HOME and HF_TOKEN, as a user sets them."""
    server.models["Tiny/Gated"] = gated = Repository(gated=True)
    gated.push({"config.json": b"{}", "model.safetensors": b"x" * 1_000_000})
    environment = os.environ | {
        "HF_ENDPOINT": server.url,
        "HF_HOME": str(tmp_path / "home"),
        "HF_TOKEN": TOKEN,
    }
    environment |= {"HF_HUB_OFFLINE": "0", "PYTHONPATH": str(ROOT), "HF_HUB_DISABLE_XET": "1"}
    environment.pop("HF_HUB_CACHE", None)
    command = [sys.executable, "-c", SCRIPT, "Tiny/Gated"]
    processes = [
        subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert outputs[0] == outputs[1] and outputs[0].startswith(f"{tmp_path}/home/hub/models--Tiny--Gated")
    assert sorted(server.downloads()) == ["config.json", "model.safetensors"]


def test_converted_copy(server: HubServer, cache: Path, tmp_path: Path) -> None:
    """A set with a script, or in another format, is read from the hub's parquet copy."""
    server.datasets["owner/script"] = repository = Repository()
    repository.push({"script.py": b"raise SystemExit", "train.json": b"[]"})
    row = {"0": {"from": "human", "value": "1 + 1?"}, "1": {"ground_truth": {"value": "2"}}}
    copied = parquet(row)  # type: ignore[arg-type]
    commit = repository.push({"default/train/0000.parquet": copied}, branch="refs/convert/parquet")
    config = local_inputs(make_config(tmp_path, train="owner/script"))
    path = config.data.train[0].path
    assert path is not None and commit in path.parts
    assert pinned(path) == Path(f"owner/script@{commit}:default/train/0000.parquet")
    [(_, found)] = file_rows(path, columns_to_read(config.data, None))
    assert isinstance(found, dict)  # the two turns of Open-Reasoner-Zero
    assert find_prompt(found, config.data, path)[1] == "1 + 1?"
    assert find_answer(found, config.data, path)[1] == "2"
    del server.datasets["owner/script"].revisions["refs/convert/parquet"]
    with pytest.raises(ConfigError, match=r"has no .parquet or .jsonl file"):
        local_inputs(make_config(tmp_path, train="owner/script:train"))


def test_a_star_of_the_readme_stays_in_its_folder() -> None:
    """`*` must not take the files of another configuration, which lie deeper."""
    files = ["train-1.jsonl", "hard/train-1.jsonl", "hard/deep/train-1.jsonl", "x/a-1.jsonl", "x/b-2.jsonl"]
    configs = {"plain": "./*.jsonl", "hard": "hard/**/*.jsonl", "set": "x/[!b]-?.jsonl", "all": "**"}
    card = {"configs": [{"config_name": name, "data_files": glob} for name, glob in configs.items()]}
    splits = find_splits(files, card)
    assert splits["plain", "train"] == ("train-1.jsonl",)
    assert splits["hard", "train"] == ("hard/deep/train-1.jsonl", "hard/train-1.jsonl")
    assert splits["set", "train"] == ("x/a-1.jsonl",)
    assert splits["all", "train"] == tuple(sorted(files))


@pytest.mark.parametrize(
    ("files", "part", "held_out", "found"),
    [
        (["data/dapo-math-17k.parquet"], "", False, ["data/dapo-math-17k.parquet"]),
        (["train.jsonl", "test.jsonl"], "", False, ["train.jsonl"]),
        (["train.jsonl", "test.jsonl"], "", True, ["test.jsonl"]),
        (
            ["data/train-00000-of-00001.parquet", "data/test-00000-of-00001.parquet"],
            "test",
            False,
            ["data/test-00000-of-00001.parquet"],
        ),
        (
            ["a/train/0000.parquet", "a/train/0001.parquet", "b/train/0000.parquet"],
            "a/train",
            False,
            ["a/train/0000.parquet", "a/train/0001.parquet"],
        ),
        (["algebra/train.parquet", "geometry/train.parquet"], "algebra", False, ["algebra/train.parquet"]),
        (["x.csv", "y.jsonl"], "y.jsonl", False, ["y.jsonl"]),
        (["algebra/train.parquet", "geometry/train.parquet"], "", False, "has several splits"),
        (["x.csv"], "", False, "has no .parquet or .jsonl file"),
        (["d/partial-train/0000.parquet"], "", False, "the hub has converted only the first part of train"),
        (["train-00000-of-00002.parquet"], "", False, "train-of-00002: 1 of 2 files are there"),
        (["test.jsonl"], "", False, "has no split train (write one of :default/test after the name)"),
        (["aime.parquet"], "", True, "has no split test (write one of :default/train after the name)"),
        (["train.parquet"], "train", True, ["train.parquet"]),
        (["a/train.jsonl", "b/test.jsonl"], "a", True, "has no split test (write one of :a/train, :b/test "),
        (["x.jsonl"], "y", False, "has no y (write one of :default/train after the name)"),
    ],
)
def test_splits(files: list[str], part: str, held_out: bool, found: list[str] | str) -> None:
    chosen = choose_files(find_splits(files, {}), files, part, held_out=held_out)
    assert chosen[: len(found)] == (tuple(found) if isinstance(found, list) else found)


def test_a_readme_cannot_hang_or_crash_the_start() -> None:
    """Many stars on a long name took exponential time; an empty range was no regular expression."""
    name = f"{'a' * 120}.parquet"
    globs = {"stars": "*a" * 30 + "*b*", "range": "[z-a].parquet", "folders": "**/" * 30 + "x", "ok": "*a*a*"}
    card = {"configs": [{"config_name": config, "data_files": glob} for config, glob in globs.items()]}
    assert find_splits([name], card) == {("ok", "train"): (name,)}


def test_a_part_of_a_data_set_in_the_cache_is_no_data_set(
    server: HubServer, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the hub neither the test split nor some of the files become the training data."""
    server.datasets["owner/parts"] = parts = Repository()
    row = parquet({"question": "1 + 1?", "answer": "2"})
    files = ("data/test-00000-of-00001.parquet", "train_a.parquet", "train_b.parquet")
    commit = parts.push(dict.fromkeys(files, row))
    local_inputs(make_config(tmp_path, train="owner/parts:test"), only=("data.train",))
    use_hub(monkeypatch, server.url, cache, offline=True)
    for train in ("owner/parts", "owner/parts:train"):
        config = make_config(tmp_path, train=train)
        with pytest.raises(ConfigError, match=r"train_a.parquet is not in the hub's cache .* is set"):
            local_inputs(config, only=("data.train",))
    # A cache of another program has no list of the files.
    (cache / "datasets--owner--parts" / ".megarl" / f"{commit}.json").unlink()
    with pytest.raises(ConfigError, match=r"owner/parts: no such file, and it is not in the hub's cache"):
        local_inputs(make_config(tmp_path, train="owner/parts"), only=("data.train",))


def test_says_that_a_cache_has_no_list_of_files(
    server: HubServer,
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = make_config(tmp_path)
    first = local_inputs(config, only=("data.train",))
    use_hub(monkeypatch, server.url, cache, offline=True)
    capsys.readouterr()
    assert local_inputs(config, only=("data.train",)) == first
    assert capsys.readouterr().err == ""
    for listing in cache.glob("*/.megarl/*.json"):
        listing.unlink()
    assert local_inputs(config, only=("data.train",)) == first
    assert "2 files of it are in the cache, which has no list of all" in capsys.readouterr().err


def test_the_record_of_the_run_wins(server: HubServer, cache: Path, tmp_path: Path) -> None:
    """An evaluation before the training has an older commit; every rank takes that of the training."""
    given, model, evaluated = (
        make_config(tmp_path),
        server.models["Tiny/Qwen2.5-0.5B"],
        tmp_path / "eval.json",
    )
    local_inputs(given, evaluated, only=("model",))
    trained = model.push({"config.json": b"{}", "model.safetensors": b""})
    run = given.run_dir / RECORD
    local_inputs(given, run, only=("model",))
    for first in (False, True):
        config = local_inputs(given, evaluated, run, first=first, only=("model",))
        assert config.model.path.name == trained


def test_many_note_a_commit_at_once(cache: Path) -> None:
    """The ranks of a machine share the cache."""
    barrier = threading.Barrier(8)

    def note(i: int) -> None:
        for branch in range(10):
            barrier.wait(60)
            name = HubName("model", "a/b", f"branch{branch}")
            hub._cache_listing(name, hub.Selection(COMMIT, ("config.json",)))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(note, range(8)))
    assert {file.read_text() for file in (cache / "models--a--b" / "refs").iterdir()} == {COMMIT}
    assert len(list((cache / "models--a--b" / ".megarl").iterdir())) == 1


def test_a_cache_that_cannot_be_written(
    server: HubServer, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A shared cache that has the files suffices, even if the branch has moved."""
    name = Path("Tiny/Qwen2.5-0.5B")
    folder = local_folder(name, "key")
    repository = folder.parent.parent
    server.models[str(name)].revisions["v2"] = folder.name
    shutil.rmtree(repository / "refs")
    (repository / "refs").write_text("")  # also root cannot write into a file
    assert local_folder(Path(f"{name}@v2"), "key") == folder
    assert f"key: the cache does not note the newest commit: {repository}/refs" in capsys.readouterr().err


def test_files_of_the_hub_stay_in_the_cache(server: HubServer, cache: Path, tmp_path: Path) -> None:
    server.datasets["owner/evil"] = evil = Repository()
    evil.push({"../../x.jsonl": b"{}", "/tmp/y.jsonl": b"{}", "train.jsonl": b"{}"})
    config = local_inputs(make_config(tmp_path, train="owner/evil"), only=("data.train",))
    assert [entry.path and entry.path.name for entry in config.data.train] == ["train.jsonl"]
    evil.files_by_commit["../x"] = evil.files_by_commit[evil.revisions["main"]]
    evil.revisions["v2"] = "../x"
    with pytest.raises(ConfigError, match="owner/evil@v2: the hub answers with no commit"):
        local_inputs(make_config(tmp_path, train="owner/evil@v2"), only=("data.train",))


@pytest.mark.parametrize("pages", ["", "/resolve/"])
def test_a_login_page_in_place_of_the_hub(
    pages: str, server: HubServer, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The network of a hotel answers with status 200. What is in the cache suffices."""
    name = Path("Tiny/Qwen2.5-0.5B")
    server.pages = pages
    with pytest.raises(ConfigError, match=r"key: Tiny/.* cannot be reached: a proxy or a login page answers"):
        local_folder(name, "key")
    server.pages = None
    folder = local_folder(name, "key")
    server.pages = pages
    assert local_folder(name, "key") == folder


def test_errors_of_hf_xet_are_of_the_network() -> None:
    def fail() -> None:
        raise RuntimeError("Data processing error: CAS service error")

    failure = hub._ask_hub(HubName("model", "a/b", key="key"), fail)
    assert isinstance(failure, ConfigError) and "CAS service error" in str(failure)


def test_model_files_are_those_that_exports_copy(tmp_path: Path) -> None:
    """No file that an export carries along is left out."""
    for pattern in CARRIED:
        name = pattern.replace("*", "") + ".json" if pattern.endswith("*") else pattern.replace("*", "x")
        assert hub.MODEL_FILES.fullmatch(name), name


def test_id_has_the_kind() -> None:
    names = [HubName("model", "a/b"), HubName("dataset", "a/b"), HubName("dataset", "a/b", held_out=True)]
    assert len({name.id for name in names}) == 3
