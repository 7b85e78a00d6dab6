"""reasoning-gym's tasks as an environment: megarl_tasks.gym_environment:GymEnvironment."""

from __future__ import annotations

from typing import Any

from megarl.rewards.verdict import Verdict
from megarl_tasks.gym_scorer import verify


class GymEnvironment:
    """A question with `tries` answers, of which the last counts."""

    def __init__(self, tries: int = 1) -> None:
        if tries < 1:
            raise ValueError(f"tries: must be >= 1 (got {tries})")
        self.tries = tries

    def reset(self, row: dict[str, Any], seed: int) -> str:
        """Return the question. row: a megarl.data.generated:GeneratedRow as a dict."""
        self.entry, self.left, self.last = str(row["entry"]), self.tries, Verdict(False, score=0.0)
        return str(row["question"])

    def step(self, text: str) -> tuple[str, float, bool]:
        self.last, self.left = verify(text, self.entry), self.left - 1
        done = self.last.correct or self.left <= 0
        return "" if done else "wrong, try again", 0.0, done

    def verdict(self) -> Verdict:
        return self.last
