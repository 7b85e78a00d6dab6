"""Sampling replay: the trainer renormalises log-probs over the sets that the engine sampled from.

The reference for log-probs and gradients is a loop in float64 over each token's set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megarl.data.sample import TokenData
from megarl.model.logprob_head import vocab_parallel_logprobs
from megarl.rollout.engines.base import GenerationRequest
from megarl.rollout.engines.transformers_engine import TransformersEngine
from megarl.rollout.sampling import SamplingParams
from megarl.training.micro_batch import renormalise
from tests.engines import load_folder
from tests.parallel import jobs
from tests.parallel.test_invariance import VOCAB, make_batch, relative_difference
from tests.ranks import RankPool
from tests.tiny_models import make_tiny_model

Ranks = Callable[..., RankPool]
WORDS, TOKENS, WIDTH, TEMPERATURE = 33, 40, 6, 0.7


def random_sets(tokens: Tensor, words: int, width: int, seed: int = 0) -> Tensor:
    """Return sets of 1 to `width` random ids with the token among them, int32 [n, width], -1 behind."""
    generator = torch.Generator().manual_seed(seed)
    sets = torch.rand(len(tokens), words, generator=generator).argsort(-1)[:, :width]
    for row, token in zip(sets, tokens.tolist(), strict=True):
        size = int(torch.randint(1, width + 1, (), generator=generator))
        if token not in row[:size]:
            row[int(torch.randint(size, (), generator=generator))] = token
        row[size:] = -1
    return sets.int()


def looped(
    hidden: Tensor, weight: Tensor, tokens: list[int], sets: list[list[int]]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return logp, and d logp / d logits as a table, written out from softmax over each set in float64."""
    logits = hidden.double() @ weight.double().T / TEMPERATURE
    logprobs, d_logits = torch.zeros(len(tokens), dtype=torch.float64), torch.zeros_like(logits)
    for i, (token, ids) in enumerate(zip(tokens, sets, strict=True)):
        members = sorted({*ids, token} - {-1}) if ids[0] >= 0 else list(range(logits.shape[1]))
        total = sum(float(logits[i, v].exp()) for v in members)
        logprobs[i] = logits[i, token] - np.log(total)
        for v in members:
            d_logits[i, v] = float(v == token) - float(logits[i, v].exp()) / total
    return logprobs, d_logits, logits


def head_case(runtime: Any) -> list[tuple[Tensor, Tensor]]:
    """Return (found, expected) of log-probs, entropy and gradients on this rank's shard."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(TOKENS, 8, generator=g), torch.randn(WORDS, 8, generator=g)
    tokens = torch.randint(0, WORDS, (TOKENS,), generator=g)
    factors, entropy_factors = torch.randn(2, TOKENS, generator=g)
    sets = random_sets(tokens, WORDS, WIDTH)
    sets[3] = -1  # not recorded: the whole vocabulary
    bounds = [0, WORDS] if runtime.layout.tp == 1 else [0, 20, WORDS]
    first, end = bounds[runtime.tp_rank], bounds[runtime.tp_rank + 1]
    mine, shard = hidden.clone().requires_grad_(), weight[first:end].clone().requires_grad_()
    group = parallel_state.get_tensor_model_parallel_group()
    labels = torch.cat([tokens[:, None], sets.long()], 1)
    sizes: dict[str, Any] = {
        "vocab_start": first,
        "vocab_shard_size": end - first,
        "chunk": 7,
        "group": group,
    }
    output = vocab_parallel_logprobs(mine, shard, labels, temperature=TEMPERATURE, sums_squares=True, **sizes)
    logprobs, entropy, squared_probs = renormalise(output, labels)
    (logprobs * factors + entropy * entropy_factors).sum().backward()
    dist.all_reduce(mine.grad, group=group)

    expected, d_logits, logits = looped(hidden, weight, tokens.tolist(), sets.tolist())
    table = logits.log_softmax(-1)
    expected_entropy = -(table.exp() * table).sum(-1)
    onehot = torch.zeros_like(table).scatter_(1, tokens[:, None], 1.0)
    expected_squares = (onehot - d_logits).square().sum(-1)
    d_logits *= factors[:, None]
    d_logits -= entropy_factors[:, None] * table.exp() * (table + expected_entropy[:, None])
    d_logits /= TEMPERATURE
    return [
        (logprobs.detach(), expected),
        (entropy.detach(), expected_entropy),
        (squared_probs.detach(), expected_squares),
        (mine.grad, d_logits @ weight.double()),
        (shard.grad, (d_logits.T @ hidden.double())[first:end]),
    ]


@pytest.mark.parametrize("tp", [1, 2])
def test_logprobs_and_gradients_are_those_of_a_loop(ranks: Ranks, tp: int) -> None:
    for results in ranks(tp, 1, 1).run(head_case):
        for found, expected in results:
            assert torch.allclose(found.double(), expected, rtol=1e-5, atol=1e-5)


def make_engine(folder: Path, max_batch: int = 256) -> TransformersEngine:
    engine = TransformersEngine(folder, eos_ids=(1,), max_batch=max_batch)
    engine.start()
    load_folder(engine)
    return engine


@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 1, 1)], ids=str)
@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_the_mismatch_vanishes_with_replay(
    ranks: Ranks, tmp_path: Path, layout: tuple[int, int, int], top_p: float
) -> None:
    """The engine's log-probs equal the trainer's with the sets, and are far off without."""
    folder = make_tiny_model(tmp_path / "model", "qwen3", vocab=VOCAB)
    prompts = [[3 + i, 20, 21 + i] for i in range(8)]
    params = SamplingParams(30, 0.8, top_p, 5, sampling_sets=True)
    requests = [GenerationRequest(tuple(prompt), seed) for seed, prompt in enumerate(prompts)]
    responses = make_engine(folder).generate(requests, params)
    theirs = torch.tensor([x for data in responses for x in data.logprobs.tolist()])
    arguments: dict[str, Any] = {"folder": folder, "prompts": prompts, "temperature": 0.8}
    arguments["responses"] = [data.tokens.tolist() for data in responses]
    sets = torch.from_numpy(pack(prompts, responses))
    replayed, entropy = ranks(*layout).run(jobs.logprobs, sets=sets, **arguments)[0]
    plain, plain_entropy = ranks(*layout).run(jobs.logprobs, **arguments)[0]
    assert (replayed - theirs).abs().max() <= 1e-4
    assert (plain - theirs).abs().mean() > 0.5
    assert torch.equal(entropy, plain_entropy), "the entropy is of the whole distribution"


def pack(prompts: list[list[int]], responses: list[TokenData]) -> np.ndarray:
    width = max(data.sampling_sets.shape[1] for data in responses if data.sampling_sets is not None)
    parts = []
    for prompt, data in zip(prompts, responses, strict=True):
        assert data.sampling_sets is not None and data.sampling_sets.dtype == np.int32
        part = np.full((len(prompt) + data.num_tokens, width), -1, np.int32)
        part[len(prompt) :, : data.sampling_sets.shape[1]] = data.sampling_sets
        parts.append(part)
    return np.concatenate(parts)


@pytest.mark.parametrize(
    "layout", [(2, 1, 1), (1, 2, 2), pytest.param((1, 1, 1, 1, 2), marks=pytest.mark.slow)], ids=str
)
def test_gradients_with_replay_do_not_depend_on_the_layout(
    ranks: Ranks, tmp_path: Path, layout: tuple[int, ...]
) -> None:
    """Policy, KL and entropy terms; some responses have observations. The last layout splits the context."""
    folder, batch = (
        make_tiny_model(tmp_path / "model", "qwen3", vocab=VOCAB, layers=4),
        make_batch(turns=True),
    )
    arguments: dict[str, Any] = {"folder": folder, "which": "actor"}
    options: dict[str, Any] = {"clip_high": 0.28, "kl_weight": 0.1, "entropy_weight": 0.2}
    alone = {**options, "budget": 10_000}
    free = ranks(1, 1, 1).run(jobs.gradients, batch=batch, options=alone, **arguments)[0]["gradients"]
    batch["sampling_sets"] = random_sets(batch.tokens, VOCAB, WIDTH)
    expected = ranks(1, 1, 1).run(jobs.gradients, batch=batch, options=alone, **arguments)[0]["gradients"]
    assert relative_difference(free, expected) > 0.1, "other log-probs, other gradients"
    found = ranks(*layout).run(jobs.gradients, batch=batch, options={**options, "budget": 34}, **arguments)[0]
    assert relative_difference(found["gradients"], expected) <= 1e-5


def test_the_engine_samples_alike_with_and_without_recording(tmp_path: Path) -> None:
    """Sets are independent of batch composition, contain the token, and survive continued responses."""
    folder = make_tiny_model(tmp_path / "model", "qwen3", vocab=VOCAB)
    engine = make_engine(folder, max_batch=4)
    params = SamplingParams(24, 1.0, 0.9, 7)
    requests = [GenerationRequest((5, 6 + i % 3, 7), seed) for seed, i in enumerate(range(9))]
    plain = engine.generate(requests, params)
    recording = replace(params, sampling_sets=True)
    found = engine.generate(requests, recording)
    assert [a.tokens.tolist() for a in plain] == [b.tokens.tolist() for b in found]
    assert all(a.sampling_sets is None for a in plain)
    for request, whole in zip(requests, found, strict=True):
        assert whole.sampling_sets is not None and whole.sampling_sets.shape[1] <= 7
        assert (whole.sampling_sets == whole.tokens[:, None]).any(1).all()
        assert engine.generate([request], recording) == [whole]
        if whole.num_tokens > 3:
            begun = whole.first(3, len(request.prompt_tokens))
            [continued] = engine.generate([replace(request, prefix=begun)], recording)
            assert continued.tokens.tolist() == whole.tokens.tolist()
            assert np.array_equal(continued.sampling_sets, whole.sampling_sets)
