"""All on which a run's result depends bitwise."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from megarl.config import Config
from megarl.config.load import PACKAGE
from megarl.data.generated import gym_entries
from megarl.parallel.machine import get_version
from megarl.schedule.preflight import versions

PATHS = ("run_dir", "model.path", "data.train", "data.eval")  # compared by their contents


def identity(config: Config) -> dict[str, Any]:
    """Return a run's identity."""
    cpu_lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    models = [line for line in cpu_lines if line.startswith("model name")]
    return {
        "settings": list_settings(config),
        "inputs": checksum_inputs(config),
        "code": checksum_code(),
        "versions": {"python": platform.python_version(), **versions()},
        "processor": [torch.backends.cpu.get_cpu_capability(), *models[:1]],  # it decides which kernels run
    }


def checksum_inputs(config: Config) -> str:
    entries = (*config.data.train, *config.data.eval)
    files = checksum_files([*list_files(config.model.path), *(entry.path for entry in entries if entry.path)])
    generated = {key: entry.model_dump(mode="json") for key, entry in gym_entries(config.data).items()}
    if not generated:
        return files
    return hashlib.sha256(json.dumps([files, generated, get_version("reasoning-gym")]).encode()).hexdigest()


def list_files(folder: Path) -> list[Path]:
    return [file for file in sorted(folder.iterdir()) if file.is_file()]


def checksum_files(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def checksum_code() -> str:
    return checksum_files(sorted(PACKAGE.parent.glob("megarl*/**/*.py")))[:10]


def list_settings(config: Config) -> dict[str, Any]:
    """Return all settings except paths."""

    def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
        leaves: dict[str, Any] = {}
        for key, value in tree.items():
            leaves |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
        return leaves

    settings = flatten(config.model_dump(mode="json"))
    return {key: value for key, value in settings.items() if key not in PATHS}
