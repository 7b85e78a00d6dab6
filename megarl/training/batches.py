"""From a step's whole batch to this replica's share: mini-batches, global denominators, balanced sequences, micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algorithms.advantages import response_lengths
from megarl.algorithms.weights import token_weights
from megarl.config.schema import Config
from megarl.data.experience import Experience
from megarl.data.packing import balance, cost, even_length, pack
from megarl.model.builder import Actor, Critic
from megarl.parallel.runtime import Runtime
from megarl.training.micro_batch import MicroBatch, make_micro_batches


@dataclass
class LocalBatch:
    """The sequences that this data-parallel replica trains on, and its micro-batches of each mini-batch of the actor and of the
    critic, in update order. Both cover all of the sequences; they are the same lists unless `critic.mini_batch` is set."""

    experience: Experience
    mini_batches: list[list[MicroBatch]]
    critic_mini_batches: list[list[MicroBatch]]

    @property
    def micro_batches(self) -> list[MicroBatch]:
        """Those of all mini-batches: what a forward pass over the whole share takes."""
        return [batch for mini_batch in self.mini_batches for batch in mini_batch]


def mini_batch_ids(sequences: int, mini_batch: int, seed: int) -> Tensor:
    """Which mini-batch each sequence belongs to, int64 [n]: a shuffle that depends on the seed alone, not on the layout. The
    mini-batches of one size are unions of those of a size that divides it."""
    order = torch.randperm(sequences, generator=torch.Generator().manual_seed(seed))
    ids = torch.empty(sequences, dtype=torch.int64)
    ids[order] = torch.arange(sequences) // mini_batch
    return ids


def add_weights(experience: Experience, ids: Tensor, critic_ids: Tensor, config: Config) -> None:
    """Writes policy_weights, nll_weights and value_weights, float32 [T]: the denominators of every loss term, global over
    each mini-batch (docs/design.md, "Numbers that must hold everywhere"). Reads correct and truncated.

    ids, critic_ids: int64 [n], the actor's and the critic's mini-batch of each sequence."""
    kept = ~experience["truncated"] if config.reward.overlong.filter else torch.ones_like(experience["truncated"])
    lengths, aggregation = response_lengths(experience.response_mask, experience.cu_seqlens), config.algorithm.aggregation
    experience["policy_weights"] = experience.spread(token_weights(lengths, aggregation, ids, kept))
    experience["nll_weights"] = experience.spread(token_weights(lengths, "token", ids, kept & experience["correct"]))
    experience["value_weights"] = experience.spread(token_weights(lengths, "token", critic_ids, kept))


def distribute(
    batch: Experience, config: Config, mini_batch: int, seed: int, models: Sequence[Actor | Critic], runtime: Runtime
) -> LocalBatch:
    """This replica's share of `batch`, which every rank holds whole. Every rank computes the same assignment.

    models: those that the share goes through, by whose shapes its cost is estimated."""
    critic_mini_batch = config.critic.mini_batch or mini_batch
    finest = min(mini_batch, critic_mini_batch)  # one divides the other (config/check.py): balanced parts make balanced unions
    ids, critic_ids, fine_ids = (mini_batch_ids(batch.num_sequences, size, seed) for size in (mini_batch, critic_mini_batch, finest))
    add_weights(batch, ids, critic_ids, config)
    costs = cost(batch.lengths.tolist(), even_length(*map(matrix_shape, models)))
    shares_of: list[list[list[int]]] = []  # by mini-batch and replica
    for number in range(int(fine_ids.max()) + 1):
        members = (fine_ids == number).nonzero().squeeze(-1).tolist()
        shares = balance([costs[i] for i in members], runtime.layout.dp)
        shares_of.append([[members[i] for i in share] for share in shares])
    mine = [shares[runtime.dp_rank] for shares in shares_of]
    local = batch.select([i for share in mine for i in share])
    stops = torch.tensor([0, *map(len, mine)]).cumsum(0).tolist()

    def divided(size: int) -> list[list[MicroBatch]]:
        parts = range(0, len(mine), size // finest)
        ranges = [range(stops[i], stops[min(i + size // finest, len(mine))]) for i in parts]
        budget, least = config.update.tokens_per_micro_batch, [1] * len(ranges)
        if runtime.layout.tp % runtime.layout.ep:  # experts are reached through other replicas: all replicas do as many passes
            lengths = batch.lengths.tolist()
            for number, i in enumerate(parts):
                theirs = [
                    [lengths[j] for shares in shares_of[i : i + size // finest] for j in shares[dp]] for dp in range(runtime.layout.dp)
                ]
                least[number] = max(len(pack(share, budget)) for share in theirs)
        return [make_micro_batches(local, own, budget, models[0], at_least=n) for own, n in zip(ranges, least, strict=True)]

    mini_batches = divided(mini_batch)
    return LocalBatch(local, mini_batches, mini_batches if critic_mini_batch == mini_batch else divided(critic_mini_batch))


def matrix_shape(model: Actor | Critic) -> tuple[int, int]:
    """(matrix parameters that a token goes through, query width) of a model's layers on all ranks, as `even_length` takes them."""
    c = model.config
    assert c.kv_channels is not None and c.num_query_groups is not None and c.ffn_hidden_size is not None
    queries, keys = c.num_attention_heads * c.kv_channels, c.num_query_groups * c.kv_channels
    mlp = 3 * c.ffn_hidden_size
    if c.num_moe_experts is not None:  # the router, and the experts that it chooses
        assert c.moe_ffn_hidden_size is not None
        mlp = c.num_moe_experts + 3 * c.moe_ffn_hidden_size * c.moe_router_topk
    return c.num_layers * c.hidden_size * (2 * queries + 2 * keys + mlp), c.num_layers * queries
