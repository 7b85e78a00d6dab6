"""Boxes: rectangular parts of tensors, and what they have in common. Imports without torch."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from megarl.weights.families import Shape

if TYPE_CHECKING:
    from torch import Tensor

Box = tuple[tuple[int, int], ...]  # (start, stop) of every dimension


def full_box(shape: Shape) -> Box:
    """Return the box that covers a whole tensor."""
    return tuple((0, size) for size in shape)


def volume(box: Box) -> int:
    """Return the number of elements of a box."""
    return prod(stop - start for start, stop in box)


def intersect(a: Box, b: Box) -> Box | None:
    """Return the common box, or None if it is empty."""
    common = tuple(
        (max(start, other), min(stop, end)) for (start, stop), (other, end) in zip(a, b, strict=True)
    )
    return common if all(start < stop for start, stop in common) else None


def shift(box: Box, origin: Box, destination: Box) -> Box:
    """Return a box within `origin`, moved to where `destination` lies."""
    return tuple(
        (a - o + d, b - o + d) for (a, b), (o, _), (d, _) in zip(box, origin, destination, strict=True)
    )


def view(tensor: Tensor, box: Box) -> Tensor:
    """Return `tensor[box]`, sharing its memory."""
    return tensor.detach()[tuple(slice(start, stop) for start, stop in box)]
