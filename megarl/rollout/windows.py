"""Rollouts with `rollout.window` (T-PPO)."""

from __future__ import annotations

import math
from dataclasses import replace

from megarl.data.sample import SampleGroup
from megarl.rollout.controller import Controller, GroupRequest, StepGroups, make_sampling_params
from megarl.rollout.metrics import compute_step_metrics


class WindowController(Controller):
    """Samples at most `rollout.window` new tokens of each response in a step.

    Unfinished responses come first, then new ones, each as a separate request."""

    async def collect(self, step: int) -> StepGroups:
        config = self.config
        if config.rollout.window is None or step <= 0:  # value pretraining needs whole responses
            return await super().collect(step)
        self.start_rollout(make_sampling_params(config.rollout, step), window=config.rollout.window)
        queue, self.returned = self.returned, []
        num_prompts = max(0, math.ceil((config.responses - len(queue)) / config.rollout.group_size))
        for request in self.take_requests(num_prompts, step):
            queue += [GroupRequest(request.prompt, [seed]) for seed in request.seeds]
        requests, deferred_requests = queue[: config.responses], queue[config.responses :]
        await self.dispatch(requests)
        slots = list(self.dispatcher.slots.values())
        samples = [group.samples[0] for group in await self.wait_for_groups()]
        groups: list[SampleGroup] = []
        for request, slot, sample in zip(requests, slots, samples, strict=True):
            if not groups or groups[-1].prompt.uid != request.prompt.uid:
                groups.append(SampleGroup(request.prompt, [], self.dispatcher.version))
            groups[-1].samples.append(sample)
            if sample.is_partial:
                self.returned.append(replace(request, first_id=slot.id, engine_by_response=[slot.engine]))
        stats = {
            "rollout/prompts": len(groups),
            "rollout/tokens": sum(s.num_sampled - s.prefix_tokens for s in samples),
            "rollout/continued": sum(s.prefix_tokens > 0 for s in samples) / len(samples),
            "rollout/unfinished": len(self.returned) / len(samples),
            "rollout/moved": self.dispatcher.rebalanced,
        }
        self.returned += deferred_requests
        metrics, error_counts = compute_step_metrics(groups, config.reward.max_ungraded)
        return groups, stats | metrics, error_counts
