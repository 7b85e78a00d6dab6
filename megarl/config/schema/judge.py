"""Section `reward.judge`."""

from __future__ import annotations

import os
from typing import Literal

from megarl.config.schema.section import Section, field

JUDGE = "judge"  # reward.verifier, and the judge's name among reward terms
CODE = "{code}"  # in `pattern`: the code that only this call has


class JudgeConfig(Section):
    """A language model behind an OpenAI-compatible endpoint that scores responses.

    With `reward.verifier: judge` it gives the verdict, else its score is a term of the reward."""

    url: str | None = field(
        None,
        "base URL of the endpoint, e.g. https://api.openai.com/v1 or http://127.0.0.1:30000/v1; "
        "null: no judge",
    )
    model: str = field("", "name of the model there")
    key_variable: str | None = field(
        None, "environment variable that holds the API key, on every node; null: no key"
    )
    weight: float = field(1.0, "factor of its score from 0 to 1 as a term; 0: only measured")
    template: str = field(
        "Judge the response to a question.\n\nThe question:\n{question}\n\nA correct answer:\n{reference}\n\n"
        "The response:\n{response}\n\nDoes the response answer the question correctly and completely? "
        "First give your reasons in a few sentences.",
        "the task of the judge; {question}, {reference} and {response} become quoted texts. "
        "megarl adds how quotes are marked and how to write the score",
    )
    format: Literal["line", "json"] = field(
        "line",
        "line: the reply ends with a score line, after reasons; json: the reply is an object {score}, "
        "which `response_format` forces on servers that support it",
    )
    pattern: str = field(
        r"(?i)[\W_]*score {code}:?[\s*_]*(-?\d+(?:\.\d+)?)[*_.\s]*",
        "regular expression of the whole score line; its first group is the number. {code} is a code of "
        "this call, which a response cannot know. With another pattern, `template` must describe the line",
    )
    lowest: float = field(0.0, "worst score")
    highest: float = field(10.0, "best score; others outside the range are refused")
    threshold: float = field(
        0.5, "a response is right from this share of the way from lowest to highest on", ge=0, le=1
    )
    reasoning: bool = field(False, "the judge also sees the text up to the last </think>")
    max_response_chars: int = field(
        20_000, "a longer response is shown without its middle, with a note", "characters", ge=100
    )
    votes: int = field(1, "calls for each response, with different seeds", ge=1)
    combine: Literal["mean", "majority"] = field(
        "mean", "of votes: the mean score, or 1 if more than half reach the threshold and else 0"
    )
    temperature: float = field(0.0, "of the judge; above 0 for several votes", ge=0)
    max_completion_tokens: int = field(1024, "longest reply; a longer one is refused", "tokens", ge=1)
    options: dict[str, bool | int | float | str] = field(
        {}, "further fields of the request, e.g. {reasoning_effort: low}"
    )
    concurrency: int = field(32, "calls at the same time, of each engine", "calls", ge=1)
    timeout: float = field(60.0, "longest time for one call", "seconds", gt=0)
    retries: int = field(
        4, "calls after a failed one, if the connection, the server or a rate limit failed", "calls", ge=0
    )
    max_calls: int | None = field(
        None,
        "budget of a training step, retries included, shared equally by engines; null: none",
        "calls",
        ge=1,
    )
    max_tokens: int | None = field(
        None,
        "budget of a training step, prompts and replies, shared equally by engines; running calls may exceed "
        "it; null: none",
        "tokens",
        ge=1,
    )
    cache: int = field(
        100_000, "scores of each engine that are kept, in memory and in run_dir/judge", "scores", ge=0
    )

    def read_key(self) -> str | None:
        """Return the API key from the environment; None if no variable is named or it is unset or empty."""
        return os.environ.get(self.key_variable, "").strip() or None if self.key_variable else None

    def normalise(self, score: float) -> float:
        return (score - self.lowest) / (self.highest - self.lowest)
