"""Bring the actor's weights into all engines, and recover failed engines.

All ranks call the same methods in the same order; only ranks with engines call `recover`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megarl.config.errors import EngineError, EngineFailure
from megarl.config.schema import Config, RolloutConfig
from megarl.model.builder import DTYPES
from megarl.parallel.comm import gather_objects
from megarl.parallel.device_memory import empty_cache
from megarl.parallel.runtime import Ranks, Runtime
from megarl.sync.backends import BACKENDS
from megarl.sync.backends.base import UpdatableEngine, WeightBackend
from megarl.sync.plan import engine_plan, frozen_targets
from megarl.sync.transfer import Staging, Transfer, TransferStats
from megarl.weights.lora import merged

READY_WAIT = 10.0  # seconds to wait for an engine between collectives
Failures = list[EngineFailure | None]  # by rank


class _Guard:
    """Calls functions of an engine until one raises EngineFailure, and keeps that failure.

    After a failure, or if inactive, it calls nothing and returns None."""

    def __init__(self, *, active: bool) -> None:
        self.active = active
        self.failure: EngineFailure | None = None

    def __call__(self, call: Callable[..., Any], *arguments: Any) -> Any:
        if self.active and self.failure is None:
            try:
                return call(*arguments)
            except EngineFailure as error:
                self.failure = error
        return None


class WeightSync:
    """Brings the actor's weights into the engines.

    transfers  by bucket
    memory     staging memory of all transfers, allocated only during a sync
    constant   number of leading transfers with frozen weights only; syncs skip them while `complete`
    version    of the last sync
    complete   whether the engines hold all weights of the last sync
    asleep     tags whose device memory the engines have freed
    failures   of engines since the last sync; more than `max_failures` end the run"""

    def __init__(
        self,
        config: RolloutConfig,
        runtime: Runtime,
        engine: UpdatableEngine | None,
        backend: WeightBackend[Any],
        transfers: Sequence[Transfer],
        memory: Sequence[Staging] = (),
        constant: int = 0,
    ) -> None:
        self.config, self.runtime = config, runtime
        self.engine, self.backend = engine, backend
        self.transfers, self.memory, self.constant = transfers, memory, constant
        self.max_failures, self.failures = config.engine_failures, 0
        self.version = -1
        self.complete = False
        self.asleep: set[str] = set()
        # Engine-only ranks keep host copies, for engines that restart during training.
        self._copies: list[dict[str, Tensor]] = []
        self._keeps_copies = engine is not None and runtime.rollout_ranks > 0 and backend.can_recover
        self._events: list[str] = []
        self._restarted = False
        for staging in memory:
            staging.release()

    @property
    def nbytes(self) -> int:
        return sum(transfer.target_bytes for transfer in self.transfers)

    def sync(self, version: int) -> TransferStats:
        """Write the actor's weights into all engines, as `version`."""
        self.failures, self.version = 0, version
        failures, stats = self._update(_Guard(active=self.engine is not None), self.runtime.job)
        self._recover(failures, self.runtime.job)
        return stats

    def recover(self, failures: Failures) -> None:
        """Restart failed engines with the weights of `version`. Unfinished requests continue.

        The actor must still have these weights, unless the engines' ranks have host copies.
        Raises EngineError on every rank after too many failures. failures: by rank with an engine"""
        self._recover(failures, self.runtime.engines)

    def _recover(self, failures: Failures, ranks: Ranks) -> None:
        while any(failures):
            self.complete = False
            has_restarted = self._restart(failures, ranks)
            failures, _ = self._update(_Guard(active=has_restarted), ranks)

    def sleep(self, tags: Sequence[str]) -> None:
        """Free the device memory of these tags in all engines."""
        self.asleep |= set(tags)
        self.complete &= "weights" not in tags
        self._call_all(lambda engine: engine.sleep(tags))

    def wake(self, tags: Sequence[str]) -> None:
        """Allocate the memory of these tags. Weights are undefined until a sync."""
        self.asleep -= set(tags)
        self._call_all(lambda engine: engine.wake(tags))

    def take_events(self) -> list[str]:
        events, self._events = self._events, []
        return events

    def _call_all(self, call: Callable[[UpdatableEngine], None]) -> None:
        ranks, engine = self.runtime.job, self.engine
        guard = _Guard(active=engine is not None)
        self._await_ready(guard, ranks)
        if engine is not None:
            guard(call, engine)
        # Do not repeat `call` on a restarted engine: `_await_ready` frees the tags in `asleep` again.
        while any(failures := gather_objects(ranks, guard.failure, EngineFailure | None)):
            self.complete = False
            guard = _Guard(active=self._restart(failures, ranks))
            self._await_ready(guard, ranks)

    def _restart(self, failures: Failures, ranks: Ranks) -> bool:
        num_trainers = ranks.world - (self.runtime.rollout_ranks or ranks.world)
        for rank, failure in enumerate(failures):
            if failure is not None:
                self.failures += 1
                count = f"{self.failures} of at most {self.max_failures}"
                job_rank = rank - num_trainers + self.runtime.first_engine
                self._events.append(f"engine of rank {job_rank} failed ({count}): {failure}")
                last_failure = failure
        if self.failures > self.max_failures:
            error = EngineError(
                f"rollout: {self.failures} engine failures since the last weight transfer, "
                f"rollout.engine_failures allows {self.max_failures}; the last: {last_failure}"
            )
            error.on_every_rank = True
            raise error
        # Only an engine's leader sees failures, but all its ranks restart it.
        tp = self.config.engine_tp
        leader = num_trainers + (ranks.rank - num_trainers) // tp * tp
        if self.engine is None or not any(failures[leader : leader + tp]):
            return False
        self.backend.recover()
        self._restarted = True
        return True

    def _await_ready(self, guard: _Guard, ranks: Ranks) -> None:
        """Wait until guarded engines are ready. Restarted ones then free the tags in `asleep`."""
        # An engine's start may outlast a collective's timeout, so poll it. An inactive or failed guard
        # returns None, which counts as ready.
        engine, is_ready = self.engine, False
        while not is_ready:
            answer = guard(lambda: engine is None or engine.ready(READY_WAIT)) is not False
            is_ready = all(gather_objects(ranks, answer, bool))
        if self._restarted and self.asleep and engine is not None:
            guard(engine.sleep, sorted(self.asleep))
        self._restarted = False

    def _update(self, guard: _Guard, ranks: Ranks) -> tuple[Failures, TransferStats]:
        self._await_ready(guard, ranks)
        num_skipped = self.constant if self.complete else 0
        bytes_kept = sum(transfer.target_bytes for transfer in self.transfers[:num_skipped])
        stats = TransferStats(0, 0, 0, 0.0, bytes_kept=bytes_kept)
        failures: Failures = []
        start = time.perf_counter()
        guard(self.backend.begin)
        backend_seconds = time.perf_counter() - start
        for memory in self.memory:
            memory.take()
        for bucket in range(num_skipped, len(self.transfers)):
            stats += self._fill(bucket, ranks)
            start = time.perf_counter()
            failures = self._send(bucket, guard, ranks)
            backend_seconds += time.perf_counter() - start
        sent = 0
        if self.backend.reports_notes:
            notes = self.engine.take_notes() if self.engine else []
            local_report = notes, self.backend.bytes_sent
            self.backend.bytes_sent = 0
            for rank_notes, rank_sent in gather_objects(ranks, local_report, tuple[list[str], int]):
                self._events += rank_notes
                sent += rank_sent
        stats += TransferStats(0, 0, 0, 0.0, backend_bytes=sent, backend_seconds=backend_seconds)
        for memory in self.memory:
            memory.release()
        self.complete = not any(failures)
        return failures, stats

    def _fill(self, bucket: int, ranks: Ranks) -> TransferStats:
        transfer = self.transfers[bucket]
        if ranks.world < self.runtime.job.world:
            for name, copy in self._copies[bucket].items():
                transfer.targets[name].copy_(copy)
            return TransferStats(0, 0, 0, 0.0)
        stats = transfer.run()
        if self.config.fingerprint:
            transfer.check()
        if self._keeps_copies:
            self._copy(bucket, transfer.targets)
        return stats

    def _send(self, bucket: int, guard: _Guard, ranks: Ranks) -> Failures:
        # No engine reads before all ranks have written, ...
        handle = None if self.engine is None else self.backend.handle(bucket)
        handles: list[bytes | None] = [None] * (self.runtime.job.world - ranks.world)
        handles += gather_objects(ranks, handle, bytes | None)
        guard(self.backend.send, bucket, handles, self.version)
        if bucket == len(self.transfers) - 1:
            guard(self.backend.finish, self.version)
        # ... and no rank writes before all engines have read.
        return gather_objects(ranks, guard.failure, EngineFailure | None)

    def _copy(self, bucket: int, targets: Mapping[str, Tensor]) -> None:
        if len(self._copies) <= bucket:
            self._copies.append({name: torch.empty_like(t, device="cpu") for name, t in targets.items()})
        for name, tensor in targets.items():
            self._copies[bucket][name].copy_(tensor)


def make_weight_sync(
    config: Config,
    runtime: Runtime,
    hf_config: Mapping[str, Any],
    model: torch.nn.Module | None,
    engine: UpdatableEngine | None,
) -> WeightSync:
    plan = engine_plan(config, hf_config, runtime.layout, cpu=runtime.device.type == "cpu")
    parameters = {} if model is None else dict(model.named_parameters())
    sources = (
        merged(parameters, hf_config, runtime.layout, runtime.rank, config.actor.lora) if parameters else {}
    )
    dtype, bucket_bytes = DTYPES[config.model.dtype], config.rollout.transfer_bucket * 2**20
    staging, memory = Staging(runtime.device), Staging(runtime.device)
    backend_class = BACKENDS[config.rollout.weight_backend]
    backend = backend_class(config, runtime.rank, runtime.device, dtype)
    frozen_names = frozen_targets(plan, hf_config, config.actor) if backend.keeps_frozen else frozenset[str]()
    names_by_bucket = backend.split(plan, frozen_names)
    parts = [plan.part(part) for part in names_by_bucket] if len(names_by_bucket) > 1 else [plan]
    targets = [{} for _ in parts] if engine is None else backend.connect(engine, parts, memory)
    transfers = [
        Transfer(
            part,
            runtime.rank,
            sources,
            tensors,
            bucket_bytes,
            dtype=dtype,
            group=runtime.transfer_group,
            staging=staging,
        )
        for part, tensors in zip(parts, targets, strict=True)
    ]
    constant = sum(frozen_names.issuperset(part) for part in names_by_bucket)
    weight_sync = WeightSync(config.rollout, runtime, engine, backend, transfers, (staging, memory), constant)
    # The engine needs the memory that `connect` has used.
    empty_cache(runtime.device)
    return weight_sync
