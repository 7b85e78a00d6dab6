"""What a rollout step hands on: the groups to train on, and what became of the problems of an evaluation."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from megarl.algorithms.evaluation import avg_at_k, interval, ks_up_to, majority_at_k, pass_at_k
from megarl.data.experience import Experience
from megarl.observe.run_log import Sample, choose_samples
from megarl.rollout.groups import Group, Response


def response_stats(responses: Sequence[Response]) -> dict[str, float]:
    """reward/* and response/* over `responses` (at least one)."""
    lengths = [r.tokens.size for r in responses]
    count = len(responses)
    return {
        "reward/mean": sum(r.reward for r in responses) / count,
        "reward/accuracy": sum(r.correct for r in responses) / count,
        "reward/truncated": sum(r.truncated for r in responses) / count,
        "reward/unverified": sum(r.error is not None for r in responses) / count,
        "reward/overlong_penalty": sum(r.penalty for r in responses) / count,
        "response/length_mean": sum(lengths) / count,
        "response/length_min": min(lengths),
        "response/length_max": max(lengths),
    }


@dataclass
class RolloutBatch:
    """groups: to train on, in the order of their prompts (surplus of the step before first); stats: rollout/*, reward/*, response/*, the
    same on every rank; seconds: this rank's time per part; errors: verifiers' failures and how often each occurred."""

    step: int
    groups: list[Group]
    stats: dict[str, float]
    seconds: dict[str, float]
    errors: dict[str, int]

    @property
    def responses(self) -> list[Response]:
        """All responses, group after group: row i of the Experience is responses[i]."""
        return [r for group in self.groups for r in group.responses]

    def to_experience(self) -> Experience:
        """Columns: engine_logprobs float32 [T]; rewards float32, correct, truncated bool, group_ids, policy_version and
        response_index int64 [n]. policy_version is that of a response's oldest token; where some go on under new weights,
        token_versions int32 [T] has each token's.

        group_ids[i] is the position of its group in `groups`, response_index[i] its position in the group."""
        prompts = {id(group): np.array(group.prompt.tokens, dtype=np.int64) for group in self.groups}
        rows = [(prompts[id(group)], r) for group in self.groups for r in group.responses]
        lengths = np.array([prompt.size + r.tokens.size for prompt, r in rows], dtype=np.int64)
        tokens = np.concatenate([part for prompt, r in rows for part in (prompt, r.tokens)])
        logprobs = np.concatenate([part for prompt, r in rows for part in (np.zeros(prompt.size, dtype=np.float32), r.logprobs)])
        spans = np.array([n for prompt, r in rows for n in (prompt.size, r.tokens.size)], dtype=np.int64)
        mask = np.repeat(np.tile([False, True], len(rows)), spans)
        responses = [r for _, r in rows]
        places = [(g, i) for g, group in enumerate(self.groups) for i in range(len(group.responses))]
        columns = {
            "engine_logprobs": torch.from_numpy(logprobs),
            "rewards": torch.tensor([r.reward for r in responses], dtype=torch.float32),
            "correct": torch.tensor([r.correct for r in responses], dtype=torch.bool),
            "truncated": torch.tensor([r.truncated for r in responses], dtype=torch.bool),
            "group_ids": torch.tensor([g for g, _ in places], dtype=torch.int64),
            "policy_version": torch.tensor(
                [g.version if r.versions is None else r.versions.min() for g in self.groups for r in g.responses]
            ),
            "response_index": torch.tensor([i for _, i in places], dtype=torch.int64),
        }
        if any(r.versions is not None for r in responses):
            zeros = [np.zeros(prompt.size, dtype=np.int32) for prompt, _ in rows]
            own = [
                np.full(r.tokens.size, g.version, dtype=np.int32) if r.versions is None else r.versions
                for g in self.groups
                for r in g.responses
            ]
            columns["token_versions"] = torch.from_numpy(np.concatenate([part for both in zip(zeros, own, strict=True) for part in both]))
        cu_seqlens = torch.from_numpy(np.concatenate([[0], lengths.cumsum()]))
        return Experience(torch.from_numpy(tokens), cu_seqlens, torch.from_numpy(mask), columns)

    def samples(self, tokenizer: Any, limit: int) -> dict[int, Sample]:
        """At most `limit` responses of the first groups as `choose_samples` takes them, as text, by their row of the Experience."""
        if not limit:
            return {}
        groups = self.groups[: max(2, math.ceil(limit / len(self.groups[0].responses)))]
        rows = [(group, r) for group in groups for r in group.responses]
        found = [
            Sample(
                step=self.step,
                prompt=group.prompt.text,
                response="",
                reward=r.reward,
                correct=r.correct,
                truncated=r.truncated,
                length=int(r.tokens.size),
                answer=group.prompt.answer,
                group_size=len(group.responses),
                group_right=group.correct,
            )
            for group, r in rows
        ]
        wanted = {id(sample) for sample in choose_samples(found, limit)}
        chosen = [row for row, sample in enumerate(found) if id(sample) in wanted]
        texts = tokenizer.batch_decode([rows[row][1].tokens.tolist() for row in chosen], skip_special_tokens=True)
        return {row: replace(found[row], response=text) for row, text in zip(chosen, texts, strict=True)}


@dataclass
class EvaluationResult:
    """k answers to each problem. `groups` are in the order of the problems."""

    k: int
    groups: list[Group]

    def table(self) -> list[dict[str, Any]]:
        """One row per problem: its scores, pass@j for every j of `ks_up_to`, the most frequent answer and its votes, mean length in
        tokens, share of truncated answers and of verifier failures."""
        rows = []
        for group in self.groups:
            answers, correct = group.responses, [r.correct for r in group.responses]
            first = Counter(r.extracted for r in answers if r.extracted is not None).most_common(1)
            rows.append(
                {
                    "uid": group.prompt.uid,
                    "prompt": group.prompt.text,
                    "answer": group.prompt.answer,
                    "right": sum(correct),
                    "avg": avg_at_k(correct),
                    "pass": pass_at_k(len(answers), sum(correct), self.k),
                    "pass_at": {str(k): pass_at_k(len(answers), sum(correct), k) for k in ks_up_to(self.k)},
                    "majority": majority_at_k([r.extracted for r in answers], correct),
                    "vote": first[0][0] if first else None,
                    "votes": first[0][1] if first else 0,
                    "length_mean": sum(r.tokens.size for r in answers) / len(answers),
                    "truncated": sum(r.truncated for r in answers) / len(answers),
                    "unverified": sum(r.error is not None for r in answers) / len(answers),
                }
            )
        return rows

    def stats(self) -> dict[str, float]:
        """eval/*: means over the problems."""
        table = self.table()
        means = {
            f"eval/{name}": sum(row[name] for row in table) / len(table) for name in ("avg", "pass", "majority", "length_mean", "truncated")
        }
        return {**means, "eval/k": self.k, "eval/problems": len(table)}

    def scores(self) -> dict[str, dict[str, float]]:
        """avg@k, pass@1 ... pass@k and majority@k: the mean over the problems and its 95 % confidence interval, low to high."""
        table = self.table()
        columns = {
            f"avg@{self.k}": [row["avg"] for row in table],
            **{f"pass@{k}": [row["pass_at"][str(k)] for row in table] for k in ks_up_to(self.k)},
            f"majority@{self.k}": [row["majority"] for row in table],
        }
        found = {}
        for name, values in columns.items():
            low, high = interval(values, self.k)
            found[name] = {"mean": math.fsum(values) / len(values), "low": low, "high": high}
        return found

    def counts(self) -> dict[str, int]:
        """What became of the answers. unverified: the verifier failed on it, and it counts as wrong."""
        answers = [answer for group in self.groups for answer in group.responses]
        return {
            "all": len(answers),
            "right": sum(answer.correct for answer in answers),
            "without_answer": sum(answer.extracted is None for answer in answers),
            "truncated": sum(answer.truncated for answer in answers),
            "unverified": sum(answer.error is not None for answer in answers),
        }

    def answers(self, tokenizer: Any) -> Iterator[dict[str, Any]]:
        """Every answer with its text, for a jsonl file; decoded as it is asked for, so that one rank alone need do it."""
        for group in self.groups:
            texts = tokenizer.batch_decode([r.tokens.tolist() for r in group.responses], skip_special_tokens=True)
            for i, (r, text) in enumerate(zip(group.responses, texts, strict=True)):
                yield {
                    "uid": group.prompt.uid,
                    "prompt": group.prompt.text,
                    "answer": group.prompt.answer,
                    "index": i,
                    "response": text,
                    "extracted": r.extracted,
                    "correct": r.correct,
                    "truncated": r.truncated,
                    "error": r.error,
                    "length": int(r.tokens.size),
                }
