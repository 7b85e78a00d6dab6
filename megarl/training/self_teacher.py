"""Batches and average weights of a teacher that is the actor with a longer prompt (self-distillation)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megarl.config.schema import Config, TeacherConfig
from megarl.data.batch import MicroBatch, RolloutBatch, TrainBatch
from megarl.data.teacher_prompts import PADDING, SIBLING
from megarl.model.builder import ModelChunks
from megarl.parallel.comm import sum_over_replicas
from megarl.parallel.runtime import Runtime
from megarl.training.micro_batch import make_micro_batches


class TeacherBatch(NamedTuple):
    """This replica's responses after the teacher's prompts.

    batch    [teacher's prompt + response] of each taught response
    indices  int64 [R], positions in the actor's TrainBatch of the responses' tokens, in the order of
             `batch.response_mask`
    metrics  of all replicas"""

    batch: TrainBatch
    indices: Tensor
    metrics: dict[str, float]


def make_teacher_batch(
    rollout: RolloutBatch, batch: TrainBatch, config: TeacherConfig, special: Sequence[int], runtime: Runtime
) -> TeacherBatch:
    """Put the teacher's prompts before this replica's responses. Collective.

    special: tokens at the end of a sibling's response that the teacher's prompt leaves out"""
    siblings = choose_siblings(rollout) if config.demonstration == "sibling" else None
    responses = gather_siblings(siblings, rollout, batch, special, runtime) if siblings is not None else {}
    starts, ends = batch.cu_seqlens.tolist(), batch.prompt_lengths.tolist()
    tokens, masks, lengths, indices = [], list[Tensor](), [0], list[Tensor]()
    missing = too_long = 0
    for i, row in enumerate(batch.rows.tolist()):
        begin, end = starts[i] + ends[i], starts[i + 1]
        if begin == end:
            continue
        prompt = rollout["teacher_prompts"][row].long()
        prompt = prompt[prompt != PADDING]
        if siblings is not None:
            sibling = int(siblings[row])
            prompt = insert(prompt, responses[sibling]) if sibling >= 0 else prompt[:0]
        if not len(prompt):
            missing += 1
        elif len(prompt) > config.max_context_tokens:
            too_long += 1
        else:
            tokens += [prompt, batch.tokens[begin:end]]
            masks += [torch.zeros(len(prompt), dtype=torch.bool), batch.response_mask[begin:end]]
            lengths.append(len(prompt) + end - begin)
            indices.append(torch.arange(begin, end)[batch.response_mask[begin:end]])
    teacher_batch = TrainBatch(
        torch.cat([batch.tokens[:0], *tokens]),
        torch.tensor(lengths).cumsum(0),
        torch.cat([batch.response_mask[:0], *masks]),
    )
    counts = torch.tensor([missing, too_long, teacher_batch.num_tokens, len(lengths) - 1])
    totals = sum_over_replicas(runtime, counts).tolist()
    names = ("missing", "too_long", "tokens", "responses")
    metrics = {f"teacher/{name}": total for name, total in zip(names, totals, strict=True)}
    return TeacherBatch(teacher_batch, torch.cat([torch.empty(0, dtype=torch.int64), *indices]), metrics)


def choose_siblings(rollout: RolloutBatch) -> Tensor:
    """Return the first other correct response of each response's group, int64 [n]; -1: none."""
    usable = rollout["correct"] & (rollout.response_lengths > 0)
    first_two: dict[int, list[int]] = {}
    groups = rollout["group_ids"].tolist()
    for row in usable.nonzero().squeeze(-1).tolist():
        rows = first_two.setdefault(groups[row], [])
        if len(rows) < 2:
            rows.append(row)
    chosen = [
        next((other for other in first_two.get(group, ()) if other != row), -1)
        for row, group in enumerate(groups)
    ]
    return torch.tensor(chosen, dtype=torch.int64)


def gather_siblings(
    siblings: Tensor, rollout: RolloutBatch, batch: TrainBatch, special: Sequence[int], runtime: Runtime
) -> dict[int, Tensor]:
    """Return the tokens of each sibling by its row, int64, on every rank."""
    rows = siblings[siblings >= 0].unique()
    ends = (rollout.lengths - rollout.prompt_lengths)[rows].cumsum(0).tolist()
    spans = dict(zip(rows.tolist(), zip([0, *ends], ends, strict=False), strict=True))
    tokens = torch.zeros(ends[-1] if ends else 0, dtype=torch.int64)
    starts, prompts = batch.cu_seqlens.tolist(), batch.prompt_lengths.tolist()
    for i, row in enumerate(batch.rows.tolist()):
        if row in spans:
            tokens[slice(*spans[row])] = batch.tokens[starts[i] + prompts[i] : starts[i + 1]]
    tokens = sum_over_replicas(runtime, tokens).long()  # float64 holds every token exactly
    return {row: strip_end(tokens[slice(*span)], special) for row, span in spans.items()}


def strip_end(tokens: Tensor, special: Sequence[int]) -> Tensor:
    kept = (~torch.isin(tokens, torch.tensor([*special], dtype=torch.int64))).nonzero()
    return tokens[: int(kept[-1]) + 1] if len(kept) else tokens[:0]


def insert(prompt: Tensor, response: Tensor) -> Tensor:
    """Return the prompt with `response` at each SIBLING."""
    pieces = [prompt[:0]]
    for token in prompt.split(1):
        pieces.append(response if int(token) == SIBLING else token)
    return torch.cat(pieces)


def pack_teacher_batch(
    batch: TrainBatch, config: Config, model: ModelChunks, runtime: Runtime
) -> list[MicroBatch]:
    """Pack the sequences for a forward pass. Collective if replicas share experts."""
    budget = config.update.tokens_per_micro_batch
    return make_micro_batches(batch, range(batch.num_sequences), budget, model, runtime)


class AverageWeights:
    """The exponential moving average of a model's weights, float32 on the host.

    rate: of each `update`. Every rank has its own slices."""

    def __init__(self, model: ModelChunks, rate: float) -> None:
        self.rate = rate
        self.weights = {name: _copy(parameter) for name, parameter in model.named_parameters()}

    @torch.no_grad()
    def update(self, model: ModelChunks) -> None:
        for name, parameter in model.named_parameters():
            self.weights[name].lerp_(_copy(parameter), self.rate)

    @torch.no_grad()
    def write(self, model: ModelChunks) -> None:
        """Write the average into a model with the same parameters."""
        for name, parameter in model.named_parameters():
            parameter.copy_(self.weights[name])


def _copy(parameter: Tensor) -> Tensor:
    return parameter.detach().to("cpu", torch.float32, copy=True)
