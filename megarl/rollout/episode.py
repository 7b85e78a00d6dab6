"""An episode: from a prompt to a response, as a coroutine. The worker (worker.py) runs one for each response,
many at once; what the policy wrote is verified and trained on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from megarl.data.prompts import Prompt
from megarl.rollout.engine import EngineClient
from megarl.rollout.sampling import Completion, SamplingParams


class EpisodeAborted(Exception):
    """The rollout has what it needs: what the policy has written so far goes on in a later one."""


class EpisodeTruncated(BaseException):
    pass


class ToolError(Exception):
    pass


@dataclass
class Policy:
    """The policy as one episode sees it.

    seed     of all that it draws
    written  what it has written, also in an earlier rollout that was aborted; None: nothing yet"""

    client: EngineClient
    seed: int
    params: SamplingParams
    written: Completion | None = None

    async def generate(self, tokens: tuple[int, ...]) -> Completion:
        """Return what the policy writes behind `tokens`. Raises EpisodeAborted where the rollout ends
        before."""
        if self.written is None or self.written.finish == "abort":
            written = await self.client.generate(tokens, self.seed, self.params, self.written)
            self.written = written if written.tokens else self.written
            if written.finish == "abort":
                raise EpisodeAborted
        assert self.written is not None
        return self.written


Episode = Callable[[Prompt, Policy], Awaitable[Completion]]


async def single_turn(prompt: Prompt, policy: Policy) -> Completion:
    """Let the policy answer once."""
    return await policy.generate(prompt.tokens)


def row_of(prompt: Prompt) -> dict:
    return {
        "uid": prompt.uid,
        "prompt": prompt.text,
        "question": prompt.question,
        "answer": prompt.answer,
        "data_source": prompt.source,
        "entry": prompt.entry,
        **prompt.extra,
    }
