"""An engine of your own, without cache and batches. To register it: docs/extending.md, "An engine"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from megarl.config.schema import Config
from megarl.data.sample import TokenData
from megarl.parallel.runtime import Runtime
from megarl.rollout.engines.base import GenerationRequest, RolloutEngine
from megarl.rollout.sampling import SamplingParams, choose


class PlainEngine(RolloutEngine):
    """Decodes one response after the other on the CPU, each token from the whole text before it."""

    def __init__(self, folder: Path, eos_ids: Sequence[int]) -> None:
        self.folder, self.eos_ids = folder, set(eos_ids)
        self.requests: dict[int, tuple[GenerationRequest, SamplingParams]] = {}

    @classmethod
    def build(cls, config: Config, tokenizer: Any, runtime: Runtime) -> PlainEngine:
        return cls(config.model.path, [tokenizer.eos_token_id])

    def start(self) -> None:
        self.model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(self.folder)).eval()

    def parameters(self) -> dict[str, torch.Tensor]:  # the weight backend writes them
        return {name: parameter.data for name, parameter in self.model.named_parameters()}

    def end_update(self, version: int) -> None:
        self.weight_version = version

    def submit(self, requests: Mapping[int, GenerationRequest], params: SamplingParams) -> None:
        self.requests |= {key: (request, params) for key, request in requests.items()}

    @property
    def running(self) -> int:
        return len(self.requests)

    @torch.inference_mode()
    def poll(self, seconds: float) -> list[tuple[int, TokenData]]:
        key, (request, params) = self.requests.popitem()
        prefix, seed = request.prefix or TokenData(), torch.tensor([request.seed])
        tokens, logprobs = prefix.tokens.tolist(), prefix.logprobs.tolist()
        while len(tokens) < request.limit(params) and self.eos_ids.isdisjoint(tokens[-1:]):
            logits = self.model(torch.tensor([[*request.prompt_tokens, *tokens]])).logits[:, -1]
            token, logprob = choose(logits, seed, torch.tensor([len(tokens)]), params)
            tokens, logprobs = [*tokens, int(token)], [*logprobs, float(logprob)]
        return [(key, TokenData(tokens, logprobs, "stop" if tokens[-1] in self.eos_ids else "length"))]

    def abort(self) -> list[tuple[int, TokenData]]:
        aborted, self.requests = [(key, TokenData()) for key in self.requests], {}
        return aborted
