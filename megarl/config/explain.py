"""What pydantic found wrong, as one line for a person: where the value was set, which key, what is wrong, what to do."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from megarl.config.schema import Config

SHOWN = 60  # characters of a value
SUGGESTED = 3  # keys
_PLAINER = {
    "int_parsing": "must be a whole number",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "path_type": "must be a path, as text",
    "string_type": "must be a text (quotes make one of anything)",
    "tuple_type": "must be a list, written [a, b]",
    "missing": "has too few values",
    "too_long": "has too many values",
}


def knobs(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every leaf of the schema with its dotted key."""
    for name, field in section.model_fields.items():
        below = _section(field)
        if below is not None:
            yield from knobs(below, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


def explain(error: ValidationError, origins: Mapping[str, str], path: str) -> str:
    """The first problem as `where: key: what is wrong (got value)`, and how many other keys have one.

    origins: dotted key -> the file or command line that set it; path: the file that lacks what nobody set."""
    problems = error.errors(include_url=False)
    keys = [_key(problem["loc"]) for problem in problems]
    key = keys[0]
    parts = key.split(".")
    where = next((origins[k] for i in range(len(parts), 0, -1) if (k := ".".join(parts[:i])) in origins), path)
    first = problems[0]
    if first["type"] == "extra_forbidden":
        what = f"unknown key{_suggestion(key)}"
    elif first["type"] == "missing" and len(first["loc"]) == len(parts):
        what, where = "must be given", path
    else:
        # A value that may be of several types has one problem per type.
        said = " or ".join(dict.fromkeys(_said(p) for p, k in zip(problems, keys, strict=True) if k == key))
        what = f"{said.replace(' or must be ', ' or ')} (got {_shown(first['input'])})"
    others = len(set(keys)) - 1
    return f"{where}: {key}: {what}" + (f" [and {others} more]" if others else "")


def _section(field: FieldInfo) -> type[BaseModel] | None:
    kinds = [kind for kind in (field.annotation, *get_args(field.annotation)) if isinstance(kind, type)]
    return next((kind for kind in kinds if issubclass(kind, BaseModel)), None)


def _key(location: Sequence[str | int]) -> str:
    """The dotted key of a place in the input; what follows a leaf (a member of a union, a position in a list) is no part of it."""
    section: type[BaseModel] | None = Config
    parts = []
    for part in location:
        if section is None:
            break
        parts.append(str(part))
        field = section.model_fields.get(str(part))
        section = _section(field) if field is not None else None
    return ".".join(parts)


def _said(problem: Mapping[str, Any]) -> str:
    kind, text = problem["type"], str(problem["msg"]).removeprefix("Value error, ")
    if kind == "model_type":
        return (
            "is an empty section: give it keys, or leave it out" if problem["input"] is None else "must be a section of `key: value` lines"
        )
    text = _PLAINER.get(kind, text)
    return "must be " + text.removeprefix("Input should be ") if text.startswith("Input should be ") else text


def _shown(value: Any) -> str:
    """`value` for a message; reprlib because a list of aliases of lists can stand for more than memory holds."""
    text = value if isinstance(value, str) else reprlib.repr(value)
    text = repr(text[: SHOWN + 1]) if isinstance(value, str) else text
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


def _suggestion(key: str) -> str:
    """Known keys that may have been meant: in the same section, else of the same name elsewhere."""
    known = [name for name, _ in knobs(Config)]
    sections = dict.fromkeys(name[:i] for name in known for i, c in enumerate(name) if c == ".")
    parent, _, last = key.rpartition(".")
    beside = {name.rpartition(".")[2]: name for name in (*known, *sections) if name.rpartition(".")[0] == parent}
    found = [beside[name] for name in difflib.get_close_matches(last, beside, SUGGESTED, 0.7)]
    found = found or [name for name in (*known, *sections) if name.rpartition(".")[2] == last][:SUGGESTED]
    if found:
        return f" (did you mean {' or '.join(found)}?)"
    return f" (known here: {', '.join(beside)})"
