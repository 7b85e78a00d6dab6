"""SPPO (arXiv 2604.08865): a critic that reads prompts alone."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.scores import explained_variance, variance_sums
from megarl.config.schema import Config
from megarl.data.batch import TrainBatch
from megarl.parallel.comm import sum_over_replicas
from megarl.parallel.runtime import Runtime
from megarl.training.columns import expected_reward, write_advantages


def add_prompt_advantages(config: Config, batch: TrainBatch, runtime: Runtime) -> dict[str, float]:
    """Write advantages [T], R - sigmoid(V) for R in {0, 1}; also call `add_prompt_returns`."""
    metrics, chances = add_prompt_returns(batch, runtime)
    advantages = batch["rewards"].double() - expected_reward(config.reward, chances)
    write_advantages(config.algorithm, batch, batch.spread(advantages.float()), runtime)
    return metrics


def add_prompt_returns(batch: TrainBatch, runtime: Runtime) -> tuple[dict[str, float], Tensor]:
    """Write returns [T], the critic's targets: 1 at the first token of a right response, else 0.

    Also return the critic's chances sigmoid(V), float64 [n]; 1/2 for ungraded responses."""
    nonempty = batch.response_lengths > 0
    first_tokens = (batch.cu_seqlens[:-1] + batch.prompt_lengths)[nonempty]
    chances = torch.full((batch.num_sequences,), 0.5, dtype=torch.float64)
    chances[nonempty] = batch["values"][first_tokens].double().sigmoid()
    correct = batch["correct"].double()
    batch["returns"] = torch.zeros(batch.num_tokens).index_copy_(0, first_tokens, correct[nonempty].float())
    variance = sum_over_replicas(runtime, variance_sums(correct, chances, nonempty))
    return {"value/explained_variance": explained_variance(variance)}, chances
