"""After an update the engine has bitwise the exported weights, and the trainer's log-probabilities."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.families import ROWS
from tests.parallel import jobs
from tests.ranks import RankPool
from tests.tiny_models import EXPERT_BIAS, make_tiny_model

PROMPTS = [[3, 9, 4], [7] * 11, [20], [3, 9, 4], [5, 6, 7, 8, 9, 10]]
FAST = {"qwen3", "qwen3_moe", "deepseek_v3", "qwen3_5_moe_text"}  # each has a different kind of layer
CASES = [
    pytest.param(layout, family, options, marks=() if family in FAST else pytest.mark.slow)
    for family, row in ROWS.items()
    for layout, options in row.sent
]


def changed_tensors(out: Path, folder: Path) -> dict[str, Tensor]:
    """Return the tensors of an exported folder, after checking that some differ from the original ones."""
    exported, original = (
        {name: tensor for file in place.glob("*.safetensors") for name, tensor in load_file(file).items()}
        for place in (out, folder)
    )
    assert any(not torch.equal(exported[name], original[name]) for name in exported), (
        "no change by the update"
    )
    return exported


@pytest.mark.shows("transfer")
@pytest.mark.parametrize(("layout", "family", "options"), CASES, ids=lambda x: str(x))
def test_transfer_is_exact(
    layout: tuple, family: str, options: dict, ranks: Callable[..., RankPool], tmp_path: Path
) -> None:
    folder = make_tiny_model(tmp_path / "model", family, vocab=61, **options)
    out = tmp_path / "out"
    answers = ranks(*layout).run(jobs.rollout_after_update, folder=folder, out=out, prompts=PROMPTS)
    exported = changed_tensors(out, folder)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    for answer in answers:
        assert answer["parameters"].keys() == exported.keys()
        for name, tensor in answer["parameters"].items():
            assert torch.equal(tensor, exported[name]), name
        assert (answer["engine"] - answer["trainer"]).abs().max() <= 1e-5
        assert answer["greedy"] == answers[0]["greedy"]
    for prompt, tokens in zip(PROMPTS, answers[0]["greedy"], strict=True):
        with torch.no_grad():
            generated = model.generate(
                torch.tensor([prompt]), do_sample=False, max_new_tokens=12, eos_token_id=1, pad_token_id=0
            )
        assert generated[0, len(prompt) :].tolist() == tokens


@pytest.mark.parametrize(
    ("layout", "family"),
    [
        *(((2, 1, 1), "qwen3"), ((1, 1, 2, 2), "glm4_moe"), ((1, 2, 1), "qwen3_5_text")),
        pytest.param((1, 2, 1), "qwen3", marks=pytest.mark.slow),
        pytest.param((1, 1, 2, 2), "qwen3_5_moe_text", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_transfer_is_exact_in_bf16(
    layout: tuple, family: str, ranks: Callable[..., RankPool], tmp_path: Path
) -> None:
    """Trainer and engine differ only by bf16 rounding.

    The distributed optimizer has fp32 copies of bf16 weights, and a router's bias is float32."""
    folder = make_tiny_model(tmp_path / "model", family, vocab=61, tied=True, dtype=torch.bfloat16)
    out = tmp_path / "out"
    answers = ranks(*layout).run(
        jobs.rollout_after_update, folder=folder, out=out, prompts=PROMPTS, dtype="bf16"
    )
    exported = changed_tensors(out, folder)
    for answer in answers:
        assert answer["grad_norm"] > 0
        for name, tensor in answer["parameters"].items():
            single = name.endswith(EXPERT_BIAS)
            assert tensor.dtype == exported[name].dtype == (torch.float32 if single else torch.bfloat16)
            assert torch.equal(tensor, exported[name]), name
        assert (answer["engine"] - answer["trainer"]).abs().mean() <= 0.02


@pytest.mark.parametrize("what", ["loss", "gradient"])
@pytest.mark.parametrize("layout", [(2, 1, 1), (1, 2, 1), (1, 1, 2)])
def test_bad_numbers_stop_the_update_on_every_rank(
    layout: tuple, what: str, ranks: Callable[..., RankPool], tmp_path: Path
) -> None:
    folder = make_tiny_model(tmp_path / "model", "qwen3", vocab=61)
    # Rank 1 is on the last stage, which computes losses.
    for text, unchanged in ranks(*layout).run(
        jobs.update_with_bad_loss, folder=folder, bad_rank=1, what=what
    ):
        assert text is not None
        assert text.startswith("actor update, rank ")
        assert what in text
        assert unchanged
