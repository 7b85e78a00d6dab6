"""Send only what changed to SGLang servers that have our loader (rollout/engines/sglang_delta.py).

This rank and each rank of a server keep a host copy of the Hugging Face tensors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from megarl.config.schema import Config
from megarl.sync import delta
from megarl.sync.backends.http import PATH, encode_tensors
from megarl.sync.backends.servers import ServersBackend


class DeltaBackend(ServersBackend):
    """Sends changes to servers with this rank's last version, and everything to others.

    After the last bucket each server reports its version and checksums. One with other checksums gets
    everything again from this rank's copy."""

    def __init__(self, config: Config, rank: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(config, rank, device, dtype)
        self._sent = delta.Sender()
        self._holders: set[str] = set()  # URLs of servers with `_sent`

    def begin(self) -> None:
        super().begin()
        self._base, self._sent.version = self._sent.version, ""
        known = {server.url for server in self.engine.updating_servers if server.is_known}
        self._holders &= known if self._base else set()

    def send_bucket(self, bucket: int, version: int) -> None:
        changes: dict[str, delta.Change | None] = {}
        for name, tensor in self.buckets[bucket].items():
            host = tensor.detach().to("cpu", copy=True).contiguous().flatten().view(torch.uint8)
            new: delta.Bytes = host.numpy()
            old = self._sent.tensors.get(name)
            if old is None or new.size != old.size:
                changes[name] = delta.Change("full", b"")
            else:
                changes[name] = delta.encode(old, new, tensor.dtype.itemsize)
            if changes[name] is not None:
                self._sent.tensors[name], self._sent.checksums[name] = new, delta.checksum(new)
        urls = {server.url for server in self.engine.updating_servers}
        changed = {name: change for name, change in changes.items() if change is not None}
        self._post(bucket, version, self._base, changed, sorted(urls & self._holders))
        self._post_all(bucket, version, sorted(urls - self._holders))
        if self.is_last(bucket):
            self._sent.version = self.engine.name_version(version)
            self._check(version)

    def _post_all(self, bucket: int, version: int, urls: Sequence[str]) -> None:
        changes = {name: delta.Change("full", b"") for name in self.buckets[bucket]}
        self._post(bucket, version, "", changes, urls)

    def _post(
        self, bucket: int, version: int, base: str, changes: dict[str, delta.Change], urls: Sequence[str]
    ) -> None:
        if not urls:
            return
        rows, parts = [], []
        for name, change in changes.items():
            new, tensor = self._sent.tensors[name], self.buckets[bucket][name]
            part = new if change.kind == "full" else np.frombuffer(change.data, np.uint8)
            width, crc = tensor.dtype.itemsize, self._sent.checksums[name]
            rows.append((name, change.kind, part.size, new.size, width, crc))
            parts.append(part)
        header: dict[str, Any] = {
            "base": base,
            "version": self.engine.name_version(version),
            "bucket": bucket,
            "last": self.is_last(bucket),
            "tensors": rows,
            "formats": {
                name: (str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
                for name, tensor in self.buckets[bucket].items()
                if name in changes
            },
        }
        data = torch.from_numpy(np.concatenate(parts)) if parts else torch.empty(0, dtype=torch.uint8)
        payload = encode_tensors([(json.dumps(header), data)])
        tp_by_url = {server.url: server.tp for server in self.engine.updating_servers}
        body_by_tp = {
            tp: {"serialized_named_tensors": [payload] * tp, "load_format": delta.LOADER}
            for tp in {tp_by_url[url] for url in urls}
        }
        self.bytes_sent += sum(len(payload) * tp_by_url[url] for url in urls)
        body_by_url = {url: body_by_tp[tp_by_url[url]] for url in urls}
        self.load(PATH, body_by_url, version if self.is_last(bucket) else None)

    def _check(self, version: int) -> None:
        """Send everything again to servers with other checksums, once."""
        bad = self._find_bad_servers()
        if bad:
            for bucket in range(len(self.buckets)):
                urls = [server.url for server in self.engine.updating_servers if server.url in bad]
                self._post_all(bucket, version, urls)
            for url, report in self._find_bad_servers().items():
                self.engine.leave_out(url, f"its weights are not those that were sent: {report}")
        self._holders = {server.url for server in self.engine.updating_servers}

    def _find_bad_servers(self) -> dict[str, str]:
        """Return unexpected reports by URL."""
        expected = delta.make_report(self._sent.version, self._sent.checksums)
        bad = {}
        # SGLang's own tensors have a dot in their names. The report's buffer has none.
        for url, ranks in self.engine.read_checksums(["."]).items():
            names = [name for rank in ranks for name in rank if name.startswith(delta.REPORT)]
            reports = [name.removeprefix(delta.REPORT) for name in names]
            if reports != [expected] * len(ranks):
                bad[url] = next((report for report in reports if report != expected), "no report")
        return bad
