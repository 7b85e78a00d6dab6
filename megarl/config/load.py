"""From YAML files and dotted overrides to a checked `Config`.

Order, later wins: the recipe's preset, the files named by `base:` (parents first), the file itself, the overrides. A file can be
read over another base than its own, which is how the rows of an ablation at 32B become rows at demo scale.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megarl.config.errors import ConfigError
from megarl.config.explain import explain
from megarl.config.recipes import PRESETS, Settings
from megarl.config.schema import Config
from megarl.config.yaml_text import dump_yaml, parse_yaml

MAX_DEPTH = 8  # sections within sections; the schema has 3, and an alias that holds itself has no end
COMMAND_LINE = "command line"
PACKAGE = Path(__file__).resolve().parents[1]  # its configs/ is a link to the repository's, and a folder where a wheel was installed


def load_config(path: str | Path, overrides: Sequence[str] = (), base: Path | None = None) -> Config:
    """Reads, merges and validates. Raises ConfigError with one line that names the file (or the override) and the key.

    base: stands in for the file at the root of the chain of bases, the one that names no base itself; what the files above it say
    holds over `base` and over the bases of `base`."""
    origins: dict[str, str] = {}
    settings: Settings = {}
    for name, layer in [*_files(config_file(path), base), *[(COMMAND_LINE, _parse_override(o)) for o in overrides]]:
        _merge(settings, layer, origins, name)
    recipe = settings.get("recipe")
    merged: Settings = {}
    if isinstance(recipe, str):
        _merge(merged, PRESETS.get(recipe, {}), {}, "")
    _merge(merged, settings, {}, "")
    try:
        return Config.model_validate(merged)
    except ValidationError as error:
        raise ConfigError(explain(error, origins, str(path))) from None


def config_file(name: str | Path, folder: Path = Path()) -> Path:
    """The file that `folder` calls `name`; a `configs/...` that is not there is megarl's own, which is installed with it."""
    there, own = folder / name, PACKAGE / name
    return own if Path(name).parts[:1] == ("configs",) and own.is_file() and not there.exists() else there


def set_key(key: str, value: int | Path | list[Path]) -> str:
    """An override; paths in quotes, since a comma or a bracket in one would be YAML's."""
    return f"{key}={json.dumps(value, default=str, ensure_ascii=False)}"


def dump_config(config: Config) -> str:
    """The resolved configuration as YAML that `load_config` reads back to the same values."""
    return dump_yaml(config.model_dump(mode="json"))


def _files(path: Path, root: Path | None = None, named_by: tuple[Path, ...] = ()) -> list[tuple[str, Settings]]:
    """The file and its bases, parents first. root: read in place of a file without a base; named_by: the files on the way here."""
    if any(path.resolve() == earlier.resolve() for earlier in named_by):
        circle = " -> ".join(str(earlier) for earlier in (*named_by, path))
        raise ConfigError(f"{path}: base: the files name each other in a circle ({circle})")
    whose = f" (base of {named_by[-1]})" if named_by else ""
    layer = read_yaml(path, whose)
    bases = layer.pop("base", [])
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(b, str) and b and "\0" not in b for b in bases):
        raise ConfigError(f"{path}: base: must be a file name or a list of file names")
    if root is not None and not bases:
        return _files(root)
    return [entry for base in bases for entry in _files(config_file(base, path.parent), root, (*named_by, path))] + [(str(path), layer)]


def read_yaml(path: Path, whose: str = "") -> Settings:
    """The mapping that a file holds. `whose`: who named it, for the message of the ConfigError where there is none."""
    content = parse_yaml(_read(path, whose), str(path))
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: must hold `key: value` lines{whose}")
    return content


def _read(path: Path, whose: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file{whose}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}{whose}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}{whose}") from None


def _parse_override(text: str) -> Settings:
    key, equals, value = text.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not equals or not all(parts):
        raise ConfigError(f"{COMMAND_LINE}: {text!r}: an override is written key=value, with dots in the key (e.g. actor.lr=2e-6)")
    setting: Any = parse_yaml(value, f"{COMMAND_LINE}: {key}") if value.strip() else None
    for part in reversed(parts):
        setting = {part: setting}
    return setting


def _merge(into: Settings, layer: Settings, origins: dict[str, str], name: str, sections: tuple[str, ...] = ()) -> None:
    """Puts `layer` over `into`, section by section; `origins` learns which layer a key was last set by."""
    if len(sections) > MAX_DEPTH:
        raise ConfigError(f"{name}: {sections[0]}: sections within sections, more than {MAX_DEPTH} deep")
    for key, value in layer.items():
        if not isinstance(key, str):
            raise ConfigError(f"{name}: {'.'.join((*sections, str(key)))}: a key must be a text, not {key!r}")
        dotted = ".".join((*sections, key))
        origins[dotted] = name
        if isinstance(value, dict):
            below = into.get(key)
            into[key] = below if isinstance(below, dict) else {}
            _merge(into[key], value, origins, name, (*sections, key))
        else:
            into[key] = value
