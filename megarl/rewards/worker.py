"""A verifier process: reads batches of (response, answer) from stdin, writes one verdict after the other to
stdout.

A message is JSON on one line. VerifierPool starts the process.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import threading
import time
from typing import IO, Any

from megarl.config.errors import ConfigError
from megarl.rewards.verdict import Verdict, Verifier, get_verifier

_MAX_TEXT = 1000  # characters of an extracted answer or an error that travel back
_GRACE = 2.0  # seconds after the limit of an item at which a worker whose parent has died ends by itself
_PARENT_CHECK = 5.0  # seconds
# Address space beyond the data memory: the interpreter, its libraries and what they map. Bounds shared
# memory, which is not data.
_MAPPED = 1 << 30


def judge(verifier: Verifier, response: str, answer: str) -> Verdict:
    """Return the verifier's verdict; whatever it raises or returns wrongly is a verdict with an error."""
    try:
        result: object = verifier(response, answer)
    except MemoryError:
        return Verdict(False, error="verifier ran out of memory")
    except Exception as error:  # noqa: BLE001 (recorded with the answer: a verifier's bug must not end the run)
        return Verdict(False, error=f"{type(error).__name__}: {error}".split("\n")[0])
    if isinstance(result, Verdict):
        return result
    if isinstance(result, bool):
        return Verdict(result)
    return Verdict(False, error=f"verifier returned {type(result).__name__}, not bool or Verdict")


def main() -> None:
    """Read the settings, answer `null` (ready) or the reason why this process cannot start; serve until input
    ends."""
    threading.Thread(target=_follow, args=(os.getppid(),), daemon=True).start()
    # Signals for the job (Ctrl-C, Slurm's warning) are the trainer's business, which needs its verifiers to
    # save and stop.
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    settings = json.loads(source.readline())
    # What a verifier prints must not get into the messages; stderr stays for a failing start.
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    limit = settings["memory_mib"] << 20
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_AS, (limit + _MAPPED, limit + _MAPPED))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        verifier = get_verifier(settings["verifier"])
    except ConfigError as error:  # goes to the parent, which raises it
        _write(sink, str(error))
        return
    os.dup2(nowhere, 2)
    _write(sink, None)
    for batch in source:
        for response, answer in json.loads(batch):
            # The parent kills a worker that overruns. If the parent is dead nobody does: SIGALRM's default
            # action ends it.
            signal.setitimer(signal.ITIMER_REAL, settings["timeout"] + _GRACE)
            verdict = judge(verifier, response, answer)
            signal.setitimer(signal.ITIMER_REAL, 0)
            texts = (
                None if text is None else str(text)[:_MAX_TEXT] for text in (verdict.extracted, verdict.error)
            )
            _write(sink, [bool(verdict.correct), *texts])


def _write(sink: IO[bytes], message: Any) -> None:
    sink.write(json.dumps(message).encode() + b"\n")
    sink.flush()


def _follow(parent: int) -> None:
    """End this process once its parent is gone.

    The end of its input does not say so: a forked child of the parent may outlive it with the pipe open."""
    while os.getppid() == parent:
        time.sleep(_PARENT_CHECK)
    os._exit(0)
