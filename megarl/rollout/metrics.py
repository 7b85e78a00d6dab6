"""Metrics of a step's responses, and samples to read."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import compress
from typing import Any

from megarl.config.errors import ConfigError
from megarl.config.schema import JUDGE
from megarl.data.sample import Sample, SampleGroup
from megarl.observe.run_log import SampleRecord, choose_samples


def compute_step_metrics(
    groups: Sequence[SampleGroup], max_ungraded: float
) -> tuple[dict[str, float], dict[str, int]]:
    """Return metrics of finished responses, and the number of each error.

    Raises ConfigError if more than the share `max_ungraded` is ungraded."""
    finished_groups = [
        replace(group, samples=finished_samples)
        for group in groups
        if (finished_samples := [sample for sample in group.samples if not sample.is_partial])
    ]
    responses = [r for group in finished_groups for r in group.samples]
    ungraded_errors = [r.error for r in responses if not r.graded]
    if len(ungraded_errors) > max_ungraded * len(responses):
        problem = f"{len(ungraded_errors)} of {len(responses)} responses of a step were not graded"
        raise ConfigError(
            f"reward.max_ungraded: {problem}, more than {max_ungraded:g} of them: {ungraded_errors[0]}"
        )
    stats = response_stats(responses) if responses else {}
    error_counts = Counter(r.error for r in responses if r.error is not None)
    return stats | length_error(finished_groups) | source_stats(finished_groups), dict(error_counts)


def response_stats(responses: Sequence[Sample]) -> dict[str, float]:
    """Return reward/*, response/*, reflection/* and episode/* of at least one response.

    All but reward/unverified (with an error), reward/ungraded and reward/judge_* count graded responses.
    response/length_* count sampled tokens."""
    failures = {
        "reward/unverified": sum(r.error is not None for r in responses) / len(responses),
        **dict.fromkeys(
            ("reward/ungraded", "reward/unjudged"),  # the second until 0.4
            sum(not r.graded for r in responses) / len(responses),
        ),
        **judge_stats(responses),
    }
    responses = [r for r in responses if r.graded]
    if not responses:
        return failures
    lengths, count = [r.num_sampled for r in responses], len(responses)
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
        **{f"reward/term_{name}": sum(r.terms.get(name, 0.0) for r in responses) / count for name in terms},
    }
    if any(r.score is not None for r in responses):
        stats["reward/score"] = mean_score(responses)
    if verifications := sum(r.verifications for r in responses):
        # Each verification yields the accepted tokens of a draft, and the next token.
        stats["rollout/accept_length"] = 1 + sum(r.accepted_drafts for r in responses) / verifications
    if JUDGE in terms:  # with weight 0, a response without the judge's score is graded too
        scores = [r.terms[JUDGE] for r in responses if JUDGE in r.terms]
        stats[f"reward/term_{JUDGE}"] = sum(scores) / len(scores)
    for name, flag in (("right", True), ("wrong", False)):
        if subset_lengths := [r.num_sampled for r in responses if r.correct == flag]:
            stats[f"response/length_{name}"] = sum(subset_lengths) / len(subset_lengths)
    return stats | episode_stats(responses) | reflection_stats(responses)


def episode_stats(responses: Sequence[Sample]) -> dict[str, float]:
    """Return episode/* if a response has several turns or calls tools."""
    if not any(r.turns > 1 or r.calls for r in responses):
        return {}
    count = len(responses)
    return {
        "episode/turns_mean": sum(r.turns for r in responses) / count,
        "episode/calls_mean": sum(r.calls for r in responses) / count,
        "episode/observed_mean": sum(r.num_tokens - r.num_sampled for r in responses) / count,
    }


def reflection_stats(responses: Sequence[Sample]) -> dict[str, float]:
    """Return reflection/* if words are configured: the share with words, and the accuracy of both parts."""
    if any(r.reflects is None for r in responses):
        return {}
    with_words, without_words = (
        [r.correct for r in responses if r.reflects is flag] for flag in (True, False)
    )
    stats = {"reflection/share": len(with_words) / len(responses)}
    if with_words and without_words:
        stats["reflection/accuracy"] = sum(with_words) / len(with_words)
        stats["reflection/accuracy_without"] = sum(without_words) / len(without_words)
    return stats


def judge_stats(responses: Sequence[Sample]) -> dict[str, float]:
    """Return reward/judge_* of the responses that the judge was asked about, ungraded ones included.

    seconds is the mean time of a response, agreement the share where judge and rule say the same. The others
    are sums: calls, retries, cached, prompt_tokens, completion_tokens, ungraded_<reason>."""
    costs = [r.judge for r in responses if r.judge]
    if not costs:
        return {}
    names = dict.fromkeys(("calls", "retries", "cached", "prompt_tokens", "completion_tokens"))
    names |= dict.fromkeys(sorted(name for cost in costs for name in cost if name.startswith("ungraded_")))
    stats = {f"reward/judge_{name}": math.fsum(cost.get(name, 0.0) for cost in costs) for name in names}
    for name, key in (("seconds", "seconds"), ("agreement", "agrees")):
        if values := [cost[key] for cost in costs if key in cost]:
            stats[f"reward/judge_{name}"] = math.fsum(values) / len(values)
    return stats


def length_error(groups: Sequence[SampleGroup]) -> dict[str, float]:
    """Return the standard error of response/length_mean, in tokens.

    The units are prompts, whose responses are correlated."""
    lengths_by_prompt = [[r.num_sampled for r in group.samples if r.graded] for group in groups]
    lengths_by_prompt = [lengths for lengths in lengths_by_prompt if lengths]
    num_prompts, count = len(lengths_by_prompt), sum(map(len, lengths_by_prompt))
    if num_prompts < 2:
        return {}
    mean = sum(map(sum, lengths_by_prompt)) / count
    squares = sum((sum(lengths) - mean * len(lengths)) ** 2 for lengths in lengths_by_prompt)
    return {"response/length_error": math.sqrt(squares * num_prompts / (num_prompts - 1)) / count}


def group_by_source(groups: Iterable[SampleGroup]) -> dict[str, list[SampleGroup]]:
    groups_by_name: dict[str, list[SampleGroup]] = {}
    for group in groups:
        groups_by_name.setdefault(group.prompt.source_name, []).append(group)
    return dict(sorted(groups_by_name.items()))


def source_stats(groups: Sequence[SampleGroup]) -> dict[str, float]:
    """Return source/<name>/* if there are several sources."""
    stats: dict[str, float] = {}
    sources = group_by_source(groups)
    for name, source_groups in sources.items() if len(sources) > 1 else ():
        responses = [response for group in source_groups for response in group.samples]
        values, keys = response_stats(responses), ("reward/accuracy", "reward/score", "response/length_mean")
        stats[f"source/{name}/responses"] = len(responses)
        for short_name, key in zip(("accuracy", "score", "length"), keys, strict=True):
            if key in values:
                stats[f"source/{name}/{short_name}"] = values[key]
    return stats


def mean_score(responses: Sequence[Sample]) -> float:
    """Return the mean score; without one, 1 is right and 0 wrong."""
    return math.fsum(r.correct if r.score is None else r.score for r in responses) / len(responses)


def select_groups_to_show(groups: Sequence[SampleGroup], limit: int) -> Sequence[SampleGroup]:
    return groups[: max(2, math.ceil(limit / len(groups[0].samples)))] if limit else []


def make_records(
    step: int, groups: Sequence[SampleGroup], tokenizer: Any, limit: int
) -> dict[int, SampleRecord]:
    """Return at most `limit` finished samples, by row of the batch."""
    rows = [(group, r, text) for group in groups for r, text in group.texts(tokenizer)]
    records = [
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
        for group, r, text in rows
    ]
    finished_records = [*compress(records, (not r.is_partial for _, r, _ in rows))]
    chosen_ids = {id(record) for record in choose_samples(finished_records, limit)}
    return {row: record for row, record in enumerate(records) if id(record) in chosen_ids}
