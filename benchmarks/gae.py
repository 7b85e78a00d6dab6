"""Compare GAE on a packed rollout with the usual implementations.

These are loops over tokens (on tensors and on lists) and a loop over time on padded tensors. Prints ratios,
memory, the largest relative error, and CPU seconds, which depend less on other work than wall time does."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from measure import PeakMemory, Verdicts, machine
from torch import Tensor

from megarl.algorithms.advantages import gae, length_adaptive_lambda

Loop = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor | list[float]]


def rollout(
    responses: int, mean: int, longest: int, seed: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Make a rollout with log-normal response lengths, prompts of 50-200 tokens and reward +-1 at the end.

    Returns: rewards, values and response mask, [num_tokens]; cu_seqlens; response lengths"""
    generator = torch.Generator().manual_seed(seed)
    lengths = (0.9 * torch.randn(responses, generator=generator, dtype=torch.float64)).exp()
    for _ in range(20):  # the cut at `longest` lowers the mean: rescale
        lengths = (lengths * (mean / lengths.mean())).clamp(1, longest)
    lengths = lengths.long()
    prompts = torch.randint(50, 201, (responses,), generator=generator)
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), (prompts + lengths).cumsum(0)])
    total = int(cu_seqlens[-1])
    mask = torch.zeros(total, dtype=torch.bool)
    for start, end in zip((cu_seqlens[1:] - lengths).tolist(), cu_seqlens[1:].tolist(), strict=True):
        mask[start:end] = True
    values = torch.randn(total, generator=generator).mul_(0.3)
    rewards = torch.zeros(total)
    rewards[cu_seqlens[1:] - 1] = torch.randn(responses, generator=generator).sign()
    return rewards, values, mask, cu_seqlens, lengths


def list_loop(
    rewards: Tensor, values: Tensor, cu_seqlens: Tensor, lengths: Tensor, lam: Tensor
) -> list[float]:
    """Compute GAE token by token on lists of Python floats (float64), for response tokens only.

    This is several times faster than on tensors."""
    reward_list, value_list = rewards.tolist(), values.tolist()
    out = [0.0] * len(value_list)
    for end, length, decay in zip(cu_seqlens[1:].tolist(), lengths.tolist(), lam.tolist(), strict=True):
        advantage = next_value = 0.0
        for t in range(end - 1, end - length - 1, -1):
            advantage = reward_list[t] + next_value - value_list[t] + decay * advantage
            next_value = value_list[t]
            out[t] = advantage
    return out


def tensor_loop(rewards: Tensor, values: Tensor, cu_seqlens: Tensor, lengths: Tensor, lam: Tensor) -> Tensor:
    """Compute GAE token by token on tensors, as the papers' formula is usually implemented."""
    out = torch.zeros_like(values)
    for end, length, decay in zip(cu_seqlens[1:].tolist(), lengths.tolist(), lam.tolist(), strict=True):
        advantage = next_value = torch.tensor(0.0)
        for t in range(end - 1, end - length - 1, -1):
            advantage = rewards[t] + next_value - values[t] + decay * advantage
            next_value = values[t]
            out[t] = advantage
    return out


def pad(x: Tensor, cu_seqlens: Tensor, lengths: Tensor) -> Tensor:
    """Copy response tokens to a tensor [responses, longest], padded with 0."""
    out = torch.zeros(lengths.numel(), int(lengths.max()))
    for row, end, length in zip(out, cu_seqlens[1:].tolist(), lengths.tolist(), strict=True):
        row[:length] = x[end - length : end]
    return out


def padded_loop(rewards: Tensor, values: Tensor, mask: Tensor, lam: Tensor) -> Tensor:
    """Compute GAE by a loop over time on padded tensors, as common trainers do.

    All tensors are float32 [responses, longest]."""
    advantage = next_value = torch.zeros(rewards.shape[0])
    backwards = []
    for t in reversed(range(rewards.shape[1])):
        new = rewards[:, t] + next_value - values[:, t] + lam * advantage
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        advantage = torch.where(mask[:, t], new, advantage)
        backwards.append(advantage)
    return torch.stack(backwards[::-1], dim=1) * mask


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--responses", type=int, default=8192)
    parser.add_argument("--mean", type=int, default=4000, help="mean response length, tokens")
    parser.add_argument("--longest", type=int, default=20480, help="longest response, tokens")
    parser.add_argument(
        "--sample",
        type=int,
        default=256,
        help="responses of the loop on lists; its time is scaled up by tokens",
    )
    parser.add_argument("--repeats", type=int, default=3, help="the fastest of so many counts, for megarl")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    rewards, values, mask, cu_seqlens, lengths = rollout(args.responses, args.mean, args.longest, seed=0)
    lam = length_adaptive_lambda(lengths, alpha=0.05)
    tokens = int(lengths.sum())
    print(
        f"{args.responses} responses, {tokens / 1e6:.1f}M tokens, mean {tokens / args.responses:.0f}, "
        f"longest {int(lengths.max())}"
    )

    print(machine())
    peak, seconds = PeakMemory(), []
    for _ in range(args.repeats):
        start = time.process_time()
        ours = gae(rewards, values, mask, cu_seqlens, lam)
        seconds.append(time.process_time() - start)
    best = min(seconds)
    memory = peak.growth() / (rewards.numel() * 4)

    ratios: dict[str, float] = {}

    def report(name: str, wall: float, remark: str) -> None:
        ratios[name] = wall / best
        print(f"{name:27} {wall:8.2f} s {wall / best:7.1f} x  {remark}")

    report(
        "megarl",
        best,
        f"{tokens / best / 1e6:.1f}M tokens/s, peak memory + {memory:.1f} token-sized float32 arrays",
    )
    loops: list[tuple[str, Loop, int]] = [
        ("over tokens, on tensors", tensor_loop, 4),
        ("over tokens, on lists", list_loop, args.sample),
    ]
    for name, function, sample in loops:
        sample = min(sample, args.responses)
        end = int(cu_seqlens[sample])
        start = time.process_time()
        exact = function(
            rewards[:end], values[:end], cu_seqlens[: sample + 1], lengths[:sample], lam[:sample]
        )
        share = int(lengths[:sample].sum()) / tokens
        report(
            f"loop {name}",
            (time.process_time() - start) / share,
            f"{share:.2%} of the tokens were run, the time is scaled up",
        )

    padded_rewards, padded_values = pad(rewards, cu_seqlens, lengths), pad(values, cu_seqlens, lengths)
    padded_mask = torch.arange(padded_values.shape[1]) < lengths[:, None]
    start = time.process_time()
    other = padded_loop(padded_rewards, padded_values, padded_mask, lam.float())
    report(
        "loop over time, padded",
        time.process_time() - start,
        f"padding not counted; {padded_mask.numel() / tokens:.1f} x the entries",
    )

    reference = torch.as_tensor(exact, dtype=torch.float64)
    scale = reference.abs().clamp(min=1e-3)
    error = float(((ours[:end] - reference).abs() / scale).max())
    theirs = (other[:sample][padded_mask[:sample]] - reference[mask[:end]]).abs() / scale[mask[:end]]
    print(
        f"largest relative error against the float64 loop: megarl {error:.1e}, padded loop "
        f"{theirs.max():.1e}\n"
    )
    verdicts = Verdicts()
    verdicts.at_least(
        "GAE, loop over tokens on tensors / megarl", ratios["loop over tokens, on tensors"], 50, " x"
    )
    verdicts.at_least(
        "GAE, loop over tokens on Python lists / megarl", ratios["loop over tokens, on lists"], 50, " x"
    )
    verdicts.at_least("GAE, padded loop over time / megarl", ratios["loop over time, padded"], 3, " x")
    verdicts.at_most("GAE, memory in token-sized float32 arrays", memory, 4)
    verdicts.at_most("GAE, largest relative error", error, 1e-6, must=True)
    return verdicts.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
