"""Base class of sections, and documented fields."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic.fields import FieldInfo

OURS = "our choice"


def field(default: Any, doc: str, unit: str = "", source: str = OURS, **bounds: Any) -> Any:
    """Declare a documented field. source: a paper's section or equation, or OURS"""
    return Field(default, description=doc, json_schema_extra={"unit": unit, "source": source}, **bounds)


def section(kind: type[Section]) -> Any:
    """Declare a section with its defaults."""
    return field(kind(), f"see {kind.__name__}")


def section_model(field: FieldInfo) -> type[BaseModel] | None:
    """Return the section class of a field, or None."""
    return None if get_origin(field.annotation) in (dict, tuple) else _model_in(field)


def entry_model(field: FieldInfo) -> type[BaseModel] | None:
    """Return the section class of entries (`reward.terms`, `data.eval`), or None."""
    return _model_in(field) if get_origin(field.annotation) in (dict, tuple) else None


def _model_in(field: FieldInfo) -> type[BaseModel] | None:
    classes = [
        candidate
        for candidate in (field.annotation, *get_args(field.annotation))
        if isinstance(candidate, type)
    ]
    return next((candidate for candidate in classes if issubclass(candidate, BaseModel)), None)


def fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield the schema's leaves by dotted key."""
    for name, info in model.model_fields.items():
        subsection = section_model(info)
        if subsection is not None:
            yield from fields(subsection, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", info


def as_list(value: Any) -> Any:
    """Turn a string into a list, for keys that accept either."""
    return [value] if isinstance(value, str) else value


class Section(BaseModel):
    """Base of sections: immutable, without unknown keys."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, protected_namespaces=(), allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _plausible(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse true as 1 and NUL characters, which pydantic accepts; expand ~ in paths."""
        annotation = cls.model_fields[str(info.field_name)].annotation
        types = (annotation, *get_args(annotation))
        parts = value if isinstance(value, list) else [value]
        if isinstance(value, dict) and Path in types:
            parts = [*value.values()]
        if any(isinstance(part, bool) for part in parts) and bool not in types:
            raise ValueError("must not be true or false")
        if any(isinstance(part, str) and "\0" in part for part in parts):
            raise ValueError("must not hold a NUL character")
        if Path not in types:
            return value
        # Shells do not expand the ~ of `model.path=~/x`.
        paths = [Path(p).expanduser() if isinstance(p, str) and p.startswith("~/") else p for p in parts]
        if isinstance(value, dict):
            return dict(zip(value, paths, strict=True))
        return paths if isinstance(value, list) else paths[0]
