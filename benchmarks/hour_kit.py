"""Pack the locked environment of `make gpu` for a GPU machine without a network.

The archives come in pieces and omit device code for other GPUs.

    make install-gpu                                                     # here, without a GPU
    python benchmarks/hour_kit.py .venv-gpu kit --arch 90 --piece 56     # compute capability 9.0, MB
    for name in python torch kernels; do cat kit/$name.tar.xz.* | tar xJ -C site; done     # there
    . kit/environment.sh site                                            # PYTHONPATH and LD_LIBRARY_PATH

The GPU machine needs the same minor version of Python, a torch for the same CUDA, and the packages of COMMON.
NVIDIA's libraries of that torch are used, except NCCL and cuDNN. The kit contains those two, because torch
and Transformer Engine require the versions that they were compiled with. FlashAttention's kernels, half of
the total size, are left out: `make gpu ARGS="--engine-options='{\\"attention_backend\\":\\"triton\\"}'"`.
"""

from __future__ import annotations

import argparse
import mmap
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

FATBIN, ELF, PTX = b"\x50\xed\x55\xba", 2, 1  # magic number of a group of entries; kinds of an entry
LARGE = 2**20  # libraries below this stay as they are
# Expected on the GPU machine, in any version.
COMMON = """Cython PIL contourpy fontTools google grpc kiwisolver llvmlite lxml matplotlib mpl_toolkits mpmath
    networkx numba numpy onnx onnxscript onnx_ir pandas pillow pip pyarrow scipy setuptools sympy tensorboard
    uvloop"""
# Requirements of SGLang that no stage imports.
UNUSED = """Cryptodome anthropic cryptography cudnn datasets deep_ep deepseek_recipe flash_mla flashinfer
    hf_xet jedi mistral_common modelscope nccl nvshmem pycountry tilelang timm torchcodec wandb z3
    zstandard"""
LEFT_OUT = (
    *(
        "sgl_kernel/flash_ops",
        "sgl_kernel/infllm_ops",
        "sglang/multimodal_gen/",
        "sglang/test/",
        "torch/include/",
    ),
    *("sglang/srt/rust_extensions/_bench", "sglang/srt/rust_extensions/_server", "triton/_C/libproton"),
    *("triton/backends/amd/lib", "triton/backends/nvidia/lib/cupti", "triton/instrumentation"),
    *("nvidia_cutlass_dsl/cu12", "nvidia_cutlass_dsl/dsl_packages/cutlass/_mlir/_mlir_libs/_cutlass_ir.cu12"),
)
ARCHIVES = {
    "torch": "torch torchgen functorch",
    "kernels": "triton triton_kernels sgl_kernel transformer_engine nvidia nvidia_cutlass_dsl",
}
ENVIRONMENT = """# . kit/environment.sh SITE
site=$(cd "$1" && pwd)
export CUDNN_HOME=$site/nvidia/cudnn  # where Transformer Engine looks first
export LD_LIBRARY_PATH=$site/nvidia/nccl/lib:$CUDNN_HOME/lib$(printf ':%s' $(python3 -c \\
    'import sysconfig; print(sysconfig.get_path("purelib"))')/nvidia/*/lib):$LD_LIBRARY_PATH
export PYTHONPATH=$site:$site/nvidia_cutlass_dsl/dsl_packages:$PYTHONPATH
"""


def keep_only(library: Path, arch: int) -> tuple[int, int]:
    """Overwrite a shared library's code for other GPUs with zeros, in place, so that it compresses.

    A section .nv_fatbin is a sequence of groups. A group is a header and entries.
    Header: magic, u16 version, u16 bytes of the header, u64 bytes of the entries.
    Entry: u16 kind, u16 version, u32 bytes of its header, u64 bytes of code; at byte 28 u32 capability.
    If a group has no code for the GPU, its PTX is kept, which the driver compiles.

    Args: arch: compute capability of the GPU (90: 9.0)
    Returns: bytes of code that are kept, bytes that are cleared"""
    kept = cleared = 0
    with library.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        for begin, size in fatbins(library):
            at = begin
            while at + 16 <= begin + size:
                if memory[at : at + 4] != FATBIN:
                    at += 8  # groups are aligned
                    continue
                header, length = struct.unpack_from("<HQ", memory, at + 6)
                entry, end, entries = at + header, at + header + length, []
                while entry < end:
                    kind, own, code = struct.unpack_from("<H2xIQ", memory, entry)
                    [capability] = struct.unpack_from("<I", memory, entry + 28)
                    entries.append((kind, capability, entry + own, code))
                    entry += own + code
                there = any((kind, capability) == (ELF, arch) for kind, capability, _, _ in entries)
                for kind, capability, where, code in entries:
                    if (kind, capability) == (ELF, arch) if there else kind == PTX:
                        kept += code
                    else:
                        memory[where : where + code] = bytes(code)
                        cleared += code
                at = -(-end // 8) * 8
    return kept, cleared


def fatbins(library: Path) -> Iterator[tuple[int, int]]:
    """Yield offset and size of the sections with GPU code, from readelf."""
    command = ["readelf", "--section-headers", "--wide", str(library)]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for line in told.replace("[ ", "[").splitlines():
        words = line.split()
        if len(words) > 5 and words[1] in (".nv_fatbin", "__nv_relfatbin"):
            yield int(words[4], 16), int(words[5], 16)


def pack(site: Path, kit: Path, arch: int, piece: int) -> None:
    """Write the archives of a site-packages folder, each in pieces of `piece` bytes."""
    names: dict[str, list[str]] = {name: packages.split() for name, packages in ARCHIVES.items()}
    taken = {package for packages in names.values() for package in packages}
    apart = {*COMMON.split(), *UNUSED.split(), "__pycache__"}
    names["python"] = [
        path.name
        for path in sorted(site.iterdir())
        if path.name.removesuffix(".libs") not in apart | taken and not path.name.startswith("__editable__")
    ]
    for name, packages in names.items():
        there = [package for package in packages if (site / package).exists()]
        written = archive(site, there, kit / f"{name}.tar.xz", arch, piece)
        print(f"{name}: {written / 1e6:.0f} MB", flush=True)


def archive(site: Path, packages: list[str], path: Path, arch: int, piece: int) -> int:
    """Write the packages' files to PATH.00, PATH.01, ..., with code for one GPU; return the bytes written."""
    packing = ["sh", "-c", 'xz -1 -T0 | split --numeric-suffixes --bytes "$0" - "$1"', str(piece), f"{path}."]
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(packing, stdin=subprocess.PIPE) as process,
        tarfile.open(fileobj=process.stdin, mode="w|") as tar,
    ):
        for file in sorted(file for package in packages for file in files(site / package)):
            source, member = file, str(file.relative_to(site))
            if member.startswith(LEFT_OUT):
                continue
            if ".so" in file.suffixes and file.stat().st_size > LARGE:
                source = Path(shutil.copy2(file, folder))
                keep_only(source, arch)
            tar.add(source, member, recursive=False)
            if source != file:
                source.unlink()
    if process.returncode:
        raise SystemExit(f"hour_kit: {packing[2]}: exit code {process.returncode}")
    return sum(written.stat().st_size for written in path.parent.glob(f"{path.name}.*"))


def files(path: Path) -> list[Path]:
    """List the files of a path without bytecode; of the folder `nvidia` only NCCL and cuDNN."""
    if not path.is_dir():
        return [path]
    folders = [path / name / "lib" for name in ("nccl", "cudnn")] if path.name == "nvidia" else [path]
    found = (file for folder in folders for file in folder.rglob("*"))
    return [file for file in found if not file.is_dir() and "__pycache__" not in file.parts]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("environment", type=Path, help="of `make install-gpu`: .venv-gpu")
    parser.add_argument("kit", type=Path, help="folder that is written, and must not exist")
    parser.add_argument("--arch", type=int, default=90, help="compute capability of the GPU (default: 90)")
    parser.add_argument("--piece", type=float, default=56, help="MB of a piece (default: 56)")
    given = parser.parse_args()
    sites = sorted(given.environment.glob("lib/python3.*/site-packages"))
    if not sites:
        parser.error(f"{given.environment}: no environment (make install-gpu)")
    for tool in ("readelf", "xz", "split"):
        if not shutil.which(tool):
            parser.error(f"{tool} is not there (packages binutils, xz-utils, coreutils)")
    if given.kit.exists():
        parser.error(f"{given.kit}: is there already (delete it, or name another folder)")
    given.kit.mkdir(parents=True)
    (given.kit / "environment.sh").write_text(ENVIRONMENT)
    pack(sites[0], given.kit, given.arch, int(given.piece * 1e6))
    return 0


if __name__ == "__main__":
    sys.exit(main())
