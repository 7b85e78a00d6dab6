"""Make a TrainBatch of a RolloutBatch: balance over replicas, loss weights, mini-batches."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor

from megarl.algorithms.losses import token_weights
from megarl.config.schema import Config
from megarl.data.batch import MicroBatch, RolloutBatch, TrainBatch
from megarl.data.packing import balance, balance_groups, cost, even_length
from megarl.model.builder import ModelChunks
from megarl.parallel.comm import sum_over_replicas
from megarl.parallel.delivery import deliver
from megarl.parallel.runtime import Runtime
from megarl.training.micro_batch import make_micro_batches


def make_train_batch(
    rollout: RolloutBatch,
    config: Config,
    mini_batch: int,
    seed: int,
    models: Sequence[ModelChunks],
    runtime: Runtime,
) -> TrainBatch:
    """Return this replica's sequences of a step, packed into micro-batches.

    Every rank computes the same assignment. Collective if replicas share experts.
    models: their sizes determine a sequence's cost"""
    critic_mini_batch = config.critic.mini_batch or mini_batch
    # One divides the other (config/check.py), and unions of balanced parts are balanced.
    smallest_size = min(mini_batch, critic_mini_batch)
    shares_prompts = config.update.share_prompts
    groups = rollout["group_ids"] if shares_prompts else torch.arange(rollout.num_sequences)
    sizes = (mini_batch, critic_mini_batch, smallest_size)
    actor_ids, critic_ids, smallest_ids = (mini_batch_ids(groups, size, seed) for size in sizes)
    shares = divide(rollout, smallest_ids, groups if shares_prompts else None, models, runtime.layout.dp)
    batch = take_share(rollout, shares, runtime)
    for name, weights in loss_weights(rollout, actor_ids, critic_ids, config).items():
        batch[name] = batch.spread(weights[batch.rows])
    if "prefix_tokens" in rollout:
        batch["policy_loss_weights"] = torch.where(batch.sampled_mask, batch["policy_loss_weights"], 0.0)

    prompt_lengths = rollout.prompt_lengths[batch.rows] if shares_prompts else None

    def pack(tokens: TrainBatch, ids: Tensor, chosen: Tensor) -> list[list[MicroBatch]]:
        """Pack chosen sequences by mini-batch. ids: int64 [n], of mini-batches; chosen: bool [n]"""
        mini_batches = []
        for number in ids[chosen].unique():  # those with a sequence on any replica
            indices = (chosen & (ids == number))[batch.rows].nonzero().squeeze(-1).tolist()
            budget = config.update.tokens_per_micro_batch
            packs = make_micro_batches(tokens, indices, budget, models[0], runtime, prompt_lengths)
            mini_batches.append(packs)
        return mini_batches

    all_sequences = torch.ones(rollout.num_sequences, dtype=torch.bool)
    is_finished = ~rollout["unfinished"] if "unfinished" in rollout else all_sequences
    batch.mini_batches = pack(batch, actor_ids, all_sequences)
    batch.critic_mini_batches = [batch.mini_batches]
    if config.has_prompt_critic:
        prompts, token_indices = prompts_alone(batch)
        mini_batches = pack(prompts, critic_ids, is_finished)
        for micro_batch in chain.from_iterable(mini_batches):
            micro_batch.token_indices = token_indices[micro_batch.token_indices]
        batch.critic_mini_batches = [mini_batches]
    elif config.critic.count > 1 or critic_mini_batch != mini_batch or not is_finished.all():
        critic_by_row = critic_numbers(rollout, config)
        batch.critic_mini_batches = [
            pack(batch, critic_ids, is_finished & (critic_by_row == critic))
            for critic in range(config.critic.count)
        ]
    return batch


def divide(
    rollout: RolloutBatch, ids: Tensor, groups: Tensor | None, models: Sequence[ModelChunks], replicas: int
) -> list[list[list[int]]]:
    """Return the rows of each mini-batch and replica, [mini-batch][replica], at equal cost.

    ids: int64 [n], each sequence's mini-batch
    groups: int64 [n], if responses share prompts (`update.share_prompts`)"""
    even = even_length(*map(matrix_shape, models))
    costs, prompt_costs = (
        cost(lengths.tolist(), even) for lengths in (rollout.lengths, rollout.prompt_lengths)
    )
    shares_by_mini_batch = []
    for mini_batch in range(int(ids.max()) + 1):
        rows = (ids == mini_batch).nonzero().squeeze(-1).tolist()
        if groups is not None:
            shares = balance_groups(
                [prompt_costs[row] for row in rows],
                [costs[row] - prompt_costs[row] for row in rows],
                groups[rows].tolist(),
                replicas,
            )
        else:
            shares = balance([costs[row] for row in rows], replicas)
        shares_by_mini_batch.append([[rows[i] for i in share] for share in shares])
    return shares_by_mini_batch


def take_share(
    rollout: RolloutBatch, shares: Sequence[Sequence[Sequence[int]]], runtime: Runtime
) -> TrainBatch:
    """Return this replica's sequences with their tokens. shares: see `divide`"""
    layout = runtime.layout
    rows_by_replica = [[row for part in shares for row in part[dp]] for dp in range(layout.dp)]
    rows = torch.tensor(rows_by_replica[runtime.dp_rank], dtype=torch.int64)
    if rollout.owners is None:
        batch = rollout.local.select(rows)
        batch.columns |= {name: column[rows] for name, column in rollout.columns.items()}
    else:
        ranks = range(layout.world)
        ranks_by_replica = [
            [rank for rank in ranks if layout.coords(rank).dp == dp] for dp in range(layout.dp)
        ]
        batch = deliver(runtime, rollout, rows_by_replica, ranks_by_replica)
    batch.rows = rows
    return batch


def gather_responses(
    local_values: Tensor, rollout: RolloutBatch, batch: TrainBatch, runtime: Runtime
) -> Tensor:
    """Return all replicas' numbers in rollout order [n], on every rank."""
    values = torch.zeros(rollout.num_sequences, dtype=torch.float64)
    values[batch.rows] = local_values.double()
    return sum_over_replicas(runtime, values).to(local_values.dtype)


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
    """Pack this replica's chosen sequences (bool [n], of the rollout) for a forward pass.

    Collective if replicas share experts."""
    indices, budget = chosen[batch.rows].nonzero().squeeze(-1), config.update.tokens_per_micro_batch
    names = ["group_ids"] * config.update.share_prompts + ["sampling_sets"] * ("sampling_sets" in batch)
    columns = {name: batch[name] for name in names}
    tokens = TrainBatch(batch.tokens, batch.cu_seqlens, batch.response_mask, columns)
    prompt_lengths = rollout.prompt_lengths[batch.rows] if config.update.share_prompts else None
    return make_micro_batches(tokens, indices.tolist(), budget, model, runtime, prompt_lengths)


def critic_lengths(rollout: RolloutBatch, config: Config) -> Tensor:
    if config.has_prompt_critic:
        return torch.minimum(rollout.lengths, rollout.prompt_lengths + 1)
    return rollout.lengths


def prompts_alone(batch: TrainBatch) -> tuple[TrainBatch, Tensor]:
    """Return each sequence up to its first response token, whose value is the prompt's.

    Also return the tokens' positions in `batch`."""
    prompts, lengths, starts = batch.prompt_lengths, batch.lengths, batch.cu_seqlens[:-1]
    positions = torch.arange(batch.num_tokens) - torch.repeat_interleave(starts, lengths)
    token_indices = (positions <= torch.repeat_interleave(prompts, lengths)).nonzero().squeeze(-1)
    ends = torch.minimum(lengths, prompts + 1).cumsum(0)
    columns = {name: batch[name] for name in ("group_ids",) if name in batch}
    tokens, mask = batch.tokens[token_indices], batch.response_mask[token_indices]
    return TrainBatch(tokens, torch.cat([ends.new_zeros(1), ends]), mask, columns), token_indices


def mini_batch_ids(groups: Tensor, mini_batch: int, seed: int) -> Tensor:
    """Shuffle groups by seed, for any layout, and return each sequence's mini-batch, int64 [n].

    If one size divides another, the larger mini-batches are unions of the smaller."""
    group_numbers = groups.unique(return_inverse=True)[1]
    permutation = torch.randperm(int(group_numbers.max()) + 1, generator=torch.Generator().manual_seed(seed))
    shuffled_position = torch.empty_like(permutation)
    shuffled_position[permutation] = torch.arange(len(permutation))
    ids = torch.empty_like(groups)
    ids[shuffled_position[group_numbers].argsort(stable=True)] = torch.arange(len(groups)) // mini_batch
    return ids


def loss_weights(rollout: RolloutBatch, ids: Tensor, critic_ids: Tensor, config: Config) -> dict[str, Tensor]:
    """Return policy_, nll_ and value_loss_weights of each response's tokens, float32 [n].

    Denominators are global over a mini-batch. With partial rollouts, the policy's count only tokens sampled
    in this step, the others whole finished responses."""
    truncated = rollout["truncated"]
    in_loss = ~truncated if config.reward.overlong.filter else torch.ones_like(truncated)
    aggregation, max_length = config.algorithm.aggregation, config.rollout.max_response_tokens
    lengths = rollout.response_lengths
    sampled_lengths = lengths - rollout["prefix_tokens"] if "prefix_tokens" in rollout else lengths
    value_lengths = lengths.clamp(max=1) if config.has_prompt_critic else lengths
    finished_in_loss = in_loss & ~rollout["unfinished"] if "unfinished" in rollout else in_loss
    value_loss_ids = critic_ids * config.critic.count + critic_numbers(rollout, config)
    return {
        "policy_loss_weights": token_weights(sampled_lengths, aggregation, ids, in_loss, max_length),
        "nll_loss_weights": token_weights(lengths, "token", ids, finished_in_loss & rollout["correct"]),
        "value_loss_weights": token_weights(value_lengths, "token", value_loss_ids, finished_in_loss),
    }


def matrix_shape(model: ModelChunks) -> tuple[int, int]:
    """Return matrix parameters per token and query width, summed over layers, for `even_length`."""
    c = model.config
    assert c.kv_channels is not None and c.num_query_groups is not None and c.ffn_hidden_size is not None
    query_width, key_width = c.num_attention_heads * c.kv_channels, c.num_query_groups * c.kv_channels
    mlps = c.num_layers * 3 * c.ffn_hidden_size
    if c.num_moe_experts is not None:
        assert c.moe_ffn_hidden_size is not None
        moe_width = c.moe_ffn_hidden_size * c.moe_router_topk + (c.moe_shared_expert_intermediate_size or 0)
        num_dense = c.moe_layer_freq.count(0) if isinstance(c.moe_layer_freq, list) else 0
        mlps = num_dense * 3 * c.ffn_hidden_size + (c.num_layers - num_dense) * (
            c.num_moe_experts + 3 * moe_width
        )
    attention = c.hidden_size * (2 * query_width + 2 * key_width)
    if isinstance(c, MLATransformerConfig):  # kv_channels is the width of a key there
        value_width, nope_width = c.num_attention_heads * c.v_head_dim, c.num_attention_heads * c.qk_head_dim
        attention = c.hidden_size * (c.kv_lora_rank + c.qk_pos_emb_head_dim + value_width)
        attention += c.kv_lora_rank * (nope_width + value_width)
        attention += (
            (c.q_lora_rank * (c.hidden_size + query_width)) if c.q_lora_rank else c.hidden_size * query_width
        )
        query_width = (query_width + value_width) // 2
    return c.num_layers * attention + c.hidden_size * mlps, c.num_layers * query_width
