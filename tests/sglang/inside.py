"""Runs inside SGLang's processes, for tests: a "loader" that writes the model's parameters to a file."""

from __future__ import annotations

import sys
from typing import Any

import torch
from safetensors.torch import save_file


def dump(model: torch.nn.Module, named_tensors: list[tuple[str, Any]]) -> None:
    """Write every parameter of this rank to the file named by the first tensor's name and the rank."""
    from sglang.srt.runtime_context import get_parallel

    assert not sys.modules.get("megatron.core"), "its setting of the memory saver would end CUDA graphs"
    parameters = {name: p.data.to("cpu", copy=True).contiguous() for name, p in model.named_parameters()}
    save_file(parameters, named_tensors[0][0].format(rank=get_parallel().tp_rank))
