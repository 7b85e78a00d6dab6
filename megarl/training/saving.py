"""Write the checkpoints of a run in the background.

Every rank copies its part to the host between two steps, and writes its file in a thread. Then rank 0 writes
index and manifest (last, so an interrupted folder never looks complete) and renames the folder.
The format is Megatron's torch_dist with a common.pt, which versions 0.16 to 0.19 read."""

from __future__ import annotations

import json
import shutil
import sys
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from megatron.core.dist_checkpointing import LocalNonpersistentObject, ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import extract_matching_values, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, apply_factories, is_main_replica
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from megarl.config.errors import CheckpointError
from megarl.config.files import fsync
from megarl.config.schema import PRETRAINING, Config
from megarl.data.packing import balance
from megarl.parallel.comm import any_rank, broadcast_from_rank_0, gather_shares_to_rank_0, gather_to_rank_0
from megarl.parallel.runtime import Runtime, generator_states
from megarl.training.checkpoint import (
    BATCHES,
    FOLDER,
    FORMAT,
    MANIFEST,
    folder_name,
    hash_file,
    list_fixed_settings,
    prune,
    seal,
    write_state,
)
from megarl.training.model import TrainableModel
from megarl.training.sharded import FAILURES, megatron_state, quiet_warnings, reason
from megarl.weights.index import COMMON, CONFIG
from megarl.weights.index import FORMAT as MODEL_FORMAT

# Seconds between Python's thread switches during a write. With the default, step and writer starve each
# other: torch releases the interpreter in every operation.
SWITCH_INTERVAL = 2e-4
NO_ROOM = "make room, or set checkpoint.every to 0"
PATIENCE = 0.8  # share of parallel.timeout, which is how long other ranks wait
Entries = dict[str, tuple[int, str]]  # file -> (bytes, SHA-256)


class Part(NamedTuple):
    key: str
    offsets: tuple[int, ...] | None = None
    extents: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()
    dtype: str = ""

    @property
    def item(self) -> WriteItem:
        if self.offsets is None:
            return WriteItem(MetadataIndex(self.key), WriteItemType.BYTE_IO)
        chunk = ChunkStorageMetadata(torch.Size(self.offsets), torch.Size(self.extents))
        properties = TensorProperties(getattr(torch, self.dtype))
        tensor_data = TensorWriteData(chunk, properties, torch.Size(self.shape))
        return WriteItem(MetadataIndex(self.key, self.offsets), WriteItemType.SHARD, tensor_data=tensor_data)


class WrittenPart(NamedTuple):
    """`length` bytes of a file from `start`; `size`: the tensor's."""

    key: str
    offsets: tuple[int, ...] | None
    size: int
    file: str
    start: int
    length: int

    @staticmethod
    def from_result(result: WriteResult) -> WrittenPart:
        index, storage = result.index, result.storage_data
        offsets = None if index.offset is None else tuple(index.offset)
        return WrittenPart(
            index.fqn, offsets, result.size_in_bytes, storage.relative_path, storage.offset, storage.length
        )

    @property
    def result(self) -> WriteResult:
        storage = _StorageInfo(self.file, self.start, self.length)
        return WriteResult(MetadataIndex(self.key, self.offsets), self.size, storage)


Report = tuple[tuple[str, str] | None, Entries, dict[str, list[WrittenPart]]]


# Joins all ranks' shares in a thread of rank 0.
Join = Callable[[Sequence[Mapping[str, Any]]], Mapping[str, Any]]


class StoredRollouts(Protocol):
    @abstractmethod
    def files(self, step: int) -> list[Path]:
        """Return the files once they exist; called in a thread of rank 0."""

    @abstractmethod
    def wait_for_files(self, step: int) -> None:
        """Wait until they exist; every rank calls this first."""


class CheckpointWriter:
    """Writes checkpoints. Every rank makes the same calls.

    prepare   called with a model's name before a copy
    share     type of a rank's share of the batch source's state
    seconds   the longest time that a save has blocked the run"""

    def __init__(
        self,
        runtime: Runtime,
        config: Config,
        models: Mapping[str, TrainableModel],
        versions: Mapping[str, str],
        prepare: Callable[[str], None],
        join: Join,
        share: Any,
        warn: Callable[[str], None],
        stored_rollouts: StoredRollouts | None = None,
    ) -> None:
        self.runtime, self.config, self.models, self.versions = runtime, config, models, dict(versions)
        self.prepare, self.join, self.share = prepare, join, share
        self.warn, self.stored_rollouts, self.seconds = warn, stored_rollouts, 0.0
        self.settings = list_fixed_settings(config)
        self._copiers = {name: HostCopier(runtime) for name in models}
        self._writing: _Writing | None = None

    def save(
        self, stage: str, step: int, parts: tuple[str, ...], state: Mapping[str, Any], *, now: bool = False
    ) -> None:
        """Finish the previous checkpoint and start that of `step`; with `now`, finish it too.

        state: must not change until the checkpoint is complete; `samplers` is this rank's share.
        Raises CheckpointError on every rank if a write failed."""
        started = time.perf_counter()
        self.finish()
        folder = self.config.run_dir / FOLDER / folder_name(stage, step)
        layout = {key: size for key, size in asdict(self.runtime.layout).items() if isinstance(size, int)}
        manifest = {
            "format": FORMAT,
            "stage": stage,
            "step": step,
            "steps": self.config.steps,
            "layout": layout,
            "settings": self.settings,
            "versions": self.versions,
        }
        share_type: Any = tuple[dict[str, Any], self.share]  # type: ignore[name-defined]
        shares = gather_shares_to_rank_0(self.runtime, (generator_states(), state["samplers"]), share_type)
        writing, failure = _Writing(folder, manifest), None
        if shares is not None:
            generators, samplers = map(list, zip(*shares, strict=True))
            writing.state = {**state, "samplers": samplers, "generators": generators}
            try:
                shutil.rmtree(writing.partial, ignore_errors=True)
                writing.partial.mkdir(parents=True)  # raises if it still exists, for example as a link
                for part in parts:
                    (writing.partial / part).mkdir()
            except OSError as error:
                failure = f"{folder}: {cannot_be_written(reason(error))}"
                shutil.rmtree(writing.partial, ignore_errors=True)
        failure = broadcast_from_rank_0(self.runtime, failure, str | None)
        if failure is not None:
            raise CheckpointError(failure)
        try:
            for name in parts:
                self.prepare(name)
                writing.models[name] = self._copiers[name].copy_model(self.models[name])
        except CheckpointError as error:
            raise CheckpointError(f"{folder}: {error}") from None
        self._writing = writing
        writing.in_thread(lambda: writing.write_local_parts(self.join, self.stored_rollouts))
        if now or not self.config.checkpoint.background:
            self.finish()
        self.seconds = max(self.seconds, time.perf_counter() - started)

    @property
    def pending(self) -> int:
        return sum(copy.nbytes for copy in self._writing.models.values()) if self._writing is not None else 0

    @property
    def busy(self) -> bool:
        thread = self._writing.thread if self._writing is not None else None
        return thread is not None and thread.is_alive()

    @property
    def step(self) -> int | None:
        return None if self._writing is None else int(self._writing.manifest["step"])

    @property
    def unfinished(self) -> bool:
        """Equal on all ranks."""
        return self._writing is not None

    def advance(self) -> None:
        """Advance an unfinished checkpoint; call it when no rank is busy.

        The first call has rank 0 write index and manifest, the second ends the checkpoint.
        Raises CheckpointError on every rank if a write failed, and removes the files."""
        writing = self._writing
        if writing is None:
            return
        results = {name: copy.results for name, copy in writing.models.items()}
        report_by_rank = gather_to_rank_0(self.runtime, (writing.failure, writing.files, results), Report)
        failures = [
            (f"rank {rank}: {failure[0]}", failure[1])
            for rank, (failure, _, _) in enumerate(report_by_rank or [])
            if failure is not None
        ]
        failures = broadcast_from_rank_0(self.runtime, failures, list[tuple[str, str]])
        if failures:
            self._writing = None
            if self.runtime.rank == 0:
                shutil.rmtree(writing.partial, ignore_errors=True)
            raise CheckpointError(f"{writing.final}: {cannot_be_written(*failures[0])}")
        if writing.parts_written:
            self._writing = None
            for line in writing.not_removed:
                self.warn(line)
            return
        models, writing.models, writing.parts_written = writing.models, {}, True
        if report_by_rank is not None:
            reports = [(files, results) for _, files, results in report_by_rank]
            writing.in_thread(lambda: writing.complete(models, reports, self.config))

    def finish(self) -> None:
        if self._writing is not None and self.stored_rollouts is not None:
            self.stored_rollouts.wait_for_files(self._writing.manifest["step"])
        while self._writing is not None:
            limit, key = min(
                (self.config.checkpoint.timeout, "checkpoint.timeout"),
                (PATIENCE * self.runtime.timeout, "parallel.timeout"),
            )
            if self._writing.thread is not None:
                self._writing.thread.join(limit)
            if self.busy:
                self._writing.failure = f"writing took longer than {limit:g} s", f"raise {key}"
            self.advance()


@dataclass
class _Writing:
    """An unfinished checkpoint, on one rank.

    state: on rank 0; parts_written: rank 0 still writes index and manifest"""

    final: Path
    manifest: dict[str, Any]
    state: Mapping[str, Any] | None = None
    models: dict[str, HostCopy] = field(default_factory=dict)
    parts_written: bool = False
    files: Entries = field(default_factory=dict)
    failure: tuple[str, str] | None = None
    not_removed: list[str] = field(default_factory=list)
    thread: threading.Thread | None = None

    @property
    def partial(self) -> Path:
        return self.final.with_name(f".{self.final.name}.partial")

    def in_thread(self, work: Callable[[], None]) -> None:

        def run() -> None:
            default_interval = sys.getswitchinterval()
            sys.setswitchinterval(SWITCH_INTERVAL)
            try:
                work()
            except Exception as error:  # noqa: BLE001 (`advance` raises it on every rank)
                self.failure = reason(error), NO_ROOM
            finally:
                sys.setswitchinterval(default_interval)

        self.thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        self.thread.start()

    def write_local_parts(self, join: Join, stored_rollouts: StoredRollouts | None) -> None:
        for name, copy in self.models.items():
            self._add(copy.write(self.partial / name))
        if self.state is None:
            return
        full_state = {**self.state, "samplers": join(self.state["samplers"])}
        self._add(write_state(self.partial, full_state))
        if stored_rollouts is None or self.manifest["stage"] == PRETRAINING:
            return
        for path in stored_rollouts.files(self.manifest["step"]):
            folder = self.partial / BATCHES / path.parent.name
            folder.mkdir(parents=True, exist_ok=True)
            self._add([Path(shutil.copy(path, folder))])

    def complete(
        self, models: Mapping[str, HostCopy], reports: list[tuple[Entries, dict[str, Any]]], config: Config
    ) -> None:
        partial, final = self.partial, self.final
        for name, copy in models.items():
            self._add(copy.write_index(partial / name, [results[name] for _, results in reports]))
        for files, _ in reports:
            self.files |= files
        text = seal({**self.manifest, "files": dict(sorted(self.files.items()))})
        (partial / MANIFEST).write_text(text, encoding="utf-8")
        folders = [folder for folder in partial.iterdir() if folder.is_dir()]
        for path in (partial / MANIFEST, *folders, partial):
            fsync(path)
        if final.exists():  # damaged: the run did not continue from it
            shutil.rmtree(final)
        partial.rename(final)
        fsync(final.parent)
        self.not_removed = prune(config.run_dir, config.checkpoint)

    def _add(self, paths: list[Path]) -> None:
        for path in paths:
            fsync(path)
            self.files[str(path.relative_to(self.partial))] = path.stat().st_size, hash_file(path)


class HostCopier:
    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._parts: list[Part] | None = None
        self._index: Metadata | None = None

    def copy_model(self, model: TrainableModel) -> HostCopy:
        """Collective. Raises CheckpointError if parts are missing or overlap."""
        try:
            state = megatron_state(model, is_loading=False)
            with quiet_warnings():
                return self.copy_state(state)
        except FAILURES as error:
            what = f"cannot be put together: {reason(error)} (a defect: please report it)"
            raise CheckpointError(what) from error

    def copy_state(self, state: dict[str, Any]) -> HostCopy:
        """Collective. Raises RuntimeError on every rank if parts are missing or overlap."""
        apply_factories(state)
        parts, common = extract_matching_values(
            state, lambda value: isinstance(value, (ShardedBase, LocalNonpersistentObject))
        )
        parts = [part for part in nested_values(parts) if isinstance(part, ShardedBase)]
        copies = [_copy_part(part) for part in self._own(parts)]
        descriptions = [part for part, _ in copies]
        if any_rank(self.runtime, descriptions != self._parts):
            self._index, self._parts = self._agree(descriptions), descriptions
        plan = SavePlan([part.item for part in descriptions])
        named_plan = FileSystemWriter("").prepare_global_plan([plan] * self.runtime.world)[self.runtime.rank]
        return HostCopy(named_plan, {part.item.index: copy for part, copy in copies}, self._index, common)

    def _own(self, parts: list[ShardedBase]) -> list[ShardedBase]:
        """Choose the parts that this rank writes.

        Data- and context-parallel ranks hold the same weights and optimizer; each writes an equal share. The
        first replica writes experts and small objects."""
        shared_parts, parts_to_write = [], []
        for part in parts:
            # replica_id is (pipeline stage, tensor-parallel rank, data-parallel rank).
            replica_id = part.replica_id
            is_dense_tensor = isinstance(part, ShardedTensor) and ".experts." not in part.key
            if is_dense_tensor and isinstance(replica_id, tuple):
                if not any(replica_id[:-1]):
                    shared_parts.append(part)
            elif is_main_replica(replica_id):
                parts_to_write.append(part)
        shared_parts.sort(key=lambda part: (part.key, part.global_offset))
        layout, coords = self.runtime.layout, self.runtime.layout.coords(self.runtime.rank)
        shares = balance([part.data.nbytes for part in shared_parts], layout.dp * layout.cp)
        return parts_to_write + [shared_parts[i] for i in shares[coords.dp * layout.cp + coords.cp]]

    def _agree(self, parts: list[Part]) -> Metadata | None:
        parts_by_rank, index, failure = gather_to_rank_0(self.runtime, parts, list[Part]), None, None
        if parts_by_rank is not None:
            plans = [SavePlan([part.item for part in share]) for share in parts_by_rank]
            try:
                global_plans, index = DefaultSavePlanner(flatten_state_dict=False).create_global_plan(plans)
                if [len(share.items) for share in plans] != [len(plan.items) for plan in global_plans]:
                    failure = "two ranks would write the same part"
            except (ValueError, AssertionError) as error:
                failure = str(error)
        failure = broadcast_from_rank_0(self.runtime, failure, str | None)
        if failure is not None:
            raise RuntimeError(failure)
        return index


def _copy_part(part: Any) -> tuple[Part, torch.Tensor | BytesIO]:
    if not isinstance(part, ShardedTensor):
        buffer = BytesIO()
        torch.save([part.data], buffer)
        return Part(part.unique_key), buffer
    shape = (1,) * part.prepend_axis_num + tuple(part.local_shape)
    copy = torch.empty(part.data.shape, dtype=part.data.dtype).copy_(part.data.detach()).view(shape)
    dtype = str(copy.dtype).removeprefix("torch.")
    return Part(part.key, tuple(part.global_offset), shape, tuple(part.global_shape), dtype), copy


@dataclass
class HostCopy:
    """One model's copies on this rank.

    index: on rank 0; common: Megatron's unsharded part"""

    plan: SavePlan
    copies: dict[MetadataIndex, Any]
    index: Metadata | None
    common: dict[str, Any]
    results: list[WrittenPart] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(
            copy.nbytes if isinstance(copy, torch.Tensor) else copy.getbuffer().nbytes
            for copy in self.copies.values()
        )

    def write(self, folder: Path) -> list[Path]:
        copies = self.copies

        class Planner(DefaultSavePlanner):
            def resolve_data(self, write_item: WriteItem) -> Any:
                return copies[write_item.index]

        planner = Planner(flatten_state_dict=False)
        # Copying ahead would create a CUDA context of every rank on GPU 0, this thread's device.
        writer = FileSystemWriter(folder, sync_files=True, per_thread_copy_ahead=0)
        write_future = writer.write_data(self.plan, planner)
        write_future.wait()
        self.results, self.copies = [WrittenPart.from_result(result) for result in write_future.value()], {}
        return sorted({folder / part.file for part in self.results})

    def write_index(self, folder: Path, results: list[list[WrittenPart]]) -> list[Path]:
        """Write the index; return the new files."""
        assert self.index is not None
        torch.save(self.common, folder / COMMON)
        FileSystemWriter(folder, sync_files=True).finish(
            self.index, [[part.result for part in written_parts] for written_parts in results]
        )
        (folder / CONFIG).write_text(json.dumps(MODEL_FORMAT), encoding="utf-8")
        return [path for path in sorted(folder.iterdir()) if path.suffix != ".distcp"]


def cannot_be_written(why: str, remedy: str = NO_ROOM) -> str:
    return f"cannot be written: {why} ({remedy})"
