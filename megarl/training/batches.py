"""From a step's whole batch to this replica's share: mini-batches, global denominators, balanced sequences, micro-batches."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algorithms.weights import counts, token_weights
from megarl.config.schema import Config
from megarl.data.experience import Experience
from megarl.data.packing import balance, cost
from megarl.model.builder import Actor, Critic
from megarl.parallel.runtime import Runtime
from megarl.training.micro_batch import MicroBatch, make_micro_batches


@dataclass
class LocalBatch:
    """The sequences that this data-parallel replica trains on, and its micro-batches of each mini-batch, in update order."""

    experience: Experience
    mini_batches: list[list[MicroBatch]]

    @property
    def micro_batches(self) -> list[MicroBatch]:
        """Those of all mini-batches: what a forward pass over the whole share takes."""
        return [batch for mini_batch in self.mini_batches for batch in mini_batch]


def mini_batch_ids(sequences: int, mini_batch: int, seed: int) -> Tensor:
    """Which mini-batch each sequence belongs to, int64 [n]: a shuffle that depends on the seed alone, not on the layout."""
    order = torch.randperm(sequences, generator=torch.Generator().manual_seed(seed))
    ids = torch.empty(sequences, dtype=torch.int64)
    ids[order] = torch.arange(sequences) // mini_batch
    return ids


def add_weights(experience: Experience, ids: Tensor, config: Config) -> None:
    """Writes policy_weights, nll_weights and value_weights, float32 [T]: the denominators of every loss term, global over
    each mini-batch (DESIGN.md, "Numbers that must hold everywhere"). Reads correct and truncated."""
    kept = ~experience["truncated"] if config.reward.overlong.filter else torch.ones_like(experience["truncated"])
    aggregation = config.algorithm.aggregation
    terms = {
        "policy_weights": (kept, aggregation),
        "nll_weights": (kept & experience["correct"], "token"),
        "value_weights": (kept, "token"),
    }
    sequence_ids = experience.sequence_ids
    for name, (included, how) in terms.items():
        column = torch.zeros(experience.num_tokens)
        for mini_batch in ids.unique():
            include = included & (ids == mini_batch)
            tokens, responses = counts(experience.response_mask, sequence_ids, include).tolist()
            column += token_weights(experience.response_mask, sequence_ids, how, tokens, responses, include)
        experience[name] = column


def distribute(batch: Experience, config: Config, mini_batch: int, seed: int, model: Actor | Critic, runtime: Runtime) -> LocalBatch:
    """This replica's share of `batch`, which every rank holds whole. Every rank computes the same assignment."""
    ids = mini_batch_ids(batch.num_sequences, mini_batch, seed)
    add_weights(batch, ids, config)
    costs = cost(batch.lengths.tolist(), model.config.hidden_size)
    mine: list[list[int]] = []
    for number in range(int(ids.max()) + 1):
        members = (ids == number).nonzero().squeeze(-1).tolist()
        shares = balance([costs[i] for i in members], runtime.layout.dp)
        mine.append([members[i] for i in shares[runtime.dp_rank]])
    local = batch.select([i for share in mine for i in share])
    mini_batches, first = [], 0
    for share in mine:
        indices = list(range(first, first + len(share)))
        mini_batches.append(make_micro_batches(local, indices, config.update.tokens_per_micro_batch, model))
        first += len(share)
    return LocalBatch(local, mini_batches)
