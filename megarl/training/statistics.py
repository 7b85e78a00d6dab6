"""The numbers of a step's phases as metrics: global sums over replicas, turned into the fixed names."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megarl.algorithms.losses import loss_metrics
from megarl.data.experience import Experience
from megarl.parallel.comm import sum_over_replicas, sum_stats
from megarl.parallel.runtime import Runtime
from megarl.training.learner import Learner, Loss
from megarl.training.micro_batch import MicroBatch

TRAINING_PHASES = ("old_logprobs", "reference_logprobs", "values", "critic_update", "actor_update", "supervised_update")


def policy_statistics(experience: Experience, runtime: Runtime) -> dict[str, float]:
    """Generation entropy and mean probability of the sampled tokens, over all response tokens of the step."""
    mask = experience.response_mask
    probabilities = experience["old_logprobs"][mask].double().exp()
    local = torch.stack([mask.sum().double(), experience["entropy"][mask].double().sum(), probabilities.sum()])
    tokens, entropy, probability = sum_over_replicas(runtime, local).tolist()
    return {"policy/entropy": entropy / max(tokens, 1), "policy/mean_prob": probability / max(tokens, 1)}


def update_mini_batches(
    learner: Learner, mini_batches: Sequence[Sequence[MicroBatch]], loss: Loss, epochs: int, room: str, runtime: Runtime
) -> dict[str, float]:
    """`epochs` passes of optimizer steps over the mini-batches; the metrics of `room` ("policy" or "value")."""
    learner.begin_step()
    sums: dict[str, float] = {}
    norms: list[float] = []
    passes = [micro_batches for _ in range(epochs) for micro_batches in mini_batches]
    for number, micro_batches in enumerate(passes, start=1):
        result = learner.update(micro_batches, loss, more=number < len(passes))
        norms.append(result.grad_norm)
        for key, value in result.sums.items():
            sums[key] = sums.get(key, 0.0) + value
    metrics = loss_metrics(sum_stats(runtime, sums), updates=len(norms))
    # Entropy and mean probability are those of the rollout, before any update (policy_statistics).
    metrics = {k: v for k, v in metrics.items() if k not in ("policy/entropy", "policy/mean_prob")}
    return metrics | {f"{room}/grad_norm": sum(norms) / len(norms), f"{room}/lr": learner.lr}


def throughput(metrics: dict[str, float]) -> dict[str, float]:
    """Tokens per second of the whole job: response tokens generated, and tokens put through forward and update of the models."""
    rates = {}
    if metrics.get("time/rollout") and "rollout/tokens" in metrics and not metrics.get("rollout/reused"):
        rates["throughput/rollout_tokens"] = metrics["rollout/tokens"] / metrics["time/rollout"]
    training = sum(metrics.get(f"time/{name}", 0.0) for name in TRAINING_PHASES)
    if training and "train/tokens" in metrics:
        rates["throughput/train_tokens"] = metrics["train/tokens"] / training
    return rates
