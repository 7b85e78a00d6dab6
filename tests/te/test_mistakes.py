"""The comparison with portable layers sees mistakes: each is made on purpose, and the comparison must go red
or the layers refuse."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ranks import RankPool
from tests.te import jobs
from tests.te.test_fp8 import BF16, GRADIENTS, LOGPROBS, differences, fp8

Ranks = Callable[..., RankPool]
FP32 = {"layers": "te", "dtype": "fp32"}
PORTABLE = {"layers": "portable", "dtype": "fp32"}


def test_mistakes_in_float32_are_seen(ranks: Ranks, tmp_path: Path) -> None:
    """Log-probs or gradients leave the bound of 1e-5 by far; without a mistake both keep it."""
    seen = {
        "merged sequences": (0.1, 0.1),
        "another epsilon": (1e-3, 1e-3),
        "weight gradients counted twice": (0.0, 0.1),
    }
    models = {"bf16": PORTABLE, "none": FP32} | dict.fromkeys(seen, FP32)
    found = ranks(1, 1, 1).run(
        jobs.measure, folder=tmp_path, models=models, mistakes={name: name for name in seen}
    )
    assert max(differences(found, "none")) <= 1e-5
    for name, (logprobs, gradients) in seen.items():
        measured = differences(found, name)
        assert measured[0] >= logprobs and measured[1] >= gradients, (name, measured)
        assert max(measured) > 100 * 1e-5, (name, measured)


def test_wrong_scales_are_seen(ranks: Ranks, tmp_path: Path) -> None:
    models = {"bf16": BF16, "right": fp8("tensorwise"), "wrong": fp8("tensorwise")}
    found = ranks(1, 1, 1).run(
        jobs.measure, folder=tmp_path, models=models, mistakes={"wrong": "scales that saturate"}
    )
    right, wrong = differences(found, "right"), differences(found, "wrong")
    assert right[0] <= LOGPROBS and right[1] <= GRADIENTS
    assert wrong[0] > LOGPROBS and wrong[1] > GRADIENTS


@pytest.mark.parametrize(
    ("mistake", "model", "complaint"),
    [
        ("packs that are not filled up", fp8("tensorwise"), r"^\w+: .*divisible by"),
        ("a max_seqlen that is too small", FP32, r"^IndexError: "),
    ],
)
def test_what_the_layers_refuse(
    mistake: str, model: dict, complaint: str, tmp_path: Path, ranks: Ranks
) -> None:
    assert ranks(1, 1, 1).run(jobs.refusal, folder=tmp_path, model=model, mistake="none") == [""]
    (said,) = ranks(1, 1, 1).run(jobs.refusal, folder=tmp_path, model=model, mistake=mistake)
    assert re.search(complaint, said, re.DOTALL), said
