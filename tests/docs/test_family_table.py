"""The table of docs/families.md matches the existing tests and their results."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.families import ROWS
from tests.family_table import BEGIN, END, PAGE, PROPERTIES, SHOWN, claimed, read_results, table

TESTS = Path(__file__).parents[1]
RESULTS = """<?xml version="1.0" encoding="utf-8"?>
<testsuites name="pytest tests"><testsuite timestamp="2026-11-26T01:02:03">
<testcase classname="tests.a" name="test_one[x]" time="0.1"/><testcase classname="tests.a" name="test_two"/>
<testcase classname="tests.a" name="test_three"><skipped message="needs more"/></testcase>
<testcase classname="tests.a" name="test_four"><failure message="assert 1 == 2"/></testcase>
<testcase classname="tests.a" name="test_five"><error message="setup"/></testcase>
</testsuite></testsuites>"""


def test_it_claims_what_tests_show(pytestconfig: pytest.Config) -> None:
    """A new or removed family or mark requires `make families`."""
    shown = set(pytestconfig.stash[SHOWN])
    assert {family for family, _ in shown} <= set(ROWS) and {what for _, what in shown} <= set(PROPERTIES)
    found = claimed(PAGE.read_text())
    assert shown <= found, "what the table leaves out"
    collected = {name.partition("::")[0] for tests in pytestconfig.stash[SHOWN].values() for name in tests}
    marked = {
        ".".join(file.relative_to(TESTS.parent).with_suffix("").parts)
        for file in TESTS.rglob("test_*.py")
        if "mark.shows(" in file.read_text() and file != Path(__file__)
    }
    if marked - collected or any("::" in argument for argument in pytestconfig.args):
        pytest.skip("not all tests were collected, as `make test` does: what it claims too much is not seen")
    assert found == shown, "what no test shows"


def test_cells_are_counts_of_results(tmp_path: Path) -> None:
    (tmp_path / "test.xml").write_text(RESULTS)
    date, passed = read_results(tmp_path / "test.xml")
    assert date == "2026-11-26"
    assert passed == {
        "tests.a::test_one[x]": True,
        "tests.a::test_two": True,
        "tests.a::test_four": False,
        "tests.a::test_five": False,
    }
    one, two, three, four, five = (f"tests.a::test_{n}" for n in ("one[x]", "two", "three", "four", "five"))
    shown = {
        ("qwen2", "LoRA"): [one, two],
        ("qwen2", "TP"): [two, three],
        ("qwen2", "CP"): [three],
        ("qwen2", "FP8"): [one, four, five],
    }
    written = table(["qwen2", "llama"], shown, {"test": date}, passed)
    head, _, *rows = (
        [cell.strip() for cell in row.strip("|").split("|")] for row in written.splitlines() if row[:1] == "|"
    )
    cells = {(row[0], what): cell for row in rows for what, cell in zip(head[1:], row[1:], strict=True)}
    assert {place: cell for place, cell in cells.items() if cell != "-"} == {
        ("`qwen2`", "LoRA"): "2",
        ("`qwen2`", "TP"): "1 of 2",
        ("`qwen2`", "CP"): "not run",
        ("`qwen2`", "FP8"): "2 failed",
    }
    assert len(cells) == 2 * len(PROPERTIES)
    first = "Results: `make test` of 2026-11-26; there are none of `make test-slow`, `make test-te`, "
    assert written.startswith(f"{first}`make test-sglang`.\n")
    assert claimed(f"above\n{BEGIN}{written}{END}| below | x |\n") == set(shown)
