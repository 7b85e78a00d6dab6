"""Which engine begins which of the responses that wait: one rule, of what the controller of rollouts
(controller.py) knows when it gives out work."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

PRIOR = 8  # responses that every engine counts as having ended at the start: one more or less says little


def share_out(
    waiting: Sequence[Sequence[int]], running: Sequence[int], limits: Sequence[float], ended: Sequence[int]
) -> list[list[int]]:
    """Return which of the waiting responses each engine begins now. Per engine:

    waiting  the responses that an equal division gave it, in the order in which they should begin
    running  how many it has begun that have not ended, nor wait for something that is not the engine
    limits   how many it may have at once
    ended    how many it has ended so far, which says how fast it is

    Responses go one by one to the engine that would have nothing to do first, at the speed so far, while it
    may have more. So no engine that may have one is without while one waits, and where engines are alike
    each gets what the division gave it. An engine takes its own from the front; where it has none left, from
    the end of the longest list, where the slower engine would come last. Neighbours, which may share a
    prompt, are taken together."""
    speeds = [PRIOR + count for count in ended]
    counts = [0] * len(waiting)
    # Of two engines that would be idle at the same time, first the one that has responses of its own left.
    queue = [
        (n / speed, not own, e)
        for e, (n, speed, own) in enumerate(zip(running, speeds, waiting, strict=True))
    ]
    heapq.heapify(queue)
    left = sum(map(len, waiting))
    while left and queue:
        _, _, e = heapq.heappop(queue)
        if running[e] + counts[e] >= limits[e]:
            continue
        counts[e] += 1
        left -= 1
        none_left = counts[e] >= len(waiting[e])
        heapq.heappush(queue, ((running[e] + counts[e]) / speeds[e], none_left, e))
    given = [list(own[:count]) for own, count in zip(waiting, counts, strict=True)]
    rest = [list(own[count:]) for own, count in zip(waiting, counts, strict=True)]
    for mine, count in zip(given, counts, strict=True):
        while len(mine) < count:
            longest = max(rest, key=len)
            some = min(count - len(mine), len(longest))
            mine += longest[-some:]
            del longest[-some:]
    return given
