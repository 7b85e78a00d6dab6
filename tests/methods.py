"""The methods of megarl.config.methods that a file of configs/methods selects, and no recipe."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config.methods import METHODS
from megarl.config.recipes import PRESETS
from megarl.config.schema import AlgorithmConfig


def methods_without_recipe() -> Iterator[tuple[str, str]]:
    """Yield switch and name."""
    recipes = [preset["algorithm"] for preset in PRESETS.values()]
    for switch, table in METHODS.items():
        default = AlgorithmConfig.model_fields[switch].default
        known = {default, *(recipe.get(switch) for recipe in recipes)}
        yield from ((switch, name) for name in table if name not in known)
