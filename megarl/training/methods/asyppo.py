"""AsyPPO (arXiv 2510.01656): what the agreement of several critics decides."""

from __future__ import annotations

import torch

from megarl.config.schema import AgreementConfig
from megarl.data.batch import TrainBatch
from megarl.parallel.comm import find_among_smallest, sum_over_replicas
from megarl.parallel.runtime import Runtime


def add_agreement(config: AgreementConfig, batch: TrainBatch, runtime: Runtime) -> dict[str, float]:
    """Set advantages [T] to 0 where the critics agree most.

    The standard deviation of critic_values [T, m] decides. `mask` is the share of tokens whose advantage
    becomes 0. With `filter`, write entropy_weights [T]: the weights before any mismatch correction, but 0 at
    the share on which the critics agree least. Denominators do not change. Tokens with equal deviations are
    all selected or none, so shares are upper bounds."""
    weights = batch["policy_loss_weights"]
    in_loss = weights > 0
    spread = batch["critic_values"].double().std(-1, correction=0).float()
    keys = spread.view(torch.int32)[in_loss]  # the bits of non-negative floats have the floats' order
    sums = torch.stack([in_loss.sum().double(), spread[in_loss].double().sum()])
    tokens, total = sum_over_replicas(runtime, sums).tolist()
    metrics, masks = {"value/spread": total / max(tokens, 1)}, {}
    for name, share, sort_keys in (
        ("agreed", config.mask, keys),
        ("disputed", config.filter, torch.iinfo(keys.dtype).max - keys),
    ):
        masks[name] = in_loss.clone()
        masks[name][in_loss] = find_among_smallest(runtime, sort_keys, int(share * tokens))
        count = float(sum_over_replicas(runtime, masks[name].sum()))
        metrics[f"policy/{name}"] = count / max(tokens, 1)
    batch["advantages"] = batch["advantages"].masked_fill(masks["agreed"], 0.0)
    if config.filter:
        if "uncorrected_weights" in batch:
            weights = batch["uncorrected_weights"]
        batch["entropy_weights"] = weights.masked_fill(masks["disputed"], 0.0)
    return metrics
