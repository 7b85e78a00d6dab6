"""What checkpoints cost at demo scale when one is saved after every step: `configs/demo_vapo.yaml` on two ranks, with none, with one
written beside the next step, and with one that the run waits for.

python benchmarks/checkpoint.py [--steps 20]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from measure import LIMIT, Verdicts, machine

from megarl.data.arithmetic import write_demo

ROOT = Path(__file__).resolve().parents[1]
WAYS = {"none": ["checkpoint.every=0"], "beside": ["checkpoint.every=1"], "waiting": ["checkpoint.every=1", "checkpoint.background=false"]}
TARGET = 0.05  # of the time of a step, when every step is saved
WARM = 2  # first steps, in which torch and the disk's cache warm up


def train(folder: Path, way: str, steps: int) -> list[dict[str, float]]:
    """The records of a run's steps."""
    run = folder / way
    keys = [f"model.path={folder}/model", f"data.train=[{folder}/train.jsonl]", "data.eval=[]", "evaluation.every=0", f"run_dir={run}"]
    keys += [f"steps={steps}", "value_pretraining.steps=0", "log.terminal=quiet", "log.report=false", "checkpoint.export_hf=false"]
    command = [sys.executable, "-m", "megarl", "train", str(ROOT / "configs/demo_vapo.yaml"), *keys, *WAYS[way]]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, timeout=LIMIT)
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][WARM:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="of each run (default: %(default)s)")
    given = parser.parse_args()
    print(machine(), flush=True)
    shares = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_demo(folder, seed=0)
        for way in WAYS:
            steps = train(folder, way, given.steps)
            step = statistics.median(record["time/step"] for record in steps)
            # The run's own time for checkpoints, not the difference of two runs, which on a busy machine says nothing.
            spent = statistics.median(record["time/checkpoint"] for record in steps)
            shares[way] = spent / step
            print(
                f"{way:<8} step {step * 1e3:7.1f} ms, of the run's own time for a checkpoint {spent * 1e3:6.1f} ms ({spent / step:.1%})",
                flush=True,
            )
    verdicts = Verdicts()
    verdicts.at_most("share of a step that a checkpoint written beside it takes, when every step is saved", shares["beside"], TARGET)
    return verdicts.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
