"""Check an engine's inputs on 8 H100 with SGLang's own code: arguments and transfer handles."""

from __future__ import annotations

import inspect
import io
import json
from collections.abc import Iterator
from importlib.util import find_spec
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.multiprocessing import reductions

from megarl.config.schema import Config
from megarl.parallel.internals import changed
from megarl.parallel.machine import cuda_runtime_folders
from megarl.rollout.engines.sglang import LOADER, TAGS, SGLangEngine
from tests.gpu.scene import get_sizes
from tests.rehearsal.fakecuda import pretend
from tests.tiny_models import make_tokenizer

pytestmark = pytest.mark.skipif(find_spec("sglang") is None, reason="sglang is not installed: make rehearse")
LENGTHS = {"max_response_tokens": 20480}


@pytest.fixture(scope="module", autouse=True)
def node() -> Iterator[None]:
    """Simulate 8 H100 before the first import of sglang, which queries the devices.

    Stubs replace SGLang's kernels if they are not installed."""
    from megarl.rollout.engines import sglang_host  # noqa: F401 (installs the stubs)

    patch = pytest.MonkeyPatch()
    pretend(patch)
    yield
    patch.undo()


def engine_on(
    folder: Path, rank: int = 0, sizes: dict[str, Any] | None = None, **rollout: Any
) -> SGLangEngine:
    """Make a rank's engine on CUDA, not started; the defaults are tp 8 and Qwen2.5-32B's sizes."""
    sizes = sizes or get_sizes("Qwen2.5-32B")
    (folder / "config.json").write_text(json.dumps(sizes))
    make_tokenizer(400).save_pretrained(folder)
    asked = {"engine": "sglang", "engine_tp": 8, **LENGTHS, **rollout}
    model = {"path": folder, "dtype": "bf16"}
    config = Config(
        recipe="dapo", run_dir=folder, steps=1, model=model, rollout=asked, data={"max_prompt_tokens": 2048}
    )
    return SGLangEngine(config, sizes, rank, torch.device("cuda", rank % 8), (1,))


@pytest.mark.parametrize(
    ("weights", "options"),
    [
        ("model", {}),
        ("fp8_block", {}),
        ("model", {"attention_backend": "triton", "disable_cuda_graph": True}),
        ("model", {"enable_deterministic_inference": True}),
    ],
    ids=["bf16", "fp8", "options of benchmarks/gpu.py", "options of the stage restart"],
)
def test_sglang_takes_the_arguments(tmp_path: Path, weights: str, options: dict[str, Any]) -> None:
    from sglang.srt.server_args import ServerArgs

    engine = engine_on(tmp_path, weights_dtype=weights, engine_options=options)
    assert engine.process is not None
    server = ServerArgs(**engine.process.arguments)
    server.resolve_once()  # as Engine does; raises on contradictory arguments
    server.check_server_args()
    found = server.resolved_dict()
    wanted = {
        "device": "cuda",
        "tp_size": 8,
        "dtype": "bfloat16",
        "load_format": "dummy",
        "sampling_backend": "pytorch",  # the name under which our sampler is registered
        "custom_weight_loader": [LOADER],
        "enable_memory_saver": True,
        "enable_custom_logit_processor": True,
        "skip_tokenizer_init": True,
        "mem_fraction_static": 0.8,
        "max_running_requests": 256,
        "disable_overlap_schedule": False,
        "attention_backend": "fa3",
        **{key: value for key, value in options.items() if key != "disable_cuda_graph"},
    }
    assert {key: found[key] for key in wanted} == wanted
    override = json.loads(found["json_model_override_args"])
    assert override.get("quantization_config", {}).get("weight_block_size") == (
        [128, 128] if weights == "fp8_block" else None
    )
    if not options:
        assert found["cuda_graph_config"]["decode"]["max_bs"] == 256  # a graph for every batch size


def test_experts_go_through_the_runner_whose_order_is_written(tmp_path: Path) -> None:
    """SGLang's default runner on Blackwell swaps an expert's gate and up projections."""
    from sglang.srt.server_args import ServerArgs

    experts = {
        **get_sizes("Qwen2.5-32B"),
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
    }
    experts |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 1024, "head_dim": 128}
    engine = engine_on(tmp_path, sizes=experts)
    assert engine.process is not None
    server = ServerArgs(**engine.process.arguments)
    server.resolve_once()
    assert server.resolved_dict()["moe_runner_backend"] == "triton"
    dense = engine_on(tmp_path).process
    assert dense is not None and "moe_runner_backend" not in dense.arguments


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3_moe"])
def test_parameters_of_fp8_blocks_are_those_of_the_plan(model_type: str) -> None:
    """SGLang's own methods create the parameters of a linear layer, of experts and of attention.

    The scales of attention's FP8 KV cache are not transferred: only the engine has them."""
    from sglang.srt.layers.quantization.fp8 import Fp8Config, Fp8LinearMethod, Fp8MoEMethod
    from sglang.srt.layers.quantization.kv_cache import BaseKVCacheMethod

    from megarl.rollout.engines.sglang import FP8_CONFIG
    from megarl.rollout.engines.sglang_inside import KV_SCALES
    from megarl.sync.plan import fp8_block
    from megarl.weights.shards import hf_shapes, sglang_shards

    sizes = {"model_type": model_type, "num_hidden_layers": 1, "hidden_size": 256, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 2, "intermediate_size": 512, "vocab_size": 320, "head_dim": 128}
    sizes |= {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
    _, [(_, planned)], _ = fp8_block([], [(0, sglang_shards(sizes, 1, 0))], hf_shapes(sizes))
    config, layer = Fp8Config.from_config(FP8_CONFIG), torch.nn.Module()
    layer.tp_group, layer.moe_tp_size, layer.moe_runner_config = None, 1, SimpleNamespace(is_gated=True)
    load = {"weight_loader": lambda *_: None}
    if model_type == "qwen2":
        method = Fp8LinearMethod(config)
        method.create_weights(layer, 256, [512, 512], 256, 1024, torch.bfloat16, **load)
        prefix, expert = "model.layers.0.mlp.gate_up_proj.", ""
    else:
        method = Fp8MoEMethod(config)
        method.create_weights(layer, 3, 256, 256, torch.bfloat16, **load)
        prefix, expert = "model.layers.0.mlp.experts.", ".2"
    theirs = {
        f"{prefix}{name}{expert}": tuple(p.shape[1:] if expert else p.shape)
        for name, p in layer.named_parameters()
    }
    ours = {n: s.shape for n, s in planned.items() if n.startswith(prefix) and n.endswith(expert)}
    assert theirs == ours
    attention = torch.nn.Module()
    BaseKVCacheMethod(config).create_weights(attention)
    assert {f".attn.{name}" for name, _ in attention.named_parameters()} == set(KV_SCALES)


def test_an_engine_of_half_a_node_begins_at_its_own_device(tmp_path: Path) -> None:
    first, second = (engine_on(tmp_path, rank, engine_tp=4) for rank in (0, 12))
    assert first.process is not None and second.process is not None
    assert [engine.process.arguments["base_gpu_id"] for engine in (first, second) if engine.process] == [0, 4]


def cuda_reduction(nbytes: int, device: int) -> tuple[Any, tuple[Any, ...]]:
    """Reduce a uint8 tensor on a device by torch's own code, with simulated answers of the driver."""
    storage = SimpleNamespace(
        _untyped_storage=SimpleNamespace(device=torch.device("cuda", device)),
        is_sparse=False,
        _weak_ref=torch.zeros(1)
        .untyped_storage()
        ._weak_ref,  # torch keeps a weak reference to shared storages
        _share_cuda_=lambda: (device, b"h" * 64, nbytes, 0, b"r", 0, b"e" * 64, True),
    )
    tensor = SimpleNamespace(
        requires_grad=False,
        is_leaf=True,
        is_nested=False,
        _backward_hooks=None,
        layout=torch.strided,
        dtype=torch.uint8,
        device=torch.device("cuda", device),
        _typed_storage=lambda: storage,
        untyped_storage=lambda: storage,
        storage_offset=lambda: 0,
        size=lambda: torch.Size([nbytes]),
        stride=lambda: (1,),
    )
    rebuild, arguments = reductions.reduce_tensor(tensor)
    return rebuild, tuple(torch.Tensor if value is SimpleNamespace else value for value in arguments)


class OnDevice:
    """An object that is pickled like a CUDA tensor."""

    def __init__(self, nbytes: int, device: int) -> None:
        self.nbytes, self.device = nbytes, device

    def __reduce__(self) -> Any:
        rebuild, arguments = cuda_reduction(self.nbytes, self.device)
        arguments = tuple(
            torch.storage.TypedStorage if value is SimpleNamespace else value for value in arguments
        )
        return rebuild, arguments


def test_sglang_unpickles_a_handle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's unpickler, which refuses unknown names, accepts a handle and rebuilds the rank's tensor."""
    from sglang.srt.utils.common import MultiprocessingSerializer, SafeUnpickler

    rebuilt: list[tuple[Any, ...]] = []

    def rebuild_cuda_tensor(*arguments: Any) -> torch.Tensor:
        rebuilt.append(arguments)
        return torch.zeros(8, dtype=torch.uint8)

    rebuild_cuda_tensor.__module__, rebuild_cuda_tensor.__qualname__ = (
        reductions.__name__,
        "rebuild_cuda_tensor",
    )
    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", rebuild_cuda_tensor)
    engine = engine_on(tmp_path, rank=3)
    handle = bytes(ForkingPickler.dumps([(json.dumps({"tensors": {}, "complete": []}), OnDevice(8, 3))]))
    for load in (MultiprocessingSerializer.deserialize, lambda data: SafeUnpickler(io.BytesIO(data)).load()):
        [(text, memory)] = load(handle)
        assert json.loads(text) == {"tensors": {}, "complete": []} and memory.numel() == 8
    assert len(rebuilt) == 2 and engine.device.index in rebuilt[0]


def test_a_rank_of_an_engine_on_cuda_leaves_its_environment_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    engine = engine_on(tmp_path)
    assert engine.process is not None
    environment = engine.process.environment
    assert all(folder in environment["LD_LIBRARY_PATH"].split(":") for folder in cuda_runtime_folders())
    assert "RANK" not in environment and "SGLANG_USE_CPU_ENGINE" not in environment
    assert environment["CUDA_VISIBLE_DEVICES"] == "0,1,2,3,4,5,6,7"


def test_the_ranks_of_an_engine_agree_on_each_token(tmp_path: Path) -> None:
    """SGLang's sampler reads SYNC_TOKEN_IDS_ACROSS_TP at import."""
    from sglang.srt.layers import sampler

    engine = engine_on(tmp_path)
    assert engine.process is not None
    assert engine.process.environment["SYNC_TOKEN_IDS_ACROSS_TP"] == "1"
    assert "SYNC_TOKEN_IDS_ACROSS_TP" in inspect.getsource(sampler)


def test_what_sleeps_has_a_name_in_sglang() -> None:
    from sglang.srt.constants import GPU_MEMORY_ALL_TYPES

    assert set(TAGS) <= set(GPU_MEMORY_ALL_TYPES)


def test_the_table_of_internals() -> None:
    assert changed("sglang") == []
