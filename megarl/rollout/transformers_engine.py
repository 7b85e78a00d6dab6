"""The rollout engine on Hugging Face transformers: the default on a CPU, and the reference for other engines.

A weight transfer writes its weights in place (`parameters`). Decoding is a loop of our own over the
transformers model: each response has its own seed, equal prompts share one prefill, and rows that end make
room for the next.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from megarl.config.errors import CheckpointError, EngineError
from megarl.rollout.engine import RolloutEngine, check_positions
from megarl.rollout.sampling import Completion, Request, SamplingParams, choose, routing_array
from megarl.weights.plan import Plan
from megarl.weights.transfer import Staging

ATTENTION = "megarl_rollout"  # the name under which `attention` is registered with transformers
# Columns of the cache, by device: torch's memory-efficient kernel on CUDA refuses a bf16 mask that starts in
# between.
ALIGNMENT = {"cpu": 1, "cuda": 8}
PREFILL_TOKENS = 16384  # padded prompt tokens in one forward pass
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
        self._aborted = threading.Event()
        self._submitted: list[tuple[dict[int, Request], SamplingParams]] = []
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
            line = str(error).strip().splitlines()[0]
            raise CheckpointError(
                f"{self.folder}: not the folder of a causal language model: {line} (check config.json)"
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
        others = [name for name, _ in model.named_buffers() if "rotary_emb" not in name]
        if others:
            raise CheckpointError(
                f"{self.folder}: the model has buffers that nothing defines: {', '.join(others)} "
                "(use another model family)"
            )
        self._model = model.eval().requires_grad_(False)
        self._has_weights = self._asleep = False
        self.weight_version = -1

    def ready(self, seconds: float) -> bool:
        return self._model is not None

    def restart(self) -> None:
        """Raise EngineError: its errors are those of the rank."""
        raise EngineError("rollout engine: the transformers engine has no process that could be started anew")

    def stop(self) -> None:
        self._aborted.set()
        self._submitted.clear()
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
        for name, parameter in self._model.named_parameters():
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
        """Accept requests again; no cache outlives a `generate` call. Raises EngineError without weights."""
        self.parameters()
        self._has_weights = True
        self.weight_version = version

    def sleep(self, tags: Sequence[str] = ("weights",)) -> None:
        """Free the storage of the weights; the tensors of `parameters` stay the same objects. The KV cache
        ends with `generate`."""
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

    def submit(self, requests: Mapping[int, Request], params: SamplingParams) -> None:
        """Keep requests for the next `poll`, which decodes all of them as one batch."""
        self._submitted.append((dict(requests), params))

    @property
    def running(self) -> int:
        return sum(len(requests) for requests, _ in self._submitted)

    def poll(self, seconds: float) -> list[tuple[int, Completion]]:
        """Generate everything that was submitted, whatever `seconds`."""
        ended: list[tuple[int, Completion]] = []
        while self._submitted:
            requests, params = self._submitted.pop(0)
            ended += zip(requests, self.generate(list(requests.values()), params), strict=True)
        return ended

    def abort(self) -> list[tuple[int, Completion]]:
        """Forget what was submitted; end a `generate` in another thread after its current step."""
        self._aborted.set()
        forgotten = [(number, Completion()) for requests, _ in self._submitted for number in requests]
        self._submitted.clear()
        return forgotten

    @torch.inference_mode()
    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Completion]:
        """Return one completion per request, in their order. A stop text stays in the response, up to the end
        of the token that completed it.

        Raises EngineError without valid weights, for a request that does not fit the model, and for NaN
        logits."""
        if not self._has_weights:
            state = "without weights: an update must follow start and wake"
            if self._model is None or self._asleep:
                state = "asleep" if self._asleep else "not started"
            raise EngineError(f"rollout engine: generate was called while it is {state}")
        self._aborted.clear()
        if not requests:
            return []
        positions, vocab = self._model.config.max_position_embeddings, self._model.config.vocab_size
        prompts = dict.fromkeys(r.prompt for r in requests)
        longest = max(map(len, prompts))
        check_positions(longest, params.max_tokens, positions)
        for i, prompt in enumerate(prompts):
            if not prompt or min(prompt) < 0 or max(prompt) >= vocab:
                problem = f"is empty or has a token id outside the model's vocabulary of {vocab}"
                raise EngineError(f"rollout: prompt {i} {problem}")
        if params.stop not in self._stopping:  # about a second for a vocabulary of 150,000
            self._stopping[params.stop] = Stopping(
                params.stop, vocab, self.eos_ids, self.tokenizer, self.device
            )
        loop = DecodeLoop(self._model, self.max_batch, requests, params, self._stopping[params.stop])
        try:
            return loop.run(self._aborted)
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
        self.texts, self.tokenizer, self.window = texts, tokenizer, 0
        eos, candidates = torch.zeros(vocab, dtype=torch.bool), torch.ones(vocab, dtype=torch.bool)
        eos[[i for i in eos_ids if i < vocab]] = True
        if texts:
            if tokenizer is None:
                raise EngineError(
                    "rollout.stop: stop texts need a tokenizer, and the engine was made without one"
                )
            self.window = max(len(text.encode()) for text in texts) + 8
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
        """Return whether these tokens (-1: none yet) hold one of the texts."""
        text = self.tokenizer.decode([token for token in tokens if token >= 0], skip_special_tokens=True)
        return any(stop in text for stop in self.texts)


class DecodeLoop:
    """One `generate` call: admits waiting prompts, decodes at most `max_batch` responses at once, ends and
    collects them.

    A row of the batch is one response. Requests with equal prompts share one prefill (unless they are more
    than `max_batch`) and join together, in the order in which their prompts first appear, whenever rows are
    free. Everything per row lives in tensors and becomes Python lists once, at the end."""

    def __init__(
        self,
        model: Any,
        max_batch: int,
        requests: Sequence[Request],
        params: SamplingParams,
        stopping: Stopping,
    ) -> None:
        self.requests, self.params, self.stopping = requests, params, stopping
        self.body, self.head, self.device = model.get_decoder(), model.get_output_embeddings(), model.device
        self.max_batch = min(max_batch, len(requests))
        groups: dict[tuple[int, ...], list[int]] = {}
        for i, request in enumerate(requests):
            groups.setdefault(request.prompt, []).append(i)
        self.waiting = [
            (p, ids[i : i + max_batch]) for p, ids in groups.items() for i in range(0, len(ids), max_batch)
        ]
        self.waiting.reverse()  # the next one is popped from the end
        self.seeds = torch.tensor([r.seed for r in requests], dtype=torch.int64, device=self.device)
        self.cache = KVCache(model.config, self.max_batch, model.dtype, self.device)
        # Per row: the request (len(requests) once it has ended), its seed, newest token, that token's
        # position, and the number of response tokens so far; and its newest tokens, for stop texts.
        self.state = torch.zeros(5, self.max_batch, dtype=torch.int64, device=self.device)
        self.request, self.seed, self.token, self.position, self.count = self.state
        self.newest = self.token.new_full((self.max_batch, stopping.window), -1)
        # Per step: requests, tokens, log-probabilities.
        self.records: list[tuple[Tensor, Tensor, Tensor]] = []
        self.stopped: set[int] = set()
        # Of a mixture whose routing is wanted: what the routers of the layers have just chosen, [tokens,
        # topk] each; what they chose for the prompt of a request, [tokens, layers, topk]; and per step for
        # the rows' tokens: requests, [rows, layers, topk].
        self.experts = model.config.num_experts if params.routing else 0
        self.chosen: list[Tensor] = []
        self.of_prompts: dict[int, Tensor] = {}
        self.of_steps: list[tuple[Tensor, Tensor]] = []

    def run(self, aborted: threading.Event) -> list[Completion]:
        """Return one completion per request. Raises FloatingPointError at NaN logits, with the place."""
        if not self.experts:
            return self._run(aborted)
        hooks = [
            layer.mlp.gate.register_forward_hook(lambda _gate, _inputs, output: self.chosen.append(output[2]))
            for layer in self.body.layers
        ]
        try:
            return self._run(aborted)
        finally:
            for hook in hooks:
                hook.remove()

    def _run(self, aborted: threading.Event) -> list[Completion]:
        while not aborted.is_set() and (self.waiting or self.cache.rows):
            # Rows are filled where enough of them are free to pay for a prefill, or the batch has run empty.
            free = self.max_batch - self.cache.rows
            enough = max(len(self.waiting[-1][1]), self.max_batch // 4) if self.waiting else free + 1
            if not self.cache.rows or free >= enough:
                self._admit()
            else:
                self._step()
            self._sweep()
        return self._completions()

    def _admit(self) -> None:
        """Prefill waiting prompts while their responses fit, and choose each response's first token."""
        cache, taken, free = self.cache, [], self.max_batch - self.cache.rows
        while self.waiting and len(self.waiting[-1][1]) <= free:
            taken.append(self.waiting.pop())
            free -= len(taken[-1][1])
        taken.sort(key=lambda group: len(group[0]))
        self._make_room(len(taken[-1][0]))
        longest = 0
        chunk: list[tuple[tuple[int, ...], list[int]]] = []
        for group in taken:
            longest = len(group[0])
            if chunk and (len(chunk) + 1) * longest > PREFILL_TOKENS:
                self._prefill(chunk)
                chunk = []
            chunk.append(group)
        self._prefill(chunk)
        cache.first = min(cache.first, cache.column - longest)

    def _prefill(self, groups: list[tuple[tuple[int, ...], list[int]]]) -> None:
        cache, device = self.cache, self.device
        prompts = [torch.tensor(p) for p, _ in groups]
        tokens = nn.utils.rnn.pad_sequence(prompts, batch_first=True).to(device)
        lengths = torch.tensor([len(p) for p, _ in groups], device=device)
        source = torch.repeat_interleave(
            torch.arange(len(groups)), torch.tensor([len(ids) for _, ids in groups])
        ).to(device)
        cache.prefilling = True
        position = torch.arange(tokens.shape[1], device=device)[None]
        hidden = self.body(
            input_ids=tokens, position_ids=position, past_key_values=cache, use_cache=True
        ).last_hidden_state
        cache.prefilling = False
        if self.experts:
            chosen = self._take_chosen().unflatten(0, tokens.shape)
            for (prompt, ids), of_prompt in zip(groups, chosen, strict=True):
                self.of_prompts |= dict.fromkeys(ids, of_prompt[: len(prompt)])
        rows = slice(cache.rows, cache.rows + source.numel())
        cache.place(lengths, source)
        self.request[rows] = torch.tensor([i for _, ids in groups for i in ids]).to(device)
        self.seed[rows] = self.seeds[self.request[rows]]
        self.position[rows] = lengths[source] - 1
        self.count[rows] = 0
        self.newest[rows] = -1
        logits = self.head(hidden[torch.arange(len(groups), device=device), lengths - 1])
        self._choose(rows, logits[source])

    def _step(self) -> None:
        """Feed every row's newest token and choose the next."""
        cache = self.cache
        if cache.column == cache.mask.shape[1]:
            self._make_room(0)
        rows = slice(0, cache.rows)
        hidden = self.body(
            input_ids=self.token[rows, None],
            position_ids=self.position[rows, None],
            attention_mask=cache.decode_mask(),
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        cache.column += 1
        if self.experts:
            self.of_steps.append((self.request[rows].clone(), self._take_chosen()))
        self._choose(rows, self.head(hidden[:, 0]))

    def _take_chosen(self) -> Tensor:
        """Return the experts of the forward pass just run, int16 [tokens, layers, topk]."""
        chosen = torch.stack(self.chosen, dim=1).short()
        self.chosen.clear()
        return chosen

    def _choose(self, rows: slice, logits: Tensor) -> None:
        """Choose the next token of `rows` from logits [rows, vocab]; ended rows get request len(requests)."""
        request, count = self.request[rows], self.count[rows]
        token, logprob = choose(logits, self.seed[rows], count, self.params)
        self.records.append((request.clone(), token, logprob))
        self.token[rows] = token
        self.position[rows] += 1
        count += 1
        if self.stopping.texts:
            self._stop_texts(rows, token)
        request.masked_fill_(self.stopping.eos[token] | (count >= self.params.max_tokens), len(self.requests))

    def _stop_texts(self, rows: slice, token: Tensor) -> None:
        """End rows whose newest tokens hold a stop text. Only those that may complete one are decoded."""
        request, window = self.request[rows], self.newest[rows]
        window.copy_(torch.cat([window[:, 1:], token[:, None]], dim=1))
        look = (self.stopping.candidates[token] & (request < len(self.requests))).nonzero()[:, 0]
        tails = zip(look.tolist(), window[look].tolist(), strict=True)
        ended = [row for row, tail in tails if self.stopping.found_in(tail)]
        if ended:
            self.stopped.update(request[ended].tolist())
            request[ended] = len(self.requests)

    def _sweep(self) -> None:
        """Drop ended rows once they are over a sixteenth: live rows from the end take their places."""
        rows = self.cache.rows
        live = self.request[:rows] < len(self.requests)
        status = int(live.sum() + self.records[-1][2].isnan().any() * _NAN)
        if status >= _NAN:
            requests, _, logprobs = self.records[-1]
            request = int(requests[logprobs.isnan()][0])
            token = sum(int((ids == request).sum()) for ids, _, _ in self.records) - 1
            raise FloatingPointError(f"row {request}, response token {token}")
        if rows - status <= rows // 16:
            return
        target = (~live[:status]).nonzero()[:, 0]
        source = live[status:].nonzero()[:, 0] + status
        self.cache.move(source, target, status)
        self.state[:, target] = self.state[:, source]
        self.newest[target] = self.newest[source]

    def _make_room(self, prompt: int) -> None:
        """Lay the cache out anew so that rows of `prompt` tokens fit before its column and some steps behind
        it. Growth is geometric, but never beyond what the live rows can still need."""
        cache = self.cache
        # The newest token is not in the cache yet.
        used = int(self.position[: cache.rows].max()) if cache.rows else 0
        cache.first = cache.column - used
        column = max(used, prompt)
        if prompt > cache.column or cache.column == cache.mask.shape[1] or not cache.rows:
            cache.relayout(column, min(column * 3 // 2 + 128, column + self.params.max_tokens))

    def _completions(self) -> list[Completion]:
        if not self.records:
            return [Completion() for _ in self.requests]
        total = len(self.requests)
        requests = torch.cat([r for r, _, _ in self.records]).cpu()
        order = requests.argsort(stable=True)[: int((requests < total).sum())]
        ends = [0, *torch.bincount(requests[order], minlength=total).cumsum(0).tolist()]
        tokens = torch.cat([t for _, t, _ in self.records]).cpu()[order].tolist()
        logprobs = torch.cat([p for _, _, p in self.records]).cpu()[order].tolist()
        eos = set(self.stopping.eos.nonzero()[:, 0].tolist())
        fed = self._fed(total) if self.experts else []
        completions = []
        for i in range(total):
            span = slice(ends[i], ends[i + 1])
            completion = Completion(tokens[span], logprobs[span], "abort")
            if i in self.stopped or (completion.tokens and completion.tokens[-1] in eos):
                completion.finish = "stop"
            elif len(completion.tokens) == self.params.max_tokens:
                completion.finish = "length"
            if self.experts:
                chosen = torch.cat([self.of_prompts[i].cpu(), fed[i]]).numpy()
                length = len(self.requests[i].prompt) + len(completion.tokens)
                completion.routing = routing_array(chosen, length, self.experts)
            completions.append(completion)
        return completions

    def _fed(self, total: int) -> Sequence[Tensor]:
        """Return the experts of each request's response tokens but the last, [tokens, layers, topk]."""
        if not self.of_steps:
            return [self.of_prompts[i].cpu()[:0] for i in range(total)]
        requests = torch.cat([r for r, _ in self.of_steps]).cpu()
        order = requests.argsort(stable=True)[: int((requests < total).sum())]
        chosen = torch.cat([c for _, c in self.of_steps]).cpu()[order]
        return chosen.split(torch.bincount(requests[order], minlength=total).tolist())


class KVCache:
    """Keys and values per layer [rows, kv_heads, columns, dim], and the mask [rows, columns] (0 from a row's
    start, else -inf).

    Rows are right-aligned: every row's newest token stands in the same column, a row's first token in its own
    start column, so that one step of all rows is written with one copy and a row's mask never changes while
    it lives.

    What attention sees starts at a multiple of ALIGNMENT columns: those before the first row's start are
    masked.

    Passed to transformers' forward as `past_key_values`, whose attention layers call only `update`. While
    `prefilling`, keys and values are set aside for `place`; otherwise the one new column is written at
    `column`."""

    def __init__(self, config: Any, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        heads, layers = config.num_attention_heads, config.num_hidden_layers
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        self.keys = [torch.zeros(rows, kv_heads, 0, dim, dtype=dtype, device=device) for _ in range(layers)]
        self.values = [torch.zeros_like(k) for k in self.keys]
        self.mask = torch.full((rows, 0), -torch.inf, dtype=dtype, device=device)
        self.column = 0  # columns in use: the next token goes here
        self.first = 0  # no live row starts before this column
        self.rows = 0  # live rows: 0..rows-1
        self.align = ALIGNMENT[device.type]
        self.prefilling = False
        self._aside: list[tuple[Tensor, Tensor]] = []

    def update(
        self, key: Tensor, value: Tensor, layer: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Add a layer's new keys and values [rows, kv_heads, new, dim]; return all that it attends to."""
        if self.prefilling:
            self._aside.append((key, value))
            return key, value
        rows, column = self.rows, self.column
        keys, values = self.keys[layer], self.values[layer]
        keys[:rows, :, column] = key[:, :, 0]
        values[:rows, :, column] = value[:, :, 0]
        seen = slice(self._seen_from, column + 1)
        return keys[:rows, :, seen], values[:rows, :, seen]

    @property
    def _seen_from(self) -> int:
        return self.first // self.align * self.align

    def decode_mask(self) -> Tensor:
        """Return the additive mask [rows, 1, 1, columns that attention sees] of the next step."""
        return self.mask[: self.rows, None, None, self._seen_from : self.column + 1]

    def place(self, lengths: Tensor, source: Tensor) -> None:
        """Append one row per entry of `source`: prompt source[i] of the prefill just run, lengths[source[i]]
        tokens long, ending before `column` (the caller made room). lengths: int64 [prompts]; source: int64
        [new rows]."""
        width = self._aside[0][0].shape[2]
        new = slice(self.rows, self.rows + source.numel())
        left = self.column - width
        # Right-padded prompts become right-aligned; what lies before a prompt's start is masked.
        at = torch.arange(width, device=lengths.device) - (width - lengths)[:, None]
        mask = torch.zeros(at.shape, dtype=self.mask.dtype, device=at.device).masked_fill_(at < 0, -torch.inf)
        self.mask[new] = -torch.inf
        self.mask[new, left : self.column] = mask[source]
        self.mask[new, self.column :] = 0
        index = at.clamp_(min=0)[:, None, :, None]
        for layer, pair in enumerate(self._aside):
            for cache, fresh in zip((self.keys[layer], self.values[layer]), pair, strict=True):
                aligned = fresh.gather(2, index.expand(-1, fresh.shape[1], -1, fresh.shape[3]))
                cache[new, :, left : self.column] = aligned[source]
        self._aside.clear()
        self.rows += source.numel()

    def move(self, source: Tensor, target: Tensor, rows: int) -> None:
        """Copy rows `source` over rows `target`; then only the first `rows` rows live."""
        used = slice(self.first, self.column)
        for cache in (*self.keys, *self.values):
            cache[target, :, used] = cache[source, :, used]
        self.mask[target] = self.mask[source]
        self.rows = rows

    def relayout(self, column: int, columns: int) -> None:
        """Move the live content so that the next token's column is `column`, in a cache of at least
        `columns`."""
        used = self.column - self.first
        first = column - used
        columns = -(-columns // self.align) * self.align
        for caches in (self.keys, self.values):
            for layer, old in enumerate(caches):
                # Zeros, not empty: masked columns get weight 0, and 0 times an uninitialised NaN is NaN.
                fresh = old.new_zeros(old.shape[0], old.shape[1], columns, old.shape[3])
                fresh[: self.rows, :, first:column] = old[: self.rows, :, self.first : self.column]
                caches[layer] = fresh
        mask = torch.full(
            (self.mask.shape[0], columns), -torch.inf, dtype=self.mask.dtype, device=self.mask.device
        )
        mask[: self.rows, first:column] = self.mask[: self.rows, self.first : self.column]
        mask[: self.rows, column:] = 0
        self.mask, self.first, self.column = mask, first, column


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Implement transformers' attention interface: query [rows, heads, q, dim], key and value [rows,
    kv_heads, k, dim] -> [rows, q, heads, dim].

    In decoding (q = 1) the query heads that share a key head are treated as queries of one head, so that
    grouped keys are never repeated. Without a mask (prefill) attention is causal."""
    rows, heads, length, dim = query.shape
    kv_heads = key.shape[1]
    scale = kwargs["scaling"]
    if length == 1:
        grouped = query.view(rows, kv_heads, heads // kv_heads, dim)
        out = F.scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scale)
        return out.view(rows, 1, heads, dim), None
    out = F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scale, enable_gqa=heads != kv_heads
    )
    return out.transpose(1, 2), None


AttentionInterface.register(ATTENTION, attention)
