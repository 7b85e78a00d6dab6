"""The same counts (tests/scale/drawn.py) without processes: python -m tests.scale.simulated TP PP DP EACH
[RESPONSES TOKENS]

Ranks are threads. They run the code of parallel/comm.py and parallel/delivery.py as it is; what that asks of
torch.distributed goes to a group that counts, per rank, messages and bytes of content (no headers, no
handshakes). A gather is a message from each to the first; a broadcast goes along gloo's binomial tree. The
controller's messages go through their sockets, and are counted where they are sent.
"""

from __future__ import annotations

import json
import queue
import statistics
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.parallel import comm, secret
from megarl.parallel.layout import Layout
from megarl.rollout import messages
from tests.scale import drawn

WAITED = 12.0  # seconds of a rollout in which nothing ends
LIMIT = 900.0  # seconds that a message may take: a thousand threads share a core


class Group:
    """A rank's end of a group: its number there, and the numbers of all members among all ranks."""

    def __init__(self, net: Net, name: str, members: Sequence[int], rank: int) -> None:
        self.net, self.name, self.members, self.number = net, name, members, rank

    def rank(self) -> int:
        return self.number

    def send(self, tensor: Tensor, to: int, tag: int) -> None:
        size = tensor.numel() * tensor.element_size()
        self.net.counts[self.members[self.number]].update(messages=1, bytes=size)
        self.net.counts[self.members[to]].update(messages=1, bytes=size, bytes_in=size)
        self.net.boxes[self.name, self.number, to, tag].put(tensor)

    def receive(self, into: Tensor, source: int, tag: int) -> None:
        into.copy_(self.net.boxes[self.name, source, self.number, tag].get(timeout=LIMIT))


class Net:
    """What `torch.distributed` is to comm.py."""

    def __init__(self, world: int) -> None:
        self.boxes: Any = defaultdict(queue.SimpleQueue)
        self.counts = [Locked() for _ in range(world)]

    def get_world_size(self, group: Group) -> int:
        return len(group.members)

    def get_rank(self, group: Group) -> int:
        return group.number

    def gather(self, tensor: Tensor, into: list[Tensor] | None, *, group: Group, group_dst: int) -> None:
        if into is None:
            group.send(tensor, group_dst, -1)
            return
        into[group_dst].copy_(tensor)
        for rank, place in enumerate(into):
            if rank != group_dst:
                group.receive(place, rank, -1)

    def broadcast(self, tensor: Tensor, *, group: Group, group_src: int) -> None:
        assert group_src == 0
        world, lowest = len(group.members), group.number & -group.number
        if group.number:
            group.receive(tensor, group.number - lowest, -2)
        step = 1
        while step < (lowest or world):
            if group.number + step < world:
                group.send(tensor, group.number + step, -2)
            step *= 2

    def send(self, tensor: Tensor, *, group: Group, tag: int, group_dst: int) -> None:
        group.send(tensor, group_dst, tag)

    def recv(self, tensor: Tensor, *, group: Group, tag: int, group_src: int) -> None:
        group.receive(tensor, group_src, tag)

    def isend(self, tensor: Tensor, *, group: Group, tag: int, group_dst: int) -> Any:
        group.send(tensor, group_dst, tag)
        return SimpleNamespace(wait=lambda: None)

    def irecv(self, tensor: Tensor, *, group: Group, tag: int, group_src: int) -> Any:
        return SimpleNamespace(wait=lambda: group.receive(tensor, group_src, tag))


class Locked:
    """A Counter that several threads add to."""

    def __init__(self) -> None:
        self.lock, self.counter = threading.Lock(), Counter[str]()

    def update(self, **more: int) -> None:
        with self.lock:
            self.counter.update(more)

    def now(self) -> Counter[str]:
        with self.lock:
            return Counter(self.counter)


@contextmanager
def in_place_of_torch(net: Net) -> Iterator[None]:
    """Have comm.py send through the net, in this process, and count the controller's messages."""
    hub, link = messages.Hub.send, messages.Link.send

    def count(source: int, target: int, message: messages.Message) -> None:
        size = len(messages.encode_message(message))
        if source != target:
            net.counts[source].update(messages=1, bytes=size)
            net.counts[target].update(messages=1, bytes=size, bytes_in=size)

    async def from_hub(self: messages.Hub, number: int, message: messages.Message) -> None:
        count(0, number, message)
        await hub(self, number, message)

    async def from_link(self: messages.Link, message: messages.Message) -> None:
        count(int(self.socket.identity), 0, message)
        await link(self, message)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comm, "dist", net)
        patch.setattr(messages, "own_address", lambda: "127.0.0.1")
        patch.setattr(secret, "_secret", bytes(secret.SIZE))
        patch.setattr(messages.Hub, "send", from_hub)
        patch.setattr(messages.Link, "send", from_link)
        yield


def simulate(
    layout: Layout, each: int, responses: int, tokens: int, waited: float = WAITED
) -> list[dict[str, Any]]:
    """Each rank's counts; `each` ranks have one engine."""
    net, found = Net(layout.world), [dict[str, Any]() for _ in range(layout.world)]
    barrier = threading.Barrier(layout.world)

    def one(rank: int) -> None:
        torch.set_num_threads(1)
        group = Group(net, "all", range(layout.world), rank)
        ranks: Any = SimpleNamespace(rank=rank, world=layout.world, cpu_group=group)

        def traffic() -> Counter[str]:
            barrier.wait(LIMIT)  # what others send is counted here at once: none is ahead
            counted = net.counts[rank].now()
            barrier.wait(LIMIT)
            return counted

        sizes = {"seconds": waited, "responses": responses, "tokens": tokens}
        meet = partial(barrier.wait, LIMIT)
        found[rank] = drawn.count(ranks, layout, each, traffic, meet, **sizes)  # type: ignore[arg-type]

    threading.stack_size(512 * 1024)
    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(layout.world)]
    with in_place_of_torch(net):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if not all(found):
        raise SystemExit("simulated: a rank has failed")
    return found


def summary(found: Sequence[dict[str, Any]], each: int, waited: float, responses: int) -> dict[str, float]:
    """The row of docs/scale.md, from each rank's counts."""
    leaders = found[::each]

    def of_waiting(ranks: Sequence[dict[str, Any]], what: str) -> float:
        return statistics.median(10 * rank["waiting"].get(what, 0) / waited for rank in ranks or found)

    facts = statistics.median(rank["facts"].get("bytes_in", 0) for rank in leaders[1:] or leaders)
    return {
        "ranks": len(found),
        "engines": len(leaders),
        "messages in 10 s, all ranks": 5 * sum(r["waiting"].get("messages", 0) for r in found) / waited,
        "messages in 10 s, rank 0": of_waiting(found[:1], "messages"),
        "messages in 10 s, a leader": of_waiting(leaders[1:], "messages"),
        "bytes in 10 s, rank 0": of_waiting(found[:1], "bytes"),
        "bytes in 10 s, a leader": of_waiting(leaders[1:], "bytes"),
        "bytes of facts into a leader, a response": facts / responses,
        "share, bytes": statistics.median(rank["share"] for rank in found),
        "delivery into a rank / share": max(r["delivery"].get("bytes_in", 0) / r["share"] for r in found),
        "all into a rank / share": max(
            sum(r[part].get("bytes_in", 0) for part in ("facts", "delivery")) / r["share"] for r in found[1:]
        ),
        "sent by a rank / (share + drawn)": max(
            (r["delivery"].get("bytes", 0) - r["delivery"].get("bytes_in", 0)) / (r["share"] + r["drawn"])
            for r in found
        ),
        "messages of delivery, a rank": max(r["delivery"].get("messages", 0) for r in found),
    }


if __name__ == "__main__":
    tp, pp, dp, group = map(int, sys.argv[1:5])
    many, long = map(int, sys.argv[5:7] or (2048, 500))
    counted = simulate(Layout(tp=tp, pp=pp, dp=dp), group, many, long)
    print(json.dumps(summary(counted, group, WAITED, many), indent=1))
