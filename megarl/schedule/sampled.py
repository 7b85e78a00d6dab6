"""The tokens of the responses that are shown to people, with each token's advantage and value: gathered from the replicas
that trained on them to rank 0."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from megarl.data.experience import Experience
from megarl.observe.run_log import Sample
from megarl.parallel.comm import gather_on_0
from megarl.schedule.run import Run, Step

STEPS_WITH_TOKENS = 100  # about so many steps of a run: samples.jsonl stays small however long it is
TOKENS_SHOWN = 512  # of a response: its first and its last half of them
DIGITS = 4  # significant ones of a token's numbers
WHOLE_CHARACTER = 4  # a character's UTF-8 has at most so many bytes, and so many tokens


def has_tokens(number: int, steps: int) -> bool:
    """Whether the samples of step `number` of `steps` get their tokens."""
    return number % -(-steps // STEPS_WITH_TOKENS) == 0 or number in (1, steps)


def with_tokens(run: Run, step: Step) -> list[Sample]:
    """Return the step's samples with their tokens, advantages and values. Every rank calls this; rank 0 gets them complete."""
    runtime = run.runtime
    mine = (
        token_worth(step.local.experience, step.batch, list(step.samples))
        if runtime.is_replica_leader
        else {}
    )
    parts = gather_on_0(runtime, mine)
    if parts is None:
        return list(step.samples.values())
    found = {row: columns for part in parts for row, columns in part.items()}
    return [
        _complete(sample, response_ids(step.batch, row), found.get(row, {}), run.tokenizer)
        for row, sample in step.samples.items()
    ]


def token_worth(local: Experience, batch: Experience, rows: Sequence[int]) -> dict[int, dict[str, Tensor]]:
    """Return row of `batch` -> {"advantages", "values"}, float32 [response tokens], for the rows and columns that are in
    `local`, a replica's share."""
    places = list(zip(local["group_ids"].tolist(), local["response_index"].tolist(), strict=True))
    found = {}
    for row in rows:
        place = (int(batch["group_ids"][row]), int(batch["response_index"][row]))
        if place in places:
            tokens = _response(local, places.index(place))
            found[row] = {
                name: local[name][tokens].float() for name in ("advantages", "values") if name in local
            }
    return found


def response_ids(batch: Experience, row: int) -> list[int]:
    """Return the token ids of one response."""
    ids: list[int] = batch.tokens[_response(batch, row)].tolist()
    return ids


def _response(experience: Experience, row: int) -> Tensor:
    """Return the indices of a response's tokens, int64."""
    start, end = experience.cu_seqlens[row : row + 2].tolist()
    return start + experience.response_mask[start:end].nonzero().squeeze(-1)


def _complete(sample: Sample, ids: list[int], columns: dict[str, Tensor], tokenizer: Any) -> Sample:
    worth = {name: column.tolist() for name, column in columns.items()}
    if advantages := worth.get("advantages"):
        mean = math.fsum(advantages) / len(advantages)
        sample = replace(
            sample, advantage_mean=mean, advantage_min=min(advantages), advantage_max=max(advantages)
        )
    half, left_out = TOKENS_SHOWN // 2, len(ids) - TOKENS_SHOWN
    if left_out <= 0:
        texts = token_texts(tokenizer, ids)
        shown = {name: _rounded(column) for name, column in worth.items()}
    else:
        gap = f"\n[... {left_out} tokens left out ...]\n"
        texts = [*token_texts(tokenizer, ids[:half]), gap, *token_texts(tokenizer, ids[-half:])]
        shown = {name: [*_rounded(c[:half]), None, *_rounded(c[-half:])] for name, c in worth.items()}
    return replace(sample, tokens=texts, advantages=shown.get("advantages"), values=shown.get("values"))


def _rounded(column: list[float]) -> list[float | None]:
    return [float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None for value in column]


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Return the text of each token, special ones included. A character that several tokens make up stands at the first of
    them."""
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
