"""Simulate steps whose weights change while responses run (`schedule.in_flight`)."""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from megarl.config.schema.schedule import get_lead
from megarl.plan.simulate import (
    GROUP_CORRELATION,
    WARM_UP,
    Costs,
    Engine,
    RolloutWork,
    SimulatedGroup,
    Split,
    Timeline,
    simulate,
)

MEASURED = 5  # steps
LONGEST_WARM_UP = 5  # extra steps until staleness is steady
TRAINERS = -1  # in the queue of events


@dataclass
class GroupInFlight(SimulatedGroup):
    """A group with its versions.

    oldest          version of its first token
    version_tokens  sum of versions over tokens"""

    oldest: int | None = None
    version_tokens: float = 0.0


class _InFlightSimulation:
    def __init__(self, work: RolloutWork, costs: Costs, split: Split, seed: int, measured: int) -> None:
        self.work, self.costs, self.split, self.rng = work, costs, split, random.Random(seed)
        self.engines = [Engine(costs, work.prompt_tokens) for _ in range(split.engines)]
        self.names, self.timeline = split.engine_names, split.make_timeline()
        self.timeline.warm_up = WARM_UP + min(split.max_staleness, LONGEST_WARM_UP)
        self.steps = self.timeline.warm_up + measured
        self.events: list[tuple[float, int, int]] = []  # seconds, engine or TRAINERS, engine's version
        self.now = self.trainer_now = 0.0
        self.trains = False
        self.version = 0  # of the engines' weights
        self.version_begins = [[0.0] for _ in self.engines]  # decoding step, by engine and version
        self.waiting: deque[tuple[float, GroupInFlight]] = deque()  # responses of started groups
        self.sampled_again: deque[GroupInFlight] = deque()
        self.finished: list[GroupInFlight] = []  # of the next batch
        self.batches: deque[list[GroupInFlight]] = deque()
        self.running = self.accepted = self.offered = self.dropped = 0  # groups; only dropped after warm-up
        self.handed_over = 0  # batches
        self.reported_tokens = 0.0

    def run(self) -> Timeline:
        self._fill(range(len(self.engines)))
        while len(self.timeline.ends) < self.steps:
            self.now, number, version = heapq.heappop(self.events)
            if number == TRAINERS:
                self._finish_update()
            elif version == self.engines[number].version:
                self._finish_responses(number)
        for number, engine in enumerate(self.engines):
            engine.advance(self.now)
            self._record_rollout(number)
        trained_groups = self.work.prompts * (self.steps - self.timeline.warm_up)
        self.timeline.dropped = self.dropped / trained_groups
        return self.timeline

    def _start_group(self) -> None:
        if self.sampled_again:
            group = self.sampled_again.popleft()
        else:
            lengths = self.work.sample_lengths(self.rng, self.work.group_size)
            group = GroupInFlight(lengths, self.rng.random() < self.work.kept_share, len(lengths))
        self.running += 1
        self.waiting.extend((length, group) for length in group.lengths)

    @property
    def _may_start(self) -> bool:
        """Return whether ordered steps need more groups, like rollout/in_flight.py."""
        prompts = self.work.prompts
        missing = prompts * (self.version + 1 + get_lead(self.split.max_staleness)) - self.accepted
        return self.running * (self.accepted + prompts) < missing * (self.offered + prompts)

    def _fill(self, numbers: Iterable[int], changed: Iterable[int] = ()) -> None:
        """Start responses on engines `numbers`, those with the fewest running first.

        changed: engines whose next event must be computed in any case"""
        changed_engines, at_once = set(changed), self.costs.at_once
        free_engines: list[tuple[int, int]] = []
        if self.waiting or self._may_start:
            running_counts = ((len(self.engines[number].running), number) for number in numbers)
            free_engines = [pair for pair in running_counts if pair[0] < at_once]
            heapq.heapify(free_engines)
        while free_engines and (self.waiting or self._may_start):
            if not self.waiting:
                self._start_group()
            length, group = self.waiting.popleft()
            if group.oldest is None:
                group.oldest = self.version
            running, number = free_engines[0]
            engine = self.engines[number]
            if number not in changed_engines:
                changed_engines.add(number)
                engine.advance(self.now)
            engine.waiting.append((length, group))
            engine.start_waiting()
            if running + 1 < at_once:
                heapq.heapreplace(free_engines, (running + 1, number))
            else:
                heapq.heappop(free_engines)
        for number in changed_engines:
            engine = self.engines[number]
            if engine.running:
                heapq.heappush(self.events, (engine.next_finish(), number, engine.version))
            else:
                engine.version += 1

    def _finish_responses(self, number: int) -> None:
        engine, frees_others = self.engines[number], False
        engine.advance(self.now)
        for length, group in engine.pop_finished():
            assert isinstance(group, GroupInFlight)
            group.version_tokens += self._sum_versions(number, length)
            group.running -= 1
            if not group.running:
                frees_others |= not self._offer(group)
        self._fill(range(len(self.engines)) if frees_others else (number,), (number,))

    def _offer(self, group: GroupInFlight) -> bool:
        """Add a finished group to the next batch, or reject or drop it. Return whether it was added."""
        self.running -= 1
        assert group.oldest is not None
        if self.handed_over - group.oldest > self.split.max_staleness:
            self.dropped += len(self.timeline.ends) >= self.timeline.warm_up
            self.sampled_again.append(self._sample_again(group))
            return False
        self.offered += 1
        if not group.kept:
            return False
        self.accepted += 1
        self.finished.append(group)
        if len(self.finished) == self.work.prompts:
            self.batches.append(self.finished)
            self.finished = []
            self.handed_over += 1
            if not self.trains:
                self._train()
        return True

    def _sample_again(self, group: GroupInFlight) -> GroupInFlight:
        """Sample the same prompt: keep some lengths, because a prompt's responses have similar ones."""
        fresh = self.work.sample_lengths(self.rng, self.work.group_size)
        pairs = zip(group.lengths, fresh, strict=True)
        lengths = [old if self.rng.random() < GROUP_CORRELATION else new for old, new in pairs]
        return GroupInFlight(lengths, group.kept, len(lengths))

    def _sum_versions(self, number: int, length: float) -> float:
        """Sum the versions of a finished response's tokens."""
        begins, end, total = self.version_begins[number], self.engines[number].step, 0.0
        begin = end - length
        for version in range(self.version, -1, -1):
            version_begin = max(begin, begins[version])
            total += version * (end - version_begin)
            if version_begin <= begin:
                break
            end = version_begin
        return total

    def _train(self) -> None:
        batch, step, begin = self.batches.popleft(), len(self.timeline.ends) + 1, self.trainer_now
        start = max(begin, self.now)
        self.timeline.add("trainers", step, "wait for batch", begin, start)
        self.trainer_now, self.trains = start, True
        fresh_tokens = sum(sum(group.lengths) for group in batch)
        prompt_tokens = self.work.prompt_tokens * self.work.group_size * len(batch)
        for phase, seconds in self.costs.train(fresh_tokens + prompt_tokens).items():
            self.timeline.add("trainers", step, phase, self.trainer_now, self.trainer_now + seconds)
            self.trainer_now += seconds
        oldest = min(group.oldest or 0 for group in batch)
        mean_version = sum(group.version_tokens for group in batch) / fresh_tokens
        self.timeline.staleness.append((step - 1 - mean_version, step - 1 - oldest))
        self.timeline.tokens.append(fresh_tokens + prompt_tokens)
        heapq.heappush(self.events, (self.trainer_now, TRAINERS, 0))

    def _finish_update(self) -> None:
        """Transfer weights at once, then train on the next batch, if any."""
        self.timeline.ends.append(self.now)
        self.version += 1
        self.trains, self.trainer_now = False, self.now + self.costs.transfer
        self.timeline.add("trainers", self.version, "weight_transfer", self.now, self.trainer_now)
        for number, engine in enumerate(self.engines):
            engine.advance(self.now)
            self._record_rollout(number)
            self.version_begins[number].append(engine.step)
            name, step = self.names[number], self.handed_over + 1
            self.timeline.add(name, step, "weight_transfer", self.now, self.trainer_now)
            prefill = 0.0 if self.split.keeps_cache else engine.cached_tokens * self.costs.prefill_token
            self.timeline.add(name, step, "prefill_again", self.trainer_now, self.trainer_now + prefill)
            engine.now = max(engine.now, self.now) + self.costs.transfer + prefill
            if engine.running:
                engine.busy.append((engine.now, engine.now))
        generated_tokens = sum(engine.generated for engine in self.engines)
        self.timeline.generated.append(generated_tokens - self.reported_tokens)
        self.reported_tokens = generated_tokens
        if self.batches:
            self._train()
        self._fill(range(len(self.engines)), range(len(self.engines)))

    def _record_rollout(self, number: int) -> None:
        """Move an engine's decoding since the last transfer to its row."""
        engine, name, step = self.engines[number], self.names[number], self.handed_over + 1
        spans = self.timeline.rows.get(name)
        previous_end = spans[-1].end if spans else 0.0
        for begin, end in engine.busy:
            self.timeline.add(name, step, "wait for weights", previous_end, begin)
            self.timeline.add(name, step, "rollout", begin, min(end, self.now))
            previous_end = end
        self.timeline.add(name, step, "wait for weights", previous_end, self.now)
        engine.busy = []


def simulate_in_flight(
    work: RolloutWork, costs: Costs, split: Split, seed: int = 0, measured: int = MEASURED
) -> Timeline:
    """Simulate steps of engines that never drain.

    Groups start until version + 1 + `get_lead` batches are handed over or running. The first finished
    groups are the next batch. A group that is too old when it ends is sampled again."""
    return _InFlightSimulation(work, costs, split, seed, measured).run()


def simulate_split(work: RolloutWork, costs: Costs, split: Split, seed: int = 0) -> Timeline:
    return (simulate_in_flight if split.max_staleness else simulate)(work, costs, split, seed)
