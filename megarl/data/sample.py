"""Samples: responses between engine and update.

A small `Sample` goes to every rank. Its `TokenData` stays on the engine's rank until the training rank is
known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np
from msgspec import structs

from megarl.data.response_text import policy_texts
from megarl.observe.run_log import OBSERVED, POLICY

if TYPE_CHECKING:
    from megarl.data.prompts import Prompt

# Per-token columns. Rewards are float64, because they are summed.
DTYPES: dict[str, Any] = {
    "tokens": np.int32,
    "logprobs": np.float32,
    "policy_versions": np.int32,
    "is_sampled": np.bool_,
    "turn_rewards": np.float64,
}


def _empty() -> np.ndarray:
    return np.empty(0)


class TokenData(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """The tokens of a response, possibly partial.

    tokens           int32 [num_tokens], with end-of-sequence and observations (tool output)
    logprobs         float32 [num_tokens], natural log, after temperature, before top-p and top-k (but see
                     sampling_sets); 0 for observations
    finish_reason    "stop" (end-of-sequence or stop text), "length" (token limit) or "abort" (unfinished)
    policy_versions  int32 [num_tokens], version of the weights that sampled each token; None: all tokens have
                     the version of the SampleGroup, or versions are unknown
    routed_experts   [prompt + num_tokens, layers, topk], see `routing_array`; None: not recorded
    is_sampled       bool [num_tokens], False for observations; None: all sampled
    turn_rewards     float64 [num_tokens], each turn's reward on its last token
    accepted_drafts  tokens of a draft model that the engine accepted
    verifications    passes that verified drafts; 0: without a draft model
    sampling_sets    int32 [num_tokens, k], ids that each token was sampled from, then -1; only -1 for
                     observations; None: not recorded. `logprobs` are renormalised over a recorded set
    journal          log to replay a multi-turn episode; stays on its rank"""

    tokens: np.ndarray = msgspec.field(default_factory=_empty)
    logprobs: np.ndarray = msgspec.field(default_factory=_empty)
    finish_reason: Literal["stop", "length", "abort"] = "abort"
    policy_versions: np.ndarray | None = None
    routed_experts: np.ndarray | None = None
    is_sampled: np.ndarray | None = None
    turn_rewards: np.ndarray | None = None
    sampling_sets: np.ndarray | None = None
    journal: list[Any] = msgspec.field(default_factory=list)
    accepted_drafts: int = 0
    verifications: int = 0

    def __post_init__(self) -> None:
        for name, dtype in DTYPES.items():
            if (column := getattr(self, name)) is not None:
                setattr(self, name, np.asarray(column, dtype))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TokenData):
            return NotImplemented
        pairs = zip(structs.astuple(self), structs.astuple(other), strict=True)
        return all(np.array_equal(a, b) if isinstance(a, np.ndarray) else a is b or a == b for a, b in pairs)

    @property
    def num_tokens(self) -> int:
        return int(self.tokens.size)

    @property
    def num_sampled(self) -> int:
        return self.num_tokens if self.is_sampled is None else int(self.is_sampled.sum())

    def first(self, count: int, prompt_length: int) -> TokenData:
        """Return the first `count` tokens, without the journal; of all tokens also the counts of drafts.

        prompt_length: for `routed_experts`"""
        columns: dict[str, Any] = {name: getattr(self, name) for name in (*DTYPES, "sampling_sets")}
        columns = {name: None if column is None else column[:count] for name, column in columns.items()}
        experts = None if self.routed_experts is None else self.routed_experts[: prompt_length + count]
        first = TokenData(finish_reason=self.finish_reason, routed_experts=experts, **columns)
        if count == self.num_tokens:
            first.accepted_drafts, first.verifications = self.accepted_drafts, self.verifications
        return first

    def append_turn(self, observed: Sequence[int], turn: TokenData) -> None:
        """Append an observation and the next turn. All columns must exist."""
        assert turn.policy_versions is not None
        num_observed = len(observed)
        set_parts = (self.num_tokens, self.sampling_sets), (num_observed, None)
        self.sampling_sets = join_sampling_sets((*set_parts, (turn.num_tokens, turn.sampling_sets)))
        new_columns: dict[str, Any] = {
            "tokens": [*observed, *turn.tokens],
            "logprobs": [*[0.0] * num_observed, *turn.logprobs],
            "policy_versions": [*[turn.policy_versions[0]] * num_observed, *turn.policy_versions],
            "is_sampled": [*[False] * num_observed, *[True] * turn.num_tokens],
            "turn_rewards": [0.0] * (num_observed + turn.num_tokens),
        }
        for name, dtype in DTYPES.items():
            column = np.concatenate([getattr(self, name), np.array(new_columns[name], dtype)])
            setattr(self, name, column)
        self.routed_experts = turn.routed_experts
        self.accepted_drafts += turn.accepted_drafts
        self.verifications += turn.verifications


def join_sampling_sets(parts: Sequence[tuple[int, np.ndarray | None]]) -> np.ndarray | None:
    """Concatenate sampling sets, int32 [tokens, k], as wide as the largest set; None if all are empty.

    parts: pairs of a number of tokens and their sets; None: not recorded, so -1"""
    width = max((int((sets >= 0).any(0).sum()) for _, sets in parts if sets is not None), default=0)
    if not width:
        return None
    joined = np.full((sum(count for count, _ in parts), width), -1, np.int32)
    start = 0
    for count, sets in parts:
        if sets is not None:
            joined[start : start + count, : sets.shape[1]] = sets[:, :width]
        start += count
    return joined


class Sample(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """One response to a prompt.

    owner             rank whose engine generated it, counted among ranks with engines
    finish_reason     "stop", "length", or "window" (continues in the next step)
    correct           as in Verdict; likewise extracted, error, score, terms and graded
    reward            score, reward terms and overlong penalty combined
    overlong_penalty  <= 0
    reflects          whether the text has one of `log.reflection_words`; None: none configured
    oldest_version    lowest policy version of sampled tokens; None: that of the SampleGroup
    experts_format    dtype and shape of one token's `routed_experts`; None: not recorded
    id                unique within a run; 0: not assigned
    num_tokens        with observations; 0 means `num_sampled`
    turns, calls      model turns and tool calls of the episode
    accepted_drafts   as in TokenData; likewise verifications
    prefix_tokens     sampled by earlier steps (`rollout.window`)
    judge             `Opinion.costs` of reward.judge, and agrees: 1 if it and the rule say the same; empty
                      if not asked
    set_width         columns of `sampling_sets`; 0: not recorded
    data              None on every rank but the owner"""

    owner: int
    num_sampled: int
    finish_reason: Literal["stop", "length", "window"]
    correct: bool = False
    extracted: str | None = None
    error: str | None = None
    reward: float = 0.0
    overlong_penalty: float = 0.0
    score: float | None = None
    terms: dict[str, float] = msgspec.field(default_factory=dict)
    graded: bool = True
    reflects: bool | None = None
    oldest_version: int | None = None
    experts_format: tuple[str, tuple[int, ...]] | None = None
    id: int = 0
    num_tokens: int = 0
    turns: int = 1
    calls: int = 0
    has_turn_rewards: bool = False
    prefix_tokens: int = 0
    accepted_drafts: int = 0
    verifications: int = 0
    judge: dict[str, float] = msgspec.field(default_factory=dict)
    set_width: int = 0
    data: TokenData | None = None

    def __post_init__(self) -> None:
        self.num_tokens = self.num_tokens or self.num_sampled

    @staticmethod
    def from_data(data: TokenData, owner: int, **fields: Any) -> Sample:
        index, experts = slice(None) if data.is_sampled is None else data.is_sampled, data.routed_experts
        versions = data.policy_versions
        return Sample(
            owner,
            data.num_sampled,
            oldest_version=None if versions is None else int(versions[index].min()),
            experts_format=None if experts is None else (str(experts.dtype), experts.shape[1:]),
            num_tokens=data.num_tokens,
            has_turn_rewards=data.turn_rewards is not None,
            accepted_drafts=data.accepted_drafts,
            verifications=data.verifications,
            set_width=0 if data.sampling_sets is None else data.sampling_sets.shape[1],
            data=data,
            **fields,
        )

    @property
    def is_truncated(self) -> bool:
        return self.finish_reason == "length"

    @property
    def is_partial(self) -> bool:
        """True if it continues in the next step: no verdict yet, and reward 0."""
        return self.finish_reason == "window"

    def turn_texts(self, tokenizer: Any) -> list[list[str]] | None:
        """Return [POLICY or OBSERVED, text] of each part; None without observations."""
        if self.data is None or self.data.is_sampled is None or self.data.is_sampled.all():
            return None
        tokens, is_sampled = self.data.tokens, self.data.is_sampled
        ends = [*(np.flatnonzero(np.diff(is_sampled)) + 1).tolist(), tokens.size]
        parts = [(begin, tokens[begin:end].tolist()) for begin, end in pairwise([0, *ends])]
        texts = policy_texts(tokenizer, [part for _, part in parts])
        authors = [POLICY if is_sampled[begin] else OBSERVED for begin, _ in parts]
        return [[author, text] for author, text in zip(authors, texts, strict=True)]


@dataclass
class SampleGroup:
    """All samples of one prompt. policy_version: of the sampling weights."""

    prompt: Prompt
    samples: list[Sample]
    policy_version: int

    @property
    def oldest_version(self) -> int:
        versions = (sample.oldest_version for sample in self.samples)
        return min(self.policy_version if version is None else version for version in versions)

    @property
    def counted(self) -> list[Sample]:
        """Graded samples to train on.

        Empty if only one of several samples is graded, because it has no other to be compared with."""
        graded_samples = [sample for sample in self.samples if sample.graded]
        return graded_samples if len(graded_samples) > 1 or len(self.samples) == 1 else []

    @property
    def num_correct(self) -> int:
        return sum(sample.correct for sample in self.counted)

    @property
    def is_mixed(self) -> bool:
        """True if 0 < num_correct < number of counted samples (DAPO eq. 11)."""
        return 0 < self.num_correct < len(self.counted)

    def with_data(self, data_by_id: Mapping[int, TokenData]) -> SampleGroup:
        samples = [structs.replace(sample, data=data_by_id.get(sample.id)) for sample in self.samples]
        return SampleGroup(self.prompt, samples, self.policy_version)

    def texts(self, tokenizer: Any) -> Iterator[tuple[Sample, str]]:
        samples = [sample for sample in self.samples if sample.data is not None]
        tokens = [sample.data.tokens.tolist() for sample in samples if sample.data is not None]
        return zip(samples, policy_texts(tokenizer, tokens), strict=True)
