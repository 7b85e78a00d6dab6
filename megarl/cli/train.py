"""`megarl train`: checks everything, starts the ranks if nobody has, and runs the scheduler on each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.cli.ranks import on_rank_0, work
from megarl.config import dump_config, load_config
from megarl.config.schema import Config

if TYPE_CHECKING:
    from megarl.parallel.runtime import Runtime


def train(path: Path, overrides: Sequence[str] = (), *, checked: bool = False) -> int:
    """Trains as the config says. Started as one process it launches the ranks that the layout needs; under torchrun it is one.

    checked: the process that launched this one has done the checks and claimed the run's folder.
    """
    config = load_config(path, overrides)
    from megarl.parallel.launch import launch, ranks_here
    from megarl.parallel.runtime import is_launched, launched_rank

    if not checked and not on_rank_0(lambda: _check(config, str(path), claim=launched_rank() == 0)):
        return 2
    if not is_launched() and ranks_here(config.parallel) > 1:
        return launch(config.parallel, ["train", "--checked", str(path), *overrides], config.run_dir)
    code = work(config, lambda runtime: _train(config, runtime), launched=checked)
    if code == 0 and launched_rank() == 0 and config.log.report:
        from megarl.observe.report import write_report

        print(f"report: {write_report([config.run_dir], config.run_dir)}")
    return code


def _check(config: Config, where: str, claim: bool) -> None:
    from megarl.schedule.preflight import claim_run_dir, preflight, write_versions

    preflight(config, where)
    if claim:
        claim_run_dir(config)
        (config.run_dir / "config.yaml").write_text(dump_config(config), encoding="utf-8")
        write_versions(config.run_dir / "versions.json")


def _train(config: Config, runtime: Runtime) -> None:
    from megarl.schedule.run import Run
    from megarl.schedule.scheduler import Scheduler

    run = Run(config, runtime)
    if runtime.rank == 0:
        reports = {name: asdict(report) for name, report in run.data_reports.items()}
        (config.run_dir / "data.json").write_text(json.dumps(reports, indent=1) + "\n", encoding="utf-8")
    try:
        Scheduler(run).execute()
    finally:
        run.close()
