"""Jobs that the tests of this folder run on every rank, with real models and process groups."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megarl.config.schema import (
    AlgorithmConfig,
    Config,
    CriticConfig,
    ModelConfig,
    OptimizerConfig,
    OverlongConfig,
    ParallelConfig,
    RewardConfig,
    TeacherConfig,
    UpdateConfig,
)
from megarl.data.batch import RolloutBatch, TrainBatch
from megarl.model.routing import routing_counts, start_counting
from megarl.parallel.comm import sum_over_ranks, sum_over_replicas
from megarl.parallel.cpu_platform import on_cpu
from megarl.parallel.runtime import Runtime
from megarl.training.micro_batch import make_micro_batches
from tests.ranks import USED_AT_START


def make_config(
    folder: Path,
    *,
    sequence_parallel: bool | None = None,
    overlap_warmup_flush: bool = False,
    dtype: str = "fp32",
    budget: int = 64,
    chunk: int = 7,
    mini_batch: int = 8,
    overlong: bool = False,
    share_prompts: bool = False,
    model: Mapping[str, Any] | None = None,
    optimizer: Mapping[str, Any] | None = None,
    critics: int = 1,
    teacher: Mapping[str, Any] | None = None,
    **algorithm: Any,
) -> Config:
    """Build a configuration for a model folder.

    `model`, `optimizer` (of actor and critic), `teacher` and `algorithm` take the keys of the schema."""
    return Config(
        recipe="vapo",
        run_dir=folder,
        steps=4,
        model=ModelConfig(**{"path": folder, "dtype": dtype, **(model or {})}),
        parallel=ParallelConfig(
            sequence_parallel=sequence_parallel, overlap_warmup_flush=overlap_warmup_flush
        ),
        actor=OptimizerConfig(**(optimizer or {})),
        critic=CriticConfig(**{"lr": 1e-3, "count": critics, **(optimizer or {})}),
        reward=RewardConfig(overlong=OverlongConfig(filter=overlong)),
        algorithm=AlgorithmConfig(**{"advantage": "gae", **algorithm}),
        teacher=TeacherConfig(**(teacher or {})),
        update=UpdateConfig(
            mini_batch=mini_batch,
            tokens_per_micro_batch=budget,
            logprob_chunk=chunk,
            share_prompts=share_prompts,
        ),
    )


def load(model: torch.nn.Module, folder: Path, runtime: Runtime, critic: bool = False) -> None:
    """Load the weights of a Hugging Face folder into this rank's model."""
    from megarl.weights.families import model_weights
    from megarl.weights.hf import HFFolder, load_into
    from megarl.weights.shards import megatron_layout

    source = HFFolder(folder, critic=critic)
    shards = megatron_layout(source.config, runtime.layout, critic=critic)[runtime.rank][1]
    load_into(model_weights(dict(model.named_parameters())), shards, source)


def load_adapters(
    model: Any, folder: Path, runtime: Runtime, lora: Any, given: Mapping[str, torch.Tensor]
) -> None:
    """Load this rank's parts of full adapters, named as in PEFT without its prefix."""
    from megarl.weights.boxes import view
    from megarl.weights.families import read_config, rename_to_table
    from megarl.weights.shards import megatron_layout

    named = rename_to_table(dict(model.named_parameters()))
    for name, shard in megatron_layout(read_config(folder), runtime.layout, lora=lora)[runtime.rank][
        1
    ].items():
        assert tuple(named[name].shape) == shard.shape, name
        for region in shard.regions:
            view(named[name], region.local_box).copy_(view(given[region.hf_name], region.hf_box))


def logprobs(
    runtime: Runtime,
    folder: Path,
    prompts: list[list[int]],
    responses: list[list[int]],
    temperature: float = 1.0,
    sequence_parallel: bool | None = None,
    model: Mapping[str, Any] | None = None,
    routing: torch.Tensor | None = None,
    sets: torch.Tensor | None = None,
    dtype: str = "fp32",
    budget: int = 40,
    chunk: int = 7,
    top_k: int | None = None,
) -> Any:
    """Compute log-probabilities and entropy of all response tokens, in the given order, on every rank.

    Args:
        budget: tokens per micro-batch.
        chunk: `update.logprob_chunk`.
        top_k: instead return log-probs and ids of the k most likely tokens of each position, on the last
            stage.
        routing: the engine's choice of experts, [T, layers, topk]. Each replica then computes its share of
            the sequences, and the result is the log-probabilities and the routers' counts.
        sets: sampling sets to replay, [T, k]."""
    from megarl.model.builder import build_actor
    from megarl.model.hf_config import read_hf_config
    from megarl.training.model import InferenceModel

    config = make_config(folder, sequence_parallel=sequence_parallel, model=model, dtype=dtype, chunk=chunk)
    config = config.model_copy(
        update={"rollout": config.rollout.model_copy(update={"temperature": temperature})}
    )
    actor = build_actor(config, read_hf_config(folder), runtime)
    load(actor, folder, runtime)
    experience = TrainBatch.build(prompts, responses)
    if routing is not None:
        experience["routing"] = routing
    if sets is not None:
        experience["sampling_sets"] = sets
    rows = range(len(prompts)) if routing is None else range(runtime.dp_rank, len(prompts), runtime.layout.dp)
    batches = make_micro_batches(experience, rows, budget, actor, runtime)
    inference = InferenceModel("actor", actor, runtime)
    inference.replays_routing, inference.replays_sampling = routing is not None, sets is not None
    start_counting(actor.routings, grad=False)
    mask = experience.response_mask
    if top_k is not None:
        columns = inference.top_k_columns(experience, batches, top_k, 300)
        return columns["logprobs"][mask], columns["tokens"][mask]
    columns = inference.logprob_columns(experience, batches)
    if routing is None:
        return columns["logprobs"][mask], columns["entropy"][mask]
    counts = sum_over_ranks(
        runtime, routing_counts(actor.routings, actor.config.num_layers, actor.config.num_moe_experts)
    )
    shared = sum_over_replicas(runtime, columns["logprobs"][mask])
    return shared, counts


def values(
    runtime: Runtime,
    folder: Path,
    prompts: list[list[int]],
    responses: list[list[int]],
    model: Mapping[str, Any] | None = None,
) -> Any:
    """Compute the values of the states in which the response tokens were chosen."""
    from megarl.model.builder import build_critic
    from megarl.model.hf_config import read_hf_config
    from megarl.training.model import InferenceModel

    critic = build_critic(make_config(folder, model=model), read_hf_config(folder), runtime)
    load(critic, folder, runtime, critic=True)
    experience = TrainBatch.build(prompts, responses)
    batches = make_micro_batches(experience, range(len(prompts)), 40, critic)
    return InferenceModel("critic", critic, runtime).value_columns(experience, batches)["values"][
        experience.response_mask
    ]


def reward_scores(
    runtime: Runtime,
    folder: Path,
    prompts: list[list[int]],
    responses: list[list[int]],
    group_ids: list[int] | None = None,
) -> tuple[Any, list[int]]:
    """Score all responses with a reward model, in the given order, on every rank.

    Also returns the number of sequences in each micro-batch of this replica's share. `group_ids`: groups
    whose prompts are shared."""
    from megarl.model.builder import build_critic
    from megarl.model.hf_config import read_hf_config
    from megarl.training.batch import gather_responses, make_train_batch
    from megarl.training.model import InferenceModel

    config = make_config(folder, mini_batch=4, share_prompts=group_ids is not None)
    built = build_critic(config, read_hf_config(folder), runtime)
    load(built, folder, runtime, critic=True)
    batch = TrainBatch.build(prompts, responses)
    if group_ids is not None:
        batch["group_ids"] = torch.tensor(group_ids)
    for column in ("correct", "truncated"):
        batch[column] = torch.zeros(len(prompts), dtype=torch.bool)
    rollout = RolloutBatch.from_train_batch(batch)
    local = make_train_batch(rollout, config, 4, 3, [built], runtime)
    model = InferenceModel("reward", built, runtime)
    scores = model.sequence_scores(local, local.micro_batches)
    ends = local.cu_seqlens[1:] - 1
    packed = [int(torch.isin(b.token_indices, ends).sum()) for b in local.micro_batches]
    return gather_responses(scores, rollout, local, runtime), packed


def advantages_of_turns(
    runtime: Runtime, folder: Path, batch: TrainBatch, options: dict[str, Any]
) -> TrainBatch:
    """Return the batch with a critic's values, advantages and returns."""
    from megarl.model.builder import build_critic
    from megarl.model.hf_config import read_hf_config
    from megarl.training.columns import add_gae
    from megarl.training.model import InferenceModel

    config = make_config(folder, **options)
    critic = build_critic(config, read_hf_config(folder), runtime)
    load(critic, folder, runtime, critic=True)
    batches = make_micro_batches(batch, range(batch.num_sequences), 40, critic)
    batch["values"] = InferenceModel("critic", critic, runtime).value_columns(batch, batches)["values"]
    add_gae(config, batch, runtime)
    return batch


def gradients(
    runtime: Runtime,
    folder: Path,
    batch: TrainBatch,
    which: str,
    options: dict[str, Any],
    prompts: list[int] | None = None,
    adapters: Mapping[str, torch.Tensor] | None = None,
) -> Any:
    """Compute the gradients of one mini-batch and the sums of its statistics.

    Gradients have Hugging Face names and shapes, on rank 0 ({} on other ranks).

    Args:
        which: actor, critic or critic_2.
        prompts: prompt lengths in tokens; rank 0 then owns all sampled responses and delivers them.
        adapters: initial LoRA adapters; their gradients are returned under PEFT's names."""
    from megarl.config.methods import load_function
    from megarl.model.builder import build_actor, build_critic
    from megarl.model.hf_config import read_hf_config
    from megarl.parallel.comm import sum_stats
    from megarl.schedule.phases import sample_uniforms
    from megarl.training.batch import make_train_batch
    from megarl.training.columns import correct_mismatch
    from megarl.training.model import TrainableModel
    from megarl.training.objectives import actor_loss, critic_loss, list_candidates

    config = make_config(folder, mini_batch=batch.num_sequences, **options)
    which, _, last = which.partition("_")
    critic = int(last or 1) - 1
    build = build_critic if which == "critic" else build_actor
    model = build(config, read_hf_config(folder), runtime)
    load(model, folder, runtime, critic=which == "critic")
    settings = config.critic if which == "critic" else config.actor
    if adapters is not None:
        load_adapters(model, folder, runtime, settings.lora, adapters)
    learner = TrainableModel(which, model, settings, config.steps, runtime)
    given = RolloutBatch.from_train_batch(batch)
    if prompts is not None:
        rows = torch.arange(batch.num_sequences if runtime.rank == 0 else 0)
        own = batch.select(rows)
        names = [name for name, column in batch.columns.items() if len(column) == batch.num_sequences]
        given = RolloutBatch(
            lengths=batch.lengths,
            response_lengths=batch.response_lengths,
            prompt_lengths=torch.tensor(prompts),
            owners=torch.zeros(batch.num_sequences, dtype=torch.int64),
            columns={name: batch[name] for name in names},
            rows=rows,
            local=replace(own, columns={n: column for n, column in own.columns.items() if n not in names}),
        )
    local = make_train_batch(given, config, config.update.mini_batch, 3, [model], runtime)
    correct_mismatch(config.algorithm.mismatch, local, runtime)
    learner.replays_routing, learner.replays_sampling = "routing" in batch, "sampling_sets" in batch
    [micro_batches] = local.critic_mini_batches[critic] if which == "critic" else local.mini_batches
    algorithm, experience = config.algorithm, local
    if which == "critic":
        loss = critic_loss(algorithm, experience, critic)
    elif selector := algorithm.policy_loss.selector:
        of_policy = learner.logprob_columns(experience, micro_batches)["logprobs"]
        draws = sample_uniforms(experience, 0, 1, 1)
        select = load_function(selector)
        arguments = algorithm.arguments(algorithm.policy_loss.selector_options)
        found = select(algorithm, experience, micro_batches, of_policy, draws, runtime, **arguments)
        loss = actor_loss(algorithm, experience, found)
    else:
        loss = actor_loss(algorithm, experience, teacher=config.teacher)
        if (candidates := list_candidates(experience)) is not None:
            micro_batches = [replace(one, candidates=candidates) for one in micro_batches]
    sums = sum_stats(runtime, learner.compute_gradients(micro_batches, loss))
    with on_cpu():
        learner.optimizer.prepare_grads()
        norm = learner.optimizer.get_grad_norm()
    _gather_shards(learner)
    # Frozen parameters have no gradient; they count as zeros.
    grads = {
        name: p.main_grad.clone() if p.requires_grad else torch.zeros(p.shape)
        for name, p in learner.model.named_parameters()
    }
    gathered = _in_hf_names(grads, folder, runtime, which == "critic")
    if adapters is not None:
        gathered |= _in_hf_names(grads, folder, runtime, which == "critic", settings.lora)
    computed = sum(batch.tokens.shape[1] for batch in micro_batches)
    tokens = {"tokens": local.num_tokens, "computed": computed}
    return {"gradients": gathered, "norm": norm, "sums": sums, **tokens}


def groups_in_use(runtime: Runtime, **arguments: Any) -> tuple[list[Any], list[Any]]:
    """Return (members, name) of two lists of process groups.

    The first lists the groups that this rank used when it started, the second those whose collective
    counters advance in `gradients`."""
    from torch.distributed.distributed_c10d import _world

    def count() -> dict[Any, int]:
        return {group: group._get_sequence_number_for_group() for group in _world.pg_map}

    before = count()
    gradients(runtime, **arguments)
    used = [
        group
        for group, number in count().items()
        if number > before.get(group, 0) and dist.get_world_size(group) > 1
    ]
    return USED_AT_START, [(dist.get_process_group_ranks(group), group.group_desc) for group in used]


def _gather_shards(learner: Any) -> None:
    """Gather the full reduced gradients on each data-parallel rank.

    The distributed optimizer leaves each rank only the reduced gradients of its shard."""
    import torch.distributed as dist

    for buffer in learner.buffers:
        group = buffer.data_parallel_group
        for bucket in buffer.buckets:
            mine = bucket.grad_data.chunk(group.size())[group.rank()].clone()
            dist.all_gather_into_tensor(bucket.grad_data, mine, group=group)


def _in_hf_names(
    tensors: Mapping[str, torch.Tensor], folder: Path, runtime: Runtime, critic: bool, lora: Any = None
) -> dict[str, torch.Tensor]:
    """Gather all ranks' float32 tensors under Hugging Face names on rank 0 ({} on other ranks).

    `tensors` is keyed by parameter name. With `lora`, gathers the adapters only."""
    from megarl.sync.plan import make_plan
    from megarl.sync.transfer import Transfer
    from megarl.weights.families import rename_to_table
    from megarl.weights.hf import HFFolder
    from megarl.weights.shards import hf_shards, megatron_layout

    hf_config = HFFolder(folder, critic=critic).config
    targets = hf_shards(hf_config, critic=critic, lora=lora)
    plan = make_plan(megatron_layout(hf_config, runtime.layout, critic=critic, lora=lora), [(0, targets)])
    out = (
        {name: torch.full(shard.shape, torch.nan) for name, shard in targets.items()}
        if runtime.rank == 0
        else {}
    )
    Transfer(plan, runtime.rank, rename_to_table(dict(tensors)), out, 2**20, dtype=torch.float32).run()
    return out


def rollout_after_update(
    runtime: Runtime, folder: Path, out: Path, prompts: list[list[int]], dtype: str = "fp32"
) -> Any:
    """Update the actor once, sync its weights to this rank's engine, sample, and export the weights.

    Returns the engine's parameters, its log-probabilities of the sampled tokens and greedy responses, the
    trainer's log-probabilities of the sampled tokens, and the gradient norm."""
    from megarl.model.builder import DTYPES, build_actor
    from megarl.model.hf_config import read_hf_config
    from megarl.rollout.engines.base import GenerationRequest
    from megarl.rollout.engines.transformers_engine import TransformersEngine
    from megarl.rollout.sampling import SamplingParams
    from megarl.sync.export import export_hf
    from megarl.sync.plan import engine_plan
    from megarl.sync.transfer import Transfer
    from megarl.training.batch import make_train_batch
    from megarl.training.model import TrainableModel
    from megarl.training.objectives import supervised_loss
    from megarl.weights.families import rename_to_table
    from megarl.weights.hf import HFFolder

    config = make_config(folder, dtype=dtype, nll_weight=1.0)
    model = build_actor(config, read_hf_config(folder), runtime)
    load(model, folder, runtime)
    # Use the critic's learning rate: it is large enough for a visible change.
    learner = TrainableModel("actor", model, config.critic, config.steps, runtime)
    batch = TrainBatch.build([[3, 4]] * 4, [[5, 6, 7], [8, 9], [10], [11, 12]])
    batch["correct"], batch["truncated"] = torch.ones(4, dtype=torch.bool), torch.zeros(4, dtype=torch.bool)
    local = make_train_batch(RolloutBatch.from_train_batch(batch), config, 4, 0, [model], runtime)
    learner.begin_step()
    result = learner.update(local.mini_batches[0], supervised_loss(local))

    named = rename_to_table(dict(model.named_parameters()))
    engine = TransformersEngine(folder, dtype=DTYPES[dtype], eos_ids=(1,))
    engine.start()
    plan = engine_plan(config, HFFolder(folder).config, runtime.layout)
    plan.verify()
    engine.begin_update()
    Transfer(plan, runtime.rank, named, engine.parameters(), 2**12, dtype=DTYPES[dtype]).run()
    engine.end_update(1)
    sampled = engine.generate(
        [GenerationRequest(tuple(p), seed=i) for i, p in enumerate(prompts)], SamplingParams(max_tokens=12)
    )
    greedy = engine.generate(
        [GenerationRequest(tuple(p), seed=0) for p in prompts], SamplingParams(max_tokens=12, temperature=0.0)
    )
    export_hf(out, folder, runtime.layout, runtime.rank, named, dtype=DTYPES[dtype])

    experience = TrainBatch.build(prompts, [c.tokens for c in sampled])
    batches = make_micro_batches(experience, range(len(prompts)), 40, model)
    ours = learner.logprob_columns(experience, batches)["logprobs"][experience.response_mask]
    return {
        "parameters": {name: tensor.clone() for name, tensor in engine.parameters().items()},
        "engine": torch.tensor([x for c in sampled for x in c.logprobs.tolist()]),
        "trainer": ours,
        "greedy": [c.tokens.tolist() for c in greedy],
        "grad_norm": result.grad_norm,
    }


def update_with_bad_loss(runtime: Runtime, folder: Path, bad_rank: int, what: str) -> Any:
    """Run an update whose loss or gradient is not finite on one rank.

    Returns the error's text and whether the weights are unchanged."""
    from megarl.config.errors import NumericalError
    from megarl.model.builder import build_actor
    from megarl.model.hf_config import read_hf_config
    from megarl.training.model import TrainableModel

    config = make_config(folder)
    model = build_actor(config, read_hf_config(folder), runtime)
    load(model, folder, runtime)
    learner = TrainableModel("actor", model, config.critic, config.steps, runtime)
    batches = make_micro_batches(TrainBatch.build([[3, 4]], [[5, 6, 7]]), [0], 40, model)
    learner.begin_step()
    before = [p.detach().clone() for p in model.parameters()]

    def loss(output: Any, batch: Any) -> Any:
        value = output[0].sum()
        if runtime.rank == bad_rank:
            value = value * float("nan") if what == "loss" else _InfiniteGradient.apply(value)
        return value, {}

    try:
        learner.update(batches, loss)
    except NumericalError as error:
        return str(error), all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    return None, False


class _InfiniteGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * float("inf")


def learning_rates(runtime: Runtime, folder: Path, steps: int) -> Any:
    """Return the critic's learning rate at each step of value pretraining and of the main schedule.

    Value pretraining has a separate constant rate."""
    from megarl.config.schema import CriticConfig
    from megarl.model.builder import build_critic
    from megarl.model.hf_config import read_hf_config
    from megarl.training.model import TrainableModel

    model = build_critic(make_config(folder), read_hf_config(folder), runtime)
    config = CriticConfig(lr=1e-2, schedule="linear", warmup_steps=2, min_lr_ratio=0.1)
    learner = TrainableModel("critic", model, config, steps, runtime)

    def rates(count: int) -> list[float]:
        found = []
        for _ in range(count):
            learner.begin_step()
            found.append(learner.lr)
        return found

    learner.start_schedule(3, constant_lr=1e-4)
    pretraining = rates(3)
    learner.start_schedule(steps)
    return pretraining, rates(steps)


def updates_with_moves(
    runtime: Runtime,
    folder: Path,
    which: str,
    dtype: str,
    moves: bool,
    model: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Run three updates, with all tensor groups offloaded and onloaded before each if `moves`.

    Returns gradient norms, all tensors, the bytes left on the device (`away`), and the groups' bytes."""
    from megatron.core import parallel_state

    from megarl.model.builder import build_actor, build_critic
    from megarl.model.hf_config import read_hf_config
    from megarl.parallel.offload_group import HostPool
    from megarl.training.batch import make_train_batch
    from megarl.training.model import TrainableModel
    from megarl.training.objectives import critic_loss, supervised_loss
    from megarl.training.tensor_groups import tensor_groups

    config = make_config(folder, mini_batch=6, dtype=dtype, model=model)
    built = (build_critic if which == "critic" else build_actor)(config, read_hf_config(folder), runtime)
    load(built, folder, runtime, critic=which == "critic")
    learner = TrainableModel(which, built, config.critic, config.steps, runtime)
    pool = HostPool(runtime.device, 4096)
    groups = tensor_groups(learner, pool)
    batch = TrainBatch.build([[3, 9, 4, 5 + i] for i in range(6)], [[7 + i, 8, 1] for i in range(6)])
    batch["correct"], batch["truncated"] = torch.ones(6, dtype=torch.bool), torch.zeros(6, dtype=torch.bool)
    batch["values"], batch["returns"] = torch.zeros(batch.num_tokens), torch.ones(batch.num_tokens)
    local = make_train_batch(RolloutBatch.from_train_batch(batch), config, 6, 3, [built], runtime)
    loss = critic_loss(config.algorithm, local) if which == "critic" else supervised_loss(local)
    norms, away, storages = [], 0, [p.untyped_storage() for p in built.parameters()]
    for _ in range(3):
        for group in groups.values() if moves else ():
            group.offload()
        # Megatron's layers gather into this buffer
        gathered = parallel_state.get_global_memory_buffer().buffer.values()
        away += sum(s.nbytes() for s in storages) + sum(tensor.nbytes for tensor in gathered)
        for group in groups.values() if moves else ():
            group.onload()
        learner.begin_step()
        norms.append(learner.update(local.mini_batches[0], loss).grad_norm)
    states = [state for part in learner.optimizers for state in part.state.values()]
    tensors = {f"weights {name}": p.data.clone() for name, p in built.named_parameters()}
    tensors |= {
        f"state {i} {key}": value.clone()
        for i, state in enumerate(states)
        for key, value in state.items()
        if torch.is_tensor(value)
    }
    sizes = {name: group.nbytes for name, group in groups.items()}
    return {
        "norms": norms,
        "tensors": tensors,
        "away": away,
        "bytes": {"host": pool.nbytes, **sizes} if moves else {},
        "sizes": sizes,
    }


def left_behind(
    runtime: Runtime, folder: Path, model: Mapping[str, Any] | None = None
) -> list[tuple[int, tuple[int, ...]]]:
    """List what an update allocates and leaves allocated after all tensor groups are offloaded.

    Returns bytes and tensor shape of each storage, the largest first."""
    from megarl.model.builder import build_actor
    from megarl.model.hf_config import read_hf_config
    from megarl.parallel.offload_group import HostPool
    from megarl.training.batch import make_train_batch
    from megarl.training.model import TrainableModel
    from megarl.training.objectives import supervised_loss
    from megarl.training.tensor_groups import tensor_groups

    def alive() -> dict[int, Any]:
        gc.collect()
        tensors = [thing for thing in gc.get_objects() if isinstance(thing, torch.Tensor)]
        return {tensor.untyped_storage()._cdata: tensor for tensor in tensors if tensor.device.type != "meta"}

    config = make_config(folder, mini_batch=6, dtype="bf16", model=model)
    built = build_actor(config, read_hf_config(folder), runtime)
    load(built, folder, runtime)
    learner = TrainableModel("actor", built, config.actor, config.steps, runtime)
    pool = HostPool(runtime.device, 4096)
    groups = tensor_groups(learner, pool)
    batch = TrainBatch.build([[3, 9, 4, 5 + i] for i in range(6)], [[7 + i, 8, 1] * 5 for i in range(6)])
    batch["correct"], batch["truncated"] = torch.ones(6, dtype=torch.bool), torch.zeros(6, dtype=torch.bool)
    local = make_train_batch(RolloutBatch.from_train_batch(batch), config, 6, 3, [built], runtime)
    before = alive().keys()
    learner.begin_step()
    learner.update(local.mini_batches[0], supervised_loss(local))
    for group in groups.values():
        group.offload()
    left = {key: tensor for key, tensor in alive().items() if key not in before}
    sizes = [(tensor.untyped_storage().nbytes(), tuple(tensor.shape)) for tensor in left.values()]
    # The offloaded groups lie in chunks of the host pool; generator states are on the host too.
    of_the_host = ((pool.chunk,), tuple(torch.get_rng_state().shape))
    return sorted((size for size in sizes if size[0] and size[1] not in of_the_host), reverse=True)


def around_a_checkpoint(runtime: Runtime, folder: Path, checkpoint: Path, read: bool) -> dict[str, Any]:
    """Run two updates. A checkpoint is written after the first, or replaces it if `read`.

    Returns all tensors between the two updates and after the second."""
    import megatron.core

    from megarl.model.builder import build_actor
    from megarl.model.hf_config import read_hf_config
    from megarl.training.batch import make_train_batch
    from megarl.training.model import TrainableModel
    from megarl.training.objectives import supervised_loss
    from megarl.training.sharded import load_trainable
    from tests.checkpoints import save_model

    config = make_config(folder, mini_batch=6)
    model = build_actor(config, read_hf_config(folder), runtime)
    load(model, folder, runtime)
    learner = TrainableModel("actor", model, config.critic, config.steps, runtime)
    batch = TrainBatch.build([[3, 9, 4, 5 + i] for i in range(6)], [[7 + i, 8, 1] for i in range(6)])
    batch["correct"], batch["truncated"] = torch.ones(6, dtype=torch.bool), torch.zeros(6, dtype=torch.bool)
    local = make_train_batch(RolloutBatch.from_train_batch(batch), config, 6, 3, [model], runtime)

    def update() -> None:
        learner.begin_step()
        learner.update(local.mini_batches[0], supervised_loss(local))

    def tensors() -> dict[str, torch.Tensor]:
        found = {f"weights {name}": p.data.clone() for name, p in model.named_parameters()}
        states = [state for part in learner.optimizers for state in part.state.values()]
        return found | {
            f"state {i} {key}": value.clone()
            for i, state in enumerate(states)
            for key, value in state.items()
        }

    if read:
        load_trainable(learner, checkpoint)
    else:
        update()
        save_model(learner, checkpoint)
    between = tensors()
    update()
    return {"version": megatron.core.__version__, "between": between, "after": tensors()}


def updates_with_overlap(runtime: Runtime, folder: Path, checkpoint: Path, **parallel: Any) -> dict[str, Any]:
    """Update twice on two mini-batches each, with offload and onload after each step.

    Returns gradient norms, weights, the weights read from a checkpoint, and whether the replicas had the
    same weights after each update."""
    from megarl.config.schema import ParallelConfig
    from megarl.model.builder import build_actor
    from megarl.model.hf_config import read_hf_config
    from megarl.parallel.comm import gather_objects
    from megarl.parallel.offload_group import HostPool
    from megarl.training.batch import make_train_batch
    from megarl.training.model import TrainableModel
    from megarl.training.objectives import supervised_loss
    from megarl.training.sharded import load_trainable
    from megarl.training.tensor_groups import tensor_groups
    from tests.checkpoints import save_model

    config = make_config(folder, mini_batch=4, budget=16)

    def learner(**parallel: Any) -> Any:
        model = build_actor(config, read_hf_config(folder), runtime)
        load(model, folder, runtime)
        return TrainableModel(
            "actor", model, config.critic, config.steps, runtime, ParallelConfig(**parallel)
        )

    ours = learner(**parallel)
    batch = TrainBatch.build(
        [[3, 9, 4, 5 + i % 7] for i in range(8)], [[7 + i, 8, 1][: 1 + i % 3] for i in range(8)]
    )
    batch["correct"], batch["truncated"] = torch.ones(8, dtype=torch.bool), torch.zeros(8, dtype=torch.bool)
    local = make_train_batch(RolloutBatch.from_train_batch(batch), config, 4, 3, [ours.model], runtime)
    norms, alike = [], []
    for _ in range(2):
        ours.begin_step()
        for number, micro_batches in enumerate(local.mini_batches, start=1):
            norms.append(
                ours.update(
                    micro_batches, supervised_loss(local), more=number < len(local.mini_batches)
                ).grad_norm
            )
            size = float(sum(p.detach().double().abs().sum() for p in ours.model.parameters()))
            sums = gather_objects(runtime, size, float)
            stage = [
                sums[rank]
                for rank in range(runtime.world)
                if runtime.layout.coords(rank).pp == runtime.pp_rank
            ]
            alike.append(len(set(stage)) == 1)
        groups = tensor_groups(ours, HostPool(runtime.device, 4096))
        for group in groups.values():
            group.offload()
        for group in groups.values():
            group.onload()
    weights = {name: p.detach().clone() for name, p in ours.model.named_parameters()}
    save_model(ours, checkpoint)
    again = learner()
    load_trainable(again, checkpoint)
    back = {name: p.detach().clone() for name, p in again.model.named_parameters()}
    buckets = sum(len(buffer.buckets) for buffer in ours.buffers)
    return {"norms": norms, "weights": weights, "back": back, "alike": alike, "buckets": buckets}


def read_without_a_call(runtime: Runtime, folder: Path) -> list[str]:
    """List trainable weights of an actor whose modules are never called in the forward pass."""
    from megarl.config.schema import ParallelConfig
    from megarl.model.builder import build_actor
    from megarl.model.hf_config import read_hf_config
    from megarl.training.batch import make_train_batch
    from megarl.training.model import TrainableModel
    from megarl.training.objectives import supervised_loss

    config = make_config(folder, mini_batch=4, budget=16)
    model = build_actor(config, read_hf_config(folder), runtime)
    load(model, folder, runtime)
    ours = TrainableModel("actor", model, config.critic, config.steps, runtime, ParallelConfig())
    batch = TrainBatch.build([[3, 9, 4, 5 + i] for i in range(4)], [[7 + i, 8, 1] for i in range(4)])
    batch["correct"], batch["truncated"] = torch.ones(4, dtype=torch.bool), torch.zeros(4, dtype=torch.bool)
    local = make_train_batch(RolloutBatch.from_train_batch(batch), config, 4, 3, [ours.model], runtime)
    called: set[torch.nn.Module] = set()
    hooks = [
        module.register_forward_pre_hook(lambda module, _: called.add(module)) for module in model.modules()
    ]
    ours.begin_step()
    ours.update(local.mini_batches[0], supervised_loss(local))
    for hook in hooks:
        hook.remove()
    return [
        f"{name}.{weight}"
        for name, module in model.named_modules()
        for weight, parameter in module.named_parameters(recurse=False)
        if parameter.requires_grad and module not in called
    ]


def stage_parts(runtime: Runtime, length: int, offset: int) -> str:
    """Have each rank copy two of a tensor's `length` numbers, starting at rank * `offset`.

    Returns the error's text, "" if there is none."""
    from megatron.core.dist_checkpointing import ShardedTensor

    from megarl.training.saving import HostCopier

    at = (runtime.rank * offset,)
    part = ShardedTensor(
        "weights", torch.zeros(2), torch.float32, (2,), (length,), at, axis_fragmentations=None
    )
    try:
        HostCopier(runtime).copy_state({"model": {"weights": part}, "schedule_steps": 3})
    except RuntimeError as error:
        return str(error)
    return ""


def saved_before_a_step(runtime: Runtime, folder: Path) -> bool:
    """Save a model before its first step and load it into another one.

    Returns whether both have the same weights and moments."""
    from megarl.training.sharded import load_trainable
    from tests.checkpoints import save_model
    from tests.plan.jobs import learner_of

    torch.manual_seed(5)  # replicas start with the same weights
    first, second = (learner_of(runtime, "qwen2", "bf16", critic=False)[1] for _ in range(2))
    save_model(first, folder)
    load_trainable(second, folder)

    def tensors(learner: Any) -> list[torch.Tensor]:
        states = learner.optimizer.optimizer.state.values()
        return [*learner.model.parameters(), *(state[key] for state in states for key in sorted(state))]

    ours, theirs = tensors(first), tensors(second)
    return len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def partly_frozen(
    runtime: Runtime,
    folder: Path,
    checkpoint: Path,
    read: bool,
    which: str,
    optimizer: dict[str, Any],
    overlap: bool,
    dtype: str = "fp32",
    layers: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Run two updates as `around_a_checkpoint`, for a partly frozen model, with an offload after each.

    Returns this rank's numbers of parameters: trained, in gradient buffers and in the optimizer. Also
    returns the optimizer's step counts, and on rank 0 the full weights before, between and after the
    updates."""
    from megarl.model.builder import build_actor, build_critic
    from megarl.model.hf_config import read_hf_config
    from megarl.parallel.offload_group import HostPool
    from megarl.training.batch import make_train_batch
    from megarl.training.model import TrainableModel
    from megarl.training.objectives import critic_loss, supervised_loss
    from megarl.training.sharded import load_model, load_trainable, megatron_state
    from megarl.training.tensor_groups import tensor_groups
    from tests.checkpoints import save_model

    critic = which == "critic"
    given = {"lr": 1e-3, "weight_decay": 0.1, **optimizer}
    config = make_config(folder, mini_batch=6, optimizer=given, dtype=dtype, model=layers)
    model = (build_critic if critic else build_actor)(config, read_hf_config(folder), runtime)
    load(model, folder, runtime, critic=critic)
    settings = config.critic if critic else config.actor
    parallel = ParallelConfig(overlap_grad_reduce=overlap, overlap_param_gather=overlap)
    learner = TrainableModel(which, model, settings, config.steps, runtime, parallel)
    groups = tensor_groups(learner, HostPool(runtime.device, 4096))
    batch = TrainBatch.build([[3, 9, 4, 5 + i] for i in range(6)], [[7 + i, 8, 1] for i in range(6)])
    batch["correct"], batch["truncated"] = torch.ones(6, dtype=torch.bool), torch.zeros(6, dtype=torch.bool)
    batch["values"], batch["returns"] = torch.zeros(batch.num_tokens), torch.ones(batch.num_tokens)
    local = make_train_batch(RolloutBatch.from_train_batch(batch), config, 6, 3, [model], runtime)
    loss = critic_loss(config.algorithm, local) if critic else supervised_loss(local)

    def weights() -> dict[str, torch.Tensor]:
        named = {name: p.detach() for name, p in model.named_parameters()}
        whole = _in_hf_names(named, folder, runtime, critic)
        adapters = settings.lora.rank is not None
        return whole | (_in_hf_names(named, folder, runtime, critic, settings.lora) if adapters else {})

    def update() -> None:
        learner.begin_step()
        learner.update(local.mini_batches[0], loss)
        for group in groups.values():
            group.offload()
        left.append(sum(p.untyped_storage().nbytes() for p in model.parameters()))
        for group in groups.values():
            group.onload()

    left: list[int] = []  # bytes of parameters that were not offloaded
    before = weights()
    if read:
        load_trainable(learner, checkpoint)
        alone = (build_critic if critic else build_actor)(config, read_hf_config(folder), runtime)
        load(alone, folder, runtime, critic=critic)
        load_model(alone, checkpoint)
        pairs = zip(alone.named_parameters(), model.parameters(), strict=True)
        assert [name for (name, one), other in pairs if not torch.equal(one, other)] == [], "read alone"
    else:
        update()
        save_model(learner, checkpoint)
    between = weights()
    update()
    written = megatron_state(learner, is_loading=False)["optimizer"]
    return {
        "trained": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "buffered": sum(p.numel() for p in model.parameters() if hasattr(p, "main_grad")),
        "optimized": sum(
            p.numel() for part in learner.optimizers for g in part.param_groups for p in g["params"]
        ),
        "steps": {  # Muon has no step count
            group["step"]
            for state in written.values()
            for group in state.get("optimizer", {}).get("param_groups", ())
        },
        "lr": learner.lr,
        "left": left,
        "weights": (before, between, weights()),
    }


def updates_with_muon(
    runtime: Runtime, folder: Path, optimizer: dict[str, Any], updates: int, overlap: bool = False
) -> list[dict[str, torch.Tensor]]:
    """Update the actor several times with Muon.

    Returns the initial weights, then each update's gradient and new weights, in Hugging Face names and
    shapes (rank 0; {} on other ranks)."""
    from megarl.model.builder import build_actor
    from megarl.model.hf_config import read_hf_config
    from megarl.training.batch import make_train_batch
    from megarl.training.model import TrainableModel
    from megarl.training.objectives import supervised_loss

    config = make_config(folder, mini_batch=6, optimizer=optimizer)
    model = build_actor(config, read_hf_config(folder), runtime)
    load(model, folder, runtime)
    parallel = ParallelConfig(overlap_grad_reduce=overlap, overlap_param_gather=overlap, overlap_bucket=2000)
    learner = TrainableModel("actor", model, config.actor, config.steps, runtime, parallel)
    batch = TrainBatch.build([[3, 9, 4, 5 + i] for i in range(6)], [[7 + i, 8, 1] for i in range(6)])
    batch["correct"], batch["truncated"] = torch.ones(6, dtype=torch.bool), torch.zeros(6, dtype=torch.bool)
    local = make_train_batch(RolloutBatch.from_train_batch(batch), config, 6, 3, [model], runtime)
    loss, found = supervised_loss(local), []

    def whole(of: Any) -> dict[str, torch.Tensor]:
        return _in_hf_names({n: of(p).clone() for n, p in model.named_parameters()}, folder, runtime, False)

    found.append(whole(lambda parameter: parameter.detach()))
    for _ in range(updates):
        learner.begin_step()
        learner.compute_gradients(local.mini_batches[0], loss)
        _gather_shards(learner)
        found.append(whole(lambda parameter: parameter.main_grad))
        learner.update(local.mini_batches[0], loss)
        found.append(whole(lambda parameter: parameter.detach()))
    return found


def syncs_of_frozen(runtime: Runtime, folder: Path, optimizer: dict[str, Any]) -> list[dict[str, Any]]:
    """Sync weights to each rank's engine three times, with fingerprints.

    The engine's weights are corrupted before the second sync. Before the third the engine sleeps and loses
    them. Returns for each sync the bytes written, sent and kept, the actor's weights (on rank 0) and the
    engine's."""
    from megarl.model.builder import build_actor
    from megarl.model.hf_config import read_hf_config
    from megarl.rollout.engines.transformers_engine import TransformersEngine
    from megarl.sync.weight_sync import make_weight_sync
    from megarl.weights.families import read_config

    config = make_config(folder, optimizer=optimizer)
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"fingerprint": True})})
    model = build_actor(config, read_hf_config(folder), runtime)
    load(model, folder, runtime)
    engine = TransformersEngine(folder, dtype=torch.float32, eos_ids=(1,))
    engine.start()
    sync = make_weight_sync(config, runtime, read_config(folder), model, engine)
    found = []
    for version in range(3):
        if version == 1:
            for tensor in engine.parameters().values():
                tensor.fill_(7.0)
        if version == 2:
            sync.sleep(["weights"])
            sync.wake(["weights"])
        stats = sync.sync(version)
        named = {name: p.detach() for name, p in model.named_parameters()}
        found.append(
            {
                "written": stats.bytes_received + stats.bytes_local,
                "sent": stats.bytes_sent,
                "kept": stats.metrics()["transfer/bytes_kept"],
                "actor": _in_hf_names(named, folder, runtime, critic=False),
                "engine": {name: tensor.clone() for name, tensor in engine.parameters().items()},
            }
        )
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data.add_(0.5)
    return found


def with_adapters(
    runtime: Runtime,
    folder: Path,
    lora: Mapping[str, Any],
    given: Mapping[str, torch.Tensor],
    prompts: list[list[int]],
    responses: list[list[int]],
    out: Path,
    dtype: str = "fp32",
    model: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Compute log-probs without adapters, with initial ones, with given ones, and with these disabled.

    Then syncs weights to this rank's engine, writes both exports, and syncs again after B has doubled."""
    from megarl.model.builder import DTYPES, build_actor
    from megarl.model.hf_config import read_hf_config
    from megarl.rollout.engines.transformers_engine import TransformersEngine
    from megarl.sync.export import export_hf, export_peft
    from megarl.sync.weight_sync import make_weight_sync
    from megarl.training.model import InferenceModel
    from megarl.weights.families import read_config
    from megarl.weights.lora import merged

    config = make_config(folder, dtype=dtype, optimizer={"lora": lora}, model=model)
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"fingerprint": True})})
    experience = TrainBatch.build(prompts, responses)

    def logprobs_of(model: Any, adapters: bool = True) -> torch.Tensor:
        batches = make_micro_batches(experience, range(len(prompts)), 40, model)
        inference = InferenceModel("actor", model, runtime, adapters=adapters)
        return inference.logprob_columns(experience, batches)["logprobs"][experience.response_mask]

    hf = read_hf_config(folder)
    alone, actor = (build_actor(one, hf, runtime) for one in (config.without_adapters(), config))
    for one in (alone, actor):
        load(one, folder, runtime)
    found = {"alone": logprobs_of(alone), "first": logprobs_of(actor)}
    load_adapters(actor, folder, runtime, config.actor.lora, given)
    found |= {"given": logprobs_of(actor), "off": logprobs_of(actor, adapters=False)}
    engine = TransformersEngine(folder, dtype=DTYPES[dtype], eos_ids=(1,))
    engine.start()
    sync = make_weight_sync(config, runtime, read_config(folder), actor, engine)
    sync.sync(0)
    found["engine"] = {name: tensor.clone() for name, tensor in engine.parameters().items()}
    place = folder, runtime.layout, runtime.rank
    named = dict(actor.named_parameters())
    sources = merged(named, read_config(folder), runtime.layout, runtime.rank, config.actor.lora)
    export_hf(out / "hf", *place, sources, dtype=DTYPES[dtype])
    export_peft(out / "lora", *place, named, config.actor.lora)
    for name, parameter in named.items():
        if name.endswith("_b"):
            parameter.data.mul_(2.0)
    stats = sync.sync(1)
    found["kept"] = stats.bytes_kept
    found["grown"] = {name: tensor.clone() for name, tensor in engine.parameters().items()}
    return found


def whole_optimizer(learner: Any, folder: Path, runtime: Runtime, critic: bool) -> dict[str, torch.Tensor]:
    """Gather weights and Adam's two moments of the full model on rank 0 ({} on other ranks).

    Tensors have Hugging Face names and shapes. Each rank of the distributed optimizer has a span of each
    moment."""
    named = dict(learner.model.named_parameters())
    found = {"weights": {name: p.detach().float() for name, p in named.items()}}
    for moment in ("exp_avg", "exp_avg_sq"):
        found[moment] = {}
        for name, parameter in named.items():
            whole = torch.zeros(parameter.shape)
            for part in learner.optimizers:
                if parameter in part.model_param_gbuf_map:
                    place = part._get_model_param_range_map(parameter)["param"]
                    states = part._get_main_param_and_optimizer_states(parameter)
                    whole.view(-1)[place.start : place.end] = states[moment]
            buffers = [
                buffer
                for chunk in learner.chunks
                for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
            ]
            holds = [buffer for buffer in buffers if parameter in buffer.param_to_bucket]
            assert len(holds) == parameter.requires_grad
            for buffer in holds:  # the other ranks' spans are zeros here
                dist.all_reduce(whole, group=buffer.data_parallel_group)
            found[moment][name] = whole
    return {
        f"{kind} {name}": tensor
        for kind, tensors in found.items()
        for name, tensor in _in_hf_names(tensors, folder, runtime, critic).items()
    }


def optimizer_around_a_checkpoint(
    runtime: Runtime,
    folder: Path,
    checkpoint: Path,
    batch: TrainBatch,
    which: str,
    read: bool,
    model: Mapping[str, Any] | None = None,
) -> dict[str, torch.Tensor]:
    """Return the full model and optimizer state after an update and a save, or after a load if `read`."""
    from megarl.model.builder import build_actor, build_critic
    from megarl.model.hf_config import read_hf_config
    from megarl.training.batch import make_train_batch
    from megarl.training.model import TrainableModel
    from megarl.training.objectives import actor_loss, critic_loss
    from megarl.training.sharded import load_trainable
    from tests.checkpoints import save_model

    critic = which == "critic"
    config = make_config(folder, mini_batch=batch.num_sequences, nll_weight=0.1, model=model)
    built = (build_critic if critic else build_actor)(config, read_hf_config(folder), runtime)
    load(built, folder, runtime, critic=critic)
    learner = TrainableModel(which, built, config.critic, config.steps, runtime)
    if read:
        load_trainable(learner, checkpoint)
    else:
        local = make_train_batch(
            RolloutBatch.from_train_batch(batch), config, config.update.mini_batch, 3, [built], runtime
        )
        learner.begin_step()
        loss = (critic_loss if critic else actor_loss)(config.algorithm, local)
        learner.update(local.mini_batches[0], loss)
        save_model(learner, checkpoint)
    return whole_optimizer(learner, folder, runtime, critic)
