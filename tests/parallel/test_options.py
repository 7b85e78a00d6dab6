"""Megatron's options (listed in docs/gpu.md) reach Megatron and have only the intended effect."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from megarl.config.errors import ConfigError
from megarl.config.schema import ModelConfig, ParallelConfig
from megarl.data.batch import RolloutBatch, TrainBatch
from megarl.parallel.runtime import Runtime
from megarl.weights.shards import check_recomputed
from tests.parallel import jobs
from tests.parallel.test_experts import mixture
from tests.parallel.test_invariance import VOCAB, make_batch, relative_difference
from tests.ranks import RankPool
from tests.tiny_models import make_tiny_model

Ranks = Callable[..., RankPool]
GIVEN = (
    *("moe_router_dtype", "moe_permute_fusion", "recompute_granularity", "recompute_modules"),
    *("deallocate_pipeline_outputs", "batch_p2p_sync"),
    *("grad_reduce_in_fp32", "reduce_scatter_with_fp32_accumulation"),
)
VAPO = {"clip_high": 0.28, "aggregation": "token", "nll_weight": 0.1, "budget": 34}


@contextmanager
def apart() -> Iterator[None]:
    """Restore Megatron's global function that reduces gradients.

    A run has a single `parallel.grad_dtype`; here several follow in one process."""
    from megatron.core.distributed import param_and_grad_buffer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            param_and_grad_buffer, "dist_reduce_scatter_func", param_and_grad_buffer.dist_reduce_scatter_func
        )
        yield


def learner_of(runtime: Runtime, folder: Path, model: dict[str, Any], **parallel: Any) -> Any:
    """Build an actor with a folder's weights, and its optimizer."""
    from megarl.model.builder import build_actor
    from megarl.model.hf_config import read_hf_config
    from megarl.training.model import TrainableModel

    config = jobs.make_config(folder, mini_batch=8, budget=16, model=model)
    actor = build_actor(config, read_hf_config(folder), runtime)
    jobs.load(actor, folder, runtime)
    settings = config.critic.model_copy(update={"lr": 1e-3})
    return config, TrainableModel("actor", actor, settings, 4, runtime, ParallelConfig(**parallel))


def given(runtime: Runtime, folder: Path, model: dict[str, Any], **parallel: Any) -> dict[str, Any]:
    """Return the options that Megatron receives, and the dtypes of the gradient buffers."""
    with apart():
        _, learner = learner_of(runtime, folder, model, **parallel)
    found = vars(learner.chunks[0].config) | vars(learner.chunks[0].ddp_config)
    buffers = {buffer.grad_dtype for buffer in learner.buffers}
    return {**{key: found[key] for key in GIVEN}, "buffers": buffers}


def test_megatron_is_given_what_is_asked_for(ranks: Ranks, tmp_path: Path) -> None:
    folder = mixture(tmp_path / "mixture", vocab=VOCAB)
    defaults = ranks(1, 1, 1).run(given, folder=folder, model={"dtype": "bf16"})[0]
    assert defaults["moe_router_dtype"] == "fp32" and not defaults["moe_permute_fusion"]
    assert defaults["grad_reduce_in_fp32"] and not defaults["reduce_scatter_with_fp32_accumulation"]
    assert defaults["buffers"] == {torch.float32}
    others = {"dtype": "bf16", "router_dtype": "model"}
    found = ranks(1, 1, 2).run(given, folder=folder, model=others, grad_dtype="bf16")[0]
    assert found["moe_router_dtype"] is None
    assert not found["grad_reduce_in_fp32"] and found["reduce_scatter_with_fp32_accumulation"]
    assert found["buffers"] == {torch.bfloat16}
    folder = make_tiny_model(tmp_path / "dense", "qwen2", vocab=VOCAB, layers=4)
    for names, theirs in ((["mlp"], ["mlp"]), (["attention", "mlp"], ["core_attn", "mlp"])):
        model = {"recompute": "selective", "recompute_modules": names}
        found = ranks(1, 2, 1).run(given, folder=folder, model=model)[0]
        assert (found["recompute_granularity"], found["recompute_modules"]) == ("selective", theirs)
    # Sent outputs are freed only where no message can still be in flight.
    for layout, freed in (((1, 1, 1), False), ((1, 2, 1), True), ((1, 2, 1, 1, 1, 2), False)):
        found = ranks(*layout).run(given, folder=folder, model={})[0]
        assert (found["deallocate_pipeline_outputs"], found["batch_p2p_sync"]) == (freed, False), layout


def routed(runtime: Runtime, folder: Path, router_dtype: str, hidden: torch.Tensor) -> list[Any]:
    """Route bf16 hidden states in each layer; return weights [tokens, experts] and the selection mask."""
    from megarl.model.builder import build_actor
    from megarl.model.hf_config import read_hf_config
    from megarl.model.routing import start_counting

    model = {"dtype": "bf16", "router_dtype": router_dtype}
    actor = build_actor(jobs.make_config(folder, model=model), read_hf_config(folder), runtime)
    jobs.load(actor, folder, runtime)
    start_counting(actor.routings, grad=True)
    found = []
    for layer in actor.chunks[0].decoder.layers:
        layer.mlp.router.router_replay.packed = actor.pack(torch.tensor([0, len(hidden)]))
        with torch.no_grad():
            weights, chosen = layer.mlp.router(hidden[:, None].bfloat16())
        found.append((weights, chosen))
    return found


def test_a_router_in_fp32_chooses_as_hugging_faces_in_fp32(ranks: Ranks, tmp_path: Path) -> None:
    """With the same bf16 weights and hidden states, an fp32 router selects the same experts.

    In bf16 rounded logits resolve near ties differently, and all routing weights are rounded."""
    folder = mixture(tmp_path / "model", vocab=VOCAB, experts=32, active=4)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).float()
    hidden = torch.randn(
        2000, model.config.hidden_size, generator=torch.Generator().manual_seed(1)
    ).bfloat16()
    found = {
        name: ranks(1, 1, 1).run(routed, folder=folder, router_dtype=name, hidden=hidden)[0]
        for name in ("fp32", "model")
    }
    for number, layer in enumerate(model.model.layers):
        with torch.no_grad():
            _, scores, own = layer.mlp.gate(hidden.float())
        expected = torch.zeros(2000, 32).scatter(1, own, scores)
        weights, chosen = found["fp32"][number]
        assert weights.dtype == torch.float32
        assert torch.equal(chosen, expected > 0)
        assert (weights - expected).abs().max() < 1e-6
        weights, chosen = found["model"][number]
        assert weights.dtype == torch.bfloat16
        differ = (chosen != (expected > 0)).any(1)
        assert 0 < differ.float().mean() < 0.2
        assert 1e-4 < (weights.float() - expected)[~differ].abs().max() < 1e-2


@pytest.mark.parametrize("family", ["qwen2", "glm4"])
def test_recomputed_mlps_change_no_gradient(family: str, ranks: Ranks, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", family, vocab=VOCAB)
    arguments: dict[str, Any] = {"folder": folder, "batch": make_batch(), "which": "actor"}
    plain = ranks(1, 2, 1).run(jobs.gradients, **arguments, options=VAPO)[0]["gradients"]
    for modules in (["mlp"], ["attention", "mlp"]):
        model = {"recompute": "selective", "recompute_modules": modules}
        found = ranks(1, 2, 1).run(jobs.gradients, **arguments, options={**VAPO, "model": model})[0]
        assert relative_difference(found["gradients"], plain) <= 1e-6, modules


def test_experts_are_not_recomputed_alone(tmp_path: Path) -> None:
    hf = AutoModelForCausalLM.from_pretrained(mixture(tmp_path / "model", vocab=VOCAB)).config.to_dict()
    model = ModelConfig(path=tmp_path, recompute="selective", recompute_modules=("attention", "mlp"))
    with pytest.raises(ConfigError, match=r"^model\.recompute_modules: mlp is for dense models"):
        check_recomputed(hf, model)
    check_recomputed(hf, model.model_copy(update={"recompute": "full"}))


def left_behind(runtime: Runtime, folder: Path) -> list[int]:
    """Return the sizes of a stage's outputs for each micro-batch after all backward passes."""
    from megarl.training.micro_batch import make_micro_batches

    _, learner = learner_of(runtime, folder, {})
    given: list[torch.Tensor] = []
    learner.model.chunks[0].register_forward_hook(lambda _module, _inputs, output: given.append(output))
    batch = TrainBatch.build([[3, 9, 4]] * 4, [[7, 8, 1]] * 4)
    batches = make_micro_batches(batch, range(4), 6, learner.model)
    learner.compute_gradients(batches, lambda output, _: (output[0].sum(), {}))
    return [output.numel() for output in given if isinstance(output, torch.Tensor)]


def test_what_a_stage_has_sent_is_freed(ranks: Ranks, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", "qwen2", vocab=VOCAB)
    first, last = ranks(1, 2, 1).run(left_behind, folder=folder)
    assert first == [1] * 4 and last == []  # the last stage returns pairs


def summed(runtime: Runtime, folder: Path, overlap: bool, grad_dtype: str) -> dict[str, Any]:
    """Return this rank's share of a mini-batch's gradients, and the norms of two updates.

    Everything is offloaded and onloaded after each update. Also returns the sum of the weights at the end."""
    from megarl.parallel.offload_group import HostPool
    from megarl.training.batch import make_train_batch
    from megarl.training.objectives import supervised_loss
    from megarl.training.tensor_groups import tensor_groups

    with apart():
        keys: dict[str, Any] = {"overlap_grad_reduce": overlap, "overlap_param_gather": overlap}
        keys |= {"grad_dtype": grad_dtype, "overlap_bucket": 1000 if overlap else None}
        config, learner = learner_of(runtime, folder, {"dtype": "bf16"}, **keys)
        batch = TrainBatch.build(
            [[3, 9, 4, 5 + i % 7] for i in range(8)], [[7 + i, 8, 1][: 1 + i % 3] for i in range(8)]
        )
        batch["correct"], batch["truncated"] = (torch.full((8,), value) for value in (True, False))
        local = make_train_batch(RolloutBatch.from_train_batch(batch), config, 8, 3, [learner.model], runtime)
        loss, shares, norms = supervised_loss(local), [], []
        learner.compute_gradients(local.mini_batches[0], loss)
        for buffer in learner.buffers:
            for bucket in buffer.buckets:
                size = bucket.grad_data.numel() // buffer.data_parallel_world_size
                start = torch.distributed.get_rank(buffer.data_parallel_group) * size
                shares.append(bucket.grad_data[start : start + size].float().clone())
        for _ in range(2):
            learner.begin_step()
            norms.append(learner.update(local.mini_batches[0], loss).grad_norm)
            groups = tensor_groups(learner, HostPool(runtime.device, 4096)).values()
            for group in groups:
                group.offload()
            for group in groups:
                group.onload()
        weights = float(sum(p.detach().double().sum() for p in learner.model.parameters()))
        return {"shares": shares, "norms": norms, "weights": weights}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("layout", [(1, 1, 2), pytest.param((1, 2, 2), marks=pytest.mark.slow)], ids=str)
def test_gradients_in_bf16_are_those_in_fp32_rounded(
    layout: tuple[int, ...], overlap: bool, ranks: Ranks, tmp_path: Path
) -> None:
    folder = make_tiny_model(tmp_path / "model", "qwen3", vocab=VOCAB)
    pool = ranks(*layout)
    exact, halved = (
        pool.run(summed, folder=folder, overlap=overlap, grad_dtype=kind) for kind in ("fp32", "bf16")
    )
    for ours, theirs in zip(halved, exact, strict=True):
        found, wanted = torch.cat(ours["shares"]), torch.cat(theirs["shares"])
        assert torch.equal(found, found.bfloat16().float()) and not torch.equal(wanted, found)
        assert float((found - wanted).norm() / wanted.norm()) < 0.01
        assert ours["norms"] == pytest.approx(theirs["norms"], rel=0.02)
    by_stage = [halved[rank]["weights"] for rank in range(2)]
    if layout[1] == 1:  # replicas have the same weights
        assert by_stage[0] == by_stage[1]
