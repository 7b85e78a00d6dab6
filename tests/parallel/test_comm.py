"""Objects of any length that ranks exchange through rank 0, open sockets, and reductions of gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from megarl.parallel.comm import INLINE, any_flags, broadcast_from_rank_0, gather_objects, gather_to_rank_0
from megarl.parallel.objects import encode
from megarl.parallel.runtime import Runtime
from tests.ranks import RankPool

FRAME = len(encode({"rank": 0, "text": b"x" * 300})) - 300
# Some encoded messages end just before, at and after the length that is sent at once.
LENGTHS = (0, INLINE - FRAME - 1, INLINE - FRAME, INLINE + 1, 70_000)


def message(rank: int, length: int) -> Any:
    """Return a rank's message: None for rank 1, else a message whose length depends on the rank."""
    return None if rank == 1 else {"rank": rank, "text": bytes([rank]) * (length + rank)}


def exchange(runtime: Runtime) -> dict[str, Any]:
    messages = [message(runtime.rank, length) for length in LENGTHS]
    listening = [one for one in psutil.Process().net_connections("tcp") if one.status == psutil.CONN_LISTEN]
    return {
        "all": [gather_objects(runtime, sent, Any) for sent in messages],
        "on 0": [gather_to_rank_0(runtime, sent, Any) for sent in messages],
        "from 0": [broadcast_from_rank_0(runtime, sent, Any) for sent in messages],
        "any": any_flags(runtime, (runtime.rank == 3, False, True)),
        "listening": len(listening),
    }


def test_every_rank_gets_what_each_has_sent(ranks: Callable[..., RankPool]) -> None:
    expected = [[message(rank, length) for rank in range(4)] for length in LENGTHS]
    for rank, found in enumerate(ranks(2, 2, 1).run(exchange)):
        assert found["all"] == expected
        assert found["on 0"] == (expected if rank == 0 else [None] * len(LENGTHS))
        assert found["from 0"] == [messages[0] for messages in expected]
        assert found["any"] == [True, False, True]
        # All of Megatron's groups share a gloo device, since each device has a thread that wakes a hundred
        # times a second.
        # a second.
        assert found["listening"] == 1


def summed(runtime: Runtime) -> dict[str, Any]:
    """Reduce this rank's gradients as Megatron does, blocking and asynchronously, and with torch.

    Returns the rank's part by each way, and for Megatron's two also the whole buffer."""
    from megatron.core import parallel_state
    from megatron.core.distributed import param_and_grad_buffer as buffers

    group = parallel_state.get_data_parallel_group()
    own = torch.randn(4 * 3001, generator=torch.Generator().manual_seed(runtime.rank))
    theirs = torch.empty(len(own) // group.size())
    dist.reduce_scatter_tensor(theirs, own.clone(), group=group)
    found: dict[str, Any] = {"theirs": theirs}
    for name, beside in (("at once", False), ("beside", True)):
        whole = own.clone()
        part = whole.chunk(group.size())[group.rank()]
        with buffers._coalescing_manager(group, async_ops=beside) as handle:
            buffers.dist_reduce_scatter_func(part, whole, op=dist.ReduceOp.SUM, group=group, async_op=beside)
        if beside:
            handle.wait()
        found |= {name: part.clone(), f"{name}, whole": whole}
    return found


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_gradients_are_summed_where_they_stand(ranks: Callable[..., RankPool], dp: int) -> None:
    """Reductions in place are bitwise those of torch's reduce_scatter over gloo, which sums a copy.

    In place, the other ranks' parts of the buffer have their sums too."""
    found = ranks(1, 1, dp).run(summed)
    for rank in found:
        assert torch.equal(rank["at once"], rank["theirs"]) and torch.equal(rank["beside"], rank["theirs"])
        assert torch.equal(rank["at once, whole"], torch.cat([other["theirs"] for other in found]))


# dtype, and number of a rank's weights
NUMBERS = ((torch.float32, 128), (torch.bfloat16, 128), (torch.bfloat16, 127))


def gathered(runtime: Runtime) -> dict[str, torch.Tensor]:
    """Gather the ranks' weights as Megatron does, blocking and asynchronously, and return their bytes."""
    from megatron.core import parallel_state
    from megatron.core.distributed import param_and_grad_buffer as buffers

    group = parallel_state.get_data_parallel_group()
    found = {}
    for dtype, count in (*NUMBERS,):
        own = torch.randn(count, generator=torch.Generator().manual_seed(runtime.rank)).to(dtype)
        own[:3] = torch.tensor([-0.0, float("nan"), float("-inf")])
        for name, beside in (("at once", False), ("beside", True)):
            # a bucket within a larger buffer
            whole = torch.full((2 + group.size() * len(own),), 7.0, dtype=dtype)[2:]
            part = whole.chunk(group.size())[group.rank()]
            part.copy_(own)
            with buffers._coalescing_manager(group, async_ops=beside) as handle:
                buffers.dist_all_gather_func(whole, part, group=group, async_op=beside)
            if beside:
                handle.wait()
            found[f"{count} of {dtype}, {name}"] = whole.view(torch.uint8).clone()
        found[f"{count} of {dtype}, own"] = own.view(torch.uint8)
    return found


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_weights_are_gathered_where_they_stand(ranks: Callable[..., RankPool], dp: int) -> None:
    """The gathered weights are bitwise equal, including the sign of a zero and NaNs."""
    found = ranks(1, 1, dp).run(gathered)
    for dtype, count in NUMBERS:
        which = f"{count} of {dtype}"
        expected = torch.cat([rank[f"{which}, own"] for rank in found])
        for rank in found:
            assert torch.equal(rank[f"{which}, at once"], expected)
            assert torch.equal(rank[f"{which}, beside"], expected)
