"""The converters: bit for bit there and back, loaded by Megatron itself, streaming."""

from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig

from megarl.config.errors import CheckpointError
from megarl.parallel.layout import Layout
from megarl.weights.boxes import full_box
from megarl.weights.families import FAMILIES
from megarl.weights.hf import HFFolder, load_into
from megarl.weights.megatron import MegatronFolder, conversion_layout, hf_to_megatron, megatron_to_hf
from megarl.weights.shards import megatron_layout
from megarl.weights.tensor_files import BLOCK, FileTensor, blocks
from tests.families import BF16, FP16, ROWS
from tests.ranks import RankPool
from tests.tiny_models import make_tiny_model, model_class
from tests.weights import jobs
from tests.weights.folders import folder_tensors, same_bits

Ranks = Callable[..., RankPool]
# (family, options of the tiny model, (tp, pp, ep) that the checkpoint is cut for)
MODELS = [(family, *case) for family, row in ROWS.items() for case in row.converted]
FAST = {"qwen2", "qwen3_moe", "deepseek_v3", "qwen3_5_moe_text", "glm4"}  # a kind of layer each
CARRIED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)


@pytest.mark.shows("converters")
@pytest.mark.parametrize(
    ("family", "options", "sizes"),
    [pytest.param(*case, marks=() if case[0] in FAST else pytest.mark.slow) for case in MODELS],
)
def test_there_and_back_changes_no_bit(
    family: Any, options: dict[str, Any], sizes: tuple[int, int, int], tmp_path: Path
) -> None:
    folder = make_tiny_model(tmp_path / "model", family, **options)
    critic = "classification" in options
    done = hf_to_megatron(
        folder, tmp_path / "megatron", conversion_layout(*sizes), critic=critic, verify=True
    )
    assert done.left_out == () and done.size >= sum(
        tensor.nbytes for name, tensor in folder_tensors(folder).items() if name != "score.bias"
    )
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back", max_shard_bytes=30_000, verify=True)
    assert same_bits(folder_tensors(folder), folder_tensors(tmp_path / "back"))
    assert HFFolder(tmp_path / "back", critic=critic).missing == ()
    for made in (tmp_path / "megatron", tmp_path / "back"):
        for name in CARRIED:
            assert (made / name).read_bytes() == (folder / name).read_bytes(), name
        sums = dict(reversed(line.split("  ")) for line in (made / "SHA256SUMS").read_text().splitlines())
        assert sums == {
            p.name: hashlib.sha256(p.read_bytes()).hexdigest()
            for p in made.iterdir()
            if p.name != "SHA256SUMS"
        }


def test_numbers_that_are_not_numbers_survive(tmp_path: Path) -> None:
    """Each of the 65,536 patterns of 16 bits, NaNs with their payloads among them."""
    folder = make_tiny_model(tmp_path / "model", "llama", dtype=BF16, vocab=2048, hidden=32)
    tensors = folder_tensors(folder)
    tensors["lm_head.weight"] = (
        torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(BF16).view(2048, 32)
    )
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    hf_to_megatron(folder, tmp_path / "megatron", conversion_layout(2, 1, 1), verify=True)
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back", verify=True)
    assert same_bits(tensors, folder_tensors(tmp_path / "back"))


@torch.no_grad()
def hf_outputs(folder: Path, family: str, classification: str | None, sequence: list[int]) -> Tensor:
    """Hugging Face's logits, or values, of a sequence: [tokens, vocabulary or 1]."""
    config = AutoConfig.from_pretrained(folder)
    model = model_class(family, classification).from_pretrained(folder, config=config, dtype=torch.float32)
    hidden = model.model(torch.tensor([sequence])).last_hidden_state[0]
    return (model.score if classification else model.lm_head)(hidden)


@pytest.mark.slow
def test_megatron_loads_what_was_converted(ranks: Ranks, tmp_path: Path) -> None:
    """`dist_checkpointing.load` with the model's own sharded_state_dict, in other layouts than the files'.

    Parameters bit for bit, and logits (a critic's: values) of the model that was loaded so.
    """
    sequences = [
        torch.randint(0, 101, (size,), generator=torch.Generator().manual_seed(size)).tolist()
        for size in (2, 24)
    ]
    for number, (family, options, sizes) in enumerate(MODELS):
        folder = make_tiny_model(tmp_path / str(number), family, **options)  # type: ignore[arg-type]
        kind, checkpoint = options.get("classification"), tmp_path / f"{number}m"
        hf_to_megatron(folder, checkpoint, conversion_layout(*sizes), critic=kind is not None)
        expected = [hf_outputs(folder, family, kind, sequence) for sequence in sequences]
        arguments = {"folder": folder, "checkpoint": checkpoint, "sequences": sequences}
        arguments["critic"] = kind is not None
        of_experts = [(2, 1, 1, 2)] if FAMILIES[family].is_moe else []
        for layout in [(1, 1, 1, 1), (2, 1, 1, 1), (1, 2, 1, 1), *of_experts]:
            for wrong, outputs in ranks(*layout).run(jobs.load_checkpoint, **arguments):
                assert wrong == [], (family, options, layout)
                if layout[1] == 1:
                    for found, wanted in zip(outputs, expected, strict=True):
                        assert wanted.abs().max() > 0.01
                        difference = (found[:, : wanted.shape[1]] - wanted).abs().max()
                        assert difference <= 1e-5, (family, options, layout)


@pytest.mark.slow
def test_checkpoints_of_training_become_hugging_face_folders(ranks: Ranks, tmp_path: Path) -> None:
    """A training run's keys and shapes are those that the converter writes, and its checkpoint goes back to
    where it came from."""
    for number, (family, case) in enumerate((("qwen3", 0), ("glm4", 0), ("qwen2", 2))):
        options, _ = ROWS[family].converted[case]
        single: dict[str, Any] = {**options, "dtype": torch.float32}
        folder = make_tiny_model(tmp_path / str(number), family, **single)  # type: ignore[arg-type]
        critic, trained, converted = (
            "classification" in options,
            tmp_path / f"{number}t",
            tmp_path / f"{number}c",
        )
        trained.mkdir()
        ranks(2, 1, 1).run(jobs.save_checkpoint, folder=folder, out=trained, critic=critic)
        hf_to_megatron(folder, converted, conversion_layout(2, 1, 1), critic=critic)
        wanted, found = jobs.keys(trained), jobs.keys(converted)
        assert {key: found.get(key) for key in wanted} == wanted
        with pytest.raises(CheckpointError, match=r"config\.json: no such file"):
            megatron_to_hf(trained, tmp_path / "never")
        megatron_to_hf(trained, tmp_path / f"{number}b", source=folder, verify=True)
        assert same_bits(folder_tensors(folder), folder_tensors(tmp_path / f"{number}b"))


def test_dtypes(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", "qwen3", seed=3)
    hf_to_megatron(folder, tmp_path / "megatron", Layout())
    megatron_to_hf(tmp_path / "megatron", tmp_path / "half", dtype=BF16, verify=True)
    assert same_bits(
        {name: tensor.bfloat16() for name, tensor in folder_tensors(folder).items()},
        folder_tensors(tmp_path / "half"),
    )
    assert json.loads((tmp_path / "half" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    tensors = folder_tensors(folder)
    tensors["model.norm.weight"][3] = 1e6
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    hf_to_megatron(folder, tmp_path / "large", Layout())
    with pytest.raises(
        CheckpointError, match=r"model\.norm\.weight: has numbers beyond the range of float16"
    ):
        megatron_to_hf(tmp_path / "large", tmp_path / "never", dtype=FP16)
    assert not list(tmp_path.glob("*never*"))


def test_a_critic_that_was_never_one_starts_at_zero(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", "qwen3", tied=True)
    hf_to_megatron(folder, tmp_path / "megatron", conversion_layout(2, 2, 1), critic=True, verify=True)
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back")
    after = folder_tensors(tmp_path / "back")
    assert after.pop("score.weight").count_nonzero() == after.pop("score.bias").count_nonzero() == 0
    assert same_bits(folder_tensors(folder), after)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["architectures"] == [
        "Qwen3ForTokenClassification"
    ]


def test_a_rank_reads_no_more_than_its_slices(tmp_path: Path) -> None:
    """Counted by the kernel: bytes of read calls while rank after rank loads, from either kind of folder."""
    folder = make_tiny_model(
        tmp_path / "model", "qwen3_moe", hidden=64, ffn=96, vocab=2003, dtype=BF16, max_shard_bytes=200_000
    )
    layout = Layout(tp=2, pp=2, ep=2)
    hf_to_megatron(folder, tmp_path / "megatron", layout)
    for source in (HFFolder(folder), MegatronFolder(tmp_path / "megatron")):
        for name in source.shapes:
            source.read(name, full_box(source.shapes[name]))  # the headers are read once
        for rank, shards in megatron_layout(source.config, layout):
            tensors = {name: torch.empty(shard.shape) for name, shard in shards.items()}
            boxes = [region.hf_box for shard in shards.values() for region in shard.regions]
            slices = sum(math.prod(stop - start for start, stop in box) for box in boxes) * BF16.itemsize
            before = read_bytes()
            load_into(tensors, shards, source)
            assert slices <= read_bytes() - before <= slices + 4096, rank  # 4096: reading the counter itself


def read_bytes() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def test_boxes_of_files_are_those_of_slicing(tmp_path: Path) -> None:
    whole = torch.arange(6 * 7 * 5, dtype=torch.int32).view(6, 7, 5)
    path = tmp_path / "raw"
    path.write_bytes(b"head" + whole.numpy().tobytes())
    stored = FileTensor(path, 4, (6, 7, 5), torch.int32)
    for box in product(*(list(combinations(range(size + 1), 2)) for size in (6, 7, 5))):
        assert torch.equal(stored.read(box, "x"), whole[tuple(slice(*ends) for ends in box)])
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="raw: x: the file ends before the tensor does"):
        stored.read(full_box((6, 7, 5)), "x")


def test_boxes_of_a_checkpoint_are_those_of_slicing(tmp_path: Path) -> None:
    """Whatever number of chunks a box lies in."""
    folder = make_tiny_model(tmp_path / "model", "qwen3_moe", dtype=BF16, vocab=101)
    hf_to_megatron(folder, tmp_path / "megatron", conversion_layout(2, 2, 2))
    checkpoint = MegatronFolder(tmp_path / "megatron")
    for name, whole in folder_tensors(folder).items():
        for box in product(*(((0, n), (n // 3, n - n // 4), (n - 1, n)) for n in whole.shape)):
            assert torch.equal(checkpoint.read(name, box), whole[tuple(slice(*ends) for ends in box)]), (
                name,
                box,
            )


@pytest.mark.slow
def test_several_processes_write_what_one_does(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", "qwen3_moe", dtype=BF16, max_shard_bytes=20_000)
    back = tmp_path / "back"
    for processes, command in (
        (3, ["to-megatron", folder, tmp_path / "megatron", "--tp", "2", "--verify"]),
        (2, ["to-hf", tmp_path / "megatron", back, "--verify"]),
    ):
        run = torchrun(processes, command)
        assert run.returncode == 0, run.stderr[-2000:]
        assert "compared with the source" in run.stdout
    assert same_bits(folder_tensors(folder), folder_tensors(back))
    sorted(folder.glob("model-*.safetensors"))[-1].write_bytes(b"nothing")
    run = torchrun(2, ["to-megatron", folder, tmp_path / "never"])
    assert run.returncode != 0 and run.stderr.count("truncated or not a safetensors file") == 1
    assert not list(tmp_path.glob("*never*"))


def torchrun(processes: int, command: list[Any]) -> subprocess.CompletedProcess[str]:
    tool = {"to-megatron": "hf_to_megatron.py", "to-hf": "megatron_to_hf.py"}[command[0]]
    script = Path(__file__).parents[2] / "tools" / tool
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*launch, script, *command[1:]], capture_output=True, text=True, timeout=300, env=environment
    )


# Converts in a process of its own and prints by how much its peak memory grew beyond that of the bare import.
GROWTH = """
import sys
from pathlib import Path
from megarl.weights.megatron import conversion_layout, hf_to_megatron, megatron_to_hf
def peak():
    return 1024 * next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
before = peak()
if sys.argv[1] == "to-megatron":
    layout = conversion_layout(int(sys.argv[4]), 1, 1)
    hf_to_megatron(Path(sys.argv[2]), Path(sys.argv[3]), layout, verify=True)
else:
    megatron_to_hf(Path(sys.argv[2]), Path(sys.argv[3]), verify=True)
print("GREW", peak() - before)
"""


@pytest.mark.slow
def test_memory_is_bounded_by_the_largest_tensor(tmp_path: Path) -> None:
    """Far below the limit of 1.5 x the largest tensor + 512 MiB: the second term is 48 MiB here, and the
    model is 8 times the first."""
    folder = make_tiny_model(
        tmp_path / "model",
        "qwen2",
        hidden=1024,
        ffn=4096,
        heads=16,
        kv_heads=2,
        vocab=10_007,
        layers=8,
        dtype=BF16,
        tied=True,
    )
    largest = max(tensor.nbytes for tensor in folder_tensors(folder).values())
    limit = 1.5 * largest + (48 << 20)
    assert sum(path.stat().st_size for path in folder.glob("*.safetensors")) > 3 * limit
    for command in (
        ["to-megatron", folder, tmp_path / "megatron", 1],
        ["to-hf", tmp_path / "megatron", tmp_path / "back"],
    ):
        run = subprocess.run(
            [sys.executable, "-c", GROWTH, *map(str, command)], capture_output=True, text=True, timeout=400
        )
        assert run.returncode == 0, run.stderr[-2000:]
        assert int(run.stdout.split("GREW")[1]) <= limit, (command, limit)


def test_blocks_are_rows_that_tile_a_tensor() -> None:
    for shape in ((1, 10), (100_000, 64), (3, 4_000_000), (7,), (5_000_000,)):
        boxes = list(blocks(shape, 4))
        starts, stops = [box[0][0] for box in boxes], [box[0][1] for box in boxes]
        assert [*starts, shape[0]] == [0, *stops]
        assert all(box[1:] == full_box(shape[1:]) for box in boxes)
        row = 4 * math.prod(shape[1:])
        assert all((box[0][1] - box[0][0]) * row <= max(BLOCK, row) for box in boxes)
