"""Runs inside SGLang's own processes: a sampler in which each response has its own seed, and a loader of weight shards.

Imported only there, since it needs sglang. SGLang's own per-request seeds need its deterministic mode, which has no CPU
kernels and gives up the prefix cache.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import torch
from sglang.srt.layers.sampler import Sampler, register_sampler_backend
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor
from torch import Tensor

from megarl.rollout.sampling import SamplingParams, choose

BACKEND = "pytorch"  # SGLang insists on this name on a CPU
LOADER = "megarl.rollout.sglang_inside.load_shards"


class KeepParams(CustomLogitProcessor):
    """Is never called: a request that names a processor keeps its `custom_params` in the batch for the sampler."""

    def __call__(self, logits: Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> Tensor:
        return logits


class Drawn(NamedTuple):
    """The sampling inputs of a batch, on the device.

    seeds, prompts  seeds and prompt lengths, int64 [rows]
    kinds           sampling parameters, each with the rows that have them, int64, or None for all rows
    """

    seeds: Tensor
    prompts: Tensor
    kinds: list[tuple[SamplingParams, Tensor | None]]


class SeededSampler(Sampler):
    """Draws as the transformers engine does (sampling.py): a token follows from its logits, the response's seed and position.

    `custom_params` of a request: seed, prompt (its length in tokens), temperature, top_p, top_k. A batch has the same list
    of them from token to token until a request joins, which makes it longer, or leaves, which makes a new one
    (SamplingBatchInfo): only then is anything copied to the device. The device is never waited for, so that SGLang prepares
    a step while the one before it runs."""

    _rows: Any = None
    _count = 0
    _own = False
    _drawn: Drawn

    def forward(
        self, logits_output: Any, sampling_info: Any, return_logprob: bool, *rest: Any, **options: Any
    ) -> Tensor:
        rows, logits = sampling_info.custom_params, logits_output.next_token_logits
        count = len(rows or ())
        if rows and (rows is not self._rows or count != self._count):
            self._rows, self._count = rows, count
            self._own = all(row is not None for row in rows)
            if self._own:
                self._drawn = _drawn(rows, logits.device)
        if not rows or not self._own:  # SGLang's own requests
            tokens: Tensor = super().forward(logits_output, sampling_info, return_logprob, *rest, **options)
            return tokens
        seeds, prompts, kinds = self._drawn
        index = rest[2] + 1 - prompts
        if len(kinds) == 1:
            tokens, logprobs = choose(logits, seeds, index, kinds[0][0])
        else:
            tokens, logprobs = (
                torch.empty_like(index),
                torch.empty(count, dtype=torch.float32, device=logits.device),
            )
            for params, members in kinds:
                tokens[members], logprobs[members] = choose(
                    logits[members], seeds[members], index[members], params
                )
        logits_output.next_token_logprobs = logprobs
        self._sync_token_ids_across_tp(tokens, sampling_info)
        return tokens


def _drawn(rows: list[dict[str, Any]], device: torch.device) -> Drawn:
    members: dict[SamplingParams, list[int]] = {}
    for i, row in enumerate(rows):
        members.setdefault(SamplingParams(0, row["temperature"], row["top_p"], row["top_k"]), []).append(i)

    def there(numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, pin_memory=device.type == "cuda").to(device, non_blocking=True)

    kinds = [(params, there(some) if len(members) > 1 else None) for params, some in members.items()]
    return Drawn(there([row["seed"] for row in rows]), there([row["prompt"] for row in rows]), kinds)


def run_scheduler(*arguments: Any, **options: Any) -> None:
    """Run SGLang's scheduler process with our sampler."""
    from sglang.srt.managers.scheduler import run_scheduler_process

    register_sampler_backend(BACKEND, SeededSampler)
    run_scheduler_process(*arguments, **options)


@torch.no_grad()
def load_shards(model: torch.nn.Module, named_tensors: list[tuple[str, Tensor]]) -> None:
    """Load a bucket of a weight transfer; SGLang calls it as a `custom_weight_loader`.

    Each name is JSON. `tensors`: where tensors of this rank lie in the memory, which is the tensor that comes with the name
    (CUDA) or, where that is empty, the file `path` of `size` bytes. `complete`: all names of the transfer, with its last
    bucket. Raises ValueError if they are not the model's, or a shape or dtype differs.

    When it returns, the device has read the memory: SGLang answers for all its ranks after a barrier of their processes,
    not of their devices, and then the memory is written again."""
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
                raise ValueError(
                    f"{name}: SGLang has {list(target.shape)} {target.dtype}, megarl sent {shape} {kind}"
                )
            target.copy_(source)
        complete = {_stem(name) for name in part["complete"]}
        if complete and complete != set(parameters):
            raise ValueError(
                f"parameters that megarl and SGLang do not share: {sorted(complete ^ set(parameters))}"
            )
        torch.get_device_module(memory.device).synchronize()


def _stem(name: str) -> str:
    """Return the parameter's name: `name` itself, or without its end where it is one expert's part (`....w13_weight.7`)."""
    stem, _, expert = name.rpartition(".")
    return stem if expert.isdigit() else name


def _parameter(parameters: dict[str, torch.nn.Parameter], name: str) -> Tensor:
    stem = _stem(name)
    if stem not in parameters:
        raise ValueError(f"{name}: SGLang has no such parameter")
    data = parameters[stem].data
    return data if stem == name else data[int(name.rpartition(".")[2])]
