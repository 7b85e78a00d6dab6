"""The methods of megarl.config.methods, and their files in configs/methods."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.config import check_config, load_config
from megarl.config.errors import ConfigError
from megarl.config.methods import METHODS
from megarl.config.recipes import PRESETS
from megarl.config.schema import AlgorithmConfig


def methods_without_recipe() -> Iterator[tuple[str, str]]:
    """Yield switch and name of the methods that no recipe selects, but a file."""
    recipes = [preset["algorithm"] for preset in PRESETS.values()]
    for switch, table in METHODS.items():
        default = AlgorithmConfig.model_fields[switch].default
        known = {default, *(recipe.get(switch) for recipe in recipes)}
        yield from ((switch, name) for name in table if name not in known)


def refusal(name: str, *overrides: str) -> str:
    """Return the error of a method's file with overrides."""
    file = Path(__file__).parents[1] / "configs/methods" / f"{name}.yaml"
    check_config(load_config(file), "")
    with pytest.raises(ConfigError) as error:
        check_config(load_config(file, overrides), "")
    return str(error.value)
