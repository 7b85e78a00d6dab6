"""tools/size.py counts what it says."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

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


def test_code_lines() -> None:
    spec = spec_from_file_location("size", ROOT / "tools/size.py")
    assert spec and spec.loader
    size = module_from_spec(spec)
    spec.loader.exec_module(size)
    assert size.code_lines(SOURCE) == 7 and size.code_lines("") == 0


def test_every_package_has_a_line() -> None:
    command = [sys.executable, ROOT / "tools/size.py"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    names = [line.split()[0] for line in said.splitlines()[1:]]
    assert names == ["megarl", "megarl_experiments", "megarl_report", "megarl_tasks", "megarl_verifier"]
