"""The tokens of logged samples: their numbers and their text."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.data.batch import TrainBatch
from megarl.observe.run_log import SampleRecord
from megarl.schedule import samples as module
from megarl.schedule.samples import add_tokens, decode_tokens, has_tokens, response_indices, token_columns
from tests.tiny_models import make_tokenizer

TEXTS = ("1+1=2", "Größe 👍!", "")


def make_batch(tokenizer: Any) -> TrainBatch:
    responses = [
        [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id] for text in TEXTS * 2
    ]
    batch = TrainBatch.build([[5, 6]] * 6, responses)
    batch["group_ids"] = torch.tensor([0, 0, 0, 1, 1, 1])
    batch["response_index"] = torch.tensor([0, 1, 2] * 2)
    return batch


def response_ids(batch: TrainBatch, row: int) -> list[int]:
    return batch.tokens[response_indices(batch, row)].tolist()


def test_texts_of_tokens_make_up_the_whole() -> None:
    tokenizer = make_tokenizer(300)
    batch = make_batch(tokenizer)
    for row, text in enumerate(TEXTS * 2):
        found = decode_tokens(tokenizer, response_ids(batch, row))
        assert "".join(found) == f"{text}<eos>" and len(found) == len(text.encode()) + 1
    assert decode_tokens(tokenizer, response_ids(batch, 1))[2:5] == ["ö", "", "ß"]
    cut = tokenizer.encode("👍", add_special_tokens=False)[:2]
    assert len(decode_tokens(tokenizer, cut)) == 2  # a response may end within a character


@pytest.mark.parametrize("shown", [512, 4])
def test_each_sample_gets_the_numbers_of_its_own_tokens(shown: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two replicas each have half of the sequences, in different orders."""
    monkeypatch.setattr(module, "TOKENS_SHOWN", shown)
    tokenizer = make_tokenizer(300)
    batch = make_batch(tokenizer)
    rows = [torch.tensor([4, 0, 2]), torch.tensor([5, 3, 1])]
    shares = [replace(batch.select(chosen), rows=chosen) for chosen in rows]
    for share in shares:
        numbers = share["group_ids"] * 100 + share["response_index"] * 10
        share["advantages"] = (
            share.spread(numbers).float() + torch.arange(share.num_tokens) / 1e4
        ) * share.response_mask
    theirs = token_columns(shares[1], [0, 1, 4])
    assert theirs.keys() == {1} and theirs[1].keys() == {"tokens", "observed", "advantages"}
    monkeypatch.setattr(module, "broadcast_from_rank_0", lambda runtime, value, kind: value)
    monkeypatch.setattr(module, "gather_to_rank_0", lambda runtime, value, kind: [value, theirs])
    runtime: Any = SimpleNamespace(rank=0, world=1, is_replica_leader=True)
    samples = {row: SampleRecord(1, "p", TEXTS[row % 3], 1.0, True, False, 1) for row in (0, 1, 4)}
    complete = add_tokens(samples, shares[0], tokenizer, runtime)
    for (row, sample), found in zip(samples.items(), complete, strict=True):
        number = row // 3 * 100 + row % 3 * 10
        assert found.response == sample.response and found.values is None
        assert (
            found.tokens is not None
            and found.advantages is not None
            and len(found.tokens) == len(found.advantages)
        )
        assert all(x is None or number <= x < number + 0.1 for x in found.advantages)
        assert found.advantage_min is not None and number <= found.advantage_min < number + 0.1
        length = len(TEXTS[row % 3].encode()) + 1
        if length <= shown:
            assert "".join(found.tokens) == f"{TEXTS[row % 3]}<eos>" and None not in found.advantages
        else:
            assert len(found.tokens) == 5 and found.advantages[2] is None
            assert f"{length - 4} tokens left out" in found.tokens[2] and found.tokens[4] == "<eos>"


def test_what_was_observed_is_shown_without_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = make_tokenizer(300)
    batch = TrainBatch.build([[5, 6]], [tokenizer.encode("2+2=4.", add_special_tokens=False)])
    batch.response_mask[4:6] = False
    batch["advantages"] = torch.arange(8.0) * batch.response_mask
    monkeypatch.setattr(module, "broadcast_from_rank_0", lambda runtime, value, kind: value)
    monkeypatch.setattr(module, "gather_to_rank_0", lambda runtime, value, kind: [value])
    runtime: Any = SimpleNamespace(rank=0, world=1, is_replica_leader=True)
    samples = {0: SampleRecord(1, "p", "2+2=4.", 1.0, True, False, 4)}
    [found] = add_tokens(samples, replace(batch, rows=torch.tensor([0])), tokenizer, runtime)
    assert found.tokens == list("2+2=4.") and found.advantages == [2, 3, None, None, 6, 7]
    assert found.observed == [False, False, True, True, False, False]
    assert (found.advantage_mean, found.advantage_min, found.advantage_max) == (4.5, 2, 7)
    # Tokens of an earlier step are left out too: the batch does not have their advantages.
    batch["prefix_tokens"], batch["values"] = torch.tensor([2]), torch.ones(8)
    batch["advantages"] = batch["advantages"] * (torch.arange(8) > 3)
    [found] = add_tokens(samples, replace(batch, rows=torch.tensor([0])), tokenizer, runtime)
    assert found.advantages == [None, None, None, None, 6, 7] and found.advantage_mean == 6.5
    assert found.values == [1, 1, None, None, 1, 1]


@pytest.mark.parametrize("steps", [1, 8, 100, 101, 5000])
def test_only_so_many_steps_have_tokens(steps: int) -> None:
    chosen = [number for number in range(1, steps + 1) if has_tokens(number, steps)]
    assert chosen[0] == 1 and chosen[-1] == steps and min(steps, 51) <= len(chosen) <= 102
