"""An engine of your own, without cache and batches. To register it: docs/extending.md, "An engine"."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch

from megarl.config.errors import EngineError
from megarl.rollout.engines.transformers_engine import TransformersEngine
from megarl.rollout.sampling import Completion, Request, SamplingParams, choose


class PlainEngine(TransformersEngine):
    """Decodes one response after the other, each token from the whole text before it."""

    def start(self) -> None:
        super().start()
        self._asked: dict[int, tuple[Request, SamplingParams]] = {}

    def submit(self, requests: Mapping[int, Request], params: SamplingParams) -> None:
        if params.stop:
            raise EngineError("rollout.stop: the plain engine knows no stop texts (leave them out)")
        self._check(requests.values(), params)
        self._asked |= {key: (request, params) for key, request in requests.items()}

    @property
    def running(self) -> int:
        return len(self._asked)

    def poll(self, seconds: float) -> list[tuple[int, Completion]]:
        ended, end = [], time.monotonic() + seconds
        while self._asked and not (ended and time.monotonic() >= end):
            key = next(iter(self._asked))
            ended.append((key, self._decode(*self._asked.pop(key))))
        return ended

    def abort(self) -> list[tuple[int, Completion]]:
        forgotten = [(key, Completion()) for key in self._asked]
        self._asked.clear()
        return forgotten

    @torch.inference_mode()
    def _decode(self, request: Request, params: SamplingParams) -> Completion:
        made = Completion(finish="length")
        seed = torch.tensor([request.seed], device=self.device)
        while len(made.tokens) < request.limit(params):
            text = torch.tensor([[*request.prompt, *made.tokens]], device=self.device)
            logits = self._model(text, use_cache=False).logits[:, -1]
            token, logprob = choose(logits, seed, torch.full_like(seed, len(made.tokens)), params)
            made.tokens.append(int(token))
            made.logprobs.append(float(logprob))
            if made.tokens[-1] in self.eos_ids:
                made.finish = "stop"
                break
        made.versions = [self.weight_version] * len(made.tokens)
        return made
