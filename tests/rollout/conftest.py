"""Tiny random models of every family, made once, and engines on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megarl.rollout.transformers_engine import TransformersEngine
from tests.engines import load_folder
from tests.tiny_models import make_tiny_model

FAMILIES = ["qwen2", "qwen3", "llama", "glm4"]
TINIEST = {"layers": 1, "hidden": 16, "heads": 2, "kv_heads": 1, "ffn": 16, "head_dim": 8}
EOS = 1


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def gather_by_runtime() -> Iterator[None]:
    """Ranks are threads, or there is one: what they exchange goes by way of the runtime that the test
    gives."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("sampler", "weight_sync"):
            name = f"megarl.rollout.{module}.gather_objects"
            patch.setattr(name, lambda runtime, value: runtime.gather(value))
        yield


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> dict[str, Path]:
    """qwen3 is tied with a head size of its own, llama has llama3's rope and equal numbers of heads; grouped:
    four queries for each key."""
    root = tmp_path_factory.mktemp("rollout-models")
    return {
        "qwen2": make_tiny_model(root / "qwen2", "qwen2"),
        "qwen3": make_tiny_model(root / "qwen3", "qwen3", tied=True, head_dim=16),
        "llama": make_tiny_model(root / "llama", "llama", kv_heads=4, rope="llama3"),
        "glm4": make_tiny_model(root / "glm4", "glm4", head_dim=12),
        "grouped": make_tiny_model(root / "grouped", "qwen3", heads=8, kv_heads=2, head_dim=32),
    }


@pytest.fixture(scope="session")
def make_engine(folders) -> Callable[..., TransformersEngine]:
    def make(family: str = "qwen3", **options) -> TransformersEngine:
        tokenizer = AutoTokenizer.from_pretrained(folders[family])
        engine = TransformersEngine(folders[family], **{"eos_ids": [EOS], "tokenizer": tokenizer, **options})
        engine.start()
        load_folder(engine, version=7)
        return engine

    return make


@pytest.fixture(scope="session")
def reference(folders) -> Callable[[str], torch.nn.Module]:
    """The same weights in plain transformers, with its own attention."""
    return lambda family: AutoModelForCausalLM.from_pretrained(
        folders[family], dtype=torch.float32, attn_implementation="eager"
    ).eval()
