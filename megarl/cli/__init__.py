"""The commands: they read arguments, call the packages below, turn errors into one line and an exit code."""

import sys


def run() -> int:
    """Run the command that the shell gave; Ctrl-C while it is imported is one line too."""
    try:
        from megarl.cli.main import main

        return main()
    except KeyboardInterrupt:
        print("megarl: interrupted", file=sys.stderr)
        return 130
