"""Dynamic sampling: which groups a step trains on (DAPO eq. 11)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from megarl.config.errors import ConfigError, DataError
from megarl.config.schema import DynamicSamplingConfig
from megarl.data.sample import SampleGroup

SAME = 1e-6  # rewards of a smaller standard deviation count as one: group_advantages adds this to it


class GroupCollector:
    """Decides which groups a rollout step trains on. They come in generation batches or, from an engine that
    streams, one by one (`refill`):

        while n := collector.next_batch():
            collector.offer(<groups of the next n prompts, in their order>)
        groups, surplus = collector.result()

    prompts  groups wanted
    surplus  accepted groups left over from the step before, which are taken first

    Every decision follows from the groups offered, in their order, and from nothing else.
    """

    def __init__(
        self, prompts: int, dynamic: DynamicSamplingConfig, surplus: Iterable[SampleGroup] = ()
    ) -> None:
        self.prompts, self.dynamic = prompts, dynamic
        self.accepted = list(surplus)
        self.offered: list[SampleGroup] = []  # of this step, in order
        self.rejected: list[SampleGroup] = []
        self.batches = 0
        self.submitted = 0  # prompts, where the engine streams

    @property
    def missing(self) -> int:
        """Return how many groups are still to be accepted."""
        return max(0, self.prompts - len(self.accepted))

    def next_batch(self) -> int:
        """Return the prompts of the next generation batch; 0 when the step has what it needs or has reached
        its limit.

        Raises DataError (ConfigError where nothing was judged) at the limit where the configuration says
        stop."""
        if not self.missing:
            return 0
        if self.batches >= self.dynamic.max_batches:
            self._check_limit()
            return 0
        self.batches += 1
        if self.batches == 1:
            return self._first
        return min(self.prompts, max(self.missing, self._estimate(self.missing, ())))

    def refill(self, ahead: Sequence[SampleGroup], running: int) -> int:
        """Return how many prompts to submit beside those that run. Never more run at once than `prompts` (or
        the first batch), and a step has at most `prompts` * max_batches. How many run ahead depends on time;
        which groups are accepted does not. Raises as `next_batch`.

        ahead    groups that are complete but not offered, as one before them still runs
        running  prompts whose groups are not complete"""
        missing = self.missing - sum(map(self._accepts, ahead))
        if missing <= 0:
            return 0
        if not self.submitted:
            self.submitted = self._first
            return self.submitted
        left = self.prompts * self.dynamic.max_batches - self.submitted
        if self.dynamic.enabled and left <= 0 and not running and not ahead:
            self._check_limit()
        if not self.dynamic.enabled or left <= 0 or not (self.offered or ahead):
            return 0
        more = max(0, min(left, min(self._estimate(missing, ahead), self.prompts) - running))
        self.submitted += more
        return more

    @property
    def _first(self) -> int:
        return math.ceil(self.missing * self.dynamic.oversample) if self.dynamic.enabled else self.missing

    def _differs(self, group: SampleGroup) -> bool:
        return group.is_mixed if self.dynamic.by == "accuracy" else group.reward_std > SAME

    def _accepts(self, group: SampleGroup) -> bool:
        return not self.dynamic.enabled or self._differs(group)

    def _estimate(self, missing: int, ahead: Sequence[SampleGroup]) -> int:
        """Estimate the prompts for `missing` accepted groups, by Laplace's rule: careful after few."""
        kept = len(self.offered) - len(self.rejected) + sum(map(self._differs, ahead))
        return math.ceil(missing * (len(self.offered) + len(ahead) + 2) / (kept + 1))

    def _check_limit(self) -> None:
        if self.dynamic.at_limit != "stop":
            return
        count, responses = len(self.offered), [r for group in self.offered for r in group.samples]
        errors = sorted(r.error for r in responses if r.error is not None)
        first = errors[0] if errors else "no error is known"
        if responses and not any(r.judged for r in responses):
            if first.startswith(("rollout.", "reward.")):  # the key of what has failed
                raise ConfigError(f"{first} (and no response to {count} prompts was judged)")
            raise ConfigError(f"reward.verifier: it failed on every answer of {count} prompts: {first}")
        all_failed = responses and len(errors) == len(responses)
        failed = f"; all responses have errors: {first}" if all_failed else ""
        wanted = "right and wrong answers" if self.dynamic.by == "accuracy" else "rewards that differ"
        raise DataError(
            f"rollout.dynamic_sampling.max_batches: after {self.dynamic.max_batches} generation batches "
            f"({count} prompts) only {len(self.accepted)} of {self.prompts} groups have {wanted}{failed} "
            "(raise it, choose other prompts, or set rollout.dynamic_sampling.at_limit to continue)"
        )

    def offer(self, groups: Sequence[SampleGroup]) -> None:
        """Accept or reject complete groups, in the order of their prompts."""
        self.offered += groups
        for group in groups:
            (self.accepted if self._accepts(group) else self.rejected).append(group)

    def result(self) -> tuple[list[SampleGroup], list[SampleGroup]]:
        """Return the `prompts` groups to train on, and the surplus for the next step (at most `prompts`; the
        rest is dropped). Where too few were accepted, the first rejected ones follow the accepted."""
        groups = (self.accepted + self.rejected)[: self.prompts]
        return groups, self.accepted[self.prompts : 2 * self.prompts]

    def stats(self) -> dict[str, float]:
        """Return rollout/*: counts over the groups offered in this step. kept + all right + all wrong =
        prompts, with or without filtering; by score the latter two count those that are not kept, and a group
        of right and wrong answers with one reward is in none of the three. waste: the share of their tokens
        that are neither trained on nor kept for the next step."""
        groups, surplus = self.result()
        used = {id(group) for group in (*groups, *surplus)}
        tokens = [sum(r.num_sampled for r in group.samples) for group in self.offered]
        waste = sum(n for group, n in zip(self.offered, tokens, strict=True) if id(group) not in used)
        alike = [group for group in self.offered if not self._differs(group)]
        right = sum(group.num_correct == len(group.samples) for group in alike)
        wrong = sum(group.num_correct == 0 for group in alike)
        stats = {
            "rollout/groups_kept": len(self.offered) - len(alike),
            "rollout/groups_all_right": right,
            "rollout/groups_all_wrong": wrong,
            "rollout/batches": self.batches or math.ceil(len(self.offered) / self.prompts),
            "rollout/prompts": len(self.offered),
            "rollout/tokens": sum(tokens),
            "rollout/waste": waste / max(sum(tokens), 1),
            "rollout/surplus": len(surplus),
        }
        shares = (("all_right", right), ("all_wrong", wrong)) if self.offered else ()
        return stats | {f"rollout/share_{name}": count / len(self.offered) for name, count in shares}
