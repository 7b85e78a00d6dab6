"""Compare the simulator's step time and idle share (megarl/plan/simulate.py) with real runs.

The settings are two colocated ranks that alternate generation and training, and one rank for each side. Those
two are asynchronous by one step or two, or have weights in flight (`schedule.in_flight: retract`). The model
is untrained and ends responses at random: mean length about 30 tokens, at most 200.

Costs are fitted to two sets of runs:

- Two simultaneous runs of one rank that generates and trains. Two busy cores are slower than one, and
  asynchronous runs keep both busy.
- Every other step of two colocated runs of two ranks, one before and one after the asynchronous runs.

The remaining colocated steps and all steps of the asynchronous runs are predicted. Figures are medians over
steps, because of other work on the machine. If the load differs between runs, the ratio of step times is the
most reliable figure.

    make bench BENCH=simulate
    python benchmarks/simulate.py --steps 30 --ahead 1 2 --in-flight
"""

from __future__ import annotations

import argparse
import shutil
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from measure import Verdicts, machine
from step import FOLDER as BENCH
from step import megarl

from megarl.data.batch import read_batch
from megarl.observe.runs import read_jsonl
from megarl.observe.timeline import is_phase, timeline_ranks
from megarl.plan.in_flight import simulate_split
from megarl.plan.simulate import Costs, RolloutWork, Split, recorded
from megarl.plan.times import Lengths

FOLDER = BENCH / "simulate"
PROMPTS, GROUP, UPDATES, LONGEST = 32, 8, 4, 200
WARMUP = 3
ALONE = ("alone_1", "alone_2")
PHASES = ("distribute", "old_logprobs", "group_advantages", "actor_update")
SEEDS = 8  # simulations, of some steps each
STALENESS, ROOM = 4, 4  # bound with weights in flight; batches of responses that an engine has room for
BOUND, POINTS = 0.15, 5  # relative error; percentage points of the idle share


def train(name: str, steps: int, *overrides: str) -> Path:
    """Train on the demo's sums with a learning rate so small that response lengths do not change."""
    run_dir = FOLDER / name
    shutil.rmtree(run_dir, ignore_errors=True)
    settings = (
        f"model.path={FOLDER / 'model'}",
        f"data.train=[{FOLDER / 'train.jsonl'}]",
        f"run_dir={run_dir}",
        f"steps={steps + WARMUP}",
        f"rollout.prompts={PROMPTS}",
        f"rollout.group_size={GROUP}",
        f"rollout.max_response_tokens={LONGEST}",
        f"rollout.max_batch={PROMPTS * GROUP}",
        f"update.mini_batch={PROMPTS * GROUP // UPDATES}",
        "rollout.dynamic_sampling.enabled=false",
        "actor.lr=1e-9",
        "actor.warmup_steps=0",
        "checkpoint.rollouts=true",
        "checkpoint.export_hf=false",
        "parallel.tp=1",
        "data.eval=[]",
        "evaluation.every=0",
        "log.report=false",
    )
    megarl("train", "configs/demos/dapo.yaml", *settings, *overrides)
    return run_dir


class Measured:
    """A run's timeline.

    steps: the steps after the warm-up; a step lasts until the next one starts on rank 0"""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        files = {rank: run_dir / "timeline" / f"rank-{rank:05d}.jsonl" for rank in timeline_ranks(run_dir)}
        self.records = {rank: read_jsonl(path, is_phase).records for rank, path in files.items()}
        self.begins: dict[int, float] = {}
        for record in self.records[0]:
            if record["step"]:
                self.begins.setdefault(record["step"], record["begin"])
        self.steps = [step for step in sorted(self.begins) if step > WARMUP and step + 1 in self.begins]

    def idle(self, step: int) -> float:
        """Return the share of the ranks' time in a step that they waited."""
        begin, end = self.begins[step], self.begins[step + 1]
        waited = 0.0
        for records in self.records.values():
            for r in records:  # the wait is at a phase's end; count only its part within this step
                waited += max(0.0, min(r["end"], end) - max(r["end"] - r["waited"], begin))
        return waited / (end - begin) / len(self.records)

    def phases(self, step: int, rank: int) -> dict[str, tuple[float, float]]:
        """Return, by phase, its seconds and the seconds of them that the rank waited."""
        found: dict[str, tuple[float, float]] = {}
        for r in self.records[rank]:
            if r["step"] == step:
                seconds, waited = found.get(r["phase"], (0.0, 0.0))
                found[r["phase"]] = seconds + r["end"] - r["begin"], waited + r["waited"]
        return found

    def lengths(self, step: int) -> tuple[list[np.ndarray], float]:
        """Return the response lengths by engine, and the mean prompt length."""
        paths = sorted((self.run_dir / "rollouts" / f"step-{step:06d}").glob("rank-*.safetensors"))
        parts = [read_batch(path) for path in paths]
        prompts = [part.prompt_lengths for part in parts]
        return [part.response_lengths.numpy() for part in parts], float(torch.cat(prompts).float().mean())


def robust(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> np.ndarray:
    """Fit least squares with non-negative coefficients, without the worst fifth of the rows.

    Those are steps in which the machine had other work. The second fit is the result."""
    a, b = np.array(rows, dtype=float), np.array(seconds)
    for _ in range(2):
        kept = list(range(a.shape[1]))
        while True:
            found = np.zeros(a.shape[1])
            found[kept] = np.linalg.lstsq(a[:, kept], b, rcond=None)[0]
            if (found >= 0).all():
                break
            kept.remove(int(found.argmin()))
        off = np.abs(a @ found - b)
        a, b = a[off <= np.quantile(off, 0.8)], b[off <= np.quantile(off, 0.8)]
    return found


def calibrate(steps: Sequence[tuple[Measured, int]]) -> Callable[[int], Costs]:
    """Fit costs to these steps of colocated runs.

    Decoding depends on steps, tokens and cached tokens. A phase depends on a rank's tokens, separately for
    one rank and for two, which wait for each other.

    Returns: a function from the number of trainers to their costs"""
    rows: list[list[float]] = []
    seconds: list[float] = []
    transfers: list[float] = []
    samples: dict[tuple[int, str], list[tuple[float, float]]] = {}  # (ranks, phase) -> (tokens, seconds)
    for run, step in steps:
        drawn, prompt = run.lengths(step)
        ranks = [run.phases(step, rank) for rank in run.records]
        for found, own in zip(ranks, drawn, strict=True):  # all ranks start together
            taken, waited = found["rollout"]
            rows.append([own.max(), own.sum(), (own * (prompt + own / 2)).sum()])
            seconds.append(taken - waited)
        transfers.append(ranks[0]["weight_transfer"][0])
        times = {name: max(one[name][0] for one in ranks) for name in PHASES}
        whole = run.begins[step + 1] - run.begins[step]
        times["other"] = max(0.0, whole - sum(times.values()) - ranks[0]["rollout"][0] - transfers[-1])
        tokens = sum(own.sum() + prompt * len(own) for own in drawn) / len(ranks)
        for name, taken in times.items():
            samples.setdefault((len(ranks), name), []).append((tokens, taken))
    fixed, row, cached = robust(rows, seconds)
    once = f"{1e3 * fixed:.2f} ms a step, {1e6 * row:.1f} us a token, {1e9 * cached:.0f} ns of its cache"
    print(f"  decoding {once}")
    fits = {}
    for (ranks_, name), pairs in samples.items():
        found = robust([(1.0, tokens) for tokens, _ in pairs], [taken for _, taken in pairs])
        fits[ranks_, name] = found
        print(f"  {name}, {ranks_} rank(s): {found[0]:.3f} s, {1e6 * found[1]:.1f} us a token of a rank")

    def costs(trainers: int) -> Costs:
        own = {name: fit for (ranks, name), fit in fits.items() if ranks == trainers}
        return Costs(
            decode=lambda count, tokens: float(fixed + row * count + cached * tokens),
            prefill=0.0,
            at_once=ROOM * PROMPTS * GROUP,
            train=lambda tokens: {n: float(a + b * tokens / trainers) for n, (a, b) in own.items()},
            transfer=statistics.median(transfers),
            # A forward pass over known tokens, like the trainer's old log-probs.
            prefill_token=float(fits[1, "old_logprobs"][1]),
        )

    return costs


def predict(costs: Costs, work: RolloutWork, split: Split) -> tuple[float, float]:
    """Return step time and idle share, medians over SEEDS simulations."""
    courses = [simulate_split(work, costs, split, seed=seed) for seed in range(SEEDS)]
    return statistics.median(c.step for c in courses), statistics.median(c.idle for c in courses)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=int, default=24, help="counted steps of a setting (default %(default)s)"
    )
    parser.add_argument("--ahead", type=int, nargs="*", default=[1], help="default: 1")
    parser.add_argument("--in-flight", action="store_true", help="also with weights in flight")
    parser.add_argument("--keep", action="store_true", help="take the runs that are there")
    given = parser.parse_args()
    print(machine())
    # run, title, overrides, split
    asynchronous = [
        (f"ahead_{ahead}", f"ahead {ahead}", [f"schedule.ahead={ahead}"], Split(1, 1, ahead))
        for ahead in given.ahead
    ]
    if given.in_flight:
        # Room for all groups: else this engine waits until a quarter of its rows is free.
        keys = ["schedule.in_flight=retract", f"schedule.max_staleness={STALENESS}"]
        keys.append(f"rollout.max_batch={ROOM * PROMPTS * GROUP}")
        split = Split(1, 1, max_staleness=STALENESS)
        asynchronous.append(("in_flight", f"in flight, staleness <= {STALENESS}", keys, split))
    if not given.keep:
        shutil.rmtree(FOLDER, ignore_errors=True)
        from megarl_tasks.arithmetic import write_demo

        write_demo(FOLDER, 0)
        train("before", given.steps // 2, "parallel.dp=2")
        with ThreadPoolExecutor() as pool:
            alone = [pool.submit(train, name, given.steps // 2, "parallel.dp=1") for name in ALONE]
            for run in alone:
                run.result()
        for name, _, keys, _ in asynchronous:
            train(name, given.steps, "parallel.dp=1", "parallel.rollout_ranks=1", *keys)
        train("after", given.steps // 2, "parallel.dp=2")
    before, after = (Measured(FOLDER / name) for name in ("before", "after"))
    by_themselves = [(run, step) for run in map(Measured, map(FOLDER.joinpath, ALONE)) for step in run.steps]
    print("\nfitted:")
    in_turn = [(run, step) for run in (before, after) for step in run.steps]
    costs = calibrate([*by_themselves, *in_turn[::2]])
    fitted, draw, where = recorded(before.run_dir, Lengths(1, LONGEST, 7))
    print(f"\nlengths of {where}: mean {fitted.mean:.1f}, prompts {fitted.prompt:.1f} tokens")
    work = RolloutWork(PROMPTS, GROUP, fitted.prompt, draw, streams=False)
    verdicts, figures = Verdicts(), []
    settings = [("2 ranks in turn", in_turn[1::2], Split(2))]
    for folder, title, _, split in asynchronous:
        run = Measured(FOLDER / folder)
        settings.append((f"1 + 1 ranks, {title}", [(run, step) for step in run.steps], split))
    for name, steps, split in settings:
        seconds, idle = predict(costs(split.trainers or split.engines), work, split)
        measured = statistics.median(run.begins[step + 1] - run.begins[step] for run, step in steps)
        waited = statistics.median(run.idle(step) for run, step in steps)
        figures.append((name, measured, seconds))
        print(f"\n{name}: a step takes {measured:.3f} s, of it waiting {waited:.1%}", end="")
        print(f"; simulated {seconds:.3f} s, {idle:.1%}")
        verdicts.at_most(f"simulate, {name}: step time off by", abs(seconds / measured - 1), BOUND)
        verdicts.at_most(f"simulate, {name}: points of idle share off by", 100 * abs(idle - waited), POINTS)
    (_, first, simulated), *others = figures
    for name, measured, seconds in others:
        ratios = measured / first, seconds / simulated
        print(f"\n{name}, step time / in turn: measured {ratios[0]:.2f}, simulated {ratios[1]:.2f}")
        verdicts.at_most(f"simulate, {name}: that ratio off by", abs(ratios[1] / ratios[0] - 1), BOUND)
    return verdicts.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
