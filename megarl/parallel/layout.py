"""The arrangement of a job's ranks. Imports without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Coords(NamedTuple):
    """A rank's coordinates, fastest-varying first (Megatron's order)."""

    tp: int
    cp: int
    dp: int
    pp: int


# Communication overlaps by default above this dp * cp.
OVERLAP_ABOVE = 4


@dataclass(frozen=True)
class Layout:
    """Sizes of tensor, pipeline, data, expert and context parallelism, and virtual pipeline stages.

    `ep` neighbours of a stage share the experts. Expert tensor parallelism is 1."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    cp: int = 1
    vpp: int = 1

    def __post_init__(self) -> None:
        sizes = vars(self)
        if min(sizes.values()) < 1:
            sizes_text = ", ".join(f"{name}={size}" for name, size in sizes.items())
            raise ValueError(f"every parallel size must be at least 1 (got {sizes_text})")
        if self.stage % self.ep:
            ranks = f"tp * cp * dp = {self.stage}" if self.cp > 1 else f"tp * dp = {self.stage}"
            raise ValueError(f"ep={self.ep} must divide {ranks}, the ranks of a pipeline stage")

    @property
    def stage(self) -> int:
        return self.tp * self.cp * self.dp

    @property
    def world(self) -> int:
        return self.stage * self.pp

    def rank(self, *, tp: int, pp: int, dp: int, cp: int = 0) -> int:
        """Return tp + TP * (cp + CP * (dp + DP * pp))."""
        if not (0 <= tp < self.tp and 0 <= cp < self.cp and 0 <= pp < self.pp and 0 <= dp < self.dp):
            raise IndexError(f"tp={tp}, cp={cp}, pp={pp}, dp={dp} is outside of {self}")
        return tp + self.tp * (cp + self.cp * (dp + self.dp * pp))

    def coords(self, rank: int) -> Coords:
        if not 0 <= rank < self.world:
            raise IndexError(f"rank {rank} is outside of {self}")
        quotient, tp = divmod(rank, self.tp)
        quotient, cp = divmod(quotient, self.cp)
        pp, dp = divmod(quotient, self.dp)
        return Coords(tp, cp, dp, pp)

    def layers(self, layers: int, pp_rank: int) -> list[int]:
        """Return the layers of a pipeline stage.

        Stage s has chunks s, s + pp, s + 2 pp, ... of pp * vpp (arXiv 2104.04473, section 2.2)."""
        size = layers // (self.pp * self.vpp)
        return [layer for layer in range(layers) if layer // size % self.pp == pp_rank]

    def ep_rank(self, rank: int) -> int:
        """Return a rank's share of experts."""
        return rank % self.stage % self.ep


def padded_vocab(vocab: int, tp: int) -> int:
    """Return the rows of Megatron's embedding."""
    return -(-vocab // tp) * tp
