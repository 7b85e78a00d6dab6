"""The layout does not change the gradients of any loss term.

The reference is one rank with one micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config import load_config
from megarl.config.methods import POLICY_LOSSES
from megarl.data.batch import TrainBatch
from tests.parallel import jobs
from tests.ranks import RankPool
from tests.tiny_models import make_tiny_model

VOCAB = 61
LAYOUTS = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 1), (1, 1, 2), (1, 2, 2)]
MIXED = [(1, 1, 1), (2, 2, 1), (1, 2, 2)]  # together they have tp, pp and dp above 1
FAR = {"clip_low": 0.004, "clip_high": 0.004}  # for probabilities of about 1 / VOCAB
# One test per loss term: the others are disabled by zero advantages or weights.
TERMS: dict[str, tuple[str, dict[str, Any]]] = {
    "policy, token level": ("actor", {"clip_high": 0.28}),
    "policy, sample level": ("actor", {"aggregation": "sample"}),
    "policy, overlong filter": ("actor", {"overlong": True}),
    "positive-example NLL": ("actor", {"nll_weight": 0.3}),
    "KL": ("actor", {"kl_weight": 0.2}),
    "DAPO": ("actor", {"clip_high": 0.28, "aggregation": "token", "overlong": True}),
    "VAPO": ("actor", {"clip_high": 0.28, "aggregation": "token", "nll_weight": 0.1}),
    "policy, importance weights of tokens": ("actor", {"mismatch": {"weight": "token", "cap": 1.1}}),
    "policy and KL, importance weights of responses": (
        "actor",
        {"kl_weight": 0.2, "mismatch": {"weight": "sequence", "cap": 3.0}},
    ),
    "policy, tokens masked": ("actor", {"mismatch": {"mask": "token", "mask_low": 0.8, "mask_high": 1.2}}),
    "policy, responses masked": (
        "actor",
        {
            "aggregation": "sample",
            "mismatch": {"weight": "token", "mask": "sequence", "mask_low": 0.95, "mask_high": 1.05},
        },
    ),
    "Dr. GRPO": ("actor", {"aggregation": "constant"}),
    "dual clip": ("actor", {"dual_clip": 1.1}),
    "GSPO": ("actor", {"surrogate": "gspo", "aggregation": "sample", "clip_low": 0.1, "clip_high": 0.1}),
    "CISPO": ("actor", {"surrogate": "cispo", "clip_low": 1.0, "clip_high": 0.2}),
    "SAO": ("actor", {"surrogate": "masked", "old_logprobs": "engine", "clip_low": 0.8, "clip_high": 3.0}),
    "DPPO": ("actor", {"surrogate": "dppo_tv", "old_logprobs": "engine", "aggregation": "constant", **FAR}),
    "DPPO by KL": ("actor", {"surrogate": "dppo_kl", "clip_low": 3e-4, "clip_high": 3e-4}),
    "DPPO by top k": (
        "actor",
        {"surrogate": "dppo_tv", "dppo": {"top_k": 5}, "clip_low": 0.5, "clip_high": 0.5},
    ),
    "DPPO by top k, KL": (
        "actor",
        {"surrogate": "dppo_kl", "dppo": {"top_k": 5}, "clip_low": 1.0, "clip_high": 1.0},
    ),
    "SAPO": ("actor", {"surrogate": "sapo", "aggregation": "sample"}),
    "Clip-Cov": ("actor", {"surrogate": "clip_cov", "covariance": {"share": 0.05, "low": 0.02}}),
    "KL-Cov": ("actor", {"surrogate": "kl_cov", "covariance": {"share": 0.1}}),
    "FIPO": (
        "actor",
        {"surrogate": "fipo", "dual_clip": 1.3, "fipo": {"half_life": 4.0, "low": 0.8, "limit": 1.3}},
    ),
    "entropy": ("actor", {"entropy_weight": 0.5}),
    "teacher's top k": ("actor", {"teacher": {"top_k": 4, "weight": 0.5}}),
    "teacher's top k, SDPO": (
        "actor",
        {"teacher": {"top_k": 4, "weight": 0.5, "alpha": 0.5, "ratio_cap": 1.2}},
    ),
    "teacher's sampled token": ("actor", {"teacher": {"ratio_cap": 1.2, "weight": 0.5}}),
    "value": ("critic", {}),
    "value, clipped": ("critic", {"value_clip": 0.1}),
    "AsyPPO, entropy": ("actor", {"entropy_weight": 0.5, "agreement": {"filter": 0.2}}),
    "AsyPPO, value": ("critic_2", {"critics": 2, "value_clip": 0.1}),
    "T-PPO": ("actor", {"clip_high": 0.28, "dual_clip": 10.0, "nll_weight": 0.1}),
    "T-PPO, value": ("critic", {}),
    "value of prompts": ("critic", {"advantage": "prompt_value"}),
    "value of prompts, overlong filter": ("critic", {"advantage": "prompt_value", "overlong": True}),
}
METHODS = Path(__file__).parents[2] / "configs/methods"
for name in sorted(set(POLICY_LOSSES) - {options.get("surrogate", "ppo") for _, options in TERMS.values()}):
    preset = load_config(METHODS / f"{name}.yaml").algorithm.model_dump(exclude_defaults=True)
    tests = import_module(f"tests.algorithms.test_{name}")
    options = preset | getattr(tests, "FOR_RANDOM_RATIOS", {})
    TERMS[name] = ("actor", {key: value for key, value in options.items() if key != "advantage"})
ACTS = {  # a statistic that shows that the surrogate treats some tokens differently from PPO
    **dict.fromkeys(("Clip-Cov", "KL-Cov"), "selected"),
    **dict.fromkeys(("DPPO", "DPPO by KL", "DPPO by top k", "DPPO by top k, KL"), "clip_fraction_high"),
    **{name: "selected" for name in TERMS if name in POLICY_LOSSES and POLICY_LOSSES[name].selector},
    **dict.fromkeys(("teacher's top k", "teacher's top k, SDPO", "teacher's sampled token"), "taught"),
}
FAST = {
    *("VAPO", "Clip-Cov", "DPPO by top k", "entropy", "value", "T-PPO"),
}
"""VAPO's terms, entropy, one that looks at all ranks, one that reads further tokens, and one of windows; the
others are a second each, of three layouts."""


def make_batch(only_first_correct: bool = False, turns: bool = False) -> TrainBatch:
    """Make ragged responses, few of them correct and some truncated.

    A rank or a micro-batch may thus have no correct response. With `turns`, responses contain observations
    between the sampled tokens, and some start with one."""
    g = torch.Generator().manual_seed(11)
    sizes = [(3, 20), (5, 1), (2, 33), (4, 8), (6, 2), (1, 14), (9, 5), (2, 27)]
    draw = [[torch.randint(0, VOCAB, (n,), generator=g).tolist() for n in pair] for pair in sizes]
    batch = TrainBatch.build([p for p, _ in draw], [r for _, r in draw])
    mask, total = batch.response_mask, batch.num_tokens
    if turns:
        mask &= torch.rand(total, generator=torch.Generator().manual_seed(13)) < 0.6
        mask[batch.cu_seqlens[1:] - 1] = True
    batch["correct"] = torch.tensor([True] + [not only_first_correct and i % 3 == 0 for i in range(1, 8)])
    batch["truncated"] = torch.tensor([i in (2, 7) for i in range(8)])
    for name, scale in (("old_logprobs", 0.3), ("ref_logprobs", 0.3)):
        batch[name] = torch.where(mask, -4.0 + scale * torch.randn(total, generator=g), 0.0)
    batch["engine_logprobs"] = torch.where(
        mask, batch["old_logprobs"] + 0.2 * torch.randn(total, generator=g), 0.0
    )
    for name in ("advantages", "returns", "values"):
        batch[name] = torch.where(mask, torch.randn(total, generator=g), 0.0)
    return batch


def make_batch_of(term: str, turns: bool = False) -> TrainBatch:
    """Make the batch with the columns that a term of `TERMS` reads."""
    batch = make_batch("NLL" in term, turns)
    if "T-PPO" in term:  # tokens of earlier steps; half of the incorrect responses are unfinished
        batch["prefix_tokens"] = torch.tensor([7, 0, 30, 3, 0, 13, 4, 0])
        batch["unfinished"] = ~batch["correct"] & (torch.arange(8) % 2 == 1)
    if "teacher" in term:  # two of the responses have no teacher
        g = torch.Generator().manual_seed(14)
        likeliest = torch.randn(batch.num_tokens, VOCAB, generator=g).log_softmax(-1).topk(4, -1)
        judged = batch.spread((torch.arange(8) % 4 != 1).float())[:, None] > 0
        batch["teacher_logprobs"] = likeliest.values.masked_fill(~judged, -torch.inf)
        batch["teacher_tokens"] = likeliest.indices.int()
        if "sampled" in term:
            batch["teacher_logprobs"] = batch["teacher_logprobs"][:, 1]
            del batch.columns["teacher_tokens"]
    if "top k" in term and "DPPO" in term:  # the sampled token is in the top k of some positions only
        g = torch.Generator().manual_seed(15)
        logits = 2 * torch.randn(batch.num_tokens, VOCAB, generator=g)
        logits[::2].scatter_(-1, batch.tokens[::2, None], 3.0)
        of_old = logits.log_softmax(-1)
        batch["old_logprobs"] = of_old.gather(-1, batch.tokens[:, None])[:, 0] * batch.response_mask
        likeliest = of_old.topk(5, -1)
        batch["old_top_logprobs"], batch["old_top_tokens"] = likeliest.values, likeliest.indices.int()
    if "AsyPPO" in term:
        g = torch.Generator().manual_seed(16)
        batch["entropy_weights"] = (torch.rand(batch.num_tokens, generator=g) < 0.7) / batch.num_tokens
        batch["critic_values"] = torch.randn(batch.num_tokens, 2, generator=g)
    batch["group_ids"], batch["response_index"] = torch.arange(8) // 2, torch.arange(8) % 2
    return batch


def relative_difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return the norm of the difference of all gradients, relative to the norm of the expected gradient."""
    norm = torch.cat([x.flatten() for x in expected.values()]).double().norm()
    difference = torch.cat([(found[name] - expected[name]).flatten() for name in expected]).double().norm()
    assert norm > 1e-6, "the gradient is nothing: the test would compare nothing"
    return float(difference / norm)


@pytest.mark.parametrize(
    "term", [pytest.param(term, marks=[] if term in FAST else [pytest.mark.slow]) for term in TERMS]
)
def test_gradients_do_not_depend_on_the_layout(
    term: str, ranks: Callable[[int, int, int], RankPool], tmp_path: Path
) -> None:
    which, options = TERMS[term]
    folder = make_tiny_model(
        tmp_path / "model",
        "qwen3",
        vocab=VOCAB,
        layers=2,
        tied=True,
        classification="token" if "critic" in which else None,
    )
    batch = make_batch_of(term)

    def gradients(layout: tuple[int, int, int], budget: int, shuffle: bool = False) -> dict[str, Any]:
        order = [5, 2, 7, 0, 1, 6, 3, 4] if shuffle else range(8)
        arguments = {
            "folder": folder,
            "batch": batch.select(order),
            "which": which,
            "options": {**options, "budget": budget},
        }
        return ranks(*layout).run(jobs.gradients, **arguments)[0]

    expected = gradients((1, 1, 1), budget=10_000)
    if term in ACTS:
        assert expected["sums"][f"policy/{ACTS[term]}"] > 0, "no token is treated otherwise than by PPO"
    for layout in LAYOUTS if term == "VAPO" else MIXED:
        found = gradients(layout, budget=48, shuffle=layout[0] == 1)
        assert relative_difference(found["gradients"], expected["gradients"]) <= 1e-5, layout
        exact = torch.cat([x.flatten() for x in found["gradients"].values()]).double().norm()
        assert found["norm"] == pytest.approx(float(exact), rel=1e-5), (
            layout,
            "the norm that clips the gradient",
        )
        for name, value in expected["sums"].items():
            assert found["sums"][name] == pytest.approx(value, rel=1e-5, abs=1e-6), (layout, name)


@pytest.mark.parametrize(
    ("which", "layers", "layout"),
    [
        ("actor", 1, (1, 1, 1)),
        pytest.param("actor", 2, (2, 2, 1), marks=pytest.mark.slow),
        pytest.param("critic", 1, (2, 2, 1), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_gradients_do_not_depend_on_how_many_layers_are_recomputed(
    which: str, layers: int, layout: tuple[int, int, int], ranks: Callable[..., RankPool], tmp_path: Path
) -> None:
    kind: Any = "token" if which == "critic" else None
    folder = make_tiny_model(
        tmp_path / "model", "qwen3", vocab=VOCAB, layers=4, tied=True, classification=kind
    )
    given = {"folder": folder, "batch": make_batch(), "which": which}
    [expected] = ranks(1, 1, 1).run(jobs.gradients, **given, options={"budget": 10_000})
    model = {"recompute": "full", "recompute_layers": layers}
    found = ranks(*layout).run(jobs.gradients, **given, options={"budget": 48, "model": model})
    assert relative_difference(found[0]["gradients"], expected["gradients"]) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("which", ["actor", "critic"])
def test_gradients_of_norms_behind_blocks_do_not_depend_on_the_layout(
    which: str, ranks: Callable[[int, int, int], RankPool], tmp_path: Path
) -> None:
    """GLM-4's norms after blocks are replicated over tensor-parallel ranks, each with part of the tokens.

    Runs with each kind of recomputation."""
    kind: Any = "token" if which == "critic" else None
    folder = make_tiny_model(tmp_path / "model", "glm4", vocab=VOCAB, layers=2, classification=kind)
    arguments = {"folder": folder, "which": which, "batch": make_batch()}
    options = TERMS["VAPO" if which == "actor" else "value"][1]
    expected = ranks(1, 1, 1).run(jobs.gradients, **arguments, options={**options, "budget": 10_000})[0]
    norms = [name for name in expected["gradients"] if "post_self_attn" in name or "post_mlp" in name]
    assert len(norms) == 4 and all(expected["gradients"][name].any() for name in norms)
    for number, layout in enumerate(LAYOUTS):
        model = {"recompute": ("none", "selective", "full")[number % 3]}
        found = ranks(*layout).run(
            jobs.gradients, **arguments, options={**options, "budget": 48, "model": model}
        )[0]
        assert relative_difference(found["gradients"], expected["gradients"]) <= 1e-5, layout


@pytest.mark.parametrize(
    "layout",
    [
        *((2, 2, 1), (1, 2, 2), (2, 1, 2, 2)),
        pytest.param((2, 2, 1, 1), marks=pytest.mark.slow),
        pytest.param((1, 2, 2, 2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_every_group_that_a_run_uses_was_used_by_all_its_members_at_start(
    layout: tuple[int, ...], ranks: Callable[..., RankPool], tmp_path: Path
) -> None:
    """NCCL creates a group's communicator at its first use, which all members must enter.

    Point-to-point messages are exempt. With a fourth number (ep), the model is a mixture of experts."""
    family: Any = "qwen3_moe" if layout[3:] else "qwen3"
    folder = make_tiny_model(tmp_path / "model", family, vocab=VOCAB, layers=2, tied=True)
    found = ranks(*layout).run(
        jobs.groups_in_use, folder=folder, batch=make_batch(), which="actor", options={"budget": 48}
    )
    for rank, (started, used) in enumerate(found):
        assert ([0, 1, 2, 3], "default_pg") in started
        for group in started:
            assert all(group in found[member][0] for member in group[0]) and rank in group[0]
        assert {tuple(map(str, group)) for group in used} <= {tuple(map(str, group)) for group in started}


SHARED: dict[str, tuple[str, dict[str, Any]]] = {
    "VAPO": ("actor", {"clip_high": 0.28, "nll_weight": 0.1, "entropy_weight": 0.1}),
    "GSPO": TERMS["GSPO"],
    "value": ("critic", {"value_clip": 0.1}),
}


@pytest.mark.parametrize(
    "turns", [pytest.param(False, marks=pytest.mark.slow), True], ids=["one turn", "turns"]
)
@pytest.mark.parametrize(
    "term", [pytest.param(t, marks=[] if t == "VAPO" else pytest.mark.slow) for t in SHARED]
)
def test_prompts_that_are_computed_once_change_no_gradient(
    term: str, turns: bool, ranks: Callable[[int, int, int], RankPool], tmp_path: Path
) -> None:
    """Sharing the computation of prompts changes no gradient.

    Cases: three groups, one of a single response, in any order; a token budget that splits a group; and
    sequence parallelism. With turns, responses have observations and some start with one."""
    which, options = SHARED[term]
    classification = "token" if which == "critic" else None
    folder = make_tiny_model(
        tmp_path / "model", "qwen3", vocab=VOCAB, layers=2, tied=True, classification=classification
    )
    batch = make_batch()
    g = torch.Generator().manual_seed(12)
    groups = [0, 0, 1, 0, 1, 2, 1, 1]
    prompts = [torch.randint(0, VOCAB, (n,), generator=g).tolist() for n in (17, 9, 4)]
    behind = batch.response_mask.clone()
    if turns:
        batch = make_batch(turns=True)
    responses = [
        t[m].tolist()
        for t, m in zip(
            batch.tokens.split(batch.lengths.tolist()), behind.split(batch.lengths.tolist()), strict=True
        )
    ]
    shared = TrainBatch.build([prompts[n] for n in groups], responses)
    shared["group_ids"] = torch.tensor(groups)
    in_shared, of_prompts = shared.response_mask.clone(), shared.prompt_lengths
    shared.response_mask[in_shared] = batch.response_mask[behind]
    assert turns == bool((shared.prompt_lengths > of_prompts).any())
    for name, column in batch.columns.items():
        if column.shape[0] == batch.num_sequences:
            shared[name] = column
        else:
            shared[name] = torch.zeros(shared.num_tokens, dtype=column.dtype)
            shared[name][in_shared] = column[behind]

    def gradients(layout: tuple[int, int, int], order: list[int], **more: Any) -> dict[str, Any]:
        prompts_of = of_prompts[order].tolist() if turns else None
        arguments = {"folder": folder, "batch": shared.select(order), "which": which, "prompts": prompts_of}
        return ranks(*layout).run(jobs.gradients, options={**options, **more}, **arguments)[0]

    expected = gradients((1, 1, 1), list(range(8)), budget=10_000)
    assert expected["computed"] == shared.num_tokens
    for layout in MIXED:
        for budget in (10_000, 50):
            found = gradients(layout, [5, 2, 7, 0, 1, 6, 3, 4], budget=budget, share_prompts=True)
            assert relative_difference(found["gradients"], expected["gradients"]) <= 1e-5, (layout, budget)
            if layout == (1, 1, 1) and budget == 10_000:
                assert found["computed"] == shared.num_tokens - 2 * 17 - 3 * 9
