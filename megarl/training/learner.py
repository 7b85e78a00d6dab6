"""A model that learns: Megatron's DDP, distributed optimizer, learning-rate schedule and pipeline schedule around actor or critic."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed import finalize_model_grads as megatron_finalize
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megarl.config.errors import NumericalError
from megarl.config.schema import OptimizerConfig, ParallelConfig
from megarl.model.builder import Actor, Critic
from megarl.parallel.comm import any_rank, gather_objects
from megarl.parallel.cpu_platform import on_cpu
from megarl.parallel.runtime import Runtime
from megarl.training.micro_batch import MicroBatch

Stats = dict[str, Tensor]
Loss = Callable[[Any, MicroBatch], tuple[Tensor, Stats]]
# Data-parallel size above which the overlaps are on unless the config decides: below it, there is little to hide. (Measured was only
# that they change nothing but rounding.)
OVERLAP_ABOVE = 4


@dataclass
class UpdateResult:
    """Of one optimizer step: this rank's statistics as sums (empty but on the last stage), the global gradient norm, the rate."""

    sums: dict[str, float]
    grad_norm: float
    lr: float


def _finalize(model: Any, num_tokens: Any = None, **groups: Any) -> None:
    # Our losses carry their global denominators already (algorithms/weights.py). With calculate_per_token_loss neither the
    # schedule nor DDP divides them; Megatron would divide the gradients by num_tokens here: it is not passed on.
    megatron_finalize(model, None, **groups)


class Frozen:
    """A model that only looks: forward passes without gradients (the reference policy)."""

    def __init__(self, name: str, model: Actor | Critic, runtime: Runtime) -> None:
        self.name, self.model, self.runtime = name, model, runtime
        self.chunk: Any = model
        self.megatron_seconds = 0.0  # spent in Megatron's schedules and optimizer so far, our loss functions left out

    def forward(self, micro_batches: Sequence[MicroBatch]) -> list[Any]:
        """The head's outputs, one entry per micro-batch, on the last pipeline stage; empty elsewhere."""

        def collect(output: Any, _batch: MicroBatch) -> tuple[Tensor, Any]:
            return torch.zeros(()), output

        with torch.no_grad():
            return self._run(micro_batches, collect, forward_only=True)

    def _run(self, micro_batches: Sequence[MicroBatch], loss: Loss, forward_only: bool) -> list[Any]:
        def forward_step(batches: Iterator[MicroBatch], chunk: Any) -> tuple[Any, Callable[[Any], tuple[Tensor, Tensor, Any]]]:
            batch = next(batches)
            output = chunk(batch.tokens, batch.positions, batch.packed, batch.at, batch.labels)

            def loss_func(output: Any) -> tuple[Tensor, Tensor, Any]:
                began = time.perf_counter()
                value, stats = loss(output, batch)
                self.megatron_seconds -= time.perf_counter() - began
                return value, torch.zeros((), dtype=torch.int, device=value.device), stats

            return output, loss_func

        started = time.perf_counter()
        outputs = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(micro_batches),
            model=[self.chunk],
            num_microbatches=len(micro_batches),
            seq_length=max(b.tokens.shape[1] for b in micro_batches),
            micro_batch_size=1,
            forward_only=forward_only,
        )
        self.megatron_seconds += time.perf_counter() - started
        return outputs


class Learner(Frozen):
    """Actor or critic with its optimizer. The model's weights are loaded before: the optimizer copies them."""

    def __init__(
        self,
        name: str,
        model: Actor | Critic,
        config: OptimizerConfig,
        steps: int,
        runtime: Runtime,
        parallel: ParallelConfig | None = None,
    ) -> None:
        super().__init__(name, model, runtime)
        bf16 = model.config.params_dtype == torch.bfloat16
        parallel = parallel or ParallelConfig()
        reduce, gather = (
            runtime.layout.dp > OVERLAP_ABOVE if wanted is None else wanted
            for wanted in (parallel.overlap_grad_reduce, parallel.overlap_param_gather)
        )
        with on_cpu():
            self.chunk = DistributedDataParallel(
                model.config,
                DistributedDataParallelConfig(
                    use_distributed_optimizer=True,
                    grad_reduce_in_fp32=True,
                    overlap_grad_reduce=reduce or gather,  # without which Megatron makes one bucket of all
                    overlap_param_gather=gather,
                    bucket_size=parallel.overlap_bucket,
                ),
                model,
            )
            self.optimizer = get_megatron_optimizer(
                MegatronOptimizerConfig(
                    optimizer="adam",
                    lr=config.lr,
                    min_lr=config.lr * config.min_lr_ratio,
                    weight_decay=config.weight_decay,
                    adam_beta1=config.betas[0],
                    adam_beta2=config.betas[1],
                    adam_eps=config.eps,
                    clip_grad=config.clip_grad,
                    bf16=bf16,
                    params_dtype=model.config.params_dtype,
                    use_distributed_optimizer=True,
                    overlap_param_gather=gather,
                ),
                [self.chunk],
            )
        self._gathers_later, self._gather_due = gather, False
        if gather:
            self.chunk.disable_forward_pre_hook(param_sync=False)
            model.decoder.register_forward_hook(lambda *_: self._await_weights())
        model.config.no_sync_func = self.chunk.no_sync
        model.config.finalize_model_grads_func = _finalize
        model.config.grad_scale_func = self.optimizer.scale_loss
        self.config = config
        self.start_schedule(steps)

    def start_schedule(self, steps: int, constant_lr: float | None = None) -> None:
        """From now on: warm-up, then constant, linear or cosine over `steps` rollout steps; or one constant rate."""
        c = self.config
        peak = constant_lr or c.lr
        lowest = peak if constant_lr else c.lr * c.min_lr_ratio
        warmup = 0 if constant_lr else c.warmup_steps
        for group in self.optimizer.param_groups:  # where Megatron's schedule finds them, before its own arguments
            group["max_lr"], group["min_lr"] = peak, lowest
        self.schedule = OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=peak,
            min_lr=lowest,
            lr_warmup_steps=warmup,
            lr_decay_steps=max(steps, warmup + 1),
            lr_decay_style="constant" if constant_lr else c.schedule,
            start_wd=c.weight_decay,
            end_wd=c.weight_decay,
            wd_incr_steps=0,
            wd_incr_style="constant",
        )

    @property
    def parts(self) -> list[Any]:
        """Megatron's distributed optimizers: one for dense models."""
        return list(getattr(self.optimizer, "chained_optimizers", [self.optimizer]))

    def begin_step(self) -> None:
        """One rollout step further in the learning-rate schedule, before its updates."""
        self.schedule.step(increment=1)

    @property
    def lr(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"]) if self.optimizer.param_groups else 0.0

    def update(self, micro_batches: Sequence[MicroBatch], loss: Loss, *, more: bool = False) -> UpdateResult:
        """One optimizer step over one mini-batch. `loss` gives a sum whose global denominators are inside, and statistics as sums.

        more: the next thing that is done with the model is another update. With `parallel.overlap_param_gather` its forward pass then
        gathers the weights; without `more` they are whole when this returns, to be transferred, saved, or moved off the device.
        Raises NumericalError on every rank, and leaves the weights as they were, where a loss or gradient is not finite.
        """
        if self._gather_due:
            self.chunk.enable_forward_pre_hook()
        sums = self.compute_gradients(micro_batches, loss)
        started = time.perf_counter()
        with on_cpu():
            _, grad_norm, _ = self.optimizer.step()
            if self._gathers_later and more:
                self._gather_due = True
            elif self._gathers_later:
                self.chunk.start_param_sync(force_sync=True)
        self.megatron_seconds += time.perf_counter() - started
        self._require_finite_weights()
        return UpdateResult(sums, float(grad_norm or 0.0), self.lr)

    def _await_weights(self) -> None:
        """At the end of the decoder, in the first forward pass after an update: every module has waited for its weights but the output
        layer, whose weight the actor's head reads without calling the layer. Megatron's hooks would begin gathers in any other pass."""
        if self._gather_due:
            for group in (*self.chunk.bucket_groups, *self.chunk.expert_parallel_bucket_groups):
                group.finish_param_sync(skip_next_bucket_dispatch=True)
            self.chunk.disable_forward_pre_hook(param_sync=False)
            self._gather_due = False

    def _require_finite_weights(self) -> None:
        # Of this rank's share of them: the others' may still be on their way. The sums stay on the device until one number of them all is
        # looked at.
        shares = [parameter.detach().float().sum() for part in self.parts for group in part.param_groups for parameter in group["params"]]
        if any_rank(self.runtime, bool(shares) and not bool(torch.isfinite(torch.stack(shares).sum()))):
            error = NumericalError(f"{self.name} update: its weights are not finite any more (continue from a checkpoint)")
            error.fatal = True
            raise error

    def compute_gradients(self, micro_batches: Sequence[MicroBatch], loss: Loss) -> dict[str, float]:
        """Forward and backward of one mini-batch into Megatron's gradient buffers; gives the statistics. Errors as `update`."""
        self.chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

        def checked(output: Any, batch: MicroBatch) -> tuple[Tensor, Stats]:
            value, stats = loss(output, batch)
            return value, {**stats, "_loss": value.detach().clone()}

        collected = self._run(micro_batches, checked, forward_only=False)
        self._require_finite(collected)
        sums: dict[str, float] = {}
        for stats in collected:
            del stats["_loss"]
            for key, value in stats.items():
                sums[key] = sums.get(key, 0.0) + float(value)
        return sums

    def _require_finite(self, collected: list[Stats]) -> None:
        losses = [float(stats["_loss"]) for stats in collected]
        bad = [f"loss of micro-batch {i} is {value}" for i, value in enumerate(losses) if not torch.isfinite(torch.tensor(value))]
        buffers = [*self.chunk.buffers, *self.chunk.expert_parallel_buffers]
        if not all(bool(torch.isfinite(buffer.grad_data.sum())) for buffer in buffers):
            bad.append("gradient is not finite")
        if any_rank(self.runtime, bool(bad)):
            reports = gather_objects(self.runtime, bad)
            # A bad loss makes bad gradients on every rank: name the loss, the cause, if there is one.
            found = [(text, rank) for rank, report in enumerate(reports) for text in report]
            first, rank = min(found, key=lambda pair: not pair[0].startswith("loss"))
            raise NumericalError(f"{self.name} update, rank {rank}: {first}; the update was not applied")
