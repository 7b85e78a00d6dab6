#!/usr/bin/env python
"""Megatron distributed checkpoint to Hugging Face folder; the same as `megarl convert to-hf`. Alone or under
torchrun."""

import sys

from megarl.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["convert", "to-hf", *sys.argv[1:]]))
