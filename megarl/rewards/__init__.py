"""Rewards: verifiers of final answers, terms for length and format, and the processes that run them. Nothing
here imports torch."""

from megarl.rewards.pool import VerifierPool
from megarl.rewards.verdict import Judged, Verdict, Verifier, get_verifier

__all__ = ["Judged", "Verdict", "Verifier", "VerifierPool", "get_verifier"]
