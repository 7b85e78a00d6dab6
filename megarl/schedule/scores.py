"""Scores of an evaluation: avg@k, pass@k, majority@k."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megarl.algorithms.scores import avg_at_k, interval, ks_up_to, majority_at_k, pass_at_k
from megarl.data.prompts import ProblemSet
from megarl.data.sample import SampleGroup
from megarl.rollout.metrics import group_by_source, mean_score


@dataclass
class Scores:
    """Scores by problem. Problems with an ungraded answer do not count."""

    groups: list[SampleGroup]

    @property
    def k(self) -> int | None:
        """None if it varies."""
        sample_counts = {len(group.samples) for group in self.groups}
        return sample_counts.pop() if len(sample_counts) == 1 else None

    @property
    def graded(self) -> list[SampleGroup]:
        return [group for group in self.groups if all(sample.graded for sample in group.samples)]

    def table(self) -> list[dict[str, Any]]:
        rows = []
        for group in self.graded:
            answers, correct = group.samples, [sample.correct for sample in group.samples]
            n = len(answers)
            top_votes = Counter(
                sample.extracted for sample in answers if sample.extracted is not None
            ).most_common(1)
            rows.append(
                {
                    "uid": group.prompt.uid,
                    "question": group.prompt.question,
                    "prompt": group.prompt.text,
                    "answer": group.prompt.answer,
                    "right": sum(correct),
                    "avg": avg_at_k(correct),
                    "pass": pass_at_k(n, sum(correct), n),
                    "pass_at": {str(k): pass_at_k(n, sum(correct), k) for k in ks_up_to(n)},
                    "majority": majority_at_k([sample.extracted for sample in answers], correct),
                    "vote": top_votes[0][0] if top_votes else None,
                    "votes": top_votes[0][1] if top_votes else 0,
                    "length_mean": sum(sample.num_sampled for sample in answers) / n,
                    "truncated": sum(sample.is_truncated for sample in answers) / n,
                    "unverified": sum(sample.error is not None for sample in answers) / n,
                    "samples": n,
                }
            )
        return rows

    def means(self, prefix: str) -> dict[str, float]:
        table, answers = self.table(), [answer for group in self.graded for answer in group.samples]
        num_ungraded = len(self.groups) - len(table)
        counts: dict[str, float] = {
            f"{prefix}/ungraded": num_ungraded,
            f"{prefix}/unjudged": num_ungraded,  # until 0.4
            f"{prefix}/problems": len(table),
        }
        if not table:
            return counts
        means = {
            f"{prefix}/{name}": sum(row[name] for row in table) / len(table)
            for name in ("avg", *(("pass", "majority") if self.k else ()), "length_mean", "truncated")
        }
        if any(answer.score is not None for answer in answers):
            means[f"{prefix}/score"] = mean_score(answers)
        return {**means, **counts}

    def scores(self) -> dict[str, dict[str, float]]:
        """Return avg@k, pass@1 ... pass@k and majority@k, or `avg` if k varies, with 95 % intervals."""
        table, num_samples = self.table(), self.k
        columns = {"avg" if num_samples is None else f"avg@{num_samples}": [row["avg"] for row in table]}
        if num_samples is not None:
            columns |= {f"pass@{k}": [row["pass_at"][str(k)] for row in table] for k in ks_up_to(num_samples)}
            columns[f"majority@{num_samples}"] = [row["majority"] for row in table]
        intervals = {}
        for name, values in columns.items():
            if not values:
                continue
            low, high = interval(values, min(row["samples"] for row in table))
            intervals[name] = {"mean": math.fsum(values) / len(values), "low": low, "high": high}
        return intervals

    def counts(self) -> dict[str, int]:
        """Count answers by outcome.

        unverified: the verifier failed; ungraded: those of them that are left out instead of wrong"""
        answers = [answer for group in self.groups for answer in group.samples]
        return {
            "all": len(answers),
            "right": sum(answer.correct for answer in answers),
            "without_answer": sum(answer.extracted is None for answer in answers),
            "truncated": sum(answer.is_truncated for answer in answers),
            "unverified": sum(answer.error is not None for answer in answers),
            "ungraded": sum(not answer.graded for answer in answers),
        }


@dataclass
class EvaluationResult:
    """Problem sets with their answers."""

    sets: list[tuple[ProblemSet, list[SampleGroup]]]

    @property
    def headline(self) -> Scores:
        """Return the scores over sets without a separate `every`: always the same problems."""
        return Scores(
            [group for problem_set, groups in self.sets if problem_set.every is None for group in groups]
        )

    def by_name(self) -> dict[str, Scores]:
        """Return the scores of named sets, and of the rest by data_source; {} if undivided."""
        groups_by_name = group_by_source(
            group for problem_set, groups in self.sets if not problem_set.name for group in groups
        )
        groups_by_name |= {problem_set.name: groups for problem_set, groups in self.sets if problem_set.name}
        is_divided = len(groups_by_name) > 1 or any(problem_set.name for problem_set, _ in self.sets)
        return {name: Scores(groups_by_name[name]) for name in sorted(groups_by_name)} if is_divided else {}

    def stats(self) -> dict[str, float]:
        """Return eval/* of the headline and eval/<name>/* of each part of `by_name`."""
        headline, set_names = self.headline, {problem_set.name for problem_set, _ in self.sets}
        stats: dict[str, float] = {}
        if headline.groups:
            stats = headline.means("eval")
        for name, scores in self.by_name().items():
            stats |= scores.means(f"eval/{name}")
            if scores.k is not None and (name in set_names or scores.k != headline.k):
                stats[f"eval/{name}/k"] = scores.k
        return stats if headline.k is None else {**stats, "eval/k": headline.k}

    def table(self) -> list[dict[str, Any]]:
        return [
            {**row, "set": problem_set.name or None}
            for problem_set, groups in self.sets
            for row in Scores(groups).table()
        ]

    def answers(self, tokenizer: Any) -> Iterator[dict[str, Any]]:
        for problem_set, group in (
            (problem_set, group) for problem_set, groups in self.sets for group in groups
        ):
            for i, (sample, text) in enumerate(group.texts(tokenizer)):
                yield {
                    "set": problem_set.name or None,
                    "data_source": group.prompt.source_name,
                    "uid": group.prompt.uid,
                    "question": group.prompt.question,
                    "prompt": group.prompt.text,
                    "answer": group.prompt.answer,
                    "index": i,
                    "response": text,
                    "turns": sample.turn_texts(tokenizer),
                    "extracted": sample.extracted,
                    "correct": sample.correct,
                    "score": sample.score,
                    "truncated": sample.is_truncated,
                    "error": sample.error,
                    "graded": sample.graded,
                    "length": sample.num_sampled,
                }
