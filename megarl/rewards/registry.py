"""Verifiers by name: `dapo`, `math`, or a function of the user by its dotted path."""

from __future__ import annotations

import importlib

from megarl.config.errors import ConfigError
from megarl.rewards.verdict import Verifier

_BUILT_IN = {"dapo": "megarl.rewards.answer:verify_dapo", "math": "megarl.rewards.symbolic:verify_math"}


def get_verifier(name: str) -> Verifier:
    """The function that `reward.verifier` names: `f(response, reference answer) -> bool | Verdict`.

    Raises ConfigError if it cannot be imported or is not callable."""
    path = _BUILT_IN.get(name, name)
    module_name, colon, function = path.partition(":")
    if not colon or not module_name or not function:
        raise ConfigError(f"reward.verifier: unknown verifier {name!r} (use {', '.join(_BUILT_IN)} or package.module:function)")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a module of the user may raise anything while it is imported
        raise ConfigError(
            f"reward.verifier: {module_name} cannot be imported: {type(error).__name__}: {_first_line(error)} "
            f"(it must lie on PYTHONPATH or in the current folder)"
        ) from error
    verifier = getattr(module, function, None)
    if not callable(verifier):
        raise ConfigError(f"reward.verifier: {module_name} has no function {function}")
    return verifier


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]
