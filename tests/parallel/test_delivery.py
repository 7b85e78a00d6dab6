"""Delivery of a step's batch from the ranks that sampled it to those that train on it.

Each rank gets its share as if it were selected from the full batch, whichever ranks own the responses."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch

from megarl.data.batch import RolloutBatch, TrainBatch
from megarl.parallel.delivery import deliver, row_bytes
from megarl.parallel.runtime import Runtime
from tests.ranks import RankPool

CASES = 24


def whole_batch(seed: int) -> TrainBatch:
    """Make random sequences; some batches have token versions, choices of experts, or observations."""
    chance, g = random.Random(seed), torch.Generator().manual_seed(seed)
    n = chance.choice([0, 1, 3, 17])
    prompts = [[chance.randrange(200_000) for _ in range(chance.randint(1, 4))] for _ in range(n)]
    whole = TrainBatch.build(
        prompts, [[chance.randrange(200_000) for _ in range(chance.randint(1, 9))] for _ in range(n)]
    )
    if chance.random() < 0.5:  # the last token remains the policy's
        shown = torch.rand(whole.num_tokens, generator=g) < 0.5
        shown[whole.cu_seqlens[1:] - 1] = False
        whole.response_mask &= ~shown
    mask, total = whole.response_mask, whole.num_tokens
    whole["engine_logprobs"] = torch.where(mask, torch.randn(total, generator=g), 0.0)
    if chance.random() < 0.5:
        versions = torch.randint(0, 9, (total,), generator=g, dtype=torch.int32)
        whole["token_versions"] = torch.where(mask, versions, 0).to(torch.int32)
    if chance.random() < 0.5:
        kind = chance.choice([torch.uint8, torch.int16])
        whole["routing"] = torch.randint(0, 99, (total, 3, 2), generator=g).to(kind)
    if chance.random() < 0.5:
        sets = torch.randint(-1, 99, (total, 5), generator=g, dtype=torch.int32)
        whole["sampling_sets"] = torch.where(mask[:, None], sets, 0)
    whole["rewards"] = torch.randn(n, generator=g)
    return whole


def held_by(whole: TrainBatch, owners: torch.Tensor, rank: int) -> RolloutBatch:
    """Return a rank's part of the batch before delivery."""
    rows = (owners == rank).nonzero().squeeze(-1)
    of_sequences = {"rewards": whole["rewards"]}
    own = whole.select(rows)
    own.columns.pop("rewards")
    lengths = whole.lengths, whole.response_lengths, whole.prompt_lengths
    return RolloutBatch(*lengths, owners, of_sequences, rows, own)


def deliver_cases(runtime: Runtime) -> list[int]:
    """Check on each rank that its share equals a selection; return the full batch's bytes in each case."""
    found = []
    for seed in range(CASES):
        chance, whole = random.Random(seed), whole_batch(seed)
        # Four ranks in replicas of 4, 2 or 1, or two of them separate from those that sample.
        replicas, drawing = chance.choice(
            [
                ([[0, 1, 2, 3]], [0, 1, 2, 3]),
                ([[0, 2], [1, 3]], [0, 2]),
                ([[0], [1], [2], [3]], [0, 1, 2, 3]),
                ([[0], [1]], [2, 3]),
                ([[0, 1]], [3]),
            ]
        )
        n = whole.num_sequences
        owners = torch.tensor([chance.choice(drawing) for _ in range(n)], dtype=torch.int64)
        order = chance.sample(range(n), n)
        shares = [order[d :: len(replicas)] for d in range(len(replicas))]
        batch = held_by(whole, owners, runtime.rank)
        local = deliver(runtime, batch, shares, replicas)
        mine = next((d for d, members in enumerate(replicas) if runtime.rank in members), None)
        expected = whole.select(shares[mine] if mine is not None else [])
        assert local.columns.keys() == expected.columns.keys(), seed
        for name in ("tokens", "cu_seqlens", "response_mask", *expected.columns):
            one, other = (getattr(e, name) if name not in e else e[name] for e in (local, expected))
            assert one.dtype == other.dtype and torch.equal(one, other), (seed, name)
        found.append(int(row_bytes(batch).sum()))
        behind = batch.lengths - batch.prompt_lengths
        of_token = {"engine_logprobs": 4, "token_versions": 4, "sampling_sets": 20}
        entry = sum(size for name, size in of_token.items() if name in whole)
        # the mask is sent only if responses have observations
        entry += not torch.equal(behind, batch.response_lengths)
        routing = whole["routing"][0].nbytes if "routing" in whole and n else 0
        assert row_bytes(batch).tolist() == ((4 + routing) * batch.lengths + entry * behind).tolist()
    return found


def test_each_rank_gets_its_share_as_it_was(ranks: Callable[..., RankPool]) -> None:
    found = ranks(2, 2, 1).run(deliver_cases)
    assert all(each == found[0] for each in found) and max(found[0]) > 500
