"""Measure the device memory of one rank of a large job, phase by phase, without a GPU and other ranks.

Real are megarl's phases, models, offloading, weight sync and checkpoints, Megatron's schedule, DDP and
optimizer, packs and columns. The device's tensors are fake and have no values (fake_tensors.py). Collectives
transfer nothing: other ranks are assumed to give the same answers as this one. The engine is a separate
process, which does not run; this rank has only the transfer buckets."""

from __future__ import annotations

import gc
import json
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist

from megarl.config.phases import never_offloaded, select_phases, select_stages
from megarl.config.schema import PRETRAINING, Config
from megarl.data.batch import RolloutBatch, TrainBatch
from megarl.model.hf_config import read_hf_config
from megarl.parallel import comm
from megarl.parallel import runtime as parallel
from megarl.parallel.objects import decode, encode
from megarl.parallel.offload_group import HostPool
from megarl.parallel.runtime import Runtime
from megarl.plan.inputs import PlanInputs, make_plan_inputs
from megarl.plan.memory import Need, checkpoint_need, construction_need, phase_need
from megarl.plan.sizes import GIB
from megarl.rollout.engines.sglang import SGLangEngine
from megarl.schedule import models
from megarl.schedule.offload import EngineMemory, OffloadManager
from megarl.schedule.phases import FUNCTIONS, enforce_columns
from megarl.schedule.run import Run, Step
from megarl.sync.weight_sync import make_weight_sync
from megarl.training import sharded
from megarl.training.model import InferenceModel
from megarl.training.saving import HostCopier
from megarl.weights.families import Sizes
from tests.rehearsal.fake_tensors import Memory, fake_cuda

ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
COMMON = {
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "norm_topk_prob": True,
    "attention_bias": False,
}


def complete(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Complete a known model's sizes to a config.json."""
    return {**COMMON, "architectures": [ARCHITECTURES[sizes["model_type"]]], **sizes}


@contextmanager
def alone(rank: int, world: int) -> Iterator[None]:
    """Make this process a rank of a job without the other ranks.

    Process groups do nothing, and objects gathered from other ranks are copies of this rank's."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    start, group = dist.init_process_group, dist.new_group

    def started(backend: Any = None, *_: Any, **__: Any) -> None:
        start("fake", store=FakeStore(), rank=rank, world_size=world)

    def grouped(ranks: Any = None, *_: Any, **options: Any) -> Any:
        kept = {key: options[key] for key in ("use_local_synchronization", "group_desc") if key in options}
        return group(ranks, backend="fake", **kept)

    def again(value: Any, kind: Any) -> Any:
        return decode(encode(value), kind, "this rank")

    def gathered(ranks: Any, value: Any, kind: Any) -> list[Any]:
        return [again(value, kind) for _ in range(dist.get_world_size(ranks.cpu_group))]

    def on_0(ranks: Any, value: Any, kind: Any) -> list[Any] | None:
        return [again(value, kind)] * ranks.world if ranks.rank == 0 else None

    answers = {
        "gather_objects": gathered,
        "gather_to_rank_0": on_0,
        "broadcast_from_rank_0": lambda ranks, value, kind: value,
        "any_flags": lambda ranks, flags: list(flags),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "init_process_group", started)
        # Megatron requests a backend for its groups: all of them get the fake one.
        patch.setattr(dist, "new_group", grouped)
        # Replace the functions in every module of megarl that has imported them.
        for name, answer in answers.items():
            original = getattr(comm, name)
            for module in [m for key, m in sys.modules.items() if key.partition(".")[0] == "megarl"]:
                if vars(module).get(name) is original:
                    patch.setattr(module, name, answer)
        patch.setattr(parallel, "join_store", lambda secret, seconds: FakeStore())
        settings = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": 0, "MASTER_PORT": 1}
        for key, value in {**settings, "MASTER_ADDR": "127.0.0.1"}.items():
            patch.setenv(key, str(value))
        yield
        if dist.is_initialized():
            from megatron.core import parallel_state

            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()


@contextmanager
def neighbours() -> Iterator[None]:
    """Supply the tensor shapes that the previous and next pipeline stages would send.

    Activations arrive in the order of the micro-batches, gradients in the order of this stage's outputs."""
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    sent: deque[list[int]] = deque()
    coming: deque[list[int]] = deque()
    shapes, run = P2PCommunicator._communicate_shapes, InferenceModel._run

    def told(self: Any, next_: Any, previous: Any, from_previous: bool, from_next: bool) -> Any:
        shapes(self, next_, previous, from_previous, from_next)
        if next_ is not None:
            sent.append(list(next_.shape))
        before = coming.popleft() if from_previous else [0, 0, 0]
        return before, sent.popleft() if from_next else [0, 0, 0]

    def listed(self: InferenceModel, micro_batches: Any, loss: Any, forward_only: bool) -> Any:
        c = self.model.config
        parts = c.tensor_model_parallel_size if c.sequence_parallel else 1
        sent.clear()
        coming.clear()
        coming.extend([b.tokens.shape[1] // parts, 1, c.hidden_size] for b in micro_batches)
        return run(self, micro_batches, loss, forward_only)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(P2PCommunicator, "_communicate_shapes", told)
        patch.setattr(InferenceModel, "_run", listed)
        yield


class Engine(SGLangEngine):
    """This rank's side of an engine without processes: the buckets from which they would copy."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.process = None


def build_lonely_run(config: Config, hf: Mapping[str, Any], runtime: Runtime) -> Run:
    """Build a run's models from sizes, without weights."""
    folder: Any = SimpleNamespace(config=dict(hf), path=config.model.path)
    config_json = read_hf_config(config.model.path)
    offload = OffloadManager(runtime.device, never_offloaded(config, gpu=True))
    host, source = HostPool(runtime.device), MagicMock()
    builder = models.ModelBuilder(config, runtime, folder, config_json, offload, host)
    actor = builder.build_actor()
    critics = [builder.build_critic() for _ in range(config.critic.count if config.has_critic else 0)]
    none: list[Any] = []
    return Run(
        *(config, runtime, (), folder, config_json, offload, host),
        *(actor, critics, None, None, none, None, source),
    )


def connect(run: Run) -> None:
    """Add an engine and its weight sync to the run."""
    engine = Engine(run.config, run.folder.config, run.runtime.rank, run.runtime.device, (1,))
    run.engine = engine
    weight_sync = make_weight_sync(run.config, run.runtime, run.folder.config, run.actor.model, engine)
    weight_sync.backend.handle = lambda bucket: b""  # type: ignore[method-assign]
    run.weight_sync = weight_sync
    for tag in ("weights", "kv_cache"):
        run.offload.register({f"engine.{tag}": EngineMemory(weight_sync, tag, torch.device("cpu"), 0)})


def batch_of(config: Config, plan: PlanInputs, updates: int) -> tuple[Config, TrainBatch]:
    """Make a batch of sequences of maximum length for `updates` updates of each model.

    In each update a replica has enough full packs to fill its pipeline.

    Returns: the configuration with mini-batches of that size and one epoch, and the batch"""
    length, prompt = plan.longest, config.data.max_prompt_tokens
    packs = plan.layout.pp * (2 if plan.layout.vpp > 1 else 1)
    size = plan.layout.dp * packs * max(1, config.update.tokens_per_micro_batch // length)
    rows = size * updates
    update = config.update.model_copy(update={"mini_batch": size, "epochs": 1})
    critic = config.critic.model_copy(update={"mini_batch": None, "epochs": 1})
    pretraining = config.value_pretraining.model_copy(update={"epochs": 1})
    config = config.model_copy(update={"update": update, "critic": critic, "value_pretraining": pretraining})
    batch = TrainBatch.build([[5] * prompt] * rows, [[5] * (length - prompt)] * rows)
    batch["correct"], batch["truncated"] = (
        torch.ones(rows, dtype=torch.bool),
        torch.zeros(rows, dtype=torch.bool),
    )
    batch["rewards"], batch["engine_logprobs"] = torch.ones(rows), torch.zeros(batch.num_tokens)
    batch["policy_version"] = torch.zeros(rows, dtype=torch.int64)
    batch["group_ids"] = torch.arange(rows) // max(1, config.rollout.group_size)
    return config, batch


def measure(config: Config, hf: Mapping[str, Any], stage: int, updates: int = 2) -> list[dict[str, Any]]:
    """Measure the peak device memory of a rank of this pipeline stage, phase by phase.

    The phases are those of value pretraining and of a step, and construction, checkpoint and continuation.
    Each row has the plan's parts, too, except the engine's and the contexts, which are not in this process.

    hf: the complete config.json of the model (`complete`)"""
    plan = make_plan_inputs(config, hf)
    layout = plan.layout
    rank = next(rank for rank in range(layout.world) if layout.coords(rank).pp == stage)
    sizes, memory, rows = Sizes.from_config(hf), Memory(), list[dict[str, Any]]()
    chosen = hf.get("num_experts_per_tok", 0) / sizes.experts if sizes.experts else 0.5
    started = time.perf_counter()

    def note(name: str, need: Need | None, peak: int | None = None) -> None:
        nonlocal started
        parts = need.parts if need is not None else {}
        planned = {k: v for k, v in parts.items() if k != "contexts" and not k.startswith("engine.")}
        rows.append(
            {
                "phase": name,
                "stage": stage,
                "measured": memory.peak if peak is None else peak,
                "stays": memory.now,
                "planned": sum(planned.values()),
                "parts": planned,
                "pinned": memory.pinned,
                "largest": memory.at_peak.most_common(40),
                "seconds": time.perf_counter() - started,
            }
        )
        started = time.perf_counter()
        print(f"{name}: {rows[-1]['measured'] / GIB:.2f} GiB, {rows[-1]['seconds']:.0f} s", file=sys.stderr)

    with (
        tempfile.TemporaryDirectory() as folder,
        alone(rank, layout.world),
        fake_cuda(chosen, memory) as device,
        neighbours(),
        pytest.MonkeyPatch.context() as patch,
    ):
        Path(folder, "config.json").write_text(json.dumps(hf), encoding="utf-8")
        config = config.model_copy(
            update={"model": config.model.model_copy(update={"path": Path(folder)}), "steps": 10}
        )
        config, batch = batch_of(config, plan, updates)
        patch.setattr(models, "open_model", lambda path, **_: SimpleNamespace(config=dict(hf), path=path))
        patch.setattr(models, "load_weights", lambda *_, **__: None)
        patch.setattr(parallel, "choose_device", lambda _: device)
        runtime = parallel.start(config.parallel, config.seed, mixture=bool(sizes.experts))

        def watch(name: str) -> None:
            build = getattr(models.ModelBuilder, f"build_{name}")

            def build_watched(builder: models.ModelBuilder) -> Any:
                memory.reset()
                model = build(builder)
                note(f"construction: {name}", construction_need(plan, name, stage))
                return model

            patch.setattr(models.ModelBuilder, f"build_{name}", build_watched)

        watch("actor")
        watch("critic")
        run = build_lonely_run(config, hf, runtime)
        for (
            name,
            model,
        ) in run.models.items():  # the moments exist after the first update or a loaded checkpoint
            run.offload.onload("start", {f"{name}.weights", f"{name}.optimizer"})
            for optimizer in model.optimizers:
                sharded.allocate_moments(optimizer.optimizer)
        run.offload.onload("start", ())
        memory.reset()
        connect(run)
        note("start of the engine", None)
        for kind in select_stages(config):
            step = Step(kind, 1)
            step.rollout = RolloutBatch.from_train_batch(batch)
            for phase in select_phases(config, kind):
                label = f"{kind}: {phase.name}" if kind == PRETRAINING else phase.name
                if phase.on_gpu:
                    run.residency.onload(phase.name, phase.on_gpu)
                gc.collect()
                memory.reset()
                if phase.name != "rollout":
                    with enforce_columns(phase, step):
                        FUNCTIONS[phase.name](run, step)
                note(label, phase_need(plan, phase, stage) if phase.on_gpu else None)
        # Skip the check that all ranks' parts are complete: there is only one rank.
        patch.setattr(HostCopier, "_agree", lambda self, plan: None)
        copiers = {name: HostCopier(runtime) for name in run.models}
        for name, model in run.models.items():
            run.residency.onload_for_checkpoint(name)
            gc.collect()
            memory.reset()
            copiers[name].copy_model(model)
            note(f"checkpoint: {name}", checkpoint_need(plan, name, stage))
        patch.setattr(sharded, "check_trainable", lambda _: None)
        patch.setattr(sharded.dist_checkpointing, "load", _loaded)
        run.offload.onload("end", ())  # a continued run has made no pass yet
        for name, model in run.models.items():
            run.residency.onload_for_checkpoint(name)
            gc.collect()
            memory.reset()
            sharded.load_trainable(model, Path(folder))
            note(f"continuation: {name}", checkpoint_need(plan, name, stage, load=True))
        run.offload.onload("end", ())
        gc.collect()
        memory.reset()
        note("end", None)
    return rows


def _loaded(wanted: dict[str, Any], folder: str) -> dict[str, Any]:
    """Return a state dict as Megatron's `load` does, without reading a checkpoint.

    Megatron fills the tensors of the given state in place, and its factories merge the parts."""
    from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
    from megatron.core.dist_checkpointing.mapping import ShardedBase, apply_factory_merges
    from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess

    parts, _, factories = load_preprocess(wanted)
    filled = dict_list_map_inplace(lambda v: v.data if isinstance(v, ShardedBase) else v, parts)
    return apply_factory_merges(filled, factories)
