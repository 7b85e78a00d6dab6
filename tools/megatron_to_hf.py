#!/usr/bin/env python
"""Convert a Megatron checkpoint to a Hugging Face folder, alone or under torchrun.

The same as `megarl convert to-hf`."""

import sys

from megarl.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["convert", "to-hf", *sys.argv[1:]]))
