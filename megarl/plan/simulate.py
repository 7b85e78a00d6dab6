"""A step in time: who waits for whom where engines and trainers take turns, and where they run beside each
other, some steps ahead (`megarl plan --simulate`).

Response lengths are drawn; an engine decodes all that it has, the slower the more that is; trainers go
through their phases. What a decoding step and a phase cost comes from plan/times.py, or was measured
(benchmarks/simulate.py). Pure Python; a discrete event is the end of a response.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import NormalDist, fmean, pstdev
from typing import Literal, NamedTuple

from safetensors import SafetensorError, safe_open

from megarl.config.check import check_config
from megarl.config.errors import DataError, MegarlError
from megarl.config.schema import TRAIN, Config
from megarl.observe.runs import load_run
from megarl.plan.fit import find_problem
from megarl.plan.inputs import PlanInputs
from megarl.plan.search import with_keys
from megarl.plan.times import (
    GROUPS_KEPT,
    Lengths,
    decoded_at_once,
    decoding,
    estimate,
    windows_of,
)
from megarl.sync.plan import engine_ranks

ALIKE = 0.5  # our estimate: of the variance of log lengths, what the responses to one prompt have in common
BATCHES, FIRST = 6, 3  # that are simulated, and the step from which on they count
RECORDED = 20  # last steps whose rollouts are read for their lengths

Balance = Literal["stretches", "queue", "longest"]
Draw = Callable[[random.Random, int], Sequence[float]]


@dataclass(frozen=True)
class Costs:
    """What takes how many seconds.

    decode    a step of an engine, of so many responses with so many tokens in the cache
    prefill   of an engine for a response's prompt
    at_once   responses that an engine decodes at once
    train     tokens of a batch -> phase -> seconds, in their order; the trainers together
    transfer  a weight transfer
    changes   the phase in which the actor's weights change"""

    decode: Callable[[float, float], float]
    prefill: float
    at_once: int
    train: Callable[[float], Mapping[str, float]]
    transfer: float
    changes: str = "actor_update"


@dataclass(frozen=True)
class RolloutWork:
    """What a step draws.

    prompts, group  groups that a step trains on, and their responses
    prompt, draw    mean tokens of a prompt; gives the lengths of a group's responses
    kept            share of the groups that dynamic sampling keeps; 1: it is off
    streams         whether groups are drawn as long as some are missing (SGLang), or batch after batch
    oversample      first generation batch / groups needed
    window          tokens of a response that a step draws (rollout.window); 0: all
    most_windows    of any response
    balance         stretches: requests stay where equal stretches of them were submitted; queue: those that
                    have not begun move to an engine that has room; longest: those that are expected to be
                    longest are also begun first, as earlier epochs tell"""

    prompts: int
    group: int
    prompt: float
    draw: Draw
    kept: float = 1.0
    streams: bool = True
    oversample: float = 1.0
    balance: Balance = "queue"
    window: int = 0
    most_windows: int = 1


@dataclass
class SimulatedGroup:
    """A prompt's responses: their lengths, and how many of them have not ended; of a response that earlier
    steps have begun, alone, the tokens that are there."""

    lengths: Sequence[float]
    kept: bool
    left: int
    begun: float = 0.0


@dataclass(frozen=True)
class SimulatedRollout:
    """A batch that was drawn.

    seconds    until the last group that it needs is complete
    busy       of each engine, the stretches of time in which it had something to decode
    tokens     of the groups that are trained on, with prompts
    fresh      of these, without those that earlier steps drew
    generated  tokens of all responses, those that are thrown away as well"""

    seconds: float
    busy: list[list[tuple[float, float]]]
    tokens: float
    fresh: float
    generated: float


class Engine:
    """Decodes responses, all that it has one step at a time."""

    def __init__(self, costs: Costs, prompt: float) -> None:
        self.costs, self.prompt = costs, prompt
        self.now, self.step, self.pace, self.tokens = 0.0, 0.0, 0.0, 0.0
        self.running: list[tuple[float, int, float, SimulatedGroup]] = []  # by the step at which they end
        self.waiting: deque[tuple[float, SimulatedGroup]] = deque()
        self.busy: list[tuple[float, float]] = []
        self.version = self.count = 0
        self.generated = 0.0

    def advance(self, now: float) -> None:
        """Decode until `now`, at the pace of the responses that run."""
        if self.running:
            begin, until = self.busy.pop()
            done = max(0.0, now - self.now) / self.pace
            self.step += done
            self.tokens += done * len(self.running)
            self.busy.append((begin, max(until, now)))
        self.now = max(self.now, now)

    def ended(self) -> Iterator[SimulatedGroup]:
        """Give the groups of the responses that have ended by now."""
        while self.running and self.running[0][0] <= self.step + 1e-9:
            _, _, length, group = heapq.heappop(self.running)
            self.tokens -= self.prompt + group.begun + length
            self.generated += length
            yield group

    def admit(self) -> None:
        """Begin what waits, as far as there is room."""
        while self.waiting and len(self.running) < self.costs.at_once:
            length, group = self.waiting.popleft()
            if not self.running:
                self.busy.append((self.now, self.now))
            self.count += 1
            heapq.heappush(self.running, (self.step + length, self.count, length, group))
            self.tokens += self.prompt + group.begun
            self.now += self.costs.prefill * (1 + group.begun / max(self.prompt, 1.0))

    def next_end(self) -> float:
        """Return when the next response ends; the pace is that of half way until then."""
        self.version += 1
        left, count = self.running[0][0] - self.step, len(self.running)
        self.pace = self.costs.decode(count, self.tokens + count * left / 2)
        return self.now + left * self.pace


def simulate_rollout(
    work: RolloutWork, costs: Costs, engines: int, chance: random.Random
) -> SimulatedRollout:
    """Draw a batch. What a step leaves to the next one (surplus, partial responses) is not followed."""
    all_engines = [Engine(costs, work.prompt) for _ in range(engines)]
    submitted: list[SimulatedGroup] = []
    events: list[tuple[float, int, int]] = []  # when, engine, its version then
    now = 0.0
    complete = kept = 0  # groups, and how many of them dynamic sampling keeps
    offered = accepted = 0  # the same, up to the first that is not complete
    groups = work.prompts * (work.group if work.window else 1)  # windows are on their own
    longest_first = work.balance == "longest"
    moves = work.balance != "stretches" and engines > 1

    def submit(prompts: int) -> None:
        rows = []
        for _ in range(prompts):
            if work.window:
                group = a_window(work, chance)
            else:
                lengths = work.draw(chance, work.group)
                group = SimulatedGroup(lengths, chance.random() < work.kept, len(lengths))
            submitted.append(group)
            rows += [(length, group) for length in group.lengths]
        if longest_first:  # by what its group's are on average, as earlier epochs would tell
            rows.sort(key=lambda row: -fmean(row[1].lengths))
        for number, engine in enumerate(all_engines):
            stretch = slice(number * len(rows) // engines, (number + 1) * len(rows) // engines)
            engine.waiting += rows[number::engines] if longest_first else rows[stretch]
            engine.advance(now)
            engine.admit()
        for number in range(engines):
            go_on(number)

    def go_on(number: int) -> None:
        """Begin what the engine has room for, its own requests first, and note when it ends a response."""
        engine = all_engines[number]
        engine.admit()
        while moves and len(engine.running) < costs.at_once:
            if not any(other.waiting for other in all_engines):
                break
            loaded = max(all_engines, key=lambda other: len(other.waiting))
            engine.waiting.append(loaded.waiting.popleft() if longest_first else loaded.waiting.pop())
            engine.admit()
        if engine.running:
            heapq.heappush(events, (engine.next_end(), number, engine.version))

    def wanted() -> int:
        """Return how many prompts to submit now: what GroupCollector (rollout/collector.py) would."""
        missing = groups - accepted
        if not submitted:
            return math.ceil(missing * work.oversample) if work.kept < 1 else missing
        if work.streams:  # those that are complete behind one that is not count as well
            missing = groups - kept
        if missing <= 0:
            return 0
        estimated = math.ceil(missing * (complete + 2) / (kept + 1))
        if not work.streams:
            return min(groups, max(missing, estimated))
        return max(0, min(estimated, groups) - (len(submitted) - complete))

    while accepted < groups:
        if not events:
            submit(wanted())
        now, number, version = heapq.heappop(events)
        engine = all_engines[number]
        if version != engine.version:
            continue
        engine.advance(now)
        before = complete
        for group in engine.ended():
            group.left -= 1
            complete += not group.left
            kept += group.kept and not group.left
        go_on(number)
        if complete == before:
            continue
        while offered < len(submitted) and not submitted[offered].left and accepted < groups:
            accepted += submitted[offered].kept
            offered += 1
        if work.streams and work.kept < 1 and (more := wanted()):
            submit(more)
    for engine in all_engines:  # what still runs is aborted
        engine.advance(now)
        engine.generated += sum(length - (end - engine.step) for end, _, length, _ in engine.running)
    used = [group for group in submitted[:offered] if group.kept][:groups]
    tokens = sum(length + work.prompt + group.begun for group in used for length in group.lengths)
    fresh = sum(length + work.prompt * (not group.begun) for group in used for length in group.lengths)
    generated = sum(engine.generated for engine in all_engines)
    return SimulatedRollout(now, [engine.busy for engine in all_engines], tokens, fresh, generated)


def a_window(work: RolloutWork, chance: random.Random) -> SimulatedGroup:
    """Draw a response of a step and its window, of a job that has gone on for long: a response is there the
    more often the more windows it has."""
    while True:
        [length] = work.draw(chance, 1)
        windows = windows_of(length, work.window)
        if chance.randrange(work.most_windows) < len(windows):
            found = chance.choice(windows)
            return SimulatedGroup([found.drawn], True, 1, found.begun)


class Span(NamedTuple):
    """A phase of some ranks, of step `step`. Phases that begin with "wait" are waiting."""

    step: int
    phase: str
    begin: float
    end: float


@dataclass
class Course:
    """Steps as they were simulated.

    rows   name -> its phases in time: of the trainers together, and of each engine; where they take turns the
           engines' rows have all of it
    ranks  name -> how many there are
    marks  when each step's updates were done
    """

    rows: dict[str, list[Span]] = field(default_factory=dict)
    ranks: dict[str, int] = field(default_factory=dict)
    marks: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    generated: list[float] = field(default_factory=list)

    @property
    def steady(self) -> tuple[float, float]:
        """Return when the steps that count begin, and when they end."""
        return self.marks[FIRST - 1], self.marks[-1]

    @property
    def step(self) -> float:
        """Return the mean seconds of a step."""
        begin, end = self.steady
        return (end - begin) / (len(self.marks) - FIRST)

    @property
    def tokens_second(self) -> float:
        """Return the tokens of batches, with prompts, a second of the job; each once, however many steps have
        trained on what stands behind it."""
        return fmean(self.tokens[FIRST:]) / self.step

    def waits(self, name: str) -> dict[str, float]:
        """Return what a row waits for -> its share of the row's time."""
        begin, end = self.steady
        shares: dict[str, float] = {}
        for span in self.rows[name]:
            inside = min(span.end, end) - max(span.begin, begin)
            if span.phase.startswith("wait") and inside > 0:
                shares[span.phase] = shares.get(span.phase, 0.0) + inside / (end - begin)
        return shares

    @property
    def idle(self) -> float:
        """Return the share of the ranks' time in which they wait."""
        waited = sum(self.ranks[name] * sum(self.waits(name).values()) for name in self.rows)
        return waited / sum(self.ranks.values())


class Split(NamedTuple):
    """How a job uses its ranks: so many engines of engine_tp each, and trainers, ranks that only train; 0:
    those of the engines do, in turn. ahead: schedule.ahead."""

    engines: int
    trainers: int = 0
    ahead: int = 0
    engine_tp: int = 1

    @staticmethod
    def of(plan: PlanInputs, ahead: int) -> Split:
        """Return the split of a plan, whose layout is the trainers'."""
        trainers, apart = plan.layout.world, plan.config.parallel.rollout_ranks
        return Split(plan.engines(apart or trainers), trainers if apart else 0, ahead, plan.engine_tp)


def simulate(work: RolloutWork, costs: Costs, split: Split, seed: int = 0) -> Course:
    """Run BATCHES steps of a job that uses its ranks in this way.

    With ahead = a, the batch of step k is drawn with the weights after step k - 1 - a, the first ones with
    the initial weights. Version v is transferred when the trainers have it and the engines have ended batch
    v + a; with a = 2 the trainers look before each phase, and wait before the next change of their
    weights."""
    course, trainers, ahead = Course(), split.trainers, split.ahead
    names = [f"engine {number}" for number in range(split.engines)]
    drawn: list[SimulatedRollout] = []
    ends: list[float] = []  # of each batch
    trainer_now = engine_now = 0.0

    def rollout() -> None:
        """Draw the next batch."""
        nonlocal engine_now
        number = len(ends)
        if number < BATCHES:  # those drawn beyond are not trained on
            drawn.append(simulate_rollout(work, costs, split.engines, random.Random(f"{seed} {number}")))
        batch, step = drawn[number % BATCHES], number + 1
        for name, busy in zip(names, batch.busy, strict=True):
            at = engine_now
            for begin, end in busy:
                put(name, step, "wait for other engines", at, engine_now + begin)
                put(name, step, "rollout", engine_now + begin, engine_now + end)
                at = engine_now + end
            put(name, step, "wait for other engines", at, engine_now + batch.seconds)
        engine_now += batch.seconds
        ends.append(engine_now)

    def put(name: str, step: int, phase: str, begin: float, end: float) -> None:
        if end > begin:
            course.rows.setdefault(name, []).append(Span(step, phase, begin, end))

    def meet(version: int) -> None:
        """Transfer the weights, once both sides are there, and let the engines go on."""
        nonlocal trainer_now, engine_now
        begin = max(trainer_now, engine_now)
        put("trainers", version, "wait for engines", trainer_now, begin)
        for name in names:
            put(name, version + ahead + 1, "wait for weights", engine_now, begin)
        for name in ("trainers", *names):
            put(name, version, "weight_transfer", begin, begin + costs.transfer)
        trainer_now = engine_now = begin + costs.transfer
        rollout()

    if trainers:
        course.ranks["trainers"] = trainers
        course.rows["trainers"] = []
    course.ranks |= dict.fromkeys(names, split.engine_tp)
    for _ in range(1 + ahead if trainers else 0):
        rollout()
    behind = 0  # the version that is still to be transferred
    for step in range(1, BATCHES + 1):
        if not trainers:
            rollout()
            trainer_now = engine_now
        else:
            begin = max(trainer_now, ends[step - 1])
            put("trainers", step, "wait for batch", trainer_now, begin)
            trainer_now = begin
        batch = drawn[step - 1]
        for phase, seconds in costs.train(batch.tokens).items():
            if behind and (phase == costs.changes or engine_now <= trainer_now):
                meet(behind)
                behind = 0
            for name in ("trainers",) if trainers else names:
                put(name, step, phase, trainer_now, trainer_now + seconds)
            trainer_now += seconds
        course.marks.append(trainer_now)
        course.tokens.append(batch.fresh)
        course.generated.append(batch.generated)
        if not trainers:
            for name in names:
                put(name, step, "weight_transfer", trainer_now, trainer_now + costs.transfer)
            engine_now = trainer_now + costs.transfer
        elif ahead == 2 and engine_now > trainer_now:
            behind = step
        else:
            meet(step)
    return course


# Where the figures come from: a plan, and recorded lengths.


def costs_of(plan: PlanInputs, lengths: Lengths) -> Costs:
    """Return what things cost by plan/times.py. The plan's layout is the trainers'."""
    parts = estimate(plan, lengths)
    train = {name: s for name, s in parts.parts.items() if name not in ("rollout", "weight_transfer")}
    one = decoding(plan)
    return Costs(
        decode=one.step,
        prefill=lengths.prefilled(cached=plan.config.rollout.capabilities.continuous_batching) * one.prefill,
        at_once=decoded_at_once(plan, lengths),
        train=lambda tokens: {name: s * tokens / parts.tokens for name, s in train.items()},
        transfer=parts.parts["weight_transfer"],
    )


def work_of(
    config: Config, lengths: Lengths, balance: Balance, kept: float | None = None, draw: Draw | None = None
) -> RolloutWork:
    """Return what a step of this configuration draws."""
    rollout = config.rollout
    return RolloutWork(
        prompts=rollout.prompts,
        group=rollout.group_size,
        prompt=lengths.prompt + lengths.shown,  # in the cache from the beginning on; tools take no time
        draw=draw or log_normal(lengths),
        kept=(kept or GROUPS_KEPT) if rollout.dynamic_sampling.enabled else 1.0,
        streams=rollout.capabilities.continuous_batching,
        oversample=rollout.dynamic_sampling.oversample,
        balance=balance,
        window=rollout.window or 0,
        most_windows=max(1, math.ceil(lengths.longest / (rollout.window or lengths.longest))),
    )


def log_normal(lengths: Lengths) -> Draw:
    """Return what draws a group's lengths: log-normal, cut at the limit, and alike within a group."""
    scale, common, own = math.log(lengths.median), ALIKE**0.5, (1 - ALIKE) ** 0.5

    def draw(chance: random.Random, responses: int) -> list[float]:
        prompt = common * chance.gauss(0, 1)
        drawn = (prompt + own * chance.gauss(0, 1) for _ in range(responses))
        return [max(1.0, min(math.exp(scale + lengths.spread * z), lengths.longest)) for z in drawn]

    return draw


def best_split(plan: PlanInputs, work: RolloutWork, lengths: Lengths, world: int) -> PlanInputs | None:
    """Return the plan with the quickest split of `world` ranks one step ahead, of those that the layout
    allows (tp x pp x cp divides the trainers, engine_tp both sides) and that fit. From the best by the
    estimate of plan/times.py on, a batch is drawn for its neighbours, as long as they are quicker. None where
    there is no such split."""
    layout, found = plan.layout, []
    unit = layout.tp * layout.pp * layout.cp
    for trainers in range(unit, world, unit):
        ranks = world - trainers
        keys = {"parallel__dp": trainers // unit, "parallel__rollout_ranks": ranks, "schedule__ahead": 1}
        made = with_keys(plan, **keys)
        try:
            if trainers // layout.pp % layout.ep or find_problem(made):
                continue
            check_config(made.config, "plan")
            engine_ranks(made.config, trainers)
        except MegarlError:
            continue
        found.append((made, estimate(made, lengths)))
    if not found:
        return None

    @cache
    def seconds(place: int) -> float:
        made, times = found[place]
        engines = made.engines(made.config.parallel.rollout_ranks)
        drawn = simulate_rollout(work, costs_of(made, lengths), engines, random.Random(0))
        return max(times.training, drawn.seconds)

    place = min(range(len(found)), key=lambda i: found[i][1].total)
    while True:
        near = [i for i in (place - 1, place + 1) if 0 <= i < len(found)]
        quickest = min([place, *near], key=seconds)
        if quickest == place:
            return found[place][0]
        place = quickest


class Tried(NamedTuple):
    """A way to use the job's ranks, steps ahead, and what came of it."""

    plan: PlanInputs
    ahead: int
    course: Course

    @property
    def apart(self) -> int:
        """Return how many ranks have engines only; 0: the trainers have them."""
        return self.plan.config.parallel.rollout_ranks


def compare(plan: PlanInputs, work: RolloutWork, lengths: Lengths) -> list[Tried]:
    """Simulate the configuration, and beside it: all ranks in turn, and the best split with ahead 1 and 2."""
    unit, parallel = plan.layout.tp * plan.layout.pp * plan.layout.cp, plan.config.parallel
    world = plan.layout.world + parallel.rollout_ranks
    wanted = [(plan, plan.config.schedule.ahead)]
    if parallel.rollout_ranks and world % unit == 0 and world % plan.engine_tp == 0:
        wanted.append((with_keys(plan, parallel__dp=world // unit, parallel__rollout_ranks=0), 0))
    if best := best_split(plan, work, lengths, world):
        wanted += [(best, 1), (best, 2)]
    tried: list[Tried] = []
    for made, ahead in wanted:
        if any((one.plan.layout, one.ahead) == (made.layout, ahead) for one in tried):
            continue
        course = simulate(work, costs_of(made, lengths), Split.of(made, ahead))
        tried.append(Tried(made, ahead, course))
    return tried


def recorded(run_dir: Path, lengths: Lengths) -> tuple[Lengths, Draw, str]:
    """Return a run's lengths, what draws them, and where they are from: its recorded rollouts
    (checkpoint.rollouts), of which groups are drawn as they are; else the mean and the longest in
    metrics.jsonl, through which a log-normal is put. Raises DataError for a run without either."""
    steps = sorted(manifest.parent for manifest in (run_dir / "rollouts").glob("step-*/manifest.json"))
    files = [path for step in steps[-RECORDED:] for path in sorted(step.glob("*.safetensors"))]
    groups: dict[tuple[Path, int], list[int]] = {}
    prompts: list[int] = []
    for path in files:
        try:
            with safe_open(path, "np") as file:
                ends, mask = file.get_tensor("cu_seqlens"), file.get_tensor("response_mask")
                ids = file.get_tensor("column.group_ids")
                windows = "column.unfinished" in file.keys()  # noqa: SIM118 (not a mapping)
                goes_on = file.get_tensor("column.unfinished") if windows else ids < 0
        except (OSError, SafetensorError) as error:
            raise DataError(f"{path}: is damaged ({error})") from None
        for begin, end, group, unfinished in zip(ends[:-1], ends[1:], ids, goes_on, strict=True):
            if unfinished:
                continue
            own = mask[begin:end].nonzero()[0]  # what lies between is neither the prompt's nor drawn
            groups.setdefault((path.parent, int(group)), []).append(own.size)
            prompts.append(int(own[0] if own.size else end - begin))
    if groups:
        alone = [max(1, n) for group in groups.values() for n in group]
        logs = [math.log(n) for n in alone]
        known = fmean(alone), max(lengths.longest, *alone), fmean(prompts), max(1e-3, pstdev(logs))
        fitted = Lengths(*known, window=lengths.window)

        def draw(chance: random.Random, responses: int) -> list[float]:
            group = chance.choice(own_groups)
            return [float(n) for n in chance.choices(group, k=responses)]

        own_groups = list(groups.values())
        return fitted, draw, f"{len(alone):,} responses of the rollouts in {run_dir}"
    run = load_run(run_dir)
    of_training = [
        record for record in run.by_stage.get(TRAIN, {}).values() if "response/length_mean" in record
    ]
    records = of_training[-(-len(of_training) * 2 // 3) :] or of_training
    if not records:
        raise DataError(f"{run_dir}: no step of training with response lengths (choose another run)")
    mean = fmean(record["response/length_mean"] for record in records)
    longest = max(record["response/length_max"] for record in records)
    size = run.setting("rollout", "group_size", default=1) or 1
    responses = sum(record.get("rollout/prompts", 1) * size for record in records)
    # Of so many responses one is this long; where some were cut, their share is.
    share = max(1 / max(2, responses), fmean(record.get("reward/truncated") or 0.0 for record in records))
    # Where half and more were cut, what is left says nothing of their spread: they are taken as alike.
    share, low, high = min(share, 0.5), 1e-3, 3.0 if share < 0.5 else 1e-3
    for _ in range(40):
        middle = (low + high) / 2
        known = mean, max(lengths.longest, longest), lengths.prompt, middle
        fitted = Lengths(*known, window=lengths.window)
        beyond = fitted.median * math.exp(middle * NormalDist().inv_cdf(1 - share)) > longest
        low, high = (low, middle) if beyond else (middle, high)
    return fitted, log_normal(fitted), f"mean and longest of {len(records)} steps of {run_dir}"
