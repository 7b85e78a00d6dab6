"""Context parallelism: each sequence of a pack in 2 * cp chunks over the ranks, against Hugging Face and
against one rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.parallel import jobs
from tests.parallel.test_parity import hf_logprobs, sequences
from tests.ranks import RankPool
from tests.tiny_models import make_tiny_model

SLOW = pytest.mark.slow
LAYOUTS = [  # tp, pp, dp, ep, cp
    (1, 1, 1, 1, 2),
    pytest.param((1, 1, 1, 1, 4), marks=SLOW),
    (2, 2, 1, 1, 2),
    pytest.param((1, 2, 1, 1, 4), marks=SLOW),
]
NAMES = "tp{0[0]}-pp{0[1]}-dp{0[2]}-ep{0[3]}-cp{0[4]}".format


@pytest.mark.parametrize("layout", LAYOUTS, ids=NAMES)
def test_logprobs_equal_hugging_face(
    layout: tuple[int, ...], ranks: Callable[..., RankPool], tmp_path: Path
) -> None:
    prompts, responses = sequences(307)
    for number, (family, options) in enumerate([("qwen3", {"tied": True}), ("llama", {"rope": "llama3"})]):
        folder = make_tiny_model(tmp_path / str(number), family, vocab=307, layers=2 * layout[1], **options)
        expected, entropy = hf_logprobs(folder, prompts, responses, 0.7)
        arguments = {"folder": folder, "prompts": prompts, "responses": responses, "temperature": 0.7}
        for found, found_entropy in ranks(*layout).run(jobs.logprobs, **arguments):
            assert (found - expected).abs().max() <= 1e-5, (family, options)
            assert (found_entropy - entropy).abs().max() <= 1e-5
