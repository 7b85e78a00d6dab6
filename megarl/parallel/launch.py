"""Start and end the ranks of a job on one machine. Jobs on several machines use torchrun.

Why not torchrun on one machine: its agent forks while it has threads, which is unsafe. It leaves engines
of ended ranks running, gives ranks no time to save, and reports the first dead rank, not the cause.
"""

from __future__ import annotations

import ctypes
import gc
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch.distributed as dist

from megarl.config.errors import Interrupted
from megarl.config.files import mark_required, write_atomic
from megarl.config.schema import ParallelConfig
from megarl.parallel.machine import ALLOCATOR, EXPANDABLE
from megarl.parallel.runtime import LAUNCHED_BY, STORE_FILE, choose_device
from megarl.parallel.secret import SECRET_FILE, make_secret
from megarl.parallel.signals import follow_launcher

_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # a rank's error file; torchrun sets it too
# gloo raises plain RuntimeErrors with these texts.
_PEER_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
_TERMINATING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_FORWARDED = (signal.SIGTERM, signal.SIGUSR1)  # passed on as SIGUSR1, with a grace period
_HANDLED = (*_TERMINATING, signal.SIGUSR1, signal.SIGALRM)
POLL = 0.1  # seconds between checks
PATIENCE = 30.0  # seconds for ranks to end after SIGTERM
HUNG = 124
_KILLED_BY = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)
# Exit codes after which a retry may succeed: a lost peer (1, as for a defect), hung, killed.
LOST = (1, HUNG, *(128 + number for number in _KILLED_BY))
_PR_SET_NAME = 15  # linux/prctl.h


def count_local_ranks(config: ParallelConfig) -> int:
    return config.tp * config.pp * config.cp * (config.dp or 1) + config.rollout_ranks


def launch(
    rank_main: Callable[[], int],
    config: ParallelConfig,
    folder: Path,
    grace: float = 0.0,
    meanwhile: Callable[[], None] = lambda: None,
) -> int:
    """Run `rank_main` on every rank. Return 0, or the exit code of `explain_failures`.

    A failure ends all ranks. Raises KeyboardInterrupt after Ctrl-C.

    rank_main  returns the exit code; picklable, because ranks on GPUs are not forked
    folder     of the run, for messages
    grace      seconds to save after a first SIGTERM or SIGUSR1, which ranks receive as SIGUSR1
    meanwhile  called repeatedly; if it raises, the ranks end"""
    os.environ.setdefault("OMP_NUM_THREADS", str(config.threads))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    ranks: list[BaseProcess] = []
    forwarded_signals: list[int] = []
    handlers = {number: signal.getsignal(number) for number in (_HANDLED if grace else _TERMINATING)}

    def handle(number: int, frame: FrameType | None) -> None:
        if forwarded_signals or number not in _FORWARDED or not grace:
            raise _Terminated(forwarded_signals[0] if number == signal.SIGALRM else number)
        forwarded_signals.append(number)
        # Notify the caller too, so that it starts no new ranks.
        if callable(previous_handler := handlers[signal.Signals(number)]):
            previous_handler(number, frame)
        # Not print, which the signal may have interrupted.
        line = f"megarl: {signal.Signals(number).name}: the ranks have {grace:g} s to save and leave\n"
        os.write(sys.stderr.fileno(), line.encode())
        signal.setitimer(signal.ITIMER_REAL, grace)
        for rank in ranks:
            if rank.exitcode is None and rank.pid is not None:
                os.kill(rank.pid, signal.SIGUSR1)

    with mark_required(Path(os.environ.get("TMPDIR", "/tmp"))):
        error_directory = tempfile.TemporaryDirectory(prefix="megarl-ranks-")
    with error_directory as error_folder:
        error_files = [Path(error_folder, str(rank)) for rank in range(count_local_ranks(config))]
        try:
            for number in handlers:
                signal.signal(number, handle)
            _start_ranks(rank_main, config, error_files, ranks)
            while (codes := {rank.exitcode for rank in ranks}) <= {0, None} and None in codes:
                time.sleep(POLL)
                meanwhile()
            if codes == {0}:
                return 0
            killed_ranks = _end_ranks(ranks)
            failures = {}
            for rank, (process, file) in enumerate(zip(ranks, error_files, strict=True)):
                code = -signal.SIGTERM if rank in killed_ranks else process.exitcode
                if code:
                    content = json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
                    failures[rank] = code, content
            forwarded = forwarded_signals[0] if forwarded_signals else None
            code, line = explain_failures(failures, folder, forwarded)
            print(f"megarl: {line}", file=sys.stderr, flush=True)
            return code
        except _Terminated as terminated:
            _end_ranks(ranks)
            number = signal.Signals(terminated.args[0])
            print(f"megarl: ended by {number.name}, with all ranks", file=sys.stderr, flush=True)
            return 128 + number
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            _end_ranks(ranks)
            for number, handler in handlers.items():
                signal.signal(number, handler)


class _Terminated(BaseException):
    """The launcher received a signal, whose number is the argument."""


def _start_ranks(
    rank_main: Callable[[], int],
    config: ParallelConfig,
    error_files: Sequence[Path],
    ranks: list[BaseProcess],
) -> None:
    """Start ranks and append each to `ranks`. Store and secret lie in the error files' folder."""
    world, folder = len(error_files), error_files[0].parent
    context: Any = multiprocessing.get_context("fork" if _may_fork(config) else "spawn")
    make_secret(folder / "secret")
    common = {
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",  # nobody listens: the store is a file
        STORE_FILE: str(folder / "store"),
        SECRET_FILE: str(folder / "secret"),
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)  # until the rank has reset the handlers
    gc.collect()
    gc.freeze()  # garbage collection in a fork would write to shared pages and so copy them
    try:
        for rank, file in enumerate(error_files):
            environment = common | {"RANK": str(rank), "LOCAL_RANK": str(rank), _ERROR_FILE: str(file)}
            process = context.Process(target=_run_rank, args=(rank_main, environment), name=f"rank {rank}")
            process.start()
            ranks.append(process)
    finally:
        gc.unfreeze()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)


@contextmanager
def without_tokenizer_threads() -> Iterator[None]:
    """Keep tokenizers from starting threads before ranks are forked."""
    name = "TOKENIZERS_PARALLELISM"
    old_value = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        del os.environ[name]
        if old_value is not None:
            os.environ[name] = old_value


def _may_fork(config: ParallelConfig) -> bool:
    """Return whether ranks can be forked: no CUDA, and no threads, whose locks would stay locked.

    pyarrow's jemalloc thread is fork-safe."""
    if choose_device(config.device).type != "cpu":
        return False
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return len([name for name in names if name != "jemalloc_bg_thd"]) == 1


def _run_rank(rank_main: Callable[[], int], environment: dict[str, str]) -> NoReturn:
    os.setsid()
    for number in _HANDLED:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)
    follow_launcher()
    os.environ.update(environment)
    ctypes.CDLL(None).prctl(_PR_SET_NAME, f"megarl rank {environment['RANK']}".encode())
    sys.exit(rank_main())


def _end_ranks(ranks: Sequence[BaseProcess]) -> set[int]:
    """End the ranks and their children. Return the ranks that SIGTERM did not end."""

    def send_signal(number: signal.Signals) -> None:
        for rank in ranks:
            if rank.exitcode is None and rank.pid is not None:
                try:
                    os.killpg(rank.pid, number)
                except ProcessLookupError:  # before its setsid
                    with suppress(ProcessLookupError):
                        os.kill(rank.pid, number)

    send_signal(signal.SIGTERM)
    deadline = time.monotonic() + PATIENCE
    while (
        running_ranks := [n for n, rank in enumerate(ranks) if rank.exitcode is None]
    ) and time.monotonic() < deadline:
        time.sleep(POLL)
    send_signal(signal.SIGKILL)
    for n in running_ranks:
        ranks[n].join(PATIENCE)
    return set(running_ranks)


def environment_of_children() -> dict[str, str]:
    """Return the environment for an engine's process: this process's, without the launcher's variables.

    SGLang's memory saver refuses the allocator option expandable_segments, so remove that too."""
    rank_variables = {*LAUNCHED_BY, STORE_FILE, SECRET_FILE}
    launcher_variables = {*rank_variables, "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK"}
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in launcher_variables and not name.startswith("TORCHELASTIC_")
    }
    for name in ALLOCATOR & environment.keys():
        if options := EXPANDABLE.sub("", environment.pop(name)).strip(", "):
            environment[name] = options
    return environment


def explain_failures(
    failures: Mapping[int, tuple[int, Any]], folder: Path, forwarded: int | None = None
) -> tuple[int, str]:
    """Return exit code and message of the first cause. A killed rank's code: 128 + signal.

    failures   rank -> (exit code, negative for a signal; content of its error file)
    forwarded  signal that ranks received as SIGUSR1

    The cause is the first of these that exists:
    1. a hang that a watchdog reported (the stuck rank is killed too, so this comes before killed ranks)
    2. a killed rank
    3. the earliest error
    4. a rank that lost a peer or that NCCL aborted
    5. a rank that the launcher ended"""

    def get_priority(rank: int) -> tuple[int, float]:
        code, error = failures[rank]
        has_line = isinstance(error, dict) and "line" in error
        if code == HUNG and has_line:
            return -1, error["timestamp"]
        if code < 0 and code not in (-signal.SIGABRT, -signal.SIGTERM):
            return 0, 0.0
        if has_line:
            return (2 if error["peer_lost"] else 1), error["timestamp"]
        # NCCL's watchdog aborts ranks that wait for an ended one.
        return {-signal.SIGABRT: 2, -signal.SIGTERM: 3}.get(code, 1), 0.0

    rank = min(failures, key=get_priority)
    code, error = failures[rank]
    # SIGUSR1 kills a rank that has not installed its handler yet, or has removed it.
    if forwarded is not None and code == -signal.SIGUSR1:
        reason = f"stopped by {signal.Signals(forwarded).name}: rank {rank} had nothing to save"
        return Interrupted.code, f"{reason}; the same command continues from what is in {folder}"
    if isinstance(error, dict) and "line" in error and not (code < 0 and error["peer_lost"]):
        return (code if code > 0 else error["code"]), str(error["line"])
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else "of unknown name"
        hint = ""
        if -code == signal.SIGKILL:
            hint = "; SIGKILL comes when memory runs out (see dmesg) or a process was stopped for too long"
        cause = f"rank {rank} was killed by signal {-code} ({name}), the others were ended{hint}"
        return 128 - code, f"{cause}; what the run wrote is in {folder}"
    failure = f"rank {rank} ended with exit code {code}"
    return code, f"{failure}: its output is above, what the run wrote is in {folder}"


def write_error_file(line: str, code: int, *, peer_lost: bool = False) -> bool:
    """Write a rank's last line for its launcher. Returns False if that fails."""
    path = os.environ.get(_ERROR_FILE)
    if not path:
        return False
    # torchrun reads `message` and `timestamp`, `launch` the rest
    content = {"message": line, "timestamp": time.time(), "line": line, "code": code, "peer_lost": peer_lost}
    try:
        write_atomic(Path(path), json.dumps(content))
    except OSError:  # perhaps a full disk
        return False
    return True


def lost_a_peer(error: BaseException) -> bool:
    return isinstance(error, dist.DistNetworkError | dist.DistBackendError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in _PEER_LOST)
    )
