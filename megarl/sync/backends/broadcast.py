"""Broadcast weights to SGLang servers over process groups: NCCL on GPUs, gloo on CPUs.

Each server has a separate group, of this rank and the server's ranks. In a common group a server that dies
leaves the others waiting, as SGLang sets no timeout. The groups are separate from torch's default group."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import suppress
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.config.schema import Config
from megarl.sync.backends.servers import ServersBackend


class BroadcastBackend(ServersBackend):
    """Sends a bucket as one message to each server. New, returning and restarted servers get new groups."""

    def __init__(self, config: Config, rank: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(config, rank, device, dtype)
        self._groups: dict[str, _Group] = {}  # by URL
        self._timeout = config.rollout.engine_timeout

    def begin(self) -> None:
        super().begin()
        servers = {server.url: server for server in self.engine.updating_servers}
        for url in [url for url in self._groups if url not in servers or not servers[url].is_known]:
            self._close(url)
        new = {url: server.tp for url, server in servers.items() if url not in self._groups}
        self._groups |= {url: _Group(url, tp, self.device, self._timeout) for url, tp in new.items()}
        self._run(
            "/init_weights_update_group",
            {url: self._groups[url].arguments for url in new},
            lambda group: group.connect(),
        )

    def send_bucket(self, bucket: int, version: int) -> None:
        # Large elements first, so that each tensor is aligned to its dtype.
        tensors = sorted(self.buckets[bucket].items(), key=lambda item: -item[1].dtype.itemsize)
        body = {
            "names": [name for name, _ in tensors],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors],
            "shapes": [list(tensor.shape) for _, tensor in tensors],
            "load_format": "flattened_bucket",
            **self.engine.update_options(version if self.is_last(bucket) else None),
        }
        message = torch.cat([tensor.detach().flatten().view(torch.uint8) for _, tensor in tensors])
        urls = [server.url for server in self.engine.updating_servers]
        bodies = {url: {**body, "group_name": self._groups[url].name} for url in urls}
        self._run("/update_weights_from_distributed", bodies, lambda group: group.broadcast(message))
        self.bytes_sent += message.nbytes * len(urls)

    def _run(
        self, path: str, body_by_url: Mapping[str, Mapping[str, Any]], action: Callable[[_Group], None]
    ) -> None:
        """Run a command at servers, and this rank's part of it in their groups.

        Servers where either fails are left out. No wait is longer than rollout.engine_timeout."""
        if not body_by_url:
            return
        actions = {url: _start(action, self._groups[url]) for url in body_by_url}
        posts = self.engine.post(path, body_by_url)
        for url in body_by_url:
            parts = (actions[url], posts[url])
            wait(parts, timeout=self._timeout, return_when=FIRST_EXCEPTION)
            errors = [part.exception() for part in reversed(parts) if part.done()]
            if len(errors) < len(parts) or any(errors):
                error = next(filter(None, errors), f"no answer for {self._timeout:g} s")
                self._close(url)
                self.engine.leave_out(url, f"{path}: {error}")

    def _close(self, url: str) -> None:
        self._groups.pop(url).close()


def _start(action: Callable[[_Group], None], group: _Group) -> Future[None]:
    """Run in a thread. After a failure elsewhere nobody waits for it, and it ends by the group's timeout."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            action(group)
            future.set_result(None)
        except RuntimeError as error:
            future.set_exception(error)

    threading.Thread(target=run, name="weight broadcast", daemon=True).start()
    return future


class _Group:
    """A process group of this rank, as rank 0, and the ranks of one server."""

    def __init__(self, url: str, tp: int, device: torch.device, seconds: float) -> None:
        self.device, self.world = device, 1 + tp
        self.name = f"megarl-{uuid4().hex[:12]}"
        self._timeout = timedelta(seconds=seconds)
        family, self.host = find_address(url)
        # TCPStore itself would listen on all addresses.
        listener = socket.create_server((self.host, 0), family=family)
        self.port = listener.getsockname()[1]
        self._store: Any = dist.TCPStore(
            self.host,
            self.port,
            is_master=True,
            wait_for_workers=False,
            timeout=self._timeout,
            master_listen_fd=listener.detach(),
        )
        self._group: Any = None

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the arguments of /init_weights_update_group."""
        return {
            "master_address": self.host,
            "master_port": self.port,
            "rank_offset": 1,
            "world_size": self.world,
            "group_name": self.name,
            "backend": "gloo" if self.device.type == "cpu" else "nccl",
        }

    def connect(self) -> None:
        # A separate connection: `close` ends the store, and with it the members' waits.
        store: Any = dist.TCPStore(
            self.host, self.port, is_master=False, wait_for_workers=False, timeout=self._timeout
        )
        # The prefixes of torch's init_process_group, which the server uses.
        for prefix in (self.name, f"{self.name}/", f"{self.device.type}/"):
            store = dist.PrefixStore(prefix, store)
        if self.device.type == "cpu":
            gloo: Any = dist.ProcessGroupGloo
            options = gloo._Options()
            options._devices = [gloo.create_device(hostname=self.host)]
            options._timeout = self._timeout
            self._group = gloo(store, 0, self.world, options)
        else:
            options = dist.ProcessGroupNCCL.Options()
            # Its watchdog ends the process: `close` must come first.
            options._timeout = 2 * self._timeout + timedelta(seconds=60)
            self._group = dist.ProcessGroupNCCL(store, 0, self.world, options)

    def broadcast(self, message: Tensor) -> None:
        """Send bytes. Raises RuntimeError if a member does not take them in time."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        if self.device.type == "cpu":
            options.timeout = self._timeout
        group = self._group  # gloo's destructor waits for operations: let it run in this thread
        group.broadcast([message], options).wait(self._timeout)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        group, self._group, self._store = self._group, None, None
        if group is not None and self.device.type == "cuda":
            with suppress(RuntimeError):
                group.abort()  # on a CPU it would wait for running operations


def find_address(url: str) -> tuple[socket.AddressFamily, str]:
    """Return this machine's address on the way to a server."""
    parts = urlsplit(url)
    addresses = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)
    family, kind, _, _, target = addresses[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)  # sends nothing
        return family, str(probe.getsockname()[0])
