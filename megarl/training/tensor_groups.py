"""The tensor groups of a model that can be offloaded: where Megatron keeps weights, gradients and optimizer state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor

from megarl.parallel.offload import Contents, HostPool, Movable
from megarl.training.model import InferenceModel, TrainableModel


def tensor_groups(model: InferenceModel, pool: HostPool) -> dict[str, Movable]:
    """Return {"actor.weights", "actor.gradients", "actor.optimizer"}; for an inference model its weights alone."""
    device = model.runtime.device
    if not isinstance(model, TrainableModel):
        return {f"{model.name}.weights": _Weights(model, model.model.parameters, pool, "constant")}
    # Megatron's ParamAndGradBuffers, one for each dtype, and those of experts. All parameters are views of their param_data.
    buffers: list[Any] = [*model.chunk.buffers, *model.chunk.expert_parallel_buffers]

    def optimizer() -> Iterator[Tensor]:
        """This rank's share of the FP32 main parameters and of Adam's moments. FP32 parameters are their own main
        parameters: views of the weights, which belong to another group."""
        others = {
            t.untyped_storage()._cdata for buffer in buffers for t in (buffer.param_data, buffer.grad_data)
        }
        for part in model.optimizers:
            tensors = [p for group in part.param_groups for p in group["params"]]
            tensors += [t for state in part.state.values() for t in state.values() if isinstance(t, Tensor)]
            yield from (tensor for tensor in tensors if tensor.untyped_storage()._cdata not in others)

    return {
        f"{model.name}.weights": _Weights(model, lambda: (buffer.param_data for buffer in buffers), pool),
        f"{model.name}.gradients": Movable(
            lambda: (buffer.grad_data for buffer in buffers), device, pool, "zero"
        ),
        f"{model.name}.optimizer": Movable(optimizer, device, pool),
    }


class _Weights(Movable):
    """Weights of a model. The FP8 copies that Transformer Engine's modules cache go too; they are made again at the next
    forward pass."""

    def __init__(
        self,
        model: InferenceModel,
        tensors: Callable[[], Iterable[Tensor]],
        pool: HostPool,
        contents: Contents = "kept",
    ) -> None:
        super().__init__(tensors, model.runtime.device, pool, contents)
        self._model = model.model

    def offload(self) -> None:
        super().offload()
        for module in self._model.modules():
            getattr(module, "_fp8_workspaces", {}).clear()
