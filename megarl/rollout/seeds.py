"""Sampling seeds: functions of what is sampled, never of a rank, an engine or an order. Stable across machines and Python versions."""

from __future__ import annotations

import hashlib


def _hash(salt: str, *numbers: int) -> int:
    text = ":".join([salt, *map(str, numbers)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def response_seed(run_seed: int, step: int, prompt_uid: int, index: int) -> int:
    """Seed (63 bits) of response `index` to a prompt in rollout step `step`; the step separates repeated prompts."""
    return _hash("megarl.rollout", run_seed, step, prompt_uid, index)


def evaluation_seed(run_seed: int, problem_uid: int, index: int) -> int:
    """Seed (63 bits) of answer `index` to a held-out problem. No step: every evaluation of a run draws with the same numbers, so
    that its curve moves because of the policy."""
    return _hash("megarl.evaluation", run_seed, problem_uid, index)


def shuffle_seed(run_seed: int, step: int) -> int:
    """Seed (63 bits) of what is shuffled between the rollout and the updates of a step."""
    return _hash("megarl.shuffle", run_seed, step)
