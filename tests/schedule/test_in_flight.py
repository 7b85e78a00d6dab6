"""Whole runs with weights in flight: leaving and continuing, and the answer before a transfer."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from megarl.rollout import messages as m
from megarl.schedule import ahead
from megarl.schedule.in_flight import InFlightGeneration, InFlightRank
from megarl.sync.transfer import TransferStats
from tests.chaos.harness import Job, in_flight_keys, make_config, prepare

ALONE: Any = SimpleNamespace(rank=0, world=1, cpu_group=None)


def test_trainers_join_a_transfer_when_the_engines_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine's restart may outlast a collective, so trainers wait for a message before they enter one."""
    waits, log = iter(range(5)), list[str]()

    def receive(seconds: float) -> Any:
        if not log:
            return m.DataReports({})
        if next(waits, None) is not None:
            log.append("wait")
            return None
        return m.TransferReady(3)

    def send(order: m.Order) -> None:
        log.append(type(order).__name__)

    def sync(version: int) -> TransferStats:
        log.append("sync")
        return TransferStats(0, 0, 0, 0.0)

    link = SimpleNamespace(send=send, receive=receive)
    monkeypatch.setattr(ahead, "ControllerLink", lambda runtime: link)
    schedule = SimpleNamespace(lead=1)
    config: Any = SimpleNamespace(schedule=schedule, steps=9, run_dir=Path("nowhere"))
    runtime: Any = SimpleNamespace(store=dist.HashStore(), **vars(ALONE))
    generation = InFlightGeneration(config, runtime, SimpleNamespace(sync=sync))  # type: ignore[arg-type]
    generation.publish(3)
    assert log == ["TransferWeights", *["wait"] * 5, "sync"]


def test_a_batch_older_than_a_lowered_bound_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is trained on: its prompts are in no other batch."""
    monkeypatch.setattr(ahead, "run_on_rank_0", lambda ranks, copy: copy())
    folder = tmp_path / "checkpoint" / "step-000005"
    folder.mkdir(parents=True)
    state = {"stats": {f"staleness/share_{n}": 0.25 for n in (0, 2, 10)}, "errors": {}}
    text = json.dumps({"files": {}, "state": state})
    (folder / "manifest.json").write_text(f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}\n")
    rank: Any = InFlightRank.__new__(InFlightRank)
    rank.runtime = SimpleNamespace(engines=ALONE)
    for bound, events in ((10, 0), (9, 1)):
        schedule = SimpleNamespace(max_staleness=bound)
        rank.config = SimpleNamespace(run_dir=tmp_path / f"run-{bound}", schedule=schedule)
        stored = rank._reuse(folder, 5)
        assert (rank.config.run_dir / "rollouts" / "step-000005" / "manifest.json").exists()
        assert len(stored.events) == events
    assert stored.events[0].startswith("step 5 trains on tokens up to 10 versions old")


@pytest.mark.slow
def test_a_run_leaves_between_checkpoints_and_continues(tmp_path: Path) -> None:
    """The signal comes in step 8 after the engines have stored batch 9. No step had a checkpoint.

    Engines then have removed the batches that nobody needs. The run is saved as of step 7 nevertheless."""
    prepare(tmp_path)
    keys = in_flight_keys("retract") | {"steps": 10, "checkpoint": {"every": 20, "keep": 3}}
    config = make_config(tmp_path, "run", **keys)
    job = Job(config, forked=True)
    try:
        # Step 7 has no evaluation, in which the trainer would hear of later batches.
        job.until_phase("old_logprobs", rank=0, step=8)
        trainer = job.pid(0)
        os.kill(trainer, signal.SIGSTOP)
        later = config.run_dir / "rollouts" / "step-000009" / "manifest.json"
        job.until("a later batch", later.exists)
        time.sleep(1.0)  # the engines now remove batches that nobody needs
        job.process.send_signal(signal.SIGTERM)
        os.kill(trainer, signal.SIGCONT)
        assert job.wait() == 75, job.output()[-2000:]
        assert "step 7 of train is saved in " in job.output() and job.orphans() == 0
    finally:
        job.destroy()
    again = Job(config, forked=True)
    try:
        assert again.wait() == 0, again.output()[-2000:]
        assert "continues from" in again.output()
    finally:
        again.destroy()
    lines = (config.run_dir / "metrics.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if record["stage"] == "train"]
    assert [record["step"] for record in records] == list(range(1, 11))
