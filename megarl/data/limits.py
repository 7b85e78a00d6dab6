"""Memory and time limits for processing untrusted files."""

from __future__ import annotations

import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from megarl.config.errors import ConfigError

MEMORY = 1 << 30  # bytes per rendering or decoded batch of rows
_STATM = Path("/proc/self/statm")
_ONE_THREAD = threading.RLock()  # the limit is process-wide


@contextmanager
def memory_limit(size: int = MEMORY) -> Iterator[None]:
    """Raise MemoryError if the block allocates more than `size` bytes; no effect without /proc.

    Other threads wait; blocks may be nested."""
    with _ONE_THREAD:
        old_limits = resource.getrlimit(resource.RLIMIT_DATA)
        if _STATM.exists():
            used_bytes = int(_STATM.read_text().split()[5]) * resource.getpagesize()
            limits = [limit for limit in (used_bytes + size, *old_limits) if limit != resource.RLIM_INFINITY]
            resource.setrlimit(resource.RLIMIT_DATA, (min(limits), old_limits[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, old_limits)


@contextmanager
def time_limit(seconds: float, what: str) -> Iterator[None]:
    """Raise ConfigError `what ...` if the block takes more than `seconds`.

    Only in the main thread, which alone receives signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def raise_error(*_: Any) -> NoReturn:
        raise ConfigError(f"{what} has not ended within {seconds:g} s (it may loop for ever)")

    old_handler = signal.signal(signal.SIGALRM, raise_error)
    old_seconds, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, old_seconds)
        signal.signal(signal.SIGALRM, old_handler)
