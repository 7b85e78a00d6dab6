"""Grouped products (`model.grouped_experts`): one module for all experts of a rank, with other names of
parameters, and the same log-probabilities, gradients and checkpoints as experts one by one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.parallel import jobs
from tests.parallel.test_experts import LOSSES, mixture
from tests.parallel.test_invariance import VOCAB, make_batch, relative_difference
from tests.parallel.test_lora import draw_adapters
from tests.parallel.test_parity import hf_logprobs, sequences
from tests.ranks import RankPool

Ranks = Callable[..., RankPool]
GROUPED = {"layers": "te", "grouped_experts": True}
LAYOUTS = [(1, 1, 1, 1), (2, 1, 1, 2), (1, 2, 2, 2)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_log_probs_and_gradients(layout: tuple[int, ...], ranks: Ranks, tmp_path: Path) -> None:
    """Against Hugging Face's model, and one rank's portable layers."""
    folder = mixture(tmp_path / "model", vocab=VOCAB)
    prompts, responses = sequences(VOCAB)
    expected, entropy = hf_logprobs(folder, prompts, responses, 1.0)
    arguments: dict[str, Any] = {"folder": folder, "prompts": prompts, "responses": responses}
    for logprobs, entropies in ranks(*layout).run(jobs.logprobs, **arguments, model=GROUPED):
        assert (logprobs - expected).abs().max() <= 1e-5
        assert (entropies - entropy).abs().max() <= 1e-5
    options = LOSSES["VAPO"][1]
    arguments = {"folder": folder, "batch": make_batch(), "which": "actor"}
    one = ranks(1, 1, 1).run(jobs.gradients, **arguments, options={**options, "budget": 10_000})[0]
    for recompute in ("none", "full"):
        chosen = {**options, "budget": 34, "model": {**GROUPED, "recompute": recompute}}
        found = ranks(*layout).run(jobs.gradients, **arguments, options=chosen)[0]
        assert relative_difference(found["gradients"], one["gradients"]) <= 1e-5, recompute
        # What clips them counts the experts of every rank.
        assert found["norm"] == pytest.approx(one["norm"], rel=1e-5), recompute


def calls_of_grouped_products(runtime: Any, **arguments: Any) -> int:
    import transformer_engine_torch

    before = transformer_engine_torch.CALLS["te_general_grouped_gemm"]
    jobs.logprobs(runtime, **arguments)
    return transformer_engine_torch.CALLS["te_general_grouped_gemm"] - before


def test_the_grouped_product_is_what_runs(ranks: Ranks, tmp_path: Path) -> None:
    folder = mixture(tmp_path / "model", vocab=VOCAB)
    arguments: dict[str, Any] = {"folder": folder, "prompts": [[3, 4]], "responses": [[5, 6]]}
    pool = ranks(1, 1, 1)
    # two layers of two products
    assert pool.run(calls_of_grouped_products, **arguments, model=GROUPED) == [4]
    assert pool.run(calls_of_grouped_products, **arguments, model={"layers": "te"}) == [0]


@pytest.mark.parametrize("which", ["actor", "critic"])
def test_checkpoints_are_those_of_experts_one_by_one(which: str, ranks: Ranks, tmp_path: Path) -> None:
    """Written by either and read by the other, at another ep: weights and both of Adam's moments to the
    bit."""
    kind = "token" if which == "critic" else None
    folder = mixture(tmp_path / "model", vocab=VOCAB, classification=kind)
    arguments: dict[str, Any] = {"folder": folder, "batch": make_batch(), "which": which}
    for number, (write, read) in enumerate(((GROUPED, {}), ({}, GROUPED))):
        arguments["checkpoint"] = tmp_path / str(number)
        arguments["checkpoint"].mkdir()
        around = jobs.optimizer_around_a_checkpoint
        saved = ranks(2, 1, 1, 2).run(around, read=False, model=write, **arguments)[0]
        for layout in LAYOUTS:
            found = ranks(*layout).run(around, read=True, model=read, **arguments)[0]
            different = [name for name in saved if not torch.equal(saved[name], found[name])]
            assert not different and found.keys() == saved.keys(), (write, layout, different[:3])


LORA = {"rank": 3, "alpha": 6.0}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_adapters_are_those_of_experts_one_by_one(
    layout: tuple[int, ...], ranks: Ranks, tmp_path: Path
) -> None:
    """Gradients, also of experts that no token chose; log-probs; what an engine gets, and both exports."""
    folder = mixture(tmp_path / "model", vocab=VOCAB)
    adapters = draw_adapters(folder, LORA)
    options: dict[str, Any] = {"optimizer": {"lora": LORA}, "budget": 48}
    arguments: dict[str, Any] = {
        "folder": folder,
        "which": "actor",
        "adapters": adapters,
        "batch": make_batch(),
    }
    one = ranks(1, 1, 1).run(jobs.gradients, **arguments, options=options)[0]
    assert any(".experts." in name and gradient.any() for name, gradient in one["gradients"].items())
    for recompute in ("none", "full"):
        chosen = {**options, "model": {**GROUPED, "recompute": recompute}}
        found = ranks(*layout).run(jobs.gradients, **arguments, options=chosen)[0]
        assert found["gradients"].keys() == one["gradients"].keys()
        assert relative_difference(found["gradients"], one["gradients"]) <= 1e-5, recompute
        assert found["norm"] == pytest.approx(one["norm"], rel=1e-5), recompute
    prompts, responses = sequences(VOCAB)
    both = []
    for name, model in (("single", {"layers": "te"}), ("grouped", GROUPED)):
        (out := tmp_path / name).mkdir()
        texts = {"prompts": prompts, "responses": responses, "out": out, "model": model}
        found = ranks(*layout).run(jobs.with_adapters, folder=folder, lora=LORA, given=adapters, **texts)
        files = [load_file(out / kind) for kind in ("hf/model.safetensors", "lora/adapter_model.safetensors")]
        both.append((found, files))
    (single, files), (grouped, others) = both
    for theirs, ours in zip(single, grouped, strict=True):
        assert torch.equal(ours["first"], ours["alone"]) and torch.equal(ours["off"], ours["alone"])
        assert (
            (ours["given"] - theirs["given"]).abs().max() <= 1e-5 < (ours["given"] - ours["off"]).abs().max()
        )
        for kind in ("engine", "grown"):
            assert all(torch.equal(ours[kind][name], tensor) for name, tensor in theirs[kind].items()), kind
        assert ours["kept"] == theirs["kept"]
    for theirs, ours in zip(files, others, strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


def test_checkpoints_of_adapters_are_those_of_experts_one_by_one(ranks: Ranks, tmp_path: Path) -> None:
    """They begin alike; each reads what the other has written, at another layout, to the bit, and goes on."""
    folder = mixture(tmp_path / "model", vocab=VOCAB)
    found = {}
    for name, written in (("grouped", GROUPED), ("single", {})):
        (checkpoint := tmp_path / name).mkdir()
        arguments: dict[str, Any] = {"folder": folder, "checkpoint": checkpoint, "which": "actor"}
        arguments |= {"optimizer": {"lora": LORA}, "overlap": False}
        first = ranks(2, 1, 1, 2).run(jobs.partly_frozen, read=False, layers=written, **arguments)
        found[name] = original, saved, last = first[0]["weights"]
        for model, layout in ((written, (2, 1, 1, 2)), ({} if written else GROUPED, (1, 2, 2, 2))):
            again = ranks(*layout).run(jobs.partly_frozen, read=True, layers=model, **arguments)
            begin, between, after = again[0]["weights"]
            assert begin.keys() == original.keys()
            for key, tensor in saved.items():
                assert torch.equal(begin[key], original[key]) and torch.equal(between[key], tensor), key
                exact = model is written
                torch.testing.assert_close(after[key], last[key], rtol=0, atol=0 if exact else 1e-4, msg=key)
    assert all(torch.equal(found["single"][0][key], tensor) for key, tensor in found["grouped"][0].items())
