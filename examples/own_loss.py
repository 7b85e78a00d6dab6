"""A policy loss of your own: Simple Policy Optimization (arXiv 2401.16025).

    python examples/own_loss.py

prints its gradient next to that of PPO's clip. `algorithm.surrogate` takes only names that megarl knows. To
train with a loss of your own, give it a file and a row in megarl: docs/extending.md, "A policy loss".
"""

from __future__ import annotations

import torch

from megarl.algorithms.losses import Objective, Surrogate, Tokens, policy_loss, ppo


def simple(t: Tokens) -> Objective:
    """Return r_t A_t - |A_t| (r_t - 1)^2 / (2 epsilon) (arXiv 2401.16025)."""
    away = (t.ratio - 1).square() / (2 * t.clip_high)
    return Objective(t.ratio * t.advantage - t.advantage.abs() * away, t.ratio < t.low, t.ratio > t.high)


def gradient(surrogate: Surrogate, ratio: float, advantage: float, clip: float = 0.2) -> float:
    """Return the loss's derivative by the log-prob of one token, at a ratio of new to old probability."""
    old = torch.tensor([-1.0], dtype=torch.float64)
    new = (old + torch.tensor([ratio], dtype=torch.float64).log()).requires_grad_()
    weights = torch.ones(1)  # of each token in the sum: 1 / the number of tokens, here one
    loss, _ = policy_loss(new, old, torch.tensor([advantage]), weights, clip, clip, surrogate=surrogate)
    [found] = torch.autograd.grad(loss, new)
    return float(found)


if __name__ == "__main__":
    print("ratio    clip  simple   of a token with advantage 1")
    for ratio in (0.6, 0.8, 1.0, 1.2, 1.4):
        print(f"{ratio:5.1f} {gradient(ppo, ratio, 1.0):7.3f} {gradient(simple, ratio, 1.0):7.3f}")
