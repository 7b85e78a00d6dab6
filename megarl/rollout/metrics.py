"""Metrics of a step's responses, and samples for people to read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import compress
from typing import Any

from megarl.data.sample import Sample, SampleGroup
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
