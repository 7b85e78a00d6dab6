"""Verify drafts in SGLang's scheduler with megarl's sampler. Written against 0.5.23.

SGLang's own verification knows no seeds of responses, and on a CPU it verifies greedily. Here each
token of a draft's chain is sampled from the target's logits, by the response's seed and the token's position.
A draft is accepted as long as it equals these tokens, so it changes no token, only the time. The target's
probability of a proposed token is also the rate at which rejection sampling accepts a draft that proposes one
token (Leviathan et al. 2023, arXiv:2211.17192)."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from megarl.rollout.engines.sglang_inside import SeededRows

LOGPROBS = "seeded_logprobs"  # attribute of SGLang's LogitsProcessorOutput: of each token of the chains


def install() -> None:
    """Replace SGLang's verification of drafts, and on a CPU the parts that it lacks there."""
    from sglang.srt.speculative import eagle_worker_common as worker

    worker.eagle_sample = SeededVerification(worker.eagle_sample)
    worker.compute_spec_logprobs = SeededLogprobs(worker.compute_spec_logprobs)
    if not torch.cuda.is_available():
        _install_cpu_attention()


class SeededVerification:
    """Replaces `eagle_sample`. own: SGLang's, for requests without seeds, which are its health checks"""

    def __init__(self, own: Any) -> None:
        self.own, self.rows = own, SeededRows()

    def __call__(
        self, verify_input: Any, batch: Any, logits_output: Any, *rest: Any, **options: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens by row of the logits, the number of new tokens, and rows of the accepted ones.

        Shapes: int32 [requests * width], [requests] and [requests, depth], -1 after the last one."""
        from sglang.srt.speculative.eagle_utils import verify_tree_greedy_func

        chosen, width = None, verify_input.draft_token_num
        if not batch.forward_mode.is_idle():
            logits, rows = logits_output.next_token_logits, batch.sampling_info.custom_params
            chosen = self.rows.choose(rows, logits, verify_input.positions, width)
        if chosen is None:
            result: tuple[Tensor, Tensor, Tensor] = self.own(
                verify_input, batch, logits_output, *rest, **options
            )
            return result
        tokens, logprobs, _ = chosen  # no sampling sets: config/check.py refuses them
        requests, device = len(batch.seq_lens), tokens.device
        predict = torch.zeros(tokens.shape, dtype=torch.int32, device=device)
        accepted = torch.full((requests, verify_input.max_tree_depth), -1, dtype=torch.int32, device=device)
        num_accepted = torch.empty(requests, dtype=torch.int32, device=device)
        verify_tree_greedy_func(
            predicts=predict,
            accept_index=accepted,
            accept_token_num=num_accepted,
            candidates=verify_input.draft_token.view(requests, width),
            retrieve_index=verify_input.retrieve_index,
            retrieve_next_token=verify_input.retrieve_next_token,
            retrieve_next_sibling=verify_input.retrieve_next_sibling,
            target_predict=tokens.view(requests, width),
            topk=verify_input.tree_topk,
        )
        _broadcast(predict, accepted, num_accepted)
        setattr(logits_output, LOGPROBS, logprobs)
        return predict, num_accepted + 1, accepted


def _broadcast(*tensors: Tensor) -> None:
    """Give all ranks the first one's results, as SGLang does: ranks that differ would deadlock."""
    from sglang.srt.runtime_context import get_parallel

    group = get_parallel().tp_group
    if group.world_size > 1:
        for tensor in tensors:
            group.broadcast(tensor, src=0)


class SeededLogprobs:
    """Replaces `compute_spec_logprobs`, which knows no temperatures of responses."""

    def __init__(self, own: Any) -> None:
        self.own = own

    def __call__(self, batch: Any, logits_output: Any, predict: Tensor, **options: Any) -> None:
        logprobs = getattr(logits_output, LOGPROBS, None)
        if logprobs is None:
            self.own(batch, logits_output, predict, **options)
            return
        logits_output.next_token_logprobs = logprobs[options["accept_index"].long()]


def _install_cpu_attention() -> None:
    """Let torch-native attention verify chains and run a draft's steps: SGLang has that for AMX only."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

    class ChainAttention(TorchNativeAttnBackend):
        """step: of a draft's forward passes, from 0; None: of the target or a draft's prefill"""

        step: int | None = None
        prefill_attention_backend_str = decode_attention_backend_str = "torch_native"

        def forward_extend(
            self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, *rest: Any, **options: Any
        ) -> Tensor:
            if forward_batch.forward_mode.is_target_verify():
                forward_batch = widen(forward_batch)
            out: Tensor = super().forward_extend(q, k, v, layer, forward_batch, *rest, **options)
            return out

        def forward_decode(
            self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, *rest: Any, **options: Any
        ) -> Tensor:
            if self.step is not None:
                forward_batch = copy.copy(forward_batch)
                forward_batch.seq_lens = forward_batch.seq_lens + self.step + 1
            out: Tensor = super().forward_decode(q, k, v, layer, forward_batch, *rest, **options)
            return out

    def widen(forward_batch: Any) -> Any:
        """Return the batch with the lengths of a prefill: the chain's tokens follow the cached ones."""
        width, wide = forward_batch.spec_info.draft_token_num, copy.copy(forward_batch)
        wide.extend_prefix_lens = forward_batch.seq_lens
        wide.extend_seq_lens = torch.full_like(forward_batch.seq_lens, width)
        wide.seq_lens = forward_batch.seq_lens + width
        return wide

    class Steps:
        """A backend for each of a draft's forward passes but the last, which only samples."""

        def __init__(self, runner: Any, steps: int) -> None:
            self.attn_backends = [ChainAttention(runner) for _ in range(steps - 1)]
            for step, backend in enumerate(self.attn_backends):
                backend.step = step

        def init_forward_metadata(self, forward_batch: Any) -> None:
            for backend in self.attn_backends:
                backend.init_forward_metadata(forward_batch)

    def create_decode_backend(factory: Any) -> Any:
        steps = factory.speculative_num_steps
        return Steps(factory.draft_model_runner, steps) if steps > 1 else None

    ATTENTION_BACKENDS["torch_native"] = ChainAttention
    DraftBackendFactory.create_decode_backend = create_decode_backend
    DraftBackendFactory.create_draft_extend_backend = lambda factory: ChainAttention(
        factory.draft_model_runner
    )
