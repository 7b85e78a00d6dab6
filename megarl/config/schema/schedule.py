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
