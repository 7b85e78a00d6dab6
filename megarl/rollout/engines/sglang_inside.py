"""Code in SGLang's processes: a sampler with seeds per response, and a weight loader.

SGLang's own seeds need its deterministic mode, which has no CPU kernels and no prefix cache."""

from __future__ import annotations

import json
from typing import Any

import torch
from sglang.srt.layers.sampler import Sampler, register_sampler_backend
from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor
from torch import Tensor

from megarl.rollout.engines.sglang_kernels import add_shared_expert, forward_gated_norm
from megarl.rollout.sampling import SamplingParams, choose, choose_with_set

BACKEND = "pytorch"  # required on a CPU
# Scales of the KV cache, parameters with FP8 weights (radix_attention.py, quantization/kv_cache.py, 0.5.23).
# They are always 1 here, and a sleep loses them.
KV_SCALES = (".attn.k_scale", ".attn.v_scale")


class KeepParams(DisallowedTokensLogitsProcessor):
    """Never called. SGLang keeps `custom_params` only for requests with a logit processor.

    With this base class SGLang also returns sampling masks (supports_sampling_mask)."""

    def __call__(self, logits: Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> Tensor:
        return logits


class SeededRows:
    """Samples by sampling.py for the requests of a batch.

    `custom_params` of a request: seed, prompt (its length in tokens), temperature, top_p, top_k, and
    sampling_sets (equal to the request's return_sampling_mask). SGLang extends a batch's list of them, and
    replaces it when a request ends (SamplingBatchInfo). Only then are they copied to the device."""

    _rows: Any = None
    _count = 0
    _all_have_params = False
    _seeds: Tensor  # int64 [rows], on the device
    _prompts: Tensor  # lengths, int64 [rows]
    _rows_by_params: list[tuple[SamplingParams, Tensor | None]]  # None: all rows

    def choose(
        self, rows: Any, logits: Tensor, positions: Tensor, width: int = 1
    ) -> tuple[Tensor, Tensor, Tensor | None] | None:
        """Sample the token after each position; None if a request has no params.

        Args:
            rows: `custom_params` of the requests
            logits: [requests * width, vocab]; positions: int64 [requests * width], of the preceding tokens
            width: positions of a request

        Returns tokens int64 and log-probs float32, [requests * width] each; and sampling sets, int32
        [requests * width, k], ids, then -1, or None if no request wants them."""
        count = len(rows or ())
        if rows and (rows is not self._rows or count != self._count):
            self._rows, self._count = rows, count
            self._all_have_params = all(row is not None for row in rows)
            if self._all_have_params:
                self._copy(rows, logits.device)
        if not rows or not self._all_have_params:  # SGLang's own requests
            return None
        seeds, prompts = self._seeds, self._prompts
        if width > 1:
            seeds, prompts = seeds.repeat_interleave(width), prompts.repeat_interleave(width)
        index = positions + 1 - prompts
        widest = max((params.top_k for params, _ in self._rows_by_params if params.sampling_sets), default=0)
        sets = None
        if widest:
            sets = torch.full((len(index), widest), -1, dtype=torch.int32, device=logits.device)
        tokens = torch.empty_like(index)
        logprobs = torch.empty(len(index), dtype=torch.float32, device=logits.device)
        for params, indices in self._rows_by_params:
            if indices is not None and width > 1:
                offsets = torch.arange(width, device=indices.device)
                indices = (indices[:, None] * width + offsets).flatten()
            chosen = slice(None) if indices is None else indices
            inputs = logits[chosen], seeds[chosen], index[chosen], params
            if sets is not None and params.sampling_sets:
                tokens[chosen], logprobs[chosen], found = choose_with_set(*inputs)
                sets[chosen, : found.shape[1]] = found
            else:
                tokens[chosen], logprobs[chosen] = choose(*inputs)
        return tokens, logprobs, sets

    def _copy(self, rows: list[dict[str, Any]], device: torch.device) -> None:

        def copy_to_device(numbers: list[int]) -> Tensor:
            return torch.tensor(numbers, pin_memory=device.type == "cuda").to(device, non_blocking=True)

        indices_by_params: dict[SamplingParams, list[int]] = {}
        for i, row in enumerate(rows):
            indices_by_params.setdefault(
                SamplingParams(
                    *(0, row["temperature"], row["top_p"], row["top_k"]),
                    sampling_sets=row.get("sampling_sets", False),
                ),
                [],
            ).append(i)
        self._rows_by_params = [
            (params, copy_to_device(indices) if len(indices_by_params) > 1 else None)
            for params, indices in indices_by_params.items()
        ]
        self._seeds = copy_to_device([row["seed"] for row in rows])
        self._prompts = copy_to_device([row["prompt"] for row in rows])


class SeededSampler(SeededRows, Sampler):
    """SGLang's sampler, for a token per request."""

    def forward(
        self, logits_output: Any, sampling_info: Any, return_logprob: bool, *rest: Any, **options: Any
    ) -> Tensor:
        chosen = self.choose(sampling_info.custom_params, logits_output.next_token_logits, rest[2])
        if chosen is None:
            tokens: Tensor = super().forward(logits_output, sampling_info, return_logprob, *rest, **options)
            return tokens
        tokens, logprobs, sets = chosen
        logits_output.next_token_logprobs = logprobs
        if sets is not None:
            wanted = sampling_info.sampling_mask_batch_indices
            logits_output.sampling_mask_output = _make_mask_output(sets[wanted], logprobs[wanted])
        self._sync_token_ids_across_tp(tokens, sampling_info)
        return tokens


def _make_mask_output(sets: Tensor, logprobs: Tensor) -> Any:
    """Return sampling sets as SGLang's SamplingMaskOutput. sets: int32 [rows, k], ids, then -1"""
    from sglang.srt.layers.logits_processor import SamplingMaskOutput, SamplingMaskStatus

    lengths = (sets >= 0).sum(-1, dtype=torch.int32)
    statuses = torch.full_like(lengths, int(SamplingMaskStatus.OK))
    return SamplingMaskOutput(sets, lengths, logprobs, None, statuses)


def run_scheduler(*arguments: Any, **options: Any) -> None:
    """Run SGLang's scheduler with our sampler, on a CPU with our kernels."""
    from sglang.srt.managers.scheduler import run_scheduler_process

    register_sampler_backend(BACKEND, SeededSampler)
    if not torch.cuda.is_available():
        _prepare_cpu()
    if arguments[0].speculative_algorithm:
        from megarl.rollout.engines import sglang_draft

        sglang_draft.install()
    run_scheduler_process(*arguments, **options)


def _prepare_cpu() -> None:
    """Replace code that does not run on a CPU.

    Torch-native attention reads the cache, which has only latents, so multi-latent prompts use them, too.
    Linear attention's norm and shared expert's gate are Triton kernels."""
    from sglang.srt.models import qwen2_moe, qwen3_next
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod
    from sglang.srt.models.qwen3_5 import RMSNormGated

    AttentionBackendRegistry.register("torch_native", lambda attention, batch: AttnForwardMethod.MLA)
    RMSNormGated.forward = qwen3_next.FusedRMSNormGated.forward = forward_gated_norm
    qwen2_moe.fused_gate_sigmoid_mul_add = add_shared_expert


@torch.no_grad()
def load_shards(model: torch.nn.Module, named_tensors: list[tuple[str, Tensor]]) -> None:
    """Load a bucket of a weight transfer, as SGLang's `custom_weight_loader`.

    named_tensors: pairs of JSON and a buffer. Keys of the JSON: `tensors` (name -> offset, shape, dtype),
    `path` and `size` (of a file in place of an empty buffer), `complete` (in the last bucket, all names).
    Raises ValueError unless names, shapes and dtypes fit.

    Synchronises the device, as the sender reuses the buffer after a barrier that ignores the GPU."""
    parameters = dict(model.named_parameters())
    for text, buffer in named_tensors:
        bucket = json.loads(text)
        if not buffer.numel():
            buffer = torch.from_file(bucket["path"], shared=True, size=bucket["size"], dtype=torch.uint8)
        for name, (start, shape, dtype_name) in bucket["tensors"].items():
            dtype = getattr(torch, dtype_name)
            source = (
                buffer[start : start + dtype.itemsize * torch.Size(shape).numel()].view(dtype).view(shape)
            )
            stem, expert = _split(name)
            if stem not in parameters:
                raise ValueError(f"{name}: SGLang has no such parameter")
            target = parameters[stem].data if expert is None else parameters[stem].data[expert]
            if target.shape != source.shape or target.dtype != dtype:
                target_format = f"{list(target.shape)} {target.dtype}"
                raise ValueError(f"{name}: SGLang has {target_format}, megarl sent {shape} {dtype}")
            target.copy_(source)
        all_names = {_split(name)[0] for name in bucket["complete"]}
        if all_names:
            kv_scales = {name for name in parameters if name.endswith(KV_SCALES)} - all_names
            if all_names != set(parameters) - kv_scales:
                differing_names = sorted(all_names ^ (set(parameters) - kv_scales))
                raise ValueError(f"parameters that megarl and SGLang do not share: {differing_names}")
            for name in kv_scales:
                parameters[name].data.fill_(1.0)
            if finish := getattr(model, "post_load_weights", None):
                finish()  # multi-latent attention also has kv_b_proj in parts
            for module in model.modules():
                if refresh := getattr(module, "refresh_gemma_weight", None):
                    refresh()  # fused kernels read 1 + weight
        torch.get_device_module(buffer.device).synchronize()


def _split(name: str) -> tuple[str, int | None]:
    """Split off the expert, if any (`....w13_weight.7`)."""
    stem, _, expert = name.rpartition(".")
    return (stem, int(expert)) if expert.isdigit() else (name, None)
