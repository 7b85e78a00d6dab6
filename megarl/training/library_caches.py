"""Free memory that Megatron and Transformer Engine cache between passes."""

from __future__ import annotations

import sys
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer.transformer_block import TransformerBlock

# Attributes of a mixture's token dispatcher: some 450 bytes per token and layer with 128 experts.
DISPATCHED = ("probs", "routing_map", "reversed_local_input_permutation_mapping")


def free_weight_caches(model: torch.nn.Module) -> None:
    """Free FP8 copies of weights, last inputs and routing, rotary angles and gathered inputs."""
    for module in model.modules():
        getattr(module, "_fp8_workspaces", {}).clear()
        if isinstance(module, RotaryEmbedding):
            module.forward.cache_clear()
        if isinstance(module, TransformerBlock):
            module.set_input_tensor(None)
        dispatcher: Any = getattr(module, "token_dispatcher", None)
        for name in DISPATCHED if dispatcher is not None else ():
            setattr(dispatcher, name, None)
    if parallel_state.is_initialized():
        parallel_state.get_global_memory_buffer().buffer.clear()


def free_gradient_caches() -> None:
    """Free Transformer Engine's placeholder gradients, one tensor per weight shape."""
    layers = sys.modules.get("transformer_engine.pytorch.module.base")
    getattr(layers, "_dummy_wgrads", {}).clear()
