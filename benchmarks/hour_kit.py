"""Bring megarl to a GPU machine without a network, and run the stages of `make gpu` there.

    make gpu-kit                                   # with a network, no GPU needed: writes the folder `kit`
    python3 kit/kit.py unpack TARGET               # GPU machine: check and unpack the pieces, run doctor
    python3 kit/kit.py run TARGET --minutes 60     # GPU machine: arguments of benchmarks/hour.py

kit.py is a copy of this file. It needs only the standard library.

The GPU machine must have the same minor version of Python, torch for the same CUDA, and COMMON's packages.
NVIDIA's libraries come from that torch. NCCL and cuDNN come from the kit, because torch and Transformer
Engine require the versions that they were compiled with.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import lzma
import mmap
import os
import re
import shlex
import shutil
import struct
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

ROOT = Path(__file__).resolve().parent.parent
CORES = len(os.sched_getaffinity(0))
FATBIN, ELF, PTX = b"\x50\xed\x55\xba", 2, 1  # magic number of a group of entries; kinds of an entry
LARGE = 2**20  # bytes; smaller libraries are packed unchanged
# Expected on the GPU machine, in any version.
COMMON = """Cython PIL contourpy fontTools google grpc kiwisolver llvmlite lxml matplotlib mpl_toolkits mpmath
    networkx numba numpy onnx onnxscript onnx_ir pandas pillow pip pyarrow scipy setuptools sympy tensorboard
    uvloop"""
# Requirements of SGLang that no stage imports.
UNUSED = """Cryptodome anthropic cryptography cudnn datasets deep_ep deepseek_recipe flash_mla flashinfer
    hf_xet jedi mistral_common modelscope nccl nvshmem pycountry tilelang timm torchcodec wandb z3
    zstandard"""
FLASH = "sgl_kernel/flash_ops"  # FlashAttention's kernels for SGLang
LEFT_OUT = (
    *("sgl_kernel/infllm_ops", "sglang/multimodal_gen/", "sglang/test/", "torch/include/"),
    *("sglang/srt/rust_extensions/_bench", "sglang/srt/rust_extensions/_server", "triton/_C/libproton"),
    *("triton/backends/amd/lib", "triton/backends/nvidia/lib/cupti", "triton/instrumentation"),
    *("nvidia_cutlass_dsl/cu12", "nvidia_cutlass_dsl/dsl_packages/cutlass/_mlir/_mlir_libs/_cutlass_ir.cu12"),
)
PACKAGES = {
    "torch": "torch torchgen functorch",
    "kernels": "triton triton_kernels sgl_kernel transformer_engine nvidia nvidia_cutlass_dsl",
}
ARCHIVES = ("torch", "kernels", "flash", "python", "megarl")
GIT = ("git", "-C", str(ROOT))


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
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for line in output.replace("[ ", "[").splitlines():
        words = line.split()
        if len(words) > 5 and words[1] in (".nv_fatbin", "__nv_relfatbin"):
            yield int(words[4], 16), int(words[5], 16)


def pack(given: argparse.Namespace) -> int:
    """Write archives in pieces, manifest.json with the SHA-256 of each piece, and kit.py."""
    sites = sorted(given.environment.glob("lib/python3.*/site-packages"))
    added = dict(word.partition("=")[::2] for word in given.add)  # name -> path
    tools = ("bash", "git", "readelf", "split", "xz")
    problems = [f"{tool}: not installed. Install {tool}." for tool in tools if not shutil.which(tool)]
    problems += [f"{given.environment}: no environment. Run make install-gpu."] * (not sites)
    problems += [f"{given.kit}: exists. Delete it or name another folder."] * given.kit.exists()
    for name, path in added.items():
        if not re.fullmatch(r"\w[\w.-]*", name) or name in ARCHIVES or not Path(path).exists():
            problems.append(f"--add {name}={path}: needs a new name and an existing path.")
    unknown = [name for name in given.without if name not in (*ARCHIVES, *added)]
    problems += [f"--without {name}: no such archive. Name one of {', '.join(ARCHIVES)}." for name in unknown]
    if problems or len(added) < len(given.add):
        return fail(*problems or ["--add: two archives have the same name."])
    commit = subprocess.check_output([*GIT, "rev-parse", "HEAD"], text=True).strip()
    given.kit.mkdir(parents=True)
    [site], contents, size, archives = sites, site_files(sites[0]), int(given.piece * 1e6), {}
    for name in (name for name in [*ARCHIVES, *added] if name not in given.without):
        started, folder, path = time.monotonic(), "site", given.kit / f"{name}.tar.xz"
        if name in added:
            source, folder, path = Path(added[name]), "data", path.with_suffix("")  # weights hardly compress
            files = {str(Path(name, file.relative_to(source))): file for file in list_files(source)}
            write_tar(files, path, size)
        elif name == "megarl":
            folder = "."
            with open_pieces(path, size) as pipe:
                subprocess.run([*GIT, "archive", "--prefix=megarl/", commit], stdout=pipe, check=True)
            if subprocess.check_output([*GIT, "status", "--porcelain"]):
                print("megarl: uncommitted changes are not packed. Commit them first to include them.")
        else:
            write_tar(contents[name], path, size, given.arch)
        pieces = [describe(piece) for piece in sorted(given.kit.glob(f"{path.name}.[0-9]*"))]
        archives[name] = {"folder": folder, "pieces": pieces} | (
            {"commit": commit} if name == "megarl" else {}
        )
        megabytes, seconds = sum(piece["bytes"] for piece in pieces) / 1e6, time.monotonic() - started
        print(f"{name}: {megabytes:.1f} MB, {len(pieces)} pieces, {seconds:.0f} s", flush=True)
    manifest = {"python": site.parent.name.removeprefix("python"), "archives": archives}
    (given.kit / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    shutil.copyfile(__file__, given.kit / "kit.py")
    return 0


def site_files(site: Path) -> dict[str, dict[str, Path]]:
    """Return the files of a site-packages folder by archive and relative path."""
    owner = {package: name for name, packages in PACKAGES.items() for package in packages.split()}
    archives: dict[str, dict[str, Path]] = {name: {} for name in ARCHIVES}
    ignored = {*COMMON.split(), *UNUSED.split(), "__pycache__"}
    for path in sorted(site.iterdir()):
        if path.name.removesuffix(".libs") in ignored or path.name.startswith("__editable__"):
            continue
        # Of NVIDIA's libraries only NCCL and cuDNN.
        folders = [path / name / "lib" for name in ("nccl", "cudnn")] if path.name == "nvidia" else [path]
        for file in (file for folder in folders for file in list_files(folder)):
            member = str(file.relative_to(site))
            if member.startswith(FLASH):
                archives["flash"][member] = file
            elif not member.startswith(LEFT_OUT):
                archives[owner.get(path.name, "python")][member] = file
    return archives


def list_files(path: Path) -> list[Path]:
    """List the files below a path without bytecode, sorted."""
    found = sorted(path.rglob("*")) if path.is_dir() else [path]
    return [file for file in found if file.is_file() and "__pycache__" not in file.parts]


def write_tar(files: dict[str, Path], path: Path, size: int, arch: int | None = None) -> None:
    """Write files under the names of their keys. With `arch`, large libraries keep code for one GPU only."""
    with open_pieces(path, size) as pipe, TemporaryDirectory() as temp, tarfile.open(None, "w|", pipe) as tar:
        tar.dereference = True  # a model in the cache of Hugging Face is a folder of links
        for name, file in files.items():
            source = file
            if arch is not None and ".so" in file.suffixes and file.stat().st_size > LARGE:
                source = Path(shutil.copy2(file, temp))
                keep_only(source, arch)
            tar.add(source, name)
            if source != file:
                source.unlink()


@contextmanager
def open_pieces(path: Path, size: int) -> Iterator[IO[bytes]]:
    """Yield a pipe to PATH.00, PATH.01, ... of `size` bytes each. A path that ends in .xz is compressed."""
    compress = "xz -1 -T0" if path.suffix == ".xz" else "cat"
    script = f'set -o pipefail; {compress} | split --numeric-suffixes --bytes "$0" - "$1"'
    with subprocess.Popen(["bash", "-c", script, str(size), f"{path}."], stdin=subprocess.PIPE) as process:
        assert process.stdin
        yield process.stdin
    if process.returncode:
        raise SystemExit(f"{path}: `{compress} | split` ended with exit code {process.returncode}")


def describe(piece: Path) -> dict[str, Any]:
    """Return name, bytes and SHA-256 of a piece."""
    with piece.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"name": piece.name, "bytes": piece.stat().st_size, "sha256": digest}


def unpack(kit: Path, target: Path, archives: dict[str, Any], chosen: list[str]) -> int:
    """Unpack the chosen archives that are complete, in parallel, then check the installation.

    Returns: 2 if a piece is missing or damaged, 1 if a check failed, else 0"""
    state = target / ".unpacked"  # holds the entry in the manifest of each unpacked archive
    if target.exists() and not state.is_dir() and any(target.iterdir()):
        return fail(f"{target}: is not empty. Name a new folder.")
    state.mkdir(parents=True, exist_ok=True)
    unpacked = {path.name: json.loads(path.read_text()) for path in state.iterdir()}
    todo = [name for name in chosen if unpacked.get(name) != archives[name]]
    todo.sort(key=lambda name: len(archives[name]["pieces"]), reverse=True)
    with ProcessPoolExecutor(CORES) as pool:
        jobs = [pool.submit(unpack_archive, kit, target, name, archives[name]) for name in todo]
        complete = all(job.result() for job in jobs)
    write_environment(target)
    missing = [name for name in ARCHIVES if name != "flash" and not (state / name).is_file()]
    if missing:
        print(f"not checked, because these archives are not unpacked: {', '.join(missing)}")
    failures = 0 if missing else check(target)
    return int(failures > 0) if complete else 2


def unpack_archive(kit: Path, target: Path, name: str, archive: dict[str, Any]) -> bool:
    """Check the pieces of an archive and unpack it. Return whether it is unpacked."""
    started, pieces = time.monotonic(), [str(kit / piece["name"]) for piece in archive["pieces"]]
    problems = [line for piece in archive["pieces"] if (line := find_problem(kit, piece))]
    folder, state = target / archive["folder"], target / ".unpacked" / name
    if state.is_file() and archive["folder"] == "site":
        problems.append(f"{folder}: has {name} of another kit. Name a new folder.")
    if problems:
        fail(*problems)
        return False
    state.unlink(missing_ok=True)
    if archive["folder"] != "site":  # several archives share `site`
        shutil.rmtree(folder / name, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        extract(pieces, folder)
        state.write_text(json.dumps(archive))
    except OSError as error:  # e.g. the disk is full
        state.unlink(missing_ok=True)
        fail(f"{name}: {error}. Call unpack again.")
        return False
    print(f"{name}: unpacked, {time.monotonic() - started:.0f} s", flush=True)
    return True


def extract(pieces: list[str], folder: Path) -> None:
    """Unpack a tar file that is divided into pieces. Members outside the folder are refused."""
    opener: Any = lzma.LZMAFile if ".tar.xz." in pieces[0] else nullcontext
    process = subprocess.Popen(["cat", *pieces], stdout=subprocess.PIPE)
    with process, opener(process.stdout) as stream, tarfile.open(None, "r|", stream, bufsize=2**16) as tar:
        tar.extractall(folder, filter="data")


def find_problem(kit: Path, piece: dict[str, Any]) -> str:
    """Return a line if a piece is missing, incomplete or damaged, else an empty string."""
    path = kit / piece["name"]
    if not path.is_file():
        return f"{path}: missing. Copy it into the kit."
    if path.stat().st_size != piece["bytes"]:
        return f"{path}: has {path.stat().st_size:,} of {piece['bytes']:,} bytes. Copy it again."
    return "" if describe(path) == piece else f"{path}: damaged (another SHA-256). Copy it again."


def write_environment(target: Path) -> None:
    """Write TARGET/environment.sh: the variables that megarl needs."""
    site, machine = target / "site", importlib.util.find_spec("nvidia")  # libraries of the machine's torch
    folders = map(Path, (machine and machine.submodule_search_locations) or ())
    libraries = [lib for path in folders if target not in path.parents for lib in sorted(path.glob("*/lib"))]
    libraries = [site / "nvidia/nccl/lib", site / "nvidia/cudnn/lib", *libraries]
    packages = [target / "megarl", site, site / "nvidia_cutlass_dsl/dsl_packages"]
    lines = ["export HF_HUB_OFFLINE=1", f"export CUDNN_HOME={shlex.quote(str(site / 'nvidia/cudnn'))}"]
    for name, paths in {"LD_LIBRARY_PATH": libraries, "PYTHONPATH": packages}.items():
        lines.append(f'export {name}={shlex.quote(":".join(map(str, paths)))}"${{{name}:+:${name}}}"')
    (target / "environment.sh").write_text("\n".join(lines) + "\n")


def python_command(target: Path, *arguments: str) -> list[str]:
    """Return a command that starts this Python in the environment of TARGET/environment.sh."""
    # Another process: the loader reads LD_LIBRARY_PATH only when a process starts.
    script = '. "$0" && exec "$@"'
    return ["sh", "-c", script, str(target / "environment.sh"), sys.executable, *arguments]


def check(target: Path) -> int:
    """Run `megarl doctor` and check the demos' configs. Return the number of failures."""
    tree = target / "megarl"
    doctor = subprocess.run(python_command(target, "-m", "megarl", "doctor"), cwd=tree, check=False)

    def check_config(path: Path) -> bool:
        command = python_command(target, "-m", "megarl", "config", "check", str(path))
        done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
        return done.returncode == 0 or not fail(done.stderr.strip())

    # The others inherit from base.yaml and *_base.yaml, which are incomplete.
    configs = [path for path in sorted(tree.glob("configs/demos/*.yaml")) if not path.stem.endswith("base")]
    with ThreadPoolExecutor(CORES) as pool:
        valid = sum(pool.map(check_config, configs))
    print(f"config check: {valid} of {len(configs)} configs are valid", flush=True)
    return int(doctor.returncode != 0) + len(configs) - valid


def run(target: Path, arguments: list[str]) -> int:
    """Replace this process by benchmarks/hour.py."""
    script, state = target / "megarl/benchmarks/hour.py", target / ".unpacked/megarl"
    if not state.is_file():
        return fail(f"{target}: megarl is not unpacked. Run kit.py unpack {target}.")
    options = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    options.add_argument("--gpus", default="1")
    options.add_argument("--out", type=Path)
    options.add_argument("--engine-options")
    options.add_argument("--fetched")
    given, _ = options.parse_known_args(arguments)
    # Outside the tree, which another kit replaces.
    out = (given.out or target / "runs" / ("gpu-8" if given.gpus == "8" else "gpu")).resolve()
    arguments = ["--out", str(out), *arguments]
    if given.engine_options is None and not any(target.glob(f"site/{FLASH}*")):
        print("flash is not unpacked: SGLang uses attention_backend triton")
        arguments += ["--engine-options", '{"attention_backend": "triton"}']
    fetched = target / "data/fetched"  # models' wheels and GSM8K
    if given.fetched is None and fetched.is_dir():
        arguments += ["--fetched", str(fetched)]
    os.environ["MEGARL_COMMIT"] = commit = json.loads(state.read_text())["commit"][:10]  # for the report
    print(f"megarl {commit}, report: {out / 'report.md'}", flush=True)
    command = python_command(target, str(script), *arguments)
    os.execvp(command[0], command)


def fail(*lines: str) -> int:
    """Print problems, one a line. Return the exit code."""
    print(*lines, sep="\n", file=sys.stderr, flush=True)
    return 2


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("pack", help="write a kit")
    command.add_argument("environment", type=Path, help="of `make install-gpu`: .venv-gpu")
    command.add_argument("kit", type=Path, help="new folder")
    command.add_argument("--arch", type=int, default=90, help="compute capability of the GPU (default: 90)")
    command.add_argument("--piece", type=float, default=56, help="MB of a piece (default: 56)")
    text = f"archives to leave out, of {', '.join(ARCHIVES)} and those of --add"
    command.add_argument("--without", nargs="+", default=[], metavar="NAME", help=text)
    text = "files or folders, e.g. models, that become TARGET/data/NAME"
    command.add_argument("--add", nargs="+", default=[], action="extend", metavar="NAME=PATH", help=text)
    command = commands.add_parser("unpack", help="check pieces, unpack archives, run megarl doctor")
    command.add_argument("target", type=Path, help="new folder, or one of an earlier call")
    command.add_argument("--only", nargs="+", metavar="NAME", help="archives (default: all)")
    command = commands.add_parser("run", help="run benchmarks/hour.py")
    command.add_argument("target", type=Path, help="folder of unpack")
    command.add_argument("arguments", nargs=argparse.REMAINDER, help="of benchmarks/hour.py")
    given = parser.parse_args()
    if given.command == "pack":
        return pack(given)
    kit, target = Path(__file__).resolve().parent, given.target.resolve()
    if not (kit / "manifest.json").is_file():
        return fail(f"{kit}/manifest.json: missing. Run kit.py in the folder that pack wrote.")
    manifest = json.loads((kit / "manifest.json").read_text())
    python, archives = "{}.{}".format(*sys.version_info), manifest["archives"]
    if python != manifest["python"]:
        needed = manifest["python"]
        return fail(f"Python {python}: the kit is for Python {needed}. Use python{needed}.")
    if given.command == "run":
        return run(target, given.arguments)
    unknown = sorted({*(given.only or ())} - archives.keys())
    if unknown:
        return fail(f"--only: no archive {', '.join(unknown)}. The kit has {', '.join(archives)}.")
    return unpack(kit, target, archives, given.only or list(archives))


if __name__ == "__main__":
    sys.exit(main())
