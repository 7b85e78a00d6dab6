"""`megarl replay RUN --step K`: one step of a run again, from its checkpoint and recorded rollout, and every number compared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.cli.quiet import quiet_libraries
from megarl.cli.ranks import on_rank_0, start_ranks, work
from megarl.config import check_config, load_config
from megarl.config.errors import ConfigError
from megarl.config.load import set_key
from megarl.config.schema import Config

if TYPE_CHECKING:
    from megarl.parallel.runtime import Runtime

# Its rollout is on disk: whatever engine sampled it, none is needed that must be started.
ENGINE = ("rollout.engine=transformers", "rollout.engine_tp=1", "rollout.weights_dtype=model", "rollout.fingerprint=false")


def replay(run: Path, step: int, tolerance: float | None, overrides: Sequence[str], *, checked: bool = False) -> int:
    """0: everything is equal; 1: something differs. overrides: another layout, e.g. parallel.tp=1, is compared within `tolerance`."""
    if not (run / "config.yaml").is_file():
        raise ConfigError(f"{run}: no config.yaml there (give the folder of a run)")
    config = load_config(run / "config.yaml", [*ENGINE, set_key("run_dir", run), *overrides])
    quiet_libraries()
    from megarl.parallel.launch import ranks_here
    from megarl.parallel.runtime import is_launched

    if not checked and not on_rank_0(lambda: _check(config, str(run / "config.yaml"), step)):
        return 2
    if not is_launched() and ranks_here(config.parallel) > 1:
        options = ["--step", str(step), *(["--tolerance", str(tolerance)] if tolerance else [])]
        return start_ranks(config, ["replay", "--checked", str(run), *options, *overrides], run)
    different: list[str] = []

    def job(runtime: Runtime) -> None:
        from megarl.schedule.replay import lines
        from megarl.schedule.replay import replay as again

        outcome = again(config, step, runtime, tolerance)
        different.extend(outcome.different)
        if runtime.rank == 0:
            print("\n".join(lines(outcome)), flush=True)

    code = work(config, job, launched=checked)
    return code or int(bool(different))


def _check(config: Config, where: str, step: int) -> None:
    from megarl.schedule.preflight import preflight
    from megarl.schedule.replay import check_replay

    check_config(config, where)
    check_replay(config, step)
    preflight(config, where)
