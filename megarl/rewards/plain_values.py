"""Exchange plain Python values with a process that nobody trusts.

JSON with one tag for each type that it lacks. Nothing is unpickled, and no received object has methods."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

_SEQUENCES: dict[str, type] = {"tuple": tuple, "set": set, "frozenset": frozenset}


class UnknownValueError(Exception):
    """A value is not plain, or a message describes none."""


def encode(value: Any, describe: Callable[[Any], dict[str, Any]] | None = None) -> Any:
    """Return what JSON can hold.

    describe: returns another object's message; without it such objects raise UnknownValueError."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # not `str(value)`, which an enum answers by its name
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": repr(float(value))}
    if describe is not None and isinstance(value, list | dict | set) and _has_own_names(type(value)):
        return describe(value)
    if isinstance(value, list):
        return [encode(item, describe) for item in value]
    if isinstance(value, tuple | set | frozenset):
        tag = next(tag for tag, kind in _SEQUENCES.items() if isinstance(value, kind))
        return {tag: [encode(item, describe) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[encode(key, describe), encode(item, describe)] for key, item in value.items()]}
    if isinstance(value, complex):
        return {"complex": [encode(value.real), encode(value.imag)]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": value.hex()}
    if hasattr(type(value), "tolist"):  # numpy
        return encode(value.tolist(), describe)
    if describe is None:
        raise UnknownValueError(type(value).__name__)
    return describe(value)


def _has_own_names(kind: type) -> bool:
    """Return whether a program defined this class, with methods: for example a cache from OrderedDict."""
    is_own = kind.__module__ not in sys.stdlib_module_names
    return is_own and any(not name.startswith("_") for name in vars(kind))


def decode(message: Any, find: Callable[[str, Any], Any] | None = None) -> Any:
    """Return the value of a message. find: returns the object of another tag and its content.

    Raises UnknownValueError, TypeError, ValueError or RecursionError for other messages."""
    if isinstance(message, list):
        return [decode(item, find) for item in message]
    if not isinstance(message, dict):
        return message
    if len(message) != 1:
        raise UnknownValueError("a message has not one tag")
    ((tag, content),) = message.items()
    if tag in _SEQUENCES:
        return _SEQUENCES[tag](decode(item, find) for item in content)
    if tag == "dict":
        return {decode(key, find): decode(item, find) for key, item in content}
    if tag == "float":
        return float(content)
    if tag == "complex":
        real, imaginary = (decode(part) for part in content)
        return complex(real, imaginary)
    if tag == "bytes":
        return bytes.fromhex(content)
    if find is not None:
        return find(tag, content)
    raise UnknownValueError(f"unknown tag {tag!r}")
