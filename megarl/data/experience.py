"""Experience: the packed, columnar batch that travels through the phases of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Experience:
    """n prompt+response sequences, packed without padding into T tokens.

    tokens         int64 [T]    sequence after sequence, each prompt followed by its response
    cu_seqlens     int64 [n+1]  sequence i is tokens[cu_seqlens[i]:cu_seqlens[i+1]]
    response_mask  bool  [T]    True on response tokens (the end-of-sequence token included)
    columns        name -> Tensor: [T] (one entry a token) or [n] (one entry a response)

    A token column is aligned with the token it speaks of: `logprobs[t]` is log pi(tokens[t] | tokens before t), and
    `values[t]` is V(s_t), the value of the state in which tokens[t] was chosen. Outside the response they are 0.
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
            self._check(name, column)

    def _check(self, name: str, column: Tensor) -> None:
        if column.shape[0] not in (self.num_tokens, self.num_sequences):
            expected = f"{self.num_tokens} tokens or {self.num_sequences} responses"
            raise ValueError(f"column {name}: must have an entry for each of {expected} (got {column.shape[0]})")

    def __getitem__(self, name: str) -> Tensor:
        return self.columns[name]

    def __setitem__(self, name: str, column: Tensor) -> None:
        self._check(name, column)
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
        """Prompt + response tokens of each sequence, int64 [n]."""
        return self.cu_seqlens.diff()

    @property
    def sequence_ids(self) -> Tensor:
        """The sequence that each token belongs to, int64 [T]."""
        return torch.repeat_interleave(torch.arange(self.num_sequences, device=self.cu_seqlens.device), self.lengths)

    @property
    def response_lengths(self) -> Tensor:
        """Response tokens of each sequence, int64 [n]."""
        return torch.zeros_like(self.cu_seqlens[1:]).index_add_(0, self.sequence_ids, self.response_mask.long())

    def spread(self, values: Tensor) -> Tensor:
        """One value per response [n] at each of its tokens, [T]; 0 outside the responses."""
        return torch.where(self.response_mask, torch.repeat_interleave(values, self.lengths), 0)

    def select(self, indices: Sequence[int] | Tensor) -> Experience:
        """The sequences `indices`, in that order, with all their columns."""
        indices = torch.as_tensor(indices, dtype=torch.int64)
        lengths = self.lengths[indices]
        cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        starts = torch.repeat_interleave(self.cu_seqlens[:-1][indices] - cu_seqlens[:-1], lengths)
        at = torch.arange(int(cu_seqlens[-1])) + starts
        per_token = self.num_tokens
        columns = {k: (c[at] if c.shape[0] == per_token else c[indices]) for k, c in self.columns.items()}
        return Experience(self.tokens[at], cu_seqlens, self.response_mask[at], columns)

    @staticmethod
    def build(prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], **columns: Tensor) -> Experience:
        """Packs lists of token ids; `columns` as in the class, already packed."""
        rows = [list(p) + list(r) for p, r in zip(prompts, responses, strict=True)]
        cu_seqlens = torch.tensor([0] + [len(r) for r in rows]).cumsum(0)
        mask = [flag for p, r in zip(prompts, responses, strict=True) for flag in [False] * len(p) + [True] * len(r)]
        tokens = torch.tensor([t for row in rows for t in row], dtype=torch.int64)
        return Experience(tokens, cu_seqlens, torch.tensor(mask, dtype=torch.bool), dict(columns))
