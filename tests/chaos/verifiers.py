"""A verifier for runs with an untrained model that takes its time, so that it can be met at work."""

import time
import zlib


def thorough(response: str, answer: str) -> bool:
    """Works for some milliseconds, then finds a quarter of all texts right, whatever they say."""
    end = time.process_time() + 0.004
    while time.process_time() < end:
        pass
    return zlib.crc32(f"{answer}:{response}".encode()) % 4 == 0
