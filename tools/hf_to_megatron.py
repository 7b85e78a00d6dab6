#!/usr/bin/env python
"""Hugging Face folder to Megatron distributed checkpoint; the same as `megarl convert to-megatron`. Alone or
under torchrun."""

import sys

from megarl.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["convert", "to-megatron", *sys.argv[1:]]))
