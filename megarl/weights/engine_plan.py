"""The plan of a run's weight transfer, from its configuration: which layout the engine has, and what a GPU's share of it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.config.errors import ConfigError
from megarl.config.schema import Config
from megarl.parallel.layout import Layout
from megarl.weights.formats import fp8_block
from megarl.weights.layout import Shards, hf_shapes, hf_shards, megatron_layout
from megarl.weights.plan import Plan
from megarl.weights.planner import make_plan
from megarl.weights.sglang_layout import sglang_shards


def engine_targets(config: Config, hf_config: Mapping[str, Any], world: int, *, cpu: bool = False) -> list[tuple[int, Shards]]:
    """(rank, shards) of the engine on every rank: rank r holds part r % engine_tp of engine r // engine_tp. cpu: SGLang's CPU engine."""
    tp = config.rollout.engine_tp
    if world % tp:
        raise ConfigError(f"rollout.engine_tp: {tp} does not divide the {world} devices (parallel.tp * parallel.pp * parallel.dp)")
    if config.rollout.engine == "transformers":
        shards = [hf_shards(hf_config)]
    else:
        shards = [sglang_shards(hf_config, tp, rank, cpu=cpu) for rank in range(tp)]
    return [(rank, shards[rank % tp]) for rank in range(world)]


def engine_plan(config: Config, hf_config: Mapping[str, Any], layout: Layout, *, cpu: bool = False) -> Plan:
    """How the actor's weights get into the engine. ConfigError if the model cannot be divided as `parallel` or `rollout` says."""
    sources = megatron_layout(hf_config, layout)
    targets = engine_targets(config, hf_config, layout.world, cpu=cpu)
    formats: dict[str, str] = {}
    if config.rollout.weights_dtype == "fp8_block":
        targets, scales, formats = fp8_block(targets, hf_shapes(hf_config))
        sources = with_scales(sources, scales)
    return make_plan(sources, targets, formats=formats, gpus_per_node=config.cluster.gpus_per_node)


def with_scales(sources: list[tuple[int, Shards]], scales: Shards) -> list[tuple[int, Shards]]:
    """The sources with the scales of FP8 blocks, which all ranks know (see quantize.py)."""
    joined: dict[int, Shards] = {}
    return [(rank, joined.setdefault(id(shards), {**shards, **scales})) for rank, shards in sources]
