"""Verdicts, and the import of verifiers and reward terms."""

from __future__ import annotations

import difflib
import importlib.util
import json
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

MAX_TEXT = 1000  # characters of an answer or error in a message


@dataclass(frozen=True)
class Verdict:
    """The result of grading one response.

    correct    counts for accuracy, pass@k, group filtering and positive-example loss
    extracted  normalised final answer, for majority voting
    error      why grading failed
    graded     False: the answer cannot cause the error, and counts nowhere (docs/verifiers.md). True with an
               error: the answer caused it, and is wrong
    score      partial credit, any finite number: 1 earns a correct answer's reward, 0 a wrong one's;
               None: use `correct`
    terms      name -> value of `reward.terms`; VerifierPool sets it"""

    correct: bool
    extracted: str | None = None
    error: str | None = None
    score: float | None = None
    terms: Mapping[str, float] = field(default_factory=dict, hash=False)
    graded: bool = True

    def reward(self, correct: float, incorrect: float) -> float:
        """Return (1 - score) incorrect + score correct, exact at 0 and 1."""
        score = float(self.correct) if self.score is None else self.score
        return (1.0 - score) * incorrect + score * correct


class Reference(NamedTuple):
    """The reference of a problem with its own verifier.

    answer    for people and reward terms; "" if unknown
    verifier  `module:function`, called with response and `entry`"""

    answer: str
    verifier: str
    entry: str


# (response, reference answer) -> bool, score (correct from 1 on), (correct, extracted answer) or Verdict.
Verifier = Callable[[str, str], bool | float | tuple[bool, str | None] | Verdict]


@dataclass(frozen=True)
class GradedResponse:
    """The argument of a reward term.

    answer   the reference
    length   tokens, end-of-sequence included
    longest  rollout.max_response_tokens"""

    text: str
    answer: str
    length: int
    longest: int
    truncated: bool
    verdict: Verdict


def short(text: object) -> str | None:
    """Cut to MAX_TEXT characters, and replace unpaired surrogates."""
    return None if text is None else str(text)[:MAX_TEXT].encode(errors="replace").decode()


class UnusableError(Exception):
    """A user's function returned an invalid value."""


def as_verdict(result: object, who: str) -> Verdict:
    """Convert the value that `who` returned; scores are correct from 1 on. Raises UnusableError."""
    if isinstance(result, bool) or _is_numpy_bool(result):
        return Verdict(bool(result))
    if isinstance(result, tuple):
        if len(result) != 2:
            raise UnusableError(f"{who} returned a tuple of {len(result)}, not (right, answer)")
        return Verdict(bool(result[0]), result[1])
    if not isinstance(result, Verdict):
        score = finite(result, f"{who} returned", "not bool, number, (right, answer) or Verdict")
        return Verdict(score >= 1, score=score)
    verdict = Verdict(bool(result.correct), result.extracted, result.error, graded=bool(result.graded))
    if result.score is None:
        return verdict
    return replace(verdict, score=finite(result.score, f"{who} returned a score:", "not a number"))


def finite(value: Any, what: str, wanted: str) -> float:
    """Return a finite number. Raises UnusableError with `what` and `wanted`."""
    if not isinstance(value, Real) and not _is_numpy_bool(value):
        raise UnusableError(f"{what} {type(value).__name__}, {wanted}")
    if not math.isfinite(number := float(value)):
        raise UnusableError(f"{what} {number}, which is not finite")
    return number


@contextmanager
def _current_folder(module: str) -> Iterator[None]:
    """Search the current folder last, and only during the block.

    Else libraries could import optional modules, such as apex, from a folder that others own."""
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
    """Detect numpy's bool without importing numpy."""
    return getattr(value, "shape", None) == () and getattr(value, "dtype", None) == "bool"


Term = Callable[[GradedResponse], float]  # other arguments are bound


READ_VERDICT = f"{__name__}:read_verdict"


def reference_to_verdict(answer: str, verdict: Verdict) -> Reference:
    """Return a reference whose verifier returns `verdict`, so that reward terms see it."""
    fields = verdict.correct, verdict.extracted, verdict.error, verdict.score, verdict.graded
    return Reference(answer, READ_VERDICT, json.dumps(fields))


def read_verdict(response: str, entry: str) -> Verdict:
    correct, extracted, error, score, graded = json.loads(entry)
    return Verdict(correct, extracted, error, score, graded=graded)


def verifier_path(name: str) -> str:
    """Return the `module:function` of a verifier's name or path. Raises ConfigError."""
    if name == "judge":  # asked by the rollout's workers (rewards/judge.py); here its verdicts arrive
        return READ_VERDICT
    if all(name.partition(":")):
        return name
    verifiers = plugins("megarl.verifiers")
    if name not in verifiers:
        remedy = f"use {', '.join(verifiers)}, judge or package.module:function" if verifiers else REINSTALL
        raise ConfigError(f"reward.verifier: unknown verifier {name!r} ({remedy})")
    return verifiers[name].value


def get_verifier(name: str) -> Verifier:
    """Import a verifier. Raises ConfigError."""
    return import_object("reward.verifier", verifier_path(name))


def get_term(name: str, path: str, arguments: Mapping[str, Any]) -> Term:
    return partial(import_object(f"reward.terms.{name}.function", path), **arguments)


def import_object(key: str, path: str, what: str = "function") -> Callable[..., Any]:
    """Import `module:function` for the configuration key `key`.

    Raises ConfigError if that fails or it is not callable."""
    module_name, _, name = path.partition(":")
    if not (module_name and name):
        raise ConfigError(f"{key}: {path!r} names no {what} (write package.module:{what})")
    try:
        with _current_folder(module_name.partition(".")[0]):
            module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # user code may raise anything at its import
        raise ConfigError(
            f"{key}: {module_name} cannot be imported: {type(error).__name__}: {first_line(error)} "
            f"(it must lie on PYTHONPATH or in the current folder)"
        ) from error
    imported_object = getattr(module, name, None)
    if not callable(imported_object):
        close_names = difflib.get_close_matches(
            name, [k for k, value in vars(module).items() if callable(value)]
        )
        hint = f" (did you mean {' or '.join(close_names)}?)" if close_names else ""
        raise ConfigError(f"{key}: {module_name} has no {what} {name}{hint}")
    return cast(Callable[..., Any], imported_object)
