"""Whatever bytes a file holds: what reads it gives content or one of our own errors, on one line. (The
configuration: tests/config.)"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megarl.config.errors import CheckpointError, MegarlError
from megarl.config.schema import Config, DataConfig
from megarl.data.batch import TrainBatch, read_batch, write_batch
from megarl.data.prompts import validate_files
from megarl.model.hf_config import check_buildable
from megarl.rewards import get_verifier
from megarl.rewards.pool import grade
from megarl.rewards.verdict import Verdict
from megarl.schedule.rollouts import read_manifest
from megarl.schedule.tokenizer_checks import ModelDescription, check_tokenizer
from megarl.training.checkpoint import find_checkpoint, open_checkpoint, read_state, write_state
from megarl.weights.families import ROPE_NEEDS, ROPE_NUMBERS, VALUES
from megarl.weights.hf import HFFolder
from megarl.weights.index import METADATA, read_index
from tests.tiny_models import make_tiny_model

QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=8,
)


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """`content` with some bytes replaced, or cut, or grown."""
    changed = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, min(len(changed), 4000) - 1)))  # where headers are, mostly
        changed[at : at + draw(st.integers(0, 3))] = draw(st.binary(max_size=6))
    return bytes(changed[: draw(st.integers(0, len(changed)))] if draw(st.booleans()) else changed)


def only_our_errors(read: Callable[[], Any]) -> None:
    with suppress(MegarlError):
        try:
            read()
        except MegarlError as error:
            assert "\n" not in str(error)
            raise


ROWS = st.fixed_dictionaries(
    {}, optional={"prompt": JSON, "question": JSON, "answer": JSON, "reward_model": JSON, "response": JSON}
)


@QUICK
@given(
    st.one_of(
        st.binary(max_size=300),
        st.lists(ROWS.map(lambda row: json.dumps(row).encode()), max_size=5).map(b"\n".join),
    )
)
def test_data_files(tmp_path: Path, content: bytes) -> None:
    for name in ("rows.jsonl", "rows.parquet"):
        (tmp_path / name).write_bytes(content)
        only_our_errors(
            lambda name=name: validate_files(DataConfig(train=(tmp_path / name,), template="raw"))
        )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, bytes, bytes]]:
    folder = make_tiny_model(tmp_path_factory.mktemp("fuzz") / "model", "qwen2", tied=True)
    yield folder, (folder / "model.safetensors").read_bytes(), (folder / "config.json").read_bytes()


@QUICK
@given(data=st.data())
def test_safetensors_of_a_model(model: tuple[Path, bytes, bytes], data: st.DataObject) -> None:
    folder, weights, config = model
    (folder / "model.safetensors").write_bytes(data.draw(damaged(weights)))
    (folder / "config.json").write_bytes(config)
    only_our_errors(lambda: HFFolder(folder))


@QUICK
@given(data=st.data())
def test_config_of_a_model(model: tuple[Path, bytes, bytes], data: st.DataObject) -> None:
    folder, weights, config = model
    (folder / "model.safetensors").write_bytes(weights)
    values = json.loads(config)
    key = data.draw(
        st.sampled_from(sorted({*values, *VALUES, "head_dim", "auto_map", "id2label", "quantization_config"}))
    )
    changed = {**values, key: data.draw(JSON)}
    if data.draw(st.booleans()):
        changed.pop(data.draw(st.sampled_from(sorted(values))), None)
    text = json.dumps(changed).encode()
    (folder / "config.json").write_bytes(data.draw(st.one_of(st.just(text), damaged(config))))
    only_our_errors(lambda: HFFolder(folder))
    only_our_errors(lambda: check_buildable(folder))


OTHERS = ("rope_type", "type", "attention_factor", "beta_fast", "short_factor", "long_factor", "mscale")
ROPE = st.sampled_from(sorted({*ROPE_NUMBERS, *OTHERS}))


@QUICK
@given(
    kind=st.sampled_from(sorted(ROPE_NEEDS)),
    rope=st.dictionaries(ROPE, st.integers(-1, 9) | st.floats() | JSON, max_size=6),
)
def test_rotary_embeddings_of_a_model(
    model: tuple[Path, bytes, bytes], kind: str, rope: dict[str, Any]
) -> None:
    folder, _, config = model
    needed = dict.fromkeys(ROPE_NEEDS[kind], 2.0)
    (folder / "config.json").write_text(
        json.dumps({**json.loads(config), "rope_scaling": {"rope_type": kind, **needed, **rope}})
    )
    only_our_errors(lambda: check_buildable(folder))


@settings(QUICK, max_examples=40)
@given(
    data=st.data(),
    name=st.sampled_from(["tokenizer.json", "tokenizer_config.json", "generation_config.json"]),
)
def test_tokenizer_of_a_model(model: tuple[Path, bytes, bytes], data: st.DataObject, name: str) -> None:
    folder, _, config = model
    (folder / "config.json").write_bytes(config)
    whole = (folder / name).read_bytes()
    values = json.loads(whole)
    key = data.draw(
        st.sampled_from(
            sorted({*values, "chat_template", "eos_token", "tokenizer_class", "added_tokens_decoder"})
        )
    )
    inner = values[key] if isinstance(values.get(key), dict) and data.draw(st.booleans()) else None
    if inner:
        inner[data.draw(st.sampled_from(sorted(inner)))] = data.draw(JSON)
    text = json.dumps(values if inner else {**values, key: data.draw(JSON)}).encode()
    (folder / name).write_bytes(data.draw(st.one_of(st.just(text), damaged(whole))))
    run = {
        "recipe": "dapo",
        "run_dir": "x",
        "steps": 1,
        "model": {"path": folder},
        "data": {"train": ["x.jsonl"]},
    }
    try:
        only_our_errors(
            lambda: check_tokenizer(Config.model_validate(run), ModelDescription(folder, json.loads(config)))
        )
    finally:
        (folder / name).write_bytes(whole)


@QUICK
@given(data=st.data())
def test_recorded_rollouts(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "step.safetensors"
    write_batch(path, TrainBatch.build([[1, 2]], [[3, 4, 5]]))
    path.write_bytes(data.draw(damaged(path.read_bytes())))
    only_our_errors(lambda: read_batch(path))
    manifest, text = tmp_path / "manifest.json", '{"files": {}, "state": {"a": 1.0}, "made_from": {}}'
    whole = f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}\n".encode()
    manifest.write_bytes(data.draw(damaged(whole)))
    only_our_errors(lambda: read_manifest(manifest))


@QUICK
@given(tensors=st.dictionaries(st.text(max_size=5), st.lists(st.integers(-5, 5), max_size=4), max_size=3))
def test_foreign_files_in_the_place_of_rollouts(tmp_path: Path, tensors: dict[str, list[int]]) -> None:
    path, header = tmp_path / "step.safetensors", {"sha256": "0"}
    path.write_bytes(save({name: torch.tensor(values) for name, values in tensors.items()}, header))
    only_our_errors(lambda: read_batch(path))


@QUICK
@given(data=st.data())
def test_state_of_a_checkpoint(tmp_path: Path, data: st.DataObject) -> None:
    for path in write_state(tmp_path, {"numbers": list(range(50)), "surplus": [{"tokens": [0.5] * 40}]}):
        content = path.read_bytes()
        path.write_bytes(data.draw(damaged(content)))
        only_our_errors(lambda: read_state(tmp_path))
        path.write_bytes(content)


class _Bad:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_an_index_that_would_run_something(tmp_path: Path) -> None:
    """torch unpickles a checkpoint's .metadata whatever it holds; we look first."""
    path = tmp_path / METADATA
    for foreign in (_Bad(tmp_path / "done"), torch.nn.Linear, print):
        path.write_bytes(pickle.dumps({"state": foreign}))
        with pytest.raises(CheckpointError, match="has no business there"):
            read_index(tmp_path)
    assert not (tmp_path / "done").exists()
    # A name with dots is followed by pickle, and a module that is allowed imports others.
    path.write_bytes(
        b"\x80\x04\x8c%ctorch.distributed.checkpoint.metadata\x8c\x09os.system\x93."
        % len("torch.distributed.checkpoint.metadata")
    )
    with pytest.raises(CheckpointError, match=r"os\.system has no business there"):
        read_index(tmp_path)


@QUICK
@given(data=st.data())
def test_index_of_a_checkpoint(tmp_path: Path, data: st.DataObject) -> None:
    chunks = [ChunkStorageMetadata(torch.Size([0]), torch.Size([3]))]
    place = {MetadataIndex("weight", [0]): _StorageInfo("__0_0.distcp", 0, 12)}
    metadata = Metadata(
        {"weight": TensorStorageMetadata(TensorProperties(torch.bfloat16), torch.Size([3]), chunks)},
        storage_data=place,
    )
    whole = pickle.dumps(metadata)
    (tmp_path / METADATA).write_bytes(whole)
    assert read_index(tmp_path) == metadata
    (tmp_path / METADATA).write_bytes(data.draw(damaged(whole)))
    only_our_errors(lambda: read_index(tmp_path))


@QUICK
@given(content=st.one_of(st.binary(max_size=200), JSON.map(lambda value: json.dumps(value).encode())))
def test_manifests(tmp_path: Path, content: bytes) -> None:
    folder = tmp_path / "checkpoints" / "step-000001"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest.json").write_bytes(content)
    only_our_errors(lambda: open_checkpoint(folder))
    assert find_checkpoint(tmp_path)[0] is None


@pytest.mark.parametrize("name", ["dapo", "math"])
@settings(max_examples=100, deadline=None)
@given(
    response=st.text(max_size=120),
    answer=st.text(max_size=30),
    form=st.sampled_from(["{}", "Answer: {}", "\\boxed{{{}}}", "Answer: \\frac{}{}"]),
)
def test_verifiers(name: str, response: str, answer: str, form: str) -> None:
    """A verdict, whatever is judged; that none takes long or much memory is the pool's business
    (tests/rewards, tests/verifier)."""
    response = form.replace("{}", response.replace("{", "").replace("}", ""))
    verdict = grade(get_verifier(name), {}, response, answer)
    assert isinstance(verdict, Verdict) and isinstance(verdict.correct, bool)
    assert name != "dapo" or verdict.error is None
