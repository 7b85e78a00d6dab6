"""Rewards: verifiers of final answers, the processes that run them, and the length penalty. Nothing here
imports torch."""

from megarl.rewards.pool import VerifierPool
from megarl.rewards.verdict import Verdict, Verifier, get_verifier, soft_overlong_punishment

__all__ = ["Verdict", "Verifier", "VerifierPool", "get_verifier", "soft_overlong_punishment"]
