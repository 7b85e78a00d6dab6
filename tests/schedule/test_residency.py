"""What is on the device in which phase: by declaration, in the books, and in a run whose tenants really leave."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megarl.config.errors import ConfigError, DeviceMemoryError
from megarl.config.schema import Config
from megarl.parallel.offload import HostPool, Movable
from megarl.schedule import phases, recipes
from megarl.schedule.phases import Phase
from megarl.schedule.residency import TENANTS, Residency, check_residency, kept, resident_sets
from tests.schedule.demo import make_warm_model, train

CPU = torch.device("cpu")
ORDERS = {
    "grpo": recipes.GROUP_POLICY,
    "grpo with kl": recipes.GROUP_POLICY_WITH_KL,
    "vapo": recipes.ACTOR_CRITIC,
    "vapo with kl": recipes.ACTOR_CRITIC_WITH_KL,
    "value pretraining": recipes.VALUE_PRETRAINING,
    "sft": recipes.SUPERVISED,
}


def both(present: frozenset[str]) -> bool:
    return "engine.kv_cache" in present and any(name.endswith(".optimizer") for name in present)


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_kv_cache_and_optimizer_share_the_device_only_where_the_config_says_so(order: tuple[Phase, ...]) -> None:
    check_residency(order)
    for phase, present in zip(order, resident_sets(order, ()), strict=True):
        assert phase.resident <= present
        assert not both(present), phase.name
        assert not phase.resident or present == phase.resident
    if "rollout" in {phase.name for phase in order}:
        assert any(both(present) for present in resident_sets(order, {"actor.optimizer"}))


def test_declarations_that_contradict_are_found() -> None:
    greedy = replace(phases.actor_update, resident=phases.actor_update.resident | {"engine.kv_cache"})
    with pytest.raises(ValueError, match=r"phase actor_update needs engine\.kv_cache and an optimizer on the device together"):
        check_residency((phases.rollout, greedy))
    with pytest.raises(ValueError, match=r"phase rollout needs engine\.cache, which is no tenant"):
        check_residency((replace(phases.rollout, resident=frozenset({"engine.cache"})),))


def make_residency(keep: frozenset[str] = frozenset()) -> tuple[Residency, dict[str, torch.Tensor]]:
    tensors = {name: torch.full((64 * (i + 1),), float(i)) for i, name in enumerate(TENANTS)}
    residency, pool = Residency(CPU, keep), HostPool(CPU, 1024)
    residency.add({name: Movable(lambda tensor=tensor: [tensor], CPU, pool) for name, tensor in tensors.items()})
    return residency, tensors


@pytest.mark.parametrize("keep", [(), ("actor.optimizer",), ("engine.weights", "reference.weights")])
def test_what_leaves_leaves_before_anything_comes(keep: tuple[str, ...]) -> None:
    residency, tensors = make_residency(frozenset(keep))
    for _ in range(2):
        for phase in recipes.ACTOR_CRITIC_WITH_KL:
            if phase.resident:
                residency.enter(phase.name, phase.resident)
            there = {name for name, tensor in tensors.items() if tensor.untyped_storage().nbytes()}
            assert there == residency.present
            assert not phase.resident or there == phase.resident | set(keep)
            assert residency.nbytes == sum(tensors[name].nbytes for name in there)
    directions = [move.enters for move in residency.moves if move.phase == "critic_update"]
    assert directions == sorted(directions)
    assert {move.tenant for move in residency.moves}.isdisjoint(keep)
    for i, (name, tensor) in enumerate(tensors.items()):
        if name in residency.present:
            assert torch.equal(tensor, torch.full((64 * (i + 1),), float(i))), name


def test_guests_leave_again() -> None:
    residency, tensors = make_residency()
    residency.enter("rollout", {"engine.weights", "engine.kv_cache"})
    with residency.also("rollout", {"actor.weights", "engine.weights"}):
        assert residency.present == {"engine.weights", "engine.kv_cache", "actor.weights"}
    assert residency.present == {"engine.weights", "engine.kv_cache"}
    assert not tensors["actor.weights"].untyped_storage().nbytes()


@pytest.mark.parametrize(
    ("keep", "phase", "knobs"),
    [
        ((), "actor_update", ["update.tokens_per_micro_batch", "model.recompute=full"]),
        (TENANTS, "old_logprobs", ["update.logprob_chunk", "residency.offload=true"]),
        (("actor.optimizer",), "rollout", ["rollout.engine_memory", "actor.optimizer out of residency.keep"]),
    ],
)
def test_out_of_memory_is_explained(keep: tuple[str, ...], phase: str, knobs: list[str]) -> None:
    residency, _ = make_residency(frozenset(keep))
    residency.enter(phase, {"actor.weights"})
    with pytest.raises(DeviceMemoryError) as caught, residency.explained(phase):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.81 GiB")
    message = str(caught.value)
    assert message.startswith(f"phase {phase}: CUDA out of memory, Tried to allocate 2.00 GiB; on the device are ")
    for name in residency.present:
        assert f"{name} 0.00 GiB" in message
    for knob in knobs:
        assert knob in message


def make_config(**residency: object) -> Config:
    return Config(recipe="dapo", run_dir=Path("run"), steps=1, model={"path": Path("x")}, data={"train": [Path("x")]}, residency=residency)


def test_who_stays() -> None:
    cuda = torch.device("cuda", 0)
    assert kept(make_config(), CPU) == frozenset(TENANTS)
    assert kept(make_config(), cuda) == frozenset()
    assert kept(make_config(keep=["engine.weights"]), cuda) == {"engine.weights"}
    assert kept(make_config(offload=True), CPU) == frozenset()
    assert kept(make_config(offload=False), cuda) == frozenset(TENANTS)


@pytest.mark.parametrize(
    ("residency", "complaint"),
    [
        ({"offload": False, "keep": ["actor.weights"]}, "residency.keep: has no effect with residency.offload false"),
        ({"keep": ["critic.optimizer"]}, "residency.keep: critic.optimizer: this run has none"),
    ],
)
def test_contradictions(residency: dict, complaint: str) -> None:
    from megarl.config.check import check_config

    with pytest.raises(ConfigError, match=complaint):
        check_config(make_config(**residency), "x.yaml")


@pytest.mark.slow
@pytest.mark.timeout(1500)  # four runs, each with a limit of its own
def test_a_run_whose_tenants_leave_ends_in_the_same_bits(tmp_path: Path) -> None:
    """All recipes' tenants: actor, critic, reference, engine; value pretraining, whose engine must get its weights again; checkpoints."""
    warm = make_warm_model(tmp_path, 40)
    options = ["value_pretraining.steps=2", "algorithm.kl_weight=0.01", "checkpoint.every=1", "parallel.tp=1", "steps=2"]
    stays, moves = (train(warm, "vapo", tmp_path / name, f"residency.offload={name}", *options) for name in ("false", "true"))

    def comparable(records: list[dict]) -> list[dict]:
        return [{k: v for k, v in record.items() if not k.startswith(("time/", "inside/", "throughput/", "memory"))} for record in records]

    assert comparable(stays) == comparable(moves)
    for name in (
        "hf/model.safetensors",
        "critic_pretrained/model.safetensors",
        "samples.jsonl",
        "distributions.jsonl",
        "evaluations.jsonl",
    ):
        assert (tmp_path / "false" / name).read_bytes() == (tmp_path / "true" / name).read_bytes(), name
    before, after = ([r for r in records if r["stage"] == "train"][-1] for records in (stays, moves))
    phases_there = {name for name in after if name.startswith("memory/") and name != "memory/host"}
    assert phases_there == {name for name in before if name.startswith("memory/") and name != "memory/host"}
    assert len({before[name] for name in phases_there}) == 1, "everything stays"
    assert all(after[name] < before[name] for name in phases_there)
    assert before["memory/host"] == 0 < after["memory/host"]
    # A checkpoint that was written between moves is the same too: the last step again from the one before it, without moves.
    shutil.rmtree(tmp_path / "true" / "checkpoints" / "step-000002")
    again = train(warm, "vapo", tmp_path / "true", "residency.offload=false", *options)
    assert comparable(again)[-2:] == comparable(stays)[-2:]
    assert (tmp_path / "false/hf/model.safetensors").read_bytes() == (tmp_path / "true/hf/model.safetensors").read_bytes()
