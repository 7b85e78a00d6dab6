"""Dynamic sampling (DAPO eq. 11), and a step's groups as columns."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megarl.config.errors import ConfigError, DataError
from megarl.config.schema import Config, DynamicSamplingConfig
from megarl.data.batch import RolloutBatch, TrainBatch
from megarl.data.sample import Sample, SampleGroup, TokenData

# Largest standard deviation of rewards that count as equal. group_advantages divides by std + this.
SAME = 1e-6


class GroupCollector:
    """Decides which groups a step trains on. Only the offered groups and their order matter, not timing.

    surplus: accepted groups that the previous step did not need"""

    def __init__(
        self, prompts: int, dynamic: DynamicSamplingConfig, surplus: Iterable[SampleGroup] = ()
    ) -> None:
        self.prompts, self.dynamic = prompts, dynamic
        self.accepted = list(surplus)
        self.offered: list[SampleGroup] = []
        self.rejected: list[SampleGroup] = []
        self.batches = 0
        self.submitted = 0

    @property
    def missing(self) -> int:
        return max(0, self.prompts - len(self.accepted))

    @property
    def is_full(self) -> bool:
        """Return whether the step has its groups, at `max_batches` with rejected ones.

        Raises as `next_batch`."""
        if not self.missing or len(self.offered) < self.prompts * self.dynamic.max_batches:
            return not self.missing
        self._check_limit()
        return True

    def next_batch(self) -> int:
        """Return the size of the next generation batch; 0 if none is needed or allowed.

        Raises DataError at the limit if `at_limit` is "stop"; ConfigError if nothing was graded."""
        if not self.missing:
            return 0
        if self.batches >= self.dynamic.max_batches:
            self._check_limit()
            return 0
        self.batches += 1
        if self.batches == 1:
            return self._first
        return min(self.prompts, max(self.missing, self._estimate(self.missing, ())))

    def refill(self, ahead: Sequence[SampleGroup], running: int) -> int:
        """Return how many prompts to add with continuous batching. Raises as `next_batch`.

        The number depends on timing; the accepted groups do not.

        ahead: complete groups that wait for an earlier one; running: incomplete groups"""
        missing = self.missing - sum(map(self._accepts, ahead))
        if missing <= 0:
            return 0
        if not self.submitted:
            self.submitted = self._first
            return self.submitted
        prompts_left = self.prompts * self.dynamic.max_batches - self.submitted
        if self.dynamic.enabled and prompts_left <= 0 and not running and not ahead:
            self._check_limit()
        if not self.dynamic.enabled or prompts_left <= 0 or not (self.offered or ahead):
            return 0
        new_prompts = max(0, min(prompts_left, min(self._estimate(missing, ahead), self.prompts) - running))
        self.submitted += new_prompts
        return new_prompts

    @property
    def _first(self) -> int:
        return math.ceil(self.missing * self.dynamic.oversample) if self.dynamic.enabled else self.missing

    def _differs(self, group: SampleGroup) -> bool:
        if self.dynamic.by == "accuracy":
            return group.is_mixed
        rewards = [sample.reward for sample in group.counted]
        return bool(rewards) and float(np.std(rewards)) > SAME

    def _accepts(self, group: SampleGroup) -> bool:
        return not self.dynamic.enabled or self._differs(group)

    def _estimate(self, missing: int, ahead: Sequence[SampleGroup]) -> int:
        """Estimate prompts for `missing` groups by Laplace's rule of succession."""
        num_kept = len(self.offered) - len(self.rejected) + sum(map(self._differs, ahead))
        return math.ceil(missing * (len(self.offered) + len(ahead) + 2) / (num_kept + 1))

    def _check_limit(self) -> None:
        if self.dynamic.at_limit != "stop":
            return
        count, responses = len(self.offered), [r for group in self.offered for r in group.samples]
        errors = sorted(r.error for r in responses if r.error is not None)
        first_error = errors[0] if errors else "no error is known"
        if responses and not any(r.graded for r in responses):
            if first_error.startswith(("rollout.", "reward.")):
                raise ConfigError(f"{first_error} (and no response to {count} prompts was graded)")
            raise ConfigError(f"reward.verifier: it failed on every answer of {count} prompts: {first_error}")
        all_failed = responses and len(errors) == len(responses)
        error_text = f"; all responses have errors: {first_error}" if all_failed else ""
        requirement = "right and wrong answers" if self.dynamic.by == "accuracy" else "rewards that differ"
        raise DataError(
            f"rollout.dynamic_sampling.max_batches: after {self.dynamic.max_batches} generation batches "
            f"({count} prompts) only {len(self.accepted)} of {self.prompts} groups have "
            f"{requirement}{error_text} "
            "(raise it, choose other prompts, or set rollout.dynamic_sampling.at_limit to continue)"
        )

    def offer(self, groups: Sequence[SampleGroup]) -> None:
        self.offered += groups
        for group in groups:
            (self.accepted if self._accepts(group) else self.rejected).append(group)

    def result(self) -> tuple[list[SampleGroup], list[SampleGroup]]:
        """Return `prompts` groups, rejected ones last, and surplus groups."""
        groups = (self.accepted + self.rejected)[: self.prompts]
        return groups, self.accepted[self.prompts : 2 * self.prompts]

    def stats(self) -> dict[str, float]:
        """Return rollout/* of the groups offered in this step."""
        groups, surplus = self.result()
        used_ids = {id(group) for group in (*groups, *surplus)}
        tokens = [sum(r.num_sampled for r in group.samples) for group in self.offered]
        waste = sum(n for group, n in zip(self.offered, tokens, strict=True) if id(group) not in used_ids)
        uniform_groups = [group for group in self.offered if not self._differs(group)]
        num_right = sum(group.num_correct == len(group.samples) for group in uniform_groups)
        num_wrong = sum(group.num_correct == 0 for group in uniform_groups)
        stats = {
            "rollout/groups_kept": len(self.offered) - len(uniform_groups),
            "rollout/groups_all_right": num_right,
            "rollout/groups_all_wrong": num_wrong,
            "rollout/batches": self.batches or math.ceil(len(self.offered) / self.prompts),
            "rollout/prompts": len(self.offered),
            "rollout/tokens": sum(tokens),
            "rollout/waste": waste / max(sum(tokens), 1),
            "rollout/surplus": len(surplus),
        }
        counts = (("all_right", num_right), ("all_wrong", num_wrong)) if self.offered else ()
        return stats | {f"rollout/share_{name}": count / len(self.offered) for name, count in counts}


def make_rollout_batch(groups: Sequence[SampleGroup], *, compared: bool = True) -> RolloutBatch:
    """Return the samples of groups as columns, with the tokens on this rank.

    A sample that does not count keeps its row, with its prompt only and a separate group id. So it adds
    nothing to losses, denominators or statistics.

    compared: whether advantages compare a group's samples. Then `SampleGroup.counted` count, else all graded
        samples."""
    samples = [sample for group in groups for sample in group.samples]
    group_ids = [g for g, group in enumerate(groups) for _ in group.samples]
    counted_ids = {id(r) for g in groups for r in (g.counted if compared else g.samples) if r.graded}
    is_counted = torch.tensor([id(sample) in counted_ids for sample in samples])
    prompts = [np.array(group.prompt.tokens, dtype=np.int64) for group in groups]
    prompt_lengths = torch.tensor([prompts[g].size for g in group_ids])
    local_rows = [
        (row, g, s.data) for row, (g, s) in enumerate(zip(group_ids, samples, strict=True)) if s.data
    ]
    sequences = [
        (prompts[g], groups[g].policy_version, data if is_counted[row] else data.first(0, prompts[g].size))
        for row, g, data in local_rows
    ]
    return RolloutBatch(
        lengths=prompt_lengths + torch.tensor([s.num_tokens for s in samples]) * is_counted,
        response_lengths=torch.tensor([s.num_sampled for s in samples]) * is_counted,
        prompt_lengths=prompt_lengths,
        owners=torch.tensor([s.owner for s in samples], dtype=torch.int64),
        columns=_sample_columns(groups, samples, group_ids, is_counted),
        rows=torch.tensor([row for row, _, _ in local_rows], dtype=torch.int64),
        local=pack_tokens(sequences, samples),
        groups=[*groups],
    )


def _sample_columns(
    groups: Sequence[SampleGroup], samples: Sequence[Sample], group_ids: Sequence[int], is_counted: Tensor
) -> dict[str, Tensor]:
    """Return the columns [n] of all samples.

    rewards         float32
    correct         bool
    truncated       bool
    group_ids       int64, position in `groups`; a separate one if the sample does not count
    policy_version  int64, of the oldest token
    response_index  int64, position in its group
    prefix_tokens   int64, sampled by earlier steps
    unfinished      bool, whether a later step continues the sample

    The last two exist only if some sample is partial or continued (`rollout.window`)."""
    rows = list(zip(group_ids, samples, is_counted.tolist(), strict=True))
    ids = [g if counts else len(groups) + row for row, (g, _, counts) in enumerate(rows)]
    versions = [
        groups[g].policy_version if s.oldest_version is None else s.oldest_version for g, s, _ in rows
    ]
    rewards = [sample.reward if counts else 0.0 for _, sample, counts in rows]
    response_indices = [i for group in groups for i in range(len(group.samples))]
    columns = {
        "rewards": torch.tensor(rewards, dtype=torch.float32),
        "correct": torch.tensor([sample.correct for sample in samples], dtype=torch.bool),
        "truncated": torch.tensor([sample.is_truncated for sample in samples], dtype=torch.bool),
        "group_ids": torch.tensor(ids, dtype=torch.int64),
        "policy_version": torch.tensor(versions, dtype=torch.int64),
        "response_index": torch.tensor(response_indices, dtype=torch.int64),
    }
    if any(sample.prefix_tokens or sample.is_partial for sample in samples):
        columns["prefix_tokens"] = torch.tensor([sample.prefix_tokens for sample in samples]) * is_counted
        columns["unfinished"] = torch.tensor([sample.is_partial for sample in samples])
    return columns


def pack_tokens(
    sequences: Sequence[tuple[np.ndarray, int, TokenData]], samples: Sequence[Sample]
) -> TrainBatch:
    """Pack prompts and responses of this rank.

    Columns [T], 0 for tokens that the policy did not sample:
        engine_logprobs  float32
        token_versions   int32, if some sample was continued under new weights
        turn_rewards     float32, if some turn has a reward
        routing          uint8 or int16 [T, layers, topk], routed experts as in `routing_array`, if recorded
        sampling_sets    int32 [T, k], ids that each token was sampled from, then -1, if recorded

    Args:
        sequences: of this rank: prompt, its group's policy version, response
        samples: of the whole step; they decide which columns exist, so all ranks have the same"""
    cu_seqlens = np.cumsum([0, *(p.size + d.num_tokens for p, _, d in sequences)], dtype=np.int64)
    total = int(cu_seqlens[-1])
    tokens, mask = np.empty(total, dtype=np.int64), np.zeros(total, dtype=bool)
    columns = {
        name: np.full((total, *shape), filler, dtype)
        for name, (dtype, shape, filler) in _describe_token_columns(samples).items()
    }
    for (prompt, version, data), (start, end) in zip(sequences, pairwise(cu_seqlens), strict=True):
        prompt_end = start + prompt.size
        tokens[start:prompt_end], tokens[prompt_end:end] = prompt, data.tokens
        is_sampled = mask[prompt_end:end]
        is_sampled[:] = True if data.is_sampled is None else data.is_sampled
        columns["engine_logprobs"][prompt_end:end][is_sampled] = data.logprobs[is_sampled]
        if "token_versions" in columns:
            versions = data.policy_versions
            columns["token_versions"][prompt_end:end][is_sampled] = (
                version if versions is None else versions[is_sampled]
            )
        if data.turn_rewards is not None:
            columns["turn_rewards"][prompt_end:end][is_sampled] = data.turn_rewards[is_sampled]
        if data.routed_experts is not None:
            columns["routing"][start:end] = data.routed_experts
        if data.sampling_sets is not None:
            columns["sampling_sets"][prompt_end:end, : data.sampling_sets.shape[1]] = data.sampling_sets
    tensors = {name: torch.from_numpy(column) for name, column in columns.items()}
    return TrainBatch(torch.from_numpy(tokens), torch.from_numpy(cu_seqlens), torch.from_numpy(mask), tensors)


def _describe_token_columns(samples: Sequence[Sample]) -> dict[str, tuple[Any, tuple[int, ...], int]]:
    """Return dtype, shape of a token's value and filler of each column that `pack_tokens` makes."""
    columns: dict[str, tuple[Any, tuple[int, ...], int]] = {"engine_logprobs": (np.float32, (), 0)}
    if any(sample.oldest_version is not None for sample in samples):
        columns["token_versions"] = np.int32, (), 0
    if any(sample.has_turn_rewards for sample in samples):
        columns["turn_rewards"] = np.float32, (), 0
    formats = [sample.experts_format for sample in samples if sample.experts_format is not None]
    if formats:
        dtype, shape = formats[0]
        # The largest number is no expert. It fills rows of surplus samples that lack routing.
        columns["routing"] = dtype, shape, int(np.iinfo(dtype).max)
    if set_width := max((sample.set_width for sample in samples), default=0):
        columns["sampling_sets"] = np.int32, (set_width,), -1
    return columns


def make_method_columns(groups: Sequence[SampleGroup], config: Config) -> dict[str, Tensor]:
    """Return the columns [n] that advantages or teachers need.

    reward_parts  float32 [n, parts], `reward.parts` without the model's, unweighted
    prompt_uids   int64
    teachers      int64; -1: none"""
    samples = [(group.prompt, sample) for group in groups for sample in group.samples]
    column_names, columns = config.algorithm.advantage_method.columns, dict[str, Tensor]()
    if "reward_parts" in column_names:
        names = [name for name in config.reward.parts if name != "model"]
        parts = [[reward_part(sample, name) for name in names] for _, sample in samples]
        columns["reward_parts"] = torch.tensor(parts, dtype=torch.float32).view(len(parts), len(names))
    if "prompt_uids" in column_names:
        columns["prompt_uids"] = torch.tensor([prompt.uid for prompt, _ in samples])
    if config.teacher.by_source:
        columns["teachers"] = torch.tensor([config.teacher.number(prompt.source) for prompt, _ in samples])
    return columns


def reward_part(sample: Sample, name: str) -> float:
    if name == "verifier":
        return float(sample.correct) if sample.score is None else sample.score
    if name == "overlong":
        return sample.overlong_penalty
    return sample.terms.get(name.removeprefix("terms."), 0.0)
