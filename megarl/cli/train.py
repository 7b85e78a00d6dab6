"""`megarl train`: checks everything, starts the ranks if nobody has, and trains on each."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.cli.ranks import on_rank_0, start_ranks, work
from megarl.config import dump_config, load_config
from megarl.config.schema import Config

if TYPE_CHECKING:
    from megarl.parallel.runtime import Runtime
    from megarl.parallel.signals import StopRequest


def train(path: Path, overrides: Sequence[str] = (), *, checked: bool = False, fresh: bool = False) -> int:
    """Trains as the config says. Started as one process it launches the ranks that the layout needs; under torchrun it is one.

    checked: the process that launched this one has done the checks and claimed the run's folder; fresh: only where there is no run yet.
    """
    config = load_config(path, overrides)
    from megarl.parallel.signals import StopRequest

    # megarl's own launcher ends ranks by SIGTERM, and passes on what it is told by SIGUSR1. Before the imports that take seconds.
    signals = [] if not config.checkpoint.every else [signal.SIGUSR1] if checked else [signal.SIGUSR1, signal.SIGTERM]
    with StopRequest(signals, config.checkpoint.time_limit, config.checkpoint.time_margin) as stop:
        return _train_until(stop, config, path, overrides, checked=checked, fresh=fresh)


def _train_until(stop: StopRequest, config: Config, path: Path, overrides: Sequence[str], *, checked: bool, fresh: bool) -> int:
    from megarl.parallel.launch import ranks_here
    from megarl.parallel.runtime import is_launched, launched_rank

    if not checked and not on_rank_0(lambda: _check(config, str(path), claim=launched_rank() == 0, fresh=fresh)):
        return 2
    if not is_launched() and ranks_here(config.parallel) > 1:
        return _launch(config, ["train", "--checked", str(path), *overrides], stop)
    code = work(config, lambda runtime: _train(config, runtime, stop), launched=checked)
    if code == 0 and launched_rank() == 0 and config.log.report:
        from megarl.observe.report import write_report

        print(f"report: {write_report([config.run_dir], config.run_dir)}")
    return code


def _launch(config: Config, arguments: list[str], stop: StopRequest) -> int:
    """The ranks, and again after one was killed or hung, as often as `parallel.restarts` says."""
    from megarl.parallel.launch import LOST

    grace = config.checkpoint.grace if config.checkpoint.every else 0.0
    for number in range(config.parallel.restarts + 1):
        if number:
            line = f"the ranks are started anew ({number} of at most {config.parallel.restarts} times)"
            print(f"megarl: {line}", file=sys.stderr, flush=True)
        code = start_ranks(config, arguments, config.run_dir, grace, stop)
        if code not in LOST:
            break
    return code


def _check(config: Config, where: str, claim: bool, fresh: bool) -> None:
    from megarl.schedule.preflight import claim_run_dir, preflight, write_versions

    for line in preflight(config, where):
        print(f"megarl: {line}", file=sys.stderr, flush=True)
    if claim:
        claim_run_dir(config, fresh=fresh)
        (config.run_dir / "config.yaml").write_text(dump_config(config), encoding="utf-8")
        write_versions(config.run_dir / "versions.json")


def _train(config: Config, runtime: Runtime, stop: StopRequest) -> None:
    from megarl.schedule.run import Run
    from megarl.schedule.trainer import Trainer
    from megarl.schedule.watchdog import Watchdog

    with Watchdog(config.run_dir, runtime.rank, runtime.world, config.watchdog) as watchdog:
        run = Run(config, runtime)
        if runtime.rank == 0:
            reports = {name: asdict(report) for name, report in run.data_reports.items()}
            (config.run_dir / "data.json").write_text(json.dumps(reports, indent=1) + "\n", encoding="utf-8")
        try:
            Trainer(run, stop, watchdog).train()
        finally:
            run.close()
