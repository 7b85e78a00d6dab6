"""Simulate which ranks wait in training steps, and how long."""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import NormalDist, fmean, pstdev
from typing import Literal, NamedTuple

from safetensors import SafetensorError, safe_open

from megarl.config.errors import DataError
from megarl.config.schema import TRAIN, Config
from megarl.observe.runs import load_run
from megarl.plan.inputs import PlanInputs
from megarl.plan.times import (
    ENGINE_PARTS,
    KEPT_GROUPS,
    Lengths,
    decode_batch_size,
    estimate,
    make_decode_cost,
    split_into_windows,
)

GROUP_CORRELATION = 0.5  # our estimate, of log lengths in a group
BATCHES, WARM_UP = 6, 3  # simulated steps, and how many are not measured
RECORDED_STEPS = 20  # last steps whose rollouts are read
ACTOR_UPDATE = "actor_update"

Balance = Literal["equal", "queue", "longest"]
SampleLengths = Callable[[random.Random, int], Sequence[float]]


@dataclass(frozen=True)
class Costs:
    """Seconds of each operation, estimated or measured (benchmarks/simulate.py).

    decode         a step, given running responses and cached tokens
    prefill        of a response's prompt
    at_once        most responses decoded at once (no seconds)
    train          tokens of a batch -> phase -> seconds, in phase order
    prefill_token  to compute one cached token again under new weights"""

    decode: Callable[[float, float], float]
    prefill: float
    at_once: int
    train: Callable[[float], Mapping[str, float]]
    transfer: float
    prefill_token: float = 0.0


@dataclass(frozen=True)
class RolloutWork:
    """What engines generate in a step.

    prompts         trained groups
    kept_share      of groups, by dynamic sampling
    streams         continuous batching: submits missing groups at any time
    oversample      groups of the first submission / groups needed
    balance         `equal`: each engine keeps an equal part of the requests.
                    `queue`: an engine with room takes another one's waiting requests.
                    `longest`: as `queue`, and the longest expected requests start first.
    window          most tokens of a response in a step; 0: all"""

    prompts: int
    group_size: int
    prompt_tokens: float
    sample_lengths: SampleLengths
    kept_share: float = 1.0
    streams: bool = True
    oversample: float = 1.0
    balance: Balance = "queue"
    window: int = 0
    max_windows: int = 1


@dataclass
class SimulatedGroup:
    """Responses to one prompt, or one window of a response.

    lengths        new tokens of each response
    prefix_tokens  of earlier steps"""

    lengths: Sequence[float]
    kept: bool
    running: int
    prefix_tokens: float = 0.0


@dataclass(frozen=True)
class SimulatedRollout:
    """A generated batch.

    seconds    until the last needed group is complete
    busy       (begin, end) of decoding, by engine
    tokens     trained ones, with prompts
    fresh      the same, without prefixes
    generated  tokens, also discarded ones"""

    seconds: float
    busy: list[list[tuple[float, float]]]
    tokens: float
    fresh: float
    generated: float


class Engine:
    def __init__(self, costs: Costs, prompt_tokens: float) -> None:
        self.costs, self.prompt_tokens = costs, prompt_tokens
        self.now, self.step, self.step_seconds, self.cached_tokens = 0.0, 0.0, 0.0, 0.0
        self.running: list[tuple[float, int, float, SimulatedGroup]] = []  # heap by last step
        self.waiting: deque[tuple[float, SimulatedGroup]] = deque()
        self.busy: list[tuple[float, float]] = []
        self.version = self.started = 0
        self.generated = 0.0

    def advance(self, now: float) -> None:
        if self.running:
            begin, end = self.busy.pop()
            steps = max(0.0, now - self.now) / self.step_seconds
            self.step += steps
            self.cached_tokens += steps * len(self.running)
            self.busy.append((begin, max(end, now)))
        self.now = max(self.now, now)

    def pop_finished(self) -> Iterator[tuple[float, SimulatedGroup]]:
        """Yield new tokens and group of each finished response."""
        while self.running and self.running[0][0] <= self.step + 1e-9:
            _, _, length, group = heapq.heappop(self.running)
            self.cached_tokens -= self.prompt_tokens + group.prefix_tokens + length
            self.generated += length
            yield length, group

    def start_waiting(self) -> None:
        while self.waiting and len(self.running) < self.costs.at_once:
            length, group = self.waiting.popleft()
            if not self.running:
                self.busy.append((self.now, self.now))
            self.started += 1
            heapq.heappush(self.running, (self.step + length, self.started, length, group))
            self.cached_tokens += self.prompt_tokens + group.prefix_tokens
            self.now += self.costs.prefill * (1 + group.prefix_tokens / max(self.prompt_tokens, 1.0))

    def next_finish(self) -> float:
        """Estimate the next response's end from the middle step's time."""
        self.version += 1
        steps, count = self.running[0][0] - self.step, len(self.running)
        self.step_seconds = self.costs.decode(count, self.cached_tokens + count * steps / 2)
        return self.now + steps * self.step_seconds


class _RolloutSimulation:
    def __init__(self, work: RolloutWork, costs: Costs, engines: int, rng: random.Random) -> None:
        self.work, self.costs, self.rng, self.now = work, costs, rng, 0.0
        self.engines = [Engine(costs, work.prompt_tokens) for _ in range(engines)]
        self.events: list[tuple[float, int, int]] = []  # seconds, engine, version
        self.submitted: list[SimulatedGroup] = []
        self.complete = self.kept = 0  # finished groups; kept ones
        self.read = self.accepted = 0  # the same, up to the first unfinished group
        # Windows are trained on alone, not as groups.
        self.needed = work.prompts * (work.group_size if work.window else 1)

    def run(self) -> SimulatedRollout:
        while self.accepted < self.needed:
            if not self.events:
                self._submit(self._count_missing())
            self.now, number, version = heapq.heappop(self.events)
            if version == self.engines[number].version:
                self._finish_responses(number)
        for engine in self.engines:  # abort unfinished responses
            engine.advance(self.now)
            unfinished = engine.running
            engine.generated += sum(length - (end - engine.step) for end, _, length, _ in unfinished)
        trained_groups = [group for group in self.submitted[: self.read] if group.kept][: self.needed]
        prompt_tokens = self.work.prompt_tokens
        responses = [(length, group.prefix_tokens) for group in trained_groups for length in group.lengths]
        tokens = sum(length + prompt_tokens + prefix_tokens for length, prefix_tokens in responses)
        fresh = sum(length + prompt_tokens * (not prefix_tokens) for length, prefix_tokens in responses)
        generated = sum(engine.generated for engine in self.engines)
        return SimulatedRollout(self.now, [engine.busy for engine in self.engines], tokens, fresh, generated)

    def _sample_group(self) -> SimulatedGroup:
        if self.work.window:
            return sample_window(self.work, self.rng)
        lengths = self.work.sample_lengths(self.rng, self.work.group_size)
        return SimulatedGroup(lengths, self.rng.random() < self.work.kept_share, len(lengths))

    def _submit(self, prompts: int) -> None:
        groups = [self._sample_group() for _ in range(prompts)]
        self.submitted += groups
        rows = [(length, group) for group in groups for length in group.lengths]
        longest_first, count = self.work.balance == "longest", len(self.engines)
        if longest_first:  # as known from earlier epochs
            rows.sort(key=lambda row: -fmean(row[1].lengths))
        for number, engine in enumerate(self.engines):
            part = slice(number * len(rows) // count, (number + 1) * len(rows) // count)
            engine.waiting += rows[number::count] if longest_first else rows[part]
            engine.advance(self.now)
            engine.start_waiting()
        for number in range(count):
            self._continue(number)

    def _continue(self, number: int) -> None:
        """Fill the engine, with its own requests first."""
        engine, balance = self.engines[number], self.work.balance
        engine.start_waiting()
        while balance != "equal" and len(engine.running) < self.costs.at_once:
            busiest_engine = max(self.engines, key=lambda candidate: len(candidate.waiting))
            if not busiest_engine.waiting:
                break
            waiting = busiest_engine.waiting
            engine.waiting.append(waiting.popleft() if balance == "longest" else waiting.pop())
            engine.start_waiting()
        if engine.running:
            heapq.heappush(self.events, (engine.next_finish(), number, engine.version))

    def _finish_responses(self, number: int) -> None:
        engine, previous_complete = self.engines[number], self.complete
        engine.advance(self.now)
        for _, group in engine.pop_finished():
            group.running -= 1
            self.complete += not group.running
            self.kept += group.kept and not group.running
        self._continue(number)
        if self.complete == previous_complete:
            return
        while self.read < len(self.submitted) and self.accepted < self.needed:
            group = self.submitted[self.read]
            if group.running:
                break
            self.accepted += group.kept
            self.read += 1
        if self.work.streams and self.work.kept_share < 1 and (missing_groups := self._count_missing()):
            self._submit(missing_groups)

    def _count_missing(self) -> int:
        """Count the groups to submit now, like rollout/collector.py."""
        work, missing = self.work, self.needed - self.accepted
        if not self.submitted:
            return math.ceil(missing * work.oversample) if work.kept_share < 1 else missing
        if work.streams:  # finished groups behind unfinished ones count too
            missing = self.needed - self.kept
        if missing <= 0:
            return 0
        estimated_groups = math.ceil(missing * (self.complete + 2) / (self.kept + 1))
        if not work.streams:
            return min(self.needed, max(missing, estimated_groups))
        return max(0, min(estimated_groups, self.needed) - (len(self.submitted) - self.complete))


def simulate_rollout(work: RolloutWork, costs: Costs, engines: int, rng: random.Random) -> SimulatedRollout:
    return _RolloutSimulation(work, costs, engines, rng).run()


def sample_window(work: RolloutWork, rng: random.Random) -> SimulatedGroup:
    """Sample a window of a long run's step.

    A response with n windows is in n steps, so it is sampled n times as often."""
    while True:
        [length] = work.sample_lengths(rng, 1)
        windows = split_into_windows(length, work.window)
        if rng.randrange(work.max_windows) < len(windows):
            window = rng.choice(windows)
            return SimulatedGroup([window.new_tokens], True, 1, window.prefix_tokens)


class Span(NamedTuple):
    """A phase of a step, in seconds. Phases "wait ..." are idle time."""

    step: int
    phase: str
    begin: float
    end: float


@dataclass
class Timeline:
    """Simulated steps.

    rows       "trainers" or engine -> spans
    ends       seconds at the end of each step's updates
    tokens     of each batch, without prefixes
    generated  tokens of each rollout
    warm_up    first steps, which are not measured
    staleness  mean and most versions of each batch's tokens behind its update (weights in flight)
    dropped    too old groups / trained groups (weights in flight)"""

    rows: dict[str, list[Span]] = field(default_factory=dict)
    ranks: dict[str, int] = field(default_factory=dict)
    ends: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    generated: list[float] = field(default_factory=list)
    warm_up: int = WARM_UP
    staleness: list[tuple[float, int]] = field(default_factory=list)
    dropped: float = 0.0

    @property
    def step(self) -> float:
        return (self.ends[-1] - self.ends[self.warm_up - 1]) / (len(self.ends) - self.warm_up)

    @property
    def tokens_per_second(self) -> float:
        return fmean(self.tokens[self.warm_up :]) / self.step

    @property
    def mean_staleness(self) -> float:
        return fmean(mean for mean, _ in self.staleness[self.warm_up :])

    @property
    def max_staleness(self) -> int:
        return max(most for _, most in self.staleness)

    def add(self, name: str, step: int, phase: str, begin: float, end: float) -> None:
        if end > begin:
            self.rows.setdefault(name, []).append(Span(step, phase, begin, end))

    def wait_shares(self, name: str) -> dict[str, float]:
        """Return a row's waits as shares of the time after the warm-up."""
        begin, end = self.ends[self.warm_up - 1], self.ends[-1]
        shares: dict[str, float] = {}
        for span in self.rows[name]:
            overlap = min(span.end, end) - max(span.begin, begin)
            if span.phase.startswith("wait") and overlap > 0:
                shares[span.phase] = shares.get(span.phase, 0.0) + overlap / (end - begin)
        return shares

    @property
    def idle(self) -> float:
        idle_ranks = sum(self.ranks[name] * sum(self.wait_shares(name).values()) for name in self.rows)
        return idle_ranks / sum(self.ranks.values())


class Split(NamedTuple):
    """How a job divides its ranks.

    trainers       ranks without engines; 0: engines' ranks train
    max_staleness  bound with weights in flight; 0: weights change between rollouts
    keeps_cache    the KV cache outlives a weight change"""

    engines: int
    trainers: int = 0
    ahead: int = 0
    engine_tp: int = 1
    max_staleness: int = 0
    keeps_cache: bool = False

    @staticmethod
    def from_plan(plan: PlanInputs, ahead: int) -> Split:
        trainers, rollout_ranks = plan.layout.world, plan.config.parallel.rollout_ranks
        engines, schedule = plan.engines(rollout_ranks or trainers), plan.config.schedule
        bound = schedule.max_staleness if plan.in_flight else 0
        keeps_cache = schedule.in_flight == "keep"
        return Split(engines, trainers if rollout_ranks else 0, ahead, plan.engine_tp, bound, keeps_cache)

    def make_timeline(self) -> Timeline:
        timeline, names = Timeline(), self.engine_names
        if self.trainers:
            timeline.ranks["trainers"] = self.trainers
            timeline.rows["trainers"] = []
        timeline.ranks |= dict.fromkeys(names, self.engine_tp)
        return timeline

    @property
    def engine_names(self) -> list[str]:
        return [f"engine {number}" for number in range(self.engines)]


class _StepSimulation:
    def __init__(self, work: RolloutWork, costs: Costs, split: Split, seed: int) -> None:
        self.work, self.costs, self.split, self.seed = work, costs, split, seed
        self.engine_names, self.timeline = split.engine_names, split.make_timeline()
        self.rollouts: list[SimulatedRollout] = []
        self.rollout_ends: list[float] = []
        self.trainer_now = self.engine_now = 0.0

    def run(self) -> Timeline:
        disaggregated = self.split.trainers > 0
        for _ in range(1 + self.split.ahead if disaggregated else 0):
            self._generate()
        postponed_version = 0  # of weights to transfer later; 0: none
        for step in range(1, BATCHES + 1):
            if disaggregated:
                begin = max(self.trainer_now, self.rollout_ends[step - 1])
                self.timeline.add("trainers", step, "wait for batch", self.trainer_now, begin)
                self.trainer_now = begin
            else:
                self._generate()
                self.trainer_now = self.engine_now
            batch = self.rollouts[step - 1]
            for phase, seconds in self.costs.train(batch.tokens).items():
                if postponed_version and (phase == ACTOR_UPDATE or self.engine_now <= self.trainer_now):
                    self._transfer(postponed_version)
                    postponed_version = 0
                for name in ("trainers",) if disaggregated else self.engine_names:
                    self.timeline.add(name, step, phase, self.trainer_now, self.trainer_now + seconds)
                self.trainer_now += seconds
            self.timeline.ends.append(self.trainer_now)
            self.timeline.tokens.append(batch.fresh)
            self.timeline.generated.append(batch.generated)
            if not disaggregated:
                self.engine_now = self.trainer_now + self.costs.transfer
                for name in self.engine_names:
                    self.timeline.add(name, step, "weight_transfer", self.trainer_now, self.engine_now)
            elif self.split.ahead == 2 and self.engine_now > self.trainer_now:
                postponed_version = step
            else:
                self._transfer(step)
        return self.timeline

    def _generate(self) -> None:
        """Generate a batch. Untrained ones beyond BATCHES repeat earlier ones."""
        batch_index = len(self.rollout_ends)
        if batch_index < BATCHES:
            rng = random.Random(f"{self.seed} {batch_index}")
            self.rollouts.append(simulate_rollout(self.work, self.costs, self.split.engines, rng))
        batch, step, start = self.rollouts[batch_index % BATCHES], batch_index + 1, self.engine_now
        for name, busy in zip(self.engine_names, batch.busy, strict=True):
            previous_end = start
            for begin, end in busy:
                self.timeline.add(name, step, "wait for other engines", previous_end, start + begin)
                self.timeline.add(name, step, "rollout", start + begin, start + end)
                previous_end = start + end
            self.timeline.add(name, step, "wait for other engines", previous_end, start + batch.seconds)
        self.engine_now += batch.seconds
        self.rollout_ends.append(self.engine_now)

    def _transfer(self, version: int) -> None:
        begin = max(self.trainer_now, self.engine_now)
        self.timeline.add("trainers", version, "wait for engines", self.trainer_now, begin)
        for name in self.engine_names:
            self.timeline.add(
                name, version + self.split.ahead + 1, "wait for weights", self.engine_now, begin
            )
        for name in ("trainers", *self.engine_names):
            self.timeline.add(name, version, "weight_transfer", begin, begin + self.costs.transfer)
        self.trainer_now = self.engine_now = begin + self.costs.transfer
        self._generate()


def simulate(work: RolloutWork, costs: Costs, split: Split, seed: int = 0) -> Timeline:
    """Simulate BATCHES steps of a job.

    With ahead = a, the weights after step k - 1 - a generate step k's batch. Version v is transferred when
    engines have finished batch v + a. With a = 2 trainers poll before each phase, and wait only before the
    next actor update."""
    return _StepSimulation(work, costs, split, seed).run()


def make_costs(plan: PlanInputs, lengths: Lengths) -> Costs:
    step = estimate(plan, lengths)
    train = {name: s for name, s in step.parts.items() if name not in ENGINE_PARTS}
    cost = make_decode_cost(plan)
    prefilled = lengths.count_prefilled(cached=plan.config.rollout.capabilities.continuous_batching)
    return Costs(
        decode=cost.step,
        prefill=prefilled * cost.prefill,
        at_once=decode_batch_size(plan, lengths),
        train=lambda tokens: {name: s * tokens / step.tokens for name, s in train.items()},
        transfer=step.parts["weight_transfer"],
        prefill_token=cost.prefill,
    )


def make_rollout_work(
    config: Config,
    lengths: Lengths,
    balance: Balance,
    kept_share: float | None = None,
    sample_lengths: SampleLengths | None = None,
) -> RolloutWork:
    """Tools' observations count as prompt; tools take no time."""
    rollout = config.rollout
    return RolloutWork(
        prompts=rollout.prompts,
        group_size=rollout.group_size,
        prompt_tokens=lengths.prompt + lengths.all_observed,
        sample_lengths=sample_lengths or make_log_normal(lengths),
        kept_share=(kept_share or KEPT_GROUPS) if rollout.dynamic_sampling.enabled else 1.0,
        streams=rollout.capabilities.continuous_batching,
        oversample=rollout.dynamic_sampling.oversample,
        balance=balance,
        window=rollout.window or 0,
        max_windows=max(1, math.ceil(lengths.longest / (rollout.window or lengths.longest))),
    )


def make_log_normal(lengths: Lengths) -> SampleLengths:
    """Make a log-normal sampler, cut at the limit, correlated within a group."""
    log_median = math.log(lengths.median)
    group_weight, response_weight = GROUP_CORRELATION**0.5, (1 - GROUP_CORRELATION) ** 0.5

    def sample(rng: random.Random, responses: int) -> list[float]:
        group_deviation = group_weight * rng.gauss(0, 1)
        normals = (group_deviation + response_weight * rng.gauss(0, 1) for _ in range(responses))
        return [max(1.0, min(math.exp(log_median + lengths.spread * z), lengths.longest)) for z in normals]

    return sample


def recorded(run_dir: Path, lengths: Lengths) -> tuple[Lengths, SampleLengths, str]:
    """Return a run's lengths, their sampler, and their source.

    Samples recorded rollouts (checkpoint.rollouts) by group, else fits a log-normal to metrics.jsonl. Raises
    DataError without either. lengths: limit, window and missing prompts"""
    groups, prompts = _read_rollouts(run_dir)
    if not groups:
        return _fit_to_metrics(run_dir, lengths)
    responses = [max(1, n) for group in groups for n in group]
    spread = max(1e-3, pstdev([math.log(n) for n in responses]))
    longest = max(lengths.longest, *responses)
    fitted = Lengths(fmean(responses), longest, fmean(prompts), spread, window=lengths.window)

    def sample(rng: random.Random, count: int) -> list[float]:
        group = rng.choice(groups)
        return [float(n) for n in rng.choices(group, k=count)]

    return fitted, sample, f"{len(responses):,} responses of the rollouts in {run_dir}"


def _read_rollouts(run_dir: Path) -> tuple[list[list[int]], list[int]]:
    """Read lengths of finished responses by group, and of prompts."""
    steps = sorted(manifest.parent for manifest in (run_dir / "rollouts").glob("step-*/manifest.json"))
    files = [path for step in steps[-RECORDED_STEPS:] for path in sorted(step.glob("*.safetensors"))]
    groups: dict[tuple[Path, int], list[int]] = {}
    prompts: list[int] = []
    for path in files:
        try:
            with safe_open(path, "np") as file:
                ends, mask = file.get_tensor("cu_seqlens"), file.get_tensor("response_mask")
                group_ids = file.get_tensor("column.group_ids")
                has_windows = "column.unfinished" in file.keys()  # noqa: SIM118 (not a mapping)
                partial_mask = file.get_tensor("column.unfinished") if has_windows else group_ids < 0
        except (OSError, SafetensorError) as error:
            raise DataError(f"{path}: is damaged ({error})") from None
        for begin, end, group_id, is_partial in zip(
            ends[:-1], ends[1:], group_ids, partial_mask, strict=True
        ):
            if is_partial:
                continue
            sampled_indices = mask[begin:end].nonzero()[0]  # not the prompt's or a tool's
            groups.setdefault((path.parent, int(group_id)), []).append(sampled_indices.size)
            prompts.append(int(sampled_indices[0] if sampled_indices.size else end - begin))
    return list(groups.values()), prompts


def _fit_to_metrics(run_dir: Path, lengths: Lengths) -> tuple[Lengths, SampleLengths, str]:
    run = load_run(run_dir)
    records = [r for r in run.by_stage.get(TRAIN, {}).values() if "response/length_mean" in r]
    records = records[-(-len(records) * 2 // 3) :] or records
    if not records:
        raise DataError(f"{run_dir}: no step of training with response lengths (choose another run)")
    mean = fmean(record["response/length_mean"] for record in records)
    longest = max(record["response/length_max"] for record in records)
    group_size = run.setting("rollout", "group_size", default=1) or 1
    responses = sum(record.get("rollout/prompts", 1) * group_size for record in records)
    # The longest is the quantile 1 - 1 / responses; if some were cut, 1 - their share.
    cut_share = fmean(record.get("reward/truncated") or 0.0 for record in records)
    tail_share = max(1 / max(2, responses), cut_share)
    limit = max(lengths.longest, longest)
    fit = partial(Lengths, mean, limit, lengths.prompt, window=lengths.window)
    # If at least half were cut, assume equal lengths.
    tail_share, low, high = min(tail_share, 0.5), 1e-3, 3.0 if tail_share < 0.5 else 1e-3
    for _ in range(40):
        spread = (low + high) / 2
        fitted = fit(spread=spread)
        is_too_wide = fitted.median * math.exp(spread * NormalDist().inv_cdf(1 - tail_share)) > longest
        low, high = (low, spread) if is_too_wide else (spread, high)
    return fitted, make_log_normal(fitted), f"mean and longest of {len(records)} steps of {run_dir}"
