"""The stages of `make gpu` that are Transformer Engine's, with its kernels emulated and a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.test_hour import call, statuses


@pytest.mark.timeout(1500)
def test_fp8_beside_bf16(tmp_path: Path) -> None:
    """VAPO in both precisions, whose curves are not the same, and log-probs beside Hugging Face's."""
    chosen = ("model", "qwen_vapo", "qwen_fp8", "parity", "vapo_bf16", "vapo_fp8")
    told = call(tmp_path, "--only", *chosen)
    found = statuses(tmp_path)
    assert [found[name] for name in chosen] == ["passed"] * 6, told
    assert "met     | FP8 is at work" in (tmp_path / "vapo_fp8.log").read_text()
    ours, theirs = (
        json.loads((tmp_path / f"{name}.json").read_text())["figures"]["runs"][name]["curves"][
            "gradient norm"
        ]
        for name in ("vapo_fp8", "vapo_bf16")
    )
    assert ours == pytest.approx(theirs, rel=0.05) and ours != theirs
    assert "Transformer Engine FP8 tensorwise: mean difference / that of Hugging Face in e4m3" in told
