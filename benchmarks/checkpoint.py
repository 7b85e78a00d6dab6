"""Measure the cost of saving a checkpoint after every step at demo scale.

`configs/demos/vapo.yaml` runs on two ranks without checkpoints, with checkpoints written in the background
during the next step, and with checkpoints that the run waits for.

If all cores are busy (here: one rank per core), background writing slows down the step. On a busy machine CPU
seconds are more reliable than the wall clock.

python benchmarks/checkpoint.py [--steps 20] [--rounds 2]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import psutil
from measure import LIMIT, Verdicts, cpu_seconds, machine

from megarl_tasks.arithmetic import write_demo

ROOT = Path(__file__).resolve().parents[1]
WAYS = {
    "none": ["checkpoint.every=0"],
    "beside": ["checkpoint.every=1"],
    "waiting": ["checkpoint.every=1", "checkpoint.background=false"],
}
TARGET = 0.05  # share of a step's time, with a checkpoint every step
WARM = 2  # untimed first steps, in which torch and the disk cache warm up


def train(folder: Path, way: str, steps: int) -> tuple[list[float], list[float], list[float]]:
    """Train and return three lists with one entry a step.

    Returns: wall seconds since the end of the previous step, CPU seconds of the run's child processes in that
    time, and the checkpoint seconds that the run logged"""
    run = folder / way
    keys = [
        f"model.path={folder}/model",
        f"data.train=[{folder}/train.jsonl]",
        "data.eval=[]",
        "evaluation.every=0",
        f"run_dir={run}",
    ]
    keys += [
        f"steps={steps}",
        "value_pretraining.steps=0",
        "log.terminal=quiet",
        "log.report=false",
        "checkpoint.export_hf=false",
    ]
    command = [
        sys.executable,
        "-m",
        "megarl",
        "train",
        str(ROOT / "configs/demos/vapo.yaml"),
        *keys,
        *WAYS[way],
    ]
    records, ends, cpu = run / "metrics.jsonl", [0.0], [0.0]
    shutil.rmtree(run, ignore_errors=True)
    process = psutil.Popen(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"})
    limit = time.monotonic() + LIMIT
    while process.poll() is None:
        if records.exists() and records.read_bytes().count(b"\n") >= len(ends):
            ends.append(time.monotonic())
            cpu.append(cpu_seconds([one.pid for one in process.children(recursive=True)]))
        if time.monotonic() > limit:
            process.kill()
            raise TimeoutError(f"{way}: not done after {LIMIT:.0f} s")
        time.sleep(0.003)
    if process.returncode:
        raise RuntimeError(f"{way}: exit code {process.returncode}")
    own = [json.loads(line)["time/checkpoint"] for line in records.read_text().splitlines()]
    wall, used = ([after - before for before, after in pairwise(of[1:])][WARM:] for of in (ends, cpu))
    return wall, used, own[WARM:]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20, help="of each run (default: %(default)s)")
    parser.add_argument(
        "--rounds", type=int, default=2, help="runs of each way, in turn (default: %(default)s)"
    )
    given = parser.parse_args()
    print(machine(), flush=True)
    steps: dict[str, list[float]] = {way: [] for way in WAYS}
    cpu: dict[str, list[float]] = {way: [] for way in WAYS}
    own: dict[str, list[float]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_demo(folder, seed=0)
        for _ in range(given.rounds):
            for way in WAYS:
                found, used, spent = train(folder, way, given.steps)
                steps[way] += found
                cpu[way] += used
                own[way] += spent
    plain = statistics.median(steps["none"])
    plain_cpu = statistics.mean(cpu["none"])  # mean: CPU time has a resolution of 0.01 s
    for way in WAYS:
        step, spent = statistics.median(steps[way]), statistics.median(own[way])
        waited = f"of which the run waited {spent * 1e3:6.1f} ms ({spent / step:.1%})"
        used = statistics.mean(cpu[way])
        print(
            f"{way:<8} step {step * 1e3:7.1f} ms ({step / plain - 1:+.1%}), {waited}; "
            f"CPU {used * 1e3:7.1f} ms ({used / plain_cpu - 1:+.1%})"
        )
    verdicts = Verdicts()
    beside = statistics.median(steps["beside"])
    verdicts.at_most(
        "what a checkpoint written beside each step adds to it, share of a step without",
        beside / plain - 1,
        TARGET,
    )
    verdicts.at_most(
        "of that, time in which the run waits, share of a step",
        statistics.median(own["beside"]) / beside,
        TARGET,
    )
    return verdicts.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
