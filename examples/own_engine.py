"""An engine of your own, without cache and batches. To register it: docs/extending.md, "An engine"."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch

from megarl.config.errors import EngineError
from megarl.data.sample import TokenData
from megarl.rollout.engines.base import GenerationRequest
from megarl.rollout.engines.transformers_engine import TransformersEngine
from megarl.rollout.sampling import SamplingParams, choose


class PlainEngine(TransformersEngine):
    """Decodes one response after the other, each token from the whole text before it."""

    def start(self) -> None:
        super().start()
        self._asked: dict[int, tuple[GenerationRequest, SamplingParams]] = {}

    def submit(self, requests: Mapping[int, GenerationRequest], params: SamplingParams) -> None:
        if params.stop:
            raise EngineError("rollout.stop: the plain engine knows no stop texts (leave them out)")
        self._check(requests.values(), params)
        self._asked |= {key: (request, params) for key, request in requests.items()}

    @property
    def running(self) -> int:
        return len(self._asked)

    def poll(self, seconds: float) -> list[tuple[int, TokenData]]:
        ended, end = [], time.monotonic() + seconds
        while self._asked and not (ended and time.monotonic() >= end):
            key = next(iter(self._asked))
            ended.append((key, self._decode(*self._asked.pop(key))))
        return ended

    def abort(self) -> list[tuple[int, TokenData]]:
        forgotten = [(key, TokenData()) for key in self._asked]
        self._asked.clear()
        return forgotten

    @torch.inference_mode()
    def _decode(self, request: GenerationRequest, params: SamplingParams) -> TokenData:
        tokens, logprobs, reason = list[int](), list[float](), "length"
        seed = torch.tensor([request.seed], device=self.device)
        while len(tokens) < request.limit(params):
            context = torch.tensor([[*request.prompt_tokens, *tokens]], device=self.device)
            logits = self._model(context, use_cache=False).logits[:, -1]
            token, logprob = choose(logits, seed, torch.full_like(seed, len(tokens)), params)
            tokens.append(int(token))
            logprobs.append(float(logprob))
            if tokens[-1] in self.eos_ids:
                reason = "stop"
                break
        return TokenData(tokens, logprobs, reason, [self.weight_version] * len(tokens))
