"""The rollout engine on Hugging Face transformers, a reference for the others."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from msgspec import structs
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeGatedDeltaNet
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from megarl.config.errors import CheckpointError, EngineError, first_line
from megarl.config.schema import Config
from megarl.data.response_text import end_tokens
from megarl.data.sample import TokenData
from megarl.model.builder import DTYPES
from megarl.parallel.runtime import Runtime
from megarl.rollout.engines.base import GenerationRequest, RolloutEngine, check_positions
from megarl.rollout.engines.transformers_decode import DecodeLoop, Stopping
from megarl.rollout.engines.transformers_layers import (
    ATTENTION,
    Block,
    BlockLinear,
    CachedDeltaNet,
    CachedFusedDeltaNet,
    is_batch_invariant,
)
from megarl.rollout.sampling import SamplingParams
from megarl.weights.families import EXPERT_BIAS

BIAS = EXPERT_BIAS.hf[0][0].partition("{l}")[2]  # suffix of buffers that are weights


class TransformersEngine(RolloutEngine):
    """A RolloutEngine in this process. tokenizer: only for stop texts

    keeps_cache: running responses keep their KV cache when weights change"""

    keeps_cache = False

    @classmethod
    def build(cls, config: Config, tokenizer: Any, runtime: Runtime) -> TransformersEngine:
        dtype, max_batch = DTYPES[config.model.dtype], config.rollout.max_batch
        eos_ids = end_tokens(tokenizer)
        engine = cls(config.model.path, dtype, runtime.device, max_batch, eos_ids, tokenizer)
        engine.keeps_cache = config.schedule.in_flight == "keep"
        return engine

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
        self.model: Any = None
        self._has_weights = self._asleep = False
        # One per SamplingParams; the first decodes next.
        self._loops: list[DecodeLoop] = []
        self._stopping: dict[tuple[str, ...], Stopping] = {}

    def start(self) -> None:
        """Allocate the model with undefined weights. Raises CheckpointError for an unusable folder."""
        try:
            config = AutoConfig.from_pretrained(self.folder, local_files_only=True, trust_remote_code=False)
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(
                    config, dtype=self.dtype, attn_implementation=ATTENTION, trust_remote_code=False
                )
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"{self.folder}: not the folder of a causal language model: {first_line(error)} "
                "(check config.json)"
            ) from error
        if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
            raise CheckpointError(
                f"{self.folder}/config.json: sliding-window attention is not supported "
                "(set use_sliding_window to false)"
            )
        model.to_empty(device=self.device)
        model.tie_weights()  # to_empty gives tied weights a storage each
        # Rotary frequencies are not in the checkpoint; to_empty left them undefined.
        body = model.get_decoder()
        body.rotary_emb = type(body.rotary_emb)(config=config).to(self.device)
        for name, bias in list(model.named_buffers()):
            if name.endswith(BIAS):  # float32 by from_pretrained, but not by from_config
                module_name, _, buffer_name = name.rpartition(".")
                setattr(model.get_submodule(module_name), buffer_name, bias.float())
        undefined_buffers = [
            n for n, _ in model.named_buffers() if "rotary_emb" not in n and not n.endswith(BIAS)
        ]
        if undefined_buffers:
            raise CheckpointError(
                f"{self.folder}: the model has buffers that nothing defines: {', '.join(undefined_buffers)} "
                "(use another model family)"
            )
        for module in model.modules():
            if type(module) in (Qwen3_5GatedDeltaNet, Qwen3_5MoeGatedDeltaNet):  # equal code
                module.__class__ = CachedDeltaNet
            elif type(module) is Qwen3NextGatedDeltaNet:
                module.__class__ = CachedFusedDeltaNet
        self.model = model.eval().requires_grad_(False)
        linear_layers = [module for module in model.modules() if type(module) is nn.Linear]
        self._block = Block.make([module.weight for module in linear_layers], config.hidden_size)
        for module in linear_layers if is_batch_invariant(linear_layers[0].weight) else ():
            module.__class__ = BlockLinear
            cast(BlockLinear, module).block = self._block
        self._has_weights = self._asleep = False
        self.weight_version = -1

    def ready(self, seconds: float) -> bool:
        return self.model is not None

    def stop(self) -> None:
        self._loops.clear()
        self.model, self._has_weights, self._asleep = None, False, False
        self._stopping.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def parameters(self) -> dict[str, Tensor]:
        """Return the weights by Hugging Face's names, of tied ones only the embedding.

        Write to them only between begin_update and end_update. Raises EngineError before `start` and while
        asleep."""
        if self.model is None or self._asleep:
            state = "asleep (call wake)" if self._asleep else "not started"
            raise EngineError(f"rollout engine: it has no weights to write, because it is {state}")
        tensors: dict[str, Tensor] = {}
        biases = ((name, bias) for name, bias in self.model.named_buffers() if name.endswith(BIAS))
        for name, parameter in (*self.model.named_parameters(), *biases):
            # transformers 5 has a layer's experts in two tensors, unlike files.
            layer, separator, projection = name.rpartition(".experts.")
            if not separator:
                tensors[name] = parameter.data
            parts = ("gate_proj", "up_proj") if projection == "gate_up_proj" else (projection,)
            for expert, tensor in enumerate(parameter.data) if separator else ():
                for part, view in zip(parts, tensor.chunk(len(parts)), strict=True):
                    tensors[f"{layer}.experts.{expert}.{part}.weight"] = view
        return tensors

    def begin_update(self) -> None:
        self._has_weights = False

    def end_update(self, version: int) -> None:
        self.parameters()  # may raise EngineError
        with torch.inference_mode():
            for loop in self._loops:
                loop.change_weights(version, recompute=not self.keeps_cache)
        self._has_weights, self.weight_version = True, version

    def sleep(self, tags: Sequence[str] = ("weights",)) -> None:
        """Free the weights' storage, but keep the tensors of `parameters`."""
        if self.model is None or self._asleep or "weights" not in tags:
            return
        self._asleep, self._has_weights = True, False
        for parameter in self.model.parameters():
            parameter.untyped_storage().resize_(0)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def wake(self, tags: Sequence[str] = ("weights",)) -> None:
        if self.model is None or not self._asleep or "weights" not in tags:
            return
        for parameter in self.model.parameters():
            parameter.untyped_storage().resize_(parameter.numel() * parameter.element_size())
        self._asleep = False

    def submit(self, requests: Mapping[int, GenerationRequest], params: SamplingParams) -> None:
        """Queue requests. A response ends with the token that completes a stop text.

        Raises EngineError without weights, or if a request does not fit."""
        if not requests:
            return
        loop = next((loop for loop in self._loops if loop.params == params), None) or self._make_loop(params)
        positions, vocab = self.model.config.max_position_embeddings, self.model.config.vocab_size
        check_positions(requests.values(), params, positions)
        for i, prompt in enumerate(dict.fromkeys(request.prompt_tokens for request in requests.values())):
            if not prompt or min(prompt) < 0 or max(prompt) >= vocab:
                problem = f"is empty or has a token id outside the model's vocabulary of {vocab}"
                raise EngineError(f"rollout: prompt {i} {problem}")
        loop.add(requests)
        if loop not in self._loops:
            self._loops.append(loop)

    @property
    def running(self) -> int:
        return sum(len(loop.requests) for loop in self._loops)

    @torch.inference_mode()
    def poll(self, seconds: float) -> list[tuple[int, TokenData]]:
        """Generate for `seconds`; return finished responses. Raises EngineError for NaN logits.

        Different params alternate between calls."""
        responses: list[tuple[int, TokenData]] = []
        deadline = time.monotonic() + seconds
        while self._loops and not (responses and time.monotonic() >= deadline):
            try:
                responses += self._loops[0].run(deadline - time.monotonic(), self.should_end_poll)
            except FloatingPointError as error:
                raise EngineError(
                    f"rollout: NaN logits in {error}, with weight version {self.weight_version} (the weights "
                    "or the last update are damaged; look at the update before this version)"
                ) from None
            loop = self._loops.pop(0)
            if loop.requests:
                self._loops.append(loop)
                break
        return responses

    def abort(self) -> list[tuple[int, TokenData]]:
        responses: list[tuple[int, TokenData]] = []
        with torch.inference_mode():
            for loop in self._loops:
                responses += [(key, data) for key, (_, data) in loop.take_partials().items()]
                for key, request in loop.requests.items():
                    prefix = request.prefix or TokenData()
                    responses.append((key, structs.replace(prefix, finish_reason="abort")))
        self._loops.clear()
        return responses

    def _make_loop(self, params: SamplingParams) -> DecodeLoop:
        if not self._has_weights:
            state = "without weights: an update must follow start and wake"
            if self.model is None or self._asleep:
                state = "asleep" if self._asleep else "not started"
            raise EngineError(f"rollout engine: asked for responses while it is {state}")
        if params.stop not in self._stopping:  # slow to make for a large vocabulary
            self._stopping[params.stop] = Stopping(
                params.stop, self.model.config.vocab_size, self.eos_ids, self.tokenizer, self.device
            )
        stopping = self._stopping[params.stop]
        return DecodeLoop(self.model, self._block, self.max_batch, params, stopping, self.weight_version)
