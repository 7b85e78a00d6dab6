"""Verifiers for tests that need correct and wrong responses of a random model."""

import time

from megarl.rewards.verdict import GradedResponse, Verdict


def even_length(response: str, answer: str) -> Verdict:
    """Accept responses with an even number of bytes; the majority vote is over that number."""
    length = len(response.encode())
    return Verdict(length % 2 == 0, str(length))


def only_labelled(response: str, answer: str) -> bool:
    """Fail on every response of a random model."""
    if "Answer:" not in response:
        raise LookupError("no label")
    return True


def a_text(response: str, answer: str) -> str:
    return "yes"


def endless(response: str, answer: str) -> bool:
    time.sleep(3600)
    return True


def checksum(response: GradedResponse) -> float:
    """Return a number that differs between texts."""
    return sum(response.text.encode()) % 7 / 7
