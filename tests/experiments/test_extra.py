"""`megarl ablate` where scipy and statsmodels are not installed."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("missing", ["scipy", "statsmodels"])
def test_the_error_names_the_extra(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None\n"
    code += "from megarl.cli.main import main; sys.exit(main(['ablate', 'vapo']))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("megarl: megarl ablate: ") and missing in done.stderr
    assert "pip install 'megarl[experiments]'" in done.stderr
