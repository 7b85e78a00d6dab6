"""A plan in sentences and tables, as `megarl plan` prints them and docs/planning.md shows them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megarl.plan.memory import Plan
from megarl.plan.sizes import GIB
from megarl.plan.times import Estimate, Found, Lengths

COLUMNS = (
    ("weights", ("actor.weights", "critic.weights", "reference.weights", "reward.weights")),
    ("gradients", ("actor.gradients", "critic.gradients")),
    ("optimizer", ("actor.optimizer", "critic.optimizer")),
    ("engine", ("engine.weights",)),
    ("KV cache", ("engine.kv_cache",)),
    ("activations", ("activations",)),
    ("head", ("head",)),
    ("buckets", ("transfer buckets",)),
    ("other", ("contexts",)),
)
SHOWN = 8  # layouts that fit, and others, in the list


def lines(plan: Plan, where: str, lengths: Lengths, made: Estimate) -> Iterator[str]:
    """Yield the lines of the whole plan but its alternatives. where: the source of the model's sizes."""
    layout, config, device = plan.layout, plan.config, plan.device
    size = f"{plan.actor.parameters / 1e9:.2f} B parameters, {plan.actor.dtype}"
    yield f"model    {where}: {size}, recompute {config.model.recompute}, {plan.layers} layers"
    gpus = f"{layout.world} x {device.name} ({device.memory / GIB:.1f} GiB)"
    virtual = f" (vpp {layout.vpp})" if layout.vpp > 1 else ""
    context = f", cp {layout.cp}" if layout.cp > 1 else ""
    sizes = f"tp {layout.tp}, pp {layout.pp}{virtual}, dp {layout.dp}{context}"
    yield f"layout   {sizes}: {gpus} on {plan.nodes} nodes"
    if config.recipe != "sft":
        engines = f"{layout.world // plan.engine_tp} of tp {plan.engine_tp} ({config.rollout.engine})"
        yield f"engines  {engines}, KV cache of each {plan.cache_tokens:,.0f} tokens"
    yield ""
    yield "GiB on a GPU, of the fullest stage"
    needs = list(plan.needs())
    used = [
        (title, names) for title, names in COLUMNS if any(set(names) & need.parts.keys() for need in needs)
    ]
    yield f"{'phase':20s}" + "".join(f"{title:>12s}" for title, _ in used) + f"{'total':>9s}{'free':>9s}"
    for need in needs:
        cells = [sum(need.parts.get(name, 0.0) for name in names) / GIB for _, names in used]
        row = "".join(f"{cell:12.1f}" if cell else f"{'-':>12s}" for cell in cells)
        free = (device.memory - need.total) / GIB
        yield f"{need.phase:20s}{row}{need.total / GIB:9.1f}{free:9.1f}"
    yield ""
    budget = plan.budget()
    largest = f"none: the longest sequence has {plan.longest:,} tokens and does not fit"
    if budget:
        largest = f"{budget:,} tokens"
    yield f"largest update.tokens_per_micro_batch  {largest} (now {config.update.tokens_per_micro_batch:,})"
    found = plan.activations("actor")
    head = (found.head * plan.pack + found.head_fixed) / GIB
    yield f"log-prob head at work on a micro-batch  {head:.1f} GiB, at another time than the layers"
    if config.recipe != "sft":
        full = f"{plan.cache_tokens / plan.longest:,.0f} of full length"
        mean = f"{plan.cache_tokens / (config.data.max_prompt_tokens + lengths.mean):,.0f} of mean length"
        yield f"responses decoded at once by an engine  {full}, {mean}"
        yield f"weights into a GPU at each transfer  {plan.transferred / 1e9:.2f} GB"
    host, there = plan.host(), config.cluster.host_memory
    listed = ", ".join(f"{name} {size / GIB:.0f}" for name, size in host.items())
    yield f"memory of a node  {sum(host.values()) / GIB:.0f} of {there:.0f} GiB: {listed}"
    checkpoint, keep = plan.checkpoint() / 1e9, config.checkpoint.keep
    yield f"a checkpoint on disk  {checkpoint:,.1f} GB" + (
        f", {keep} kept: {checkpoint * keep:,.0f} GB" if keep else ""
    )
    yield ""
    yield (
        f"a step takes about {clock(made.total)}, estimated from data sheets, with responses of "
        f"{lengths.mean:,.0f} tokens on average (up to {lengths.longest:,}), "
        f"{made.tokens / 1e6:.1f} M tokens a step"
    )
    for name, seconds in made.parts.items():
        yield f"    {name:24s}{clock(seconds):>10s}  {seconds / made.total:4.0%}"


def layouts(found: Sequence[Found], current: Plan, *, everything: bool = False) -> Iterator[str]:
    """Yield the layouts that fit, and why others do not."""
    good = [(one.plan, one.estimate) for one in found if one.estimate is not None]
    limit = len(found) if everything else SHOWN
    bad = len(found) - len(good)
    yield f"layouts of {current.layout.world} GPUs: {len(good)} fit, {bad} do not; best first"
    if good:
        heads = f"{'tp':>4s}{'pp':>4s}{'dp':>5s}{'engine tp':>11s}{'a step':>10s}{'rollout':>10s}"
        yield heads + f"{'largest budget':>16s}{'KV tokens':>12s}"
    for plan, made in good[:limit]:
        layout = plan.layout
        same = (layout, plan.engine_tp) == (current.layout, current.engine_tp)
        yield (
            f"{layout.tp:4d}{layout.pp:4d}{layout.dp:5d}{plan.engine_tp:11d}{clock(made.total):>10s}"
            f"{clock(made.parts.get('rollout', 0.0)):>10s}{plan.budget():16,d}{plan.cache_tokens:12,.0f}"
            + ("  <- the configuration" if same else "")
        )
    if len(good) > limit:
        yield f"    and {len(good) - limit} more (--all)"
    reasons: dict[tuple[str, str], list[int]] = {}
    for one in found:
        if one.problem:
            layout = one.plan.layout
            place = f"tp {layout.tp}, pp {layout.pp}, dp {layout.dp}"
            reasons.setdefault((place, one.problem), []).append(one.plan.engine_tp)
    for (place, problem), engines in list(reasons.items())[:limit]:
        yield f"    not {place}, engine tp {'/'.join(map(str, engines))}: {problem}"
    if len(reasons) > limit:
        yield f"    and {len(reasons) - limit} more that do not (--all)"


def clock(seconds: float) -> str:
    """Return a time as people read it: 0.4 s, 1:15, 1:06:40."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"
