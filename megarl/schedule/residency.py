"""Residency: which tenants are on the device while what runs. Before a phase everything leaves that it does not need, then what it
needs comes; what stays for the whole run is `residency.keep`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple, Protocol, get_args

import torch

from megarl.config import schema
from megarl.config.errors import DeviceMemoryError
from megarl.config.schema import Config
from megarl.parallel.offload import begin_peak, empty_cache, free_memory, peak
from megarl.rollout.delivery import Delivery

if TYPE_CHECKING:
    from megarl.schedule.phases import Phase

TENANTS: tuple[str, ...] = get_args(schema.Tenant)
GIB = 2**30
TRAINING_ADVICE = "lower update.tokens_per_micro_batch, set model.recompute=full, or raise parallel.tp or parallel.pp"
ADVICE = {
    "rollout": "lower rollout.engine_memory",
    "evaluation": "lower rollout.engine_memory",
    "old_logprobs": "lower update.tokens_per_micro_batch or update.logprob_chunk, or raise parallel.tp",
    "reference_logprobs": "lower update.tokens_per_micro_batch or update.logprob_chunk, or raise parallel.tp",
    "values": "lower update.tokens_per_micro_batch, or raise parallel.tp",
    "weight_transfer": "lower rollout.transfer_bucket or rollout.engine_memory",
    "start": "raise parallel.tp or parallel.pp",
    "checkpoint": "raise parallel.tp, parallel.pp or parallel.dp",
}


class Tenant(Protocol):
    """Something that takes memory of the device and can leave it."""

    @property
    def nbytes(self) -> int:
        """What it takes, or would take, on the device."""

    def leave(self) -> None:
        """Frees its memory there."""

    def enter(self) -> None:
        """Comes back."""


class Move(NamedTuple):
    """A tenant left or entered the device before a phase."""

    phase: str
    tenant: str
    enters: bool


def kept(config: Config, device: torch.device) -> frozenset[str]:
    """The tenants that never leave the device: all of them where nothing is moved."""
    moves = device.type == "cuda" if config.residency.offload is None else config.residency.offload
    return frozenset(config.residency.keep if moves else TENANTS)


def resident_sets(phases: Iterable[Phase], keep: Collection[str]) -> list[frozenset[str]]:
    """What is on the device in each phase of a step that follows upon another like it. A phase that needs nothing there moves nothing."""
    order = list(phases)
    present: frozenset[str] = frozenset()
    for phase in order:
        present = phase.resident or present
    sets = []
    for phase in order:
        present = phase.resident or present
        sets.append(present | frozenset(keep))
    return sets


def check_residency(phases: Iterable[Phase]) -> None:
    """Raises ValueError naming the phase that needs a tenant that there is not, or the KV cache and an optimizer together: only
    `residency.keep` may have both on the device."""
    order = list(phases)
    for phase, present in zip(order, resident_sets(order, ()), strict=True):
        if unknown := present - frozenset(TENANTS):
            raise ValueError(f"phase {phase.name} needs {', '.join(sorted(unknown))}, which is no tenant")
        if "engine.kv_cache" in present and any(name.endswith(".optimizer") for name in present):
            raise ValueError(f"phase {phase.name} needs engine.kv_cache and an optimizer on the device together")


class EngineTenant:
    """The weights or the KV cache of the engines, of which this rank's device has a share. nbytes: where it is known beforehand; on a
    GPU it is measured, as what the device has more of when it has left."""

    def __init__(self, delivery: Delivery, tag: str, device: torch.device, nbytes: int) -> None:
        self.delivery, self.tag, self.device, self.nbytes = delivery, tag, device, nbytes

    def leave(self) -> None:
        before = free_memory(self.device)
        self.delivery.sleep((self.tag,))
        self.nbytes = free_memory(self.device) - before or self.nbytes

    def enter(self) -> None:
        self.delivery.wake((self.tag,))


class Residency:
    """The tenants of one rank and where they are. All ranks do the same moves in the same order: those of engines are collective."""

    def __init__(self, device: torch.device, keep: Collection[str]) -> None:
        self.device, self.keep = device, frozenset(keep)
        self.present: set[str] = set()
        self.moves: deque[Move] = deque(maxlen=1000)  # the last ones
        self._tenants: dict[str, Tenant] = {}

    @property
    def moving(self) -> bool:
        """Whether anything ever leaves."""
        return not self.keep >= frozenset(TENANTS)

    def add(self, tenants: Mapping[str, Tenant]) -> None:
        """New ones, which are on the device."""
        self._tenants |= tenants
        self.present |= set(tenants)

    def enter(self, phase: str, wanted: Collection[str]) -> None:
        """Makes room, then brings what is wanted and not there. DeviceMemoryError where the device is full."""
        leaving = self.present - frozenset(wanted) - self.keep
        self._move(phase, leaving, enters=False)
        self._move(phase, frozenset(wanted) - self.present, enters=True)

    @contextmanager
    def also(self, phase: str, wanted: Collection[str]) -> Iterator[None]:
        """Within, what is wanted is there too, beside everything else."""
        guests = frozenset(wanted) - self.present
        self._move(phase, guests, enters=True)
        yield
        self._move(phase, guests, enters=False)

    def _move(self, phase: str, names: Collection[str], *, enters: bool) -> None:
        for name in sorted(names):
            tenant = self._tenants[name]
            with self.explained(phase):
                (tenant.enter if enters else tenant.leave)()
            (self.present.add if enters else self.present.remove)(name)
            self.moves.append(Move(phase, name, enters))
        if names and not enters:
            empty_cache(self.device)

    @property
    def nbytes(self) -> int:
        """Of the tenants that are there."""
        return sum(self._tenants[name].nbytes for name in self.present)

    @contextmanager
    def explained(self, phase: str) -> Iterator[None]:
        """Turns torch's out-of-memory error into a DeviceMemoryError that says who is there and what to change."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise DeviceMemoryError(self._explanation(phase, str(error))) from error

    def _explanation(self, phase: str, error: str) -> str:
        sizes = {name: self._tenants[name].nbytes for name in self.present}
        who = ", ".join(f"{name} {size / GIB:.2f} GiB" for name, size in sorted(sizes.items(), key=lambda pair: (-pair[1], pair[0])))
        advice = ADVICE.get(phase, TRAINING_ADVICE)
        if not self.moving:
            advice += ", or set residency.offload=true"
        elif self.keep:
            advice += f", or take {', '.join(sorted(self.keep))} out of residency.keep"
        what = ", ".join(error.strip().rstrip(".").split(". ")[:2])  # that it is out of memory, and what it asked for
        return f"phase {phase}: {what}; on the device are {who or 'no tenants'} ({advice})"

    @contextmanager
    def measured(self, phase: str, metrics: dict[str, float]) -> Iterator[None]:
        """Adds memory/<phase>, in bytes: the peak of this process on a GPU (and memory_reserved/, memory_device/, see
        parallel/offload.py), on a CPU the size of the tenants that are there."""
        begin_peak(self.device)
        yield
        found = peak(self.device) or {"": float(self.nbytes)}
        for kind, size in found.items():
            metrics[f"memory{'_' if kind else ''}{kind}/{phase}"] = size
