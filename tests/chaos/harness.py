"""Run a tiny job, inject a fault from outside, and measure the result.

The result: when the job ended, which processes it left, and whether a restart reaches the same end. The job's
own heartbeat shows where a rank is. Faults use process ids and files only.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file

from megarl.config import dump_config, load_config
from megarl.config.schema import Config
from megarl.schedule.watchdog import read_beat
from tests.commands import Command, run_command, start_python
from tests.in_flight import find_problems
from tests.tiny_models import make_tiny_model

ROOT = Path(__file__).resolve().parents[2]
# seconds for any wait; only ends a test that has failed, as each fault has its own limit
LIMIT = 600.0
OF_THE_CLOCK = ("time/", "inside/", "throughput/", "memory", "rollout/reused")
STEPS = 4
TEXTS = ("samples.jsonl", "distributions.jsonl", "evaluations.jsonl")
SECRET = "d41c0ffee-tracking-key"  # in every run's environment; must be in none of its files


def ahead_by(steps: int) -> dict[str, Any]:
    """Return the keys of a run whose second rank generates, `steps` ahead of the first rank's training."""
    return {"parallel": {"tp": 1, "rollout_ranks": 1}, "schedule": {"ahead": steps}}


def in_flight_keys(mode: str) -> dict[str, Any]:
    """Return the keys of a run with one trainer and two engines, whose weights change in flight."""
    return {
        "parallel": {"tp": 1, "rollout_ranks": 2},
        "schedule": {"in_flight": mode, "max_staleness": 3},
        "model": {"dtype": "fp32"},
        "rollout": {"continue_partial": True},
        "evaluation": {"every": 2, "samples": 1},
        "checkpoint": {"every": 1, "keep": 0, "rollouts": True},
        "algorithm": {"mismatch": {"weight": "token"}},
    }


# Keys of multi-turn runs, by what the policy interacts with.
ACTING: dict[str, dict[str, Any]] = {
    "": {},
    "tool": {"episode": "tests.chaos.acting:ask"},
    "environment": {"environment": "tests.chaos.acting:Scales", "stop": ["e"]},
}
TURNS = {"turns": {"max_tokens": 40, "seconds": 5, "calls": 1}}


def make_config(folder: Path, name: str, **keys: Any) -> Config:
    """Make a VAPO run at TP=2 in which every phase takes at least some milliseconds."""
    settings: dict[str, Any] = {
        "recipe": "vapo",
        "run_dir": folder / name,
        "steps": STEPS,
        "model": {"path": folder / "model", "dtype": "bf16", "layers": "portable"},
        "parallel": {"tp": 2, "device": "cpu", "timeout": 300},
        "data": {
            "train": [folder / "train.jsonl"],
            "eval": [folder / "eval.jsonl"],
            "template": "raw",
            "max_prompt_tokens": 16,
        },
        "rollout": {"prompts": 6, "group_size": 4, "max_response_tokens": 16, "transfer_bucket": 1},
        "reward": {
            "verifier": "tests.chaos.verifiers:thorough",
            "timeout": 5,
            "overlong": {"soft_punishment": True, "buffer": 4},
        },
        "algorithm": {
            "advantage": "gae",
            "lambda_policy": "length_adaptive",
            "alpha": 0.5,
            "whiten": True,
            "nll_weight": 0.1,
        },
        "critic": {"lr": 1e-2},
        "actor": {"lr": 1e-2, "schedule": "linear", "warmup_steps": 2},
        "update": {"mini_batch": 12, "tokens_per_micro_batch": 64},
        "value_pretraining": {"steps": 2},
        "evaluation": {"every": 1, "samples": 1},
        "checkpoint": {"every": 1, "keep": 3},
        "watchdog": {"period": 1, "silence": 30, "limit": 600},
        "log": {"terminal": "plain", "samples": 2, "report": False},
    }
    for key, value in keys.items():
        settings[key] = {**settings.get(key, {}), **value} if isinstance(value, dict) else value
    return Config.model_validate(settings)


def prepare(folder: Path) -> None:
    """Write the model and the data."""
    make_tiny_model(folder / "model", "qwen3", tied=True)
    rows = [
        json.dumps({"question": f"{a}+{b}=?", "answer": str(a + b)}) + "\n"
        for a in range(5)
        for b in range(5)
    ]
    (folder / "train.jsonl").write_text("".join(rows))
    (folder / "eval.jsonl").write_text("".join(rows[:8]))


@dataclass
class Job:
    """`megarl train`, with its output in a file.

    forked   started as in tests/commands.py, otherwise as a user starts it
    family   every process of the run that was ever observed"""

    config: Config
    forked: bool = False
    family: dict[int, psutil.Process] = field(default_factory=dict)

    def __post_init__(self) -> None:
        run = self.config.run_dir
        path = run.with_suffix(".yaml")
        path.write_text(dump_config(self.config))
        self.log = run.with_suffix(".log")
        self.began = self.log.stat().st_size if self.log.exists() else 0
        for rank in range(3):  # heartbeats of an earlier run would look like this one's
            (run / "heartbeat" / f"rank-{rank:05d}.json").unlink(missing_ok=True)
        environment = {**os.environ, "WANDB_API_KEY": SECRET, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        environment["PYTHONDONTWRITEBYTECODE"] = "1"  # Python 3.11 trusts a .pyc cut off by a full disk
        start = Command if self.forked else start_python
        with open(self.log, "ab") as log:
            self.process = start(
                ["train", str(path)],
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def second(self, *options: str) -> tuple[int, str]:
        """Run the same command while this one exists; return its exit code and output."""
        found = run_command(
            ["train", str(self.config.run_dir.with_suffix(".yaml")), *options],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            timeout=LIMIT,
        )
        return found.returncode, found.stdout + found.stderr

    def beat(self, rank: int) -> dict[str, Any]:
        """Read a rank's heartbeat; empty before the first one."""
        return read_beat(self.config.run_dir / "heartbeat", rank) or {}

    def output(self) -> str:
        """Return the output of this job so far."""
        return self.log.read_bytes()[self.began :].decode(errors="replace")

    def look(self) -> None:
        """Record the processes that exist now."""
        try:
            for process in psutil.Process(self.process.pid).children(recursive=True):
                self.family[process.pid] = process
        except psutil.NoSuchProcess:
            return

    def until(self, what: str, found: Callable[[], bool], pause: float = 0.0005) -> None:
        """Wait for a state of the run by busy polling, as some last only a few milliseconds."""
        end = time.monotonic() + LIMIT
        while not found():
            assert self.process.poll() is None, f"the run ended before {what}: {self.output()[-2000:]}"
            assert time.monotonic() < end, f"no {what} within {LIMIT:.0f} s: {self.output()[-2000:]}"
            time.sleep(pause)

    def until_phase(self, phase: str, *, rank: int = 1, stage: str = "train", step: int = 2) -> None:
        """Wait until `rank` is in `phase` of `step` or of a later step."""

        def there() -> bool:
            beat = self.beat(rank)
            return beat.get("phase") == phase and beat["stage"] == stage and beat["step"] >= step

        if stage != "start":  # imports take long, and a run does not come to other stages at once
            self.until("a sign of life", lambda: bool(self.beat(rank)), pause=0.02)
        self.until(f"phase {phase} of step {step}", there)
        self.look()

    def pid(self, rank: int) -> int:
        return int(self.beat(rank)["pid"])

    def processes(self, module: str, rank: int | None = None) -> list[psutil.Process]:
        """Return the limited processes that run a module, of one rank or of all.

        The module is that of verifiers, or of tools and environments."""
        self.look()
        return [
            process
            for process in self.family.values()
            if module in " ".join(_command(process)) and rank in (None, self._rank_of(process))
        ]

    def _rank_of(self, process: psutil.Process) -> int | None:
        """Return the rank that started a process."""
        with suppress(psutil.Error):
            parent = process.ppid()
            return next((rank for rank in range(3) if self.beat(rank).get("pid") == parent), None)
        return None

    def wait(self) -> int:
        """Wait for the launcher; return its exit code."""
        end = time.monotonic() + LIMIT
        while self.process.poll() is None and time.monotonic() < end:
            self.look()  # reads /proc of all processes
            time.sleep(0.1)
        code = self.process.poll()
        assert code is not None, f"the run still goes on after {LIMIT:.0f} s: {self.output()[-2000:]}"
        return code

    def orphans(self) -> int:
        """Count the processes of the run that still exist 20 s after its launcher ended."""
        end = time.monotonic() + 20.0
        while (left := sum(_lives(process) for process in self.family.values())) and time.monotonic() < end:
            time.sleep(0.1)
        return left

    def destroy(self) -> None:
        """Kill all remaining processes, each by its id."""
        self.look()
        for process in (*self.family.values(), self.process):
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self.process.wait(30)


def _command(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@dataclass(frozen=True)
class Fault:
    """A fault and the promised behaviour of the run.

    inject    causes the fault in a job that has just started; returns a function to undo it, if needed
    code      allowed exit codes of the launcher
    limit     seconds until the job must have ended
    keys      configuration while the fault lasts
    lost      most whole steps that may be lost in addition to the interrupted one
    said      pattern that the job's output must contain
    once      patterns, each of which must match exactly one line of the output
    without   files that lack lines at the end
    ahead     steps of `ahead_by`; None: both ranks do both
    in_flight  mode of `in_flight_keys`; such a run's end depends on time (tests/in_flight.py)
    acting    what the policy interacts with, a key of ACTING
    ungraded  some responses are left out because of the fault, so the end differs
    mounts    the fault needs the right to mount"""

    name: str
    inject: Callable[[Job], Callable[[], None] | None]
    code: tuple[int, ...]
    limit: float
    keys: dict[str, Any] = field(default_factory=dict)
    lost: int = 1
    said: str = ""
    once: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    ahead: int | None = None
    in_flight: str = ""
    acting: str = ""
    ungraded: bool = False
    mounts: bool = False

    @property
    def of_the_run(self) -> dict[str, Any]:
        """Return the keys that the undisturbed run has too."""
        keys: dict[str, Any] = {} if self.ahead is None else ahead_by(self.ahead)
        if self.in_flight:
            keys = in_flight_keys(self.in_flight)
        if self.acting:
            # A call's duration decides which responses share a batch, which may change a response in bf16.
            rollout = {**keys.get("rollout", {}), **ACTING[self.acting], **TURNS}
            keys |= {"rollout": rollout, "model": {"dtype": "fp32"}}
        return keys


@dataclass(frozen=True)
class Row:
    """A row of the table.

    detected: seconds from the fault to the end of the job, None if it continued; lost: whole steps."""

    fault: str
    detected: float | None
    lost: int
    orphans: int
    equal: bool
    remarks: tuple[str, ...]

    @property
    def green(self) -> bool:
        return self.equal and not self.orphans and not self.remarks


def measure(fault: Fault, folder: Path, undisturbed: Path, *, forked: bool = False) -> Row:
    """Inject the fault into a new run, restart that if it failed, and compare it with the undisturbed run.

    forked: of the new run, as in Job. A restarted run is always forked."""
    name = re.sub(r"\W+", "-", fault.name)
    remarks: list[str] = []
    job = Job(make_config(folder, name, **fault.of_the_run, **fault.keys), forked)
    try:
        undo = fault.inject(job)
        began, worked_at = time.monotonic(), _position(job)
        code = job.wait()
        detected = time.monotonic() - began if code else None
        orphans = job.orphans()
        if code not in fault.code:
            remarks.append(f"exit code {code}, not {fault.code}")
        if fault.said and not re.search(fault.said, job.output()):
            remarks.append(f"it does not say {fault.said!r}: {job.output()[-300:]!r}")
        lines = job.output().splitlines()
        for text in fault.once:
            if (count := sum(bool(re.search(text, line)) for line in lines)) != 1:
                remarks.append(f"{count} lines with {text!r}, not one: {job.output()[-600:]!r}")
        if "Traceback" in job.output():
            remarks.append(f"a traceback: {job.output()[-1500:]!r}")
        if detected is not None and detected > fault.limit:
            remarks.append(f"ended after {detected:.0f} s, {fault.limit:.0f} s are promised")
    finally:
        job.destroy()
    if undo is not None:
        undo()
    lost = 0
    if code:
        lost, failure = _restart(make_config(folder, name, **fault.of_the_run), worked_at)
        remarks += failure
        if lost > fault.lost:
            remarks.append(f"{lost} whole steps lost, {fault.lost} are promised")
    told = [
        path.name
        for path in (folder / name).rglob("*")
        if path.is_file() and SECRET.encode() in path.read_bytes()
    ]
    if told or SECRET in job.log.read_text(errors="replace"):
        remarks.append(f"a key from the environment was written: {told or job.log.name}")
    if (folder / name).stat().st_mode & 0o077:
        remarks.append("the run's folder is open to others")
    if fault.in_flight:
        remarks += find_problems(folder / name)[:3]
        equal = not remarks
    elif fault.ungraded:
        equal = not remarks and same_until_ungraded(folder / name, undisturbed)
    else:
        equal = not remarks and same_end(folder / name, undisturbed, fault.without)
    return Row(fault.name, detected, lost, orphans, equal, tuple(remarks))


def _position(job: Job) -> int:
    """Count the steps that were started, including value pretraining."""
    beat = job.beat(0)
    pretraining = job.config.value_pretraining.steps
    return int(beat.get("step", 0)) + (pretraining if beat.get("stage") == "train" else 0)


def _restart(config: Config, worked_at: int) -> tuple[int, list[str]]:
    """Run the same command to the end; return the number of repeated whole steps, and the errors."""
    job = Job(config, forked=True)
    try:
        code = job.wait()
        if code or job.orphans():
            return 0, [f"the restarted run: exit code {code}: {job.output()[-500:]!r}"]
    finally:
        job.destroy()
    found = re.search(r"continues from \S*/(pretraining|step)-(\d+)", job.output())
    stands = (
        0
        if found is None
        else int(found[2]) + (job.config.value_pretraining.steps if found[1] == "step" else 0)
    )
    return max(0, worked_at - stands - 1), []


def same_end(one: Path, other: Path, without: tuple[str, ...] = ()) -> bool:
    """Compare weights of actor and pretrained critic bitwise, and all recorded numbers and texts.

    Files in `without` lack some lines; their other lines are complete and in order."""
    for part in ("hf", "critic_pretrained"):
        ours, theirs = (load_file(run / part / "model.safetensors") for run in (one, other))
        if ours.keys() != theirs.keys() or not all(
            torch.equal(ours[name].view(torch.uint8), theirs[name].view(torch.uint8)) for name in ours
        ):
            return False
    for name in TEXTS:
        lines, all_lines = ((run / name).read_text().splitlines(keepends=True) for run in (one, other))
        left = iter(all_lines)
        in_order = all(line in left for line in lines)
        if not in_order or (len(lines) < len(all_lines)) != (name in without):
            return False
    return records(one) == records(other)


def same_until_ungraded(one: Path, other: Path) -> bool:
    """Check that the first record that differs is of a step that reports ungraded responses."""
    ours, theirs = records(one), records(other)
    first = next((a for a, b in zip(ours, theirs, strict=True) if a != b), {})
    return first.get("reward/ungraded", 0) > 0


def records(run_dir: Path) -> list[dict[str, Any]]:
    """Read metrics.jsonl without values that depend on time, and without events.

    With two steps off-policy, the step in which a version is transferred also depends on time."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    ahead = load_config(run_dir / "config.yaml").schedule.ahead
    left_out = (*OF_THE_CLOCK, "events") + (("transfer/",) if ahead == 2 else ())
    return [{k: v for k, v in json.loads(line).items() if not k.startswith(left_out)} for line in lines]


def undisturbed_run(folder: Path, fault: Fault) -> Path:
    """Return an undisturbed run of the fault's kind, made once. None is compared with weights in flight."""
    if fault.in_flight:
        return folder
    kind = [fault.acting] * bool(fault.acting) + [f"ahead-{fault.ahead}"] * (fault.ahead is not None)
    name = "-".join(["undisturbed", *kind])
    if (folder / name / "hf").exists():
        return folder / name
    job = Job(make_config(folder, name, **fault.of_the_run), forked=True)
    try:
        assert job.wait() == 0, job.output()
    finally:
        job.destroy()
    return job.config.run_dir


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
