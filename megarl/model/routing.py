"""Routing replay (R3, arXiv 2510.11370): use the engine's choice of experts, and count their load.

Megatron's RouterReplay keeps one list for all models, needs a choice for every token, and recomputes from a
queue. Here the choice is part of the pack, which recomputation passes to the layer again."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class Routing:
    """The choice of one layer's router.

    layer     index among all layers of the model
    tp_rank   index of this rank's share of tokens under sequence parallelism
    packed    the layer's pack, with two attributes on the host. `real_tokens`: bool [tokens] of this
              context-parallel rank, False on padding; None: no padding. `routing`: the engine's choice,
              integers [layers, tokens, topk], out of range where unknown, or None
    grad      count passes with gradients (True), without (False), or none (None). Recomputation does both
    load      tokens per expert, int64 [experts]
    compared  tokens with a known choice, and those where it differs from the router's, int64 [2]"""

    def __init__(self, layer: int, tp_rank: int, experts: int, device: torch.device) -> None:
        self.layer, self.tp_rank = layer, tp_rank
        self.packed: Any = None
        self.grad: bool | None = None
        self.load = torch.zeros(experts, dtype=torch.int64, device=device)
        self.compared = torch.zeros(2, dtype=torch.int64, device=device)

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Return scores by the router, and indices, of the chosen experts, [tokens, topk]."""
        values, router_choice = default_compute_topk(
            scores, topk, num_groups=num_groups, group_topk=group_topk
        )
        experts, tokens = router_choice, slice(self.tp_rank * len(scores), (self.tp_rank + 1) * len(scores))
        is_counting = self.grad is not None and self.grad == torch.is_grad_enabled()
        if self.packed.routing is not None:
            recorded = self.packed.routing[self.layer, tokens].to(scores.device).long()
            is_known = recorded[:, :1] < scores.shape[1]
            experts = torch.where(is_known, recorded, router_choice)
            values = scores.gather(1, experts)
            if is_counting:  # padding has no recorded choice
                is_equal = (router_choice[:, :, None] == recorded[:, None, :]).any(-1).all(-1, keepdim=True)
                self.compared += torch.stack([is_known.sum(), (is_known & ~is_equal).sum()])
        if is_counting:
            increments = torch.ones_like(experts)
            if self.packed.real_tokens is not None:
                increments *= self.packed.real_tokens[tokens, None].to(experts)
            self.load.index_add_(0, experts.flatten(), increments.flatten())
        return values, experts


def watch_routers(model: Any, device: torch.device) -> list[Routing]:
    """Put a Routing into each router of a model and return them. device: the model's later device."""
    config, routings = model.config, []
    mixture_layers = [layer for layer in model.decoder.layers if hasattr(layer.mlp, "router")]
    for layer in mixture_layers:
        router = layer.mlp.router
        tp_rank = model.pg_collection.tp.rank() if config.sequence_parallel else 0
        routing = Routing(layer.layer_number - 1, tp_rank, config.num_moe_experts, device)

        def save_pack(
            _layer: Any, _arguments: Any, named: dict[str, Any], routing: Routing = routing
        ) -> None:
            routing.packed = named["packed_seq_params"]

        router.router_replay = routing
        layer.register_forward_pre_hook(save_pack, with_kwargs=True)
        routings.append(routing)
    return routings


def start_counting(routings: Sequence[Routing], *, grad: bool) -> None:
    """Start counting from zero."""
    for routing in routings:
        routing.grad = grad
        routing.load.zero_()
        routing.compared.zero_()


def routing_counts(routings: Sequence[Routing], layers: int, experts: int) -> Tensor:
    """Stop counting and return this rank's counts, float64 [layers, experts + 2] on the host.

    The columns are load and compared. Dense layers and other stages are zero."""
    counts = torch.zeros(layers, experts + 2, dtype=torch.float64)
    for routing in routings:
        routing.grad = None
        counts[routing.layer] = torch.cat([routing.load, routing.compared]).cpu().double()
    return counts


def routing_metrics(counts: Tensor, topk: int) -> dict[str, float]:
    """Return router/* metrics, and mismatch/routing if the engine's choice is known.

    docs/families.md describes them.
    counts: sums over all ranks, only of mixture layers; topk: experts per token."""
    load, (known, different) = counts[:, :-2], counts[:, -2:].sum(0).tolist()
    experts, routed = load.shape[1], load.sum(1, keepdim=True).clamp(min=1)
    shares = load / routed
    entropy = -torch.special.xlogy(shares, shares).sum(1) / math.log(max(experts, 2))
    metrics = {
        "router/load_max": float((shares.amax(1) * experts).mean()),
        "router/load_entropy": float(entropy.mean()),
        "router/unused": float((load == 0).double().mean()),
    }
    if known:
        metrics["router/replayed"] = known * topk / float(load.sum())
        metrics["mismatch/routing"] = different / known
    return metrics
