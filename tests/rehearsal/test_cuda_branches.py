"""Run every CUDA-only branch of megarl once on a simulated node (fakecuda.py).

Tested are the device calls, their order, and the names in these branches, but not numerical results."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor
import torch.distributed as dist

from megarl.cli.nodes import node_versions
from megarl.config.errors import ConfigError
from megarl.config.schema import Config, ParallelConfig
from megarl.model import builder
from megarl.parallel import device_memory, machine, node_checks, offload_group
from megarl.parallel import runtime as parallel
from megarl.parallel.node_checks import NodeNeeds
from megarl.rollout import episode
from megarl.rollout.engines import sglang
from megarl.rollout.engines.sglang import SGLangEngine
from megarl.rollout.engines.transformers_engine import TransformersEngine
from megarl.schedule import preflight
from megarl.schedule.offload import EngineMemory, OffloadManager
from megarl.schedule.tokenizer_checks import ModelDescription
from megarl.sync import transfer
from megarl.sync.plan import make_plan
from megarl.weights.boxes import Box
from megarl.weights.families import read_config
from megarl.weights.shards import Region, Shard
from tests.gpu.scene import TINY, get_sizes
from tests.rehearsal.fakecuda import FREE, TOTAL, pretend
from tests.tiny_models import make_tokenizer

CUDA, GIB = torch.device("cuda", 0), 2**30


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Simulate a node of 8 H100 and record the device calls of a test."""
    return pretend(monkeypatch)


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Record `pin_memory` of each torch.empty and ignore it: only torch for CUDA has pinned memory."""
    asked: list[bool] = []
    empty = torch.empty

    def without_pins(*sizes: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        asked.append(pin_memory)
        return empty(*sizes, **options)

    monkeypatch.setattr(torch, "empty", without_pins)
    return asked


def make_config(**changes: Any) -> Config:
    least = {
        "recipe": "dapo",
        "run_dir": Path("x"),
        "steps": 1,
        "model": {"path": Path("x")},
        "data": {"train": [Path("x")]},
    }
    return Config(**{**least, **changes})


class TestStart:
    """parallel/runtime.py"""

    @pytest.fixture
    def joined(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
        """Use fake process groups for a job of one rank; record the arguments of init_process_group."""
        from torch.testing._internal.distributed.fake_pg import FakeStore

        asked: list[Any] = []
        join, group = dist.init_process_group, dist.new_group

        def joins(backend: str, **options: Any) -> None:
            asked.append((backend, options))
            join("fake", store=FakeStore(), rank=0, world_size=1)

        def groups(*ranks: Any, backend: str | None = None, pg_options: Any = None, **options: Any) -> Any:
            return group(*ranks, backend="fake", **options)

        monkeypatch.setattr(dist, "init_process_group", joins)
        monkeypatch.setattr(dist, "new_group", groups)
        for name in parallel.LAUNCHED_BY:
            monkeypatch.delenv(name, raising=False)
        yield asked
        monkeypatch.undo()
        parallel.stop()
        torch.backends.cuda.enable_cudnn_sdp(True)

    def test_a_rank_takes_its_device_and_nccl(
        self, joined: list[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from megatron.core.tensor_parallel import random

        calls = pretend(monkeypatch)
        monkeypatch.setenv("LOCAL_RANK", "3")
        monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
        monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
        monkeypatch.delenv("NVTE_FLASH_ATTN_V4", raising=False)
        monkeypatch.setattr(inductor, "compile_threads", 8)
        monkeypatch.setattr(random, "model_parallel_cuda_manual_seed", lambda *a, **k: None)
        monkeypatch.setattr(
            "megatron.core.tensor_parallel.model_parallel_cuda_manual_seed",
            lambda *a, **k: calls.append(("seed", *a)),
        )
        started = parallel.start(ParallelConfig(device="cuda", timeout=60), seed=7)
        assert started.device == torch.device("cuda", 3) and started.world == 1
        assert ("set_device", torch.device("cuda", 3)) in calls and ("seed", 7) in calls
        assert not torch.backends.cuda.cudnn_sdp_enabled() and inductor.compile_threads == 1
        assert joined[0][0] == "nccl" and os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
        assert os.environ["NVTE_FLASH_ATTN_V4"] == "0"
        states = parallel.generator_states()
        assert states["cuda"] == list(range(16))
        monkeypatch.setattr(random.get_cuda_rng_tracker(), "set_states", lambda states: None)
        parallel.set_generator_states(states)
        assert any(call[0] == "set_rng_state" for call in calls)

    def test_ranks_share_a_gpu_only_if_nccl_may(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pretend(monkeypatch, devices=1)
        monkeypatch.setenv("LOCAL_RANK", "1")
        with pytest.raises(ConfigError, match=r"LOCAL_RANK: 1, but this node has 1 GPUs"):
            parallel.choose_device("cuda")
        monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
        assert parallel.choose_device("cuda") == torch.device("cuda", 0)

    def test_a_rank_that_failed_waits_for_no_other_ranks_end(self, monkeypatch: pytest.MonkeyPatch) -> None:
        destroyed: list[str] = []
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
        monkeypatch.setattr(dist, "destroy_process_group", lambda: destroyed.append("groups"))
        monkeypatch.setattr("megatron.core.parallel_state.destroy_model_parallel", lambda: None)
        parallel.stop(failed=True)
        assert not destroyed
        parallel.stop()
        assert destroyed == ["groups"]

    def test_cuda_that_is_not_there(self) -> None:
        with pytest.raises(ConfigError, match="cuda was asked for"):
            parallel.choose_device("cuda")


class TestResidency:
    """parallel/offload_group.py, parallel/device_memory.py, schedule/offload.py"""

    def test_pools_are_pinned_and_bring_back_what_left(self, calls: list[Any], pinned: list[bool]) -> None:
        pool = offload_group.HostPool(CUDA, chunk=1024)
        tensor = torch.arange(5000, dtype=torch.int16)
        expected = tensor.clone()
        held = offload_group.OffloadGroup(lambda: [tensor], torch.device("cpu"), pool)
        held.offload()
        assert pinned.count(True) == 10 and pool.nbytes == 10240 and tensor.untyped_storage().nbytes() == 0
        held.onload()
        assert torch.equal(tensor, expected)

    def test_memory_is_given_back_after_what_still_runs(self, calls: list[Any]) -> None:
        device_memory.empty_cache(CUDA)
        assert [name for name, *_ in calls] == ["synchronize", "empty_cache"]
        assert device_memory.free_memory(CUDA) == FREE

    def test_figures_of_a_phase(self, calls: list[Any]) -> None:
        offload, metrics = OffloadManager(CUDA, ()), dict[str, float]()
        with offload.measure_memory("rollout", metrics):
            assert calls == [("reset_peak_memory_stats", CUDA)]
        assert metrics == {
            "memory/rollout": 3.0 * GIB,
            "memory_reserved/rollout": 5.0 * GIB,
            "memory_device/rollout": float(TOTAL - FREE),
        }

    def test_a_phase_empties_the_cache_once_somebody_has_left(self, calls: list[Any]) -> None:
        manager, tensor = OffloadManager(CUDA, ()), torch.ones(4)
        pool = offload_group.HostPool(torch.device("cpu"))
        manager.register(
            {"actor.weights": offload_group.OffloadGroup(lambda: [tensor], torch.device("cpu"), pool)}
        )
        manager.onload("rollout", ())
        assert [name for name, *_ in calls] == ["synchronize", "empty_cache"]
        manager.onload("old_logprobs", {"actor.weights"})
        assert len(calls) == 2

    def test_an_engines_share_is_what_the_device_has_more_of(
        self, calls: list[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        free = [10 * GIB]

        class Engines:
            def sleep(self, tags: tuple[str, ...]) -> None:
                assert tags == ("kv_cache",)
                free[0] += 7 * GIB

        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (free[0], TOTAL))
        group = EngineMemory(Engines(), "kv_cache", CUDA, 0)  # type: ignore[arg-type]
        group.offload()
        assert group.nbytes == 7 * GIB

    def test_a_device_that_is_full(self, calls: list[Any]) -> None:
        from megarl.config.errors import DeviceMemoryError

        offload = OffloadManager(CUDA, ("engine.weights",))
        with (
            pytest.raises(
                DeviceMemoryError,
                match=r"phase weight_transfer: CUDA out of memory.*rollout\.transfer_bucket",
            ),
            offload.explain_out_of_memory("weight_transfer"),
        ):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


class TestEngines:
    """rollout/engines/sglang.py, rollout/engines/transformers_engine.py"""

    def test_sglang_on_cuda(self, tmp_path: Path, calls: list[Any]) -> None:
        config = make_config(
            rollout={"engine": "sglang", "engine_tp": 4, "engine_memory": 0.7},
            model={"path": tmp_path, "dtype": "bf16"},
        )
        engine = SGLangEngine(config, TINY, 4, torch.device("cuda", 4), (1,))
        assert engine.process is not None
        given = engine.process.arguments
        assert (
            given["base_gpu_id"] == 4
            and given["mem_fraction_static"] == 0.7
            and given["enable_memory_saver"] is True
        )
        assert "device" not in given and "GLOO_SOCKET_IFNAME" not in engine._environment()

    def test_transformers_gives_its_memory_back(self, tmp_path: Path, calls: list[Any]) -> None:
        (tmp_path / "config.json").write_text(json.dumps(TINY))
        make_tokenizer(300).save_pretrained(tmp_path)
        engine = TransformersEngine(
            tmp_path,
            dtype=torch.float32,
            device=torch.device("cpu"),
            max_batch=2,
            eos_ids=(1,),
            tokenizer=None,
        )
        engine.start()
        engine.device = CUDA
        engine.sleep()
        engine.stop()
        assert [name for name, *_ in calls] == ["empty_cache", "empty_cache"]


def test_a_transfer_ends_when_the_device_has(calls: list[Any]) -> None:
    """In sync/transfer.py, a transfer on CUDA ends with a synchronize: others may then read the weights."""
    box: Box = ((0, 4),)
    shards = [(0, {"w": Shard((4,), (Region("w", box, box),))})]
    plan = make_plan(shards, shards, formats={}, gpus_per_node=8)
    source, target = {"w": torch.arange(4.0)}, {"w": torch.zeros(4)}
    moved = transfer.Transfer(plan, 0, source, target, 1024, dtype=torch.float32)
    moved.run()  # allocates buffers on the tensors' device, the CPU
    moved._device = CUDA
    moved.run()
    assert torch.equal(target["w"], source["w"]) and [name for name, *_ in calls] == ["synchronize"]


class TestLayers:
    """model/builder.py, model/fp8.py"""

    def test_auto_takes_transformer_engine_where_it_is(
        self, calls: list[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(
            builder,
            "transformer_engine_problem",
            lambda device: "" if device == "cuda" else "needs a CUDA device",
        )
        layers = make_config().model
        assert builder.choose_layers(layers, CUDA) == "te"
        assert builder.choose_layers(layers, torch.device("cpu")) == "portable"
        assert builder.choose_layers(layers.model_copy(update={"layers": "portable"}), CUDA) == "portable"

    @pytest.mark.parametrize(
        ("recipe", "works"), [("tensorwise", True), ("delayed", True), ("blockwise", True), ("mxfp8", False)]
    )
    def test_recipes_of_the_device(
        self, recipe: str, works: bool, calls: list[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(builder, "transformer_engine_problem", lambda device: "")
        fp8 = {"format": "hybrid", "recipe": recipe, "first_last_layers_bf16": False}
        model = make_config(model={"path": Path("x"), "dtype": "bf16", "fp8": fp8}).model
        if works:
            assert builder.choose_layers(model, CUDA) == "te"
        else:
            with pytest.raises(
                ConfigError,
                match=r"model\.fp8\.recipe: mxfp8 needs compute capability 10\.0, this device has 9\.0",
            ):
                builder.choose_layers(model, CUDA)


class TestPreflight:
    """schedule/preflight.py, parallel/node_checks.py, cli/nodes.py"""

    def test_gpus_of_a_node(self, calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
        ones = torch.ones
        monkeypatch.setattr(torch, "ones", lambda *a, device=None, **k: ones(*a, **k))
        assert node_checks._device_problems(NodeNeeds(Path("x"), devices=8)) == []
        monkeypatch.setattr(
            torch.cuda, "mem_get_info", lambda device=None: (FREE // 2 if device == 5 else FREE, TOTAL)
        )
        busy = "GPU 5: 39.1 of 79.2 GiB are free: another process is on it"
        assert node_checks._device_problems(NodeNeeds(Path("x"), devices=8)) == [busy]
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
        monkeypatch.setattr(node_checks, "driver_version", lambda: "550.54.14")
        assert node_checks._device_problems(NodeNeeds(Path("x"), devices=8)) == [
            "0 GPUs, 8 were asked for (driver 550.54.14 is too old for CUDA 13.0, of which torch is: "
            "580.65.06 or newer)"
        ]

    def test_times_are_taken_when_the_device_has_finished(
        self, calls: list[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(dist, "barrier", lambda: calls.append(("barrier",)))
        node_checks._seconds(lambda: calls.append(("work",)), CUDA)
        assert [name for name, *_ in calls] == ["barrier", "work", "synchronize"] * (node_checks.ROUNDS + 1)

    def test_versions_that_nodes_compare(self, calls: list[Any]) -> None:
        found = node_versions(True)
        assert found["nccl"] == "2.30.7" and found["GPU"] == "NVIDIA H100 80GB HBM3"

    def test_a_large_run_on_one_node_is_refused_before_its_ranks(self, calls: list[Any]) -> None:
        with pytest.raises(
            ConfigError, match=r"parallel: tp 8 x pp 4 x dp 1 = 32 devices, but there are 8 here"
        ):
            preflight._check_machine(make_config(parallel={"tp": 8, "pp": 4}), "cuda")

    def test_an_engine_that_lies_in_two_nodes_is_refused(self, calls: list[Any]) -> None:
        config = make_config(rollout={"engine": "sglang", "engine_tp": 16})
        with pytest.raises(
            ConfigError, match=r"rollout\.engine_tp: 16 does not divide the 8 devices of this node"
        ):
            preflight._check_engine_layout(config, get_sizes("Qwen2.5-32B"), CUDA, world=128)

    def test_an_engine_whose_packages_do_not_fit(
        self, calls: list[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(preflight, "find_spec", lambda name: object())
        monkeypatch.setattr(
            sglang,
            "list_unmet_requirements",
            lambda name: [f"{name} 0.5.23 needs torch==2.14.1, there is torch 2.13.0 (make install-gpu)"],
        )
        with pytest.raises(ConfigError, match=r"rollout\.engine: sglang 0\.5\.23 needs torch==2\.14\.1"):
            preflight._check_machine(make_config(rollout={"engine": "sglang"}), "cuda")

    def test_an_older_cudnn_than_torchs(self, calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(preflight, "cudnn_problem", lambda: "cuDNN 9.19.0 is found")
        with pytest.raises(ConfigError, match=r"cuDNN 9\.19\.0 is found"):
            preflight._check_machine(make_config(), "cuda")
        portable = {"path": Path("x"), "layers": "portable"}  # they do not use cuDNN
        preflight._check_machine(make_config(model=portable), "cuda")

    @pytest.fixture
    def described(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
        """Return the keys of a 32B model with only a config.json; optional packages are not installed."""
        (tmp_path / "config.json").write_text(json.dumps(get_sizes("Qwen2.5-32B")))
        folder = ModelDescription(tmp_path, read_config(tmp_path))
        monkeypatch.setattr(preflight, "check_model", lambda *a, **k: folder)
        tokenizer = SimpleNamespace()
        monkeypatch.setattr(preflight, "check_tokenizer", lambda *a, **k: tokenizer)
        monkeypatch.setattr(episode, "check_end_of_turn", lambda *a, **k: None)
        for module in (machine, preflight):
            monkeypatch.setattr(module, "find_spec", lambda name: None)
        return {"path": tmp_path, "dtype": "bf16", "recompute": "full"}

    def test_what_does_not_fit_the_device_is_refused(
        self, calls: list[Any], described: dict[str, Any]
    ) -> None:
        """The whole preflight runs, up to the check against the GPU's memory."""
        config = make_config(model=described, parallel={"tp": 1, "device": "cuda"})
        with pytest.raises(ConfigError, match=r"x\.yaml: .*GiB"):
            preflight.preflight(config, "x.yaml", world=8)

    def test_a_replay_asks_for_no_engine(
        self, calls: list[Any], described: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A replay needs no engine memory, engine packages, data or packages of loggers."""
        parallel, rollout = {"tp": 8, "device": "cuda"}, {"engine_memory": 0.05}
        for engine, refusal in (
            ("transformers", "phase rollout needs"),
            ("sglang", r"rollout\.engine: sglang is not installed"),
        ):
            keys = {"model": described, "parallel": parallel, "rollout": rollout | {"engine": engine}}
            config = make_config(**keys)
            with pytest.raises(ConfigError, match=refusal):
                preflight.preflight(config, "x.yaml", world=64)
            assert preflight.preflight(config, "x.yaml", world=64, replay=True) == []
        monkeypatch.setattr(preflight, "find_spec", lambda name: None if name == "wandb" else object())
        config = make_config(model=described, parallel=parallel, log={"wandb": True})
        with pytest.raises(ConfigError, match=r"log\.wandb: wandb is not installed"):
            preflight.preflight(config, "x.yaml", world=64)
        assert preflight.preflight(config, "x.yaml", world=64, replay=True) == []


def test_doctor_on_such_a_node(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from megarl.cli import doctor

    monkeypatch.setattr(doctor, "driver_version", lambda: "580.95.05")
    monkeypatch.setattr(doctor, "flaws", lambda cuda: iter([f"for CUDA {cuda}"]))
    monkeypatch.setattr(doctor, "matrix_rates", lambda processes: {"fp32": 17.0, "bf16": 119.0})
    assert doctor.doctor() == 0
    printed = capsys.readouterr().out
    assert "driver     580.95.05, torch for CUDA 13.0" in printed
    assert (
        "yes  training on GPUs, bf16: 8 x NVIDIA H100 80GB HBM3, 79 GiB" in printed
        and "look for CUDA 13.0" in printed
    )
