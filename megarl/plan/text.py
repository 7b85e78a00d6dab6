"""A plan in words and tables, as `megarl plan` prints them and docs/planning.md shows them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megarl.plan.memory import Need, Plan
from megarl.plan.sizes import GIB
from megarl.plan.times import Estimate, Found, Lengths

COLUMNS = (
    ("weights", ("actor.weights", "critic.weights", "reference.weights")),
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
    """The whole plan but the layouts."""
    layout, config, device = plan.layout, plan.config, plan.device
    parameters = f"{plan.actor.parameters / 1e9:.2f} B parameters"
    yield f"model    {where}: {parameters}, {plan.actor.dtype}, recompute {config.model.recompute}, {plan.layers} layers"
    gpus = f"{layout.world} x {device.name} ({device.memory / GIB:.1f} GiB)"
    yield f"layout   tp {layout.tp}, pp {layout.pp}, dp {layout.dp}: {gpus} on {plan.nodes} nodes"
    if config.recipe != "sft":
        engines = f"{layout.world // _engine_tp(plan)} of tp {_engine_tp(plan)} ({config.rollout.engine})"
        yield f"engines  {engines}, KV cache of each {plan.cache_tokens:,.0f} tokens"
    yield ""
    yield "GiB on a GPU, of the fullest stage"
    yield from table(list(plan.needs()), device.memory)
    yield ""
    budget = plan.budget()
    largest = (
        f"{budget:,} tokens"
        if budget
        else f"none: the longest sequence has {plan.longest:,} tokens and does not fit"
    )
    yield f"largest update.tokens_per_micro_batch  {largest} (now {config.update.tokens_per_micro_batch:,})"
    found = plan.activations("actor")
    head = (found.head * plan.pack + found.head_fixed) / GIB
    yield f"log-prob head at work on a micro-batch  {head:.1f} GiB, at another time than the layers"
    if config.recipe != "sft":
        longest, mean = (
            plan.cache_tokens / tokens
            for tokens in (plan.longest, config.data.max_prompt_tokens + lengths.mean)
        )
        yield f"responses decoded at once by an engine  {longest:,.0f} of full length, {mean:,.0f} of mean length"
        yield f"weights into a GPU at each transfer  {plan.engine_weights / 1e9:.2f} GB"
    host = plan.host()
    listed = ", ".join(f"{name} {size / GIB:.0f}" for name, size in host.items())
    yield f"memory of a node  {sum(host.values()) / GIB:.0f} of {config.cluster.host_memory:.0f} GiB: {listed}"
    kept = (
        f", {config.checkpoint.keep} kept: {plan.checkpoint() * config.checkpoint.keep / 1e9:,.0f} GB"
        if config.checkpoint.keep
        else ""
    )
    yield f"a checkpoint on disk  {plan.checkpoint() / 1e9:,.1f} GB{kept}"
    yield ""
    yield from time_lines(made, lengths)


def table(needs: Sequence[Need], memory: float) -> Iterator[str]:
    """A row for each phase, a column for each kind of tensor group that any of them has."""
    used = [
        (title, names)
        for title, names in COLUMNS
        if any(name in need.parts for need in needs for name in names)
    ]
    yield f"{'phase':20s}" + "".join(f"{title:>12s}" for title, _ in used) + f"{'total':>9s}{'free':>9s}"
    for need in needs:
        cells = [sum(need.parts.get(name, 0.0) for name in names) / GIB for _, names in used]
        row = "".join(f"{cell:12.1f}" if cell else f"{'-':>12s}" for cell in cells)
        yield f"{need.phase:20s}{row}{need.total / GIB:9.1f}{(memory - need.total) / GIB:9.1f}"


def time_lines(made: Estimate, lengths: Lengths) -> Iterator[str]:
    """The estimate and what it stands on."""
    yield (
        f"a step takes about {clock(made.total)}, estimated from data sheets, with responses of {lengths.mean:,.0f} tokens on average "
        f"(up to {lengths.longest:,}), {made.tokens / 1e6:.1f} M tokens a step"
    )
    for name, seconds in made.parts.items():
        yield f"    {name:24s}{clock(seconds):>10s}  {seconds / made.total:4.0%}"


def layouts(found: Sequence[Found], current: Plan, *, everything: bool = False) -> Iterator[str]:
    """The layouts that fit, and why others do not."""
    good, bad = ([one for one in found if (one.problem is None) is fits] for fits in (True, False))
    limit = len(found) if everything else SHOWN
    yield f"layouts of {current.layout.world} GPUs: {len(good)} fit, {len(bad)} do not; best first"
    if good:
        yield f"{'tp':>4s}{'pp':>4s}{'dp':>5s}{'engine tp':>11s}{'a step':>10s}{'rollout':>10s}{'largest budget':>16s}{'KV tokens':>12s}"
    for one in good[:limit]:
        layout, made = one.plan.layout, one.estimate
        assert made is not None
        mark = (
            "  <- the configuration"
            if (layout, _engine_tp(one.plan)) == (current.layout, _engine_tp(current))
            else ""
        )
        yield (
            f"{layout.tp:4d}{layout.pp:4d}{layout.dp:5d}{_engine_tp(one.plan):11d}{clock(made.total):>10s}"
            f"{clock(made.parts.get('rollout', 0.0)):>10s}{one.plan.budget():16,d}{one.plan.cache_tokens:12,.0f}{mark}"
        )
    if len(good) > limit:
        yield f"    and {len(good) - limit} more (--all)"
    reasons: dict[tuple[int, int, int, str], list[int]] = {}
    for one in bad:
        layout = one.plan.layout
        reasons.setdefault((layout.tp, layout.pp, layout.dp, one.problem or ""), []).append(
            _engine_tp(one.plan)
        )
    for (tp, pp, dp, problem), engines in list(reasons.items())[:limit]:
        yield f"    not tp {tp}, pp {pp}, dp {dp}, engine tp {'/'.join(map(str, engines))}: {problem}"
    if len(reasons) > limit:
        yield f"    and {len(reasons) - limit} more that do not (--all)"


def clock(seconds: float) -> str:
    """0.4 -> 0.4 s, 75 -> 1:15, 4000 -> 1:06:40."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"


def _engine_tp(plan: Plan) -> int:
    return 1 if plan.config.rollout.engine == "transformers" else plan.config.rollout.engine_tp
