"""Why steps of long responses make fewer tokens per second than published ones of short responses.

The tables list the planner's estimates with one change at a time.
`python tests/plan/test_long_responses.py` prints them as in docs/evidence/planning.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from unittest import mock

from megarl.config import load_config
from megarl.plan import times
from megarl.plan.inputs import PlanInputs
from megarl.plan.search import replace_keys
from megarl.plan.sizes import Shape, find_device
from megarl.plan.times import Estimate, Lengths, estimate
from megarl.weights.known_models import KNOWN_MODELS
from tests.plan.test_published import ROOT, TABLE

VAPO = ROOT / "configs/vapo_32b.yaml"
LONG = Lengths(20480 / 3, 20480, 512)


def plan_with(base: Path, changes: list[str], model: str, layout: Mapping[str, int]) -> PlanInputs:
    """Make a plan as tests/plan/test_published.py does, without checking the layout."""
    config = load_config(base, changes)
    config = config.model_copy(update={"parallel": config.parallel.model_copy(update=layout)})
    shape = Shape(KNOWN_MODELS[model], config.model.dtype)
    return PlanInputs(config, shape, shape, find_device(config.cluster))


def steps() -> Iterator[tuple[str, PlanInputs, Lengths]]:
    """Yield plans from NeMo-RL's run to configs/vapo_32b.yaml, each with all previous changes."""
    row = next(row for row in TABLE["rows"] if row["name"] == "Qwen3-32B on 32 H100")
    source = TABLE["sources"][row["source"]]
    short = Lengths(row["length"], 3984, source["prompt"])
    changes = [*source["set"], *row["set"]]
    base = ROOT / TABLE["base"]
    yield "NeMo-RL's run (571 published)", plan_with(base, changes, row["model"], row["layout"]), short
    sizes = ["rollout.prompts=512", "rollout.group_size=16"]
    wide = {**row["layout"], "dp": 8}
    name = "128 GPUs, 8,192 responses in 16 updates"
    yield name, plan_with(base, [*changes, *sizes], "Qwen2.5-32B", wide), short
    method = ["algorithm.kl_weight=0", "algorithm.nll_weight=0.1", "algorithm.advantage=gae"]
    sizes += method
    name = "VAPO: a critic instead of a reference"
    yield name, plan_with(base, [*changes, *sizes], "Qwen2.5-32B", wide), short
    vapo = plan_with(VAPO, [], "Qwen2.5-32B", {})
    limit = [
        *("rollout.engine_memory=0.8", "rollout.max_response_tokens=20480", "data.max_prompt_tokens=2048"),
        *("update.tokens_per_micro_batch=22528", "model.recompute=full", "model.recompute_layers=20"),
    ]
    settings = [*changes, *sizes, *limit]
    layout = {"tp": 4, "pp": 2, "dp": 16}
    name = "packs of up to 22,528 tokens: recomputation, pp 2"
    yield name, plan_with(base, settings, "Qwen2.5-32B", layout), short
    sampled = replace(LONG, mean=float(row["length"]))
    with mock.patch.object(times, "FP8_SPEEDUP", {}):
        yield "mean 3,251, up to 20,480 tokens, prompts of 512", vapo, sampled
    yield "FP8", vapo, sampled
    yield "mean 6,827: `configs/vapo_32b.yaml`", vapo, LONG
    yield "mean 20,000", vapo, replace(LONG, mean=20000.0)


def row(name: str, plan: PlanInputs, made: Estimate) -> str:
    """Make a row of the table: tokens per second and GPU, and a token's cost in milliseconds of a GPU."""
    parts, cost = made.parts, 1000 * plan.layout.world / made.tokens
    updates = sum(seconds for phase, seconds in parts.items() if phase.endswith("_update"))
    rollout = parts["rollout"]
    shares = (made.total, rollout, made.total - rollout - updates, updates)
    cells = " | ".join(f"{seconds * cost:.2f}" for seconds in shares)
    return f"| {name} | {made.tokens / made.total / plan.layout.world:.0f} | {cells} |"


HEAD = (
    "| {} | tokens/s a GPU | ms a token | rollout | log-probs, values, moves | updates |\n" + "|---" * 6 + "|"
)


def changed() -> Iterator[tuple[str, PlanInputs, Estimate]]:
    """Yield configs/vapo_32b.yaml, and plans with one change each.

    First come parts that the time model counts, then changes that a run could make."""
    plan = plan_with(VAPO, [], "Qwen2.5-32B", {})
    yield "`configs/vapo_32b.yaml`", plan, estimate(plan, LONG)
    seconds, costs = times._token_seconds, times.make_decode_cost
    with mock.patch.object(times, "_token_seconds", lambda p, n, u, _: seconds(p, n, u, [1.0])):
        yield "attention of training for nothing", plan, estimate(plan, LONG)
    with mock.patch.object(times, "make_decode_cost", lambda p: replace(costs(p), cached=0.0)):
        yield "reading the KV cache for nothing", plan, estimate(plan, LONG)
    with mock.patch.object(times, "make_decode_cost", lambda p: replace(costs(p), fixed=0.0, sequence=0.0)):
        yield "the host and kernels' starts for nothing in decoding", plan, estimate(plan, LONG)
    free = replace_keys(plan, cluster__node_speed=1e9, cluster__network_speed=1e9)
    yield "all messages hidden", free, estimate(free, LONG)
    whole = replace_keys(plan, model__recompute="none", model__recompute_layers=None)
    yield "no recomputation (does not fit)", whole, estimate(whole, LONG)
    once = replace_keys(plan, update__mini_batch=8192)
    yield "one update a step: no bubble or waiting between them", once, estimate(once, LONG)
    with mock.patch.object(times, "FP8_SPEEDUP", {}):
        yield "FP8's products at bf16's speed", plan, estimate(plan, LONG)
    with mock.patch.object(times, "FP8_SPEEDUP", {plan.config.model.fp8.recipe: 2.0}):
        yield "FP8's products at twice bf16's speed, as in the data sheet", plan, estimate(plan, LONG)
    quarter = replace_keys(plan, update__mini_batch=2048)
    yield "4 updates a step instead of 16 (another algorithm)", quarter, estimate(quarter, LONG)
    eight = replace_keys(plan, rollout__weights_dtype="fp8_block")
    yield "`rollout.weights_dtype=fp8_block`", eight, estimate(eight, LONG)
    ring = replace_keys(plan, parallel__cp=2, parallel__dp=8, model__recompute_layers=6)
    yield "cp 2, dp 8, 6 layers recomputed", ring, estimate(ring, LONG)
    h200 = plan_with(VAPO, ["cluster.gpu=H200", "model.recompute_layers=1"], "Qwen2.5-32B", {})
    yield "H200: 1 layer recomputed, a larger KV cache", h200, estimate(h200, LONG)


def tables() -> tuple[str, str]:
    """Return the tables of docs/evidence/planning.md."""
    walk = [row(name, plan, estimate(plan, lengths)) for name, plan, lengths in steps()]
    alone = [row(name, plan, made) for name, plan, made in changed()]
    heads = HEAD.format("each with all above it"), HEAD.format("one thing changed")
    first, second = ("\n".join([head, *rows]) + "\n" for head, rows in zip(heads, (walk, alone), strict=True))
    return first, second


def test_the_page_shows_the_tables() -> None:
    page = (ROOT / "docs" / "evidence" / "planning.md").read_text()
    for made in tables():
        assert made in page, "python tests/plan/test_long_responses.py prints them anew"


if __name__ == "__main__":
    print("\n".join(tables()), end="")
