"""Section `watchdog`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from megarl.config.schema.section import Section, field


class WatchdogConfig(Section):
    """Detection of hangs."""

    limit: float = field(3600.0, "longest time of a phase before the run ends with a report", "seconds", gt=0)
    limits: dict[str, Annotated[float, Field(gt=0)]] = field(
        {}, "limits of single phases, e.g. {rollout: 7200, weight_transfer: 300}", "seconds"
    )
    silence: float = field(
        180.0,
        "longest time without a rank's heartbeat; after twice that time another start may take over the "
        "run's folder",
        "seconds",
        gt=0,
    )
    period: float = field(5.0, "time between heartbeats", "seconds", gt=0)
