"""Prompts: what the data files hold, and what the rollout needs of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b


@dataclass(frozen=True)
class Prompt:
    """One problem. `uid` is stable across runs and machines (a hash of its text): seeds are derived from it."""

    uid: int
    text: str
    tokens: tuple[int, ...]
    answer: str
    source: str = ""
    extra: dict[str, object] = field(default_factory=dict)


def prompt_uid(text: str, answer: str) -> int:
    """63 bits that identify a problem: a hash of its text, before any template, and its reference answer."""
    digest = blake2b(f"{len(text)}:{text}{answer}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
