"""Verifiers of the tests that want both right and wrong answers of a random model."""

import time

from megarl.rewards.verdict import GradedResponse, Verdict


def even_length(response: str, answer: str) -> Verdict:
    """Right where the response has an even number of bytes; that number is what is voted on."""
    length = len(response.encode())
    return Verdict(length % 2 == 0, str(length))


def only_labelled(response: str, answer: str) -> bool:
    """Fails on whatever a random model says."""
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
