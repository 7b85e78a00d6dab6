"""The rollout engine on Hugging Face transformers: the default on a CPU, and the yardstick for the others. Its weights are written by a
weight transfer into `parameters()`; decode.py holds the loop.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from megarl.config.errors import CheckpointError, EngineError
from megarl.rollout.decode import DecodeLoop, Model, Stopping
from megarl.rollout.engine import TAGS, Completion, Request, SamplingParams
from megarl.rollout.kv_cache import ATTENTION, attention
from megarl.weights.plan import Plan
from megarl.weights.transfer import Staging

AttentionInterface.register(ATTENTION, attention)


class TransformersEngine:
    """A RolloutEngine in this process, on one device.

    folder: Hugging Face folder, of which `start` reads only config.json; max_batch: responses decoded at once; eos_ids: tokens that
    end a response; tokenizer: needed for stop texts only."""

    streams = False

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        max_batch: int = 256,
        eos_ids: Sequence[int] = (),
        tokenizer: Any = None,
    ) -> None:
        self.folder, self.dtype, self.device = Path(folder), dtype, torch.device(device)
        self.max_batch, self.eos_ids, self.tokenizer = max_batch, tuple(eos_ids), tokenizer
        self.weight_version = -1
        self._model: Any = None
        self._ready = False  # whether the weights are defined
        self._asleep = False
        self._aborted = threading.Event()
        self._submitted: list[tuple[dict[int, Request], SamplingParams]] = []
        self._stopping: dict[tuple[str, ...], Stopping] = {}

    def start(self) -> None:
        """Allocates the model with undefined weights. Raises CheckpointError for a folder that is not one of a usable causal model."""
        try:
            config = AutoConfig.from_pretrained(self.folder, local_files_only=True, trust_remote_code=False)
            # On the meta device first: no time is spent on initial values that a weight transfer will replace.
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config, dtype=self.dtype, attn_implementation=ATTENTION, trust_remote_code=False)
        except (OSError, ValueError, KeyError) as error:
            line = str(error).strip().splitlines()[0]
            raise CheckpointError(f"{self.folder}: not the folder of a causal language model: {line} (check config.json)") from error
        if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
            raise CheckpointError(f"{self.folder}/config.json: sliding-window attention is not supported (set use_sliding_window to false)")
        model.to_empty(device=self.device)
        model.tie_weights()  # to_empty gives tied weights a storage each
        self._renew_rotary(model, config)
        self._model = model.eval().requires_grad_(False)
        self._ready = self._asleep = False
        self.weight_version = -1

    def _renew_rotary(self, model: Any, config: Any) -> None:
        """The rotary frequencies are buffers outside the checkpoint, which to_empty left undefined."""
        body = model.get_decoder()
        body.rotary_emb = type(body.rotary_emb)(config=config).to(self.device)
        others = [name for name, _ in model.named_buffers() if "rotary_emb" not in name]
        if others:
            raise CheckpointError(
                f"{self.folder}: the model has buffers that nothing defines: {', '.join(others)} (use another model family)"
            )

    def parameters(self) -> dict[str, Tensor]:
        """The weights by their Hugging Face names; of tied weights only the embedding. Writing them is for between begin_update and
        end_update. Raises EngineError before `start` and while asleep."""
        if self._model is None or self._asleep:
            raise EngineError(
                f"rollout engine: it has no weights to write, because it is {'asleep (call wake)' if self._asleep else 'not started'}"
            )
        return {name: p.data for name, p in self._model.named_parameters()}

    def buckets(self, plan: Plan, memory: Staging) -> list[tuple[Plan, dict[str, Tensor]]]:
        """One: the engine's own tensors are written in place."""
        return [(plan, self.parameters())]

    def handle(self, bucket: int) -> None:
        return None

    def begin_update(self) -> None:
        self._ready = False

    def deliver(self, bucket: int, handles: Sequence[None], version: int) -> None:
        """Nothing: it is where it belongs."""

    def end_update(self, version: int) -> None:
        """No cache survives a `generate` call, so there is none to drop."""
        self.parameters()  # raises where there are none
        self._ready = True
        self.weight_version = version

    @torch.no_grad()
    def load_folder(self, version: int = 0) -> None:
        """A weight update from the folder's safetensors, for use without a trainer. Raises CheckpointError where a tensor is missing or
        has another shape."""
        self.begin_update()
        missing = self.parameters()
        for path in sorted(self.folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (not a dict)
                    if name not in missing:
                        continue  # the second name of a tied weight
                    target, tensor = missing.pop(name), file.get_tensor(name)
                    if target.shape != tensor.shape:
                        raise CheckpointError(f"{path}: {name} is {list(tensor.shape)}, config.json says {list(target.shape)}")
                    target.copy_(tensor)
        if missing:
            raise CheckpointError(f"{self.folder}: {len(missing)} tensors are in no *.safetensors file, the first is {next(iter(missing))}")
        self.end_update(version)

    @torch.inference_mode()
    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Completion]:
        """One completion per request, in their order. Raises EngineError without valid weights, for a request that does not fit the
        model, and for NaN logits. A stop text stays in the response, up to the end of the token that completed it."""
        if not self._ready:
            state = (
                "not started"
                if self._model is None
                else "asleep"
                if self._asleep
                else "without weights: an update must follow start and wake"
            )
            raise EngineError(f"rollout engine: generate was called while it is {state}")
        self._aborted.clear()
        if not requests:
            return []
        self._check(requests, params)
        config = self._model.config
        heads = config.num_attention_heads
        model = Model(
            body=self._model.get_decoder(),
            head=self._model.get_output_embeddings(),
            layers=config.num_hidden_layers,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            dtype=self.dtype,
            device=self.device,
            version=self.weight_version,
        )
        return DecodeLoop(model, requests, params, self.max_batch, self._stopping_for(params.stop), self._aborted.is_set).run()

    def submit(self, requests: Mapping[int, Request], params: SamplingParams) -> None:
        """Keeps them for the next `poll`, which decodes all of them as one batch."""
        self._submitted.append((dict(requests), params))

    def poll(self, seconds: float) -> list[tuple[int, Completion]]:
        """All that was submitted, whatever `seconds`."""
        ended = []
        while self._submitted:
            requests, params = self._submitted.pop(0)
            ended += list(zip(requests, self.generate(list(requests.values()), params), strict=True))
        return ended

    @property
    def running(self) -> int:
        return sum(len(requests) for requests, _ in self._submitted)

    def _check(self, requests: Sequence[Request], params: SamplingParams) -> None:
        positions, vocab = self._model.config.max_position_embeddings, self._model.config.vocab_size
        prompts = dict.fromkeys(r.prompt for r in requests)
        longest = max(map(len, prompts))
        if params.max_tokens < 1 or longest + params.max_tokens > positions:
            raise EngineError(
                f"rollout: a prompt of {longest} tokens and {params.max_tokens} response tokens do not fit "
                f"the model's {positions} positions (lower rollout.max_response_tokens or data.max_prompt_tokens)"
            )
        for i, prompt in enumerate(prompts):
            if not prompt or min(prompt) < 0 or max(prompt) >= vocab:
                raise EngineError(f"rollout: prompt {i} is empty or has a token id outside the model's vocabulary of {vocab}")

    def _stopping_for(self, texts: tuple[str, ...]) -> Stopping:
        """Built once per set of stop texts: looking at every token of the vocabulary takes about a second at 150,000."""
        if texts in self._stopping:
            return self._stopping[texts]
        vocab = self._model.config.vocab_size
        eos = torch.zeros(vocab, dtype=torch.bool)
        eos[[i for i in self.eos_ids if i < vocab]] = True
        if not texts:
            made = Stopping(eos.to(self.device))
        else:
            if self.tokenizer is None:
                raise EngineError("rollout.stop: stop texts need a tokenizer, and the engine was made without one")
            candidates = torch.ones(vocab, dtype=torch.bool)
            known = min(vocab, len(self.tokenizer))
            last = {text[-1] for text in texts}
            # A token of part of a character decodes to U+FFFD; a lone space may be stripped: these are always looked at.
            pieces = self.tokenizer.batch_decode([[i] for i in range(known)], skip_special_tokens=True)
            candidates[:known] = torch.tensor([" " in last or "\ufffd" in p or not last.isdisjoint(p) for p in pieces])
            window = max(len(text.encode()) for text in texts) + 8
            made = Stopping(eos.to(self.device), texts, candidates.to(self.device), window, self._text)
        self._stopping[texts] = made
        return made

    def _text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def abort(self) -> list[tuple[int, Completion]]:
        """Forgets what was submitted, and ends a `generate` that runs in another thread after its current step."""
        self._aborted.set()
        forgotten = [(number, Completion()) for requests, _ in self._submitted for number in requests]
        self._submitted.clear()
        return forgotten

    def ready(self, seconds: float) -> bool:
        return self._model is not None

    def restart(self) -> None:
        raise EngineError("rollout engine: the transformers engine has no process that could be started anew")

    def is_one_of(self, ranks: Sequence[int]) -> bool:
        """Asked of engines that failed; this one's errors are the rank's own."""
        return False

    def sleep(self, tags: Sequence[str] = TAGS) -> None:
        """Gives the storage of the weights back; the tensors of `parameters` stay the same objects. Its KV cache ends with `generate`."""
        if self._model is None or self._asleep or "weights" not in tags:
            return
        self._asleep, self._ready = True, False
        for parameter in self._model.parameters():
            parameter.untyped_storage().resize_(0)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def wake(self, tags: Sequence[str] = TAGS) -> None:
        """Allocates the weights again, undefined."""
        if self._model is None or not self._asleep or "weights" not in tags:
            return
        for parameter in self._model.parameters():
            parameter.untyped_storage().resize_(parameter.numel() * parameter.element_size())
        self._asleep = False

    def stop(self) -> None:
        self._aborted.set()
        self._submitted.clear()
        self._model, self._ready, self._asleep = None, False, False
        self._stopping.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
