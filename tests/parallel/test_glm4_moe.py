"""GLM-4.5: dense layers before mixtures, whose routers choose by biased sigmoid scores, and shared experts.
Log-probabilities and gradients against Hugging Face's over every kind of parallelism, routing replay, and
checkpoints."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megarl.config.errors import CheckpointError
from megarl.model.routing import routing_metrics
from megarl.rollout.sampling import Request, SamplingParams
from megarl.weights.families import read_config
from megarl.weights.hf import HFFolder
from megarl.weights.megatron import conversion_layout, hf_to_megatron, megatron_to_hf
from tests.parallel import jobs
from tests.parallel.test_invariance import VOCAB, make_batch
from tests.parallel.test_parity import hf_logprobs, sequences
from tests.parallel.test_routing import EXPERTS, engine_of, random_routing
from tests.ranks import RankPool
from tests.tiny_models import EXPERT_BIAS, make_tiny_model
from tests.weights.folders import folder_tensors, same_bits, set_config

Ranks = Callable[..., RankPool]
SLOW = pytest.mark.slow
# tp, pp, dp, ep, cp, and virtual stages: the second stage has no dense layer, the first chunk of a virtual
# one nothing else.
LAYOUTS = [
    (1, 1, 1),
    pytest.param((2, 1, 1, 2), marks=SLOW),
    (2, 2, 1, 2),
    pytest.param((1, 1, 2, 2), marks=SLOW),
    pytest.param((1, 1, 1, 2, 2), marks=SLOW),
    pytest.param((1, 2, 1, 1, 1, 2), marks=SLOW),
]
# 4.5, with all that the table can say; Air, without norms of q and k; groups of experts, and a layer like the
# others first.
MODELS: list[dict[str, Any]] = [
    {"head_dim": 12, "n_shared_experts": 2},
    {"use_qk_norm": False, "attention_bias": False, "tied": True, "routed_scaling_factor": 1.0},
    {"experts": 12, "active": 4, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 0},
]


def tiny(folder: Path, **options: Any) -> Path:
    return make_tiny_model(folder, "glm4_moe", **{"layers": 4, "experts": 8, "active": 3, **options})


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_logprobs_equal_hugging_face(layout: tuple[int, ...], ranks: Ranks, tmp_path: Path) -> None:
    prompts, responses = sequences(101)
    for number, options in enumerate(MODELS):
        folder = tiny(tmp_path / str(number), vocab=101, **options)
        expected, entropy = hf_logprobs(folder, prompts, responses, 1.0)
        found = ranks(*layout).run(jobs.logprobs, folder=folder, prompts=prompts, responses=responses)
        for logprobs, entropies in found:
            assert (logprobs - expected).abs().max() <= 1e-5, options
            assert (entropies - entropy).abs().max() <= 1e-5, options


def fill_gradients(model: Any, batch: Any) -> None:
    """Backward of Hugging Face's mean negative log-probability of all responses' tokens."""
    loss, ends = torch.zeros((), dtype=torch.float64), batch.cu_seqlens.tolist()
    for start, stop in itertools.pairwise(ends):
        tokens, mask = batch.tokens[start:stop], batch.response_mask[start:stop]
        logprobs = model(tokens[None]).logits[0, :-1].log_softmax(-1)
        loss -= logprobs.gather(-1, tokens[1:, None])[mask[1:], 0].sum()
    (loss / batch.response_mask.sum()).backward()


def hf_gradients(folder: Path, batch: Any) -> dict[str, torch.Tensor]:
    """Of the mean negative log-probability of all responses' tokens, in float64, by the files' names."""
    # Its grouped products have no float64.
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager")
    fill_gradients(model, batch)
    found = {}
    for name, parameter in model.named_parameters():
        layer, of_experts, kind = name.rpartition(".experts.")
        if not of_experts:
            found[name] = parameter.grad
        parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
        for expert, gradient in enumerate(parameter.grad) if of_experts else ():
            for part, own in zip(parts, gradient.chunk(len(parts)), strict=True):
                found[f"{layer}.experts.{expert}.{part}.weight"] = own
    return found


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_gradients_equal_hugging_face(layout: tuple[int, ...], ranks: Ranks, tmp_path: Path) -> None:
    batch = make_batch()
    batch.tokens = batch.tokens.clamp(min=1)  # Hugging Face gives the padding token, 0, no gradient
    batch["correct"] = torch.ones(8, dtype=torch.bool)
    batch["advantages"] = torch.zeros(batch.num_tokens)
    arguments: dict[str, Any] = {
        "batch": batch,
        "which": "actor",
        "options": {"nll_weight": 1.0, "budget": 34},
    }
    for number, options in enumerate(MODELS[:1] if layout == (1, 1, 1) else MODELS):
        folder = tiny(tmp_path / str(number), vocab=VOCAB, **options)
        theirs = hf_gradients(folder, batch)
        found = ranks(*layout).run(jobs.gradients, folder=folder, **arguments)[0]
        norm = torch.cat([x.flatten() for x in theirs.values()]).norm()
        assert found["norm"] == pytest.approx(float(norm), rel=1e-4)
        for name, gradient in theirs.items():
            assert (found["gradients"][name] - gradient).abs().max() <= 1e-5 * norm, (options, name)
        biases = found["gradients"].keys() - theirs.keys()
        assert biases and all(name.endswith("e_score_correction_bias") for name in biases)
        assert not any(found["gradients"][name].any() for name in biases)


@pytest.mark.parametrize("layout", [(1, 1, 1), pytest.param((2, 2, 1, 2), marks=SLOW)], ids=str)
def test_the_engines_choice_is_taken(layout: tuple[int, ...], ranks: Ranks, tmp_path: Path) -> None:
    """Scores are the routers' own, without the bias; what stands in the place of a dense layer counts
    nowhere."""
    folder = tiny(tmp_path / "model", vocab=101, first_k_dense_replace=1)
    prompts, responses = sequences(101)
    routing = random_routing(prompts, responses, layers=4)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    place = slice(0)  # of the sequence among all tokens

    def choose(layer: int) -> Callable[..., Any]:
        def hook(_gate: Any, _inputs: Any, output: Any) -> Any:
            given = routing[place, layer].long()
            chosen = torch.where(given < EXPERTS, given, output[2])
            scores = output[0].sigmoid().gather(-1, chosen)
            return output[0], 2.5 * scores / scores.sum(-1, keepdim=True), chosen

        return hook

    for number, layer in enumerate(model.model.layers[1:], start=1):
        layer.mlp.gate.register_forward_hook(choose(number))
    expected = []
    for prompt, response in zip(prompts, responses, strict=True):
        place = slice(place.stop, place.stop + len(prompt) + len(response))
        with torch.no_grad():
            logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        expected.append(logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0])
    arguments = {"folder": folder, "prompts": prompts, "responses": responses, "routing": routing}
    for found, counts in ranks(*layout).run(jobs.logprobs, **arguments):
        assert (found - torch.cat(expected)).abs().max() <= 1e-5
        assert not counts[0].any()
        assert counts[1:, :-2].sum(1).tolist() == [3 * len(routing)] * 3
        metrics = routing_metrics(counts[1:], 3)
        assert metrics["router/replayed"] == pytest.approx(1 - len(prompts) / len(routing))
        assert metrics["mismatch/routing"] > 0.5


def test_the_engine_records_what_its_routers_chose(tmp_path: Path) -> None:
    """As SGLang does: of a dense layer zeros."""
    folder = tiny(tmp_path / "model", vocab=61)
    completions = engine_of(folder, torch.float32).generate(
        [Request((5, 6, 7), seed=0), Request((9,) * 11, seed=1)], SamplingParams(max_tokens=12, routing=True)
    )
    model, seen = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), list[Any]()
    for layer in model.model.layers[1:]:
        layer.mlp.gate.register_forward_hook(lambda _gate, _inputs, output: seen.append(output[2]))
    for prompt, completion in zip(((5, 6, 7), (9,) * 11), completions, strict=True):
        seen.clear()
        with torch.no_grad():
            model(torch.tensor([[*prompt, *completion.tokens]]))
        assert completion.routing is not None
        found = torch.from_numpy(completion.routing[:-1]).long()
        assert found.shape[1:] == (4, 3) and not found[:, 0].any()
        assert torch.equal(found[:, 1:].sort(-1)[0], torch.stack(seen, 1)[:-1].sort(-1)[0])


@pytest.mark.slow
def test_a_checkpoint_of_one_layout_is_read_at_another(ranks: Ranks, tmp_path: Path) -> None:
    """Weights, biases and both of Adam's moments, to the bit."""
    arguments: dict[str, Any] = {"folder": tiny(tmp_path / "model", vocab=VOCAB), "batch": make_batch()}
    arguments |= {"which": "actor", "checkpoint": tmp_path / "checkpoint"}
    arguments["checkpoint"].mkdir()
    saved = ranks(2, 2, 1, 2).run(jobs.optimizer_around_a_checkpoint, read=False, **arguments)[0]
    assert any(EXPERT_BIAS in name and tensor.any() for name, tensor in saved.items())
    for layout in ((1, 1, 1), (1, 2, 2, 2), (1, 2, 1, 1, 1, 2)):
        read = ranks(*layout).run(jobs.optimizer_around_a_checkpoint, read=True, **arguments)[0]
        assert read.keys() == saved.keys()
        different = [name for name in saved if not torch.equal(saved[name], read[name])]
        assert not different, (layout, different[:3])


def test_layers_that_predict_further_are_left_out(tmp_path: Path) -> None:
    """As transformers leaves them out; an export, which has none, says so."""
    folder = tiny(tmp_path / "model", vocab=101)
    tensors, name = load_file(folder / "model.safetensors"), "model.layers.4.eh_proj.weight"
    save_file({**tensors, name: torch.ones(32, 64)}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"{name}: a glm4_moe model has no such tensor"):
        HFFolder(folder)
    set_config(folder, num_nextn_predict_layers=1)
    assert HFFolder(folder).extra == (name,)
    done = hf_to_megatron(folder, tmp_path / "megatron", conversion_layout(1, 1, 1), verify=True)
    assert done.left_out == (name,)
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back")
    assert same_bits(folder_tensors(tmp_path / "back"), tensors)
    assert read_config(tmp_path / "back")["num_nextn_predict_layers"] == 0


def test_a_bias_stays_in_float32(tmp_path: Path) -> None:
    """Whatever the others are converted to: transformers and SGLang have it so."""
    folder = tiny(tmp_path / "model", vocab=101)
    hf_to_megatron(folder, tmp_path / "megatron", conversion_layout(1, 2, 2))
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back", dtype=torch.bfloat16)
    source, back = folder_tensors(folder), folder_tensors(tmp_path / "back")
    for name, tensor in back.items():
        wanted = source[name] if name.endswith(EXPERT_BIAS) else source[name].bfloat16()
        assert tensor.dtype == wanted.dtype and torch.equal(tensor, wanted), name
    assert read_config(tmp_path / "back")["torch_dtype"] == "bfloat16"
