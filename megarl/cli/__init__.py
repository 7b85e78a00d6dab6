"""The command line."""

import sys


def run() -> int:
    """Run a command. Ctrl-C during the imports prints one line, too."""
    try:
        from megarl.cli.main import main

        return main()
    except KeyboardInterrupt:
        print("megarl: interrupted", file=sys.stderr)
        return 130
