"""The weight backends, by their names in config/engines.py."""

from typing import Any

from megarl.sync.backends.base import WeightBackend
from megarl.sync.backends.broadcast import BroadcastBackend
from megarl.sync.backends.delta import DeltaBackend
from megarl.sync.backends.disk import DiskBackend
from megarl.sync.backends.http import HttpBackend
from megarl.sync.backends.in_place import InPlaceBackend
from megarl.sync.backends.shared_memory import SharedMemoryBackend

BACKENDS: dict[str, type[WeightBackend[Any]]] = {
    "in_place": InPlaceBackend,
    "shared_memory": SharedMemoryBackend,
    "http": HttpBackend,
    "broadcast": BroadcastBackend,
    "disk": DiskBackend,
    "delta": DeltaBackend,
}
