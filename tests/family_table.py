"""The table of docs/families.md: the properties that tests show for each family.

A test has a mark, `shows("LoRA")`, for the family of its parameters, or for others
(`shows("FP8", family="qwen2")`). `make families` collects all tests, reads pytest's results (JUnit XML) and
writes the table; tests/docs/test_family_table.py compares it with the collected tests.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from xml.etree import ElementTree

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "families.md"
BEGIN, END = "<!-- written by `make families` -->\n", "<!-- until here -->\n"
SUITES = ("test", "test-slow", "test-te", "test-sglang")  # targets of the Makefile
PARTS = ("TP", "PP", "DP", "EP", "CP", "VPP")  # of a layout; shown where Hugging Face's numbers are matched
PROPERTIES = (
    *("log-probs", "gradients", "critic", *PARTS, "checkpoints", "converters", "transfer"),
    *("LoRA", "TE layers", "FP8", "SGLang's names", "SGLang", "planner"),
)
Shown = dict[tuple[str, str], list[str]]  # (family, property) -> names of tests
SHOWN = pytest.StashKey[Shown]()


def shown_by(items: Iterable[pytest.Item]) -> Shown:
    """Collect the marks of tests, with the tests' names as in JUnit XML."""
    found: Shown = {}
    for item in items:
        callspec = getattr(item, "callspec", None)
        parameters = callspec.params if callspec else {}
        for mark in item.iter_markers("shows"):
            properties = list(mark.args)
            if {"log-probs", "gradients", "critic"}.intersection(properties):
                sizes = zip(PARTS, parameters["layout"], strict=False)
                properties += [part for part, size in sizes if size > 1]
            families = mark.kwargs.get("family") or parameters["family"]
            for family in [families] if isinstance(families, str) else families:
                for what in properties:
                    found.setdefault((family, what), []).append(junit_name(item.nodeid))
    return found


def junit_name(nodeid: str) -> str:
    file, _, test = nodeid.partition("::")
    return f"{file.removesuffix('.py').replace('/', '.')}::{test}"


def read_results(file: Path) -> tuple[str, dict[str, bool]]:
    """Read a suite's date, and whether each test that ran has passed; skipped tests are omitted."""
    suite = next(ElementTree.parse(file).iter("testsuite"))
    outcomes = {
        f"{case.get('classname')}::{case.get('name')}": not (case.findall("failure") or case.findall("error"))
        for case in suite.iter("testcase")
        if case.find("skipped") is None
    }
    return suite.get("timestamp", "")[:10], outcomes


def table(families: Iterable[str], shown: Shown, dates: Mapping[str, str], passed: Mapping[str, bool]) -> str:
    """Format the table; dates: of the suites' results."""

    def cell(family: str, what: str) -> str:
        tests = shown.get((family, what), [])
        ran = [passed[test] for test in tests if test in passed]
        if not all(ran):
            return f"{ran.count(False)} failed"
        if not ran:
            return "not run" if tests else "-"
        return str(len(ran)) if len(ran) == len(tests) else f"{len(ran)} of {len(tests)}"

    there = ", ".join(f"`make {suite}` of {date}" for suite, date in dates.items())
    missing = ", ".join(f"`make {suite}`" for suite in SUITES if suite not in dates)
    lines = [
        f"Results: {there or 'none'}{f'; there are none of {missing}' if there and missing else ''}.",
        "",
        f"| family | {' | '.join(PROPERTIES)} |",
        "|---" * (1 + len(PROPERTIES)) + "|",
        *(f"| `{f}` | {' | '.join(cell(f, what) for what in PROPERTIES)} |" for f in families),
    ]
    return "\n".join(lines) + "\n"


def claimed(page: str) -> set[tuple[str, str]]:
    """Return the families and properties with tests in the page's table, whether these ran or not."""
    rows = page.partition(BEGIN)[2].partition(END)[0].splitlines()
    rows = [row for row in rows if row.startswith("| ")]
    cells = [[cell.strip(" `") for cell in row.strip("|").split("|")] for row in rows]
    heads = cells[0][1:]
    return {
        (family, what)
        for family, *values in cells[1:]
        for what, value in zip(heads, values, strict=True)
        if value != "-"
    }


class Collector:
    """A pytest plugin that records the properties that tests show."""

    shown: Shown

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.shown = shown_by(session.items)


def main(files: list[str]) -> int:
    """Write the table from the results in `files`, which have the names of the suites."""
    from tests.families import ROWS

    before, begin, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        print(f"{PAGE}: the lines {BEGIN.strip()} and {END.strip()} are missing (add them)", file=sys.stderr)
        return 2
    if foreign := [file for file in files if Path(file).stem not in SUITES]:
        print(f"{foreign[0]}: is named after none of {', '.join(SUITES)} (rename it)", file=sys.stderr)
        return 2
    collector = Collector()
    with redirect_stdout(io.StringIO()) as said:
        code = pytest.main(["--collect-only", "-q", str(Path(__file__).parent)], plugins=[collector])
    if code:
        print(said.getvalue(), file=sys.stderr)
        return int(code)
    dates, passed = {}, dict[str, bool]()
    for file in sorted(map(Path, files), key=lambda file: SUITES.index(file.stem)):
        dates[file.stem], outcomes = read_results(file)
        passed |= outcomes
    written = table(ROWS, collector.shown, dates, passed)
    PAGE.write_text(before + begin + written + end + after, encoding="utf-8")
    print(f"{PAGE}: {len(collector.shown)} cells of {len(ROWS) * len(PROPERTIES)} have tests")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
