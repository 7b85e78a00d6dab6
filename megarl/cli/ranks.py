"""What the ranks of a command have in common: joining the job, saying what went wrong once, leaving it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.cli.quiet import quiet_libraries
from megarl.config.errors import Interrupted, MegarlError
from megarl.config.schema import Config

if TYPE_CHECKING:
    from megarl.parallel.runtime import Runtime
    from megarl.parallel.signals import StopRequest


def on_rank_0(check: Callable[[], None]) -> bool:
    """Runs a check that every rank makes alike; False where it fails on another rank than 0, whose error is the one that is shown."""
    from megarl.parallel.runtime import launched_rank

    try:
        check()
    except MegarlError:
        if launched_rank() == 0:
            raise
        return False
    return True


def start_ranks(config: Config, arguments: Sequence[str], folder: Path, grace: float = 0.0, stop: StopRequest | None = None) -> int:
    """Runs `megarl ARGUMENTS` on every rank of the layout, see `launch`. What all of them need is imported before: they are forked.

    Raises Interrupted where `stop` is wanted by then: the imports take seconds."""
    quiet_libraries()
    import megarl.schedule.evaluation
    import megarl.schedule.replay
    import megarl.schedule.trainer  # noqa: F401
    from megarl.cli.main import main
    from megarl.parallel.launch import launch
    from megarl.weights.families import read_config

    family = read_config(config.model.path)["model_type"]
    with suppress(ImportError):  # it is imported when the model is made, if it is called otherwise
        import_module(f"transformers.models.{family}.modeling_{family}")
    if stop is not None and stop.should_stop():
        raise Interrupted(f"{stop.reason}: no rank has been started; the same command continues")
    return launch(main, config.parallel, arguments, folder, grace)


def work(config: Config, job: Callable[[Runtime], None], *, launched: bool) -> int:
    """One rank, from joining the job to leaving it; gives its exit code. launched: by `launch`, which says what a rank leaves word of."""
    quiet_libraries()
    from megarl.parallel import runtime as parallel
    from megarl.parallel.launch import leave_word, lost_a_peer

    runtime = parallel.start(config.parallel, config.seed)
    try:
        job(runtime)
    except MegarlError as error:
        line = str(error) if error.on_every_rank else f"rank {runtime.rank}: {error}"
        if not (launched and leave_word(line)) and (runtime.rank == 0 or not error.on_every_rank):
            print(f"megarl: {line}", file=sys.stderr, flush=True)
        return error.code
    except RuntimeError as error:
        if not (launched and lost_a_peer(error) and leave_word(f"rank {runtime.rank}: lost another rank: {error}", peer_lost=True)):
            raise
        return 1
    finally:
        parallel.stop()
    return 0
