"""Muon of megatron-core, compared with a float64 loop, and with checkpoints and offload.

The loop is the update of arXiv 2502.16982, algorithm 1 and equation 4. Needs emerging-optimizers, which
requires Python 3.12."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config.errors import ConfigError
from megarl.config.schema import OptimizerConfig
from megarl.parallel.layout import Layout
from megarl.plan.disk import checkpoint_bytes
from megarl.plan.tensors import group_bytes
from megarl.weights.families import read_config
from megarl.weights.shards import check_muon
from tests.parallel import jobs
from tests.parallel.test_invariance import VOCAB
from tests.plan.jobs import group_sizes, plan_for
from tests.plan.test_memory import other_checkpoint
from tests.ranks import RankPool
from tests.tiny_models import make_tiny_model

pytest.importorskip("emerging_optimizers", reason="pip install 'megarl[muon]' (Python 3.12)")

Ranks = Callable[..., RankPool]
SLOW = pytest.mark.slow
ADAM = re.compile("embed_tokens|lm_head|norm|bias|score")


def newton_schulz(matrix: torch.Tensor) -> torch.Tensor:
    """Orthogonalise by Algorithm 2 of Jordan's post: five steps X <- a X + (b A + c A A) X with A = X X^T."""
    x = matrix / matrix.norm()
    if x.shape[0] > x.shape[1]:
        return newton_schulz(matrix.T).T
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


def matrices(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Convert to float64, and stack an MLP's gate on its up projection, as Megatron does."""
    found = {}
    for name, tensor in tensors.items():
        if "up_proj" not in name or "gate_up" in name:
            under = tensors.get(name.replace("gate_proj", "up_proj")) if "gate_proj" in name else None
            found[name] = (tensor if under is None else torch.cat([tensor, under])).double()
    return found


@pytest.mark.parametrize(
    ("family", "layout", "overlap"),
    [
        ("qwen3", (1, 1, 2), False),
        ("qwen3", (2, 1, 1), False),
        pytest.param("qwen2", (1, 1, 1), False, marks=SLOW),
        pytest.param("glm4", (2, 1, 2), True, marks=SLOW),
        pytest.param("llama", (1, 2, 2), True, marks=SLOW),
        pytest.param("qwen3", (1, 2, 1, 1, 1, 2), False, marks=SLOW),
        pytest.param("qwen3", (1, 1, 1, 1, 2), False, marks=SLOW),
        pytest.param("qwen3_moe", (2, 1, 2), False, marks=SLOW),
        pytest.param("qwen3_moe", (1, 1, 4, 2), True, marks=SLOW),
    ],
    ids=str,
)
def test_updates_are_the_papers(
    family: Any, layout: tuple[int, ...], overlap: bool, ranks: Ranks, tmp_path: Path
) -> None:
    folder = make_tiny_model(tmp_path / "model", family, vocab=VOCAB, layers=4, tied=True)
    lr, decay, beta = 0.02, 0.1, 0.9
    options = {"optimizer": "muon", "lr": lr, "weight_decay": decay, "muon": {"momentum": beta}}
    found, *_ = ranks(*layout).run(
        jobs.updates_with_muon, folder=folder, optimizer=options, updates=3, overlap=overlap
    )
    weights, *later = [matrices(tensors) for tensors in found]
    momenta = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    squares = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    turned = 0
    for step, (gradients, after) in enumerate(zip(later[::2], later[1::2], strict=True), start=1):
        norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients.values()))
        for name, weight in weights.items():
            gradient = gradients[name] * min(1.0, 1.0 / (norm + 1e-6))
            if ADAM.search(name):
                momenta[name] = 0.9 * momenta[name] + 0.1 * gradient
                squares[name] = 0.999 * squares[name] + 0.001 * gradient.square()
                root = (squares[name] / (1 - 0.999**step)).sqrt() + 1e-8
                change = momenta[name] / (1 - 0.9**step) / root
                kept = decay if weight.ndim == 2 else 0.0
            else:
                momenta[name] = beta * momenta[name] + gradient
                scale = 0.2 * math.sqrt(max(weight.shape))
                change, kept = scale * newton_schulz(gradient + beta * momenta[name]), decay
                turned += 1
            weights[name] = weight - lr * (change + kept * weight)
            # An expert that no token chose would divide 0 by 0.
            if gradient.any():
                difference = (after[name] - weights[name]).norm() / (after[name] - weight).norm()
                assert difference <= 2e-4, (step, name, float(difference))
            weights[name] = after[name]
    assert turned >= 3 * 4 * 5


@pytest.mark.parametrize(
    ("family", "which", "dtype", "written", "read"),
    [
        ("qwen3", "actor", "fp32", (1, 1, 2), [(2, 1, 1)]),
        pytest.param("qwen2", "critic", "bf16", (2, 1, 2), [(1, 2, 1)], marks=SLOW),
        pytest.param("qwen3_moe", "actor", "bf16", (1, 2, 2, 2), [(1, 1, 1)], marks=SLOW),
    ],
    ids=str,
)
def test_a_checkpoint_continues_bit_for_bit(
    family: Any,
    which: str,
    dtype: str,
    written: tuple[int, ...],
    read: list[tuple[int, ...]],
    ranks: Ranks,
    tmp_path: Path,
) -> None:
    """The next update is bitwise equal on the same layout, and equal up to rounding on another one.

    Everything is offloaded after each update. With four ranks, communication overlaps with computation."""
    critic = which == "critic"
    kind: Any = "token" if critic else None
    folder = make_tiny_model(
        tmp_path / "model", family, vocab=VOCAB, layers=2, tied=not critic, classification=kind
    )
    (checkpoint := tmp_path / "checkpoint").mkdir()

    def run(layout: tuple[int, ...], read: bool) -> list[dict[str, Any]]:
        overlap = math.prod(layout[:3]) == 4
        settings: dict[str, Any] = {"which": which, "optimizer": {"optimizer": "muon"}, "read": read}
        arguments: dict[str, Any] = {"folder": folder, "checkpoint": checkpoint, "dtype": dtype}
        return ranks(*layout).run(jobs.partly_frozen, overlap=overlap, **settings, **arguments)

    first = run(written, read=False)
    original, saved, last = first[0]["weights"]
    assert not any(torch.equal(original[name], last[name]) for name in original if "experts" not in name)
    for number, layout in enumerate([written, written, *read]):
        found = run(layout, read=True) if number else first
        assert not any(any(rank["left"]) for rank in found), "weights that stayed on the device"
        _, between, after = found[0]["weights"]
        for name, tensor in saved.items():
            assert torch.equal(between[name], tensor), name
            if layout == written:
                assert torch.equal(after[name], last[name]), name
            else:
                rough = 2e-2 if dtype == "bf16" else 1e-5
                torch.testing.assert_close(after[name], last[name], rtol=0, atol=rough)


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        ({"family": "qwen3", "dtype": "bf16", "tie_word_embeddings": True}, (1, 1, 2, 1)),
        pytest.param({"family": "qwen2", "dtype": "fp32", "critic": True}, (2, 1, 2, 1), marks=SLOW),
        pytest.param({"family": "glm4", "dtype": "bf16"}, (1, 2, 2, 1), marks=SLOW),
        pytest.param({"family": "qwen3_moe", "dtype": "bf16", "num_experts": 4}, (2, 1, 2, 2), marks=SLOW),
    ],
    ids=str,
)
def test_the_plan_counts_a_momentum_alone(
    case: dict[str, Any], layout: tuple[int, ...], ranks: Ranks, tmp_path: Path
) -> None:
    """The plan matches the fullest replica, with the padding of the others, and the checkpoint on disk."""
    case = {**case, "optimizer": {"optimizer": "muon"}}
    if case["family"] == "qwen3_moe":
        case |= {"num_experts_per_tok": 2, "moe_intermediate_size": 128}
    plan, model = plan_for(layout, **case), "critic" if case.get("critic") else "actor"
    found = ranks(*layout).run(group_sizes, out=tmp_path / "checkpoint", **case)
    written = sum(rank.pop("written") for rank in found)
    for part in found[0]:
        measured = max(rank[part] for rank in found)
        planned = max(group_bytes(plan, f"{model}.{part}", stage) for stage in plan.stages)
        assert abs(planned / measured - 1) <= 0.01, (part, planned, measured)
    assert abs((checkpoint_bytes(plan) - other_checkpoint(plan, model)) / written - 1) <= 0.03
    alone = plan_for(layout, **{**case, "optimizer": {}})
    assert group_bytes(plan, f"{model}.optimizer", 0) < 0.8 * group_bytes(alone, f"{model}.optimizer", 0)


def test_experts_that_tensor_parallel_ranks_share_need_a_second_replica(tmp_path: Path) -> None:
    """Each tensor-parallel rank would orthogonalise all of the experts, with only part of their gradients."""
    config = read_config(make_tiny_model(tmp_path / "model", "qwen3_moe", vocab=VOCAB, layers=2))
    muon = OptimizerConfig(optimizer="muon")
    with pytest.raises(ConfigError, match=r"^actor\.optimizer: muon of experts .*\(raise parallel\.dp"):
        check_muon(config, muon, Layout(tp=2), "actor")
    for fine in (Layout(tp=2, dp=2), Layout(tp=2, ep=2), Layout(pp=2)):
        check_muon(config, muon, fine, "actor")
    config = read_config(make_tiny_model(tmp_path / "latent", "deepseek_v3", vocab=VOCAB))
    with pytest.raises(ConfigError, match=r"^critic\.optimizer: muon is not supported for a deepseek_v3"):
        check_muon(config, muon, Layout(), "critic")
