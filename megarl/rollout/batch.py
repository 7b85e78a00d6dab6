"""What a rollout gives: responses, groups of them, the batch to train on, and the result of an evaluation."""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from megarl.algorithms.evaluation import avg_at_k, interval, ks_up_to, majority_at_k, pass_at_k
from megarl.data.experience import Experience
from megarl.data.prompts import Prompt
from megarl.observe.run_log import Sample, choose_samples


@dataclass
class Response:
    """A verified response.

    tokens     int32 [l]
    logprobs   float32 [l], as the engine gave them
    extracted  as in Verdict, and error
    reward     as it enters the advantages, terms and penalty included
    penalty    soft overlong punishment, <= 0
    versions   int32 [l], of the weights that each token was sampled from; None where all are the group's
    score      as in Verdict, and terms
    reflects   whether its text holds one of `log.reflection_words`; None where there are none
    routing    the experts that prompt and response went to in the engine, as Completion.routing
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    finish: Literal["stop", "length"]
    correct: bool
    extracted: str | None
    error: str | None
    reward: float
    penalty: float
    versions: np.ndarray | None = None
    score: float | None = None
    terms: dict[str, float] = field(default_factory=dict)
    reflects: bool | None = None
    routing: np.ndarray | None = None

    @property
    def truncated(self) -> bool:
        """Return whether it reached the limit of tokens."""
        return self.finish == "length"


@dataclass
class Group:
    """All responses to one prompt. `version`: of the weights that they were sampled from."""

    prompt: Prompt
    responses: list[Response]
    version: int

    @property
    def correct(self) -> int:
        """Return the number of correct responses."""
        return sum(r.correct for r in self.responses)

    @property
    def mixed(self) -> bool:
        """Return whether 0 < correct < group size (DAPO eq. 11)."""
        return 0 < self.correct < len(self.responses)

    @property
    def spread(self) -> float:
        """Return the standard deviation of the rewards, that of the group itself."""
        return float(np.std([r.reward for r in self.responses]))

    def texts(self, tokenizer: Any) -> Iterator[tuple[Response, str]]:
        """Return each response with its text."""
        tokens = [r.tokens.tolist() for r in self.responses]
        return zip(self.responses, tokenizer.batch_decode(tokens, skip_special_tokens=True), strict=True)

    def state_dict(self) -> dict[str, Any]:
        """Return lists, dicts, numbers and texts only; exact (a float32 survives as a float64)."""
        responses = [
            {name: v.tolist() if isinstance(v, np.ndarray) else v for name, v in vars(response).items()}
            | {"routing": routing_state(response.routing)}
            for response in self.responses
        ]
        return {"prompt": prompt_state(self.prompt), "responses": responses, "version": self.version}

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> Group:
        """Undo `state_dict`."""
        responses = [
            Response(**r | {"routing": routing_from_state(r.get("routing"))}) for r in state["responses"]
        ]
        for r in responses:
            r.tokens = np.array(r.tokens, dtype=np.int32)
            r.logprobs = np.array(r.logprobs, dtype=np.float32)
            r.versions = None if r.versions is None else np.array(r.versions, dtype=np.int32)
        return Group(prompt_from_state(state["prompt"]), responses, state["version"])


def prompt_state(prompt: Prompt) -> dict[str, Any]:
    """Return a prompt as JSON holds it."""
    return vars(prompt) | {"tokens": list(prompt.tokens)}


def prompt_from_state(state: Mapping[str, Any]) -> Prompt:
    """Undo `prompt_state`."""
    return Prompt(**{**state, "tokens": tuple(state["tokens"])})


def routing_state(routing: np.ndarray | None) -> list[Any] | None:
    """Return a response's routing as JSON holds it: it has a hundred numbers and more a token."""
    if routing is None:
        return None
    return [str(routing.dtype), routing.shape, base64.b64encode(routing.tobytes()).decode()]


def routing_from_state(state: Sequence[Any] | None) -> np.ndarray | None:
    """Undo `routing_state`."""
    if state is None:
        return None
    kind, shape, data = state
    return np.frombuffer(base64.b64decode(data), dtype=kind).reshape(shape)


def response_stats(responses: Sequence[Response]) -> dict[str, float]:
    """Return reward/*, response/* and reflection/* over `responses` (at least one); no mean over nothing.
    reward/score where the verifier has graded one of them; reward/term_<name> without weights, and 0 where
    the answer has an error."""
    lengths = [r.tokens.size for r in responses]
    count = len(responses)
    graded = any(r.score is not None for r in responses)
    terms = dict.fromkeys(name for r in responses for name in r.terms)
    stats = {
        "reward/mean": sum(r.reward for r in responses) / count,
        "reward/accuracy": sum(r.correct for r in responses) / count,
        "reward/truncated": sum(r.truncated for r in responses) / count,
        "reward/unverified": sum(r.error is not None for r in responses) / count,
        "reward/overlong_penalty": sum(r.penalty for r in responses) / count,
        "response/length_mean": sum(lengths) / count,
        "response/length_min": min(lengths),
        "response/length_max": max(lengths),
        **({"reward/score": mean_score(responses)} if graded else {}),
        **{f"reward/term_{name}": sum(r.terms.get(name, 0.0) for r in responses) / count for name in terms},
    }
    for name, flag in (("right", True), ("wrong", False)):
        if chosen := [n for r, n in zip(responses, lengths, strict=True) if r.correct == flag]:
            stats[f"response/length_{name}"] = sum(chosen) / len(chosen)
    if all(r.reflects is not None for r in responses):
        with_words, without = ([r.correct for r in responses if r.reflects is flag] for flag in (True, False))
        stats["reflection/share"] = len(with_words) / count
        if with_words and without:  # else there is nothing to compare: reward/accuracy says it all
            stats["reflection/accuracy"] = sum(with_words) / len(with_words)
            stats["reflection/accuracy_without"] = sum(without) / len(without)
    return stats


def mean_score(responses: Sequence[Response]) -> float:
    """Return the mean of the verifier's scores; where it gave none, 1 is right and 0 wrong."""
    return math.fsum(r.correct if r.score is None else r.score for r in responses) / len(responses)


@dataclass
class RolloutBatch:
    """The rollout of one step.

    groups   to train on, in the order of their prompts (surplus of the step before first)
    stats    rollout/*, reward/*, response/*, reflection/*, the same on every rank
    seconds  of this rank, per part
    errors   verifiers' failures, and how often each occurred
    """

    step: int
    groups: list[Group]
    stats: dict[str, float]
    seconds: dict[str, float]
    errors: dict[str, int]

    @property
    def responses(self) -> list[Response]:
        """Return all responses, group after group: row i of the Experience is responses[i]."""
        return [r for group in self.groups for r in group.responses]

    def to_experience(self) -> Experience:
        """Return the packed batch with the columns engine_logprobs float32 [T]; rewards float32, correct and
        truncated bool, group_ids, policy_version and response_index int64 [n].

        group_ids[i] is the position of its group in `groups`, response_index[i] its position in the group.
        policy_version is that of a response's oldest token; where some were continued under new weights,
        token_versions int32 [T] has each token's. Where the engine's choice of experts was recorded, routing
        [T, layers, topk] has it (`routing_array`)."""
        rows = [(g, i, r) for g, group in enumerate(self.groups) for i, r in enumerate(group.responses)]
        prompts = [np.array(group.prompt.tokens, dtype=np.int64) for group in self.groups]
        cu_seqlens = np.cumsum([0, *(prompts[g].size + r.tokens.size for g, _, r in rows)], dtype=np.int64)
        total = int(cu_seqlens[-1])
        tokens, mask = np.empty(total, dtype=np.int64), np.zeros(total, dtype=bool)
        logprobs, versions = np.zeros(total, dtype=np.float32), np.zeros(total, dtype=np.int32)
        oldest = []
        for (g, _, r), start, end in zip(rows, cu_seqlens, cu_seqlens[1:], strict=False):
            first = start + prompts[g].size
            tokens[start:first], tokens[first:end], mask[first:end] = prompts[g], r.tokens, True
            logprobs[first:end] = r.logprobs
            versions[first:end] = self.groups[g].version if r.versions is None else r.versions
            oldest.append(self.groups[g].version if r.versions is None else int(r.versions.min()))
        columns = {
            "engine_logprobs": torch.from_numpy(logprobs),
            "rewards": torch.tensor([r.reward for _, _, r in rows], dtype=torch.float32),
            "correct": torch.tensor([r.correct for _, _, r in rows], dtype=torch.bool),
            "truncated": torch.tensor([r.truncated for _, _, r in rows], dtype=torch.bool),
            "group_ids": torch.tensor([g for g, _, _ in rows], dtype=torch.int64),
            "policy_version": torch.tensor(oldest, dtype=torch.int64),
            "response_index": torch.tensor([i for _, i, _ in rows], dtype=torch.int64),
        }
        if any(r.versions is not None for _, _, r in rows):
            columns["token_versions"] = torch.from_numpy(versions)
        if (first_found := next((r.routing for _, _, r in rows if r.routing is not None), None)) is not None:
            none = np.iinfo(first_found.dtype).max  # surplus may be of a step that recorded nothing
            routing = np.full((total, *first_found.shape[1:]), none, dtype=first_found.dtype)
            for (_, _, r), start, end in zip(rows, cu_seqlens, cu_seqlens[1:], strict=False):
                if r.routing is not None:
                    routing[start:end] = r.routing
            columns["routing"] = torch.from_numpy(routing)
        arrays = torch.from_numpy(tokens), torch.from_numpy(cu_seqlens), torch.from_numpy(mask)
        return Experience(*arrays, columns)

    def samples(self, tokenizer: Any, limit: int) -> dict[int, Sample]:
        """Return at most `limit` responses of the first groups, as `choose_samples` takes them, by their row
        of the Experience."""
        if not limit:
            return {}
        found: list[Sample] = []
        for group in self.groups[: max(2, math.ceil(limit / len(self.groups[0].responses)))]:
            found += [
                Sample(
                    step=self.step,
                    prompt=group.prompt.text,
                    response=text,
                    reward=r.reward,
                    correct=r.correct,
                    truncated=r.truncated,
                    length=int(r.tokens.size),
                    answer=group.prompt.answer,
                    group_size=len(group.responses),
                    group_right=group.correct,
                )
                for r, text in group.texts(tokenizer)
            ]
        chosen = {id(sample) for sample in choose_samples(found, limit)}
        return {row: sample for row, sample in enumerate(found) if id(sample) in chosen}


@dataclass
class EvaluationResult:
    """k answers to each problem, in the order of the problems."""

    k: int
    groups: list[Group]

    def table(self) -> list[dict[str, Any]]:
        """Return one row per problem: its scores, pass@j for every j of `ks_up_to`, the most frequent answer
        and its votes, mean length in tokens, share of truncated answers and of verifier failures."""
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
        """Return eval/*: means over the problems; eval/score where the verifier grades."""
        table, answers = self.table(), [answer for group in self.groups for answer in group.responses]
        means = {
            f"eval/{name}": sum(row[name] for row in table) / len(table)
            for name in ("avg", "pass", "majority", "length_mean", "truncated")
        }
        if any(answer.score is not None for answer in answers):
            means["eval/score"] = mean_score(answers)
        return {**means, "eval/k": self.k, "eval/problems": len(table)}

    def scores(self) -> dict[str, dict[str, float]]:
        """Return avg@k, pass@1 ... pass@k and majority@k, each with its mean over the problems and the 95 %
        confidence interval, low to high."""
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
        """Count answers by what became of them. unverified: wrong, as the verifier failed on it."""
        answers = [answer for group in self.groups for answer in group.responses]
        return {
            "all": len(answers),
            "right": sum(answer.correct for answer in answers),
            "without_answer": sum(answer.extracted is None for answer in answers),
            "truncated": sum(answer.truncated for answer in answers),
            "unverified": sum(answer.error is not None for answer in answers),
        }

    def answers(self, tokenizer: Any) -> Iterator[dict[str, Any]]:
        """Yield every answer with its text, decoded on demand, since only one rank needs it."""
        for group in self.groups:
            for i, (r, text) in enumerate(group.texts(tokenizer)):
                yield {
                    "uid": group.prompt.uid,
                    "prompt": group.prompt.text,
                    "answer": group.prompt.answer,
                    "index": i,
                    "response": text,
                    "extracted": r.extracted,
                    "correct": r.correct,
                    "score": r.score,
                    "truncated": r.truncated,
                    "error": r.error,
                    "length": int(r.tokens.size),
                }
