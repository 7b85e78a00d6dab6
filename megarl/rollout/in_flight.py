"""Rollouts while the engines' weights change (`schedule.in_flight`)."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable

from megarl.config.schema import TRAIN, Config
from megarl.data.sample import SampleGroup
from megarl.rollout import messages as m
from megarl.rollout.collector import GroupCollector
from megarl.rollout.controller import Controller, GroupRequest, StepGroups, TakePrompts, make_sampling_params

Store = Callable[[m.CollectRollout, StepGroups], Awaitable[None]]


class InFlightController(Controller):
    """Fills ordered steps with the groups that finish first, and never waits for running responses.

    At most the groups of all ordered steps exist at once. A group is on average one step older per step that
    is ordered beyond the next one.

    steps    ordered steps without a batch
    done     last step whose batch the trainers no longer need"""

    def __init__(self, config: Config, hub: m.Hub, ranks: int, take_prompts: TakePrompts) -> None:
        super().__init__(config, hub, ranks, take_prompts)
        self.steps: list[m.CollectRollout] = []
        self.done = 0
        self._accepted = self._offered = 0.0  # groups of recent steps
        self._dropped, self._forgotten = 0, list[int]()

    async def serve(self, first: m.CollectRollout, store: Store) -> None:
        """Follow orders until one asks for something else, which then comes first in `orders`.

        store: called with each full batch"""
        rollout = self.config.rollout
        self.start_rollout(make_sampling_params(rollout, first.number))
        self.steps, self._forgotten, self.orders_underway = [first], [], 0
        self._stored_time, self._stored_busy = time.monotonic(), 0.0
        collector = GroupCollector(rollout.prompts, rollout.dynamic_sampling, self.surplus)
        self.surplus = []
        while await self._follow_orders():
            if self.steps:
                self._offer_finished(collector, self.steps[0].number)
                if collector.is_full:
                    await store(self.steps[0], self._finish_step(collector))
                    self.steps.pop(0)
                    collector = GroupCollector(rollout.prompts, rollout.dynamic_sampling, self.surplus)
                    self.surplus = []
                    continue
                await self.dispatch(self.take_requests(self._count_missing(collector), self.steps[0].number))
            await self.handle_messages()
        self.orders += self.steps
        self.surplus = collector.accepted
        self.returned = await self._abort() + self.returned

    async def _follow_orders(self) -> bool:
        """Pass on new weights and note ordered steps. Return whether that was all."""
        while self.orders:
            match self.orders[0]:
                case m.TransferWeights(version):
                    self.newest_transfer = version
                    await self.pass_on(self.orders[0])
                case m.CollectRollout(stage, _, done) if stage == TRAIN:
                    self.steps.append(self.orders[0])
                    self.done = done
                case _:
                    return False
            self.orders.pop(0)
        return True

    async def pass_on(self, order: m.TransferWeights | m.StoreRollout) -> None:
        self.orders_underway += 1
        await self.hub.send_all(order)

    def _offer_finished(self, collector: GroupCollector, step: int) -> None:
        """Offer finished groups, those started first. Drop groups that step may not use."""
        oldest_allowed = step - 1 - self.config.schedule.max_staleness
        while not collector.is_full:
            groups = self.dispatcher.take_groups(collector.missing, in_order=False)
            if not groups:
                break
            fresh_groups = [group for group in groups if group.oldest_version >= oldest_allowed]
            for group in groups:
                if group.oldest_version < oldest_allowed:
                    self._drop(group)
            rejected = len(collector.rejected)
            collector.offer(fresh_groups)
            self._offered += len(fresh_groups)
            self._accepted += len(fresh_groups) - (len(collector.rejected) - rejected)

    def _drop(self, group: SampleGroup) -> None:
        """Sample the group's prompt again."""
        self._dropped += len(group.samples)
        self._forgotten += [sample.id for sample in group.samples]
        self.returned.insert(0, GroupRequest(group.prompt, ()))

    def _count_missing(self, collector: GroupCollector) -> int:
        """Return how many groups to start, so that all ordered steps can be filled.

        They have at most `max_batches` each. Before any group, all are expected to be accepted."""
        rollout, num_steps = self.config.rollout, len(self.steps)
        missing = collector.missing + rollout.prompts * (num_steps - 1)
        accepted_share = (self._accepted + rollout.prompts) / (self._offered + rollout.prompts)
        wanted = math.ceil(missing / accepted_share)
        allowed = rollout.prompts * rollout.dynamic_sampling.max_batches * num_steps - len(collector.offered)
        return max(0, min(wanted, allowed) - self.dispatcher.num_groups)

    def _finish_step(self, collector: GroupCollector) -> StepGroups:
        groups, stats, error_counts = super()._finish_step(collector)
        used_ids = {id(group) for group in groups}
        unused_groups = [group for group in collector.rejected if id(group) not in used_ids]
        self._forgotten += [sample.id for group in unused_groups for sample in group.samples]
        stats["rollout/dropped"], self._dropped = self._dropped, 0
        self._accepted, self._offered = self._accepted / 2, self._offered / 2
        return groups, stats, error_counts

    def take_forgotten(self) -> list[int]:
        """Return ids of samples that no batch needs, since the last call."""
        forgotten, self._forgotten = self._forgotten, []
        return forgotten

    def take_idle_seconds(self) -> float:
        """Return the mean seconds without work of an engine, since the last call."""
        now, busy_seconds = time.monotonic(), sum(engine.busy_seconds for engine in self.dispatcher.engines)
        elapsed, busy = now - self._stored_time, busy_seconds - self._stored_busy
        self._stored_time, self._stored_busy = now, busy_seconds
        return max(0.0, elapsed - busy / len(self.dispatcher.engines))

    def pending_requests(self) -> list[GroupRequest]:
        """Return the requests of all groups without a batch, to sample them again."""
        groups = [group.prompt for group in self.surplus]
        groups += [request.prompt for request, _ in self.dispatcher.groups()]
        groups += [request.prompt for request in self.returned]
        return [GroupRequest(prompt, ()) for prompt in groups]
