"""The code of each phase: a function with its name in config/phases.py, called as phase(run, step).
`run_phase` calls it and enforces the columns that config/phases.py declares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from megarl.config.methods import CRITIC_AGREEMENT, load_function
from megarl.config.phases import PARITY, PHASES, Phase
from megarl.config.schema import PRETRAINING
from megarl.data.batch import MicroBatch, RolloutBatch, TrainBatch
from megarl.model.routing import start_counting
from megarl.parallel.comm import sum_over_replicas
from megarl.rollout.sampling import selection_seed, shuffle_seed, uniform
from megarl.schedule.parity import check_parity
from megarl.schedule.run import Run, Step
from megarl.training.batch import critic_lengths, gather_responses, make_train_batch, micro_batches_of
from megarl.training.columns import (
    add_group_advantages,
    add_return_advantages,
    add_returns,
    add_teacher,
    correct_mismatch,
    mismatch,
    policy_statistics,
    turn_rewards,
)
from megarl.training.model import InferenceModel
from megarl.training.objectives import actor_loss, critic_loss, other_tokens, supervised_loss


def rollout(run: Run, step: Step) -> None:
    """Sample groups of responses, and verify them."""
    assert run.weight_sync is not None
    step.take(run.source.rollout(step.stage, step.number))
    step.events += run.weight_sync.take_events()


def distribute(run: Run, step: Step) -> None:
    """Distribute the batch over mini-batches with their global denominators, and bring each replica its part
    from the ranks that drew it."""
    config = run.config
    models = [*([] if step.stage == PRETRAINING else [run.actor]), *run.critics[:1]]  # all critics are alike
    networks = [model.model for model in models]
    seed = shuffle_seed(config.seed, step.index)
    step.batch = batch = make_train_batch(
        step.rollout, config, config.mini_batch, seed, networks, run.runtime
    )
    if config.update.share_prompts:
        packed = sum(int(one.packed.real_tokens.sum()) for one in batch.micro_batches)
        counts = torch.tensor([packed, batch.num_tokens])
        packed, total = sum_over_replicas(run.runtime, counts).tolist()
        step.metrics["train/shared_tokens"] = 1 - packed / total
    step.rollout.drop_tokens()


def old_logprobs(run: Run, step: Step) -> None:
    """Compute the trainer's log-probs before any update, measure how far the engine's are from them, and
    correct the policy loss's token weights for that where `algorithm.mismatch` says so."""
    batch, version = step.batch, max(0, step.number - 1 - run.config.schedule.ahead)
    start_counting(run.actor.model.routings, grad=False)
    columns = run.actor.logprob_columns(batch, batch.micro_batches)
    step.metrics |= run.actor.routing_metrics()
    batch["old_logprobs"], batch["entropy"] = columns["logprobs"], columns["entropy"]
    step.count_tokens(passes=1)
    step.add(*policy_statistics(batch, run.runtime))
    step.add(*mismatch(batch, columns["logprobs"], version, run.runtime))
    if run.config.rollout.routing_compare:
        with run.actor.free_routing():
            own = run.actor.logprob_columns(batch, batch.micro_batches)["logprobs"]
        step.count_tokens(passes=1)
        without, _ = mismatch(batch, own, version, run.runtime)
        step.metrics |= {f"mismatch/unreplayed_{name[9:]}": value for name, value in without.items()}
    step.metrics |= correct_mismatch(run.config.algorithm.mismatch, batch, run.runtime)


def old_top_k(run: Run, step: Step) -> None:
    """Find the old policy's likeliest tokens at each place, by which a trust region compares it (DPPO)."""
    batch, k = step.batch, run.config.algorithm.dppo.top_k
    step.count_tokens(passes=1)
    found = run.actor.top_k_columns(batch, batch.micro_batches, k, run.hf.vocab_size)
    batch["old_top_logprobs"], batch["old_top_tokens"] = found["logprobs"], found["tokens"].int()


def parity(run: Run, step: Step) -> None:
    """End the run where engine and trainer are further apart than `guard.parity` allows; in the first step of
    each start."""
    check_parity(run, step)


def reference_logprobs(run: Run, step: Step) -> None:
    """Compute log pi_ref of the initial policy, for the KL term (GRPO)."""
    assert run.reference is not None
    batch = step.batch
    step.count_tokens(passes=1)
    columns = run.reference.logprob_columns(batch, batch.micro_batches)
    batch["ref_logprobs"] = columns["logprobs"]


def reward_model(run: Run, step: Step) -> None:
    """Add the reward model's score of each response, by its weight, to the rewards of the whole step."""
    assert run.reward_model is not None
    rollout, batch, weight = step.rollout, step.batch, run.config.reward.model.weight
    step.count_tokens(passes=1)
    own = run.reward_model.sequence_scores(batch, batch.micro_batches)
    scores = gather_responses(own, rollout, batch, run.runtime)
    rollout["rewards"] = rollout["rewards"] + weight * scores
    batch["rewards"] = rollout["rewards"][batch.rows]
    if "reward_parts" in rollout and weight:
        rollout["reward_parts"] = torch.cat([rollout["reward_parts"], scores[:, None]], 1)
        batch["reward_parts"] = rollout["reward_parts"][batch.rows]
    scores = scores[rollout.response_lengths > 0]
    step.metrics |= {
        "reward/model_mean": float(scores.double().mean()),
        "reward/model_std": float(scores.double().std(correction=0)),
    }
    rewards = rollout["rewards"].tolist()
    step.samples = {row: replace(sample, reward=rewards[row]) for row, sample in step.samples.items()}


def values(run: Run, step: Step) -> None:
    """Compute V(s_t) before the critics are updated: of several the mean, and each one's own."""
    batch, found = step.batch, list[Tensor]()
    step.count_tokens(len(run.critics), critic_lengths(step.rollout, run.config))
    read = batch.critic_micro_batches if run.config.values_prompts else batch.micro_batches
    for name in run.critic_names:
        run.residency.onload_model("values", name, "weights")
        found.append(run.models[name].value_columns(batch, read)["values"])
    batch["values"] = torch.stack(found).mean(0)
    if len(found) > 1:
        batch["critic_values"] = torch.stack(found, 1)


def group_advantages(run: Run, step: Step) -> None:
    """Compute the advantage of each response from the rewards of the batch, by the configured method."""
    step.metrics |= add_group_advantages(run.config, step.rollout, step.batch, run.runtime)


def tracked_advantages(run: Run, step: Step) -> None:
    """Compare rewards with the running success rates of their prompts."""
    add_tracked_advantages = load_function(run.config.algorithm.advantage_method.function)
    [state] = run.method_states.values()
    step.metrics |= add_tracked_advantages(run.config, step.rollout, step.batch, run.runtime, state)


def return_advantages(run: Run, step: Step) -> None:
    """Take the rewards that follow each token, without a baseline (REINFORCE++)."""
    step.metrics |= add_return_advantages(run.config.algorithm, step.batch, run.runtime)


def gae_advantages(run: Run, step: Step) -> None:
    """Compute generalised advantages and returns by the values (VAPO eq. 3 and 5)."""
    add_gae = load_function(run.config.gae_function)
    step.add(*add_gae(run.config, step.batch, run.runtime))


def critic_agreement(run: Run, step: Step) -> None:
    """Change advantages and entropy weights where several critics agree or disagree."""
    add_agreement = load_function(CRITIC_AGREEMENT)
    step.metrics |= add_agreement(run.config.algorithm.agreement, step.batch, run.runtime)


def teacher_advantages(run: Run, step: Step) -> None:
    """Add a teacher's judgement of each sampled token to its advantage (on-policy distillation)."""
    batch, config = step.batch, run.config
    logprobs = torch.full((batch.num_tokens,), -torch.inf)  # where there is no teacher
    for teacher, micro_batches in teachers_in_turn(run, step, "teacher_advantages"):
        found = teacher.logprob_columns(batch, micro_batches)["logprobs"]
        at = torch.cat([one.token_indices for one in micro_batches])
        logprobs[at] = found[at]
    old = batch[config.algorithm.old_column]
    step.metrics |= add_teacher(config.teacher.weight, old, logprobs, batch, run.runtime)


def teacher_top_k(run: Run, step: Step) -> None:
    """Find what a teacher would have said at each place: its likeliest tokens, for a term of the loss."""
    batch, k = step.batch, run.config.teacher.top_k
    assert k is not None
    size = batch.num_tokens, k if run.runtime.is_last_stage else 0
    logprobs, tokens = torch.full(size, -torch.inf), torch.zeros(size, dtype=torch.int32)
    for teacher, micro_batches in teachers_in_turn(run, step, "teacher_top_k"):
        found = teacher.top_k_columns(batch, micro_batches, k, run.hf.vocab_size)
        at = torch.cat([one.token_indices for one in micro_batches])
        logprobs[at], tokens[at] = found["logprobs"][at], found["tokens"][at].int()
    batch["teacher_logprobs"], batch["teacher_tokens"] = logprobs, tokens


def teachers_in_turn(
    run: Run, step: Step, phase: str
) -> Iterator[tuple[InferenceModel, Sequence[MicroBatch]]]:
    """Have each teacher on the device, one after the other, and yield it with micro-batches of the responses
    on this replica that it judges; one that has none of the whole batch is left out."""
    config, batch = run.config, step.batch
    if not config.teacher.by_source:
        step.count_tokens(passes=1)
        yield run.teachers[0], batch.micro_batches
        return
    for number, teacher in enumerate(run.teachers):
        judged = step.rollout["teachers"] == number
        if not judged.any():
            continue
        step.count_tokens(1, step.rollout.lengths[judged])
        run.offload.turn(phase, "teacher.weights", number)
        yield teacher, micro_batches_of(judged, step.rollout, batch, config, teacher.model, run.runtime)


def prompt_advantages(run: Run, step: Step) -> None:
    """Compare rewards with the critic's expectation of their prompts."""
    add_prompt_advantages = load_function(run.config.algorithm.advantage_method.function)
    step.metrics |= add_prompt_advantages(run.config, step.batch, run.runtime)


def monte_carlo_returns(run: Run, step: Step) -> None:
    """Compute the critic's targets alone, for value pretraining: the policy is the initial one, its KL 0."""
    algorithm, batch = run.config.algorithm, step.batch
    if path := algorithm.advantage_method.returns:
        step.metrics |= load_function(path)(batch, run.runtime)[0]
        return
    step.add(*add_returns(algorithm, batch, run.runtime, turn_rewards(batch)))


def critic_update(run: Run, step: Step) -> None:
    """Update each critic over its own mini-batches. There are none if no response is finished. Metrics are
    means over the critics."""
    config, found = run.config, list[dict[str, float]]()
    epochs = config.value_pretraining.epochs if step.stage == PRETRAINING else config.critic.epochs
    read = critic_lengths(step.rollout, config)
    if "unfinished" in step.rollout:
        read = read.masked_fill(step.rollout["unfinished"], 0)
    step.count_tokens(epochs, read)
    for number, name in enumerate(run.critic_names):
        run.residency.onload_model("critic_update", name, "weights", "gradients", "optimizer")
        if mini_batches := step.batch.critic_mini_batches[number]:
            loss = critic_loss(config.algorithm, step.batch, number)
            found.append(run.models[name].update_mini_batches(mini_batches, loss, epochs, "value"))
        else:
            run.models[name].begin_step()
    names = found[0] if found else ()
    step.metrics |= {name: sum(of_one[name] for of_one in found) / len(found) for name in names}


def actor_update(run: Run, step: Step) -> None:
    """Update the policy over its mini-batches (DAPO eq. 8, VAPO eq. 8 and 10)."""
    algorithm, batch, epochs = run.config.algorithm, step.batch, run.config.update.epochs
    selector = load_function(path) if (path := algorithm.policy_loss.selector) else None
    selected = torch.zeros(batch.num_tokens, dtype=torch.bool) if selector else None

    def select(number: int, mini_batch: Sequence[MicroBatch]) -> None:
        """Mark in `selected` the tokens of a mini-batch that the selector chooses now."""
        assert selector is not None and selected is not None
        logprobs = run.actor.logprob_columns(batch, mini_batch)["logprobs"]
        draws = draw_tokens(batch, run.config.seed, step.index, number)
        selected.copy_(selector(algorithm, batch, mini_batch, logprobs, draws, run.runtime))

    step.count_tokens(epochs if selected is None else 2 * epochs)
    loss = actor_loss(algorithm, batch, selected, run.config.teacher)
    mini_batches, before = batch.mini_batches, None if selected is None else select
    if (others := other_tokens(batch)) is not None:
        mini_batches = [[replace(one, others=others) for one in some] for some in mini_batches]
    updates = run.actor.update_mini_batches(mini_batches, loss, epochs, "policy", before)
    # Entropy and mean probability: those before the updates, where a pass has computed them.
    step.metrics |= {name: value for name, value in updates.items() if name not in step.metrics}


def draw_tokens(batch: TrainBatch, seed: int, step: int, update: int) -> Tensor:
    """Return a random number of each token, float64 [T], which depends on seed, step, update, response and
    position alone."""
    responses = zip(batch["group_ids"].tolist(), batch["response_index"].tolist(), strict=True)
    of_responses = [selection_seed(seed, step, update, *response) for response in responses]
    seeds = torch.tensor(of_responses, dtype=torch.int64)
    positions = torch.arange(batch.num_tokens) - batch.cu_seqlens[batch.sequence_ids]
    return uniform(seeds[batch.sequence_ids], positions)


def weight_transfer(run: Run, step: Step) -> None:
    """Send the actor's weights to the engines, by the engine's weight backend (sync/backends)."""
    assert run.weight_sync is not None
    step.metrics |= run.publish(step.number)
    step.events += run.weight_sync.take_events()


def read_pairs(run: Run, step: Step) -> None:
    """Take the next prompt/response pairs of a supervised warm start."""
    step.take(run.source.rollout(step.stage, step.number))


def supervised_update(run: Run, step: Step) -> None:
    """Maximise the likelihood of the responses."""
    loss = supervised_loss(step.batch)
    step.count_tokens(passes=1)
    step.metrics |= run.actor.update_mini_batches(step.batch.mini_batches, loss, 1, "policy")


FUNCTIONS: dict[str, Callable[[Run, Step], None]] = {phase.name: globals()[phase.name] for phase in PHASES}


def run_phase(phase: Phase, run: Run, step: Step) -> None:
    """Run a phase, held to what it declares, and measure the memory that it takes."""
    # PARITY's is not recorded: a run that was interrupted has one more of these, and else the same record.
    record = nullcontext() if phase.name == PARITY else run.offload.measured(phase.name, step.metrics)
    with record, enforced(phase, step):
        FUNCTIONS[phase.name](run, step)


class DeclaredColumns(dict[str, Tensor]):
    """The columns of a batch while a phase runs, which may only use those that it declares."""

    def __init__(self, columns: Mapping[str, Tensor], phase: Phase) -> None:
        super().__init__(columns)
        self.phase = phase

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.phase.reads | self.phase.writes:
            raise ValueError(f"phase {self.phase.name} reads column {name}, which it does not declare")
        return super().__getitem__(name)

    def __setitem__(self, name: str, column: Tensor) -> None:
        if name not in self.phase.writes | self.phase.may_write:
            raise ValueError(f"phase {self.phase.name} writes column {name}, which it does not declare")
        super().__setitem__(name, column)


@contextmanager
def enforced(phase: Phase, step: Step) -> Iterator[None]:
    """Hold a phase to its declaration: raise ValueError where it uses a column that it does not declare, or
    does not write one that it declares."""

    def batches() -> dict[int, TrainBatch | RolloutBatch]:
        own, rollout = getattr(step, "batch", None), getattr(step, "rollout", None)
        found = (rollout, getattr(rollout, "own", None), own)
        return {id(batch): batch for batch in found if batch is not None}

    before = batches()
    known = {name for batch in before.values() for name in batch.columns}
    for batch in before.values():
        batch.columns = DeclaredColumns(batch.columns, phase)
    try:
        yield
    finally:
        for batch in (before | batches()).values():
            batch.columns = dict(batch.columns)
    written = {name for batch in batches().values() for name in batch.columns}
    if missing := phase.writes - written - {"tokens"}:
        raise ValueError(
            f"phase {phase.name} has not written {', '.join(sorted(missing))}, which it declares"
        )
    if undeclared := written - known - phase.writes - phase.may_write:
        raise ValueError(
            f"phase {phase.name} writes {', '.join(sorted(undeclared))}, which it does not declare"
        )
