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
        numbers = {len(group.samples) for group in self.groups}
        return numbers.pop() if len(numbers) == 1 else None

    @property
    def graded(self) -> list[SampleGroup]:
        return [group for group in self.groups if all(r.graded for r in group.samples)]

    def table(self) -> list[dict[str, Any]]:
        rows = []
        for group in self.graded:
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
        table, answers = self.table(), [answer for group in self.graded for answer in group.samples]
        ungraded: dict[str, float] = {
            f"{prefix}/ungraded": len(self.groups) - len(table),
            f"{prefix}/unjudged": len(self.groups) - len(table),  # its old name, until 0.4
            f"{prefix}/problems": len(table),
        }
        if not table:
            return ungraded
        means = {
            f"{prefix}/{name}": sum(row[name] for row in table) / len(table)
            for name in ("avg", *(("pass", "majority") if self.k else ()), "length_mean", "truncated")
        }
        if any(answer.score is not None for answer in answers):
            means[f"{prefix}/score"] = mean_score(answers)
        return {**means, **ungraded}

    def scores(self) -> dict[str, dict[str, float]]:
        """Return avg@k, pass@1 ... pass@k and majority@k, or `avg` if k varies, with 95 % intervals."""
        table, samples = self.table(), self.k
        columns = {"avg" if samples is None else f"avg@{samples}": [row["avg"] for row in table]}
        if samples is not None:
            columns |= {f"pass@{k}": [row["pass_at"][str(k)] for row in table] for k in ks_up_to(samples)}
            columns[f"majority@{samples}"] = [row["majority"] for row in table]
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
        return Scores([group for one, groups in self.sets if one.every is None for group in groups])

    def by_name(self) -> dict[str, Scores]:
        """Return the scores of named sets, and of the rest by data_source; {} if undivided."""
        parts = group_by_source(group for one, groups in self.sets if not one.name for group in groups)
        parts |= {one.name: groups for one, groups in self.sets if one.name}
        divided = len(parts) > 1 or any(one.name for one, _ in self.sets)
        return {name: Scores(parts[name]) for name in sorted(parts)} if divided else {}

    def stats(self) -> dict[str, float]:
        """Return eval/* of the headline and eval/<name>/* of each part of `by_name`."""
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
        return [{**row, "set": one.name or None} for one, some in self.sets for row in Scores(some).table()]

    def answers(self, tokenizer: Any) -> Iterator[dict[str, Any]]:
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
                    "graded": r.graded,
                    "length": r.num_sampled,
                }
