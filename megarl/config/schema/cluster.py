"""Section `cluster`: hardware."""

from __future__ import annotations

from megarl.config.schema.section import Section, field


class ClusterConfig(Section):
    """Hardware, for plans; gpus_per_node also decides the route of weights to the engines.

    Speeds are per GPU and direction."""

    gpu: str = field(
        "H100", "H100, H200, H800, H20, GB200, A100 (megarl/plan/sizes.py); else give all figures"
    )
    gpu_memory: float | None = field(None, "memory of a GPU (nvidia-smi); null: the table's", "GiB", gt=0)
    gpu_tflops: float | None = field(None, "dense bf16 rate; null: the table's", "TFLOP/s", gt=0)
    gpu_memory_speed: float | None = field(None, "memory bandwidth; null: the table's", "GB/s", gt=0)
    host_speed: float | None = field(None, "bandwidth between host and GPU; null: the table's", "GB/s", gt=0)
    host_memory: float = field(2048.0, "memory of a node", "GiB", "DGX H100 data sheet: 2 TB", gt=0)
    gpus_per_node: int = field(8, "rank r is on node r // this", "devices", "DGX H100 data sheet", ge=1)
    copy_speed: float = field(
        1675.0, "copy rate in a GPU", "GB/s", "H100 SXM data sheet: 3.35 TB/s, read and written", gt=0
    )
    node_speed: float = field(
        450.0, "bandwidth between GPUs", "GB/s", "H100 SXM data sheet: NVLink, 900 GB/s both ways", gt=0
    )
    network_speed: float = field(
        50.0, "bandwidth between nodes", "GB/s", "DGX H100 data sheet: one 400 Gb/s adapter per GPU", gt=0
    )
