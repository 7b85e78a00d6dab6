"""Load a Config from YAML files and dotted overrides.

Later wins: presets, files named by `base:` (parents first), the file itself, overrides."""

from __future__ import annotations

import difflib
import json
import re
import reprlib
import sys
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import lru_cache
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.representer import SafeRepresenter
from ruamel.yaml.resolver import VersionedResolver

from megarl.config.errors import ConfigError, first_line
from megarl.config.files import open_regular
from megarl.config.recipes import AHEAD_PRESET, IN_FLIGHT_PRESET, PRESETS
from megarl.config.schema import Config, DataEntry, EvaluationSet, GymConfig, RewardTerm
from megarl.config.schema.section import entry_model, fields, section_model

Settings = dict[str, Any]
MAX_DEPTH = 8  # nested sections; a YAML alias can contain itself
MAX_VALUES = 100_000  # values of a file after expanding aliases
COMMAND_LINE = "command line"
PACKAGE = Path(__file__).resolve().parents[1]  # has configs/: a link in a checkout, a folder in a wheel
SHOWN = 60  # characters of a value in a message
SUGGESTED = 3  # keys in a message
ENTRY_SECTIONS = (  # entries of lists, and sections that users name
    (r"reward\.terms\.[^.]+", RewardTerm),
    (r"data\.train\[\d+\]", DataEntry),
    (r"data\.eval\[\d+\]", EvaluationSet),
    (r"data\.(train|eval)\[\d+\]\.gym", GymConfig),
)
RENAMED = {  # old key -> new, with the version that renamed it; the next minor version refuses the old one
    "watchdog.limits.divide": "watchdog.limits.distribute",  # 0.2
    "reward.max_unjudged": "reward.max_ungraded",  # 0.3
}


class Layer(NamedTuple):
    """Settings of one file or override."""

    name: str
    settings: Settings
    nodes: Node | None = None  # the file's YAML nodes, for line numbers

    def where(self, key: str) -> str:
        """Return `file: line n` of a dotted key, or of the closest section in the file."""
        node, line = self.nodes, 0
        for part in re.findall(r"[^.\[\]]+|\[\d+\]", key):
            if isinstance(node, SequenceNode) and part.startswith("["):
                node = node.value[int(part[1:-1])]
                line = node.start_mark.line + 1
                continue
            pairs = node.value if isinstance(node, MappingNode) else []
            # Keys from a merge key (<<) come first; the last one wins.
            matches = [(name.start_mark.line + 1, value) for name, value in pairs if name.value == part]
            if not matches:
                break
            line, node = matches[-1]
        return f"{self.name}: line {line}" if line else self.name


def load_config(path: str | Path, overrides: Sequence[str] = (), base: Path | None = None) -> Config:
    """Read, merge and validate. Raises ConfigError with place and key.

    base: replaces the root of the chain of bases, e.g. to run ablations of a 32B model at demo scale."""
    origins: dict[str, Layer] = {}  # dotted key -> what set it
    settings: Settings = {}
    for layer in (*_files(config_file(path), base), *map(_parse_override, overrides)):
        _merge(settings, layer, origins)
    recipe = settings.get("recipe")
    merged_settings: Settings = {}
    if isinstance(recipe, str):
        _merge(merged_settings, Layer("", PRESETS.get(recipe, {})), {})
    algorithm = {**merged_settings.get("algorithm", {}), **_section(settings, "algorithm")}
    schedule = _section(settings, "schedule")
    in_flight = schedule.get("in_flight", "none") != "none"
    if recipe != "sft" and in_flight:
        _merge(merged_settings, Layer("", IN_FLIGHT_PRESET), {})
    if recipe != "sft" and (schedule.get("ahead") or in_flight) and algorithm.get("old_logprobs") != "engine":
        _merge(merged_settings, Layer("", AHEAD_PRESET), {})
    _merge(merged_settings, Layer("", settings), {})
    try:
        return Config.model_validate(merged_settings)
    except ValidationError as error:
        raise ConfigError(_explain(error, origins, str(path))) from None


def _section(settings: Settings, name: str) -> Settings:
    section = settings.get(name)
    return section if isinstance(section, dict) else {}


def config_file(name: str | Path, folder: Path = Path()) -> Path:
    """Return `name` in `folder`, or the installed file for a missing `configs/...`."""
    file, installed_file = folder / name, PACKAGE / name
    return (
        installed_file
        if Path(name).parts[:1] == ("configs",) and installed_file.is_file() and not file.exists()
        else file
    )


def set_key(key: str, value: int | Path | list[Path]) -> str:
    """Return an override, with paths in quotes so that YAML reads them unchanged."""
    return f"{key}={json.dumps(value, default=str, ensure_ascii=False)}"


def dump_config(config: Config) -> str:
    """Return YAML that `load_config` reads back."""
    return dump_yaml(config.model_dump(mode="json"))


def read_yaml(path: Path) -> Settings:
    """Read a file's mapping. Raises ConfigError."""
    return _read(path).settings


def _read(path: Path, whose: str = "") -> Layer:
    """Read a file. Raises ConfigError, with `whose` appended."""
    try:
        with open_regular(path) as file:
            text = file.read().decode("utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file{whose}") from None
    except UnicodeDecodeError as error:
        byte = f"byte {error.start} is {error.object[error.start]:#04x}"
        raise ConfigError(f"{path}: not a UTF-8 text: {byte}{whose}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}{whose}") from None
    content, nodes = _parsed(text, str(path))
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: must hold `key: value` lines{whose}")
    return Layer(str(path), deepcopy(content), nodes)


def _files(path: Path, root: Path | None, named_by: tuple[Path, ...] = ()) -> list[Layer]:
    """Read a file and its bases, parents first.

    root: replaces the file without a base. named_by: files that led here"""
    if any(path.resolve() == file.resolve() for file in named_by):
        circle = " -> ".join(str(file) for file in (*named_by, path))
        raise ConfigError(f"{path}: base: the files name each other in a circle ({circle})")
    layer = _read(path, f" (base of {named_by[-1]})" if named_by else "")
    bases = layer.settings.pop("base", [])
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(b, str) and b and "\0" not in b for b in bases):
        raise ConfigError(f"{path}: base: must be a file name or a list of file names")
    if root is not None and not bases:
        return _files(root, None)
    layers: list[Layer] = []
    for base in bases:
        layers += _files(config_file(base, path.parent), root, (*named_by, path))
    return [*layers, layer]


def _parse_override(text: str) -> Layer:
    key, equals, value = text.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not equals or not all(parts):
        rule = "an override is written key=value, with dots in the key (e.g. actor.lr=2e-6)"
        raise ConfigError(f"{COMMAND_LINE}: {text!r}: {rule}")
    setting: Any = parse_yaml(value, f"{COMMAND_LINE}: {key}") if value.strip() else None
    for part in reversed(parts):
        setting = {part: setting}
    return Layer(COMMAND_LINE, setting)


def _merge(into: Settings, layer: Layer, origins: dict[str, Layer]) -> None:
    """Merge `layer` into `into`, and record in `origins` which layer set each key."""

    def merge(into: Settings, settings: Settings, sections: tuple[str, ...]) -> None:
        if len(sections) > MAX_DEPTH:
            what = f"sections within sections, more than {MAX_DEPTH} deep"
            raise ConfigError(f"{layer.where(sections[0])}: {sections[0]}: {what}")
        for key, value in settings.items():
            dotted_key = ".".join((*sections, str(key)))
            if not isinstance(key, str):
                raise ConfigError(
                    f"{layer.where(dotted_key)}: {dotted_key}: a key must be a text, not {key!r}"
                )
            if dotted_key in RENAMED:
                warning = f"{layer.where(dotted_key)}: {dotted_key} is now {RENAMED[dotted_key]}"
                print(f"megarl: {warning}", file=sys.stderr, flush=True)
                *_, key = (dotted_key := RENAMED[dotted_key]).split(".")
            origins[dotted_key] = layer
            if isinstance(value, dict):
                old_section = into.get(key)
                into[key] = old_section if isinstance(old_section, dict) else {}
                merge(into[key], value, (*sections, key))
            else:
                into[key] = value

    merge(into, layer.settings, ())


PLAINER = {  # pydantic's error type -> our message
    **dict.fromkeys(("int_parsing", "int_type", "int_from_float"), "must be a whole number"),
    **dict.fromkeys(("float_parsing", "float_type"), "must be a number"),
    **dict.fromkeys(("bool_parsing", "bool_type"), "must be true or false"),
    "path_type": "must be a path, as text",
    "string_type": "must be a text (quotes make one of anything)",
    "tuple_type": "must be a list, written [a, b]",
    "missing": "has too few values",
    "too_long": "has too many values",
    "model_type": "must be a section of `key: value` lines",
}


def _explain(error: ValidationError, origins: Mapping[str, Layer], path: str) -> str:
    """Return the first problem with its place, and the number of the others. path: place of missing keys"""
    problems = error.errors(include_url=False)
    keys = [_key(problem["loc"]) for problem in problems]
    key, first_problem = keys[0], problems[0]
    parts = key.split(".")
    sections = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
    sections = [re.sub(r"\[\d+\]$", "", name) for name in sections]  # a list is set as a whole
    where = next((origins[name].where(key) for name in sections if name in origins), path)
    if first_problem["type"] == "extra_forbidden":
        what = f"unknown key{_suggestion(key)}"
    elif first_problem["type"] == "missing" and first_problem["loc"][-1] == parts[-1]:
        what, where = "must be given", where if "[" in key else path
    else:
        reasons = []  # a union has one problem per type
        for problem in (
            problem for problem, problem_key in zip(problems, keys, strict=True) if problem_key == key
        ):
            reason = PLAINER.get(problem["type"], problem["msg"].removeprefix("Value error, "))
            if problem["type"] == "model_type" and problem["input"] is None:
                reason = "is an empty section: give it keys, or leave it out"
            reasons.append(re.sub("^Input should be ", "must be ", reason))
        value = first_problem["input"]
        # reprlib, since aliases of lists can expand beyond memory.
        value_text = repr(value[: SHOWN + 1]) if isinstance(value, str) else reprlib.repr(value)
        value_text = value_text if len(value_text) <= SHOWN else f"{value_text[: SHOWN - 3]}..."
        what = f"{' or '.join(dict.fromkeys(reasons)).replace(' or must be ', ' or ')} (got {value_text})"
    other_count = len(set(keys)) - 1
    return f"{where}: {key}: {what}" + (f" [and {other_count} more]" if other_count else "")


def _key(location: Sequence[str | int]) -> str:
    """Return the dotted key of pydantic's `loc`, e.g. `data.eval[1].every`, without union members."""
    section: type[BaseModel] | None = Config
    entries: type[BaseModel] | None = None  # section of the next part: a user's name or an index
    parts: list[str] = []
    for part in location:
        if section is None and entries is None:
            break
        if isinstance(part, int) and parts:
            parts[-1] += f"[{part}]"
        else:
            parts.append(str(part))
        if entries is not None:
            section, entries = entries, None
        elif section is not None:
            field = section.model_fields.get(str(part))
            section = section_model(field) if field is not None else None
            entries = entry_model(field) if field is not None else None
    return ".".join(parts)


def _suggestion(key: str) -> str:
    """Suggest similar keys of the same section, else the same name elsewhere."""
    known_keys = [name for name, _ in fields(Config)]
    # Add the sections.
    known_keys += dict.fromkeys(name[:i] for name in known_keys for i, c in enumerate(name) if c == ".")
    parent, _, last_part = key.rpartition(".")
    for pattern, model in ENTRY_SECTIONS:
        if re.fullmatch(pattern, parent):
            known_keys += [f"{parent}.{name}" for name in model.model_fields]
    siblings = {name.rpartition(".")[2]: name for name in known_keys if name.rpartition(".")[0] == parent}
    suggestions = [siblings[name] for name in difflib.get_close_matches(last_part, siblings, SUGGESTED, 0.7)]
    suggestions = (
        suggestions or [name for name in known_keys if name.rpartition(".")[2] == last_part][:SUGGESTED]
    )
    if suggestions:
        return f" (did you mean {' or '.join(suggestions)}?)"
    return f" (known here: {', '.join(siblings)})"


# ruamel.yaml refuses duplicate keys. In YAML 1.2 1e-6 is a number, `no` and 1:30 are strings, 010 is 10.


class _Constructor(SafeConstructor):
    """Read dates, `=` and numbers such as 1_000 and 0o17 as strings."""

    def number_or_text(self, node: ScalarNode) -> int | str:
        text = str(self.construct_scalar(node))
        return text if re.match("[-+]?0[bo]|.*_", text) else self.construct_yaml_int(node)


class _Representer(SafeRepresenter):
    """Write YAML that other programs' PyYAML (YAML 1.1) reads the same."""

    def represent_str(self, data: str) -> ScalarNode:
        is_plain = _YAML_1_1.resolve(ScalarNode, data, (True, False)) == _YAML_1_1.DEFAULT_SCALAR_TAG
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=None if is_plain else "'")

    def represent_float(self, data: float) -> ScalarNode:
        node = super().represent_float(data)
        if "." not in node.value:  # YAML 1.1 reads 1e-06 as a string
            node.value = node.value.replace("e", ".0e")
        return node


_YAML_1_1 = VersionedResolver(version=(1, 1))
for _tag in ("timestamp", "value"):
    _Constructor.add_constructor(f"tag:yaml.org,2002:{_tag}", _Constructor.construct_yaml_str)
_Constructor.add_constructor("tag:yaml.org,2002:int", _Constructor.number_or_text)
_Representer.add_representer(str, _Representer.represent_str)
_Representer.add_representer(float, _Representer.represent_float)


def parse_yaml(text: str, where: str) -> Any:
    """Parse one document. Raises ConfigError `where: line n: not valid YAML: ...`."""
    return _parse(text, where)[0]


def _parse(text: str, where: str) -> tuple[Any, Node | None]:
    """Return a document's value and nodes."""
    yaml = YAML(typ="safe", pure=True)
    yaml.Constructor = _Constructor
    try:
        node = yaml.compose(text)
        if node is not None and _count_values(node, {}) > MAX_VALUES:
            what = f"its aliases (*name) stand for more than {MAX_VALUES:,} values (write out what is needed)"
            raise ConfigError(f"{where}: {what}")
        return (None if node is None else yaml.constructor.construct_document(node)), node
    except RecursionError:
        raise ConfigError(f"{where}: not valid YAML: nested too deep") from None
    except MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        problem = str(error.problem).partition(" with value ")[0]  # of a duplicate key
        raise ConfigError(f"{where}: {line}not valid YAML: {problem}") from None
    except YAMLError as error:
        raise ConfigError(f"{where}: not valid YAML: {first_line(error)}") from None
    except (ValueError, TypeError, LookupError, AttributeError) as error:  # `!!bool x`, `!!int ''`
        problem = f"a value does not fit its tag ({type(error).__name__}: {error})"
        raise ConfigError(f"{where}: not valid YAML: {problem}") from None


def _count_values(node: Node, counts: dict[int, int]) -> int:
    """Return the number of values after expanding aliases, which a few lines can nest beyond memory.

    A node inside itself counts as half of MAX_VALUES: MAX_DEPTH stops one such alias, and two are refused
    here. counts: node -> result."""
    if id(node) not in counts:
        counts[id(node)] = MAX_VALUES // 2 + 1
        children = node.value if isinstance(node, MappingNode | SequenceNode) else []
        if isinstance(node, MappingNode):
            children = [part for pair in children for part in pair]
        counts[id(node)] = 1 + sum(_count_values(child, counts) for child in children)
    return counts[id(node)]


# Many configurations share a file. Callers must copy the result before changing it.
_parsed = lru_cache(maxsize=64)(_parse)


def dump_yaml(content: Any) -> str:
    """Return YAML that `parse_yaml` reads back, with keys in order."""
    yaml: Any = YAML(typ="safe", pure=True)
    stream = StringIO()
    yaml.Representer = _Representer
    yaml.default_flow_style = yaml.allow_unicode = yaml.sort_base_mapping_type_on_output = False
    yaml.width = 140
    yaml.dump(content, stream)
    return stream.getvalue()
