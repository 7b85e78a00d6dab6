"""Run inside SGLang's processes, for tests: a "loader" that writes what the model holds."""

from __future__ import annotations

import sys
from typing import Any

import torch
from safetensors.torch import save_file


def dump(model: torch.nn.Module, named_tensors: list[tuple[str, Any]]) -> None:
    """Every parameter of this rank into the file that the first name, with its rank put in, says."""
    from sglang.srt.runtime_context import get_parallel

    assert not sys.modules.get("megatron.core"), "its setting of the memory saver would end CUDA graphs"
    parameters = {name: p.data.to("cpu", copy=True).contiguous() for name, p in model.named_parameters()}
    save_file(parameters, named_tensors[0][0].format(rank=get_parallel().tp_rank))
