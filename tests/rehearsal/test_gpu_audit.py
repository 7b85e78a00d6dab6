"""The table docs/evidence/gpu_audit.md is complete and up to date.

Every site in megarl that depends on a GPU has a row. Every row has such sites and a check, and refers to
existing tests and lines."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from importlib import metadata
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from tests.rehearsal import gpu_audit
from tests.rehearsal.gpu_audit import PAGE, ROOT, Site, find, library_line, read_rows

ROWS = read_rows()


def test_every_place_has_a_row_and_every_row_its_places() -> None:
    """Run python -m tests.rehearsal.gpu_audit to list missing sites in gpu_audit.yaml's format."""
    counts = Counter(site for row in ROWS for site in row.sites)
    there = set(gpu_audit.sites())
    assert sorted(there - set(counts)) == [], "places without a row"
    assert sorted(set(counts) - there) == [], "rows of places that are gone"
    assert [site for site, rows in counts.items() if rows > 1] == [], "places in several rows"


def test_every_row_has_a_check() -> None:
    for row in ROWS:
        assert row.what and row.sites, row
        assert row.tests or row.read, f"nothing checks: {row.what}"
        assert not row.read or re.match(r"2026-\d\d-\d\d: ", row.read), row.read
        assert len(row.lines) == len(set(row.lines)) and len(row.tests) == len(set(row.tests)), row


@cache
def defined(file: str) -> frozenset[str]:
    """Return the functions of a test file, methods as Class::function."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return frozenset(
        prefix + node.name
        for prefix, body in [
            ("", tree.body),
            *((f"{c.name}::", c.body) for c in tree.body if isinstance(c, ast.ClassDef)),
        ]
        for node in body
        if isinstance(node, ast.FunctionDef)
    )


def test_the_tests_that_rows_and_defects_name_exist() -> None:
    named = {test for row in ROWS for test in row.tests}
    assert len(named) > 50
    assert all(tests for _, tests in gpu_audit.defects())
    named |= {test for _, tests in gpu_audit.defects() for test in tests}
    for test in sorted(named):
        file, _, name = test.partition("::")
        assert (ROOT / file).is_file() and name in defined(file), test


def test_no_named_test_needs_a_gpu() -> None:
    """Tests in tests/gpu are skipped without a GPU, except test_scene_on_cpu.py."""
    files = {test.partition("::")[0] for row in ROWS for test in row.tests}
    assert {file for file in files if file.startswith("tests/gpu/")} <= {"tests/gpu/test_scene_on_cpu.py"}


def test_the_page_is_what_the_table_says() -> None:
    """Line numbers of megarl are ignored, because every edit changes them."""
    written, made = (
        gpu_audit.without_our_lines(text) for text in (PAGE.read_text(encoding="utf-8"), gpu_audit.page())
    )
    assert written == made, "docs/evidence/gpu_audit.md is old (python -m tests.rehearsal.gpu_audit)"


def test_versions_are_those_of_the_lock() -> None:
    lock = (ROOT / "requirements-gpu.txt").read_text(encoding="utf-8").splitlines()
    for package, version in gpu_audit.versions().items():
        assert f"{package}=={version}" in lock
    assert {library_line(text).package for row in ROWS for text in row.lines} <= set(gpu_audit.versions())


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("def f(x):\n    torch.cuda.synchronize()", ["torch.cuda.synchronize"]),
        ("def f(x):\n    return torch.backends.cuda.is_built()", ["torch.backends.cuda.is_built"]),
        ("def f(x):\n    if x.device.type == 'cuda': x.pin_memory()", ["is cuda", ".pin_memory"]),
        ("def f(x):\n    if x.device.type in ('cuda', 'cpu'): return", ['"cuda"']),
        ("def f(x):\n    return torch.empty(1, device='cuda:1')", ["device=", '"cuda:1"']),
        ("def f(x):\n    return x.to(self.device, non_blocking=True)", [".to(device)", "non_blocking="]),
        ("def f(x):\n    dist.all_reduce(x, group=x)", ["dist.all_reduce"]),
        ("def f(x):\n    os.environ['NCCL_DEBUG'] = '1'", ["NCCL_DEBUG"]),
        (
            "from megatron.core.optimizer import new\ndef f(x: new) -> new:\n    return new(x)",
            ["new"],
        ),
        ("def f(x):\n    from sglang.srt import a as b\n    b.c.d()", ["b.c.d"]),
        ("def f(x):\n    x.untyped_storage().resize_(0)", [".resize_"]),
        ("def f(x):\n    return getattr(x, '_fp8_workspaces', {})", ["._fp8_workspaces"]),
        ("def f(x):\n    return x + torch.zeros(3)", []),
    ],
)
def test_what_is_a_place(text: str, calls: list[str]) -> None:
    assert [site for site, _ in find(text, "x.py")] == [Site("x.py", "f", call) for call in calls]


def test_members_of_the_table_of_internals_are_places() -> None:
    """Attributes in the table of internals count only in the files that it names.

    Megarl's own methods may have the same names."""
    text = "class A:\n    def f(self, chunk):\n        chunk.zero_grad_buffer()"
    assert [site.call for site, _ in find(text, "training/model.py")] == [".zero_grad_buffer"]
    assert find(text, "training/objectives.py") == []


def test_lines_of_libraries() -> None:
    """The table's library lines are at their places, for libraries installed in the locked version.

    `make rehearse` has Transformer Engine and SGLang, `make rehearse-gpu` has all."""
    looked = []
    for package, version in gpu_audit.versions().items():
        try:
            found = metadata.distribution(package)
        except PackageNotFoundError:
            continue
        if found.version.partition("+")[0] == version:
            looked.append(package)
            assert gpu_audit.moved(package, Path(str(found.locate_file("")))) == []
    if not looked:
        pytest.skip("no library is installed as the lock has it")


def test_a_line_that_has_moved_is_found(tmp_path: Path) -> None:
    package, path, number, text = library_line(next(text for row in ROWS for text in row.lines))
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    file.write_text("\n" * number + text)
    assert f"{package} {path}:{number}: {text} (is at [{number + 1}])" in gpu_audit.moved(package, tmp_path)
