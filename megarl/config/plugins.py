"""Plugins: entry points of other packages, which megarl does not import by name.

megarl.commands    functions of commands: `report`, `data-gym`
megarl.verifiers   (response, reference answer) -> verdict
megarl.answers     text -> final answer or None: `boxed`, `line`
megarl.generators  modules with `generate`, `first_rows` and `VERIFIER`: `gym`
megarl.reports     (run folders, file or folder) -> file of the report: `html`
megarl.abilities   checks of a machine for `megarl doctor`"""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from megarl.config.errors import ConfigError

REINSTALL = "run `make install`, or `pip install -e .`, again"


@cache
def plugins(group: str) -> dict[str, EntryPoint]:
    """Return name -> entry point of a group, sorted."""
    return {entry_point.name: entry_point for entry_point in sorted(entry_points(group=group))}


def plugin(group: str, name: str) -> Any:
    """Load an entry point. Raises ConfigError if it is not installed or cannot be imported."""
    if name not in plugins(group):
        what = "is not installed: this installation of megarl is older than its files"
        raise ConfigError(f"entry point {name} of {group} {what} ({REINSTALL})")
    try:
        return plugins(group)[name].load()
    except ImportError as error:
        raise ConfigError(f"entry point {name} of {group}: {error} ({REINSTALL})") from error
