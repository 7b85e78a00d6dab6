#!/usr/bin/env python
"""Convert a Hugging Face folder to a Megatron checkpoint, alone or under torchrun.

The same as `megarl convert to-megatron`."""

import sys

from megarl.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["convert", "to-megatron", *sys.argv[1:]]))
