#!/usr/bin/env python
"""Convert a GGUF file to a Hugging Face folder; the same as `megarl convert from-gguf`."""

import sys

from megarl.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["convert", "from-gguf", *sys.argv[1:]]))
