"""Fingerprints: the same however a tensor is cut, different for every kind of error, and a failed check stops
every rank by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.config.errors import TransferError
from megarl.parallel.layout import Layout
from megarl.sync.plan import make_plan
from megarl.sync.transfer import Transfer, fingerprint
from megarl.weights.boxes import full_box
from megarl.weights.shards import megatron_layout, sglang_shards
from tests.ranks import RankPool
from tests.weights.folders import described, sliced
from tests.weights.jobs import into_engines, whole_model

CONFIG = described("qwen2", 2, 16, 4, 2, 24, 35, tie_word_embeddings=True)
DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn)


def test_the_sum_is_the_documented_one() -> None:
    """Against Python's integers, with the weights read off tensors that have a single bit."""

    def weight(axis: int, index: int) -> int:
        box = ((index, index + 1), (0, 1)) if axis == 0 else ((0, 1), (index, index + 1))
        one = torch.ones(1, 1, dtype=torch.int32).view(torch.float32)
        other = fingerprint(one, ((0, 1), (0, 1))).item()
        inverse = pow(weights_at_zero := other % 2**64, -1, 2**64)
        assert weights_at_zero % 2 == 1
        return fingerprint(one, box).item() * inverse % 2**64

    base = fingerprint(torch.ones(1, 1, dtype=torch.int32).view(torch.float32), ((0, 1), (0, 1))).item()
    bits = torch.randint(
        -(2**31), 2**31, (5, 7), dtype=torch.int32, generator=torch.Generator().manual_seed(0)
    )
    expected = (
        sum(int(bits[i, j]) * base * weight(0, i) * weight(1, j) for i in range(5) for j in range(7)) % 2**64
    )
    assert fingerprint(bits.view(torch.float32), full_box((5, 7))).item() % 2**64 == expected


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.sampled_from(DTYPES), st.data())
def test_parts_add_up(shape: list[int], dtype: torch.dtype, data: st.DataObject) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99)))).to(
        dtype
    )
    axis = data.draw(st.integers(0, len(shape) - 1))
    cut = data.draw(st.integers(0, shape[axis]))
    total = 0
    for start, stop in ((0, cut), (cut, shape[axis])):
        if start < stop:
            box = tuple(
                (start, stop) if dimension == axis else (0, size) for dimension, size in enumerate(shape)
            )
            total += fingerprint(tensor.narrow(axis, start, stop - start), box).item()
    assert (total - fingerprint(tensor, full_box(tuple(shape))).item()) % 2**64 == 0


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 9), st.integers(2, 9), st.sampled_from(DTYPES), st.data())
def test_errors_show(rows: int, columns: int, dtype: torch.dtype, data: st.DataObject) -> None:
    tensor = (torch.arange(rows * columns).view(rows, columns) + 1.0).to(dtype)
    before = fingerprint(tensor, full_box((rows, columns)))
    bits = tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.itemsize])
    i, j = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, columns - 1))
    kind = data.draw(st.sampled_from(["bit", "rows", "columns", "shift", "neighbours", "transposed"]))
    changed = bits.clone()
    if kind == "bit":
        changed[i, j] ^= 1 << data.draw(st.integers(0, 6))
    elif kind == "rows":
        changed[[i, i - 1]] = bits[[i - 1, i]]
    elif kind == "columns":
        changed[:, [j, j - 1]] = bits[:, [j - 1, j]]
    elif kind == "shift":
        changed = bits.roll(1, 0)
    elif kind == "neighbours":
        changed[i, [j, j - 1]] = bits[i, [j - 1, j]]
    else:
        changed = bits.T.reshape(rows, columns).clone()
    if not torch.equal(changed, bits):  # float8 rounds some neighbours to the same number
        assert fingerprint(changed.view(dtype), full_box((rows, columns))) != before


@pytest.mark.parametrize(
    "tps", [[(2, 0), (2, 1), (4, 0), (1, 0)], [(1, 0)] * 4], ids=["copied-heads-and-padding", "passed-on"]
)
def test_a_wrong_transfer_is_named_on_every_rank(
    ranks: Callable[..., RankPool], tps: list[tuple[int, int]]
) -> None:
    layout = Layout(tp=2, pp=2)
    found = ranks(2, 2, 1).run(
        into_engines, config=CONFIG, layout=layout, tps=tps, fp8=False, bucket=3000, dtype=torch.float32
    )
    hf = whole_model(CONFIG, 2)
    for (tensors, said, failed, _), place in zip(found, tps, strict=True):
        expected = sliced(sglang_shards(CONFIG, *place), hf)
        assert all(torch.equal(tensors[name], expected[name]) for name in expected)
        assert failed == []
        assert (
            said == "weight transfer: fingerprints of 1 engine tensors are not the actor's: "
            "model.layers.0.input_layernorm.weight of rank 1"
        )


@pytest.mark.parametrize("where", ["region", "padding"])
def test_any_element_counts(where: str) -> None:
    layout = megatron_layout(CONFIG, Layout())
    plan = make_plan(layout, [(0, sglang_shards(CONFIG, 1, 0))])
    weights = sliced(layout[0][1], whole_model(CONFIG))
    out = {name: torch.ones(shard.shape) for name, shard in plan.targets[0].items()}
    transfer = Transfer(plan, 0, weights, out, 1, dtype=torch.float32)
    transfer.run()
    transfer.check()
    name = "model.embed_tokens.weight"
    out[name][-1 if where == "padding" else 34, 5] += 1e-7
    with pytest.raises(TransferError, match=f"{name} of rank 0"):
        transfer.check()
