"""Features that only GLM-4.5 has.

They are routing replay next to dense layers, multi-token prediction layers, and router biases in float32.
The row in tests/families.py covers log-probabilities, gradients, values and checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megarl.config.errors import CheckpointError
from megarl.model.routing import routing_metrics
from megarl.rollout.engines.base import GenerationRequest
from megarl.rollout.sampling import SamplingParams
from megarl.weights.families import read_config
from megarl.weights.hf import HFFolder
from megarl.weights.megatron import conversion_layout, hf_to_megatron, megatron_to_hf
from tests.parallel import jobs
from tests.parallel.test_parity import sequences, tiny
from tests.parallel.test_routing import EXPERTS, engine_of, random_routing
from tests.ranks import RankPool
from tests.tiny_models import EXPERT_BIAS
from tests.weights.folders import folder_tensors, same_bits, set_config

Ranks = Callable[..., RankPool]
SLOW = pytest.mark.slow


@pytest.mark.parametrize("layout", [(1, 1, 1), pytest.param((2, 2, 1, 2), marks=SLOW)], ids=str)
def test_the_engines_choice_is_taken(layout: tuple[int, ...], ranks: Ranks, tmp_path: Path) -> None:
    """Scores come from the routers without the bias, and the entries of a dense layer are ignored."""
    folder = tiny(tmp_path / "model", "glm4_moe", vocab=101, first_k_dense_replace=1)
    prompts, responses = sequences(101)
    routing = random_routing(prompts, responses, layers=4)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    place = slice(0)  # the sequence's span of all tokens

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
    """Dense layers are recorded as zeros, as in SGLang."""
    folder = tiny(tmp_path / "model", "glm4_moe", vocab=61)
    completions = engine_of(folder, torch.float32).generate(
        [GenerationRequest((5, 6, 7), seed=0), GenerationRequest((9,) * 11, seed=1)],
        SamplingParams(max_tokens=12, routing=True),
    )
    model, seen = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), list[Any]()
    for layer in model.model.layers[1:]:
        layer.mlp.gate.register_forward_hook(lambda _gate, _inputs, output: seen.append(output[2]))
    for prompt, completion in zip(((5, 6, 7), (9,) * 11), completions, strict=True):
        seen.clear()
        with torch.no_grad():
            model(torch.tensor([[*prompt, *completion.tokens.tolist()]]))
        assert completion.routed_experts is not None
        found = torch.from_numpy(completion.routed_experts[:-1]).long()
        assert found.shape[1:] == (4, 3) and not found[:, 0].any()
        assert torch.equal(found[:, 1:].sort(-1)[0], torch.stack(seen, 1)[:-1].sort(-1)[0])


def test_layers_that_predict_further_are_left_out(tmp_path: Path) -> None:
    """Conversion skips multi-token prediction layers, as transformers does; an export declares none."""
    folder = tiny(tmp_path / "model", "glm4_moe", vocab=101)
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
    """Biases keep float32 whatever the other weights' dtype, as in transformers and SGLang."""
    folder = tiny(tmp_path / "model", "glm4_moe", vocab=101)
    hf_to_megatron(folder, tmp_path / "megatron", conversion_layout(1, 2, 2))
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back", dtype=torch.bfloat16)
    source, back = folder_tensors(folder), folder_tensors(tmp_path / "back")
    for name, tensor in back.items():
        wanted = source[name] if name.endswith(EXPERT_BIAS) else source[name].bfloat16()
        assert tensor.dtype == wanted.dtype and torch.equal(tensor, wanted), name
    assert read_config(tmp_path / "back")["torch_dtype"] == "bfloat16"
