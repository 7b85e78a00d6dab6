"""Measure seconds and tokens/s per phase of a step at the demo's size.

Also measure the share of the step outside generation and Megatron's own forward, backward and optimizer.
`--vs trl` alternates rollouts with TRL's GRPOTrainer and prints median and quartiles of the ratios.
`--vs vapo` compares SAO, which has no pass for old log-probs, with VAPO, both on 256 single responses.

    make bench BENCH=step                     # megarl alone, VAPO
    make bench BENCH=step ARGS='--vs vapo'    # SAO and VAPO
    make bench BENCH=step ARGS='--vs trl'     # 256 responses, 4 updates, no dynamic sampling; TRL by make trl
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from measure import Verdicts, cpu_seconds, machine

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "runs" / "bench"
LIMIT = 900  # seconds that one part may take


def call(*command: str | Path, env: dict[str, str] | None = None, limit: float = LIMIT) -> str:
    """Run a command from the repository's root and return its output.

    If it fails, exit with the end of the output."""
    done = subprocess.run(
        [str(c) for c in command],
        cwd=ROOT,
        env=os.environ | (env or {}),
        capture_output=True,
        text=True,
        timeout=limit,
    )
    if done.returncode:
        raise SystemExit(
            f"{' '.join(map(str, command))}: exit code "
            f"{done.returncode}\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}"
        )
    return done.stdout


def megarl(*arguments: str | Path, limit: float = LIMIT) -> str:
    return call(sys.executable, "-m", "megarl", *arguments, env={"OMP_NUM_THREADS": "1"}, limit=limit)


def warm_model() -> Path:
    """Return the demo's warm-started model, made once: its lengths and accuracy are realistic."""
    warm = FOLDER / "sft" / "hf"
    if not warm.is_dir():
        shutil.rmtree(FOLDER, ignore_errors=True)
        from megarl_tasks.arithmetic import write_demo

        write_demo(FOLDER, 0)
        where = (
            f"data.train=[{FOLDER / 'sft.jsonl'}]",
            f"model.path={FOLDER / 'model'}",
            f"run_dir={FOLDER / 'sft'}",
        )
        megarl("train", "configs/demos/sft.yaml", *where, "log.report=false")
    return warm


def megarl_command(recipe: str, steps: int, overrides: list[str]) -> tuple[list[str | Path], Path]:
    """Return the command of a demo run without evaluation, and its run folder, which is deleted here."""
    run_dir = FOLDER / recipe
    shutil.rmtree(run_dir, ignore_errors=True)
    where = [
        f"model.path={warm_model()}",
        f"data.train=[{FOLDER / 'train.jsonl'}]",
        "data.eval=[]",
        "evaluation.every=0",
        f"run_dir={run_dir}",
        f"steps={steps}",
        "value_pretraining.steps=0",
        "log.report=false",
        "checkpoint.export_hf=false",
    ]
    command = [sys.executable, "-m", "megarl", "train", f"configs/demos/{recipe}.yaml"]
    return [*command, *where, *overrides], run_dir


def run_megarl(recipe: str, steps: int, warmup: int, overrides: list[str]) -> list[dict[str, Any]]:
    """Run the demo and return the records of the timed steps."""
    command, run_dir = megarl_command(recipe, steps + warmup, overrides)
    call(*command, env={"OMP_NUM_THREADS": "1"})
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [record for record in lines if record["stage"] == "train"][warmup:]


def median(records: list[dict[str, Any]], key: str) -> float:
    return statistics.median(record[key] for record in records)


def print_phases(title: str, records: list[dict[str, Any]], verdicts: Verdicts) -> None:
    """Print the medians of each phase over the steps."""
    print(f"\n{title}: medians of {len(records)} steps")
    step = median(records, "time/step")
    responses = median(records, "rollout/tokens")
    for key in [k for k in records[0] if k.startswith("time/") and k != "time/step"]:
        seconds = median(records, key)
        tokens = responses if key == "time/rollout" else median(records, "train/tokens")
        # zero seconds: a phase that did not run, e.g. checkpoints
        speed = f"{tokens / seconds:10,.0f} tokens/s" if seconds else "did not run"
        print(f"  {key[5:]:18s} {seconds:8.4f} s  {100 * seconds / step:5.1f} %  {speed}")
    print(f"  {'step':18s} {step:8.4f} s")
    inside = statistics.median(
        (r["inside/generate"] + r["inside/megatron"]) / r["time/step"] for r in records
    )
    verdicts.at_most(
        "step, share outside generation and Megatron's forward, backward and optimizer",
        100 * (1 - inside),
        15,
        " %",
    )


@dataclass
class Trainer:
    """A trainer whose processes are stopped while another trainer runs.

    progress  a file that grows when a rollout and its updates have finished"""

    name: str
    process: psutil.Popen
    progress: Path
    size: int = 0
    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    @staticmethod
    def start(name: str, progress: Path, command: list[str | Path], threads: int) -> Trainer:
        progress.unlink(missing_ok=True)
        with open(FOLDER / f"{name}.log", "wb") as log:
            environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
            process = psutil.Popen(
                list(map(str, command)),
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=log,
            )
        return Trainer(name, process, progress)

    def processes(self) -> list[psutil.Process]:
        """Return the trainer's process and its descendants, because ranks have separate sessions."""
        return [self.process, *self.process.children(recursive=True)]

    def send(self, number: signal.Signals, processes: list[psutil.Process] | None = None) -> None:
        """Send a signal to the given processes, or to all of the trainer."""
        for process in processes or self.processes():
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def take_turn(self) -> None:
        """Resume the trainer until its next rollout has finished, and time it by this process's clock."""
        known = self.processes()  # listed early: it is slow, and would delay SIGSTOP below
        pids = [process.pid for process in known]
        used, started = cpu_seconds(pids), time.perf_counter()
        self.send(signal.SIGCONT, known)
        while (size := self.progress.stat().st_size if self.progress.exists() else 0) <= self.size:
            if self.process.poll() is not None or time.perf_counter() - started > LIMIT:
                log = (FOLDER / f"{self.name}.log").read_text(errors="replace")
                raise SystemExit(f"{self.name}: no rollout ended\n{log[-3000:]}")
            time.sleep(0.001)
        self.seconds.append(time.perf_counter() - started)
        self.send(signal.SIGSTOP, known)
        self.send(signal.SIGSTOP)  # also processes started in the meantime
        self.cpu.append(cpu_seconds(pids) - used)
        self.size = size


def beside_trl(rounds: int, warmup: int, overrides: list[str]) -> dict[str, list[float]]:
    """Measure seconds per rollout of megarl and of TRL with one and with two threads.

    The trainers alternate rollout by rollout: while one runs, the others are stopped."""
    python = ROOT / ".venv-trl" / "bin" / "python"
    if not python.is_file():
        raise SystemExit("benchmarks/step.py: no .venv-trl (make it with `make trl`)")
    command, run_dir = megarl_command("dapo", rounds + warmup + 1, overrides)
    trainers = []
    try:
        trainers.append(Trainer.start("megarl", run_dir / "metrics.jsonl", command, 1))
        for threads in (1, 2):
            progress = FOLDER / f"trl-{threads}.progress"
            command = [python, "benchmarks/trl_reference.py", warm_model(), FOLDER / "train.jsonl"]
            command += ["--threads", str(threads), "--rollouts", str(rounds + 9), "--progress", progress]
            trainers.append(Trainer.start(f"TRL, {threads} thread(s)", progress, command, threads))
            trainers[-1].send(signal.SIGSTOP)
        for _ in range(rounds + warmup):
            for trainer in trainers:
                trainer.take_turn()
    finally:
        for trainer in trainers:
            trainer.send(signal.SIGKILL)
            trainer.process.wait()
    for trainer in trainers:
        print(f"  {trainer.name:17s} {statistics.median(trainer.cpu[warmup:]):.3f} CPU s per rollout")
    return {trainer.name: trainer.seconds[warmup:] for trainer in trainers}


def compare(seconds: dict[str, list[float]], verdicts: Verdicts) -> None:
    """Print medians, and the ratio of megarl's time to that of the faster TRL in each round."""
    for name, each in seconds.items():
        listed = ", ".join(f"{x:.2f}" for x in each)
        print(f"  {name:17s} {statistics.median(each):.3f} s per rollout (each: {listed})")
    better = min((each for name, each in seconds.items() if name != "megarl"), key=statistics.median)
    ratios = [ours / theirs for ours, theirs in zip(seconds["megarl"], better, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(f"ratios of {len(ratios)} rounds: quartiles {low:.3f}, {middle:.3f}, {high:.3f}")
    verdicts.at_most("step, time / TRL's, median of the rounds' ratios", middle, 0.33, " x")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vs", choices=("trl", "vapo"), help="compare with this in the same run")
    parser.add_argument(
        "--steps", type=int, default=12, help="timed steps, after 3 that are not (default %(default)s)"
    )
    parser.add_argument("--recipe", choices=("dapo", "vapo"), default="vapo")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    given = parser.parse_args()
    print(machine())
    verdicts = Verdicts()
    if given.vs is None:
        records = run_megarl(given.recipe, given.steps, 3, given.overrides)
        print_phases(f"megarl {given.recipe}", records, verdicts)
        return verdicts.exit_code
    if given.vs == "vapo":
        single = ["rollout.prompts=256", "rollout.group_size=1", *given.overrides]
        seconds = {}
        for name, recipe, overrides in (
            ("VAPO", "vapo", []),
            ("SAO", "sao", []),
            ("SAO, one critic update", "sao", ["critic.epochs=1"]),
        ):
            records = run_megarl(recipe, given.steps, 3, [*single, *overrides])
            print_phases(f"megarl {name}", records, verdicts)
            seconds[name] = statistics.median(r["time/step"] - r["time/rollout"] for r in records)
        print("\na step's seconds after its rollout, and their ratio to VAPO's:")
        for name, value in seconds.items():
            print(f"  {name:24s} {value:.3f} s  {value / seconds['VAPO']:.2f}")
        return verdicts.exit_code
    same = ["rollout.dynamic_sampling.enabled=false", "parallel.tp=1", "parallel.dp=2", *given.overrides]
    print("\nseconds per rollout of 256 responses and 4 updates, GRPO with DAPO's loss, DP=2, in turn:")
    compare(beside_trl(given.steps, 3, same), verdicts)
    return verdicts.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
