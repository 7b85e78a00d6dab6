"""`python -m megarl`."""

from megarl.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
