"""Whether a run fits, before it takes a GPU: the same words for `megarl plan` and for `megarl train`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.config.errors import ConfigError
from megarl.config.schema import Config
from megarl.plan.devices import device_of
from megarl.plan.memory import Plan, make_plan
from megarl.plan.sizes import Shape
from megarl.weights.layout import check_layout


def plan_of(config: Config, actor: Mapping[str, Any], critic: Mapping[str, Any] | None = None, *, memory: float | None = None) -> Plan:
    """The plan of a configuration whose models have these config.json. memory: bytes of a GPU that is there. ConfigError where the model
    cannot be divided as `parallel` says."""
    parallel = config.parallel
    for described in (actor, critic or actor):
        check_layout(described, parallel.tp, parallel.pp, parallel.ep)
    dtype = config.model.dtype
    return make_plan(config, Shape(actor, dtype), Shape(critic or actor, dtype), device_of(config.cluster, memory))


def check_fits(config: Config, where: str, actor: Mapping[str, Any], critic: Mapping[str, Any] | None, world: int, memory: float) -> None:
    """ConfigError where the plan of this run on `world` GPUs of so many bytes says that it does not fit."""
    parallel = config.parallel
    dp = world // (parallel.tp * parallel.pp)
    config = config.model_copy(update={"parallel": parallel.model_copy(update={"dp": dp})})
    problem = plan_of(config, actor, critic, memory=memory).problem()
    if problem:
        raise ConfigError(f"{where}: {problem}")
