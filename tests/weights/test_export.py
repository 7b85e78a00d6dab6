"""Exports: bitwise what was loaded, readable by transformers, complete or not there at all."""

from __future__ import annotations

import filecmp
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

from megarl.config.errors import CheckpointError
from megarl.config.files import read_json
from megarl.parallel.layout import Layout
from megarl.weights.hf import INDEX, HFFolder, export_hf
from megarl.weights.layout import megatron_layout
from tests.ranks import RankPool
from tests.tiny_models import make_tiny_model
from tests.weights import jobs
from tests.weights.folders import loaded


def weights(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def same(exported: Path, source: Path) -> bool:
    ours, theirs = weights(exported), weights(source)
    return ours.keys() == theirs.keys() and all(t.dtype == theirs[n].dtype and torch.equal(t, theirs[n]) for n, t in ours.items())


def export_alone(source: Path, out: Path, critic: bool = False, dtype: torch.dtype = torch.float32, **options: int) -> None:
    folder = HFFolder(source, critic=critic)
    tensors = loaded(megatron_layout(folder.config, Layout(), critic=critic), folder, dtype)[0]
    export_hf(out, source, Layout(), 0, tensors, critic=critic, **options)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_actor_comes_back_bitwise(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    for tied in (False, True):
        source = make_tiny_model(
            tmp_path / f"source{tied}", family, tied=tied, dtype=dtype, rope="llama3" if family == "llama" else "default"
        )
        out = tmp_path / "runs" / f"out{tied}"
        export_alone(source, out, dtype=dtype)
        assert same(out, source)
        for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
            assert filecmp.cmp(source / file, out / file, shallow=False)
        assert [p.name for p in out.parent.iterdir() if p.name.endswith(".partial")] == []
        theirs, report = AutoModelForCausalLM.from_pretrained(out, dtype="auto", output_loading_info=True)
        assert not report["missing_keys"]
        assert not report["unexpected_keys"]
        assert theirs.dtype == dtype
        text = "1+2=?"
        ids = torch.tensor([AutoTokenizer.from_pretrained(out)(text)["input_ids"]])
        assert torch.equal(theirs(ids).logits, AutoModelForCausalLM.from_pretrained(source, dtype="auto")(ids).logits)


def test_several_files_with_an_index(tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "source", "qwen2")
    export_alone(source, tmp_path / "out", max_shard_bytes=30_000)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2
    for file in files:
        tensors = load_file(file)
        assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= 30_000
    index = read_json(tmp_path / "out" / INDEX)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in weights(source).values())
    assert same(tmp_path / "out", source)
    assert HFFolder(tmp_path / "out").extra == ()
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


@pytest.mark.parametrize("options", [{}, {"max_shard_bytes": 30_000}])
def test_a_critic_becomes_a_token_classifier_and_can_be_read_again(tmp_path: Path, options: dict[str, int]) -> None:
    reward_model = make_tiny_model(tmp_path / "source", "qwen2", classification="sequence")
    export_alone(reward_model, tmp_path / "critic", critic=True, **options)
    model, report = AutoModelForTokenClassification.from_pretrained(tmp_path / "critic", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert type(model).__name__ == "Qwen2ForTokenClassification"
    assert model.config.num_labels == 1
    assert torch.equal(model.score.weight, weights(reward_model)["score.weight"])
    assert not model.score.bias.any()
    assert HFFolder(tmp_path / "critic", critic=True).missing == ()
    export_alone(tmp_path / "critic", tmp_path / "again", critic=True)
    assert same(tmp_path / "again", tmp_path / "critic")


def test_four_ranks_write_what_they_hold(ranks: Callable[..., RankPool], tmp_path: Path) -> None:
    actor = make_tiny_model(tmp_path / "actor", "qwen3", tied=True, layers=4, heads=8, kv_heads=4, vocab=61, head_dim=6)
    critic = make_tiny_model(tmp_path / "critic", "llama", layers=4, heads=8, kv_heads=4, vocab=61, classification="token")
    pool = ranks(2, 2, 1)
    for number, layout in enumerate((Layout(tp=2, pp=2), Layout(tp=4), Layout(pp=2, dp=2))):
        for source, is_critic in ((actor, False), (critic, True)):
            out = tmp_path / f"{source.name}{number}"
            arguments = {"folder": source, "out": out, "layout": layout, "critic": is_critic, "max_shard_bytes": 20_000}
            assert pool.run(jobs.export, **arguments) == [""] * 4
            assert same(out, source)
            answers = pool.run(jobs.export, **arguments)  # the folder exists by now: every rank learns of it
            assert len(set(answers)) == 1
            assert f"{out}: already exists" in answers[0]


def test_a_left_over_of_an_interrupted_export_is_replaced(tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "source", "qwen2", tied=True)
    left_over = tmp_path / ".out.partial"
    left_over.mkdir()
    (left_over / "model-00001-of-00009.safetensors").write_bytes(b"half")
    export_alone(source, tmp_path / "out")
    assert not left_over.exists()
    assert same(tmp_path / "out", source)


def test_nothing_is_left_of_an_export_that_fails(tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "source", "qwen2", tied=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file/\.out\.partial: cannot be written \(Not a directory\)"):
        export_alone(source, tmp_path / "file" / "out")
