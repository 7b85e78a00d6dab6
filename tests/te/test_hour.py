"""The stages of `make gpu` that are Transformer Engine's, with its kernels emulated and a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.test_hour import call, statuses


def pass_stages(out: Path, *names: str) -> str:
    """Run these stages, check that they pass, and return what `make gpu` prints."""
    told = call(out, "--only", *names)
    found = statuses(out)
    assert [found[name] for name in names] == ["passed"] * len(names), told
    return told


@pytest.mark.timeout(1500)
def test_fp8_beside_bf16(tmp_path: Path) -> None:
    """VAPO in both precisions, whose curves are not the same, and log-probs beside Hugging Face's."""
    told = pass_stages(tmp_path, "model", "parity", "vapo_bf16", "vapo_fp8")
    assert "met     | FP8 is at work" in (tmp_path / "vapo_fp8.log").read_text()
    ours, theirs = (
        json.loads((tmp_path / f"{name}.json").read_text())["figures"]["runs"][name]["curves"][
            "gradient norm"
        ]
        for name in ("vapo_fp8", "vapo_bf16")
    )
    assert ours == pytest.approx(theirs, rel=0.05) and ours != theirs
    assert "Transformer Engine FP8 tensorwise: mean difference / that of Hugging Face in e4m3" in told


@pytest.mark.timeout(1500)
def test_row_4_of_the_list(tmp_path: Path) -> None:
    """The run of row 1 again in FP8. `.ci/run all` has this test: it is the code of the test above."""
    told = pass_stages(tmp_path, "model", "qwen_vapo", "qwen_fp8")
    assert "Seconds of phases: bf16 and FP8" in told
