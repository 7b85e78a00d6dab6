"""`megarl replay RUN --step K`: do a step of a run again, from its checkpoint and recorded rollout, and
compare every number."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.cli.ranks import passes_on_rank_0, run_rank, start_ranks, starts_ranks
from megarl.config import check_config, load_config
from megarl.config.errors import ConfigError
from megarl.config.load import set_key
from megarl.config.schema import Config

if TYPE_CHECKING:
    from megarl.parallel.runtime import Runtime

# The rollout is on disk: whatever engine sampled it, none is needed that must be started.
ENGINE = (
    "rollout.engine=transformers",
    "rollout.engine_tp=1",
    "rollout.weights_dtype=model",
    "rollout.fingerprint=false",
)


def replay(run: Path, step: int, tolerance: float | None, overrides: Sequence[str]) -> int:
    """Return 0 where every number is equal, 1 where one differs. With another layout, e.g. parallel.tp=1 in
    `overrides`, numbers are equal within `tolerance`."""
    if not (run / "config.yaml").is_file():
        raise ConfigError(f"{run}: no config.yaml there (give the folder of a run)")
    config = load_config(run / "config.yaml", [*ENGINE, set_key("run_dir", run), *overrides])

    def check() -> None:
        from megarl.schedule.preflight import preflight
        from megarl.schedule.replay import check_replay

        check_config(config, str(run / "config.yaml"))
        check_replay(config, step)
        preflight(config, str(run / "config.yaml"))

    if not passes_on_rank_0(check):
        return 2
    if starts_ranks(config):
        return start_ranks(partial(_replay, config, step, tolerance, launched=True), config, run)
    return _replay(config, step, tolerance, launched=False)


def _replay(config: Config, step: int, tolerance: float | None, *, launched: bool) -> int:
    different: list[str] = []

    def job(runtime: Runtime) -> None:
        from megarl.schedule.replay import lines, replay

        outcome = replay(config, step, runtime, tolerance)
        different.extend(outcome.different)
        if runtime.rank == 0:
            print("\n".join(lines(outcome)), flush=True)

    code = run_rank(config, job, launched=launched)
    return code or int(bool(different))
