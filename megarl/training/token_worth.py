"""What single responses' tokens were worth in a step: advantages and values by row of the whole batch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megarl.data.experience import Experience


def token_worth(local: Experience, batch: Experience, rows: Sequence[int]) -> dict[int, dict[str, Tensor]]:
    """row of `batch` -> {"advantages", "values"}: float32 [response tokens], as far as `local`, a replica's share, holds these rows and
    columns."""
    places = list(zip(local["group_ids"].tolist(), local["response_index"].tolist(), strict=True))
    found = {}
    for row in rows:
        place = (int(batch["group_ids"][row]), int(batch["response_index"][row]))
        if place in places:
            at = _response(local, places.index(place))
            found[row] = {name: local[name][at].float() for name in ("advantages", "values") if name in local}
    return found


def response_ids(batch: Experience, row: int) -> list[int]:
    """The tokens of one response."""
    ids: list[int] = batch.tokens[_response(batch, row)].tolist()
    return ids


def _response(experience: Experience, row: int) -> Tensor:
    """Where the response of a sequence lies in the [T] columns, int64."""
    start, end = experience.cu_seqlens[row : row + 2].tolist()
    return start + experience.response_mask[start:end].nonzero().squeeze(-1)
