"""Which experts a mixture's routers choose: the engine's choice in the place of their own (routing replay,
R3, arXiv 2510.11370), and how evenly the experts are loaded.

Megatron-core asks a router's `router_replay` for the choice, and has a class for it (RouterReplay in
transformer/moe/router_replay.py). Its instances are in one list for all models of a process, every token must
have a recorded choice, and recomputation takes choices from a queue. Here the choice travels with the pack,
which a layer is given again when it is recomputed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class Routing:
    """The choice of one layer's router. It has the one method that Megatron calls of a RouterReplay.

    layer     number among all layers of the model, from 0
    tp_rank   which share of a pack's tokens this rank routes (sequence parallelism)
    packed    the pack that the layer is given, with two things on the host: `real_tokens`, bool [tokens] of
              this context-parallel rank, False on what fills the pack up (None: nothing does); and `routing`,
              the engine's choice, integers [layers, tokens, topk], no expert's where there is none, or None
    grad      count in passes with gradients, without, or not at all (None). Recomputation runs a layer twice,
              and once with gradients
    load      tokens of each expert, int64 [experts]
    compared  pairs (token, layer) of which the engine's choice is known, and those of which it differs from
              the router's own, int64 [2]
    """

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
        """Return the scores of the chosen experts and their numbers, [tokens, topk] each, of this rank's
        scores [tokens, experts]. Scores are the router's own, so that gradients flow, whoever chooses."""
        values, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        chosen, here = own, slice(self.tp_rank * len(scores), (self.tp_rank + 1) * len(scores))
        counts = self.grad is not None and self.grad == torch.is_grad_enabled()
        if self.packed.routing is not None:
            recorded = self.packed.routing[self.layer, here].to(scores.device).long()
            known = recorded[:, :1] < scores.shape[1]
            chosen = torch.where(known, recorded, own)
            values = scores.gather(1, chosen)
            if counts:  # what fills the pack up has no recorded choice
                same = (own[:, :, None] == recorded[:, None, :]).any(-1).all(-1, keepdim=True)
                self.compared += torch.stack([known.sum(), (known & ~same).sum()])
        if counts:
            real = self.packed.real_tokens
            ones = torch.ones_like(chosen) if real is None else real[here, None].to(chosen).expand_as(chosen)
            self.load.index_add_(0, chosen.flatten(), ones.flatten())
        return values, chosen


def watch_routers(model: Any, device: torch.device) -> list[Routing]:
    """Put a Routing into each router of a Megatron model, and return them; [] for a dense model. They count
    on `device`, where the model will be: Megatron builds routers on the CPU whatever the device is."""
    config, found = model.config, []
    mixtures = [layer for layer in model.decoder.layers if hasattr(layer.mlp, "router")]
    for layer in mixtures:
        router = layer.mlp.router
        tp_rank = model.pg_collection.tp.rank() if config.sequence_parallel else 0
        routing = Routing(layer.layer_number - 1, tp_rank, config.num_moe_experts, device)

        def before(_layer: Any, _arguments: Any, named: dict[str, Any], routing: Routing = routing) -> None:
            routing.packed = named["packed_seq_params"]

        router.router_replay = routing
        layer.register_forward_pre_hook(before, with_kwargs=True)
        found.append(routing)
    return found


def start_counting(routings: Sequence[Routing], *, grad: bool) -> None:
    """Count from zero."""
    for routing in routings:
        routing.grad = grad
        routing.load.zero_()
        routing.compared.zero_()


def routing_counts(routings: Sequence[Routing], layers: int, experts: int) -> Tensor:
    """Return what this rank has counted and stop counting: float64 [layers, experts + 2] on the host, load
    and compared in one, zeros in other stages' layers and in dense ones; to be summed over all ranks."""
    counts = torch.zeros(layers, experts + 2, dtype=torch.float64)
    for routing in routings:
        routing.grad = None
        counts[routing.layer] = torch.cat([routing.load, routing.compared]).cpu().double()
    return counts


def routing_metrics(counts: Tensor, topk: int) -> dict[str, float]:
    """Return router/* from the counts of all ranks, and mismatch/routing where the engine's choice is known.
    counts: of mixtures alone; topk: experts of a token.

    load_max      load of the busiest expert, with the mean load as 1, mean over the layers
    load_entropy  entropy of the load over its largest, the logarithm of the number of experts, likewise
    unused        share of (layer, expert) that no token went to
    replayed      share of (layer, token) with the engine's choice in the place of the router's
    mismatch/routing  share of these for which the router would have chosen other experts"""
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
