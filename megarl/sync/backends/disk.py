"""Write weights to a file system that SGLang servers share, and let the servers load them.

A run has a subfolder of `rollout.weights.folder`, and in it one numbered folder an update. That appears when
it is complete."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from megarl.config.errors import TransferError
from megarl.config.files import describe_error, fsync
from megarl.sync.backends.servers import ServersBackend, ServersEngine
from megarl.sync.plan import Plan
from megarl.sync.transfer import Staging

PARTIAL = ".partial"
NAME = "update-{:06}"


class DiskBackend(ServersBackend):
    """The first engine's rank writes. All clients then name the folder to their servers.

    At most two updates are kept: a slow server may still read one while the next is written."""

    has_sessions = False  # SGLang restores and packs weights within the one call

    def connect(
        self, engine: ServersEngine, parts: Sequence[Plan], memory: Staging
    ) -> list[dict[str, Tensor]]:
        self._writer = min(parts[0].targets)
        self._root = (self.config.run_dir / "weights").absolute()
        if folder := self.config.rollout.weights.folder:  # other runs may share it
            self._root = folder.absolute() / engine.run_name
        return super().connect(engine, parts, memory)

    def handle(self, bucket: int) -> bytes | None:
        """Write a bucket. Return the complete folder after the last one, or an error, as JSON."""
        if self.rank != self._writer:
            return None
        try:
            self._write(bucket)
            return json.dumps({"folder": str(self._publish())}).encode() if self.is_last(bucket) else None
        except OSError as error:
            return json.dumps({"error": f"{self._root}: cannot be written: {describe_error(error)}"}).encode()

    def _write(self, bucket: int) -> None:
        # SGLang reports the folder as its model, and clients compare its name with model.path's.
        folder = self._root / PARTIAL / self.config.model.path.name
        if bucket == 0:
            shutil.rmtree(self._root / PARTIAL, ignore_errors=True)
            for old in self._updates()[:-1]:
                shutil.rmtree(old)
            folder.mkdir(parents=True)
            shutil.copyfile(self.config.model.path / "config.json", folder / "config.json")
        path = folder / f"model-{bucket:05}.safetensors"
        try:
            save_file({name: tensor.detach().cpu() for name, tensor in self.buckets[bucket].items()}, path)
        except SafetensorError as error:  # such as a full disk
            raise OSError(str(error)) from error
        fsync(path)
        self.bytes_sent += path.stat().st_size

    def _updates(self) -> list[Path]:
        return sorted(self._root.glob("update-*"))

    def _publish(self) -> Path:
        name, partial, updates = self.config.model.path.name, self._root / PARTIAL, self._updates()
        number = int(updates[-1].name.removeprefix("update-")) + 1 if updates else 0
        folder = self._root / NAME.format(number)
        fsync(partial / name)
        fsync(partial)
        partial.rename(folder)
        fsync(self._root)
        return folder / name

    def send(self, bucket: int, handles: Sequence[bytes | None], version: int) -> None:
        """Raises TransferError on every client if the folder cannot be written."""
        answer = json.loads(handles[self._writer] or b"{}")
        if "error" in answer:
            raise TransferError(f"rollout.weights.folder: {answer['error']}")
        self._folder = answer.get("folder", "")
        super().send(bucket, handles, version)

    def send_bucket(self, bucket: int, version: int) -> None:
        if self.is_last(bucket):
            body = {"model_path": self._folder, "load_format": "safetensors"}
            body_by_url = {server.url: body for server in self.engine.updating_servers}
            self.load("/update_weights_from_disk", body_by_url, version)
