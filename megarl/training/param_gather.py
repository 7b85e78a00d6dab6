"""Overlap the all-gather of updated weights with the next update's forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from megatron.core.distributed import DistributedDataParallel


class ParamGather:
    """Decides which forward pass gathers a model's weights (`parallel.overlap_param_gather`).

    Megatron's hooks would gather in any forward pass, so they are enabled only in an update's first one."""

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

        They wait only for modules that are called; the actor's head reads its weights without a call."""
        if chunk in self.pending:
            for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
                group.finish_param_sync(skip_next_bucket_dispatch=True)
            chunk.disable_forward_pre_hook(param_sync=False)
            self.pending.remove(chunk)
