"""What megarl runs inside SGLang's own processes: a sampler in which each response has its own seed, and a loader of weight shards.

Imported there alone; it needs sglang. SGLang's own per-request seeds need its deterministic mode, which has no CPU kernels and gives
up the prefix cache.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from sglang.srt.layers.sampler import Sampler, register_sampler_backend
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor
from torch import Tensor

from megarl.rollout.engine import SamplingParams
from megarl.rollout.sampling import choose

BACKEND = "pytorch"  # SGLang insists on this name on a CPU
LOADER = "megarl.rollout.sglang_inside.load_shards"


class KeepParams(CustomLogitProcessor):
    """Never called. A request that names a processor keeps its `custom_params` in the batch, where the sampler finds them."""

    def __call__(self, logits: Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> Tensor:
        return logits


class SeededSampler(Sampler):
    """Draws as the transformers engine does (sampling.py): a token is a function of its logits, the response's seed and the position.

    `custom_params` of a request: seed, prompt (its length: tokens before the response), temperature, top_p, top_k."""

    def forward(self, logits_output: Any, sampling_info: Any, return_logprob: bool, *rest: Any, **options: Any) -> Tensor:
        rows = sampling_info.custom_params
        if not rows or any(row is None for row in rows):  # SGLang's own requests
            tokens: Tensor = super().forward(logits_output, sampling_info, return_logprob, *rest, **options)
            return tokens
        logits, positions = logits_output.next_token_logits, rest[2]
        numbers = torch.tensor([(row["seed"], row["prompt"]) for row in rows]).to(logits.device)
        seeds, index = numbers[:, 0], positions + 1 - numbers[:, 1]
        kinds: dict[SamplingParams, list[int]] = {}
        for i, row in enumerate(rows):
            kinds.setdefault(SamplingParams(0, row["temperature"], row["top_p"], row["top_k"]), []).append(i)
        if len(kinds) == 1:
            tokens, logprobs = choose(logits, seeds, index, next(iter(kinds)))
        else:
            tokens, logprobs = torch.empty_like(index), torch.empty(len(rows), dtype=torch.float32, device=logits.device)
            for params, members in kinds.items():
                tokens[members], logprobs[members] = choose(logits[members], seeds[members], index[members], params)
        logits_output.next_token_logprobs = logprobs
        self._sync_token_ids_across_tp(tokens, sampling_info)
        return tokens


def run_scheduler(*arguments: Any, **options: Any) -> None:
    """SGLang's scheduler process, with our sampler."""
    from sglang.srt.managers.scheduler import run_scheduler_process

    register_sampler_backend(BACKEND, SeededSampler)
    run_scheduler_process(*arguments, **options)


@torch.no_grad()
def load_shards(model: torch.nn.Module, named_tensors: list[tuple[str, Tensor]]) -> None:
    """A `custom_weight_loader`: each name is JSON that says where tensors of this rank lie in `size` bytes, those of the tensor that
    comes with it (CUDA) or, where that is empty, of the file `path`, which is memory of a rank of the job.

    `complete`: names that, with this part, have all been delivered. ValueError if they are not the model's, or a shape or dtype differs."""
    parameters = dict(model.named_parameters())
    for text, memory in named_tensors:
        part = json.loads(text)
        if not memory.numel():
            memory = torch.from_file(part["path"], shared=True, size=part["size"], dtype=torch.uint8)
        for name, (start, shape, dtype) in part["tensors"].items():
            kind = getattr(torch, dtype)
            source = memory[start : start + kind.itemsize * torch.Size(shape).numel()].view(kind).view(shape)
            target = _parameter(parameters, name)
            if target.shape != source.shape or target.dtype != kind:
                raise ValueError(f"{name}: SGLang has {list(target.shape)} {target.dtype}, megarl sent {shape} {kind}")
            target.copy_(source)
        complete = {_stem(name) for name in part["complete"]}
        if complete and complete != set(parameters):
            raise ValueError(f"parameters that megarl and SGLang do not share: {sorted(complete ^ set(parameters))}")


def _stem(name: str) -> str:
    """The parameter of which `name` is one, or one expert's part (`....w13_weight.7`)."""
    stem, _, expert = name.rpartition(".")
    return stem if expert.isdigit() else name


def _parameter(parameters: dict[str, torch.nn.Parameter], name: str) -> Tensor:
    stem = _stem(name)
    if stem not in parameters:
        raise ValueError(f"{name}: SGLang has no such parameter")
    data = parameters[stem].data
    return data if stem == name else data[int(name.rpartition(".")[2])]
