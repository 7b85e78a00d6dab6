"""Folders of checkpoints and models that somebody else has made: reading one must not run code, nor follow a
name or a link out of the folder."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable
from io import BytesIO
from pathlib import Path, PosixPath
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from megarl.cli.main import main
from megarl.config.errors import CheckpointError, DataError
from megarl.parallel.runtime import Runtime
from megarl.schedule.rollouts import read_manifest
from megarl.training.checkpoint import FORMAT, open_checkpoint, seal
from megarl.weights.hf import HFFolder
from megarl.weights.index import COMMON, CONFIG, METADATA, read_history, read_index
from megarl.weights.megatron import conversion_layout, hf_to_megatron
from tests.ranks import RankPool
from tests.tiny_models import make_tiny_model

WEIGHT = "decoder.layers.self_attention.linear_proj.weight"
PAYLOAD = "payload.distcp"


class Exploit:
    """Make the marker's folder when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def edit_index(folder: Path, change: Callable[[Metadata], None]) -> None:
    index = pickle.loads((folder / METADATA).read_bytes())
    change(index)
    (folder / METADATA).write_bytes(pickle.dumps(index))


def index_itself(folder: Path, marker: Path) -> None:
    edit_index(folder, lambda index: index.state_dict_metadata.update({WEIGHT: Exploit(marker)}))


def weight_as_object(folder: Path, marker: Path) -> None:
    """Declare a weight as bytes, which torch unpickles."""
    torch.save(Exploit(marker), folder / PAYLOAD)
    size = (folder / PAYLOAD).stat().st_size

    def change(index: Metadata) -> None:
        index.state_dict_metadata[WEIGHT] = BytesStorageMetadata()
        index.storage_data[MetadataIndex(WEIGHT)] = _StorageInfo(PAYLOAD, 0, size)

    edit_index(folder, change)


def chunk_with_a_payload(folder: Path, marker: Path) -> None:
    """Let a tensor's place hold another pickle."""
    torch.save(Exploit(marker), folder / PAYLOAD)
    size = (folder / PAYLOAD).stat().st_size

    def change(index: Metadata) -> None:
        for place in [place for place in index.storage_data if place.fqn == WEIGHT]:
            index.storage_data[place] = _StorageInfo(PAYLOAD, 0, size)

    edit_index(folder, change)


def common_part(folder: Path, marker: Path) -> None:
    torch.save({"optimizer": Exploit(marker)}, folder / COMMON)


def another_reader(folder: Path, marker: Path) -> None:
    """Name another format, whose reader Megatron would choose."""
    written = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**written, "sharded_backend": "zarr"}))


def path_upwards(folder: Path, marker: Path) -> None:
    move(folder, "../elsewhere.distcp")


def path_from_the_root(folder: Path, marker: Path) -> None:
    move(folder, str(folder.parent / "elsewhere.distcp"))


def path_by_a_link(folder: Path, marker: Path) -> None:
    move(folder, "../elsewhere.distcp")
    (folder / "inside.distcp").symlink_to("../elsewhere.distcp")

    def change(index: Metadata) -> None:
        for place, info in index.storage_data.items():
            index.storage_data[place] = _StorageInfo("inside.distcp", info.offset, info.length)

    edit_index(folder, change)


def move(folder: Path, name: str) -> None:
    """Move the file of the weights out of the folder, and have the index name it there."""
    [file] = folder.glob("__*.distcp")
    shutil.move(file, folder.parent / "elsewhere.distcp")

    def change(index: Metadata) -> None:
        for place, info in index.storage_data.items():
            index.storage_data[place] = _StorageInfo(name, info.offset, info.length)

    edit_index(folder, change)


ATTACKS = {
    index_itself: "has no business there",
    weight_as_object: "",
    chunk_with_a_payload: "",
    common_part: "common.pt: cannot be read",
    another_reader: "metadata.json: names another format",
    path_upwards: "lies outside the folder",
    path_from_the_root: "lies outside the folder",
    path_by_a_link: "lies outside the folder",
}


def write_model(runtime: Runtime, folder: Path) -> None:
    from tests.checkpoints import save_model
    from tests.plan.jobs import learner_of

    save_model(learner_of(runtime, "qwen2", "fp32", critic=False)[1], folder)


def continue_from(runtime: Runtime, folder: Path) -> str:
    """Load a folder as a run does that continues; return what is said of it."""
    from megarl.training.sharded import load_trainable
    from tests.plan.jobs import learner_of

    learner = learner_of(runtime, "qwen2", "fp32", critic=False)[1]
    try:
        load_trainable(learner, folder)
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def trained(ranks: Callable[..., RankPool], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "actor"
    folder.mkdir()
    ranks(1, 1, 1).run(write_model, folder=folder)
    return folder


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("converted")
    make_tiny_model(folder / "model", "qwen2")
    hf_to_megatron(folder / "model", folder / "megatron", conversion_layout(1, 1, 1))
    return folder / "megatron"


def test_a_run_continues_from_what_was_written(trained: Path, ranks: Callable[..., RankPool]) -> None:
    """Without an attack, so that the refusals below are of the attacks."""
    assert ranks(1, 1, 1).run(continue_from, folder=trained) == [""]


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_a_run_that_continues(
    attack: Callable[[Path, Path], None], trained: Path, ranks: Callable[..., RankPool], tmp_path: Path
) -> None:
    folder, marker = tmp_path / "actor", tmp_path / "marker"
    shutil.copytree(trained, folder)
    attack(folder, marker)
    [line] = ranks(1, 1, 1).run(continue_from, folder=folder)
    assert ATTACKS[attack] in line and str(folder) in line and "\n" not in line
    if attack is weight_as_object:
        assert f"{WEIGHT}: is stored as an object, not as a tensor" in line
    assert not marker.exists()


@pytest.mark.parametrize(
    "attack", [a for a in ATTACKS if a not in (common_part, another_reader)], ids=lambda a: a.__name__
)
def test_a_checkpoint_as_a_model(
    attack: Callable[[Path, Path], None],
    converted: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`megarl convert to-hf`, which reads what `model.path` may name too."""
    folder, marker = tmp_path / "megatron", tmp_path / "marker"
    shutil.copytree(converted, folder)
    attack(folder, marker)
    assert main(["convert", "to-hf", str(folder), str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert ATTACKS[attack] in said and said.count("\n") == 1 and str(folder) in said
    assert not marker.exists() and not (tmp_path / "out").exists()


def test_an_index_that_changes_a_class(converted: Path, tmp_path: Path) -> None:
    """A pickle may set attributes of the classes that it may name. `_str` of PosixPath would lead every file
    that is written from then on to one place."""
    shutil.copytree(converted, tmp_path / "megatron")
    before = dict(vars(PosixPath))
    state = pickle.dumps((None, {"_str": "/nonexistent", "is_file": None}))[2:-1]  # without PROTO and STOP
    (tmp_path / "megatron" / METADATA).write_bytes(b"cpathlib\nPosixPath\n" + state + b"b.")
    with pytest.raises(CheckpointError, match="it changes a class"):
        read_index(tmp_path / "megatron")
    assert dict(vars(PosixPath)) == before and str(Path("x")) == "x"


@pytest.mark.parametrize(
    "change",
    [
        lambda index: index.state_dict_metadata.update({WEIGHT: "text"}),
        lambda index: index.storage_data.update({MetadataIndex(WEIGHT): "text"}),
        lambda index: index.storage_data.update({MetadataIndex(WEIGHT): _StorageInfo("a", -1, 1)}),
        lambda index: index.storage_data.update({MetadataIndex(WEIGHT): _StorageInfo("a", 0, 1, ["zstd"])}),
        lambda index: setattr(index, "storage_data", None),
        lambda index: next(
            e for e in index.state_dict_metadata.values() if isinstance(e, TensorStorageMetadata)
        ).chunks.append("text"),
    ],
)
def test_an_index_of_other_types(change: Callable[[Any], None], converted: Path, tmp_path: Path) -> None:
    shutil.copytree(converted, tmp_path / "megatron")
    edit_index(tmp_path / "megatron", change)
    with pytest.raises(CheckpointError, match="its parts have other types"):
        read_index(tmp_path / "megatron")


class TestHistory:
    """Transformer Engine unpickles the history of FP8's delayed scaling, so that it gets nothing of a file as
    it is."""

    KEY = "decoder.layers.mlp.linear_fc1._extra_state/shard_0_2"

    def read(self, folder: Path, content: object, *, wrapped: bool = True) -> dict[str, Any] | None:
        state = torch.frombuffer(bytearray(pickle.dumps(content)), dtype=torch.uint8)
        torch.save([state] if wrapped else content, folder / PAYLOAD)
        place = {MetadataIndex(self.KEY): _StorageInfo(PAYLOAD, 0, (folder / PAYLOAD).stat().st_size)}
        return read_history(
            folder, Metadata({self.KEY: BytesStorageMetadata()}, storage_data=place), self.KEY
        )

    def test_tensors_and_numbers(self, tmp_path: Path) -> None:
        numbers = {"num_gemms": 1, "fp8_max_fwd": 448}
        scale = torch.arange(3.0)
        found = self.read(tmp_path, {"scale_fwd": scale, "extra_fp8_variables": numbers})
        assert found is not None and found.keys() == {"scale_fwd", "extra_fp8_variables"}
        assert torch.equal(found["scale_fwd"], scale) and found["extra_fp8_variables"] == numbers

    def test_nothing(self, tmp_path: Path) -> None:
        assert self.read(tmp_path, [None], wrapped=False) is None

    @pytest.mark.parametrize("depth", ["bytes", "pickle", "tensor"])
    def test_payload(self, depth: str, tmp_path: Path) -> None:
        marker = tmp_path / "marker"

        class Nested:
            def __reduce__(self) -> Any:
                buffer = BytesIO()
                torch.save(Exploit(marker), buffer)
                return torch.storage._load_from_bytes, (buffer.getvalue(),)  # type: ignore[attr-defined]

        content: Any = {
            "bytes": [Exploit(marker)],
            "pickle": {"scale_fwd": Exploit(marker), "extra_fp8_variables": {}},
            "tensor": {"scale_fwd": Nested(), "extra_fp8_variables": {}},
        }[depth]
        with pytest.raises(CheckpointError, match=f"{PAYLOAD}: .*: not a history of delayed scaling"):
            self.read(tmp_path, content, wrapped=depth != "bytes")
        assert not marker.exists()


class TestManifest:
    """A manifest's checksum keeps it from damage, and not from who makes a manifest of his own."""

    def write(self, folder: Path, **changes: Any) -> Path:
        step = folder / "step-000001"
        step.mkdir()
        (step / "file").write_text("x")
        whole = {"format": FORMAT, "stage": "train", "step": 1, "settings": {}, "files": {"file": [1, "0"]}}
        kept = {key: value for key, value in {**whole, **changes}.items() if value is not None}
        (step / "manifest.json").write_text(seal(kept))
        return step

    def test_as_it_is_written(self, tmp_path: Path) -> None:
        assert open_checkpoint(self.write(tmp_path)).step == 1

    @pytest.mark.parametrize(
        "changes",
        [
            *({key: None} for key in ("stage", "step", "settings", "files")),
            {"step": "1"},
            {"step": True},
            {"files": []},
            {"files": {"file": 1}},
            {"files": {"file": [1, None]}},
            {"settings": []},
        ],
        ids=str,
    )
    def test_other_types(self, changes: dict[str, Any], tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match=r"manifest\.json: .* is expected"):
            open_checkpoint(self.write(tmp_path, **changes))

    @pytest.mark.parametrize("name", ["../secret", "{folder}/secret", "link", "a\0b"])
    def test_files_elsewhere(self, name: str, tmp_path: Path) -> None:
        (tmp_path / "secret").write_text("x")
        step = self.write(tmp_path, files={name.format(folder=tmp_path): [1, "0"]})
        (step / "link").symlink_to("../secret")
        with pytest.raises(CheckpointError, match="lies outside the folder"):
            open_checkpoint(step)


@pytest.mark.parametrize("files", [{"../x.safetensors": "0"}, {"/x": "0"}, {"a/b": "0"}, 5, [1]], ids=str)
def test_a_rollout_that_leads_out_of_its_folder(files: Any, tmp_path: Path) -> None:
    text = json.dumps({"made_from": {}, "files": files, "state": {}})
    digest = hashlib.sha256(text.encode()).hexdigest()
    (tmp_path / "manifest").write_text(f"{digest}\n{text}\n")
    with pytest.raises(DataError, match=r"outside its folder|is damaged"):
        read_manifest(tmp_path / "manifest")


@pytest.mark.parametrize("name", ["../other", "{folder}/other", "a/../../other"])
def test_a_safetensors_index_that_leads_out_of_the_folder(name: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    make_tiny_model(model, "qwen2")
    (model / "model.safetensors").rename(tmp_path / "other.safetensors")
    with safe_open(tmp_path / "other.safetensors", "pt") as weights:
        names = list(weights.keys())
    file = f"{name}.safetensors".format(folder=tmp_path)
    index = {"weight_map": dict.fromkeys(names, file)}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"index\.json: names .*, which lies outside the folder"):
        HFFolder(model)


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    model, marker = tmp_path / "model", tmp_path / "marker"
    make_tiny_model(model, "qwen2")
    (model / "model.safetensors").unlink()
    torch.save({"x": Exploit(marker)}, model / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="only safetensors folders are read"):
        HFFolder(model)
    assert not marker.exists()
