"""The command line: read arguments, call other packages, turn errors into a line and an exit code."""

import sys


def run() -> int:
    """Run the command of the shell. Ctrl-C during imports prints one line, too."""
    try:
        from megarl.cli.main import main

        return main()
    except KeyboardInterrupt:
        print("megarl: interrupted", file=sys.stderr)
        return 130
