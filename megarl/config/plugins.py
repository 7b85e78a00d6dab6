"""Plugins: entry points of other packages (`pyproject.toml`), none of which megarl imports by name.

Groups, and what their entry points name:

megarl.commands    function of a command, by its words: `report`, `data-gym`
megarl.verifiers   (response, reference answer) -> verdict, by its name in `reward.verifier`
megarl.answers     text -> its final answer or None: `boxed`, `line`
megarl.generators  module with `generate`, `first_rows` and `VERIFIER` for entries of data.train: `gym`
megarl.reports     (run folders, file) -> report written at the end of a run: `html`
megarl.abilities   checks of a machine for `megarl doctor`"""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from megarl.config.errors import ConfigError

REINSTALL = "run `make install`, or `pip install -e .`, again"


@cache
def plugins(group: str) -> dict[str, EntryPoint]:
    """Return a group's entry points by name, sorted."""
    return {one.name: one for one in sorted(entry_points(group=group))}


def plugin(group: str, name: str) -> Any:
    """Load an entry point. Raises ConfigError if it is not installed or cannot be imported."""
    if name not in plugins(group):
        what = "is not installed: this installation of megarl is older than its files"
        raise ConfigError(f"entry point {name} of {group} {what} ({REINSTALL})")
    try:
        return plugins(group)[name].load()
    except ImportError as error:
        raise ConfigError(f"entry point {name} of {group}: {error} ({REINSTALL})") from error
