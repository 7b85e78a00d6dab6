#!/usr/bin/env python
"""GGUF file to Hugging Face folder; the same as `megarl convert from-gguf`."""

import sys

from megarl.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["convert", "from-gguf", *sys.argv[1:]]))
