"""`megarl train`: checks everything, starts the ranks if nobody has, and runs the scheduler on each."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from megarl.cli.quiet import quiet_libraries
from megarl.config import dump_config, load_config
from megarl.config.errors import MegarlError
from megarl.config.schema import Config


def train(path: Path, overrides: Sequence[str] = (), *, checked: bool = False) -> int:
    """Trains as the config says. Started as one process it launches the ranks that the layout needs; under torchrun it is one.

    checked: the process that launched this one has done the checks and claimed the run's folder.
    """
    config = load_config(path, overrides)
    from megarl.parallel.launch import launch, ranks_here
    from megarl.parallel.runtime import is_launched, launched_rank

    if not checked:
        try:
            _check(config, str(path), claim=launched_rank() == 0)
        except MegarlError:
            if launched_rank() == 0:
                raise
            return 2  # rank 0 met the same error and says it
    if is_launched() or ranks_here(config.parallel) == 1:
        return _work(config, launched=checked)
    return launch(config.parallel, ["train", "--checked", str(path), *overrides], config.run_dir)


def _check(config: Config, where: str, claim: bool) -> None:
    from megarl.schedule.preflight import claim_run_dir, preflight, write_versions

    preflight(config, where)
    if claim:
        claim_run_dir(config)
        (config.run_dir / "config.yaml").write_text(dump_config(config), encoding="utf-8")
        write_versions(config.run_dir / "versions.json")


def _work(config: Config, launched: bool) -> int:
    """One rank, from joining the job to leaving it. `launched`: by `launch`, which says what the rank leaves word of."""
    quiet_libraries()
    from megarl.observe.report import write_report
    from megarl.parallel import runtime as parallel
    from megarl.parallel.launch import leave_word, lost_a_peer
    from megarl.schedule.run import Run
    from megarl.schedule.scheduler import Scheduler

    runtime = parallel.start(config.parallel, config.seed)
    try:
        run = Run(config, runtime)
        if runtime.rank == 0:
            reports = {name: asdict(report) for name, report in run.data_reports.items()}
            (config.run_dir / "data.json").write_text(json.dumps(reports, indent=1) + "\n", encoding="utf-8")
        try:
            Scheduler(run).execute()
        finally:
            run.close()
    except MegarlError as error:
        line = str(error) if error.on_every_rank else f"rank {runtime.rank}: {error}"
        if not (launched and leave_word(line)) and (runtime.rank == 0 or not error.on_every_rank):
            print(f"megarl: {line}", file=sys.stderr, flush=True)
        return 2
    except RuntimeError as error:
        if not (launched and lost_a_peer(error) and leave_word(f"rank {runtime.rank}: lost another rank: {error}", peer_lost=True)):
            raise
        return 1
    finally:
        parallel.stop()
    if runtime.rank == 0 and config.log.report:
        print(f"report: {write_report([config.run_dir], config.run_dir)}")
    return 0
