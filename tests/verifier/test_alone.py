"""The verifier without megarl: its folder alone, in a process that has nothing else of the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CODE = r"""
import sys
from megarl_verifier.answer import verify_dapo
from megarl_verifier.integers import integer_answer
from megarl_verifier.symbolic import verify_math

assert verify_math(r"so it is \boxed{\frac{1}{2}}", "0.5") == (True, "1/2")
assert verify_dapo("Answer: 1,234", "1234") == (True, "1234")
assert integer_answer("", r"11 - 2\sqrt{6}").value == 19
loaded = {name.partition(".")[0] for name in sys.modules}
assert not loaded & {"megarl", "torch", "transformers", "pydantic", "pyarrow"}, loaded
print(sys.modules["megarl_verifier"].__file__)
"""


def test_it_needs_neither_megarl_nor_torch(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "megarl_verifier", tmp_path / "megarl_verifier")
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(tmp_path / "megarl_verifier/__init__.py")
