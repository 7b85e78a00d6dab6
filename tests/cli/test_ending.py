"""How a job ends by a signal or failure: the launcher's message and exit code, no leftover process."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from megarl.parallel.launch import HUNG, explain_failures
from tests.cli.processes import Job, environment, megarl, wait_for
from tests.cli.scene import Scene
from tests.commands import Command

ROOT = Path(__file__).resolve().parents[2]
ENDLESS = (
    "steps=100000",
    "rollout.dynamic_sampling.max_batches=1",
    "rollout.dynamic_sampling.at_limit=continue",
    "data.eval=[]",
)


class TestExplainFailures:
    """The launcher reports the rank whose failure ended the others, from all exit codes and messages."""

    RUN = Path("runs/x")

    def word(self, line: str, at: float, peer_lost: bool = False) -> dict[str, object]:
        return {"message": line, "timestamp": at, "line": line, "code": 2, "peer_lost": peer_lost}

    def test_a_killed_rank_is_the_news_whatever_its_peers_say(self) -> None:
        lost = self.word("rank 0: lost another rank", 1.0, peer_lost=True)
        code, line = explain_failures(
            {0: (1, lost), 1: (-signal.SIGTERM, {}), 2: (-signal.SIGKILL, {})}, self.RUN
        )
        assert code == 137
        assert (
            line.startswith("rank 2 was killed by signal 9 (SIGKILL)")
            and "dmesg" in line
            and line.endswith("runs/x")
        )

    def test_a_hang_that_was_reported_is_the_news_though_the_stuck_rank_had_to_be_killed(self) -> None:
        words = {0: (HUNG, self.word("the run hangs: rank 1 does not answer", 1.0)), 1: (-signal.SIGKILL, {})}
        assert explain_failures(words, self.RUN) == (HUNG, "the run hangs: rank 1 does not answer")

    def test_an_error_of_its_own_comes_before_a_lost_peer(self) -> None:
        lost = self.word("rank 0: lost another rank", 1.0, peer_lost=True)
        assert explain_failures({0: (1, lost), 1: (2, self.word("rank 1: broken file", 2.0))}, self.RUN) == (
            2,
            "rank 1: broken file",
        )

    def test_the_earliest_error_is_said(self) -> None:
        words = {0: (2, self.word("late", 5.0)), 1: (2, self.word("early", 4.0)), 2: (-signal.SIGTERM, {})}
        assert explain_failures(words, self.RUN) == (2, "early")

    def test_a_rank_that_nccl_aborts_has_lost_a_peer(self) -> None:
        full = self.word("step 3, phase actor_update needs more memory than there is", 4.0)
        for ended in (2, -signal.SIGTERM):  # the rank exits, or the launcher ends it meanwhile
            ends = {5: (ended, full), 3: (-signal.SIGABRT, None), 4: (-signal.SIGTERM, {})}
            assert explain_failures(ends, self.RUN) == (2, full["line"])
        code, line = explain_failures({3: (-signal.SIGABRT, {}), 4: (-signal.SIGTERM, {})}, self.RUN)
        assert code == 134 and line.startswith("rank 3 was killed by signal 6 (SIGABRT)")

    def test_a_traceback_is_pointed_at(self) -> None:
        code, line = explain_failures({0: (-signal.SIGTERM, {}), 1: (1, {"message": "<NONE>"})}, self.RUN)
        assert (code, line) == (
            1,
            "rank 1 ended with exit code 1: its output is above, what the run wrote is in runs/x",
        )

    def test_a_crash(self) -> None:
        code, line = explain_failures({0: (-signal.SIGSEGV, {})}, self.RUN)
        assert (
            code == 139
            and line.startswith("rank 0 was killed by signal 11 (SIGSEGV)")
            and "dmesg" not in line
        )

    def test_a_rank_that_could_not_take_the_launchers_wish_yet(self) -> None:
        lost = self.word("rank 1: lost another rank", 1.0, peer_lost=True)
        ends = {0: (-signal.SIGUSR1, {}), 1: (1, lost), 2: (-signal.SIGTERM, {})}
        told = (
            "stopped by SIGTERM: rank 0 had nothing to save; the same command continues from what is in "
            "runs/x"
        )
        assert explain_failures(ends, self.RUN, forwarded=signal.SIGTERM) == (75, told)
        # no signal was forwarded, so the launcher did not send it
        code, line = explain_failures(ends, self.RUN)
        assert code == 138 and line.startswith("rank 0 was killed by signal 10 (SIGUSR1)")
        code, line = explain_failures({**ends, 2: (-signal.SIGKILL, {})}, self.RUN, forwarded=signal.SIGTERM)
        assert code == 75 and "stopped by SIGTERM" in line


# As sitecustomize.py of the launcher: its ranks wait where they start, or once they have their signal
# handlers, until the file `go` exists.
SLOW_RANKS = """
import os, signal, time
from pathlib import Path

folder, install = Path({folder!r}), signal.signal

def wait():
    (folder / f"waits-{{os.getpid()}}").touch()
    while not (folder / "go").exists():
        time.sleep(0.05)

def install_and_wait(number, handler):
    before = install(number, handler)
    if number == signal.SIGUSR1 and callable(handler):
        wait()
    return before

def begin():
    if signal.SIGUSR1 not in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
        return  # no rank: the launcher forks these with its signals held back
    if {with_handlers}:
        signal.signal = install_and_wait
    else:
        wait()

os.register_at_fork(after_in_child=begin)
"""
# In a process that was not forked: wait for `go` where torch is imported.
SLOW_IMPORT = """
import sys, time
from pathlib import Path

folder = Path({folder!r})

class AtTorch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            sys.meta_path.remove(self)
            (folder / "waits-alone").touch()
            while not (folder / "go").exists():
                time.sleep(0.05)

sys.meta_path.insert(0, AtTorch())
"""


@pytest.fixture
def job_scene(tmp_path: Path) -> Scene:
    return Scene.make(tmp_path)


@pytest.mark.slow
class TestRealJob:
    def test_a_verifier_that_fails_on_every_answer_ends_the_run(self, job_scene: Scene) -> None:
        """The verifier fails only on a model's responses, so the check before the run passes.

        The second step is the last.
        """
        keys = (
            "reward.verifier=tests.cli.verifiers:only_labelled",
            "guard.unverified_steps=2",
            "reward.max_ungraded=1",
            "steps=4",
            "data.eval=[]",
        )
        done = megarl("train", str(job_scene.config), *keys, "log.terminal=plain", cwd=job_scene.folder)
        assert done.returncode == 2
        assert (
            "megarl: guard.unverified_steps: every response of 2 steps in a row had an error" in done.stderr
        )
        line = (
            "every response has an error; the most frequent: LookupError: no label (2 of at most 2 steps "
            "in a row)"
        )
        assert line in " ".join(done.stdout.split())
        records = [
            json.loads(record)
            for record in (job_scene.folder / "run" / "metrics.jsonl").read_text().splitlines()
        ]
        assert [record["reward/unverified"] for record in records] == [1.0, 1.0] and line in records[1][
            "events"
        ]

    def test_a_killed_rank_ends_the_job(self, job_scene: Scene) -> None:
        with Job(job_scene.config, *ENDLESS) as job:
            victim = job.ranks(2)[1]
            job.wait_for_steps()
            victim.kill()
            code, errors = job.end()
        assert code == 137
        assert errors.splitlines()[-1] == (
            "megarl: rank 1 was killed by signal 9 (SIGKILL), the others were ended; SIGKILL comes "
            "when memory runs out (see dmesg) or a process was stopped for too long; "
            f"what the run wrote is in {job_scene.folder}/run"
        )
        assert "Traceback" not in errors

    @pytest.mark.parametrize("moment", ["starting", "training"])
    def test_control_c(self, job_scene: Scene, moment: str) -> None:
        with Job(job_scene.config, *ENDLESS, forked=moment == "training") as job:
            job.ranks(2)
            if moment == "training":
                job.wait_for_steps()
            code, errors = job.end(signal.SIGINT)
        assert (code, errors) == (130, "megarl: interrupted\n")

    def test_control_c_with_one_rank(self, job_scene: Scene) -> None:
        with Job(job_scene.config, *ENDLESS, "parallel.tp=1") as job:
            job.wait_for_steps()
            code, errors = job.end(signal.SIGINT)
        assert (code, errors) == (130, "megarl: interrupted\n")

    def test_termination(self, job_scene: Scene) -> None:
        with Job(job_scene.config, *ENDLESS) as job:
            job.ranks(2)
            job.wait_for_steps()
            code, errors = job.end(signal.SIGTERM)
        assert (code, errors) == (143, "megarl: ended by SIGTERM, with all ranks\n")

    def test_ranks_are_not_started_anew_after_the_job_was_told_to_end(self, job_scene: Scene) -> None:
        """One of them is suspended, cannot save, and is killed."""
        with Job(job_scene.config, *ENDLESS, "checkpoint.every=1", "parallel.restarts=2") as job:
            victim = job.ranks(2)[1]
            job.wait_for_steps()
            victim.suspend()
            job.process.send_signal(signal.SIGTERM)
            wait_for("the launcher's word", lambda: "to save and leave" in job.errors.read_text())
            victim.kill()
            code, errors = job.end()
        assert code == 137 and "rank 1 was killed by signal 9" in errors and "are restarted" not in errors

    @pytest.mark.parametrize("with_handlers", [False, True])
    def test_told_to_end_while_the_ranks_are_starting(
        self, job_scene: Scene, monkeypatch: pytest.MonkeyPatch, with_handlers: bool
    ) -> None:
        """Either no rank has a handler yet and the forwarded signal ends it, or all record the signal."""
        folder = self.slow_start(job_scene, monkeypatch, SLOW_RANKS, with_handlers=with_handlers)
        with Job(job_scene.config, *ENDLESS, "checkpoint.every=1", forked=False) as job:
            wait_for("the ranks to start", lambda: len(list(folder.glob("waits-*"))) == 2)
            job.process.send_signal(signal.SIGTERM)
            wait_for(
                "the launcher's word",
                lambda: "the ranks have 300 s to save and leave" in job.errors.read_text(),
            )
            (folder / "go").touch()
            code, errors = job.end()
        assert code == 75 and errors.count("\n") == 2 and "killed" not in errors, errors
        if with_handlers:
            assert errors.endswith(
                "megarl: stopped by SIGUSR1: before the first step, nothing is lost; the same command "
                "continues\n"
            )
        else:
            told = (
                r"megarl: stopped by SIGTERM: rank [01] had nothing to save; the same command continues "
                r"from what is in "
            )
            assert re.match(told + re.escape(f"{job_scene.folder}/run"), errors.splitlines()[1])

    def test_told_to_end_while_a_rank_without_our_launcher_is_importing(
        self, job_scene: Scene, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Ranks of torchrun get SIGTERM themselves."""
        folder = self.slow_start(job_scene, monkeypatch, SLOW_IMPORT)
        with Job(job_scene.config, *ENDLESS, "parallel.tp=1", "checkpoint.every=1", forked=False) as job:
            wait_for("the import", (folder / "waits-alone").exists)
            job.process.send_signal(signal.SIGTERM)
            (folder / "go").touch()
            code, errors = job.end()
        assert (code, errors) == (
            75,
            (
                "megarl: stopped by SIGTERM: before the first step, nothing is lost; the same command "
                "continues\n"
            ),
        )

    def slow_start(self, scene: Scene, monkeypatch: pytest.MonkeyPatch, code: str, **values: bool) -> Path:
        folder = scene.folder / "slow"
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(code.format(folder=str(folder), **values))
        monkeypatch.setenv("PYTHONPATH", str(folder))
        return folder

    def test_weights_that_are_not_numbers(self, job_scene: Scene) -> None:
        """Only the rank that reads the slice finds out; all end, and one line names file and tensor."""
        path, name = job_scene.folder / "model" / "model.safetensors", "model.layers.1.mlp.down_proj.weight"
        weights = load_file(path)
        weights[name][3, -1] = float("nan")  # in the slice of the second rank
        save_file(weights, path, metadata={"format": "pt"})
        with Job(job_scene.config) as job:
            job.ranks(2)
            code, errors = job.end()
        said = (
            f"megarl: {path}: {name}: holds numbers that are NaN or infinite (the file is damaged, or what "
            "wrote it had diverged"
        )
        assert (code, errors) == (2, f"{said}: take another)\n")

    def test_a_killed_launcher_takes_its_ranks_with_it(self, job_scene: Scene) -> None:
        with Job(job_scene.config, *ENDLESS) as job:
            job.ranks(2)
            job.wait_for_steps()
            code, _ = job.end(signal.SIGKILL)
        assert code == -signal.SIGKILL

    def test_an_error_in_the_midst_of_a_run_is_said_once(self, job_scene: Scene) -> None:
        with Job(
            job_scene.config,
            "rollout.dynamic_sampling.max_batches=1",
            "rollout.dynamic_sampling.at_limit=stop",
        ) as job:
            job.ranks(2)
            code, errors = job.end()
        assert code == 2
        assert (
            errors.startswith("megarl: rollout.dynamic_sampling.max_batches: after 1 generation batches")
            and errors.count("\n") == 1
        )


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_goes_on_whose_output_nobody_reads(scene: Scene, ranks: int) -> None:
    """The case is `megarl train ... | head -1`."""
    quick = ("steps=4", "data.eval=[]", *ENDLESS[1:3], f"parallel.tp={ranks}", "log.report=false")
    command, pipe = ["train", str(scene.config), *quick], subprocess.PIPE
    with Command(command, cwd=ROOT, env=environment(), stdout=pipe, stderr=pipe) as run:
        assert run.stdout is not None and run.stderr is not None
        assert run.stdout.readline()
        run.stdout.close()
        said = run.stderr.read()
        assert run.wait(300) == 0, said
    assert said.count("nobody reads this output any more; the run continues") == 1, said
    lines = (scene.folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]


def test_ctrl_c_while_the_command_is_imported_is_one_line() -> None:
    code = (
        "import sys\n"
        "class Impatient:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'typer':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Impatient())\n"
        "from megarl.cli import run\n"
        "sys.exit(run())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "megarl: interrupted\n")


@pytest.mark.parametrize("command", ["plan configs/vapo_32b.yaml", "config docs"])
def test_a_command_ends_quietly_whose_output_nobody_reads(command: str) -> None:
    """This includes output that Python buffers until the end, for which Python alone exits with code 120."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "megarl", *command.split()],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        cwd=ROOT,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")
