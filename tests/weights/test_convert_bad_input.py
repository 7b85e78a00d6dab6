"""Conversions that cannot be: the error names file and tensor, and nothing is left behind."""

from __future__ import annotations

import json
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megarl.config.errors import CheckpointError, ConfigError
from megarl.parallel.layout import Layout
from megarl.weights.megatron import conversion_layout, hf_to_megatron, megatron_to_hf
from tests.tiny_models import make_tiny_model
from tests.weights.folders import folder_tensors, same_bits, set_config


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model", "qwen2", max_shard_bytes=20_000)


def change(folder: Path, action: Callable[[dict[str, Tensor]], Any], having: str) -> Path:
    """Rewrites the file that has the tensor `having`."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    path = folder / index[having]
    tensors = load_file(path)
    action(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    return path


def refused(convert: Callable[[Path], Any], scratch: Path, *said: str) -> None:
    before = sorted(scratch.iterdir())
    with pytest.raises((CheckpointError, ConfigError)) as error:
        convert(scratch / "never")
    assert all(text in str(error.value) for text in said), (str(error.value), said)
    assert "\n" not in str(error.value)
    assert sorted(scratch.iterdir()) == before, "something was left behind"


K = "model.layers.1.self_attn.k_proj.weight"


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda f: change(f, lambda t: t.update({K: torch.zeros(8, 32)}), K), [K, "shape (8, 32)"]),
        (lambda f: change(f, lambda t: t.update({K: t[K].double()}), K), [K, "dtype F64 is not supported"]),
        (
            lambda f: change(f, lambda t: t.update({K: t[K].bfloat16()}), K),
            [K.replace("k_proj", "q_proj"), "bfloat16", "float32"],
        ),
        (lambda f: change(f, lambda t: t.pop(K), K), ["index.json", K, "but that file does not have it"]),
        (lambda f: truncate(change(f, lambda t: None, K)), [".safetensors", "truncated"]),
        (lambda f: change(f, lambda t: None, K).unlink(), [".safetensors", "no such file"]),
    ],
    ids=["shape", "dtype", "mixed dtypes", "absent", "truncated", "missing file"],
)
def test_damaged_sources(
    damage: Callable[[Path], Any], said: list[str], folder: Path, tmp_path: Path
) -> None:
    damage(folder)
    refused(lambda out: hf_to_megatron(folder, out, Layout()), tmp_path, *said)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def scribble(path: Path) -> None:
    path.write_bytes(b"\xff" * path.stat().st_size)


def test_tensors_too_many(folder: Path, tmp_path: Path) -> None:
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    path = change(folder, lambda tensors: tensors.update({"model.layers.0.surprise": torch.ones(3)}), K)
    content["weight_map"]["model.layers.0.surprise"] = path.name
    index.write_text(json.dumps(content))
    refused(lambda out: hf_to_megatron(folder, out, Layout()), tmp_path, path.name, "model.layers.0.surprise")


def test_damaged_checkpoints(folder: Path, tmp_path: Path) -> None:
    good = tmp_path / "good"
    hf_to_megatron(folder, good, conversion_layout(2, 1, 1))

    def damaged(action: Callable[[Path], Any]) -> Path:
        shutil.rmtree(tmp_path / "bad", ignore_errors=True)
        shutil.copytree(good, tmp_path / "bad")
        action(tmp_path / "bad")
        return tmp_path / "bad"

    cases: list[tuple[Callable[[Path], Any], list[str]]] = [
        (lambda path: (path / "__1_0.distcp").unlink(), ["__1_0.distcp: model.", "no such file"]),
        (lambda path: truncate(path / "__1_0.distcp"), ["__1_0.distcp: lm_head.weight: truncated"]),
        (lambda path: scribble(path / "__1_0.distcp"), ["__1_0.distcp: model.", "not a chunk"]),
        (lambda path: (path / ".metadata").write_bytes(b"nonsense"), [".metadata", "not a readable index"]),
        (lambda path: (path / ".metadata").unlink(), ["no .metadata"]),
        (
            lambda path: set_config(path, intermediate_size=96),
            [".metadata", "decoder.layers.mlp.linear_fc1.weight", "config.json asks for"],
        ),
        (
            lambda path: set_config(path, tie_word_embeddings=True),
            [".distcp: lm_head.weight: differs from model.embed_tokens.weight", "tie_word_embeddings: true"],
        ),
        (
            lambda path: set_config(path, model_type="llama", architectures=["LlamaForCausalLM"]),
            [".metadata", "decoder.layers.self_attention.linear_qkv.bias", "no such tensor"],
        ),
    ]
    for action, said in cases:
        bad = damaged(action)
        refused(lambda out, bad=bad: megatron_to_hf(bad, out), tmp_path, *said)


def test_a_layout_that_does_not_fit(folder: Path, tmp_path: Path) -> None:
    for layout, *said in (
        (conversion_layout(3, 1, 1), "parallel.tp: 3 does not divide"),
        (conversion_layout(1, 1, 2), "parallel.ep: 2", "no experts"),
    ):
        refused(lambda out, layout=layout: hf_to_megatron(folder, out, layout), tmp_path, *said)


def test_targets_that_exist(folder: Path, tmp_path: Path) -> None:
    hf_to_megatron(folder, tmp_path / "megatron", Layout())
    (tmp_path / "file").write_text("mine")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("file", "empty", "link", "megatron"):
        for convert in (
            lambda out: hf_to_megatron(folder, out, Layout()),
            lambda out: megatron_to_hf(tmp_path / "megatron", out),
        ):
            with pytest.raises(
                CheckpointError, match=rf"{name}: already exists \(choose another folder, or remove it\)"
            ):
                convert(tmp_path / name)
    assert (tmp_path / "file").read_text() == "mine" and not list((tmp_path / "empty").iterdir())
    assert not list(tmp_path.glob(".*"))


def test_interrupted_conversions_leave_nothing(folder: Path, tmp_path: Path) -> None:
    @contextmanager
    def impatient(_what: str, _size: int) -> Iterator[Callable[[int], None]]:
        def advance(_: int) -> None:
            raise KeyboardInterrupt

        yield advance

    before = sorted(tmp_path.iterdir())
    with pytest.raises(KeyboardInterrupt):
        hf_to_megatron(folder, tmp_path / "out", Layout(), watch=impatient)
    assert sorted(tmp_path.iterdir()) == before


# Converts in both directions, in children that are killed when half of the bytes are written.
KILLED = """
import os, signal, sys
from contextlib import contextmanager
from pathlib import Path
from megarl.parallel.layout import Layout
from megarl.weights.megatron import hf_to_megatron, megatron_to_hf
scratch = Path(sys.argv[1])

@contextmanager
def deadly(what, size):
    left = [size // 2]
    def advance(done):
        left[0] -= done
        if left[0] <= 0:
            os.kill(os.getpid(), signal.SIGKILL)
    yield advance

for convert in (
    lambda: hf_to_megatron(scratch / "model", scratch / "forth", Layout(), watch=deadly),
    lambda: megatron_to_hf(scratch / "megatron", scratch / "back", watch=deadly),
):
    if os.fork() == 0:
        convert()
        os._exit(0)
    print(os.WTERMSIG(os.wait()[1]))
"""


@pytest.mark.slow
def test_a_killed_conversion_leaves_nothing_under_the_name(folder: Path, tmp_path: Path) -> None:
    hf_to_megatron(folder, tmp_path / "megatron", Layout())
    run = subprocess.run(
        [sys.executable, "-c", KILLED, tmp_path], capture_output=True, text=True, timeout=200
    )
    assert (run.stdout, run.returncode) == ("9\n9\n", 0), run.stderr[-2000:]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".back.partial",
        ".forth.partial",
        "megatron",
        "model",
    ]
    assert all(
        any(path.stat().st_size for path in (tmp_path / name).iterdir())
        for name in (".back.partial", ".forth.partial")
    )
    (tmp_path / ".forth.partial" / "junk").write_text("of another layout")
    hf_to_megatron(folder, tmp_path / "forth", Layout(), verify=True)
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back", verify=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "forth", "megatron", "model"]
    assert not (tmp_path / "forth" / "junk").exists()
    assert same_bits(folder_tensors(folder), folder_tensors(tmp_path / "back"))


def test_two_at_once_do_not_mix(folder: Path, tmp_path: Path) -> None:
    """The second one is refused and the first one's work stays; flock tells two descriptors of one process
    apart as well."""

    @contextmanager
    def interrupted(_what: str, _size: int) -> Iterator[Callable[[int], None]]:
        with pytest.raises(CheckpointError, match=r"\.out\.partial: another process is writing there"):
            hf_to_megatron(folder, tmp_path / "out", Layout())
        yield lambda _: None

    hf_to_megatron(folder, tmp_path / "out", Layout(), watch=interrupted, verify=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]


@pytest.mark.parametrize("where", ["__0_0.distcp", "model.safetensors"])
def test_verify_finds_one_wrong_bit(where: str, folder: Path, tmp_path: Path) -> None:
    @contextmanager
    def meddling(what: str, _size: int) -> Iterator[Callable[[int], None]]:
        if what == "comparing":
            [path] = tmp_path.glob(f".never.partial/{where}")
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 4
            path.write_bytes(data)
        yield lambda _: None

    hf_to_megatron(folder, tmp_path / "megatron", Layout())

    def convert(out: Path) -> None:
        if where.endswith("distcp"):
            hf_to_megatron(folder, out, Layout(), verify=True, watch=meddling)
        else:
            megatron_to_hf(tmp_path / "megatron", out, verify=True, watch=meddling)

    refused(convert, tmp_path, where, "is not what was written")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 400 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = shutil.which("mount") and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", disk], capture_output=True
    )
    if not mounted or mounted.returncode:
        pytest.skip("mounting a tmpfs is not permitted here")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_a_disk_that_is_full(folder: Path, tmp_path: Path, small_disk: Path) -> None:
    """Found full before, in the middle of a tensor, at the index, at the tokenizer, at the checksums: at
    whatever comes when it is full."""
    hf_to_megatron(folder, tmp_path / "megatron", Layout())
    seen = set()
    for convert in (
        lambda out: hf_to_megatron(folder, out, Layout(), verify=True),
        lambda out: megatron_to_hf(tmp_path / "megatron", out),
    ):
        said = []
        for filled in range(270_000, 0, -8192):
            (small_disk / "other").write_bytes(b"x" * filled)
            try:
                convert(small_disk / "out")
            except CheckpointError as error:
                said.append(str(error))
                assert [path.name for path in small_disk.iterdir()] == ["other"], "something was left behind"
            else:
                break
        assert (small_disk / "out" / "SHA256SUMS").exists(), "it fits at last"
        shutil.rmtree(small_disk / "out")
        kinds = [
            r"out: 0\.1\d MB are to be written, but 0\.1\d MB are free there",
            r"/\.out\.partial/[\w.]+: (model|lm_head)\.[\w.]+: cannot be written \(No space left on device\)",
            r"/\.out\.partial/[\w.]+: cannot be copied from .*/[\w.]+ \(No space left on device\)",
            r"/(out|\.out\.partial/[\w.]+): cannot be written \(No space left on device\)",
        ]
        assert not [line for line in said if not any(re.search(kind, line) for kind in kinds)]
        seen |= {number for number, kind in enumerate(kinds) if any(re.search(kind, line) for line in said)}
    assert seen >= {0, 1, 2}


def test_a_file_that_may_not_grow(folder: Path, tmp_path: Path) -> None:
    """As a full disk, where none can be made: the process may write no file of more than 50 kB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    hf_to_megatron(folder, tmp_path / "megatron", Layout())
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        said = ".weight: cannot be written (File too large)"
        refused(lambda out: hf_to_megatron(folder, out, Layout()), tmp_path, ".distcp: model.", said)
        back = tmp_path / "megatron"
        refused(lambda out: megatron_to_hf(back, out), tmp_path, "model.safetensors: model.", said)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def open_to_all() -> Iterator[Path]:
    """A folder for another user too. pytest's own are closed to others whenever a pytest starts on this
    machine."""
    with tempfile.TemporaryDirectory() as made:
        Path(made).chmod(0o755)
        yield Path(made)


@pytest.mark.slow
def test_no_permission_to_write(folder: Path, open_to_all: Path) -> None:
    """By another user, because root may write anywhere."""
    folder = Path(shutil.copytree(folder, open_to_all / "model"))
    place = open_to_all / "place"
    place.mkdir(mode=0o555)
    code = f"""
import os
from megarl.cli.main import main
# Whatever is imported, is now.
assert main(["convert", "to-megatron", {str(folder)!r}, {str(open_to_all / "first")!r}]) == 0
if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
raise SystemExit(main(["convert", "to-megatron", {str(folder)!r}, {str(place / "out")!r}]))
"""
    folder.chmod(0o755)
    for path in folder.iterdir():
        path.chmod(0o644)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert run.returncode == 2, run.stderr[-2000:]
    assert "cannot be written (Permission denied)" in run.stderr and run.stderr.count("\n") == 1
    assert not list(place.iterdir())
