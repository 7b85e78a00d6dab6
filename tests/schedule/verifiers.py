"""A verifier for runs with an untrained model: it finds a quarter of all texts right, whatever they say."""

import zlib


def by_checksum(response: str, answer: str) -> bool:
    return zlib.crc32(f"{answer}:{response}".encode()) % 4 == 0
