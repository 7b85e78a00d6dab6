"""The controller's table of responses, and its record of each engine."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from megarl.config.errors import EngineError
from megarl.config.schema import Config
from megarl.data.prompts import Prompt
from megarl.data.sample import Sample, SampleGroup

PRIOR = 8  # finished responses that each engine is credited with at the start: speeds vary little then


@dataclass
class GroupRequest:
    """A prompt, and a seed for each of its responses.

    expected  mean length of the prompt's newest group, tokens; 0: unknown. The longest start first
    first     id of its first sample, if an earlier rollout has assigned it
    holders   by response, the engine whose leader keeps a partial response; None: there is none"""

    prompt: Prompt
    seeds: Sequence[int]
    expected: float = 0.0
    first: int | None = None
    holders: Sequence[int | None] = ()


@dataclass
class Slot:
    """One response of a group that the controller has not taken yet.

    id      of its sample, unique within a run
    index   position in its group
    engine  that generates or generated it; None while it waits for one
    sample  its result; None until it is finished"""

    request: GroupRequest
    id: int
    index: int
    engine: int | None = None
    sample: Sample | None = None

    def is_running_on(self, engine: int) -> bool:
        """Return whether this engine is generating it."""
        return self.engine == engine and self.sample is None


@dataclass
class EngineLoad:
    """What the controller knows of one engine in the present rollout.

    servers            servers that it is a client of; 1 for any other engine
    queue              slots planned for it that wait, in the order in which they should start
    waiting_for_tool   running responses that wait for a tool, an environment or an agent
    finished           responses that it has finished
    newly_finished     of these, responses reported by the newest messages
    busy_seconds       time in which it had work"""

    servers: int = 1
    queue: list[Slot] = field(default_factory=list)
    waiting_for_tool: int = 0
    finished: int = 0
    newly_finished: int = 0
    busy_seconds: float = 0.0


class Dispatcher:
    """Assigns responses to engines.

    slots       by id, in the order of the prompts, until their group is taken
    engines     one record per engine
    version     of the weights that the responses were sampled with; -1 before the first is finished
    rebalanced  responses that started on another engine than an equal division gives
    """

    def __init__(self, config: Config, engines: int) -> None:
        rollout = config.rollout
        self.slots: dict[int, Slot] = {}
        self.version = -1
        # A client of servers counts its own servers.
        self.engines = [EngineLoad(len(rollout.urls[e::engines]) or 1) for e in range(engines)]
        self.rebalanced = 0
        limit = rollout.max_batch if rollout.in_flight is None else rollout.in_flight
        self._limit = math.inf if not limit or engines == 1 else float(limit)  # 0 means no limit

    @property
    def idle_seconds(self) -> float:
        """Return the time in which an engine had no work while another had, averaged over engines."""
        busy = [engine.busy_seconds for engine in self.engines]
        return max(busy) - sum(busy) / len(busy)

    def add(self, requests: Sequence[GroupRequest]) -> list[list[Slot]]:
        """Add requests with ids to the table and plan their engines. Return, by engine, the slots that
        continue a partial response on the engine that keeps it.

        New slots are cut in the order of their prompts into equal parts, one per engine, so that one engine
        or its neighbour prefills a prompt. An engine starts the longest expected ones first."""
        fresh: list[Slot] = []
        continued: list[list[Slot]] = [[] for _ in self.engines]
        for request in requests:
            assert request.first is not None
            for i, holder in enumerate(request.holders or [None] * len(request.seeds)):
                slot = Slot(request, request.first + i, i)
                self.slots[slot.id] = slot
                if holder is None:
                    fresh.append(slot)
                else:
                    slot.engine = holder
                    continued[holder].append(slot)
        for e, engine in enumerate(self.engines):
            part = fresh[e * len(fresh) // len(self.engines) : (e + 1) * len(fresh) // len(self.engines)]
            engine.queue += sorted(part, key=lambda slot: -slot.request.expected)
        return continued

    def assign(self) -> list[list[Slot]]:
        """Start waiting responses on engines with room. Return the started slots by engine.

        An engine (or each of its servers) has room for `rollout.in_flight` responses beside those that wait
        for a tool. What it has just finished is added, so that it never runs dry between two messages."""
        on_engine = Counter(slot.engine for slot in self.slots.values() if slot.sample is None)
        running = [max(0, on_engine[e] - one.waiting_for_tool) for e, one in enumerate(self.engines)]
        limits = [self._limit * one.servers + one.newly_finished for one in self.engines]
        queues = [[slot.id for slot in one.queue] for one in self.engines]
        shares = share_out(queues, running, limits, [one.finished for one in self.engines])
        for e, (queue, share) in enumerate(zip(queues, shares, strict=True)):
            self.rebalanced += len(set(share).difference(queue))
            for i in share:
                self.slots[i].engine = e
        for one in self.engines:
            one.queue = [slot for slot in one.queue if slot.engine is None]
        return [[self.slots[i] for i in share] for share in shares]

    def finish(self, engine: int, version: int, samples: Sequence[Sample], busy_seconds: float) -> None:
        """Note finished samples of an engine. Raises EngineError if another one has other weights."""
        if self.version not in (-1, version):
            different = f"different weight versions: {sorted((self.version, version))}"
            raise EngineError(f"rollout: the ranks' engines have {different}")
        self.version = version
        load = self.engines[engine]
        load.newly_finished += len(samples)
        load.finished += len(samples)
        load.busy_seconds = busy_seconds
        for sample in samples:
            self.slots[sample.id].sample = sample

    def groups(self) -> Iterator[tuple[GroupRequest, SampleGroup | None]]:
        """Yield each request, in the order of the prompts, with its group; None if a response is missing."""
        for _, some in groupby(self.slots.values(), key=lambda slot: slot.request.first):
            slots = list(some)
            samples = [slot.sample for slot in slots if slot.sample is not None]
            request, is_complete = slots[0].request, len(samples) == len(slots)
            yield request, SampleGroup(request.prompt, samples, self.version) if is_complete else None

    def take_groups(self, most: int | None = None) -> list[SampleGroup]:
        """Remove and return the complete groups before the first incomplete one, at most `most`."""
        taken: list[SampleGroup] = []
        for _, group in self.groups():
            if group is None or len(taken) == most:
                break
            taken.append(group)
        for sample in (sample for group in taken for sample in group.samples):
            del self.slots[sample.id]
        return taken

    def clear(self) -> None:
        """Drop all slots, waiting ones too."""
        self.slots.clear()
        for engine in self.engines:
            engine.queue.clear()


def share_out(
    queues: Sequence[Sequence[int]], running: Sequence[int], limits: Sequence[float], finished: Sequence[int]
) -> list[list[int]]:
    """Return the waiting responses that each engine starts now.

    Args, one entry per engine:
        queues: responses planned for it, in the order in which they should start
        running: number of responses that it works on
        limits: most responses at once
        finished: number of finished responses, a measure of its speed

    Responses go one by one to the engine that would run dry first at its speed so far, up to its limit. Equal
    engines get what was planned. An engine takes from the front of its own queue. When that is empty it takes
    neighbours, which may share a prompt, from the end of the longest queue."""
    speeds = [PRIOR + count for count in finished]
    counts = [0] * len(queues)
    # Of two engines that would run dry at the same time, the one with own responses comes first.
    heap = [
        (n / speed, not own, e) for e, (n, speed, own) in enumerate(zip(running, speeds, queues, strict=True))
    ]
    heapq.heapify(heap)
    left = sum(map(len, queues))
    while left and heap:
        _, _, e = heapq.heappop(heap)
        if running[e] + counts[e] >= limits[e]:
            continue
        counts[e] += 1
        left -= 1
        is_exhausted = counts[e] >= len(queues[e])
        heapq.heappush(heap, ((running[e] + counts[e]) / speeds[e], is_exhausted, e))
    shares = [list(own[:count]) for own, count in zip(queues, counts, strict=True)]
    rest = [list(own[count:]) for own, count in zip(queues, counts, strict=True)]
    for share, count in zip(shares, counts, strict=True):
        while len(share) < count:
            longest = max(rest, key=len)
            missing = min(count - len(share), len(longest))
            share += longest[-missing:]
            del longest[-missing:]
    return shares
