"""Measure the memory of a device and of this process."""

from __future__ import annotations

import os
from pathlib import Path

import torch


class ProcessPeak:
    """Peak memory since `reset`, on Linux. Shared pages count in part (PSS)."""

    RESET = Path("/proc/self/clear_refs")

    def __init__(self) -> None:
        self._known = os.access(self.RESET, os.W_OK)
        self._most, self._of_others = 0, 0  # last peak, others' part of it

    def reset(self) -> None:
        if self._known:
            self.RESET.write_text("5")  # see proc(5)

    def measure(self) -> dict[str, float]:
        if not self._known:
            return {}
        peak = _kilobytes(Path("/proc/self/status"), "VmHWM") * 1024
        if not 0.95 * self._most < peak < 1.05 * self._most:  # smaps_rollup takes milliseconds per GB
            rollup = Path("/proc/self/smaps_rollup")
            self._most, self._of_others = peak, (_kilobytes(rollup, "Rss") - _kilobytes(rollup, "Pss")) * 1024
        return {"all": float(peak - self._of_others)}


def _kilobytes(path: Path, key: str) -> int:
    lines = path.read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def empty_cache(device: torch.device) -> None:
    """Release torch's cached memory, for the engine."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def free_memory(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


def reset_device_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def device_peak(device: torch.device) -> dict[str, float]:
    """Return peak bytes of tensors (""), and "reserved" by torch; "device": used now by all."""
    if device.type != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info(device)
    return {
        "": float(torch.cuda.max_memory_allocated(device)),
        "reserved": float(torch.cuda.max_memory_reserved(device)),
        "device": float(total - free),
    }
