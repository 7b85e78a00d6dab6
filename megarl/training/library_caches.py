"""Memory that Megatron and Transformer Engine cache between passes, and that is freed with a model.

It would take the engine's place on the GPU. The next pass allocates it again."""

from __future__ import annotations

import sys
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer.transformer_block import TransformerBlock

# What a mixture's layers keep of the last pack: some 450 bytes a token and layer with 128 experts.
DISPATCHED = ("probs", "routing_map", "reversed_local_input_permutation_mapping")


def free_weight_caches(model: torch.nn.Module) -> None:
    """Free what is cached of a model's passes.

    Of Transformer Engine: FP8 copies of weights. Of Megatron: the last input of a pipeline stage, what a
    mixture's layers keep of the last pack, the rotary angles of the last 32 pack lengths, and the buffer of
    gathered inputs, which is as large as the largest pack."""
    for module in model.modules():
        getattr(module, "_fp8_workspaces", {}).clear()
        if isinstance(module, RotaryEmbedding):
            module.forward.cache_clear()
        if isinstance(module, TransformerBlock):
            module.set_input_tensor(None)
        dispatcher: Any = getattr(module, "token_dispatcher", None)
        for name in DISPATCHED if dispatcher is not None else ():
            setattr(dispatcher, name, None)
    if parallel_state.is_initialized():  # without groups nothing was gathered
        parallel_state.get_global_memory_buffer().buffer.clear()


def free_gradient_caches() -> None:
    """Free what Transformer Engine gives autograd instead of a weight's gradient, which is in the buffers
    already. It keeps one tensor for each shape of a weight."""
    layers = sys.modules.get("transformer_engine.pytorch.module.base")
    getattr(layers, "_dummy_wgrads", {}).clear()
