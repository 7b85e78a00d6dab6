"""Exact deltas: what arrives is bitwise what was sent, and what does not fit is refused."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.sync.delta import Change, DeltaError, Receiver, checksum, decode, encode, make_report

WIDTHS = st.sampled_from([1, 2, 4, 8])


@st.composite
def pairs(draw: Any) -> tuple[np.ndarray, np.ndarray, int]:
    """Generate old and new bytes, and bytes an element: few, many or all elements differ."""
    width, seed = draw(WIDTHS), draw(st.integers(0, 2**32 - 1))
    elements, share = draw(st.integers(0, 3000)), draw(st.sampled_from([0.0, 0.001, 0.03, 0.3, 1.0]))
    generator = np.random.default_rng(seed)
    old = generator.integers(0, 256, elements * width, dtype=np.uint8)
    new = generator.integers(0, 256, elements * width, dtype=np.uint8)
    keep = np.repeat(generator.random(elements) >= share, width)
    return old, np.where(keep, old, new), width


@given(pairs())
def test_a_change_gives_the_new_bytes(pair: tuple[np.ndarray, np.ndarray, int]) -> None:
    old, new, width = pair
    change = encode(old, new, width)
    if change is None:
        assert np.array_equal(old, new)
    else:
        assert np.array_equal(decode(change.kind, change.data, old, new.size, width), new)


@given(st.binary(max_size=64), st.binary(min_size=64, max_size=64), WIDTHS)
def test_short_texts_of_any_bytes(old: bytes, new: bytes, width: int) -> None:
    before = np.frombuffer(old.ljust(64, b"\0"), np.uint8)
    after = np.frombuffer(new, np.uint8)
    change = encode(before, after, width)
    found = before if change is None else decode(change.kind, change.data, before, 64, width)
    assert found.tobytes() == new


@pytest.mark.parametrize("gap", [0, 1, 253, 254, 255, 256, 509, 510, 511, 100_000])
def test_gaps_around_the_escape(gap: int) -> None:
    old = np.zeros(2 * (gap + 400), np.uint8)
    new = old.copy()
    new.view(np.uint16)[[0, gap + 1]] = 7, 9
    change = encode(old, new, 2)
    assert change is not None and change.kind == "sparse"
    assert np.array_equal(decode(change.kind, change.data, old, new.size, 2), new)


def test_few_changes_take_few_bytes() -> None:
    """2 % of the elements of bf16, as after a step of training, whose last bits change."""
    generator = np.random.default_rng(0)
    old = generator.integers(0, 2**16, 10**6, dtype=np.uint16)
    new = old ^ (generator.random(10**6) < 0.02).astype(np.uint16)
    change = encode(old.view(np.uint8), new.view(np.uint8), 2)
    assert change is not None and len(change.data) < 0.02 * old.nbytes


@given(pairs(), st.data())
def test_damage_is_refused_or_seen_by_the_checksum(
    pair: tuple[np.ndarray, np.ndarray, int], data: st.DataObject
) -> None:
    """Nothing but DeltaError is raised, whatever the bytes are."""
    old, new, width = pair
    change = encode(old, new, width)
    if change is None:
        return
    damaged = bytearray(change.data)
    place = data.draw(st.integers(0, len(damaged) - 1))
    if data.draw(st.booleans()):
        damaged[place] ^= data.draw(st.integers(1, 255))
    else:
        del damaged[place:]
    try:
        found = decode(change.kind, bytes(damaged), old, new.size, width)
    except DeltaError:
        return
    assert np.array_equal(found, new) or checksum(found) != checksum(new)


@given(st.sampled_from(["full", "dense", "sparse", "other"]), st.binary(max_size=80), WIDTHS)
def test_any_bytes_give_the_size_or_a_delta_error(kind: str, data: bytes, width: int) -> None:
    old = np.zeros(32, np.uint8)
    with suppress(DeltaError):
        assert decode(kind, data, old, 32, width).size == 32


def bucket(base: str, version: str, number: int, last: bool, new: dict[str, Any], old: Any = None) -> Any:
    """Return header and data of tensors of uint16, changes of `old` where it is given."""
    rows, parts = [], []
    for name, values in new.items():
        values = values.view(np.uint8)
        change = encode(old[name].view(np.uint8), values, 2) if old else Change("full", values.tobytes())
        if change is not None:
            rows.append((name, change.kind, len(change.data), values.size, 2, checksum(values)))
            parts.append(change.data)
    header = {"base": base, "version": version, "bucket": number, "last": last, "tensors": rows}
    return header, np.frombuffer(b"".join(parts), np.uint8)


def weights(seed: int) -> list[dict[str, np.ndarray]]:
    """Return two buckets. With another seed a few elements of most tensors differ."""
    generator = np.random.default_rng(seed)
    buckets = [{f"{b}.{i}": np.arange(b, b + 500, dtype=np.uint16) for i in range(3)} for b in range(2)]
    for tensors in buckets:
        for name, tensor in tensors.items():
            if not name.endswith("2"):
                tensor[generator.integers(0, 500, 5)] += np.uint16(seed)
    return buckets


def send(receiver: Receiver, base: str, version: int, seed: int, old_seed: int | None = None) -> list[str]:
    changed = []
    for i, tensors in enumerate(weights(seed)):
        old = None if old_seed is None else weights(old_seed)[i]
        changed += receiver.apply(*bucket(base, f"v{version}", i, i == 1, tensors, old))
    return changed


def expected_report(version: int, seed: int) -> str:
    tensors = {name: tensor for part in weights(seed) for name, tensor in part.items()}
    return make_report(f"v{version}", {name: checksum(t.view(np.uint8)) for name, t in tensors.items()})


def test_a_chain_of_versions() -> None:
    receiver = Receiver()
    assert len(send(receiver, "", 0, 1)) == 6
    assert receiver.report == expected_report(0, 1)
    assert sorted(send(receiver, "v0", 1, 2, 1)) == ["0.0", "0.1", "1.0", "1.1"]
    assert receiver.report == expected_report(1, 2)
    assert send(receiver, "v1", 2, 2, 2) == [] and receiver.report == expected_report(2, 2)


def test_a_gap_in_the_chain_is_refused_until_everything_comes() -> None:
    receiver = Receiver()
    assert send(receiver, "v0", 1, 2, 1) == [] and "here is no version" in receiver.report
    send(receiver, "", 1, 2)
    assert receiver.report == expected_report(1, 2)
    assert send(receiver, "v2", 3, 4, 3) == [] and receiver.report == "refused: it changes v2, but here is v1"
    assert send(receiver, "v1", 4, 4, 2) == [], "a refused receiver has no version"
    send(receiver, "", 4, 4)
    assert receiver.report == expected_report(4, 4)


def test_an_update_that_ends_in_the_middle_leaves_no_version() -> None:
    receiver = Receiver()
    send(receiver, "", 0, 1)
    receiver.apply(*bucket("v0", "v1", 0, False, weights(2)[0], weights(1)[0]))
    assert send(receiver, "v0", 1, 2, 1) == [] and "no version" in receiver.report
    assert receiver.apply(*bucket("", "v2", 1, True, weights(2)[1])) == [] and receiver.problem
    send(receiver, "", 2, 3)
    assert receiver.report == expected_report(2, 3)


def test_a_damaged_bucket_is_refused() -> None:
    receiver = Receiver()
    send(receiver, "", 0, 1)
    header, data = bucket("v0", "v1", 0, False, weights(2)[0], weights(1)[0])
    [name, *rest, crc] = header["tensors"][0]
    header["tensors"][0] = (name, *rest, crc ^ 1)
    assert receiver.apply(header, data) == [] and receiver.report == f"refused: {name}: another checksum"
    assert receiver.apply(*bucket("v0", "v1", 1, True, weights(2)[1], weights(1)[1])) == []
    assert receiver.report.startswith("refused: ")
    assert all(np.array_equal(receiver.tensors[n], t.view(np.uint8)) for n, t in weights(1)[0].items())
