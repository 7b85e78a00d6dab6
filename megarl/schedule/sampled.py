"""What each token of the samples was worth: from the replicas that trained on them to rank 0, a few hundred numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from megarl.observe.run_log import Sample
from megarl.parallel.comm import gather_on_0
from megarl.schedule.run import Step
from megarl.training.token_worth import response_ids, token_worth

STEPS_WITH_TOKENS = 100  # of a run, about: samples.jsonl stays small however long it is
TOKENS_SHOWN = 512  # of a response: its first and its last half of them
DIGITS = 4  # significant ones of a token's numbers
WHOLE_CHARACTER = 4  # a character's UTF-8 has at most so many bytes, and so many tokens


def has_tokens(number: int, steps: int) -> bool:
    """Whether the samples of this step of so many get their tokens."""
    return number % -(-steps // STEPS_WITH_TOKENS) == 0 or number in (1, steps)


def with_tokens(step: Step) -> list[Sample]:
    """The step's samples with their tokens, advantages and values, in their order. Every rank calls this; rank 0 gets them complete."""
    runtime, tokenizer = step.run.runtime, step.run.tokenizer
    mine = token_worth(step.local.experience, step.batch, list(step.samples)) if runtime.speaks else {}
    told = gather_on_0(runtime, mine)
    if told is None:
        return list(step.samples.values())
    found = {row: columns for part in told for row, columns in part.items()}
    return [_complete(sample, response_ids(step.batch, row), found.get(row, {}), tokenizer) for row, sample in step.samples.items()]


def _complete(sample: Sample, ids: list[int], columns: dict[str, Tensor], tokenizer: Any) -> Sample:
    worth = {name: column.tolist() for name, column in columns.items()}
    if advantages := worth.get("advantages"):
        mean = math.fsum(advantages) / len(advantages)
        sample = replace(sample, advantage_mean=mean, advantage_min=min(advantages), advantage_max=max(advantages))
    half, left_out = TOKENS_SHOWN // 2, len(ids) - TOKENS_SHOWN
    if left_out <= 0:
        texts = token_texts(tokenizer, ids)
        shown = {name: _rounded(column) for name, column in worth.items()}
    else:
        gap = f"\n[... {left_out} tokens left out ...]\n"
        texts = [*token_texts(tokenizer, ids[:half]), gap, *token_texts(tokenizer, ids[-half:])]
        shown = {name: [*_rounded(column[:half]), None, *_rounded(column[-half:])] for name, column in worth.items()}
    return replace(sample, tokens=texts, advantages=shown.get("advantages"), values=shown.get("values"))


def _rounded(column: list[float]) -> list[float | None]:
    return [float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None for value in column]


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text of each token, special ones included. The text of a character that several tokens make up stands at the first of them."""
    texts: list[str] = tokenizer.batch_decode([[token] for token in ids], skip_special_tokens=False)
    at = 0
    while at < len(texts):
        if "\ufffd" in texts[at]:
            for end in range(at + 2, min(at + WHOLE_CHARACTER, len(ids)) + 1):
                whole = tokenizer.decode(list(ids[at:end]), skip_special_tokens=False)
                if "\ufffd" not in whole:
                    texts[at:end] = [whole] + [""] * (end - at - 1)
                    at = end - 1
                    break
        at += 1
    return texts
