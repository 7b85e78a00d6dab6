"""Verifiers, reward terms, and the processes that run them.

Names are imported at first use, and torch never, because every process pays for imports."""

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
