"""A verifier process: reads batches of (response, answer) from stdin, writes one verdict after the other to stdout.

A message is a 4-byte length (big endian) and JSON. VerifierPool starts it.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import struct
import sys
from typing import Any

from megarl.config.errors import ConfigError
from megarl.rewards.registry import get_verifier
from megarl.rewards.verdict import Verdict, Verifier

HEADER = struct.Struct(">I")
_MAX_TEXT = 1000  # characters of an extracted answer or an error that travel back
_GRACE = 2.0  # seconds after the limit of an item at which a worker whose parent has died ends by itself
# Address space beyond the data memory: the interpreter, its libraries and what they map. Bounds shared memory, which is not data.
_MAPPED = 1 << 30


def encode(message: Any) -> bytes:
    """One framed message."""
    body = json.dumps(message).encode()
    return HEADER.pack(len(body)) + body


def judge(verifier: Verifier, response: str, answer: str) -> Verdict:
    """The verifier's verdict; whatever it raises or returns wrongly is a verdict with an error."""
    try:
        result: object = verifier(response, answer)
    except MemoryError:
        return Verdict(False, error="verifier ran out of memory")
    except Exception as error:  # noqa: BLE001 - recorded with the answer: a verifier's bug must not end the run
        return Verdict(False, error=f"{type(error).__name__}: {error}".split("\n")[0])
    if isinstance(result, Verdict):
        return result
    if isinstance(result, bool):
        return Verdict(result)
    return Verdict(False, error=f"verifier returned {type(result).__name__}, not bool or Verdict")


def main() -> None:
    """Reads the settings, answers `null` (ready) or the reason why it cannot start, then serves until its input ends."""
    parent = os.getppid()
    # Signals for the job (Ctrl-C, Slurm's warning) are the trainer's business; it still needs its verifiers to save and stop.
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    source, sink = os.dup(0), os.dup(1)
    settings = _read(source, parent)
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
    while True:
        for response, answer in _read(source, parent):
            # The parent kills a worker that overruns. If the parent is dead, nobody does: SIGALRM's default action then ends it.
            signal.setitimer(signal.ITIMER_REAL, settings["timeout"] + _GRACE)
            verdict = judge(verifier, response, answer)
            signal.setitimer(signal.ITIMER_REAL, 0)
            _write(sink, [bool(verdict.correct), _short(verdict.extracted), _short(verdict.error)])


def _short(text: str | None) -> str | None:
    return None if text is None else str(text)[:_MAX_TEXT]


def _write(sink: int, message: Any) -> None:
    data = memoryview(encode(message))
    while data:
        data = data[os.write(sink, data) :]


def _read(source: int, parent: int) -> Any:
    (size,) = HEADER.unpack(_read_exactly(source, HEADER.size, parent))
    return json.loads(_read_exactly(source, size, parent))


def _read_exactly(source: int, size: int, parent: int) -> bytes:
    """`size` bytes; ends the process when the input ends or the parent is gone.

    The end of the input alone is not enough: a forked child of the parent may outlive it with the other end of the pipe open."""
    chunks = []
    while size:
        if not select.select([source], [], [], 5.0)[0]:
            if os.getppid() != parent:
                sys.exit(0)
            continue
        chunk = os.read(source, min(size, 1 << 20))
        if not chunk:
            sys.exit(0)
        chunks.append(chunk)
        size -= len(chunk)
    return b"".join(chunks)
