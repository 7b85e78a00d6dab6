"""Patch torch.cuda so that it answers all queries like a node of 8 H100, without a GPU.

It tests decisions that are made before a kernel runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

FREE, TOTAL = 84_000_000_000, 85_000_000_000
H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    total_memory=TOTAL,
    multi_processor_count=132,
    major=9,
    minor=0,
    is_integrated=0,
    uuid="GPU-0",
    gcnArchName="",
    warp_size=32,
    L2_cache_size=50 << 20,
    shared_memory_per_block_optin=227 << 10,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
)


def pretend(patch: pytest.MonkeyPatch, devices: int = 8, version: str = "13.0") -> list[tuple[Any, ...]]:
    """Patch torch.cuda until `patch` is undone.

    Returns: a list that records as (name, *arguments) the calls that would act on a device"""
    calls: list[tuple[Any, ...]] = []
    answers = {
        "is_available": True,
        "is_initialized": True,
        "is_bf16_supported": True,
        "device_count": devices,
        "current_device": 0,
        "get_device_capability": (9, 0),
        "get_device_properties": H100,
        "get_device_name": H100.name,
        "mem_get_info": (FREE, TOTAL),
        "max_memory_allocated": 3 << 30,
        "max_memory_reserved": 5 << 30,
        "memory_allocated": 2 << 30,
        "get_rng_state": torch.arange(16, dtype=torch.uint8),
    }
    for name, answer in answers.items():
        patch.setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    for name in ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats", "set_rng_state"):
        patch.setattr(torch.cuda, name, lambda *arguments, name=name, **_: calls.append((name, *arguments)))
    patch.setattr(torch.version, "cuda", version)
    patch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 7))
    return calls
