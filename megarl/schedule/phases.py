"""The phases of a step. Each says which columns it reads and writes and what must be resident on the device while it runs.

The scheduler checks the declarations at start-up, moves tenants between phases and times them; the planner reads them too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from megarl.observe.run_log import Sample
from megarl.schedule.recorded import record_rollout
from megarl.schedule.run import Step
from megarl.training.advantages import add_gae, add_group_advantages, add_returns, lambda_table, value_error_table
from megarl.training.batches import distribute
from megarl.training.columns import logprob_columns, value_columns
from megarl.training.losses import actor_loss, critic_loss, supervised_loss
from megarl.training.mismatch import correct_mismatch, mismatch, mismatch_histogram
from megarl.training.statistics import policy_statistics, update_mini_batches


@dataclass(frozen=True)
class Phase:
    """name: as in time/<name>. reads, writes: columns. resident: tenants that must be on the device."""

    name: str
    reads: frozenset[str]
    writes: frozenset[str]
    resident: frozenset[str]
    run: Callable[[Step], None]


def phase(reads: str = "", writes: str = "", resident: str = "") -> Callable[[Callable[[Step], None]], Phase]:
    """Declares a phase; the names are separated by spaces."""

    def declare(run: Callable[[Step], None]) -> Phase:
        return Phase(run.__name__, frozenset(reads.split()), frozenset(writes.split()), frozenset(resident.split()), run)

    return declare


@phase(writes="tokens engine_logprobs policy_version rewards correct truncated group_ids", resident="engine.weights engine.kv_cache")
def rollout(step: Step) -> None:
    """Samples groups of responses, verifies them, and keeps sampling until the batch of effective prompts is full (DAPO eq. 11)."""
    step.rollout = step.run.sampler.collect(step.index)
    step.batch = step.rollout.to_experience()
    step.samples = step.rollout.samples(step.run.tokenizer, step.run.config.log.samples)
    step.metrics |= step.rollout.stats | {f"inside/{part}": seconds for part, seconds in step.rollout.seconds.items()}
    step.events += step.run.delivery.take_events()
    if step.stage == "train" and step.run.config.checkpoint.rollouts:
        record_rollout(step)


def _frozen_rollout(step: Step) -> None:
    assert step.kept is not None
    found, step.events = step.kept.read(step.number)
    step.metrics["rollout/reused"] = float(found is not None)
    if found is not None:
        step.batch, state = found
        step.run.load_state_dict(state["samplers"])  # as if it had been sampled now: what is drawn next does not change
        step.metrics |= state["stats"]
        step.samples = {int(row): Sample(**sample) for row, sample in state.get("samples", {}).items()}
        return
    rollout.run(step)
    assert step.rollout is not None
    samples = {str(row): asdict(sample) for row, sample in step.samples.items()}
    step.kept.write(step.number, step.batch, {"stats": step.rollout.stats, "samplers": step.run.state_dict(), "samples": samples})


# Value pretraining's rollout: from disk where an earlier run has kept it, else sampled and kept.
frozen_rollout = replace(rollout, run=_frozen_rollout)


@phase(reads="rewards group_ids", writes="advantages")
def group_advantages(step: Step) -> None:
    """Rewards normalised within their group (DAPO eq. 9)."""
    add_group_advantages(step.batch)


@phase(reads="tokens correct truncated", writes="policy_weights nll_weights value_weights")
def divide(step: Step) -> None:
    """Mini-batches, their global denominators, and this replica's share of the work."""
    run = step.run
    learners = [run.critic] if step.stage == "value_pretraining" else [run.actor, run.critic]
    models = [learner.model for learner in learners if learner is not None]
    step.local = distribute(step.batch, run.config, step.mini_batch, step.seed, models, run.runtime)


@phase(reads="tokens engine_logprobs policy_version policy_weights", writes="old_logprobs entropy policy_weights", resident="actor.weights")
def old_logprobs(step: Step) -> None:
    """log pi_old of the trainer, before any update: the ratio's denominator, the measure of the engine, and what corrects for it."""
    run, experience = step.run, step.local.experience
    columns = logprob_columns(run.actor, experience, step.local.micro_batches, run.runtime)
    experience["old_logprobs"], experience["entropy"] = columns["logprobs"], columns["entropy"]
    step.count_tokens(passes=1)
    step.metrics |= policy_statistics(experience, run.runtime) | mismatch(experience, run.engine.weight_version, run.runtime)
    step.distributions["mismatch"] = mismatch_histogram(experience, run.engine.weight_version, run.runtime)
    step.metrics |= correct_mismatch(run.config.algorithm.mismatch, experience, run.runtime)


@phase(reads="tokens", writes="ref_logprobs", resident="reference.weights")
def reference_logprobs(step: Step) -> None:
    """log pi_ref of the initial policy, for the KL term (GRPO)."""
    run, experience = step.run, step.local.experience
    assert run.reference is not None
    step.count_tokens(passes=1)
    experience["ref_logprobs"] = logprob_columns(run.reference, experience, step.local.micro_batches, run.runtime)["logprobs"]


@phase(reads="tokens", writes="values", resident="critic.weights")
def values(step: Step) -> None:
    """V(s_t) before the critic is updated."""
    run, experience = step.run, step.local.experience
    assert run.critic is not None
    step.count_tokens(passes=1)
    experience["values"] = value_columns(run.critic, experience, step.local.micro_batches, run.runtime)["values"]


@phase(reads="rewards values", writes="advantages returns")
def gae_advantages(step: Step) -> None:
    """Decoupled and length-adaptive GAE (VAPO eq. 3 and 5)."""
    run, experience = step.run, step.local.experience
    algorithm, longest = run.config.algorithm, run.config.rollout.max_response_tokens
    step.metrics |= add_gae(algorithm, experience, run.runtime)
    step.distributions["lambda"] = lambda_table(algorithm, experience, longest, run.runtime)
    step.distributions["value_error"] = value_error_table(experience, run.runtime)


@phase(reads="rewards values", writes="returns")
def monte_carlo_returns(step: Step) -> None:
    """The critic's targets alone, for value pretraining."""
    run, experience = step.run, step.local.experience
    step.metrics |= add_returns(run.config.algorithm, experience, run.runtime)
    step.distributions["value_error"] = value_error_table(experience, run.runtime)


@phase(reads="tokens values returns value_weights", resident="critic.weights critic.gradients critic.optimizer")
def critic_update(step: Step) -> None:
    """The value model's optimizer steps over the mini-batches."""
    run = step.run
    assert run.critic is not None
    loss = critic_loss(run.config.algorithm, step.local.experience)
    step.count_tokens(step.critic_epochs)
    step.metrics |= update_mini_batches(run.critic, step.local.critic_mini_batches, loss, step.critic_epochs, "value", run.runtime)


@phase(reads="tokens old_logprobs advantages policy_weights nll_weights", resident="actor.weights actor.gradients actor.optimizer")
def actor_update(step: Step) -> None:
    """The policy's optimizer steps over the mini-batches (DAPO eq. 8, VAPO eq. 8 and 10)."""
    run = step.run
    loss = actor_loss(run.config.algorithm, step.local.experience)
    step.count_tokens(run.config.update.epochs)
    step.metrics |= update_mini_batches(run.actor, step.local.mini_batches, loss, run.config.update.epochs, "policy", run.runtime)


@phase(resident="actor.weights engine.weights")
def weight_transfer(step: Step) -> None:
    """The actor's shards into the engine's, in place."""
    step.metrics |= step.run.transfer_weights(step.number)
    step.events += step.run.delivery.take_events()


@phase(writes="tokens correct truncated")
def read_pairs(step: Step) -> None:
    """The next prompt/response pairs of a supervised warm start, every one of them right."""
    step.batch = step.run.pairs_batch()


@phase(reads="tokens nll_weights", resident="actor.weights actor.gradients actor.optimizer")
def supervised_update(step: Step) -> None:
    """Maximum likelihood of the responses."""
    run = step.run
    loss = supervised_loss(step.local.experience)
    step.count_tokens(passes=1)
    step.metrics |= update_mini_batches(run.actor, step.local.mini_batches, loss, 1, "policy", run.runtime)
