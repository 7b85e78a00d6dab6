"""Single-stream Policy Optimization (arXiv 2509.13232): each prompt's success rate is its baseline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class SuccessTracker:
    """Each prompt's success rate, from earlier answers: the mean a / (a + b) of Beta(a, b).

    A step with r right and w wrong answers to the prompt replaces a by rho a + r and b by rho b + w. So about
    the prompt's last 1 / (1 - rho) steps count. As verl-recipe's spo_ray_trainer.py, with constant rho and no
    offline samples.

    counts  uid of a prompt -> (a, b); PRIOR if absent"""

    PRIOR = (0.5, 0.5)

    def __init__(self, rho: float) -> None:
        self.rho = rho
        self.counts: dict[int, tuple[float, float]] = {}

    def chances(self, prompts: Tensor) -> Tensor:
        """Return each prompt's success rate, float64 [n]. prompts: int64 [n], uids."""
        counts = [self.counts.get(uid, self.PRIOR) for uid in prompts.tolist()]
        return torch.tensor([a / (a + b) for a, b in counts], dtype=torch.float64)

    def observe(self, prompts: Tensor, correct: Tensor) -> None:
        """Count a step's answers. prompts: int64 [n], uids; correct: bool [n]."""
        answers: dict[int, list[int]] = {}
        for uid, right in zip(prompts.tolist(), correct.tolist(), strict=True):
            answers.setdefault(uid, [0, 0])[0 if right else 1] += 1
        for uid, (right, wrong) in answers.items():
            a, b = self.counts.get(uid, self.PRIOR)
            self.counts[uid] = (self.rho * a + right, self.rho * b + wrong)

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the state."""
        right, wrong = ([count[i] for count in self.counts.values()] for i in (0, 1))
        return {"prompts": list(self.counts), "right": right, "wrong": wrong}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`."""
        counts = zip(state["right"], state["wrong"], strict=True)
        self.counts = dict(zip(state["prompts"], counts, strict=True))
