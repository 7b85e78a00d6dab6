"""tools/size.py counts code lines correctly."""

from __future__ import annotations

import ast
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = '''"""A module
in two lines."""

# A comment.
NUMBER = """not a docstring,
of two lines"""


def function(a: int) -> int:  # a comment behind code
    """Its docstring."""
    return (
        a

        + 1
    )
'''


PAGE = """
## From a prompt to its gradient

| file | what | type |
|---|---|---|
| [a.py](../megarl/data/a.py) | a row | `Row`, `Prompt` |
| [b.py](../megarl/b.py), the engine's | calls ([c.py](../megarl/c.py)) | |
| [a.py](../megarl/data/a.py) | again `this` | `Prompt` |

## Next
| [d.py](../megarl/d.py) | another table | `Other` |
"""


@pytest.fixture(scope="module")
def size() -> ModuleType:
    spec = spec_from_file_location("size", ROOT / "tools/size.py")
    assert spec and spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_code_lines(size: ModuleType) -> None:
    assert size.code_lines(SOURCE) == 7 and size.code_lines("") == 0


def test_path_of_a_prompt(size: ModuleType) -> None:
    assert size.path_of_a_prompt(PAGE) == ({"data/a.py", "b.py", "c.py"}, {"Row", "Prompt"})


def test_longest(size: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text(SOURCE)
    (tmp_path / "two.py").write_text("class A:\n    def f(self):\n        pass\n")
    assert size.longest(tmp_path, (ast.FunctionDef,)) == (7, "function in one.py")
    assert size.longest(tmp_path, (ast.ClassDef,)) == (3, "A in two.py")


def test_every_package_has_a_line(
    size: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(size, "code_lines", len)  # the real one tokenises all files, in three seconds
    monkeypatch.setattr(sys, "argv", ["size.py"])
    size.main()
    packages, small = capsys.readouterr().out.split("\n\n")
    assert len(small.splitlines()) == 8
    names = [line.split()[0] for line in packages.splitlines()[1:]]
    assert names == ["megarl", "megarl_experiments", "megarl_report", "megarl_tasks", "megarl_verifier"]
