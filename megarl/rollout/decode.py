"""One `generate` call of the transformers engine: admission of waiting prompts, the decode loop, stopping, and the results.

Everything per row lives in tensors and is turned into Python lists once, at the end. A row of the batch is one response.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megarl.config.errors import EngineError
from megarl.rollout.engine import Completion, Request, SamplingParams
from megarl.rollout.kv_cache import KVCache
from megarl.rollout.sampling import choose

PREFILL_TOKENS = 16384  # padded prompt tokens in one forward pass
_NAN = 1 << 40  # added to the count of live rows when one of them holds NaN, so that one device-to-host copy carries both


@dataclass(frozen=True)
class Model:
    """What the loop needs of a transformers model: `body` gives hidden states, `head` logits. `version` is for messages."""

    body: nn.Module
    head: nn.Module
    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    version: int


@dataclass(frozen=True)
class Stopping:
    """eos: bool [vocab]. With stop texts: `candidates`, bool [vocab], the tokens that may complete one; `window`, the newest tokens
    that must be looked at; `text`, from token ids to text."""

    eos: Tensor
    texts: tuple[str, ...] = ()
    candidates: Tensor | None = None
    window: int = 0
    text: Callable[[list[int]], str] = lambda ids: ""


class DecodeLoop:
    """Decodes `requests`, at most `max_batch` at once. Requests with equal prompts share one prefill (unless they are more than
    `max_batch`) and join together, in the order in which their prompts first appear, whenever rows are free."""

    def __init__(
        self,
        model: Model,
        requests: Sequence[Request],
        params: SamplingParams,
        max_batch: int,
        stopping: Stopping,
        aborted: Callable[[], bool],
    ) -> None:
        self.model, self.params, self.stopping, self.aborted = model, params, stopping, aborted
        self.requests = requests
        self.max_batch = min(max_batch, len(requests))
        groups: dict[tuple[int, ...], list[int]] = {}
        for i, request in enumerate(requests):
            groups.setdefault(request.prompt, []).append(i)
        self.waiting = [(p, ids[i : i + max_batch]) for p, ids in groups.items() for i in range(0, len(ids), max_batch)]
        self.waiting.reverse()  # the next one is popped from the end
        device = model.device
        self.seeds = torch.tensor([r.seed for r in requests], dtype=torch.int64, device=device)
        self.cache = KVCache(model.layers, self.max_batch, model.kv_heads, model.head_dim, 0, model.dtype, device)
        # Per row: the request (len(requests) once it has ended), its seed, its newest token, that token's position, response tokens so far.
        self.state = torch.zeros(5, self.max_batch, dtype=torch.int64, device=device)
        self.request, self.seed, self.token, self.position, self.count = self.state
        self.newest = torch.full((self.max_batch, stopping.window), -1, dtype=torch.int64, device=device) if stopping.texts else None
        self.records: list[tuple[Tensor, Tensor, Tensor]] = []  # per step: requests, tokens, log-probabilities
        self.stopped: set[int] = set()

    def run(self) -> list[Completion]:
        """One completion per request. Raises EngineError where logits are NaN."""
        while not self.aborted():
            if self.waiting and self._worth_admitting():
                self._admit()
            elif self.cache.rows:
                self._step()
            else:
                break
            self._sweep()
        return self._completions()

    def _worth_admitting(self) -> bool:
        """Joining costs a prefill: not for a few rows, unless the batch has run empty."""
        free = self.max_batch - self.cache.rows
        return not self.cache.rows or free >= max(len(self.waiting[-1][1]), self.max_batch // 4)

    def _admit(self) -> None:
        """Prefills waiting prompts while their responses fit, and chooses each response's first token."""
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
        model, cache, device = self.model, self.cache, self.model.device
        prompts = [torch.tensor(p) for p, _ in groups]
        tokens = nn.utils.rnn.pad_sequence(prompts, batch_first=True).to(device)
        lengths = torch.tensor([len(p) for p, _ in groups], device=device)
        source = torch.repeat_interleave(torch.arange(len(groups)), torch.tensor([len(ids) for _, ids in groups])).to(device)
        cache.prefilling = True
        position = torch.arange(tokens.shape[1], device=device)[None]
        hidden = model.body(input_ids=tokens, position_ids=position, past_key_values=cache, use_cache=True).last_hidden_state
        cache.prefilling = False
        rows = slice(cache.rows, cache.rows + source.numel())
        cache.place(lengths, source)
        self.request[rows] = torch.tensor([i for _, ids in groups for i in ids]).to(device)
        self.seed[rows] = self.seeds[self.request[rows]]
        self.position[rows] = lengths[source] - 1
        self.count[rows] = 0
        if self.newest is not None:
            self.newest[rows] = -1
        logits = model.head(hidden[torch.arange(len(groups), device=device), lengths - 1])
        self._choose(rows, logits[source])

    def _step(self) -> None:
        """Feeds every row's newest token and chooses the next."""
        cache = self.cache
        if cache.column == cache.columns:
            self._make_room(0)
        rows = slice(0, cache.rows)
        hidden = self.model.body(
            input_ids=self.token[rows, None],
            position_ids=self.position[rows, None],
            attention_mask=cache.decode_mask(),
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        cache.column += 1
        self._choose(rows, self.model.head(hidden[:, 0]))

    def _choose(self, rows: slice, logits: Tensor) -> None:
        """The next token of `rows` from logits [rows, vocab]; rows that end with it get the request number len(requests)."""
        request, count = self.request[rows], self.count[rows]
        token, logprob = choose(logits, self.seed[rows], count, self.params)
        self.records.append((request.clone(), token, logprob))
        self.token[rows] = token
        self.position[rows] += 1
        count += 1
        if self.newest is not None:
            self._stop_texts(rows, token)
        request.masked_fill_(self.stopping.eos[token] | (count >= self.params.max_tokens), len(self.requests))

    def _stop_texts(self, rows: slice, token: Tensor) -> None:
        """Ends rows whose newest tokens hold a stop text. Only rows whose token can complete one are turned into text."""
        assert self.newest is not None and self.stopping.candidates is not None
        request, window = self.request[rows], self.newest[rows]
        window.copy_(torch.cat([window[:, 1:], token[:, None]], dim=1))
        look = (self.stopping.candidates[token] & (request < len(self.requests))).nonzero()[:, 0]
        ended = []
        for row, tail in zip(look.tolist(), window[look].tolist(), strict=True):
            text = self.stopping.text([t for t in tail if t >= 0])
            if any(stop in text for stop in self.stopping.texts):
                ended.append(row)
        if ended:
            self.stopped.update(request[ended].tolist())
            request[ended] = len(self.requests)

    def _sweep(self) -> None:
        """Drops ended rows once they are more than a sixteenth: live rows from the end are moved into their places."""
        rows = self.cache.rows
        live = self.request[:rows] < len(self.requests)
        status = int(live.sum() + self.records[-1][2].isnan().any() * _NAN)
        if status >= _NAN:
            raise self._nan_error()
        if rows - status <= rows // 16:
            return
        target = (~live[:status]).nonzero()[:, 0]
        source = live[status:].nonzero()[:, 0] + status
        self.cache.move(source, target, status)
        self.state[:, target] = self.state[:, source]
        if self.newest is not None:
            self.newest[target] = self.newest[source]

    def _make_room(self, prompt: int) -> None:
        """Lays the cache out anew so that rows of `prompt` tokens fit before its column and some steps behind it. Growth is geometric, but
        never beyond what the live rows can still need."""
        cache = self.cache
        used = int(self.position[: cache.rows].max()) if cache.rows else 0  # the newest token is not in the cache yet
        cache.first = cache.column - used
        column = max(used, prompt)
        if prompt > cache.column or cache.column == cache.columns or not cache.rows:
            cache.relayout(column, min(column * 3 // 2 + 128, column + self.params.max_tokens))

    def _nan_error(self) -> EngineError:
        requests, _, logprobs = self.records[-1]
        request = int(requests[logprobs.isnan()][0])
        token = sum(int((ids == request).sum()) for ids, _, _ in self.records) - 1
        return EngineError(
            f"rollout: NaN logits in row {request}, response token {token}, with weight version {self.model.version} "
            "(the weights or the last update are damaged; look at the update before this version)"
        )

    def _completions(self) -> list[Completion]:
        total = len(self.requests)
        requests = torch.cat([r for r, _, _ in self.records]).cpu() if self.records else torch.empty(0, dtype=torch.int64)
        order = requests.argsort(stable=True)[: int((requests < total).sum())]
        ends = [0, *torch.bincount(requests[order], minlength=total).cumsum(0).tolist()]
        tokens = torch.cat([t for _, t, _ in self.records]).cpu()[order].tolist() if self.records else []
        logprobs = torch.cat([p for _, _, p in self.records]).cpu()[order].tolist() if self.records else []
        eos = set(self.stopping.eos.nonzero()[:, 0].tolist())
        completions = []
        for i in range(total):
            span = slice(ends[i], ends[i + 1])
            completion = Completion(tokens[span], logprobs[span], "abort")
            if i in self.stopped or (completion.tokens and completion.tokens[-1] in eos):
                completion.finish = "stop"
            elif len(completion.tokens) == self.params.max_tokens:
                completion.finish = "length"
            completions.append(completion)
        return completions
