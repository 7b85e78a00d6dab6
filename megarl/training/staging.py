"""A learner's checkpoint in three parts: copied to the host by all ranks, written by each rank alone, made whole by rank 0.

Only the first part talks to other ranks and touches the learner, so that the second can run beside the next step's work. The folder is
in Megatron's format torch_dist with a common.pt, which every version from 0.16 to 0.19 reads. Megatron says what the parts are
(ShardedTensor, ShardedObject); torch.distributed.checkpoint writes them.
"""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import LocalNonpersistentObject, ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import extract_matching_values, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, apply_factories, is_main_replica
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from megarl.parallel.comm import any_rank, gather_objects
from megarl.parallel.runtime import Runtime
from megarl.weights.megatron import COMMON, CONFIG, FORMAT


class Stager:
    """Copies one learner after the other's step; it keeps the index of who writes what, which all ranks agree on, from save to save."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._plan: SavePlan | None = None
        self._metadata: Metadata | None = None

    def stage(self, state: dict[str, Any]) -> Staged:
        """Host copies of what this rank has to write of megatron-core's sharded `state`; every rank calls this.

        Raises RuntimeError on every rank where the ranks' parts do not make a whole."""
        apply_factories(state)
        parts, common = extract_matching_values(state, lambda value: isinstance(value, (ShardedBase, LocalNonpersistentObject)))
        own = [part for part in nested_values(parts) if isinstance(part, ShardedBase) and is_main_replica(part.replica_id)]
        items, copies = zip(*map(_copied, own), strict=True) if own else ((), ())
        plan = SavePlan(list(items))
        if any_rank(self.runtime, plan != self._plan):
            self._metadata = self._agree(plan)
            self._plan = plan
        # torch's writer names a rank's file by its place in this list.
        named = FileSystemWriter("").prepare_global_plan([plan] * self.runtime.world)[self.runtime.rank]
        return Staged(named, {item.index: copy for item, copy in zip(items, copies, strict=True)}, self._metadata, common)

    def _agree(self, plan: SavePlan) -> Metadata | None:
        """The index of all ranks' parts, on rank 0; None on the others."""
        first = self.runtime.rank == 0
        plans: list[Any] = [plan] * self.runtime.world
        if self.runtime.world > 1:
            dist.gather_object(plan, plans if first else None, group=self.runtime.cpu_group)
        metadata, failure = None, None
        if first:
            try:
                kept, metadata = DefaultSavePlanner(flatten_state_dict=False).create_global_plan(plans)
                if any(len(theirs.items) != len(those.items) for theirs, those in zip(plans, kept, strict=True)):
                    failure = "two ranks would write the same part"
            except (ValueError, AssertionError) as error:  # parts overlap, or leave something out
                failure = str(error)
        failure = gather_objects(self.runtime, failure)[0]
        if failure is not None:
            raise RuntimeError(failure)
        return metadata


def _copied(part: Any) -> tuple[WriteItem, torch.Tensor | BytesIO]:
    """What torch's writer has to know of one of Megatron's parts, and a copy of it: the next step changes the learner's own."""
    if not isinstance(part, ShardedTensor):
        buffer = BytesIO()
        torch.save([part.data], buffer)
        return WriteItem(MetadataIndex(part.unique_key), WriteItemType.BYTE_IO), buffer
    offsets, shape = torch.Size(part.global_offset), torch.Size((1,) * part.prepend_axis_num + tuple(part.local_shape))
    copy = torch.empty(part.data.shape, dtype=part.data.dtype).copy_(part.data.detach()).view(shape)
    write = TensorWriteData(ChunkStorageMetadata(offsets, shape), TensorProperties(copy.dtype), torch.Size(part.global_shape))
    return WriteItem(MetadataIndex(part.key, offsets), WriteItemType.SHARD, tensor_data=write), copy


class _Copies(DefaultSavePlanner):
    """Gives torch's writer the copies."""

    def __init__(self, copies: dict[MetadataIndex, Any]) -> None:
        super().__init__(flatten_state_dict=False)
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
        torch.save(self.common, folder / COMMON)
        FileSystemWriter(folder, sync_files=True).finish(self.metadata, results)
        (folder / CONFIG).write_text(json.dumps(FORMAT), encoding="utf-8")
        return [path for path in sorted(folder.iterdir()) if path.suffix != ".distcp"]
