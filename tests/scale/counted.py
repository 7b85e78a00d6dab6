"""`megarl ARGUMENTS` whose ranks count what they send: python -m tests.scale.counted FOLDER ARGUMENTS

Each rank writes FOLDER/rank-00000.json, and rank 0 FOLDER/phases.txt: when each of its phases began. Messages
and bytes are the kernel's own count of this process's sockets (TCP_INFO), so that gloo's handshakes are in
it. The store is a file, and not in it.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from megarl.cli.main import main
from megarl.parallel import runtime as parallel
from megarl.parallel.runtime import Runtime
from megarl.schedule.watchdog import Watchdog

TCP_INFO = 11  # linux/tcp.h; the offsets below are struct tcp_info's
RECEIVED, SEGMENTS, SENT = 128, 152, 200


def sockets() -> list[socket.socket]:
    """Copies of this process's connected TCP sockets, to be closed by the caller."""
    found, names = [], set[str]()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            # Once each: a copy may take the number that the list itself had.
            inode = os.readlink(f"/proc/self/fd/{name}")
            if inode.startswith("socket:") and inode not in names:
                names.add(inode)
                one = socket.socket(fileno=os.dup(int(name)))
                if (
                    one.family in (socket.AF_INET, socket.AF_INET6)
                    and one.type == socket.SOCK_STREAM
                    and _peer(one)
                ):
                    found.append(one)
                else:
                    one.close()
    return found


def _peer(one: socket.socket) -> int:
    """The port at the other end; 0 where nobody is."""
    try:
        return int(one.getpeername()[1])
    except OSError:
        return 0


def traffic() -> Counter[str]:
    """sockets, messages and bytes of this process so far, both directions together; bytes_in: those that it
    received."""
    total: Counter[str] = Counter()
    for one in sockets():
        info = one.getsockopt(socket.IPPROTO_TCP, TCP_INFO, 256)
        (received,), (inward, outward), (sent,) = (
            struct.unpack_from(kind, info, at)
            for kind, at in (("<Q", RECEIVED), ("<II", SEGMENTS), ("<Q", SENT))
        )
        total.update(sockets=1, messages=inward + outward, bytes=received + sent, bytes_in=received)
        one.close()
    return total


class Count:
    """What one rank has counted, written to its file whenever it is worth it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.found, self.rank = folder, dict[str, Any](), 0
        self.imported: set[str] = set()

    def started(self, runtime: Runtime, seconds: float) -> None:
        self.rank = runtime.rank
        self.imported = set(sys.modules)
        self.found = {
            "start_seconds": seconds,
            "start": dict(traffic()),
            "threads": len(os.listdir("/proc/self/task")),
        }
        self.write()

    def write(self) -> None:
        later = sorted(set(sys.modules) - self.imported)  # each rank pays for these
        ended = {"end": dict(traffic()), "cpu_seconds": time.process_time(), "imported": later}
        whole = self.folder / f"rank-{self.rank:05d}.json"
        aside = whole.with_suffix(".partial")  # the launcher may end a rank in the midst of it
        aside.write_text(json.dumps(self.found | ended))
        aside.replace(whole)


def install(folder: Path) -> None:
    """Puts the counting where a rank joins the job and where it leaves it."""
    count = Count(folder)
    start, stop = parallel.start, parallel.stop

    def counted_start(*arguments: Any, **given: Any) -> Runtime:
        began = time.perf_counter()
        runtime = start(*arguments, **given)
        count.started(runtime, time.perf_counter() - began)
        return runtime

    def counted_stop(**given: bool) -> bool:
        if count.found:
            count.write()
        return stop(**given)

    phase = Watchdog.phase

    def noted_phase(self: Watchdog, name: str, stage: str | None = None, step: int | None = None) -> None:
        phase(self, name, stage, step)
        if self.rank == 0:
            with open(folder / "phases.txt", "a", encoding="utf-8") as file:
                file.write(f"{time.time()} {name}\n")

    parallel.start, parallel.stop, Watchdog.phase = counted_start, counted_stop, noted_phase  # type: ignore[assignment, method-assign]


if __name__ == "__main__":
    install(Path(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
