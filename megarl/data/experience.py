"""Experience: the packed, columnar batch that travels through the phases of a step; its file, which is whole
or not there; and which of its sequences share a micro-batch or go to one rank, from lengths alone, the same
on every rank."""

from __future__ import annotations

import hashlib
import heapq
import os
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megarl.config.errors import DataError
from megarl.config.files import fsync

_PARTS = ("tokens", "cu_seqlens", "response_mask")


@dataclass
class Experience:
    """n prompt+response sequences, packed without padding into T tokens.

    tokens         int64 [T]    sequence after sequence, each prompt followed by its response
    cu_seqlens     int64 [n+1]  sequence i is tokens[cu_seqlens[i]:cu_seqlens[i+1]]
    response_mask  bool  [T]    True on response tokens (the end-of-sequence token included): those that the
                                policy sampled. The prompt is what lies before the first of them; what lies
                                between two was shown to the policy between its turns (an observation)
    columns        name -> Tensor: [T] (one entry a token) or [n] (one entry a response)

    A token column is aligned with the token it is about: `logprobs[t]` is log pi(tokens[t] | tokens before
    t), and `values[t]` is V(s_t), the value of the state in which tokens[t] was chosen. Outside the response
    mask they are 0.
    """

    tokens: Tensor
    cu_seqlens: Tensor
    response_mask: Tensor
    columns: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        total = int(self.cu_seqlens[-1])
        if self.tokens.shape != (total,) or self.response_mask.shape != (total,):
            shapes = (tuple(self.tokens.shape), tuple(self.response_mask.shape))
            raise ValueError(f"tokens and response_mask must both be [{total}] (got {shapes})")
        for name, column in self.columns.items():
            self[name] = column

    def __getitem__(self, name: str) -> Tensor:
        return self.columns[name]

    def __setitem__(self, name: str, column: Tensor) -> None:
        if column.shape[0] not in (self.num_tokens, self.num_sequences):
            expected = f"{self.num_tokens} tokens or {self.num_sequences} responses"
            raise ValueError(
                f"column {name}: must have an entry for each of {expected} (got {column.shape[0]})"
            )
        self.columns[name] = column

    def __contains__(self, name: str) -> bool:
        return name in self.columns

    @property
    def num_sequences(self) -> int:
        return self.cu_seqlens.numel() - 1

    @property
    def num_tokens(self) -> int:
        return int(self.cu_seqlens[-1])

    @property
    def lengths(self) -> Tensor:
        """Return the prompt + response tokens of each sequence, int64 [n]."""
        return self.cu_seqlens.diff()

    @property
    def sequence_ids(self) -> Tensor:
        """Return the sequence that each token belongs to, int64 [T]."""
        numbers = torch.arange(self.num_sequences, device=self.cu_seqlens.device)
        return torch.repeat_interleave(numbers, self.lengths)

    @property
    def response_lengths(self) -> Tensor:
        """Return the response tokens of each sequence, int64 [n]; observations are not among them."""
        none = torch.zeros_like(self.cu_seqlens[1:])
        return none.index_add_(0, self.sequence_ids, self.response_mask.long())

    @property
    def prompt_lengths(self) -> Tensor:
        """Return the tokens before the first response token of each sequence, int64 [n]; all of them where it
        has none."""
        start, end = self.cu_seqlens[:-1], self.cu_seqlens[1:]
        own = torch.cat([self.response_mask.nonzero().squeeze(-1), self.cu_seqlens[-1:]])
        return torch.minimum(own[torch.searchsorted(own, start)], end) - start

    @property
    def drawn(self) -> Tensor:
        """Return which response tokens this step's rollout has sampled, bool [T].

        The column `begun` [n], if there is one, counts the first tokens of each response that earlier steps
        have sampled (`rollout.window`)."""
        if "begun" not in self:
            return self.response_mask
        so_far = torch.cat([self.cu_seqlens[:1], self.response_mask.cumsum(0)])
        before = so_far[self.cu_seqlens[:-1]] + self["begun"]
        return self.response_mask & (so_far[1:] > torch.repeat_interleave(before, self.lengths))

    @property
    def unfinished(self) -> Tensor:
        """Return which responses go on in the next step, bool [n]."""
        if "unfinished" not in self:
            return torch.zeros(self.num_sequences, dtype=torch.bool)
        return self["unfinished"]

    @property
    def drawn_lengths(self) -> Tensor:
        """Return the tokens of each response in `drawn`, int64 [n]."""
        return self.response_lengths - self["begun"] if "begun" in self else self.response_lengths

    def spread(self, values: Tensor) -> Tensor:
        """Return one value per response [n] at each of its tokens, [T]; 0 outside the response mask."""
        return torch.where(self.response_mask, torch.repeat_interleave(values, self.lengths), 0)

    def totals(self, values: Tensor) -> Tensor:
        """Return the sum of one value per token [T] over each sequence, float64 [n]."""
        sums = torch.zeros(self.num_sequences, dtype=torch.float64)
        return sums.index_add_(0, self.sequence_ids, values.double())

    def select(self, indices: Sequence[int] | Tensor) -> Experience:
        """Return the sequences `indices`, in that order, with all their columns."""
        indices = torch.as_tensor(indices, dtype=torch.int64)
        lengths = self.lengths[indices]
        cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        starts = torch.repeat_interleave(self.cu_seqlens[:-1][indices] - cu_seqlens[:-1], lengths)
        token_indices = torch.arange(int(cu_seqlens[-1])) + starts
        columns = {
            name: column[token_indices if column.shape[0] == self.num_tokens else indices]
            for name, column in self.columns.items()
        }
        return Experience(self.tokens[token_indices], cu_seqlens, self.response_mask[token_indices], columns)

    @staticmethod
    def build(
        prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], **columns: Tensor
    ) -> Experience:
        """Pack lists of token ids; `columns` as in the class, already packed."""
        pairs = list(zip(prompts, responses, strict=True))
        cu_seqlens = torch.tensor([0] + [len(p) + len(r) for p, r in pairs]).cumsum(0)
        tokens = torch.tensor([t for p, r in pairs for t in (*p, *r)], dtype=torch.int64)
        mask = [flag for p, r in pairs for flag in [False] * len(p) + [True] * len(r)]
        return Experience(tokens, cu_seqlens, torch.tensor(mask, dtype=torch.bool), dict(columns))


@dataclass
class StepBatch:
    """What every rank knows of the n sequences of a step, and the tokens of those that lie on this rank until
    they are delivered to the ranks that train on them (parallel/delivery.py).

    lengths           int64 [n], all tokens; response_lengths: those that the policy sampled; prompt_lengths:
                      those of the prompt that a group has in common. What is left over are observations
    owners            int64 [n], the rank on which a sequence lies, by its number among those that deliver
    columns           name -> Tensor [n], as in Experience
    rows              int64 [m], ascending, the sequences that lie on this rank
    own               these, with columns of tokens [T] alone; which ones is the same on every rank
    """

    lengths: Tensor
    response_lengths: Tensor
    prompt_lengths: Tensor
    owners: Tensor
    columns: dict[str, Tensor]
    rows: Tensor
    own: Experience

    def __getitem__(self, name: str) -> Tensor:
        return self.columns[name]

    def __setitem__(self, name: str, column: Tensor) -> None:
        if column.shape[0] != self.num_sequences:
            expected = f"an entry for each of {self.num_sequences} responses"
            raise ValueError(f"column {name}: must have {expected} (got {column.shape[0]})")
        self.columns[name] = column

    def __contains__(self, name: str) -> bool:
        return name in self.columns

    @property
    def num_sequences(self) -> int:
        return self.lengths.numel()

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def observes(self) -> bool:
        """Return whether some response has observations between its turns; the same on every rank."""
        return not torch.equal(self.lengths, self.prompt_lengths + self.response_lengths)

    def drop(self) -> None:
        """Forget the tokens, which have been delivered."""
        self.rows, self.own = self.rows[:0], self.own.select([])


def join(experiences: Sequence[Experience]) -> Experience:
    """Return the sequences of at least one experience, one after the other; all have the same columns."""
    first = experiences[0]
    lengths = torch.cat([e.lengths for e in experiences])
    return Experience(
        torch.cat([e.tokens for e in experiences]),
        torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
        torch.cat([e.response_mask for e in experiences]),
        {name: torch.cat([e[name] for e in experiences]) for name in first.columns},
    )


def write_experience(path: Path, experience: Experience) -> str:
    """Write `experience`; return its checksum. Raises OSError."""
    tensors = {name: getattr(experience, name).contiguous() for name in _PARTS}
    tensors |= {f"column.{name}": column.contiguous() for name, column in experience.columns.items()}
    partial = path.with_name(f".{path.name}.partial")
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    checksum = _checksum(tensors)
    try:
        partial.unlink(missing_ok=True)  # of a killed process, or a link, which safetensors would follow
        save_file(tensors, partial, {"sha256": checksum})
        fsync(partial)
        os.replace(partial, path)
        fsync(path.parent)
    except SafetensorError as error:  # its own word for a disk's errors, too
        raise OSError(str(error)) from error
    return checksum


def read_experience(path: Path, sha256: str | None = None) -> Experience:
    """Read the experience of a file. Raises DataError for a damaged file, and for another one than that with
    the checksum `sha256`."""
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
            checksum = file.metadata()["sha256"]
        if _checksum(tensors) != checksum or checksum != (sha256 or checksum):
            raise DataError(f"{path}: is damaged (its checksum is another)")
        tokens, cu_seqlens, mask = (tensors.pop(name) for name in _PARTS)
        columns = {
            name.removeprefix("column."): t for name, t in tensors.items() if name.startswith("column.")
        }
        return Experience(tokens, cu_seqlens, mask, columns)
    except (OSError, SafetensorError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path}: is damaged ({error})") from None


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype} {list(tensors[name].shape)}".encode())
        digest.update(tensors[name].view(torch.uint8).numpy().data)
    return digest.hexdigest()


def pack(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Return micro-batches of at most `max_tokens`, as indices into `lengths` (tokens). A longer sequence is
    alone.

    Best fit decreasing. Longest first inside a micro-batch and among micro-batches: sequences of similar
    length stand together, and portable attention handles them in one call. The order of `lengths` does not
    change which lengths share a micro-batch."""
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be >= 1 (got {max_tokens})")
    batches: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (free tokens, micro-batch), sorted
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fit = bisect_left(free, (lengths[index], 0))
        if fit < len(free):
            tokens, batch = free.pop(fit)
        else:
            tokens, batch = max_tokens, len(batches)
            batches.append([])
        batches[batch].append(index)
        insort(free, (tokens - lengths[index], batch))
    return batches


def pack_groups(
    prompts: Sequence[int], responses: Sequence[int], groups: Sequence[int], max_tokens: int
) -> list[list[list[int]]]:
    """Return micro-batches as `pack` does, where a prompt stands once before the responses to it: each is a
    list of such families, of indices into `responses`.

    prompts, responses: tokens of each sequence's prompt, and of all behind it; groups: equal where the prompt
    is. Responses that do not fit behind one prompt go behind a copy of it."""
    members: dict[int, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    families: list[list[int]] = []
    sizes: list[int] = []
    for alike in members.values():
        free = -1
        for index in sorted(alike, key=lambda i: -responses[i]):
            if responses[index] > free:
                families.append([])
                sizes.append(prompts[index])
                free = max_tokens - prompts[index]
            families[-1].append(index)
            sizes[-1] += responses[index]
            free -= responses[index]
    return [[families[i] for i in batch] for batch in pack(sizes, max_tokens)]


def cut(cu_seqlens: Tensor, cp: int) -> tuple[Tensor, Tensor]:
    """Return for each token of a pack the context-parallel rank that has it, and its place there, int64 [t]
    each.

    Each sequence, of a multiple of 2 * cp tokens, is cut into 2 * cp chunks, and rank r has chunks r and
    2 * cp - 1 - r of every one: as many causal pairs on each rank (what Transformer Engine's
    thd_get_partitioned_indices gives)."""
    chunk = cu_seqlens.diff() // (2 * cp)
    starts = torch.repeat_interleave(cu_seqlens[:-1], cu_seqlens.diff())
    sizes = torch.repeat_interleave(chunk, cu_seqlens.diff())
    positions = torch.arange(int(cu_seqlens[-1])) - starts
    number = positions // sizes
    rank = torch.minimum(number, 2 * cp - 1 - number)
    return rank, starts // cp + positions % sizes + torch.where(number < cp, 0, sizes)


def balance(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Return one list of indices into `costs` per rank, of nearly equal sums.

    The most expensive item that is left goes to the rank with the least so far. With at least `ranks` items
    every rank has one, else some lists are empty. Deterministic; the indices of a rank ascend."""
    if ranks < 1:
        raise ValueError(f"ranks must be >= 1 (got {ranks})")
    parts: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0.0, 0, rank) for rank in range(ranks)]  # (cost, items, rank): of equal costs fewer items first
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        total, count, rank = loads[0]
        parts[rank].append(index)
        heapq.heapreplace(loads, (total + costs[index], count + 1, rank))
    return [sorted(part) for part in parts]


def balance_groups(
    prompts: Sequence[float], responses: Sequence[float], groups: Sequence[int], ranks: int
) -> list[list[int]]:
    """Return one list of indices per rank, as `balance`, where a rank computes the prompt of a group once for
    all of the group's responses that it has.

    prompts, responses: the cost of each sequence's prompt, and of its response behind it. Groups are kept
    whole, or cut in halves, quarters and so on, whichever makes the slowest rank the quickest."""
    members: dict[int, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    best, slowest, parts = balance([], ranks), inf, 1
    while parts < 2 * max(map(len, members.values()), default=0):
        units = [some for group in members.values() for n in range(parts) if (some := group[n::parts])]
        costs = [prompts[unit[0]] + sum(responses[i] for i in unit) for unit in units]
        shares = [sorted(i for unit in share for i in units[unit]) for share in balance(costs, ranks)]
        loads = []
        for share in shares:
            first = {groups[i]: i for i in share}
            loads.append(sum(prompts[i] for i in first.values()) + sum(responses[i] for i in share))
        if max(loads) < slowest:
            best, slowest = shares, max(loads)
        parts *= 2
    return best


def cost(lengths: Sequence[int], even: float) -> list[float]:
    """Return the time of each sequence's forward and backward pass, l + l^2 / even, in units of one token's
    linears. even: the length, in tokens, at which causal attention takes as many FLOPs as the linears (see
    `even_length`)."""
    return [length + length * length / even for length in lengths]


def even_length(*models: tuple[int, int]) -> float:
    """Return `cost`'s `even` for models that each sequence passes equally often, given as (matrix parameters,
    query width).

    Matrix parameters P: of all layers together. Query width w: heads * head_dim, summed over the layers. l
    tokens take 2 P l FLOPs in the linears. Causal attention reads half of the square: 2 w l^2 in scores and
    weighted sums. The two are equal at l = P / w: 95,232 tokens for Qwen2.5-32B, with 18.6 hidden^2
    parameters a layer and w = hidden."""
    return sum(parameters for parameters, _ in models) / sum(width for _, width in models)
