"""Grades a worker's finished samples: judge, verifier, reward terms, overlong penalty."""

from __future__ import annotations

import asyncio
import math
import re
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any, NamedTuple

from megarl.config.errors import MegarlError
from megarl.config.schema import JUDGE, Config
from megarl.data.prompts import Prompt
from megarl.data.response_text import policy_texts
from megarl.data.sample import Sample, TokenData
from megarl.rewards.judge import Judge, Opinion
from megarl.rewards.judge_text import ends_in_thought
from megarl.rewards.shaping import soft_overlong_punishment
from megarl.rewards.verdict import Verdict, reference_to_verdict, short

if TYPE_CHECKING:
    from megarl.rewards.pool import Item, VerifierPool

_PROMPT_END = 16  # tokens; no tokenizer needs more for <think> and a newline


class GradingRequest(NamedTuple):
    """A sample in the queue.

    verdict  the episode's, or that of a judge that is the verifier; None: the verifier grades it
    opinion  of a judge that is a reward term"""

    sample: Sample
    prompt: Prompt
    verdict: Verdict | None
    opinion: Opinion | None = None


class Grader:
    """Asks the judge about each sample at once, and then grades the samples that have gathered together."""

    def __init__(
        self,
        config: Config,
        verifier: VerifierPool,
        tokenizer: Any,
        threads: Executor,
        judge: Judge | None = None,
    ) -> None:
        self.reward, self.verifier, self.tokenizer, self.threads = config.reward, verifier, tokenizer, threads
        self.judge = judge
        self.reflection = make_words_pattern(config.log.reflection_words)
        self.max_tokens = 0  # set by the worker, as the next one
        self.with_terms = False
        self.seconds = 0.0
        self._queue: list[GradingRequest] = []
        self._asking: dict[int, tuple[Sample, asyncio.Task[None]]] = {}  # by sample id
        self._has_work, self._grading = asyncio.Event(), asyncio.Lock()

    def add(self, sample: Sample, prompt: Prompt, verdict: Verdict | None) -> None:
        request = GradingRequest(sample, prompt, verdict)
        if self._needs_judge(request):
            self._asking[sample.id] = sample, self._group.create_task(self._ask_judge(request))
        else:
            self._enqueue(request)

    def _enqueue(self, request: GradingRequest) -> None:
        self._queue.append(request)
        self._has_work.set()

    def _needs_judge(self, request: GradingRequest) -> bool:
        if self.judge is None or request.sample.is_partial:
            return False
        is_graded = request.verdict is not None or bool(request.prompt.entry)
        return self.with_terms if self.reward.judge_is_term else not is_graded

    async def _ask_judge(self, request: GradingRequest) -> None:
        assert self.judge is not None
        sample, prompt = request.sample, request.prompt
        text = await asyncio.to_thread(self._decode_for_judge, sample, prompt)
        try:
            opinion = await self.judge.score(
                prompt.question or prompt.text, prompt.answer, text, has_budget=self.with_terms
            )
        except MegarlError:
            raise
        except Exception as error:  # noqa: BLE001 - reward.max_ungraded limits such responses
            frame = traceback.extract_tb(error.__traceback__)[-1]
            what = f"unexpected {type(error).__name__} in {frame.name}, line {frame.lineno}"
            opinion = Opinion(None, f"reward.judge: {what}", {"ungraded_unexpected": 1.0})
        sample.judge = opinion.costs
        del self._asking[sample.id]
        if self.reward.verifier == JUDGE:
            self._enqueue(request._replace(verdict=opinion.verdict(self.reward.judge.threshold)))
        else:
            self._enqueue(request._replace(opinion=opinion))

    async def run(self, report: Callable[[list[Sample]], Awaitable[None]]) -> None:
        """Grade and `report` queued samples together, for ever."""
        try:
            async with asyncio.TaskGroup() as self._group:
                await self._run(report)
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _run(self, report: Callable[[list[Sample]], Awaitable[None]]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._has_work.wait()
            self._has_work.clear()
            async with self._grading:
                queue, self._queue = self._queue, []
                if not queue:
                    continue
                start_time = time.perf_counter()
                await loop.run_in_executor(self.threads, self._grade, queue)
                self.seconds += time.perf_counter() - start_time
                await report([entry.sample for entry in queue])

    async def take_queue(self) -> list[Sample]:
        """Return the samples that are not graded, and stop asking the judge about them."""
        async with self._grading:
            queue, self._queue = self._queue, []
            asking, self._asking = self._asking, {}
        for _, task in asking.values():
            task.cancel()
        return [entry.sample for entry in queue] + [sample for sample, _ in asking.values()]

    def _grade(self, queue: Sequence[GradingRequest]) -> None:
        """Grade samples in place. A partial sample's reward stays 0."""
        texts = self._decode_texts([entry.sample for entry in queue])
        finished_entries = [
            (entry, text) for entry, text in zip(queue, texts, strict=True) if not entry.sample.is_partial
        ]
        for (entry, _), verdict in zip(finished_entries, self._get_verdicts(finished_entries), strict=True):
            if entry.opinion is not None:
                verdict = self._add_opinion(entry.sample, verdict, entry.opinion)
            self._set_reward(entry.sample, verdict)
        for entry, text in zip(queue, texts, strict=True):
            if self.reflection is not None:
                entry.sample.reflects = self.reflection.search(text) is not None

    def _decode_texts(self, samples: Sequence[Sample]) -> list[str]:
        """Return the text of each sample's policy turns; turns without observations between them are one."""
        turns_by_sample = [
            [turn for turn, is_sampled in split_turns(sample.data) if is_sampled] if sample.data else []
            for sample in samples
        ]
        texts = iter(policy_texts(self.tokenizer, [turn for turns in turns_by_sample for turn in turns]))
        return ["\n".join(islice(texts, len(turns))) for turns in turns_by_sample]

    def _decode_for_judge(self, sample: Sample, prompt: Prompt) -> str:
        """Return the response, with the <think> that the chat template has opened before a turn."""
        turns, context = list[list[int]](), [*prompt.tokens]
        openings = list[str]()
        for tokens, is_sampled in split_turns(sample.data) if sample.data is not None else ():
            if is_sampled:
                turns.append(tokens)
                prompt_end = self.tokenizer.decode(context[-_PROMPT_END:], skip_special_tokens=False)
                openings.append("<think>" if ends_in_thought(prompt_end) else "")
            context = tokens
        texts = policy_texts(self.tokenizer, turns)
        return "\n".join(opening + text for opening, text in zip(openings, texts, strict=True))

    def _get_verdicts(self, finished: Sequence[tuple[GradingRequest, str]]) -> list[Verdict]:
        """Return the verdicts of finished samples.

        An episode's own verdict stands, with the verifier's reward terms, unless only the verifier failed."""
        with_terms = self.with_terms and bool(self.reward.terms)
        items: list[Item] = []
        for (sample, prompt, episode_verdict, _), text in finished:
            if episode_verdict is None or with_terms:
                answer = text, prompt.reference
                if self.reward.verifier == JUDGE and episode_verdict is not None:
                    answer = text, reference_to_verdict(prompt.answer, episode_verdict)
                sizes = sample.num_sampled, self.max_tokens, sample.is_truncated
                items.append((*answer, *sizes) if with_terms else answer)
        verifier_verdicts, verdicts = iter(self.verifier.verify(items)), []
        for (_, _, episode_verdict, _), _ in finished:
            if episode_verdict is None:
                verdicts.append(next(verifier_verdicts))
                continue
            verdict = next(verifier_verdicts) if with_terms else episode_verdict
            has_failed = episode_verdict.error is not None or not episode_verdict.graded
            if verdict.error is None or has_failed:
                verdict = replace(episode_verdict, terms=verdict.terms)
            verdicts.append(verdict)
        return verdicts

    def _add_opinion(self, sample: Sample, verdict: Verdict, opinion: Opinion) -> Verdict:
        """Return a rule's verdict with the judge's score as a term."""
        if opinion.score is None and not self.reward.judge.weight:  # only measured
            return verdict
        if opinion.score is None:
            return replace(verdict, graded=False, error=opinion.error)
        if verdict.graded:
            agrees = verdict.correct == (opinion.score >= self.reward.judge.threshold)
            sample.judge = {**opinion.costs, "agrees": float(agrees)}
        return replace(verdict, terms={**verdict.terms, JUDGE: opinion.score})

    def _set_reward(self, sample: Sample, verdict: Verdict) -> None:
        reward, overlong, penalty = self.reward, self.reward.overlong, 0.0
        if overlong.soft_punishment:
            penalty = soft_overlong_punishment(sample.num_sampled, self.max_tokens, overlong.buffer)
        term_sum = sum(reward.term_weights[name] * value for name, value in verdict.terms.items())
        total = reward.weight * verdict.reward(reward.correct, reward.incorrect) + term_sum + penalty
        if sample.data is not None and sample.data.turn_rewards is not None:
            total += math.fsum(sample.data.turn_rewards)
        sample.correct, sample.graded, sample.score = verdict.correct, verdict.graded, verdict.score
        sample.extracted, sample.error = short(verdict.extracted), short(verdict.error)
        sample.terms, sample.overlong_penalty, sample.reward = dict(verdict.terms), penalty, total


def split_turns(data: TokenData) -> list[tuple[list[int], bool]]:
    """Return the tokens of each turn and whether the policy has sampled them."""
    if data.is_sampled is None:
        return [(data.tokens.tolist(), True)]
    pairs = zip(data.tokens.tolist(), data.is_sampled.tolist(), strict=True)
    turns = groupby(pairs, key=lambda pair: pair[1])
    return [([token for token, _ in turn], is_sampled) for is_sampled, turn in turns]


def make_words_pattern(words: Sequence[str]) -> re.Pattern[str] | None:
    """Return a pattern for `words`, in any case and with any space; None without words.

    A match is not part of a longer Latin word (Chinese has no spaces)."""
    alternatives = "|".join(r"\s+".join(map(re.escape, word.split())) for word in words)
    return (
        re.compile(rf"(?<![A-Za-z0-9_])(?:{alternatives})(?![A-Za-z0-9_])", re.IGNORECASE) if words else None
    )
