"""Decoding with a transformers model: prefix sharing and continuous admission."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from msgspec import structs
from torch import Tensor

from megarl.config.errors import EngineError
from megarl.data.sample import TokenData, join_sampling_sets
from megarl.rollout.engines.base import GenerationRequest
from megarl.rollout.engines.transformers_layers import COLUMNS, Block, KVCache, round_up
from megarl.rollout.sampling import SamplingParams, choose, choose_with_set, routing_array, stop_window
from megarl.weights.families import Sizes

PREFILL_TOKENS = 16384  # padded tokens of a forward pass, with those before its segments
_NAN = 1 << 40  # added to the count of live rows if one has NaN, for one copy to the host


class Stopping:
    """End-of-sequence tokens and stop texts.

    eos         bool [vocab]
    candidates  tokens that may complete a stop text, bool [vocab]"""

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
            num_tokens = min(vocab, len(tokenizer))
            last_chars = {text[-1] for text in texts}
            # Part of a character decodes to U+FFFD; a lone space may be stripped.
            pieces = tokenizer.batch_decode([[i] for i in range(num_tokens)], skip_special_tokens=False)
            candidates[:num_tokens] = torch.tensor(
                [
                    " " in last_chars or "\ufffd" in piece or not last_chars.isdisjoint(piece)
                    for piece in pieces
                ]
            )
        self.eos, self.candidates = eos.to(device), candidates.to(device)

    def found_in(self, tokens: list[int]) -> bool:
        text = self.tokenizer.decode(tokens, skip_special_tokens=False)
        return any(stop in text for stop in self.texts)

    def ends(self, tokens: list[int]) -> bool:
        return tokens[-1] in self.eos_ids or (bool(self.texts) and self.found_in(tokens[-self.window :]))


class DecodeLoop:
    """Decodes at most `max_batch` requests, one row each. Waiting prompts take free rows.

    On a CPU in float32 this is bitwise batch-invariant, except for mixtures of experts. A library's order of
    summation depends on its operands' shapes, so these may not depend on other responses: see Block,
    decode_attention, prefill_attention and _width."""

    def __init__(
        self,
        model: Any,
        block: Block,
        max_batch: int,
        params: SamplingParams,
        stopping: Stopping,
        version: int,
    ) -> None:
        self.version = version  # of the weights
        self.changes: dict[int, list[tuple[int, int]]] = {}  # by key: (first response tokens, their version)
        self.params, self.stopping, self.max_batch, self.block = params, stopping, max_batch, block
        self.body, self.head, self.device = model.get_decoder(), model.get_output_embeddings(), model.device
        self.requests: dict[int, GenerationRequest] = {}
        self.waiting: list[tuple[tuple[int, ...], list[int]]] = []
        self.experts = Sizes.from_config(model.config.to_dict()).experts if params.routing else 0
        self.chosen: list[Tensor] = []  # recorded in this pass, by layer, [tokens, topk]
        self.set_width = min(params.top_k, model.config.vocab_size) if params.sampling_sets else 0
        self.cache = KVCache(model, self.experts, self.set_width)
        # Per row: key (-1: none), seed, newest token and its position, number of response tokens and their
        # limit. Rows from `used` to the end of a block are computed and ignored.
        self.state = torch.zeros(6, self.block.get_capacity(max_batch), dtype=torch.int64, device=self.device)
        self.key, self.seed, self.token, self.position, self.count, self.limit = self.state
        self.highest = 0  # upper bound of `limit`
        self.live = torch.zeros_like(self.key, dtype=torch.bool)
        self.nan = torch.zeros_like(self.live)
        self.key.fill_(-1)
        self.used = 0
        self.longest = 0  # upper bound of `position`

    def add(self, requests: Mapping[int, GenerationRequest]) -> None:
        self.requests |= requests
        self.highest = max(self.highest, *(request.limit(self.params) for request in requests.values()))
        keys_by_prompt: dict[tuple[int, ...], list[int]] = {}
        for key, request in requests.items():
            keys_by_prompt.setdefault(request.context, []).append(key)
        max_batch = self.max_batch
        groups = [
            (prompt, keys[i : i + max_batch])
            for prompt, keys in keys_by_prompt.items()
            for i in range(0, len(keys), max_batch)
        ]
        self.waiting = groups[::-1] + self.waiting

    def change_weights(self, version: int, *, recompute: bool) -> None:
        """Note that later tokens have this version. recompute: their KV cache, by the new weights."""
        if recompute:
            prefixes = self.take_partials()
            waiting, self.waiting = self.waiting, []
            if prefixes:
                self.add(
                    {key: replace(request, prefix=prefix) for key, (request, prefix) in prefixes.items()}
                )
            self.waiting = waiting + self.waiting
        else:
            for key, count in self.state[[0, 4], : self.used].T.tolist():
                self.changes.setdefault(key, []).append((count, self.version))
        self.version = version

    def take_partials(self) -> dict[int, tuple[GenerationRequest, TokenData]]:
        """Remove unfinished responses that have tokens. Between calls of `run` no other rows are used."""
        requests = {int(key): self.requests[int(key)] for key in self.key[: self.used]}
        responses = self._take(torch.arange(self.used, device=self.device))
        self.live[: self.used], self.position[: self.used] = False, 0
        self.used = self.longest = 0
        return {key: (requests[key], structs.replace(data, finish_reason="abort")) for key, data in responses}

    def run(self, seconds: float, should_end: Callable[[], bool]) -> list[tuple[int, TokenData]]:
        """Decode until all requests are finished, for `seconds` or until `should_end()`.

        Returns finished responses. Raises FloatingPointError at NaN logits."""
        hooks = [
            layer.mlp.gate.register_forward_hook(lambda _gate, _inputs, output: self.chosen.append(output[2]))
            for layer in (self.body.layers if self.experts else ())
            if hasattr(layer.mlp, "gate")
        ]
        responses: list[tuple[int, TokenData]] = []
        deadline = time.monotonic() + seconds
        try:
            while self.requests:
                free_rows = self.max_batch - self.used
                needed_rows = (
                    max(len(self.waiting[-1][1]), self.max_batch // 4) if self.waiting else free_rows + 1
                )
                if not self.used or free_rows >= needed_rows:
                    self._admit()
                else:
                    self._step()
                is_late = time.monotonic() >= deadline or should_end()
                responses += self._sweep(at_once=is_late)
                if is_late:
                    break
        finally:
            for hook in hooks:
                hook.remove()
        return responses

    def _admit(self) -> None:
        groups, free_rows = [], self.max_batch - self.used
        while self.waiting and len(self.waiting[-1][1]) <= free_rows:
            groups.append(self.waiting.pop())
            free_rows -= len(groups[-1][1])
        self.longest = max(self.longest, *(len(prompt) for prompt, _ in groups))
        self._make_room(self.max_batch - free_rows)
        # Segments cannot pass on states of linear attention.
        segments = split_prompts([prompt for prompt, _ in groups], shared=not self.cache.states)
        rows_by_prompt, first_row = dict[int, range](), self.used
        for prompt in (segment.prompts[0] for segment in segments if segment.ends):
            rows_by_prompt[prompt] = range(first_row, first_row + len(groups[prompt][1]))
            first_row = rows_by_prompt[prompt].stop
        batch: list[Segment] = []
        for segment in segments:
            max_segments = PREFILL_TOKENS // (segment.start + segment.width)
            if batch and (batch[0][:2] != segment[:2] or len(batch) >= max_segments):
                self._prefill(batch, groups, rows_by_prompt)
                batch = []
            batch.append(segment)
        self._prefill(batch, groups, rows_by_prompt)

    def _prefill(
        self,
        segments: Sequence[Segment],
        groups: Sequence[tuple[tuple[int, ...], list[int]]],
        rows_by_prompt: Mapping[int, range],
    ) -> None:
        cache, device, (start, width) = self.cache, self.device, segments[0][:2]
        stop = start + width
        prompts = [groups[segment.prompts[0]][0][:stop] for segment in segments]
        tokens = torch.tensor([prompt + (0,) * (stop - len(prompt)) for prompt in prompts]).to(device)
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        rows_by_segment = [
            [row for prompt in segment.prompts for row in rows_by_prompt[prompt]] for segment in segments
        ]
        first_rows = torch.tensor([segment_rows[0] for segment_rows in rows_by_segment], device=device)
        with cache.prefill(start, first_rows, lengths):
            hidden = self.body(
                input_ids=tokens[:, start:],
                position_ids=torch.arange(start, stop, device=device)[None],
                past_key_values=cache,
                use_cache=True,
            ).last_hidden_state
        chosen = self._take_chosen().unflatten(0, hidden.shape[:2]) if self.experts else None
        source = torch.tensor(
            [i for i, segment_rows in enumerate(rows_by_segment) for _ in segment_rows], device=device
        )
        cache.place(torch.tensor([*chain.from_iterable(rows_by_segment)], device=device), source, chosen)
        final_segments = [i for i, segment in enumerate(segments) if segment.ends]
        if not final_segments:
            return
        keys = [key for i in final_segments for key in groups[segments[i].prompts[0]][1]]
        requests = [self.requests[key] for key in keys]
        new_rows = slice(self.used, self.used + len(keys))
        source = torch.tensor([i for i in final_segments for _ in rows_by_segment[i]], device=device)
        self.key[new_rows], self.live[new_rows] = torch.tensor(keys).to(device), True
        self.seed[new_rows], self.limit[new_rows] = torch.tensor(
            [[request.seed for request in requests], [request.limit(self.params) for request in requests]]
        ).to(device)
        self.position[new_rows] = lengths[source] - 1
        self.count[new_rows] = torch.tensor([request.prefix_length for request in requests], device=device)
        cache.tokens[new_rows, :stop] = tokens[source]
        self.used = new_rows.stop
        # Head and sampler get whole blocks, too.
        final_indices = torch.tensor(final_segments, device=device)
        last_hidden = hidden.new_zeros(self.block.pad(len(final_indices)), hidden.shape[2])
        last_hidden[: len(final_indices)] = hidden[final_indices, lengths[final_indices] - 1 - start]
        logit_index = source.new_zeros(self.block.pad(len(keys)))
        logit_index[: len(keys)] = torch.searchsorted(final_indices, source)
        self._choose(
            slice(new_rows.start, new_rows.start + len(logit_index)), self.head(last_hidden)[logit_index]
        )

    def _step(self) -> None:
        self._make_room(self.used)
        cache, rows = self.cache, slice(0, self.block.pad(self.used))
        mask = cache.attend(self.position[rows], self.longest)
        # A block takes the place of a sequence, for `BlockLinear`.
        hidden = self.body(
            input_ids=self.token[rows].view(-1, self.block.rows),
            position_ids=self.position[rows].view(-1, self.block.rows),
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        if self.experts:
            row_index = torch.arange(rows.stop, device=self.device)
            cache.chosen[row_index, self.position[rows]] = self._take_chosen()
        self.longest += 1
        self._choose(rows, self.head(hidden).flatten(0, 1))

    def _take_chosen(self) -> Tensor:
        """Return the pass's experts, int16 [tokens, layers, topk]; 0 for dense first layers."""
        chosen = torch.stack(self.chosen, dim=1).short()
        self.chosen.clear()
        return F.pad(chosen, (0, 0, len(self.body.layers) - chosen.shape[1], 0))

    def _choose(self, rows: slice, logits: Tensor) -> None:
        cache, live, count = self.cache, self.live[rows], self.count[rows]
        sets = None
        if self.set_width:
            token, logprob, sets = choose_with_set(logits, self.seed[rows], count, self.params)
        else:
            token, logprob = choose(logits, self.seed[rows], count, self.params)
        self.token[rows] = token
        self.nan[rows] = logprob.isnan() & live
        self.position[rows] += live
        count += live
        # A finished row's new token goes behind its end.
        offsets = cache.starts[rows] + self.position[rows] + ~live
        cache.tokens.view(-1).index_copy_(0, offsets, token)
        cache.logprobs.view(-1).index_copy_(0, offsets, logprob)
        if sets is not None:
            cache.sets.view(-1, self.set_width).index_copy_(0, offsets, sets)
        if self.stopping.texts:
            self._stop_texts(rows, token)
        live &= ~self.stopping.eos[token] & (count < self.limit[rows])

    def _stop_texts(self, rows: slice, token: Tensor) -> None:
        """End rows whose newest tokens contain a stop text."""
        candidate_rows = (self.stopping.candidates[token] & self.live[rows]).nonzero()[:, 0] + rows.start
        ends, counts = self.position[candidate_rows].tolist(), self.count[candidate_rows].tolist()
        for row, end, count in zip(candidate_rows.tolist(), ends, counts, strict=True):
            start = end + 1 - min(count, self.stopping.window)
            if self.stopping.found_in(self.cache.tokens[row, start : end + 1].tolist()):
                self.live[row] = False

    def _sweep(self, at_once: bool) -> list[tuple[int, TokenData]]:
        """Remove and return finished rows if over a sixteenth, or `at_once`."""
        used = self.used
        live = self.live[:used]
        live_count = int(live.sum() + self.nan.any() * _NAN)
        if live_count >= _NAN:
            row = int(self.nan.nonzero()[0])
            raise FloatingPointError(f"row {int(self.key[row])}, response token {int(self.count[row]) - 1}")
        if live_count == used or (not at_once and used - live_count <= used // 16):
            return []
        responses = self._take((~live).nonzero()[:, 0])
        target = (~live[:live_count]).nonzero()[:, 0]
        source = live[live_count:].nonzero()[:, 0] + live_count
        self.cache.move(source, target, self.longest + 1)
        self.state[:, target] = self.state[:, source]
        self.live[:live_count], self.live[live_count:used] = True, False
        self.position[live_count:used] = 0
        self.used = live_count
        self.longest = int(self.position[:live_count].max()) if live_count else 0
        return responses

    def _take(self, rows: Tensor) -> list[tuple[int, TokenData]]:
        cache, columns = self.cache, self.longest + 1
        tokens, logprobs = cache.tokens[rows, :columns].cpu(), cache.logprobs[rows, :columns].cpu()
        chosen = cache.chosen[rows].cpu().numpy() if self.experts else None
        responses = []
        for row, (key, end, count, limit) in enumerate(self.state[[0, 3, 4, 5]][:, rows].T.tolist()):
            span = slice(end + 1 - count, end + 1)
            # A view would keep all rows' log-probs.
            data = TokenData(tokens[row, span].numpy(), logprobs[row, span].numpy().copy())
            first_new, prefix = 0, self.requests[key].prefix
            if prefix is not None:
                first_new = prefix.num_tokens
                data.logprobs[:first_new] = prefix.logprobs
            if self.set_width:
                sets = cache.sets[rows[row], span][first_new:].cpu().numpy()
                prefix_sets = None if prefix is None else prefix.sampling_sets
                data.sampling_sets = join_sampling_sets(((first_new, prefix_sets), (len(sets), sets)))
            is_stopped = count < limit or self.stopping.ends(data.tokens.tolist())
            data.finish_reason = "stop" if is_stopped else "length"
            if chosen is not None:
                data.routed_experts = routing_array(chosen[row, :end], end + 1, self.experts)
            data.policy_versions = self._get_versions(key, data.num_tokens)
            del self.requests[key]
            responses.append((key, data))
        return responses

    def _get_versions(self, key: int, count: int) -> np.ndarray:
        versions = np.full(count, self.version, np.int32)
        for end, version in reversed(self.changes.pop(key, [])):
            versions[:end] = version
        prefix = self.requests[key].prefix
        if prefix is not None and prefix.policy_versions is not None:
            versions[: prefix.num_tokens] = prefix.policy_versions
        return versions

    def _make_room(self, rows: int) -> None:
        """Grow the cache to `rows` rows, and columns geometrically."""
        # Finished rows write one token more, see `_choose`.
        rows, columns = self.block.get_capacity(rows), self.longest + 3
        if rows > self.cache.rows or columns > self.cache.columns:
            new_columns = min(columns * 3 // 2 + 128, columns + self.highest)
            self.cache.reserve(rows, new_columns if columns > self.cache.columns else 0)


class Segment(NamedTuple):
    start: int
    width: int
    prompts: list[int]
    ends: bool  # its only prompt ends in it


def split_prompts(prompts: Sequence[tuple[int, ...]], shared: bool) -> list[Segment]:
    """Cut prompts into segments, ordered by start.

    shared: common beginnings, of whole COLUMNS, are segments; else each prompt is one"""

    def get_chunk_key(number: int, start: int) -> object:
        """Return a key of the tokens from `start`, unique at the prompt's end."""
        tokens = prompts[number][start : start + COLUMNS + 1]
        return tokens[:-1] if shared and len(tokens) > COLUMNS else number

    segments, stack = list[Segment](), [(0, list(range(len(prompts))))]
    while stack:
        start, group = stack.pop()
        numbers_by_chunk: dict[object, list[int]] = {}
        for number in group:
            numbers_by_chunk.setdefault(get_chunk_key(number, start), []).append(number)
        for numbers in numbers_by_chunk.values():
            if len(numbers) == 1:
                segments.append(Segment(start, _width(prompts[numbers[0]]) - start, numbers, True))
                continue
            stop = start + COLUMNS
            while len({get_chunk_key(number, stop) for number in numbers}) == 1:
                stop += COLUMNS
            segments.append(Segment(start, stop - start, numbers, False))
            stack.append((stop, numbers))
    return sorted(segments, key=lambda segment: segment[:2])


def _width(prompt: tuple[int, ...]) -> int:
    """Return a prompt's padded length, less than COLUMNS more.

    It must not depend on other prompts, as block sizes of torch's attention depend on it."""
    return round_up(len(prompt), min(COLUMNS, max(16, (1 << (len(prompt) - 1).bit_length()) // 8)))
