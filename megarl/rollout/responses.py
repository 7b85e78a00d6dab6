"""What a rollout gives: responses, groups of them, the batch to train on, and the result of an evaluation."""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, pairwise
from typing import Any, Literal

import msgspec
import numpy as np
import torch
from msgspec.structs import asdict, astuple
from torch import Tensor

from megarl.algorithms.scores import avg_at_k, interval, ks_up_to, majority_at_k, pass_at_k
from megarl.config.schema import RewardConfig, TeacherConfig
from megarl.data.experience import Experience, StepBatch
from megarl.data.prompts import ProblemSet, Prompt
from megarl.data.response_text import policy_texts
from megarl.observe.run_log import OBSERVED, POLICY, SampleRecord, choose_samples

# Fields of a response that its state has not.
DERIVED = ("number", "body", "owner", "length", "extent", "oldest", "routed", "rewarded")
BODY: dict[str, Any] = {  # of a body, one number a token
    "tokens": np.int32,
    "logprobs": np.float32,
    "versions": np.int32,
    "sampled": np.bool_,
    "rewards": np.float32,
}


class Body(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """What a response is made of: all tokens behind the prompt, of which an episode of several turns has
    sampled some, and observed the others.

    tokens     int32 [l]
    logprobs   float32 [l], as the engine gave them
    versions   int32 [l], of the weights that each token was sampled from; None where all are the group's
    routing    the experts that prompt and response went to in the engine, as Completion.routing
    sampled    bool [l], which tokens are the policy's, the last one among them; None: all are
    rewards    float32 [l], the reward of a turn on its last token; None where no turn has one
    journal    of its episode, see Completion; it stays on the rank that drew it
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray | None = None
    routing: np.ndarray | None = None
    sampled: np.ndarray | None = None
    rewards: np.ndarray | None = None
    journal: list[Any] = msgspec.field(default_factory=list)

    @staticmethod
    def of(lists: Mapping[str, Any], routing: np.ndarray | None, journal: Sequence[Any] = ()) -> Body:
        """Return a body whose columns of tokens are given as lists; where one is missing it is None."""
        columns: dict[str, Any] = {name: lists.get(name) for name in BODY}
        for name, column in columns.items():
            columns[name] = None if column is None else np.array(column, BODY[name])
        return Body(**columns, routing=routing, journal=[*journal])

    @property
    def lists(self) -> dict[str, Any]:
        """Return the columns of tokens as lists."""
        return {name: None if (c := getattr(self, name)) is None else c.tolist() for name in BODY}

    def without_tokens(self, prompt: int) -> Body:
        """Return the body of no response to a prompt of so many tokens."""
        routing = None if self.routing is None else self.routing[:prompt]
        of_tokens = (self.versions, routing, self.sampled, self.rewards)
        versions, _, sampled, rewards = (None if column is None else column[:0] for column in of_tokens)
        return Body(self.tokens[:0], self.logprobs[:0], versions, routing, sampled, rewards)


class Facts(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """What all ranks know of a verified response, and decide by alike: a response without its body.

    owner      the rank that drew it, by its number among those that have engines
    length     tokens that were sampled
    extracted  as in Verdict, and error, judged
    reward     as it enters the advantages, terms and penalty included
    penalty    soft overlong punishment, <= 0
    score      as in Verdict, and terms
    reflects   whether its text holds one of `log.reflection_words`; None where there are none
    oldest     the least of the body's versions; None where it has none
    routed     dtype and shape of a token's entry in the body's routing; None where it has none
    number     among all that the controller has had drawn; 0 where that is over
    extent     all tokens behind the prompt, those that were observed too; 0: `length`
    turns      how often the policy was asked for tokens; calls: of tools
    rewarded   whether turns have rewards of their own, which are in `reward` too
    begun      tokens that earlier steps have drawn (`rollout.window`)
    """

    owner: int
    length: int
    finish: Literal["stop", "length", "window"]
    correct: bool
    extracted: str | None
    error: str | None
    reward: float
    penalty: float
    score: float | None = None
    terms: dict[str, float] = msgspec.field(default_factory=dict)
    judged: bool = True
    reflects: bool | None = None
    oldest: int | None = None
    routed: tuple[str, tuple[int, ...]] | None = None
    number: int = 0
    extent: int = 0
    turns: int = 1
    calls: int = 0
    rewarded: bool = False
    begun: int = 0

    def __post_init__(self) -> None:
        self.extent = self.extent or self.length

    def response(self) -> Response:
        """Return the response that these are the facts of."""
        return Response(*astuple(self))

    @property
    def truncated(self) -> bool:
        """Return whether it reached the limit of tokens."""
        return self.finish == "length"

    @property
    def unfinished(self) -> bool:
        """Return whether it goes on in the next step: nobody has judged it yet, and its reward is 0."""
        return self.finish == "window"


class Response(Facts):
    """A verified response: facts and its body, which stays on the rank that drew it until it is known who
    trains on it; None on all other ranks."""

    body: Body | None = None

    @staticmethod
    def of(body: Body, owner: int, **facts: Any) -> Response:
        """Return the response with this body, whose facts but those of the body are given."""
        own = slice(None) if body.sampled is None else body.sampled
        oldest = None if body.versions is None else int(body.versions[own].min())
        routed = None if body.routing is None else (str(body.routing.dtype), body.routing.shape[1:])
        return Response(
            owner,
            body.tokens[own].size,
            extent=body.tokens.size,
            oldest=oldest,
            routed=routed,
            rewarded=body.rewards is not None,
            body=body,
            **facts,
        )

    @property
    def facts(self) -> Facts:
        """Return its facts alone."""
        return Facts(*astuple(self)[:-1])


@dataclass
class Group:
    """All responses to one prompt. `version`: of the weights that they were sampled from."""

    prompt: Prompt
    responses: list[Response]
    version: int

    @property
    def counted(self) -> list[Response]:
        """Return the responses to train on: those that were judged, unless one alone of several was, which
        has nothing to be compared with."""
        judged = [r for r in self.responses if r.judged]
        return judged if len(judged) > 1 or len(self.responses) == 1 else []

    @property
    def correct(self) -> int:
        """Return the number of correct responses."""
        return sum(r.correct for r in self.counted)

    @property
    def mixed(self) -> bool:
        """Return whether 0 < correct < group size (DAPO eq. 11)."""
        return 0 < self.correct < len(self.counted)

    @property
    def spread(self) -> float:
        """Return the standard deviation of the rewards, that of the group itself."""
        return float(np.std([r.reward for r in self.counted])) if self.counted else 0.0

    def texts(self, tokenizer: Any) -> Iterator[tuple[Response, str]]:
        """Return each response whose body is here with its text."""
        here = [r for r in self.responses if r.body is not None]
        tokens = [r.body.tokens.tolist() for r in here if r.body is not None]
        return zip(here, policy_texts(tokenizer, tokens), strict=True)

    @staticmethod
    def turns(response: Response, tokenizer: Any) -> list[list[str]] | None:
        """Return what the policy wrote and what it was shown, in turn, as [POLICY or OBSERVED, text]; None
        where it was shown nothing."""
        body = response.body
        if body is None or body.sampled is None or body.sampled.all():
            return None
        ends = [*(np.flatnonzero(np.diff(body.sampled)) + 1).tolist(), body.tokens.size]
        stretches = [(begin, body.tokens[begin:end].tolist()) for begin, end in pairwise([0, *ends])]
        texts = policy_texts(tokenizer, [tokens for _, tokens in stretches])
        who = [POLICY if body.sampled[begin] else OBSERVED for begin, _ in stretches]
        return [[name, text] for name, text in zip(who, texts, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        """Return lists, dicts, numbers and texts only; exact (a float32 survives as a float64). All bodies
        must be here."""
        responses = []
        for response in self.responses:
            assert response.body is not None
            facts = {name: v for name, v in asdict(response).items() if name not in DERIVED}
            routing = routing_state(response.body.routing)
            responses.append(facts | response.body.lists | {"routing": routing})
        return {"prompt": prompt_state(self.prompt), "responses": responses, "version": self.version}

    @staticmethod
    def from_state(state: Mapping[str, Any], owner: int = 0, *, here: bool = True) -> Group:
        """Undo `state_dict`, for a group that from now on lies on `owner`. here: whether that is this
        rank."""
        responses = []
        for saved in state["responses"]:
            body = Body.of(saved, routing_from_state(saved.get("routing")))
            facts = {name: v for name, v in saved.items() if name not in (*BODY, "routing")}
            response = Response.of(body, owner, **facts)
            responses.append(response if here else msgspec.structs.replace(response, body=None))
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
    lengths = [r.length for r in responses]
    count = len(responses)
    graded = any(r.score is not None for r in responses)
    terms = dict.fromkeys(name for r in responses for name in r.terms)
    stats = {
        **failures,
        "reward/mean": sum(r.reward for r in responses) / count,
        "reward/accuracy": sum(r.correct for r in responses) / count,
        "reward/truncated": sum(r.truncated for r in responses) / count,
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
    if any(r.turns > 1 or r.calls for r in responses):
        stats["episode/turns_mean"] = sum(r.turns for r in responses) / count
        stats["episode/calls_mean"] = sum(r.calls for r in responses) / count
        stats["episode/observed_mean"] = sum(r.extent - r.length for r in responses) / count
    if all(r.reflects is not None for r in responses):
        with_words, without = ([r.correct for r in responses if r.reflects is flag] for flag in (True, False))
        stats["reflection/share"] = len(with_words) / count
        if with_words and without:  # else there is nothing to compare: reward/accuracy says it all
            stats["reflection/accuracy"] = sum(with_words) / len(with_words)
            stats["reflection/accuracy_without"] = sum(without) / len(without)
    return stats


def length_error(groups: Sequence[Group]) -> dict[str, float]:
    """Return response/length_error: the standard error of response/length_mean, in tokens. Responses to one
    prompt are alike, so that what is drawn at random is prompts: the sum over them of the squares of their
    responses' deviations together. Nothing where fewer than two prompts have responses that were judged."""
    of_each = [[r.length for r in group.responses if r.judged] for group in groups]
    of_each = [lengths for lengths in of_each if lengths]
    prompts, count = len(of_each), sum(map(len, of_each))
    if prompts < 2:
        return {}
    mean = sum(map(sum, of_each)) / count
    squares = sum((sum(lengths) - mean * len(lengths)) ** 2 for lengths in of_each)
    return {"response/length_error": math.sqrt(squares * prompts / (prompts - 1)) / count}


def of_sources(groups: Iterable[Group]) -> dict[str, list[Group]]:
    """Return the groups by their prompts' data_source, as metrics name it."""
    found: dict[str, list[Group]] = {}
    for group in groups:
        found.setdefault(group.prompt.source_name, []).append(group)
    return dict(sorted(found.items()))


def source_stats(groups: Sequence[Group]) -> dict[str, float]:
    """Return source/<name>/*, where there are several sources: responses, accuracy, score where the verifier
    grades, mean length in tokens."""
    stats: dict[str, float] = {}
    sources = of_sources(groups)
    for name, some in sources.items() if len(sources) > 1 else ():
        responses = [response for group in some for response in group.responses]
        of_all, keys = response_stats(responses), ("reward/accuracy", "reward/score", "response/length_mean")
        stats[f"source/{name}/responses"] = len(responses)
        for short, key in zip(("accuracy", "score", "length"), keys, strict=True):
            if key in of_all:
                stats[f"source/{name}/{short}"] = of_all[key]
    return stats


def mean_score(responses: Sequence[Response]) -> float:
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
    groups: list[Group]
    stats: dict[str, float]
    seconds: dict[str, float]
    errors: dict[str, int]

    @property
    def responses(self) -> list[Response]:
        """Return all responses, group after group: row i of the batch is responses[i]."""
        return [r for group in self.groups for r in group.responses]

    def to_step_batch(self, first: int = 0, *, compared: bool = True) -> StepBatch:
        """Return the batch as every rank knows it, and what of it lies here, with the columns rewards
        float32, correct and truncated bool, group_ids, policy_version and response_index int64 [n];
        engine_logprobs float32 [T], which is 0 outside the mask of sampled tokens, as all columns [T] but
        routing are; turn_rewards float32 [T] where some turn has a reward.

        A response that does not count (`Group.counted`; where none is `compared` with its group's, one that
        was not judged) is its prompt alone, and a group of its own: no token of it is in any loss,
        denominator or statistic, and the rows stay as many.

        group_ids[i] is the position of its group in `groups`, response_index[i] its position in the group.
        policy_version is that of a response's oldest token; where some were continued under new weights,
        token_versions int32 [T] has each token's. Where the engine's choice of experts was recorded, routing
        [T, layers, topk] has it (`routing_array`). In a batch of windows (`rollout.window`) begun
        int64 [n] is the tokens of each response that earlier steps drew, unfinished bool [n] whether it goes
        on in the next.

        first: the number of the first rank that has an engine, among those that deliver the batch."""
        rows = [(g, i, r) for g, group in enumerate(self.groups) for i, r in enumerate(group.responses)]
        counted = {id(r) for g in self.groups for r in (g.counted if compared else g.responses) if r.judged}
        counts = [id(r) in counted for _, _, r in rows]
        lengths = torch.tensor([r.length for _, _, r in rows]) * torch.tensor(counts)
        extents = torch.tensor([r.extent for _, _, r in rows]) * torch.tensor(counts)
        group_ids = [g if counts[n] else len(self.groups) + n for n, (g, _, _) in enumerate(rows)]
        prompts = [np.array(group.prompt.tokens, dtype=np.int64) for group in self.groups]
        of_prompts = torch.tensor([prompts[g].size for g, _, _ in rows])
        versions = [self.groups[g].version if r.oldest is None else r.oldest for g, _, r in rows]
        windows = {}
        if any(r.begun or r.unfinished for r in self.responses):
            windows["begun"] = torch.tensor([r.begun for _, _, r in rows]) * torch.tensor(counts)
            windows["unfinished"] = torch.tensor([r.unfinished for _, _, r in rows])
        columns = windows | {
            "rewards": torch.tensor(
                [r.reward if id(r) in counted else 0.0 for _, _, r in rows], dtype=torch.float32
            ),
            "correct": torch.tensor([r.correct for _, _, r in rows], dtype=torch.bool),
            "truncated": torch.tensor([r.truncated for _, _, r in rows], dtype=torch.bool),
            "group_ids": torch.tensor(group_ids, dtype=torch.int64),
            "policy_version": torch.tensor(versions, dtype=torch.int64),
            "response_index": torch.tensor([i for _, i, _ in rows], dtype=torch.int64),
        }
        own = [
            (row, g, r.body if counts[row] else r.body.without_tokens(prompts[g].size))
            for row, (g, _, r) in enumerate(rows)
            if r.body is not None
        ]
        return StepBatch(
            lengths=of_prompts + extents,
            response_lengths=lengths,
            prompt_lengths=of_prompts,
            owners=torch.tensor([first + r.owner for _, _, r in rows], dtype=torch.int64),
            columns=columns,
            rows=torch.tensor([row for row, _, _ in own], dtype=torch.int64),
            own=self._pack([(prompts[g], self.groups[g].version, body) for _, g, body in own]),
        )

    @property
    def prompt_uids(self) -> Tensor:
        """Return the uid of each response's prompt, int64 [n]."""
        return torch.tensor([group.prompt.uid for group in self.groups for _ in group.responses])

    def teachers(self, config: TeacherConfig) -> Tensor:
        """Return the number of each response's teacher, by its prompt's data_source, int64 [n]; -1: none."""
        numbers = [config.number(group.prompt.source) for group in self.groups for _ in group.responses]
        return torch.tensor(numbers)

    def reward_parts(self, reward: RewardConfig) -> Tensor:
        """Return what each response got of each of `reward.parts` but the model's, without its weight: the
        verifier's score, the penalty, the terms; float32 [n, parts]."""

        def part(response: Response, name: str) -> float:
            if name == "verifier":
                return float(response.correct) if response.score is None else response.score
            if name == "overlong":
                return response.penalty
            return response.terms.get(name.removeprefix("terms."), 0.0)  # none where its verifier failed

        names = [name for name in reward.parts if name != "model"]
        rows = [[part(response, name) for name in names] for response in self.responses]
        return torch.tensor(rows, dtype=torch.float32).view(len(rows), len(names))

    def _pack(self, bodies: Sequence[tuple[np.ndarray, int, Body]]) -> Experience:
        """Pack prompts, versions and bodies, with their columns of tokens."""
        cu_seqlens = np.cumsum([0, *(p.size + b.tokens.size for p, _, b in bodies)], dtype=np.int64)
        total = int(cu_seqlens[-1])
        tokens, mask = np.empty(total, dtype=np.int64), np.zeros(total, dtype=bool)
        logprobs, versions = np.zeros(total, dtype=np.float32), np.zeros(total, dtype=np.int32)
        rewards = np.zeros(total, dtype=np.float32)
        kind, shape = next((r.routed for r in self.responses if r.routed is not None), ("uint8", (0,)))
        none = np.iinfo(kind).max  # surplus may be of a step that recorded nothing
        routing = np.full((total, *shape), none, dtype=kind)
        for (prompt, version, body), start, end in zip(bodies, cu_seqlens, cu_seqlens[1:], strict=False):
            first = start + prompt.size
            tokens[start:first], tokens[first:end] = prompt, body.tokens
            own = mask[first:end]
            own[:] = True if body.sampled is None else body.sampled
            logprobs[first:end][own] = body.logprobs[own]
            versions[first:end][own] = version if body.versions is None else body.versions[own]
            if body.rewards is not None:
                rewards[first:end][own] = body.rewards[own]
            if body.routing is not None:
                routing[start:end] = body.routing
        columns = {"engine_logprobs": torch.from_numpy(logprobs)}
        # Which columns there are is the same on every rank.
        if any(r.oldest is not None for r in self.responses):
            columns["token_versions"] = torch.from_numpy(versions)
        if any(r.rewarded for r in self.responses):
            columns["turn_rewards"] = torch.from_numpy(rewards)
        if any(r.routed is not None for r in self.responses):
            columns["routing"] = torch.from_numpy(routing)
        arrays = torch.from_numpy(tokens), torch.from_numpy(cu_seqlens), torch.from_numpy(mask)
        return Experience(*arrays, columns)

    def shown(self, limit: int) -> list[Group]:
        """Return the groups of which `samples` takes its at most `limit` responses."""
        return self.groups[: max(2, math.ceil(limit / len(self.groups[0].responses)))] if limit else []

    def samples(self, tokenizer: Any, limit: int) -> dict[int, SampleRecord]:
        """Return at most `limit` responses of the first groups, as `choose_samples` takes them, by their row
        of the batch; none that goes on in the next step. The bodies of `shown` must be here."""
        found: list[SampleRecord] = []
        for group in self.shown(limit):
            found += [
                SampleRecord(
                    step=self.step,
                    prompt=group.prompt.text,
                    question=group.prompt.question,
                    response=text,
                    reward=r.reward,
                    correct=r.correct,
                    truncated=r.truncated,
                    length=r.length,
                    answer=group.prompt.answer,
                    group_size=len(group.responses),
                    group_right=group.correct,
                    turns=group.turns(r, tokenizer),
                )
                for r, text in group.texts(tokenizer)
            ]
        here = [r for group in self.shown(limit) for r in group.responses if r.body is not None]
        ended = [*compress(found, (not r.unfinished for r in here))]
        chosen = {id(sample) for sample in choose_samples(ended, limit)}
        return {row: sample for row, sample in enumerate(found) if id(sample) in chosen}


@dataclass
class Scores:
    """What answers to problems came to, in the order of the problems. A problem with an answer that nobody
    has judged counts in no score."""

    groups: list[Group]

    @property
    def k(self) -> int | None:
        """Return the number of answers to each problem; None where they differ: then there is no pass@k and
        no majority@k of all of them."""
        numbers = {len(group.responses) for group in self.groups}
        return numbers.pop() if len(numbers) == 1 else None

    @property
    def judged(self) -> list[Group]:
        """Return the problems whose answers were all judged."""
        return [group for group in self.groups if all(r.judged for r in group.responses)]

    def table(self) -> list[dict[str, Any]]:
        """Return one row per judged problem: its scores, pass@j for every j of `ks_up_to`, the most frequent
        answer and its votes, mean length in tokens, share of truncated answers and of verifier failures."""
        rows = []
        for group in self.judged:
            answers, correct = group.responses, [r.correct for r in group.responses]
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
                    "length_mean": sum(r.length for r in answers) / k,
                    "truncated": sum(r.truncated for r in answers) / k,
                    "unverified": sum(r.error is not None for r in answers) / k,
                    "samples": k,
                }
            )
        return rows

    def means(self, prefix: str) -> dict[str, float]:
        """Return `prefix`/avg and so on: means over the problems; `prefix`/score where the verifier
        grades."""
        table, answers = self.table(), [answer for group in self.judged for answer in group.responses]
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
        answers = [answer for group in self.groups for answer in group.responses]
        return {
            "all": len(answers),
            "right": sum(answer.correct for answer in answers),
            "without_answer": sum(answer.extracted is None for answer in answers),
            "truncated": sum(answer.truncated for answer in answers),
            "unverified": sum(answer.error is not None for answer in answers),
            "unjudged": sum(not answer.judged for answer in answers),
        }


@dataclass
class EvaluationResult:
    """The sets of problems that were evaluated, each with the answers to it, whose bodies are on rank 0."""

    sets: list[tuple[ProblemSet, list[Group]]]

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
        """Yield every answer with its text, decoded on demand: on rank 0, where all bodies are."""
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
                    "turns": group.turns(r, tokenizer),
                    "extracted": r.extracted,
                    "correct": r.correct,
                    "score": r.score,
                    "truncated": r.truncated,
                    "error": r.error,
                    "judged": r.judged,
                    "length": r.length,
                }
