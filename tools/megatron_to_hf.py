#!/usr/bin/env python
"""Run `megarl convert to-hf`, alone or under torchrun."""

import sys

from megarl.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["convert", "to-hf", *sys.argv[1:]]))
