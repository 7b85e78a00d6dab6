#!/usr/bin/env python
"""Run `megarl convert to-megatron`, alone or under torchrun."""

import sys

from megarl.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["convert", "to-megatron", *sys.argv[1:]]))
