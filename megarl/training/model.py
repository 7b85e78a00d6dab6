"""Actor, critic, reference and reward model on Megatron."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed import finalize_model_grads as megatron_finalize
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megarl.algorithms.losses import Stats, loss_metrics
from megarl.config.errors import NumericalError
from megarl.config.schema import OptimizerConfig, ParallelConfig
from megarl.data.batch import MicroBatch, TrainBatch
from megarl.model.builder import ModelChunks
from megarl.model.lora import without_adapters
from megarl.model.routing import routing_counts, routing_metrics, start_counting
from megarl.parallel.comm import (
    any_rank,
    broadcast_from_last_stage,
    gather_objects,
    sum_over_ranks,
    sum_stats,
)
from megarl.parallel.cpu_platform import on_cpu
from megarl.parallel.layout import OVERLAP_ABOVE
from megarl.parallel.runtime import Runtime
from megarl.training.micro_batch import add_candidates, gather_output, make_label_fields, renormalise
from megarl.training.muon import muon_buffer_layouts, muon_options
from megarl.training.param_gather import ParamGather
from megarl.training.self_teacher import AverageWeights

# loss(output of the head, micro-batch) -> (loss with global denominators, statistics as sums)
Loss = Callable[[Any, MicroBatch], tuple[Tensor, Stats]]


def _finalize(model: Any, num_tokens: Any = None, **groups: Any) -> None:
    # Losses contain their global denominators; Megatron must not divide gradients by num_tokens.
    megatron_finalize(model, None, **groups)


class InferenceModel:
    """A forward-only model: reference policy, reward model, or the actor without its adapters.

    Passes raise NumericalError on every rank if a number is not finite."""

    def __init__(self, name: str, model: ModelChunks, runtime: Runtime, *, adapters: bool = True) -> None:
        self.name, self.model, self.runtime = name, model, runtime
        self.adapters = adapters  # False: with LoRA disabled
        self.chunks: list[Any] = list(model.chunks)
        self.megatron_seconds = 0.0
        self.replays_routing = self.replays_sampling = False

    def logprob_columns(
        self, batch: TrainBatch, micro_batches: Sequence[MicroBatch], *, squared_probs: bool = False
    ) -> dict[str, Tensor]:
        """Compute logprobs and entropy, float32 [T], 0 outside responses, on every pipeline stage.

        squared_probs: also a column of the sums of squared probabilities"""
        if not squared_probs:
            return self._columns(("logprobs", "entropy"), batch, micro_batches)
        try:
            for chunk in self.model.chunks:
                chunk.sums_squares = True
            return self._columns(("logprobs", "entropy", "squared_probs"), batch, micro_batches)
        finally:
            for chunk in self.model.chunks:
                chunk.sums_squares = False

    def top_k_columns(
        self, batch: TrainBatch, micro_batches: Sequence[MicroBatch], k: int, limit: int
    ) -> dict[str, Tensor]:
        """Compute the top k tokens below `limit` and their logprobs, float32 [T, k].

        [T, 0] before the last pipeline stage."""
        try:
            for chunk in self.model.chunks:
                chunk.top_k = k, limit
            return self._columns(("logprobs", "tokens"), batch, micro_batches, k)
        finally:
            for chunk in self.model.chunks:
                chunk.top_k = None

    @contextmanager
    def free_routing(self) -> Iterator[None]:
        replays_routing, self.replays_routing = self.replays_routing, False
        try:
            yield
        finally:
            self.replays_routing = replays_routing

    def routing_metrics(self) -> dict[str, float]:
        """Return the router metrics since `start_counting`. Collective."""
        c = self.model.config
        if c.num_moe_experts is None:
            return {}
        counts = routing_counts(self.model.routings, c.num_layers, c.num_moe_experts)
        dense_layers = c.moe_layer_freq.count(0) if isinstance(c.moe_layer_freq, list) else 0
        return routing_metrics(sum_over_ranks(self.runtime, counts)[dense_layers:], c.moe_router_topk)

    def value_columns(self, batch: TrainBatch, micro_batches: Sequence[MicroBatch]) -> dict[str, Tensor]:
        """Compute values, float32 [T], 0 outside responses."""
        return self._columns(("values",), batch, micro_batches)

    def sequence_scores(self, batch: TrainBatch, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """Compute a reward model's scores, float32 [n], at the sequences' last tokens."""
        ends = batch.cu_seqlens[1:] - 1
        end_micro_batches = []
        for micro_batch in micro_batches:
            is_last = torch.isin(micro_batch.token_indices, ends)
            positions, token_indices = micro_batch.pack_indices[is_last], micro_batch.token_indices[is_last]
            labels, device = torch.zeros_like(positions), micro_batch.tokens.device
            fields = make_label_fields(positions, positions, labels, micro_batch.cp_places, device)
            end_micro_batches.append(replace(micro_batch, token_indices=token_indices, **fields))
        return self._columns(("scores",), batch, end_micro_batches)["scores"][ends]

    def _columns(
        self, names: tuple[str, ...], batch: TrainBatch, micro_batches: Sequence[MicroBatch], k: int = 0
    ) -> dict[str, Tensor]:
        def collect(output: Any, _: MicroBatch) -> tuple[Tensor, Any]:
            if k:
                output = tuple(values.float().cpu() for values in output)
            # Megatron multiplies it by a loss scale on the device.
            return torch.zeros((), device=self.runtime.device), output

        with torch.no_grad(), nullcontext() if self.adapters else without_adapters(self.model):
            outputs = self._run(micro_batches, collect, forward_only=True)
        columns: dict[str, Tensor] | None = None
        if self.runtime.is_last_stage:
            shape = (batch.num_tokens, k) if k else (batch.num_tokens,)
            columns = {name: torch.zeros(shape) for name in names}
            for micro_batch, output in zip(micro_batches, outputs, strict=True):
                head_outputs = output if isinstance(output, tuple) else (output,)
                for name, values in zip(names, head_outputs, strict=True):
                    columns[name][micro_batch.token_indices] = values.float().cpu()
        if k:
            result = columns or {name: torch.zeros(batch.num_tokens, 0) for name in names}
        else:
            result = broadcast_from_last_stage(columns, names, batch.num_tokens, self.runtime)
        problems = [
            f"{name} of {int((~torch.isfinite(column)).sum())} tokens"
            for name, column in result.items()
            if not column.isfinite().all()
        ]
        if any_rank(self.runtime, bool(problems)):
            problem = next(chain.from_iterable(gather_objects(self.runtime, problems, list[str])))
            raise NumericalError(f"{self.name}: {problem} are not finite; nothing was updated with them")
        return result

    def _run(self, micro_batches: Sequence[MicroBatch], loss: Loss, forward_only: bool) -> list[Any]:

        def forward_step(batches: Iterator[MicroBatch], chunk: Any) -> tuple[Any, Callable[[Any], Any]]:
            micro_batch = next(batches)
            # Models share packs but differ in replay.
            micro_batch.packed.routing = micro_batch.routing if self.replays_routing else None
            sets = micro_batch.sampling_sets if self.replays_sampling else None
            candidates = None if forward_only else micro_batch.candidates
            labels = add_candidates(micro_batch, candidates if sets is None else sets)
            tokens, positions = micro_batch.tokens, micro_batch.positions
            output = chunk(tokens, positions, micro_batch.packed, micro_batch.logit_indices, labels)

            def loss_func(output: Any) -> tuple[Tensor, Tensor, Any]:
                started = time.perf_counter()
                if sets is not None:
                    output = renormalise(output, labels)
                value, stats = loss(gather_output(micro_batch, output), micro_batch)
                self.megatron_seconds -= time.perf_counter() - started
                return value, torch.zeros((), dtype=torch.int, device=value.device), stats

            return output, loss_func

        started = time.perf_counter()
        outputs = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(micro_batches) for _ in self.chunks],
            model=self.chunks,
            num_microbatches=len(micro_batches),
            seq_length=max(b.tokens.shape[1] for b in micro_batches),
            micro_batch_size=1,
            forward_only=forward_only,
        )
        self.megatron_seconds += time.perf_counter() - started
        return outputs


def _bucket_config(parallel: ParallelConfig, runtime: Runtime) -> DistributedDataParallelConfig:
    default = runtime.layout.dp * runtime.layout.cp > OVERLAP_ABOVE
    overlap_reduce, overlap_gather = (
        default if setting is None else setting
        for setting in (parallel.overlap_grad_reduce, parallel.overlap_param_gather)
    )
    in_bf16 = parallel.grad_dtype == "bf16"
    return DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=not in_bf16,
        reduce_scatter_with_fp32_accumulation=in_bf16,
        overlap_grad_reduce=overlap_reduce or overlap_gather,  # else Megatron makes a single bucket
        overlap_param_gather=overlap_gather,
        bucket_size=parallel.overlap_bucket,
    )


def _wrap_chunks(
    model: ModelChunks, buckets: DistributedDataParallelConfig, config: OptimizerConfig
) -> list[Any]:
    is_muon = config.optimizer == "muon"
    layouts = muon_buffer_layouts(model, buckets) if is_muon else [{} for _ in model.chunks]
    return [
        DistributedDataParallel(chunk.config, buckets, chunk, **layout)
        for chunk, layout in zip(model.chunks, layouts, strict=True)
    ]


def _make_optimizer(
    chunks: list[Any], config: OptimizerConfig, dtype: torch.dtype, buckets: DistributedDataParallelConfig
) -> Any:
    is_muon, in_bf16 = config.optimizer == "muon", dtype == torch.bfloat16
    return get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer=config.optimizer,
            **(muon_options(config.muon, in_bf16) if is_muon else {}),
            lr=config.lr,
            min_lr=config.lr * config.min_lr_ratio,
            weight_decay=config.weight_decay,
            adam_beta1=config.betas[0],
            adam_beta2=config.betas[1],
            adam_eps=config.eps,
            clip_grad=config.clip_grad,
            # Megatron's Muon needs the bf16 wrapper, which accepts float32 weights too.
            bf16=in_bf16 or is_muon,
            params_dtype=dtype,
            use_distributed_optimizer=True,
            overlap_param_gather=buckets.overlap_param_gather,
        ),
        chunks,
    )


class UpdateResult(NamedTuple):
    """sums: this rank's, on the last stage. grad_norm: global, before clipping."""

    sums: dict[str, float]
    grad_norm: float


class TrainableModel(InferenceModel):
    def __init__(
        self,
        name: str,
        model: ModelChunks,
        config: OptimizerConfig,
        steps: int,
        runtime: Runtime,
        parallel: ParallelConfig | None = None,
    ) -> None:
        super().__init__(name, model, runtime)
        self.config = config
        self.average: AverageWeights | None = None  # saved with the model
        with on_cpu():
            buckets = _bucket_config(parallel or ParallelConfig(), runtime)
            self.chunks = _wrap_chunks(model, buckets, config)
            self.optimizer = _make_optimizer(self.chunks, config, model.config.params_dtype, buckets)
        self.param_gather = ParamGather(self.chunks if buckets.overlap_param_gather else [])
        no_sync = [chunk.no_sync for chunk in self.chunks]
        model.config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
        model.config.finalize_model_grads_func = _finalize
        model.config.grad_scale_func = self.optimizer.scale_loss
        self.start_schedule(steps)

    def start_schedule(self, steps: int, constant_lr: float | None = None) -> None:
        """Start a schedule over `steps` rollout steps: warm-up and config.schedule, or constant_lr."""
        c = self.config
        max_lr = constant_lr or c.lr
        min_lr = max_lr if constant_lr else c.lr * c.min_lr_ratio
        warmup = 0 if constant_lr else c.warmup_steps
        for group in self.optimizer.param_groups:  # they override the scheduler's arguments
            group["max_lr"], group["min_lr"] = max_lr, min_lr
        self.schedule = OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=max_lr,
            min_lr=min_lr,
            lr_warmup_steps=warmup,
            lr_decay_steps=max(steps, warmup + 1),
            lr_decay_style="constant" if constant_lr else c.schedule,
            start_wd=c.weight_decay,
            end_wd=c.weight_decay,
            wd_incr_steps=0,
            wd_incr_style="constant",
        )

    @property
    def lr(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"]) if self.optimizer.param_groups else 0.0

    @property
    def optimizers(self) -> list[Any]:
        parts = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        return [optimizer for part in parts for optimizer in getattr(part, "chained_optimizers", [part])]

    @property
    def buffers(self) -> list[Any]:
        """Parameters are views of their param_data."""
        return [b for chunk in self.chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]

    def update_mini_batches(
        self,
        mini_batches: Sequence[Sequence[MicroBatch]],
        loss: Loss,
        epochs: int,
        prefix: str,
        before: Callable[[int, Sequence[MicroBatch]], None] | None = None,
    ) -> dict[str, float]:
        """Advance the learning rate by a rollout step and update on all mini-batches, `epochs` times.

        before: called before each update with its number, from 1, and mini-batch."""
        self.begin_step()
        start_counting(self.model.routings, grad=True)
        sums: dict[str, float] = {}
        norms: list[float] = []
        passes = [micro_batches for _ in range(epochs) for micro_batches in mini_batches]
        for update_number, micro_batches in enumerate(passes, start=1):
            if before:
                before(update_number, micro_batches)
            result = self.update(micro_batches, loss, more=update_number < len(passes) and before is None)
            norms.append(result.grad_norm)
            for key, value in result.sums.items():
                sums[key] = sums.get(key, 0.0) + value
        metrics = loss_metrics(sum_stats(self.runtime, sums), updates=len(norms))
        if prefix == "policy":
            metrics |= self.routing_metrics()
        return metrics | {f"{prefix}/grad_norm": sum(norms) / len(norms), f"{prefix}/lr": self.lr}

    def begin_step(self) -> None:
        self.schedule.step(increment=1)

    def update(self, micro_batches: Sequence[MicroBatch], loss: Loss, *, more: bool = False) -> UpdateResult:
        """Take one optimizer step on a mini-batch.

        more: another update follows directly, whose forward pass may gather the weights.
        Raises NumericalError on every rank, before any change if a loss or gradient is not finite, and after
        the step (`fatal`) if a weight is not."""
        self.param_gather.before_update()
        sums = self.compute_gradients(micro_batches, loss)
        started = time.perf_counter()
        with on_cpu():
            _, grad_norm, _ = self.optimizer.step()
            self.param_gather.after_step(more=more)
        self.megatron_seconds += time.perf_counter() - started
        # Other ranks' shares may not be gathered yet.
        parameter_sums = [
            parameter.detach().float().sum()
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        ]
        is_bad = bool(parameter_sums) and not bool(torch.isfinite(torch.stack(parameter_sums).sum()))
        if any_rank(self.runtime, is_bad):
            what = "the weights are no longer finite (continue from a checkpoint)"
            error = NumericalError(f"{self.name} update: {what}")
            error.fatal = True
            raise error
        return UpdateResult(sums, float(grad_norm or 0.0))

    def compute_gradients(self, micro_batches: Sequence[MicroBatch], loss: Loss) -> dict[str, float]:
        """Compute gradients into Megatron's buffers; return this rank's statistics."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

        def record_loss(output: Any, micro_batch: MicroBatch) -> tuple[Tensor, Stats]:
            value, stats = loss(output, micro_batch)
            return value, {**stats, "_loss": value.detach().clone()}

        stats_by_micro_batch = self._run(micro_batches, record_loss, forward_only=False)
        losses = [float(stats.pop("_loss")) for stats in stats_by_micro_batch]
        problems = [f"loss of micro-batch {i} is {x}" for i, x in enumerate(losses) if not math.isfinite(x)]
        if not all(bool(torch.isfinite(buffer.grad_data.sum())) for buffer in self.buffers):
            problems.append("gradient is not finite")
        if any_rank(self.runtime, bool(problems)):
            reports = gather_objects(self.runtime, problems, list[str])
            # Report a bad loss first: it makes all gradients bad.
            problems_and_ranks = [(text, rank) for rank, report in enumerate(reports) for text in report]
            problem, rank = min(problems_and_ranks, key=lambda pair: not pair[0].startswith("loss"))
            raise NumericalError(f"{self.name} update, rank {rank}: {problem}; the update was not applied")
        sums: dict[str, float] = {}
        for stats in stats_by_micro_batch:
            for key, number in stats.items():
                sums[key] = sums.get(key, 0.0) + float(number)
        return sums
