"""SGLang on the trainer's GPU: start, transfer, generate, sleep, train, transfer, wake, generate."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from megarl.parallel.runtime import Runtime
from tests.gpu.scene import ENGINE, UPDATE, Scene, colocated, get_sizes

# These work on an H200 without FlashAttention's wheels (docs/gpu.md).
OPTIONS = {"attention_backend": "triton", "disable_cuda_graph": True}


@pytest.mark.skipif(find_spec("sglang") is None, reason="needs SGLang (docs/gpu.md)")
@pytest.mark.parametrize("weights_dtype", ["model", "fp8_block"])
def test_colocated(weights_dtype: str, runtime: Runtime, tmp_path: Path) -> None:
    rollout = {
        "engine": "sglang",
        "weights_dtype": weights_dtype,
        "engine_memory": 0.3,
        "engine_options": OPTIONS,
    }
    scene = Scene(
        runtime, tmp_path, get_sizes("Qwen2.5-7B", num_hidden_layers=2, vocab_size=16000), rollout=rollout
    )
    try:
        found = colocated(scene)
        scene.offload.onload("nothing", ())
        free = torch.cuda.mem_get_info()[0]
        scene.offload.onload("rollout", ENGINE)
        came_back = free - torch.cuda.mem_get_info()[0]
    finally:
        scene.engine.stop()
    assert found["present"] == [set(ENGINE), set(UPDATE)] * 2
    assert found["answers"][0] != found["answers"][1]
    for difference in found["differences"]:
        print(f"mean |difference of log-probs| {float(difference.mean()):.4f}")
        assert difference.mean() <= (0.05 if weights_dtype == "model" else 0.2)
    total = torch.cuda.get_device_properties(0).total_memory
    assert came_back > 0.2 * total, "the KV cache came back (it is smaller where the GPU is shared)"
