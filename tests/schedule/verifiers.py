"""A verifier for untrained models: it accepts about a quarter of all texts, by checksum."""

import zlib


def by_checksum(response: str, answer: str) -> bool:
    return zlib.crc32(f"{answer}:{response}".encode()) % 4 == 0
