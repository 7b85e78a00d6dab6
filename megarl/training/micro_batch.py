"""Pack sequences into micro-batches, and convert a head's outputs of one.

Context-parallel ranks share a pack: each has a part of every sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from megarl.data.batch import MicroBatch, TrainBatch
from megarl.data.packing import assign_cp_ranks, pack_groups
from megarl.model.builder import ModelChunks
from megarl.model.fp8 import pack_multiple
from megarl.parallel.comm import max_over_ranks
from megarl.parallel.runtime import Runtime


def make_micro_batches(
    batch: TrainBatch,
    indices: Sequence[int],
    max_tokens: int,
    model: ModelChunks,
    runtime: Runtime | None = None,
    shared: Tensor | None = None,
) -> list[MicroBatch]:
    """Pack the sequences `indices` into micro-batches of at most `max_tokens`, at least one.

    Replicas without sequences take part with filler tokens. Virtual stages need a multiple of the pipeline's
    ranks.

    runtime: for replicas that share experts, and so must make the same number of passes (collective)
    shared: int64 [n], lengths of prompts that are stored once per `group_ids`"""
    config, sequences = model.config, torch.as_tensor(indices, dtype=torch.int64)
    groups = torch.arange(len(sequences)) if shared is None else batch["group_ids"][sequences]
    prompts = batch.prompt_lengths if shared is None else shared
    responses = (batch.lengths - prompts)[sequences]
    packs = pack_groups(prompts[sequences].tolist(), responses.tolist(), groups.tolist(), max_tokens)
    count = max(len(packs), 1)
    if runtime is not None and runtime.layout.tp * runtime.layout.cp % runtime.layout.ep:
        count = int(max_over_ranks(runtime, count))
    if config.virtual_pipeline_model_parallel_size is not None:
        count += -count % config.pipeline_model_parallel_size
    packs += [[] for _ in range(count - len(packs))]
    return [
        make_micro_batch(batch, [sequences[family] for family in families], prompts, model)
        for families in packs
    ]


def make_micro_batch(
    batch: TrainBatch, families: Sequence[Tensor], prompt_lengths: Tensor, model: ModelChunks
) -> MicroBatch:
    """Pack sequences. families: indices of sequences; those of a family share the prompt of the first"""
    device, cp = model.device, model.config.context_parallel_size
    layout = lay_out(batch, families, prompt_lengths, cp, pack_multiple(model.config))
    token_indices, is_real = layout.token_indices, layout.is_real
    tokens = _fill_pack(batch.tokens[token_indices], is_real, 0)
    is_response = _fill_pack(batch.response_mask[token_indices], is_real, False)
    response_positions = is_response.nonzero().squeeze(-1)
    cp_places = assign_cp_ranks(layout.cu_seqlens, cp) if cp > 1 else None
    on_this_rank = cp_places[0] == parallel_state.get_context_parallel_rank() if cp_places else slice(None)
    packed, routing = model.pack(layout.cu_seqlens, layout.prompts), None
    packed.real_tokens = is_real[on_this_rank]
    sets = batch["sampling_sets"] if "sampling_sets" in batch else None  # noqa: SIM401 (no `get`)
    if "routing" in batch:
        recorded = batch["routing"]
        routing = _fill_pack(recorded[token_indices], is_real, torch.iinfo(recorded.dtype).max)
        routing = routing[on_this_rank].transpose(0, 1).contiguous()
    return MicroBatch(
        tokens=tokens[on_this_rank][None].to(device),
        positions=layout.positions[on_this_rank][None].to(device),
        packed=packed,
        token_indices=token_indices[batch.response_mask[token_indices]],
        routing=routing,
        sampling_sets=sets,
        cp_places=cp_places,
        **make_label_fields(
            response_positions,
            layout.predictors[response_positions],
            tokens[response_positions],
            cp_places,
            device,
        ),
    )


class PackLayout(NamedTuple):
    """Where the t tokens of a pack come from.

    cu_seqlens     int64 [m+1], ends of the sequences with their padding
    is_real        bool [t], False for padding
    positions      int64 [t], each token's position in its sequence
    token_indices  int64, index in the TrainBatch of each real token
    predictors     int64 [t], position in the pack that predicts each token
    prompts        for each sequence the start in the pack of its prompt, and the prompt tokens that it skips;
                   None if no sequence skips any"""

    cu_seqlens: Tensor
    is_real: Tensor
    positions: Tensor
    token_indices: Tensor
    predictors: Tensor
    prompts: tuple[Tensor, Tensor] | None


def lay_out(
    batch: TrainBatch, families: Sequence[Tensor], prompt_lengths: Tensor, cp: int, multiple: int
) -> PackLayout:
    """Lay out a pack with `multiple` x k tokens, each sequence a multiple of 2 `cp` if cp > 1.

    A family's first sequence has its prompt; the others skip theirs."""
    sequences = torch.cat([torch.empty(0, dtype=torch.int64), *families])
    is_first = torch.tensor([i == 0 for family in families for i in range(len(family))], dtype=torch.bool)
    skipped_lengths = torch.where(is_first, 0, prompt_lengths[sequences])
    lengths = batch.lengths[sequences] - skipped_lengths
    sizes = lengths + -lengths % (2 * cp) if cp > 1 else lengths
    total = int(sizes.sum())
    filler = -total % multiple if total else multiple
    if filler:  # one more sequence, without real tokens
        lengths, sizes, sequences, skipped_lengths = (
            torch.cat([column, column.new_tensor([filler_value])])
            for column, filler_value in ((lengths, 0), (sizes, filler), (sequences, 0), (skipped_lengths, 0))
        )
        is_first = torch.cat([is_first, is_first.new_ones(1)])
    cu_seqlens = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    starts = cu_seqlens[:-1]
    prompt_starts = starts[is_first][is_first.cumsum(0) - 1]
    offsets = torch.arange(total + filler) - torch.repeat_interleave(starts, sizes)
    is_real = offsets < torch.repeat_interleave(lengths, sizes)
    positions = offsets + torch.repeat_interleave(skipped_lengths, sizes)
    # The last token of a shared prompt predicts the first token of each response.
    prompt_ends = torch.repeat_interleave(prompt_starts + skipped_lengths, sizes) - 1
    return PackLayout(
        cu_seqlens,
        is_real,
        positions,
        token_indices=(torch.repeat_interleave(batch.cu_seqlens[sequences], sizes) + positions)[is_real],
        predictors=torch.where(offsets == 0, prompt_ends, torch.arange(total + filler) - 1),
        prompts=None if is_first.all() else (prompt_starts, skipped_lengths),
    )


def _fill_pack(values: Tensor, is_real: Tensor, filler: int | bool) -> Tensor:
    """Return values of real tokens at their positions in the pack, [t, ...], and `filler` elsewhere."""
    padded = values.new_full((len(is_real), *values.shape[1:]), filler)
    padded[is_real] = values
    return padded


def make_label_fields(
    pack_indices: Tensor,
    predictors: Tensor,
    labels: Tensor,
    cp_places: tuple[Tensor, Tensor] | None,
    device: Any,
) -> dict[str, Any]:
    """Return a MicroBatch's pack_indices, logit_indices, labels and order on this rank.

    pack_indices  int64 [r], the labels' positions in the pack, on the host
    predictors    int64 [r], the positions that predict them
    labels        int64 [r], tokens
    cp_places     as in MicroBatch"""
    fields = {"pack_indices": pack_indices}
    if cp_places is None:
        return {**fields, "logit_indices": predictors.to(device), "labels": labels.to(device)}
    cp = parallel_state.get_context_parallel_world_size()
    rank, position = (column[predictors] for column in cp_places)
    counts = torch.bincount(rank, minlength=cp)
    width = int(counts.max())
    order = torch.empty_like(pack_indices)
    for r in range(cp):
        order[rank == r] = r * width + torch.arange(int(counts[r]))
    is_local = rank == parallel_state.get_context_parallel_rank()
    padded = F.pad(torch.stack((position, labels))[:, is_local], (0, width - int(is_local.sum()))).to(device)
    return {**fields, "logit_indices": padded[0], "labels": padded[1], "order": order.to(device)}


def add_candidates(micro_batch: MicroBatch, candidates: Tensor | None) -> Tensor:
    """Return the labels, int64 [r] on the device; with `candidates` [T, k] also these, [r, 1 + k]."""
    if candidates is None:
        return micro_batch.labels
    candidates = candidates[micro_batch.token_indices].long()
    if micro_batch.order is not None:
        count, order = micro_batch.labels.numel(), micro_batch.order.cpu()
        is_local = order // max(count, 1) == parallel_state.get_context_parallel_rank()
        local_candidates = candidates.new_zeros(count, candidates.shape[1])
        local_candidates[order[is_local] % max(count, 1)] = candidates[is_local]
        candidates = local_candidates
    return torch.cat([micro_batch.labels[:, None], candidates.to(micro_batch.labels.device)], 1)


def renormalise(output: tuple[Tensor, ...], labels: Tensor) -> tuple[Tensor, ...]:
    """Return the actor's output with log-probs of the sampled tokens within their sampling sets, [r].

    Its gradient to logits is one-hot - softmax over the set, and 0 elsewhere. A set without ids has all.
    Squared probabilities are summed over the set, too; the entropy stays that of the whole distribution.

    output: log-probs over the whole vocabulary [r, 1 + k], entropy, and perhaps sums of squares
    labels: int64 [r, 1 + k], each token, the ids of its set, then -1"""
    logprobs, entropy, *squares = output
    is_member = labels[:, 1:] >= 0
    has_set = is_member.any(-1)
    # Rows without a set keep finite numbers, because a gradient of 0 times infinity is NaN.
    normaliser = logprobs[:, 1:].masked_fill(~is_member & has_set[:, None], -torch.inf).logsumexp(-1)
    normaliser = torch.where(has_set, normaliser, 0.0)
    if squares:
        probs = torch.where(is_member, (logprobs[:, 1:] - normaliser[:, None]).exp(), 0.0)
        squares = [torch.where(has_set, probs.square().sum(-1), squares[0])]
    return logprobs[:, 0] - normaliser, entropy, *squares


def gather_output(micro_batch: MicroBatch, output: Any) -> Any:
    """Gather the head's outputs [r, ...] of all context-parallel ranks.

    The gradient is this rank's part: every rank computes the same loss."""
    if micro_batch.order is None or not micro_batch.order.numel():
        return output
    if isinstance(output, tuple):
        return tuple(gather_output(micro_batch, part) for part in output)
    group = parallel_state.get_context_parallel_group()
    gathered = gather_from_sequence_parallel_region(output, tensor_parallel_output_grad=False, group=group)
    return gathered.index_select(0, micro_batch.order)
