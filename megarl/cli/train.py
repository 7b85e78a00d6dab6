"""`megarl train`: check everything, start the ranks if nobody has, and train on each."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.cli.ranks import passes_on_rank_0, run_rank, start_ranks, starts_ranks
from megarl.config import dump_config, load_config
from megarl.config.schema import Config
from megarl.parallel.signals import StopRequest

if TYPE_CHECKING:
    from megarl.parallel.runtime import Runtime


def train(
    path: Path, overrides: Sequence[str] = (), *, fresh: bool = False, follow: int | None = None
) -> int:
    """Train as the configuration says and return the exit code. Where the layout has several ranks they are
    started, and again after one was killed or hung, as often as `parallel.restarts` says; under torchrun this
    process is one.

    fresh    refuse a run_dir that holds a run
    follow   the process id of a parent whose end is to be this process's end"""
    if follow is not None:
        from megarl.parallel.jobs import follow_parent

        follow_parent(follow)
    config = load_config(path, overrides)
    # From here on, as the imports take seconds. Ranks of ours are asked by SIGUSR1 alone: SIGTERM ends them.
    with _stop_request(config, signal.SIGUSR1, signal.SIGTERM) as stop:
        if not passes_on_rank_0(lambda: _check(config, str(path), fresh)):
            return 2
        if not starts_ranks(config):
            return _train(config, stop, launched=False)
        from megarl.parallel.launch import LOST

        grace = config.checkpoint.grace if config.checkpoint.every else 0.0
        for number in range(config.parallel.restarts + 1):
            if number:
                times = f"{number} of at most {config.parallel.restarts} times"
                print(f"megarl: the ranks are started anew ({times})", file=sys.stderr, flush=True)
            code = start_ranks(partial(_train_launched, config), config, config.run_dir, grace, stop)
            if code not in LOST or stop.reason is not None:  # told to stop: whatever became of a rank
                break
        return code


def _train_launched(config: Config) -> int:
    """Be a rank that `start_ranks` has started."""
    with _stop_request(config, signal.SIGUSR1) as stop:
        return _train(config, stop, launched=True)


def _train(config: Config, stop: StopRequest, *, launched: bool) -> int:
    def job(runtime: Runtime) -> None:
        from megarl.schedule.run import Run
        from megarl.schedule.trainer import Trainer
        from megarl.schedule.watchdog import Watchdog

        with (
            Watchdog(config.run_dir, runtime.rank, runtime.world, config.watchdog) as watchdog,
            closing(Run(config, runtime)) as run,
        ):
            if runtime.rank == 0:
                reports = {name: asdict(report) for name, report in run.data_reports.items()}
                (config.run_dir / "data.json").write_text(
                    json.dumps(reports, indent=1) + "\n", encoding="utf-8"
                )
            Trainer(run, stop, watchdog).train()

    code = run_rank(config, job, launched=launched)
    from megarl.parallel.runtime import launched_rank

    if code == 0 and launched_rank() == 0 and config.log.report:
        from megarl.observe.report import write_report

        print(f"report: {write_report([config.run_dir], config.run_dir)}")
    return code


def _stop_request(config: Config, *signals: signal.Signals) -> StopRequest:
    """Return what takes signals and the time limit as a request to save and leave; no signals where nothing
    is saved."""
    checkpoint = config.checkpoint
    return StopRequest(signals if checkpoint.every else (), checkpoint.time_limit, checkpoint.time_margin)


def _check(config: Config, where: str, fresh: bool) -> None:
    """Raise ConfigError and the like where the run cannot start; rank 0 claims the run's folder."""
    from megarl.parallel.runtime import launched_rank
    from megarl.schedule.preflight import claim_run_dir, preflight, write_versions

    for line in preflight(config, where):
        print(f"megarl: {line}", file=sys.stderr, flush=True)
    if launched_rank() == 0:
        claim_run_dir(config, fresh=fresh)
        (config.run_dir / "config.yaml").write_text(dump_config(config), encoding="utf-8")
        write_versions(config.run_dir / "versions.json")
