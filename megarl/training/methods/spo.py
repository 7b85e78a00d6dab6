"""SPO's advantages (algorithms/methods/spo.py)."""

from __future__ import annotations

from megarl.algorithms.advantages import mean_and_variance, moments, whiten
from megarl.algorithms.methods.spo import SuccessTracker
from megarl.algorithms.scores import explained_variance, variance_sums
from megarl.config.schema import AlgorithmConfig, Config
from megarl.data.batch import RolloutBatch, TrainBatch
from megarl.parallel.runtime import Runtime
from megarl.training.columns import expected_reward, responses_in_loss, write_advantages


def make_tracker(config: AlgorithmConfig) -> SuccessTracker:
    return SuccessTracker(config.tracker_rho)


def add_tracked_advantages(
    config: Config, rollout: RolloutBatch, batch: TrainBatch, runtime: Runtime, tracker: SuccessTracker
) -> dict[str, float]:
    """Write this replica's advantages [T]: each reward minus the tracker's expectation of its prompt.

    They are normalised over the rollout's responses. Then the tracker observes the answers."""
    answered, prompts, correct = rollout.response_lengths > 0, rollout["prompt_uids"], rollout["correct"]
    chances = tracker.chances(prompts)
    is_known = [uid in tracker.counts for uid in prompts[answered].tolist()]
    advantages = rollout["rewards"].double() - expected_reward(config.reward, chances)
    in_loss = responses_in_loss(config.reward, rollout)
    advantages = whiten(advantages, in_loss, *mean_and_variance(moments(advantages, in_loss)))
    tracker.observe(prompts[answered], correct[answered])
    token_advantages = batch.spread(advantages[batch.rows].float())
    write_advantages(config.algorithm, batch, token_advantages, runtime)
    explained = explained_variance(variance_sums(correct.double(), chances, answered))
    return {"value/explained_variance": explained, "tracker/known": sum(is_known) / max(len(is_known), 1)}
