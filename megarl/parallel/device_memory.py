"""The memory of a device and of this process: what is free, the most that a phase took, and what torch
caches given back."""

from __future__ import annotations

import os
from pathlib import Path

import torch


class ProcessPeak:
    """The most memory that this process had since `reset`: of pages that it shares with others, as forked
    ranks do with their launcher, its share (PSS in Linux's words, which elsewhere is not known)."""

    RESET = Path("/proc/self/clear_refs")

    def __init__(self) -> None:
        self._known = os.access(self.RESET, os.W_OK)
        self._most, self._of_others = 0, 0  # at the last look, bytes: what was resident, others' share of it

    def reset(self) -> None:
        """Begin to count anew."""
        if self._known:
            self.RESET.write_text("5")  # proc(5): the peak resident size becomes the present one

    def measure(self) -> dict[str, float]:
        """Return {"all": bytes}; {} where it is not known."""
        if not self._known:
            return {}
        most = _kilobytes(Path("/proc/self/status"), "VmHWM") * 1024
        if not 0.95 * self._most < most < 1.05 * self._most:  # a look at every page takes milliseconds a GB
            rollup = Path("/proc/self/smaps_rollup")
            self._most, self._of_others = most, (_kilobytes(rollup, "Rss") - _kilobytes(rollup, "Pss")) * 1024
        return {"all": float(most - self._of_others)}


def _kilobytes(path: Path, key: str) -> int:
    lines = path.read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def empty_cache(device: torch.device) -> None:
    """Give memory that torch caches back to the device, for the engine's processes; nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def free_memory(device: torch.device) -> int:
    """Return the bytes of the device that no process uses; 0 on a CPU."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


def reset_device_peak(device: torch.device) -> None:
    """Reset the peak-memory counter; nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def device_peak(device: torch.device) -> dict[str, float]:
    """Return bytes since `reset_device_peak`: the most that this process's tensors took (""), that torch held
    for them ("reserved"), and what all processes take of the device now ("device"). Empty on a CPU."""
    if device.type != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info(device)
    return {
        "": float(torch.cuda.max_memory_allocated(device)),
        "reserved": float(torch.cuda.max_memory_reserved(device)),
        "device": float(total - free),
    }
