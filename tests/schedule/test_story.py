"""Listeners of a run, and the batch source of supervised pairs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from transformers import AutoTokenizer

from megarl.config.errors import CheckpointError
from megarl.config.schema import Config
from megarl.schedule.listeners import Clock, Listener, Listeners
from megarl.schedule.run import Step
from megarl.schedule.source import SupervisedPairs
from tests.tiny_models import make_tiny_model


class Heard(Listener):
    """Record all events in a list that several listeners share."""

    def __init__(self, name: str, notes: list[str]) -> None:
        self.name, self.notes = name, notes

    def on_start(self, *, fresh: bool) -> None:
        self.notes.append(f"{self.name} begins {fresh}")

    @contextmanager
    def _around(self, what: str) -> Iterator[None]:
        self.notes.append(f"{self.name} {what}")
        try:
            yield
        except RuntimeError:
            self.notes.append(f"{self.name} {what} failed")
            raise
        self.notes.append(f"{self.name} {what} ended")

    def run(self) -> Any:
        return self._around("run")

    def step(self, step: Step) -> Any:
        return self._around(f"step {step.number}")

    def phase(self, name: str, step: Step | None = None) -> Any:
        return self._around(name)

    def event(self, line: str, *, keep: bool = True) -> None:
        self.notes.append(f"{self.name} {line} {keep}")


def test_listeners_hear_in_their_order_and_end_in_the_opposite_one() -> None:
    notes: list[str] = []
    listeners = Listeners(Heard("a", notes), Listener(), Heard("b", notes))
    listeners.on_start(fresh=True)
    with listeners.run(), listeners.phase("resume"):
        listeners.event("continues", keep=False)
    assert notes == [
        *("a begins True", "b begins True", "a run", "b run", "a resume", "b resume"),
        *("a continues False", "b continues False"),
        *("b resume ended", "a resume ended", "b run ended", "a run ended"),
    ]


def test_an_error_goes_through_all_listeners_and_on() -> None:
    """In a skipped step the clock records no time for the failed phase."""
    notes: list[str] = []
    listeners, step = Listeners(Heard("a", notes), Clock(), Heard("b", notes)), Step("train", 1)
    with pytest.raises(RuntimeError), listeners.step(step):
        with listeners.phase("rollout", step):
            pass
        with listeners.phase("values", step):
            raise RuntimeError
    ended = ["b values failed", "a values failed", "b step 1 failed", "a step 1 failed"]
    assert notes[-4:] == ended
    assert step.metrics.keys() == {"time/rollout"}


def test_a_phase_that_comes_twice_in_a_step_takes_the_time_of_both() -> None:
    step = Step("train", 1)
    with Clock().phase("residency", step):
        pass
    first = step.metrics["time/residency"]
    with Clock().phase("residency", step), Clock().phase("evaluation"):
        pass
    assert step.metrics["time/residency"] > first
    assert step.metrics.keys() == {"time/residency"}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, Any]:
    folder = tmp_path_factory.mktemp("pairs")
    model = make_tiny_model(folder / "model", "qwen3")
    rows = [{"prompt": f"{a}+1=", "response": str(a + 1)} for a in range(7)]
    (folder / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = Config(
        recipe="sft",
        run_dir=folder / "run",
        steps=1,
        model={"path": model},
        data={"train": [folder / "sft.jsonl"]},
        supervised={"batch": 3},
    )
    return config, AutoTokenizer.from_pretrained(model)


def test_pairs_go_on_from_where_they_stood(pairs: tuple[Config, Any]) -> None:
    """A resumed source continues after the last finished step, even if the next batch was already taken."""

    def taken(source: SupervisedPairs, steps: int) -> list[list[int]]:
        batches = [source.rollout("sft", number) for number in range(steps)]
        assert all(bool(batch["correct"].all()) for batch in batches)
        return [batch.local.tokens.tolist() for batch in batches]

    straight = taken(SupervisedPairs(*pairs), 7)
    source = SupervisedPairs(*pairs)
    assert source.reports["train"].kept == 7
    taken(source, 2)
    share = source.snapshot()
    assert taken(source, 1) == straight[2:3]
    resumed = SupervisedPairs(*pairs)
    resumed.load_state_dict(json.loads(json.dumps(source.join([share, {}]))))
    assert taken(resumed, 5) == straight[2:]
    with pytest.raises(CheckpointError, match=r"data\.train"):
        resumed.load_state_dict({"pairs": {**share["pairs"], "num_prompts": 8}})
    assert source.take_waited() == 0 and source.depths == {}
