"""The batch of a rollout, its metrics, and the result of an evaluation."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megarl.algorithms.scores import avg_at_k, interval, ks_up_to, majority_at_k, pass_at_k
from megarl.config.schema import RewardConfig, TeacherConfig
from megarl.data.experience import Experience, StepBatch
from megarl.data.prompts import ProblemSet
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


@dataclass
class RolloutBatch:
    """The rollout of one step.

    groups   to train on, in the order of their prompts (surplus of the step before first)
    stats    rollout/*, reward/*, response/*, episode/*, reflection/*, the same on every rank
    seconds  of this rank, per part; of rank 0 where this one has no engine to itself
    errors   verifiers' failures, and how often each occurred
    """

    step: int
    groups: list[SampleGroup]
    stats: dict[str, float]
    seconds: dict[str, float]
    errors: dict[str, int]

    @property
    def samples(self) -> list[Sample]:
        """Return all samples, group after group: row i of the batch is samples[i]."""
        return [sample for group in self.groups for sample in group.samples]

    def to_step_batch(self, first: int = 0, *, compared: bool = True) -> StepBatch:
        """Return the batch as every rank knows it, and what of it lies here, with the columns rewards
        float32, correct and truncated bool, group_ids, policy_version and response_index int64 [n];
        engine_logprobs float32 [T], which is 0 outside the mask of sampled tokens, as all columns [T] but
        routing are; turn_rewards float32 [T] where some turn has a reward.

        A sample that does not count (see `SampleGroup.counted`; where none is `compared` with its group's,
        one that was not judged) is its prompt alone, and a group of its own: no token of it is in any loss,
        denominator or statistic. The number of rows stays the same.

        group_ids[i] is the position of its group in `groups`, response_index[i] its position in the group.
        policy_version is that of a response's oldest token; where some were continued under new weights,
        token_versions int32 [T] has each token's. Where the engine's choice of experts was recorded, routing
        [T, layers, topk] has it (`routing_array`). In a batch of windows (`rollout.window`) begun
        int64 [n] is the tokens of each response that earlier steps drew, unfinished bool [n] whether it goes
        on in the next.

        first: the number of the first rank that has an engine, among those that deliver the batch."""
        rows = [(g, i, r) for g, group in enumerate(self.groups) for i, r in enumerate(group.samples)]
        counted = {id(r) for g in self.groups for r in (g.counted if compared else g.samples) if r.judged}
        counts = [id(r) in counted for _, _, r in rows]
        lengths = torch.tensor([r.num_sampled for _, _, r in rows]) * torch.tensor(counts)
        extents = torch.tensor([r.num_tokens for _, _, r in rows]) * torch.tensor(counts)
        group_ids = [g if counts[n] else len(self.groups) + n for n, (g, _, _) in enumerate(rows)]
        prompts = [np.array(group.prompt.tokens, dtype=np.int64) for group in self.groups]
        of_prompts = torch.tensor([prompts[g].size for g, _, _ in rows])
        versions = [
            self.groups[g].policy_version if r.oldest_version is None else r.oldest_version
            for g, _, r in rows
        ]
        windows = {}
        if any(r.prefix_tokens or r.is_partial for r in self.samples):
            windows["begun"] = torch.tensor([r.prefix_tokens for _, _, r in rows]) * torch.tensor(counts)
            windows["unfinished"] = torch.tensor([r.is_partial for _, _, r in rows])
        columns = windows | {
            "rewards": torch.tensor(
                [r.reward if id(r) in counted else 0.0 for _, _, r in rows], dtype=torch.float32
            ),
            "correct": torch.tensor([r.correct for _, _, r in rows], dtype=torch.bool),
            "truncated": torch.tensor([r.is_truncated for _, _, r in rows], dtype=torch.bool),
            "group_ids": torch.tensor(group_ids, dtype=torch.int64),
            "policy_version": torch.tensor(versions, dtype=torch.int64),
            "response_index": torch.tensor([i for _, i, _ in rows], dtype=torch.int64),
        }
        own = [
            (row, g, r.data if counts[row] else r.data.first(0, prompts[g].size))
            for row, (g, _, r) in enumerate(rows)
            if r.data is not None
        ]
        return StepBatch(
            lengths=of_prompts + extents,
            response_lengths=lengths,
            prompt_lengths=of_prompts,
            owners=torch.tensor([first + r.owner for _, _, r in rows], dtype=torch.int64),
            columns=columns,
            rows=torch.tensor([row for row, _, _ in own], dtype=torch.int64),
            own=self._pack([(prompts[g], self.groups[g].policy_version, data) for _, g, data in own]),
        )

    @property
    def prompt_uids(self) -> Tensor:
        """Return the uid of each response's prompt, int64 [n]."""
        return torch.tensor([group.prompt.uid for group in self.groups for _ in group.samples])

    def teachers(self, config: TeacherConfig) -> Tensor:
        """Return the number of each response's teacher, by its prompt's data_source, int64 [n]; -1: none."""
        numbers = [config.number(group.prompt.source) for group in self.groups for _ in group.samples]
        return torch.tensor(numbers)

    def reward_parts(self, reward: RewardConfig) -> Tensor:
        """Return what each response got of each of `reward.parts` but the model's, without its weight: the
        verifier's score, the penalty, the terms; float32 [n, parts]."""

        def part(response: Sample, name: str) -> float:
            if name == "verifier":
                return float(response.correct) if response.score is None else response.score
            if name == "overlong":
                return response.overlong_penalty
            return response.terms.get(name.removeprefix("terms."), 0.0)  # none where its verifier failed

        names = [name for name in reward.parts if name != "model"]
        rows = [[part(response, name) for name in names] for response in self.samples]
        return torch.tensor(rows, dtype=torch.float32).view(len(rows), len(names))

    def _pack(self, sequences: Sequence[tuple[np.ndarray, int, TokenData]]) -> Experience:
        """Pack prompts, the policy versions of their groups, and tokens of responses into one batch."""
        cu_seqlens = np.cumsum([0, *(p.size + d.num_tokens for p, _, d in sequences)], dtype=np.int64)
        total = int(cu_seqlens[-1])
        tokens, mask = np.empty(total, dtype=np.int64), np.zeros(total, dtype=bool)
        logprobs, versions = np.zeros(total, dtype=np.float32), np.zeros(total, dtype=np.int32)
        rewards = np.zeros(total, dtype=np.float32)
        formats = (sample.experts_format for sample in self.samples)
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
        # Which columns there are is the same on every rank.
        if any(sample.oldest_version is not None for sample in self.samples):
            columns["token_versions"] = torch.from_numpy(versions)
        if any(sample.has_turn_rewards for sample in self.samples):
            columns["turn_rewards"] = torch.from_numpy(rewards)
        if any(sample.experts_format is not None for sample in self.samples):
            columns["routing"] = torch.from_numpy(routing)
        arrays = torch.from_numpy(tokens), torch.from_numpy(cu_seqlens), torch.from_numpy(mask)
        return Experience(*arrays, columns)

    def shown_groups(self, limit: int) -> list[SampleGroup]:
        """Return the groups of which `records` takes its at most `limit` responses."""
        return self.groups[: max(2, math.ceil(limit / len(self.groups[0].samples)))] if limit else []

    def records(self, tokenizer: Any, limit: int) -> dict[int, SampleRecord]:
        """Return at most `limit` samples of the first groups for people to read, by their row of the batch.

        `choose_samples` chooses them among the finished ones. The tokens of `shown_groups` must be here."""
        found: list[SampleRecord] = []
        for group in self.shown_groups(limit):
            found += [
                SampleRecord(
                    step=self.step,
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
                for r, text in group.texts(tokenizer)
            ]
        here = [r for group in self.shown_groups(limit) for r in group.samples if r.data is not None]
        ended = [*compress(found, (not r.is_partial for r in here))]
        chosen = {id(sample) for sample in choose_samples(ended, limit)}
        return {row: sample for row, sample in enumerate(found) if id(sample) in chosen}


@dataclass
class Scores:
    """What answers to problems came to, in the order of the problems. A problem with an answer that nobody
    has judged counts in no score."""

    groups: list[SampleGroup]

    @property
    def k(self) -> int | None:
        """Return the number of answers to each problem; None where they differ: then there is no pass@k and
        no majority@k of all of them."""
        numbers = {len(group.samples) for group in self.groups}
        return numbers.pop() if len(numbers) == 1 else None

    @property
    def judged(self) -> list[SampleGroup]:
        """Return the problems whose answers were all judged."""
        return [group for group in self.groups if all(r.judged for r in group.samples)]

    def table(self) -> list[dict[str, Any]]:
        """Return one row per judged problem: its scores, pass@j for every j of `ks_up_to`, the most frequent
        answer and its votes, mean length in tokens, share of truncated answers and of verifier failures."""
        rows = []
        for group in self.judged:
            answers, correct = group.samples, [r.correct for r in group.samples]
            k = len(answers)
            first = Counter(r.extracted for r in answers if r.extracted is not None).most_common(1)
            rows.append(
                {
                    "uid": group.prompt.uid,
                    "question": group.prompt.question,
                    "prompt": group.prompt.text,
                    "answer": group.prompt.answer,
                    "right": sum(correct),
                    "avg": avg_at_k(correct),
                    "pass": pass_at_k(k, sum(correct), k),
                    "pass_at": {str(some): pass_at_k(k, sum(correct), some) for some in ks_up_to(k)},
                    "majority": majority_at_k([r.extracted for r in answers], correct),
                    "vote": first[0][0] if first else None,
                    "votes": first[0][1] if first else 0,
                    "length_mean": sum(r.num_sampled for r in answers) / k,
                    "truncated": sum(r.is_truncated for r in answers) / k,
                    "unverified": sum(r.error is not None for r in answers) / k,
                    "samples": k,
                }
            )
        return rows

    def means(self, prefix: str) -> dict[str, float]:
        """Return `prefix`/avg and so on: means over the problems; `prefix`/score where the verifier
        grades."""
        table, answers = self.table(), [answer for group in self.judged for answer in group.samples]
        unjudged: dict[str, float] = {
            f"{prefix}/unjudged": len(self.groups) - len(table),
            f"{prefix}/problems": len(table),
        }
        if not table:
            return unjudged
        means = {
            f"{prefix}/{name}": sum(row[name] for row in table) / len(table)
            for name in ("avg", *(("pass", "majority") if self.k else ()), "length_mean", "truncated")
        }
        if any(answer.score is not None for answer in answers):
            means[f"{prefix}/score"] = mean_score(answers)
        return {**means, **unjudged}

    def scores(self) -> dict[str, dict[str, float]]:
        """Return avg@k, pass@1 ... pass@k and majority@k, each with its mean over the problems and the 95 %
        confidence interval, low to high; where the numbers of answers differ, `avg` alone."""
        table, samples = self.table(), self.k
        columns = {"avg" if samples is None else f"avg@{samples}": [row["avg"] for row in table]}
        if samples is not None:
            columns |= {f"pass@{k}": [row["pass_at"][str(k)] for row in table] for k in ks_up_to(samples)}
            columns[f"majority@{samples}"] = [row["majority"] for row in table]
        found = {}
        for name, values in columns.items():
            if not values:
                continue
            low, high = interval(values, min(row["samples"] for row in table))
            found[name] = {"mean": math.fsum(values) / len(values), "low": low, "high": high}
        return found

    def counts(self) -> dict[str, int]:
        """Count answers by what became of them. unverified: those that the verifier came to no end with; they
        are wrong, or, where that says nothing of the answer, left out (unjudged)."""
        answers = [answer for group in self.groups for answer in group.samples]
        return {
            "all": len(answers),
            "right": sum(answer.correct for answer in answers),
            "without_answer": sum(answer.extracted is None for answer in answers),
            "truncated": sum(answer.is_truncated for answer in answers),
            "unverified": sum(answer.error is not None for answer in answers),
            "unjudged": sum(not answer.judged for answer in answers),
        }


@dataclass
class EvaluationResult:
    """The sets of problems that were evaluated, each with the answers to it, whose tokens are on rank 0."""

    sets: list[tuple[ProblemSet, list[SampleGroup]]]

    @property
    def headline(self) -> Scores:
        """Return the scores over the problems of all sets without an `every` of their own. They are evaluated
        at the same steps, so that these scores are of the same problems each time."""
        return Scores([group for one, groups in self.sets if one.every is None for group in groups])

    def by_name(self) -> dict[str, Scores]:
        """Return the scores of each set that has a name, and of the problems of the others by data_source,
        where that is another division than none."""
        parts = of_sources(group for one, groups in self.sets if not one.name for group in groups)
        parts |= {one.name: groups for one, groups in self.sets if one.name}
        divided = len(parts) > 1 or any(one.name for one, _ in self.sets)
        return {name: Scores(parts[name]) for name in sorted(parts)} if divided else {}

    def stats(self) -> dict[str, float]:
        """Return eval/* of the headline, where there is one, and eval/<name>/* of each part of `by_name`.

        eval/k is there where it is the same for all problems of the headline; eval/<name>/k of sets with a
        name, and of other parts where it is not eval/k."""
        headline, named = self.headline, {one.name for one, _ in self.sets}
        stats: dict[str, float] = {}
        if headline.groups:
            stats = headline.means("eval")
        for name, scores in self.by_name().items():
            stats |= scores.means(f"eval/{name}")
            if scores.k is not None and (name in named or scores.k != headline.k):
                stats[f"eval/{name}/k"] = scores.k
        return stats if headline.k is None else {**stats, "eval/k": headline.k}

    def table(self) -> list[dict[str, Any]]:
        """Return the rows of all problems, see `Scores.table`, each with the name of its set, or None."""
        return [{**row, "set": one.name or None} for one, some in self.sets for row in Scores(some).table()]

    def answers(self, tokenizer: Any) -> Iterator[dict[str, Any]]:
        """Yield every answer with its text, decoded on demand: on rank 0, where all tokens are."""
        for one, group in ((one, group) for one, groups in self.sets for group in groups):
            for i, (r, text) in enumerate(group.texts(tokenizer)):
                yield {
                    "set": one.name or None,
                    "data_source": group.prompt.source_name,
                    "uid": group.prompt.uid,
                    "question": group.prompt.question,
                    "prompt": group.prompt.text,
                    "answer": group.prompt.answer,
                    "index": i,
                    "response": text,
                    "turns": r.turn_texts(tokenizer),
                    "extracted": r.extracted,
                    "correct": r.correct,
                    "score": r.score,
                    "truncated": r.is_truncated,
                    "error": r.error,
                    "judged": r.judged,
                    "length": r.num_sampled,
                }
