"""The arrangement of a job's ranks: pure arithmetic without torch, so that a laptop can plan a job of 1,024
GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Coords(NamedTuple):
    """A rank's place, fastest-varying dimension first (Megatron's order tp-cp-ep-dp-pp with cp = 1)."""

    tp: int
    dp: int
    pp: int


@dataclass(frozen=True)
class Layout:
    """Sizes of tensor, pipeline, data and expert parallelism.

    Expert parallelism has no ranks of its own: the tp * dp ranks of a pipeline stage form groups of `ep`
    neighbours, each rank with its share of the experts, which are whole (expert tensor parallelism is 1)."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        if min(self.tp, self.pp, self.dp, self.ep) < 1:
            got = f"tp={self.tp}, pp={self.pp}, dp={self.dp}, ep={self.ep}"
            raise ValueError(f"every parallel size must be at least 1 (got {got})")
        if self.tp * self.dp % self.ep:
            raise ValueError(
                f"ep={self.ep} must divide tp * dp = {self.tp * self.dp}, the ranks of a pipeline stage"
            )

    @property
    def world(self) -> int:
        """Return the number of ranks."""
        return self.tp * self.pp * self.dp

    def rank(self, *, tp: int, pp: int, dp: int) -> int:
        """Return the global rank of a place: tp + TP * (dp + DP * pp)."""
        if not (0 <= tp < self.tp and 0 <= pp < self.pp and 0 <= dp < self.dp):
            raise IndexError(f"tp={tp}, pp={pp}, dp={dp} is outside of {self}")
        return tp + self.tp * (dp + self.dp * pp)

    def coords(self, rank: int) -> Coords:
        """Return the place of a global rank; the inverse of `rank`."""
        if not 0 <= rank < self.world:
            raise IndexError(f"rank {rank} is outside of {self}")
        return Coords(tp=rank % self.tp, dp=rank // self.tp % self.dp, pp=rank // (self.tp * self.dp))

    def ep_rank(self, rank: int) -> int:
        """Return which share of the experts a global rank has: its number within the stage, modulo EP."""
        return rank % (self.tp * self.dp) % self.ep


def padded_vocab(vocab: int, tp: int) -> int:
    """Return the rows of Megatron's embedding and output layer over all ranks: the next multiple of `tp`."""
    return -(-vocab // tp) * tp
