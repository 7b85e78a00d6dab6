"""A learner's checkpoint in three parts: copied to the host by all ranks, written by each rank alone, made whole by rank 0.

Only the first part talks to other ranks and touches the learner, so that the second can run beside the next step's work.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.common import TorchCommonSaveStrategy
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _DistWrapper

from megarl.parallel.comm import any_rank
from megarl.parallel.runtime import Runtime


class Stager:
    """Copies one learner after the other's step; it keeps the plan of who writes what, which all ranks must agree on, from save to save."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._local: SavePlan | None = None
        self._agreed: tuple[SavePlan, Metadata | None] | None = None

    def stage(self, state: dict[str, Any]) -> Staged:
        """Host copies of what this rank has to write of megatron-core's sharded `state`; every rank calls this.

        Raises CheckpointException or CheckpointingException on every rank where the ranks' parts do not make a whole."""
        sharded, common = save_preprocess(state, validate_access_integrity=self._agreed is None)
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica=True)
        planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        group = _DistWrapper(self.runtime.cpu_group, True, 0)
        planner.set_up_planner(mcore_to_pyt_state_dict(by_key), None, group.is_coordinator)
        local = planner.create_local_plan()
        if any_rank(self.runtime, local != self._local) or self._agreed is None:
            self._agreed = self._agree(group, planner, local)
            self._local = local
        plan, metadata = self._agreed
        final = planner.finish_plan(plan)
        return Staged(final, {item.index: _copy(planner.resolve_data(item)) for item in final.items}, metadata, common)

    @staticmethod
    def _agree(group: _DistWrapper, planner: MCoreSavePlanner, local: SavePlan) -> tuple[SavePlan, Metadata | None]:
        metadata: Metadata | None = None

        def together(plans: list[SavePlan]) -> list[SavePlan]:
            nonlocal metadata
            plans, metadata = planner.create_global_plan(plans)
            return FileSystemWriter("").prepare_global_plan(plans)

        return group.reduce_scatter("plan", lambda: local, together), metadata


def _copy(data: Any) -> Any:
    """Tensors are the learner's own, which the next step changes; objects were made into bytes for this save."""
    return data.detach().to("cpu", copy=True) if isinstance(data, torch.Tensor) else data


class _Copies(MCoreSavePlanner):
    """Gives torch's writer the copies."""

    def __init__(self, copies: dict[MetadataIndex, Any]) -> None:
        super().__init__(dedup_replicated_tensors=False, flatten_state_dict=False)
        self.copies = copies

    def resolve_data(self, write_item: WriteItem) -> Any:
        return self.copies[write_item.index]


class Staged:
    """One learner's copies on this rank. metadata: on rank 0, which also has the `common` part, the same on every rank."""

    def __init__(self, plan: SavePlan, copies: dict[MetadataIndex, Any], metadata: Metadata | None, common: dict[str, Any]) -> None:
        self.plan, self.copies, self.metadata, self.common = plan, copies, metadata, common
        self.results: list[WriteResult] = []

    @property
    def bytes(self) -> int:
        """Of the copies."""
        return sum(copy.nbytes if isinstance(copy, torch.Tensor) else copy.getbuffer().nbytes for copy in self.copies.values())

    def write(self, folder: Path) -> list[Path]:
        """Writes this rank's file into `folder`, on disk when this returns, and lets go of the copies; gives the file. Raises OSError."""
        written = FileSystemWriter(folder, sync_files=True).write_data(self.plan, _Copies(self.copies))
        written.wait()
        self.results, self.copies = written.value(), {}
        return sorted({folder / result.storage_data.relative_path for result in self.results})

    def finish(self, folder: Path, results: list[list[WriteResult]]) -> list[Path]:
        """On rank 0, with every rank's `results`: the index of all files, which makes them readable; gives the files. Raises OSError."""
        assert self.metadata is not None
        TorchCommonSaveStrategy("torch", 1).save_common(self.common, str(folder))
        FileSystemWriter(folder, sync_files=True).finish(self.metadata, results)
        save_config(CheckpointingConfig("torch_dist", 1), str(folder))
        return [path for path in sorted(folder.iterdir()) if path.suffix != ".distcp"]
