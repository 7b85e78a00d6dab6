"""Transformer Engine's layers in float32 against Hugging Face, over the rows of tests/families.py.

Gradients are compared with those of portable layers, which tests/parallel/test_parity.py compares with
Hugging Face."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.weights import families
from tests.families import ROWS, Layout
from tests.parallel import jobs, test_invariance
from tests.parallel.test_invariance import (
    FAST,
    TERMS,
    VOCAB,
    make_batch,
    make_batch_of,
    relative_difference,
)
from tests.parallel.test_lora import draw_adapters
from tests.parallel.test_parity import hf_logprobs, hf_values, sequences, tiny
from tests.ranks import RankPool
from tests.tiny_models import make_tiny_model

Ranks = Callable[..., RankPool]
RECOMPUTE = ("none", "selective", "full")
# Of linear attention there are no such layers.
FAMILIES = [family for family in ROWS if not families.FAMILIES[family].is_linear]
DENSE = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 1), (1, 1, 2)]
# Layouts of families whose layers are those of Qwen2 and Qwen3: the pair of TP and PP has both.
ALIKE = [(1, 1, 1), (2, 2, 1)]
MIXTURE = [(1, 1, 1), (2, 1, 1), (2, 1, 1, 2), (1, 1, 2, 2), (1, 2, 1)]  # tp, pp, dp, ep


def te(recompute: str = "none") -> dict[str, Any]:
    return {"layers": "te", "recompute": recompute}


def layouts_of(family: str) -> list[tuple[int, ...]]:
    if families.FAMILIES[family].is_moe:
        return MIXTURE
    return ALIKE if family in ("llama", "mistral") else DENSE


@pytest.mark.shows("TE layers")
@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_equal_hugging_face(family: str, ranks: Ranks, tmp_path: Path) -> None:
    prompts, responses = sequences(307)
    dense = not families.FAMILIES[family].is_moe
    for number, options in enumerate(ROWS[family].models):
        folder = tiny(tmp_path / str(number), family, vocab=307, **options)
        temperature = 1.0 if number % 2 else 0.7
        expected = hf_logprobs(folder, prompts, responses, temperature)
        arguments = {"folder": folder, "prompts": prompts, "responses": responses, "temperature": temperature}
        for layout in layouts_of(family):
            for sequence_parallel in (None, False) if layout[0] > 1 and dense else (None,):
                arguments["sequence_parallel"] = sequence_parallel
                # Recompute changes backward passes alone: each kind once, with gradients below.
                found = ranks(*layout).run(jobs.logprobs, **arguments, model=te(RECOMPUTE[number % 3]))
                for mine in found:
                    for quantity, exact in zip(mine, expected, strict=True):
                        assert (quantity - exact).abs().max() <= 1e-5, (options, layout, sequence_parallel)


@pytest.mark.shows("TE layers")
@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 1, 1), (2, 2, 1)], ids="tp{0[0]}-pp{0[1]}-dp{0[2]}".format)
@pytest.mark.parametrize("family", ["qwen2", "glm4_moe"])
def test_values_equal_hugging_face(family: str, layout: Layout, ranks: Ranks, tmp_path: Path) -> None:
    folder = tiny(tmp_path, family, vocab=101, tied=True, classification="token")
    prompts, responses = sequences(101)
    expected = hf_values(folder, family, prompts, responses)
    arguments = {"folder": folder, "prompts": prompts, "responses": responses}
    for found in ranks(*layout).run(jobs.values, **arguments, model=te()):
        assert (found - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("term", sorted(FAST))
def test_gradients_equal_those_of_portable_layers_on_one_rank(
    term: str, ranks: Ranks, tmp_path: Path
) -> None:
    """At every layout of the table, with every kind of recompute; the norm that clips them, and the
    statistics.

    A term reads log-probabilities, entropies or values, whichever layers computed them. One of each kind
    is enough; tests/parallel/test_invariance.py has all terms."""
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


@pytest.mark.shows("TE layers")
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "qwen3"])
def test_gradients_of_the_other_families(family: str, ranks: Ranks, tmp_path: Path) -> None:
    """With VAPO's whole loss; mixtures also where expert-parallel ranks share them."""
    folder = tiny(tmp_path / "model", family, vocab=VOCAB)
    arguments = {"folder": folder, "which": "actor", "batch": make_batch()}
    options = TERMS["VAPO"][1]
    expected = ranks(1, 1, 1).run(jobs.gradients, **arguments, options={**options, "budget": 10_000})[0]
    layouts = [(1, 1, 1), (2, 1, 1), (1, 2, 1)]
    if families.FAMILIES[family].is_moe:
        layouts = MIXTURE if family == "qwen3_moe" else [(1, 1, 1), (2, 1, 1, 2), (1, 2, 1)]
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
