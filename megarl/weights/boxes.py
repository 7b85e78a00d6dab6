"""Boxes: rectangular parts of tensors. Imports without torch."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING

from megarl.weights.families import Shape

if TYPE_CHECKING:
    from torch import Tensor

Box = tuple[tuple[int, int], ...]  # (start, stop) by dimension


def full_box(shape: Shape) -> Box:
    return tuple((0, size) for size in shape)


def volume(box: Box) -> int:
    return prod(stop - start for start, stop in box)


def intersect(a: Box, b: Box) -> Box | None:
    overlap = tuple(
        (max(start, b_start), min(stop, b_stop))
        for (start, stop), (b_start, b_stop) in zip(a, b, strict=True)
    )
    return overlap if all(start < stop for start, stop in overlap) else None


def shift(box: Box, origin: Box, destination: Box) -> Box:
    """Move a box by the distance from `origin` to `destination`."""
    return tuple(
        (a - o + d, b - o + d) for (a, b), (o, _), (d, _) in zip(box, origin, destination, strict=True)
    )


def view(tensor: Tensor, box: Box) -> Tensor:
    """Return `tensor[box]`, sharing its memory."""
    return tensor.detach()[tuple(slice(start, stop) for start, stop in box)]


def pack(sizes: Mapping[str, int], limit: float) -> list[list[str]]:
    """Divide tensors, in order, into parts of at most `limit` bytes, or one larger tensor."""
    parts: list[list[str]] = []
    part_bytes = 0
    for name, size in sizes.items():
        if not parts or (part_bytes and part_bytes + size > limit):
            parts.append([])
            part_bytes = 0
        parts[-1].append(name)
        part_bytes += size
    return parts
