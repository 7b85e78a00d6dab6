"""Routing replay: the trainer's routers use the engine's choice of experts.

The reference is Hugging Face's model, made to choose the same experts. Also tested are the routers' counts,
and that the engine's and the trainer's log-probabilities get closer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megarl.model.routing import routing_metrics
from megarl.rollout.engines.base import GenerationRequest
from megarl.rollout.engines.transformers_engine import TransformersEngine
from megarl.rollout.sampling import SamplingParams
from tests.parallel import jobs
from tests.parallel.test_experts import LAYOUTS, NAMES, mixture
from tests.parallel.test_invariance import VOCAB, make_batch, relative_difference
from tests.parallel.test_parity import sequences
from tests.ranks import RankPool

Ranks = Callable[..., RankPool]
LAYERS, EXPERTS, TOPK, NONE = 2, 8, 3, 255
VIRTUAL = (2, 2, 1, 2, 1, 2)  # tp, pp, dp, ep, cp, vpp


def random_routing(
    prompts: list[list[int]], responses: list[list[int]], layers: int = LAYERS
) -> torch.Tensor:
    """Choose random experts, uint8 [T, layers, topk], and none for the last token of each sequence."""
    generator = torch.Generator().manual_seed(3)
    lengths = [len(p) + len(r) for p, r in zip(prompts, responses, strict=True)]
    chosen = torch.rand(sum(lengths), layers, EXPERTS, generator=generator).argsort(-1)[..., :TOPK]
    chosen[torch.tensor(lengths).cumsum(0) - 1] = NONE
    return chosen.to(torch.uint8)


@contextmanager
def choosing(model: Any, routing: torch.Tensor, experts_seen: list[torch.Tensor]) -> Iterator[None]:
    """Make Hugging Face's routers choose `routing`, [tokens, layers, topk], where it has an expert."""

    def choose(layer: int) -> Callable[..., Any]:
        def hook(gate: Any, _inputs: Any, output: Any) -> Any:
            logits, _, own = output
            given = routing[:, layer].long()
            chosen = torch.where(given < EXPERTS, given, own)
            experts_seen.append(torch.stack([chosen, own]))
            scores = logits.softmax(-1).gather(-1, chosen)
            return logits, scores / scores.sum(-1, keepdim=True), chosen

        return hook

    hooks = [layer.mlp.gate.register_forward_hook(choose(i)) for i, layer in enumerate(model.model.layers)]
    yield
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize(
    "layout",
    [
        *((1, 1, 1, 1), (2, 1, 1, 2)),
        *(pytest.param(layout, marks=pytest.mark.slow) for layout in (*LAYOUTS, VIRTUAL)),
    ],
    ids=NAMES,
)
def test_the_engines_choice_is_taken(layout: tuple[int, ...], ranks: Ranks, tmp_path: Path) -> None:
    layers = 4 if layout == VIRTUAL else LAYERS
    folder = mixture(tmp_path / "model", vocab=101, layers=layers)
    prompts, responses = sequences(101)
    routing = random_routing(prompts, responses, layers)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected, at = [], 0
    counts = torch.zeros(layers, EXPERTS + 2)
    for prompt, response in zip(prompts, responses, strict=True):
        length = len(prompt) + len(response)
        of_it, seen = routing[at : at + length], []
        with torch.no_grad(), choosing(model, of_it, seen):
            logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].double()
        expected.append(logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0])
        for layer, (chosen, own) in enumerate(seen):
            for token in range(length):
                for expert in chosen[token].tolist():
                    counts[layer, expert] += 1
                if int(of_it[token, layer, 0]) < EXPERTS:
                    counts[layer, -2] += 1
                    counts[layer, -1] += set(chosen[token].tolist()) != set(own[token].tolist())
        at += length
    arguments = {"folder": folder, "prompts": prompts, "responses": responses, "routing": routing}
    for found, counted in ranks(*layout).run(jobs.logprobs, **arguments):
        assert (found - torch.cat(expected)).abs().max() <= 1e-5
        assert torch.equal(counted, counts.double())
    assert counts[:, -1].sum() > 0


def test_gradients_with_replay_do_not_depend_on_layout_and_recomputation(
    ranks: Ranks, tmp_path: Path
) -> None:
    folder, batch = mixture(tmp_path / "model", vocab=VOCAB), make_batch()
    starts, ends = batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist()
    rows = [batch.tokens[a:b].tolist() for a, b in zip(starts, ends, strict=True)]
    arguments: dict[str, Any] = {"folder": folder, "which": "actor"}
    options: dict[str, Any] = {"clip_high": 0.28, "nll_weight": 0.1}
    alone = {**options, "budget": 10_000}
    free = ranks(1, 1, 1).run(jobs.gradients, batch=batch, options=alone, **arguments)[0]["gradients"]
    batch["routing"] = random_routing(rows, [[]] * len(rows))
    expected = ranks(1, 1, 1).run(jobs.gradients, batch=batch, options=alone, **arguments)[0]["gradients"]
    assert relative_difference(free, expected) > 0.1, "other experts, other gradients"
    assert expected["model.layers.1.mlp.gate.weight"].norm() > 0, (
        "routers learn from what they did not choose"
    )
    for recompute in ("none", "full"):
        more = {**options, "budget": 34, "model": {"recompute": recompute}}
        found = ranks(2, 1, 1, 2).run(jobs.gradients, batch=batch, options=more, **arguments)[0]
        assert relative_difference(found["gradients"], expected) <= 1e-5, recompute


def engine_of(
    folder: Path, dtype: torch.dtype, noise: float = 0.0, max_batch: int = 256
) -> TransformersEngine:
    """Start an engine with the folder's weights and with noise on its routers."""
    engine = TransformersEngine(folder, dtype=dtype, eos_ids=(1,), max_batch=max_batch)
    engine.start()
    generator = torch.Generator().manual_seed(1)
    source = load_file(folder / "model.safetensors")
    for name, tensor in engine.parameters().items():
        tensor.copy_(source[name])
        if name.endswith("mlp.gate.weight"):
            tensor.add_(noise * torch.randn(tensor.shape, generator=generator))
    engine.end_update(0)
    return engine


def test_the_engine_records_what_its_routers_chose(tmp_path: Path) -> None:
    """The recorded experts match Hugging Face's choices in one pass over each full sequence.

    Equal prompts share a prefill, and finished rows make room for others."""
    folder = mixture(tmp_path / "model", vocab=61)
    engine = engine_of(folder, torch.float32, max_batch=4)
    prompts = [(5, 6, 7), (9,) * 11, (5, 6, 7), (20, 21), (5, 6, 7), (9,) * 11, (30, 31, 32, 33, 34)]
    requests = [GenerationRequest(prompt, seed=i) for i, prompt in enumerate(prompts)]
    params = SamplingParams(max_tokens=24, routing=True)
    completions = engine.generate(requests, params)
    assert len({len(c.tokens.tolist()) for c in completions}) > 2
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for prompt, completion in zip(prompts, completions, strict=True):
        tokens = [*prompt, *completion.tokens.tolist()]
        free, seen = torch.full((len(tokens), LAYERS, TOPK), NONE), []
        with torch.no_grad(), choosing(model, free, seen):
            model(torch.tensor([tokens]))
        assert completion.routed_experts is not None and completion.routed_experts.dtype == np.uint8
        assert completion.routed_experts.shape == (len(tokens), LAYERS, TOPK)
        for layer, (_, own) in enumerate(seen):
            found = torch.from_numpy(completion.routed_experts[:-1, layer]).sort(-1)[0]
            assert torch.equal(found.long(), own[:-1].sort(-1)[0])
        assert (completion.routed_experts[-1] == NONE).all()
    again = engine.generate(requests, SamplingParams(max_tokens=24))
    assert [c.tokens.tolist() for c in again] == [c.tokens.tolist() for c in completions] and again[
        0
    ].routed_experts is None


@pytest.mark.parametrize(("dtype", "noise"), [(torch.bfloat16, 0.0), (torch.float32, 0.05)], ids=str)
def test_the_mismatch_falls_with_replay(
    dtype: torch.dtype, noise: float, ranks: Ranks, tmp_path: Path
) -> None:
    folder = mixture(tmp_path / "model", vocab=61, active=2)
    engine = engine_of(folder, dtype, noise)
    prompts = [[3 + i, 20, 21 + i] for i in range(16)]
    params = SamplingParams(max_tokens=40, routing=True)
    completions = engine.generate(
        [GenerationRequest(tuple(p), seed=i) for i, p in enumerate(prompts)], params
    )
    routing = torch.from_numpy(
        np.concatenate([c.routed_experts for c in completions if c.routed_experts is not None])
    )
    theirs = torch.tensor([x for c in completions for x in c.logprobs.tolist()], dtype=torch.float64)
    arguments: dict[str, Any] = {"folder": folder, "prompts": prompts}
    arguments["responses"] = [c.tokens.tolist() for c in completions]
    pool = ranks(1, 1, 1)
    without = pool.run(jobs.logprobs, **arguments)[0][0]
    replayed, counts = pool.run(jobs.logprobs, routing=routing, **arguments)[0]
    metrics = routing_metrics(counts, topk=2)
    off, on = float((without - theirs).abs().mean()), float((replayed - theirs).abs().mean())
    assert 0.001 < metrics["mismatch/routing"] < 0.9 and 0.9 < metrics["router/replayed"] < 1
    assert on < 0.7 * off


def test_loads_as_metrics() -> None:
    """The reference is the definitions, written out."""
    counts = torch.tensor([[6, 2, 0, 0, 4, 1], [2, 2, 2, 2, 4, 2]], dtype=torch.float64)
    metrics = routing_metrics(counts, topk=2)
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25)) / math.log(4)
    assert metrics == pytest.approx(
        {
            "router/load_max": (0.75 * 4 + 1) / 2,
            "router/load_entropy": (entropy + 1) / 2,
            "router/unused": 2 / 8,
            "router/replayed": 1.0,
            "mismatch/routing": 3 / 8,
        }
    )
    assert routing_metrics(torch.zeros(2, 6, dtype=torch.float64), topk=2)["router/unused"] == 1
