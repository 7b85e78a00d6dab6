"""Starting the ranks of a job from one process on this machine, and ending them. (On several machines torchrun does it.)

A rank that ends with an error leaves word; the launcher, which outlives them all, says it once.
"""

from __future__ import annotations

import ctypes
import gc
import json
import multiprocessing
import os
import signal
import socket
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
from megarl.config.schema import ParallelConfig
from megarl.parallel.machine import ALLOCATOR, EXPANDABLE
from megarl.parallel.runtime import choose_device

Main = Callable[[Sequence[str]], int]
_WORD_FILE = "TORCHELASTIC_ERROR_FILE"  # set by torchrun too; another file for each rank
_PEER_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")  # gloo raises plain RuntimeErrors
_ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_ASKING = (signal.SIGTERM, signal.SIGUSR1)
_HANDLED = (*_ENDING, signal.SIGUSR1, signal.SIGALRM)
POLL = 0.1  # seconds between two looks at the ranks
PATIENCE = 30.0  # seconds that ranks have to go after SIGTERM
HUNG = 124  # exit code of a rank whose watchdog has fired, as of the command `timeout`
# Exit codes after which the same ranks may do better: hung, lost a peer, and killed by what comes from outside or from a bug in C.
LOST = (1, HUNG, *(128 + number for number in (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)))
_PR_SET_NAME = 15  # linux/prctl.h


def ranks_here(config: ParallelConfig) -> int:
    """Processes to start when megarl is started as one process: dp defaults to 1."""
    return config.tp * config.pp * config.cp * (config.dp or 1)


def launch(main: Main, config: ParallelConfig, arguments: Sequence[str], folder: Path, grace: float = 0.0) -> int:
    """Runs `megarl ARGUMENTS`, which is `main(arguments)`, on every rank and waits; gives 0, or the exit code of the rank that
    failed first, after one line about it (128 + signal for a rank that was killed, as a shell has it). `folder`: where the line sends
    people to look.

    When one rank ends with an error, or this process is told to end, the other ranks are ended too. With `grace`, a first SIGTERM or
    SIGUSR1 goes to the ranks as SIGUSR1, and they have so many seconds to end by themselves. Everything binds to loopback. Raises
    KeyboardInterrupt after Ctrl-C.

    On a CPU ranks are forked from this process and have what it has imported, at no cost in time or memory."""
    os.environ.setdefault("OMP_NUM_THREADS", str(config.threads))
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    ranks: list[BaseProcess] = []
    asked: list[int] = []
    store = None
    handlers = {number: signal.getsignal(number) for number in (_HANDLED if grace else _ENDING)}
    with tempfile.TemporaryDirectory(prefix="megarl-ranks-") as words:
        try:
            for number in handlers:
                signal.signal(number, _handler(ranks, asked, grace))
            store = _start(main, config, arguments, Path(words), ranks)
            while (codes := {rank.exitcode for rank in ranks}) <= {0, None} and None in codes:
                time.sleep(POLL)
            return 0 if codes == {0} else _failed(ranks, Path(words), folder, asked)
        except _ToldToEnd as told:
            _end(ranks)
            print(f"megarl: ended by {told.number.name}, with all ranks", file=sys.stderr, flush=True)
            return 128 + told.number
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            _end(ranks)
            del store  # its thread would keep the next launch of this process from forking
            for number, handler in handlers.items():
                signal.signal(number, handler)


class _ToldToEnd(BaseException):
    """Raised in the launcher by a signal, wherever it is."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = signal.Signals(number)


def _handler(ranks: list[BaseProcess], asked: list[int], grace: float) -> Callable[[int, FrameType | None], None]:
    """For all signals of the launcher; it enters into `asked` the one that was passed on to the ranks."""

    def told(number: int, _frame: FrameType | None) -> None:
        if asked or number not in _ASKING or not grace:  # a second time, or they took too long
            raise _ToldToEnd(asked[0] if number == signal.SIGALRM else number)
        asked.append(number)
        # Not print: a handler may have cut another one short.
        os.write(sys.stderr.fileno(), f"megarl: {signal.Signals(number).name}: the ranks have {grace:g} s to save and leave\n".encode())
        signal.setitimer(signal.ITIMER_REAL, grace)
        for rank in ranks:
            if rank.exitcode is None and rank.pid is not None:
                os.kill(rank.pid, signal.SIGUSR1)

    return told


def _start(main: Main, config: ParallelConfig, arguments: Sequence[str], words: Path, ranks: list[BaseProcess]) -> dist.TCPStore:
    """Starts the ranks into `ranks`, and then the store that they find each other by, whose thread no rank is to inherit."""
    world = ranks_here(config)
    forks = _may_fork(config)
    context: Any = multiprocessing.get_context("fork" if forks else "spawn")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(world)
        common = {
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(listener.getsockname()[1]),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is there: join it, make none
            "TORCHELASTIC_RESTART_COUNT": "0",
        }
        handed = listener.fileno() if forks else None
        signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)  # until a rank has let go of this process's handlers
        gc.collect()
        gc.freeze()  # a collection would write to every object's head, and so copy the memory that forked ranks share
        try:
            for rank in range(world):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank), _WORD_FILE: str(words / str(rank))}
                process = context.Process(target=_be_rank, args=(main, list(arguments), common | own, handed), name=f"rank {rank}")
                process.start()
                ranks.append(process)
        finally:
            gc.unfreeze()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)
        return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


@contextmanager
def without_tokenizer_threads() -> Iterator[None]:
    """Keep the tokenizers library from starting threads in a process that ranks are to be forked from (`_may_fork`)."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _may_fork(config: ParallelConfig) -> bool:
    """CUDA does not survive a fork, nor do other threads, whose locks nobody would open; off Linux, system libraries start some.

    A thread of jemalloc's (of pyarrow's) is none of these: jemalloc takes its locks before a fork and opens them after it."""
    if sys.platform != "linux" or choose_device(config.device).type != "cpu":
        return False
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return len([name for name in names if name != "jemalloc_bg_thd"]) == 1


def _be_rank(main: Main, arguments: list[str], environment: dict[str, str], handed: int | None) -> NoReturn:
    """In the new process. handed: a file that it has been handed down and is not to hold."""
    if handed is not None:
        os.close(handed)
    os.setsid()  # a terminal's Ctrl-C is the launcher's
    for number in _HANDLED:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)
    os.environ.update(environment)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, f"megarl rank {environment['RANK']}".encode())
    sys.exit(main(arguments))


def _send(rank: BaseProcess, number: signal.Signals) -> None:
    """To the rank and whatever it has started."""
    if rank.exitcode is None and rank.pid is not None:
        try:
            os.killpg(rank.pid, number)
        except ProcessLookupError:  # it has not come to its setsid
            with suppress(ProcessLookupError):
                os.kill(rank.pid, number)


def _end(ranks: Sequence[BaseProcess]) -> set[int]:
    """Ends the ranks that are there, and gives those that did not go when they were told to."""
    for rank in ranks:
        _send(rank, signal.SIGTERM)
    end = time.monotonic() + PATIENCE
    while (left := [n for n, rank in enumerate(ranks) if rank.exitcode is None]) and time.monotonic() < end:
        time.sleep(POLL)
    for n in left:
        _send(ranks[n], signal.SIGKILL)
        ranks[n].join(PATIENCE)
    return set(left)


def _failed(ranks: Sequence[BaseProcess], words: Path, folder: Path, asked: Sequence[int]) -> int:
    """Ends the ranks that are left when some have failed, and says why; gives the exit code."""
    killed = _end(ranks)
    ends = {}
    for number, rank in enumerate(ranks):
        code = -signal.SIGTERM if number in killed else rank.exitcode
        if code:
            word = words / str(number)
            ends[number] = code, json.loads(word.read_text(encoding="utf-8")) if word.exists() else None
    code, line = verdict(ends, folder, asked[0] if asked else None)
    print(f"megarl: {line}", file=sys.stderr, flush=True)
    return code


def environment_of_children() -> dict[str, str]:
    """This rank's environment for an engine: without a launcher's settings, which are for other process groups, and without expandable
    segments, which torch_memory_saver refuses (SGLang sleeps by it); the allocator's other options stay."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "ROLE_RANK")
    kept = {name: value for name, value in os.environ.items() if name not in names and not name.startswith("TORCHELASTIC_")}
    for name in ALLOCATOR & kept.keys():
        rest = EXPANDABLE.sub("", kept.pop(name)).strip(", ")
        if rest:
            kept[name] = rest
    return kept


def verdict(failures: Mapping[int, tuple[int, Any]], folder: Path, asked: int | None = None) -> tuple[int, str]:
    """Exit code and line for what became of the ranks: rank -> (exit code, negative for a signal; the word that it left, if any).
    asked: the signal that this process was sent and has passed on to them as SIGUSR1.

    The cause is a hang that a watchdog has reported: who is stuck does not end when the launcher asks, and is killed. Else it is a rank
    that was killed; else the earliest that ended with an error of its own; a rank that merely lost its peers, or that the launcher
    ended, comes last."""

    def order(rank: int) -> tuple[int, float]:
        code, word = failures[rank]
        left = isinstance(word, dict) and "line" in word
        if code == HUNG and left:
            return -1, word["timestamp"]
        if code < 0:
            return (0 if -code != signal.SIGTERM else 3), 0.0
        return (2 if left and word["peer_lost"] else 1), word["timestamp"] if left else 0.0

    rank = min(failures, key=order)
    code, word = failures[rank]
    if asked is not None and code == -signal.SIGUSR1:  # it had not come to where it takes the signal as a wish, or had left that
        told = f"stopped by {signal.Signals(asked).name}: rank {rank} had nothing to save"
        return Interrupted.code, f"{told}; the same command continues from what is in {folder}"
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else "of unknown name"
        hint = "; the kernel does that when memory runs out: see dmesg" if -code == signal.SIGKILL else ""
        return (
            128 - code,
            f"rank {rank} was killed by signal {-code} ({name}), the others were ended{hint}; what the run wrote is in {folder}",
        )
    if isinstance(word, dict) and "line" in word:
        return code, str(word["line"])
    return code, f"rank {rank} ended with exit code {code}: what it said is above, what the run wrote is in {folder}"


def leave_word(line: str, *, peer_lost: bool = False) -> bool:
    """A rank's last line, for its launcher to say; False where no launcher waits for it."""
    path = os.environ.get(_WORD_FILE)
    if not path:
        return False
    Path(path).write_text(json.dumps({"message": line, "timestamp": time.time(), "line": line, "peer_lost": peer_lost}), encoding="utf-8")
    return True


def lost_a_peer(error: BaseException) -> bool:
    """Whether a collective failed because another rank has gone: that one's end is the news, not this."""
    return isinstance(error, dist.DistNetworkError | dist.DistBackendError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in _PEER_LOST)
    )
