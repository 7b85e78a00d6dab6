"""Run all benchmarks with a target, one at a time, and print one summary of the verdicts.

The exit code is 1 if a result is WRONG or a benchmark fails. A missed target is `not met`, which a busy
machine can cause, and is no failure. The figures are appended to history.jsonl, see history.py.

    make bench                                # all of them, about 20 minutes on an idle core
    make bench BENCH='gae packing'            # some
    make bench BENCH=step ARGS='--vs trl'     # ARGS go to benchmarks/step.py, or real.py
    make bench BENCH=real                     # a pretrained model against TRL; not included in all
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import history
from measure import MARKS

FOLDER = Path(__file__).parent
NAMES = (
    "packing",
    "gae",
    "verifier",
    "programs",
    "rollout",
    "step",
    "logprob_head",
    "reshard",
    "convert",
    "checkpoint",
    "simulate",
)
LONG = ("real", "growth")  # run only by name: minutes each


def run(name: str, arguments: list[str]) -> tuple[list[str], int]:
    """Run one benchmark, print its output as it arrives, and return its verdicts and exit code."""
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
        "--only",
        nargs="*",
        metavar="NAME",
        choices=(*NAMES, *LONG),
        default=NAMES,
        help=", ".join((*NAMES, *LONG)),
    )
    # Arguments after "--" go to the named benchmark.
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    given, more = parser.parse_args(sys.argv[1:split]), sys.argv[split + 1 :]
    names = given.only or NAMES
    if more and len({"step", *LONG} & {*names}) != 1:
        parser.error(
            f"step, real or growth takes more arguments, and one of them must be named: {' '.join(more)}"
        )
    given_to = {name: more if name in ("step", *LONG) else [] for name in names}
    load = os.getloadavg()[0]
    results = {name: run(name, given_to[name]) for name in names}
    print("\n=== summary")
    for name, (verdicts, code) in results.items():
        print("\n".join(verdicts))
        if code:
            print(f"WRONG   | {name}: exit code {code}")
    with history.FILE.open("a", encoding="utf-8") as file:
        for name, (verdicts, _) in results.items():
            found = history.records(name, verdicts, load, " ".join(given_to[name]))
            file.writelines(json.dumps(record) + "\n" for record in found)
    print("\n".join(history.worse(history.read())))
    return int(any(code for _, code in results.values()))


if __name__ == "__main__":
    raise SystemExit(main())
