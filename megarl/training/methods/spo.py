"""SPO's advantages (algorithms/methods/spo.py), and the state that it keeps between steps."""

from __future__ import annotations

from megarl.algorithms.advantages import mean_and_variance, moments, whiten
from megarl.algorithms.methods.spo import SuccessTracker
from megarl.algorithms.scores import explained_variance, variance_sums
from megarl.config.schema import AlgorithmConfig, Config
from megarl.data.experience import Experience, StepBatch
from megarl.parallel.runtime import Runtime
from megarl.training.batch import LocalBatch
from megarl.training.columns import expected_reward, responses_in_loss, write_advantages


def make_tracker(config: AlgorithmConfig) -> SuccessTracker:
    """Return the tracker of a new run. Every rank has the same."""
    return SuccessTracker(config.tracker_rho)


def add_tracked_advantages(
    config: Config,
    batch: Experience | StepBatch,
    local: LocalBatch,
    runtime: Runtime,
    tracker: SuccessTracker,
) -> dict[str, float]:
    """Write this replica's advantages [T]: each reward minus the tracker's expectation of its prompt.

    They are normalised over the batch's responses. Then the tracker observes the answers.

    Returns:
        value/explained_variance of the tracker's chances, and tracker/known, the share of responses to
        prompts that had been answered before.
    """
    answered, prompts, correct = batch.response_lengths > 0, batch["prompt_uids"], batch["correct"]
    chances = tracker.chances(prompts)
    known = [uid in tracker.counts for uid in prompts[answered].tolist()]
    advantages = batch["rewards"].double() - expected_reward(config.reward, chances)
    counted = responses_in_loss(config.reward, batch)
    advantages = whiten(advantages, counted, *mean_and_variance(moments(advantages, counted)))
    tracker.observe(prompts[answered], correct[answered])
    experience = local.experience
    of_tokens = experience.spread(advantages[local.rows].float())
    write_advantages(config.algorithm, experience, of_tokens, runtime)
    explained = explained_variance(variance_sums(correct.double(), chances, answered))
    return {"value/explained_variance": explained, "tracker/known": sum(known) / max(len(known), 1)}
