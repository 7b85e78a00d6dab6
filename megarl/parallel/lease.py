"""The right to write into a folder: one command at a time has it, on all machines that see the folder.

A lease is a file, lease-000007.json, that says who has it. Whoever wants the folder makes the file with the
next number, which only one can, and then deletes those before it. So a lease is lost when its file is gone,
and each process that writes into the folder looks for it as it renews it (a new time of modification, which
the file server sets: machines' clocks are not compared).

Another command takes a lease over that was released; whose processes are provably gone (all were on this
machine, and the system has dropped their lock on the file); or that nobody has renewed for `limit` seconds.
Who cannot renew it for so long has ended by then: on Linux a timer of the kernel kills the process, also one
that is stopped (SIGSTOP) and would go on writing once it is woken.

filelock's `SoftFileLease` (4.2) does not replace this. It lets an owner that lost its lease keep writing. It
belongs to one process: when that dies, the folder is free, though ranks of the same job still write. And each
command must be given the owner's `limit`, which the file says here.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import grp
import json
import os
import pwd
import re
import shutil
import signal
import socket
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from io import FileIO
from pathlib import Path
from typing import IO, Any

from megarl.config.errors import ConfigError, Interrupted, LeaseError
from megarl.config.files import append_whole, why

LIMIT = 360.0  # seconds, where no configuration says otherwise
FIRST, NAME = "lease-000001.json", re.compile(r"lease-(\d{6,})\.(json|released)")
BOOT = Path("/proc/sys/kernel/random/boot_id")  # another one after each boot of the machine
POLL, PATIENCE = 0.2, 3.0  # seconds between two looks at another's lease, and that one is looked at at least
MARGIN = 5.0  # seconds by which a lease must be older than its limit: times of files are coarse
RENEWALS = 20  # in the time that a lease lasts without one
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


@dataclass(frozen=True)
class Owner:
    """Who has a lease, as its file says. machine: see BOOT; machines: of the whole job; locked: whether the
    file system knows locks; since: seconds since 1970."""

    command: str
    host: str
    machine: str
    machines: int
    pid: int
    job: str
    since: float
    limit: float
    locked: bool

    def __str__(self) -> str:
        """Return e.g. `megarl train runs there since 2026-11-24 16:30:05 on node3 (pid 123, Slurm job 7)`."""
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        job = f", Slurm job {self.job}" if self.job else ""
        return f"{self.command} runs there since {since} on {self.host} (pid {self.pid}{job})"


@dataclass(frozen=True)
class Lease:
    """A lease that was taken. It may be handed to other processes of the job: each keeps it (`kept`)."""

    path: Path
    limit: float

    def renew(self) -> None:
        """Note that its owner lives. Raises LeaseError where another command has taken it over, or where the
        file system has refused for almost as long as it lasts."""
        hold, now = _held[self], time.monotonic()
        try:
            os.utime(self.path)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ESTALE):
                raise LeaseError(
                    f"{self.path.parent}: its lease {self.path.name} is gone: another command has "
                    "taken the folder over, or it was deleted (this command writes nothing more)"
                ) from None
            if now - hold.renewed < 0.9 * self.limit:
                return  # the file system may come back
            silent = f"its lease could not be renewed for {now - hold.renewed:.0f} s: {error.strerror}"
            raise LeaseError(
                f"{self.path.parent}: {silent} (another command may take the folder over now; "
                "mend the file system and start again)"
            ) from None
        hold.renewed = now
        if hold.timer is not None:
            hold.timer.set(self.limit - (time.monotonic() - now))

    def release(self) -> None:
        """Let others have the folder. Raises LeaseError where one has taken it already.

        The first lease leaves nothing behind. Of later ones the number stays: whoever has just found the one
        before abandoned, and now makes the file of this number, must not succeed."""
        hold = _held.pop(self)
        try:
            if self.path.name == FIRST:
                self.path.unlink()
            else:
                self.path.rename(self.path.with_suffix(".released"))
        except FileNotFoundError:
            what = "another command has taken it over, or it was deleted"
            raise LeaseError(f"{self.path.parent}: {what}") from None
        except OSError as error:
            what = f"its lease cannot be released: {why(error)} (on this machine the next command takes it)"
            raise LeaseError(f"{self.path.parent}: {what}") from error
        finally:
            hold.file.close()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Renew the lease in a thread while the block lasts, and end this process at once when it is lost, or
        when it could not be renewed in time. To be entered by every process that writes into the folder: the
        files that it makes are private to this user."""
        if self not in _held:  # taken by another process, and handed over
            _held[self] = _Hold(_locked(self.path), time.monotonic())
        hold, end = _held[self], threading.Event()
        hold.timer = _Timer() if sys.platform == "linux" else None
        self.renew()

        def keep() -> None:
            while not end.wait(self.limit / RENEWALS):
                try:
                    renew_held()
                except LeaseError as error:
                    from megarl.parallel.launch import write_error_file

                    if not write_error_file(str(error), error.code):
                        print(f"megarl: {error}", file=sys.stderr, flush=True)
                    os._exit(error.code)

        thread = threading.Thread(target=keep, name="lease", daemon=True)
        thread.start()
        try:
            with private_files():
                yield
        finally:
            end.set()
            thread.join()
            if hold.timer is not None:
                hold.timer.delete()
                hold.timer = None


@contextmanager
def leased(
    folder: Path,
    command: str,
    limit: float = LIMIT,
    *,
    wait: float = 0.0,
    stop: Callable[[], bool] = lambda: False,
    machines: int = 1,
    key: str = "",
    remedy: str,
) -> Iterator[Lease]:
    """Make a folder if it is missing, and have the right to write there while the block lasts. The processes
    that do enter `Lease.kept`.

    limit     seconds without a sign of life after which another command may take it over
    wait      seconds for another command to leave
    stop      tells whether to wait no more
    machines  of this command's processes
    key       of the configuration that named the folder, or an option
    remedy    what to do where another command has it

    Files that are made in the block are private to this user. Raises ConfigError where the folder cannot be
    written, where other users could replace its files, or where another command has it; Interrupted where it
    was to wait no more."""
    name = f"{key}: {folder}" if key else str(folder)
    me = Owner(
        command=command,
        host=socket.gethostname(),
        machine=_machine(),
        machines=machines,
        pid=os.getpid(),
        job=os.environ.get("SLURM_JOB_ID", ""),
        since=round(time.time(), 1),
        limit=limit,
        locked=True,
    )
    lease, started, told = None, time.monotonic(), False
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _check_private(folder, name)
        while lease is None:
            number, path = _newest(folder)
            owner = _owner(path, limit) if path is not None else None
            if path is None or owner is None or _over(path, owner):
                lease = _make(folder.resolve(), number + 1, me)  # None where another was quicker
                continue
            waited = time.monotonic() - started
            if stop():
                raise Interrupted(f"{name}: told to stop, while {owner} (nothing was written)")
            if waited >= max(wait, PATIENCE):
                what = f"{owner}, and gave its last sign of life {_age(path):.0f} s ago"
                what += f"; waited {wait:g} s for it" if wait > PATIENCE else ""
                raise ConfigError(f"{name}: {what} ({remedy})")
            if not told and waited >= PATIENCE:
                told = True
                what = f"{name}: {owner}; waits at most {wait:g} s for it"
                print(f"megarl: {what}", file=sys.stderr, flush=True)
            time.sleep(POLL)
    except OSError as error:
        raise ConfigError(f"{name}: cannot be written: {error.strerror} (choose another folder)") from None
    try:
        with private_files():
            yield lease
    finally:
        lease.release()


@contextmanager
def private_files() -> Iterator[None]:
    """Make files in the block readable by this user alone (umask 077)."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def _check_private(folder: Path, name: str) -> None:
    """Refuse a folder in which another user could replace files: one of another owner, or one that anybody
    may write into. Warn of one that a group may write into. Raises ConfigError, OSError."""
    with tempfile.TemporaryFile(dir=folder) as probe:
        # Not the process's uid: to a file server that maps users, root is another one.
        mine = os.fstat(probe.fileno()).st_uid
    found = folder.stat()
    remedy = "choose a folder that other users cannot write into"
    if found.st_uid != mine:
        owner, me = _name_of(pwd.getpwuid, found.st_uid), _name_of(pwd.getpwuid, mine)
        raise ConfigError(f"{name}: belongs to the user {owner}, and this command runs as {me} ({remedy})")
    if found.st_mode & stat.S_IWOTH:
        raise ConfigError(f"{name}: any user may write there (chmod o-w {folder}, or {remedy})")
    if found.st_mode & stat.S_IWGRP and found.st_gid != mine:  # a user's private group has the user's number
        group = _name_of(grp.getgrgid, found.st_gid)
        what = f"members of the group {group} may write there, and so act in this user's name"
        print(
            f"megarl: {name}: {what} (chmod g-w {folder}, unless that is meant)", file=sys.stderr, flush=True
        )


def _name_of(entry: Callable[[int], tuple[Any, ...]], number: int) -> str:
    """Return the name of a user or group, or its number where it has no name."""
    try:
        return str(entry(number)[0])
    except KeyError:
        return str(number)


def make_anew(folder: Path) -> None:
    """Empty a folder, private to the user. It goes as a whole: a half deleted one would have lost its
    mark. Raises ConfigError where another command writes there."""
    with leased(folder, "megarl", remedy="stop it there, wait for it, or choose another folder"):
        pass
    old = folder.with_name(f"{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
        shutil.rmtree(old)
    folder.mkdir(parents=True, mode=0o700)


def renew_held() -> None:
    """Renew every lease that this process has, each when its time has come. Raises LeaseError."""
    for lease, hold in list(_held.items()):
        if time.monotonic() - hold.renewed >= lease.limit / RENEWALS:
            lease.renew()


def _newest(folder: Path) -> tuple[int, Path | None]:
    """Return the highest number of a lease, 0 without one, and its file."""
    found = [(int(match[1]), folder / match[0]) for match in map(NAME.fullmatch, os.listdir(folder)) if match]
    return max(found, default=(0, None), key=lambda one: one[0])


def _owner(path: Path, limit: float) -> Owner | None:
    """Return who has a lease; None where it was released."""
    if path.suffix == ".released":
        return None
    try:
        return Owner(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):  # released just now; or half written, whose owner may have died
        return Owner("another command", "a machine", "", 0, 0, "", time.time(), limit, locked=False)


def _over(path: Path, owner: Owner) -> bool:
    """Return whether the owner of a lease is gone, or silent for too long."""
    try:
        if owner.locked and owner.machines == 1 and owner.machine == _machine():
            with open(path, "r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
    except BlockingIOError:
        pass
    except FileNotFoundError:
        return False
    return _age(path) > owner.limit + MARGIN


def _age(path: Path) -> float:
    """Return the seconds since a lease was renewed, by the clock of whoever keeps the files: a file that is
    made now has the time. A lease that has gone in the meantime has the age 0."""
    with tempfile.TemporaryFile(dir=path.parent) as probe, suppress(FileNotFoundError):
        probe.write(b"now")
        probe.flush()
        with open(path, "rb") as file:  # a network's file system asks the server on opening
            return os.fstat(probe.fileno()).st_mtime - os.fstat(file.fileno()).st_mtime
    return 0.0


def _make(folder: Path, number: int, owner: Owner) -> Lease | None:
    """Make the lease of this number and delete those before it; None where another command has made one."""
    path = folder / f"lease-{number:06d}.json"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return None
    # Locked before it says who has it: who reads half of it does not take the owner for gone.
    file, content = FileIO(descriptor, "r+b"), asdict(owner)
    content["locked"] = _lock(file)
    try:
        append_whole(file, json.dumps(content).encode() + b"\n")
    except OSError:  # half a lease would keep everybody out for as long as a whole one
        path.unlink()
        file.close()
        raise
    if _newest(folder)[0] > number:  # it was begun before another took, and released, the same number
        path.unlink()
        file.close()
        return None
    for match in filter(None, map(NAME.fullmatch, os.listdir(folder))):
        if int(match[1]) < number:
            (folder / match[0]).unlink(missing_ok=True)
    lease = Lease(path, owner.limit)
    _held[lease] = _Hold(file, time.monotonic())
    return lease


def _lock(file: IO[bytes]) -> bool:
    """Lock a lease's file for as long as one of the processes lives that have it open. Return False where
    the file system knows no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        return False
    return True


def _locked(path: Path) -> IO[bytes]:
    """Open and lock a lease that another process has taken. Raises LeaseError where it is gone."""
    try:
        file = open(path, "r+b")  # noqa: SIM115 (as long as this process keeps the lease)
    except FileNotFoundError:
        raise LeaseError(f"{path.parent}: another command has taken it over") from None
    _lock(file)
    return file


def _machine() -> str:
    try:
        return BOOT.read_text(encoding="utf-8").strip()
    except OSError:  # not Linux
        return socket.gethostname()


class _Event(ctypes.Structure):
    """sigevent of signal.h, on 64-bit Linux."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signo", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("rest", ctypes.c_byte * 48),
    )


class _Times(ctypes.Structure):
    """itimerspec of time.h."""

    _fields_ = (("interval", ctypes.c_long * 2), ("value", ctypes.c_long * 2))


class _Timer:
    """A timer of the kernel that kills this process, even a stopped one, when its time is up."""

    def __init__(self) -> None:
        self._libc: Any = ctypes.CDLL(None, use_errno=True)
        if not hasattr(self._libc, "timer_create"):  # before glibc 2.34
            self._libc = ctypes.CDLL("librt.so.1", use_errno=True)
        self._timer = ctypes.c_void_p()
        event = _Event(signo=signal.SIGKILL, notify=0)  # SIGEV_SIGNAL
        self._check(
            self._libc.timer_create(time.CLOCK_BOOTTIME, ctypes.byref(event), ctypes.byref(self._timer))
        )

    def set(self, seconds: float) -> None:
        """Kill in so many seconds from now, not at the time that was set before."""
        whole = int(max(seconds, 0.001))
        value = (ctypes.c_long * 2)(whole, int((max(seconds, 0.001) - whole) * 1e9))
        self._check(self._libc.timer_settime(self._timer, 0, ctypes.byref(_Times(value=value)), None))

    def delete(self) -> None:
        self._check(self._libc.timer_delete(self._timer))

    def _check(self, code: int) -> None:
        if code:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), "timer")


@dataclass
class _Hold:
    """What this process has of a lease: its locked file, when it was renewed (time.monotonic), the timer."""

    file: IO[bytes]
    renewed: float
    timer: _Timer | None = field(default=None)


_held: dict[Lease, _Hold] = {}  # inherited by a fork, with the lock
