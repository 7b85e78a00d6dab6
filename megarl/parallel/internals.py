"""Check that installed libraries have the internals in internals.yaml, without importing them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from importlib.resources import files
from importlib.util import find_spec, resolve_name
from pathlib import Path
from typing import NamedTuple

from packaging.version import Version

from megarl.config.load import parse_yaml


class Internal(NamedTuple):
    """A function, method, class or attribute of `module`.

    how    replaces: our function takes `parameters` first, in this order; calls: we pass `parameters` by
           name; reads: it exists
    user   our file
    since  first version that must have it"""

    module: str
    name: str
    how: str
    parameters: str
    user: str
    since: str = "0"


class Package(NamedTuple):
    """A package. known: tested versions (docs/evidence/verified.md)."""

    known: str
    internals: list[Internal]


@cache
def read_table() -> dict[str, Package]:
    text = files("megarl.parallel").joinpath("internals.yaml").read_text(encoding="utf-8")
    table = {}
    for name, package in parse_yaml(text, "internals.yaml").items():
        entries = []
        for module, module_entries in package["modules"].items():
            for entry in module_entries:
                how = next(how for how in ("replaces", "calls", "reads") if how in entry)
                names = package["prefix"] + module, entry[how]
                usage = entry.get("with", ""), entry["by"], entry.get("since", "0")
                entries.append(Internal(*names, how, *usage))
        table[name] = Package(package["known"], entries)
    return table


def changed(package: str) -> list[str]:
    """Return a package's differences from the table."""
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        return []
    known, internals = read_table()[package]
    lines = []
    for entry in internals:
        if Version(version) >= Version(entry.since) and (problem := _problem(entry)):
            what = f"{package} {version}: {entry.module}.{entry.name}: {problem}"
            lines.append(f"{what}, which {entry.user} relies on (run with {known})")
    return lines


def _problem(entry: Internal) -> str:
    definition = _find(entry.module, entry.name)
    if definition is None:
        return "is not there"
    parameters = entry.parameters.split()
    if entry.how == "reads" or not parameters:
        return ""
    positional_names, names, accepts_any = _parameters(*definition)
    if entry.how == "replaces" and positional_names[: len(parameters)] != parameters:
        return f"takes {', '.join(positional_names)} and not first {', '.join(parameters)}"
    missing_names = [name for name in parameters if name not in names and not accepts_any]
    return f"has no parameter {missing_names[0]}" if missing_names else ""


def _parameters(module: str, node: ast.AST) -> tuple[list[str], set[str], bool]:
    """Return (positional parameters, all names, accepts any name)."""
    if isinstance(node, ast.ClassDef):
        constructor = _member(module, node, "__init__") or _member(module, node, "__new__")
        if constructor is not None:
            return _parameters(*constructor)
        fields = list(_fields(module, node))
        return fields, set(fields), False
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return [], set(), True
    arguments = node.args
    positional_names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    return (
        positional_names,
        {*positional_names, *(argument.arg for argument in arguments.kwonlyargs)},
        arguments.kwarg is not None,
    )


def _fields(module: str, node: ast.ClassDef) -> Iterator[str]:
    """Yield a dataclass's fields, bases first."""
    for base in _bases(module, node):
        yield from _fields(*base)
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            yield statement.target.id


def _bases(module: str, node: ast.ClassDef) -> Iterator[tuple[str, ast.ClassDef]]:
    for base in node.bases:
        definition = _find(module, base.id) if isinstance(base, ast.Name) else None
        if definition is not None and isinstance(definition[1], ast.ClassDef):
            yield definition[0], definition[1]


def _find(module: str, name: str) -> tuple[str, ast.AST] | None:
    """Return (module, node) that defines `name` or `Class.member`."""
    tree = _tree(module)
    if tree is None:
        return None
    name, _, member = name.partition(".")
    for node in _statements(tree.body):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    definition = _find(_origin(module, node), alias.name)
                    if definition:
                        return _member(*definition, member) if member else definition
        elif isinstance(node, ast.Import):
            if any((alias.asname or alias.name) == name for alias in node.names):
                return module, node
        elif name in _defined_names(node):
            return _member(module, node, member) if member else (module, node)
    return None


def _member(module: str, node: ast.AST, name: str) -> tuple[str, ast.AST] | None:
    """Return (module, node) of a member, also of a base, or set in a method."""
    if not isinstance(node, ast.ClassDef):
        return None
    for statement in node.body:
        if name in _defined_names(statement):
            return module, statement
    for descendant in ast.walk(node):
        if (
            isinstance(descendant, ast.Attribute)
            and descendant.attr == name
            and isinstance(descendant.ctx, ast.Store)
        ):
            return module, descendant
    return next((definition for base in _bases(module, node) if (definition := _member(*base, name))), None)


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements, including those within `if` and `try`. Fallbacks follow the real definition."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            for block_name in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(node, block_name, []))


def _defined_names(node: ast.AST) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _origin(module: str, node: ast.ImportFrom) -> str:
    path = _path(module)
    package = module if path and path.name == "__init__.py" else module.rpartition(".")[0]
    return resolve_name("." * node.level + (node.module or ""), package)


@cache
def _tree(module: str) -> ast.Module | None:
    path = _path(module)
    return None if path is None else ast.parse(path.read_text(encoding="utf-8"))


def _path(module: str) -> Path | None:
    """Find a module's file; an import may need a GPU."""
    package, *submodules = module.split(".")
    spec = find_spec(package) if package else None
    for location in (spec.submodule_search_locations or ()) if spec else ():
        base_path = Path(location).joinpath(*submodules)
        for path in (base_path.with_suffix(".py"), base_path / "__init__.py"):
            if path.is_file():
                return path
    return None
