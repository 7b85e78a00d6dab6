"""From `rollout.engine` to an engine: the class that config/engines.py names is imported here alone."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from megarl.config.engines import ENGINES
from megarl.config.errors import ConfigError
from megarl.config.schema import Config
from megarl.parallel.machine import import_problem
from megarl.parallel.runtime import Runtime
from megarl.rollout.engines.base import RolloutEngine


def engine_class(config: Config) -> type[RolloutEngine]:
    """Import the class of the engine."""
    module, _, name = ENGINES[config.rollout.engine].implementation.partition(":")
    engine: type[RolloutEngine] = getattr(import_module(module), name)
    return engine


def make_engine(config: Config, tokenizer: Any, runtime: Runtime) -> RolloutEngine:
    """Make this rank's engine. It is not started."""
    return engine_class(config).build(config, tokenizer, runtime)


def check_engine(config: Config, device: str) -> None:
    """Raise ConfigError where the engine is not installed, or this machine cannot run it."""
    entry = ENGINES[config.rollout.engine]
    if entry.package and not find_spec(entry.package):
        remedy = f"{entry.install}, or use transformers"
        raise ConfigError(f"rollout.engine: {config.rollout.engine} is not installed ({remedy})")
    engine_class(config).check_machine(config, device)


def engine_import_problem(config: Config) -> str | None:
    """Return why the engine's package, which is installed, cannot be imported; None if it can."""
    entry = ENGINES[config.rollout.engine]
    if not entry.import_test or not find_spec(entry.package):
        return None
    return import_problem(entry.package, entry.import_test)
