"""The phases as they declare themselves, read from the source of schedule/phases.py: importing it would import torch and Megatron,
seconds for a few words."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

from megarl.config.schema import Config

SOURCE = Path(__file__).parents[1] / "schedule" / "phases.py"
# In the order of a step, value pretraining's own phases left out: it needs nothing that the step after it does not.
ORDER = ("rollout", "old_logprobs", "reference_logprobs", "values", "critic_update", "actor_update", "supervised_update", "weight_transfer")


class Declared(NamedTuple):
    """A phase that needs the device: its name and the tenants that must be there; the columns that it writes."""

    name: str
    resident: frozenset[str]
    writes: frozenset[str]


@cache
def declarations() -> dict[str, Declared]:
    """Every phase of schedule/phases.py, by name."""
    found = {}
    for node in ast.parse(SOURCE.read_text(encoding="utf-8")).body:
        for decorator in getattr(node, "decorator_list", []):
            if isinstance(node, ast.FunctionDef) and isinstance(decorator, ast.Call) and getattr(decorator.func, "id", "") == "phase":
                words = {given.arg: frozenset(ast.literal_eval(given.value).split()) for given in decorator.keywords}
                found[node.name] = Declared(node.name, words.get("resident", frozenset()), words.get("writes", frozenset()))
    return found


def models_of(config: Config) -> tuple[str, ...]:
    """actor, critic, reference: those that the run has."""
    return ("actor", *(["critic"] if config.has_critic else []), *(["reference"] if config.algorithm.kl_weight else []))


def device_phases(config: Config) -> list[Declared]:
    """The phases of one step of the run that need something on the device, in their order."""
    there = {*models_of(config), *([] if config.recipe == "sft" else ["engine"])}
    known = declarations()
    names = ("supervised_update",) if config.recipe == "sft" else (name for name in ORDER if name != "supervised_update")
    return [known[name] for name in names if {tenant.partition(".")[0] for tenant in known[name].resident} <= there]


def columns_of(config: Config) -> frozenset[str]:
    """The columns of a step's batch, `tokens` included."""
    if config.recipe == "sft":
        rest = {"read_pairs"}
    else:
        rest = {"gae_advantages" if config.has_critic else "group_advantages"}
    step = {declared.name for declared in device_phases(config)} | rest | {"divide"}
    return frozenset[str]().union(*(declared.writes for name, declared in declarations().items() if name in step))


def kept(config: Config) -> frozenset[str]:
    """The tenants that never leave a GPU: all of them where nothing is moved."""
    everything = frozenset[str]().union(*(declared.resident for declared in device_phases(config)))
    return everything if config.residency.offload is False else everything & frozenset(config.residency.keep)


def resident_sets(phases: Iterable[Declared], keep: Collection[str]) -> dict[str, frozenset[str]]:
    """phase -> what is on the device while it runs: what it declares, and what never leaves."""
    return {declared.name: declared.resident | frozenset(keep) for declared in phases}
