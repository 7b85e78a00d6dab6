"""Objects that ranks exchange by way of rank 0, of any length; the sockets that a rank holds open; and how
gradients are summed."""

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
# Encoded, some messages end just before, at and behind what travels at once.
LENGTHS = (0, INLINE - FRAME - 1, INLINE - FRAME, INLINE + 1, 70_000)


def message(rank: int, length: int) -> Any:
    """Return what a rank sends: rank 1 None, the others messages of different lengths."""
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
        # One gloo device for all of Megatron's groups, each of which has a thread that wakes a hundred times
        # a second.
        assert found["listening"] == 1


def summed(runtime: Runtime) -> dict[str, Any]:
    """Gradients of this rank summed as Megatron does it, at once and beside other work, and by torch's own
    reduce_scatter: the rank's part of each, and the first as a whole."""
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
    """To the bits of torch's reduce_scatter over gloo, which sums a copy: in place the other ranks' parts
    hold their sums too."""
    found = ranks(1, 1, dp).run(summed)
    for rank in found:
        assert torch.equal(rank["at once"], rank["theirs"]) and torch.equal(rank["beside"], rank["theirs"])
        assert torch.equal(rank["at once, whole"], torch.cat([other["theirs"] for other in found]))


NUMBERS = ((torch.float32, 128), (torch.bfloat16, 128), (torch.bfloat16, 127))  # weights of a rank


def gathered(runtime: Runtime) -> dict[str, torch.Tensor]:
    """Weights of the ranks' parts gathered as Megatron does it, at once and beside other work: the bits."""
    from megatron.core import parallel_state
    from megatron.core.distributed import param_and_grad_buffer as buffers

    group = parallel_state.get_data_parallel_group()
    found = {}
    for dtype, count in (*NUMBERS,):
        own = torch.randn(count, generator=torch.Generator().manual_seed(runtime.rank)).to(dtype)
        own[:3] = torch.tensor([-0.0, float("nan"), float("-inf")])
        for name, beside in (("at once", False), ("beside", True)):
            whole = torch.full((2 + group.size() * len(own),), 7.0, dtype=dtype)[2:]  # a bucket of a buffer
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
    """To the bit: the sign of a zero and what is no number too."""
    found = ranks(1, 1, dp).run(gathered)
    for dtype, count in NUMBERS:
        which = f"{count} of {dtype}"
        expected = torch.cat([rank[f"{which}, own"] for rank in found])
        for rank in found:
            assert torch.equal(rank[f"{which}, at once"], expected)
            assert torch.equal(rank[f"{which}, beside"], expected)
