"""A slow verifier for runs with an untrained model, so that a fault can hit it at work."""

import time
import zlib


def thorough(response: str, answer: str) -> bool:
    """Work for some milliseconds, then call a quarter of all texts correct, by their checksum."""
    end = time.process_time() + 0.004
    while time.process_time() < end:
        pass
    return zlib.crc32(f"{answer}:{response}".encode()) % 4 == 0
