"""Dynamic sampling: which groups a step trains on (DAPO eq. 11), and these groups as columns."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from megarl.config.errors import ConfigError, DataError
from megarl.config.schema import Config, DynamicSamplingConfig
from megarl.data.batch import RolloutBatch, TrainBatch
from megarl.data.sample import Sample, SampleGroup, TokenData

SAME = 1e-6  # rewards of a smaller standard deviation count as one: group_advantages adds this to it


class GroupCollector:
    """Decides which groups a rollout step trains on. They come in generation batches or, from an engine that
    streams, one by one (`refill`):

        while n := collector.next_batch():
            collector.offer(<groups of the next n prompts, in their order>)
        groups, surplus = collector.result()

    prompts  groups wanted
    surplus  accepted groups left over from the step before, which are taken first

    Every decision follows from the groups offered, in their order, and from nothing else.
    """

    def __init__(
        self, prompts: int, dynamic: DynamicSamplingConfig, surplus: Iterable[SampleGroup] = ()
    ) -> None:
        self.prompts, self.dynamic = prompts, dynamic
        self.accepted = list(surplus)
        self.offered: list[SampleGroup] = []  # of this step, in order
        self.rejected: list[SampleGroup] = []
        self.batches = 0
        self.submitted = 0  # prompts, where the engine streams

    @property
    def missing(self) -> int:
        """Return how many groups are still to be accepted."""
        return max(0, self.prompts - len(self.accepted))

    def next_batch(self) -> int:
        """Return the prompts of the next generation batch; 0 when the step has what it needs or has reached
        its limit.

        Raises DataError (ConfigError where nothing was judged) at the limit where the configuration says
        stop."""
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
        """Return how many prompts to submit beside those that run. Never more run at once than `prompts` (or
        the first batch), and a step has at most `prompts` * max_batches. How many run ahead depends on time;
        which groups are accepted does not. Raises as `next_batch`.

        ahead    groups that are complete but not offered, as one before them still runs
        running  prompts whose groups are not complete"""
        missing = self.missing - sum(map(self._accepts, ahead))
        if missing <= 0:
            return 0
        if not self.submitted:
            self.submitted = self._first
            return self.submitted
        left = self.prompts * self.dynamic.max_batches - self.submitted
        if self.dynamic.enabled and left <= 0 and not running and not ahead:
            self._check_limit()
        if not self.dynamic.enabled or left <= 0 or not (self.offered or ahead):
            return 0
        more = max(0, min(left, min(self._estimate(missing, ahead), self.prompts) - running))
        self.submitted += more
        return more

    @property
    def _first(self) -> int:
        return math.ceil(self.missing * self.dynamic.oversample) if self.dynamic.enabled else self.missing

    def _differs(self, group: SampleGroup) -> bool:
        return group.is_mixed if self.dynamic.by == "accuracy" else group.reward_std > SAME

    def _accepts(self, group: SampleGroup) -> bool:
        return not self.dynamic.enabled or self._differs(group)

    def _estimate(self, missing: int, ahead: Sequence[SampleGroup]) -> int:
        """Estimate the prompts for `missing` accepted groups, by Laplace's rule: careful after few."""
        kept = len(self.offered) - len(self.rejected) + sum(map(self._differs, ahead))
        return math.ceil(missing * (len(self.offered) + len(ahead) + 2) / (kept + 1))

    def _check_limit(self) -> None:
        if self.dynamic.at_limit != "stop":
            return
        count, responses = len(self.offered), [r for group in self.offered for r in group.samples]
        errors = sorted(r.error for r in responses if r.error is not None)
        first = errors[0] if errors else "no error is known"
        if responses and not any(r.judged for r in responses):
            if first.startswith(("rollout.", "reward.")):  # the key of what has failed
                raise ConfigError(f"{first} (and no response to {count} prompts was judged)")
            raise ConfigError(f"reward.verifier: it failed on every answer of {count} prompts: {first}")
        all_failed = responses and len(errors) == len(responses)
        failed = f"; all responses have errors: {first}" if all_failed else ""
        wanted = "right and wrong answers" if self.dynamic.by == "accuracy" else "rewards that differ"
        raise DataError(
            f"rollout.dynamic_sampling.max_batches: after {self.dynamic.max_batches} generation batches "
            f"({count} prompts) only {len(self.accepted)} of {self.prompts} groups have {wanted}{failed} "
            "(raise it, choose other prompts, or set rollout.dynamic_sampling.at_limit to continue)"
        )

    def offer(self, groups: Sequence[SampleGroup]) -> None:
        """Accept or reject complete groups, in the order of their prompts."""
        self.offered += groups
        for group in groups:
            (self.accepted if self._accepts(group) else self.rejected).append(group)

    def result(self) -> tuple[list[SampleGroup], list[SampleGroup]]:
        """Return the `prompts` groups to train on, and the surplus for the next step (at most `prompts`; the
        rest is dropped). Where too few were accepted, the first rejected ones follow the accepted."""
        groups = (self.accepted + self.rejected)[: self.prompts]
        return groups, self.accepted[self.prompts : 2 * self.prompts]

    def stats(self) -> dict[str, float]:
        """Return rollout/*: counts over the groups offered in this step. kept + all right + all wrong =
        prompts, with or without filtering; by score the latter two count those that are not kept, and a group
        of right and wrong answers with one reward is in none of the three. waste: the share of their tokens
        that are neither trained on nor kept for the next step."""
        groups, surplus = self.result()
        used = {id(group) for group in (*groups, *surplus)}
        tokens = [sum(r.num_sampled for r in group.samples) for group in self.offered]
        waste = sum(n for group, n in zip(self.offered, tokens, strict=True) if id(group) not in used)
        alike = [group for group in self.offered if not self._differs(group)]
        right = sum(group.num_correct == len(group.samples) for group in alike)
        wrong = sum(group.num_correct == 0 for group in alike)
        stats = {
            "rollout/groups_kept": len(self.offered) - len(alike),
            "rollout/groups_all_right": right,
            "rollout/groups_all_wrong": wrong,
            "rollout/batches": self.batches or math.ceil(len(self.offered) / self.prompts),
            "rollout/prompts": len(self.offered),
            "rollout/tokens": sum(tokens),
            "rollout/waste": waste / max(sum(tokens), 1),
            "rollout/surplus": len(surplus),
        }
        shares = (("all_right", right), ("all_wrong", wrong)) if self.offered else ()
        return stats | {f"rollout/share_{name}": count / len(self.offered) for name, count in shares}


def make_rollout_batch(groups: Sequence[SampleGroup], *, compared: bool = True) -> RolloutBatch:
    """Return the samples of groups, in their order, as columns, with the tokens that are on this rank.

    Columns [n]:
        rewards          float32
        correct          bool
        truncated        bool
        group_ids        int64, position of the sample's group in `groups`
        response_index   int64, position in its group
        policy_version   int64, version of its oldest token
        begun            int64, tokens that earlier steps sampled; only with `rollout.window`
        unfinished       bool; only with `rollout.window`

    Columns [T], 0 for tokens that the policy did not sample:
        engine_logprobs  float32
        token_versions   int32, if some sample was continued under new weights
        turn_rewards     float32, if some turn has a reward
        routing          [T, layers, topk], if the engine's choice of experts was recorded (`routing_array`)

    A sample that does not count is its prompt alone, in a separate group. No token of it is in any loss,
    denominator or statistic. The number of rows stays the same.

    compared: whether samples are compared with their group's. Then `SampleGroup.counted` chooses those that
        count; otherwise all graded ones do.
    """
    rows = [(g, i, r) for g, group in enumerate(groups) for i, r in enumerate(group.samples)]
    samples = [r for _, _, r in rows]
    counted = {id(r) for g in groups for r in (g.counted if compared else g.samples) if r.judged}
    counts = [id(r) in counted for r in samples]
    counts_ = torch.tensor(counts)
    prompts = [np.array(group.prompt.tokens, dtype=np.int64) for group in groups]
    prompt_lengths = torch.tensor([prompts[g].size for g, _, _ in rows])
    versions = [
        groups[g].policy_version if r.oldest_version is None else r.oldest_version for g, _, r in rows
    ]
    columns = {
        "rewards": torch.tensor(
            [r.reward if id(r) in counted else 0.0 for r in samples], dtype=torch.float32
        ),
        "correct": torch.tensor([r.correct for r in samples], dtype=torch.bool),
        "truncated": torch.tensor([r.is_truncated for r in samples], dtype=torch.bool),
        "group_ids": torch.tensor(
            [g if counts[n] else len(groups) + n for n, (g, _, _) in enumerate(rows)], dtype=torch.int64
        ),
        "policy_version": torch.tensor(versions, dtype=torch.int64),
        "response_index": torch.tensor([i for _, i, _ in rows], dtype=torch.int64),
    }
    if any(r.prefix_tokens or r.is_partial for r in samples):
        columns["begun"] = torch.tensor([r.prefix_tokens for r in samples]) * counts_
        columns["unfinished"] = torch.tensor([r.is_partial for r in samples])
    here = [(row, g, r.data) for row, (g, _, r) in enumerate(rows) if r.data is not None]
    packed = [
        (prompts[g], groups[g].policy_version, data if counts[row] else data.first(0, prompts[g].size))
        for row, g, data in here
    ]
    return RolloutBatch(
        lengths=prompt_lengths + torch.tensor([r.num_tokens for r in samples]) * counts_,
        response_lengths=torch.tensor([r.num_sampled for r in samples]) * counts_,
        prompt_lengths=prompt_lengths,
        owners=torch.tensor([r.owner for r in samples], dtype=torch.int64),
        columns=columns,
        rows=torch.tensor([row for row, _, _ in here], dtype=torch.int64),
        own=pack_tokens(packed, samples),
        groups=[*groups],
    )


def pack_tokens(
    sequences: Sequence[tuple[np.ndarray, int, TokenData]], samples: Sequence[Sample]
) -> TrainBatch:
    """Pack prompts, the policy versions of their groups, and the tokens of responses.

    samples: all of the step, by which every rank makes the same columns."""
    cu_seqlens = np.cumsum([0, *(p.size + d.num_tokens for p, _, d in sequences)], dtype=np.int64)
    total = int(cu_seqlens[-1])
    tokens, mask = np.empty(total, dtype=np.int64), np.zeros(total, dtype=bool)
    logprobs, versions = np.zeros(total, dtype=np.float32), np.zeros(total, dtype=np.int32)
    rewards = np.zeros(total, dtype=np.float32)
    formats = (sample.experts_format for sample in samples)
    kind, shape = next((found for found in formats if found is not None), ("uint8", (0,)))
    none = np.iinfo(kind).max  # surplus may be of a step that recorded nothing
    routing = np.full((total, *shape), none, dtype=kind)
    for (prompt, version, data), start, end in zip(sequences, cu_seqlens, cu_seqlens[1:], strict=False):
        first = start + prompt.size
        tokens[start:first], tokens[first:end] = prompt, data.tokens
        own = mask[first:end]
        own[:] = True if data.is_sampled is None else data.is_sampled
        logprobs[first:end][own] = data.logprobs[own]
        versions[first:end][own] = version if data.policy_versions is None else data.policy_versions[own]
        if data.turn_rewards is not None:
            rewards[first:end][own] = data.turn_rewards[own]
        if data.routed_experts is not None:
            routing[start:end] = data.routed_experts
    columns = {"engine_logprobs": torch.from_numpy(logprobs)}
    if any(sample.oldest_version is not None for sample in samples):
        columns["token_versions"] = torch.from_numpy(versions)
    if any(sample.has_turn_rewards for sample in samples):
        columns["turn_rewards"] = torch.from_numpy(rewards)
    if any(sample.experts_format is not None for sample in samples):
        columns["routing"] = torch.from_numpy(routing)
    return TrainBatch(torch.from_numpy(tokens), torch.from_numpy(cu_seqlens), torch.from_numpy(mask), columns)


def method_columns(groups: Sequence[SampleGroup], config: Config) -> dict[str, Tensor]:
    """Return the further columns [n] that the advantage's method or the teachers need.

    reward_parts float32 [n, parts]: what each response got of each of `reward.parts` but the model's, without
    its weight. prompt_uids int64. teachers int64: the number of each response's teacher, -1 for none."""
    samples = [(group.prompt, sample) for group in groups for sample in group.samples]
    wanted, columns = config.algorithm.advantage_method.columns, dict[str, Tensor]()
    if "reward_parts" in wanted:
        names = [name for name in config.reward.parts if name != "model"]
        parts = [[reward_part(sample, name) for name in names] for _, sample in samples]
        columns["reward_parts"] = torch.tensor(parts, dtype=torch.float32).view(len(parts), len(names))
    if "prompt_uids" in wanted:
        columns["prompt_uids"] = torch.tensor([prompt.uid for prompt, _ in samples])
    if config.teacher.by_source:
        columns["teachers"] = torch.tensor([config.teacher.number(prompt.source) for prompt, _ in samples])
    return columns


def reward_part(sample: Sample, name: str) -> float:
    """Return what a sample got of one of `reward.parts`; 0 for a term whose verifier failed."""
    if name == "verifier":
        return float(sample.correct) if sample.score is None else sample.score
    if name == "overlong":
        return sample.overlong_penalty
    return sample.terms.get(name.removeprefix("terms."), 0.0)
