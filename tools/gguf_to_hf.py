#!/usr/bin/env python
"""Run `megarl convert from-gguf`."""

import sys

from megarl.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["convert", "from-gguf", *sys.argv[1:]]))
