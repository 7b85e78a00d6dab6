"""Section `schedule`."""

from __future__ import annotations

from typing import Literal

from megarl.config.schema.section import Section, field


class ScheduleConfig(Section):
    ahead: Literal[0, 1, 2] = field(
        0,
        "steps that rollouts are ahead: step k samples with the weights after step k - 1 - ahead",
        "steps",
    )
    in_flight: Literal["none", "retract", "keep", "abort"] = field(
        "none",
        "replace weights while responses run: retract (compute their KV cache again), keep (keep it), "
        "abort (send partial responses again); none: between rollouts",
    )
    max_staleness: int = field(
        4,
        "with in_flight: most versions between a token's weights and those that its update starts from; "
        "older groups are dropped and sampled again; the engines work at most half as many steps ahead",
        "versions",
        ge=1,
    )

    @property
    def lead(self) -> int:
        """Return how many steps beyond the next one are ordered from the engines."""
        return self.ahead if self.in_flight == "none" else get_lead(self.max_staleness)


def get_lead(max_staleness: int) -> int:
    """Return how many steps beyond the next one engines work on with weights in flight.

    This is half of the bound. A group's mean staleness is the lead, and slow groups reach twice that."""
    return max(1, max_staleness // 2)
