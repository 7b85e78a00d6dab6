"""What train, eval and replay share: start the ranks, be one of them, and turn errors into one line and an
exit code."""

from __future__ import annotations

import atexit
import os
import stat
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial, wraps
from importlib import import_module
from io import BufferedWriter, FileIO, TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec

from megarl.config.errors import Interrupted, MegarlError
from megarl.config.files import unforeseen
from megarl.config.schema import Config
from megarl.rewards.sandbox import hide_memory, landlock_version

if TYPE_CHECKING:
    from megarl.parallel.lease import Lease
    from megarl.parallel.runtime import Runtime
    from megarl.parallel.signals import StopRequest


Arguments = ParamSpec("Arguments")


def checks_packages(command: Callable[Arguments, int]) -> Callable[Arguments, int]:
    """Check the packages, and what launched this process, before a command that imports Megatron: one that
    does not fit is one line then, not an error in an import."""

    @wraps(command)
    def checked(*args: Arguments.args, **kwargs: Arguments.kwargs) -> int:
        from megarl.parallel import machine

        machine.check_packages()
        machine.check_launcher()
        return command(*args, **kwargs)

    return checked


def quiet_libraries() -> None:
    """Silence, in this process, warnings of Megatron and transformers about what a CPU lacks."""
    for module in ("megatron", "transformers", "torch"):
        warnings.filterwarnings("ignore", module=module)


def exit_code(command: Callable[[], int]) -> int:
    """Call a command and return its exit code. An error that the user can mend is printed as one line."""
    with spared_output():
        if isinstance(sys.stdout, TextIOWrapper):  # in a pipe too: lines before an error stay before it
            sys.stdout.reconfigure(line_buffering=True)
        code = 0
        try:
            code = command()
            if sys.stdout is not None:
                sys.stdout.flush()  # here, where a pipe's end is no traceback of Python's, and no code 120
            return code
        except MegarlError as error:
            print(f"megarl: {error}", file=sys.stderr, flush=True)
            return error.code
        except KeyboardInterrupt:
            print("megarl: interrupted", file=sys.stderr)
            return 130
        except BrokenPipeError:  # whoever read the output (`| head`) has enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return code
        except OSError as error:
            if (known := unforeseen(error)) is None:
                raise
            print(f"megarl: {known}", file=sys.stderr, flush=True)
            return known.code


class _Spared(FileIO):
    """A file or pipe in which is lost what the disk does not take, or nobody reads any more."""

    def write(self, data: Any) -> int:
        """Return as if all of it had been written."""
        try:
            left = memoryview(data)
            while left:
                left = left[super().write(left) :]
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            if self.fileno() != 2:
                print(
                    "megarl: nobody reads this output any more; the run goes on", file=sys.stderr, flush=True
                )
        except OSError:
            pass
        return len(data)


@contextmanager
def spared_output(*, pipes: bool = False) -> Iterator[None]:
    """Let a command go on whose output goes to a file on a disk that is full. (Python would keep what could
    not be written, raise again with each print, and end with code 120.) pipes: also where it goes to a
    command that has ended (`| head`): a run is not to die by that."""
    kept = sys.stdout, sys.stderr
    try:
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            try:
                mode = os.fstat(stream.fileno()).st_mode
            except (AttributeError, OSError, ValueError):  # there is none, or it is closed
                continue
            if stat.S_ISREG(mode) or (pipes and (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode))):
                stream.flush()
                sink = BufferedWriter(_Spared(stream.fileno(), "w", closefd=False))
                setattr(sys, name, TextIOWrapper(sink, stream.encoding, stream.errors, line_buffering=True))
        yield
    finally:
        for stream in {sys.stdout, sys.stderr} - set(kept):
            stream.flush()
        sys.stdout, sys.stderr = kept


def passes_on_rank_0(check: Callable[[], None]) -> bool:
    """Run a check that every rank makes alike. Return False where it fails on another rank than 0: rank 0
    raises the error."""
    from megarl.parallel.runtime import launched_rank

    try:
        check()
    except MegarlError:
        if launched_rank() == 0:
            raise
        return False
    return True


def starts_ranks(config: Config) -> bool:
    """Return whether this process is to start the ranks; else it is the only one, or torchrun started it."""
    from megarl.parallel.launch import ranks_here
    from megarl.parallel.runtime import is_launched

    return not is_launched() and ranks_here(config.parallel) > 1


def start_ranks(
    rank_main: Callable[[], int],
    config: Config,
    folder: Path,
    grace: float = 0.0,
    stop: StopRequest | None = None,
) -> int:
    """Run `rank_main` on every rank of the layout, see `launch`: on a CPU by a fork, after what all ranks
    need is imported; on GPUs in a new process, so that it must be a function of a module (it is pickled).

    Raises Interrupted where `stop` is requested by then: the imports take seconds."""
    import megarl.schedule.evaluation
    import megarl.schedule.replay
    import megarl.schedule.trainer  # noqa: F401
    from megarl.parallel.launch import launch
    from megarl.parallel.lease import renew_held
    from megarl.weights.families import read_config

    family = read_config(config.model.path)["model_type"]
    with suppress(ImportError):  # its module has another name: imported when the model is built
        import_module(f"transformers.models.{family}.modeling_{family}")
    if stop is not None and stop.should_stop():
        raise Interrupted(f"{stop.reason}: no rank has been started; the same command continues")
    with spared_output(pipes=True), _without_current_folder():
        return launch(partial(exit_code, rank_main), config.parallel, folder, grace, renew_held)


@contextmanager
def _without_current_folder() -> Iterator[None]:
    """Keep Python processes that start in the block from importing files of the current folder.

    A rank on GPUs begins as `python -c`, which would look there first."""
    name = "PYTHONSAFEPATH"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def run_rank(
    config: Config,
    job: Callable[[Runtime], int | None],
    lease: Lease | None,
    folder: Path,
    *,
    launched: bool,
) -> int:
    """Join the job as one rank, call `job`, leave, and return its exit code (None: 0). An error is printed
    once, by one rank.

    lease: on the `folder` that the job writes into; None on a rank of torchrun's other than 0, which took it.
    launched: `launch` started this rank, and prints the line that a rank writes to its error file."""
    quiet_libraries()  # a rank on GPUs was not forked
    # Landlock keeps tools and verifiers from a rank's keys by itself. An engine's own processes read a rank's
    # open files.
    if not config.rollout.capabilities.continuous_batching and not landlock_version():
        hide_memory()
    from megarl.parallel import runtime as parallel
    from megarl.parallel.comm import from_rank_0
    from megarl.parallel.launch import lost_a_peer, write_error_file
    from megarl.parallel.lease import Lease
    from megarl.weights.families import family_of, read_config

    mixture = family_of(read_config(config.model.path)).is_moe
    with ExitStack() as keeping:
        keeping.enter_context(spared_output(pipes=True))
        if lease is not None:
            keeping.enter_context(lease.kept())
        secret = folder / ".secret"
        runtime = parallel.start(config.parallel, config.seed, mixture=mixture, secret=secret)
        failed, code = True, 1
        try:
            if parallel.is_launched() and not launched:  # by torchrun: rank 0 alone has taken it
                taken = from_rank_0(runtime.job, lease, Lease | None)
                if lease is None and taken is not None:
                    keeping.enter_context(taken.kept())
            code = job(runtime) or 0
            failed = False
        except (MegarlError, OSError) as met:
            error = met if isinstance(met, MegarlError) else unforeseen(met)
            if error is None:
                raise
            if error is not met:
                error.on_every_rank = False
            failed, code = not error.on_every_rank and not isinstance(error, Interrupted), error.code
            line = str(error) if error.on_every_rank else f"rank {runtime.rank}: {error}"
            reported = launched and write_error_file(line, error.code)
            # What the engines' ranks meet alike, the trainers may not. A launched rank that could not write
            # its file may be the first to end, and the launcher then ends whoever would have said the same.
            speaks = runtime.rank in (0, runtime.first_engine) or not error.on_every_rank or launched
            if not reported and speaks:
                print(f"megarl: {line}", file=sys.stderr, flush=True)
        except RuntimeError as error:
            line = f"rank {runtime.rank}: lost another rank: {error}"
            if not (launched and lost_a_peer(error) and write_error_file(line, 1, peer_lost=True)):
                raise
        finally:
            if not parallel.stop(failed=failed):
                atexit.register(_leave, code)
    return code


def _leave(code: int) -> None:
    """End this process without what Python does at its end: there torch would abort NCCL's groups, which may
    wait for their other ranks."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
