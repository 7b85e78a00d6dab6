"""Send weights in the bodies of HTTP requests to SGLang servers. Needs only their URLs."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Sequence

from torch import Tensor

from megarl.sync.backends.servers import ServersBackend

PATH = "/update_weights_from_tensor"


class HttpBackend(ServersBackend):
    def send_bucket(self, bucket: int, version: int) -> None:
        # Copy: a view is pickled with all of its memory.
        tensors = [(name, tensor.to("cpu", copy=True)) for name, tensor in self.buckets[bucket].items()]
        payload = encode_tensors(tensors)
        servers = self.engine.updating_servers
        body_by_tp = {server.tp: {"serialized_named_tensors": [payload] * server.tp} for server in servers}
        self.bytes_sent += sum(len(payload) * server.tp for server in servers)
        body_by_url = {server.url: body_by_tp[server.tp] for server in servers}
        self.load(PATH, body_by_url, version if self.is_last(bucket) else None)


def encode_tensors(tensors: Sequence[tuple[str, Tensor]]) -> str:
    """Return the tensors in the format that one of a server's ranks reads."""
    return base64.b64encode(pickle.dumps(list(tensors), pickle.HIGHEST_PROTOCOL)).decode()
