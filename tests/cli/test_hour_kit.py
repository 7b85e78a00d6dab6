"""The kit for GPU machines without a network: GPU code, damaged pieces, a second call, variables."""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import shutil
import struct
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
ELF, PTX = 2, 1
PYTHON = "{}.{}".format(*sys.version_info)
ARCHIVES = ("torch", "kernels", "flash", "python", "megarl")
SITE = (
    *("one/__init__.py", "one/__pycache__/a.pyc", "torch/__init__.py", "torch/include/a.h", "two.py"),
    *("nvidia/nccl/lib/libnccl.so.2", "nvidia/cudnn/lib/libcudnn.so.9", "nvidia/cublas/lib/libcublas.so"),
    *("sgl_kernel/__init__.py", "sgl_kernel/flash_ops.abi3.so", "wandb/__init__.py", "numpy.libs/a.so"),
)
TREE = {
    "megarl/__init__.py": "",
    "megarl/__main__.py": "import sys; print(sys.argv[1:]); sys.exit('bad' in open(sys.argv[-1]).read()"
    " and sys.argv[-1] + ': is bad' if 'check' in sys.argv else 0)",
    "configs/demos/base.yaml": "bad",
    "configs/demos/vapo.yaml": "good",
    "benchmarks/hour.py": "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))",
}
CODE = {(ELF, 80): b"\x80" * 24, (ELF, 90): b"\x90" * 40, (PTX, 80): b"p" * 16, (PTX, 120): b"q" * 8}

pytestmark = pytest.mark.skipif(
    not all(map(shutil.which, ("bash", "cc", "git", "readelf", "xz", "split"))),
    reason="needs bash, cc, git, readelf, xz and split",
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


def write_files(folder: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)


def commit(tree: Path) -> None:
    git = ["git", "-C", str(tree), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "a"]):
        subprocess.run([*git, *command], check=True)


@pytest.fixture
def pack(kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Return a function that packs a small environment and a small tree."""
    write_files(tmp_path / "env/lib" / f"python{PYTHON}" / "site-packages", {name: name for name in SITE})
    write_files(tmp_path / "tree", TREE)
    commit(tmp_path / "tree")
    monkeypatch.setattr(kit, "GIT", ("git", "-C", str(tmp_path / "tree")))

    def call(*arguments: object) -> int:
        command = ["hour_kit", "pack", tmp_path / "env", *arguments]
        monkeypatch.setattr(sys, "argv", list(map(str, command)))
        return kit.main()

    return call


def call_kit(kit: Path, *arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run kit.py in another process, as on the GPU machine."""
    command = [sys.executable, "-I", kit / "kit.py", *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment)


def list_names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_unpacked_files_are_the_packed_ones(
    pack: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site, kit, target = (
        tmp_path / "env/lib" / f"python{PYTHON}/site-packages",
        tmp_path / "kit",
        tmp_path / "t",
    )
    large = library(site / "transformer_engine" / "large.so", *[group((ELF, 80), (ELF, 90))] * 10000)
    write_files(tmp_path, {"blobs/1": "weights", "model/config.json": "{}", "prompts.jsonl": "a"})
    (tmp_path / "model/model.safetensors").symlink_to("../blobs/1")
    (tmp_path / "tree/new.py").touch()
    added = (f"model-1.5={tmp_path / 'model'}", f"prompts.jsonl={tmp_path / 'prompts.jsonl'}")
    assert pack(kit, "--piece", 0.0009, "--add", *added) == 0
    assert "uncommitted changes are not packed" in capsys.readouterr().out
    assert len(list(kit.glob("kernels.tar.xz.*"))) > 1, "in pieces"
    done = call_kit(kit, "unpack", target)
    assert done.returncode == 0, done.stderr
    assert "['doctor']" in done.stdout and "config check: 1 of 1 configs are valid" in done.stdout
    assert list_names(target / "site") == {
        *("one/__init__.py", "two.py", "torch/__init__.py", "nvidia/nccl/lib/libnccl.so.2"),
        *("nvidia/cudnn/lib/libcudnn.so.9", "transformer_engine/large.so"),
        *("sgl_kernel/__init__.py", "sgl_kernel/flash_ops.abi3.so"),
    }
    assert {name for name in list_names(target / "megarl") if "__pycache__" not in name} == set(TREE)
    assert list_names(target / "data") == {
        *("model-1.5/config.json", "model-1.5/model.safetensors", "prompts.jsonl"),
    }
    assert (target / "data/model-1.5/model.safetensors").read_text() == "weights"
    unpacked = (target / "site/transformer_engine/large.so").read_bytes()
    assert len(unpacked) == large.stat().st_size and CODE[ELF, 80] not in unpacked
    assert CODE[ELF, 80] in large.read_bytes(), "the environment itself is left as it is"


def test_missing_and_damaged_pieces_are_named_and_the_next_call_resumes(
    pack: Callable[..., int], tmp_path: Path
) -> None:
    kit, target = tmp_path / "kit", tmp_path / "target"
    assert pack(kit) == 0
    torch, python, flash = (kit / f"{name}.tar.xz.00" for name in ("torch", "python", "flash"))
    contents = {piece: piece.read_bytes() for piece in (torch, python, flash)}
    torch.unlink()
    python.write_bytes(contents[python][:-1] + bytes([contents[python][-1] ^ 1]))
    flash.write_bytes(contents[flash][:10])
    done = call_kit(kit, "unpack", target)
    assert done.returncode == 2
    assert sorted(done.stderr.splitlines()) == [
        f"{flash}: has 10 of {len(contents[flash])} bytes. Copy it again.",
        f"{python}: damaged (another SHA-256). Copy it again.",
        f"{torch}: missing. Copy it into the kit.",
    ]
    assert "kernels: unpacked" in done.stdout and "megarl: unpacked" in done.stdout
    assert "not checked, because these archives are not unpacked: torch, python" in done.stdout
    for piece, content in contents.items():
        piece.write_bytes(content)
    (target / "site/torch").touch()
    done = call_kit(kit, "unpack", target, "--only", "torch")
    assert done.returncode == 2 and done.stderr.endswith("Call unpack again.\n")
    assert done.stderr.startswith("torch: ") and done.stderr.count("\n") == 1
    (target / "site/torch").unlink()
    done = call_kit(kit, "unpack", target, "--only", "torch", "python", "kernels")
    assert done.returncode == 0, done.stderr
    unpacked = {line.split(":")[0] for line in done.stdout.splitlines() if ": unpacked, " in line}
    assert unpacked == {"torch", "python"} and "['doctor']" in done.stdout
    assert not (target / "site/sgl_kernel/flash_ops.abi3.so").exists()


def test_members_outside_the_folder_are_refused(kit: Any, tmp_path: Path) -> None:
    (tmp_path / "kit").mkdir()
    kit.write_tar({"../outside": Path(__file__)}, tmp_path / "kit/evil.tar.xz", 10**6)
    with pytest.raises(tarfile.FilterError, match="outside the destination"):
        kit.extract([str(tmp_path / "kit/evil.tar.xz.00")], tmp_path / "target")
    assert not (tmp_path / "outside").exists()


def test_another_kit_replaces_the_tree_and_no_packages(pack: Callable[..., int], tmp_path: Path) -> None:
    first, second, target = (tmp_path / name for name in ("first", "second", "target"))
    assert pack(first) == 0 and call_kit(first, "unpack", target).returncode == 0
    write_files(tmp_path / "tree", {"configs/demos/vapo.yaml": "bad"})
    write_files(tmp_path / "env/lib" / f"python{PYTHON}/site-packages", {"two.py": "changed"})
    (tmp_path / "tree/benchmarks/hour.py").unlink()
    commit(tmp_path / "tree")
    assert pack(second, "--without", "torch", "kernels", "flash") == 0
    done = call_kit(second, "unpack", target)
    assert done.returncode == 2
    assert sorted(done.stderr.splitlines()) == [
        f"{target}/megarl/configs/demos/vapo.yaml: is bad",
        f"{target}/site: has python of another kit. Name a new folder.",
    ]
    assert not (target / "megarl/benchmarks/hour.py").exists()
    assert call_kit(second, "unpack", target, "--only", "megarl").returncode == 1, "a config is not valid"


def test_run_calls_hour_in_the_environment(pack: Callable[..., int], tmp_path: Path) -> None:
    kit, target = tmp_path / "kit", tmp_path / "target"
    write_files(tmp_path, {"wheels/smollm2.whl": "wheel"})
    assert pack(kit, "--add", f"fetched={tmp_path / 'wheels'}") == 0
    done = call_kit(kit, "run", target)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and "megarl is not unpacked" in done.stderr
    assert call_kit(kit, "unpack", target, "--only", *ARCHIVES[:2], *ARCHIVES[3:], "fetched").returncode == 0
    done = call_kit(kit, "run", target, "--tiny", "--only", "parity", "model", LD_LIBRARY_PATH="/machine lib")
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    arguments, variables = json.loads(last)
    out, site = target / "runs/gpu", target / "site"
    assert f"report: {out}/report.md" in lines[-1]
    assert arguments == [
        *("--out", str(out), "--tiny", "--only", "parity", "model"),
        *("--engine-options", '{"attention_backend": "triton"}'),
        *("--fetched", str(target / "data/fetched")),
    ]
    assert (target / "data/fetched/smollm2.whl").read_text() == "wheel"
    assert len(variables["MEGARL_COMMIT"]) == 10, "the report names the code"
    assert variables["HF_HUB_OFFLINE"] == "1" and variables["CUDNN_HOME"] == str(site / "nvidia/cudnn")
    libraries = variables["LD_LIBRARY_PATH"].split(":")
    assert libraries[:2] == [str(site / "nvidia/nccl/lib"), str(site / "nvidia/cudnn/lib")]
    assert libraries[-1] == "/machine lib"
    packages = [target / "megarl", site, site / "nvidia_cutlass_dsl/dsl_packages"]
    assert variables["PYTHONPATH"] == ":".join(map(str, packages))
    assert call_kit(kit, "unpack", target).returncode == 0
    done = call_kit(kit, "run", target, "--gpus", "8")
    arguments = ["--out", str(target / "runs/gpu-8"), "--gpus", "8"]
    fetched = ["--fetched", str(target / "data/fetched")]
    assert json.loads(done.stdout.splitlines()[-1])[0] == [*arguments, *fetched]


def test_wrong_uses_end_in_one_line(
    pack: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kit, target = tmp_path / "kit", tmp_path / "target"
    assert pack(kit, "--add", f"torch={tmp_path}") == 2
    assert capsys.readouterr().err == f"--add torch={tmp_path}: needs a new name and an existing path.\n"
    assert pack(kit) == 0
    assert pack(kit) == 2
    assert capsys.readouterr().err == f"{kit}: exists. Delete it or name another folder.\n"
    done = call_kit(kit, "unpack", target, "--only", "jax")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and "no archive jax" in done.stderr
    done = call_kit(kit, "unpack", tmp_path)
    assert (done.returncode, done.stderr) == (2, f"{tmp_path}: is not empty. Name a new folder.\n")
    manifest = json.loads((kit / "manifest.json").read_text())
    (kit / "manifest.json").write_text(json.dumps(manifest | {"python": "3.7"}))
    for command in ("unpack", "run"):
        done = call_kit(kit, command, target)
        line = f"Python {PYTHON}: the kit is for Python 3.7. Use python3.7.\n"
        assert (done.returncode, done.stderr) == (2, line)
    assert not target.exists()
