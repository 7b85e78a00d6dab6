"""A step's samples, with each token's text, advantage and value."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megarl.data.batch import TrainBatch
from megarl.observe.run_log import SampleRecord
from megarl.parallel.comm import broadcast_from_rank_0, gather_to_rank_0
from megarl.parallel.runtime import Runtime

STEPS_WITH_TOKENS = 100  # approximate number per run
TOKENS_SHOWN = 512  # per response, half at each end
DIGITS = 4  # significant
MAX_CHARACTER_TOKENS = 4  # that make one character


def has_tokens(number: int, steps: int) -> bool:
    """Return whether the samples of step `number` have tokens."""
    return number % -(-steps // STEPS_WITH_TOKENS) == 0 or number in (1, steps)


def add_tokens(
    samples: Mapping[int, SampleRecord], batch: TrainBatch, tokenizer: Any, runtime: Runtime
) -> list[SampleRecord]:
    """Return samples with columns of tokens; [] except on rank 0. Collective."""
    rows = broadcast_from_rank_0(runtime, list(samples), list[int])
    local_columns = token_columns(batch, rows) if runtime.is_replica_leader else {}
    parts = gather_to_rank_0(runtime, local_columns, dict[int, dict[str, Tensor]])
    if parts is None:
        return []
    columns_by_row = {row: columns for part in parts for row, columns in part.items()}
    samples_with_tokens = []
    for row, sample in samples.items():
        numbers = {name: column.tolist() for name, column in columns_by_row[row].items()}
        ids, observed = numbers.pop("tokens"), numbers.pop("observed")
        if advantages := [a for a in numbers.get("advantages", ()) if not math.isnan(a)]:
            mean = math.fsum(advantages) / len(advantages)
            sample = replace(
                sample, advantage_mean=mean, advantage_min=min(advantages), advantage_max=max(advantages)
            )
        half, num_left_out = TOKENS_SHOWN // 2, len(ids) - TOKENS_SHOWN
        columns: dict[str, Any]
        if num_left_out <= 0:
            texts = decode_tokens(tokenizer, ids)
            columns = {name: _round(column) for name, column in numbers.items()}
        else:
            observed = [*observed[:half], False, *observed[-half:]]
            gap = f"\n[... {num_left_out} tokens left out ...]\n"
            texts = [*decode_tokens(tokenizer, ids[:half]), gap, *decode_tokens(tokenizer, ids[-half:])]
            columns = {name: [*_round(c[:half]), None, *_round(c[-half:])] for name, c in numbers.items()}
        samples_with_tokens.append(
            replace(sample, tokens=texts, observed=observed if any(observed) else None, **columns)
        )
    return samples_with_tokens


def _round(column: list[float]) -> list[float | None]:
    return [float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None for value in column]


def token_columns(batch: TrainBatch, rows: Iterable[int]) -> dict[int, dict[str, Tensor]]:
    """Return row -> tokens, observed, advantages, values, for rows in this replica's batch.

    Observed tokens have NaN for both, tokens of earlier steps (`rollout.window`) for advantages."""
    index_by_row = {row: i for i, row in enumerate(batch.rows.tolist())}
    sampled_mask, columns_by_row = batch.sampled_mask, {}
    for row in rows:
        if row in index_by_row:
            tokens = response_indices(batch, index_by_row[row])
            observed = ~batch.response_mask[tokens]
            columns = {"tokens": batch.tokens[tokens], "observed": observed}
            for name, nan_mask in (("advantages", ~sampled_mask[tokens]), ("values", observed)):
                if name in batch:
                    columns[name] = batch[name][tokens].float().masked_fill(nan_mask, math.nan)
            columns_by_row[row] = columns
    return columns_by_row


def response_indices(batch: TrainBatch, row: int) -> Tensor:
    start, end = batch.cu_seqlens[row : row + 2].tolist()
    return torch.arange(start + int(batch.prompt_lengths[row]), end)


def decode_tokens(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Return each token's text. The first of a character's tokens has it; the others are empty."""
    texts: list[str] = tokenizer.batch_decode([[token] for token in ids], skip_special_tokens=False)
    start = 0
    while start < len(texts):
        if "\ufffd" in texts[start]:
            for end in range(start + 2, min(start + MAX_CHARACTER_TOKENS, len(ids)) + 1):
                text = tokenizer.decode(list(ids[start:end]), skip_special_tokens=False)
                if "\ufffd" not in text:
                    texts[start:end] = [text] + [""] * (end - start - 1)
                    start = end - 1
                    break
        start += 1
    return texts
