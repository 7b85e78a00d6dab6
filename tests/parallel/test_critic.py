"""Critics: learning rates, initial heads, and the values and updates of two critics.

A head that the folder lacks is zero or sampled from the run's seed, equal on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.algorithms.losses import token_weights
from megarl.data.batch import RolloutBatch, TrainBatch
from megarl.parallel.runtime import Runtime
from tests.algorithms.loops import Batch, loop_value, loop_weights
from tests.algorithms.loops import make_batch as make_columns
from tests.parallel.jobs import learning_rates, load, make_config
from tests.ranks import RankPool
from tests.tiny_models import make_tiny_model
from tests.training.test_actor_loss import whole


def head(runtime: Runtime, folder: Path, std: float, seed: int) -> Tensor | None:
    """Return the value head's weights after loading the folder; None on stages before the last."""
    from megarl.model.builder import build_critic
    from megarl.model.hf_config import read_hf_config

    config = make_config(folder)
    config = config.model_copy(
        update={"seed": seed, "critic": config.critic.model_copy(update={"head_std": std})}
    )
    model = build_critic(config, read_hf_config(folder), runtime)
    load(model, folder, runtime, critic=True)
    return model.chunks[-1].value_head.weight.detach().clone() if model.chunks[-1].post_process else None


@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 1, 1), (1, 2, 1)])
def test_head_of_a_body(
    layout: tuple[int, int, int], tmp_path: Path, ranks: Callable[[int, int, int], RankPool]
) -> None:
    folder = make_tiny_model(tmp_path / "body", "qwen3", hidden=256, heads=4, kv_heads=2)

    def found(std: float, seed: int) -> Tensor:
        heads = [h for h in ranks(*layout).run(head, folder=folder, std=std, seed=seed) if h is not None]
        assert all(torch.equal(h, heads[0]) for h in heads)
        return heads[0]

    assert found(0.0, 3).count_nonzero() == 0
    assert found(0.25, 3).std().item() == pytest.approx(0.25, rel=0.15)
    assert torch.equal(found(0.25, 3), 0.25 * torch.randn(1, 256, generator=torch.Generator().manual_seed(3)))
    assert not torch.equal(found(0.25, 4), found(0.25, 3))


def test_a_folder_with_a_head_keeps_it(tmp_path: Path, ranks: Callable[[int, int, int], RankPool]) -> None:
    folder = make_tiny_model(tmp_path / "scored", "qwen3", classification="token")
    [plain], [drawn] = (ranks(1, 1, 1).run(head, folder=folder, std=std, seed=0) for std in (0.0, 0.25))
    assert plain.count_nonzero() > 0 and torch.equal(plain, drawn)


def test_value_pretraining_has_a_rate_of_its_own(ranks: Callable[..., RankPool], tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", "qwen3", vocab=61)
    [(pretraining, main)] = ranks(1, 1, 1).run(learning_rates, folder=folder, steps=10)
    assert pretraining == [1e-4] * 3
    # Two steps of warm-up to 1e-2, then linear decay to a tenth at step 10.
    expected = [5e-3, 1e-2] + [1e-2 - 9e-3 * k / 8 for k in range(1, 9)]
    assert main == pytest.approx(expected, rel=1e-6)


def values_of(runtime: Runtime, folder: Path, advantage: str, batch: TrainBatch, share: bool) -> Any:
    """Return the responses of this replica's share, their values, and the number of tokens that were read."""
    from megarl.model.builder import build_critic
    from megarl.model.hf_config import read_hf_config
    from megarl.training.batch import make_train_batch
    from megarl.training.model import InferenceModel

    config = make_config(folder, mini_batch=4, budget=20, advantage=advantage, share_prompts=share)
    model = build_critic(config, read_hf_config(folder), runtime)
    load(model, folder, runtime, critic=True)
    local = make_train_batch(RolloutBatch.from_train_batch(batch), config, 4, 1, [model], runtime)
    read = local.critic_micro_batches
    values = InferenceModel("critic", model, runtime).value_columns(local, read)["values"]
    tokens = sum(int(one.packed.real_tokens.sum()) for one in read)
    return local["number"].tolist(), values.split(local.lengths.tolist()), tokens


@pytest.mark.parametrize("share", [False, True], ids=["each alone", "shared prompts"])
def test_a_critic_of_prompts_is_one_that_reads_all(
    share: bool, tmp_path: Path, ranks: Callable[[int, int, int], RankPool]
) -> None:
    """At a response's first token it gives the same value from fewer tokens, and zeros at all others.

    An empty response has no value."""
    folder = make_tiny_model(tmp_path / "model", "qwen3", vocab=61, classification="token")
    prompts = [[3, 9, 5, 7 + i // 4] for i in range(8)]
    batch = TrainBatch.build(prompts, [[11 + i] * n for i, n in enumerate((7, 1, 13, 2, 5, 0, 9, 30))])
    batch["number"], batch["group_ids"] = torch.arange(8), torch.arange(8) // 4
    batch["correct"], batch["truncated"] = (torch.zeros(8, dtype=torch.bool) for _ in range(2))
    for layout in ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2)):
        found: dict[str, dict[int, Tensor]] = {}
        tokens = {}
        for advantage in ("gae", "prompt_value"):
            answers = ranks(*layout).run(
                values_of, folder=folder, advantage=advantage, batch=batch, share=share
            )
            found[advantage] = {
                number: values
                for numbers, some, _ in answers
                for number, values in zip(numbers, some, strict=True)
            }
            tokens[advantage] = sum(read for *_, read in answers)
        assert tokens["prompt_value"] < 0.6 * tokens["gae"]
        for number in range(8):
            whole, alone = found["gae"][number], found["prompt_value"][number]
            torch.testing.assert_close(alone[4:5], whole[4:5], rtol=1e-5, atol=1e-6)
            assert not alone[:4].any() and not alone[5:].any()
            assert number == 5 or whole[4] != 0


def test_two_critics_give_their_mean_and_learn_from_their_own() -> None:
    """V is the mean of the critics' values, which are computed one after the other.

    Each critic learns from its own mini-batches and is clipped to its own old values. The logged loss is
    the mean over critics that had an update."""
    from megarl.schedule import phases
    from megarl.schedule.run import Step

    columns = make_columns([(2, 5), (1, 7), (3, 1)], seed=3)
    experience, weights = columns.experience, loop_weights(columns, "token", [True] * 3)
    said = {"critic": experience["values"], "critic_2": experience["old_values"]}
    now = {"critic": experience["advantages"], "critic_2": experience["rewards"]}
    experience["value_loss_weights"] = experience.spread(token_weights(experience.response_lengths, "token"))
    config = make_config(Path("model"), critics=2, value_clip=0.3)
    mini_batches = [[[whole(columns)]], [[whole(columns)]]]
    step, turns, skipped = Step("train", 1), list[str](), list[str]()
    step.rollout, step.batch = RolloutBatch.from_train_batch(experience), experience
    experience.critic_mini_batches = mini_batches

    def critic(number: int, name: str) -> Any:
        def update(given: Any, loss: Any, epochs: int, prefix: str) -> dict[str, float]:
            assert given is mini_batches[number] and (epochs, prefix) == (config.critic.epochs, "value")
            [[batch]] = given
            value, _ = loss(now[name][batch.token_indices], batch)
            return {"value/loss": float(value)}

        return SimpleNamespace(
            value_columns=lambda experience, read: {"values": said[name]},
            update_mini_batches=update,
            begin_step=lambda: skipped.append(name),
        )

    run: Any = SimpleNamespace(
        config=config,
        critics=[critic(number, name) for number, name in enumerate(said)],
        critic_names=tuple(said),
        residency=SimpleNamespace(onload_model=lambda phase, name, *parts: turns.append(f"{phase} {name}")),
    )
    run.models = dict(zip(said, run.critics, strict=True))
    expected = []
    for name in said:
        own = experience.select(range(3))
        own["values"], own["old_values"] = now[name], said[name]
        term, clipped = loop_value(Batch(own, columns.spans, columns.include), weights, 0.3)
        assert clipped
        expected.append(term.loss)

    phases.values(run, step)
    both = zip(said["critic"].tolist(), said["critic_2"].tolist(), strict=True)
    assert experience["values"].tolist() == pytest.approx([(one + other) / 2 for one, other in both])
    assert torch.equal(experience["critic_values"], torch.stack([*said.values()], 1))
    phases.critic_update(run, step)
    assert turns == [f"{phase} {name}" for phase in ("values", "critic_update") for name in said]
    assert step.metrics["value/loss"] == pytest.approx(sum(expected) / 2, rel=1e-6)
    mini_batches[1].clear()
    phases.critic_update(run, step)
    assert skipped == ["critic_2"] and step.metrics["value/loss"] == pytest.approx(expected[0], rel=1e-6)
