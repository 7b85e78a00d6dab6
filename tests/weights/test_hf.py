"""Hugging Face folders: damaged ones are refused with file and tensor; exports are bitwise and whole."""

from __future__ import annotations

import filecmp
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

from megarl.config.errors import CheckpointError
from megarl.config.files import read_json
from megarl.parallel.layout import Layout
from megarl.sync.export import export_hf
from megarl.weights.hf import INDEX, HFFolder, load_into
from megarl.weights.shards import megatron_layout
from megarl.weights.tensor_files import write_tensors
from tests.ranks import RankPool
from tests.tiny_models import make_tiny_model
from tests.weights import jobs
from tests.weights.folders import PREFIX, folder_tensors, loaded, same_bits, set_config

GATE = "model.layers.1.mlp.gate_proj.weight"
BIAS = "model.layers.0.self_attn.o_proj.bias"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model", "qwen2", tied=True)


def change(folder: Path, edit: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def refused(folder: Path, *parts: str, critic: bool = False) -> None:
    with pytest.raises(CheckpointError) as error:
        HFFolder(folder, critic=critic)
    message = str(error.value)
    assert "\n" not in message
    assert all(part in message for part in (str(folder), *parts)), message


def test_a_slice_is_that_part_of_the_tensor(folder: Path) -> None:
    whole = load_file(folder / "model.safetensors")
    assert torch.equal(HFFolder(folder).read(GATE, ((3, 11), (5, 6))), whole[GATE][3:11, 5:6])
    assert torch.equal(HFFolder(folder).read("model.norm.weight", ((0, 7),)), whole["model.norm.weight"][:7])


def test_no_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    refused(folder, "config.json: no such file")
    (folder / "config.json").write_text("{")
    refused(folder, "config.json: cannot be read as JSON")
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    refused(folder, "config.json: model_type: 'gpt2'")


def test_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    refused(folder, "neither model.safetensors nor model.safetensors.index.json")


@pytest.mark.parametrize("keep", [4, 100, -1])
def test_truncated_file(folder: Path, keep: int) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    refused(folder, "model.safetensors: truncated or not a safetensors file")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda tensors: tensors.pop(GATE), f"{GATE}: no file has this tensor"),
        (
            lambda tensors: tensors.update({GATE: tensors[GATE][1:].clone()}),
            f"model.safetensors: {GATE}: shape (47, 32), but config.json asks for (48, 32)",
        ),
        (
            lambda tensors: tensors.update({GATE: tensors[GATE].to(torch.int8)}),
            f"model.safetensors: {GATE}: dtype I8 is not supported",
        ),
        (
            lambda tensors: tensors.update({BIAS: torch.zeros(32)}),
            f"model.safetensors: {BIAS}: a qwen2 model has no such tensor",
        ),
    ],
    ids=["missing", "shape", "dtype", "another architecture"],
)
def test_tensors_that_config_json_does_not_describe(
    folder: Path, damage: Callable[[dict[str, Tensor]], Any], said: str
) -> None:
    change(folder, damage)
    refused(folder, said)


def test_harmless_tensors_are_listed(folder: Path) -> None:
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    extra = {
        "lm_head.weight": embedding.clone(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4),
    }
    change(folder, lambda tensors: tensors.update(extra))
    assert set(HFFolder(folder).extra) == set(extra)


@pytest.mark.parametrize("change_one", [0, 306])
def test_a_tied_output_layer_that_differs_in_one_number(folder: Path, change_one: int) -> None:
    other = load_file(folder / "model.safetensors")["model.embed_tokens.weight"].clone()
    other[change_one, 5] += 1e-7
    change(folder, lambda tensors: tensors.update({"lm_head.weight": other}))
    refused(folder, "model.safetensors: lm_head.weight: differs from model.embed_tokens.weight")
    HFFolder(folder, critic=True)  # has no output layer
    for unlike, said in (
        (other.half(), "differs from"),
        (other[1:].clone(), "shape (306, 32)"),
        (other.double(), "dtype F64"),
    ):
        change(folder, lambda tensors, unlike=unlike: tensors.update({"lm_head.weight": unlike}))
        refused(folder, f"model.safetensors: lm_head.weight: {said}")


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_numbers_that_are_not_finite(folder: Path, number: float, dtype: torch.dtype) -> None:
    def damage(tensors: dict[str, Tensor]) -> None:
        tensors.update({name: tensor.to(dtype) for name, tensor in tensors.items()})
        tensors[GATE][3, 4] = number

    change(folder, damage)
    model = HFFolder(folder)
    for rank, found in ((0, True), (1, False)):  # only who has the slice can know
        shards = megatron_layout(model.config, Layout(tp=2))[rank][1]
        tensors = {name: torch.zeros(shard.shape) for name, shard in shards.items()}
        with (
            pytest.raises(CheckpointError, match=rf"model\.safetensors: {GATE}: holds numbers that are NaN")
            if found
            else nullcontext()
        ):
            load_into(tensors, shards, model)


def test_a_tensor_that_only_a_shard_knows(tmp_path: Path) -> None:
    """An index that leaves the output layer out does not hide that it is another than the embedding."""
    folder = make_tiny_model(tmp_path / "model", "qwen2", max_shard_bytes=90_000)
    index = json.loads((folder / INDEX).read_text())
    file = index["weight_map"].pop("lm_head.weight")
    (folder / INDEX).write_text(json.dumps(index))
    remedy = "set tie_word_embeddings to true there, if the embedding is the output layer too"
    refused(folder, f"lm_head.weight: no file has this tensor, and config.json does not tie it ({remedy})")
    set_config(folder, tie_word_embeddings=True)
    refused(folder, f"{file}: lm_head.weight: differs from model.embed_tokens.weight")


def test_index(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", "llama", max_shard_bytes=20_000)
    index = json.loads((folder / INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2
    whole = {name: tensor for file in files for name, tensor in load_file(folder / file).items()}
    assert all(
        torch.equal(HFFolder(folder).read(name, tuple((0, n) for n in t.shape)), t)
        for name, t in whole.items()
    )

    other = next(file for file in files if file != index["weight_map"][GATE])
    (folder / INDEX).write_text(json.dumps({"weight_map": {**index["weight_map"], GATE: other}}))
    refused(folder, f"{INDEX}: {GATE}: is in {other} by the index")
    (folder / INDEX).write_text(
        json.dumps({"weight_map": {k: v for k, v in index["weight_map"].items() if k != GATE}})
    )
    refused(folder, f"{GATE}: no file has this tensor")
    (folder / INDEX).write_text(json.dumps({"metadata": {}}))
    refused(folder, f"{INDEX}: weight_map is missing or empty")
    (folder / INDEX).write_text(json.dumps(index))
    (folder / files[0]).unlink()
    refused(folder, f"{files[0]}: no such file")


def test_critic_from_an_actor_keeps_its_own_head(folder: Path) -> None:
    source = HFFolder(folder, critic=True)
    assert source.missing == ("score.weight",)
    shards = megatron_layout(source.config, Layout(), critic=True)[0][1]
    tensors = {name: torch.full(shard.shape, 7.0) for name, shard in shards.items()}
    assert load_into(tensors, shards, source) == ["value_head.weight"]
    assert torch.equal(tensors["value_head.weight"], torch.full((1, 32), 7.0))
    assert torch.equal(
        tensors["decoder.final_layernorm.weight"],
        load_file(folder / "model.safetensors")["model.norm.weight"],
    )


@pytest.mark.parametrize("kind", ["token", "sequence"])
def test_critic_from_a_reward_model(tmp_path: Path, kind: str) -> None:
    folder = make_tiny_model(tmp_path / "model", "qwen3", classification=kind)
    source = HFFolder(folder, critic=True)
    tensors = loaded(megatron_layout(source.config, Layout(), critic=True), source)[0]
    assert torch.equal(tensors["value_head.weight"], load_file(folder / "model.safetensors")["score.weight"])
    refused(folder, "lm_head.weight: no file has this tensor", critic=False)


def test_critic_heads_that_cannot_be_taken(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", "qwen3", classification="token")
    change(folder, lambda tensors: tensors["score.bias"].fill_(0.5))
    refused(folder, "score.bias: is not zero", critic=True)
    change(
        folder,
        lambda tensors: tensors.update({"score.bias": torch.zeros(2), "score.weight": torch.zeros(2, 32)}),
    )
    refused(folder, "score.weight: shape (2, 32)", critic=True)


def test_tensors_that_are_not_the_layouts_are_refused(folder: Path) -> None:
    source = HFFolder(folder)
    shards = megatron_layout(source.config, Layout())[0][1]
    tensors = {name: torch.empty(shard.shape) for name, shard in shards.items()}
    name = "decoder.final_layernorm.weight"
    with pytest.raises(ValueError, match=name):
        load_into({**tensors, name: torch.empty(33)}, shards, source)
    with pytest.raises(ValueError, match="surplus"):
        load_into({**tensors, "surplus": torch.empty(1)}, shards, source)
    with pytest.raises(ValueError, match=name):
        load_into({k: v for k, v in tensors.items() if k != name}, shards, source)


def test_weights_are_cast_to_the_models_dtype(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", "llama", dtype=torch.bfloat16)
    source = HFFolder(folder)
    tensors = loaded(megatron_layout(source.config, Layout()), source, torch.float32)[0]
    assert torch.equal(
        tensors["output_layer.weight"], load_file(folder / "model.safetensors")["lm_head.weight"].float()
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": "Qwen3ForCausalLM"}, "architectures: must be a list of names"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu' is not supported for qwen3"),
        ({"use_sliding_window": True}, "use_sliding_window: True is not supported for qwen3"),
        ({"num_hidden_layers": 10**30}, "num_hidden_layers: must be a positive integer"),
    ],
)
def test_configs_that_the_tables_do_not_describe(changes: dict, message: str, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", "qwen3")
    set_config(folder, **changes)
    with pytest.raises(CheckpointError, match=message):
        HFFolder(folder)


def same(exported: Path, source: Path) -> bool:
    return same_bits(folder_tensors(exported), folder_tensors(source))


def export_alone(
    source: Path, out: Path, critic: bool = False, dtype: torch.dtype = torch.float32, **options: int
) -> None:
    folder = HFFolder(source, critic=critic)
    tensors = loaded(megatron_layout(folder.config, Layout(), critic=critic), folder, dtype)[0]
    export_hf(out, source, Layout(), 0, tensors, critic=critic, **options)


@pytest.mark.parametrize("family", PREFIX)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_actor_comes_back_bitwise(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    for tied in (False, True):
        source = make_tiny_model(
            tmp_path / f"source{tied}",
            family,
            tied=tied,
            dtype=dtype,
            rope="llama3" if family == "llama" else "default",
        )
        out = tmp_path / "runs" / f"out{tied}"
        export_alone(source, out, dtype=dtype)
        assert same(out, source)
        for file in (
            "tokenizer.json",
            "tokenizer_config.json",
            "generation_config.json",
            "chat_template.jinja",
        ):
            assert filecmp.cmp(source / file, out / file, shallow=False)
        assert [p.name for p in out.parent.iterdir() if p.name.endswith(".partial")] == []
        theirs, report = AutoModelForCausalLM.from_pretrained(out, dtype="auto", output_loading_info=True)
        assert not report["missing_keys"]
        assert not report["unexpected_keys"]
        assert theirs.dtype == dtype
        text = "1+2=?"
        ids = torch.tensor([AutoTokenizer.from_pretrained(out)(text)["input_ids"]])
        assert torch.equal(
            theirs(ids).logits, AutoModelForCausalLM.from_pretrained(source, dtype="auto")(ids).logits
        )


def test_several_files_with_an_index(tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "source", "qwen2")
    export_alone(source, tmp_path / "out", max_shard_bytes=30_000)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2
    for file in files:
        tensors = load_file(file)
        assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= 30_000
    index = read_json(tmp_path / "out" / INDEX)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in folder_tensors(source).values())
    assert same(tmp_path / "out", source)
    assert HFFolder(tmp_path / "out").extra == ()
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


@pytest.mark.parametrize("options", [{}, {"max_shard_bytes": 30_000}])
def test_a_critic_becomes_a_token_classifier_and_can_be_read_again(
    tmp_path: Path, options: dict[str, int]
) -> None:
    reward_model = make_tiny_model(tmp_path / "source", "qwen2", classification="sequence")
    export_alone(reward_model, tmp_path / "critic", critic=True, **options)
    model, report = AutoModelForTokenClassification.from_pretrained(
        tmp_path / "critic", output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert type(model).__name__ == "Qwen2ForTokenClassification"
    assert model.config.num_labels == 1
    assert torch.equal(model.score.weight, folder_tensors(reward_model)["score.weight"])
    assert not model.score.bias.any()
    assert HFFolder(tmp_path / "critic", critic=True).missing == ()
    export_alone(tmp_path / "critic", tmp_path / "again", critic=True)
    assert same(tmp_path / "again", tmp_path / "critic")


@pytest.mark.slow
def test_four_ranks_write_what_they_hold(ranks: Callable[..., RankPool], tmp_path: Path) -> None:
    actor = make_tiny_model(
        tmp_path / "actor", "qwen3", tied=True, layers=4, heads=8, kv_heads=4, vocab=61, head_dim=6
    )
    critic = make_tiny_model(
        tmp_path / "critic", "llama", layers=4, heads=8, kv_heads=4, vocab=61, classification="token"
    )
    pool = ranks(2, 2, 1)
    for number, layout in enumerate((Layout(tp=2, pp=2), Layout(tp=4), Layout(pp=2, dp=2))):
        for source, is_critic in ((actor, False), (critic, True)):
            out = tmp_path / f"{source.name}{number}"
            arguments = {
                "folder": source,
                "out": out,
                "layout": layout,
                "critic": is_critic,
                "max_shard_bytes": 20_000,
            }
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


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"gone/x\.safetensors: cannot be written"):
        write_tensors(tmp_path / "gone" / "x.safetensors", {"a": torch.zeros(2)})
