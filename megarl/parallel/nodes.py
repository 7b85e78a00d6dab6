"""Whether the nodes of a job can work together, found out in seconds: each node's own facts, then messages between all of them.

One process per node. The first node keeps a store in which each leaves its facts and how far it got, so that a node that is silent,
slow or different is named, and nobody waits for it for ever.
"""

from __future__ import annotations

import datetime
import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
import torch.distributed as dist

from megarl.parallel.machine import driver_problem, driver_version, hostname_problem

GIB = 2**30
MESSAGE = 64 * 2**20  # bytes of one message in the measurement
CONTROL = 2**20  # of one where the question is only whether it arrives
ROUNDS = 3
CLOCKS = 5.0  # seconds that two nodes' clocks may differ: beyond that logs and time stamps of files mislead
OUTLIER = 4.0  # a node this many times slower than the middle one would slow down all of them


@dataclass(frozen=True)
class Place:
    """This process among the nodes of the job. limit: seconds for each wait."""

    node: int
    nodes: int
    host: str
    port: int
    limit: float = 60.0
    name: str = field(default_factory=socket.gethostname)


@dataclass(frozen=True)
class Needs:
    """What each node must have. devices: GPUs, 0 for a job on CPUs; folder: of the run, on a file system that all nodes share;
    bandwidth: GB/s into a node."""

    folder: Path
    devices: int = 0
    device_free: float = 0.9
    host_bytes: float = 0.0
    disk_bytes: float = 0.0
    bandwidth: float = 0.0


@dataclass(frozen=True)
class Verdict:
    """What was found: lines that each name a node and stand in the way, and lines that are good to know. The same on every node."""

    problems: list[str]
    notes: list[str]


def check_nodes(
    place: Place, needs: Needs, versions: Mapping[str, str], clock: Callable[[], float] = time.time, problems: Sequence[str] = ()
) -> Verdict:
    """The whole check; every node calls it. Two parts, so that a network is not judged between nodes that are broken anyway.
    `problems`: of this node, found before."""
    store = _join(place)
    if store is None:
        line = f"{place.name}: cannot reach {place.host}:{place.port} within {place.limit:.0f} s (a firewall, or the wrong interface?)"
        return Verdict([line], [])
    token = needs.folder / f".nodes-{place.port}"
    if place.node == 0:
        _touch(token)
        store.set("begin", "")
    try:
        _wait(store, "begin", place.limit)
        store.set(f"facts/{place.node}", json.dumps(_facts(place, needs, versions, token, problems)))
        found = _judge(store, place, clock) if place.node == 0 else _answer_clock(store, place, clock)
        verdict = _share(store, place, "facts", Verdict(found, []))
        return verdict if verdict.problems else _network(store, place, needs)
    finally:
        if place.node == 0:
            token.unlink(missing_ok=True)


def _join(place: Place) -> dist.TCPStore | None:
    limit = datetime.timedelta(seconds=place.limit)
    try:
        return dist.TCPStore(place.host, place.port, place.nodes, place.node == 0, limit, wait_for_workers=False)
    except (dist.DistError, RuntimeError):
        return None


def _touch(path: Path) -> None:
    """Leaves a file that the other nodes are to see. A folder that cannot be written is among the first node's own facts."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.touch()
    except OSError:
        return


def _wait(store: dist.Store, key: str, limit: float) -> bool:
    try:
        store.wait([key], datetime.timedelta(seconds=limit))
    except (dist.DistError, RuntimeError):
        return False
    return True


def _facts(place: Place, needs: Needs, versions: Mapping[str, str], token: Path, before: Sequence[str]) -> dict[str, Any]:
    problems = [*before, *_device_problems(needs), *_host_problems(needs, token)]
    if place.nodes > 1 and (problem := hostname_problem()):
        problems.append(problem)
    return {"name": place.name, "problems": problems, "versions": dict(versions)}


def _device_problems(needs: Needs) -> list[str]:
    """GPUs that are missing, taken, or do not answer."""
    if not needs.devices:
        return []
    found = torch.cuda.device_count()
    if found != needs.devices:
        why = driver_problem(driver_version(), torch.version.cuda) if not found else None
        return [f"{found} GPUs, {needs.devices} were asked for ({why or 'nvidia-smi; is the driver loaded?'})"]
    problems = []
    for index in range(found):
        try:
            free, total = torch.cuda.mem_get_info(index)
            one = torch.ones(256, 256, device=f"cuda:{index}")
            broken = float((one @ one).sum()) != 256.0**3
        except RuntimeError as error:
            problems.append(f"GPU {index} does not work: {str(error).splitlines()[0]}")
            continue
        if broken:
            problems.append(f"GPU {index} computes wrong results")
        if free < needs.device_free * total:
            problems.append(f"GPU {index}: {free / GIB:.1f} of {total / GIB:.1f} GiB are free: another process is on it")
    return problems


def _host_problems(needs: Needs, token: Path) -> list[str]:
    problems = []
    free = psutil.virtual_memory().available
    if free < needs.host_bytes:
        problems.append(f"{free / GIB:.1f} GiB of memory are free, the run needs {needs.host_bytes / GIB:.1f}")
    deadline = time.monotonic() + 5.0  # a network file system may show a new file late
    while not token.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    if not token.exists():
        return [*problems, f"does not see the first node's file in {token.parent} (it must be writable, and shared by all nodes)"]
    if not os.access(token.parent, os.W_OK):
        problems.append(f"{token.parent} cannot be written")
    room = shutil.disk_usage(token.parent).free
    if room < needs.disk_bytes:
        problems.append(f"{room / GIB:.1f} GiB are free in {token.parent}, the run needs {needs.disk_bytes / GIB:.1f}")
    return problems


def _judge(store: dist.Store, place: Place, clock: Callable[[], float]) -> list[str]:
    """On the first node: who is silent, what each one found, what differs from the first node."""
    deadline = time.monotonic() + place.limit
    facts, silent = {}, []
    for node in range(place.nodes):
        if _wait(store, f"facts/{node}", max(0.1, deadline - time.monotonic())):
            facts[node] = json.loads(store.get(f"facts/{node}"))
        else:
            silent.append(node)
    names = sorted(fact["name"] for fact in facts.values())
    problems = [
        f"node {node} of {place.nodes} has not reported within {place.limit:.0f} s (those that have: {', '.join(names)})" for node in silent
    ]
    first = facts[0]
    for node, fact in sorted(facts.items()):
        name = fact["name"]
        problems += [f"{name}: {problem}" for problem in fact["problems"]]
        for what in sorted({*first["versions"], *fact["versions"]}):
            theirs, ours = (found["versions"].get(what, "none") for found in (fact, first))
            if theirs != ours:
                problems.append(f"{name}: {what} {theirs}, but {first['name']} has {ours}")
        if node:
            off = _clock_of(store, node, place, clock)
            if off is None:
                problems.append(f"{name}: stopped answering")
            elif abs(off) > CLOCKS:
                problems.append(
                    f"{name}: its clock is {abs(off):.0f} s {'ahead of' if off > 0 else 'behind'} {first['name']}'s (is NTP running?)"
                )
    return problems


def _clock_of(store: dist.Store, node: int, place: Place, clock: Callable[[], float]) -> float | None:
    """Seconds by which a node's clock is ahead, to half of a message's way there and back."""
    asked = clock()
    store.set(f"ask/{node}", "")
    if not _wait(store, f"clock/{node}", place.limit):
        return None
    return float(store.get(f"clock/{node}")) - (asked + clock()) / 2


def _answer_clock(store: dist.Store, place: Place, clock: Callable[[], float]) -> list[str]:
    if _wait(store, f"ask/{place.node}", place.limit * 2):
        store.set(f"clock/{place.node}", repr(clock()))
    return []


def _share(store: dist.Store, place: Place, what: str, found: Verdict) -> Verdict:
    """The first node's findings on every node; it leaves last, as the store is gone with it."""
    if place.node == 0:
        store.set(f"verdict/{what}", json.dumps([found.problems, found.notes]))
        for node in range(1, place.nodes):
            _wait(store, f"heard/{what}/{node}", 5.0 if found.problems else place.limit)
        return found
    if not _wait(store, f"verdict/{what}", place.limit * 2):
        return Verdict([f"{place.name}: the first node {place.host} has stopped answering"], [])
    verdict = Verdict(*json.loads(store.get(f"verdict/{what}")))
    store.set(f"heard/{what}/{place.node}", "")
    return verdict


def _network(store: dist.Store, place: Place, needs: Needs) -> Verdict:
    """Messages between all nodes, over each network that the job uses; the first that does not work ends it."""
    if place.nodes == 1:
        return Verdict([], ["one node: nothing to measure between nodes"])
    notes: list[str] = []
    for i, (backend, size, bandwidth) in enumerate(networks(needs)):
        # Words of its own for each: an address that the network before has left would lead to a socket that is closed.
        found = _messages(dist.PrefixStore(f"network/{i}", store), place, backend, size, bandwidth)
        notes += found.notes
        if found.problems:
            return Verdict(found.problems, notes)
    return Verdict([], notes)


def networks(needs: Needs) -> list[tuple[str, int, float | None]]:
    """(backend, bytes of a message, GB/s into a node that it must reach, null for any). Jobs on GPUs send tensors over NCCL and control
    messages over gloo, which is often another interface: that those arrive is all that is asked of it."""
    if needs.devices:
        return [("nccl", MESSAGE, needs.bandwidth), ("gloo", CONTROL, None)]
    return [("gloo", MESSAGE, needs.bandwidth)]


def _messages(store: dist.Store, place: Place, backend: str, size: int, bandwidth: float | None) -> Verdict:
    """An all-reduce over all nodes, then a ring in which each sends to the next: every adapter in both directions."""
    guard = threading.Timer(place.limit, _gave_up, (store, place, backend))
    guard.daemon = True
    guard.start()
    try:
        speed = _measure(store, place, backend, size)
    except (dist.DistError, RuntimeError) as error:
        speed = None
        store.set(f"broken/{place.node}", f"{place.name}: {backend}: {str(error).splitlines()[0]}")
    guard.cancel()
    if speed is not None:
        store.set(f"speed/{place.node}", json.dumps([place.name, speed]))
    found = _judge_network(store, place, backend, bandwidth) if place.node == 0 else Verdict([], [])
    return _share(store, place, "network", found)


def _measure(store: dist.Store, place: Place, backend: str, size: int) -> dict[str, float]:
    """GB/s of the all-reduce, as bytes of the message by time, and into this node from the one before it."""
    device = torch.device("cuda", 0) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    limit = datetime.timedelta(seconds=place.limit)
    group_store = dist.PrefixStore("group", store)
    dist.init_process_group(backend, store=group_store, rank=place.node, world_size=place.nodes, timeout=limit)
    try:
        store.set(f"stage/{place.node}/joined", "")
        data, into = (torch.ones(size // 4, device=device) for _ in range(2))

        def ring() -> None:
            ahead, behind = (place.node + 1) % place.nodes, (place.node - 1) % place.nodes
            moves = [dist.P2POp(dist.isend, data, ahead), dist.P2POp(dist.irecv, into, behind)]
            for request in dist.batch_isend_irecv(moves):
                request.wait()

        reduce = _seconds(lambda: dist.all_reduce(data, op=dist.ReduceOp.MAX), device)
        store.set(f"stage/{place.node}/reduced", "")
        passed = _seconds(ring, device)
        if not bool((into == 1).all()):
            raise RuntimeError("a message arrived with other bytes than were sent")
        return {"all_reduce": size / reduce / 1e9, "into": size / passed / 1e9}
    finally:
        dist.destroy_process_group()


def _seconds(work: Callable[[], Any], device: torch.device) -> float:
    """The fastest of some rounds, after one that sets up connections."""
    taken = []
    for _ in range(ROUNDS + 1):
        dist.barrier()
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - started)
    return min(taken[1:])


def _gave_up(store: dist.Store, place: Place, backend: str) -> None:
    """A collective that hangs cannot be left otherwise. The process ends; the first node says who was behind."""
    if place.node == 0:
        behind = [str(node) for node in range(place.nodes) if not store.check([f"stage/{node}/reduced"])]
        absent = [str(node) for node in range(place.nodes) if not store.check([f"stage/{node}/joined"])]
        what = f"nodes {', '.join(absent)} have not joined" if absent else f"nodes {', '.join(behind)} have not finished the all-reduce"
        print(f"preflight: {place.name}: {backend} between nodes took more than {place.limit:.0f} s: {what}", flush=True)
    os._exit(2)


def _judge_network(store: dist.Store, place: Place, backend: str, least: float | None) -> Verdict:
    speeds, problems = {}, []
    for node in range(place.nodes):
        deadline = time.monotonic() + place.limit
        while not store.check([f"speed/{node}"]) and not store.check([f"broken/{node}"]) and time.monotonic() < deadline:
            time.sleep(0.02)
        if store.check([f"speed/{node}"]):
            name, speed = json.loads(store.get(f"speed/{node}"))
            speeds[name] = speed
        elif store.check([f"broken/{node}"]):
            problems.append(store.get(f"broken/{node}").decode())
        else:
            problems.append(f"node {node} of {place.nodes} was lost during the messages")
    if least is None:
        least = 0.0
    elif speeds:
        least = max(least, median(speed["into"] for speed in speeds.values()) / OUTLIER)
    problems += [
        f"{name}: {speed['into']:.2f} GB/s into it over {backend}, at least {least:.2f} are wanted"
        for name, speed in speeds.items()
        if speed["into"] < least
    ]
    slowest = min(speeds.values(), key=lambda speed: speed["into"], default={"into": 0.0, "all_reduce": 0.0})
    note = (
        f"{place.nodes} nodes over {backend}: all-reduce {slowest['all_reduce']:.2f} GB/s, into the slowest node {slowest['into']:.2f} GB/s"
    )
    return Verdict(problems, [note])
