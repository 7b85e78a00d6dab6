"""How a job ends that somebody or something ends: the launcher's line and exit code, and no process left behind."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from megarl.parallel.launch import HUNG, verdict
from tests.cli.processes import Job, megarl
from tests.cli.scene import Scene

ENDLESS = ("steps=100000", "rollout.dynamic_sampling.max_batches=1", "rollout.dynamic_sampling.at_limit=continue", "data.eval=[]")


class TestVerdict:
    """Which rank's end is the news, from the exit codes of all and the words that they left."""

    RUN = Path("runs/x")

    def word(self, line: str, at: float, peer_lost: bool = False) -> dict[str, object]:
        return {"message": line, "timestamp": at, "line": line, "peer_lost": peer_lost}

    def test_a_killed_rank_is_the_news_whatever_its_peers_say(self) -> None:
        lost = self.word("rank 0: lost another rank", 1.0, peer_lost=True)
        code, line = verdict({0: (1, lost), 1: (-signal.SIGTERM, {}), 2: (-signal.SIGKILL, {})}, self.RUN)
        assert code == 137
        assert line.startswith("rank 2 was killed by signal 9 (SIGKILL)") and "dmesg" in line and line.endswith("runs/x")

    def test_a_hang_that_was_reported_is_the_news_though_the_stuck_rank_had_to_be_killed(self) -> None:
        words = {0: (HUNG, self.word("the run hangs: rank 1 does not answer", 1.0)), 1: (-signal.SIGKILL, {})}
        assert verdict(words, self.RUN) == (HUNG, "the run hangs: rank 1 does not answer")

    def test_an_error_of_its_own_comes_before_a_lost_peer(self) -> None:
        lost = self.word("rank 0: lost another rank", 1.0, peer_lost=True)
        assert verdict({0: (1, lost), 1: (2, self.word("rank 1: broken file", 2.0))}, self.RUN) == (2, "rank 1: broken file")

    def test_the_earliest_error_is_said(self) -> None:
        words = {0: (2, self.word("late", 5.0)), 1: (2, self.word("early", 4.0)), 2: (-signal.SIGTERM, {})}
        assert verdict(words, self.RUN) == (2, "early")

    def test_a_traceback_is_pointed_at(self) -> None:
        code, line = verdict({0: (-signal.SIGTERM, {}), 1: (1, {"message": "<NONE>"})}, self.RUN)
        assert (code, line) == (1, "rank 1 ended with exit code 1: what it said is above, what the run wrote is in runs/x")

    def test_a_crash(self) -> None:
        code, line = verdict({0: (-signal.SIGSEGV, {})}, self.RUN)
        assert code == 139 and line.startswith("rank 0 was killed by signal 11 (SIGSEGV)") and "dmesg" not in line


@pytest.fixture
def job_scene(tmp_path: Path) -> Scene:
    return Scene.make(tmp_path)


@pytest.mark.slow
class TestRealJob:
    def test_a_verifier_that_fails_on_every_answer_ends_the_run(self, job_scene: Scene) -> None:
        """Only on what a model says, so that the check before the run finds nothing: the second step is the last."""
        keys = ("reward.verifier=tests.cli.verifiers:only_labelled", "guard.unverified_steps=2", "steps=4", "data.eval=[]")
        done = megarl("train", str(job_scene.config), *keys, "log.terminal=plain", cwd=job_scene.folder)
        assert done.returncode == 2
        assert "megarl: reward.verifier: it failed on every answer of 2 steps in a row" in done.stderr
        line = "the verifier failed on every answer, most often: LookupError: no label (2 of at most 2 steps in a row)"
        assert line in " ".join(done.stdout.split())
        records = [json.loads(record) for record in (job_scene.folder / "run" / "metrics.jsonl").read_text().splitlines()]
        assert [record["reward/unverified"] for record in records] == [1.0, 1.0] and line in records[1]["events"]

    def test_a_killed_rank_ends_the_job(self, job_scene: Scene) -> None:
        with Job(job_scene.config, *ENDLESS) as job:
            victim = job.ranks(2)[1]
            job.wait_for_steps()
            victim.kill()
            code, errors = job.end()
        assert code == 137
        assert errors.splitlines()[-1] == (
            "megarl: rank 1 was killed by signal 9 (SIGKILL), the others were ended; the kernel does that when memory runs out: see dmesg; "
            f"what the run wrote is in {job_scene.folder}/run"
        )
        assert "Traceback" not in errors

    @pytest.mark.parametrize("moment", ["starting", "training"])
    def test_control_c(self, job_scene: Scene, moment: str) -> None:
        with Job(job_scene.config, *ENDLESS) as job:
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

    def test_a_killed_launcher_takes_its_ranks_with_it(self, job_scene: Scene) -> None:
        with Job(job_scene.config, *ENDLESS) as job:
            job.ranks(2)
            job.wait_for_steps()
            code, _ = job.end(signal.SIGKILL)
        assert code == -signal.SIGKILL

    def test_an_error_in_the_midst_of_a_run_is_said_once(self, job_scene: Scene) -> None:
        with Job(job_scene.config, "rollout.dynamic_sampling.max_batches=1", "rollout.dynamic_sampling.at_limit=stop") as job:
            job.ranks(2)
            code, errors = job.end()
        assert code == 2
        assert errors.startswith("megarl: rollout.dynamic_sampling.max_batches: after 1 generation batches") and errors.count("\n") == 1
