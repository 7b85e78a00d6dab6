"""How a step's batch is divided into mini-batches of actor and critic, using the models' shapes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from safetensors.torch import load_file

from megarl.data.batch import RolloutBatch, TrainBatch
from megarl.parallel.runtime import Runtime
from megarl.plan.sizes import Shape
from megarl.training.batch import matrix_shape
from megarl.weights.known_models import KNOWN_MODELS
from tests.parallel.jobs import make_config
from tests.ranks import RankPool
from tests.tiny_models import make_tiny_model

RESPONSES = 16


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Make an actor, and a critic of another size and family.

    The actor's heads together are wider than its hidden states."""
    folder = tmp_path_factory.mktemp("models")
    actor = make_tiny_model(
        folder / "actor", "qwen3", vocab=61, layers=2, hidden=32, heads=4, kv_heads=2, head_dim=16
    )
    critic = make_tiny_model(
        folder / "critic",
        "llama",
        vocab=61,
        layers=4,
        hidden=64,
        heads=8,
        kv_heads=4,
        ffn=80,
        classification="token",
    )
    return actor, critic


def make_batch() -> TrainBatch:
    g = torch.Generator().manual_seed(5)
    lengths = torch.randint(1, 60, (RESPONSES,), generator=g).tolist()
    batch = TrainBatch.build([[3, 4]] * RESPONSES, [[5] * n for n in lengths])
    batch["correct"] = torch.rand(RESPONSES, generator=g) > 0.5
    batch["truncated"] = torch.rand(RESPONSES, generator=g) > 0.7
    batch["number"] = torch.arange(RESPONSES)
    return batch


def in_windows(batch: TrainBatch, none_ended_in: list[int] | None = None) -> TrainBatch:
    """Mark some responses as started in earlier steps and some incorrect ones as unfinished.

    All responses in `none_ended_in` are unfinished."""
    g = torch.Generator().manual_seed(6)
    batch["prefix_tokens"] = (torch.rand(RESPONSES, generator=g) * batch.response_lengths).long()
    batch["unfinished"] = ~batch["correct"] & (torch.rand(RESPONSES, generator=g) > 0.4)
    batch["unfinished"][none_ended_in or []] = True
    batch["correct"] &= ~batch["unfinished"]
    return batch


def divide(
    runtime: Runtime,
    folders: tuple[Path, Path],
    mini_batch: int,
    critic_mini_batch: int | None,
    batch: TrainBatch | None = None,
    critics: int = 1,
) -> dict[str, Any]:
    """Return the shapes of actor and critic, and this rank's responses in each mini-batch of each model."""
    from megarl.model.builder import build_actor, build_critic
    from megarl.model.hf_config import read_hf_config
    from megarl.training.batch import make_train_batch

    actor, critic = folders
    config = make_config(actor, mini_batch=mini_batch, overlong=batch is None)
    config = config.model_copy(
        update={
            "critic": config.critic.model_copy(update={"mini_batch": critic_mini_batch, "count": critics})
        }
    )
    models = [
        build_actor(config, read_hf_config(actor), runtime),
        build_critic(config, read_hf_config(critic), runtime),
    ]
    batch = make_batch() if batch is None else batch
    local = make_train_batch(RolloutBatch.from_train_batch(batch), config, mini_batch, 7, models, runtime)
    numbers = local.spread(local["number"])

    def members(mini_batches: Any) -> list[list[int]]:
        return [
            sorted({int(n) for micro in own for n in numbers[micro.token_indices]}) for own in mini_batches
        ]

    def by_number(name: str) -> dict[int, torch.Tensor]:
        of_sequences = local[name].split(local.lengths.tolist())
        return dict(zip(local["number"].tolist(), of_sequences, strict=True))

    return {
        "shapes": [matrix_shape(model) for model in models],
        "actor": members(local.mini_batches),
        "critic": members(local.critic_mini_batches[0]),
        "critics": [members(of_one) for of_one in local.critic_mini_batches],
        "weights": {name: by_number(f"{name}_loss_weights") for name in ("policy", "nll", "value")},
        "forward": sum(micro.token_indices.numel() for micro in local.micro_batches),
        "local": int(local.response_mask.sum()),
    }


def test_shapes_are_those_of_the_weights(
    folders: tuple[Path, Path], ranks: Callable[[int, int, int], RankPool]
) -> None:
    for layout in ((1, 1, 1), (2, 1, 1), (1, 2, 1)):
        found = ranks(*layout).run(divide, folders=folders, mini_batch=8, critic_mini_batch=None)[0]["shapes"]
        for (parameters, width), folder in zip(found, folders, strict=True):
            layers = {k: v for k, v in load_file(folder / "model.safetensors").items() if ".layers." in k}
            assert parameters == sum(tensor.numel() for tensor in layers.values() if tensor.ndim == 2)
            assert width == sum(
                tensor.shape[0] for name, tensor in layers.items() if name.endswith("q_proj.weight")
            )


def test_of_experts_only_the_chosen_ones_count() -> None:
    """The reference is a hand count of a layer of Qwen3-30B-A3B.

    It has hidden size 2,048, 32 query and 4 key/value heads of 128, and 8 of 128 experts of width 768."""
    sizes = {
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_query_groups": 4,
        "kv_channels": 128,
        "ffn_hidden_size": 768,
    }
    experts = {"num_moe_experts": 128, "moe_router_topk": 8, "moe_ffn_hidden_size": 768}
    config = TransformerConfig(num_layers=1, **sizes, **experts)
    attention = 2048 * 4096 + 2 * 2048 * 512 + 4096 * 2048
    assert matrix_shape(SimpleNamespace(config=config)) == (attention + 2048 * 128 + 8 * 3 * 2048 * 768, 4096)


def test_of_dense_layers_before_mixtures_each_counts_as_what_it_is() -> None:
    """The references are a hand count of GLM-4.5-Air with two layers and the planner's count."""
    sizes = {"hidden_size": 4096, "num_attention_heads": 96, "num_query_groups": 8, "kv_channels": 128}
    experts = {"num_moe_experts": 128, "moe_router_topk": 8, "moe_ffn_hidden_size": 1408}
    more = {"moe_shared_expert_intermediate_size": 1408, "moe_layer_freq": [0, 1], "ffn_hidden_size": 10944}
    config = TransformerConfig(num_layers=2, **sizes, **experts, **more, add_bias_linear=False)
    attention = 2 * 4096 * 12288 + 2 * 4096 * 1024
    layers = 2 * attention + 3 * 4096 * 10944 + 4096 * 128 + 9 * 3 * 4096 * 1408
    assert matrix_shape(SimpleNamespace(config=config)) == (layers, 2 * 12288)
    planned = Shape({**KNOWN_MODELS["GLM-4.5-Air"], "num_hidden_layers": 2}, "bf16")
    assert planned.active == layers + 4096 * 151552


def test_of_latent_attention_each_matrix_counts() -> None:
    """The references are hand counts of two layers of DeepSeek-V3 and Moonlight.

    Moonlight has no latents of queries."""
    for name, hidden, heads, rank in (
        ("DeepSeek-V3", 7168, 128, 1536),
        ("Moonlight-16B-A3B", 2048, 16, None),
    ):
        sizes = {"hidden_size": hidden, "num_attention_heads": heads, "kv_channels": 192, "q_lora_rank": rank}
        known = {**KNOWN_MODELS[name], "num_hidden_layers": 2, "first_k_dense_replace": 1}
        experts, active, ffn = (
            known[key] for key in ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
        )
        shared = ffn * known["n_shared_experts"]
        more = {"num_moe_experts": experts, "moe_router_topk": active, "moe_ffn_hidden_size": ffn}
        more |= {"moe_shared_expert_intermediate_size": shared, "moe_layer_freq": [0, 1]}
        more |= {"ffn_hidden_size": known["intermediate_size"], "add_bias_linear": False}
        config = MLATransformerConfig(num_layers=2, rope_type="rope", **sizes, **more)
        queries = rank * (hidden + heads * 192) if rank else hidden * heads * 192
        attention = queries + hidden * 576 + 512 * heads * 256 + heads * 128 * hidden
        dense = 3 * hidden * known["intermediate_size"]
        layers = 2 * attention + dense + hidden * experts + 3 * hidden * (active * ffn + shared)
        assert matrix_shape(SimpleNamespace(config=config)) == (layers, 2 * heads * 160)
        assert Shape(known, "bf16").active == layers + hidden * known["vocab_size"]


@pytest.mark.parametrize("critic_mini_batch", [None, 2, 4, 16])
def test_mini_batches_of_the_critic(
    critic_mini_batch: int | None, folders: tuple[Path, Path], ranks: Callable[[int, int, int], RankPool]
) -> None:
    """Mini-batches partition the responses over all replicas, each with its size and denominators.

    One and two replicas give the same mini-batches."""
    batch = make_batch()
    lengths, kept = batch.response_lengths.tolist(), (~batch["truncated"]).tolist()
    sizes = {"actor": 4, "critic": critic_mini_batch or 4}
    whole: dict[str, Any] = {}
    for layout in ((1, 1, 1), (1, 1, 2)):
        found = ranks(*layout).run(divide, folders=folders, mini_batch=4, critic_mini_batch=critic_mini_batch)
        assert all(rank["forward"] == rank["local"] for rank in found)
        for which, size in sizes.items():
            mini_batches = [
                sorted(n for rank in found for n in rank[which][k]) for k in range(RESPONSES // size)
            ]
            assert sorted(n for own in mini_batches for n in own) == list(range(RESPONSES))
            assert {len(own) for own in mini_batches} == {size}
            assert whole.setdefault(which, mini_batches) == mini_batches
            kind = "value" if which == "critic" else "policy"
            weights = {n: own for rank in found for n, own in rank["weights"][kind].items()}
            for own in mini_batches:
                tokens = sum(lengths[n] for n in own if kept[n])
                for n in own:
                    mine = weights[n][2:].double().tolist()
                    assert mine == pytest.approx([1 / tokens if kept[n] else 0.0] * lengths[n], rel=1e-6)


@pytest.mark.parametrize("critic_mini_batch", [None, 8])
def test_two_critics_learn_from_responses_of_their_own(
    critic_mini_batch: int | None, folders: tuple[Path, Path], ranks: Callable[[int, int, int], RankPool]
) -> None:
    """Each critic learns from every other response of a group.

    Its mini-batches are those of a single critic without the other critic's responses, with separate
    denominators. One and two replicas give the same mini-batches."""
    batch = make_batch()
    batch["response_index"] = torch.arange(RESPONSES) % 4
    batch["truncated"] = torch.zeros(RESPONSES, dtype=torch.bool)
    lengths, size = batch.response_lengths.tolist(), critic_mini_batch or 4
    sizes = {"mini_batch": 4, "critic_mini_batch": critic_mini_batch, "batch": batch}
    of_one = ranks(1, 1, 1).run(divide, folders=folders, **sizes)[0]["critic"]
    assert {len(members) for members in of_one} == {size}
    for layout in ((1, 1, 1), (1, 1, 2)):
        found = ranks(*layout).run(divide, folders=folders, **sizes, critics=2)
        weights = {n: own for rank in found for n, own in rank["weights"]["value"].items()}
        for critic in range(2):
            expected = [[n for n in members if n % 2 == critic] for members in of_one]
            expected = [members for members in expected if members]
            mini_batches = [
                sorted(n for rank in found for n in rank["critics"][critic][k]) for k in range(len(expected))
            ]
            assert mini_batches == expected
            for members in expected:
                tokens = sum(lengths[n] for n in members)
                for n in members:
                    assert weights[n][2:].tolist() == pytest.approx([1 / tokens] * lengths[n], rel=1e-6)


@pytest.mark.parametrize("layout", [(1, 1, 1), (1, 1, 2)], ids=str)
def test_mini_batches_of_windows(
    layout: tuple[int, int, int], folders: tuple[Path, Path], ranks: Callable[[int, int, int], RankPool]
) -> None:
    """The policy learns from this step's tokens of all responses, critic and NLL from finished responses.

    Critic and NLL use all tokens of these; NLL only those of correct responses. A mini-batch without
    finished responses is no mini-batch of the critic."""
    plain = ranks(1, 1, 1).run(divide, folders=folders, mini_batch=4, critic_mini_batch=None)[0]["actor"]
    batch = in_windows(make_batch(), none_ended_in=plain[2])
    found = ranks(*layout).run(divide, folders=folders, mini_batch=4, critic_mini_batch=None, batch=batch)
    lengths, begun = batch.response_lengths.tolist(), batch["prefix_tokens"].tolist()
    ended, right = (~batch["unfinished"]).tolist(), batch["correct"].tolist()
    assert any(begun) and 0 < sum(right) < sum(ended) < RESPONSES - 4
    actors = [sorted(n for rank in found for n in rank["actor"][k]) for k in range(4)]
    assert actors == plain
    critics = [sorted(n for rank in found for n in rank["critic"][k]) for k in range(len(found[0]["critic"]))]
    assert critics == [[n for n in own if ended[n]] for k, own in enumerate(plain) if k != 2]
    weights = {
        kind: {n: own[2:].tolist() for rank in found for n, own in rank["weights"][kind].items()}
        for kind in ("policy", "nll", "value")
    }
    for own in plain:
        drawn = sum(lengths[n] - begun[n] for n in own)
        of_ended, of_right = (sum(lengths[n] for n in own if flags[n]) for flags in (ended, right))
        for n in own:
            policy = [0.0] * begun[n] + [1 / drawn] * (lengths[n] - begun[n])
            assert weights["policy"][n] == pytest.approx(policy, rel=1e-6)
            value = 1 / of_ended if ended[n] else 0.0
            assert weights["value"][n] == pytest.approx([value] * lengths[n], rel=1e-6)
            nll = 1 / of_right if right[n] else 0.0
            assert weights["nll"][n] == pytest.approx([nll] * lengths[n], rel=1e-6)


def some_of_a_share(
    runtime: Runtime, folder: Path, chosen: list[int], shared: bool
) -> tuple[list[int], torch.Tensor, float]:
    """Compute log-probs of the chosen responses only.

    Returns each micro-batch's number of tokens, the log-probs, and their largest difference from those of a
    full pass."""
    from megarl.model.builder import build_actor
    from megarl.model.hf_config import read_hf_config
    from megarl.training.batch import make_train_batch, pack_chosen
    from megarl.training.model import InferenceModel
    from tests.parallel.jobs import load

    config = make_config(folder, mini_batch=4, share_prompts=shared)
    model = build_actor(config, read_hf_config(folder), runtime)
    load(model, folder, runtime)
    batch = make_batch()
    batch["group_ids"] = torch.arange(RESPONSES) // 4
    local = make_train_batch(RolloutBatch.from_train_batch(batch), config, 4, 7, [model], runtime)
    some = torch.isin(torch.arange(RESPONSES), torch.tensor(chosen))
    packs = pack_chosen(some, batch, local, config, model, runtime)
    actor = InferenceModel("actor", model, runtime)
    found, every = (
        actor.logprob_columns(local, batches)["logprobs"] for batches in (packs, local.micro_batches)
    )
    expected = torch.where(local.spread(some[local.rows].float()) > 0, every, 0.0)
    return [pack.tokens.shape[1] for pack in packs], found, float((found - expected).abs().max())


@pytest.mark.parametrize(
    "shared", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["alone", "shared prompts"]
)
def test_passes_over_some_of_the_responses(
    shared: bool, ranks: Callable[..., RankPool], tmp_path: Path
) -> None:
    """Teachers score some responses; with expert parallelism all replicas make the same number of passes."""
    folder = make_tiny_model(tmp_path, "qwen3_moe", vocab=61, layers=2, experts=4, active=2)
    for layout in ((1, 1, 1, 1), (1, 1, 2, 2)):
        for chosen in ([], [6], [0, 1, 2, 3, 4, 9, 12]):
            answers = ranks(*layout).run(some_of_a_share, folder=folder, chosen=chosen, shared=shared)
            assert len({len(tokens) for tokens, _, _ in answers}) == 1
            assert max(difference for *_, difference in answers) <= 1e-5
            judged = sum(int(found.count_nonzero()) for _, found, _ in answers)
            assert judged == int(make_batch().response_lengths[chosen].sum())
    longest = int(make_batch().lengths.max())
    assert max(tokens[0] for tokens, _, _ in answers) <= max(64, longest)
