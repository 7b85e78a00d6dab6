"""Batches: RolloutBatch (a step), TrainBatch (a replica's share), MicroBatch (a forward pass)."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megarl.config.errors import DataError
from megarl.config.files import fsync
from megarl.data.sample import Sample, SampleGroup
from megarl.observe.run_log import SampleRecord

_PARTS = ("tokens", "cu_seqlens", "response_mask")


@dataclass
class RolloutBatch:
    """The n sequences of a step. Columns are equal on every rank. Tokens are only this rank's.

    lengths           int64 [n], prompt, response and observations
    response_lengths  int64 [n], sampled tokens
    prompt_lengths    int64 [n]
    owners            int64 [n], rank with the tokens (see parallel/delivery.py); None: every rank has all
    columns           name -> Tensor [n]
    rows              int64 [m], ascending, indices of the sequences whose tokens are on this rank
    local             the sequences `rows`, with per-token columns [T] only; every rank has the same columns
    groups            empty if read from disk
    errors            verifier error -> count
    records           on rank 0, row -> response to show
    events            lines for the run's log"""

    lengths: Tensor
    response_lengths: Tensor
    prompt_lengths: Tensor
    owners: Tensor | None
    columns: dict[str, Tensor]
    rows: Tensor
    local: TrainBatch
    groups: list[SampleGroup] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    errors: dict[str, int] = field(default_factory=dict)
    records: dict[int, SampleRecord] = field(default_factory=dict)
    events: list[str] = field(default_factory=list)

    @staticmethod
    def from_train_batch(batch: TrainBatch) -> RolloutBatch:
        local = batch.select(range(batch.num_sequences))
        sequence_names = [name for name in local.columns if len(local[name]) != local.num_tokens]
        columns = {name: local.columns.pop(name) for name in sequence_names}
        rows = torch.arange(local.num_sequences)
        return RolloutBatch(
            local.lengths, local.response_lengths, local.prompt_lengths, None, columns, rows, local
        )

    def __getitem__(self, name: str) -> Tensor:
        return self.columns[name]

    def __setitem__(self, name: str, column: Tensor) -> None:
        if column.shape[0] != self.num_sequences:
            expected = f"an entry for each of {self.num_sequences} responses"
            raise ValueError(f"column {name}: must have {expected} (got {column.shape[0]})")
        self.columns[name] = column

    def __contains__(self, name: str) -> bool:
        return name in self.columns

    @property
    def num_sequences(self) -> int:
        return self.lengths.numel()

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def samples(self) -> list[Sample]:
        return [sample for group in self.groups for sample in group.samples]

    @property
    def has_observations(self) -> bool:
        """Equal on every rank."""
        return not torch.equal(self.lengths, self.prompt_lengths + self.response_lengths)

    def drop_tokens(self) -> None:
        self.rows, self.local, self.groups = self.rows[:0], self.local.select([]), []


@dataclass
class TrainBatch:
    """n prompt+response sequences, packed without padding into T tokens.

    tokens         int64 [T], each prompt followed by its response
    cu_seqlens     int64 [n+1]; sequence i is tokens[cu_seqlens[i]:cu_seqlens[i+1]]
    response_mask  bool [T], True on sampled tokens, with end-of-sequence. Tokens before the first True
                   are the prompt, later False tokens are observations
    columns        name -> Tensor, [T] or [n]

    `training.batch.make_train_batch` sets these:
    rows           int64 [n], index of each sequence in the RolloutBatch
    mini_batches   the actor's micro-batches by mini-batch, in update order
    critic_mini_batches  likewise, for each critic

    `logprobs[t]` is log pi(tokens[t] | tokens before t), `values[t]` V of the state before tokens[t]; both 0
    outside the mask."""

    tokens: Tensor
    cu_seqlens: Tensor
    response_mask: Tensor
    columns: dict[str, Tensor] = field(default_factory=dict)
    rows: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    mini_batches: list[list[MicroBatch]] = field(default_factory=list)
    critic_mini_batches: list[list[list[MicroBatch]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        num_tokens = int(self.cu_seqlens[-1])
        if self.tokens.shape != (num_tokens,) or self.response_mask.shape != (num_tokens,):
            shapes = (tuple(self.tokens.shape), tuple(self.response_mask.shape))
            raise ValueError(f"tokens and response_mask must both be [{num_tokens}] (got {shapes})")
        for name, column in self.columns.items():
            self[name] = column

    def __getitem__(self, name: str) -> Tensor:
        return self.columns[name]

    def __setitem__(self, name: str, column: Tensor) -> None:
        if column.shape[0] not in (self.num_tokens, self.num_sequences):
            expected = f"{self.num_tokens} tokens or {self.num_sequences} responses"
            raise ValueError(
                f"column {name}: must have an entry for each of {expected} (got {column.shape[0]})"
            )
        self.columns[name] = column

    def __contains__(self, name: str) -> bool:
        return name in self.columns

    @property
    def num_sequences(self) -> int:
        return self.cu_seqlens.numel() - 1

    @property
    def num_tokens(self) -> int:
        return int(self.cu_seqlens[-1])

    @property
    def lengths(self) -> Tensor:
        return self.cu_seqlens.diff()

    @property
    def sequence_ids(self) -> Tensor:
        indices = torch.arange(self.num_sequences, device=self.cu_seqlens.device)
        return torch.repeat_interleave(indices, self.lengths)

    @property
    def response_lengths(self) -> Tensor:
        """Sampled tokens, int64 [n]."""
        zeros = torch.zeros_like(self.cu_seqlens[1:])
        return zeros.index_add_(0, self.sequence_ids, self.response_mask.long())

    @property
    def prompt_lengths(self) -> Tensor:
        """Tokens before the response, int64 [n]. If it is empty, all tokens of the sequence."""
        start, end = self.cu_seqlens[:-1], self.cu_seqlens[1:]
        sampled_positions = torch.cat([self.response_mask.nonzero().squeeze(-1), self.cu_seqlens[-1:]])
        return torch.minimum(sampled_positions[torch.searchsorted(sampled_positions, start)], end) - start

    @property
    def sampled_mask(self) -> Tensor:
        """Tokens that this step sampled, bool [T].

        Column `prefix_tokens` [n], if any, counts those of earlier steps (`rollout.window`)."""
        if "prefix_tokens" not in self:
            return self.response_mask
        sampled_counts = torch.cat([self.cu_seqlens[:1], self.response_mask.cumsum(0)])
        prefix_counts = sampled_counts[self.cu_seqlens[:-1]] + self["prefix_tokens"]
        return self.response_mask & (
            sampled_counts[1:] > torch.repeat_interleave(prefix_counts, self.lengths)
        )

    @property
    def unfinished(self) -> Tensor:
        """Responses that continue in the next step, bool [n]."""
        if "unfinished" not in self:
            return torch.zeros(self.num_sequences, dtype=torch.bool)
        return self["unfinished"]

    @property
    def sampled_lengths(self) -> Tensor:
        """Sampled tokens of this step, int64 [n]."""
        lengths = self.response_lengths
        return lengths - self["prefix_tokens"] if "prefix_tokens" in self else lengths

    @property
    def micro_batches(self) -> list[MicroBatch]:
        return [*chain.from_iterable(self.mini_batches)]

    @property
    def critic_micro_batches(self) -> list[MicroBatch]:
        return [*chain.from_iterable(chain.from_iterable(self.critic_mini_batches))]

    def spread(self, values: Tensor) -> Tensor:
        """Expand [n] to [T]; 0 outside the mask."""
        return torch.where(self.response_mask, torch.repeat_interleave(values, self.lengths), 0)

    def totals(self, values: Tensor) -> Tensor:
        """Sum values [T] over each sequence, float64 [n]."""
        sums = torch.zeros(self.num_sequences, dtype=torch.float64)
        return sums.index_add_(0, self.sequence_ids, values.double())

    def select(self, indices: Sequence[int] | Tensor) -> TrainBatch:
        indices = torch.as_tensor(indices, dtype=torch.int64)
        lengths = self.lengths[indices]
        cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        offsets = torch.repeat_interleave(self.cu_seqlens[:-1][indices] - cu_seqlens[:-1], lengths)
        token_indices = torch.arange(int(cu_seqlens[-1])) + offsets
        columns = {
            name: column[token_indices if column.shape[0] == self.num_tokens else indices]
            for name, column in self.columns.items()
        }
        return TrainBatch(self.tokens[token_indices], cu_seqlens, self.response_mask[token_indices], columns)

    @staticmethod
    def build(
        prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], **columns: Tensor
    ) -> TrainBatch:
        """Pack lists of token ids. `columns` are already packed."""
        pairs = list(zip(prompts, responses, strict=True))
        cu_seqlens = torch.tensor([0] + [len(p) + len(r) for p, r in pairs]).cumsum(0)
        tokens = torch.tensor([t for p, r in pairs for t in (*p, *r)], dtype=torch.int64)
        mask = [flag for p, r in pairs for flag in [False] * len(p) + [True] * len(r)]
        return TrainBatch(tokens, cu_seqlens, torch.tensor(mask, dtype=torch.bool), dict(columns))


@dataclass
class MicroBatch:
    """One pack of t tokens, r of them response tokens.

    E.g. prompts a b and c, responses x y and z: tokens a b x y c z, labels x y z, logit_indices 1 2 4,
    pack_indices 2 3 5. With `update.share_prompts` a prompt stands once before its responses.

    tokens, positions  int64 [1, t] on the device; t is a multiple that sequence parallelism and FP8 require
    packed             sequence boundaries for attention and routers
    logit_indices      int64 [r], positions in the pack that predict the labels
    labels             int64 [r], the response tokens
    token_indices      int64 [r] on the host, the labels' positions in the TrainBatch
    pack_indices       int64 [r] on the host, the labels' positions in the pack
    routing            the engine's experts, host [layers, t, topk] (model/routing.py)
    candidates         int64 or int32 [T, k] on the host, k more candidate tokens at each position whose
                       log-probs are needed (top-k of a teacher or the old policy)
    sampling_sets      int32 [T, k] on the host, ids that each token was sampled from, then -1; None: all ids

    Under context parallelism, `token_indices` and `pack_indices` describe the whole pack. The other fields
    describe this rank's part, with r padded to the same number on each rank. Two more fields are set:
    cp_places          (rank, position there) of each token of the pack, on the host (`assign_cp_ranks`)
    order              int64 [r], index of each label in the concatenation over ranks"""

    tokens: Tensor
    positions: Tensor
    packed: Any
    logit_indices: Tensor
    labels: Tensor
    token_indices: Tensor
    pack_indices: Tensor
    routing: Tensor | None = None
    cp_places: tuple[Tensor, Tensor] | None = None
    order: Tensor | None = None
    candidates: Tensor | None = None
    sampling_sets: Tensor | None = None

    def column(self, batch: TrainBatch, name: str) -> Tensor:
        """Return a column at the labels, [r, ...] on the device."""
        return batch[name][self.token_indices].to(self.tokens.device)


def join(batches: Sequence[TrainBatch]) -> TrainBatch:
    """Concatenate batches with the same columns."""
    lengths = torch.cat([batch.lengths for batch in batches])
    return TrainBatch(
        torch.cat([batch.tokens for batch in batches]),
        torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
        torch.cat([batch.response_mask for batch in batches]),
        {name: torch.cat([batch[name] for batch in batches]) for name in batches[0].columns},
    )


def write_batch(path: Path, batch: TrainBatch) -> str:
    """Write `batch` atomically and return its checksum. Raises OSError."""
    tensors = {name: getattr(batch, name).contiguous() for name in _PARTS}
    tensors |= {f"column.{name}": column.contiguous() for name, column in batch.columns.items()}
    partial_path = path.with_name(f".{path.name}.partial")
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    checksum = _checksum(tensors)
    try:
        partial_path.unlink(missing_ok=True)  # safetensors would follow a link
        save_file(tensors, partial_path, {"sha256": checksum})
        fsync(partial_path)
        os.replace(partial_path, path)
        fsync(path.parent)
    except SafetensorError as error:  # also wraps disk errors
        raise OSError(str(error)) from error
    return checksum


def read_batch(path: Path, sha256: str | None = None) -> TrainBatch:
    """Read a batch. Raises DataError if it is damaged or its checksum is not `sha256`."""
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
            checksum = file.metadata()["sha256"]
        if _checksum(tensors) != checksum or checksum != (sha256 or checksum):
            raise DataError(f"{path}: is damaged (its checksum differs)")
        tokens, cu_seqlens, mask = (tensors.pop(name) for name in _PARTS)
        columns = {name.removeprefix("column."): tensor for name, tensor in tensors.items()}
        return TrainBatch(tokens, cu_seqlens, mask, columns)
    except (OSError, SafetensorError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path}: is damaged ({error})") from None


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype} {list(tensors[name].shape)}".encode())
        digest.update(tensors[name].view(torch.uint8).numpy().data)
    return digest.hexdigest()
