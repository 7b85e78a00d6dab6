"""Jobs with which ranks measure for the planner's tests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec import structs

from megarl.config.phases import select_phases
from megarl.config.schema import Config, OptimizerConfig, ParallelConfig
from megarl.data.batch import TrainBatch
from megarl.data.prompts import Prompt
from megarl.data.sample import Sample, SampleGroup, TokenData
from megarl.model.builder import build_actor, build_critic
from megarl.parallel.comm import barrier
from megarl.parallel.delivery import deliver
from megarl.parallel.runtime import Runtime
from megarl.plan.inputs import PlanInputs, make_plan_inputs
from megarl.plan.sizes import Passes, Shape, count_activations, count_in_flight, count_kept_outputs
from megarl.rollout.collector import make_rollout_batch
from megarl.training.micro_batch import make_micro_batches
from megarl.training.model import TrainableModel
from megarl.weights.families import Sizes
from tests.checkpoints import save_model
from tests.families import ROWS
from tests.parallel.memory import LiveMemory

SIZES = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
PACK, LENGTH = 8, 64  # sequences of a micro-batch, and tokens of each
# Every other layer of this model has linear attention.
LINEAR: dict[str, Any] = {"family": "qwen3_5_text", "full_attention_interval": 2, "linear_key_head_dim": 32}
LINEAR |= {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_value_head_dim": 32}


def hf_of(family: str, **keys: Any) -> Any:
    """Make a Hugging Face configuration."""
    return ROWS[family].config(
        **{**SIZES, "max_position_embeddings": 512, "tie_word_embeddings": False, **keys}
    )


def config_of(
    dtype: str,
    recompute: str = "none",
    sequence_parallel: bool | None = None,
    chunk: int = 256,
    optimizer: Mapping[str, Any] | None = None,
    recompute_layers: int | None = None,
    recompute_modules: Sequence[str] = ("attention",),
    **parallel: Any,
) -> Config:
    model: dict[str, Any] = {"dtype": dtype, "recompute": recompute, "recompute_layers": recompute_layers}
    model["recompute_modules"] = recompute_modules
    settings = {
        "recipe": "vapo",
        "run_dir": Path("unused"),
        "steps": 1,
        "model": {"path": Path("unused"), "layers": "portable", **model},
        "parallel": {"sequence_parallel": sequence_parallel, **parallel},
        "algorithm": {"advantage": "gae"},
        "update": {"logprob_chunk": chunk},
        "actor": optimizer or {},
        "critic": optimizer or {},
    }
    return Config.model_validate(settings)


def plan_for(
    layout: tuple[int, ...],
    family: str,
    dtype: str,
    critic: bool = False,
    optimizer: Mapping[str, Any] | None = None,
    **keys: Any,
) -> PlanInputs:
    """Plan a run with models of these sizes."""
    tp, pp, dp, ep, cp = (*layout, 1)[:5]
    described = hf_of(family, **keys).to_dict()
    return make_plan_inputs(
        config_of(dtype, optimizer=optimizer, tp=tp, pp=pp, dp=dp, ep=ep, cp=cp), described
    )


def learner_of(
    runtime: Runtime, family: str, dtype: str, critic: bool, recompute: str = "none", **keys: Any
) -> tuple[Any, TrainableModel]:
    """Build a model with random weights, and its optimizer."""
    optimizer, sequence_parallel = keys.pop("optimizer", None), keys.pop("sequence_parallel", None)
    layers, parallel = keys.pop("recompute_layers", None), ParallelConfig(**keys.pop("parallel", {}))
    modules = keys.pop("recompute_modules", ("attention",))
    config = config_of(
        dtype, recompute, sequence_parallel, keys.pop("chunk", 256), optimizer, layers, modules
    )
    hf = hf_of(family, **keys)
    model = (build_critic if critic else build_actor)(config, hf, runtime)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    settings = OptimizerConfig.model_validate(optimizer or {})
    return hf, TrainableModel("model", model, settings, 1, runtime, parallel)


def group_sizes(
    runtime: Runtime, out: Path, family: str, dtype: str, critic: bool = False, **keys: Any
) -> dict[str, int]:
    """Run a step and return the bytes of weights, gradients and optimizer on this rank, by storage.

    `written` is the number of bytes that this rank writes to a checkpoint."""
    _, learner = learner_of(runtime, family, dtype, critic, **keys)
    learner.update(
        batches(learner, 1, LENGTH), lambda output, _: ((output if critic else output[0]).sum(), {})
    )
    buffers = learner.buffers
    weights, gradients = storages(b.param_data for b in buffers), storages(b.grad_data for b in buffers)
    weights |= storages(learner.model.parameters())
    optimizer: dict[int, int] = {}
    for part in learner.optimizers:
        held = [p for group in part.optimizer.param_groups for p in group["params"]]
        held += [
            t
            for state in part.optimizer.state.values()
            for t in state.values()
            if isinstance(t, torch.Tensor) and t.dim()
        ]
        optimizer |= storages(held)
    if runtime.rank == 0:
        out.mkdir(exist_ok=True)
    barrier(runtime)
    written = save_model(learner, out)
    own = {key: size for key, size in optimizer.items() if key not in weights and key not in gradients}
    return {
        "weights": sum(weights.values()),
        "gradients": sum(gradients.values()),
        "optimizer": sum(own.values()),
        "written": written,
    }


def construction(runtime: Runtime, **keys: Any) -> int:
    """Return the most bytes alive on this rank while a model and its optimizer are made."""
    with LiveMemory() as memory:
        _, learner = learner_of(runtime, critic=False, **keys)
    assert learner.buffers
    return memory.peak


def largest_bucket(runtime: Runtime, **keys: Any) -> int:
    """Return the parameters of the largest bucket that a checkpoint gathers on this rank."""
    _, learner = learner_of(runtime, dtype="bf16", critic=False, **keys)
    return max(bucket.grad_data.numel() for buffer in learner.buffers for bucket in buffer.buckets)


def storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Map address to bytes of the storages behind tensors."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None}


def batches(learner: TrainableModel, count: int, tokens: int = PACK * LENGTH) -> list[Any]:
    """Make `count` micro-batches of `tokens` tokens, from sequences of LENGTH tokens."""
    rows = tokens // LENGTH * count
    batch = TrainBatch.build([[1, 2]] * rows, [[3] * (LENGTH - 2)] * rows)
    return make_micro_batches(batch, range(rows), tokens, learner.model)


def measure(
    runtime: Runtime,
    family: str = "qwen2",
    dtype: str = "fp32",
    critic: bool = False,
    micro_batches: int = 1,
    **keys: Any,
) -> tuple[float, float]:
    """Return the most bytes alive in forward and backward on this rank: (measured, predicted)."""
    hf, learner = learner_of(runtime, family, dtype, critic, **keys)
    made = batches(learner, micro_batches)

    def loss(output: Any, _: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return (output if critic else output[0]).sum(), {}

    learner.compute_gradients(made, loss)  # first run: allocations that happen once
    with LiveMemory() as memory:
        learner.compute_gradients(made, loss)
    layout = runtime.layout
    tokens = PACK * LENGTH // layout.cp
    sequence_parallel = layout.tp > 1 and keys.get("sequence_parallel") is not False
    passes = Passes(
        tp=layout.tp,
        cp=layout.cp,
        recompute=keys.get("recompute", "none"),
        chunk=keys.get("chunk", 256),
        layers="portable",
        sequence_parallel=sequence_parallel,
        recomputed=keys.get("recompute_layers"),
        modules=keys.get("recompute_modules", ("attention",)),
        trains_head=keys.get("optimizer") is None,
    )
    predicted = count_activations(Shape(hf.to_dict(), dtype), passes, critic=critic)
    kept = min(micro_batches, count_in_flight(layout, runtime.pp_rank))
    layers, last = hf.num_hidden_layers // layout.pp, runtime.is_last_stage
    outputs = count_kept_outputs(layout, kept, last)
    own = layout.layers(hf.num_hidden_layers, runtime.pp_rank)
    dense = sum(layer < Sizes.from_config(hf.to_dict()).dense for layer in own)
    return float(memory.peak), predicted.training(tokens, layers, kept, last, outputs, dense)


def batch_bytes(runtime: Runtime, prompts: int, group: int, prompt: int, length: int) -> int:
    """Return the bytes of a step's batch on this rank, with all columns that VAPO's phases write.

    They are the responses that its engine sampled, as samples and packed, the metadata of the full batch,
    and the delivered share of its replica."""
    tokens, logprobs = np.full(length, 7, dtype=np.int32), np.zeros(length, dtype=np.float32)
    graded: dict[str, Any] = {"finish_reason": "stop", "correct": True, "extracted": None, "error": None}
    graded |= {"reward": 1.0, "overlong_penalty": 0.0}
    groups = [SampleGroup(Prompt(uid, "", (3,) * prompt, ""), [], 0) for uid in range(prompts)]
    kept = []
    for number in range(prompts * group):
        owner = number % runtime.world
        sample = Sample.from_data(TokenData(tokens.copy(), logprobs.copy()), owner, **graded)
        if owner == runtime.rank:
            kept.append(sample.data)
        elsewhere = structs.replace(sample, data=None)
        groups[number // group].samples.append(sample if owner == runtime.rank else elsewhere)
    batch = make_rollout_batch(groups)
    known = [batch.lengths, batch.response_lengths, batch.prompt_lengths, batch.owners]
    known += batch.columns.values()
    drawn = [batch.local.tokens, batch.local.response_mask, *batch.local.columns.values()]
    held = sum(tensor.nbytes for tensor in (*known, *drawn))
    held += sum(data.tokens.nbytes + data.logprobs.nbytes for data in kept if data is not None)
    layout, order = runtime.layout, range(prompts * group)
    shares = [[i for i in order if i % layout.dp == replica] for replica in range(layout.dp)]
    ranks = range(layout.world)
    trained_by = [[rank for rank in ranks if layout.coords(rank).dp == dp] for dp in range(layout.dp)]
    local = deliver(runtime, batch, shares, trained_by)
    config = config_of("fp32")
    written = frozenset[str]().union(*(phase.writes for phase in select_phases(config)))
    for name in written - local.columns.keys() - {"tokens"}:
        local[name] = torch.zeros(local.num_tokens)
    return held + sum(t.nbytes for t in (local.tokens, local.response_mask, *local.columns.values()))


def long_sequence(runtime: Runtime, length: int) -> tuple[int, float, float]:
    """Update with one sequence of `length` tokens.

    Returns this rank's tokens of it, the peak of MiB alive, and the gradient's norm."""
    narrow = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    keys = {**narrow, **heads, "max_position_embeddings": length}
    _, learner = learner_of(runtime, "qwen3", "fp32", critic=False, **keys)
    drawn = torch.randint(0, 512, (length,), generator=torch.Generator().manual_seed(1)).tolist()
    made = make_micro_batches(TrainBatch.build([drawn[:64]], [drawn[64:]]), [0], length, learner.model)
    with LiveMemory() as memory:
        result = learner.update(made, lambda output, _: (-output[0].mean(), {}))
    return made[0].tokens.numel(), memory.peak / 2**20, result.grad_norm
