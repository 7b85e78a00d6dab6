"""Residency of tensor groups: unneeded ones wait in host memory during a phase."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from megarl.config.errors import DeviceMemoryError
from megarl.config.phases import GROUPS
from megarl.parallel.device_memory import (
    ProcessPeak,
    device_peak,
    empty_cache,
    free_memory,
    reset_device_peak,
)
from megarl.parallel.offload_group import OffloadGroup
from megarl.sync.weight_sync import WeightSync
from megarl.training.model import TrainableModel

GIB = 2**30
UPDATE_ADVICE = (
    "lower update.tokens_per_micro_batch, set model.recompute=full, or raise parallel.tp or parallel.pp"
)
LOGPROB_ADVICE = "lower update.tokens_per_micro_batch or update.logprob_chunk, or raise parallel.tp"
ADVICE = {
    **dict.fromkeys(
        ("rollout", "evaluation"),
        "lower rollout.engine_memory (sglang) or rollout.max_batch (transformers)",
    ),
    **dict.fromkeys(("old_logprobs", "parity", "reference_logprobs"), LOGPROB_ADVICE),
    **dict.fromkeys(("old_top_k", "teacher_advantages", "teacher_logprobs", "teacher_top_k"), LOGPROB_ADVICE),
    **dict.fromkeys(("reward_model", "values"), "lower update.tokens_per_micro_batch, or raise parallel.tp"),
    "weight_transfer": "lower rollout.transfer_bucket or rollout.engine_memory",
    "start": "raise parallel.tp or parallel.pp",
    "checkpoint": "raise parallel.tp, parallel.pp or parallel.dp",
}


class EngineMemory:
    """This rank's share of engine weights or KV cache. On a GPU `sleep` measures `nbytes`."""

    def __init__(self, weight_sync: WeightSync, tag: str, device: torch.device, nbytes: int) -> None:
        self.weight_sync, self.tag, self.device, self.nbytes = weight_sync, tag, device, nbytes

    def offload(self) -> None:
        free_before = free_memory(self.device)
        self.weight_sync.sleep((self.tag,))
        self.nbytes = free_memory(self.device) - free_before or self.nbytes

    def onload(self) -> None:
        self.weight_sync.wake((self.tag,))


class AlternatingGroup:
    """One tensor group of several models, such as the weights of all teachers.

    At most one part, `current`, is on the device; with `stay` always all.
    """

    def __init__(self, parts: Sequence[OffloadGroup], *, stay: bool) -> None:
        self.parts, self.stay, self.current = [*parts], stay, len(parts) - 1  # the last part is built last

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.parts if self.stay else [self.parts[self.current]]))

    def offload(self) -> None:
        self.parts[self.current].offload()

    def onload(self) -> None:
        self.current = 0
        self.parts[0].onload()


class OffloadManager:
    """Moves tensor groups, on all ranks in the same order: engines' sleep and wake are collective."""

    def __init__(self, device: torch.device, keep: Collection[str]) -> None:
        self.device, self.keep = device, frozenset(keep)
        self.present: set[str] = set()
        self._process = ProcessPeak()
        self._groups: dict[str, OffloadGroup | EngineMemory | AlternatingGroup] = {}

    @property
    def enabled(self) -> bool:
        return not self.keep >= frozenset(GROUPS)

    @property
    def nbytes(self) -> int:
        return sum(self._groups[name].nbytes for name in self.present)

    def register(self, groups: Mapping[str, OffloadGroup | EngineMemory]) -> None:
        for name, group in groups.items():
            old_group = self._groups.get(name)
            if isinstance(group, OffloadGroup) and old_group is not None:
                parts = old_group.parts if isinstance(old_group, AlternatingGroup) else [old_group]
                self._groups[name] = AlternatingGroup([*parts, group], stay=name in self.keep)
            else:
                self._groups[name] = group
            self.present.add(name)

    def select_part(self, phase: str, name: str, number: int) -> None:
        group = self._groups[name]
        if isinstance(group, AlternatingGroup) and not group.stay and group.current != number:
            group.offload()
            empty_cache(self.device)
            group.current = number
            with self.explain_out_of_memory(phase):
                group.parts[number].onload()

    def onload(self, phase: str, groups: Collection[str]) -> None:
        self._move(phase, self.present - frozenset(groups) - self.keep, onload=False)
        self._move(phase, frozenset(groups) - self.present, onload=True)

    @contextmanager
    def with_extra(self, phase: str, groups: Collection[str]) -> Iterator[None]:
        extra = frozenset(groups) - self.present
        self._move(phase, extra, onload=True)
        yield
        self._move(phase, extra, onload=False)

    def _move(self, phase: str, names: Collection[str], *, onload: bool) -> None:
        for name in sorted(names):
            group = self._groups[name]
            with self.explain_out_of_memory(phase):
                (group.onload if onload else group.offload)()
            (self.present.add if onload else self.present.remove)(name)
        if names and not onload:
            empty_cache(self.device)

    @contextmanager
    def explain_out_of_memory(self, phase: str) -> Iterator[None]:
        """Raise torch's out-of-memory error as DeviceMemoryError with groups and remedy."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            sizes = {name: self._groups[name].nbytes for name in self.present}
            largest_first = sorted(sizes.items(), key=lambda pair: (-pair[1], pair[0]))
            groups = ", ".join(f"{name} {size / GIB:.2f} GiB" for name, size in largest_first)
            advice = ADVICE.get(phase, UPDATE_ADVICE)
            if not self.enabled:
                advice += ", or set residency.offload=true"
            elif self.keep:
                advice += f", or take {', '.join(sorted(self.keep))} out of residency.keep"
            what = ", ".join(str(error).strip().rstrip(".").split(". ")[:2])
            raise DeviceMemoryError(
                f"phase {phase}: {what}; on the device are {groups or 'no tensor groups'} ({advice})"
            ) from error

    @contextmanager
    def measure_memory(self, phase: str, metrics: dict[str, float]) -> Iterator[None]:
        """Add memory/<phase> and memory_<kind>/<phase> (bytes) to the metrics.

        They are `device_peak` on a GPU, else loaded groups and the process's peaks.
        """
        reset_device_peak(self.device)
        if self.device.type == "cpu":
            self._process.reset()
        yield
        sizes = device_peak(self.device) or {"": float(self.nbytes)} | self._process.measure()
        for kind, size in sizes.items():
            metrics[f"memory{'_' if kind else ''}{kind}/{phase}"] = size


class Residency:
    def __init__(
        self,
        manager: OffloadManager,
        models: Mapping[str, TrainableModel],
        weight_sync: WeightSync | None = None,
    ) -> None:
        self.manager, self.models, self.weight_sync = manager, models, weight_sync

    def onload(self, phase: str, groups: Collection[str]) -> None:
        """Have only these tensor groups and residency.keep on the device.

        An engine without weights gets the actor's first, unless the phase syncs them."""
        weight_sync = self.weight_sync
        if weight_sync is None:
            # No engine here: phases that need only its groups move nothing.
            if model_groups := {name for name in groups if not name.startswith("engine.")}:
                self.manager.onload(phase, model_groups)
            return
        needs_engine = "engine.weights" in groups and "actor.weights" not in groups
        if needs_engine and not weight_sync.complete:
            self.manager.onload(phase, {"actor.weights", "engine.weights"})
            weight_sync.sync(weight_sync.version)
        self.manager.onload(phase, groups)
        if needs_engine and not weight_sync.complete:  # an engine failed to wake up
            with self.manager.with_extra(phase, {"actor.weights"}):
                weight_sync.sync(weight_sync.version)

    def onload_model(self, phase: str, name: str, *parts: str) -> None:
        model = self.models[name]
        groups = {f"{model.name}.{part}" for part in parts}
        self.onload(phase, groups)
        if model.name == "critic":
            critic_index = list(self.models).index(name) - 1
            for group in sorted(groups):
                self.manager.select_part(phase, group, critic_index)

    def onload_for_checkpoint(self, name: str) -> None:
        self.onload_model("checkpoint", name, "weights", "optimizer")
