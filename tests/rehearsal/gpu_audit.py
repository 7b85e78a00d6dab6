"""The GPU audit: a table of all code in megarl that depends on the device or on a GPU library.

Such a site calls CUDA, NCCL, Transformer Engine, Megatron or SGLang, or compares devices. Sites are found in
the sources. gpu_audit.yaml has, for each site, its assumptions about the libraries and the tests of them.
`python -m tests.rehearsal.gpu_audit` writes docs/evidence/gpu_audit.md from both."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from megarl.parallel.internals import read_table

ROOT = Path(__file__).parents[2]
TABLE, PAGE = Path(__file__).with_suffix(".yaml"), ROOT / "docs" / "evidence" / "gpu_audit.md"
LIBRARIES = ("megatron", "transformer_engine", "sglang", "torch_memory_saver")
# Prefixes of torch's names that are used only with CUDA.
CUDA = re.compile(r"torch\.(cuda|backends\.cuda|version\.cuda|get_device_module|accelerator)\b")
COLLECTIVE = re.compile(r"(dist|distributed)\.[a-z_]+$")
VARIABLE = re.compile(r"(NVTE|NCCL|CUDA|TORCH|TORCHINDUCTOR|SGLANG|PYTORCH|GLOO|SYNC|LD|KINETO)_[A-Z0-9_]+")
# Methods and arguments that behave differently, or asynchronously, on a GPU.
METHODS = {
    *("resize_", "from_dlpack", "_foreach_copy_", "_foreach_zero_", "pin_memory", "is_cuda"),
    *("record_stream", "wait_stream", "record_event", "wait_event"),
    *("_fp8_workspaces", "_dummy_wgrads", "fuse_wgrad_accumulation", "compile_threads"),
    # Attributes of parameters that layers and optimizers of Megatron and Transformer Engine read.
    *("allreduce", "tensor_model_parallel", "partition_dim", "partition_stride"),
}
ARGUMENTS = {"pin_memory", "non_blocking", "device", "out_dtype", "map_location"}
DEVICES = ("cuda", "cpu", "nccl")


class Site(NamedTuple):
    """A site in megarl.

    call: the abbreviated code, in one of these forms:
        name `torch.cuda.synchronize`, `GPTModel`; method `.resize_`; argument `pin_memory=`
        comparison with a device `is cuda`; name of a device or backend `"nccl"`
        environment variable; key of an engine's arguments `tp_size:`"""

    file: str
    function: str
    call: str


class Row(NamedTuple):
    """A row of the table: an assumption that some sites make, and its checks.

    what    the assumption
    lines   lines of libraries, as "package path:line text of that line"
    tests   tests of it that need no GPU, as "path::name"
    read    date and result of a code review, for what no test can check"""

    topic: str
    sites: tuple[Site, ...]
    what: str
    lines: tuple[str, ...]
    tests: tuple[str, ...]
    read: str


class _Finder(ast.NodeVisitor):
    """Collect the sites of one file with their lines."""

    def __init__(self, file: str) -> None:
        self.file, self.found = file, list[tuple[Site, int]]()
        self._scope: list[str] = []
        self._imported: set[str] = set()
        self._members = _members(file)

    def _add(self, node: Any, call: str) -> None:
        self.found.append((Site(self.file, ".".join(self._scope) or "module", call), node.lineno))

    def visit_FunctionDef(self, node: Any) -> None:
        self._scope.append(node.name)
        for part in (*node.decorator_list, *node.args.defaults, *node.args.kw_defaults, *node.body):
            if part is not None:
                self.visit(part)  # annotations are not executed
        self._scope.pop()

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for base in node.bases:
            self.visit(base)
        self._scope.append(node.name)
        for part in node.body:
            self.visit(part)
        self._scope.pop()

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Import(self, node: ast.Import) -> None:
        self._imported |= {
            alias.asname or alias.name.split(".")[0]
            for alias in node.names
            if alias.name.split(".")[0] in LIBRARIES
        }

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if (node.module or "").split(".")[0] in LIBRARIES:
            self._imported |= {alias.asname or alias.name for alias in node.names}

    def visit_Attribute(self, node: ast.Attribute) -> None:
        text = ast.unparse(node)
        is_name = bool(re.fullmatch(r"[\w.]+", text))
        if is_name and (
            CUDA.match(text)
            or COLLECTIVE.match(text)
            or text.split(".")[0] in self._imported
            or text == "ForkingPickler.dumps"
        ):
            self._add(node, text)
            return
        if node.attr in METHODS or node.attr in self._members:
            self._add(node, f".{node.attr}")
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if node.id in self._imported:
            self._add(node, node.id)

    def visit_Compare(self, node: ast.Compare) -> None:
        for side in (node.left, *node.comparators):
            if isinstance(side, ast.Constant) and side.value in DEVICES:
                self._add(node, f"is {side.value}")
            else:
                self.visit(side)

    def visit_Call(self, node: ast.Call) -> None:
        function = node.func
        if isinstance(function, ast.Name) and function.id in ("getattr", "hasattr"):
            name = ast.literal_eval(node.args[1]) if isinstance(node.args[1], ast.Constant) else ""
            if name in METHODS or name in self._members:
                self._add(node, f".{name}")
        if isinstance(function, ast.Attribute):
            if function.attr in ("cpu", "cuda") and not node.args:
                self._add(node, f".{function.attr}()")
            if function.attr == "to" and any("device" in ast.unparse(argument) for argument in node.args):
                self._add(node, ".to(device)")
        self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg in ARGUMENTS:
            self._add(node.value, f"{node.arg}=")
        self.generic_visit(node)

    def visit_Dict(self, node: ast.Dict) -> None:
        for key in node.keys:
            if self._scope[-1:] == ["_arguments"] and isinstance(key, ast.Constant):
                self._add(key, f"{key.value!s}:")
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        key = node.slice
        if self._scope[-1:] == ["_arguments"] and ast.unparse(node.value) == "arguments":
            self._add(node, f"{key.value!s}:" if isinstance(key, ast.Constant) else ast.unparse(node))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str):
            if VARIABLE.fullmatch(node.value):
                self._add(node, node.value)
            elif re.fullmatch(r"(cuda|nccl)(:.*)?", node.value):
                self._add(node, '"' + node.value.rstrip(":") + '"')


@cache
def _members(file: str) -> frozenset[str]:
    """Return the attributes of library objects that a file uses, according to the table of internals."""
    own = Path(file).name
    entries = [entry for package in read_table().values() for entry in package.internals]
    names = {entry.name for entry in entries if own in [Path(user).name for user in entry.user.split(", ")]}
    return frozenset(name.rpartition(".")[2] for name in names if "." in name)


def find(text: str, file: str) -> list[tuple[Site, int]]:
    """Return the sites in the source of a file, with their lines."""
    finder = _Finder(file)
    finder.visit(ast.parse(text))
    return finder.found


@cache
def sites() -> dict[Site, list[int]]:
    """Return all sites of megarl with their lines.

    parallel/cpu_platform.py, which replaces CUDA by the CPU, is left out: it does not run with CUDA."""
    found: dict[Site, list[int]] = {}
    for path in sorted((ROOT / "megarl").rglob("*.py")):
        name = path.relative_to(ROOT / "megarl").as_posix()
        if name != "parallel/cpu_platform.py":
            for site, line in find(path.read_text(encoding="utf-8"), name):
                found.setdefault(site, []).append(line)
    return found


@cache
def read_rows() -> list[Row]:
    """Return the rows of gpu_audit.yaml."""
    rows = []
    for section in yaml.safe_load(TABLE.read_text(encoding="utf-8"))["topics"]:
        for row in section["rows"]:
            places = [
                Site(file, function, call)
                for file, functions in row["sites"].items()
                for function, calls in functions.items()
                for call in calls
            ]
            parts = (row["what"], row.get("lines", []), row.get("tests", []), row.get("read", ""))
            what, lines, tests, read = parts
            rows.append(Row(section["topic"], tuple(places), what, tuple(lines), tuple(tests), read))
    return rows


def defects() -> list[tuple[str, list[str]]]:
    """Return the defects that were found and fixed, each with its tests."""
    found = yaml.safe_load(TABLE.read_text(encoding="utf-8"))["defects"]
    return [(defect["what"], defect["tests"]) for defect in found]


class Line(NamedTuple):
    """A line of a library: package, file within its wheel, line number from 1, and text in that line."""

    package: str
    path: str
    number: int
    text: str


def library_line(written: str) -> Line:
    """Parse one of a row's `lines`."""
    package, place, text = written.split(" ", 2)
    path, _, number = place.rpartition(":")
    return Line(package, path, int(number), text)


def versions() -> dict[str, str]:
    """Return the version of each library that the lines refer to."""
    found: dict[str, str] = yaml.safe_load(TABLE.read_text(encoding="utf-8"))["versions"]
    return found


def moved(package: str, folder: Path) -> list[str]:
    """Return the package's lines that are not where the table has them; its files are in `folder`."""
    wrong = []
    for line in {library_line(text) for row in read_rows() for text in row.lines}:
        if line.package == package:
            path = folder / line.path
            there = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
            if not (line.number <= len(there) and line.text in there[line.number - 1]):
                near = [n for n, text in enumerate(there, 1) if line.text in text]
                wrong.append(f"{package} {line.path}:{line.number}: {line.text} (is at {near})")
    return sorted(wrong)


def page() -> str:
    """Return the text of docs/evidence/gpu_audit.md."""
    head = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    rows, lines = read_rows(), sites()
    tested, alone = sum(bool(row.tests) for row in rows), sum(bool(row.read) for row in rows)
    known = ", ".join(f"{package} {version}" for package, version in versions().items())
    columns = ["| ours | relies on | the library's line | checked by |", "|---|---|---|---|"]
    out = [
        "# GPU audit",
        "",
        "<!-- Written by `python -m tests.rehearsal.gpu_audit` from tests/rehearsal/gpu_audit.yaml. -->",
        "",
        head["introduction"].strip(),
        "",
        f"{len(rows)} rows for {len(lines)} places in {len({site.file for site in lines})} files: {tested} "
        f"are held by tests that need no GPU, {alone} rely on a reading where no test can. The "
        f"libraries are {known}.",
    ]
    for topic in dict.fromkeys(row.topic for row in rows):
        out += ["", f"## {topic}", "", *columns]
        out += [_cells(row, lines) for row in rows if row.topic == topic]
    out += [
        "",
        "## Defects that were found so",
        "",
        "| what was wrong | the test that shows it |",
        "|---|---|",
    ]
    for what, tests in defects():
        out.append(f"| {what} | {'<br>'.join(f'`{test}`' for test in tests)} |")
    return "\n".join(out) + "\n"


def _cells(row: Row, lines: dict[Site, list[int]]) -> str:
    places = []
    for file in dict.fromkeys(site.file for site in row.sites):
        functions = []
        for function in dict.fromkeys(site.function for site in row.sites if site.file == file):
            calls = [site for site in row.sites if (site.file, site.function) == (file, function)]
            numbers = sorted({number for site in calls for number in lines.get(site, [])})
            written = ", ".join(f"`{site.call}`" for site in calls)
            functions.append(f"{function}:{','.join(map(str, numbers))} {written}")
        places.append(f"[{file}](../../megarl/{file}) " + "; ".join(functions))
    quoted = [
        f"{line.package} `{line.path}:{line.number}` `{line.text}`" for line in map(library_line, row.lines)
    ]
    checks = [f"`{test}`" for test in row.tests] + ([row.read] if row.read else [])
    cells = [" · ".join(places), row.what, "<br>".join(quoted), "<br>".join(checks)]
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"


def without_our_lines(text: str) -> str:
    """Return the page without line numbers of megarl, which change with every edit."""
    return re.sub(r"(\w):[\d,]+ `", r"\1: `", text)


def skeleton() -> Iterator[str]:
    """Yield the sites without a row, in the format of gpu_audit.yaml."""
    left = dict.fromkeys(sites())
    for row in read_rows():
        for site in row.sites:
            left.pop(site, None)
    for file in dict.fromkeys(site.file for site in left):
        yield f"{file}:"
        for function in dict.fromkeys(site.function for site in left if site.file == file):
            calls = [site.call for site in left if (site.file, site.function) == (file, function)]
            yield f"  {function}: [{', '.join(calls)}]"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print("\n".join(skeleton()) or f"{PAGE.relative_to(ROOT)}: every place has a row")
