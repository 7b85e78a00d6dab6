"""GSM8K (Cobbe et al. 2021, arXiv 2110.14168) as OpenAI publishes it."""

from __future__ import annotations

import hashlib
import time
import urllib.request
from http.client import HTTPException
from pathlib import Path

from megarl.config.errors import DataError
from megarl.config.files import write_atomic

URL = "https://raw.githubusercontent.com/openai/grade-school-math/master/grade_school_math/data"
# Bytes and SHA-256.
FILES = {
    "train": (4_166_206, "17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465"),
    "test": (749_738, "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14"),
}
FETCH_LIMIT = 120.0  # seconds of a file
EVAL_ROWS = 512


def fetch_gsm8k(source: Path, folder: Path, url: str = URL, limit: float = FETCH_LIMIT) -> None:
    """Write gsm8k_train.jsonl and gsm8k_eval.jsonl (the first test problems) into `folder`.

    source: folder of the published files, downloaded if missing. Raises DataError."""
    train, test = (_fetch(source / f"gsm8k_{name}.jsonl", name, url, limit) for name in FILES)
    if folder != source:
        write_atomic(folder / "gsm8k_train.jsonl", train)
    write_atomic(folder / "gsm8k_eval.jsonl", b"".join(test.splitlines(keepends=True)[:EVAL_ROWS]))


def _fetch(path: Path, name: str, url: str, limit: float) -> bytes:
    size, sha256 = FILES[name]
    where, remedy = str(path), "delete it and try again"
    if is_missing := not path.exists():
        where, remedy = f"{url}/{name}.jsonl", f"put the file into {path.parent} by hand, as {path.name}"
    try:
        data = _download(where, size, limit) if is_missing else path.read_bytes()
    except (OSError, HTTPException) as error:
        reason = str(error).removeprefix("<urlopen error ").removesuffix(">") or type(error).__name__
        raise DataError(f"{where}: cannot be read: {reason} (try again, or {remedy})") from None
    if (checksum := hashlib.sha256(data).hexdigest()) != sha256:
        raise DataError(f"{where}: its SHA-256 is {checksum}, not {sha256} ({remedy})")
    if is_missing:
        write_atomic(path, data)
    return data


def _download(url: str, size: int, limit: float) -> bytes:
    """Read up to `size` + 1 bytes. Raises OSError or HTTPException."""
    deadline, data = time.monotonic() + limit, bytearray()
    with urllib.request.urlopen(url, timeout=min(limit, 30.0)) as response:
        while len(data) <= size and (block := response.read1(min(1 << 16, size + 1 - len(data)))):
            data += block
            if time.monotonic() > deadline:
                raise TimeoutError(f"not complete within {limit:.0f} s")
    return bytes(data)
