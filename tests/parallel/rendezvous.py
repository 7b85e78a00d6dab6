"""Messages between pipeline stages as NCCL may have them, over gloo: a send ends when its receiver has asked
for it (gloo may end a small one at once), and where Megatron synchronises the device, all that was begun has
to end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as distributed

ACKNOWLEDGED = 7  # a tag of gloo's messages


class _Works:
    """A message and, with it, the word that its receiver has asked for it."""

    def __init__(self, *works: Any) -> None:
        self.works: tuple[Any, ...] = works

    def wait(self) -> None:
        for work in self.works:  # gloo's can be waited for once
            work.wait()
        self.works = ()


@contextmanager
def rendezvous() -> Iterator[tuple[set[tuple[int, str]], list[int]]]:
    """Until this is left. Gives to whom, and in which group, single messages were sent, and how many messages
    were begun before each time that the device was synchronised."""
    from megatron.core.pipeline_parallel import p2p_communication as megatron

    send, receive = dist.isend, dist.irecv
    begun: list[_Works] = []
    sent: set[tuple[int, str]] = set()
    waited: list[int] = []
    batched: list[bool] = []

    def isend(tensor: Any, dst: int, group: Any = None, tag: int = 0) -> _Works:
        word = torch.zeros(1)
        begun.append(_Works(send(tensor, dst, group, tag), receive(word, dst, group, ACKNOWLEDGED)))
        if not batched:
            sent.add((dst, group.group_desc))
        return begun[-1]

    def irecv(tensor: Any, src: int, group: Any = None, tag: int = 0) -> _Works:
        begun.append(_Works(receive(tensor, src, group, tag), send(torch.ones(1), src, group, ACKNOWLEDGED)))
        return begun[-1]

    def batch(operations: list[Any]) -> list[_Works]:
        batched.append(True)
        works = [operation.op(operation.tensor, operation.peer, operation.group) for operation in operations]
        batched.clear()
        return works

    def synchronize(device: Any = None) -> None:
        for work in begun:
            work.wait()
        waited.append(len(begun))
        begun.clear()

    with pytest.MonkeyPatch.context() as patch:
        for module in (dist, distributed):
            patch.setattr(module, "isend", isend)
            patch.setattr(module, "irecv", irecv)
            patch.setattr(module, "batch_isend_irecv", batch)
        patch.setattr(torch.cuda, "synchronize", synchronize)
        assert megatron.torch.distributed.isend is isend
        yield sent, waited
