"""Confine processes that handle a policy's text.

A supervisor kills all that such a process leaves behind. `restrict` gives up rights, as far as kernel and
container allow; `probe` tries them."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import pwd
import resource
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, NoReturn

# CALCULATE, for megarl's verifiers, is STRICT without programs.
CALCULATE, STRICT, NETWORK, OFF = "calculate", "strict", "network", "off"

PROCESSES, FILES, SOCKETS, LATER = "other processes", "other files", "the network", "the time after its end"
_PROBE_LIMIT = 20.0  # seconds

_PARENT_CHECK = 1.0
_WATCHED = (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP)
_IGNORED = (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)  # meant for the trainer
_MOST_PROCESSES = 256

# linux/prctl.h
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP = 1, 4, 22
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 36, 38
# linux/sched.h
_NEW_MOUNTS, _NEW_IPC, _NEW_USER, _NEW_PIDS, _NEW_NETWORK = 0x20000, 0x8000000, 1 << 28, 1 << 29, 1 << 30
_ANY_NEW, _CLONE_THREAD = 0x7E020080, 0x10000
_MOUNT_PRIVATE = (1 << 18) | (1 << 14)
_BIND, _MOUNT_SETATTR = 1 << 12, 442
_CAPABILITY_VERSION = 0x20080522  # _LINUX_CAPABILITY_VERSION_3
_CAN_READ_ALL = (1 << 1) | (1 << 2)  # root's capabilities to read users' files

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.syscall.restype = ctypes.c_long


class Supervised(NamedTuple):
    """A process under its supervisor.

    folder     the only one where it may write
    protected  process ids of supervisor and trainer"""

    sandbox: str
    folder: Path
    protected: tuple[int, ...]


def hide_memory() -> None:
    """Hide environment, memory and open files from the user's processes and debuggers."""
    _call(_LIBC.prctl, _PR_SET_DUMPABLE, 0, 0, 0, 0)


def supervise(sandbox: str) -> Supervised:
    """Fork, and return in the child; the parent supervises it.

    The parent prints the child's process id, kills all that it leaves running, and ends as it does. SIGTERM,
    SIGHUP or the trainer's death ends all. Call before any thread."""
    trainer = os.getppid()
    folder = Path(tempfile.mkdtemp(prefix="megarl-worker-"))
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    _call(_LIBC.prctl, _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    init = _enter_namespaces() if sandbox != OFF and _can_enter_namespaces() else None
    protected = (os.getpid(), trainer)
    read_end, write_end = os.pipe()
    child = os.fork()
    if child:
        os.write(1, json.dumps(child).encode() + b"\n")
        os.close(write_end)
        _watch(child, init, trainer, folder)
    die_with_parent()
    os.close(write_end)
    os.read(read_end, 1)  # the process id must come before its messages
    os.close(read_end)
    os.setsid()  # so it cannot join another process group
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)
    if init is not None:
        with suppress(OSError):  # if a container masks /proc, Landlock guards processes
            _call(_LIBC.mount, b"proc", b"/proc", b"proc", 0, None)
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    return Supervised(sandbox, folder, protected)


def _watch(child: int, init: int | None, trainer: int, folder: Path) -> NoReturn:
    null_device = os.open(os.devnull, os.O_RDWR)
    os.dup2(null_device, 0)
    os.dup2(null_device, 1)  # so messages end when the child does
    code: int | None = None
    while code is None:
        signal_info = signal.sigtimedwait(_WATCHED, _PARENT_CHECK)
        if signal_info is not None and signal_info.si_signo != signal.SIGCHLD:
            code = -signal_info.si_signo
        elif os.getppid() != trainer:
            code = 0
        else:
            code = _reap(child)
    _kill_rest(init)
    with suppress(OSError):
        remove_tree(folder)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 128 - code)


def remove_tree(folder: Path) -> None:
    """Remove a tree, moving entries up, because shutil.rmtree fails on deep trees."""
    while entries := list(os.scandir(folder)):
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.path)
                continue
            os.chmod(entry.path, 0o700)
            for nested_entry in list(os.scandir(entry.path)):
                if nested_entry.is_dir(follow_symlinks=False):
                    os.chmod(nested_entry.path, 0o700)  # moving a folder writes its parent's entry in it
                os.rename(nested_entry.path, folder / uuid.uuid4().hex)
            os.rmdir(entry.path)
    os.rmdir(folder)


def _reap(child: int) -> int | None:
    """Return the child's exit code (negative: signal), None while it runs."""
    exit_code = None
    with suppress(ChildProcessError):
        while (pid_and_status := os.waitpid(-1, os.WNOHANG))[0]:
            if pid_and_status[0] == child:
                exit_code = os.waitstatus_to_exitcode(pid_and_status[1])
    return exit_code


def _kill_rest(init: int | None) -> None:
    if init is not None:
        os.kill(init, signal.SIGKILL)
    while True:
        try:
            ended_pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if ended_pid:
            continue
        if init is None:
            # Stop all first, so that none escapes by forking.
            for number in (signal.SIGSTOP, signal.SIGKILL):
                for pid in _descendants():
                    with suppress(ProcessLookupError):
                        os.kill(pid, number)
        time.sleep(0.002)


def _descendants() -> set[int]:
    parents: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(OSError):
                fields = Path("/proc", entry, "stat").read_text(errors="replace").rpartition(")")[2].split()
                parents[int(entry)] = int(fields[1])
    descendants, children = set[int](), {os.getpid()}
    while children:
        children = {pid for pid, parent in parents.items() if parent in children} - descendants
        descendants |= children
    return descendants


def _enter_namespaces() -> int:
    """Put later children into new namespaces, and return the id of their init, which ends them.

    Raises OSError."""
    flags = _NEW_PIDS | _NEW_MOUNTS | _NEW_IPC
    if os.geteuid() == 0:
        _call(_LIBC.unshare, flags)  # in a user namespace, root could not read users' files
    else:
        user, group = os.geteuid(), os.getegid()
        _call(_LIBC.unshare, flags | _NEW_USER)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    _call(_LIBC.mount, b"none", b"/", None, _MOUNT_PRIVATE, None)
    init = os.fork()
    if init:
        return init
    die_with_parent()
    null_device = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null_device, stream)
    while True:  # inherits orphans
        signal.sigwait({signal.SIGCHLD})
        _reap(0)


def die_with_parent() -> None:
    _call(_LIBC.prctl, _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _can_enter_namespaces() -> bool:
    """Try it in a child, because a failure half way leaves a process without rights."""
    if not (child := os.fork()):
        try:
            os.kill(_enter_namespaces(), signal.SIGKILL)
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def restrict(process: Supervised) -> list[str]:
    """Give up rights of this process and its children for good; return the layers that apply.

    docs/verifiers.md lists the rights. Running threads keep their access to files."""
    if process.sandbox == OFF:
        return []
    layers = []
    if in_namespace := os.getppid() == 0:
        layers.append("namespaces")
    if process.sandbox != NETWORK:
        _works(_LIBC.unshare, _NEW_NETWORK)  # else seccomp still applies
    if in_namespace and os.geteuid() != 0:  # counted per user namespace
        resource.setrlimit(resource.RLIMIT_NPROC, (_MOST_PROCESSES, _MOST_PROCESSES))
    is_read_only = in_namespace and _make_read_only(process.folder)
    _drop_capabilities()
    _call(_LIBC.prctl, _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    hide_memory()  # or its children could forge its messages
    if version := _landlock(process, _readable()):
        layers.append(f"Landlock {version}")
    if _filter_calls(process, in_namespace, is_read_only):
        layers.append("seccomp")
    return layers


def confine(folder: Path, readable: Iterable[Path], *, files_only: bool = False) -> bool:
    """Leave this process only `readable`, the writable `folder`, and calculation, for good.

    It starts no process. Returns whether Landlock and seccomp both apply.
    files_only: it creates regular files only, because removing many folders takes minutes"""
    process = Supervised(CALCULATE, folder, ())
    _drop_all_capabilities()
    _call(_LIBC.prctl, _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    hide_memory()
    has_landlock = bool(_landlock(process, readable, _MAKE_OTHERS if files_only else 0))
    return _filter_calls(process, False, False) and has_landlock


def can_confine() -> bool:
    """Return whether this kernel has what `confine` needs; it tries in a child."""
    if not (child := os.fork()):
        try:
            os._exit(not confine(Path(os.devnull), ()))
        except OSError:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def probe() -> tuple[list[str], dict[str, bool]]:
    """Try `restrict`; return its layers and the targets that it protects."""
    boot = "import sys; sys.path[:] = sys.argv[2:]; from megarl.rewards.sandbox import try_to_escape; "
    with tempfile.NamedTemporaryFile() as other_file:
        process = subprocess.Popen(
            [sys.executable, "-c", f"{boot}try_to_escape(sys.argv[1])", other_file.name, *sys.path],
            stdout=subprocess.PIPE,
        )
        try:
            output, is_over = process.communicate(timeout=_PROBE_LIMIT)[0], True
        except subprocess.TimeoutExpired as timeout:  # a descendant has the pipe
            process.kill()
            output, is_over = timeout.output or b"", False
    if len(lines := output.splitlines()) < 2:
        return [], dict.fromkeys((PROCESSES, FILES, SOCKETS, LATER), False)
    layers, protection = json.loads(lines[1])
    return layers, protection | {LATER: is_over}


def try_to_escape(other_file: str) -> NoReturn:
    """Write the process id, then the layers and which attempts failed."""
    trainer = os.getppid()
    layers = restrict(supervise(STRICT))

    def fails(attempt: Callable[[], object]) -> bool:
        try:
            attempt()
        except OSError:
            return True
        return False

    if not os.fork():
        os.setsid()
        if not os.fork():
            time.sleep(2 * _PROBE_LIMIT)
        os._exit(0)
    protection = {
        PROCESSES: fails(lambda: os.kill(trainer, 0)) and fails(Path(f"/proc/{trainer}/environ").read_bytes),
        FILES: fails(lambda: open(other_file, "ab").close()) and fails(lambda: os.chmod(other_file, 0o644)),
        SOCKETS: fails(lambda: socket.socket().close()),
    }
    os.write(1, json.dumps([layers, protection]).encode() + b"\n")
    os._exit(0)


def _make_read_only(folder: Path) -> bool:
    """Make all but the folder read-only; return whether that worked.

    Landlock ignores modes, owners, times and extended attributes."""
    read_only, writable = struct.pack("=QQQQ", 1, 0, 0, 0), struct.pack("=QQQQ", 0, 1, 0, 0)
    at_fdcwd, recursive = -100, 0x8000  # AT_FDCWD, AT_RECURSIVE
    path = str(folder).encode()
    try:
        _call(_LIBC.unshare, _NEW_MOUNTS)  # the supervisor keeps its mounts
        _call(_LIBC.mount, path, path, None, _BIND, None)
        _call(_LIBC.syscall, _MOUNT_SETATTR, at_fdcwd, b"/", recursive, read_only, len(read_only))
        _call(_LIBC.syscall, _MOUNT_SETATTR, at_fdcwd, path, 0, writable, len(writable))
    except OSError:
        return False
    return True


def _drop_all_capabilities() -> None:
    header = struct.pack("=Ii", _CAPABILITY_VERSION, 0)
    _call(_LIBC.capset, header, struct.pack("=6I", 0, 0, 0, 0, 0, 0))


def _drop_capabilities() -> None:
    """Drop capabilities, which under no_new_privs no exec restores."""
    header = struct.pack("=Ii", _CAPABILITY_VERSION, 0)
    old_capabilities = ctypes.create_string_buffer(24)
    _call(_LIBC.capget, header, old_capabilities)
    effective, permitted, _, *_ = struct.unpack("=6I", old_capabilities.raw)
    new_capabilities = struct.pack("=6I", effective & _CAN_READ_ALL, permitted & _CAN_READ_ALL, 0, 0, 0, 0)
    _call(_LIBC.capset, header, new_capabilities)


# ---- Landlock (linux/landlock.h; the same numbers on all architectures) ----

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_EXECUTE, _WRITE, _READ, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_MAKE_OTHERS = 0b1111011 << 6  # folders, links, pipes, sockets, devices; not MAKE_REG
_TRUNCATE, _IOCTL = 1 << 14, 1 << 15
_OF_FILES = _EXECUTE | _WRITE | _READ | _TRUNCATE | _IOCTL
_RIGHTS = (0, 13, 14, 15, 15, 16)  # number of file rights, by version
_DEVICES = ("null", "zero", "full", "random", "urandom")


def landlock_version() -> int:
    return max(0, int(_LIBC.syscall(_CREATE_RULESET, None, 0, 1)))


def _landlock(process: Supervised, readable: Iterable[Path], withheld: int = 0) -> int:
    """Restrict reading and writing; return Landlock's version. withheld: rights in its own folder"""
    if not (version := landlock_version()):
        return 0
    handled_rights = (1 << _RIGHTS[min(version, len(_RIGHTS) - 1)]) - 1
    tcp = 0b11 if process.sandbox != NETWORK else 0
    attributes = struct.pack("=QQQ", handled_rights, tcp, 0b11)  # last: abstract sockets, signals
    ruleset = int(
        _call(
            _LIBC.syscall, _CREATE_RULESET, attributes, 24 if version >= 6 else 16 if version >= 4 else 8, 0
        )
    )
    read_rights = _EXECUTE | _READ | _READ_DIR
    for path, rights in (
        *((path, read_rights) for path in readable),
        *((Path("/dev", name), _READ | _WRITE) for name in _DEVICES),
        (process.folder, handled_rights & ~withheld),
    ):
        try:
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            allowed_rights = rights & handled_rights if path.is_dir() else rights & handled_rights & _OF_FILES
            rule = struct.pack("=Qi", allowed_rights, descriptor)
            _call(_LIBC.syscall, _ADD_RULE, ruleset, 1, rule, 0)
        finally:
            os.close(descriptor)
    _call(_LIBC.syscall, _RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)
    return version


def _readable() -> Iterator[Path]:
    """Yield what code may read.

    All but temporary folders, devices, sockets, and the home's hidden entries, which hold keys. The current
    folder and Python's may lie in these.
    """
    hidden_entries, homes = set[Path](), {Path(os.environ.get("HOME", "/"))}
    with suppress(KeyError):  # a user id without a name
        homes.add(Path(pwd.getpwuid(os.getuid()).pw_dir))
    for home in homes:
        with suppress(OSError):
            hidden_entries.update(entry for entry in home.resolve().iterdir() if entry.name.startswith("."))
    private_folders = {Path(path).resolve() for path in ("/tmp", "/var/tmp", "/dev", "/run", "/var/run")}
    needed_paths = [*filter(os.path.exists, sys.path), os.getcwd(), sys.prefix, sys.base_prefix]
    for path in {Path(name).resolve() for name in (*needed_paths, "/etc/resolv.conf")}:
        # Not if it is a private folder itself.
        yield from _without(path, hidden_entries | (private_folders - set(path.parents)))
    yield from _without(Path("/"), hidden_entries | private_folders)


def _without(folder: Path, hidden: set[Path]) -> Iterator[Path]:
    """Yield the folder, or its largest parts without hidden entries."""
    if folder in hidden:
        return
    if not any(folder in path.parents for path in hidden):
        yield folder
        return
    with suppress(OSError):
        for entry in folder.iterdir():
            if not entry.is_symlink():
                yield from _without(entry, hidden)


# ---- seccomp ----


def _numbers(table: str) -> dict[str, tuple[int, int]]:
    words = iter(table.split())
    return {name: (int(x86), int(arm)) for name, x86, arm in zip(words, words, words, strict=True)}


# Numbers on x86_64 and aarch64 (0: none); tests/security compares them with the headers.
_ALWAYS = _numbers("""
    ptrace 101 117   process_vm_readv 310 270   process_vm_writev 311 271   pidfd_getfd 438 438
    kcmp 312 272   process_madvise 440 440   bpf 321 280   perf_event_open 298 241   userfaultfd 323 282
    io_uring_setup 425 425   io_uring_enter 426 426   io_uring_register 427 427   add_key 248 217
    request_key 249 218   keyctl 250 219   mount 165 40   umount2 166 39   pivot_root 155 41   chroot 161 51
    open_tree 428 428   move_mount 429 429   fsopen 430 430   fsconfig 431 431   fsmount 432 432
    fspick 433 433   mount_setattr 442 442   unshare 272 97   setns 308 268   open_by_handle_at 304 265
    init_module 175 105   finit_module 313 273   delete_module 176 106   kexec_load 246 104
    kexec_file_load 320 294   reboot 169 142   acct 163 89   swapon 167 224   swapoff 168 225
    quotactl 179 60   iopl 172 0   ioperm 173 0   modify_ldt 154 0   settimeofday 164 170   adjtimex 159 171
    clock_settime 227 112   clock_adjtime 305 266   sethostname 170 161   setdomainname 171 162
    shmget 29 194   shmat 30 196   shmctl 31 195   semget 64 190   msgget 68 186   msgsnd 69 189
    msgrcv 70 188   mq_open 240 180
""")  # they reach into other processes or change the machine
_SOMETIMES = _numbers("""
    socketpair 53 199   fcntl 72 25   truncate 76 45   socket 41 198   ioctl 16 29   clone 56 220
    clone3 435 435   fork 57 0   vfork 58 0   execve 59 221   execveat 322 281   kill 62 129
    tkill 200 130   tgkill 234 131   rt_sigqueueinfo 129 138   rt_tgsigqueueinfo 297 240
    pidfd_send_signal 424 424   prlimit64 302 261   sched_setaffinity 203 122   sched_setscheduler 144 119
    sched_setparam 142 118   sched_setattr 314 274   setpriority 141 140   ioprio_set 251 30
    migrate_pages 256 238   move_pages 279 239
""")  # depends on sandbox or argument
_ATTRIBUTES = _numbers("""
    chmod 90 0   fchmod 91 52   fchmodat 268 53   chown 92 0   fchown 93 55   lchown 94 0   fchownat 260 54
    utime 132 0   utimes 235 0   futimesat 261 0   utimensat 280 88   setxattr 188 5   lsetxattr 189 6
    fsetxattr 190 7   removexattr 197 14   lremovexattr 198 15   fremovexattr 199 16
    fchmodat2 452 452   setxattrat 463 463   removexattrat 466 466   file_setattr 469 469
""")  # refused unless file systems are read-only
_STARTING = ("fork", "vfork", "execve", "execveat")
_SIGNALS = ("kill", "tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo")
_OF_PROCESS = ("prlimit64", "sched_setaffinity", "sched_setscheduler", "sched_setparam", "sched_setattr")
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column, AUDIT_ARCH_*
# AF_INET, AF_INET6, AF_NETLINK (for name resolution); not AF_UNIX, which reaches services such as docker.
_FAMILIES = (2, 10, 16)
_STREAMS = tuple(kind | flags for kind in (1, 5) for flags in (0, 0x800, 0x80000, 0x80800))
# TIOCSTI, TIOCLINUX type into the terminal; FIOSETOWN, SIOCSPGRP signal any process.
_FORBIDDEN_IOCTLS = (0x5412, 0x541C, 0x8901, 0x8902)
_OWNERS = (8, 10, 15)  # F_SETOWN, F_SETSIG, F_SETOWN_EX


class Rule(NamedTuple):
    """A system call that fails with `error`.

    argument  index of the argument that decides; None: always fails
    bits      fails with one of these bits
    lacks     fails without one of these bits
    among     fails for these values
    unless    fails for other values"""

    name: str
    argument: int | None = None
    bits: int = 0
    lacks: int = 0
    among: Sequence[int] = ()
    unless: Sequence[int] = ()
    error: int = errno.EPERM


def rules(process: Supervised, in_namespace: bool, is_read_only: bool) -> Iterator[Rule]:
    yield from map(Rule, _ALWAYS)
    yield Rule("ioctl", 1, among=_FORBIDDEN_IOCTLS)
    yield Rule("fcntl", 1, among=_OWNERS)
    yield Rule("socketpair", 1, unless=_STREAMS)  # datagrams reach any address
    if not is_read_only:
        yield from map(Rule, ("truncate", *_ATTRIBUTES))
    yield Rule("clone3", error=errno.ENOSYS)  # unreadable flags; libc then calls clone
    yield Rule("clone", 0, bits=_ANY_NEW)
    yield Rule("socket", 0, unless=_FAMILIES) if process.sandbox == NETWORK else Rule("socket")
    if process.sandbox == CALCULATE:
        yield from map(Rule, _STARTING)
        yield Rule("clone", 0, lacks=_CLONE_THREAD)
    if in_namespace:
        return
    own_pid = os.getpid()
    for name in _OF_PROCESS:
        yield Rule(name, 0, unless=(0, own_pid))
    yield from map(Rule, ("migrate_pages", "move_pages", "ioprio_set", "pidfd_send_signal"))
    yield Rule("setpriority", 1, unless=(0, own_pid))
    groups = [os.getpgid(pid) for pid in process.protected]
    forbidden = [-1, *process.protected, *(-group for group in groups)]
    for name in _SIGNALS:
        if process.sandbox == CALCULATE:
            yield Rule(name, 0, unless=(own_pid,))
        else:  # it may end its children
            yield Rule(name, 0, among=forbidden)


def filter_program(found: Iterable[Rule], machine: str) -> bytes:
    column, architecture = _MACHINES[machine]
    load, equal, at_least, has_bits, end = 0x20, 0x15, 0x35, 0x45, 0x06
    number_offset, fails, allow = 0, 0x50000, 0x7FFF0000  # SECCOMP_RET_ERRNO, SECCOMP_RET_ALLOW

    def step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("=HBBI", code, if_true, if_false, value & 0xFFFFFFFF)

    program = [step(load, 4), step(equal, architecture, 1, 0), step(end, fails | errno.EPERM)]
    program.append(step(load, number_offset))
    # x86_64 has aliases of the calls from here on; aarch64 has no calls so high.
    program += [step(at_least, 0x40000000, 0, 1), step(end, fails | errno.EPERM)]
    for rule in found:
        if not (call := (_ALWAYS | _SOMETIMES | _ATTRIBUTES)[rule.name][column]):
            continue
        fail_step = step(end, fails | rule.error)
        body = [fail_step]
        if rule.argument is not None:
            body = [step(load, 16 + 8 * rule.argument)]  # these calls read only the lower half
            if rule.bits:
                body += [step(has_bits, rule.bits, 0, 1), fail_step]
            elif rule.lacks:
                body += [step(has_bits, rule.lacks, 1, 0), fail_step]
            elif rule.among:
                for value in rule.among:
                    body += [step(equal, value, 0, 1), fail_step]
            else:
                num_values = len(rule.unless)
                body += [step(equal, value, num_values - i, 0) for i, value in enumerate(rule.unless)]
                body.append(fail_step)
            body.append(step(load, number_offset))
        program += [step(equal, call, 0, len(body)), *body]
    return b"".join([*program, step(end, allow)])


def _filter_calls(process: Supervised, in_namespace: bool, is_read_only: bool) -> bool:
    """Filter in all threads; return whether this kernel can."""
    if (machine := platform.machine()) not in _MACHINES:
        return False
    code = filter_program(rules(process, in_namespace, is_read_only), machine)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("=HxxxxxxQ", len(code) // 8, ctypes.addressof(buffer))
    all_threads, mode = 1, 1  # SECCOMP_FILTER_FLAG_TSYNC, SECCOMP_SET_MODE_FILTER
    call = {"x86_64": 317, "aarch64": 277}[machine]
    return _works(_LIBC.syscall, call, mode, all_threads, program)


def _call(function: Callable[..., int], *arguments: object) -> int:
    """Call a C function with integers as long. Raises OSError."""
    ctypes.set_errno(0)
    c_arguments = (
        ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in arguments
    )
    if (result := function(*c_arguments)) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def _works(function: Callable[..., int], *arguments: object) -> bool:
    try:
        _call(function, *arguments)
    except OSError:
        return False
    return True
