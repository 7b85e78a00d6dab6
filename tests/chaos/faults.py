"""The faults that are injected, one per row of the table."""

from __future__ import annotations

import os
import random
import re
import resource
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from megarl.rewards.process import FAILED_STARTS
from megarl.schedule.watchdog import WIDTH
from tests.chaos.harness import STEPS, TEXTS, Fault, Job, kill

KILLED = 137
SOON = 60.0  # seconds; torch's launcher gives the other ranks 30 s to end
TIME_LIMIT = 90.0  # seconds for a whole job; imports alone may take 10 s
LONGEST = 64 * 2**20  # bytes that a rank may write to a file; no file reaches it by itself
VERIFIERS, TOOLS = "megarl.rewards.pool", "megarl.agents.tools"  # part of such a process's command
FORWARD_AND_UPDATE = ("old_logprobs", "values", "critic_update", "actor_update")


def kill_in(
    phase: str, *, stage: str = "train", step: int = 2, rank: int | None = None
) -> Callable[[Job], None]:
    """Kill (-9) a rank, by default a random one, once it is in the phase."""

    def inject(job: Job) -> None:
        victim = random.randrange(2) if rank is None else rank
        job.until_phase(phase, rank=victim, stage=stage, step=step)
        kill(job.pid(victim))

    return inject


def kill_while_judging(job: Job) -> None:
    """Kill (-9) a rank whose verifiers are at work."""
    job.until_phase("rollout")
    at_work(job, VERIFIERS)
    kill(job.pid(1))


def at_work(job: Job, module: str, rank: int | None = None) -> list[psutil.Process]:
    """Return the limited processes of a rank, or of all ranks, once one of them is at work.

    Those of a rank are supervisors, which sleep while a child of theirs works."""
    found: list[psutil.Process] = []

    def busy() -> bool:
        found[:] = job.processes(module, rank)
        with suppress(psutil.NoSuchProcess):
            working = [process for parent in found for process in (parent, *parent.children())]
            return any(process.status() == psutil.STATUS_RUNNING for process in working)
        return False

    job.until(f"{module} at work", busy)
    return found


def kill_in_a_call(rank: int | None = None) -> Callable[[Job], None]:
    """Kill (-9) a rank, by default a random one, in the middle of a tool's call."""

    def inject(job: Job) -> None:
        victim = random.randrange(2) if rank is None else rank
        job.until_phase("rollout", rank=victim)
        at_work(job, TOOLS, victim)
        kill(job.pid(victim))

    return inject


def keep_down(job: Job) -> None:
    """Kill (-9) rank 1's only environment process, and its replacements while they start.

    They are killed until the pool gives up."""
    job.until_phase("rollout")
    killed: set[int] = set()

    def another() -> set[int]:
        return {process.pid for process in job.processes(TOOLS, 1)} - killed

    for _ in range(1 + FAILED_STARTS):
        job.until("an environment's process", lambda: bool(another()))
        for pid in another():
            kill(pid)
            killed.add(pid)


def kill_while_writing(job: Job) -> None:
    """Kill (-9) a rank while a checkpoint is half written."""
    checkpoints = job.config.run_dir / "checkpoints"
    job.until_phase("rollout", step=2, rank=0)
    job.until("a checkpoint being written", lambda: any(checkpoints.glob(".step-*.partial")))
    job.look()
    kill(job.pid(random.randrange(2)))


def kill_launcher(job: Job) -> None:
    job.until_phase("actor_update")
    kill(job.process.pid)


def kill_launcher_ahead(job: Job) -> None:
    job.until_phase("actor_update", rank=0)
    kill(job.process.pid)


def each(module: str, number: signal.Signals) -> Callable[[Job], None]:
    """Send a signal to every process of a kind once one of them is at work."""

    def inject(job: Job) -> None:
        job.until_phase("rollout")
        for process in at_work(job, module):
            process.send_signal(number)

    return inject


TRAINER, ENGINE = 0, 1  # ranks of an off-policy run
AHEAD = (
    *((TRAINER, phase) for phase in ("rollout", *FORWARD_AND_UPDATE, "weight_transfer", "evaluation")),
    *((ENGINE, phase) for phase in ("rollout", "weight_transfer", "evaluation", "wait for orders")),
)


IN_FLIGHT = (
    *((0, phase) for phase in ("rollout", *FORWARD_AND_UPDATE, "weight_transfer", "evaluation")),
    *((rank, phase) for rank in (1, 2) for phase in ("rollout", "weight_transfer", "evaluation")),
)


def tell(number: signal.Signals) -> Callable[[Job], None]:
    """Send a signal to the launcher in the middle of a step."""

    def inject(job: Job) -> None:
        job.until_phase("values", rank=0)
        job.process.send_signal(number)

    return inject


def stop_rank(job: Job) -> None:
    job.until_phase("actor_update")
    os.kill(job.pid(1), signal.SIGSTOP)


def outlast_the_time_limit(job: Job) -> None:
    """Stop both ranks in the middle of a step until the time limit has passed."""
    job.until_phase("values", step=1)
    limit = psutil.Process(job.process.pid).create_time() + TIME_LIMIT
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for rank in range(2):
            os.kill(job.pid(rank), number)
        if number == signal.SIGSTOP:
            time.sleep(max(0.0, limit - time.time()))


def second_start(stage: str, step: int, phase: str) -> Callable[[Job], None]:
    """Run the same command again while both ranks are stopped in a phase."""

    def inject(job: Job) -> None:
        job.until_phase(phase, stage=stage, step=step)
        ranks = [job.pid(rank) for rank in range(2)]
        for rank in ranks:
            os.kill(rank, signal.SIGSTOP)
        try:
            code, said = job.second()
        finally:
            for rank in ranks:
                os.kill(rank, signal.SIGCONT)
        told = f"megarl train runs there since .*pid {job.process.pid}.*sign of life"
        assert code == 2 and re.search(told, said.splitlines()[-1]), said

    return inject


def kill_and_start_at_once(job: Job) -> None:
    """Kill (-9) the launcher and run the same command again at once, while its ranks may still exist."""
    job.until_phase("actor_update")
    kill(job.process.pid)
    code, said = job.second()
    assert code == 0, said


def stop_and_take_over(job: Job) -> None:
    """Stop all processes, let another command take over and finish the run, then wake them."""
    job.until_phase("actor_update")
    processes = [psutil.Process(job.process.pid), *(psutil.Process(job.pid(rank)) for rank in range(2))]
    for process in processes:
        process.suspend()
    code, said = job.second("--wait", "300")
    assert code == 0, said

    def files() -> dict[Path, tuple[int, int]]:
        found = (path for path in job.config.run_dir.rglob("*") if path.is_file())
        return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in found}

    before = files()
    for process in processes:
        if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            process.resume()
    job.process.wait(SOON)
    assert files() == before


def disk_full(job: Job) -> None:
    """Limit the size of one rank's files, like a full disk.

    The rank can do without its timeline, but not without its next checkpoint."""
    job.until_phase("old_logprobs")
    resource.prlimit(job.pid(1), resource.RLIMIT_FSIZE, (4096, 4096))


def no_rollouts(stage: str) -> Callable[[Job], None]:
    """Limit the size of one rank's files to a few heartbeats.

    The first file that fails and that the run needs is the rank's part of a rollout."""

    def inject(job: Job) -> None:
        job.until_phase("rollout", stage=stage, step=2)
        resource.prlimit(job.pid(1), resource.RLIMIT_FSIZE, (4 * WIDTH, 4 * WIDTH))

    return inject


def full(
    *files: str, rank: int = 0, phase: str = "old_logprobs", again: bool = False
) -> Callable[[Job], Callable[[], None]]:
    """Make these files impossible to extend, while all others can grow.

    They are extended with a hole, which takes no space, to the rank's new limit of file size.
    again: they can grow again in the next step."""

    def inject(job: Job) -> Callable[[], None]:
        job.until_phase(phase, rank=rank)
        paths = [found for name in files for found in job.config.run_dir.glob(name)]
        assert len(paths) == len(files), paths
        with standing(job.pid(rank)):
            resource.prlimit(job.pid(rank), resource.RLIMIT_FSIZE, (LONGEST, LONGEST))
            sizes = {path: path.stat().st_size for path in paths}
            for path in paths:
                os.truncate(path, LONGEST)

        def undo() -> None:
            for path, size in sizes.items():
                with path.open("r+b") as file:
                    file.seek(LONGEST)
                    added = file.read()
                    assert path.stat().st_size >= LONGEST, f"{path} was cut"
                    file.truncate(size)
                assert not added, f"{path}: half a line was left: {added!r}"

        if again:
            job.until_phase(phase, rank=rank, step=3)
            with standing(job.pid(rank)):
                undo()
            return lambda: None
        return undo

    return inject


@contextmanager
def standing(pid: int) -> Iterator[None]:
    """Stop a process inside the context."""
    process = psutil.Process(pid)
    process.suspend()
    try:
        while process.status() != psutil.STATUS_STOPPED:
            time.sleep(0.001)
        yield
    finally:
        process.resume()


def nowhere(*files: str) -> Callable[[Job], Callable[[], None]]:
    """Link these files to a device without free space."""

    def inject(job: Job) -> Callable[[], None]:
        run = job.config.run_dir
        run.mkdir(mode=0o700, exist_ok=True)
        paths = [run / name for name in files]
        for path in paths:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            path.symlink_to("/dev/full")

        def undo() -> None:
            for path in paths:
                path.unlink(missing_ok=True)

        return undo

    return inject


def in_the_way(name: str) -> Callable[[Job], Callable[[], None]]:
    """Put a file where the run needs a folder at its end."""

    def inject(job: Job) -> Callable[[], None]:
        job.until_phase("old_logprobs", rank=0)
        path = job.config.run_dir / name
        path.write_text("")
        job.until_phase("actor_update", rank=0, step=STEPS)
        return path.unlink

    return inject


def disk_of_its_own_full(job: Job) -> Callable[[], None]:
    """Mount a file system on the run's folder and fill it, for every rank and file; undo frees it."""
    run = job.config.run_dir
    run.mkdir(mode=0o700)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m,mode=0700", "chaos", str(run)], check=True)
    job.until_phase("old_logprobs")
    ballast = run / "ballast"
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))

    def undo() -> None:
        ballast.unlink()
        copy = run.with_name(f"{run.name}-copy")
        shutil.copytree(run, copy, symlinks=True)
        subprocess.run(["umount", str(run)], check=True)
        run.rmdir()
        copy.rename(run)

    return undo


def may_mount() -> bool:
    """Return whether this process may mount a file system."""
    with tempfile.TemporaryDirectory() as folder:
        if subprocess.run(["mount", "-t", "tmpfs", "chaos", folder], capture_output=True).returncode:
            return False
        subprocess.run(["umount", folder], check=True)
    return True


def no_folder(job: Job) -> Callable[[], None]:
    """Replace the checkpoint folder by a file, as if its disk were removed."""
    job.until_phase("old_logprobs")
    folder = job.config.run_dir / "checkpoints"
    away = folder.with_name("away")
    folder.rename(away)
    folder.write_text("")

    def undo() -> None:
        folder.unlink()
        away.rename(folder)

    return undo


def damage(how: Callable[[Path], None]) -> Callable[[Job], Callable[[], None]]:
    """Kill the run, then damage a file of its newest checkpoint."""

    def inject(job: Job) -> Callable[[], None]:
        job.until_phase("actor_update", step=3)
        kill(job.pid(0))

        def harm() -> None:
            newest = max((job.config.run_dir / "checkpoints").glob("step-*"))
            how(newest / "actor" / "__1_0.distcp")

        return harm

    return inject


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


FAULTS = (
    *(
        Fault(f"kill -9 of a rank: {phase}", kill_in(phase), (KILLED,), SOON)
        for phase in ("rollout", *FORWARD_AND_UPDATE)
    ),
    Fault("kill -9 of a rank: reward", kill_while_judging, (KILLED,), SOON),
    Fault("kill -9 of a rank: weight transfer", kill_in("weight_transfer"), (KILLED,), SOON),
    Fault("kill -9 of a rank: evaluation", kill_in("evaluation", step=2), (KILLED,), SOON),
    Fault(
        "kill -9 of a rank: first rollout",
        kill_in("rollout", stage="value_pretraining", step=1),
        (KILLED,),
        SOON,
    ),
    Fault(
        "kill -9 of a rank: value pretraining",
        kill_in("critic_update", stage="value_pretraining", step=2),
        (KILLED,),
        SOON,
    ),
    Fault("kill -9 of a rank: checkpoint writing", kill_while_writing, (KILLED,), SOON, lost=2),
    Fault("kill -9 of the launcher", kill_launcher, (-signal.SIGKILL,), SOON),
    Fault("kill -9 of all verifiers", each(VERIFIERS, signal.SIGKILL), (0,), SOON),
    Fault("reward time-out: all verifiers stopped", each(VERIFIERS, signal.SIGSTOP), (0,), SOON),
    # The end equals that of an undisturbed run of the same kind.
    *(
        Fault(name, inject, (code,), SOON, acting=acting)
        for name, inject, code, acting in (
            ("kill -9 of a rank: in a tool's call", kill_in_a_call(), KILLED, "tool"),
            ("kill -9 of a rank: in an environment's step", kill_in_a_call(), KILLED, "environment"),
            ("all tools hang (SIGSTOP)", each(TOOLS, signal.SIGSTOP), 0, "tool"),
            ("all environments hang (SIGSTOP)", each(TOOLS, signal.SIGSTOP), 0, "environment"),
            ("kill -9 of all tools", each(TOOLS, signal.SIGKILL), 0, "tool"),
            ("kill -9 of all environments", each(TOOLS, signal.SIGKILL), 0, "environment"),
        )
    ),
    Fault(
        "ahead 1, kill -9 of the engine: in a tool's call",
        kill_in_a_call(ENGINE),
        (KILLED,),
        SOON,
        acting="tool",
        ahead=1,
    ),
    Fault(
        "an environment that stays down",
        keep_down,
        (0,),
        SOON,
        {"reward": {"max_ungraded": 0.9}},
        said=r"of the responses could not be graded and are left out; .* died at their start",
        acting="environment",
        ungraded=True,
    ),
    Fault("SIGTERM", tell(signal.SIGTERM), (75,), SOON, lost=0, said="SIGTERM: the ranks have"),
    Fault("SIGUSR1", tell(signal.SIGUSR1), (75,), SOON, lost=0, said="stopped by SIGUSR1: step"),
    Fault(
        "time limit",
        outlast_the_time_limit,
        (75,),
        SOON,
        {"checkpoint": {"time_limit": TIME_LIMIT, "time_margin": 0}, "watchdog": {"silence": TIME_LIMIT}},
        lost=0,
        said="time limit is near",
    ),
    Fault(
        "a stopped rank (SIGSTOP)",
        stop_rank,
        (124,),
        30.0 + SOON,
        said="the run hangs: rank 1 does not answer",
    ),
    *(
        Fault(f"second start: {stage} {phase}", second_start(stage, step, phase), (0,), SOON)
        for stage, step, phase in (
            ("start", 0, "choose a checkpoint"),
            ("start", 0, "evaluation"),
            ("value_pretraining", 1, "rollout"),
            ("value_pretraining", 1, "critic_update"),
            *(
                ("train", 1, phase)
                for phase in ("rollout", *FORWARD_AND_UPDATE, "weight_transfer", "evaluation")
            ),
            ("train", STEPS, "checkpoint"),
        )
    ),
    Fault(
        "kill -9 of the launcher, next start at once",
        kill_and_start_at_once,
        (-signal.SIGKILL,),
        SOON,
        lost=STEPS,
    ),
    Fault(
        "stopped, taken over, woken",
        stop_and_take_over,
        (2,),
        SOON,
        {"watchdog": {"silence": 15}},
        lost=STEPS,
        said="another command has taken",
    ),
    Fault(
        "disk full during a checkpoint",
        disk_full,
        (2,),
        SOON,
        said=r"megarl: \S*checkpoints/step-\d+: cannot be written: ",
        once=(r"rank-00001.jsonl: cannot be written: File too large; the run continues",),
    ),
    Fault(
        "disk full: the whole folder",
        disk_of_its_own_full,
        (2,),
        SOON,
        said=r"cannot be written: .*No space left on device",
        mounts=True,
    ),
    # The run continues without these files. Each is reported once.
    *(
        Fault(
            f"disk full: {', '.join(files)}",
            full(*files, rank=rank, again=again),
            (0,),
            SOON,
            keys,
            once=tuple(f"{said}: cannot be written: File too large; the run continues" for said in once),
            without=tuple(name for name in files if name in TEXTS),
        )
        for files, rank, again, keys, once in (
            (("timeline/rank-00001.jsonl",), 1, False, {}, ("timeline/rank-00001.jsonl",)),
            (("timeline/rank-00000.jsonl",), 0, True, {}, ("timeline/rank-00000.jsonl",)),
            (("samples.jsonl",), 0, True, {}, ("samples.jsonl",)),
            (("distributions.jsonl",), 0, False, {}, ("distributions.jsonl",)),
            (
                ("samples.jsonl", "events.jsonl"),  # the failure of the first is an event for the second
                0,
                False,
                {},
                ("samples.jsonl", "events.jsonl"),
            ),
            (("tensorboard/*",), 0, False, {"log": {"tensorboard": True}}, ("tensorboard",)),
        )
    ),
    Fault(
        "disk full: data.json, profile, report.html",
        nowhere("data.json", "profile/.train-000002-rank-00001.json.gz", "report.html"),
        (0,),
        SOON,
        {"log": {"profile": 1, "report": True}},
        once=tuple(
            f"{name}: cannot be written: No space left on device"
            for name in ("data.json", "profile", "report.html")
        ),
    ),
    # The run ends without these files.
    *(
        Fault(
            f"disk full: {name}",
            inject,
            (2,),
            2 * SOON,  # some fail at the start, so imports count
            lost=lost,
            once=(rf"{name}\S*: cannot be written[: (]+{why}",),
        )
        for name, inject, why, lost in (
            ("metrics.jsonl", full("metrics.jsonl"), "File too large", 1),
            ("evaluations.jsonl", full("evaluations.jsonl"), "File too large", 1),
            ("config.yaml", nowhere("config.yaml"), "No space left", 0),
            ("settings.json", nowhere("settings.json"), "No space left", 0),
            ("hf", in_the_way(".hf.partial"), "Not a directory", 1),
        )
    ),
    *(
        Fault(
            f"{name}disk full: rollouts",
            no_rollouts(stage),
            (2,),
            SOON,
            lost=1,
            said=r"step-\d+/rank-\d+\.safetensors: cannot be written: ",
            ahead=ahead,
        )
        for name, stage, ahead in (("", "value_pretraining", None), ("ahead 1, ", "train", 1))
    ),
    Fault("checkpoint folder gone", no_folder, (2,), SOON, said="cannot be written"),
    Fault(
        "newest checkpoint: a file truncated",
        damage(lambda path: os.truncate(path, 100)),
        (KILLED,),
        SOON,
        lost=2,
    ),
    Fault("newest checkpoint: a bit flipped", damage(flip_bit), (KILLED,), SOON, lost=2),
    Fault("newest checkpoint: a file deleted", damage(lambda path: path.unlink()), (KILLED,), SOON, lost=2),
    # A checkpoint is complete once the batches in flight are on disk too.
    *(
        Fault(
            f"ahead {ahead}, kill -9 of the {('trainer', 'engine')[rank]}: {phase}",
            kill_in(phase, rank=rank),
            (KILLED,),
            SOON,
            lost=ahead,
            ahead=ahead,
        )
        for ahead in (1, 2)
        for rank, phase in AHEAD
    ),
    *(
        Fault(f"ahead {ahead}, {what}", inject, (code,), SOON, lost=lost, said=said, ahead=ahead)
        for ahead in (1, 2)
        for what, inject, code, lost, said in (
            ("kill -9 while a checkpoint is written", kill_while_writing, KILLED, 2, ""),
            ("SIGTERM", tell(signal.SIGTERM), 75, 0, "SIGTERM: the ranks have"),
            ("kill -9 of the launcher", kill_launcher_ahead, -signal.SIGKILL, ahead, ""),
        )
    ),
    # The engines' weights change while responses run.
    *(
        Fault(
            f"in flight, kill -9 of the {('trainer', 'controller', 'engine')[rank]}: {phase}",
            kill_in(phase, rank=rank),
            (KILLED,),
            SOON,
            in_flight="retract",
        )
        for rank, phase in IN_FLIGHT
    ),
    *(
        Fault(
            f"in flight, {what}", inject, (code,), SOON, lost=lost, said=said, in_flight=mode, acting=acting
        )
        for what, inject, code, lost, said, mode, acting in (
            ("SIGTERM", tell(signal.SIGTERM), 75, 0, "SIGTERM: the ranks have", "retract", ""),
            ("kill -9 while a checkpoint is written", kill_while_writing, KILLED, 2, "", "retract", ""),
            ("kill -9 of the launcher", kill_launcher_ahead, -signal.SIGKILL, 1, "", "retract", ""),
            ("kept cache, kill -9 of an engine", kill_in("rollout", rank=2), KILLED, 1, "", "keep", ""),
            ("kill -9 of an engine: in a tool's call", kill_in_a_call(2), KILLED, 1, "", "retract", "tool"),
        )
    ),
)
