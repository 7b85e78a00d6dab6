"""Send weights over HTTP, to SGLang servers that the user runs.

One rank per client has whole tensors by Hugging Face names, and posts each bucket to all servers."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from megarl.sync.backends.base import UpdatableEngine, WeightBackend, stage
from megarl.sync.plan import Plan
from megarl.sync.transfer import Staging


class HttpEngine(UpdatableEngine, Protocol):
    """A client of servers with `update_weights_from_tensor`."""

    @property
    def is_updating(self) -> bool:
        """Return whether any server is updating."""

    def post_weights(self, payload: str, version: int | None) -> None:
        """Post a bucket to all updating servers.

        payload: base64 of a pickled list of (name, tensor); version: only with the update's last bucket"""


class HttpBackend(WeightBackend[HttpEngine]):
    keeps_frozen = False  # a returning server has no weights
    reports_notes = True  # about servers that drop out or come back

    def connect(self, engine: HttpEngine, parts: Sequence[Plan], memory: Staging) -> list[dict[str, Tensor]]:
        self.engine = engine
        self._buckets = stage([self.places(part) for part in parts], memory)
        return self._buckets

    def send(self, bucket: int, handles: Sequence[bytes | None], version: int) -> None:
        if not self.engine.is_updating:
            return
        # Copy: a view is pickled with all of its memory.
        tensors = [(name, tensor.to("cpu", copy=True)) for name, tensor in self._buckets[bucket].items()]
        payload = base64.b64encode(pickle.dumps(tensors, pickle.HIGHEST_PROTOCOL)).decode()
        self.engine.post_weights(payload, version if bucket == len(self._buckets) - 1 else None)
