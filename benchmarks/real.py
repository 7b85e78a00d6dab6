"""Compare a rollout of 128 responses with two updates on SmolLM2-135M-Instruct with TRL's GRPOTrainer.

Prompts, maximum length, updates, precision and cores are the same. Also measure which share of the
processor's measured matrix product rate generation, log-probs and update reach.

    make trl                                     # TRL, once
    make bench BENCH=real                        # fp32, and bf16 where the processor multiplies it faster

The trainers alternate, because both together do not fit 24 GiB in fp32. The best rollout of each counts,
after one that is not timed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

from measure import Verdicts, machine, phase_flops
from step import ROOT, call, megarl

from megarl.parallel.machine import matrix_rates
from megarl.weights.families import Sizes, read_config

FOLDER = ROOT / "runs" / "smollm2"
PROMPTS, GROUP, UPDATES, TOKENS, RANKS = 16, 8, 2, 48, 2
LIMIT = 3600  # time limit of one run of a trainer, seconds
TARGETS = {"fp32": 0.33, "bf16": 0.30}


def ours(dtype: str, rollouts: int, overrides: list[str]) -> list[dict[str, Any]]:
    """Run megarl and return the records of the timed steps."""
    run_dir = FOLDER / "bench"
    shutil.rmtree(run_dir, ignore_errors=True)
    megarl(
        *("train", "configs/demos/smollm2_dapo.yaml"),
        *(f"model.path={FOLDER / 'model'}", f"data.train=[{FOLDER / 'train.jsonl'}]", "data.eval=[]"),
        *(f"run_dir={run_dir}", f"model.dtype={dtype}", f"parallel.dp={RANKS}", f"steps={1 + rollouts}"),
        *(f"rollout.prompts={PROMPTS}", f"rollout.group_size={GROUP}"),
        *(f"rollout.max_response_tokens={TOKENS}", f"update.mini_batch={PROMPTS * GROUP // UPDATES}"),
        *("rollout.dynamic_sampling.enabled=false", "evaluation.every=0", "actor.lr=1e-6"),
        *("actor.schedule=constant", "log.report=false", "checkpoint.export_hf=false", *overrides),
        limit=LIMIT,
    )
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for line in lines if (record := json.loads(line))["stage"] == "train"][1:]


def theirs(python: Path, dtype: str, threads: int, rollouts: int) -> dict[str, Any]:
    """Run TRL and return the JSON object that it prints."""
    said = call(
        *(python, "benchmarks/trl_reference.py", FOLDER / "model", FOLDER / "train.jsonl"),
        *("--prompts", str(PROMPTS), "--group", str(GROUP), "--updates", str(UPDATES), "--dtype", dtype),
        *("--max-tokens", str(TOKENS), "--rollouts", str(rollouts), "--warmup", "1"),
        *("--threads", str(threads)),
        env={"OMP_NUM_THREADS": str(threads)},
        limit=LIMIT,
    )
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return found


def shares(record: dict[str, Any], rate: float) -> dict[str, float]:
    """Return the share of the cores' peak rate that each phase reaches.

    rate: FLOP/s of one core; each rank has one"""
    work = phase_flops(Sizes.from_config(read_config(FOLDER / "model")), record, GROUP)
    return {name: flops / (record[f"time/{name}"] * rate * RANKS) for name, flops in work.items()}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", choices=("fp32", "bf16"), nargs="*", help="default: as above")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each (default: %(default)s)")
    parser.add_argument("--rollouts", type=int, default=3, help="timed, in a turn (default: %(default)s)")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    given = parser.parse_args()
    python = ROOT / ".venv-trl" / "bin" / "python"
    if not python.is_file():
        print("benchmarks/real.py: no .venv-trl: megarl alone (make it with `make trl`)", file=sys.stderr)
    print(machine())
    megarl("demo", "--model", "smollm2", "--data-only")
    rates = matrix_rates(RANKS)
    print("matrix products, GFLOP/s a core:", ", ".join(f"{k} {v:.0f}" for k, v in rates.items()))
    quick = ["fp32"] + (["bf16"] if rates["bf16"] > rates["fp32"] else [])
    verdicts = Verdicts()
    for dtype in given.dtype or quick:
        print(f"\n{dtype}: {PROMPTS} x {GROUP} responses of at most {TOKENS} tokens, {UPDATES} updates")
        records: list[dict[str, Any]] = []
        trl: list[dict[str, Any]] = []
        for turn in range(given.rounds):
            records += ours(dtype, given.rollouts, given.overrides)
            if python.is_file():
                trl.append(theirs(python, dtype, 2 - turn % 2, given.rollouts))
        seconds = [record["time/step"] for record in records]
        print(f"  megarl: {min(seconds):.1f} s, each {', '.join(f'{s:.1f}' for s in seconds)}")
        print(f"    response tokens: {statistics.mean(r['rollout/tokens'] for r in records):,.0f} a rollout")
        best = min(records, key=lambda record: record["time/step"])
        for name, share in shares(best, rates[dtype] * 1e9).items():
            print(f"    {name:13s} {best[f'time/{name}']:6.1f} s  {share:.0%} of the rate of products")
        for one in trl:
            each = ", ".join(f"{s:.1f}" for s in one["seconds_per_rollout"])
            tokens = statistics.mean(one["response_tokens_per_rollout"])
            name = f"TRL {one['versions']['trl']}, {one['threads']} thread(s)"
            print(f"  {name}: each {each} s; {tokens:,.0f} tokens")
        if trl:
            ratio = min(seconds) / min(s for one in trl for s in one["seconds_per_rollout"])
            verdicts.at_most(f"real, {dtype}, time / TRL's", ratio, TARGETS[dtype], " x")
    return verdicts.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
