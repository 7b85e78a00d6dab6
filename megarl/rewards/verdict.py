"""What a verifier says about one response, what the terms of `reward.terms` see of it, and both by name."""

from __future__ import annotations

import difflib
import importlib.util
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Real
from typing import Any, NamedTuple, cast

from megarl.config.errors import ConfigError, first_line
from megarl.config.plugins import REINSTALL, plugins

MAX_TEXT = 1000  # characters of an extracted answer or an error that travel


@dataclass(frozen=True)
class Verdict:
    """The judgement of one response.

    correct    whether the response answers the problem: what accuracy, pass@k, group filtering and the
               positive-example loss count
    extracted  the normalised final answer, for majority voting; None where the response gives none
    error      why the verifier came to no end, else None
    judged     False where that says nothing of the answer (docs/verifiers.md): nobody has judged it, and the
               response is left out of everything; with an error and True the answer counts as wrong
    score      of a verifier that grades, any finite number: 1 earns what a right answer earns, 0 what a wrong
               one does; None: what `correct` says
    terms      name -> value of each of `reward.terms`, which the pool fills in"""

    correct: bool
    extracted: str | None = None
    error: str | None = None
    score: float | None = None
    terms: Mapping[str, float] = field(default_factory=dict, hash=False)
    judged: bool = True

    def reward(self, correct: float, incorrect: float) -> float:
        """Return (1 - score) incorrect + score correct: exactly one of the two at 0 and at 1, which
        `incorrect + score (correct - incorrect)` is not in floating point."""
        score = float(self.correct) if self.score is None else self.score
        return (1.0 - score) * incorrect + score * correct


class Reference(NamedTuple):
    """The reference of a problem that has a verifier of its own, whatever reward.verifier says.

    answer    for people and for the terms of the reward; "" where none is known
    verifier  `module:function`, which is called with the response and `entry`
    entry     all that it needs to know of the problem"""

    answer: str
    verifier: str
    entry: str


# (response, reference answer) -> judgement. A plain bool will do; a number is a score, and right from 1 on; a
# pair is (right, extracted answer), of who knows nothing of megarl; a Verdict can carry both, and a score of
# which it says itself whether it is right.
Verifier = Callable[[str, str], bool | float | tuple[bool, str | None] | Verdict]


@dataclass(frozen=True)
class Judged:
    """A response that a verifier has judged, as a term of the reward sees it.

    answer     the reference answer
    length     tokens of the response, the end-of-sequence token included
    longest    rollout.max_response_tokens
    truncated  whether it was cut there"""

    text: str
    answer: str
    length: int
    longest: int
    truncated: bool
    verdict: Verdict


def short(text: object) -> str | None:
    """Return an answer or an error as text that any message holds, at most MAX_TEXT characters of it: half of
    a surrogate pair, which JSON can spell, is replaced."""
    return None if text is None else str(text)[:MAX_TEXT].encode(errors="replace").decode()


class UnusableError(Exception):
    """What a function of the user has returned is no use."""


def as_verdict(result: object, who: str) -> Verdict:
    """Return the verdict that `who` means by what it returned; a bare number is a score, and right from 1 on.
    Raises UnusableError for anything else."""
    if isinstance(result, bool) or _is_numpy_bool(result):
        return Verdict(bool(result))
    if isinstance(result, tuple):
        if len(result) != 2:
            raise UnusableError(f"{who} returned a tuple of {len(result)}, not (right, answer)")
        return Verdict(bool(result[0]), result[1])
    if not isinstance(result, Verdict):
        score = finite(result, f"{who} returned", "not bool, number, (right, answer) or Verdict")
        return Verdict(score >= 1, score=score)
    verdict = Verdict(bool(result.correct), result.extracted, result.error, judged=bool(result.judged))
    if result.score is None:
        return verdict
    return replace(verdict, score=finite(result.score, f"{who} returned a score:", "not a number"))


def finite(value: Any, what: str, wanted: str) -> float:
    """Return a number as float. Raises UnusableError, of the words given, for another type, and for one that
    is not finite."""
    if not isinstance(value, Real) and not _is_numpy_bool(value):
        raise UnusableError(f"{what} {type(value).__name__}, {wanted}")
    if not math.isfinite(number := float(value)):
        raise UnusableError(f"{what} {number}, which is not finite")
    return number


@contextmanager
def _current_folder(module: str) -> Iterator[None]:
    """Search the current folder too while the block imports a module that is not elsewhere.

    At other times files there are not imported: libraries ask for optional modules, such as apex, and the
    folder may be anybody's."""
    folder = os.getcwd()
    if folder in sys.path or module in sys.modules or importlib.util.find_spec(module) is not None:
        yield
        return
    sys.path.append(folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def _is_numpy_bool(value: Any) -> bool:
    """Return whether it is numpy's bool, what comparing two of its numbers gives: neither a bool nor, as
    these numbers are, a Real. No worker imports numpy to ask."""
    return getattr(value, "shape", None) == () and getattr(value, "dtype", None) == "bool"


Term = Callable[[Judged], float]  # with its arguments already bound


def verifier_path(name: str) -> str:
    """Return `module:function` of the verifier that `reward.verifier` names: `dapo`, `math`, another one that
    a package brings, or the user's own, which is named so. Raises ConfigError for an unknown name."""
    if all(name.partition(":")):
        return name
    known = plugins("megarl.verifiers")
    if name not in known:
        remedy = f"use {', '.join(known)} or package.module:function" if known else REINSTALL
        raise ConfigError(f"reward.verifier: unknown verifier {name!r} ({remedy})")
    return known[name].value


def get_verifier(name: str) -> Verifier:
    """Return the function that `reward.verifier` names (see `verifier_path`).

    Raises ConfigError if it is unknown, cannot be imported or is not callable."""
    return imported("reward.verifier", verifier_path(name))


def get_term(name: str, path: str, arguments: Mapping[str, Any]) -> Term:
    """Return the function `module:function` that the term `name` of `reward.terms` names, with its arguments.
    Raises as `get_verifier`."""
    return partial(imported(f"reward.terms.{name}.function", path), **arguments)


def imported(key: str, path: str, what: str = "function") -> Callable[..., Any]:
    """Return `module:function`, which the key `key` names; what: what it is to be. The module may lie in the
    current folder. Raises ConfigError if it cannot be imported or is not callable."""
    module_name, _, name = path.partition(":")
    if not (module_name and name):
        raise ConfigError(f"{key}: {path!r} names no {what} (write package.module:{what})")
    try:
        with _current_folder(module_name.partition(".")[0]):
            module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a module of the user may raise anything while it is imported
        raise ConfigError(
            f"{key}: {module_name} cannot be imported: {type(error).__name__}: {first_line(error)} "
            f"(it must lie on PYTHONPATH or in the current folder)"
        ) from error
    found = getattr(module, name, None)
    if not callable(found):
        near = difflib.get_close_matches(
            name, [one for one, value in vars(module).items() if callable(value)]
        )
        hint = f" (did you mean {' or '.join(near)}?)" if near else ""
        raise ConfigError(f"{key}: {module_name} has no {what} {name}{hint}")
    return cast(Callable[..., Any], found)
