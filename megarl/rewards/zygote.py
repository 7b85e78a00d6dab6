"""A small process that forks one confined process for each program.

It never sees a program or a test: its children read them. So a program finds nothing in its memory but
Python. programs.py starts it and talks with it by a socket."""

from __future__ import annotations

# So programs that import these start sooner.
import bisect  # noqa: F401
import builtins
import gc
import json
import os
import random
import resource
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from megarl.rewards.program_roles import ROLES
from megarl.rewards.sandbox import can_confine, confine, die_with_parent, remove_tree

MAX_FILE = 16 << 20  # bytes of a file that a program writes
_MAX_OPEN_FILES = 64
_MAX_THREADS, _CHECK_SECONDS = 512, 0.05
MAPPED = 1 << 30  # address space beyond the data limit, for libraries
MAX_REQUEST, MAX_DESCRIPTORS = 1 << 12, 16
_SHARED_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo")


def main() -> NoReturn:
    """Serve requests until the socket closes. Arguments: its number, and the programs' folder."""
    control, folder = socket.socket(fileno=os.dup(int(sys.argv[1]))), Path(sys.argv[2])
    os.close(int(sys.argv[1]))  # it may be above the descriptors that `_run` closes
    die_with_parent()
    # The path of programs: Python's own library, and installed packages.
    standard = os.path.dirname(os.__file__)
    sys.path[:] = [
        path
        for path in sys.path
        if f"{path}/".startswith(f"{standard}/") or Path(path).name in ("site-packages", "dist-packages")
    ]
    readable = [Path(path) for path in {*sys.path, *_SHARED_LIBRARIES, f"{sys.base_prefix}/lib"}]
    control.send(json.dumps(can_confine()).encode())
    gc.collect()
    gc.freeze()
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, MAX_REQUEST, MAX_DESCRIPTORS)
        if not message:
            os._exit(0)
        if message == b"stop":  # it came after the program's end
            continue
        request, children = json.loads(message), list[int]()
        given = iter(descriptors)
        for role, count in request["processes"]:
            own = [next(given) for _ in range(count)]
            if not (child := os.fork()):
                _run(role, own, request, folder, readable)
            children.append(child)
        for descriptor in descriptors:
            os.close(descriptor)
        reply = _wait(children, control, request["seconds"])
        if os.listdir(folder):
            remove_tree(folder)
            folder.mkdir(0o700)
        control.send(json.dumps(reply).encode())


def _run(
    role: str, descriptors: list[int], request: dict[str, Any], folder: Path, readable: list[Path]
) -> NoReturn:
    """Confine this process, then act as `role`, with descriptors from 3 on; the first is the setup."""
    code = 1
    try:
        die_with_parent()
        top = max(descriptors) + 1
        moved = [os.dup2(descriptor, top + i) for i, descriptor in enumerate(descriptors)]
        descriptors = [os.dup2(descriptor, 3 + i) for i, descriptor in enumerate(moved)]
        os.closerange(3 + len(descriptors), 1024)
        with open(descriptors[0]) as file:
            setup = json.load(file)
        cpu = request["cpu_seconds"]
        resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu))
        _limit(resource.RLIMIT_DATA, request["memory"])
        _limit(resource.RLIMIT_AS, request["memory"] + MAPPED)
        _limit(resource.RLIMIT_CORE, 0)
        resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_FILE, MAX_FILE))
        resource.setrlimit(resource.RLIMIT_NOFILE, (_MAX_OPEN_FILES, _MAX_OPEN_FILES))
        os.chdir(folder)
        is_answer = role != "tests"  # tests are the data set's, and may need folders
        if not confine(folder, readable, files_only=is_answer) and not request["unconfined"]:
            os._exit(1)
        random.seed(0)
        sys.argv[:] = ["answer.py"]
        vars(builtins).update(exit=sys.exit, quit=sys.exit)  # as Python's site module does
        code = ROLES[role](setup, descriptors[1:])
    finally:  # also after SystemExit: an answer must not return into the loop
        os._exit(code)


def _limit(kind: int, limit: int) -> None:
    """Lower a limit; keep it if it is lower already."""
    _, hard = resource.getrlimit(kind)
    value = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(kind, (value, value))


def _has_many_threads(children: list[int]) -> bool:
    """Return whether a program has more threads than allowed. RLIMIT_NPROC does not limit root."""
    return any(len(os.listdir(f"/proc/{child}/task")) > _MAX_THREADS for child in children)


def _wait(children: list[int], control: socket.socket, seconds: float) -> dict[str, Any]:
    """Wait for the last child, the limit, or a message to stop; kill all.

    Returns: `code` of the last (negative: signal), `timed_out`, and CPU `seconds` of all."""
    end, poll = time.monotonic() + seconds, select.poll()
    last = os.pidfd_open(children[-1])
    poll.register(last, select.POLLIN)
    poll.register(control, select.POLLIN)
    ready = poll.poll(0)
    while not ready and (left := end - time.monotonic()) > 0 and not _has_many_threads(children):
        ready = poll.poll(min(left, _CHECK_SECONDS) * 1000)
    os.close(last)
    if any(descriptor == control.fileno() for descriptor, _ in ready):
        control.recv(MAX_REQUEST)
    cpu, status = 0.0, 0
    for child in children:
        os.kill(child, signal.SIGKILL)
        _, status, usage = os.wait4(child, 0)
        cpu += usage.ru_utime + usage.ru_stime
    return {"code": os.waitstatus_to_exitcode(status), "timed_out": not ready, "seconds": cpu}
