"""Measure a step of runs whose longest response has 8 times the mean length, on two ranks.

Synchronous ranks generate and train. One step ahead and with weights in flight, one rank generates and
one trains. An episode cuts each response at a length that its seed decides, so all runs have the same
lengths.

    python benchmarks/in_flight.py --steps 20
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from measure import Verdicts, machine
from step import FOLDER as BENCH
from step import call

if TYPE_CHECKING:
    from megarl.agents.episode import Policy
    from megarl.data.prompts import Prompt

FOLDER = BENCH / "in_flight"
MEAN, RATIO, SPREAD = 24, 8, 1.0  # tokens; longest / mean; deviation of log lengths
WARMUP = 4  # steps
APART = ("parallel.rollout_ranks=1",)
RUNS = {
    "synchronous": ("parallel.dp=2",),
    "ahead 1": (*APART, "schedule.ahead=1"),
    "in flight": (*APART, "schedule.in_flight=retract", "schedule.max_staleness=8"),
}


async def write(prompt: Prompt, policy: Policy) -> None:
    """Sample a response of a log-normal length, past any end-of-sequence token."""
    normal = random.Random(policy.seed).gauss(0, 1)
    median = MEAN / math.exp(SPREAD**2 / 2)
    left = max(1, min(RATIO * MEAN, round(median * math.exp(SPREAD * normal))))
    while left:
        left -= len((await policy.generate(max_tokens=left)).tokens)


def train(name: str, steps: int, *overrides: str) -> list[dict[str, Any]]:
    """Return the records of a run's steps after the warm-up."""
    run_dir = FOLDER / name.replace(" ", "_")
    shutil.rmtree(run_dir, ignore_errors=True)
    settings = (
        "recipe=grpo",
        f"model.path={FOLDER / 'model'}",
        f"data.train=[{FOLDER / 'train.jsonl'}]",
        "data.eval=[]",
        "evaluation.every=0",
        f"run_dir={run_dir}",
        f"steps={steps + WARMUP}",
        "parallel.tp=1",
        "rollout.prompts=32",
        "rollout.group_size=8",
        f"rollout.max_response_tokens={RATIO * MEAN}",
        "rollout.episode=in_flight:write",
        "rollout.turns.max=64",
        "reward.overlong.soft_punishment=false",
        "reward.overlong.filter=false",
        "rollout.dynamic_sampling.enabled=false",
        "update.mini_batch=256",
        "actor.lr=1e-9",
        "actor.warmup_steps=0",
        "guard.parity=none",
        "checkpoint.export_hf=false",
        "log.report=false",
    )
    here = {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{Path(__file__).parent}{os.pathsep}."}
    command = ["-m", "megarl", "train", "configs/demos/dapo.yaml", *settings, *overrides]
    call(sys.executable, *command, env=here)
    records = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [record for record in records if record["stage"] == "train"][WARMUP:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="measured steps of a run (default: 20)")
    steps = parser.parse_args().steps
    from megarl_tasks.arithmetic import write_demo

    if not (FOLDER / "model").is_dir():
        write_demo(FOLDER, 0)
    print(machine())
    seconds: dict[str, float] = {}
    for name, overrides in RUNS.items():
        records = train(name, steps, *overrides)
        # From the time of a batch to that of the next one, which counts waits and transfers.
        seconds[name] = statistics.median(record["time/step"] for record in records)
        lengths = statistics.fmean(record["response/length_mean"] for record in records)
        longest = max(record["response/length_max"] for record in records)
        staleness = statistics.fmean(record.get("staleness/mean", 0.0) for record in records)
        dropped = sum(record.get("rollout/dropped", 0) for record in records)
        waits = statistics.median(record["time/rollout"] for record in records)
        print(
            f"{name:11} {seconds[name]:7.2f} s a step, of which {waits:.2f} s for the batch; "
            f"lengths: mean {lengths:.1f}, longest {longest:.0f}; "
            f"staleness {staleness:.1f}, dropped responses {dropped}",
            flush=True,
        )
    verdicts = Verdicts()
    verdicts.at_most("a step in flight / synchronous", seconds["in flight"] / seconds["synchronous"], 0.6)
    verdicts.at_most("a step in flight / one step ahead", seconds["in flight"] / seconds["ahead 1"], 0.8)
    return verdicts.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
