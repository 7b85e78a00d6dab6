"""From the groups of a step to its RolloutBatch, and their metrics."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import compress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megarl.config.schema import Config
from megarl.data.batch import RolloutBatch, TrainBatch
from megarl.data.sample import Sample, SampleGroup, TokenData
from megarl.observe.run_log import SampleRecord, choose_samples


def response_stats(responses: Sequence[Sample]) -> dict[str, float]:
    """Return reward/*, response/* and reflection/* over those of `responses` (at least one) that were judged;
    no mean over nothing. response/length_* count sampled tokens. reward/score where the verifier has graded
    one; reward/term_<name> without weights, and 0 where the answer has an error. Where there are turns or
    calls to speak of, episode/*: their means, and that of observed tokens. Of all: reward/unverified, the
    share with an error of the verifier, and reward/unjudged, the share on which that says nothing."""
    failures = {
        "reward/unverified": sum(r.error is not None for r in responses) / len(responses),
        "reward/unjudged": sum(not r.judged for r in responses) / len(responses),
    }
    responses = [r for r in responses if r.judged]
    if not responses:
        return failures
    lengths = [r.num_sampled for r in responses]
    count = len(responses)
    graded = any(r.score is not None for r in responses)
    terms = dict.fromkeys(name for r in responses for name in r.terms)
    stats = {
        **failures,
        "reward/mean": sum(r.reward for r in responses) / count,
        "reward/accuracy": sum(r.correct for r in responses) / count,
        "reward/truncated": sum(r.is_truncated for r in responses) / count,
        "reward/overlong_penalty": sum(r.overlong_penalty for r in responses) / count,
        "response/length_mean": sum(lengths) / count,
        "response/length_min": min(lengths),
        "response/length_max": max(lengths),
        **({"reward/score": mean_score(responses)} if graded else {}),
        **{f"reward/term_{name}": sum(r.terms.get(name, 0.0) for r in responses) / count for name in terms},
    }
    for name, flag in (("right", True), ("wrong", False)):
        if chosen := [n for r, n in zip(responses, lengths, strict=True) if r.correct == flag]:
            stats[f"response/length_{name}"] = sum(chosen) / len(chosen)
    if any(r.turns > 1 or r.calls for r in responses):
        stats["episode/turns_mean"] = sum(r.turns for r in responses) / count
        stats["episode/calls_mean"] = sum(r.calls for r in responses) / count
        stats["episode/observed_mean"] = sum(r.num_tokens - r.num_sampled for r in responses) / count
    if all(r.reflects is not None for r in responses):
        with_words, without = ([r.correct for r in responses if r.reflects is flag] for flag in (True, False))
        stats["reflection/share"] = len(with_words) / count
        if with_words and without:  # else there is nothing to compare: reward/accuracy says it all
            stats["reflection/accuracy"] = sum(with_words) / len(with_words)
            stats["reflection/accuracy_without"] = sum(without) / len(without)
    return stats


def length_error(groups: Sequence[SampleGroup]) -> dict[str, float]:
    """Return response/length_error: the standard error of response/length_mean, in tokens. Responses to one
    prompt are alike, so that what is drawn at random is prompts: the sum over them of the squares of their
    responses' deviations together. Nothing where fewer than two prompts have responses that were judged."""
    of_each = [[r.num_sampled for r in group.samples if r.judged] for group in groups]
    of_each = [lengths for lengths in of_each if lengths]
    prompts, count = len(of_each), sum(map(len, of_each))
    if prompts < 2:
        return {}
    mean = sum(map(sum, of_each)) / count
    squares = sum((sum(lengths) - mean * len(lengths)) ** 2 for lengths in of_each)
    return {"response/length_error": math.sqrt(squares * prompts / (prompts - 1)) / count}


def of_sources(groups: Iterable[SampleGroup]) -> dict[str, list[SampleGroup]]:
    """Return the groups by their prompts' data_source, as metrics name it."""
    found: dict[str, list[SampleGroup]] = {}
    for group in groups:
        found.setdefault(group.prompt.source_name, []).append(group)
    return dict(sorted(found.items()))


def source_stats(groups: Sequence[SampleGroup]) -> dict[str, float]:
    """Return source/<name>/*, where there are several sources: responses, accuracy, score where the verifier
    grades, mean length in tokens."""
    stats: dict[str, float] = {}
    sources = of_sources(groups)
    for name, some in sources.items() if len(sources) > 1 else ():
        responses = [response for group in some for response in group.samples]
        of_all, keys = response_stats(responses), ("reward/accuracy", "reward/score", "response/length_mean")
        stats[f"source/{name}/responses"] = len(responses)
        for short, key in zip(("accuracy", "score", "length"), keys, strict=True):
            if key in of_all:
                stats[f"source/{name}/{short}"] = of_all[key]
    return stats


def mean_score(responses: Sequence[Sample]) -> float:
    """Return the mean of the verifier's scores; where it gave none, 1 is right and 0 wrong."""
    return math.fsum(r.correct if r.score is None else r.score for r in responses) / len(responses)


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


def groups_to_show(groups: Sequence[SampleGroup], limit: int) -> Sequence[SampleGroup]:
    """Return the first groups, among which `records` chooses."""
    return groups[: max(2, math.ceil(limit / len(groups[0].samples)))] if limit else []


def records(step: int, groups: Sequence[SampleGroup], tokenizer: Any, limit: int) -> dict[int, SampleRecord]:
    """Return at most `limit` finished samples for people to read, by their row of the batch.

    groups: the result of `groups_to_show`, with tokens. `choose_samples` chooses among their samples."""
    found = [
        SampleRecord(
            step=step,
            prompt=group.prompt.text,
            question=group.prompt.question,
            response=text,
            reward=r.reward,
            correct=r.correct,
            truncated=r.is_truncated,
            length=r.num_sampled,
            answer=group.prompt.answer,
            group_size=len(group.samples),
            group_right=group.num_correct,
            turns=r.turn_texts(tokenizer),
        )
        for group in groups
        for r, text in group.texts(tokenizer)
    ]
    here = [r for group in groups for r in group.samples if r.data is not None]
    finished = [*compress(found, (not r.is_partial for r in here))]
    chosen = {id(sample) for sample in choose_samples(finished, limit)}
    return {row: sample for row, sample in enumerate(found) if id(sample) in chosen}
