"""All benchmarks with a target, one after the other, and one table of what was met. Exit code 1 if a result
was WRONG or a benchmark failed; a time that a busy machine missed is `not met` and no failure.

    make bench                                # all of them, about 20 minutes on an idle core
    make bench BENCH='gae packing'            # some
    make bench BENCH=step ARGS='--vs trl'     # ARGS go to benchmarks/step.py
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from measure import MARKS

FOLDER = Path(__file__).parent
NAMES = (
    "packing",
    "gae",
    "verifier",
    "rollout",
    "step",
    "logprob_head",
    "reshard",
    "convert",
    "checkpoint",
    "simulate",
)


def run(name: str, arguments: list[str]) -> tuple[list[str], int]:
    """Runs one benchmark, shows its output as it comes, and gives its verdicts and exit code."""
    print(f"\n=== {name}", flush=True)
    verdicts = []
    command = [sys.executable, str(FOLDER / f"{name}.py"), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            if line.partition("|")[0].strip() in MARKS:
                verdicts.append(line.rstrip())
    return verdicts, process.returncode


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="*", metavar="NAME", choices=NAMES, default=NAMES, help=", ".join(NAMES)
    )
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)  # what follows goes to step.py
    given, for_step = parser.parse_args(sys.argv[1:split]), sys.argv[split + 1 :]
    names = given.only or NAMES
    if for_step and "step" not in names:
        parser.error(f"only step takes more arguments: {' '.join(for_step)}")
    results = {name: run(name, for_step if name == "step" else []) for name in names}
    print("\n=== summary")
    for name, (verdicts, code) in results.items():
        print("\n".join(verdicts))
        if code:
            print(f"WRONG   | {name}: exit code {code}")
    return int(any(code for _, code in results.values()))


if __name__ == "__main__":
    raise SystemExit(main())
