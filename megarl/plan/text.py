"""Format a plan for `megarl plan`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from string import ascii_lowercase
from typing import Any

from megarl.plan.disk import (
    checkpoint_bytes,
    count_checkpoints,
    count_stored_batches,
    disk_bytes,
    stored_batch_bytes,
)
from megarl.plan.engines import kv_cache_tokens, transferred_bytes
from megarl.plan.fit import largest_micro_batch
from megarl.plan.host import cpu_bytes, cpu_bytes_by_phase, node_bytes
from megarl.plan.inputs import PlanInputs
from megarl.plan.memory import gpu_needs
from megarl.plan.search import Candidate, describe_layout, drop_unproven, list_overrides, pick_best
from megarl.plan.simulate import RolloutWork
from megarl.plan.sizes import GIB
from megarl.plan.splits import Scale, SimulatedSplit
from megarl.plan.tensors import model_activations
from megarl.plan.times import Estimate, Lengths

MODELS = ("actor", "critic", "reference", "reward", "teacher")
COLUMNS = (
    ("weights", (*(f"{model}.weights" for model in MODELS), "copied weights")),
    ("FP8 copies", tuple(f"{model}.fp8_copies" for model in MODELS)),
    ("gradients", ("actor.gradients", "critic.gradients")),
    ("optimizer", ("actor.optimizer", "critic.optimizer")),
    ("engine", ("engine.weights",)),
    ("KV cache", ("engine.kv_cache",)),
    ("activations", ("activations",)),
    ("head", ("head",)),
    (
        "buckets",
        ("transfer buckets", "gathered bucket", "summed gradients", "joined weights", "Muon's matrices"),
    ),
    ("other", ("contexts",)),
)
# A configuration whose step takes at most this factor of the best one's time counts as equally good, because
# estimates have larger errors.
CLOSE = 1.02
BALANCE = {
    "equal": "requests stay with the engine that they were given to",
    "queue": "requests that have not started move to engines that have room",
    "longest": "the longest expected start first, where there is room",
}
SHOWN = 8


def lines(plan: PlanInputs, where: str, lengths: Lengths, made: Estimate) -> Iterator[str]:
    """Format a plan, without other layouts. where: source of the model's sizes."""
    layout, config, device = plan.layout, plan.config, plan.device
    size = f"{plan.actor.parameters / 1e9:.2f} B parameters, {plan.actor.dtype}"
    yield f"model    {where}: {size}, recompute {config.model.recompute}, {plan.layers} layers"
    rollout_ranks = config.parallel.rollout_ranks
    all_ranks = layout.world + rollout_ranks
    nodes = -(-all_ranks // config.cluster.gpus_per_node)
    gpus = f"{all_ranks} x {device.name} ({device.memory / GIB:.1f} GiB)"
    rollout_text = f", and {rollout_ranks} ranks that generate" if rollout_ranks else ""
    yield f"layout   {describe_layout(layout)}{rollout_text}: {gpus} on {nodes} nodes"
    if config.has_engine:
        ranks = rollout_ranks or layout.world
        engines = f"{plan.engines(ranks)} of tp {plan.engine_tp} ({config.rollout.engine})"
        cache = f"KV cache of each {kv_cache_tokens(plan):,.0f} tokens"
        if config.rollout.capabilities.remote:
            cache = "nothing of which is on these GPUs; how quick they are is a guess"
        yield f"engines  {engines}, {cache}"
    yield ""
    yield "GiB on a GPU, of the fullest stage"
    needs = list(gpu_needs(plan))
    used_columns = [
        (title, names) for title, names in COLUMNS if any(set(names) & need.parts.keys() for need in needs)
    ]
    yield (
        f"{'phase':20s}"
        + "".join(f"{title:>12s}" for title, _ in used_columns)
        + f"{'total':>9s}{'free':>9s}"
    )
    for need in needs:
        cells = [sum(need.parts.get(name, 0.0) for name in names) / GIB for _, names in used_columns]
        row = "".join(f"{cell:12.1f}" if cell else f"{'-':>12s}" for cell in cells)
        free = (device.memory - need.total) / GIB
        yield f"{need.phase:20s}{row}{need.total / GIB:9.1f}{free:9.1f}"
    yield ""
    budget = largest_micro_batch(plan)
    largest = f"none: the longest sequence has {plan.longest:,} tokens and does not fit"
    if budget:
        largest = f"{budget:,} tokens"
    yield f"largest update.tokens_per_micro_batch  {largest} (now {config.update.tokens_per_micro_batch:,})"
    activations = model_activations(plan, "actor")
    head = (activations.head * plan.pack + activations.head_fixed) / GIB
    yield f"log-prob head at work on a micro-batch  {head:.1f} GiB, at another time than the layers"
    if config.has_engine:
        mean_tokens = lengths.prompt + lengths.mean + lengths.all_observed
        full_count, mean_count = (
            min(kv_cache_tokens(plan) / n, config.rollout.max_batch) for n in (plan.longest, mean_tokens)
        )
        limit_text = f"{full_count:,.0f} of full length, {mean_count:,.0f} of mean length"
        yield f"responses decoded at once by an engine  {limit_text}"
        yield f"weights into a GPU at each transfer  {transferred_bytes(plan) / 1e9:.2f} GB"
    host_bytes, host_memory = node_bytes(plan), config.cluster.host_memory
    parts_text = ", ".join(f"{name} {size / GIB:.0f}" for name, size in host_bytes.items())
    yield f"memory of a node  {sum(host_bytes.values()) / GIB:.0f} of {host_memory:.0f} GiB: {parts_text}"
    batches, limit_text = count_stored_batches(plan), ""
    batch_bytes = batches * stored_batch_bytes(plan)
    run_bytes = disk_bytes(plan) - batch_bytes
    if run_bytes:
        limit_text = f", at most {sum(count_checkpoints(plan))} at once: {run_bytes / 1e9:,.0f} GB"
    yield f"a checkpoint on disk  {checkpoint_bytes(plan) / 1e9:,.1f} GB{limit_text}"
    if batches:
        yield f"batches on disk, from engines to trainers  {batch_bytes / 1e9:,.1f} GB, at most {batches}"
    yield ""
    yield (
        f"a step takes about {clock(made.total)}, estimated from data sheets, with responses of "
        f"{lengths.mean:,.0f} tokens on average (up to {lengths.longest:,}){describe_turns(lengths)}, "
        f"{made.tokens / 1e6:.1f} M tokens a step"
    )
    for name, seconds in made.parts.items():
        yield f"    {name:24s}{clock(seconds):>10s}  {seconds / made.total:4.0%}"
    if made.asynchronous:
        yield "    the rollout runs beside training: the longer of the two counts, and the transfer"
        if "prefill_again" in made.parts:
            yield "    weights change in flight: prefill_again, of running responses, counts with the rollout"


def describe_turns(lengths: Lengths) -> str:
    """Describe windows or turns, if any."""
    if lengths.window:
        return f", at most {lengths.window:,} of them in a step"
    if lengths.turns == 1:
        return ""
    turn_text = f"{lengths.observed:,.0f} tokens shown and {clock(lengths.idle)} of a tool between two"
    return f" in {lengths.turns} turns, {turn_text}"


def on_cpu(plan: PlanInputs, where: str, memory: float) -> Iterator[str]:
    """Format a run on this machine's CPU. memory: its bytes."""
    size = f"{plan.actor.parameters / 1e9:.3f} B parameters, {plan.actor.dtype}"
    yield f"model    {where}: {size}, recompute {plan.config.model.recompute}, portable layers"
    yield f"layout   {describe_layout(plan.layout)}: {plan.layout.world} ranks on this machine's CPU"
    yield ""
    yield "GiB of all ranks together, all the time"
    constant_parts, parts_by_phase = cpu_bytes(plan), cpu_bytes_by_phase(plan)
    for name, part_bytes in constant_parts.items():
        yield f"    {name:24s}{part_bytes / GIB:10.2f}"
    constant_bytes = sum(constant_parts.values())
    totals = {phase: constant_bytes + sum(parts.values()) for phase, parts in parts_by_phase.items()}
    yield "and by phase, with all of that"
    for phase, parts in parts_by_phase.items():
        parts_text = ", ".join(f"{part} {part_bytes / GIB:.2f}" for part, part_bytes in parts.items())
        yield f"    {phase:24s}{totals[phase] / GIB:10.2f}  {parts_text}"
    yield f"at most  {max(totals.values()) / GIB:.2f} of the {memory / GIB:.2f} that this machine has"


def layouts(found: Sequence[Candidate], current: Candidate, *, everything: bool = False) -> Iterator[str]:
    fitting_candidates = [
        (candidate, candidate.estimate) for candidate in found if candidate.estimate is not None
    ]
    limit = len(found) if everything else SHOWN
    unfit_count = len(found) - len(fitting_candidates)
    gpus = f"{current.plan.layout.world} GPUs"
    if current.plan.config.parallel.rollout_ranks:
        gpus += " that train"
    yield (
        f"layouts of {gpus}, each with its best engines, recomputation, budget and residency: "
        f"{len(fitting_candidates)} fit, {unfit_count} do not; best first"
    )
    listed_candidates = fitting_candidates[:limit]
    if current.estimate is not None:
        listed_candidates.append((current, current.estimate))
        listed_candidates.sort(key=lambda pair: pair[1].total)
    if listed_candidates:
        headings = f"{'layout':28s}{'engine tp':>11s}{'recompute':>16s}{'budget':>9s}{'a step':>10s}"
        yield f"  {headings}{'rollout':>9s}{'GiB free':>10s}  kept on the GPU"
    for candidate, estimate in listed_candidates:
        config = candidate.plan.config
        kept_groups = ", ".join(config.residency.keep) or "-"
        layers = config.model.recompute_layers
        recompute = config.model.recompute + (f", {layers} layers" if layers else "")
        if config.model.recompute == "selective":
            recompute = " and ".join(config.model.recompute_modules)
        yield (
            f"  {describe_layout(candidate.plan.layout):28s}{candidate.plan.engine_tp:11d}{recompute:>16s}"
            f"{config.update.tokens_per_micro_batch:9,d}{clock(estimate.total):>10s}"
            f"{clock(estimate.parts.get('rollout', 0.0)):>9s}{candidate.free / GIB:10.1f}  "
            + ("<- the configuration" if candidate is current else kept_groups)
        )
    if len(fitting_candidates) > limit:
        yield f"    and {len(fitting_candidates) - limit} more (--all)"
    unfit_candidates = [candidate for candidate in found if candidate.problem]
    for candidate in unfit_candidates[:limit]:
        yield f"    not {describe_layout(candidate.plan.layout)}: {candidate.problem}"
    if len(unfit_candidates) > limit:
        yield f"    and {len(unfit_candidates) - limit} more that do not (--all)"


def best(tried: list[Candidate], current: Candidate, path: Path) -> Iterator[str]:
    """Format the best layout's overrides, as command and YAML. Raises ConfigError if none fits."""
    quickest, current_estimate = pick_best(tried), current.estimate
    proven_candidates = drop_unproven(tried, current.plan.config.parallel)
    is_any_proven = any(candidate.estimate for candidate in proven_candidates)
    choice = pick_best(proven_candidates) if is_any_proven else quickest
    estimate = choice.estimate
    assert estimate is not None and quickest.estimate is not None
    overrides = list_overrides(choice.plan, current.plan)
    comparison = "; as it is it does not fit"
    if current_estimate:
        comparison = f"; the configuration as it is: {clock(current_estimate.total)}"
        comparison += ", and as good" if current_estimate.total <= CLOSE * estimate.total else ""
    yield f"# {describe_layout(choice.plan.layout)}: a step takes about {clock(estimate.total)}{comparison}"
    yield f"# {choice.free / GIB:.1f} GiB of each {choice.plan.device.name} stay free"
    if quickest is not choice:
        name, gain = describe_layout(quickest.plan.layout), 1 - quickest.estimate.total / estimate.total
        gain_text = f"{100 * gain:.0f} % quicker, if what has not run on a GPU yet keeps its promise"
        yield f"# {gain_text}: {name} (--all)"
    arguments = " ".join(f"{key}={_value(value)}" for key, value in overrides.items())
    yield f"megarl train {path} {arguments}"
    yield ""
    sections: dict[str, dict[str, Any]] = {}
    for dotted, value in overrides.items():
        section, _, key = dotted.partition(".")
        sections.setdefault(section, {})[key] = value
    for section, values in sections.items():
        yield f"{section}:"
        yield from (f"  {key}: {_value(value)}" for key, value in values.items())


def simulated(
    tried: Sequence[SimulatedSplit], work: RolloutWork, lengths: Lengths, where: str
) -> Iterator[str]:
    """Format simulated splits, and timelines of the configured and the quickest."""
    yield from _describe_work(work, lengths, where)
    headings = f"{'a step':>9s}{'tokens/s':>10s}{'a GPU':>7s}{'idle':>6s}{'trainers':>10s}{'engines':>9s}"
    width = 2 + max(30, *(len(split.name) for split in tried))
    yield f"{'':{width}s}{headings}"
    quickest = min(tried, key=lambda split: split.order)
    for split in tried:
        timeline, world = split.timeline, split.plan.layout.world + split.rollout_ranks
        engines = [sum(timeline.wait_shares(name).values()) for name in timeline.rows if name != "trainers"]
        idle = f"{sum(timeline.wait_shares('trainers').values()):.0%}" if split.rollout_ranks else "-"
        mark = "  <- the quickest" if split is quickest else ""
        if split is tried[0]:
            mark = "  <- the configuration"
        yield (
            f"{split.name:{width}s}{clock(timeline.step):>9s}{timeline.tokens_per_second:10,.0f}"
            f"{timeline.tokens_per_second / world:7,.0f}{timeline.idle:6.0%}"
            f"{idle:>10s}{fmean(engines):9.0%}{mark}"
        )
    in_flight = next((split.timeline for split in reversed(tried) if split.timeline.staleness), None)
    if in_flight:
        age = f"versions behind: {in_flight.mean_staleness:.1f} on average, {in_flight.max_staleness} at most"
        yield f"in flight  {age}; groups dropped as too old: {in_flight.dropped:.1%}"
    for split in (tried[0], quickest) if quickest is not tried[0] else (quickest,):
        yield ""
        yield from _bars(split)
    if quickest.rollout_ranks and quickest is not tried[0]:
        saved_share = 1 - quickest.timeline.step / tried[0].timeline.step
        yield ""
        yield f"quickest: {quickest.keys}, {saved_share:.0%} less time a step"


def scaled(scales: Iterable[Scale], work: RolloutWork, lengths: Lengths, where: str) -> Iterator[str]:
    """Format the best splits by number of GPUs. The gain is over alternating ranks."""
    yield from _describe_work(work, lengths, where)
    columns = f"{'in turn':>10s}{'ahead 1':>10s}{'in flight':>11s}{'gain':>6s}{'dropped':>9s}"
    yield f"{'GPUs':>6s}{columns}  best split"
    for scale in scales:
        times = [clock(split.timeline.step) if split else "-" for split in scale[1:]]
        best, gain, dropped = scale.in_flight, "-", "-"
        if best:
            dropped = f"{best.timeline.dropped:.1%}"
        if best and scale.in_turn:
            gain = f"{1 - best.timeline.step / scale.in_turn.timeline.step:.0%}"
        found = [split for split in scale[1:] if split]
        name = min(found, key=lambda split: split.order).name if found else "does not fit"
        columns = f"{times[0]:>10s}{times[1]:>10s}{times[2]:>11s}{gain:>6s}{dropped:>9s}"
        yield f"{scale.gpus:6,d}{columns}  {name}"


def _describe_work(work: RolloutWork, lengths: Lengths, where: str) -> Iterator[str]:
    limit_text = f"up to {lengths.longest:,}"
    mean_text = f"mean {lengths.mean:,.0f} tokens, median {lengths.median:,.0f}"
    yield f"lengths  {where}: {mean_text}, {limit_text}{describe_turns(lengths)}"
    kept_text = f", of which dynamic sampling keeps {work.kept_share:.0%}" if work.kept_share < 1 else ""
    yield f"a step   {work.prompts} groups of {work.group_size} responses{kept_text}; {BALANCE[work.balance]}"
    yield ""


def _bars(tried: SimulatedSplit) -> Iterator[str]:
    """Format the last step as bars: trainers, and the least, median and most waiting engine."""
    timeline, width = tried.timeline, 72
    begin, end = timeline.ends[-2:]
    engines = sorted(
        (name for name in timeline.rows if name != "trainers"),
        key=lambda name: sum(timeline.wait_shares(name).values()),
    )
    chosen_engines = dict.fromkeys((engines[0], engines[len(engines) // 2], engines[-1]))
    names = [*(name for name in timeline.rows if name == "trainers"), *chosen_engines]
    phases = dict.fromkeys(span.phase for name in names for span in timeline.rows[name])
    letters: dict[str, str] = {}
    for phase in (phase for phase in phases if not phase.startswith("wait")):
        free_letters = [c for c in (*phase, *ascii_lowercase) if c.isalpha() and c not in letters.values()]
        letters[phase] = free_letters[0]
    yield f"a step of {clock(end - begin)}; a letter is {clock((end - begin) / width)}, a dot waits"
    seconds: dict[str, float] = {}
    for name in names:
        spans = [span for span in timeline.rows[name] if span.end > begin and span.begin < end]
        bar = ""
        for i in range(width):
            time = begin + (i + 0.5) * (end - begin) / width
            phase = next((span.phase for span in spans if span.begin <= time < span.end), "wait")
            bar += letters.get(phase, ".")
        yield f"    {name:12s}{bar}"
        for span in spans if name in ("trainers", engines[-1]) else ():
            duration = min(span.end, end) - max(span.begin, begin)
            key = span.phase if span.phase in letters else f"{name}: {span.phase}"
            seconds[key] = seconds.get(key, 0.0) + duration
    legend = (f"{letters.get(key, '.')} {key} {clock(s)}" for key, s in seconds.items() if s > 0.001)
    yield from textwrap.wrap(", ".join(legend), 100, initial_indent="    ", subsequent_indent="    ")


def _value(value: Any) -> str:
    if isinstance(value, list):
        return f"[{','.join(value)}]"
    return "null" if value is None else str(value)


def clock(seconds: float) -> str:
    """Format a duration, such as 0.4 s, 1:15 or 1:06:40."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, secs = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{secs:02}" if minutes >= 60 else f"{minutes}:{secs:02}"
