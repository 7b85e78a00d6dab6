"""Predicted activations of portable layers, compared with the peak of live memory in a real update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.plan.jobs import LINEAR, measure
from tests.ranks import RankPool

TOLERANCE = 0.15
CASES: list[Any] = [
    {},
    {"recompute": "full"},
    pytest.param({"recompute": "selective"}, marks=pytest.mark.slow),
    pytest.param({"recompute": "selective", "recompute_modules": ["mlp"]}, marks=pytest.mark.slow),
    {"recompute": "selective", "recompute_modules": ["mlp", "attention"], "family": "glm4"},
    {"recompute": "full", "recompute_layers": 1},
    {"recompute": "full", "recompute_layers": 3, "critic": True},
    pytest.param({"dtype": "bf16"}, marks=pytest.mark.slow),
    pytest.param({"dtype": "bf16", "recompute": "full"}, marks=pytest.mark.slow),
    {"critic": True},
    pytest.param({"critic": True, "recompute": "full"}, marks=pytest.mark.slow),
    {"family": "qwen3"},
    pytest.param({"family": "glm4"}, marks=pytest.mark.slow),
    pytest.param({"family": "glm4", "recompute": "full", "dtype": "bf16"}, marks=pytest.mark.slow),
    pytest.param(LINEAR, marks=pytest.mark.slow),
    {**LINEAR, "recompute": "full"},
    pytest.param({**LINEAR, "dtype": "bf16"}, marks=pytest.mark.slow),
    {**LINEAR, "family": "qwen3_5_moe_text", "num_experts": 4, "num_experts_per_tok": 2}
    | {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 512},
    pytest.param(  # the head dominates
        {"num_hidden_layers": 1, "vocab_size": 4096}, marks=pytest.mark.slow
    ),
    {"num_hidden_layers": 1, "vocab_size": 4096, "optimizer": {"lora": {"rank": 1}}},
    {"num_hidden_layers": 1, "chunk": 2048},
    pytest.param({"intermediate_size": 2048, "num_key_value_heads": 8}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: " ".join(f"{k}={v}" for k, v in case.items()) or "plain"
)
def test_prediction_on_one_rank(ranks: Callable[..., RankPool], case: dict[str, Any]) -> None:
    check(ranks(1, 1, 1), case)


@pytest.mark.parametrize(
    "case",
    [
        {},
        pytest.param({"recompute": "full", "dtype": "bf16"}, marks=pytest.mark.slow),
        pytest.param({"sequence_parallel": False}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_prediction_under_tensor_parallelism(ranks: Callable[..., RankPool], case: dict[str, Any]) -> None:
    check(ranks(2, 1, 1), case)


@pytest.mark.parametrize(
    "case",
    [
        {},
        pytest.param({"recompute": "full"}, marks=pytest.mark.slow),
        pytest.param({"recompute": "full", "recompute_layers": 1}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_prediction_under_pipeline_parallelism(ranks: Callable[..., RankPool], case: dict[str, Any]) -> None:
    """The first stage has two micro-batches in flight at its first backward pass."""
    check(ranks(1, 2, 1), {**case, "micro_batches": 3})


@pytest.mark.parametrize(
    "case",
    [{}, {"recompute": "full"}],
    ids=str,
)
@pytest.mark.slow
def test_prediction_with_virtual_stages(ranks: Callable[..., RankPool], case: dict[str, Any]) -> None:
    """The first of two stages has 5 chunks of half a stage in flight at its first backward pass.

    That is 1 + (pp - 1) / (pp * vpp) = 1.25 times the 2 micro-batches without virtual stages."""
    check(ranks(1, 2, 1, 1, 1, 2), {**case, "micro_batches": 4})


@pytest.mark.parametrize(
    "case",
    [
        {},
        pytest.param({"critic": True, "recompute": "full"}, marks=pytest.mark.slow),
        pytest.param({"recompute": "selective"}, marks=pytest.mark.slow),
        pytest.param({"family": "qwen3", "num_key_value_heads": 8}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_context_parallelism_divides_them(ranks: Callable[..., RankPool], case: dict[str, Any]) -> None:
    """A rank keeps its part of each sequence, and none of the gathered keys and values."""
    [(alone, _)] = ranks(1, 1, 1).run(measure, **case)
    for measured, _ in check(ranks(1, 1, 1, 1, 2), case):
        assert measured <= 0.55 * alone, f"{measured / alone:.3f} of one rank's"


@pytest.mark.slow
def test_prediction_over_four_context_parallel_ranks(ranks: Callable[..., RankPool]) -> None:
    check(ranks(1, 1, 1, 1, 4), {})


def check(pool: RankPool, case: dict[str, Any]) -> list[Any]:
    """Compare measured and predicted bytes of every rank, and return them."""
    found = pool.run(measure, **case)
    for measured, predicted in found:
        assert abs(predicted / measured - 1) < TOLERANCE, (
            f"predicted {predicted:,.0f}, measured {measured:,.0f}: {predicted / measured:.3f}"
        )
    return found


LATENT = {
    "family": "deepseek_v3",
    "num_hidden_layers": 4,
    "first_k_dense_replace": 3,
    "num_key_value_heads": 8,
}
LATENT |= {"n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 256, "n_group": 1}
LATENT |= {
    "topk_group": 1,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "head_dim": 16,
    "v_head_dim": 32,
    "kv_lora_rank": 64,
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param({"q_lora_rank": None}, marks=pytest.mark.slow),
        {"q_lora_rank": 96, "recompute": "selective"},
        pytest.param({"recompute": "full"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_prediction_of_latent_attention(ranks: Callable[..., RankPool], case: dict[str, Any]) -> None:
    """The model has three dense layers and a small mixture of experts."""
    check(ranks(1, 1, 1), {"q_lora_rank": 96, **LATENT, **case})
