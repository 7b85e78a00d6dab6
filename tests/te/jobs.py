"""What ranks do in the tests of this folder, over the GPU suite's Scene: a model of random weights, its
learner, residency."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from megarl.config.schema import Config
from megarl.parallel.runtime import Runtime
from megarl.plan.inputs import make_plan_inputs
from megarl.plan.tensors import fp8_copy_bytes
from tests.gpu.scene import UPDATE, WEIGHTS, Scene, get_sizes
from tests.plan.jobs import storages

# Every side is a multiple of 128 at TP 2, as block scaling wants it.
DENSE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
MIXTURE = {
    **DENSE,
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "head_dim": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
}


def make_scene(runtime: Runtime, folder: Path, model: Mapping[str, Any], **overrides: Any) -> Scene:
    """model: as in the schema, and `mixture`: whether it has experts; `lora`: the actor's adapters, whose B
    are random here."""
    model = dict(model)
    sizes, lora = dict(MIXTURE if model.pop("mixture", False) else DENSE), model.pop("lora", None)
    if lora is None:
        return Scene(runtime, folder, get_sizes("tiny", **sizes), model=model, **overrides)
    scene = Scene(runtime, folder, get_sizes("tiny", **sizes), model=model, actor={"lora": lora}, **overrides)
    generator = torch.Generator().manual_seed(5)
    for name, parameter in sorted(scene.actor.model.named_parameters()):
        if name.endswith("_b"):
            parameter.data.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return scene


def emulation() -> Any:
    """The compiled half, imported when a rank has Megatron already."""
    import transformer_engine_torch

    return transformer_engine_torch


def measure(
    runtime: Runtime,
    folder: Path,
    models: Mapping[str, Mapping[str, Any]],
    mistakes: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Log-probabilities, this rank's gradients as one vector, and the kernels that were called, for each of
    `models`.

    Of a second pass, as recipe delayed has no scales in its first. mistakes: {model: what is done wrong on
    purpose}."""
    found = {}
    for name, model in models.items():
        with MISTAKES[(mistakes or {}).get(name, "none")]():
            scene = make_scene(runtime, folder, model)
            local = scene.local(6, 61)  # with the prompts 390 tokens, which FP8 fills up
            scene.logprobs(local), scene.gradients(local)
            calls = emulation().CALLS
            calls.clear()
            logprobs, gradients = scene.logprobs(local), scene.gradients(local)
        found[name] = {
            "logprobs": logprobs,
            "gradients": torch.cat([gradients[key].flatten() for key in sorted(gradients)]),
            "calls": dict(calls),
        }
        del scene
        gc.collect()
    return found


def refusal(runtime: Runtime, folder: Path, model: Mapping[str, Any], mistake: str) -> str:
    """The error with which the layers refuse a mistake; empty where they do not."""
    try:
        measure(runtime, folder, {"wrong": model}, {"wrong": mistake})
    except Exception as error:  # noqa: BLE001 (which one it is is the answer)
        return f"{type(error).__name__}: {error}"
    return ""


def accumulate(runtime: Runtime, folder: Path, dtype: str, grad_dtype: str = "fp32") -> dict[str, float]:
    """Gradients of several micro-batches with the fused addition and without, relative to the sum of each
    micro-batch's own."""
    from tests.parallel.test_options import apart

    with apart():
        scene = make_scene(
            runtime,
            folder,
            {"layers": "te", "dtype": dtype},
            update={"tokens_per_micro_batch": 128},
            parallel={"grad_dtype": grad_dtype},
        )
        return _accumulated(scene)


def _accumulated(scene: Scene) -> dict[str, float]:
    from megarl.training.objectives import supervised_loss

    local = scene.local(6, 60)
    (batches,) = local.mini_batches
    assert len(batches) > 2
    scene.offload.onload("actor_update", UPDATE)
    linears = [module for module in scene.actor.model.modules() if hasattr(module, "fuse_wgrad_accumulation")]
    weights = [module.weight for module in linears]
    assert len(linears) == 16 and all(module.fuse_wgrad_accumulation for module in linears)
    assert not scene.actor.model.config.gradient_accumulation_fusion, "apex would be asked for"

    def gradients(part: Any) -> torch.Tensor:
        scene.actor.compute_gradients(part, supervised_loss(local))
        return torch.cat([weight.main_grad.flatten().clone() for weight in weights])

    exact = sum(gradients([batch]).double() for batch in batches)
    found = {"fused": gradients(batches)}
    for module in linears:
        module.fuse_wgrad_accumulation = False
    found["apart"] = gradients(batches)
    errors = {name: float((value.double() - exact).norm() / exact.norm()) for name, value in found.items()}
    return {**errors, "equal": torch.equal(found["fused"], found["apart"])}


def scales(scene: Scene) -> dict[str, torch.Tensor]:
    """What the linears keep for recipe delayed: histories of maxima and the scales made from them."""
    kept = {}
    for name, module in scene.actor.model.named_modules():
        if not hasattr(module, "fuse_wgrad_accumulation"):
            continue  # attention could have scales, too, but is not in FP8
        for key, state in getattr(module, "fp8_meta", {}).items():
            if key in ("scaling_fwd", "scaling_bwd"):
                kept[f"{name}.{key}.history"] = state.amax_history.clone()
                kept[f"{name}.{key}.scale"] = state.scale.clone()
    return kept


def through_a_checkpoint(
    runtime: Runtime, folder: Path, written: Mapping[str, Any], read: Mapping[str, Any], forget: bool = False
) -> dict[str, Any]:
    """Two updates, a checkpoint, and one update more; the same one after the checkpoint was loaded into a
    model of the kind `read`.

    forget: the scales that were loaded are thrown away again, as if they had not been in the checkpoint."""
    from megarl.training.sharded import allocate_moments, load_trainable
    from megarl.weights.families import rename_to_table
    from tests.checkpoints import save_model

    def places(scene: Scene) -> list[int]:
        [adam] = [optimizer.optimizer for optimizer in scene.actor.optimizers]
        allocate_moments(adam)
        return [moment.data_ptr() for own in adam.state.values() for moment in own.values()]

    first = make_scene(runtime, folder / "first", written)
    for _ in range(2):
        first.update(first.local(4, 32))
    checkpoint = folder / "checkpoint"
    if runtime.rank == 0:
        checkpoint.mkdir()
    torch.distributed.barrier()
    save_model(first.actor, checkpoint)
    second = make_scene(runtime, folder / "second", read)
    before = places(second)
    load_trainable(second.actor, checkpoint)
    filled_in_place = before == places(second)
    if forget:
        for module in second.actor.model.modules():
            for key in ("scaling_fwd", "scaling_bwd"):
                if state := getattr(module, "fp8_meta", {}).get(key):
                    state.amax_history.zero_(), state.scale.fill_(1.0)
    out: dict[str, Any] = {
        "scales": [scales(scene) for scene in (first, second)],
        "weights": [],
        "norms": [],
        "logprobs": [],
        "filled_in_place": filled_in_place,
    }
    for scene in (first, second):
        scene.offload.onload("old_logprobs", WEIGHTS)
        named = rename_to_table(dict(scene.actor.model.named_parameters()))
        out["weights"].append({name: parameter.detach().clone() for name, parameter in named.items()})
        out["norms"].append(scene.update(scene.local(4, 32)).grad_norm)
        out["logprobs"].append(scene.logprobs(scene.local(4, 32)))
    return out


def beside_another(
    runtime: Runtime, folder: Path, model: Mapping[str, Any], other: bool
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Gradient norms of three updates, between which another model of the recipe is trained where `other`;
    what the linears keep at last."""
    first, second = (make_scene(runtime, folder / name, model) for name in ("first", "second"))
    norms = []
    for number in range(3):
        norms.append(first.update(first.local(4, 32)).grad_norm)
        if other:
            second.update(second.local(3, 40 + number))
    return norms, scales(first)


def updates(runtime: Runtime, folder: Path, model: Mapping[str, Any], moves: bool) -> dict[str, Any]:
    """Three updates, with everything off the device before each where `moves`; `copies`: FP8 copies of
    weights that stayed behind; `stand_ins`: bytes that Transformer Engine keeps for autograd in the place of
    weights' gradients, after each update and after each move."""
    from transformer_engine.pytorch.module.base import _dummy_wgrads

    def stand_ins() -> int:
        return sum(tensor.nbytes for tensor in _dummy_wgrads.values())

    _dummy_wgrads.clear()
    scene = make_scene(runtime, folder / str(moves), model, residency={"offload": moves})
    local = scene.local(4, 32)
    found: dict[str, Any] = {"norms": [], "copies": 0, "stand_ins": []}
    for _ in range(3):
        scene.logprobs(local)
        found["norms"].append(scene.update(local).grad_norm)
        found["stand_ins"].append(stand_ins())
        if moves:
            scene.offload.onload("rollout", ())
            modules = scene.actor.model.modules()
            found["copies"] += sum(len(getattr(module, "_fp8_workspaces", {})) for module in modules)
            found["stand_ins"].append(stand_ins())
    found["logprobs"] = scene.logprobs(local)
    return found


def copies(runtime: Runtime, folder: Path, model: Mapping[str, Any], transposes: bool) -> list[float]:
    """Bytes of the FP8 copies of weights that are there after an update and a pass without gradients behind
    it, and what is planned for them. transposes: whether the device needs them."""
    scene = make_scene(
        runtime, folder, model, residency={"offload": False}, update={"tokens_per_micro_batch": 128}
    )
    local = scene.local(6, 60)
    found = []
    for run in (scene.update, scene.logprobs):
        run(local)
        kept = [
            getattr(copy, part, None)
            for module in scene.actor.model.modules()
            for copy in getattr(module, "_fp8_workspaces", {}).values()
            for part in PARTS
        ]
        found.append(float(sum(storages(part for part in kept if part is not None).values())))
    parallel = scene.config.parallel.model_copy(update=asdict(runtime.layout))
    plan = make_plan_inputs(scene.config.model_copy(update={"parallel": parallel}), scene.sizes)
    plan = replace(plan, device=replace(plan.device, transposes=transposes))
    return [*found, fp8_copy_bytes(plan, "actor", runtime.pp_rank)]


# Of a quantised tensor, as Transformer Engine names them.
PARTS = (
    *("_data", "_transpose", "_rowwise_data", "_columnwise_data"),
    *("_scale_inv", "_rowwise_scale_inv", "_columnwise_scale_inv"),
)


def train(runtime: Runtime, config: Config) -> None:
    """The whole run that `config` describes."""
    from megarl.schedule.run import build_run
    from megarl.schedule.trainer import Trainer

    run = build_run(config, runtime)
    try:
        Trainer(run).train()
    finally:
        run.close()


def train_without_cudnn(runtime: Runtime, config: Config) -> None:
    """The same where cuDNN has no kernel for any shape."""
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.attention.dot_product_attention import dot_product_attention

    none = tex.NVTE_Fused_Attn_Backend.NVTE_No_Backend, "no kernel"
    anew = {**dot_product_attention._attention_backends, "attention_params": None}
    with (
        _changed(tex, "get_fused_attn_backend", lambda parameters: none),
        _changed(dot_product_attention, "_attention_backends", anew),
    ):
        train(runtime, config)


# Mistakes, each of which the comparison with portable layers must show.


@contextmanager
def _no_mistake() -> Iterator[None]:
    yield


@contextmanager
def _changed(owner: Any, name: str, value: Any) -> Iterator[None]:
    kept = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, kept)


def _merged_sequences() -> Any:
    """Attention across the borders of sequences."""
    from megarl.model.builder import Actor

    right = Actor.pack

    def pack(self: Any, cu_seqlens: torch.Tensor, *shared: Any) -> Any:
        return right(self, cu_seqlens if self.layers_kind == "portable" else cu_seqlens[[0, -1]], *shared)

    return _changed(Actor, "pack", pack)


def _short_maximum() -> Any:
    """A max_seqlen below the longest sequence's length."""
    from megarl.model.builder import Actor

    right = Actor.pack

    def pack(*asked: Any) -> Any:
        packed = right(*asked)
        packed.max_seqlen_q = packed.max_seqlen_kv = 8
        return packed

    return _changed(Actor, "pack", pack)


def _packs_not_filled_up() -> Any:
    """Packs of any length, where FP8 takes multiples of 16."""
    import megarl.training.micro_batch as micro_batch

    return _changed(micro_batch, "pack_multiple", lambda config: 1)


def _other_epsilon() -> Any:
    """RMSNorm with an epsilon of 1e-2 instead of 1e-6."""
    import transformer_engine.pytorch.cpp_extensions as theirs  # which has names of its own for some kernels

    right = theirs.rmsnorm_fwd
    return _changed(theirs, "rmsnorm_fwd", lambda x, w, eps, *rest: right(x, w, 1e-2, *rest))


def _gradients_twice() -> Any:
    """Weight gradients that are added to the buffer by the product, and once more by Megatron's hook."""
    right = emulation().generic_gemm

    def generic_gemm(A: Any, transA: bool, B: Any, transB: bool, D: Any, *rest: Any, **keys: Any) -> Any:
        made = right(A, transA, B, transB, D, *rest, **keys)
        return right(A, transA, B, transB, D, *rest, **keys) if D is not None and transB else made

    return _changed(emulation(), "generic_gemm", generic_gemm)


def _saturated_scales() -> Any:
    """Scales sixteen times too large, so that a part of all values saturates."""
    right = emulation().scale_of
    return _changed(emulation(), "scale_of", lambda *arguments: 16 * right(*arguments))


MISTAKES: dict[str, Callable[[], Any]] = {
    "none": _no_mistake,
    "merged sequences": _merged_sequences,
    "a max_seqlen that is too small": _short_maximum,
    "packs that are not filled up": _packs_not_filled_up,
    "another epsilon": _other_epsilon,
    "weight gradients counted twice": _gradients_twice,
    "scales that saturate": _saturated_scales,
}
