"""What packages beside megarl bring to it, by the entry points of their distribution (`pyproject.toml`).
megarl itself imports none of them.

megarl.commands    the function of a command, by its words: `report`, `data-gym`
megarl.verifiers   (response, reference answer) -> verdict, by the name that `reward.verifier` has for it
megarl.answers     text -> the final answer in it or None: `boxed`, `line`
megarl.generators  a module with `generate`, `first_rows` and `VERIFIER`, for an entry of data.train: `gym`
megarl.reports     (folders of runs, file) -> the file, which a run ends with: `html`
megarl.abilities   what `megarl doctor` asks of a machine"""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from megarl.config.errors import ConfigError

REINSTALL = "run `make install`, or `pip install -e .`, again"


@cache
def plugins(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of a group by their names, in the order of these."""
    return {one.name: one for one in sorted(entry_points(group=group))}


def plugin(group: str, name: str) -> Any:
    """Return what a package beside megarl brings under this name. Raises ConfigError where nothing does, as
    megarl was installed before it could, or where it cannot be imported."""
    if name not in plugins(group):
        what = "is not installed: this installation of megarl is older than its files"
        raise ConfigError(f"entry point {name} of {group} {what} ({REINSTALL})")
    try:
        return plugins(group)[name].load()
    except ImportError as error:
        raise ConfigError(f"entry point {name} of {group}: {error} ({REINSTALL})") from error
