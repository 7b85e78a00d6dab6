"""Verifiers of the tests that want both right and wrong answers of a random model."""

from megarl.rewards.verdict import Verdict


def even_length(response: str, answer: str) -> Verdict:
    """Right where the response has an even number of bytes; that number is what is voted on."""
    length = len(response.encode())
    return Verdict(length % 2 == 0, str(length))
