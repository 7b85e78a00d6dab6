"""Start ranks, run one rank, and turn errors into a line and an exit code."""

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
from megarl.config.files import to_storage_error
from megarl.config.schema import Config
from megarl.rewards.sandbox import hide_memory, landlock_version

if TYPE_CHECKING:
    from megarl.parallel.lease import Lease
    from megarl.parallel.runtime import Runtime
    from megarl.parallel.signals import StopRequest


Arguments = ParamSpec("Arguments")


def checks_packages(command: Callable[Arguments, int]) -> Callable[Arguments, int]:
    """Check packages and launcher before a command imports Megatron."""

    @wraps(command)
    def wrapper(*args: Arguments.args, **kwargs: Arguments.kwargs) -> int:
        from megarl.parallel import machine

        machine.check_packages()
        machine.check_launcher()
        return command(*args, **kwargs)

    return wrapper


def quiet_libraries() -> None:
    """Silence warnings that are mostly about missing GPU packages."""
    for module in ("megatron", "transformers", "torch"):
        warnings.filterwarnings("ignore", module=module)


def exit_code(command: Callable[[], int]) -> int:
    """Call a command and return its exit code. Print errors that the user can fix as one line."""
    with spared_output():
        if isinstance(sys.stdout, TextIOWrapper):  # order of output and errors in a pipe
            sys.stdout.reconfigure(line_buffering=True)
        code = 0
        try:
            code = command()
            if sys.stdout is not None:
                sys.stdout.flush()  # a closed pipe raises here, not at exit with code 120
            return code
        except MegarlError as error:
            print(f"megarl: {error}", file=sys.stderr, flush=True)
            return error.code
        except KeyboardInterrupt:
            print("megarl: interrupted", file=sys.stderr)
            return 130
        except BrokenPipeError:  # the reader (`| head`) has finished
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return code
        except OSError as error:
            if (storage_error := to_storage_error(error)) is None:
                raise
            print(f"megarl: {storage_error}", file=sys.stderr, flush=True)
            return storage_error.code


class _Spared(FileIO):
    """An output that is dropped if the disk is full or the reader has finished."""

    def write(self, data: Any) -> int:
        try:
            remaining = memoryview(data)
            while remaining:
                remaining = remaining[super().write(remaining) :]
        except BrokenPipeError:
            null_device = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null_device, self.fileno())
            os.close(null_device)
            if self.fileno() != 2:
                line = "megarl: nobody reads this output any more; the run continues"
                print(line, file=sys.stderr, flush=True)
        except OSError:
            pass
        return len(data)


@contextmanager
def spared_output(*, pipes: bool = False) -> Iterator[None]:
    """Let a command continue when its output file is on a full disk; with `pipes` also without a reader.

    Python would keep the text, raise again with each print, and end with code 120."""
    original_streams = sys.stdout, sys.stderr
    try:
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            try:
                mode = os.fstat(stream.fileno()).st_mode
            except (AttributeError, OSError, ValueError):
                continue
            if stat.S_ISREG(mode) or (pipes and (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode))):
                stream.flush()
                sink = BufferedWriter(_Spared(stream.fileno(), "w", closefd=False))
                setattr(sys, name, TextIOWrapper(sink, stream.encoding, stream.errors, line_buffering=True))
        yield
    finally:
        for stream in {sys.stdout, sys.stderr} - set(original_streams):
            stream.flush()
        sys.stdout, sys.stderr = original_streams


def passes_on_rank_0(check: Callable[[], None]) -> bool:
    """Run a check that is the same on all ranks. If it fails, rank 0 raises and others return False."""
    from megarl.parallel.runtime import launched_rank

    try:
        check()
    except MegarlError:
        if launched_rank() == 0:
            raise
        return False
    return True


def starts_ranks(config: Config) -> bool:
    """Return whether there are several ranks that torchrun has not started."""
    from megarl.parallel.launch import count_local_ranks
    from megarl.parallel.runtime import is_launched

    return not is_launched() and count_local_ranks(config.parallel) > 1


def start_ranks(
    rank_main: Callable[[], int],
    config: Config,
    folder: Path,
    grace: float = 0.0,
    stop: StopRequest | None = None,
) -> int:
    """Run `rank_main` on every rank. Raises Interrupted if `stop` was requested during the imports.

    On CPUs `launch` forks the ranks after the imports."""
    import megarl.schedule.evaluation
    import megarl.schedule.replay
    import megarl.schedule.trainer  # noqa: F401
    from megarl.parallel.launch import launch
    from megarl.parallel.lease import renew_held
    from megarl.weights.families import read_config

    family = read_config(config.model.path)["model_type"]
    with suppress(ImportError):  # then it is imported later
        import_module(f"transformers.models.{family}.modeling_{family}")
    if stop is not None and stop.should_stop():
        raise Interrupted(f"{stop.reason}: no rank has been started; the same command continues")
    with spared_output(pipes=True), _without_current_folder():
        return launch(partial(exit_code, rank_main), config.parallel, folder, grace, renew_held)


@contextmanager
def _without_current_folder() -> Iterator[None]:
    """Keep the `python -c` of GPU ranks from importing files of the current folder."""
    name = "PYTHONSAFEPATH"
    old_value = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        del os.environ[name]
        if old_value is not None:
            os.environ[name] = old_value


def run_ranks(config: Config, job: Callable[[Runtime], int | None], lease: Lease | None, folder: Path) -> int:
    """Call `job` on every rank: those started here, or this one. job: picklable, as for `launch`"""
    if starts_ranks(config):
        return start_ranks(partial(run_rank, config, job, lease, folder, launched=True), config, folder)
    return run_rank(config, job, lease, folder, launched=False)


def run_rank(
    config: Config,
    job: Callable[[Runtime], int | None],
    lease: Lease | None,
    folder: Path,
    *,
    launched: bool,
) -> int:
    """Join the job as one rank, call `job`, and return its exit code. One rank prints an error.

    lease: on `folder`; None on torchrun's ranks other than 0
    launched: whether `launch` started this rank, and prints its error"""
    quiet_libraries()  # GPU ranks were not forked
    # Without Landlock, hide a rank's keys from tools and verifiers. Not with engine processes, which must
    # read a rank's open files.
    if not config.rollout.capabilities.continuous_batching and not landlock_version():
        hide_memory()
    from megarl.parallel import runtime as parallel
    from megarl.parallel.comm import broadcast_from_rank_0
    from megarl.parallel.launch import lost_a_peer, write_error_file
    from megarl.parallel.lease import Lease
    from megarl.weights.families import get_family, read_config

    is_moe = get_family(read_config(config.model.path)).is_moe
    with ExitStack() as stack:
        stack.enter_context(spared_output(pipes=True))
        if lease is not None:
            stack.enter_context(lease.kept())
        secret = folder / ".secret"
        runtime = parallel.start(config.parallel, config.seed, mixture=is_moe, secret=secret)
        has_failed, code = True, 1
        try:
            if parallel.is_launched() and not launched:  # torchrun: only rank 0 has the lease
                shared_lease = broadcast_from_rank_0(runtime.job, lease, Lease | None)
                if lease is None and shared_lease is not None:
                    stack.enter_context(shared_lease.kept())
            code = job(runtime) or 0
            has_failed = False
        except (MegarlError, OSError) as raised:
            error = to_storage_error(raised) if isinstance(raised, OSError) else raised
            if error is None:
                raise
            has_failed, code = not error.on_every_rank and not isinstance(error, Interrupted), error.code
            line = str(error) if error.on_every_rank else f"rank {runtime.rank}: {error}"
            is_reported = launched and write_error_file(line, error.code)
            # Engines' errors may not reach the trainers, so the first rank of each kind prints. A launched
            # rank without a file prints too: the launcher may end the others first.
            should_print = runtime.rank in (0, runtime.first_engine) or not error.on_every_rank or launched
            if not is_reported and should_print:
                print(f"megarl: {line}", file=sys.stderr, flush=True)
        except RuntimeError as error:
            line = f"rank {runtime.rank}: lost another rank: {error}"
            if not (launched and lost_a_peer(error) and write_error_file(line, 1, peer_lost=True)):
                raise
        finally:
            if not parallel.stop(failed=has_failed):
                atexit.register(_leave, code)
    return code


def _leave(code: int) -> None:
    """Exit before torch aborts NCCL's groups, which may wait for other ranks."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
