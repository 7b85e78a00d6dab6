"""Steps shared by the backends whose engine is a client of SGLang servers.

One rank per client has whole tensors by Hugging Face names. A backend supplies `send_bucket`."""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any, ClassVar, Protocol

from torch import Tensor

from megarl.config.errors import TransferError
from megarl.sync.backends.base import UpdatableEngine, WeightBackend, stage
from megarl.sync.plan import Plan
from megarl.sync.transfer import Staging

Posts = Mapping[str, Future[None]]


class UpdatingServer(Protocol):
    """A server in an update.

    tp        its tensor-parallel ranks
    is_known  it has run, with the same weights, since the last update"""

    url: str
    tp: int
    is_known: bool


class ServersEngine(UpdatableEngine, Protocol):
    """A client of SGLang servers.

    has_sessions  updates are between /begin_weight_update and /end_weight_update"""

    has_sessions: bool

    @property
    def run_name(self) -> str:
        """Return a name that only this run has."""

    @property
    def updating_servers(self) -> Sequence[UpdatingServer]:
        """Return the servers that this update still reaches."""

    def post(self, path: str, body_by_url: Mapping[str, Mapping[str, Any]]) -> Posts:
        """Start a command at servers, within rollout.engine_timeout each.

        The futures' errors have `code`, the HTTP status, or 0 without an answer."""

    def update_options(self, version: int | None) -> dict[str, Any]:
        """Return the options of a bucket. version: only with the update's last bucket"""

    def name_version(self, version: int) -> str: ...

    def leave_out(self, url: str, why: str) -> None:
        """Send no more weights or requests to a server until the next update."""

    def read_checksums(self, skip: Sequence[str]) -> dict[str, list[dict[str, str]]]:
        """Return each server's checksums, by rank and SGLang's tensor name.

        skip: parts of names"""


class ServersBackend(WeightBackend[ServersEngine]):
    keeps_frozen = False  # a returning server has no weights
    reports_notes = True  # about servers that drop out or come back
    has_sessions: ClassVar[bool] = True

    def connect(
        self, engine: ServersEngine, parts: Sequence[Plan], memory: Staging
    ) -> list[dict[str, Tensor]]:
        self.engine, engine.has_sessions = engine, self.has_sessions
        self.buckets = stage([self.places(part) for part in parts], memory)
        return self.buckets

    def send(self, bucket: int, handles: Sequence[bytes | None], version: int) -> None:
        if self.engine.updating_servers:
            self.send_bucket(bucket, version)

    @abstractmethod
    def send_bucket(self, bucket: int, version: int) -> None:
        """Bring a bucket into all updating servers, or leave servers out."""

    def is_last(self, bucket: int) -> bool:
        return bucket == len(self.buckets) - 1

    def load(self, path: str, body_by_url: Mapping[str, Mapping[str, Any]], version: int | None) -> None:
        """Post a bucket. Servers that do not load it are left out. version: only with the last bucket"""
        options = self.engine.update_options(version)
        # Servers with the same body keep sharing one object, so that it is encoded once.
        bodies = {id(body): {**body, **options} for body in body_by_url.values()}
        posts = self.engine.post(path, {url: bodies[id(body)] for url, body in body_by_url.items()})
        wait(posts.values())
        for url, future in posts.items():
            if error := future.exception():
                self.engine.leave_out(url, str(error))

    def finish(self, version: int) -> None:
        if self.config.rollout.fingerprint:
            self.compare_servers()
        super().finish(version)

    def compare_servers(self) -> None:
        """Compare SGLang's checksums of all tensors between servers of equal tensor-parallel size.

        Raises TransferError with the differing tensors."""
        checksums_by_url = self.engine.read_checksums([])
        urls_by_tp: dict[int, list[str]] = defaultdict(list)
        for server in self.engine.updating_servers:
            if server.url in checksums_by_url:
                urls_by_tp[server.tp].append(server.url)
        for first, *others in urls_by_tp.values():
            for other in others:
                ranks = zip(checksums_by_url[first], checksums_by_url[other], strict=True)
                # A name without a dot is not SGLang's.
                names = sorted({name for a, b in ranks for name, _ in a.items() ^ b.items() if "." in name})
                if names:
                    what = f"{first} and {other} have different weights: {', '.join(names[:3])}"
                    raise TransferError(f"weight transfer: {what}{', ...' if names[3:] else ''}")
