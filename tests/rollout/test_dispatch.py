"""Which engine starts which response: no response is lost or assigned twice, and no engine is idle.

A simulated clock measures the gain where one engine is slow."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.rollout.controller import share_out

ENGINES = st.integers(1, 9)


@given(data=st.data(), engines=ENGINES)
def test_nothing_is_lost_or_given_twice_and_nobody_is_idle(data: st.DataObject, engines: int) -> None:
    def sample_per_engine(values: st.SearchStrategy[int]) -> list[int]:
        return data.draw(st.lists(values, min_size=engines, max_size=engines))

    ends = sample_per_engine(st.integers(0, 30))
    waiting = [list(range(sum(ends[:e]), sum(ends[: e + 1]))) for e in range(engines)]
    running, limits = sample_per_engine(st.integers(0, 20)), sample_per_engine(st.integers(1, 20))
    ended = sample_per_engine(st.integers(0, 500))
    given_ = share_out(waiting, running, limits, ended)
    assert given_ == share_out(waiting, running, limits, ended) and len(given_) == engines
    begun = [number for numbers in given_ for number in numbers]
    assert len(begun) == len(set(begun)) and set(begun) <= set(range(sum(ends)))
    left = sum(ends) - len(begun)
    for e, numbers in enumerate(given_):
        total = running[e] + len(numbers)
        assert not numbers or total <= limits[e]
        # An engine keeps free room only if nothing waits, and idle engines are served first.
        assert not left or total >= limits[e]
        own = [number for number in numbers if number in waiting[e]]
        assert own == waiting[e][: len(own)] == numbers[: len(own)], "its own from the front, and first"
        if len(own) < len(numbers):
            assert len(own) == len(waiting[e]), "others' where it has none of its own"
    idle = [e for e in range(engines) if not running[e]]
    assert len(begun) < len(idle) or all(given_[e] for e in idle)


@given(engines=ENGINES, count=st.integers(0, 200))
def test_engines_that_are_alike_get_what_the_division_gave_them(engines: int, count: int) -> None:
    waiting = [list(range(e * count // engines, (e + 1) * count // engines)) for e in range(engines)]
    assert share_out(waiting, [0] * engines, [count] * engines, [0] * engines) == waiting
    limits = [3] * engines
    assert share_out(waiting, [0] * engines, limits, [0] * engines) == [own[:3] for own in waiting]


def clock(speeds: list[int], lengths: list[int], in_flight: int, *, moves: bool = True) -> float:
    """Return the time for responses of these lengths, as a multiple of the ideal split's.

    The ideal is the work divided by the sum of the speeds. In a tick an engine samples `speed` tokens,
    round-robin over its responses."""
    count, n = len(speeds), len(lengths)
    waiting = [list(range(e * n // count, (e + 1) * n // count)) for e in range(count)]
    left: list[dict[int, int]] = [{} for _ in speeds]
    ended, just, ticks = [0] * count, [0] * count, 0
    while any(waiting) or any(left):
        limits = [in_flight + new for new in just] if moves else [n] * count
        running = [len(have) for have in left]
        begun = share_out(waiting, running, limits, ended)
        for have, numbers in zip(left, begun, strict=True):
            have |= {number: lengths[number] for number in numbers}
        taken = {number for numbers in begun for number in numbers}
        waiting = [[number for number in own if number not in taken] for own in waiting]
        just = [0] * count
        for e, speed in enumerate(speeds):
            for _ in range(speed):
                if not left[e]:
                    break
                number, tokens = next(iter(left[e].items()))
                del left[e][number]  # move it to the end of the queue
                if tokens > 1:
                    left[e][number] = tokens - 1
                else:
                    just[e] += 1
        ended = [a + b for a, b in zip(ended, just, strict=True)]
        ticks += 1
    return ticks / (sum(lengths) / sum(speeds))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("engines", [2, 4])
def test_a_slow_engine_holds_up_nobody(engines: int, seed: int) -> None:
    """One engine is slower by a factor of 3. Equal parts take 2 (two engines) or 2.5 (four) of the ideal.

    Lengths are log-normal."""
    rng = random.Random(seed)
    lengths = [min(200, 1 + int(rng.lognormvariate(3.4, 0.6))) for _ in range(150 * engines)]
    speeds = [20] + [60] * (engines - 1)
    assert clock(speeds, lengths, in_flight=8) <= 1.15
    assert clock(speeds, lengths, in_flight=8, moves=False) >= 1.8
