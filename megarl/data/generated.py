"""Rows that a package beside megarl generates where an entry of data.train or data.eval has no file: `gym`,
problems of reasoning-gym (megarl_tasks/gym.py)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from megarl.config.plugins import plugin
from megarl.config.schema import DataConfig, GymConfig
from megarl.rewards.verdict import Reference


class GeneratedRow(Protocol):
    """A generated problem, or why there is none in its place.

    key      of its entry: `data.train[0].gym`
    task     what it is one of, and `index` which one
    prompt   the question, with what the entry puts before it
    answer   one that is right; "" where none is known
    entry    what the generator's verifier needs of it
    problem  the reason and its detail"""

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
    """Return the entries that reasoning-gym generates by their keys: `data.eval[1].gym`."""
    lists = (("data.train", data.train), ("data.eval", data.eval))
    return {f"{key}[{i}].gym": one.gym for key, entries in lists for i, one in enumerate(entries) if one.gym}


def generate(entries: Mapping[str, GymConfig]) -> Iterator[GeneratedRow]:
    """Yield the rows of the entries, which are given by their keys, one entry after the other: the same in
    any process.

    Raises ConfigError where reasoning-gym is not installed, or a task or parameter does not exist, and
    DataError or WaitTimeout where its process dies or comes to no end with a row."""
    if entries:
        yield from _gym().generate(entries)


def first_rows(entries: Mapping[str, GymConfig], rounds: int = 16) -> Iterator[GeneratedRow]:
    """Yield `rounds` rows of every task of every entry, one of each first. All names and parameters are
    checked before the first. Raises as `generate`."""
    if entries:
        yield from _gym().first_rows(entries, rounds)


def check_tasks(entries: Mapping[str, GymConfig]) -> None:
    """Raise ConfigError where reasoning-gym is not installed, or a task or parameter of `entries` does not
    exist."""
    for _ in first_rows(entries, rounds=1):
        return


def reference_to(answer: str, entry: str) -> Reference:
    """Return what responses to a generated problem are judged by."""
    return Reference(answer, _gym().VERIFIER, entry)


def own_verifiers(data: DataConfig) -> tuple[str, ...]:
    """Return the verifiers that rows of `data` bring with them, for VerifierPool."""
    return (_gym().VERIFIER,) if data.has_gym else ()


def _gym() -> Any:
    return plugin("megarl.generators", "gym")
