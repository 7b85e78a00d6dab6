"""Starting the ranks of a job from one process, with torch's elastic launcher (what torchrun uses), on this machine.

A rank that ends with an error leaves word; the launcher, which outlives them all, says it once.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import torch.distributed as dist

from megarl.config.errors import Interrupted
from megarl.config.schema import ParallelConfig
from megarl.parallel.machine import ALLOCATOR, EXPANDABLE

_WORD_FILE = "TORCHELASTIC_ERROR_FILE"  # set by the elastic launcher, another file for each rank
_PEER_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")  # gloo raises plain RuntimeErrors
_ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_ASKING = (signal.SIGTERM, signal.SIGUSR1)
HUNG = 124  # exit code of a rank whose watchdog has fired, as of the command `timeout`
# Exit codes after which the same ranks may do better: hung, lost a peer, and killed by what comes from outside or from a bug in C.
LOST = (1, HUNG, *(128 + number for number in (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)))


def ranks_here(config: ParallelConfig) -> int:
    """Processes to start when megarl is started as one process: dp defaults to 1."""
    return config.tp * config.pp * config.cp * (config.dp or 1)


def launch(config: ParallelConfig, arguments: Sequence[str], folder: Path, grace: float = 0.0) -> int:
    """Runs `python -m megarl ARGUMENTS` on every rank and waits; gives 0, or the exit code of the rank that failed first, after one line
    about it (128 + signal for a rank that was killed, as a shell has it). `folder`: where the line sends people to look.

    When one rank ends with an error, or this process is told to end, the other ranks are ended too. With `grace`, a first SIGTERM or
    SIGUSR1 goes to the ranks as SIGUSR1, and they have so many seconds to end by themselves. Everything binds to loopback. Raises
    KeyboardInterrupt after Ctrl-C.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # The ranks report their own errors; the launcher's tables of tracebacks would bury them. (Some of its loggers set their own level.)
    for name in [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed.elastic")]:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", str(config.threads))
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    settings = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks_here(config),
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.1,
        start_method="spawn",
        # Not SIGINT, which would be passed on: a rank that is still importing would answer Ctrl-C with a traceback, one that is in a
        # collective not at all. As a KeyboardInterrupt here it makes the agent end the ranks with SIGTERM.
        signals_to_handle=",".join(number.name for number in _ENDING if not (grace and number in _ASKING)),
    )
    handlers = {number: signal.getsignal(number) for number in (*_ENDING, *_ASKING, signal.SIGALRM)}
    asked = _ask_ranks_on_signal(grace) if grace else []
    try:
        elastic_launch(settings, sys.executable)("-m", "megarl", *arguments)
    except ChildFailedError as error:
        ends = {rank: (f.exitcode, f.error_file_data) for rank, f in error.failures.items()}
        code, line = verdict(ends, folder, asked[0] if asked else None)
        print(f"megarl: {line}", file=sys.stderr, flush=True)
        return code
    except SignalException as error:
        print(f"megarl: ended by {error.sigval.name}, with all ranks", file=sys.stderr, flush=True)
        return 128 + error.sigval
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return 0


def _ask_ranks_on_signal(grace: float) -> list[int]:
    """Installs handlers; gives the list that will hold the signal with which this process was told to end."""
    from torch.distributed.elastic.multiprocessing import SignalException

    asked: list[int] = []

    def ask(number: int, _frame: FrameType | None) -> None:
        if asked or number == signal.SIGALRM:  # a second time, or they took too long
            raise SignalException(f"told to end by signal {number}", signal.Signals(asked[0] if number == signal.SIGALRM else number))
        asked.append(number)
        # Not print: a handler may have cut another one short.
        os.write(sys.stderr.fileno(), f"megarl: {signal.Signals(number).name}: the ranks have {grace:g} s to save and leave\n".encode())
        signal.setitimer(signal.ITIMER_REAL, grace)
        for child in psutil.Process().children():
            with suppress(psutil.NoSuchProcess):
                child.send_signal(signal.SIGUSR1)

    for number in (*_ASKING, signal.SIGALRM):
        signal.signal(number, ask)
    return asked


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
