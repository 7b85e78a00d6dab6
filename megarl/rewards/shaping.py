"""The soft overlong punishment: a length penalty that is added to the rule's reward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload


@overload
def soft_overlong_punishment(length: int, max_tokens: int, buffer: int) -> float: ...
@overload
def soft_overlong_punishment(length: Sequence[int], max_tokens: int, buffer: int) -> list[float]: ...
def soft_overlong_punishment(length: int | Sequence[int], max_tokens: int, buffer: int) -> float | list[float]:
    """DAPO eq. 13, in [-1, 0], with L_max = `max_tokens` and L_cache = `buffer` (both tokens, 0 < buffer <= max_tokens).

    0 for |y| <= L_max - L_cache; ((L_max - L_cache) - |y|) / L_cache up to L_max; -1 beyond. `length` is one response's
    tokens or those of several. Raises ValueError for a buffer outside its bounds."""
    if not 0 < buffer <= max_tokens:
        raise ValueError(f"buffer must be in (0, max_tokens = {max_tokens}] (got {buffer})")
    if not isinstance(length, int):
        return [soft_overlong_punishment(int(one), max_tokens, buffer) for one in length]
    return max(-1.0, min(0.0, (max_tokens - buffer - length) / buffer))
