"""Numbers that are not finite end a step, and after some in a row the run; thresholds give a line each."""

from __future__ import annotations

import pytest

from megarl.config.errors import NumericalError
from megarl.config.schema import GuardConfig
from megarl.schedule.guards import Guards


def test_the_run_stops_after_so_many_in_a_row() -> None:
    guards = Guards(GuardConfig(skipped_steps=2))
    for number in (1, 2):
        assert f"({number} of at most 2 in a row)" in guards.failed(NumericalError("loss is nan"))
    guards.passed({})
    assert "(1 of at most 2 in a row)" in guards.failed(NumericalError("loss is nan"))
    resumed = Guards(GuardConfig(skipped_steps=2))
    resumed.load_state_dict(guards.state_dict())
    resumed.failed(NumericalError("loss is nan"))
    with pytest.raises(NumericalError, match=r"^loss is nan$"):
        resumed.failed(NumericalError("loss is nan"))


def test_a_bad_weight_stops_at_once() -> None:
    error = NumericalError("weights")
    error.fatal = True
    with pytest.raises(NumericalError):
        Guards(GuardConfig()).failed(error)


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ({"policy/entropy": 0.04}, "policy/entropy 0.04 is below guard.entropy_low 0.05"),
        ({"response/length_mean": 31.0}, "response/length_mean 31 is more than guard.length_growth 1.5 x 20"),
        ({"policy/clip_fraction_high": 0.31}, "policy/clip_fraction_high 0.31 is above guard.clip_fraction 0.3"),
        ({"policy/clip_fraction_low": 0.31}, "policy/clip_fraction_low 0.31 is above"),
    ],
)
def test_alarms(metrics: dict[str, float], words: str) -> None:
    guards = Guards(GuardConfig(entropy_low=0.05, length_growth=1.5, clip_fraction=0.3))
    calm = {"policy/entropy": 0.06, "response/length_mean": 20.0, "policy/clip_fraction_high": 0.29, "policy/clip_fraction_low": 0.29}
    assert guards.passed(calm) == []
    (line,) = guards.passed({**calm, **metrics})
    assert line.startswith(f"alarm: {words}")
    assert Guards(GuardConfig(entropy_low=None, length_growth=None, clip_fraction=None)).passed({**calm, **metrics}) == []
