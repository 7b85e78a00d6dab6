"""Megatron against Hugging Face on the same weights, for every family and layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from tests.parallel import jobs
from tests.ranks import RankPool
from tests.tiny_models import make_tiny_model

LAYOUTS = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 1), (1, 1, 2)]
FAST = ((1, 1, 1), (2, 2, 1))
FAMILIES = [
    ("qwen2", {}),
    ("qwen2", {"tied": True}),
    ("qwen3", {"head_dim": 12}),
    ("qwen3", {"tied": True}),
    ("llama", {"rope": "llama3"}),
    ("mistral", {"head_dim": 12}),
    ("glm4", {"head_dim": 12}),
    ("glm4", {"tied": True, "attention_bias": False, "partial_rotary_factor": 0.25, "head_dim": 16}),
]


def sequences(vocab: int) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts and responses of very different lengths, a response of one token among them."""
    generator = torch.Generator().manual_seed(5)
    sizes = [(3, 9), (11, 1), (1, 30), (7, 16), (2, 2), (20, 5)]
    draw = [[torch.randint(0, vocab, (n,), generator=generator).tolist() for n in pair] for pair in sizes]
    return [p for p, _ in draw], [r for _, r in draw]


def hf_logprobs(
    folder: Path, prompts: list[list[int]], responses: list[list[int]], temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found, entropies = [], []
    for prompt, response in zip(prompts, responses, strict=True):
        with torch.no_grad():
            logits = (
                model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].double()
                / temperature
            )
        table = logits.log_softmax(-1)
        found.append(table.gather(-1, torch.tensor(response)[:, None])[:, 0])
        entropies.append(-(table.exp() * table).sum(-1))
    return torch.cat(found), torch.cat(entropies)


@pytest.mark.parametrize(
    "layout",
    [pytest.param(layout, marks=[] if layout in FAST else pytest.mark.slow) for layout in LAYOUTS],
    ids="tp{0[0]}-pp{0[1]}-dp{0[2]}".format,
)
def test_logprobs_equal_hugging_face(
    layout: tuple[int, int, int], ranks: Callable[[int, int, int], RankPool], tmp_path: Path
) -> None:
    tp, pp, dp = layout
    for number, (family, options) in enumerate(FAMILIES):
        # A vocabulary that tp does not divide, and more layers than stages.
        folder = make_tiny_model(tmp_path / str(number), family, vocab=307, layers=2 * pp, **options)
        prompts, responses = sequences(307)
        temperature = 1.0 if number % 2 else 0.7
        expected, entropy = hf_logprobs(folder, prompts, responses, temperature)
        for sequence_parallel in (None, False) if tp > 1 else (None,):
            arguments = {
                "folder": folder,
                "prompts": prompts,
                "responses": responses,
                "temperature": temperature,
            }
            for found, found_entropy in ranks(tp, pp, dp).run(
                jobs.logprobs, sequence_parallel=sequence_parallel, **arguments
            ):
                assert (found - expected).abs().max() <= 1e-5, (family, options, sequence_parallel)
                assert (found_entropy - entropy).abs().max() <= 1e-5


@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 1, 1), (2, 2, 1)], ids="tp{0[0]}-pp{0[1]}-dp{0[2]}".format)
def test_values_equal_hugging_face(
    layout: tuple[int, int, int], ranks: Callable[[int, int, int], RankPool], tmp_path: Path
) -> None:
    """A reward model with one label becomes a critic whose values are that model's scores."""
    tp, pp, dp = layout
    prompts, responses = sequences(101)
    for family, tied in (("qwen2", True), ("glm4", False)):
        folder = make_tiny_model(
            tmp_path / family, family, vocab=101, layers=2 * pp, tied=tied, classification="token"
        )
        model = AutoModelForTokenClassification.from_pretrained(folder, dtype=torch.float32)
        expected = []
        for prompt, response in zip(prompts, responses, strict=True):
            with torch.no_grad():
                logits = model(torch.tensor([prompt + response])).logits
                expected.append(logits[0, len(prompt) - 1 : -1, 0])
        for found in ranks(tp, pp, dp).run(jobs.values, folder=folder, prompts=prompts, responses=responses):
            assert (found - torch.cat(expected)).abs().max() <= 1e-5, family

    # A sequence classifier scores the last token of what it is given: the state in which the last response
    # token was chosen.
    folder = make_tiny_model(
        tmp_path / "sequence", "qwen3", vocab=101, layers=2 * pp, classification="sequence"
    )
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        scores = torch.cat(
            [model(torch.tensor([p + r[:-1]])).logits[:, 0] for p, r in zip(prompts, responses, strict=True)]
        )
    last = torch.tensor([len(r) for r in responses]).cumsum(0) - 1
    for found in ranks(tp, pp, dp).run(jobs.values, folder=folder, prompts=prompts, responses=responses):
        assert (found[last] - scores).abs().max() <= 1e-5


@pytest.mark.parametrize(
    "layout",
    [(1, 1, 1), (2, 1, 1), (1, 1, 2), pytest.param((2, 2, 1), marks=pytest.mark.slow)],
    ids="tp{0[0]}-pp{0[1]}-dp{0[2]}".format,
)
def test_a_reward_models_scores_equal_hugging_face(
    layout: tuple[int, int, int], ranks: Callable[[int, int, int], RankPool], tmp_path: Path
) -> None:
    """Of whole responses, packed, in the order of the batch whichever replica has scored them."""
    prompts, responses = sequences(101)
    prompts, responses = prompts[:4] * 2, responses[:4] + responses[:4][::-1]
    for family in ("qwen3", "llama"):
        folder = make_tiny_model(
            tmp_path / family, family, vocab=101, layers=2 * layout[1], classification="sequence"
        )
        model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            rows = zip(prompts, responses, strict=True)
            expected = torch.cat([model(torch.tensor([p + r])).logits[:, 0] for p, r in rows])
        assert expected.unique().numel() == 8
        arguments = {"folder": folder, "prompts": prompts, "responses": responses}
        for group_ids in (None, [0, 1, 2, 3] * 2):
            for found, packed in ranks(*layout).run(jobs.reward_scores, group_ids=group_ids, **arguments):
                assert (found - expected).abs().max() <= 1e-5
                assert max(packed) > 1, "several sequences of one pack"
