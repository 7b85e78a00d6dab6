"""Make a TrainBatch of a RolloutBatch: balance, loss weights, micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor

from megarl.algorithms.losses import token_weights
from megarl.config.schema import Config
from megarl.data.batch import MicroBatch, RolloutBatch, TrainBatch
from megarl.data.packing import balance, balance_groups, cost, cut, even_length, pack_groups
from megarl.model.builder import ModelChunks
from megarl.model.fp8 import pack_multiple
from megarl.parallel.comm import max_over_ranks, sum_over_replicas
from megarl.parallel.delivery import deliver
from megarl.parallel.runtime import Runtime


def make_train_batch(
    rollout: RolloutBatch,
    config: Config,
    mini_batch: int,
    seed: int,
    models: Sequence[ModelChunks],
    runtime: Runtime,
) -> TrainBatch:
    """Return this replica's sequences of a step, packed into micro-batches.

    Every rank computes the same assignment. models: their sizes determine a sequence's cost."""
    critic_mini_batch = config.critic.mini_batch or mini_batch
    # One divides the other (config/check.py), and unions of balanced parts are balanced.
    finest = min(mini_batch, critic_mini_batch)
    shared = config.update.share_prompts
    groups = rollout["group_ids"] if shared else torch.arange(rollout.num_sequences)
    sizes = (mini_batch, critic_mini_batch, finest)
    ids, critic_ids, finest_ids = (mini_batch_ids(groups, size, seed) for size in sizes)
    shares_of = divide(rollout, finest_ids, groups if shared else None, models, runtime.layout.dp)
    mine = [shares[runtime.dp_rank] for shares in shares_of]
    batch = take_share(rollout, shares_of, runtime)
    rows = batch.rows
    for name, of_responses in loss_weights(rollout, ids, critic_ids, config).items():
        batch[name] = batch.spread(of_responses[rows])
    if "begun" in rollout:
        batch["policy_loss_weights"] = torch.where(batch.sampled_mask, batch["policy_loss_weights"], 0.0)
    every = torch.ones(rollout.num_sequences, dtype=torch.bool)
    ended = ~rollout["unfinished"] if "unfinished" in rollout else every
    stops = torch.tensor([0, *map(len, mine)]).cumsum(0).tolist()

    def mini_batches_of(
        size: int, read: TrainBatch, read_lengths: Tensor, chosen: Tensor
    ) -> list[list[MicroBatch]]:
        budget, made = config.update.tokens_per_micro_batch, []
        for first in range(0, len(mine), size // finest):
            stop, at_least = min(first + size // finest, len(mine)), 1
            if not any(chosen[share].any() for shares in shares_of[first:stop] for share in shares):
                continue
            # With experts spread over replicas, all replicas need the same number of passes.
            if runtime.layout.tp * runtime.layout.cp % runtime.layout.ep:
                for replica in range(runtime.layout.dp):
                    theirs = [i for shares in shares_of[first:stop] for i in shares[replica] if chosen[i]]
                    packs = _pack(
                        rollout.prompt_lengths[theirs], read_lengths[theirs], groups[theirs], budget
                    )
                    at_least = max(at_least, len(packs))
            own = [i for i in range(stops[first], stops[stop]) if chosen[rows[i]]]
            prompts_of = rollout.prompt_lengths[rows] if shared else None
            made.append(make_micro_batches(read, own, budget, models[0], at_least, prompts_of))
        return made

    batch.mini_batches = mini_batches_of(mini_batch, batch, rollout.lengths, every)
    batch.critic_mini_batches = [batch.mini_batches]
    if config.has_prompt_critic:
        read, places = prompts_alone(batch)
        alone = mini_batches_of(critic_mini_batch, read, critic_lengths(rollout, config), ended)
        batch.critic_mini_batches = [
            [[replace(one, token_indices=places[one.token_indices]) for one in some] for some in alone]
        ]
    elif config.critic.count > 1 or critic_mini_batch != mini_batch or not ended.all():
        learners = critic_numbers(rollout, config)
        batch.critic_mini_batches = [
            mini_batches_of(critic_mini_batch, batch, rollout.lengths, ended & (learners == number))
            for number in range(config.critic.count)
        ]
    return batch


def divide(
    rollout: RolloutBatch,
    mini_batch_of: Tensor,
    groups: Tensor | None,
    models: Sequence[ModelChunks],
    replicas: int,
) -> list[list[list[int]]]:
    """Divide each mini-batch's sequences among replicas at equal cost: [mini-batch][replica].

    mini_batch_of: int64 [n]; groups: int64 [n], if responses share prompts"""
    even = even_length(*map(matrix_shape, models))
    costs, of_prompts = (cost(some.tolist(), even) for some in (rollout.lengths, rollout.prompt_lengths))
    shares_of = []
    for number in range(int(mini_batch_of.max()) + 1):
        members = (mini_batch_of == number).nonzero().squeeze(-1).tolist()
        if groups is not None:
            shares = balance_groups(
                [of_prompts[i] for i in members],
                [costs[i] - of_prompts[i] for i in members],
                groups[members].tolist(),
                replicas,
            )
        else:
            shares = balance([costs[i] for i in members], replicas)
        shares_of.append([[members[i] for i in share] for share in shares])
    return shares_of


def take_share(
    rollout: RolloutBatch, shares_of: Sequence[Sequence[Sequence[int]]], runtime: Runtime
) -> TrainBatch:
    layout = runtime.layout
    of_replicas = [[i for shares in shares_of for i in shares[replica]] for replica in range(layout.dp)]
    rows = torch.tensor(of_replicas[runtime.dp_rank], dtype=torch.int64)
    if rollout.owners is None:
        batch = rollout.own.select(rows)
        batch.columns |= {name: column[rows] for name, column in rollout.columns.items()}
    else:
        ranks = range(layout.world)
        trained_by = [[rank for rank in ranks if layout.coords(rank).dp == dp] for dp in range(layout.dp)]
        batch = deliver(runtime, rollout, of_replicas, trained_by)
    batch.rows = rows
    return batch


def gather_responses(
    of_responses: Tensor, rollout: RolloutBatch, batch: TrainBatch, runtime: Runtime
) -> Tensor:
    """Return all replicas' numbers in rollout order [n], on every rank."""
    placed = torch.zeros(rollout.num_sequences, dtype=torch.float64)
    placed[batch.rows] = of_responses.double()
    return sum_over_replicas(runtime, placed).to(of_responses.dtype)


def critic_numbers(rollout: RolloutBatch, config: Config) -> Tensor:
    """Each critic sees responses to every prompt."""
    if config.critic.count == 1:
        return torch.zeros_like(rollout.lengths)
    return rollout["response_index"] % config.critic.count


def pack_chosen(
    chosen: Tensor,
    rollout: RolloutBatch,
    batch: TrainBatch,
    config: Config,
    model: ModelChunks,
    runtime: Runtime,
) -> list[MicroBatch]:
    """Pack this replica's `chosen` sequences, bool [n] of the rollout."""
    rows, groups, shared = batch.rows, torch.arange(rollout.num_sequences), config.update.share_prompts
    groups, prompts = rollout["group_ids"] if shared else groups, rollout.prompt_lengths
    own, budget, at_least = chosen[rows].nonzero().squeeze(-1), config.update.tokens_per_micro_batch, 1
    if runtime.layout.tp * runtime.layout.cp % runtime.layout.ep:
        packs = _pack(prompts[rows[own]], rollout.lengths[rows[own]], groups[rows[own]], budget)
        at_least = max(at_least, int(max_over_ranks(runtime, len(packs))))
    columns, of_prompts = dict[str, Tensor](), None
    if shared:
        columns, of_prompts = {"group_ids": batch["group_ids"]}, prompts[rows]
    read = TrainBatch(batch.tokens, batch.cu_seqlens, batch.response_mask, columns)
    return make_micro_batches(read, own.tolist(), budget, model, at_least, of_prompts)


def critic_lengths(rollout: RolloutBatch, config: Config) -> Tensor:
    if config.has_prompt_critic:
        return torch.minimum(rollout.lengths, rollout.prompt_lengths + 1)
    return rollout.lengths


def prompts_alone(batch: TrainBatch) -> tuple[TrainBatch, Tensor]:
    """Return each sequence up to its first response token, whose value is the prompt's.

    Also return the tokens' positions in `batch`."""
    prompts, lengths, starts = batch.prompt_lengths, batch.lengths, batch.cu_seqlens[:-1]
    within = torch.arange(batch.num_tokens) - torch.repeat_interleave(starts, lengths)
    places = (within <= torch.repeat_interleave(prompts, lengths)).nonzero().squeeze(-1)
    ends = torch.minimum(lengths, prompts + 1).cumsum(0)
    columns = {name: batch[name] for name in ("group_ids",) if name in batch}
    tokens, mask = batch.tokens[places], batch.response_mask[places]
    return TrainBatch(tokens, torch.cat([ends.new_zeros(1), ends]), mask, columns), places


def mini_batch_ids(groups: Tensor, mini_batch: int, seed: int) -> Tensor:
    """Shuffle groups by seed, for any layout, and return each sequence's mini-batch, int64 [n].

    If one size divides another, the larger mini-batches are unions of the smaller."""
    numbers = groups.unique(return_inverse=True)[1]
    shuffled = torch.randperm(int(numbers.max()) + 1, generator=torch.Generator().manual_seed(seed))
    place = torch.empty_like(shuffled)
    place[shuffled] = torch.arange(len(shuffled))
    ids = torch.empty_like(groups)
    ids[place[numbers].argsort(stable=True)] = torch.arange(len(groups)) // mini_batch
    return ids


def loss_weights(rollout: RolloutBatch, ids: Tensor, critic_ids: Tensor, config: Config) -> dict[str, Tensor]:
    """Return policy_, nll_ and value_loss_weights of each response's tokens, float32 [n].

    Denominators are global over a mini-batch. With partial rollouts, the policy's count only tokens sampled
    in this step, the others whole finished responses."""
    truncated = rollout["truncated"]
    kept = ~truncated if config.reward.overlong.filter else torch.ones_like(truncated)
    aggregation, longest = config.algorithm.aggregation, config.rollout.max_response_tokens
    lengths = rollout.response_lengths
    drawn = lengths - rollout["begun"] if "begun" in rollout else lengths
    valued = lengths.clamp(max=1) if config.has_prompt_critic else lengths
    ended = kept & ~rollout["unfinished"] if "unfinished" in rollout else kept
    of_critics = critic_ids * config.critic.count + critic_numbers(rollout, config)
    return {
        "policy_loss_weights": token_weights(drawn, aggregation, ids, kept, longest),
        "nll_loss_weights": token_weights(lengths, "token", ids, ended & rollout["correct"]),
        "value_loss_weights": token_weights(valued, "token", of_critics, ended),
    }


def matrix_shape(model: ModelChunks) -> tuple[int, int]:
    """Return matrix parameters and query width, summed over layers, for `even_length`."""
    c = model.config
    assert c.kv_channels is not None and c.num_query_groups is not None and c.ffn_hidden_size is not None
    queries, keys = c.num_attention_heads * c.kv_channels, c.num_query_groups * c.kv_channels
    mlps = c.num_layers * 3 * c.ffn_hidden_size
    if c.num_moe_experts is not None:
        assert c.moe_ffn_hidden_size is not None
        columns = c.moe_ffn_hidden_size * c.moe_router_topk + (c.moe_shared_expert_intermediate_size or 0)
        dense = c.moe_layer_freq.count(0) if isinstance(c.moe_layer_freq, list) else 0
        mlps = dense * 3 * c.ffn_hidden_size + (c.num_layers - dense) * (c.num_moe_experts + 3 * columns)
    attention = c.hidden_size * (2 * queries + 2 * keys)
    if isinstance(c, MLATransformerConfig):  # kv_channels is the width of a key there
        values, unrotated = c.num_attention_heads * c.v_head_dim, c.num_attention_heads * c.qk_head_dim
        attention = c.hidden_size * (c.kv_lora_rank + c.qk_pos_emb_head_dim + values)
        attention += c.kv_lora_rank * (unrotated + values)
        attention += (c.q_lora_rank * (c.hidden_size + queries)) if c.q_lora_rank else c.hidden_size * queries
        queries = (queries + values) // 2
    return c.num_layers * attention + c.hidden_size * mlps, c.num_layers * queries


def locate(
    at: Tensor, before: Tensor, labels: Tensor, places: tuple[Tensor, Tensor] | None, device: Any
) -> dict[str, Any]:
    """Return a MicroBatch's at, logit_indices, labels and order on this rank.

    at: int64 [r], positions in the pack, on the host; before: [r], positions that predict them;
    labels: [r], their tokens; places: a MicroBatch's `cut`"""
    if places is None:
        return {"at": at, "logit_indices": before.to(device), "labels": labels.to(device)}
    cp = parallel_state.get_context_parallel_world_size()
    rank, place = (of[before] for of in places)
    counts = torch.bincount(rank, minlength=cp)
    most = int(counts.max())
    order = torch.empty_like(at)
    for r in range(cp):
        order[rank == r] = r * most + torch.arange(int(counts[r]))
    mine = rank == parallel_state.get_context_parallel_rank()
    filled = F.pad(torch.stack((place, labels))[:, mine], (0, most - int(mine.sum()))).to(device)
    return {"at": at, "logit_indices": filled[0], "labels": filled[1], "order": order.to(device)}


def labels_and_others(micro_batch: MicroBatch) -> Tensor:
    """Return `labels`, int64 [r], or with `others` [r, 1 + k], on the device."""
    if micro_batch.others is None:
        return micro_batch.labels
    others = micro_batch.others[micro_batch.token_indices].long()
    if micro_batch.order is not None:
        count, order = micro_batch.labels.numel(), micro_batch.order.cpu()
        mine = order // max(count, 1) == parallel_state.get_context_parallel_rank()
        placed = others.new_zeros(count, others.shape[1])
        placed[order[mine] % max(count, 1)] = others[mine]
        others = placed
    return torch.cat([micro_batch.labels[:, None], others.to(micro_batch.labels.device)], 1)


def gather_output(micro_batch: MicroBatch, of_head: Any) -> Any:
    """Gather the head's outputs [r, ...] of all context-parallel ranks.

    The gradient is this rank's part: every rank computes the same loss."""
    if micro_batch.order is None or not micro_batch.order.numel():
        return of_head
    if isinstance(of_head, tuple):
        return tuple(gather_output(micro_batch, one) for one in of_head)
    group = parallel_state.get_context_parallel_group()
    whole = gather_from_sequence_parallel_region(of_head, tensor_parallel_output_grad=False, group=group)
    return whole.index_select(0, micro_batch.order)


def _pack(prompts: Tensor, lengths: Tensor, groups: Tensor, budget: int) -> list[list[list[int]]]:
    return pack_groups(prompts.tolist(), (lengths - prompts).tolist(), groups.tolist(), budget)


def make_micro_batches(
    batch: TrainBatch,
    indices: Sequence[int],
    max_tokens: int,
    model: ModelChunks,
    at_least: int = 1,
    shared: Tensor | None = None,
) -> list[MicroBatch]:
    """Pack the sequences `indices` into at least `at_least` micro-batches of at most `max_tokens`.

    Replicas without sequences take part with filler tokens. Virtual stages need a multiple of the pipeline's
    ranks.

    shared: int64 [n], lengths of prompts that are stored once per `group_ids`"""
    device, multiple = model.device, pack_multiple(model.config)
    cp = model.config.context_parallel_size
    wanted = torch.as_tensor(indices, dtype=torch.int64)
    groups = torch.arange(len(wanted)) if shared is None else batch["group_ids"][wanted]
    prompts = batch.prompt_lengths if shared is None else shared
    packs = _pack(prompts[wanted], batch.lengths[wanted], groups, max_tokens)
    wanted_packs, c = max(len(packs), at_least), model.config
    if c.virtual_pipeline_model_parallel_size is not None:
        wanted_packs += -wanted_packs % c.pipeline_model_parallel_size
    micro_batches = []
    for families in packs + [[]] * (wanted_packs - len(packs)):
        # A family's first sequence has its prompt (from `prompt`), the others skip it (`skipped` tokens).
        index = wanted[torch.tensor([i for family in families for i in family], dtype=torch.int64)]
        first = torch.tensor([n == 0 for family in families for n in range(len(family))], dtype=torch.bool)
        lengths = batch.lengths[index]
        skipped = torch.where(first, 0, prompts[index])
        lengths = lengths - skipped
        sizes = lengths + -lengths % (2 * cp) if cp > 1 else lengths
        total = int(sizes.sum())
        filler = -total % multiple or (multiple if total == 0 else 0)
        if filler:
            lengths, sizes, index, skipped = (
                torch.cat([of, of.new_tensor([n])])
                for of, n in ((lengths, 0), (sizes, filler), (index, 0), (skipped, 0))
            )
            first = torch.cat([first, first.new_ones(1)])
        cu_seqlens = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
        starts = cu_seqlens[:-1]
        prompt = starts[first][first.cumsum(0) - 1]
        within = torch.arange(total + filler) - torch.repeat_interleave(starts, sizes)
        is_real = within < torch.repeat_interleave(lengths, sizes)
        positions = within + torch.repeat_interleave(skipped, sizes)
        token_indices = (torch.repeat_interleave(batch.cu_seqlens[index], sizes) + positions)[is_real]
        tokens = torch.zeros(total + filler, dtype=torch.int64)
        tokens[is_real] = batch.tokens[token_indices]
        is_response = torch.zeros(total + filler, dtype=torch.bool)
        is_response[is_real] = batch.response_mask[token_indices]
        at = is_response.nonzero().squeeze(-1)
        # The last token of a shared prompt predicts the first token of each response.
        ends = torch.repeat_interleave(prompt + skipped, sizes) - 1
        before = torch.where(within == 0, ends, torch.arange(total + filler) - 1)[at]
        places = cut(cu_seqlens, cp) if cp > 1 else None
        here = places[0] == parallel_state.get_context_parallel_rank() if places else slice(None)
        packed, routing = model.pack(cu_seqlens, None if first.all() else (prompt, skipped)), None
        packed.real_tokens = is_real[here]
        if "routing" in batch:
            recorded = batch["routing"]
            none = torch.iinfo(recorded.dtype).max
            routing = recorded.new_full((total + filler, *recorded.shape[1:]), none)
            routing[is_real] = recorded[token_indices]
            routing = routing[here].transpose(0, 1).contiguous()
        micro_batches.append(
            MicroBatch(
                tokens=tokens[here][None].to(device),
                positions=positions[here][None].to(device),
                packed=packed,
                token_indices=token_indices[batch.response_mask[token_indices]],
                routing=routing,
                cut=places,
                **locate(at, before, tokens[at], places, device),
            )
        )
    return micro_batches
