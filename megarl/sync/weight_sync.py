"""Weight sync: the actor's weights into all engines, bucket by bucket, and engines that failed started again.

Collective: all ranks call the same methods in the same order, `recover` those with engines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import methodcaller
from typing import Any, Protocol

import torch
from torch import Tensor

from megarl.config.errors import EngineError, EngineFailure
from megarl.config.schema import RolloutConfig
from megarl.parallel.comm import gather_objects
from megarl.parallel.runtime import Ranks, Runtime
from megarl.sync.transfer import Staging, Transfer, TransferStats

READY_WAIT = 10.0  # seconds that a rank waits for its engine before it exchanges with the others
Failures = list[EngineFailure | None]  # by rank


class Engine(Protocol):
    """What a weight sync calls of a rollout engine, see RolloutEngine."""

    def ready(self, seconds: float) -> bool: ...
    def restart(self) -> None: ...
    def handle(self, bucket: int) -> bytes | None: ...
    def begin_update(self) -> None: ...
    def load_bucket(self, bucket: int, handles: Sequence[Any], version: int) -> None: ...
    def end_update(self, version: int) -> None: ...
    def sleep(self, tags: Sequence[str]) -> None: ...
    def wake(self, tags: Sequence[str]) -> None: ...
    def take_notes(self) -> list[str]: ...


class _Guard:
    """Makes calls of the engine until its first failure; none where there is no engine to be called."""

    def __init__(self, engine: Engine | None) -> None:
        self.engine = engine
        self.failure: EngineFailure | None = None

    def __call__(self, call: Callable[[Engine], Any]) -> Any:
        if self.engine is not None and self.failure is None:
            try:
                return call(self.engine)
            except EngineFailure as error:
                self.failure = error
        return None


class WeightSync:
    """Keeps the engines supplied with the actor's weights. All ranks of the job have one.

    engine         of this rank, None where it has none
    transfers      one for each bucket of the engine, in order
    memory         what all transfers share; on the device only during a sync
    constant       so many transfers, the first, bring frozen weights: engines that have theirs get the others
    version        of the weights that were synced last
    complete       whether all engines have weights
    asleep         tags whose device memory the engines have freed
    failures       of engines, since the last sync; beyond `max_failures` the run ends
    """

    def __init__(
        self,
        config: RolloutConfig,
        runtime: Runtime,
        engine: Engine | None,
        transfers: Sequence[Transfer],
        memory: Sequence[Staging] = (),
        constant: int = 0,
    ) -> None:
        self.config, self.runtime, self.engine = config, runtime, engine
        self.transfers, self.memory, self.constant = transfers, memory, constant
        self.max_failures, self.failures = config.engine_failures, 0
        self.version = -1
        self.complete = False
        self.asleep: set[str] = set()
        # Where the actor is on other ranks, which go on: what an engine that is started anew gets.
        self._copies: list[dict[str, Tensor]] = []
        self._keeps = engine is not None and runtime.rollout_ranks > 0 and config.engine_kind.streams
        self._events: list[str] = []
        self._restarted = False  # this rank's engine was started again, and nothing of it sleeps
        for staging in memory:
            staging.release()

    @property
    def nbytes(self) -> int:
        """Return the bytes of this rank's share of its engine's weights."""
        return sum(transfer.target_bytes for transfer in self.transfers)

    def sync(self, version: int) -> TransferStats:
        """Write the actor's present weights into all engines, which then carry `version`. Frozen ones are not
        written again to engines that all have kept their weights since the last sync."""
        self.failures, self.version = 0, version
        failures, stats = self._update(_Guard(self.engine), self.runtime.job)
        self._recover(failures, self.runtime.job)
        return stats

    def recover(self, failures: Failures) -> None:
        """Start the engines of the ranks that met a failure again and give them the weights of `version`,
        which the actor must still have; where it is on other ranks, from a copy on the host. Their unfinished
        requests continue. failures: of the ranks with engines. Raises EngineError on each of them once there
        were too many."""
        self._recover(failures, self.runtime.engines)

    def _recover(self, failures: Failures, ranks: Ranks) -> None:
        while any(failures):
            self.complete = False
            started_again = self._restart(failures, ranks)
            failures, _ = self._update(_Guard(self.engine if started_again else None), ranks)

    def sleep(self, tags: Sequence[str]) -> None:
        """Free the device memory of the tags in all engines; without weights they need a sync."""
        self.asleep |= set(tags)
        self.complete &= "weights" not in tags
        self._call_all(lambda engine: engine.sleep(tags))

    def wake(self, tags: Sequence[str]) -> None:
        """Allocate the memory of the tags again; weights are undefined until a sync."""
        self.asleep -= set(tags)
        self._call_all(lambda engine: engine.wake(tags))

    def take_events(self) -> list[str]:
        """Return the lines about failures since the last call."""
        events, self._events = self._events, []
        return events

    def _call_all(self, call: Callable[[Engine], None]) -> None:
        guard = _Guard(self.engine)
        ranks = self.runtime.job
        self._await_ready(guard, ranks)
        guard(call)
        # An engine that failed is not asked again: once started anew it is put to sleep as `asleep` says.
        while any(failures := gather_objects(ranks, guard.failure, EngineFailure | None)):
            self.complete = False
            guard = _Guard(self.engine if self._restart(failures, ranks) else None)
            self._await_ready(guard, ranks)

    def _restart(self, failures: Failures, ranks: Ranks) -> bool:
        """Start this rank's engine again where it failed, and return whether it did. Raises EngineError on
        every rank once there were too many failures."""
        trainers = ranks.world - (self.runtime.rollout_ranks or ranks.world)  # of `ranks`, before the engines
        for rank, failure in enumerate(failures):
            if failure is not None:
                self.failures += 1
                count = f"{self.failures} of at most {self.max_failures}"
                number = rank - trainers + self.runtime.first_engine
                self._events.append(f"engine of rank {number} failed ({count}): {failure}")
                last = failure
        if self.failures > self.max_failures:
            error = EngineError(
                f"rollout: {self.failures} engine failures since the last weight transfer, "
                f"rollout.engine_failures allows {self.max_failures}; the last: {last}"
            )
            error.on_every_rank = True
            raise error
        # All ranks of an engine start it again, of which the leader alone meets failures.
        tp = self.config.engine_tp
        leader = trainers + (ranks.rank - trainers) // tp * tp
        if self.engine is None or not any(failures[leader : leader + tp]):
            return False
        self.engine.restart()
        self._restarted = True
        return True

    def _await_ready(self, guard: _Guard, ranks: Ranks) -> None:
        """Wait until all guarded engines are ready; those started again sleep as far as the others do."""
        # An engine may take longer to start than any rank may wait in a collective. A guard that is not
        # active, or whose engine has failed, answers None: nobody waits for that one.
        is_ready = False
        while not is_ready:
            answer = guard(lambda engine: engine.ready(READY_WAIT)) is not False
            is_ready = all(gather_objects(ranks, answer, bool))
        if self._restarted and self.asleep:
            guard(lambda engine: engine.sleep(sorted(self.asleep)))
        self._restarted = False

    def _update(self, guard: _Guard, ranks: Ranks) -> tuple[Failures, TransferStats]:
        """Transfer the weights once. All `ranks` take part in the transfer; only the engines whose guard is
        active load what it brings. Without the actor's ranks it comes from the copies on the host."""
        self._await_ready(guard, ranks)
        from_copies = ranks.world < self.runtime.job.world
        skipped = self.constant if self.complete else 0
        kept = sum(transfer.target_bytes for transfer in self.transfers[:skipped])
        total = TransferStats(0, 0, 0, 0.0, bytes_kept=kept)
        failures: Failures = []
        guard(lambda engine: engine.begin_update())
        for memory in self.memory:
            memory.take()
        for bucket, transfer in list(enumerate(self.transfers))[skipped:]:
            if from_copies:
                for name, copy in self._copies[bucket].items():
                    transfer.targets[name].copy_(copy)
            else:
                total = total.plus(transfer.run())
                if self.config.fingerprint:
                    transfer.check()
                if self._keeps:
                    self._keep(bucket, transfer.targets)
            # Nobody reads before all have written, ...
            handles = gather_objects(ranks, self.engine and self.engine.handle(bucket), bytes | None)
            handles = [None] * (self.runtime.job.world - ranks.world) + handles  # by rank of the job
            guard(methodcaller("load_bucket", bucket, handles, self.version))
            if bucket == len(self.transfers) - 1:
                guard(lambda engine: engine.end_update(self.version))
            # ... and nobody writes before all have read.
            failures = gather_objects(ranks, guard.failure, EngineFailure | None)
        if self.config.engine_kind.remote:
            notes = self.engine.take_notes() if self.engine else []
            for theirs in gather_objects(ranks, notes, list[str]):
                self._events += theirs
        for memory in self.memory:
            memory.release()
        self.complete = not any(failures)
        return failures, total

    def _keep(self, bucket: int, targets: Mapping[str, Tensor]) -> None:
        """Copy what a transfer has brought to the host."""
        if len(self._copies) <= bucket:
            self._copies.append({name: torch.empty_like(t, device="cpu") for name, t in targets.items()})
        for name, tensor in targets.items():
            self._copies[bucket][name].copy_(tensor)
