"""Rows generated for `gym` entries of data.train and data.eval by the plugin megarl_tasks/gym.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from megarl.config.plugins import plugin
from megarl.config.schema import DataConfig, GymConfig
from megarl.rewards.verdict import Reference


class GeneratedRow(Protocol):
    """A generated problem, or the reason why there is none.

    key      key of its entry: `data.train[0].gym`
    index    number within the task
    prompt   the question, with the entry's text before it
    answer   a correct answer; "" if unknown
    entry    data for the generator's verifier
    problem  (reason, detail) if generation failed"""

    @property
    def key(self) -> str: ...
    @property
    def task(self) -> str: ...
    @property
    def index(self) -> int: ...
    @property
    def question(self) -> str: ...
    @property
    def prompt(self) -> str | list[dict[str, str]]: ...
    @property
    def answer(self) -> str: ...
    @property
    def entry(self) -> str: ...
    @property
    def problem(self) -> tuple[str, str] | None: ...


def gym_entries(data: DataConfig) -> dict[str, GymConfig]:
    """Return key -> entry with `gym`: `data.eval[1].gym`."""
    lists = (("data.train", data.train), ("data.eval", data.eval))
    return {f"{key}[{i}].gym": one.gym for key, entries in lists for i, one in enumerate(entries) if one.gym}


def generate(entries: Mapping[str, GymConfig]) -> Iterator[GeneratedRow]:
    """Yield the rows of all entries in order, the same in any process.

    Raises ConfigError if reasoning-gym, a task or a parameter is missing, and DataError or WaitTimeout if its
    process dies or hangs."""
    if entries:
        yield from _gym().generate(entries)


def first_rows(entries: Mapping[str, GymConfig], rounds: int = 16) -> Iterator[GeneratedRow]:
    """Yield `rounds` rows of every task, round by round, after checking all names and parameters.

    Raises the errors of `generate`."""
    if entries:
        yield from _gym().first_rows(entries, rounds)


def check_tasks(entries: Mapping[str, GymConfig]) -> None:
    """Raise ConfigError if reasoning-gym, a task or a parameter of `entries` is missing."""
    for _ in first_rows(entries, rounds=1):
        return


def reference_to(answer: str, entry: str) -> Reference:
    """Return the reference of a generated problem for its verifier."""
    return Reference(answer, _gym().VERIFIER, entry)


def own_verifiers(data: DataConfig) -> tuple[str, ...]:
    """Return the verifiers that `data` needs in addition to reward.verifier."""
    return (_gym().VERIFIER,) if data.has_gym else ()


def _gym() -> Any:
    return plugin("megarl.generators", "gym")
