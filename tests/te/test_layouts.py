"""Transformer Engine's layers in float32 against Hugging Face and against portable layers, over the tables of
tests/parallel."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForTokenClassification

from tests.parallel import jobs, test_invariance, test_parity
from tests.parallel.test_invariance import TERMS, VOCAB, make_batch, make_batch_of, relative_difference
from tests.parallel.test_lora import draw_adapters
from tests.parallel.test_parity import FAMILIES, hf_logprobs, sequences
from tests.ranks import RankPool
from tests.tiny_models import make_tiny_model
from tests.weights import test_families

Ranks = Callable[..., RankPool]
RECOMPUTE = ("none", "selective", "full")
EXPERTS = ({"head_dim": 12}, {"norm_topk_prob": False, "active": 3, "tied": True})
# (tp, pp, dp, ep); the tables of the dense families have no ep.
LAYOUTS = sorted({(*layout, 1) for layout in test_parity.LAYOUTS} | set(test_families.LAYOUTS))


def te(recompute: str = "none") -> dict[str, Any]:
    return {"layers": "te", "recompute": recompute}


@pytest.mark.parametrize("layout", LAYOUTS, ids="tp{0[0]}-pp{0[1]}-dp{0[2]}-ep{0[3]}".format)
def test_logprobs_equal_hugging_face_and_portable_layers(
    layout: tuple[int, int, int, int], ranks: Ranks, tmp_path: Path
) -> None:
    tp, pp, _, ep = layout
    dense = FAMILIES if ep == 1 else []
    mixtures = [("qwen3_moe", options) for options in EXPERTS] if layout in test_families.LAYOUTS else []
    prompts, responses = sequences(307)
    for number, (family, options) in enumerate([*dense, *mixtures]):
        folder = make_tiny_model(tmp_path / str(number), family, vocab=307, layers=2 * pp, **options)
        temperature = 1.0 if number % 2 else 0.7
        expected = hf_logprobs(folder, prompts, responses, temperature)
        arguments = {"folder": folder, "prompts": prompts, "responses": responses, "temperature": temperature}
        for sequence_parallel in (None, False) if tp > 1 and family != "qwen3_moe" else (None,):
            arguments["sequence_parallel"] = sequence_parallel
            portable = ranks(*layout).run(jobs.logprobs, **arguments)
            # Recompute changes backward passes alone: each kind once, with gradients below.
            found = ranks(*layout).run(jobs.logprobs, **arguments, model=te(RECOMPUTE[number % 3]))
            for mine, theirs in zip(found, portable, strict=True):
                for quantity, other, exact in zip(mine, theirs, expected, strict=True):
                    assert (quantity - other).abs().max() <= 1e-5, (family, options, sequence_parallel)
                    assert (quantity - exact).abs().max() <= 1e-5, (family, options, sequence_parallel)


@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 1, 1), (2, 2, 1)], ids="tp{0[0]}-pp{0[1]}-dp{0[2]}".format)
def test_values_equal_hugging_face(layout: tuple[int, int, int], ranks: Ranks, tmp_path: Path) -> None:
    folder = make_tiny_model(
        tmp_path, "qwen2", vocab=101, layers=2 * layout[1], tied=True, classification="token"
    )
    prompts, responses = sequences(101)
    model = AutoModelForTokenClassification.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        expected = [
            model(torch.tensor([p + r])).logits[0, len(p) - 1 : -1, 0]
            for p, r in zip(prompts, responses, strict=True)
        ]
    for found in ranks(*layout).run(
        jobs.values, folder=folder, prompts=prompts, responses=responses, model=te()
    ):
        assert (found - torch.cat(expected)).abs().max() <= 1e-5


@pytest.mark.parametrize("term", TERMS)
def test_gradients_equal_those_of_portable_layers_on_one_rank(
    term: str, ranks: Ranks, tmp_path: Path
) -> None:
    """At every layout of the table, with every kind of recompute; the norm that clips them, and the
    statistics."""
    which, options = TERMS[term]
    kind = "token" if which == "critic" else None
    folder = make_tiny_model(
        tmp_path / "model", "qwen3", vocab=VOCAB, layers=2, tied=True, classification=kind
    )
    arguments = {"folder": folder, "which": which, "batch": make_batch_of(term)}
    expected = ranks(1, 1, 1).run(jobs.gradients, **arguments, options={**options, "budget": 10_000})[0]
    for number, layout in enumerate(test_invariance.LAYOUTS):
        chosen = {**options, "budget": 48, "model": te(RECOMPUTE[number % 3])}
        found = ranks(*layout).run(jobs.gradients, **arguments, options=chosen)[0]
        check(found, expected, layout)


@pytest.mark.parametrize("family", ["qwen2", "llama", "qwen3_moe", "glm4", "deepseek_v3"])
def test_gradients_of_the_other_families(family: Any, ranks: Ranks, tmp_path: Path) -> None:
    """With VAPO's whole loss; mixtures also where expert-parallel ranks share them."""
    layers = 4 if family == "deepseek_v3" else 2  # whose stages have a mixture each
    folder = make_tiny_model(tmp_path / "model", family, vocab=VOCAB, layers=layers)
    arguments = {"folder": folder, "which": "actor", "batch": make_batch()}
    options = TERMS["VAPO"][1]
    expected = ranks(1, 1, 1).run(jobs.gradients, **arguments, options={**options, "budget": 10_000})[0]
    mixture = family in ("qwen3_moe", "deepseek_v3")
    layouts = test_families.LAYOUTS if mixture else [(1, 1, 1, 1), (2, 1, 1, 1), (1, 2, 1, 1)]
    for number, layout in enumerate(layouts):
        chosen = {**options, "budget": 34, "model": te(RECOMPUTE[number % 3])}
        check(ranks(*layout).run(jobs.gradients, **arguments, options=chosen)[0], expected, layout)


@pytest.mark.parametrize(
    ("which", "optimizer"),
    [
        ("critic", {"frozen": ["attention"]}),
        ("actor", {"frozen": ["attention", "embeddings"], "frozen_layers": 1}),
    ],
    ids=str,
)
def test_gradients_of_partly_frozen_models(
    which: str, optimizer: dict[str, Any], ranks: Ranks, tmp_path: Path
) -> None:
    """Whose norms are fused with matrices, and where products add to gradient buffers by themselves."""
    kind: Any = "token" if which == "critic" else None
    folder = make_tiny_model(
        tmp_path / "model", "qwen3", vocab=VOCAB, layers=2, tied=True, classification=kind
    )
    arguments = {"folder": folder, "which": which, "batch": make_batch()}
    options = {"optimizer": optimizer, "budget": 10_000}
    expected = ranks(1, 1, 1).run(jobs.gradients, **arguments, options=options)[0]
    frozen = [name for name, gradient in expected["gradients"].items() if not gradient.any()]
    assert any("input_layernorm" in name for name in frozen) and len(frozen) < len(expected["gradients"])
    for number, layout in enumerate([(1, 1, 1), (2, 1, 1), (1, 2, 1)]):
        chosen = {**options, "budget": 48, "model": te(RECOMPUTE[number % 3])}
        found = ranks(*layout).run(jobs.gradients, **arguments, options=chosen)[0]
        check(found, expected, layout)
        assert [name for name, gradient in found["gradients"].items() if not gradient.any()] == frozen


@pytest.mark.parametrize(
    ("family", "which"), [("qwen3", "actor"), ("qwen2", "critic"), ("qwen3_moe", "actor")]
)
def test_gradients_of_adapters(family: Any, which: str, ranks: Ranks, tmp_path: Path) -> None:
    """Beside linears whose norms, with adapters, stand alone."""
    kind: Any = "token" if which == "critic" else None
    folder = make_tiny_model(
        tmp_path / "model", family, vocab=VOCAB, layers=2, tied=which == "actor", classification=kind
    )
    lora = {"rank": 3, "alpha": 6.0}
    arguments = {"folder": folder, "which": which, "batch": make_batch()}
    arguments["adapters"] = draw_adapters(folder, lora)
    options = {"optimizer": {"lora": lora}, "budget": 10_000}
    expected = ranks(1, 1, 1).run(jobs.gradients, **arguments, options=options)[0]
    for number, layout in enumerate([(1, 1, 1), (2, 1, 1), (1, 2, 1)]):
        chosen = {**options, "budget": 48, "model": te(RECOMPUTE[number % 3])}
        check(ranks(*layout).run(jobs.gradients, **arguments, options=chosen)[0], expected, layout)


def check(found: dict[str, Any], expected: dict[str, Any], layout: tuple[int, ...]) -> None:
    assert relative_difference(found["gradients"], expected["gradients"]) <= 1e-5, layout
    exact = torch.cat([x.flatten() for x in found["gradients"].values()]).double().norm()
    assert found["norm"] == pytest.approx(float(exact), rel=1e-5), (
        layout,
        "the norm that clips the gradient",
    )
    for name, value in expected["sums"].items():
        assert found["sums"][name] == pytest.approx(value, rel=1e-5, abs=1e-6), (layout, name)
