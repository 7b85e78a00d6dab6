"""What a model, its gradients and its optimizer hold on the device: where Megatron keeps the tensors that residency moves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor

from megarl.parallel.offload import HostPool, Movable
from megarl.training.learner import Frozen, Learner

Tensors = Callable[[], Iterable[Tensor]]


def tenants_of(model: Frozen, pool: HostPool) -> dict[str, Movable]:
    """{"actor.weights": ..., "actor.gradients": ..., "actor.optimizer": ...}; of a model that does not learn its weights alone, which
    nobody writes."""
    device = model.runtime.device
    if not isinstance(model, Learner):
        return {f"{model.name}.weights": Movable(lambda: _parameters(model), device, pool, "constant")}
    return {
        f"{model.name}.weights": _Weights(model, pool),
        f"{model.name}.gradients": Movable(lambda: _gradients(model), device, pool, "zero"),
        f"{model.name}.optimizer": Movable(lambda: _optimizer(model), device, pool),
    }


class _Weights(Movable):
    """Of a learner. The FP8 copies that Transformer Engine's modules keep of them go too, and are made again at the next forward pass."""

    def __init__(self, learner: Learner, pool: HostPool) -> None:
        super().__init__(lambda: _weights(learner), learner.runtime.device, pool)
        self._model = learner.model

    def leave(self) -> None:
        super().leave()
        for module in self._model.modules():
            getattr(module, "_fp8_workspaces", {}).clear()


def _buffers(learner: Learner) -> list[Any]:
    """Megatron's ParamAndGradBuffers, one for each dtype, and those of experts."""
    return [*learner.chunk.buffers, *learner.chunk.expert_parallel_buffers]


def _weights(learner: Learner) -> Iterator[Tensor]:
    """The distributed optimizer has made all parameters views of these."""
    return (buffer.param_data for buffer in _buffers(learner))


def _gradients(learner: Learner) -> Iterator[Tensor]:
    return (buffer.grad_data for buffer in _buffers(learner))


def _parameters(model: Frozen) -> Iterator[Tensor]:
    return iter(model.model.parameters())


def _optimizer(learner: Learner) -> Iterator[Tensor]:
    """This rank's share of the FP32 main parameters and of Adam's moments. Of parameters that are FP32 themselves the former are the
    weights: views of them, which are not listed here."""
    theirs = {tensor.untyped_storage()._cdata for tensors in (_weights(learner), _gradients(learner)) for tensor in tensors}
    for part in learner.parts:
        held = [p for group in part.param_groups for p in group["params"]]
        held += [tensor for state in part.state.values() for tensor in state.values() if isinstance(tensor, Tensor)]
        yield from (tensor for tensor in held if tensor.untyped_storage()._cdata not in theirs)
