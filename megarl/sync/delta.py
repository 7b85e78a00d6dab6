"""Exact differences of weights: encoding, checksums, and the receiver's chain of versions.

Imports without torch. A receiver in SGLang's processes applies them (rollout/engines/sglang_delta.py)."""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
LOADER = "megarl.rollout.engines.sglang_delta.load_delta"
REPORT = "megarl "  # begins the name of the buffer in which a server reports
ESCAPE = 255  # a byte of a gap that continues in the next byte
SPARSE_LIMIT = 4  # sparse if fewer than one element in this many has changed
LEVEL = 1  # zlib's fastest
_COUNTS = struct.Struct("<QQ")
_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class DeltaError(ValueError):
    """A delta is damaged, or does not fit the receiver's version."""


@dataclass(frozen=True)
class Change:
    """The new bytes of a tensor. kind: full (raw), dense (xor of all), or sparse (xor of changed elements)"""

    kind: str
    data: bytes


def encode(old: Bytes, new: Bytes, width: int) -> Change | None:
    """Return the change from old to new, uint8 [bytes], or None if they are equal.

    width: bytes an element"""
    word = _WORDS[width]
    xor = old.view(word) ^ new.view(word)
    indices = np.flatnonzero(xor)
    if not indices.size:
        return None
    if indices.size * SPARSE_LIMIT > xor.size:
        return Change("dense", zlib.compress(_split_planes(xor.view(np.uint8), width), LEVEL))
    gaps = np.diff(indices, prepend=-1) - 1
    num_escapes = gaps // ESCAPE
    ends = np.cumsum(num_escapes + 1) - 1
    gap_bytes = np.full(int(ends[-1]) + 1, ESCAPE, np.uint8)
    gap_bytes[ends] = gaps % ESCAPE
    values = _split_planes(xor[indices].view(np.uint8), width)
    packed = zlib.compress(gap_bytes.tobytes() + values, LEVEL)
    return Change("sparse", _COUNTS.pack(indices.size, gap_bytes.size) + packed)


def decode(kind: str, data: bytes, old: Bytes | None, size: int, width: int) -> Bytes:
    """Return the new bytes, uint8 [size]. Raises DeltaError if the data is damaged."""
    if kind == "full":
        if len(data) != size:
            raise DeltaError(f"{len(data)} bytes instead of {size}")
        return np.frombuffer(data, np.uint8).copy()
    if old is None or old.size != size:
        raise DeltaError("there is nothing of this size to change")
    if kind == "dense":
        return old ^ _join_planes(_decompress(data, size), width)
    if kind != "sparse" or len(data) < _COUNTS.size:
        raise DeltaError(f"a change of kind {kind!r} with {len(data)} bytes")
    count, num_gap_bytes = _COUNTS.unpack_from(data)
    num_elements = size // width
    if count > num_elements or num_gap_bytes > num_elements:
        raise DeltaError(f"{count} changes of {num_elements} elements")
    raw = _decompress(data[_COUNTS.size :], num_gap_bytes + count * width)
    gap_bytes = np.frombuffer(raw, np.uint8, num_gap_bytes).astype(np.int64)
    ends = np.flatnonzero(gap_bytes != ESCAPE)
    if ends.size != count or (count and ends[-1] != num_gap_bytes - 1):
        raise DeltaError(f"positions of {ends.size} changes instead of {count}")
    indices = np.cumsum(gap_bytes)[ends] + np.arange(count)
    if count and indices[-1] >= num_elements:
        raise DeltaError(f"a change behind the last of {num_elements} elements")
    new = old.copy()
    new.view(_WORDS[width])[indices] ^= _join_planes(raw[num_gap_bytes:], width).view(_WORDS[width])
    return new


def checksum(tensor: Bytes) -> int:
    return zlib.crc32(tensor.data)


def digest(checksums: Mapping[str, int]) -> str:
    """Return a hash of all tensors' checksums."""
    lines = "".join(f"{name} {checksums[name]:08x}\n" for name in sorted(checksums))
    return hashlib.sha256(lines.encode()).hexdigest()[:32]


def _split_planes(elements: Bytes, width: int) -> bytes:
    """Return first all lowest bytes, then the next: they compress better."""
    return elements.reshape(-1, width).T.tobytes()


def _join_planes(planes: bytes, width: int) -> Bytes:
    return np.ascontiguousarray(np.frombuffer(planes, np.uint8).reshape(width, -1).T).reshape(-1)


def _decompress(data: bytes, size: int) -> bytes:
    decompressor = zlib.decompressobj()
    try:
        raw = decompressor.decompress(data, size + 1)
    except zlib.error as error:
        raise DeltaError(f"damaged: {error}") from None
    if len(raw) != size or not decompressor.eof:
        raise DeltaError(f"does not have {size} bytes")
    return raw


@dataclass
class Sender:
    """What receivers have: a copy of all tensors of `version`, "" if incomplete."""

    version: str = ""
    tensors: dict[str, Bytes] = field(default_factory=dict)
    checksums: dict[str, int] = field(default_factory=dict)


@dataclass
class Receiver:
    """A copy of all tensors, which changes update bucket by bucket.

    version  of the complete tensors, or "" within an update and after a problem
    problem  why the last update was refused, or "" """

    version: str = ""
    problem: str = ""
    tensors: dict[str, Bytes] = field(default_factory=dict)
    checksums: dict[str, int] = field(default_factory=dict)
    _update: tuple[str, str] = ("", "")
    _next_bucket: int = 0

    def apply(self, header: Mapping[str, Any], data: Bytes) -> list[str]:
        """Apply a bucket and return the changed tensors' names. A refused bucket changes nothing.

        header: base and version (names), bucket, last, and for each tensor of `tensors` its name, kind,
        bytes of data, bytes, bytes an element and checksum. Base "": all tensors are full."""
        try:
            return self._apply(header, data)
        except DeltaError as error:
            self.version, self.problem, self._next_bucket = "", str(error), -1
            return []

    def _apply(self, header: Mapping[str, Any], data: Bytes) -> list[str]:
        update, bucket = (header["base"], header["version"]), header["bucket"]
        if bucket == 0:
            if update[0] and update[0] != self.version:
                raise DeltaError(f"it changes {update[0]}, but here is {self.version or 'no version'}")
            if not update[0]:
                self.tensors, self.checksums = {}, {}
            self.version, self.problem, self._update, self._next_bucket = "", "", update, 0
        if update != self._update or bucket != self._next_bucket:
            raise DeltaError(self.problem or f"bucket {bucket} came instead of {self._next_bucket}")
        changed: dict[str, tuple[Bytes, int]] = {}
        start = 0
        for name, kind, num_bytes, size, width, expected in header["tensors"]:
            part = data[start : start + num_bytes].tobytes()
            start += num_bytes
            try:
                new = decode(kind, part, self.tensors.get(name), size, width)
            except DeltaError as error:
                raise DeltaError(f"{name}: {error}") from None
            if checksum(new) != expected:
                raise DeltaError(f"{name}: another checksum")
            changed[name] = new, expected
        for name, (new, expected) in changed.items():
            self.tensors[name], self.checksums[name] = new, expected
        self._next_bucket = bucket + 1
        if header["last"]:
            self.version = update[1]
        return list(changed)

    @property
    def report(self) -> str:
        """Return what the sender expects after an update, or the problem."""
        return f"refused: {self.problem}" if self.problem else make_report(self.version, self.checksums)


def make_report(version: str, checksums: Mapping[str, int]) -> str:
    return f"{version} {digest(checksums)}"
