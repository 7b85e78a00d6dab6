"""Check that every operation on fake CUDA tensors has its tensors on the right device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.data.batch import RolloutBatch, TrainBatch
from megarl.parallel.layout import Layout
from tests.parallel.jobs import make_config
from tests.parallel.test_experts import mixture
from tests.ranks import in_a_fork
from tests.rehearsal.fake_tensors import fake_cuda
from tests.rehearsal.pretended import rank_of

EXPERTS, TOPK, LAYERS = 8, 3, 2


def mixed_devices() -> list[str]:
    """Return which of the operations raise on fake tensors."""
    refused = []
    with fake_cuda() as device:
        there, here = torch.ones(4, device=device), torch.ones(4)
        counts, places = torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int64, device=device)
        operations: dict[str, Any] = {
            "a product": lambda: there * here,
            "a product of one element": lambda: there * torch.ones(1),
            "a sum in place": lambda: counts.add_(places),
            "an indexed sum": lambda: counts.index_add_(0, places, places),
            "an index of the host's tensor": lambda: here[places],
            # A device accepts these:
            "a number times a tensor": lambda: there * torch.ones(()),
            "an index from the host": lambda: there[counts],
            "moves": lambda: (there.cpu() + here, here.to(device) + there, here.copy_(there)),
        }
        for name, operation in operations.items():
            try:
                operation()
            except RuntimeError:
                refused.append(name)
        assert there.device == device and there.cpu().tolist() == [0.0] * 4 and float(there[0]) == 0.0
    return refused


def test_mixed_devices_are_refused() -> None:
    assert in_a_fork(mixed_devices) == [
        "a product",
        "a product of one element",
        "a sum in place",
        "an indexed sum",
        "an index of the host's tensor",
    ]


def passes_of_a_mixture(folder: Path, kind: str) -> tuple[dict[str, Any], dict[str, float]]:
    """Run a forward pass of an actor or critic whose routers replay the engine's choice.

    Returns: shape and device of each column, and the routers' metrics"""
    from megarl.model import builder
    from megarl.model.hf_config import read_hf_config
    from megarl.model.routing import start_counting
    from megarl.training.batch import make_train_batch
    from megarl.training.model import TrainableModel

    with fake_cuda(TOPK / EXPERTS) as device, rank_of(Layout(tp=1, pp=1, dp=1, ep=1), 0, device) as runtime:
        config = make_config(folder, mini_batch=2)
        model = getattr(builder, f"build_{kind}")(config, read_hf_config(folder), runtime)
        assert {parameter.device for parameter in model.parameters()} == {device}
        learner = TrainableModel(kind, model, config.actor, 1, runtime)
        batch = TrainBatch.build([[3, 4, 5], [6, 7]], [[8, 9], [10, 1]])
        batch["correct"] = batch["truncated"] = torch.zeros(2, dtype=torch.bool)
        batch["routing"] = torch.zeros(batch.num_tokens, LAYERS, TOPK, dtype=torch.uint8)
        local = make_train_batch(RolloutBatch.from_train_batch(batch), config, 2, 3, [model], runtime)
        learner.replays_routing = True
        start_counting(model.routings, grad=False)
        columns = learner.logprob_columns if kind == "actor" else learner.value_columns
        found = columns(local, local.micro_batches)
        shapes = {name: (tuple(column.shape), column.device.type) for name, column in found.items()}
        return shapes, learner.routing_metrics()


@pytest.mark.parametrize(("kind", "columns"), [("actor", ["logprobs", "entropy"]), ("critic", ["values"])])
def test_a_mixture_on_a_device(kind: str, columns: list[str], tmp_path: Path) -> None:
    classification = "token" if kind == "critic" else None
    folder = mixture(tmp_path, vocab=101, layers=LAYERS, classification=classification)
    found, metrics = in_a_fork(passes_of_a_mixture, folder, kind)
    assert found == dict.fromkeys(columns, ((9,), "cpu"))
    assert metrics.keys() == {"router/load_max", "router/load_entropy", "router/unused"}
