"""What each token of the samples was worth: from the replicas that trained on them to rank 0, a few hundred numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megarl.data.experience import Experience
from megarl.observe.samples import Sample
from megarl.parallel.comm import gather_objects
from megarl.schedule.run import Step

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
    mine = worth(step.local.experience, step.batch, list(step.samples)) if runtime.speaks else {}
    found = {row: columns for part in gather_objects(runtime, mine) for row, columns in part.items()}
    if runtime.rank:
        return list(step.samples.values())
    return [_complete(sample, response_ids(step.batch, row), found.get(row, {}), tokenizer) for row, sample in step.samples.items()]


def worth(local: Experience, batch: Experience, rows: Sequence[int]) -> dict[int, dict[str, Tensor]]:
    """row of `batch` -> {"advantages", "values"}: float32 [response tokens], as far as `local` holds these rows and columns."""
    places = list(zip(local["group_ids"].tolist(), local["response_index"].tolist(), strict=True))
    found = {}
    for row in rows:
        place = (int(batch["group_ids"][row]), int(batch["response_index"][row]))
        if place in places:
            at = _response(local, places.index(place))
            found[row] = {name: local[name][at].float() for name in ("advantages", "values") if name in local}
    return found


def _response(experience: Experience, row: int) -> Tensor:
    """Where the response of a sequence lies in the [T] columns, int64."""
    start, end = experience.cu_seqlens[row : row + 2].tolist()
    return start + experience.response_mask[start:end].nonzero().squeeze(-1)


def response_ids(batch: Experience, row: int) -> list[int]:
    """The tokens of one response."""
    ids: list[int] = batch.tokens[_response(batch, row)].tolist()
    return ids


def _complete(sample: Sample, ids: list[int], columns: dict[str, Tensor], tokenizer: Any) -> Sample:
    advantages = columns.get("advantages", torch.zeros(0))
    if advantages.numel():
        sample = replace(
            sample,
            advantage_mean=float(advantages.double().mean()),
            advantage_min=float(advantages.min()),
            advantage_max=float(advantages.max()),
        )
    half, left_out = TOKENS_SHOWN // 2, len(ids) - TOKENS_SHOWN
    if left_out <= 0:
        shown = {name: _rounded(column) for name, column in columns.items()}
        return replace(sample, tokens=token_texts(tokenizer, ids), advantages=shown.get("advantages"), values=shown.get("values"))
    gap = f"\n[... {left_out} tokens left out ...]\n"
    texts = [*token_texts(tokenizer, ids[:half]), gap, *token_texts(tokenizer, ids[-half:])]
    shown = {name: [*_rounded(column[:half]), None, *_rounded(column[-half:])] for name, column in columns.items()}
    return replace(sample, tokens=texts, advantages=shown.get("advantages"), values=shown.get("values"))


def _rounded(column: Tensor) -> list[float | None]:
    return [float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None for value in column.tolist()]


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
