"""Groups of a model's tensors that are offloaded together."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megarl.parallel.offload_group import HostPool, OffloadGroup
from megarl.training.library_caches import free_gradient_caches, free_weight_caches
from megarl.training.model import InferenceModel, TrainableModel


def tensor_groups(model: InferenceModel, pool: HostPool) -> dict[str, OffloadGroup]:
    """Return {"actor.weights", "actor.gradients", "actor.optimizer"}; only weights if not trained."""
    device = model.runtime.device
    if not isinstance(model, TrainableModel):
        weights = _Weights(model.model.parameters, device, pool, "constant")
        weights.model = model.model
        return {f"{model.name}.weights": weights}
    buffers = model.buffers

    def optimizer() -> Iterator[Tensor]:
        """Yield this rank's FP32 main parameters and Adam's moments.

        FP32 weights are their own main parameters, and belong to another group."""
        buffer_storages = {
            t.untyped_storage()._cdata for buffer in buffers for t in (buffer.param_data, buffer.grad_data)
        }
        for part in model.optimizers:
            tensors = [p for group in part.param_groups for p in group["params"]]
            tensors += [t for state in part.state.values() for t in state.values() if isinstance(t, Tensor)]
            yield from (
                tensor for tensor in tensors if tensor.untyped_storage()._cdata not in buffer_storages
            )

    def parameters() -> Iterator[Tensor]:
        yield from (buffer.param_data for buffer in buffers)
        yield from (parameter for parameter in model.model.parameters() if not parameter.requires_grad)

    weights = _Weights(parameters, device, pool)
    weights.model = model.model
    gradients = _Gradients(lambda: (buffer.grad_data for buffer in buffers), device, pool, "zero")
    return {
        f"{model.name}.weights": weights,
        f"{model.name}.gradients": gradients,
        f"{model.name}.optimizer": OffloadGroup(optimizer, device, pool),
    }


class _Weights(OffloadGroup):
    model: torch.nn.Module

    def offload(self) -> None:
        super().offload()
        free_weight_caches(self.model)


class _Gradients(OffloadGroup):
    def offload(self) -> None:
        super().offload()
        free_gradient_caches()
