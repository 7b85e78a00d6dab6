"""Messages between pipeline stages over gloo, with semantics that NCCL may have.

A send completes only with its receive (gloo may complete a small one at once). Where Megatron synchronises
the device, all started messages must complete."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as distributed

ACKNOWLEDGED = 7  # a tag for gloo messages


class _Works:
    """A message and the receiver's acknowledgement."""

    def __init__(self, *works: Any) -> None:
        self.works: tuple[Any, ...] = works

    def wait(self) -> None:
        for work in self.works:  # gloo's works can be waited for only once
            work.wait()
        self.works = ()


@contextmanager
def rendezvous() -> Iterator[tuple[set[tuple[int, str]], list[int]]]:
    """Replace the messages' functions within the `with` block.

    Yields (rank, group) of each destination of point-to-point sends outside batches, and the number of
    messages started before each device synchronisation."""
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
