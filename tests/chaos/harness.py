"""One tiny run, faults that come from outside, and what becomes of it: how soon it ended, what it left,
whether the end is the same.

Where a rank is, is read from the run's own heartbeat; what is done to it is done by its process id, or to its
files.
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
from tests.tiny_models import make_tiny_model

ROOT = Path(__file__).resolve().parents[2]
# seconds for any wait: what is promised is said by the fault, this only ends a test that has failed
LIMIT = 600.0
OF_THE_CLOCK = ("time/", "inside/", "throughput/", "memory", "rollout/reused")
STEPS = 4
TEXTS = ("samples.jsonl", "distributions.jsonl", "evaluations.jsonl")
SECRET = "d41c0ffee-tracking-key"  # in every run's environment, to be found in none of its files


def ahead_by(steps: int) -> dict[str, Any]:
    """The keys of a run whose second rank draws, so many steps ahead of what the first trains on."""
    return {"parallel": {"tp": 1, "rollout_ranks": 1}, "schedule": {"ahead": steps}}


# Keys of a run whose responses act, by what they act on.
ACTING: dict[str, dict[str, Any]] = {
    "": {},
    "tool": {"episode": "tests.chaos.acting:ask"},
    "environment": {"environment": "tests.chaos.acting:Scales", "stop": ["e"]},
}
TURNS = {"turns": {"max_tokens": 40, "seconds": 5, "calls": 1}}


def make_config(folder: Path, name: str, **keys: Any) -> Config:
    """A VAPO run at TP=2 whose every phase takes some milliseconds at least."""
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
    """Model and data."""
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
    """`megarl train`, its output in a file.

    forked   as in tests/commands.py; else as a user starts it
    family   every process of the run that was ever seen"""

    config: Config
    forked: bool = False
    family: dict[int, psutil.Process] = field(default_factory=dict)

    def __post_init__(self) -> None:
        run = self.config.run_dir
        path = run.with_suffix(".yaml")
        path.write_text(dump_config(self.config))
        self.log = run.with_suffix(".log")
        self.began = self.log.stat().st_size if self.log.exists() else 0
        for rank in range(2):  # of the run before, which would look as if it were this one's
            (run / "heartbeat" / f"rank-{rank:05d}.json").unlink(missing_ok=True)
        environment = {**os.environ, "WANDB_API_KEY": SECRET, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        environment["PYTHONDONTWRITEBYTECODE"] = "1"  # what is cut off on a full disk, Python 3.11 believes
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
        """What becomes of the same command, given while this one is there: exit code and output."""
        found = run_command(
            ["train", str(self.config.run_dir.with_suffix(".yaml")), *options],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            timeout=LIMIT,
        )
        return found.returncode, found.stdout + found.stderr

    def beat(self, rank: int) -> dict[str, Any]:
        """Where a rank is, empty before it has said so."""
        return read_beat(self.config.run_dir / "heartbeat", rank) or {}

    def output(self) -> str:
        """What this job has printed so far."""
        return self.log.read_bytes()[self.began :].decode(errors="replace")

    def look(self) -> None:
        """Remembers the processes that are there now."""
        try:
            for process in psutil.Process(self.process.pid).children(recursive=True):
                self.family[process.pid] = process
        except psutil.NoSuchProcess:
            return

    def until(self, what: str, found: Callable[[], bool]) -> None:
        """Waits for a moment of the run, busily: some last a few milliseconds."""
        end = time.monotonic() + LIMIT
        while not found():
            assert self.process.poll() is None, f"the run ended before {what}: {self.output()[-2000:]}"
            assert time.monotonic() < end, f"no {what} within {LIMIT:.0f} s: {self.output()[-2000:]}"
            time.sleep(0.0005)

    def until_phase(self, phase: str, *, rank: int = 1, stage: str = "train", step: int = 2) -> None:
        """Until `rank` is in `phase` of `step`, or of a later one."""

        def there() -> bool:
            beat = self.beat(rank)
            return beat.get("phase") == phase and beat["stage"] == stage and beat["step"] >= step

        self.until(f"phase {phase} of step {step}", there)
        self.look()

    def pid(self, rank: int) -> int:
        return int(self.beat(rank)["pid"])

    def processes(self, module: str, rank: int | None = None) -> list[psutil.Process]:
        """The limited processes of a rank, or of all, that run a module: verifiers, or tools and
        environments."""
        self.look()
        return [
            process
            for process in self.family.values()
            if module in " ".join(_command(process)) and rank in (None, self._rank_of(process))
        ]

    def _rank_of(self, process: psutil.Process) -> int | None:
        """The rank that has started a process."""
        with suppress(psutil.Error):
            parent = process.ppid()
            return next((rank for rank in range(2) if self.beat(rank).get("pid") == parent), None)
        return None

    def wait(self) -> int:
        """The launcher's exit code."""
        end = time.monotonic() + LIMIT
        while self.process.poll() is None and time.monotonic() < end:
            self.look()
            time.sleep(0.02)
        code = self.process.poll()
        assert code is not None, f"the run still goes on after {LIMIT:.0f} s: {self.output()[-2000:]}"
        return code

    def orphans(self) -> int:
        """Processes of the run that are there some seconds after its launcher has gone."""
        end = time.monotonic() + 20.0
        while (left := sum(_lives(process) for process in self.family.values())) and time.monotonic() < end:
            time.sleep(0.1)
        return left

    def destroy(self) -> None:
        """Whatever is left is ended, each by its own id."""
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
    """inject: brings it about in a job that has just started, and gives what undoes it, if anything must;
    code: the launcher's exit codes that are right; keys: while it lasts; lost: most whole steps that may be
    lost besides the interrupted one; said: what the job must say of it; once: what must stand in one line
    each of what it prints; without: files that lack lines at the end; ahead: the run is `ahead_by` so many
    steps, None for both ranks doing both; acting: what its responses act on, see ACTING; ungraded: some of
    them are left out for it, so that the end is another; mounts: whether it needs the right to mount."""

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
    acting: str = ""
    ungraded: bool = False
    mounts: bool = False

    @property
    def of_the_run(self) -> dict[str, Any]:
        """The keys that the undisturbed run has too."""
        keys: dict[str, Any] = {} if self.ahead is None else ahead_by(self.ahead)
        if self.acting:
            # How long a call takes decides which responses run together, which in bf16 may change one.
            keys |= {"rollout": {**ACTING[self.acting], **TURNS}, "model": {"dtype": "fp32"}}
        return keys


@dataclass(frozen=True)
class Row:
    """Of the table. detected: seconds from the fault to the end of the job, None where it went on; lost:
    whole steps."""

    fault: str
    detected: float | None
    lost: int
    orphans: int
    equal: bool
    remarks: tuple[str, ...]

    @property
    def green(self) -> bool:
        return self.equal and not self.orphans and not self.remarks


def measure(fault: Fault, folder: Path, undisturbed: Path) -> Row:
    """Injects the fault into a run of its own, starts that again until it is done, and compares its end with
    the undisturbed run's."""
    name = re.sub(r"\W+", "-", fault.name)
    remarks: list[str] = []
    job = Job(make_config(folder, name, **fault.of_the_run, **fault.keys))
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
    if fault.ungraded:
        equal = not remarks and same_until_ungraded(folder / name, undisturbed)
    else:
        equal = not remarks and same_end(folder / name, undisturbed, fault.without)
    return Row(fault.name, detected, lost, orphans, equal, tuple(remarks))


def _position(job: Job) -> int:
    """Steps that were begun, those of value pretraining counted too."""
    beat = job.beat(0)
    pretraining = job.config.value_pretraining.steps
    return int(beat.get("step", 0)) + (pretraining if beat.get("stage") == "train" else 0)


def _restart(config: Config, worked_at: int) -> tuple[int, list[str]]:
    """The same command again, to the end: (whole steps that had to be done again, what went wrong)."""
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
    """Weights of actor and pretrained critic to the bit, and every number and text that was recorded. Of the
    files `without` some lines are missing; the others are whole and in their order."""
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
    """The first record that differs is of a step that has left out responses, and says how many."""
    ours, theirs = records(one), records(other)
    first = next((a for a, b in zip(ours, theirs, strict=True) if a != b), {})
    return first.get("reward/ungraded", 0) > 0


def records(run_dir: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what the clock says, and without events. Two steps ahead the clock also says
    during which step a version is transferred."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    ahead = load_config(run_dir / "config.yaml").schedule.ahead
    left_out = (*OF_THE_CLOCK, "events") + (("transfer/",) if ahead == 2 else ())
    return [{k: v for k, v in json.loads(line).items() if not k.startswith(left_out)} for line in lines]


def undisturbed_run(folder: Path, fault: Fault) -> Path:
    """The run that nothing happens to, of the fault's kind; made once."""
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
