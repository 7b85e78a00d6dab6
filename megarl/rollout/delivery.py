"""Weights into the engines, bucket after bucket, and engines that failed back to life. All ranks call both alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from megarl.config.errors import EngineError, EngineFailure
from megarl.rollout.engine import RolloutEngine
from megarl.weights.transfer import Staging, Transfer, TransferStats

PATIENCE = 10.0  # seconds
Failures = list[EngineFailure | None]  # by rank


class _Trial:
    """Calls of an engine up to its first failure; none at all where it is not `mine`."""

    def __init__(self, mine: bool) -> None:
        self.mine = mine
        self.failure: EngineFailure | None = None

    def __call__(self, call: Callable[..., Any], *arguments: Any) -> Any:
        if self.mine and self.failure is None:
            try:
                return call(*arguments)
            except EngineFailure as error:
                self.failure = error
        return None


class Delivery:
    """transfers: one for each bucket of the engine, in order; gather: every rank's object, by rank, on every rank; most_failures: failures
    of engines, since the last whole delivery, after which none is started anew; check: compare weights by fingerprints; memory: what all
    transfers share, on the device from the begin of a delivery to its end.

    events: lines about failures, for the run's log; `take_events` empties it. delivered: whether all engines have weights. asleep: tags
    whose memory they have given back."""

    def __init__(
        self,
        engine: RolloutEngine,
        transfers: Sequence[Transfer],
        gather: Callable[[Any], list[Any]],
        most_failures: int = 0,
        check: bool = False,
        memory: Sequence[Staging] = (),
    ) -> None:
        self.engine, self.transfers, self.gather = engine, transfers, gather
        self.most_failures, self.check, self.memory = most_failures, check, memory
        self._release()
        self.failures = 0
        self.version = -1
        self.events: list[str] = []
        self.delivered = False
        self.asleep: set[str] = set()
        self._fresh = False  # this rank's engine was started anew and is all awake

    @property
    def nbytes(self) -> int:
        """Of this rank's share of its engine's weights."""
        return sum(transfer.target_bytes for transfer in self.transfers)

    def sleep(self, tags: Sequence[str]) -> None:
        """Frees the device memory of all engines that the tags name; without weights they need a delivery."""
        self.asleep |= set(tags)
        self.delivered &= "weights" not in tags
        self._all(self.engine.sleep, tags)

    def wake(self, tags: Sequence[str]) -> None:
        """Undoes `sleep`; weights are undefined until a delivery."""
        self.asleep -= set(tags)
        self._all(self.engine.wake, tags)

    def _all(self, call: Callable[[Sequence[str]], None], tags: Sequence[str]) -> None:
        trial = _Trial(True)
        self._await(trial)
        trial(call, tags)
        failures = self.gather(trial.failure)
        while any(failures):
            self.delivered = False
            trial = _Trial(self._restart(failures))
            self._await(trial)
            failures = self.gather(trial.failure)

    def run(self, version: int) -> TransferStats:
        """The actor's present weights into all engines, which then carry `version`."""
        self.failures, self.version = 0, version
        failures, stats = self._attempt(True)
        if any(failures):
            self.recover(failures)
        return stats

    def recover(self, failures: Failures) -> None:
        """Starts the engines of the ranks that met a failure anew and gives them the weights of `version`, which the actor must still have;
        what they had not finished goes on. EngineError on every rank once there were too many failures."""
        while any(failures):
            failures, _ = self._attempt(self._restart(failures))

    def _restart(self, failures: Failures) -> bool:
        """Whether this rank's engine was started anew; EngineError on every rank once there were too many failures."""
        for rank, failure in enumerate(failures):
            if failure is not None:
                self.failures += 1
                self.events.append(f"engine of rank {rank} failed ({self.failures} of at most {self.most_failures}): {failure}")
                last = failure
        if self.failures > self.most_failures:
            error = EngineError(
                f"rollout: {self.failures} engine failures since the last weight transfer, rollout.engine_failures allows "
                f"{self.most_failures}; the last: {last}"
            )
            error.on_every_rank = True
            raise error
        # All ranks of an engine start it anew, of which the leader alone meets failures.
        mine = self.engine.is_one_of([rank for rank, failure in enumerate(failures) if failure is not None])
        if mine:
            self.engine.restart()
            self._fresh = True
        return mine

    def _await(self, trial: _Trial) -> None:
        """Until the engines of this trial, on all ranks, are there; those started anew go to sleep as far as they are to be asleep."""
        # An engine may take longer to start than any rank may wait in a collective.
        while not all(self.gather(trial(self.engine.ready, PATIENCE) is not False)):
            pass
        if self._fresh and self.asleep:
            trial(self.engine.sleep, sorted(self.asleep))
        self._fresh = False

    def _attempt(self, mine: bool) -> tuple[Failures, TransferStats]:
        """One delivery, to the engines whose ranks say `mine`; the others' memory is written too, and not looked at."""
        trial = _Trial(mine)
        self._await(trial)
        total = TransferStats(0, 0, 0, 0.0)
        failures: Failures = []
        trial(self.engine.begin_update)
        for memory in self.memory:
            memory.take()
        for bucket, transfer in enumerate(self.transfers):
            total = total.plus(transfer.run())
            if self.check:
                transfer.check()
            handles = self.gather(self.engine.handle(bucket))  # nobody reads before all have written
            trial(self.engine.deliver, bucket, handles, self.version)
            if bucket == len(self.transfers) - 1:
                trial(self.engine.end_update, self.version)
            failures = self.gather(trial.failure)  # nobody writes before all have read
        self._release()
        self.delivered = not any(failures)
        return failures, total

    def _release(self) -> None:
        for memory in self.memory:
            memory.release()

    def take_events(self) -> list[str]:
        """The lines since the last call."""
        events, self.events = self.events, []
        return events
