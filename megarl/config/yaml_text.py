"""YAML as people expect it: the scalars of YAML 1.2's core schema (`yes` is a text, 1e-6 a number), no key given twice."""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import yaml

from megarl.config.errors import ConfigError

# PyYAML follows YAML 1.1, where 1e-6 is a text, `no` is false, 010 is 8, 1:30 is 90 and 2024-01-01 is a date.
_RESOLVERS = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", list("-+.0123456789")),
    ("merge", r"<<", ["<"]),
)


class _Loader(yaml.SafeLoader):
    """Safe YAML in which a key given twice is an error instead of a silent override."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        twice = next((k for i, k in enumerate(keys) if k in keys[:i]), None)
        if twice is not None:
            raise yaml.constructor.ConstructorError(None, None, f"key {twice!r} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Puts into quotes what either YAML would take for something else than a text, so that every reader reads the same."""


_Loader.yaml_implicit_resolvers = {}  # none of YAML 1.1's
for _tag, _pattern, _first in _RESOLVERS:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_pattern})$"), _first)


def _integer(loader: _Loader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node))
    return int(text, 16) if text.startswith("0x") else int(text)


_Loader.add_constructor("tag:yaml.org,2002:int", _integer)


def parse_yaml(text: str, where: str) -> Any:
    """The one document in `text`; ConfigError `where: line n: not valid YAML: ...` for what is none."""
    try:
        return yaml.load(text, Loader=_Loader)  # a subclass of SafeLoader
    except RecursionError:
        raise ConfigError(f"{where}: not valid YAML: nested too deep") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(f"{where}: {line}not valid YAML: {problem}") from None
    except (ValueError, TypeError, LookupError, AttributeError) as error:  # PyYAML's answers to `!!bool x`, `!!timestamp x` and their like
        raise ConfigError(f"{where}: not valid YAML: a value does not fit its tag ({type(error).__name__}: {error})") from None


def dump_yaml(content: Any) -> str:
    """`content` as YAML, keys in their order, that `parse_yaml` reads back to the same."""
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, width=140)
