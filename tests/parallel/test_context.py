"""Context parallelism: each sequence of a micro-batch lies in 2 * cp chunks over the ranks.

The references are Hugging Face and one rank. tests/parallel/test_parity.py compares the families'
log-probabilities."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from megarl.config.methods import POLICY_LOSSES
from tests.parallel import jobs
from tests.parallel.test_invariance import TERMS, VOCAB, make_batch, make_batch_of, relative_difference
from tests.parallel.test_parity import hf_logprobs, sequences
from tests.plan.jobs import long_sequence
from tests.ranks import RankPool
from tests.tiny_models import make_tiny_model

SLOW = pytest.mark.slow
NAMES = "tp{0[0]}-pp{0[1]}-dp{0[2]}-ep{0[3]}-cp{0[4]}".format


@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 1, 1, 1, 2), (2, 2, 1)], ids=str)
def test_the_likeliest_tokens_equal_hugging_face(
    layout: tuple[int, ...], ranks: Callable[..., RankPool], tmp_path: Path
) -> None:
    """A teacher's top-k tokens match on the last stage's ranks, for a vocabulary that tp does not divide."""
    prompts, responses = sequences(307)
    folder = make_tiny_model(tmp_path, "qwen3", vocab=307, layers=2)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = [
            model(torch.tensor([p + r])).logits[0, len(p) - 1 : -1]
            for p, r in zip(prompts, responses, strict=True)
        ]
    expected = (torch.cat(logits).double() / 0.7).log_softmax(-1)[:, :300].topk(5, -1)
    arguments = {"folder": folder, "prompts": prompts, "responses": responses, "temperature": 0.7}
    answers = ranks(*layout).run(jobs.logprobs, **arguments, top_k=5)
    last = [found for found in answers if found[0].shape[1]]
    assert len(last) == len(answers) / layout[1]
    for logprobs, tokens in last:
        assert torch.equal(tokens.long(), expected.indices)
        assert (logprobs - expected.values).abs().max() <= 1e-5


@pytest.mark.parametrize("layout", [(1, 1, 1, 1, 2), pytest.param((2, 2, 1, 1, 2), marks=SLOW)], ids=NAMES)
def test_values_and_scores_equal_one_ranks(
    layout: tuple[int, ...], ranks: Callable[..., RankPool], tmp_path: Path
) -> None:
    """The critic's values and a reward model's scores at the last token match those of one rank.

    If a chunk ends between them, the last token and the one before it lie on different ranks."""
    prompts, responses = sequences(101)
    for kind, job in (("token", jobs.values), ("sequence", jobs.reward_scores)):
        folder = make_tiny_model(tmp_path / kind, "qwen3", vocab=101, layers=2, classification=kind)
        count = 6 if kind == "token" else 4
        arguments = {"folder": folder, "prompts": prompts[:count], "responses": responses[:count]}
        [expected] = ranks(1, 1, 1).run(job, **arguments)
        for found in ranks(*layout).run(job, **arguments):
            difference = found - expected if kind == "token" else found[0] - expected[0]
            assert difference.abs().max() <= 1e-5, kind


GRADIENTS: list[Any] = [
    ("DAPO", (1, 1, 1, 1, 2), {}),
    ("VAPO", (2, 1, 1, 1, 2), {"turns": True}),
    ("teacher's top k", (2, 1, 1, 1, 2), {"turns": True}),
    ("value", (1, 1, 1, 1, 2), {}),
    ("GSPO", (1, 1, 1, 1, 2), {}),
    ("VAPO", (1, 1, 1, 1, 4), {}),
    ("VAPO", (1, 1, 2, 1, 2), {}),
    ("VAPO", (1, 2, 1, 1, 2), {}),
    ("value", (2, 2, 1, 1, 2), {}),
    ("entropy", (2, 1, 1, 1, 2), {"sequence_parallel": False}),
    ("VAPO", (1, 1, 1, 1, 2), {"model": {"recompute": "full"}}),
    ("VAPO", (1, 1, 1, 1, 2), {"model": {"recompute": "selective"}}),
    ("VAPO", (1, 1, 1, 1, 2), {"optimizer": {"frozen_layers": 1, "frozen": ["embeddings"]}}),
    ("VAPO", (1, 1, 1, 1, 2), {"optimizer": {"frozen_layers": 1}, "model": {"recompute": "full"}}),
    *((name, (1, 1, 1, 1, 2), {"turns": True}) for name in TERMS if name in POLICY_LOSSES),
]


@pytest.mark.parametrize(
    ("term", "layout", "options"),
    [pytest.param(*case, marks=SLOW if number > 2 else ()) for number, case in enumerate(GRADIENTS)],
    ids=lambda value: NAMES(value) if isinstance(value, tuple) else str(value),
)
def test_gradients_equal_one_ranks(
    term: str,
    layout: tuple[int, ...],
    options: dict[str, Any],
    ranks: Callable[..., RankPool],
    tmp_path: Path,
) -> None:
    """Losses, statistics and the norm for clipping match too: each rank's tokens count once."""
    which, of_term = TERMS[term]
    kind = "token" if which == "critic" else None
    folder = make_tiny_model(
        tmp_path, "qwen3", vocab=VOCAB, layers=2, tied=which == "actor", classification=kind
    )
    options = dict(options)
    batch = make_batch_of(term, options.pop("turns", False))
    arguments = {"folder": folder, "batch": batch, "which": which}
    parts = {key: value for key, value in options.items() if key == "optimizer"}
    [expected] = ranks(1, 1, 1).run(
        jobs.gradients, options={**of_term, **parts, "budget": 10_000}, **arguments
    )
    found = ranks(*layout).run(jobs.gradients, options={**of_term, **options, "budget": 48}, **arguments)[0]
    assert relative_difference(found["gradients"], expected["gradients"]) <= 1e-5
    assert found["norm"] == pytest.approx(expected["norm"], rel=1e-5)
    for name, value in expected["sums"].items():
        assert found["sums"][name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(1, 1, 1, 1, 2), (1, 1, 1, 2, 2)], ids=NAMES)
def test_a_mixtures_tokens_go_to_experts_of_other_ranks(
    layout: tuple[int, ...], ranks: Callable[..., RankPool], tmp_path: Path
) -> None:
    """A group of experts may lie on the context-parallel ranks of a replica."""
    prompts, responses = sequences(307)
    folder = make_tiny_model(tmp_path / "logprobs", "qwen3_moe", vocab=307)
    expected, _ = hf_logprobs(folder, prompts, responses, 1.0)
    arguments = {"folder": folder, "prompts": prompts, "responses": responses}
    for found, _ in ranks(*layout).run(jobs.logprobs, **arguments):
        assert (found - expected).abs().max() <= 1e-5
    folder = make_tiny_model(tmp_path / "gradients", "qwen3_moe", vocab=VOCAB, layers=2)
    arguments = {
        "folder": folder,
        "batch": make_batch(),
        "which": "actor",
        "options": {**TERMS["VAPO"][1], "budget": 48},
    }
    [alone] = ranks(1, 1, 1).run(jobs.gradients, **arguments)
    found = ranks(*layout).run(jobs.gradients, **arguments)[0]
    assert relative_difference(found["gradients"], alone["gradients"]) <= 1e-5
    assert found["norm"] == pytest.approx(alone["norm"], rel=1e-5)


@pytest.mark.slow
def test_a_long_sequence_is_learned_from(ranks: Callable[..., RankPool]) -> None:
    """An update with 16,384 tokens over four ranks needs less than 64 MiB on each (49 measured)."""
    for tokens, peak, norm in ranks(1, 1, 1, 1, 4).run(long_sequence, length=16384):
        assert tokens == 4096
        assert peak < 64, "the pairs of this rank's queries and all keys alone, a byte each, would be 64"
        assert norm > 0
