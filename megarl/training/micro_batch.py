"""Micro-batches: packs of an Experience's sequences in the form that the models take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megarl.data.experience import Experience
from megarl.data.packing import pack
from megarl.model.builder import Actor, Critic
from megarl.model.fp8 import pack_multiple


@dataclass
class MicroBatch:
    """One pack of t tokens, r of them response tokens.

    tokens, positions  int64 [1, t] on the device; t is a multiple of what sequence parallelism and FP8 ask for
    packed             what attention needs to know of the sequences
    at                 int64 [r], the place in the pack that predicts each response token (the one before it)
    labels             int64 [r], the response tokens
    slots              int64 [r] on the host, where these tokens stand in the Experience: columns are read and written there
    """

    tokens: Tensor
    positions: Tensor
    packed: Any
    at: Tensor
    labels: Tensor
    slots: Tensor

    def column(self, experience: Experience, name: str) -> Tensor:
        """Column `name` at this micro-batch's response tokens, [r] on the device."""
        return experience[name][self.slots].to(self.tokens.device)


def make_micro_batches(
    experience: Experience, indices: Sequence[int], max_tokens: int, model: Actor | Critic, at_least: int = 1
) -> list[MicroBatch]:
    """Packs the sequences `indices` by token budget. At least so many micro-batches, if only of one token that counts nowhere:
    every data-parallel replica must take part in an update, with or without sequences."""
    lengths = experience.lengths[torch.as_tensor(indices, dtype=torch.int64)].tolist()
    groups = [[indices[i] for i in group] for group in pack(lengths, max_tokens)]
    groups += [[]] * (at_least - len(groups))
    return [_micro_batch(experience, group, pack_multiple(model.config), model) for group in groups]


def _micro_batch(experience: Experience, group: Sequence[int], multiple: int, model: Actor | Critic) -> MicroBatch:
    index = torch.as_tensor(group, dtype=torch.int64)
    lengths = experience.lengths[index]
    total = int(lengths.sum())
    # One sequence more fills the pack up to a multiple; its tokens are nobody's response.
    filler = -total % multiple or (multiple if total == 0 else 0)
    sizes = torch.cat([lengths, lengths.new_tensor([filler])]) if filler else lengths
    cu_seqlens = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    starts_in_experience = torch.repeat_interleave(experience.cu_seqlens[:-1][index], lengths)
    positions = torch.arange(total + filler) - torch.repeat_interleave(cu_seqlens[:-1], sizes)
    slots = starts_in_experience + positions[:total]
    tokens = torch.cat([experience.tokens[slots], torch.zeros(filler, dtype=torch.int64)])
    is_response = experience.response_mask[slots]
    at = is_response.nonzero().squeeze(-1) - 1
    device = model.rotary_pos_emb.inv_freq.device
    return MicroBatch(
        tokens=tokens[None].to(device),
        positions=positions[None].to(device),
        packed=model.pack(cu_seqlens),
        at=at.to(device),
        labels=tokens[at + 1].to(device),
        slots=slots[is_response],
    )
