"""`megarl train` and `megarl replay`."""

from __future__ import annotations

import atexit
import gc
import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from megarl.cli.arguments import ConfigFile, Overrides, Wait, key_values
from megarl.cli.ranks import (
    checks_packages,
    passes_on_rank_0,
    run_rank,
    run_ranks,
    start_ranks,
    starts_ranks,
)
from megarl.config import check_config, dump_config, load_config
from megarl.config.errors import ConfigError
from megarl.config.files import mark_required, write_atomic
from megarl.config.hub import RECORD, local_inputs, pin_names
from megarl.config.load import set_key
from megarl.config.schema import Config, ScheduleConfig
from megarl.config.text import printable
from megarl.parallel.signals import StopRequest, follow_launcher

if TYPE_CHECKING:
    from megarl.parallel.lease import Lease
    from megarl.parallel.runtime import Runtime


@checks_packages
def train(
    path: ConfigFile,
    overrides: Overrides,
    *,
    fresh: Annotated[
        bool, Option("--fresh", help="refuse a run_dir with a run, instead of continuing it")
    ] = False,
    wait: Wait = 0.0,
    profile: Annotated[
        int | None,
        Option(metavar="N", help="trace N steps for Perfetto, into run_dir/profile (log.profile)"),
    ] = None,
    # process id of `ablate`, with which this one ends
    follow: Annotated[int | None, Option(hidden=True)] = None,
) -> int:
    """Train by supervised warm start, GRPO, DAPO, PPO or VAPO: the config's recipe.

    Starts the ranks of the layout, and restarts them after one was killed or hung, at most parallel.restarts
    times. Under torchrun this process is one rank."""
    if follow is not None:
        follow_launcher(follow)
    if profile is not None:
        overrides = [*overrides, f"log.profile={profile}"]
    config = load_config(path, overrides)
    # Before the imports, which take seconds. The ranks get SIGUSR1; SIGTERM ends them.
    with _stop_request(config, signal.SIGUSR1, signal.SIGTERM) as stop, ExitStack() as stack:

        def check() -> None:
            nonlocal config
            check_config(config, str(path))
            config = local_inputs(config, config.run_dir / RECORD, first=launched_rank() == 0)
            check_run(config, str(path))

        from megarl.parallel.runtime import launched_rank

        if not passes_on_rank_0(check):
            return 2
        lease = stack.enter_context(lease_of_run(config, "megarl train", wait, stop.should_stop))
        if lease is not None:
            begin_run(config, fresh)
        if not starts_ranks(config):
            return _train(config, stop, lease, launched=False)
        assert lease is not None
        from megarl.parallel.launch import LOST

        grace = config.checkpoint.grace if config.checkpoint.every else 0.0
        for attempt in range(config.parallel.restarts + 1):
            if attempt:
                lease.renew()
                attempts_text = f"{attempt} of at most {config.parallel.restarts} times"
                print(f"megarl: the ranks are restarted ({attempts_text})", file=sys.stderr, flush=True)
            code = start_ranks(
                partial(_train_launched, config, stop.end, lease), config, config.run_dir, grace, stop
            )
            if code not in LOST or stop.reason is not None:
                break
        return code


def check_run(config: Config, where: str) -> None:
    """Raise a MegarlError for a wrong configuration, before the ranks start."""
    from megarl.schedule.preflight import preflight

    for line in preflight(config, where):
        print(f"megarl: {printable(line)}", file=sys.stderr, flush=True)


def begin_run(config: Config, fresh: bool) -> None:
    """Claim the run folder, and write configuration and versions into it."""
    from megarl.observe.prometheus import Exporter
    from megarl.schedule.preflight import claim_run_dir, versions

    if config.log.prometheus:
        Exporter(config.log.prometheus, config.log.prometheus_host).close()  # raises if the port is in use
    claim_run_dir(config, fresh=fresh)
    for name, text in (
        ("config.yaml", dump_config(pin_names(config))),
        ("versions.json", json.dumps(versions(), indent=1) + "\n"),
    ):
        with mark_required(config.run_dir / name):
            write_atomic(config.run_dir / name, text)


def lease_of_run(
    config: Config, command: str, wait: float, stop: Callable[[], bool]
) -> AbstractContextManager[Lease | None]:
    """Return a context with rank 0's lease of the run, which expires after twice `watchdog.silence`."""
    from megarl.parallel.lease import hold_lease
    from megarl.parallel.runtime import launched_rank, launched_world

    if launched_rank() != 0:
        return nullcontext()
    machines = launched_world() // int(os.environ.get("LOCAL_WORLD_SIZE", launched_world()))
    remedy = "stop it there, wait for it with --wait SECONDS, or choose another run_dir"
    names, limit = {"key": "run_dir", "remedy": remedy}, 2 * config.watchdog.silence
    return hold_lease(config.run_dir, command, limit, wait=wait, stop=stop, machines=machines, **names)


def _stop_request(config: Config, *signals: signal.Signals) -> StopRequest:
    """Return a stop request for the time limit, and for signals if the run has checkpoints."""
    checkpoint = config.checkpoint
    return StopRequest(signals if checkpoint.every else (), checkpoint.time_limit, checkpoint.time_margin)


def _train_launched(config: Config, end: float | None, lease: Lease) -> int:
    """Run a rank of `start_ranks`. end: the time limit, which a restart does not extend."""
    with _stop_request(config, signal.SIGUSR1) as stop:
        stop.end = end
        return _train(config, stop, lease, launched=True)


def _train(config: Config, stop: StopRequest, lease: Lease | None, *, launched: bool) -> int:
    def job(runtime: Runtime) -> None:
        from megarl.schedule.ahead import EngineRank
        from megarl.schedule.in_flight import InFlightRank
        from megarl.schedule.run import build_run
        from megarl.schedule.trainer import Trainer
        from megarl.schedule.watchdog import Watchdog

        with Watchdog(config.run_dir, runtime.rank, runtime.job.world, config.watchdog) as watchdog:
            if not runtime.trains:
                rank_class = EngineRank if config.schedule.in_flight == "none" else InFlightRank
                with closing(rank_class(config, runtime)) as rank:
                    rank.serve(watchdog)
                return
            with closing(build_run(config, runtime)) as run:
                # megatron-core collects garbage at each save: spare it millions of objects.
                gc.freeze()
                # Else triton's bindings would list them as leaks.
                atexit.register(gc.unfreeze)
                if runtime.rank == 0:
                    reports = {name: asdict(report) for name, report in run.source.reports.items()}
                    with run.dispensable.file(config.run_dir / "data.json"):
                        write_atomic(config.run_dir / "data.json", json.dumps(reports, indent=1) + "\n")
                Trainer(run, stop, watchdog).train()

    code = run_rank(config, job, lease, config.run_dir, launched=launched)
    from megarl.parallel.runtime import launched_rank

    if code == 0 and launched_rank() == 0 and config.log.report:
        from megarl.config.plugins import plugin

        try:
            print(f"report: {plugin('megarl.reports', 'html')([config.run_dir], config.run_dir)}")
        except ConfigError as error:  # the run is complete anyway
            print(f"megarl: {error}", file=sys.stderr, flush=True)
    return code


@checks_packages
def replay(
    run: Annotated[
        Path,
        Argument(metavar="RUN", help="folder of a run with checkpoints and checkpoint.rollouts"),
    ],
    overrides: Annotated[list[str], key_values("parallel.tp=1 parallel.dp=1")],
    *,
    step: Annotated[int, Option(metavar="K", help="rollout step; needs the checkpoint of step K - 1")],
    tolerance: Annotated[
        float | None,
        Option(metavar="X", help="tolerance for another layout; default: 1e-3 in fp32, 5e-2 in bf16"),
    ] = None,
    wait: Wait = 0.0,
) -> int:
    """Repeat one step of a run from its files, and compare every recorded number.

    The exit code is 1 if one differs. With another layout numbers must be equal within the tolerance."""
    file = run / "config.yaml"
    if not file.is_file():
        raise ConfigError(f"{run}: no config.yaml there (give the folder of a run)")
    config = load_config(file, [set_key("run_dir", run), *overrides])
    config = config.model_copy(update={"parallel": config.parallel.model_copy(update={"rollout_ranks": 0})})
    from megarl.parallel.runtime import launched_rank

    def check() -> None:
        nonlocal config
        from megarl.schedule.preflight import preflight
        from megarl.schedule.replay import check_replay

        config = local_inputs(config, run / RECORD, first=launched_rank() == 0)
        check_replay(config, step)
        # A replay generates nothing.
        preflight(config.model_copy(update={"schedule": ScheduleConfig()}), str(file), replay=True)

    if not passes_on_rank_0(check):
        return 2
    with lease_of_run(config, "megarl replay", wait, lambda: False) as lease:
        return run_ranks(config, partial(_replay, config, step, tolerance), lease, run)


def _replay(config: Config, step: int, tolerance: float | None, runtime: Runtime) -> int:
    from megarl.schedule import replay

    outcome = replay.replay(config, step, runtime, tolerance)
    if runtime.rank == 0:
        print(printable("\n".join(replay.lines(outcome))), flush=True)
    return int(bool(outcome.different))
