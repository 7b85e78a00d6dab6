"""`python -m megarl`."""

import os
import sys

# Python looks for modules in the current folder first, which may be anybody's: apex.py there would be run.
if not sys.flags.safe_path and sys.path[0] == os.getcwd():
    del sys.path[0]

from megarl.cli import run

if __name__ == "__main__":
    raise SystemExit(run())
