"""Rewards: verifiers of final answers, terms for length and format, and the processes that run them.

Each name is imported at its first use, and nothing imports torch, because every such process pays for it."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megarl.rewards.pool import VerifierPool
    from megarl.rewards.verdict import GradedResponse, Verdict, Verifier, get_verifier

__all__ = ["GradedResponse", "Verdict", "Verifier", "VerifierPool", "get_verifier"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "pool" if name == "VerifierPool" else "verdict"
    return getattr(import_module(f"{__name__}.{module}"), name)
