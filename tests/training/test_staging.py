"""Parts of a checkpoint that do not form a whole are refused before a write; what stays on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedTensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan

from megarl.parallel.offload_group import HostPool
from megarl.training.saving import HostCopy, _copy_part
from megarl.training.tensor_groups import tensor_groups
from tests.parallel.jobs import saved_before_a_step, stage_parts
from tests.ranks import RankPool


@pytest.mark.parametrize(
    ("length", "offset", "said"),
    [
        (4, 2, ""),
        (2, 0, "two ranks would write the same part"),
        (3, 1, "overlapping chunks"),
        (6, 2, "invalid fill tensor-volume"),
    ],
    ids=["whole", "twice", "overlapping", "a hole"],
)
def test_parts_must_make_a_whole(
    length: int, offset: int, said: str, ranks: Callable[[int, int, int], RankPool]
) -> None:
    first, second = ranks(1, 1, 2).run(stage_parts, length=length, offset=offset)
    assert first == second and said in first and bool(said) == bool(first)


def test_a_model_whose_first_step_was_skipped_is_saved_and_read(
    ranks: Callable[[int, int, int], RankPool], tmp_path: Path
) -> None:
    (tmp_path / "checkpoint").mkdir()
    assert all(ranks(1, 1, 2).run(saved_before_a_step, folder=tmp_path / "checkpoint"))


def test_a_rank_writes_without_asking_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer thread's default device is GPU 0 on every rank; a stream would create a context there."""
    part, copy = _copy_part(ShardedTensor.from_rank_offsets("weights", torch.arange(4.0)))
    (plan,) = FileSystemWriter("").prepare_global_plan([SavePlan([part.item])])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: pytest.fail("asked for a stream"))
    (file,) = HostCopy(plan, {part.item.index: copy}, None, {}).write(tmp_path)
    assert file.stat().st_size > 16


def test_fp8_copies_leave_with_the_weights_of_a_model_that_does_not_learn() -> None:
    """The reference policy's copies must go too: no other code frees them before the engine wakes up."""
    module = torch.nn.Linear(4, 4)
    module._fp8_workspaces = {"weight": torch.ones(16)}  # as in Transformer Engine's modules
    model: Any = SimpleNamespace(
        runtime=SimpleNamespace(device=torch.device("cpu")), model=module, name="reference"
    )
    (weights,) = tensor_groups(model, HostPool(torch.device("cpu"), 1024)).values()
    before = module.weight.detach().clone()
    weights.offload()
    assert module._fp8_workspaces == {} and module.weight.untyped_storage().nbytes() == 0
    weights.onload()
    assert torch.equal(module.weight, before)
