"""A reward of your own: a verifier that grades, and a term that is added to it.

    make demo RECIPE=dapo
    PYTHONPATH=examples megarl train examples/own_reward.yaml

Both functions run in sandboxed processes with limits. They must depend on their arguments only, because a run
that was killed calls them again. docs/your_own_task.md has the rules.
"""

from __future__ import annotations

from megarl.rewards.verdict import GradedResponse, Verdict
from megarl_verifier.answer import find_answer


def near(response: str, answer: str) -> Verdict:
    """Grade the last `Answer:` line: 1 for the reference answer, less the further away the number is."""
    found = find_answer(response)
    if found is None or not found.removeprefix("-").isdecimal():
        return Verdict(correct=False)
    distance = abs(int(found) - int(answer))
    return Verdict(correct=distance == 0, extracted=str(int(found)), score=1 / (1 + distance))


def brevity(response: GradedResponse) -> float:
    """Return 1 for an empty response, 0 for one of `rollout.max_response_tokens` and for wrong ones."""
    return (1 - response.length / response.longest) * response.verdict.correct
