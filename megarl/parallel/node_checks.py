"""Check the nodes of a job before its ranks start.

Nodes report progress in the first node's store, so that messages can name a silent one.
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
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import psutil
import torch
import torch.distributed as dist

from megarl.config.errors import ConfigError, WaitTimeout, first_line
from megarl.parallel.machine import GIB, driver_problem, driver_version, hostname_problem
from megarl.parallel.secret import SECRET_FILE, SignedStore, agree_on_secret, open_store

MESSAGE = 64 * 2**20
CONTROL = 2**20
ROUNDS = 3
CLOCKS = 5.0  # seconds that clocks may differ
VISIBLE = 5.0  # seconds until others must see a file
HEARD = 5.0  # seconds for others to read findings
UNSIGNED = 300  # bytes of an unsigned line to print
OUTLIER = 4.0  # a node this many times slower than the median is a problem
DEVICE_FREE = 0.9


@dataclass(frozen=True)
class NodePlace:
    """This node's place in the job. limit: seconds for each wait."""

    node: int
    nodes: int
    host: str
    port: int
    limit: float
    name: str = field(default_factory=socket.gethostname)


@dataclass(frozen=True)
class NodeNeeds:
    """Requirements on each node.

    folder     of the run, shared by all nodes
    devices    GPUs
    bandwidth  GB/s into the node"""

    folder: Path
    devices: int = 0
    host_bytes: float = 0.0
    disk_bytes: float = 0.0
    bandwidth: float = 0.0


class Findings(NamedTuple):
    """Results, the same on every node."""

    problems: list[str]  # stop the job
    notes: list[str]


def check_nodes(
    place: NodePlace,
    needs: NodeNeeds,
    versions: Mapping[str, str],
    clock: Callable[[], float] = time.time,
    problems: Sequence[str] = (),
) -> Findings:
    """Check this node, its differences from others, and the network. Every node calls this.

    problems: found earlier on this node"""
    is_first = place.node == 0
    try:
        unsigned_store = open_store(place.host, place.port, place.nodes, place.limit, first=is_first)
    except (OSError, dist.DistError, RuntimeError):
        where = f"{place.host}:{place.port} within {place.limit:.0f} s"
        return Findings([f"{place.name}: cannot reach {where} (a firewall, or the wrong interface?)"], [])
    store = SignedStore(unsigned_store)
    secret = needs.folder / f".nodes-{place.port}"  # others must see it
    if not is_first:
        store.wait("begin", place.limit)
    try:
        agree_on_secret(secret, VISIBLE, first=is_first)
    except WaitTimeout:
        what = f"{place.name}: does not see the first node's file in {needs.folder}"
        line = f"{what} (it must be writable, and shared by all nodes)"
        with suppress(dist.DistError):  # the first node has left
            unsigned_store.set(f"unseen/{place.node}", line)  # not signed: this node has no secret
            unsigned_store.set(f"heard/facts/{place.node}", "")
        return Findings([line], [])
    except ConfigError as error:
        return Findings([f"{place.name}: {error}"], [])
    if is_first:
        store.set("begin", "")
    try:
        node_problems = [*problems, *_device_problems(needs), *_host_problems(needs)]
        if place.nodes > 1 and (problem := hostname_problem()):
            node_problems.append(problem)
        facts = {"name": place.name, "problems": node_problems, "versions": dict(versions)}
        store.set(f"facts/{place.node}", json.dumps(facts))
        all_problems = _check_nodes(store, place, clock) if is_first else []
        if not is_first and store.wait(f"ask/{place.node}", place.limit * 2):
            store.set(f"clock/{place.node}", repr(clock()))
        findings = _share(store, place, "facts", Findings(all_problems, []))
        if findings.problems:
            return findings
        if place.nodes == 1:
            return Findings([], ["one node: nothing to measure between nodes"])
        notes: list[str] = []
        for i, (backend, size, bandwidth) in enumerate(networks(needs)):
            # Separate keys: an earlier network's address leads to a closed socket.
            network_store = dist.PrefixStore(f"network/{i}", unsigned_store)
            findings = _try_network(network_store, place, backend, size, bandwidth)
            notes += findings.notes
            if findings.problems:
                return Findings(findings.problems, notes)
        return Findings([], notes)
    finally:
        if is_first and SECRET_FILE not in os.environ:
            secret.unlink(missing_ok=True)


def _device_problems(needs: NodeNeeds) -> list[str]:
    if not needs.devices:
        return []
    count = torch.cuda.device_count()
    if count != needs.devices:
        why = None if count else driver_problem(driver_version(), torch.version.cuda)
        why = why or "run nvidia-smi: is the driver loaded?"
        return [f"{count} GPUs, {needs.devices} were asked for ({why})"]
    problems = []
    for index in range(count):
        try:
            free, total = torch.cuda.mem_get_info(index)
            ones = torch.ones(256, 256, device=f"cuda:{index}")
            is_wrong = float((ones @ ones).sum()) != 256.0**3
        except RuntimeError as error:
            problems.append(f"GPU {index} does not work: {first_line(error)}")
            continue
        if is_wrong:
            problems.append(f"GPU {index} computes wrong results")
        if free < DEVICE_FREE * total:
            memory_text = f"{free / GIB:.1f} of {total / GIB:.1f} GiB are free"
            problems.append(f"GPU {index}: {memory_text}: another process is on it")
    return problems


def _host_problems(needs: NodeNeeds) -> list[str]:
    problems, folder = [], needs.folder
    free = psutil.virtual_memory().available
    if free < needs.host_bytes:
        what = f"{free / GIB:.1f} GiB of memory are free"
        problems.append(f"{what}, the run needs {needs.host_bytes / GIB:.1f}")
    if not os.access(folder, os.W_OK):
        problems.append(f"{folder} cannot be written")
    free = shutil.disk_usage(folder).free
    if free < needs.disk_bytes:
        what = f"{free / GIB:.1f} GiB are free in {folder}"
        problems.append(f"{what}, the run needs {needs.disk_bytes / GIB:.1f}")
    return problems


def _check_nodes(store: SignedStore, place: NodePlace, clock: Callable[[], float]) -> list[str]:
    """Return, on the first node, lines about silent, unsound and different nodes."""
    deadline = time.monotonic() + place.limit
    facts, secret_problems = {}, dict[int, str]()
    for node in range(place.nodes):
        key = f"facts/{node}"
        while not store.has(key) and not store.has(f"unseen/{node}") and time.monotonic() < deadline:
            time.sleep(0.02)
        if store.has(key):
            facts[node] = json.loads(store.get(key))
        elif store.has(f"unseen/{node}"):
            line = store.store.get(f"unseen/{node}")[:UNSIGNED].decode(errors="replace")
            secret_problems[node] = "".join(filter(str.isprintable, line))
    names = ", ".join(sorted(node_facts["name"] for node_facts in facts.values()))
    problems = [*secret_problems.values()] + [
        f"node {node} of {place.nodes} has not reported within {place.limit:.0f} s (those that have: {names})"
        for node in range(place.nodes)
        if node not in facts and node not in secret_problems
    ]
    first_facts = facts[0]
    for node, node_facts in sorted(facts.items()):
        name = node_facts["name"]
        problems += [f"{name}: {problem}" for problem in node_facts["problems"]]
        for package in sorted({*first_facts["versions"], *node_facts["versions"]}):
            version = node_facts["versions"].get(package, "none")
            first_version = first_facts["versions"].get(package, "none")
            if version != first_version:
                problems.append(f"{name}: {package} {version}, but {first_facts['name']} has {first_version}")
        if node == 0:
            continue
        request_time = clock()
        store.set(f"ask/{node}", "")
        if not store.wait(f"clock/{node}", place.limit):
            problems.append(f"{name}: stopped answering")
            continue
        # Compare with the middle of the round trip.
        clock_offset = float(store.get(f"clock/{node}")) - (request_time + clock()) / 2
        if abs(clock_offset) > CLOCKS:
            direction = "ahead of" if clock_offset > 0 else "behind"
            offset_text = f"{abs(clock_offset):.0f} s {direction} {first_facts['name']}'s"
            problems.append(f"{name}: its clock is {offset_text} (is NTP running?)")
    return problems


def _share(store: SignedStore, place: NodePlace, part: str, findings: Findings) -> Findings:
    """Return the first node's findings on every node. The first node leaves last: it has the store."""
    if place.node == 0:
        store.set(f"findings/{part}", json.dumps(findings))
        for node in range(1, place.nodes):
            store.wait(f"heard/{part}/{node}", HEARD if findings.problems else place.limit)
        return findings
    if not store.wait(f"findings/{part}", place.limit * 2):
        return Findings([f"{place.name}: the first node {place.host} has stopped answering"], [])
    findings = Findings(*json.loads(store.get(f"findings/{part}")))
    store.set(f"heard/{part}/{place.node}", "")
    return findings


def networks(needs: NodeNeeds) -> list[tuple[str, int, float | None]]:
    """Return (backend, bytes of a message, least GB/s into a node) of the job's networks.

    gloo's control messages often have another interface."""
    if needs.devices:
        return [("nccl", MESSAGE, needs.bandwidth), ("gloo", CONTROL, None)]
    return [("gloo", MESSAGE, needs.bandwidth)]


def _try_network(
    store: dist.Store, place: NodePlace, backend: str, size: int, bandwidth: float | None
) -> Findings:
    """Measure GB/s into this node, in a ring, and of an all-reduce.

    Both are message size / time, not bus bandwidth."""

    signed_store = SignedStore(store)

    def give_up() -> None:
        """End the process, the only way out of a hanging collective."""
        if place.node == 0:
            late_nodes, absent_nodes = (
                [str(node) for node in range(place.nodes) if not signed_store.has(f"stage/{node}/{stage}")]
                for stage in ("reduced", "joined")
            )
            what = f"nodes {', '.join(late_nodes)} have not finished the all-reduce"
            if absent_nodes:
                what = f"nodes {', '.join(absent_nodes)} have not joined"
            line = f"{backend} between nodes took more than {place.limit:.0f} s: {what}"
            print(f"preflight: {place.name}: {line}", flush=True)
        os._exit(2)

    def measure() -> tuple[float, float]:
        device = torch.device("cuda", 0) if backend == "nccl" else torch.device("cpu")
        if backend == "nccl":
            torch.cuda.set_device(device)
        limit = datetime.timedelta(seconds=place.limit)
        group_store = dist.PrefixStore("group", store)
        dist.init_process_group(
            backend, store=group_store, rank=place.node, world_size=place.nodes, timeout=limit
        )
        try:
            signed_store.set(f"stage/{place.node}/joined", "")
            data, received = (torch.ones(size // 4, device=device) for _ in range(2))

            def pass_around_ring() -> None:
                next_node, previous_node = (place.node + 1) % place.nodes, (place.node - 1) % place.nodes
                operations = [
                    dist.P2POp(dist.isend, data, next_node),
                    dist.P2POp(dist.irecv, received, previous_node),
                ]
                for request in dist.batch_isend_irecv(operations):
                    request.wait()

            reduce_seconds = _seconds(lambda: dist.all_reduce(data, op=dist.ReduceOp.MAX), device)
            signed_store.set(f"stage/{place.node}/reduced", "")
            ring_seconds = _seconds(pass_around_ring, device)
            if not bool((received == 1).all()):
                raise RuntimeError("a message arrived with other bytes than were sent")
            return size / ring_seconds / 1e9, size / reduce_seconds / 1e9
        finally:
            dist.destroy_process_group()

    timer = threading.Timer(place.limit, give_up)
    timer.daemon = True
    timer.start()
    try:
        signed_store.set(f"speed/{place.node}", json.dumps([place.name, *measure()]))
    except (dist.DistError, RuntimeError) as error:
        signed_store.set(f"broken/{place.node}", f"{place.name}: {backend}: {first_line(error)}")
    timer.cancel()
    findings = (
        _check_network(signed_store, place, backend, bandwidth) if place.node == 0 else Findings([], [])
    )
    return _share(signed_store, place, "network", findings)


def _seconds(work: Callable[[], Any], device: torch.device) -> float:
    """Return the fewest seconds of ROUNDS, after one that connects."""
    durations = []
    for _ in range(ROUNDS + 1):
        dist.barrier()
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        durations.append(time.perf_counter() - start)
    return min(durations[1:])


def _check_network(store: SignedStore, place: NodePlace, backend: str, least: float | None) -> Findings:
    """Return, on the first node, lost, failed and slow nodes. least: GB/s."""
    speeds, problems = {}, []
    for node in range(place.nodes):
        deadline = time.monotonic() + place.limit
        speed_key, broken_key = f"speed/{node}", f"broken/{node}"
        while not store.has(speed_key) and not store.has(broken_key) and time.monotonic() < deadline:
            time.sleep(0.02)
        if store.has(speed_key):
            name, *speed = json.loads(store.get(speed_key))
            speeds[name] = tuple(speed)
        elif store.has(broken_key):
            problems.append(store.get(broken_key))
        else:
            problems.append(f"node {node} of {place.nodes} stopped answering during the network measurement")
    if least is not None and speeds:
        least = max(least, median(ring_speed for ring_speed, _ in speeds.values()) / OUTLIER)
    for name, (ring_speed, _) in speeds.items():
        if least is not None and ring_speed < least:
            speed_text = f"{ring_speed:.2f} GB/s into it over {backend}"
            problems.append(f"{name}: {speed_text}, at least {least:.2f} are wanted")
    ring_speed, reduce_speed = min(speeds.values(), default=(0.0, 0.0))
    speed = f"all-reduce {reduce_speed:.2f} GB/s, into the slowest node {ring_speed:.2f} GB/s"
    return Findings(problems, [f"{place.nodes} nodes over {backend}: {speed}"])
