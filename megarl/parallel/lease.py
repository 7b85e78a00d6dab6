"""Leases: one command at a time writes into a folder, on all machines that see it.

A command takes the folder by creating the file with the next number (lease-000007.json), and deletes older
ones. An owner whose file is gone has lost the lease. Owners renew their file's time, which the file server
sets, so machines' clocks do not matter.

A kernel timer kills even a stopped owner that cannot renew.

filelock's `SoftFileLease` (4.2) does not end an owner that lost it, and is free when one process dies, though
other ranks still write.
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
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from typing import IO, Any

from megarl.config.errors import ConfigError, Interrupted, LeaseError
from megarl.config.files import append_atomic, describe_error

LIMIT = 360.0  # seconds
FIRST, NAME = "lease-000001.json", re.compile(r"lease-(\d{6,})\.(json|released)")
BOOT = Path("/proc/sys/kernel/random/boot_id")  # changes at each boot
POLL, PATIENCE = 0.2, 3.0  # seconds between checks, minimum wait
MARGIN = 5.0  # seconds beyond the limit: file times are coarse
RENEWALS = 20  # within `limit` seconds
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


@dataclass(frozen=True)
class Owner:
    """A lease's owner, as stored in its file.

    machine   see BOOT
    since     seconds since 1970
    locked    the file system supports locks"""

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
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        job = f", Slurm job {self.job}" if self.job else ""
        return f"{self.command} runs there since {since} on {self.host} (pid {self.pid}{job})"


@dataclass(frozen=True)
class Lease:
    """A folder's lease, for all processes of a job."""

    path: Path
    limit: float

    def renew(self) -> None:
        """Renew the lease. Raises LeaseError if it is lost, or about to expire."""
        hold, start = _held_leases[self], time.monotonic()
        try:
            os.utime(self.path)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ESTALE):
                raise LeaseError(
                    f"{self.path.parent}: its lease {self.path.name} is gone: another command has "
                    "taken the folder over, or it was deleted (this command writes nothing more)"
                ) from None
            if start - hold.renewed < 0.9 * self.limit:
                return  # the file system may come back
            problem = f"its lease could not be renewed for {start - hold.renewed:.0f} s: {error.strerror}"
            raise LeaseError(
                f"{self.path.parent}: {problem} (another command may take the folder over now; "
                "repair the file system and start again)"
            ) from None
        hold.renewed = start
        if hold.timer is not None:
            hold.timer.set(self.limit - (time.monotonic() - start))

    def release(self) -> None:
        """Release the folder. Raises LeaseError if another command has taken it.

        Every lease but the first leaves a file: a command that found the previous one abandoned may be about
        to create this number, and must fail."""
        hold = _held_leases.pop(self)
        try:
            if self.path.name == FIRST:
                self.path.unlink()
            else:
                self.path.rename(self.path.with_suffix(".released"))
        except FileNotFoundError:
            what = "another command has taken it over, or it was deleted"
            raise LeaseError(f"{self.path.parent}: {what}") from None
        except OSError as error:
            problem = f"its lease cannot be released: {describe_error(error)}"
            raise LeaseError(f"{self.path.parent}: {problem} (the next command here takes it)") from error
        finally:
            hold.file.close()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Renew the lease in a thread during the block. Ends this process if it is lost.

        Every process that writes into the folder must enter it."""
        if self not in _held_leases:  # handed over by another process
            try:
                file = open(self.path, "r+b")  # noqa: SIM115 (open as long as the lease)
            except FileNotFoundError:
                raise LeaseError(f"{self.path.parent}: another command has taken it over") from None
            _lock(file)
            _held_leases[self] = _Hold(file, time.monotonic())
        hold, stop_event = _held_leases[self], threading.Event()
        hold.timer = _Timer()
        self.renew()

        def renew_regularly() -> None:
            while not stop_event.wait(self.limit / RENEWALS):
                try:
                    renew_held()
                except LeaseError as error:
                    from megarl.parallel.launch import write_error_file

                    if not write_error_file(str(error), error.code):
                        print(f"megarl: {error}", file=sys.stderr, flush=True)
                    os._exit(error.code)

        thread = threading.Thread(target=renew_regularly, name="lease", daemon=True)
        thread.start()
        try:
            with private_files():
                yield
        finally:
            stop_event.set()
            thread.join()
            hold.timer.delete()
            hold.timer = None


@contextmanager
def hold_lease(
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
    """Create a folder if necessary, and hold its lease during the block.

    limit   seconds without renewal until the lease may be taken over
    wait    seconds to wait for another command
    key     names the folder in messages
    remedy  if another command has the folder

    New files are private to this user. Raises ConfigError if the folder is not writable, not private or
    taken, and Interrupted if `stop` ended the wait."""
    name = f"{key}: {folder}" if key else str(folder)
    new_owner = Owner(
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
    lease, start, is_reported = None, time.monotonic(), False
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _check_private(folder, name)
        while lease is None:
            number, path = _newest(folder)
            owner = _owner(path, limit) if path is not None else None
            if path is None or owner is None or _is_expired(path, owner):
                lease = _create(folder.resolve(), number + 1, new_owner)  # None: another command was faster
                continue
            wait_seconds = time.monotonic() - start
            if stop():
                raise Interrupted(f"{name}: stopped, while {owner} (nothing was written)")
            if wait_seconds >= max(wait, PATIENCE):
                what = f"{owner}, and gave its last sign of life {_age(path):.0f} s ago"
                what += f"; waited {wait:g} s for it" if wait > PATIENCE else ""
                raise ConfigError(f"{name}: {what} ({remedy})")
            if not is_reported and wait_seconds >= PATIENCE:
                is_reported = True
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
    """Make the block's new files private to this user."""
    old_umask = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(old_umask)


def _check_private(folder: Path, name: str) -> None:
    """Raise ConfigError if other users can replace files; warn if a group can."""
    with tempfile.TemporaryFile(dir=folder) as probe:
        # Not the process's uid: a file server may map root to another user.
        uid = os.fstat(probe.fileno()).st_uid
    status = folder.stat()
    remedy = "choose a folder that other users cannot write into"
    if status.st_uid != uid:
        owner, user = _get_name(pwd.getpwuid, status.st_uid), _get_name(pwd.getpwuid, uid)
        raise ConfigError(f"{name}: belongs to the user {owner}, and this command runs as {user} ({remedy})")
    if status.st_mode & stat.S_IWOTH:
        raise ConfigError(f"{name}: any user may write there (chmod o-w {folder}, or {remedy})")
    if status.st_mode & stat.S_IWGRP and status.st_gid != uid:  # equal: the user's private group
        group = _get_name(grp.getgrgid, status.st_gid)
        what = f"members of the group {group} may write there, and so act in this user's name"
        print(
            f"megarl: {name}: {what} (chmod g-w {folder}, unless that is meant)", file=sys.stderr, flush=True
        )


def _get_name(entry: Callable[[int], tuple[Any, ...]], number: int) -> str:
    try:
        return str(entry(number)[0])
    except KeyError:
        return str(number)


def replace_folder(folder: Path) -> None:
    """Replace a folder by an empty, private one.

    It is renamed first: half deleted, it may lack the file that marks it as megarl's. Raises ConfigError if
    another command has it."""
    with hold_lease(folder, "megarl", remedy="stop it there, wait for it, or choose another folder"):
        pass
    old_folder = folder.with_name(f"{folder.name}.old")
    shutil.rmtree(old_folder, ignore_errors=True)
    if folder.exists():
        folder.rename(old_folder)
        shutil.rmtree(old_folder)
    folder.mkdir(parents=True, mode=0o700)


def renew_held() -> None:
    for lease, hold in list(_held_leases.items()):
        if time.monotonic() - hold.renewed >= lease.limit / RENEWALS:
            lease.renew()


def _newest(folder: Path) -> tuple[int, Path | None]:
    entries = [
        (int(match[1]), folder / match[0]) for match in map(NAME.fullmatch, os.listdir(folder)) if match
    ]
    return max(entries, default=(0, None), key=lambda entry: entry[0])


def _owner(path: Path, limit: float) -> Owner | None:
    if path.suffix == ".released":
        return None
    try:
        return Owner(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):  # just released, or half written
        return Owner("another command", "a machine", "", 0, 0, "", time.time(), limit, locked=False)


def _is_expired(path: Path, owner: Owner) -> bool:
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
    """Return seconds since renewal by the file server's clock; 0 if the file is gone."""
    with tempfile.TemporaryFile(dir=path.parent) as probe, suppress(FileNotFoundError):
        probe.write(b"now")
        probe.flush()
        with open(path, "rb") as file:  # network file systems fetch the time when opening
            return os.fstat(probe.fileno()).st_mtime - os.fstat(file.fileno()).st_mtime
    return 0.0


def _create(folder: Path, number: int, owner: Owner) -> Lease | None:
    path = folder / f"lease-{number:06d}.json"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return None
    # Lock first: a reader of half a file must not conclude that the owner has ended.
    file, content = FileIO(descriptor, "r+b"), asdict(owner)
    content["locked"] = _lock(file)
    try:
        append_atomic(file, json.dumps(content).encode() + b"\n")
    except OSError:  # half a lease blocks the folder
        path.unlink()
        file.close()
        raise
    if _newest(folder)[0] > number:  # another command took and released it
        path.unlink()
        file.close()
        return None
    for match in filter(None, map(NAME.fullmatch, os.listdir(folder))):
        if int(match[1]) < number:
            (folder / match[0]).unlink(missing_ok=True)
    lease = Lease(path, owner.limit)
    _held_leases[lease] = _Hold(file, time.monotonic())
    return lease


def _lock(file: IO[bytes]) -> bool:
    """Lock a file until all processes close it. Returns False if unsupported."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        return False
    return True


def _machine() -> str:
    try:
        return BOOT.read_text(encoding="utf-8").strip()
    except OSError:  # not Linux
        return socket.gethostname()


class _Event(ctypes.Structure):
    """sigevent of signal.h, 64-bit Linux."""

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
    """A kernel timer that kills this process, even a stopped one."""

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
        full_seconds = int(max(seconds, 0.001))
        value = (ctypes.c_long * 2)(full_seconds, int((max(seconds, 0.001) - full_seconds) * 1e9))
        self._check(self._libc.timer_settime(self._timer, 0, ctypes.byref(_Times(value=value)), None))

    def delete(self) -> None:
        self._check(self._libc.timer_delete(self._timer))

    def _check(self, code: int) -> None:
        if code:
            error_number = ctypes.get_errno()
            raise OSError(error_number, os.strerror(error_number), "timer")


@dataclass
class _Hold:
    """This process's part in a lease. renewed: time.monotonic."""

    file: IO[bytes]
    renewed: float
    timer: _Timer | None = None


_held_leases: dict[Lease, _Hold] = {}  # inherited by a fork, with the lock
