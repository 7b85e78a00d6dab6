"""A step's sampled responses for people to read, with each token's text, advantage and value."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megarl.data.batch import TrainBatch
from megarl.observe.run_log import SampleRecord
from megarl.parallel.comm import from_rank_0, gather_on_0
from megarl.parallel.runtime import Runtime

STEPS_WITH_TOKENS = 100  # about so many steps of a run: samples.jsonl stays small however long it is
TOKENS_SHOWN = 512  # of a response: its first and its last half of them
DIGITS = 4  # significant ones of a token's numbers
WHOLE_CHARACTER = 4  # a character's UTF-8 has at most so many bytes, and so many tokens


def has_tokens(number: int, steps: int) -> bool:
    """Return whether the samples of step `number` of `steps` get their tokens."""
    return number % -(-steps // STEPS_WITH_TOKENS) == 0 or number in (1, steps)


def with_tokens(
    samples: Mapping[int, SampleRecord], batch: TrainBatch, tokenizer: Any, runtime: Runtime
) -> list[SampleRecord]:
    """Return a step's samples, by their row of the batch, with their tokens, advantages and values. Every
    rank calls this with its replica's share of the batch; rank 0, which has the samples, gets them
    complete."""
    wanted = from_rank_0(runtime, list(samples), list[int])
    worths = token_worth(batch, wanted) if runtime.is_replica_leader else {}
    parts = gather_on_0(runtime, worths, dict[int, dict[str, Tensor]])
    if parts is None:
        return []
    found = {row: columns for part in parts for row, columns in part.items()}
    complete = []
    for row, sample in samples.items():
        worth = {name: column.tolist() for name, column in found[row].items()}
        ids, observed = worth.pop("tokens"), worth.pop("observed")
        if advantages := [a for a in worth.get("advantages", ()) if not math.isnan(a)]:
            mean = math.fsum(advantages) / len(advantages)
            sample = replace(
                sample, advantage_mean=mean, advantage_min=min(advantages), advantage_max=max(advantages)
            )
        half, left_out = TOKENS_SHOWN // 2, len(ids) - TOKENS_SHOWN
        shown: dict[str, Any]
        if left_out <= 0:
            texts = token_texts(tokenizer, ids)
            shown = {name: _rounded(column) for name, column in worth.items()}
        else:
            observed = [*observed[:half], False, *observed[-half:]]
            gap = f"\n[... {left_out} tokens left out ...]\n"
            texts = [*token_texts(tokenizer, ids[:half]), gap, *token_texts(tokenizer, ids[-half:])]
            shown = {name: [*_rounded(c[:half]), None, *_rounded(c[-half:])] for name, c in worth.items()}
        complete.append(replace(sample, tokens=texts, observed=observed if any(observed) else None, **shown))
    return complete


def _rounded(column: list[float]) -> list[float | None]:
    return [float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None for value in column]


def token_worth(batch: TrainBatch, rows: Iterable[int]) -> dict[int, dict[str, Tensor]]:
    """Return row of the batch -> {"tokens", "observed", "advantages", "values"}, of the response's tokens and
    of what was observed between them, NaN there, for the rows and columns that are in `batch`, a replica's
    share. What earlier steps drew of a response (`rollout.window`) has no advantage in this one: NaN."""
    places = {row: i for i, row in enumerate(batch.rows.tolist())}
    drawn, found = batch.drawn, {}
    for row in rows:
        if row in places:
            tokens = response_indices(batch, places[row])
            observed = ~batch.response_mask[tokens]
            columns = {"tokens": batch.tokens[tokens], "observed": observed}
            for name, none in (("advantages", ~drawn[tokens]), ("values", observed)):
                if name in batch:
                    columns[name] = batch[name][tokens].float().masked_fill(none, math.nan)
            found[row] = columns
    return found


def response_indices(batch: TrainBatch, row: int) -> Tensor:
    """Return the indices of the tokens behind a response's prompt, int64."""
    start, end = batch.cu_seqlens[row : row + 2].tolist()
    return torch.arange(start + int(batch.prompt_lengths[row]), end)


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Return the text of each token. A character that several tokens make up stands at the first of them."""
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
