"""An episode that calls a tool, and an environment, for runs with an untrained model.

Both work for some milliseconds, so that a fault can hit them at work."""

from __future__ import annotations

import time
import zlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megarl.agents.episode import Policy
    from megarl.data.prompts import Prompt


def weigh(text: str) -> int:
    """Work for some milliseconds, and return a number below 50 that depends on the text alone."""
    end = time.process_time() + 0.02
    while time.process_time() < end:
        pass
    return zlib.crc32(text.encode("utf-8", "surrogatepass")) % 50


async def ask(prompt: Prompt, policy: Policy) -> None:
    """Weigh the policy's text, show it the weight and let it continue; twice."""
    for _ in range(2):
        turn = await policy.generate(max_tokens=5)
        policy.observe(f" {await policy.call(weigh, turn.text)} ")
    await policy.generate()


class Scales:
    """Show the sum of the weights of all texts, and reward each text, until three are weighed."""

    def reset(self, row: dict[str, Any], seed: int) -> str:
        self.weights = [seed % 50]
        return str(row["question"])

    def step(self, text: str) -> tuple[str, float, bool]:
        self.weights.append(weigh(text))
        return f" {sum(self.weights)} ", self.weights[-1] / 100, len(self.weights) == 4

    def verdict(self) -> bool:
        return sum(self.weights) % 4 == 0
