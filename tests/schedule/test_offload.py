"""Which tensor groups are on the device in each phase: declared, tracked, and in a run that offloads."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.config.errors import ConfigError, DeviceMemoryError
from megarl.config.phases import GROUPS, Phase, check_phases, never_offloaded, resident_groups, select_phases
from megarl.config.schema import PRETRAINING, SUPERVISED, TRAIN, Config
from megarl.parallel.offload_group import HostPool, OffloadGroup
from megarl.plan.tensors import group_bytes
from megarl.plan.times import LINKS, default_lengths, estimate
from megarl.schedule.offload import OffloadManager, Residency
from tests.plan.test_memory import plan_32b
from tests.schedule.demo import make_warm_model, train

CPU = torch.device("cpu")


def make_config(**keys: object) -> Config:
    given = {
        "recipe": "dapo",
        "run_dir": Path("run"),
        "steps": 1,
        "model": {"path": Path("x")},
        "data": {"train": [Path("x")]},
    }
    return Config.model_validate(given | keys)


SCORED: dict[str, object] = {"algorithm": {"advantage": "gae"}, "reward": {"model": {"path": Path("m")}}}
ASYPPO: dict[str, Any] = {
    "algorithm": {"advantage": "gae", "agreement": {"filter": 0.2}},
    "critic": {"count": 2},
}
# Configuration and stage by name.
STEPS: dict[str, tuple[Config, str]] = {
    "grpo": (make_config(recipe="grpo"), TRAIN),
    "grpo with kl": (make_config(recipe="grpo", algorithm={"kl_weight": 0.1}), TRAIN),
    "vapo": (make_config(recipe="vapo", algorithm={"advantage": "gae"}), TRAIN),
    "vapo with kl": (make_config(recipe="vapo", algorithm={"advantage": "gae", "kl_weight": 0.1}), TRAIN),
    "tppo": (make_config(recipe="tppo", algorithm={"advantage": "gae"}, rollout={"window": 8}), TRAIN),
    "sao": (make_config(recipe="sao", algorithm={"advantage": "gae", "old_logprobs": "engine"}), TRAIN),
    "reinforce_pp": (
        make_config(recipe="reinforce_pp", algorithm={"advantage": "return", "kl_reward": 0.1}),
        TRAIN,
    ),
    "clip_cov": (make_config(recipe="clip_cov", algorithm={"surrogate": "clip_cov"}), TRAIN),
    "rloo with kl": (
        make_config(recipe="rloo", algorithm={"advantage": "leave_one_out", "kl_reward": 0.1}),
        TRAIN,
    ),
    "spo": (make_config(recipe="spo", algorithm={"advantage": "tracked"}), TRAIN),
    "sppo": (make_config(recipe="sppo", algorithm={"advantage": "prompt_value"}), TRAIN),
    "value pretraining of sppo": (
        make_config(recipe="sppo", algorithm={"advantage": "prompt_value"}),
        PRETRAINING,
    ),
    "gdpo with a reward model": (
        make_config(recipe="gdpo", algorithm={"advantage": "per_reward"}, reward=SCORED["reward"]),
        TRAIN,
    ),
    "vapo with a reward model": (make_config(recipe="vapo", **SCORED), TRAIN),
    "dapo with a reward model": (make_config(recipe="dapo", reward=SCORED["reward"]), TRAIN),
    "vapo with a teacher": (
        make_config(recipe="vapo", algorithm={"advantage": "gae"}, teacher={"path": Path("m")}),
        TRAIN,
    ),
    "sao with a teacher": (
        make_config(recipe="sao", algorithm={"old_logprobs": "engine"}, teacher={"path": Path("m")}),
        TRAIN,
    ),
    "dapo with teachers' likeliest tokens": (
        make_config(recipe="dapo", teacher={"by_source": {"a": Path("m")}, "top_k": 4}),
        TRAIN,
    ),
    "asyppo": (make_config(recipe="asyppo", **ASYPPO), TRAIN),
    "asyppo with mismatch weights": (
        make_config(
            recipe="asyppo",
            algorithm={**ASYPPO["algorithm"], "mismatch": {"weight": "token"}},
            critic=ASYPPO["critic"],
        ),
        TRAIN,
    ),
    "spo, filtered": (
        make_config(recipe="spo", algorithm={"advantage": "tracked"}, reward={"overlong": {"filter": True}}),
        TRAIN,
    ),
    "vapo, whitened": (make_config(recipe="vapo", algorithm={"advantage": "gae", "whiten": True}), TRAIN),
    "value pretraining of two critics": (make_config(recipe="asyppo", **ASYPPO), PRETRAINING),
    "value pretraining": (make_config(recipe="vapo", algorithm={"advantage": "gae"}), PRETRAINING),
    "value pretraining with a reward model": (make_config(recipe="vapo", **SCORED), PRETRAINING),
    "sft": (make_config(recipe="sft"), SUPERVISED),
}
ORDERS = {name: select_phases(*step) for name, step in STEPS.items()}


def both(present: frozenset[str]) -> bool:
    return "engine.kv_cache" in present and any(name.endswith(".optimizer") for name in present)


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_kv_cache_and_optimizer_share_the_device_only_where_the_config_says_so(
    order: tuple[Phase, ...],
) -> None:
    check_phases(order)
    assert not any(both(phase.on_gpu) for phase in order)
    if "rollout" in {phase.name for phase in order}:
        assert any(both(phase.on_gpu | {"actor.optimizer"}) for phase in order)


def test_declarations_that_contradict_are_found() -> None:
    phases = {phase.name: phase for phase in ORDERS["grpo"]}
    rollout, update = phases["rollout"], phases["actor_update"]
    greedy = replace(update, reads=frozenset(), on_gpu=update.on_gpu | {"engine.kv_cache"})
    with pytest.raises(
        ValueError, match=r"phase actor_update needs engine\.kv_cache and an optimizer on the device together"
    ):
        check_phases((rollout, greedy))
    with pytest.raises(ValueError, match=r"phase rollout needs engine\.cache, which is no tensor group"):
        check_phases((replace(rollout, on_gpu=frozenset({"engine.cache"})),))


class Group(OffloadGroup):
    """A tensor that records its moves: (group name, whether it was onloaded)."""

    def __init__(
        self, name: str, tensor: torch.Tensor, pool: HostPool, moves: list[tuple[str, bool]]
    ) -> None:
        super().__init__(lambda: [tensor], CPU, pool)
        self.name, self.moves = name, moves

    def offload(self) -> None:
        self.moves.append((self.name, False))
        super().offload()

    def onload(self) -> None:
        self.moves.append((self.name, True))
        super().onload()


def make_manager(
    keep: frozenset[str] = frozenset(), moves: list[tuple[str, bool]] | None = None
) -> tuple[OffloadManager, dict[str, torch.Tensor]]:
    tensors = {name: torch.full((64 * (i + 1),), float(i)) for i, name in enumerate(GROUPS)}
    offload, pool = OffloadManager(CPU, keep), HostPool(CPU, 1024)
    noted = [] if moves is None else moves
    offload.register({name: Group(name, tensor, pool, noted) for name, tensor in tensors.items()})
    return offload, tensors


@pytest.mark.parametrize("keep", [(), ("actor.optimizer",), ("engine.weights", "reference.weights")])
def test_what_leaves_leaves_before_anything_comes(keep: tuple[str, ...]) -> None:
    moves: list[tuple[str, bool]] = []
    offload, tensors = make_manager(frozenset(keep), moves)
    for _ in range(2):
        for phase in ORDERS["vapo with kl"]:
            before = len(moves)
            if phase.on_gpu:
                offload.onload(phase.name, phase.on_gpu)
            directions = [onload for _, onload in moves[before:]]
            assert directions == sorted(directions)
            there = {name for name, tensor in tensors.items() if tensor.untyped_storage().nbytes()}
            assert there == offload.present
            assert not phase.on_gpu or there == phase.on_gpu | set(keep)
            assert offload.nbytes == sum(tensors[name].nbytes for name in there)
    assert {name for name, _ in moves}.isdisjoint(keep)
    for i, (name, tensor) in enumerate(tensors.items()):
        if name in offload.present:
            assert torch.equal(tensor, torch.full((64 * (i + 1),), float(i))), name


def test_a_phase_of_engines_elsewhere_moves_nothing() -> None:
    """Trainers that wait for remote responses have no local engine to make room for."""
    moves: list[tuple[str, bool]] = []
    offload, _ = make_manager(moves=moves)
    residency = Residency(offload, {})
    residency.onload("rollout", {"engine.weights", "engine.kv_cache"})
    assert not moves
    residency.onload("weight_transfer", {"engine.weights", "actor.weights"})
    assert offload.present == {"actor.weights"}


@pytest.mark.parametrize("keep", [(), ("actor.weights",), ("critic.optimizer", "engine.weights")])
@pytest.mark.parametrize("remote_ranks", [0, 8])
@pytest.mark.parametrize(
    "name", ["vapo", "vapo with kl", "value pretraining", "sft", "dapo with a reward model"]
)
def test_what_is_printed_is_on_the_gpu(name: str, remote_ranks: int, keep: tuple[str, ...]) -> None:
    """`megarl config phases` prints the groups that are on the device in a run's second step."""
    config, stage = STEPS[name]
    sizes = config.parallel.model_copy(update={"rollout_ranks": remote_ranks})
    keeps = config.residency.model_copy(update={"keep": keep})
    config = config.model_copy(update={"parallel": sizes, "residency": keeps})
    offload, _ = make_manager(frozenset(keep))
    for group in GROUPS:
        if not config.has_group(group) or (remote_ranks and group.startswith("engine.")):
            offload.present.discard(group)
    weight_sync: Any = SimpleNamespace(complete=True)
    has_engine = config.has_engine and not remote_ranks
    residency = Residency(offload, {}, weight_sync if has_engine else None)
    phases = select_phases(config, stage)
    for step in (1, 2):
        for phase, resident in zip(phases, resident_groups(config, phases), strict=True):
            if phase.on_gpu:
                residency.onload(phase.name, phase.on_gpu)
            if step == 2:
                assert offload.present == resident, phase.name


def test_guests_leave_again() -> None:
    offload, tensors = make_manager()
    offload.onload("rollout", {"engine.weights", "engine.kv_cache"})
    with offload.with_extra("rollout", {"actor.weights", "engine.weights"}):
        assert offload.present == {"engine.weights", "engine.kv_cache", "actor.weights"}
    assert offload.present == {"engine.weights", "engine.kv_cache"}
    assert not tensors["actor.weights"].untyped_storage().nbytes()


@pytest.mark.parametrize("count", [1, 2])
def test_critics_travel_as_often_as_is_planned(count: int) -> None:
    """One step as ranks run it.

    Of two critics the second is on the device once the values are computed; the first is onloaded again for
    its update.
    """
    plan = plan_32b("recipe=vapo", f"critic.count={count}", "parallel.tp=4", "parallel.pp=4", "parallel.dp=8")
    moves: list[tuple[str, bool]] = []
    offload, pool = OffloadManager(CPU, plan.keep), HostPool(CPU, 1024)
    for name in sorted(plan.groups):
        for _ in range(count if name.startswith("critic.") else 1):
            offload.register({name: Group(name, torch.ones(4), pool, moves)})
            offload.onload("start", ())
    for _ in range(2):  # the second step starts in the state in which it ends
        moves.clear()
        for phase in plan.phases:
            for number in range(count if phase.model == "critic" else 1):
                offload.onload(phase.name, phase.on_gpu)
                for name in sorted(phase.on_gpu):
                    offload.select_part(phase.name, name, number)
    travelled = [name for name, _ in moves if not name.startswith("engine.") and "gradients" not in name]
    moved = sum(max(group_bytes(plan, name, stage) for stage in plan.stages) for name in travelled)
    seconds = estimate(plan, default_lengths(plan)).parts["on and off the device"]
    assert seconds * plan.device.host_speed * 1e9 * LINKS == pytest.approx(moved)


@pytest.mark.parametrize("stay", [False, True])
def test_teachers_take_turns(stay: bool) -> None:
    name = "teacher.weights"
    offload, pool = OffloadManager(CPU, frozenset({name} if stay else ())), HostPool(CPU, 1024)
    tensors = [torch.full((64 * (i + 1),), float(i)) for i in range(3)]

    def there() -> list[int]:
        return [i for i, tensor in enumerate(tensors) if tensor.untyped_storage().nbytes()]

    for i, tensor in enumerate(tensors):  # in the order in which models are built
        assert there() == [*range(0 if stay else i, 3)]
        offload.register({name: OffloadGroup(lambda tensor=tensor: [tensor], CPU, pool, "constant")})
        offload.onload("start", ())
    assert there() == ([0, 1, 2] if stay else [])
    for order in ([0, 1, 2], [2], [1, 2]):
        offload.onload("teacher_top_k", {name})
        for number in order:
            offload.select_part("teacher_top_k", name, number)
            assert there() == ([0, 1, 2] if stay else [number])
            assert offload.nbytes == sum(tensors[i].nbytes for i in there())
            assert torch.equal(tensors[number], torch.full((64 * (number + 1),), float(number)))
        offload.onload("actor_update", ())
        assert there() == ([0, 1, 2] if stay else [])


@pytest.mark.parametrize(
    ("keep", "phase", "knobs"),
    [
        ((), "actor_update", ["update.tokens_per_micro_batch", "model.recompute=full"]),
        (GROUPS, "old_logprobs", ["update.logprob_chunk", "residency.offload=true"]),
        (("actor.optimizer",), "rollout", ["rollout.engine_memory", "actor.optimizer out of residency.keep"]),
    ],
)
def test_out_of_memory_is_explained(keep: tuple[str, ...], phase: str, knobs: list[str]) -> None:
    offload, _ = make_manager(frozenset(keep))
    offload.onload(phase, {"actor.weights"})
    with pytest.raises(DeviceMemoryError) as caught, offload.explain_out_of_memory(phase):
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.81 GiB"
        )
    message = str(caught.value)
    assert message.startswith(
        f"phase {phase}: CUDA out of memory, Tried to allocate 2.00 GiB; on the device are "
    )
    for name in offload.present:
        assert f"{name} 0.00 GiB" in message
    for knob in knobs:
        assert knob in message


def test_who_stays() -> None:
    def kept(gpu: bool, **residency: object) -> frozenset[str]:
        return never_offloaded(make_config(residency=residency), gpu=gpu)

    assert kept(gpu=False) == frozenset(GROUPS)
    assert kept(gpu=True) == frozenset()
    assert kept(gpu=True, keep=["engine.weights"]) == {"engine.weights"}
    assert kept(gpu=False, offload=True) == frozenset()
    assert kept(gpu=True, offload=False) == frozenset(GROUPS)


@pytest.mark.parametrize(
    ("residency", "complaint"),
    [
        (
            {"offload": False, "keep": ["actor.weights"]},
            "residency.keep: has no effect with residency.offload false",
        ),
        ({"keep": ["critic.optimizer"]}, "residency.keep: critic.optimizer: this run has none"),
    ],
)
def test_contradictions(residency: dict, complaint: str) -> None:
    from megarl.config.check import check_config

    with pytest.raises(ConfigError, match=complaint):
        check_config(make_config(residency=residency), "x.yaml")


@pytest.mark.slow
@pytest.mark.timeout(1500)  # four runs, each with its limit
def test_a_run_that_offloads_ends_in_the_same_bits(tmp_path: Path) -> None:
    """All groups are offloaded: actor, critic, reference, engine.

    The run includes checkpoints and value pretraining, after which the engine needs its weights again.
    """
    warm = make_warm_model(tmp_path, 40)
    options = [
        "value_pretraining.steps=2",
        "algorithm.kl_weight=0.01",
        "checkpoint.every=1",
        "parallel.tp=1",
        "steps=2",
    ]
    stays, moves = (
        train(warm, "vapo", tmp_path / name, f"residency.offload={name}", *options)
        for name in ("false", "true")
    )

    def comparable(records: list[dict]) -> list[dict]:
        return [
            {
                k: v
                for k, v in record.items()
                if not k.startswith(("time/", "inside/", "throughput/", "memory"))
            }
            for record in records
        ]

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
    # A checkpoint written while groups are offloaded is equal too: repeat the last step from it without
    # offloading.
    shutil.rmtree(tmp_path / "true" / "checkpoints" / "step-000002")
    again = train(warm, "vapo", tmp_path / "true", "residency.offload=false", *options)
    assert comparable(again)[-2:] == comparable(stays)[-2:]
    assert (tmp_path / "false/hf/model.safetensors").read_bytes() == (
        tmp_path / "true/hf/model.safetensors"
    ).read_bytes()
