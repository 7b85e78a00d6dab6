"""The kit of `make gpu` for offline machines: which code of a library is kept, bitwise unchanged."""

from __future__ import annotations

import ctypes
import importlib
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
ELF, PTX = 2, 1
CODE = {(ELF, 80): b"\x80" * 24, (ELF, 90): b"\x90" * 40, (PTX, 80): b"p" * 16, (PTX, 120): b"q" * 8}

pytestmark = pytest.mark.skipif(
    not all(map(shutil.which, ("cc", "readelf", "xz", "split"))), reason="needs cc, readelf, xz and split"
)


@pytest.fixture
def kit(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("hour_kit")


def group(*entries: tuple[int, int]) -> bytes:
    """Return code for GPUs as nvcc embeds it in a library, aligned to 8 bytes."""
    made = b""
    for kind, capability in entries:
        code = CODE[kind, capability]
        header = struct.pack("<HHIQ12xI32x", kind, 0x101, 64, len(code), capability)
        made += header + code
    made = b"\x50\xed\x55\xba" + struct.pack("<HHQ", 1, 16, len(made)) + made
    return made + bytes(-len(made) % 8)


def library(path: Path, *groups: bytes) -> Path:
    """Compile a shared library with a function and a section with these groups."""
    path.parent.mkdir(parents=True, exist_ok=True)
    source, code = path.with_suffix(".c"), path.with_suffix(".bin")
    code.write_bytes(b"".join(groups))
    source.write_text(
        f'__asm__(".section .nv_fatbin,\\"a\\"\\n.balign 8\\n.incbin \\"{code}\\"\\n.text");'
        "\nint answer(void) { return 42; }\n"
    )
    subprocess.run(["cc", "-shared", "-fPIC", "-o", path, source], check=True)
    source.unlink()
    code.unlink()
    return path


def test_code_for_other_gpus_is_cleared(kit: Any, tmp_path: Path) -> None:
    both, only_ptx = ((ELF, 80), (ELF, 90), (PTX, 120)), ((ELF, 80), (PTX, 80))
    path = library(tmp_path / "lib.so", group(*both), group(*only_ptx))
    before = path.read_bytes()
    kept, cleared = kit.keep_only(path, 90)
    assert (kept, cleared) == (40 + 16, 24 + 8 + 24)
    after = path.read_bytes()
    assert len(after) == len(before)
    assert CODE[ELF, 90] in after and CODE[PTX, 80] in after, "of a group without code for the GPU, its PTX"
    assert CODE[ELF, 80] not in after and CODE[PTX, 120] not in after
    assert ctypes.CDLL(str(path)).answer() == 42


def test_what_is_unpacked_is_what_was_installed(kit: Any, tmp_path: Path) -> None:
    site, packed, unpacked = (tmp_path / name for name in ("site", "kit", "unpacked"))
    for name in ("one/__init__.py", "one/__pycache__/a.pyc", "torch/__init__.py", "torch/include/a.h"):
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(name)
    for name in (
        "nvidia/nccl/lib/libnccl.so.2",
        "nvidia/cudnn/lib/libcudnn.so.9",
        "nvidia/cusparselt/lib/libcusparseLt.so.0",
        "wandb/__init__.py",
        "two.py",
    ):
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(name)
    large = library(site / "transformer_engine" / "large.so", *[group((ELF, 80), (ELF, 90))] * 10000)
    packed.mkdir()
    kit.pack(site, packed, 90, 900)
    unpacked.mkdir()
    for name in ("python", "torch", "kernels"):
        command = f'cat "{packed}"/{name}.tar.xz.* | tar xJ -C "{unpacked}"'
        subprocess.run(command, shell=True, check=True)
    assert len(list(packed.glob("kernels.tar.xz.*"))) > 1, "in pieces"
    found = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*") if path.is_file()}
    assert found == {
        *("one/__init__.py", "two.py", "torch/__init__.py", "nvidia/nccl/lib/libnccl.so.2"),
        "nvidia/cudnn/lib/libcudnn.so.9",
        "transformer_engine/large.so",
    }
    there = (unpacked / "transformer_engine/large.so").read_bytes()
    assert len(there) == large.stat().st_size and CODE[ELF, 80] not in there
    assert CODE[ELF, 80] in large.read_bytes(), "the environment itself is left as it is"
