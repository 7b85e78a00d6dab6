"""Properties of loading: a dump can be loaded, and any file or override raises only ConfigError."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import annotated_types
import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from megarl.config import Config, dump_config, load_config
from megarl.config.errors import ConfigError
from megarl.config.load import dump_yaml, parse_yaml
from megarl.config.schema.section import Section, fields

MINIMUM = "recipe: grpo\nrun_dir: runs/x\nsteps: 3\nmodel: {path: m}\n"
KNOBS = dict(fields(Config))
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "minimum.yaml").write_text(MINIMUM)
        yield Path(name)


def one(kind: Any, bounds: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Return values of one type of the schema within its bounds."""
    low, high = bounds.get("ge", bounds.get("gt")), bounds.get("le", bounds.get("lt"))
    if kind is Any:
        return st.recursive(st.booleans() | st.integers() | TEXTS, lambda inner: st.lists(inner, max_size=2))
    if kind is bool:
        return st.booleans()
    if kind is int:
        return st.integers(
            low if "gt" not in bounds else low + 1, high if high is None or "le" in bounds else high - 1
        )
    if kind is float:
        options = {
            "exclude_min": "gt" in bounds,
            "exclude_max": "lt" in bounds,
            "allow_nan": False,
            "allow_infinity": False,
        }
        return st.floats(low, high, **options)
    if kind is Path:
        return TEXTS.filter(bool).map(lambda text: str(Path(text)))
    if issubclass(kind, Section):  # under keys that the user names
        drawn = st.fixed_dictionaries({name: values(field) for name, field in kind.model_fields.items()})
        if {"path", "gym"} <= set(kind.model_fields):  # one of the two
            drawn = st.builds(
                lambda given, other: {**given, other: None}, drawn, st.sampled_from(["path", "gym"])
            )
        return drawn.filter(lambda given: accepts(kind, given))
    assert kind is str, kind
    return TEXTS


def accepts(kind: type[Section], given: dict[str, Any]) -> bool:
    try:
        kind.model_validate(given)
    except ValidationError:
        return False
    return True


def limits(field: FieldInfo) -> dict[str, Any]:
    """Return ge, gt, le and lt of a field."""
    return {
        type(limit).__name__.lower(): next(iter(vars(limit).values()))
        if hasattr(limit, "__dict__")
        else getattr(limit, type(limit).__name__.lower())
        for limit in field.metadata
        if isinstance(
            limit, annotated_types.Ge | annotated_types.Gt | annotated_types.Le | annotated_types.Lt
        )
    }


def values(field: FieldInfo) -> st.SearchStrategy[Any]:
    """Return values of a key, from its annotation and bounds alone."""

    def of(annotation: Any) -> st.SearchStrategy[Any]:
        if annotation is type(None):
            return st.none()
        if get_origin(annotation) is Literal:
            return st.sampled_from(get_args(annotation))
        if get_origin(annotation) is tuple:
            kind, last = get_args(annotation)
            return st.lists(of(kind), min_size=0 if last is ... else 2, max_size=3 if last is ... else 2)
        if get_origin(annotation) is dict:
            key, value = get_args(annotation)
            return st.dictionaries(TEXTS.filter(bool) if key is str else of(key), of(value), max_size=3)
        if get_origin(annotation) is Annotated:
            kind, bounded = get_args(annotation)
            return one(kind, limits(bounded))
        if get_args(annotation):
            return st.one_of(*map(of, get_args(annotation)))
        return one(annotation, limits(field))

    return of(field.annotation)


@st.composite
def settings_of_knobs(draw: st.DrawFn) -> dict[str, Any]:
    keys = draw(st.lists(st.sampled_from(sorted(KNOBS)), unique=True, max_size=12))
    return {key: draw(values(KNOBS[key])) for key in keys}


@settings(max_examples=10, deadline=None)
@given(chosen=settings_of_knobs())
@example(
    chosen={
        "run_dir": "1e5",
        "reward.verifier": "no",
        "rollout.stop": ["\x85", "~", "", "<<", "2024-01-01", "\u2028"],
    }
)
@example(
    chosen={"actor.lr": 5e-324, "critic.lr": 1.7976931348623157e308, "data.eval": [], "parallel.dp": None}
)
@example(
    chosen={
        "data.eval": [
            {"path": p, "gym": None, "name": n, "every": None, "samples": n and 1}
            for p in "ab"
            for n in (None, "c")
        ]
    }
)
def test_what_is_dumped_is_read_back(folder: Path, chosen: dict[str, Any]) -> None:
    config = load_config(
        folder / "minimum.yaml", [f"{key}={dump_yaml(value)}" for key, value in chosen.items()]
    )
    for key, value in chosen.items():
        found: Any = config
        for part in key.split("."):
            found = getattr(found, part)
        assert plain(found) == value
    text = dump_config(config)
    (folder / "dumped.yaml").write_text(text, encoding="utf-8")
    assert load_config(folder / "dumped.yaml") == config
    # Other programs read the run's config.yaml with PyYAML, which has different rules for text.
    assert yaml.safe_load(text) == parse_yaml(text, "") == config.model_dump(mode="json")


def plain(value: Any) -> Any:
    """Convert a value to plain YAML types."""
    if isinstance(value, Section):
        value = dict(value)
    if isinstance(value, dict):
        return {key: plain(v) for key, v in value.items()}
    if isinstance(value, tuple):
        return [plain(v) for v in value]
    return str(value) if isinstance(value, Path) else value


def refused_or_loaded(path: Path, *overrides: str) -> None:
    try:
        load_config(path, overrides)
    except ConfigError as error:
        assert "\n" not in str(error)
        str(error).encode("utf-8", "backslashreplace")


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(content=st.one_of(st.binary(max_size=200), TEXTS.map(str.encode)))
@example(content=b"a: &x {b: *x}")
@example(content=b"[" * 3000)
@example(content=b"steps: " + b"9" * 5000)
@example(content=b"steps: !!timestamp x")
@example(content=b"steps: !!int ''")
@example(
    content=b"a: &a [x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a]\nrun_dir: [*b,*b,*b,*b,*b,*b,*b,*b]"
)
def test_any_bytes(folder: Path, content: bytes) -> None:
    (folder / "bytes.yaml").write_bytes(content)
    refused_or_loaded(folder / "bytes.yaml")


NAMES = st.sampled_from([*sorted({part for key in KNOBS for part in key.split(".")}), "base", "foo"])
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), TEXTS, st.dates(), st.binary(max_size=4)
)
TREES = st.recursive(
    SCALARS,
    lambda below: st.one_of(
        st.lists(below, max_size=3), st.dictionaries(st.one_of(NAMES, SCALARS), below, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=100, deadline=None)
@given(tree=st.dictionaries(NAMES, TREES, max_size=6))
def test_any_yaml(folder: Path, tree: dict[str, Any]) -> None:
    (folder / "tree.yaml").write_text(
        yaml.safe_dump({"recipe": "vapo", "run_dir": "x", "steps": 1, "model": {"path": "m"}, **tree})
    )
    refused_or_loaded(folder / "tree.yaml")


@settings(max_examples=200, deadline=None)
@given(
    key=st.one_of(st.sampled_from(sorted(KNOBS)), TEXTS), value=st.one_of(TEXTS, TREES.map(yaml.safe_dump))
)
def test_any_override(folder: Path, key: str, value: str) -> None:
    refused_or_loaded(folder / "minimum.yaml", f"{key}={value}")
    refused_or_loaded(folder / "minimum.yaml", key + value)
