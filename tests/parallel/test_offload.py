"""Tensors are offloaded and onloaded unchanged and in place, through reusable host memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.config.errors import DeviceMemoryError
from megarl.parallel.offload_group import HostPool, OffloadGroup
from tests.families import Family
from tests.parallel import jobs
from tests.ranks import RankPool
from tests.tiny_models import make_tiny_model

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.float64)


def bits(tensor: torch.Tensor) -> bytes:
    # Call clone() first: numpy() would prevent resizing the storage.
    return tensor.clone().flatten().view(torch.uint8).numpy().tobytes()


def test_a_host_without_room_is_named() -> None:
    """On a GPU, the message quotes CUDA's error when the host is full: "CUDA error: out of memory"."""
    pool = HostPool(CPU, 2**55)
    with pytest.raises(DeviceMemoryError, match=r"^host memory: is full after .* 0\.00 GiB: .*\)$"):
        pool.take(1)
    assert pool.nbytes == 0


@given(
    sizes=st.lists(st.tuples(st.integers(0, 70), st.sampled_from(DTYPES)), min_size=1, max_size=8),
    chunk=st.sampled_from((1, 16, 64, 256)),
    rounds=st.integers(1, 3),
)
def test_comes_back_as_it_left(sizes: list[tuple[int, torch.dtype]], chunk: int, rounds: int) -> None:
    """Views share a storage and remain views of it, and the host memory of each round is reused."""
    pool = HostPool(CPU, chunk)
    whole = [
        torch.randint(0, 256, (n * dtype.itemsize,), dtype=torch.uint8).view(dtype) for n, dtype in sizes
    ]
    views = [tensor[1:] for tensor in whole if len(tensor) > 1]
    group = OffloadGroup(lambda: [*views, *whole], CPU, pool)
    before, size = [bits(tensor) for tensor in whole], sum(tensor.nbytes for tensor in whole)
    for _ in range(rounds):
        assert group.nbytes == size
        group.offload()
        assert group.nbytes == size
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in whole)
        group.onload()
        assert [bits(tensor) for tensor in whole] == before
        assert all(
            view.data_ptr() == base[1:].data_ptr()
            for view, base in zip(views, (t for t in whole if len(t) > 1), strict=True)
        )
    assert pool.nbytes == -(-size // chunk) * chunk


def test_zeros_and_constants() -> None:
    pool = HostPool(CPU, 32)
    gradients, weights = torch.full((9,), torch.nan), torch.arange(20.0)
    zero, constant = (
        OffloadGroup(lambda: [gradients], CPU, pool, "zero"),
        OffloadGroup(lambda: [weights], CPU, pool, "constant"),
    )
    zero.offload()
    assert pool.nbytes == 0
    zero.onload()
    assert torch.equal(gradients, torch.zeros(9))
    for _ in range(2):
        constant.offload()
        constant.onload()
        assert torch.equal(weights, torch.arange(20.0))
        assert pool.nbytes == 96


def test_what_is_elsewhere_stays() -> None:
    here, there = torch.ones(4), torch.ones(4, device="meta")
    group = OffloadGroup(lambda: [here, there], CPU, HostPool(CPU, 16))
    assert group.nbytes == here.nbytes
    group.offload()
    group.onload()
    assert torch.equal(here, torch.ones(4))


def test_no_room_leaves_everything_off_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.arange(4.0), torch.arange(8.0)]
    group = OffloadGroup(lambda: tensors, CPU, HostPool(CPU, 16))
    group.offload()
    resize = torch.UntypedStorage.resize_

    def full(storage: torch.UntypedStorage, size: int) -> None:
        if size == tensors[1].numel() * 4:
            raise torch.OutOfMemoryError("no room")
        resize(storage, size)

    with monkeypatch.context() as patched, pytest.raises(torch.OutOfMemoryError):
        patched.setattr(torch.UntypedStorage, "resize_", full)
        group.onload()
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)
    group.onload()
    assert torch.equal(tensors[1], torch.arange(8.0))


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        ((2, 1, 1), "bf16"),
        pytest.param((1, 1, 2), "bf16", marks=pytest.mark.slow),
        pytest.param((1, 2, 1), "fp32", marks=pytest.mark.slow),
    ],
)
def test_a_learner_that_was_away_learns_the_same_bits(
    layout: tuple, dtype: str, ranks: Callable[..., RankPool], tmp_path: Path
) -> None:
    """Weights, gradients and optimizer are offloaded between updates.

    In bf16 the optimizer has separate FP32 copies, in FP32 views."""
    folder = make_tiny_model(tmp_path / "model", "qwen3", vocab=61, tied=True)
    for which in ("actor", "critic"):
        stayed, moved = (
            ranks(*layout).run(jobs.updates_with_moves, folder=folder, which=which, dtype=dtype, moves=moves)
            for moves in (False, True)
        )
        for here, there in zip(stayed, moved, strict=True):
            assert here["norms"] == there["norms"]
            assert all(norm > 0 for norm in here["norms"])
            assert here["tensors"].keys() == there["tensors"].keys()
            for name, tensor in here["tensors"].items():
                assert bits(tensor) == bits(there["tensors"][name]), name
            assert there["away"] == 0
            assert min(there["bytes"].values()) > 0
            assert there["sizes"] == here["sizes"]


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen3_moe", (2, 1, 1)),
        ("qwen3", (1, 2, 1)),
        pytest.param("qwen3", (2, 1, 1), marks=pytest.mark.slow),
    ],
)
def test_nothing_of_an_update_stays_on_the_device(
    family: Family, layout: tuple, ranks: Callable[..., RankPool], tmp_path: Path
) -> None:
    """Libraries keep tensors of the last or largest micro-batch, which would use the engine's memory.

    Each of these is larger here than what may stay: counts of an expert's tokens."""
    folder = make_tiny_model(tmp_path / "model", family, vocab=61)
    for left in ranks(*layout).run(jobs.left_behind, folder=folder):
        assert [found for found in left if found[0] > 64] == []
