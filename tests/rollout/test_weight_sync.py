"""Weight sync to SGLang without a GPU: memory, messages and handles, with the plans of 32B models."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from megatron.core import parallel_state
from torch.testing._internal.distributed.fake_pg import FakeStore

from megarl.cli import train
from megarl.config import load_config
from megarl.config.errors import ConfigError, EngineFailure
from megarl.config.schema import Config
from megarl.parallel import cpu_platform, runtime
from megarl.parallel.layout import Layout
from megarl.parallel.machine import allocator_problem
from megarl.plan.engines import transfer_buffer_bytes
from megarl.plan.inputs import make_plan_inputs
from megarl.rollout.engines.sglang import SGLangEngine
from megarl.schedule import evaluation, models, preflight, run, source
from megarl.sync.backends.shared_memory import SharedMemoryBackend
from megarl.sync.plan import Plan, engine_plan, engine_targets
from megarl.sync.transfer import Staging, Transfer, TransferStats
from megarl.sync.weight_sync import WeightSync, make_weight_sync
from megarl.weights.boxes import full_box, pack
from megarl.weights.known_models import KNOWN_MODELS
from megarl.weights.shards import Region, Shard

ROOT = Path(__file__).parents[2]
HF = {
    "model_type": "qwen2",
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
    **KNOWN_MODELS["Qwen2.5-32B"],
}
META = torch.device("meta")
# (tp, pp, dp, engine_tp). In the second, a quarter of the ranks has no message in the first bucket.
LAYOUTS = [
    (8, 4, 4, 8),
    pytest.param((4, 2, 16, 4), marks=pytest.mark.slow),
    pytest.param((8, 1, 16, 8), marks=pytest.mark.slow),
    (4, 2, 1, 4),
    (2, 2, 2, 4),
    (2, 1, 4, 2),
]


@cache
def planned(tp: int, pp: int, dp: int, engine_tp: int, *overrides: str) -> tuple[Config, Layout, Plan]:
    sizes = [f"parallel.tp={tp}", f"parallel.pp={pp}", f"parallel.dp={dp}", f"rollout.engine_tp={engine_tp}"]
    config = load_config(ROOT / "configs/vapo_32b.yaml", [*sizes, *overrides])
    layout = Layout(tp=tp, pp=pp, dp=dp)
    return config, layout, engine_plan(config, HF, layout)


def weight_sync_of(rank: int, *sizes: Any) -> WeightSync:
    """Make one rank's weight sync as in a run, from meta tensors, which take no memory."""
    config, layout, plan = planned(*sizes)
    engine = SGLangEngine(config, HF, rank, META, (1,))
    engine.process = None
    weights = {
        name: torch.empty(shard.shape, dtype=torch.bfloat16, device=META)
        for name, shard in plan.sources[rank].items()
        if not name.endswith("_scale_inv")
    }
    model: Any = SimpleNamespace(named_parameters=lambda: weights.items())
    job: Any = SimpleNamespace(
        layout=layout,
        rank=rank,
        device=META,
        rollout_ranks=0,
        world=layout.world,
        first_engine=0,
        transfer_group=None,
        gather=lambda value: [value] * layout.world,
    )
    job.job = job.engines = job
    return make_weight_sync(config, job, HF, model, engine)


@pytest.mark.parametrize(
    ("sizes", "weights"),
    [
        pytest.param((2, 2, 2, 1), "model", marks=pytest.mark.slow),
        ((2, 1, 2, 2), "fp8_block"),
        pytest.param((8, 4, 4, 8), "model", marks=pytest.mark.slow),
        pytest.param((4, 2, 16, 4), "fp8_block", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_weight_sync_takes_what_is_planned_and_gives_it_back(
    sizes: tuple[int, ...], weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: 34 staging buffers took 3.9 GiB permanently, while the plan counted 0.25 GiB."""
    overrides = (f"rollout.weights_dtype={weights}",)
    plan = make_plan_inputs(planned(*sizes, *overrides)[0], HF)
    there: list[int] = []

    def note(self: Transfer) -> TransferStats:
        there.append(sum(memory.nbytes for memory in made.memory))
        return TransferStats(0, 0, 0, 0.0)

    monkeypatch.setattr(Transfer, "run", note)
    monkeypatch.setattr(SharedMemoryBackend, "handle", lambda self, bucket: b"")
    for rank in (0, plan.layout.world - 1):
        made = weight_sync_of(rank, *sizes, *overrides)
        assert len(made.transfers) > 3
        assert sum(memory.nbytes for memory in made.memory) == 0, "before a sync nothing is there"
        there.clear()
        made.sync(0)
        assert len(there) == len(made.transfers) and len(set(there)) == 1
        assert 0.45 * transfer_buffer_bytes(plan) <= there[0] <= transfer_buffer_bytes(plan)
        assert sum(memory.nbytes for memory in made.memory) == 0, "after it nothing is left"


@given(st.lists(st.integers(0, 9)), st.integers(1, 12))
def test_tensors_are_packed_in_their_order(sizes: list[int], limit: int) -> None:
    """Each part is as full as possible: the first tensor of the next part would not fit."""
    parts = pack({str(i): size for i, size in enumerate(sizes)}, limit)
    assert [int(name) for part in parts for name in part] == list(range(len(sizes))) and all(parts)
    filled = [[sizes[int(name)] for name in part] for part in parts]
    assert all(sum(part) <= limit or sum(part) == max(part) for part in filled)
    assert all(sum(one) + other[0] > limit for one, other in pairwise(filled))


@pytest.mark.parametrize("weights", ["model", "fp8_block"])
def test_an_engine_that_has_its_frozen_weights_gets_the_others(
    weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frozen tensors have separate buckets, fused ones and scales too. A sleep or failure resends all."""
    ran: list[str] = []
    monkeypatch.setattr(Transfer, "run", lambda self: ran.extend(self.targets) or TransferStats(0, 0, 0, 0.0))
    monkeypatch.setattr(SharedMemoryBackend, "handle", lambda self, bucket: b"")
    overrides = (f"rollout.weights_dtype={weights}", "actor.frozen=attention", "actor.frozen_layers=3")
    made = weight_sync_of(0, 2, 1, 1, 2, *overrides)

    def written(version: int) -> set[str]:
        ran.clear()
        made.sync(version)
        assert len(ran) == len(set(ran))
        return set(ran)

    everything = written(0)
    frozen = {
        name
        for name in everything
        if "self_attn" in name
        or "input_layernorm" in name
        or name.startswith(tuple(f"model.layers.{layer}." for layer in range(3)))
    }
    some = {
        *("model.layers.63.self_attn.qkv_proj.weight", "model.layers.63.self_attn.qkv_proj.bias"),
        "model.layers.2.mlp.gate_up_proj.weight",
        *(["model.layers.2.mlp.down_proj.weight_scale_inv"] if weights == "fp8_block" else []),
    }
    assert some < frozen and made.nbytes == sum(t.target_bytes for t in made.transfers)
    assert written(1) == everything - frozen
    made.sleep(["kv_cache"])
    made.wake(["kv_cache"])
    assert written(2) == everything - frozen
    made.sleep(["weights"])
    made.wake(["weights"])
    assert written(3) == everything
    ran.clear()
    made.recover([EngineFailure("died while it generated"), None])
    assert set(ran) == everything
    failing = [EngineFailure("died in an update")]
    monkeypatch.setattr(made.engine, "begin_update", lambda: failing and _raise(failing.pop()))
    ran.clear()
    made.sync(4)
    assert ran.count("model.norm.weight") == 2 and set(ran) == everything
    assert written(5) == everything - frozen


def _raise(error: Exception) -> None:
    raise error


@pytest.fixture
def fake_job() -> Iterator[Any]:
    """Start one rank of a job without its other ranks; return the groups of its all-reduces, in order."""

    def start(rank: int, layout: Layout) -> list[list[int]]:
        cpu_platform.install()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world)
        parallel_state.initialize_model_parallel(
            layout.tp, layout.pp, expert_tensor_parallel_size=1, create_gloo_process_groups=False
        )
        used: list[list[int]] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                dist, "all_reduce", lambda tensor, group: used.append(dist.get_process_group_ranks(group))
            )
            runtime._connect(torch.device("cpu"))
        end()
        return used

    def end() -> None:
        if dist.is_initialized():
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()

    yield start
    end()


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_no_transfer_is_the_first_use_of_a_group(sizes: tuple[int, int, int, int], fake_job: Any) -> None:
    """All ranks use the job's group before the first message.

    Otherwise NCCL would create its communicator only with the ranks that have messages, and hang."""
    config, layout, plan = planned(*sizes)
    first = plan.part(SharedMemoryBackend(config, 1, META, torch.bfloat16).split(plan)[0])
    everyone = list(range(layout.world))
    talking = {
        rank
        for copy in (*first.copies, *first.relays)
        if copy.src_rank != copy.dst_rank
        for rank in (copy.src_rank, copy.dst_rank)
    }
    silent = set(everyone) - talking
    assert len(silent) == (32 if sizes == (4, 2, 16, 4) else len(silent))
    for rank in {min(silent, default=0), min(talking, default=0), layout.world - 1}:
        used = fake_job(rank, layout)
        assert used[0] == everyone, "before any message, all ranks use the group of the messages"
        assert all(rank in members for members in used)


def test_a_handle_is_of_memory_that_is_shared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each handle needs a new storage object over the same bytes.

    torch wraps a shared CUDA storage again at each sharing and keeps the wrappers as long as the storage."""
    shared: list[torch.Tensor] = []

    def dumps(value: Any) -> bytes:
        shared.append(value[0][1])
        return pickle.dumps(value[0][0])

    monkeypatch.setattr("megarl.sync.backends.shared_memory.ForkingPickler.dumps", dumps)
    config, _, _ = planned(2, 1, 4, 2)
    engine = SGLangEngine(config, HF, 1, torch.device("cuda", 1), (1,))
    backend = SharedMemoryBackend(config, 1, torch.device("cuda", 1), torch.bfloat16)
    box = full_box((8, 4))
    shards = {name: Shard((8, 4), (Region(name, box, box),)) for name in ("a", "b")}
    memory = Staging(torch.device("cpu"))
    [tensors] = backend.connect(engine, [Plan((), {}, {1: shards})], memory)
    memory.release()
    memory.take()
    tensors["b"].fill_(3.0)
    parts = [json.loads(pickle.loads(backend.handle(0))) for _ in range(3)]
    storages = {tensor.untyped_storage()._cdata for tensor in (*shared, memory.take())}
    assert len(storages) == 4 and {tensor.data_ptr() for tensor in shared} == {memory.take().data_ptr()}
    start, shape, dtype = parts[0]["tensors"]["b"]
    assert shape == [8, 4] and (shared[0][start : start + 64].view(getattr(torch, dtype)) == 3.0).all()


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_the_engine_runs_without_expandable_segments(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's memory saver refuses them; other allocator options stay."""
    for value, left in (
        ("expandable_segments:True", None),
        ("max_split_size_mb:512,expandable_segments:True", "max_split_size_mb:512"),
        (
            "expandable_segments: true , roundup_power2_divisions:[256:1,>:8]",
            "roundup_power2_divisions:[256:1,>:8]",
        ),
        ("max_split_size_mb:512", "max_split_size_mb:512"),
    ):
        monkeypatch.setenv(name, value)
        engine = SGLangEngine(planned(2, 1, 4, 2)[0], HF, 0, torch.device("cuda", 0), (1,))
        assert engine.process is not None
        assert engine.process.environment.get(name) == left
        assert (allocator_problem() is not None) == (left != value)


def test_a_user_is_told_that_the_engine_runs_without_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = planned(2, 1, 4, 2)[0].model_copy(update={"run_dir": tmp_path})
    monkeypatch.setattr(preflight, "choose_device", lambda wanted: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", MagicMock())
    checks = (
        "check_config",
        "_check_machine",
        "check_model",
        "check_frozen",
        "check_tokenizer",
        "_check_positions",
        "_check_engine_layout",
        "make_plan_inputs",
        "check_fits",
        "validate_files",
        "check_pretraining_rollouts",
        "claim_run_dir",
    )
    for name in checks:
        monkeypatch.setattr(preflight, name, MagicMock())
    train.check_run(config, "config.yaml")
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    train.check_run(config, "config.yaml")
    assert (
        "megarl: PYTORCH_CUDA_ALLOC_CONF: SGLang runs without expandable_segments" in capsys.readouterr().err
    )


def test_engines_behind_the_trainers_begin_with_one_of_their_first_ranks() -> None:
    """With 6 trainers and 4 rollout ranks, an engine of 4 ranks would span two nodes of 8."""
    engines = ["parallel.rollout_ranks=4", "rollout.engine_tp=4"]
    config = load_config(ROOT / "configs/vapo_32b.yaml", engines)
    with pytest.raises(ConfigError, match=r"^rollout\.engine_tp: 4 does not divide the 6 training ranks"):
        engine_targets(config, HF, 6)
    assert [rank for rank, _ in engine_targets(config, HF, 8)] == [8, 9, 10, 11]


@pytest.mark.parametrize(
    ("capability", "refused"),
    [
        ((8, 0), "on GPUs before Ada and Hopper"),
        ((8, 6), "on GPUs before Ada and Hopper"),
        ((8, 9), None),
        ((9, 0), None),
        ((10, 0), "on Blackwell"),
        ((12, 0), "on Blackwell"),
    ],
)
def test_fp8_blocks_are_not_sent_to_an_engine_that_packs_them_in_its_own_way(
    capability: tuple[int, int], refused: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = planned(2, 1, 4, 2, "rollout.weights_dtype=fp8_block")[0]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    expected = (
        pytest.raises(ConfigError, match=rf"^rollout\.weights_dtype: fp8_block: {refused}")
        if refused
        else nullcontext()
    )
    with expected:
        preflight._check_engine_layout(config, HF, torch.device("cuda", 0), world=8)


class Told:
    """An engine process that records its calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def call(self, *what: Any) -> None:
        self.calls.append(what)


def test_the_graphs_of_decoding_sleep_with_the_kv_cache() -> None:
    """SGLang's memory saver covers CUDA graphs only if an environment variable is set before capture.

    SGLang does not start with that variable and breakable graphs, its default for prefill."""
    config = planned(2, 1, 4, 2)[0]
    for options, sleeps in (
        ({}, True),
        ({"cuda_graph_backend_prefill": "breakable"}, False),
        ({"disable_prefill_cuda_graph": False}, False),
        ({"cuda_graph_config": '{"decode": {"backend": "breakable"}}'}, False),
        ({"cuda_graph_backend_prefill": "full"}, True),
    ):
        given = config.model_copy(
            update={"rollout": config.rollout.model_copy(update={"engine_options": options})}
        )
        engine = SGLangEngine(given, HF, 0, torch.device("cuda", 0), (1,))
        assert engine.process is not None
        assert engine.process.environment["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] == str(int(sleeps))
        assert engine.process.arguments["disable_prefill_cuda_graph"] == options.get(
            "disable_prefill_cuda_graph", True
        )
    engine.process = told = Told()  # type: ignore[assignment]
    for move in (engine.sleep, engine.wake):
        move(("kv_cache",))
        move(("weights",))
        move()
    tags = [["kv_cache", "cuda_graph"], ["weights"], ["weights", "kv_cache", "cuda_graph"]]
    assert told.calls == [(name, some) for name in ("sleep", "wake") for some in tags]


@pytest.mark.parametrize("what", ["run", "evaluation"])
def test_an_engine_starts_when_all_ranks_have_given_back_their_memory(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine starts after all models are built and caches emptied on all ranks.

    SGLang measures the free memory of each GPU and refuses to start if they differ."""
    order: list[str] = []

    def says(word: str) -> Any:
        return lambda *arguments, **options: order.append(word) or MagicMock()

    monkeypatch.setattr(source, "empty_cache", says("empties"))
    monkeypatch.setattr(source, "barrier", says("waits"))
    engine = SimpleNamespace(start=says("starts"), running=0)
    config = planned(2, 1, 4, 2)[0]
    if what == "run":
        for name in ("load_tokenizer", "open_model", "read_hf_config", "HostPool"):
            monkeypatch.setattr(run, name, MagicMock(return_value=MagicMock()))
        for name in ("PromptSampler", "VerifierPool", "RolloutRank"):
            monkeypatch.setattr(source, name, MagicMock(return_value=MagicMock()))
        monkeypatch.setattr(source, "read_prompts", lambda *_, **__: ([], MagicMock()))
        monkeypatch.setattr(source, "read_problem_sets", lambda *_, **__: ([], {}))
        monkeypatch.setattr(models.ModelBuilder, "build_actor", says("settles"))
        monkeypatch.setattr(models.ModelBuilder, "build_critic", says("settles"))
        built = SimpleNamespace(build=lambda *arguments: engine)
        monkeypatch.setattr(source, "load_engine_class", lambda config: built)
        monkeypatch.setattr(run, "make_weight_sync", says("weight sync"))
        monkeypatch.setattr(run, "EngineMemory", MagicMock())
        run.build_run(config, MagicMock(device=torch.device("cpu"), rollout_ranks=0))
        assert order == ["settles", "settles", "empties", "waits", "starts", "weight sync"]
    else:
        for name in ("load_tokenizer", "read_hf_config", "read_config", "open_model"):
            monkeypatch.setattr(evaluation, name, MagicMock())
        monkeypatch.setattr(evaluation, "broadcast_from_rank_0", lambda runtime, value, kind: value)
        monkeypatch.setattr(evaluation, "read_problem_sets", lambda *_, **__: ([], {}))
        built = SimpleNamespace(build=lambda *arguments: engine)
        monkeypatch.setattr(evaluation, "load_engine_class", lambda config: built)
        monkeypatch.setattr(evaluation, "build_actor", says("builds"))
        monkeypatch.setattr(evaluation, "load_weights", says("loads"))
        monkeypatch.setattr(evaluation, "make_weight_sync", says("weight sync"))
        evaluation.Evaluation(config, None, MagicMock(device=torch.device("cpu")))
        assert order == ["builds", "loads", "empties", "waits", "starts", "weight sync"]
