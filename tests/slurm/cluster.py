"""A throw-away Slurm on this machine: munged, slurmctld and two slurmd, as root, without systemd. Each node
has a hostname of its own."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil

NODES = ("node1", "node2")
DAEMONS = ("munged", "munge", "slurmctld", "slurmd", "sbatch")
LIMIT = 180.0
HOSTS, MARK = Path("/etc/hosts"), "# megarl's tests, process "
CONF = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,sched_min_interval=0,bf_interval=2
SlurmdParameters=config_overrides
ReturnToService=2
JobRequeue=1
KillWait=5
MinJobAge=600
SlurmdTimeout=20
InactiveLimit=0
PropagateResourceLimits=NONE
NodeName=node1 NodeHostname=node1 NodeAddr=127.0.1.1 Port={port1} CPUs=4 RealMemory=4096 State=UNKNOWN
NodeName=node2 NodeHostname=node2 NodeAddr=127.0.1.2 Port={port2} CPUs=4 RealMemory=4096 State=UNKNOWN
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=batch Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2
"""
# cred_expire: how long a requeued job waits before it may start again (less than 5 counts as 120).
# config_overrides: a node may claim more CPUs than there are.


def missing() -> str | None:
    """Why there can be no cluster here."""
    absent = [name for name in DAEMONS if shutil.which(name) is None]
    if absent:
        return f"{', '.join(absent)} not installed (make test-slurm)"
    if os.geteuid():
        return "slurmd starts jobs as the user who asked for them: needs root"
    if subprocess.run(["unshare", "--uts", "true"], capture_output=True, check=False).returncode:
        return "hostnames of their own for the nodes (unshare --uts) are not allowed here"
    return None


def wait_for(what: str, found: Callable[[], object], limit: float = LIMIT) -> None:
    """Polls until `found()`."""
    end = time.monotonic() + limit
    while not found():
        if time.monotonic() > end:
            raise AssertionError(f"waited {limit:.0f} s for {what}")
        time.sleep(0.1)


class Cluster:
    """The daemons and their folder; used as a context."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # The nodes' names resolve to loopback, which the preflight refuses, unless told that it is meant.
        self.environment = {
            **os.environ,
            "SLURM_CONF": str(folder / "slurm.conf"),
            "GLOO_SOCKET_IFNAME": "lo",
        }
        self.pids: dict[str, psutil.Process] = {}

    def __enter__(self) -> Cluster:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if "slurmctld" in self.pids:
            for job in self.run("squeue", "-h", "-o", "%A").split():
                self.run("scancel", job)
            wait_for("jobs to end", lambda: not self.run("squeue", "-h").strip())
        for daemon in ("slurmd.node1", "slurmd.node2", "slurmctld", "munged"):
            process = self.pids.get(daemon)
            if process is not None and process.is_running():
                process.terminate()
        _, alive = psutil.wait_procs([p for p in self.pids.values() if p.is_running()], timeout=10)
        for process in alive:
            process.kill()
        lines = HOSTS.read_text().splitlines(keepends=True)
        # in place: it is a mount in containers; another suite beside this one has lines of its own
        HOSTS.write_text("".join(line for line in lines if not _left_behind(line)))

    def _start(self) -> None:
        folder = self.folder
        for part in ("state", "spool-node1", "spool-node2"):
            (folder / part).mkdir(parents=True)
        ports = _free_ports(3)
        host = socket.gethostname().split(".")[0]
        (folder / "slurm.conf").write_text(
            CONF.format(folder=folder, host=host, port=ports[0], port1=ports[1], port2=ports[2])
        )
        (folder / "cgroup.conf").write_text("CgroupAutomount=no\nCgroupPlugin=cgroup/v1\n")
        with HOSTS.open("a") as hosts:
            hosts.writelines(f"127.0.1.{i} {name} {MARK}{os.getpid()}\n" for i, name in enumerate(NODES, 1))
        key = folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        files = {"--key-file": key, "--socket": folder / "munge.socket", "--pid-file": folder / "munged.pid"}
        files |= {"--log-file": folder / "munged.log", "--seed-file": folder / "munge.seed"}
        self.run("munged", "--force", *(f"{option}={path}" for option, path in files.items()))
        self._remember("munged", folder / "munged.pid")
        self.run("slurmctld", "-c")
        self._remember("slurmctld", folder / "slurmctld.pid")
        wait_for("slurmctld", lambda: "is UP" in self.run("scontrol", "ping", check=False))
        for name in NODES:
            self.start_node(name)
        wait_for("idle nodes", lambda: self.states() == ["idle", "idle"])

    def start_node(self, name: str) -> None:
        """The node's slurmd, for the first time or again."""
        (self.folder / f"slurmd.{name}.pid").unlink(missing_ok=True)
        self.run("unshare", "--uts", "sh", "-c", f"hostname {name}; exec slurmd -N {name}")
        self._remember(f"slurmd.{name}", self.folder / f"slurmd.{name}.pid")

    def kill_node(self, name: str) -> None:
        """As when the power fails: slurmd, the steps' daemons and everything that they started, with
        SIGKILL."""
        daemon = self.pids.pop(f"slurmd.{name}")
        family = [daemon]
        for process in psutil.process_iter(["name"]):
            if (
                process.info["name"] == "slurmstepd"
                and process.ppid() in (1, daemon.pid)
                and self._is_on(process, name)
            ):
                family += [process, *process.children(recursive=True)]
        for process in family:
            if process.is_running():
                process.send_signal(signal.SIGKILL)

    def _is_on(self, process: psutil.Process, name: str) -> bool:
        """A step's daemon has no mark of its node, but its tasks' environment has."""
        for child in process.children(recursive=True):
            try:
                environment = child.environ()
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
            if (
                environment.get("SLURM_CONF") == str(self.folder / "slurm.conf")
                and environment.get("SLURMD_NODENAME") == name
            ):
                return True
        return False

    def states(self) -> list[str]:
        """The nodes' states."""
        return self.run("sinfo", "-h", "-N", "-p", "batch", "-o", "%T").split()

    def run(self, *command: str, check: bool = True, **environment: str) -> str:
        """A command of Slurm's; what it printed."""
        done = subprocess.run(
            command,
            env=self.environment | environment,
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
            start_new_session=True,
        )
        assert not check or done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        """What `scontrol show job` says."""
        return dict(re.findall(r"(\w+)=(\S*)", self.run("scontrol", "show", "job", "-o", number)))

    def _remember(self, name: str, file: Path) -> None:
        wait_for(name, lambda: file.is_file() and file.read_text().strip())
        self.pids[name] = psutil.Process(int(file.read_text()))


def _left_behind(line: str) -> bool:
    """Tell a line of /etc/hosts that this process wrote, or one that is gone."""
    _, mark, pid = line.partition(MARK)
    return bool(mark) and (int(pid) == os.getpid() or not psutil.pid_exists(int(pid)))


def _free_ports(count: int) -> list[int]:
    """Below those that the system gives away by itself."""
    found: list[int] = []
    while len(found) < count:
        port = random.randint(16000, 19999)
        with socket.socket() as probe:
            if port not in found and probe.connect_ex(("127.0.0.1", port)):
                found.append(port)
    return found
