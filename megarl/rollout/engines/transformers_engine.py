"""The rollout engine on Hugging Face transformers: the default on a CPU, and the reference for other engines.

A weight transfer writes its weights in place (`parameters`). Decoding is a loop of our own over the
transformers model: each response has its own seed, what prompts begin with in common is prefilled once, and
rows that end make room for the next.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeGatedDeltaNet
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from megarl.config.errors import CheckpointError, EngineError, first_line
from megarl.model.delta_net import convolve, delta_rule, delta_step, gated_norm, gates
from megarl.rollout.engines.engine import RolloutEngine, check_positions
from megarl.rollout.sampling import Completion, Request, SamplingParams, choose, routing_array, stop_window
from megarl.weights.families import EXPERT_BIAS, Sizes
from megarl.weights.plan import Plan
from megarl.weights.transfer import Staging

ATTENTION = "megarl_rollout"  # the name under which `attention` is registered with transformers
BIAS = EXPERT_BIAS.hf[0][0].partition("{l}")[2]  # how the names of the buffers end that are weights
COLUMNS = 64  # keys of a chunk of attention: see DecodeLoop
# (Also, torch's memory-efficient kernel on CUDA refuses a bf16 mask whose rows are not a multiple of 8.)
NARROW = 256  # hidden size below which calling a product costs more than multiplying
LARGEST = 64  # rows of a product of a wide layer
PREFILL_TOKENS = 16384  # padded prompt tokens in one forward pass
# A layer's number (-1 before the first, their count behind the last), and what part of it; its whole output.
Part = tuple[int, str]
OUTPUT, HEAD = "residual, or a norm behind attention or MLP", "output layer"
_NAN = 1 << 40  # added to the count of live rows where one holds NaN: one device-to-host copy carries both


class TransformersEngine(RolloutEngine):
    """A RolloutEngine in this process, on one device.

    folder     Hugging Face folder, of which `start` reads only config.json
    max_batch  responses decoded at once
    eos_ids    tokens that end a response
    tokenizer  needed for stop texts only
    """

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
        self._has_weights = self._asleep = False
        # Of what was submitted, one for each params; the first decodes next.
        self._loops: list[DecodeLoop] = []
        self._stopping: dict[tuple[str, ...], Stopping] = {}

    def start(self) -> None:
        """Allocate the model with undefined weights. Raises CheckpointError for a folder that is not one of a
        usable causal model."""
        try:
            config = AutoConfig.from_pretrained(self.folder, local_files_only=True, trust_remote_code=False)
            # On the meta device first: no time is spent on initial values that a weight transfer will
            # replace.
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
        # The rotary frequencies are buffers outside the checkpoint, which to_empty left undefined.
        body = model.get_decoder()
        body.rotary_emb = type(body.rotary_emb)(config=config).to(self.device)
        for name, bias in list(model.named_buffers()):
            if name.endswith(BIAS):  # in float32 where a folder is loaded, but not where a model is made
                place, _, kind = name.rpartition(".")
                setattr(model.get_submodule(place), kind, bias.float())
        others = [n for n, _ in model.named_buffers() if "rotary_emb" not in n and not n.endswith(BIAS)]
        if others:
            raise CheckpointError(
                f"{self.folder}: the model has buffers that nothing defines: {', '.join(others)} "
                "(use another model family)"
            )
        for module in model.modules():
            if type(module) in (Qwen3_5GatedDeltaNet, Qwen3_5MoeGatedDeltaNet):  # the same, line by line
                module.__class__ = CachedDeltaNet
            elif type(module) is Qwen3NextGatedDeltaNet:
                module.__class__ = CachedFusedDeltaNet
        self._model = model.eval().requires_grad_(False)
        linear = [module for module in model.modules() if type(module) is nn.Linear]
        self._block = Block.of([module.weight for module in linear], config.hidden_size)
        for module in linear if in_fixed_order(linear[0].weight) else ():
            module.__class__ = BlockLinear
            cast(BlockLinear, module).block = self._block
        self._has_weights = self._asleep = False
        self.weight_version = -1

    def ready(self, seconds: float) -> bool:
        return self._model is not None

    def restart(self) -> None:
        """Raise EngineError: its errors are those of the rank."""
        raise EngineError("rollout engine: the transformers engine has no process that could be started anew")

    def stop(self) -> None:
        self._loops.clear()
        self._model, self._has_weights, self._asleep = None, False, False
        self._stopping.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def parameters(self) -> dict[str, Tensor]:
        """Return the weights by the names of Hugging Face's files, to be written between begin_update and
        end_update; of tied weights only the embedding. Raises EngineError before `start` and while asleep."""
        if self._model is None or self._asleep:
            state = "asleep (call wake)" if self._asleep else "not started"
            raise EngineError(f"rollout engine: it has no weights to write, because it is {state}")
        found: dict[str, Tensor] = {}
        biases = ((name, bias) for name, bias in self._model.named_buffers() if name.endswith(BIAS))
        for name, parameter in (*self._model.named_parameters(), *biases):
            # transformers 5 has all experts of a layer in two tensors, whose parts the files name.
            layer, of_experts, kind = name.rpartition(".experts.")
            if not of_experts:
                found[name] = parameter.data
            parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
            for expert, tensor in enumerate(parameter.data) if of_experts else ():
                for part, view in zip(parts, tensor.chunk(len(parts)), strict=True):
                    found[f"{layer}.experts.{expert}.{part}.weight"] = view
        return found

    def split(self, plan: Plan, frozen: Collection[str] = ()) -> list[list[str]]:
        names = next(iter(plan.targets.values()))
        parts = [name for name in names if name in frozen], [name for name in names if name not in frozen]
        return [part for part in parts if part]

    def buckets(self, parts: Sequence[Plan], memory: Staging) -> list[dict[str, Tensor]]:
        tensors = self.parameters()
        return [{name: tensors[name] for name in next(iter(part.targets.values()))} for part in parts]

    def begin_update(self) -> None:
        self._has_weights = False

    def end_update(self, version: int) -> None:
        """Accept requests again. Raises EngineError without weights."""
        self.parameters()
        self._has_weights = True
        self.weight_version = version

    def sleep(self, tags: Sequence[str] = ("weights",)) -> None:
        """Free the storage of the weights; the tensors of `parameters` stay the same objects. The KV cache
        ends with the requests."""
        if self._model is None or self._asleep or "weights" not in tags:
            return
        self._asleep, self._has_weights = True, False
        for parameter in self._model.parameters():
            parameter.untyped_storage().resize_(0)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def wake(self, tags: Sequence[str] = ("weights",)) -> None:
        if self._model is None or not self._asleep or "weights" not in tags:
            return
        for parameter in self._model.parameters():
            parameter.untyped_storage().resize_(parameter.numel() * parameter.element_size())
        self._asleep = False

    @torch.inference_mode()
    def parts(self, tokens: Sequence[int], given: Mapping[Part, Tensor]) -> dict[Part, Tensor]:
        """Run a sequence and return, in the model's order, what each part of it gives, on the host, [t,
        hidden]; as (layers, HEAD) the logits, float32 [t, vocab]. A layer's input is what `given` has as the
        output of the one before it, not what that gave here: so a difference stays where it arises. Raises
        EngineError before `start` and while asleep."""
        self.parameters()
        body, head, found, hooks = self._model.get_decoder(), self._model.get_output_embeddings(), {}, []
        last = len(body.layers) - 1

        def note(part: Part, _module: Any, _arguments: Any, output: Any) -> None:
            found[part] = (output[0] if isinstance(output, tuple) else output)[0].cpu()

        def replace(before: Part, _module: Any, arguments: Any) -> Any:
            own = arguments[0]
            if before == (-1, "embedding"):
                found[before] = own[0].cpu()
            return given[before][None].to(own), *arguments[1:]

        def watch(module: Any, part: Part, before: Part | None = None) -> None:
            hooks.append(module.register_forward_hook(partial(note, part)))
            if before is not None:
                hooks.append(module.register_forward_pre_hook(partial(replace, before)))

        for number, layer in enumerate(body.layers):
            watch(layer.input_layernorm, (number, "norm before attention"))
            mixer = layer.linear_attn if hasattr(layer, "linear_attn") else layer.self_attn
            watch(mixer, (number, "attention"))
            watch(layer.post_attention_layernorm, (number, "norm before MLP"))
            watch(layer.mlp, (number, "MLP"))
            watch(layer, (number, OUTPUT), (number - 1, OUTPUT) if number else (-1, "embedding"))
        watch(body.norm, (last + 1, "final norm"), (last, OUTPUT))
        try:
            body(input_ids=torch.tensor([tokens], device=self.device), use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        hidden = given[last + 1, "final norm"].float()  # logits rounded to bf16 would be off by up to 0.06
        return {**found, (last + 1, HEAD): F.linear(hidden, head.weight.cpu().float())}

    def submit(self, requests: Mapping[int, Request], params: SamplingParams) -> None:
        """Let requests wait for `poll`, beside what runs. A stop text stays in the response, up to the end of
        the token that completed it. Raises EngineError without valid weights and for a request that does not
        fit the model."""
        if not requests:
            return
        loop = next((loop for loop in self._loops if loop.params == params), None) or self._loop(params)
        self._check(requests.values(), params)
        loop.add(requests)
        if loop not in self._loops:
            self._loops.append(loop)

    @property
    def running(self) -> int:
        return sum(len(loop.requests) for loop in self._loops)

    @torch.inference_mode()
    def poll(self, seconds: float) -> list[tuple[int, Completion]]:
        """Generate for `seconds`, or until all has ended; return what has ended. Requests of one params are
        decoded together, those of different params in turns, a call each. Raises EngineError for NaN logits.
        """
        ended: list[tuple[int, Completion]] = []
        end = time.monotonic() + seconds
        while self._loops and not (ended and time.monotonic() >= end):
            ended += self._run(self._loops[0], end - time.monotonic())
            loop = self._loops.pop(0)
            if loop.requests:
                self._loops.append(loop)
                break
        return ended

    def abort(self) -> list[tuple[int, Completion]]:
        """Forget what was submitted."""
        forgotten = [(key, Completion()) for loop in self._loops for key in loop.requests]
        self._loops.clear()
        return forgotten

    def _loop(self, params: SamplingParams) -> DecodeLoop:
        if not self._has_weights:
            state = "without weights: an update must follow start and wake"
            if self._model is None or self._asleep:
                state = "asleep" if self._asleep else "not started"
            raise EngineError(f"rollout engine: asked for responses while it is {state}")
        if params.stop not in self._stopping:  # about a second for a vocabulary of 150,000
            self._stopping[params.stop] = Stopping(
                params.stop, self._model.config.vocab_size, self.eos_ids, self.tokenizer, self.device
            )
        return DecodeLoop(self._model, self._block, self.max_batch, params, self._stopping[params.stop])

    def _check(self, requests: Collection[Request], params: SamplingParams) -> None:
        """Raise EngineError for a request that does not fit the model."""
        positions, vocab = self._model.config.max_position_embeddings, self._model.config.vocab_size
        check_positions(requests, params, positions)
        for i, prompt in enumerate(dict.fromkeys(request.prompt for request in requests)):
            if not prompt or min(prompt) < 0 or max(prompt) >= vocab:
                problem = f"is empty or has a token id outside the model's vocabulary of {vocab}"
                raise EngineError(f"rollout: prompt {i} {problem}")

    def _run(self, loop: DecodeLoop, seconds: float) -> list[tuple[int, Completion]]:
        try:
            return loop.run(seconds)
        except FloatingPointError as error:
            raise EngineError(
                f"rollout: NaN logits in {error}, with weight version {self.weight_version} (the weights or "
                "the last update are damaged; look at the update before this version)"
            ) from None


class Stopping:
    """What ends a response.

    eos         the tokens that end it, bool [vocab]
    candidates  the tokens that may complete one of the stop texts, bool [vocab]
    window      newest tokens that can hold a stop text; 0 without texts
    """

    def __init__(
        self, texts: tuple[str, ...], vocab: int, eos_ids: Sequence[int], tokenizer: Any, device: torch.device
    ) -> None:
        self.texts, self.tokenizer, self.eos_ids = texts, tokenizer, frozenset(eos_ids)
        self.window = stop_window(texts)
        eos, candidates = torch.zeros(vocab, dtype=torch.bool), torch.ones(vocab, dtype=torch.bool)
        eos[[i for i in eos_ids if i < vocab]] = True
        if texts:
            if tokenizer is None:
                raise EngineError(
                    "rollout.stop: stop texts need a tokenizer, and the engine was made without one"
                )
            known = min(vocab, len(tokenizer))
            last = {text[-1] for text in texts}
            # A token of part of a character decodes to U+FFFD; a lone space may be stripped: both are
            # candidates.
            pieces = tokenizer.batch_decode([[i] for i in range(known)], skip_special_tokens=True)
            candidates[:known] = torch.tensor(
                [" " in last or "\ufffd" in piece or not last.isdisjoint(piece) for piece in pieces]
            )
        self.eos, self.candidates = eos.to(device), candidates.to(device)

    def found_in(self, tokens: list[int]) -> bool:
        """Return whether these tokens hold one of the texts."""
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return any(stop in text for stop in self.texts)

    def ends(self, tokens: list[int]) -> bool:
        """Return whether a response ends behind these tokens, of which all but the last did not end it."""
        return tokens[-1] in self.eos_ids or (bool(self.texts) and self.found_in(tokens[-self.window :]))


class DecodeLoop:
    """Requests that are decoded together: it admits waiting prompts, decodes at most `max_batch` responses at
    once, and gives back those that have ended, until its time is up.

    A row of the batch is one response. Requests with equal prompts share one prefill (unless they are more
    than `max_batch`) and join together, in the order in which their prompts first appear, whenever rows are
    free. Prompts that join together and begin alike, with the same examples, say, share that of their
    beginning (`segments_of`). Everything per row lives in tensors and becomes Python lists once, when it
    ends.

    On a CPU, in float32, a response and its log-probabilities are the same to the bit in any company. How a
    library orders the sum of a product or a reduction depends on its shape, so no shape that a response meets
    depends on its company: linear layers multiply rows in blocks of one size (`Block`), attention adds
    chunks of COLUMNS keys in their order (`decode_attention`), each row from its own column 0 on, and takes a
    prompt's queries in such chunks (`prefill_attention`); a prompt is padded to a width of its own, not to
    the longest of its neighbours. (Mixtures are not: the tokens of an expert are multiplied as many as there
    are.) Linear attention takes a step row by row."""

    def __init__(
        self, model: Any, block: Block, max_batch: int, params: SamplingParams, stopping: Stopping
    ) -> None:
        self.params, self.stopping, self.max_batch, self.block = params, stopping, max_batch, block
        self.body, self.head, self.device = model.get_decoder(), model.get_output_embeddings(), model.device
        self.requests: dict[int, Request] = {}  # that have not come back
        self.waiting: list[tuple[tuple[int, ...], list[int]]] = []  # the next one is popped from the end
        # Of a mixture whose routing is wanted: what the routers of the layers have just chosen, [tokens,
        # topk] each.
        self.experts = Sizes.of(model.config.to_dict()).experts if params.routing else 0
        self.chosen: list[Tensor] = []
        self.cache = KVCache(model, self.experts)
        # Per row: the key of its request (-1: none), its seed, newest token, that token's position, the
        # number of response tokens so far, and how many there may be. Rows up to `used` are responses, of
        # which some have ended; those behind them, up to a whole number of blocks, are computed but mean
        # nothing.
        self.state = torch.zeros(6, self.block.room(max_batch), dtype=torch.int64, device=self.device)
        self.key, self.seed, self.token, self.position, self.count, self.limit = self.state
        self.highest = 0  # no row's limit is higher
        self.live = torch.zeros_like(self.key, dtype=torch.bool)
        self.nan = torch.zeros_like(self.live)
        self.key.fill_(-1)
        self.used = 0
        self.longest = 0  # no row's newest token has a higher position

    def add(self, requests: Mapping[int, Request]) -> None:
        """Let requests wait for free rows. The keys must be free."""
        self.requests |= requests
        self.highest = max(self.highest, *(request.limit(self.params) for request in requests.values()))
        groups: dict[tuple[int, ...], list[int]] = {}
        for key, request in requests.items():
            groups.setdefault(request.text, []).append(key)
        most = self.max_batch
        new = [(p, keys[i : i + most]) for p, keys in groups.items() for i in range(0, len(keys), most)]
        self.waiting = new[::-1] + self.waiting

    def run(self, seconds: float) -> list[tuple[int, Completion]]:
        """Return what ends within `seconds`. Raises FloatingPointError at NaN logits, with the place."""
        hooks = [
            layer.mlp.gate.register_forward_hook(lambda _gate, _inputs, output: self.chosen.append(output[2]))
            for layer in (self.body.layers if self.experts else ())
            if hasattr(layer.mlp, "gate")
        ]
        ended: list[tuple[int, Completion]] = []
        end = time.monotonic() + seconds
        try:
            while self.requests:
                # Rows are filled where enough of them are free to pay for a prefill, or the batch has run
                # empty.
                free = self.max_batch - self.used
                enough = max(len(self.waiting[-1][1]), self.max_batch // 4) if self.waiting else free + 1
                if not self.used or free >= enough:
                    self._admit()
                else:
                    self._step()
                late = time.monotonic() >= end
                ended += self._sweep(at_once=late)
                if late:
                    break
        finally:
            for hook in hooks:
                hook.remove()
        return ended

    def _admit(self) -> None:
        """Prefill waiting prompts while their responses fit, and choose each response's first token."""
        taken, free = [], self.max_batch - self.used
        while self.waiting and len(self.waiting[-1][1]) <= free:
            taken.append(self.waiting.pop())
            free -= len(taken[-1][1])
        self.longest = max(self.longest, *(len(prompt) for prompt, _ in taken))
        self._make_room(self.max_batch - free)
        # A state of linear attention would have to be handed on, as keys and values are.
        segments = segments_of([prompt for prompt, _ in taken], shared=not self.cache.states)
        rows, first = dict[int, range](), self.used  # of each prompt's responses
        for prompt in (segment.prompts[0] for segment in segments if segment.ends):
            rows[prompt] = range(first, first + len(taken[prompt][1]))
            first = rows[prompt].stop
        together: list[Segment] = []
        for segment in segments:
            alike = together and together[0][:2] == segment[:2]
            if together and not (alike and (len(together) + 1) * segment.width <= PREFILL_TOKENS):
                self._prefill(together, taken, rows)
                together = []
            together.append(segment)
        self._prefill(together, taken, rows)

    def _prefill(
        self,
        segments: Sequence[Segment],
        groups: Sequence[tuple[tuple[int, ...], list[int]]],
        rows_of: Mapping[int, range],
    ) -> None:
        """Take segments of one start and width through the model, and begin the responses to the prompts that
        end in them, whose rows are the next ones."""
        cache, device, (start, width) = self.cache, self.device, segments[0][:2]
        stop = start + width
        prompts = [groups[segment.prompts[0]][0][:stop] for segment in segments]
        tokens = torch.tensor([prompt + (0,) * (stop - len(prompt)) for prompt in prompts]).to(device)
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        rows = [[row for prompt in segment.prompts for row in rows_of[prompt]] for segment in segments]
        with cache.prefill(start, torch.tensor([some[0] for some in rows], device=device), lengths):
            hidden = self.body(
                input_ids=tokens[:, start:],
                position_ids=torch.arange(start, stop, device=device)[None],
                past_key_values=cache,
                use_cache=True,
            ).last_hidden_state
        chosen = self._take_chosen().unflatten(0, hidden.shape[:2]) if self.experts else None
        source = torch.tensor([i for i, some in enumerate(rows) for _ in some], device=device)
        cache.place(torch.tensor([row for some in rows for row in some], device=device), source, chosen)
        ending = [i for i, segment in enumerate(segments) if segment.ends]
        if not ending:
            return
        keys = [key for i in ending for key in groups[segments[i].prompts[0]][1]]
        asked = [self.requests[key] for key in keys]
        new = slice(self.used, self.used + len(keys))
        source = torch.tensor([i for i in ending for _ in rows[i]], device=device)
        self.key[new], self.live[new] = torch.tensor(keys).to(device), True
        self.seed[new], self.limit[new] = torch.tensor(
            [[request.seed for request in asked], [request.limit(self.params) for request in asked]]
        ).to(device)
        self.position[new] = lengths[source] - 1
        self.count[new] = torch.tensor([request.begun for request in asked], device=device)
        cache.tokens[new, :stop] = tokens[source]
        self.used = new.stop
        # The head, and what draws from its logits, see whole blocks too.
        ends = torch.tensor(ending, device=device)
        last = hidden.new_zeros(self.block.whole(len(ends)), hidden.shape[2])
        last[: len(ends)] = hidden[ends, lengths[ends] - 1 - start]
        padded = source.new_zeros(self.block.whole(len(keys)))
        padded[: len(keys)] = torch.searchsorted(ends, source)
        self._choose(slice(new.start, new.start + len(padded)), self.head(last)[padded])

    def _step(self) -> None:
        """Feed every row's newest token and choose the next."""
        self._make_room(self.used)
        cache, rows = self.cache, slice(0, self.block.whole(self.used))
        mask = cache.attend(self.position[rows], self.longest)
        # In blocks, as `BlockLinear` multiplies them: what looks like a sequence is a block of responses.
        hidden = self.body(
            input_ids=self.token[rows].view(-1, self.block.rows),
            position_ids=self.position[rows].view(-1, self.block.rows),
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        if self.experts:
            at = torch.arange(rows.stop, device=self.device)
            cache.chosen[at, self.position[rows]] = self._take_chosen()
        self.longest += 1
        self._choose(rows, self.head(hidden).flatten(0, 1))

    def _take_chosen(self) -> Tensor:
        """Return the experts of the forward pass just run, int16 [tokens, layers, topk]; of the first layers,
        where these are dense, 0."""
        chosen = torch.stack(self.chosen, dim=1).short()
        self.chosen.clear()
        return F.pad(chosen, (0, 0, len(self.body.layers) - chosen.shape[1], 0))

    def _choose(self, rows: slice, logits: Tensor) -> None:
        """Choose the next token of `rows` from logits [rows, vocab]."""
        cache, live, count = self.cache, self.live[rows], self.count[rows]
        token, logprob = choose(logits, self.seed[rows], count, self.params)
        self.token[rows] = token
        self.nan[rows] = logprob.isnan() & live
        self.position[rows] += live
        count += live
        # A row that has ended stays where it is: what is computed for it goes behind its end.
        at = cache.starts[rows] + self.position[rows] + ~live
        cache.tokens.view(-1).index_copy_(0, at, token)
        cache.logprobs.view(-1).index_copy_(0, at, logprob)
        if self.stopping.texts:
            self._stop_texts(rows, token)
        live &= ~self.stopping.eos[token] & (count < self.limit[rows])

    def _stop_texts(self, rows: slice, token: Tensor) -> None:
        """End rows whose newest tokens hold a stop text. Only those that may complete one are decoded."""
        look = (self.stopping.candidates[token] & self.live[rows]).nonzero()[:, 0] + rows.start
        ends, counts = self.position[look].tolist(), self.count[look].tolist()
        for row, end, count in zip(look.tolist(), ends, counts, strict=True):
            first = end + 1 - min(count, self.stopping.window)
            if self.stopping.found_in(self.cache.tokens[row, first : end + 1].tolist()):
                self.live[row] = False

    def _sweep(self, at_once: bool) -> list[tuple[int, Completion]]:
        """Return the rows that have ended once they are over a sixteenth, or `at_once`: live rows from the
        end take their places."""
        used = self.used
        live = self.live[:used]
        status = int(live.sum() + self.nan.any() * _NAN)
        if status >= _NAN:
            row = int(self.nan.nonzero()[0])
            raise FloatingPointError(f"row {int(self.key[row])}, response token {int(self.count[row]) - 1}")
        if status == used or (not at_once and used - status <= used // 16):
            return []
        ended = self._take((~live).nonzero()[:, 0])
        target = (~live[:status]).nonzero()[:, 0]
        source = live[status:].nonzero()[:, 0] + status
        self.cache.move(source, target, self.longest + 1)
        self.state[:, target] = self.state[:, source]
        self.live[:status], self.live[status:used] = True, False
        self.position[status:used] = 0
        self.used = status
        self.longest = int(self.position[:status].max()) if status else 0
        return ended

    def _take(self, rows: Tensor) -> list[tuple[int, Completion]]:
        """Return the responses of rows, which have ended and are to be given up."""
        cache, columns = self.cache, self.longest + 1
        tokens, logprobs = cache.tokens[rows, :columns].cpu(), cache.logprobs[rows, :columns].cpu()
        chosen = cache.chosen[rows].cpu().numpy() if self.experts else None
        taken = []
        for row, (key, end, count, limit) in enumerate(self.state[[0, 3, 4, 5]][:, rows].T.tolist()):
            span = slice(end + 1 - count, end + 1)
            completion = Completion(tokens[row, span].tolist(), logprobs[row, span].tolist())
            if (partial := self.requests[key].partial) is not None:
                completion.logprobs[: len(partial.logprobs)] = partial.logprobs
            by_itself = count < limit or self.stopping.ends(completion.tokens)
            completion.finish = "stop" if by_itself else "length"
            if chosen is not None:
                completion.routing = routing_array(chosen[row, :end], end + 1, self.experts)
            del self.requests[key]
            taken.append((key, completion))
        return taken

    def _make_room(self, rows: int) -> None:
        """Let the cache hold `rows` rows, and the next token of each. Growth is geometric, but never beyond
        what the live rows can still need."""
        # Behind a row's newest token there is a place for what is computed after its end.
        rows, columns = self.block.room(rows), self.longest + 3
        if rows > self.cache.rows or columns > self.cache.columns:
            grown = min(columns * 3 // 2 + 128, columns + self.highest)
            self.cache.reserve(rows, grown if columns > self.cache.columns else 0)


class KVCache:
    """Keys and values per layer [rows, kv_heads, columns, dim], in multi-latent attention latents and rotated
    keys, one head of each; and of each position its token, that token's log-probability and, where routing is
    wanted, its experts. A row's token of position p stands in column p.
    A layer of linear attention has a state of each row instead (`CachedDeltaNet`), behind its newest token.

    Passed to transformers' forward as `past_key_values`, whose attention layers call only `update`. While
    `prefilling`, keys and values are set aside for `place`; otherwise the one new column of each row is
    written where `attend` says."""

    def __init__(self, model: Any, experts: int) -> None:
        config, dtype, device = model.config, model.dtype, model.device
        heads, layers = config.num_attention_heads, config.num_hidden_layers
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        widths = (getattr(config, "head_dim", None) or config.hidden_size // heads,) * 2
        if hasattr(config, "kv_lora_rank"):
            kv_heads, widths = 1, (config.kv_lora_rank, config.qk_rope_head_dim)
        self.rows = self.columns = 0
        sizes = Sizes.of(config.to_dict())
        # A layer of linear attention has no heads here.
        heads_of = [0 if layer in sizes.linear else kv_heads for layer in range(layers)]
        self.kv_heads = kv_heads
        self.keys, self.values = (
            [torch.zeros(0, heads, 0, width, dtype=dtype, device=device) for heads in heads_of]
            for width in widths
        )
        # Of those layers: the newest inputs of the convolution, and the delta rule's state.
        self.inputs = {
            n: torch.zeros(0, sizes.mixed, sizes.conv - 1, dtype=dtype, device=device) for n in sizes.linear
        }
        shape = 0, sizes.value_heads, sizes.key // max(sizes.key_heads, 1), sizes.value_dim
        self.states = {n: torch.zeros(shape, device=device) for n in sizes.linear}
        self.tokens = torch.zeros(0, 0, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(0, 0, device=device)
        routed = layers, config.num_experts_per_tok if experts else 0
        self.chosen = torch.zeros(0, 0, *routed, dtype=torch.int16, device=device)
        # While prefilling: where the segments begin, a row that holds what stands before each, and where the
        # prompts end, or the segments.
        self.prefilling, self.start = False, 0
        self.before = self.lengths = torch.zeros(0, dtype=torch.int64, device=device)
        self._aside: dict[int, tuple[Tensor, Tensor]] = {}

    def update(
        self, key: Tensor, value: Tensor, layer: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Add a layer's new keys and values, [segments, kv_heads, tokens, dim] or of a step [blocks,
        kv_heads, rows, dim]; return all that it attends to, [rows, kv_heads, columns, dim]."""
        if self.prefilling:
            self._aside[layer] = key, value
            if not self.start:
                return key, value
            both = zip((self.keys[layer], self.values[layer]), (key, value), strict=True)
            key, value = (torch.cat([old[self.before, :, : self.start], new], 2) for old, new in both)
            return key, value
        keys, values = self.keys[layer], self.values[layer]
        rows = len(key) * key.shape[2]
        for cache, fresh in ((keys, key), (values, value)):
            dim = fresh.shape[3]
            cache.view(-1, dim).index_copy_(0, self._at, fresh.transpose(1, 2).reshape(-1, dim))
        return keys[:rows, :, : self._seen], values[:rows, :, : self._seen]

    @contextmanager
    def prefill(self, start: int, before: Tensor, lengths: Tensor) -> Iterator[None]:
        """Set aside, for `place`, what a forward pass gives of segments that begin at `start`. before,
        lengths: int64 [segments], a row that holds what stands before each, and how many tokens of the prompt
        there are with it."""
        self.prefilling, self.start, self.before, self.lengths = True, start, before, lengths
        try:
            yield
        finally:
            self.prefilling = False

    def keep(self, layer: int, inputs: Tensor, state: Tensor) -> None:
        """Take what a layer of linear attention has behind the newest tokens: of prompts, or of the first
        rows."""
        if self.prefilling:
            self._aside[layer] = inputs, state
            return
        self.inputs[layer][: len(inputs)], self.states[layer][: len(state)] = inputs, state

    def attend(self, position: Tensor, longest: int) -> Tensor:
        """Prepare a step whose new tokens have these positions, int64 [rows], none above `longest`; return
        its additive mask [rows, 1, 1, columns that attention sees]."""
        self._seen = _whole(longest + 1, COLUMNS)
        rows, position = len(position), position[:, None]
        self._at = (self._starts_of_heads[:rows] + position).view(-1)
        mask = torch.zeros(rows, self._seen, dtype=self.keys[0].dtype, device=position.device)
        return mask.masked_fill_(self._numbers[: self._seen] > position, -torch.inf)[:, None, None]

    def place(self, rows: Tensor, source: Tensor, chosen: Tensor | None) -> None:
        """Write into `rows` what the prefill just run has set aside of the segments `source`, int64 [n] each,
        and of the segments' experts, [segments, tokens, layers, topk]."""
        for layer, pair in self._aside.items():
            if layer in self.states:
                self.inputs[layer][rows], self.states[layer][rows] = (fresh[source] for fresh in pair)
                continue
            for cache, fresh in zip((self.keys[layer], self.values[layer]), pair, strict=True):
                cache[rows, :, self.start : self.start + fresh.shape[2]] = fresh[source]
        self._aside.clear()
        if chosen is not None:
            self.chosen[rows, self.start : self.start + chosen.shape[1]] = chosen[source]

    def move(self, source: Tensor, target: Tensor, columns: int) -> None:
        """Copy the first `columns` columns of rows `source` over rows `target`."""
        for cache in (*self.keys, *self.values):
            cache[target, :, :columns] = cache[source, :, :columns]
        for of_rows in (*self.inputs.values(), *self.states.values()):
            of_rows[target] = of_rows[source]
        for of_tokens in (self.tokens, self.logprobs, self.chosen):
            of_tokens[target, :columns] = of_tokens[source, :columns]

    def reserve(self, rows: int, columns: int) -> None:
        """Grow to at least these sizes; what is there stays."""
        old_rows, old_columns = self.rows, self.columns
        self.rows, self.columns = max(rows, old_rows), max(_whole(columns, COLUMNS), old_columns)

        def grown(old: Tensor, dim: int) -> Tensor:
            shape = [self.rows, *old.shape[1:dim], self.columns, *old.shape[dim + 1 :]]
            # Zeros, not empty: masked columns get weight 0, and 0 times an uninitialised NaN is NaN.
            fresh = old.new_zeros(shape)
            fresh[:old_rows].narrow(dim, 0, old_columns).copy_(old)
            return fresh

        for caches in (self.keys, self.values):
            for layer, old in enumerate(caches):
                caches[layer] = grown(old, 2)
        for states in (self.inputs, self.states):
            for layer, old in states.items():
                states[layer] = F.pad(old, (0, 0) * (old.dim() - 1) + (0, self.rows - old_rows))
        self.tokens, self.logprobs = grown(self.tokens, 1), grown(self.logprobs, 1)
        self.chosen = grown(self.chosen, 1)
        # Of the flattened tensors: where rows, and heads of rows, begin.
        heads, device = self.kv_heads, self.tokens.device
        self.starts = torch.arange(self.rows, device=device) * self.columns
        self._starts_of_heads = torch.arange(self.rows * heads, device=device).view(-1, heads) * self.columns
        self._numbers = torch.arange(self.columns, device=device)


def _whole(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


class Segment(NamedTuple):
    """What goes through the model at once of a prompt, or of several that begin alike.

    start, width  its first token, and how many they are, with padding
    prompts       their numbers
    ends          whether a prompt ends in it, which is then the only one
    """

    start: int
    width: int
    prompts: list[int]
    ends: bool


def segments_of(prompts: Sequence[tuple[int, ...]], shared: bool) -> list[Segment]:
    """Cut prompts into segments, each behind those that stand before it. shared: whole chunks of COLUMNS
    tokens that several of them begin with are a segment of their own; else each prompt is one."""

    def chunk(number: int, start: int) -> object:
        """Return what others must have there too; where it is the prompt's end, nobody has."""
        tokens = prompts[number][start : start + COLUMNS + 1]
        return tokens[:-1] if shared and len(tokens) > COLUMNS else number

    segments, left = list[Segment](), [(0, list(range(len(prompts))))]
    while left:
        start, those = left.pop()
        alike: dict[object, list[int]] = {}
        for number in those:
            alike.setdefault(chunk(number, start), []).append(number)
        for numbers in alike.values():
            if len(numbers) == 1:
                segments.append(Segment(start, _width(prompts[numbers[0]]) - start, numbers, True))
                continue
            stop = start + COLUMNS
            while len({chunk(number, stop) for number in numbers}) == 1:
                stop += COLUMNS
            segments.append(Segment(start, stop - start, numbers, False))
            left.append((stop, numbers))
    return sorted(segments, key=lambda segment: segment[:2])


def _width(prompt: tuple[int, ...]) -> int:
    """Return the tokens to which a prompt is padded, at most a quarter more and less than COLUMNS: torch's
    attention works in blocks whose size depends on it, so it must not depend on other prompts; and prompts of
    few widths go through the model together."""
    return _whole(len(prompt), min(COLUMNS, max(16, (1 << (len(prompt) - 1).bit_length()) // 8)))


def in_fixed_order(tensor: Tensor) -> bool:
    """Return whether the sums of products with it are taken in an order that company does not change: in
    float32 on a CPU. (bf16 would have to round the scores, or to keep its keys in float32.)"""
    return tensor.device.type == "cpu" and tensor.dtype == torch.float32


class Block(NamedTuple):
    """In which shapes linear layers multiply.

    rows     a batch has a whole number of so many
    fewest   blocks of `rows` in a batch
    largest  rows of a product, of which a batch takes as many as it needs and a last one of a power of two;
             0: of all blocks at once
    """

    rows: int
    fewest: int = 1
    largest: int = 0

    @staticmethod
    def of(weights: Sequence[Tensor], hidden: int) -> Block:
        """Return the block for a model of such weights, whose values are undefined and may be overwritten,
        and this width. In a narrow one blocks are small and go into one batched product, for which MKL has
        another path where there is but one. Where no order is fixed they only keep the number of shapes
        small."""
        if not in_fixed_order(weights[0]):
            return Block(8)
        return Block(16, 2) if hidden < NARROW else Block(fewest_rows(weights), largest=LARGEST)

    def whole(self, rows: int) -> int:
        """Return the rows of as many blocks as these rows need."""
        if not self.largest:
            return max(_whole(rows, self.rows), self.rows * self.fewest)
        rest = rows % self.largest
        return rows - rest + (max(self.rows, 1 << (rest - 1).bit_length()) if rest or not rows else 0)

    def room(self, rows: int) -> int:
        """Return the rows that tensors need for so many responses, of which the newest may begin anywhere."""
        return self.whole(rows) + (self.largest or self.whole(0))


def fewest_rows(weights: Iterable[Tensor]) -> int:
    """Return from how many rows on, a power of two of at least 8, products with such matrices add up a row in
    the order of those of LARGEST rows, on this processor and with its library: LARGEST where none smaller
    does. Tried with equal rows, of random numbers, whose results are equal where the order is. The values of
    the weights are overwritten."""
    random, fewest = torch.Generator().manual_seed(0), 8
    for weight in {weight.shape: weight for weight in weights}.values():
        weight.normal_(generator=random)
        rows = torch.randn(1, weight.shape[1], generator=random).repeat(LARGEST, 1)
        expected, size = F.linear(rows, weight)[0], LARGEST // 2
        while size >= fewest and bool((F.linear(rows[:size], weight) == expected).all()):
            size //= 2
        fewest = max(fewest, 2 * size)
    return fewest


class BlockLinear(nn.Linear):
    """A linear layer that multiplies rows in products of the shapes of `block`: the order in which the
    products of a row are added depends on nothing else."""

    block: Block

    def forward(self, input: Tensor) -> Tensor:
        """input [..., in] -> [..., out]."""
        shape, block = (*input.shape[:-1], self.out_features), self.block
        count = input.numel() // self.in_features
        if padding := block.whole(count) - count:
            input = F.pad(input.reshape(-1, self.in_features), (0, 0, 0, padding))
        if block.largest:
            rows = input.reshape(-1, self.in_features)
            parts = [F.linear(part, self.weight, self.bias) for part in rows.split(block.largest)]
            out = parts[0] if len(parts) == 1 else torch.cat(parts)
        else:
            if input.dim() != 3 or input.shape[1] != block.rows:
                input = input.reshape(-1, block.rows, self.in_features)
            out = torch.bmm(input, self.weight.t().expand(len(input), -1, -1))
            if self.bias is not None:
                out += self.bias
        if padding:
            out = out.view(-1, self.out_features)[:count]
        return out if out.shape == shape else out.view(shape)


class CachedDeltaNet(Qwen3_5GatedDeltaNet):
    """Linear attention whose state of each row is in a KVCache."""

    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return what the convolution takes, the output's gates, alpha and beta, [..., tokens, n] each."""
        layers = self.in_proj_qkv, self.in_proj_z, self.in_proj_a, self.in_proj_b
        channels, gate, alpha, beta = (layer(hidden_states) for layer in layers)
        return channels, gate, alpha, beta

    def forward(
        self, hidden_states: Tensor, cache_params: Any = None, attention_mask: Any = None, **_: Any
    ) -> Tensor:
        """hidden_states [prompts, tokens, hidden] while prefilling, where each prompt ends at its length; in
        a step [blocks, rows, hidden], a token of each row -> the same."""
        cache, layer, kernel = cache_params, self.layer_idx, self.conv1d.weight
        channels, gate, alpha, beta = self.project(hidden_states)
        decay, beta = gates(alpha, beta, self.A_log, self.dt_bias)
        sizes = self.key_dim, self.key_dim, self.value_dim
        dims = self.head_k_dim, self.head_k_dim, self.head_v_dim

        def heads_of(mixed: Tensor) -> list[Tensor]:
            parts = zip(mixed.split(sizes, -1), dims, strict=True)
            return [part.unflatten(-1, (-1, dim)) for part, dim in parts]

        if cache is None or cache.prefilling:
            if cache is not None:
                # A prompt's state stays as it is behind its end.
                ended = torch.arange(alpha.shape[1], device=alpha.device) >= cache.lengths[:, None]
                decay, beta = (x.masked_fill(ended[..., None], 0) for x in (decay, beta))
            query, key, value = heads_of(convolve(channels, kernel))
            out, state = delta_rule(query, key, value, decay, beta)
            if cache is not None:
                before = kernel.shape[2] - 1
                last = cache.lengths[:, None] + torch.arange(before, device=alpha.device)
                inputs = F.pad(channels.transpose(1, 2), (before, 0))
                inputs = inputs.gather(2, last[:, None].expand(-1, inputs.shape[1], -1))
                cache.keep(layer, inputs, state)
        else:
            flat, rows = channels.flatten(0, 1), channels.shape[0] * channels.shape[1]
            inputs = torch.cat([cache.inputs[layer][:rows], flat[..., None]], -1)
            query, key, value = heads_of(F.silu((inputs * kernel[:, 0]).sum(-1)))
            state, decay, beta = cache.states[layer][:rows], decay.flatten(0, 1), beta.flatten(0, 1)
            out, state = delta_step(state, query, key, value, decay, beta)
            cache.keep(layer, inputs[..., 1:], state)
            out = out.unflatten(0, channels.shape[:2])
        out = gated_norm(
            out, gate.unflatten(-1, (-1, self.head_v_dim)), self.norm.weight, self.layer_norm_epsilon
        )
        return self.out_proj(out.flatten(2))


class CachedFusedDeltaNet(CachedDeltaNet, Qwen3NextGatedDeltaNet):
    """That of Qwen3-Next, with a projection for four things, and one for two."""

    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        fused = self.in_proj_qkvz(hidden_states), self.in_proj_ba(hidden_states)
        query, key, value, gate, beta, alpha = self.fix_query_key_value_ordering(*fused)
        return torch.cat([x.flatten(2) for x in (query, key, value)], -1), gate.flatten(2), alpha, beta


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Implement transformers' attention interface: query [rows, heads, q, dim], key and value [rows,
    kv_heads, k, dim] -> [rows, q, heads, dim]. Values may be narrower; the output then is.

    Without a mask (prefill) attention is causal, and the queries are those of the last keys. With one (a step
    of decoding) query is [blocks, heads, rows, dim], one query of each row; the query heads that share a key
    head are treated as queries of one head, so that grouped keys are never repeated."""
    scale, narrow = kwargs["scaling"], value.shape[3]
    if narrow < key.shape[3]:  # torch's attention that keeps no scores wants them as wide
        value = F.pad(value, (0, key.shape[3] - narrow))
    if attention_mask is None:
        return prefill_attention(query, key, value, scale).transpose(1, 2)[..., :narrow], None
    rows, kv_heads, _, dim = key.shape
    blocks, heads, block, _ = query.shape
    query = query.transpose(1, 2).reshape(rows, kv_heads, heads // kv_heads, dim)
    if in_fixed_order(query):
        out = decode_attention(query, key, value, attention_mask, scale)
    else:
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scale)
    return out.reshape(blocks, block, heads, dim)[..., :narrow], None


def prefill_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Attend causally with the queries of the last keys. Where sums have an order, COLUMNS queries are taken
    at once, so that it does not depend on how many keys stand before the first query: what a prompt shares
    with others may be computed apart.

    query [rows, heads, q, dim]; key, value [rows, kv_heads, k, dim], k - q a multiple of COLUMNS -> [rows,
    heads, q, dim]."""
    queries, before, ordered = query.shape[2], key.shape[2] - query.shape[2], in_fixed_order(query)
    if ordered:  # lying in memory alike
        key, value = key.contiguous(), value.contiguous()
    at, step, parts = torch.arange(key.shape[2], device=key.device), COLUMNS if ordered else queries, []
    for first in range(0, queries, step):
        stop = min(first + step, queries)
        seen = slice(before + stop)
        mask = at[seen] <= at[before + first : before + stop, None] if before + first else None
        parts.append(
            F.scaled_dot_product_attention(
                query[:, :, first:stop],
                key[:, :, seen],
                value[:, :, seen],
                attn_mask=mask,
                is_causal=mask is None,
                scale=scale,
                enable_gqa=query.shape[1] != key.shape[1],
            )
        )
    return torch.cat(parts, 2) if len(parts) > 1 else parts[0]


def decode_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attend to keys in chunks of COLUMNS, whose results are added in the order of the keys: a row's sums are
    the same whatever is masked behind its end, since such a chunk adds zeros.

    query [rows, kv_heads, group, dim]; key, value [rows, kv_heads, n * COLUMNS, dim], finite where masked;
    mask, additive, [rows, 1, 1, n * COLUMNS] -> [rows, kv_heads, group, dim]."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    split = key.split(COLUMNS, 2), value.split(COLUMNS, 2), mask.split(COLUMNS, 3)
    # Of each chunk the result and, float32 [rows, kv_heads, group], the logarithm of the sum of exponentials.
    found = [flash(query, k, v, attn_mask=m, scale=scale) for k, v, m in zip(*split, strict=True)]
    if len(found) == 1:
        return found[0][0]
    sums = torch.stack([total for _, total in found])
    sums += mask[:, 0, 0, ::COLUMNS].T[..., None, None]  # of a chunk that is masked whole there is no sum
    shares = (sums - sums.amax(0)).exp_()[..., None]
    out, total = found[0][0] * shares[0], shares[0]
    for (part, _), share in zip(found[1:], shares[1:], strict=True):
        out = torch.addcmul(out, part, share)
        total = total + share
    return out / total


AttentionInterface.register(ATTENTION, attention)
