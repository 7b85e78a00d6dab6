"""Measure balanced packing at the size of published runs.

Responses are assigned to ranks by estimated cost, and each rank's share to micro-batches by token budget.
Lengths are log-normal, cut at 20,480 tokens. Waste is the unused share of the micro-batches' token budget.
The cost of a rank is the sum of its samples' costs (linear layers and attention of Qwen2.5-32B).

Training plans each mini-batch separately. The second case has mini-batches of 512 samples, 32 per rank, where
each rank's last micro-batch is filled at random.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time

from measure import Verdicts, machine

from megarl.config.schema import UpdateConfig
from megarl.data.packing import balance, cost, even_length, pack

Plan = list[list[list[int]]]  # rank, micro-batch, index
HIDDEN, LAYERS, MATRICES = 5120, 64, 18.6  # Qwen2.5-32B; matrix parameters of a layer / hidden^2


def draw(count: int, seed: int) -> list[int]:
    """Sample response lengths with median 5,000 tokens; about one in 25 is cut at 20,480."""
    rng = random.Random(seed)
    return [max(16, min(20480, int(rng.lognormvariate(math.log(5000), 0.8)))) for _ in range(count)]


def costs_of(lengths: list[int]) -> list[float]:
    return cost(lengths, even_length((round(LAYERS * MATRICES * HIDDEN**2), LAYERS * HIDDEN)))


def plan(lengths: list[int], ranks: int, budget: int) -> Plan:
    """Plan each rank's micro-batches as `distribute` and `make_micro_batches` do."""
    shares = balance(costs_of(lengths), ranks)
    return [
        [[share[i] for i in group] for group in pack([lengths[i] for i in share], budget)] for share in shares
    ]


def imbalance(plan: Plan, lengths: list[int]) -> float:
    """Return the slowest rank's cost / the mean."""
    costs = costs_of(lengths)
    ranks = [sum(costs[i] for group in rank for i in group) for rank in plan]
    return max(ranks) / statistics.mean(ranks)


def waste(plan: Plan, lengths: list[int], budget: int) -> float:
    groups = [group for rank in plan for group in rank]
    return 1 - sum(lengths[i] for group in groups for i in group) / (budget * len(groups))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=8192)
    parser.add_argument("--ranks", type=int, default=16)
    budget = UpdateConfig().tokens_per_micro_batch
    parser.add_argument(
        "--budget",
        type=int,
        default=budget,
        help="tokens per micro-batch (default: update.tokens_per_micro_batch)",
    )
    parser.add_argument("--mini-batch", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5, help="the fastest of so many counts")
    args = parser.parse_args()

    print(f"{machine()}\n{args.samples} samples, {args.ranks} ranks, micro-batches of {args.budget} tokens")
    lengths = draw(args.samples, seed=0)
    plans, seconds = [], []
    for _ in range(args.repeats):
        start = time.perf_counter()
        plans.append(plan(lengths, args.ranks, args.budget))
        seconds.append(time.perf_counter() - start)
    whole, verdicts = plans[0], Verdicts()
    verdicts.at_most("packing, token budget left empty", 100 * waste(whole, lengths, args.budget), 2, " %")
    verdicts.at_most("packing, slowest rank / mean", imbalance(whole, lengths), 1.03, " x")
    verdicts.at_most("packing, time to plan", min(seconds), 1, " s")
    verdicts.holds("packing, the same plan each time", all(other == whole for other in plans))
    placed = sorted(i for rank in whole for group in rank for i in group)
    full = all(
        sum(lengths[i] for i in group) <= args.budget or len(group) == 1 for rank in whole for group in rank
    )
    verdicts.holds(
        "packing, every sample once, no micro-batch over its budget",
        placed == list(range(args.samples)) and full,
    )

    parts = [lengths[i : i + args.mini_batch] for i in range(0, args.samples, args.mini_batch)]
    small = [plan(part, args.ranks, args.budget) for part in parts]
    empty = statistics.mean(waste(p, part, args.budget) for p, part in zip(small, parts, strict=True))
    uneven = [imbalance(p, part) for p, part in zip(small, parts, strict=True)]
    longest = [max(map(len, p)) / statistics.mean(map(len, p)) for p in small]
    print(
        f"\nIn mini-batches of {args.mini_batch} (no target): {100 * empty:.1f} % of the budget empty; "
        "slowest rank / mean by cost:"
    )
    print(
        f"mean {statistics.mean(uneven):.4f}, worst {max(uneven):.4f}; most micro-batches / mean: "
        f"{statistics.mean(longest):.3f}."
    )
    print(
        "What is left empty here costs no time: a micro-batch is as long as its samples, and is not padded "
        "to the budget."
    )
    return verdicts.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
