"""The code of each phase of config/phases.py."""

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
from megarl.training.batch import critic_lengths, gather_responses, make_train_batch, pack_chosen
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
from megarl.training.objectives import actor_loss, critic_loss, list_candidates, supervised_loss
from megarl.training.self_teacher import make_teacher_batch, pack_teacher_batch


def rollout(run: Run, step: Step) -> None:
    assert run.weight_sync is not None
    step.set_rollout(run.source.rollout(step.stage, step.number))
    step.events += run.weight_sync.take_events()


def distribute(run: Run, step: Step) -> None:
    config = run.config
    models = [*([] if step.stage == PRETRAINING else [run.actor]), *run.critics[:1]]  # critics share a layout
    networks = [model.model for model in models]
    seed = shuffle_seed(config.seed, step.index)
    step.batch = batch = make_train_batch(
        step.rollout, config, config.mini_batch, seed, networks, run.runtime
    )
    if config.update.share_prompts:
        packed_tokens = sum(int(micro_batch.packed.real_tokens.sum()) for micro_batch in batch.micro_batches)
        counts = torch.tensor([packed_tokens, batch.num_tokens])
        packed_tokens, total = sum_over_replicas(run.runtime, counts).tolist()
        step.metrics["train/shared_tokens"] = 1 - packed_tokens / total
    step.rollout.drop_tokens()


def old_logprobs(run: Run, step: Step) -> None:
    """Compute the trainer's log-probs before any update, and compare the engine's."""
    batch, schedule = step.batch, run.config.schedule
    # With weights in flight a batch has tokens of several versions, and all are compared.
    version = None if schedule.in_flight != "none" else max(0, step.number - 1 - schedule.ahead)
    start_counting(run.actor.model.routings, grad=False)
    needs_squares = run.config.algorithm.advantage_method.squared_probs
    columns = run.actor.logprob_columns(batch, batch.micro_batches, squared_probs=needs_squares)
    step.metrics |= run.actor.routing_metrics()
    batch["old_logprobs"], batch["entropy"] = columns["logprobs"], columns["entropy"]
    if needs_squares:
        batch["squared_probs"] = columns["squared_probs"]
    step.count_tokens(passes=1)
    step.add_metrics(*policy_statistics(batch, run.runtime))
    step.add_metrics(*mismatch(batch, columns["logprobs"], version, run.runtime))
    if run.config.rollout.routing_compare:
        with run.actor.free_routing():
            unreplayed_logprobs = run.actor.logprob_columns(batch, batch.micro_batches)["logprobs"]
        step.count_tokens(passes=1)
        unreplayed_metrics, _ = mismatch(batch, unreplayed_logprobs, version, run.runtime)
        for name, value in unreplayed_metrics.items():
            step.metrics[name.replace("mismatch/", "mismatch/unreplayed_")] = value
    step.metrics |= correct_mismatch(run.config.algorithm.mismatch, batch, run.runtime)


def old_top_k(run: Run, step: Step) -> None:
    batch, k = step.batch, run.config.algorithm.dppo.top_k
    step.count_tokens(passes=1)
    columns = run.actor.top_k_columns(batch, batch.micro_batches, k, run.hf.vocab_size)
    batch["old_top_logprobs"], batch["old_top_tokens"] = columns["logprobs"], columns["tokens"].int()


def parity(run: Run, step: Step) -> None:
    check_parity(run, step)


def reference_logprobs(run: Run, step: Step) -> None:
    assert run.reference is not None
    step.count_tokens(passes=1)
    columns = run.reference.logprob_columns(step.batch, step.batch.micro_batches)
    step.batch["ref_logprobs"] = columns["logprobs"]


def reward_model(run: Run, step: Step) -> None:
    assert run.reward_model is not None
    rollout, batch, weight = step.rollout, step.batch, run.config.reward.model.weight
    step.count_tokens(passes=1)
    local_scores = run.reward_model.sequence_scores(batch, batch.micro_batches)
    scores = gather_responses(local_scores, rollout, batch, run.runtime)
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
    batch, estimates = step.batch, list[Tensor]()
    step.count_tokens(len(run.critics), critic_lengths(step.rollout, run.config))
    micro_batches = batch.critic_micro_batches if run.config.has_prompt_critic else batch.micro_batches
    for name in run.critic_names:
        run.residency.onload_model("values", name, "weights")
        estimates.append(run.models[name].value_columns(batch, micro_batches)["values"])
    batch["values"] = torch.stack(estimates).mean(0)
    if len(estimates) > 1:
        batch["critic_values"] = torch.stack(estimates, 1)


def group_advantages(run: Run, step: Step) -> None:
    step.metrics |= add_group_advantages(run.config, step.rollout, step.batch, run.runtime)


def tracked_advantages(run: Run, step: Step) -> None:
    add_tracked_advantages = load_function(run.config.algorithm.advantage_method.function)
    [state] = run.method_states.values()
    step.metrics |= add_tracked_advantages(run.config, step.rollout, step.batch, run.runtime, state)


def return_advantages(run: Run, step: Step) -> None:
    """Sum each token's later rewards, without a baseline (REINFORCE++)."""
    step.metrics |= add_return_advantages(run.config.algorithm, step.batch, run.runtime)


def gae_advantages(run: Run, step: Step) -> None:
    """Compute generalised advantages and returns (VAPO eq. 3 and 5)."""
    add_gae = load_function(run.config.gae_function)
    step.add_metrics(*add_gae(run.config, step.batch, run.runtime))


def optimal_token_advantages(run: Run, step: Step) -> None:
    add_advantages = load_function(run.config.algorithm.advantage_method.function)
    step.metrics |= add_advantages(run.config, step.rollout, step.batch, run.runtime)


def critic_agreement(run: Run, step: Step) -> None:
    add_agreement = load_function(CRITIC_AGREEMENT)
    step.metrics |= add_agreement(run.config.algorithm.agreement, step.batch, run.runtime)


def teacher_advantages(run: Run, step: Step) -> None:
    """Add a teacher's log-probs to the advantages (on-policy distillation)."""
    logprobs = teacher_columns(run, step, "teacher_advantages")["logprobs"]
    old_logprobs = step.batch[run.config.algorithm.old_column]
    step.metrics |= add_teacher(run.config.teacher.weight, old_logprobs, logprobs, step.batch, run.runtime)


def teacher_top_k(run: Run, step: Step) -> None:
    batch, columns = step.batch, teacher_columns(run, step, "teacher_top_k", run.config.teacher.top_k)
    batch["teacher_logprobs"], batch["teacher_tokens"] = columns["logprobs"], columns["tokens"].int()


def teacher_logprobs(run: Run, step: Step) -> None:
    step.batch["teacher_logprobs"] = teacher_columns(run, step, "teacher_logprobs")["logprobs"]


def teacher_columns(run: Run, step: Step, phase: str, k: int | None = None) -> dict[str, Tensor]:
    """Return the teachers' logprobs [T], -inf without a teacher; with k their top k logprobs and tokens.

    Those are [T, k], and [T, 0] before the last pipeline stage. With teacher.alone, set advantages to 0."""
    if run.config.teacher.alone:
        step.batch["advantages"] = torch.zeros_like(step.batch["advantages"])
    shape = (step.batch.num_tokens, *([k if run.runtime.is_last_stage else 0] if k else []))
    columns = {"logprobs": torch.full(shape, -torch.inf)}
    if k:
        columns["tokens"] = torch.zeros(shape)
    for teacher, batch, micro_batches, indices in load_teachers(run, step, phase):
        if k:
            outputs = teacher.top_k_columns(batch, micro_batches, k, run.hf.vocab_size)
        else:
            outputs = teacher.logprob_columns(batch, micro_batches)
        token_indices = torch.cat([micro_batch.token_indices for micro_batch in micro_batches])
        actor_indices = token_indices if indices is None else indices[token_indices]
        for name, column in columns.items():
            column[actor_indices] = outputs[name][token_indices]
    return columns


# Teacher, its batch and micro-batches, and positions of that batch's tokens in the actor's; None: the same.
TeacherPass = tuple[InferenceModel, TrainBatch, Sequence[MicroBatch], Tensor | None]


def load_teachers(run: Run, step: Step, phase: str) -> Iterator[TeacherPass]:
    """Load the needed teachers one by one, with micro-batches of their responses."""
    config, batch = run.config, step.batch
    if config.has_self_teacher:
        yield load_self_teacher(run, step)
        return
    if not config.teacher.by_source:
        step.count_tokens(passes=1)
        yield run.teachers[0], batch, batch.micro_batches, None
        return
    for number, teacher in enumerate(run.teachers):
        mask = step.rollout["teachers"] == number
        if not mask.any():
            continue
        step.count_tokens(1, step.rollout.lengths[mask])
        run.offload.select_part(phase, "teacher.weights", number)
        micro_batches = pack_chosen(mask, step.rollout, batch, config, teacher.model, run.runtime)
        yield teacher, batch, micro_batches, None


def load_self_teacher(run: Run, step: Step) -> TeacherPass:
    """Return the actor as its own teacher, with a batch of longer prompts."""
    config, [teacher] = run.config, run.teachers
    if run.actor.average is not None:
        run.actor.average.write(teacher.model)
    special = run.tokenizer.all_special_ids
    batch, response_indices, metrics = make_teacher_batch(
        step.rollout, step.batch, config.teacher, special, run.runtime
    )
    step.metrics |= metrics
    step.count_tokens(1, torch.tensor([int(metrics["teacher/tokens"])]))
    indices = torch.zeros(batch.num_tokens, dtype=torch.int64)
    indices[batch.response_mask] = response_indices
    return teacher, batch, pack_teacher_batch(batch, config, teacher.model, run.runtime), indices


def prompt_advantages(run: Run, step: Step) -> None:
    add_prompt_advantages = load_function(run.config.algorithm.advantage_method.function)
    step.metrics |= add_prompt_advantages(run.config, step.batch, run.runtime)


def monte_carlo_returns(run: Run, step: Step) -> None:
    """Compute the critic's targets for value pretraining (KL 0)."""
    algorithm, batch = run.config.algorithm, step.batch
    if path := algorithm.advantage_method.returns:
        step.metrics |= load_function(path)(batch, run.runtime)[0]
        return
    step.add_metrics(*add_returns(algorithm, batch, run.runtime, turn_rewards(batch)))


def critic_update(run: Run, step: Step) -> None:
    config, updates = run.config, list[dict[str, float]]()
    epochs = config.value_pretraining.epochs if step.stage == PRETRAINING else config.critic.epochs
    lengths = critic_lengths(step.rollout, config)
    if "unfinished" in step.rollout:
        lengths = lengths.masked_fill(step.rollout["unfinished"], 0)
    step.count_tokens(epochs, lengths)
    for number, name in enumerate(run.critic_names):
        run.residency.onload_model("critic_update", name, "weights", "gradients", "optimizer")
        if mini_batches := step.batch.critic_mini_batches[number]:
            loss = critic_loss(config.algorithm, step.batch, number)
            updates.append(run.models[name].update_mini_batches(mini_batches, loss, epochs, "value"))
        else:
            run.models[name].begin_step()
    names = updates[0] if updates else ()
    step.metrics |= {name: sum(update[name] for update in updates) / len(updates) for name in names}


def actor_update(run: Run, step: Step) -> None:
    """Update the policy (DAPO eq. 8, VAPO eq. 8 and 10)."""
    algorithm, batch, epochs = run.config.algorithm, step.batch, run.config.update.epochs
    selector = load_function(path) if (path := algorithm.policy_loss.selector) else None
    selected = torch.zeros(batch.num_tokens, dtype=torch.bool) if selector else None

    def select(number: int, mini_batch: Sequence[MicroBatch]) -> None:
        assert selector is not None and selected is not None
        logprobs = run.actor.logprob_columns(batch, mini_batch)["logprobs"]
        randoms = sample_uniforms(batch, run.config.seed, step.index, number)
        options = algorithm.arguments(algorithm.policy_loss.selector_options)
        selected.copy_(selector(algorithm, batch, mini_batch, logprobs, randoms, run.runtime, **options))

    step.count_tokens(epochs if selected is None else 2 * epochs)
    loss = actor_loss(algorithm, batch, selected, run.config.teacher)
    mini_batches, before_update = batch.mini_batches, None if selected is None else select
    if (candidates := list_candidates(batch)) is not None:
        mini_batches = [
            [replace(micro_batch, candidates=candidates) for micro_batch in micro_batches]
            for micro_batches in mini_batches
        ]
    updates = run.actor.update_mini_batches(mini_batches, loss, epochs, "policy", before_update)
    if run.actor.average is not None:
        run.actor.average.update(run.actor.model)
    # Keep statistics from before the updates.
    step.metrics |= {name: value for name, value in updates.items() if name not in step.metrics}


def sample_uniforms(batch: TrainBatch, seed: int, step: int, update: int) -> Tensor:
    """Return uniform numbers, float64 [T], by seed, step, update, response and position alone."""
    responses = zip(batch["group_ids"].tolist(), batch["response_index"].tolist(), strict=True)
    seeds = torch.tensor(
        [selection_seed(seed, step, update, *response) for response in responses], dtype=torch.int64
    )
    positions = torch.arange(batch.num_tokens) - batch.cu_seqlens[batch.sequence_ids]
    return uniform(seeds[batch.sequence_ids], positions)


def weight_transfer(run: Run, step: Step) -> None:
    assert run.weight_sync is not None
    step.metrics |= run.publish(step.number)
    step.events += run.weight_sync.take_events()


def read_pairs(run: Run, step: Step) -> None:
    step.set_rollout(run.source.rollout(step.stage, step.number))


def supervised_update(run: Run, step: Step) -> None:
    loss = supervised_loss(step.batch)
    step.count_tokens(passes=1)
    step.metrics |= run.actor.update_mini_batches(step.batch.mini_batches, loss, 1, "policy")


FUNCTIONS: dict[str, Callable[[Run, Step], None]] = {phase.name: globals()[phase.name] for phase in PHASES}


def run_phase(phase: Phase, run: Run, step: Step) -> None:
    # Parity's memory is not recorded, so that a resumed run has equal records.
    record = nullcontext() if phase.name == PARITY else run.offload.measure_memory(phase.name, step.metrics)
    with record, enforce_columns(phase, step):
        FUNCTIONS[phase.name](run, step)


class DeclaredColumns(dict[str, Tensor]):
    """A batch's columns during a phase, which may use only those that it declares."""

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
def enforce_columns(phase: Phase, step: Step) -> Iterator[None]:
    """Raise ValueError for undeclared columns, and for declared ones that are not written."""

    def collect_batches() -> dict[int, TrainBatch | RolloutBatch]:
        train_batch, rollout_batch = getattr(step, "batch", None), getattr(step, "rollout", None)
        candidates = (rollout_batch, getattr(rollout_batch, "local", None), train_batch)
        return {id(batch): batch for batch in candidates if batch is not None}

    batches_before = collect_batches()
    known_columns = {name for batch in batches_before.values() for name in batch.columns}
    for batch in batches_before.values():
        batch.columns = DeclaredColumns(batch.columns, phase)
    try:
        yield
    finally:
        for batch in (batches_before | collect_batches()).values():
            batch.columns = dict(batch.columns)
    written_columns = {name for batch in collect_batches().values() for name in batch.columns}
    if missing := phase.writes - written_columns - {"tokens"}:
        raise ValueError(
            f"phase {phase.name} has not written {', '.join(sorted(missing))}, which it declares"
        )
    if undeclared := written_columns - known_columns - phase.writes - phase.may_write:
        raise ValueError(
            f"phase {phase.name} writes {', '.join(sorted(undeclared))}, which it does not declare"
        )
