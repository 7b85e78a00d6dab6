"""The job's secret: random bytes with which ranks sign messages.

It is in a private file, never in arguments, variables or a store. `launch` creates the file; under torchrun
rank 0 does, unless MEGARL_SECRET_FILE names one.
"""

from __future__ import annotations

import datetime
import hmac
import os
import socket
import stat
import time
from pathlib import Path

import torch.distributed as dist

from megarl.config.errors import ConfigError, MessageError, WaitTimeout

SECRET_FILE = "MEGARL_SECRET_FILE"
SIZE = 32  # bytes of secret and signature (HMAC-SHA-256)
_POLL = 0.02  # seconds between checks
_secret: bytes | None = None


def make_secret(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(os.urandom(SIZE))


def read_secret(path: Path) -> bytes | None:
    """Return a file's secret, None if missing or incomplete. Raises ConfigError unless it is private."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path}: the job's secret cannot be read: {error.strerror}") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            remedy = f"remove it; {SECRET_FILE} may name another place, with mode 0600"
            raise ConfigError(f"{path}: is not a file that this user alone can read and write ({remedy})")
        secret = os.read(descriptor, SIZE)
    finally:
        os.close(descriptor)
    return secret if len(secret) == SIZE else None


def agree_on_secret(path: Path | None, seconds: float, *, first: bool) -> None:
    """Read the job's secret, waiting at most `seconds`. `first` may create it."""
    global _secret
    named_path = os.environ.get(SECRET_FILE)
    if named_path:
        path = Path(named_path)
    if path is None:
        raise ConfigError(f"{SECRET_FILE}: is not set (name a file of {SIZE} random bytes, with mode 0600)")
    deadline = time.monotonic() + seconds
    while (secret := read_secret(path)) is None:
        if first and not named_path:
            try:
                path.unlink(missing_ok=True)  # incomplete, from a killed process
                make_secret(path)
            except OSError as error:
                remedy = f"{SECRET_FILE} may name another file, of {SIZE} random bytes"
                raise ConfigError(f"{path}: cannot be written: {error.strerror} ({remedy})") from None
        elif time.monotonic() > deadline:
            what = f"the job's secret has not appeared there within {seconds:g} s"
            raise WaitTimeout(f"{path}: {what} (all nodes must see this file, of {SIZE} bytes)")
        time.sleep(_POLL)
    _secret = secret


def sign(*parts: bytes | str | int) -> bytes:
    assert _secret is not None, "ranks exchange messages only after they have agreed on a secret"
    signature = hmac.new(_secret, digestmod="sha256")
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode()
        signature.update(len(data).to_bytes(8, "little"))
        signature.update(data)
    return signature.digest()


def verify(signature: bytes, what: str, *parts: bytes | str | int) -> None:
    """Raise MessageError if a signature is wrong."""
    if not hmac.compare_digest(signature, sign(*parts)):
        remedy = "another process takes part, or a rank has another secret: docs/cluster.md"
        raise MessageError(f"{what}: is not from a rank of this job ({remedy})")


def open_store(host: str, port: int, members: int, seconds: float, *, first: bool) -> dist.TCPStore:
    """Join a TCPStore. torch itself would listen at all addresses, not only at `host`."""
    limit = datetime.timedelta(seconds=seconds)
    if not first:
        return dist.TCPStore(host, port, members, False, limit, wait_for_workers=False)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(members)
        descriptor = listener.detach()
    return dist.TCPStore(
        host, port, members, True, limit, wait_for_workers=False, master_listen_fd=descriptor
    )


class SignedStore:
    """Signed values in a store that anybody may write."""

    def __init__(self, store: dist.Store) -> None:
        self.store = store

    def set(self, key: str, value: str) -> None:
        data = value.encode()
        self.store.set(key, sign("store", key, data) + data)  # type: ignore[arg-type] # it takes bytes too

    def get(self, key: str) -> str:
        """Return a value. Raises MessageError unless this job set it."""
        signed_value = self.store.get(key)
        signature, data = signed_value[:SIZE], signed_value[SIZE:]
        verify(signature, f"store: {key}", "store", key, data)
        return data.decode()

    def has(self, *keys: str) -> bool:
        return bool(self.store.check([*keys]))

    def wait(self, key: str, seconds: float) -> bool:
        try:
            self.store.wait([key], datetime.timedelta(seconds=seconds))
        except (dist.DistError, RuntimeError):
            return False
        return True
