"""The plan of parameters, gradients, optimizer and checkpoints, compared with real tensors and files."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import FileSystemReader

from megarl.cli.main import main
from megarl.cli.nodes import planned_needs
from megarl.config import load_config
from megarl.config.errors import ConfigError
from megarl.config.schema import PRETRAINING, TRAIN
from megarl.parallel.layout import Layout
from megarl.plan.disk import checkpoint_bytes, disk_bytes
from megarl.plan.engines import engine_weight_bytes, kv_cache_bytes
from megarl.plan.fit import find_problem, largest_micro_batch
from megarl.plan.host import KNOWN, cpu_bytes, cpu_bytes_by_phase, node_bytes, sampled_bytes, step_batch_bytes
from megarl.plan.inputs import PlanInputs, make_plan_inputs
from megarl.plan.memory import (
    checkpoint_need,
    construction_need,
    gpu_needs,
    phase_buffers,
    phase_need,
)
from megarl.plan.search import replace_keys
from megarl.plan.sizes import Passes, Shape, count_activations
from megarl.plan.tensors import count_bucket_params, count_params, count_trained, fp8_copy_bytes, group_bytes
from megarl.plan.times import LINKS, default_lengths, estimate
from megarl.schedule.preflight import check_fits
from megarl.training.checkpoint import FOLDER, FORMAT, MANIFEST, folder_name, prune, seal
from megarl.weights.known_models import KNOWN_MODELS
from tests.plan.jobs import LINEAR, batch_bytes, construction, group_sizes, hf_of, largest_bucket, plan_for
from tests.ranks import RankPool

ROOT = Path(__file__).parents[2]
GIB = 2**30
LAYOUTS: list[tuple[int, ...]] = [  # tp, pp, dp, ep, cp
    (1, 1, 1, 1),
    (2, 1, 1, 1),
    (1, 2, 1, 1),
    (1, 1, 2, 1),
    (2, 1, 2, 1),
    (1, 1, 1, 1, 2),
]
# more layers on each GPU than the configuration sets
SMALL = [
    "parallel.tp=4",
    "parallel.pp=1",
    "parallel.dp=32",
    "model.recompute_layers=null",
]
MODELS: list[dict[str, Any]] = [
    {"family": "qwen2", "dtype": "bf16"},
    {"family": "qwen3", "dtype": "fp32", "tie_word_embeddings": True, "vocab_size": 2047},
    {"family": "qwen2", "dtype": "bf16", "critic": True},
    {"family": "qwen2", "dtype": "bf16", "critic": True, "optimizer": {"frozen": "attention"}},
    {
        "family": "qwen3",
        "dtype": "bf16",
        "tie_word_embeddings": True,
        "optimizer": {"frozen": ["embeddings"], "frozen_layers": 3},
    },
    {
        "family": "qwen2",
        "dtype": "bf16",
        "optimizer": {"lora": {"rank": 24, "targets": ["v_proj", "down_proj"]}},
    },
    {"family": "qwen3", "dtype": "bf16", "critic": True, "optimizer": {"lora": {"rank": 32}}},
    {"family": "qwen3_5_text", "dtype": "bf16", "optimizer": {"lora": {"rank": 16}}},
]


def is_slow(case: dict[str, Any], layout: tuple[int, ...]) -> bool:
    if "optimizer" in case:
        return layout != ((1, 1, 1, 1) if case.get("critic") else (1, 2, 1, 1))
    if case["dtype"] == "fp32":
        return layout != (2, 1, 1, 1)
    return layout not in ((1, 2, 1, 1), (1, 1, 2, 1)) if not case.get("critic") else layout != (1, 1, 1, 1)


def planned(family: str) -> pytest.MarkDecorator:
    return pytest.mark.shows("planner", family=family)


def name(case: dict[str, Any]) -> str:
    return "-".join(map(str, case.values()))


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        pytest.param(
            case,
            layout,
            marks=[planned(case["family"]), *([pytest.mark.slow] if is_slow(case, layout) else [])],
        )
        for case in MODELS
        for layout in LAYOUTS
    ],
    ids=lambda value: name(value) if isinstance(value, dict) else str(value),
)
def test_tensor_groups_are_as_large_as_planned(
    ranks: Callable[..., RankPool], tmp_path: Path, layout: tuple[int, ...], case: dict[str, Any]
) -> None:
    """Planned group sizes match measured ones within 1 % on every rank, the checkpoint within 2 %.

    The groups include Adam's moments, since one step has run."""
    plan = plan_for(layout, **case)
    model = "critic" if case.get("critic") else "actor"
    written: dict[tuple[int, int], list[int]] = {}  # bytes by (stage, tp rank), one for each replica
    for rank, found in enumerate(ranks(*layout).run(group_sizes, out=tmp_path / "checkpoint", **case)):
        stage = plan.layout.coords(rank).pp
        written.setdefault((stage, plan.layout.coords(rank).tp), []).append(found.pop("written"))
        for part, measured in found.items():
            planned = group_bytes(plan, f"{model}.{part}", stage)
            assert abs(planned - measured) <= 0.01 * measured, (
                f"rank {rank}: {part}: planned {planned:,.0f}, there are {measured:,.0f} bytes"
            )
    on_disk = sum(file.stat().st_size for file in (tmp_path / "checkpoint").rglob("*.distcp"))
    # an empty tensor measures the overhead of each tensor in the file
    torch.save(torch.zeros(0), empty := io.BytesIO())
    parts = FileSystemReader(tmp_path / "checkpoint").read_metadata().storage_data
    on_disk -= len(parts) * len(empty.getvalue())
    assert all(max(shares) < 1.1 * min(shares) for shares in written.values()), "replicas write alike"
    planned = checkpoint_bytes(plan) - other_checkpoint(plan, model)
    # 1 % allows for the file's other contents
    assert abs(planned / on_disk - 1) < 0.02, f"planned {planned:,.0f}, there are {on_disk:,.0f} bytes"


def other_checkpoint(plan: PlanInputs, model: str) -> float:
    """Return the checkpoint bytes of the other model: of the critic for the actor, and vice versa."""
    alone = plan.config.model_copy(
        update={"algorithm": plan.config.algorithm.model_copy(update={"advantage": "group"})}
    )
    actors = checkpoint_bytes(PlanInputs(alone, plan.actor, plan.critic, plan.device))
    return checkpoint_bytes(plan) - actors if model == "actor" else actors


LATENT = {"num_key_value_heads": 8, "head_dim": 64, "n_group": 1, "topk_group": 1}


def test_dense_layers_before_mixtures_keep_what_dense_layers_keep() -> None:
    """GLM-4.5-Air's dense layer keeps the same activations as a layer of a dense model of its sizes."""
    config = {**KNOWN_MODELS["GLM-4.5-Air"], "num_hidden_layers": 4}
    for recompute in ("none", "full", "selective"):
        passes = Passes(tp=2, chunk=256, layers="te", recompute=recompute, sequence_parallel=True)
        found = count_activations(Shape(config, "bf16"), passes, critic=False)
        plain = count_activations(Shape({**config, "model_type": "qwen2"}, "bf16"), passes, critic=False)
        assert (found.dense == plain and found.layer != plain.layer) or recompute == "full"
        fewer = found.training(100.0, 4, 1.0, False, dense=1)
        saved = 100 * (found.layer - plain.layer)
        assert fewer == pytest.approx(found.training(100.0, 4, 1.0, False) - saved)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "layout"),
    [
        pytest.param(more, layout, marks=planned(more["family"]))
        for more, layout in (
            ({"family": "qwen3_moe", "num_experts": 4}, (2, 1, 1, 2)),
            ({"family": "glm4_moe", "n_routed_experts": 4}, (2, 1, 1, 2)),
            ({"family": "glm4_moe", "n_routed_experts": 4}, (1, 2, 2, 2)),
            ({"family": "deepseek_v3", "n_routed_experts": 4, **LATENT}, (2, 1, 1, 2)),
            (LINEAR, (2, 2, 1, 1)),
            ({**LINEAR, "family": "qwen3_5_moe_text", "num_experts": 4}, (2, 2, 1, 2)),
        )
    ],
    ids=str,
)
def test_experts_are_as_large_as_planned(
    more: dict[str, Any], layout: tuple[int, ...], ranks: Callable[..., RankPool], tmp_path: Path
) -> None:
    case = {**more, "dtype": "bf16", "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    plan = plan_for(layout, **case)
    for rank, found in enumerate(ranks(*layout).run(group_sizes, out=tmp_path / "checkpoint", **case)):
        found.pop("written")
        for part, measured in found.items():
            planned = group_bytes(plan, f"actor.{part}", plan.layout.coords(rank).pp)
            assert abs(planned / measured - 1) < 0.01, (rank, part)


@pytest.mark.parametrize("name", KNOWN_MODELS)
def test_parameters_of_public_models(name: str) -> None:
    """The parameter count equals the sum over the tensors' shapes."""
    from math import prod

    from megarl.plan.sizes import Shape
    from megarl.weights.shards import hf_shapes

    assert Shape(KNOWN_MODELS[name], "bf16").parameters == sum(
        map(prod, hf_shapes(KNOWN_MODELS[name]).values())
    )


def test_a_reward_model_is_planned(tmp_path: Path) -> None:
    """A reward model adds a phase with the weights and time of a critic; a smaller one takes less."""
    with_one = plan_32b("reward.model.path=/no/such/folder")
    without = plan_32b()
    for stage in range(with_one.layout.pp):
        assert group_bytes(with_one, "reward.weights", stage) == group_bytes(
            with_one, "critic.weights", stage
        )
    needs = {need.phase: need for need in gpu_needs(with_one)}
    assert needs.keys() - {need.phase for need in gpu_needs(without)} == {"reward_model"}
    assert needs["reward_model"].parts["reward.weights"] > 0
    assert needs["reward_model"].total < needs["critic_update"].total
    kept = plan_32b("reward.model.path=/no/such/folder", "residency.keep=[reward.weights]")
    assert all(need.parts["reward.weights"] > 0 for need in gpu_needs(kept) if need.phase != "construction")
    assert checkpoint_bytes(with_one) == checkpoint_bytes(without)
    assert sum(node_bytes(with_one).values()) > sum(node_bytes(without).values())
    times = estimate(with_one, default_lengths(with_one)).parts
    assert times["reward_model"] == pytest.approx(times["values"], rel=0.01)
    (tmp_path / "config.json").write_text(json.dumps(KNOWN_MODELS["Qwen2.5-7B"]))
    smaller = plan_32b(f"reward.model.path={tmp_path}", "parallel.tp=4", "parallel.pp=4", "parallel.dp=8")
    assert 0 < group_bytes(smaller, "reward.weights", 0) < group_bytes(smaller, "critic.weights", 0) / 3


def test_a_critic_of_its_own_size_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The critic's size comes from the config.json of its folder, in `plan` and in a node's needs."""
    (tmp_path / "config.json").write_text(json.dumps(KNOWN_MODELS["Qwen2.5-1.5B"]))
    path, actor = ROOT / "configs/vapo_7b.yaml", KNOWN_MODELS["Qwen2.5-7B"]
    configs = [load_config(path, [f"critic.path={critic}"]) for critic in ("/no/such/folder", tmp_path)]
    alike, smaller = (make_plan_inputs(config, actor) for config in configs)
    for part in ("weights", "gradients", "optimizer"):
        actors, critics = f"actor.{part}", f"critic.{part}"
        assert 0 < group_bytes(smaller, critics, 0) < group_bytes(alike, critics, 0) / 3
        assert group_bytes(smaller, actors, 0) == group_bytes(alike, actors, 0)
    before, after = (estimate(plan, default_lengths(plan)).parts for plan in (alike, smaller))
    assert after["critic_update"] < before["critic_update"] / 3
    assert after["actor_update"] == before["actor_update"]
    needs = [planned_needs(config, 8) for config in configs]
    assert all(less < more for more, less in zip(*needs, strict=True))
    assert main(["plan", str(path), f"critic.path={tmp_path}"]) == 0
    assert f"a checkpoint on disk  {checkpoint_bytes(smaller) / 1e9:,.1f} GB" in capsys.readouterr().out
    without = load_config(ROOT / "configs/dapo_32b.yaml", [f"critic.path={tmp_path}"])
    assert make_plan_inputs(without, KNOWN_MODELS["Qwen2.5-32B"]).critic.config == KNOWN_MODELS["Qwen2.5-32B"]


def test_a_teacher_is_planned(tmp_path: Path) -> None:
    """A teacher adds a phase with memory for its weights, whatever its size, and time of a forward pass."""
    (tmp_path / "config.json").write_text(json.dumps(KNOWN_MODELS["Qwen2.5-7B"]))
    layout = "parallel.tp=4", "parallel.pp=4", "parallel.dp=8"
    alike, smaller = (plan_32b(f"teacher.path={path}", *layout) for path in ("/no/such/folder", tmp_path))
    assert group_bytes(alike, "teacher.weights", 0) == group_bytes(alike, "actor.weights", 0)
    assert 0 < group_bytes(smaller, "teacher.weights", 0) < group_bytes(alike, "teacher.weights", 0) / 3
    needs = {need.phase: need for need in gpu_needs(alike)}
    assert needs.keys() - {need.phase for need in gpu_needs(plan_32b(*layout))} == {"teacher_advantages"}
    parts, old = needs["teacher_advantages"].parts, needs["old_logprobs"].parts
    assert parts["teacher.weights"] == old["actor.weights"] and parts["activations"] == old["activations"]
    times = [estimate(plan, default_lengths(plan)).parts for plan in (alike, smaller)]
    assert times[0]["teacher_advantages"] == pytest.approx(times[0]["old_logprobs"], rel=0.01)
    assert times[1]["teacher_advantages"] < times[1]["old_logprobs"] / 3


def test_a_self_teacher_is_planned() -> None:
    """Initial weights need GPU memory, current ones none, and an average host memory and disk."""
    layout = "parallel.tp=4", "parallel.pp=4", "parallel.dp=8"
    plans = {
        weights: plan_32b(f"teacher.weights={weights}", "teacher.max_context_tokens=1024", *layout)
        for weights in ("initial", "current", "average")
    }
    none = plan_32b(*layout)
    needs = {name: {need.phase: need for need in gpu_needs(plan)} for name, plan in plans.items()}
    parts = {name: needs[name]["teacher_advantages"].parts for name in plans}
    weight_bytes = needs["initial"]["old_logprobs"].parts["actor.weights"]
    assert parts["initial"]["teacher.weights"] == parts["average"]["teacher.weights"] == weight_bytes
    assert parts["current"]["actor.weights"] == weight_bytes and "teacher.weights" not in parts["current"]
    node = {name: node_bytes(plan) for name, plan in plans.items()}
    assert "average weights" not in node["initial"] and node["average"]["average weights"] > 0
    params = none.actor.count_params(Layout(), 0).all
    assert checkpoint_bytes(plans["average"]) - checkpoint_bytes(none) == 4 * params
    assert checkpoint_bytes(plans["initial"]) == checkpoint_bytes(none)


def test_several_teachers_are_planned(tmp_path: Path) -> None:
    """The plan counts all teachers on the host and in transfers, but only the largest on the GPU.

    With residency.keep all are on the GPU. The top-k tokens take memory in the head and in the batch."""
    (tmp_path / "config.json").write_text(json.dumps(KNOWN_MODELS["Qwen2.5-7B"]))
    layout = "parallel.tp=4", "parallel.pp=4", "parallel.dp=8"
    both = f"teacher.by_source={{a: {tmp_path}, b: /no/such/folder}}"
    small, large, two, kept, several = (
        plan_32b(*keys, *layout)
        for keys in (
            [f"teacher.path={tmp_path}"],
            ["teacher.path=/no/such/folder"],
            [both],
            [both, "residency.keep=[teacher.weights]"],
            [both, "teacher.top_k=32"],
        )
    )
    name, last = "teacher.weights", 3
    together = group_bytes(small, name, 0) + group_bytes(large, name, 0)
    assert group_bytes(two, name, 0) == group_bytes(large, name, 0) and group_bytes(kept, name, 0) == together
    beside = [node_bytes(plan)["pinned buffers"] for plan in (two, large)]
    assert beside[0] - beside[1] == pytest.approx(group_bytes(small, name, 0) * 8, rel=0.2)
    needs = [{need.phase: need.total for need in gpu_needs(plan)} for plan in (large, two)]
    assert needs[0] == needs[1]
    travelled = [estimate(p, default_lengths(p)).parts["on and off the device"] for p in (large, two)]
    bandwidth = two.device.host_speed * 1e9 * LINKS
    assert travelled[1] - travelled[0] == pytest.approx(2 * group_bytes(small, name, 0) / bandwidth, rel=0.1)
    phases = {phase.name: phase for phase in several.phases}
    for phase, part in (("teacher_top_k", "activations"), ("actor_update", "head")):
        of_two = next(
            p for p in two.phases if p.model == phases[phase].model and p.updates_weights == (part == "head")
        )
        more = (
            phase_buffers(several, phases[phase], last, 1e4)[part]
            - phase_buffers(two, of_two, last, 1e4)[part]
        )
        assert 32 * 1e4 * 40 < more < 32 * 1e4 * 80
    tokens = two.step_tokens(two.longest) / 8
    more = node_bytes(several)["rollouts"] - node_bytes(two)["rollouts"]
    assert more == pytest.approx(tokens * 8 * (32 * 24), rel=0.1)


def test_two_critics_are_planned() -> None:
    """Two critics alternate on the GPU; both count in host memory, checkpoints and transfers.

    With residency.keep both are on the GPU. Values take twice the time. Updates take less than 1.5 times the
    time, since each critic learns from half of the tokens."""
    keys = "recipe=vapo", "parallel.tp=4", "parallel.pp=4", "parallel.dp=8"
    one, two, kept = (
        plan_32b(*keys, *more)
        for more in ([], ["critic.count=2"], ["critic.count=2", "residency.keep=[critic.weights]"])
    )
    name = "critic.weights"
    assert group_bytes(two, name, 0) == group_bytes(one, name, 0) == group_bytes(kept, name, 0) / 2
    needs = [{need.phase: need.total for need in gpu_needs(plan)} for plan in (one, two)]
    assert needs[0] == needs[1]
    more = sum(group_bytes(one, f"critic.{part}", 0) for part in ("weights", "optimizer"))
    assert node_bytes(two)["pinned buffers"] - node_bytes(one)["pinned buffers"] == pytest.approx(
        8 * more, rel=0.2
    )
    critic = count_trained(one, "critic", Layout(), 0).all
    assert checkpoint_bytes(two) - checkpoint_bytes(one) == pytest.approx(critic * (2 + 3 * 4))
    times = [estimate(plan, default_lengths(plan)).parts for plan in (one, two)]
    assert times[1]["values"] == pytest.approx(2 * times[0]["values"])
    assert times[0]["critic_update"] < times[1]["critic_update"] < 1.5 * times[0]["critic_update"]
    moved = "on and off the device"
    assert times[1][moved] > times[0][moved]
    assert {key: times[1][key] for key in ("rollout", "actor_update")} == {
        key: times[0][key] for key in ("rollout", "actor_update")
    }


def test_trainers_without_engines_keep_their_weights_on_the_gpu() -> None:
    """Colocated trainers offload everything for the rollout, disaggregated ones the optimizer alone.

    Verifiers run on the nodes that have engines."""
    layout = "parallel.tp=4", "parallel.pp=4", "parallel.dp=4"
    beside, apart, mixed = (
        make_plan_inputs(
            load_config(ROOT / "configs/dapo_32b.yaml", [*layout, *keys]), KNOWN_MODELS["Qwen2.5-32B"]
        )
        for keys in (
            (),
            ("parallel.rollout_ranks=64",),
            ("parallel.rollout_ranks=64", "cluster.gpus_per_node=72"),
        )
    )
    weights, optimizer = (group_bytes(beside, f"actor.{part}", 0) for part in ("weights", "optimizer"))
    assert apart.residents == [{n for n in names if "actor" in n} for names in beside.residents][1:]
    hosts = [node_bytes(plan) for plan in (beside, apart, mixed)]
    assert hosts[0]["pinned buffers"] == pytest.approx(8 * (weights + optimizer), rel=1e-4)
    assert hosts[1]["pinned buffers"] == pytest.approx(8 * optimizer, rel=1e-4)
    assert hosts[1]["verifiers"] == 0 < hosts[0]["verifiers"] == hosts[2]["verifiers"]
    assert hosts[2]["processes"] == 9 * hosts[0]["processes"]
    moved = [estimate(p, default_lengths(p)).parts["on and off the device"] for p in (beside, apart)]
    bandwidth = apart.device.host_speed * 1e9 * LINKS
    assert moved[0] - moved[1] == pytest.approx(2 * weights / bandwidth, rel=1e-4)


def test_likeliest_tokens_of_the_old_policy_are_planned() -> None:
    """The top-k pass takes as long as the old log-probs' pass; it, the update and the batch need memory."""
    keys = "recipe=dppo", "algorithm.old_logprobs=trainer", "parallel.tp=4", "parallel.pp=4", "parallel.dp=8"
    binary, apart = (plan_32b(*keys, f"algorithm.dppo.top_k={k}") for k in (0, 20))
    phases = {phase.name: phase for phase in apart.phases}
    for phase, part in (("old_top_k", "activations"), ("actor_update", "head")):
        of_binary = phases["old_logprobs" if part == "activations" else phase]
        more = (
            phase_buffers(apart, phases[phase], 3, 1e4)[part] - phase_buffers(binary, of_binary, 3, 1e4)[part]
        )
        assert 20 * 1e4 * 40 < more < 20 * 1e4 * 80
    times = estimate(apart, default_lengths(apart)).parts
    assert times["old_top_k"] == pytest.approx(times["old_logprobs"])
    more = node_bytes(apart)["rollouts"] - node_bytes(binary)["rollouts"]
    assert more == pytest.approx(apart.step_tokens(apart.longest) * (20 * 24 + 2 * 4))


def test_a_pass_before_each_update_takes_its_time() -> None:
    """The pass by which Clip-Cov selects tokens takes, with one update a step, the time of old log-probs."""
    plans = [
        plan_32b("update.mini_batch=8192", f"algorithm.surrogate={name}") for name in ("ppo", "clip_cov")
    ]
    without, with_it = (estimate(plan, default_lengths(plan)).parts for plan in plans)
    longer = {name: with_it[name] - seconds for name, seconds in without.items() if with_it[name] != seconds}
    assert longer == pytest.approx({"actor_update": without["old_logprobs"]})


def test_the_hosts_hold_the_engines_choice_of_experts() -> None:
    """Routing replay takes 384 bytes a token: 8 of 128 experts in each of 48 layers, a byte each.

    Each rank stores them for its replica's share and again in its micro-batches. It also stores those of
    the tokens that its engine sampled, as received and once more for delivery."""
    without, with_it = (
        make_plan_inputs(
            load_config(ROOT / "configs/dapo_30b_a3b.yaml", [f"rollout.routing_replay={replay}"]),
            KNOWN_MODELS["Qwen3-30B-A3B"],
        )
        for replay in ("false", "true")
    )
    more = node_bytes(with_it)["rollouts"] - node_bytes(without)["rollouts"]
    assert more == pytest.approx(8 * (2 + 2) * 384 * 256 * 16 * (2048 + 20480) / 32)


def test_sampling_sets_are_counted() -> None:
    """Hosts hold each token's ids as received and packed; a GPU the ids' log-probs in log-prob passes."""
    without, with_it = (
        make_plan_inputs(
            load_config(
                ROOT / "configs/dapo_30b_a3b.yaml", ["rollout.top_k=50", f"rollout.sampling_replay={replay}"]
            ),
            KNOWN_MODELS["Qwen3-30B-A3B"],
        )
        for replay in ("false", "true")
    )
    more = node_bytes(with_it)["rollouts"] - node_bytes(without)["rollouts"]
    assert more == pytest.approx(8 * (2 + 2) * 200 * 256 * 16 * (2048 + 20480) / 32)
    for name in ("old_logprobs", "actor_update"):
        bytes_by_replay = [
            max(need.total for need in gpu_needs(plan) if need.phase == name) for plan in (without, with_it)
        ]
        assert bytes_by_replay[1] > bytes_by_replay[0], name


@pytest.mark.parametrize("layout", [(1, 1, 1, 1), (2, 1, 2, 1)], ids=str)
def test_a_rank_holds_its_share_of_the_batch(ranks: Callable[..., RankPool], layout: tuple[int, ...]) -> None:
    """Planned bytes of a rank's share and sampled responses are 1 to 1.5 times those of real tensors.

    The excess leaves room for the indices of micro-batches."""
    sizes = {"prompts": 16, "group": 4, "prompt": 4, "length": 400}
    plan, parts = plan_for(layout, "qwen2", "fp32"), {"data": {"max_prompt_tokens": 4}}
    parts["rollout"] = {"prompts": 16, "group_size": 4, "max_response_tokens": 400}
    changed = {name: getattr(plan.config, name).model_copy(update=keys) for name, keys in parts.items()}
    plan = replace(plan, config=plan.config.model_copy(update=changed))
    for measured in ranks(*layout).run(batch_bytes, **sizes):
        assert measured < step_batch_bytes(plan) < 1.5 * measured


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 3), st.integers(0, 3), st.integers(0, 5))
def test_what_a_rank_holds_of_the_batch_goes_down_with_the_ranks(tp: int, pp: int, dp: int) -> None:
    """The share of a replica shrinks with dp, sampled tokens with all ranks, metadata with neither.

    Given pairs (SFT) are read in full by every rank."""
    plan, sizes = plan_32b(), {"tp": 2**tp, "pp": 2**pp, "dp": 2**dp}
    one = replace_keys(plan, **{f"parallel__{name}": size for name, size in sizes.items()})
    alone = replace_keys(plan, parallel__tp=1, parallel__pp=1, parallel__dp=1)
    facts = KNOWN * plan.config.responses
    share = step_batch_bytes(alone) - facts - sampled_bytes(alone)
    assert step_batch_bytes(one) == pytest.approx(
        share / 2**dp + sampled_bytes(alone) / 2 ** (tp + pp + dp) + facts
    )
    pairs = make_plan_inputs(load_config(ROOT / "configs/demos/sft.yaml"), KNOWN_MODELS["Qwen2.5-0.5B"])
    assert step_batch_bytes(replace_keys(pairs, parallel__dp=2**dp)) == step_batch_bytes(pairs)


def plan_32b(*overrides: str) -> PlanInputs:
    return make_plan_inputs(
        load_config(ROOT / "configs/vapo_32b.yaml", overrides), KNOWN_MODELS["Qwen2.5-32B"]
    )


@pytest.mark.parametrize("tp", [1, 4, 8])
def test_an_engines_weights_are_its_shards(tp: int) -> None:
    """All shards in the engine's table exceed the model's bytes by less than 0.2 %; FP8 halves them."""
    plan = plan_32b(f"rollout.engine_tp={tp}")
    whole = 2 * plan.actor.parameters
    assert whole <= engine_weight_bytes(plan) * tp < 1.002 * whole
    fp8 = plan_32b(f"rollout.engine_tp={tp}", "rollout.weights_dtype=fp8_block")
    assert 0.5 < engine_weight_bytes(fp8) / engine_weight_bytes(plan) < 0.56


def test_figures_by_hand() -> None:
    """The plan of Qwen2.5-32B at tp 8, pp 4, dp 4, stage 0 (16 layers and embedding) equals hand formulas."""
    plan = plan_32b("parallel.tp=8", "parallel.pp=4", "parallel.dp=4", "rollout.engine_tp=8")
    layer = (5120 * (5120 + 2 * 1024) + 5120 + 2 * 1024 + 5120 * 5120 + 3 * 5120 * 27648) // 8 + 2 * 5120
    elements = 16 * layer + 152064 // 8 * 5120
    assert group_bytes(plan, "actor.weights", 0) == 2 * elements
    assert group_bytes(plan, "actor.gradients", 0) == 4 * elements
    assert group_bytes(plan, "actor.optimizer", 0) == 12 * elements / 4
    assert plan.actor.cache_bytes(8) == 2 * 64 * 1 * 128 * 2
    assert kv_cache_bytes(plan) == 0.8 * plan.device.memory - engine_weight_bytes(plan)


def test_fp8_copies_are_where_the_weights_are() -> None:
    """FP8 copies match a hand count of 32 layers a stage, one of them in bf16.

    Counted are the matrices of attention and MLP without biases: two bytes a weight on Hopper, one where a
    product needs no transposed copy. tests/te/test_training.py compares with Transformer Engine's modules."""
    plan = plan_32b("parallel.tp=8", "parallel.pp=2", "parallel.dp=8", "residency.keep=[]")
    layer = (5120 * (5120 + 2 * 1024) + 5120 * 5120 + 3 * 5120 * 27648) // 8
    assert fp8_copy_bytes(plan, "actor", 0) == fp8_copy_bytes(plan, "critic", 1) == 2 * 31 * layer
    bytes_of = {
        "cluster.gpu=GB200": 1.0,
        "model.fp8.first_last_layers_bf16=false": 2 * 32 / 31,
        "model.layers=portable model.fp8.format=none": 0.0,
        "model.fp8.format=none": 0.0,
        "model.fp8.recipe=blockwise model.fp8.format=e4m3": 2 + 8 / 128**2,
        "model.fp8.recipe=mxfp8 model.fp8.format=e4m3 cluster.gpu=GB200": 2.0625,
    }
    same = ("parallel.tp=8", "parallel.pp=2", "parallel.dp=8")
    for changes, expected in bytes_of.items():
        assert fp8_copy_bytes(plan_32b(*same, *changes.split()), "actor", 0) == expected * 31 * layer, changes
    # Stages between the first and the last have all layers in FP8.
    four = plan_32b("parallel.tp=8", "parallel.pp=4", "parallel.dp=4")
    in_fp8 = [fp8_copy_bytes(four, "actor", stage) / (2 * layer) for stage in range(4)]
    assert in_fp8 == [15, 16, 16, 15]
    assert 1 in four.stages
    for need in (need for need in gpu_needs(plan) if need.phase != "construction"):
        of = {name.partition(".")[0] for name in need.parts if name.endswith(".fp8_copies")}
        assert of == {name.partition(".")[0] for name in need.parts if name.endswith(".weights")} - {"engine"}
    # A pass without gradients makes row-wise copies only, unless the update's copies are still there.
    by_phase = {
        phase.name: phase_need(plan, phase, 0).parts["actor.fp8_copies"]
        for phase in plan.phases
        if phase.model == "actor"
    }
    assert by_phase["old_logprobs"] * 2 == by_phase["actor_update"] == fp8_copy_bytes(plan, "actor", 0)
    assert "actor.fp8_copies" not in checkpoint_need(plan, "actor", 0, load=True).parts
    kept = next(gpu_needs(plan_32b("residency.keep=[reference.weights,actor.weights]")))
    assert kept.phase == "rollout" and kept.parts["actor.fp8_copies"] > 0


@pytest.mark.parametrize("layout", [(1, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1)], ids=str)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_construction_takes_as_much_as_planned(
    ranks: Callable[..., RankPool], layout: tuple[int, ...], dtype: str
) -> None:
    """The peak while building a model, with the weights that fill its buffers, is as planned.

    The optimizer briefly has one tensor twice, which the plan omits."""
    found = ranks(*layout).run(construction, family="qwen2", dtype=dtype)
    plan = plan_for(layout, "qwen2", dtype)
    for rank, measured in enumerate(found):
        built = construction_need(plan, "actor", plan.layout.coords(rank).pp)
        planned = built.total - built.parts["contexts"]
        assert 0.99 * planned < measured < 1.01 * planned + 2 * plan.actor.largest_tensor(1)


def test_construction_is_a_phase_of_its_own() -> None:
    """DAPO's 72B model at tp 4, pp 2 needs 8 bytes for each of the last stage's 9.1 billion parameters."""
    path, same = ROOT / "configs/dapo_72b.yaml", ("parallel.tp=4", "parallel.pp=2", "parallel.dp=32")
    plan = make_plan_inputs(load_config(path, same), KNOWN_MODELS["Qwen2.5-72B"])
    needs = {need.phase: need for need in gpu_needs(plan)}
    built = needs["construction"]
    assert built.total - built.parts["contexts"] == 8 * count_params(plan, "actor", built.stage).all
    assert 67 * GIB < built.total - built.parts["contexts"] < 68 * GIB
    # Groups that stay on the GPU are there when the next model is built.
    kept = plan_32b("residency.keep=[actor.optimizer,critic.optimizer]")
    built = next(need for need in gpu_needs(kept) if need.phase == "construction")
    assert "actor.optimizer" in built.parts and "critic.optimizer" not in built.parts


@pytest.mark.parametrize(
    ("layout", "keys"),
    [
        ((2, 1, 1, 1), {"family": "qwen2"}),
        ((1, 2, 1, 1), {"family": "qwen2"}),
        ((1, 1, 2, 1), {"family": "qwen2", "parallel": {"overlap_grad_reduce": True}}),
        ((1, 2, 1, 1), {"family": "qwen2", "parallel": {"overlap_grad_reduce": True}}),
    ],
    ids=str,
)
def test_a_checkpoint_gathers_buckets_as_large_as_planned(
    ranks: Callable[..., RankPool], layout: tuple[int, ...], keys: dict[str, Any]
) -> None:
    """The largest bucket is as planned on every rank; stages after the first have a single bucket."""
    overlap = {"overlap_bucket": 300_000} if "parallel" in keys else {}
    keys = {**keys, "parallel": {**keys.get("parallel", {}), **overlap}}
    plan = plan_for(layout, keys["family"], "bf16")
    parallel = plan.config.parallel.model_copy(update=keys["parallel"])
    plan = replace(plan, config=plan.config.model_copy(update={"parallel": parallel}))
    for rank, largest in enumerate(ranks(*layout).run(largest_bucket, **keys)):
        stage = plan.layout.coords(rank).pp
        cut = overlap and not stage
        assert (0.5 if cut else 0.99) * count_bucket_params(plan, "actor", stage) <= largest
        assert largest <= 1.01 * count_bucket_params(plan, "actor", stage)
        assert (
            count_bucket_params(plan, "actor", stage) < count_params(plan, "actor", stage).shared
        ) == bool(cut)


def test_what_a_checkpoint_joins_when_it_is_read() -> None:
    """Loading joins gate and up projections of all of a stage's layers, next to weights and optimizer."""
    plan = plan_32b("parallel.tp=4", "parallel.pp=2", "parallel.dp=16")
    read = checkpoint_need(plan, "critic", 0, load=True)
    assert read.parts["joined weights"] == 32 * 2 * 27648 // 4 * 5120 * 2
    in_bf16 = load_config(ROOT / "configs/dapo_30b_a3b.yaml", ["model.fp8.format=none"])
    mixture = make_plan_inputs(in_bf16, KNOWN_MODELS["Qwen3-30B-A3B"])
    assert (
        checkpoint_need(mixture, "actor", 0, load=True).parts["joined weights"]
        == 48 * 16 * 2 * 768 * 2048 * 2
    )
    # On the first stage, whose gathered buckets are small, joining is the peak.
    checkpoint = next(need for need in gpu_needs(mixture) if need.phase == "checkpoint")
    assert "joined weights" in checkpoint.parts


def test_a_checkpoint_is_a_phase_of_its_own() -> None:
    """Saving DAPO's 72B model at tp 4, pp 2 peaks on the last stage.

    It gathers its 9.1 billion parameters in float32, twice on the GPU, next to weights, optimizer and FP8
    copies."""
    path, same = ROOT / "configs/dapo_72b.yaml", ("parallel.tp=4", "parallel.pp=2", "parallel.dp=32")
    less = ("model.recompute_layers=null",)
    of_72b = make_plan_inputs(load_config(path, [*same, *less]), KNOWN_MODELS["Qwen2.5-72B"])
    *_, saved = gpu_needs(of_72b)
    assert saved.phase == "checkpoint" and saved.stage == 1
    elements = count_params(of_72b, "actor", 1).all
    assert saved.parts["gathered bucket"] == 4 * elements * (2 + 1 / 32)
    assert saved.parts.keys() > {"actor.weights", "actor.optimizer", "actor.fp8_copies"}
    bf16 = ("model.fp8.format=none", "model.fp8.first_last_layers_bf16=false")
    without = make_plan_inputs(load_config(path, [*same, *less, *bf16]), KNOWN_MODELS["Qwen2.5-72B"])
    words = r"phase checkpoint needs 9\d\.. GiB .*stage 1: gathered bucket .*raise parallel.tp or parallel.pp"
    assert re.search(words, find_problem(without) or "")
    never = make_plan_inputs(
        load_config(path, [*same, *less, "checkpoint.every=0"]), KNOWN_MODELS["Qwen2.5-72B"]
    )
    assert "checkpoint" not in {need.phase for need in gpu_needs(never)}
    # The first stage's buckets are small.
    bucket = count_bucket_params(of_72b, "actor", 0)
    assert bucket == 40_000_000 + 8192 * 152064 // 4 < count_bucket_params(of_72b, "actor", 1) / 20


@settings(max_examples=40, deadline=None)
@given(
    steps=st.integers(1, 12),
    pretraining=st.integers(0, 5),
    every=st.integers(1, 5),
    keep=st.integers(0, 4),
    keep_every=st.integers(0, 4),
)
def test_the_disk_holds_the_checkpoints_that_are_kept(
    steps: int, pretraining: int, every: int, keep: int, keep_every: int
) -> None:
    """The planned disk space is the peak of a simulated run that removes old checkpoints after each save."""
    keys = {"every": every, "keep": keep, "keep_every": keep_every}
    overrides = [f"checkpoint.{name}={value}" for name, value in keys.items()]
    overrides += [f"steps={steps}", f"value_pretraining.steps={pretraining}"]
    config = load_config(ROOT / "configs/vapo_7b.yaml", overrides)
    most = 0.0
    plan = make_plan_inputs(config, KNOWN_MODELS["Qwen2.5-7B"])
    sizes = {"step": checkpoint_bytes(plan), "pretraining": checkpoint_bytes(plan, pretraining=True)}
    with TemporaryDirectory() as folder:
        for stage, count in ((PRETRAINING, pretraining), (TRAIN, steps)):
            for step in range(1, count + 1):
                if step % every and step < count:
                    continue
                place = Path(folder) / FOLDER / folder_name(stage, step)
                place.mkdir(parents=True)
                manifest = {"format": FORMAT, "stage": stage, "step": step, "settings": {}, "files": {}}
                (place / MANIFEST).write_text(seal(manifest))
                there = [sizes[found.name.split("-")[0]] for found in place.parent.iterdir()]
                most = max(most, sum(there))
                prune(Path(folder), config.checkpoint)
    assert disk_bytes(plan) == pytest.approx(most) and planned_needs(config, 8)[1] == disk_bytes(plan)
    assert disk_bytes(replace_keys(plan, checkpoint__every=0)) == 0
    critic = count_trained(plan, "critic", Layout(), 0).all
    assert sizes["pretraining"] == pytest.approx(critic * (2 + 3 * 4))


def test_larger_budgets_need_more_and_the_largest_is_the_last_that_fits() -> None:
    plan = plan_32b(*SMALL)
    budget = largest_micro_batch(plan)
    assert budget > plan.longest
    totals = [max(need.total for need in gpu_needs(plan, tokens)) for tokens in (budget, budget + 1024)]
    assert totals[0] <= plan.device.memory < totals[1]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["parallel.tp=1", "parallel.pp=1", "parallel.dp=128"],
            r"phase \w+ needs .* raise parallel.tp or parallel.pp",
        ),
        (["rollout.engine_memory=0.97"], "phase rollout needs .*; lower rollout.engine_memory"),
        (
            ["rollout.engine=transformers", "rollout.engine_tp=1"],
            "phase rollout needs .*; lower rollout.max_batch",
        ),
        (["rollout.engine_tp=1"], "holds 0 tokens|phase weight_transfer needs|KV cache of an engine holds"),
        (
            ["update.tokens_per_micro_batch=999424"],
            r"phase \w+ needs .*; lower update.tokens_per_micro_batch to \d+",
        ),
        (
            ["model.recompute=none", *SMALL],
            "phase critic_update needs .*; set model.recompute=full",
        ),
        (
            ["parallel.pp=1", "parallel.dp=32"],
            "phase critic_update needs .*; raise model.recompute_layers 18, or set it to null",
        ),
        (["residency.offload=false"], "phase .* needs .*; set residency.offload=true"),
        (
            ["residency.keep=[actor.optimizer,critic.optimizer,actor.gradients]", *SMALL],
            "take .* out of residency.keep",
        ),
        (["cluster.host_memory=100"], r"a node needs \d+ GiB of memory and has 100"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_does_not_fit_is_said_with_what_to_change(overrides: list[str], words: str) -> None:
    plan = plan_32b(*overrides)
    problem = find_problem(plan)
    assert problem is not None and re.search(words, problem), problem
    advice = re.search(r"lower update.tokens_per_micro_batch to (\d+)|set (model.recompute=full)", problem)
    if "raise model.recompute_layers" in problem:
        assert find_problem(plan_32b(*overrides, "model.recompute_layers=null")) is None
    if advice:  # the advice helps
        change = f"update.tokens_per_micro_batch={advice[1]}" if advice[1] else advice[2]
        assert find_problem(plan_32b(*overrides, change)) is None
    with pytest.raises(ConfigError) as error:  # train stops with the same message
        world, memory = plan.layout.world, plan.device.memory
        check_fits(make_plan_inputs(plan.config, plan.actor.config, world=world, memory=memory), "x.yaml")
    assert str(error.value) == f"x.yaml: {problem}"


def test_a_replay_is_planned_without_an_engine() -> None:
    """A replay's plan omits the engine's KV cache and weights; the rest is as in the run."""
    for keys, problem in (
        ("rollout.engine_memory=0.1", "the KV cache of an engine holds"),
        ("residency.keep=[engine.weights]", "take engine.weights out of residency.keep"),
    ):
        training = plan_32b(keys)
        plan = make_plan_inputs(training.config, training.actor.config, replay=True)
        assert problem in (find_problem(training) or "") and find_problem(plan) is None
    needs, before = ({need.phase: need for need in gpu_needs(of)} for of in (plan, plan_32b()))
    assert before.keys() - needs.keys() == {"rollout", "weight_transfer"}
    assert all(before[phase].total == need.total for phase, need in needs.items() if phase != "checkpoint")
    assert needs["checkpoint"].total <= before["checkpoint"].total  # a replay writes no checkpoint
    host, of_run = node_bytes(plan), node_bytes(plan_32b())
    assert host["verifiers"] == host["checkpoint staging"] == 0 < min(of_run.values())
    demo, sizes = (
        load_config(ROOT / "configs/demos/vapo.yaml", ["checkpoint.every=1"]),
        KNOWN_MODELS["Qwen2.5-7B"],
    )
    on_cpu, again = (
        make_plan_inputs(demo, sizes, world=2, cpu=True, replay=replay) for replay in (False, True)
    )
    assert cpu_bytes(on_cpu)["engines' weights"] > 0 == cpu_bytes(again)["engines' weights"]
    assert "rollout" in cpu_bytes_by_phase(on_cpu) and "rollout" not in cpu_bytes_by_phase(again)
    copied = "copy of a checkpoint"
    assert copied in cpu_bytes_by_phase(on_cpu)["actor_update"]
    assert copied not in cpu_bytes_by_phase(again)["actor_update"]


def test_the_32b_configurations_fit_their_128_gpus() -> None:
    for recipe in ("vapo", "dapo"):
        config = load_config(ROOT / f"configs/{recipe}_32b.yaml")
        for gpu in ("H100", "H200", "H800", "A100"):
            cluster = config.cluster.model_copy(update={"gpu": gpu})
            assert (
                find_problem(
                    make_plan_inputs(
                        config.model_copy(update={"cluster": cluster}), KNOWN_MODELS["Qwen2.5-32B"]
                    )
                )
                is None
            )


def test_another_gpu_needs_all_its_figures() -> None:
    config = load_config(
        ROOT / "configs/vapo_32b.yaml",
        ["cluster.gpu=B1", "cluster.gpu_memory=100", "cluster.gpu_tflops=1000"],
    )
    with pytest.raises(
        ConfigError, match=r"^cluster.gpu: B1 .*: set cluster.gpu_memory_speed, cluster.host_speed as well$"
    ):
        make_plan_inputs(config, KNOWN_MODELS["Qwen2.5-32B"])
    more = ["cluster.gpu_memory_speed=3000", "cluster.host_speed=50"]
    overrides = ["cluster.gpu=B1", "cluster.gpu_memory=100", "cluster.gpu_tflops=1000", *more]
    assert (
        make_plan_inputs(
            load_config(ROOT / "configs/vapo_32b.yaml", overrides), KNOWN_MODELS["Qwen2.5-32B"]
        ).device.memory
        == 100 * GIB
    )


def test_kept_groups_are_in_every_phase() -> None:
    free, keeping = plan_32b(), plan_32b("residency.keep=[actor.optimizer]")
    for before, after in zip(gpu_needs(free), gpu_needs(keeping), strict=True):
        extra = (
            0.0 if "actor.optimizer" in before.parts else group_bytes(keeping, "actor.optimizer", after.stage)
        )
        assert after.total == pytest.approx(before.total + extra, abs=GIB)
    assert node_bytes(keeping)["pinned buffers"] < node_bytes(free)["pinned buffers"]


def test_models_used_in_tests_are_what_they_say() -> None:
    assert hf_of("qwen3", num_hidden_layers=2).num_hidden_layers == 2
