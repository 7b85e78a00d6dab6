"""What a GPU has, from data sheets: the figures that a plan's estimates stand on. `cluster` in the configuration replaces each of them."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config.errors import ConfigError
from megarl.config.schema import ClusterConfig

GIB = 2**30


@dataclass(frozen=True)
class Device:
    """memory: bytes; tflops: dense bf16; memory_speed, host_speed: GB/s of its own memory, and to and from the host, in one direction."""

    name: str
    memory: float
    tflops: float
    memory_speed: float
    host_speed: float


# Data sheets: H100 SXM5, H200 SXM, H800 SXM, A100 SXM4 80 GB. What nvidia-smi shows is a little less than the round number.
DEVICES = {
    "H100": Device("H100", 79.2 * GIB, 989.0, 3350.0, 55.0),
    "H200": Device("H200", 139.8 * GIB, 989.0, 4800.0, 55.0),
    "H800": Device("H800", 79.2 * GIB, 989.0, 3350.0, 55.0),
    "A100": Device("A100", 79.2 * GIB, 312.0, 2039.0, 25.0),
}


def device_of(cluster: ClusterConfig, measured: float | None = None) -> Device:
    """The GPU that `cluster` describes: one of the table by name, with the figures that it states itself. measured: bytes of memory
    that a real one was found to have."""
    known = DEVICES.get(cluster.gpu)
    wanted = {
        "gpu_memory": cluster.gpu_memory and cluster.gpu_memory * GIB,
        "gpu_tflops": cluster.gpu_tflops,
        "gpu_memory_speed": cluster.gpu_memory_speed,
        "host_speed": cluster.host_speed,
    }
    table = (known.memory, known.tflops, known.memory_speed, known.host_speed) if known else (None,) * 4
    figures = {key: given if given is not None else default for (key, given), default in zip(wanted.items(), table, strict=True)}
    missing = [f"cluster.{key}" for key, value in figures.items() if value is None]
    if missing:
        raise ConfigError(f"cluster.gpu: {cluster.gpu} is not in the table ({', '.join(DEVICES)}): set {', '.join(missing)} as well")
    memory, tflops, memory_speed, host_speed = (float(value or 0.0) for value in figures.values())
    return Device(cluster.gpu, measured or memory, tflops, memory_speed, host_speed)
