"""`megarl config show|check|docs`: print, check and explain a configuration."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from megarl.config import Config, check_config, dump_config, load_config
from megarl.config.load import dump_yaml
from megarl.config.recipes import PRESETS
from megarl.config.schema import fields

_WORDS = {
    int: "whole number",
    float: "number",
    bool: "true or false",
    str: "text",
    Path: "path",
    type(None): "null",
}


def show(path: Path, overrides: Sequence[str]) -> int:
    """Print the resolved configuration as YAML."""
    print(dump_config(load_config(path, overrides)), end="")
    return 0


def check(path: Path, overrides: Sequence[str]) -> int:
    """Check keys, types and contradictions; the model's folder and the data files too, where the folder is on
    this machine."""
    config = load_config(path, overrides)
    check_config(config, str(path))
    if not config.model.path.is_dir():
        absent = f"model.path {config.model.path} is not on this machine, so the layout was not checked"
        print(f"{path}: the configuration holds; {absent}")
        return 0
    from megarl.schedule.preflight import preflight

    preflight(config, str(path))
    print(f"{path}: the configuration holds")
    return 0


def docs() -> int:
    """Print every field: key, meaning; kind, unit, default, what recipes set it to, source."""
    for key, field in fields(Config):
        extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        kind = " or ".join(_kinds(field.annotation)) + (f", in {extra['unit']}" if extra.get("unit") else "")
        default = "required" if field.is_required() else f"default {_yaml(field.default)}"
        presets = [
            f"{recipe} {_yaml(value)}"
            for recipe, preset in PRESETS.items()
            if (value := _setting(preset, key)) is not None
        ]
        by_recipe = f" ({', '.join(presets)})" if presets else ""
        print(
            f"{key}\n    {field.description}\n    {kind}; {default}{by_recipe}; source: {extra.get('source')}"
        )
    return 0


def _kinds(annotation: Any) -> list[str]:
    """Return the types of a field in words; choices as they are written."""
    if get_origin(annotation) is Literal:
        return [str(choice) for choice in get_args(annotation)]
    if get_origin(annotation) is tuple:
        first, last = get_args(annotation)
        if get_origin(first) is Literal:
            return [f"list of some of {', '.join(_kinds(first))}"]
        return [
            f"list of {_WORDS[first]}s"
            if last is ...
            else f"list of {len(get_args(annotation))} {_WORDS[first]}s"
        ]
    if get_origin(annotation) is dict:
        return ["section of your own keys"]
    if get_args(annotation):
        return [kind for member in get_args(annotation) for kind in _kinds(member)]
    return [_WORDS[annotation]]


def _yaml(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_yaml, value))}]"
    return dump_yaml({"": value}).partition(":")[2].strip()


def _setting(preset: Any, key: str) -> Any:
    for part in key.split("."):
        preset = preset.get(part) if isinstance(preset, dict) else None
    return preset
