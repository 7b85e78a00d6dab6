"""An episode of your own: two attempts at a problem, the second one after a hint.

    make demo RECIPE=dapo
    PYTHONPATH=examples megarl train examples/own_episode.yaml

A worker runs one such coroutine for each response, many at once. Only sampled tokens are trained on; the hint
is context. docs/episodes.md has the rules, and tools, environments and agents.
"""

from __future__ import annotations

from megarl.agents.episode import Policy
from megarl.data.prompts import Prompt
from megarl.rewards.verdict import Verdict
from megarl_verifier.answer import verify_dapo

HINT = "\nWait\n"


async def two_attempts(prompt: Prompt, policy: Policy) -> Verdict:
    """Score 1 for a right first answer, 0.5 for a right second one."""
    first = await policy.generate(max_tokens=40)
    right, extracted = verify_dapo(first.text, prompt.answer)
    if right:
        return Verdict(correct=True, extracted=extracted, score=1.0)
    policy.observe(HINT)
    second = await policy.generate()
    right, extracted = verify_dapo(second.text, prompt.answer)
    return Verdict(correct=right, extracted=extracted, score=0.5 if right else 0.0)
