"""Partly frozen models: in every layout, trained parameters have the full model's gradients.

Frozen parameters have none."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parallel import jobs
from tests.parallel.test_invariance import VOCAB, make_batch, relative_difference
from tests.ranks import RankPool
from tests.tiny_models import make_tiny_model

Ranks = Callable[..., RankPool]
ATTENTION = {"frozen": ["attention"]}
EMBEDDINGS = {"frozen": ["embeddings"]}
# With two stages, the first one has no trainable parameters.
LOWER_HALF = {"frozen": ["embeddings"], "frozen_layers": 1}
BOTH = {"frozen": ["attention", "embeddings"], "frozen_layers": 1}
ALL_LAYERS = {"frozen": [], "frozen_layers": 2}
SLOW = pytest.mark.slow


def is_frozen(name: str, optimizer: dict[str, Any]) -> bool:
    """Implement the documented rules for a Hugging Face tensor of a model with tied embeddings."""
    parts, layers = optimizer["frozen"], optimizer.get("frozen_layers", 0)
    attention = "self_attn" in name or "input_layernorm" in name
    return (
        ("embeddings" in parts and "embed_tokens" in name)
        or ("attention" in parts and attention)
        or any(f".layers.{layer}." in name for layer in range(layers))
    )


def tiny_model(folder: Path, which: str, layout: tuple[int, ...]) -> Path:
    """Make a mixture of experts if the layout has an expert-parallel size."""
    family: Any = "qwen3_moe" if layout[3:] else "qwen3"
    kind: Any = "token" if which == "critic" else None
    return make_tiny_model(folder, family, vocab=VOCAB, layers=2, tied=True, classification=kind)


@pytest.mark.parametrize(
    ("which", "optimizer", "layout", "recompute"),
    [
        ("critic", ATTENTION, (2, 1, 1), "none"),
        ("actor", LOWER_HALF, (1, 2, 1), "none"),
        ("actor", LOWER_HALF, (2, 1, 1), "full 1"),
        pytest.param("critic", BOTH, (1, 1, 2), "full", marks=SLOW),
        pytest.param("actor", EMBEDDINGS, (1, 2, 1), "full", marks=SLOW),
        pytest.param("actor", LOWER_HALF, (1, 2, 2), "full", marks=SLOW),
        pytest.param("actor", LOWER_HALF, (2, 1, 1), "full", marks=SLOW),
        pytest.param("actor", ATTENTION, (2, 2, 1), "selective", marks=SLOW),
        pytest.param("actor", BOTH, (2, 1, 2), "selective", marks=SLOW),
        pytest.param("critic", EMBEDDINGS, (2, 1, 1), "full", marks=SLOW),
        pytest.param("critic", ALL_LAYERS, (1, 2, 1), "full", marks=SLOW),
        pytest.param("actor", LOWER_HALF, (1, 2, 2, 2), "none", marks=SLOW),
        pytest.param("critic", ATTENTION, (2, 1, 2, 2), "full", marks=SLOW),
    ],
    ids=str,
)
def test_gradients_are_those_of_the_whole_model(
    which: str,
    optimizer: dict[str, Any],
    layout: tuple[int, ...],
    recompute: str,
    ranks: Ranks,
    tmp_path: Path,
) -> None:
    folder = tiny_model(tmp_path / "model", which, layout)
    arguments: dict[str, Any] = {"folder": folder, "batch": make_batch(), "which": which}
    [whole] = ranks(1, 1, 1).run(jobs.gradients, **arguments, options={"budget": 10_000})
    kind, _, layers = recompute.partition(" ")
    model = {"recompute": kind, "recompute_layers": int(layers) if layers else None}
    options = {"budget": 48, "optimizer": optimizer, "model": model}
    found = ranks(*layout).run(jobs.gradients, **arguments, options=options)
    trained = {name for name in whole["gradients"] if not is_frozen(name, optimizer)}
    assert 0 < len(trained) < len(whole["gradients"])
    expected, ours = (
        {name: gradient for name, gradient in gradients.items() if name in trained}
        for gradients in (whole["gradients"], found[0]["gradients"])
    )
    assert relative_difference(ours, expected) <= 1e-5
    for name in whole["gradients"].keys() - trained:
        assert not found[0]["gradients"][name].any(), name
    norm = float(torch.cat([x.flatten() for x in expected.values()]).double().norm())
    for rank in found:
        assert rank["norm"] == pytest.approx(norm, rel=1e-5), "the norm that clips the gradient"


@pytest.mark.parametrize(
    ("which", "optimizer", "written", "read"),
    [
        ("actor", LOWER_HALF, (1, 2, 1), [(1, 2, 1), (1, 1, 2)]),
        pytest.param("critic", ATTENTION, (1, 1, 2), [(1, 1, 2), (2, 1, 1)], marks=SLOW),
        pytest.param("actor", LOWER_HALF, (1, 1, 1), [(1, 2, 2), (2, 2, 1)], marks=SLOW),
        pytest.param("critic", ALL_LAYERS, (1, 2, 1), [(1, 2, 1), (1, 1, 2)], marks=SLOW),
        pytest.param("actor", LOWER_HALF, (1, 2, 2), [(1, 2, 2), (1, 2, 1)], marks=SLOW),
        pytest.param("actor", LOWER_HALF, (1, 2, 2, 2), [(1, 2, 2, 2), (2, 1, 1, 2)], marks=SLOW),
    ],
    ids=str,
)
def test_nothing_moves_what_is_frozen(
    which: str,
    optimizer: dict[str, Any],
    written: tuple[int, ...],
    read: list[tuple[int, ...]],
    ranks: Ranks,
    tmp_path: Path,
) -> None:
    """Updates, weight decay and checkpoints leave frozen parameters unchanged.

    They have no gradients and no optimizer state. The checkpoint can be read on another layout, and
    training continues from it bitwise on its layout. With four ranks, communication overlaps with
    computation."""
    folder = tiny_model(tmp_path / "model", which, written)
    (checkpoint := tmp_path / "checkpoint").mkdir()

    def run(layout: tuple[int, ...], read: bool) -> list[dict[str, Any]]:
        overlap = prod(layout[:3]) == 4
        settings: dict[str, Any] = {"which": which, "optimizer": optimizer, "read": read, "overlap": overlap}
        return ranks(*layout).run(jobs.partly_frozen, folder=folder, checkpoint=checkpoint, **settings)

    first = run(written, read=False)
    original, saved, last = first[0]["weights"]
    for name, tensor in original.items():
        same = torch.equal(tensor, saved[name]) and torch.equal(tensor, last[name])
        assert same == is_frozen(name, optimizer), name
    for number, layout in enumerate([written, *read]):
        found = run(layout, read=True) if number else first
        for rank in found:
            assert rank["trained"] == rank["buffered"]
            assert rank["steps"] == {2.0} and rank["lr"] == 1e-3, "whether it has something to train or not"
            assert not any(rank["left"]), "what is frozen leaves the device as well"
        optimized, trained = (sum(rank[what] for rank in found) for what in ("optimized", "trained"))
        assert optimized * layout[2] == trained or layout[3:]
        _, between, after = found[0]["weights"]
        for name, tensor in saved.items():
            assert torch.equal(between[name], tensor), name
            if layout == written:
                assert torch.equal(after[name], last[name]), name
            else:
                torch.testing.assert_close(after[name], last[name], rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "optimizer", "layout"),
    [
        ("qwen3", ATTENTION, (2, 1, 1)),
        pytest.param("qwen3", LOWER_HALF, (1, 2, 1), marks=SLOW),
        pytest.param("qwen2", BOTH, (2, 1, 2), marks=SLOW),
    ],
    ids=str,
)
def test_what_is_frozen_is_sent_once(
    family: Any, optimizer: dict[str, Any], layout: tuple[int, int, int], ranks: Ranks, tmp_path: Path
) -> None:
    """Byte counts and an engine with corrupted weights show it; an engine that lost its weights gets all."""
    folder = make_tiny_model(tmp_path / "model", family, vocab=VOCAB, layers=2, tied=True)
    found = ranks(*layout).run(jobs.syncs_of_frozen, folder=folder, optimizer=optimizer)
    for rank in found:
        for version, sync in enumerate(rank):
            actor = found[0][version]["actor"]
            kept = {name for name in actor if version == 1 and is_frozen(name, optimizer)}
            for name, tensor in sync["engine"].items():
                expected = torch.full_like(tensor, 7.0) if name in kept else actor[name]
                assert torch.equal(tensor, expected), (version, name)
            sizes = {name: tensor.nbytes for name, tensor in actor.items()}
            assert sync["kept"] == sum(sizes[name] for name in kept)
            assert sync["written"] == sum(sizes.values()) - sync["kept"]
        assert rank[1]["kept"] > 0
    sent = [sum(rank[version]["sent"] for rank in found) for version in range(3)]
    assert sent[1] < sent[0] == sent[2]
