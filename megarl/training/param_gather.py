"""The all-gather of updated weights, overlapped with the forward pass of the next update."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from megatron.core.distributed import DistributedDataParallel


class ParamGather:
    """Decides which forward pass gathers a model's weights (`parallel.overlap_param_gather`).

    `TrainableModel` owns it. Megatron's hooks gather in any forward pass while they are enabled: only from
    one
    update to the end of the decoder in the next."""

    def __init__(self, chunks: Sequence[DistributedDataParallel]) -> None:
        self.chunks = chunks
        self.pending = set[Any]()  # chunks whose weights the next update gathers
        for chunk in chunks:
            chunk.disable_forward_pre_hook(param_sync=False)
            chunk.module.decoder.register_forward_hook(partial(self._finish, chunk))

    def before_update(self) -> None:
        for chunk in self.pending:
            chunk.enable_forward_pre_hook()

    def after_step(self, *, more: bool) -> None:
        """Gather the weights now, or with `more` in the update that follows directly."""
        if more:
            self.pending = set(self.chunks)
            return
        for chunk in self.chunks:
            chunk.start_param_sync(force_sync=True)

    def _finish(self, chunk: Any, *_: Any) -> None:
        """Wait for a chunk's weights at the end of its decoder, and disable Megatron's hooks.

        The hooks wait for each module that is called, but the actor's head reads the output layer's weights
        without a call."""
        if chunk in self.pending:
            for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
                group.finish_param_sync(skip_next_bucket_dispatch=True)
            chunk.disable_forward_pre_hook(param_sync=False)
            self.pending.remove(chunk)
