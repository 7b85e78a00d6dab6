"""A killed run continues from its newest checkpoint and ends bitwise equal.

At another layout the loaded and exported values are equal too.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from megarl.cli.main import main
from megarl.config import dump_config
from megarl.config.errors import CheckpointError, ConfigError
from megarl.config.schema import CheckpointConfig, Config
from megarl.observe.runs import load_run
from megarl.schedule.preflight import claim_run_dir
from megarl.training import saving
from megarl.training.checkpoint import (
    BOUND,
    FREE,
    Checkpoint,
    check_continues,
    check_same_adapters,
    choose_checkpoint,
    find_checkpoint,
    list_fixed_settings,
    prune,
    read_state,
    seal,
    write_state,
)
from tests.commands import Command, run_command, start_python
from tests.ranks import RankPool
from tests.schedule.jobs import generators_moved, write_again
from tests.tiny_models import make_tiny_model

ROOT = Path(__file__).parents[2]
LIMIT = 400.0  # seconds for one run, on a busy machine
TIMES = ("time/", "inside/", "throughput/", "memory_all/")


def make_config(folder: Path, run_dir: Path, **keys: Any) -> Config:
    """Return a DAPO run of a random tiny model with tied embeddings.

    The vocabulary has 307 tokens, so that two ranks must pad it.
    """
    settings: dict[str, Any] = {
        "recipe": "dapo",
        "seed": 1,  # leaves surplus groups at the first checkpoint
        "run_dir": run_dir,
        "steps": 6,
        "model": {"path": folder / "model", "dtype": "fp32", "layers": "portable"},
        "parallel": {"tp": 1, "device": "cpu", "timeout": 60},
        "data": {"train": [folder / "train.jsonl"], "template": "raw", "max_prompt_tokens": 16},
        "rollout": {
            "prompts": 6,
            "group_size": 4,
            "max_response_tokens": 8,
            "dynamic_sampling": {"enabled": True, "max_batches": 4},
        },
        "reward": {
            "verifier": "tests.schedule.verifiers:by_checksum",
            "overlong": {"soft_punishment": True, "buffer": 4},
        },
        "algorithm": {"advantage": "group", "clip_high": 0.28},
        "actor": {"lr": 1e-2, "schedule": "linear", "warmup_steps": 2, "weight_decay": 0.01},
        "update": {"mini_batch": 12, "tokens_per_micro_batch": 64},
        "checkpoint": {"every": 2, "keep": 0},
        "log": {"terminal": "plain", "samples": 2, "report": False},
    }
    for key, value in keys.items():
        settings[key] = {**settings.get(key, {}), **value} if isinstance(value, dict) else value
    return Config.model_validate(settings)


def write_task(folder: Path) -> Path:
    """Write the model and the data for `make_config`."""
    make_tiny_model(folder / "model", "qwen3", tied=True)
    rows = [{"question": f"{a}+{b}=?", "answer": str(a + b)} for a in range(5) for b in range(5)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_task(tmp_path_factory.mktemp("resume"))


def start(config: Config, *, forked: bool) -> subprocess.Popen[str] | Command:
    """Start `megarl train`: one process, which launches the ranks. forked: see tests/commands.py."""
    path = config.run_dir.with_suffix(".yaml")
    path.write_text(dump_config(config))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    begin = Command if forked else start_python
    return begin(
        ["train", str(path)], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def train(config: Config) -> str:
    """Run to the end in a forked process and return the output."""
    path = config.run_dir.with_suffix(".yaml")
    path.write_text(dump_config(config))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = run_command(["train", str(path)], cwd=ROOT, env=environment, timeout=LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def kill(process: subprocess.Popen[str] | Command) -> None:
    """Kill the launcher and all its descendants with SIGKILL, each by its pid."""
    if process.poll() is not None:
        return
    family = psutil.Process(process.pid).children(recursive=True)
    for member in (psutil.Process(process.pid), *family):
        try:
            member.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
    process.wait(30)
    psutil.wait_procs(family, timeout=30)


def start_and_kill(config: Config, *, forked: bool = True) -> None:
    """Start a run and kill it once its second checkpoint exists.

    One that is not forked has another hash seed than the run with which it is compared.
    """
    process = start(config, forked=forked)
    try:
        deadline = time.monotonic() + LIMIT
        while not (config.run_dir / "checkpoints" / "step-000002").exists():
            assert process.poll() is None and time.monotonic() < deadline, "no checkpoint"
            time.sleep(0.01)
    finally:
        kill(process)


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> Path:
    """Return the folder of an uninterrupted run at TP=2, with checkpoints of steps 2, 4 and 6."""
    config = make_config(folder, folder / "undisturbed", parallel={"tp": 2})
    train(config)
    return config.run_dir


def records(run_dir: Path) -> list[dict[str, Any]]:
    """Read metrics.jsonl without timings, throughput and memory."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not k.startswith(TIMES)} for line in lines]


def assert_same_tensors(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        rows = min(tensor.shape[0], other[name].shape[0])  # vocabulary padding depends on the layout
        assert torch.equal(tensor[:rows], other[name][:rows]), name
        assert not tensor[rows:].any() and not other[name][rows:].any(), name


def assert_same_export(one: Path, other: Path) -> None:
    assert_same_tensors(load_file(one / "model.safetensors"), load_file(other / "model.safetensors"))


def stored(part: Path, scratch: Path) -> dict[str, torch.Tensor]:
    """Load all tensors of one checkpoint part unsharded, with torch's offline converter."""
    dcp_to_torch_save(part, scratch)
    return {
        name: value
        for name, value in torch.load(scratch, weights_only=False).items()
        if isinstance(value, torch.Tensor)
    }


@pytest.mark.slow
def test_a_killed_run_ends_in_the_same_bits(folder: Path, undisturbed: Path) -> None:
    config = make_config(folder, folder / "killed", parallel={"tp": 2})
    checkpoints = config.run_dir / "checkpoints"
    start_and_kill(config, forked=False)
    checkpoint, _ = find_checkpoint(config.run_dir)
    assert checkpoint is not None and checkpoint.step < config.steps, "it was done before it was killed"
    # A partial folder, as a kill during a later save leaves it, and a checkpoint with a truncated file.
    shutil.copytree(checkpoint.path, checkpoints / ".step-000090.partial")
    damaged = shutil.copytree(checkpoint.path, checkpoints / "step-000080")
    os.truncate(damaged / "actor" / "__1_0.distcp", 100)
    with open(config.run_dir / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "stage": "train", "rewa')  # a line that the kill cut off

    output = train(config)

    assert f"continues from {checkpoint.path}" in output
    skipped = [line for line in output.splitlines() if "(skipped)" in line]
    assert (
        len(skipped) == 2
        and "step-000090.partial" in skipped[0]
        and "__1_0.distcp: has 100 bytes" in skipped[1]
    )
    assert_same_export(config.run_dir / "hf", undisturbed / "hf")
    assert records(config.run_dir) == records(undisturbed)
    for name in ("samples.jsonl", "distributions.jsonl"):
        assert (config.run_dir / name).read_text() == (undisturbed / name).read_text()
    for rank in (0, 1):  # each step is in the timeline exactly once
        lines = (config.run_dir / "timeline" / f"rank-{rank:05d}.jsonl").read_text().splitlines()
        phases = [(phase["step"], phase["phase"]) for phase in map(json.loads, lines)]
        for name in ("rollout", "actor_update", "weight_transfer"):
            assert [step for step, phase in phases if phase == name] == [1, 2, 3, 4, 5, 6]
        assert (0, "resume") in phases
    happened = [event["event"] for event in load_run(config.run_dir).events]
    assert (
        f"continues from {checkpoint.path}" in happened
        and sum("(skipped)" in event for event in happened) == 2
    )
    # The comparison proves something only if the weights changed and a surplus was stored.
    assert read_state(undisturbed / "checkpoints/step-000002")["samplers"]["rollout"]["surplus"]
    start_weights, end_weights = (
        load_file(f / "model.safetensors") for f in (folder / "model", undisturbed / "hf")
    )
    assert all((start_weights[name] != end_weights[name]).any() for name in end_weights)


@pytest.mark.slow
def test_what_is_known_of_prompts_survives_a_kill(folder: Path) -> None:
    """SPO's tracked distributions, which decide the advantages, are bitwise equal after a kill."""
    more: dict[str, Any] = {
        "recipe": "spo",
        "algorithm": {"advantage": "tracked"},
        "rollout": {"prompts": 24, "group_size": 1, "dynamic_sampling": {"enabled": False}},
    }
    whole, killed = (make_config(folder, folder / f"spo-{name}", **more) for name in ("whole", "killed"))
    train(whole)
    start_and_kill(killed)
    assert "continues from" in train(killed)

    assert_same_export(killed.run_dir / "hf", whole.run_dir / "hf")
    assert records(killed.run_dir) == records(whole.run_dir)
    first, last, again = (
        read_state(config.run_dir / f"checkpoints/step-{step:06d}")["tracker"]
        for config, step in ((whole, 2), (whole, 6), (killed, 6))
    )
    assert last == again and len(last["prompts"]) == 25
    assert first["right"] != last["right"] and sum(last["right"]) > 25 * 0.5
    known = [record["tracker/known"] for record in records(whole.run_dir) if record["stage"] == "train"]
    assert known[0] == 0 and known[1] > 0.9


@pytest.mark.slow
def test_a_killed_run_goes_on_with_responses_that_have_not_ended(folder: Path) -> None:
    """The checkpoint stores partial responses: windows of three tokens, on two engines."""

    def make(name: str) -> Config:
        return make_config(
            folder,
            folder / name,
            recipe="tppo",
            seed=0,  # some responses finish in the first step
            parallel={"dp": 2},
            algorithm={
                "advantage": "gae",
                "lambda_policy": "length_adaptive",
                "lambda_floor": 0.95,
                "window_tail": 1,
                "whiten": True,
                "nll_weight": 0.1,
            },
            rollout={"window": 3, "dynamic_sampling": {"enabled": False}},
            critic={"lr": 1e-2},
            value_pretraining={"steps": 1},
        )

    undisturbed, config = make("windows"), make("windows-killed")
    train(undisturbed)
    start_and_kill(config, forked=False)
    assert "continues from" in train(config)
    assert_same_export(config.run_dir / "hf", undisturbed.run_dir / "hf")

    # A partial response may continue on another engine than before the kill.
    def numbers(run_dir: Path) -> list[dict[str, Any]]:
        kept = records(run_dir)
        return [
            {k: v for k, v in one.items() if not k.startswith(("rollout/moved", "memory/"))} for one in kept
        ]

    assert numbers(config.run_dir) == numbers(undisturbed.run_dir)
    held = read_state(undisturbed.run_dir / "checkpoints/step-000002")["samplers"]["rollout"]["returned"]
    lengths = {len(begun["tokens"]) for one in held for begun in one["begun"]}
    assert lengths == {3, 6}
    steps = [record for record in records(config.run_dir) if record["stage"] == "train"]
    assert len(steps) == 6 and all(record["rollout/unfinished"] > 0 for record in steps)
    assert steps[0]["rollout/continued"] == 0.0 < steps[-1]["rollout/continued"]
    counted = [each["mismatch"] for each in load_run(config.run_dir).distributions if "mismatch" in each]
    assert [sum(each["tokens"]) for each in counted] == [record["rollout/tokens"] for record in steps]


@pytest.mark.slow
@pytest.mark.parametrize(("pp", "dp", "cp"), [(2, 1, 1), (1, 2, 1), (1, 1, 2)])
def test_another_layout_gets_the_same_values(
    folder: Path, undisturbed: Path, ranks: Callable[..., RankPool], pp: int, dp: int, cp: int
) -> None:
    """Weights and optimizer saved at TP=2 are equal when loaded and saved again at another layout.

    A full disk raises an error on every rank at once.
    """
    out = folder / f"pp{pp}-dp{dp}-cp{cp}"
    full = out / "full"
    full.mkdir(parents=True)
    (full / "__0_0.distcp").symlink_to("/dev/full")
    started = time.monotonic()
    config = make_config(folder, out, parallel={"pp": pp, "cp": cp})
    messages = ranks(1, pp, dp, 1, cp).run(write_again, config=config, source=undisturbed, full=full)
    assert all("No space left" in message and "\n" not in message for message in messages), messages
    assert time.monotonic() - started < LIMIT
    assert_same_export(out / "hf", undisturbed / "hf")
    one, other = (
        stored(f / "checkpoints/step-000006/actor", folder / "whole.pt") for f in (undisturbed, out)
    )
    assert sum("exp_avg_sq" in name for name in one) == sum(not name.startswith("optimizer.") for name in one)
    assert_same_tensors(one, other)


@pytest.mark.slow
def test_a_context_parallel_run_goes_on_in_the_same_bits(folder: Path, undisturbed: Path) -> None:
    """Its first step also matches a run at TP=2 to a relative tolerance of 1e-4."""
    for name, steps in (("cp", 4), ("cp-added", 2), ("cp-added", 4)):
        train(
            make_config(
                folder, folder / name, parallel={"cp": 2}, steps=steps, actor={"schedule": "constant"}
            )
        )
    straight, added = folder / "cp", folder / "cp-added"
    assert_same_export(added / "hf", straight / "hf")
    assert records(added) == records(straight)
    first, expected = records(straight)[0], records(undisturbed)[0]
    assert first["policy/grad_norm"] > 0.1
    for name, value in expected.items():
        if name.startswith(("policy/", "response/", "reward/")):
            assert first[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


@pytest.mark.slow
def test_a_partly_frozen_run_goes_on_with_more_steps(
    folder: Path, vapo: Callable[[str, int], Config]
) -> None:
    """The first of the actor's two pipeline stages trains nothing, and rank 0 belongs to it."""

    def run(name: str, steps: int) -> Path:
        settings = vapo(name, steps).model_dump()
        settings["parallel"]["pp"] = 2
        settings["actor"] |= {"frozen": ["embeddings"], "frozen_layers": 1}
        settings["critic"] |= {"frozen": ["attention"]}
        config = Config.model_validate(settings)
        train(config)
        return config.run_dir

    straight = run("frozen", 3)
    for steps in (1, 3):
        added = run("frozen-added", steps)
    for what in ("hf", "critic_pretrained"):
        assert_same_export(added / what, straight / what)
    assert records(added) == records(straight)
    steps = [record for record in records(straight) if record["stage"] == "train"]
    original = load_file(folder / "model/model.safetensors")
    frozen = [name for name in original if ".layers.0." in name or "embed_tokens" in name]
    kept = sum(original[name].numel() * 2 for name in frozen)
    assert [record["transfer/bytes_kept"] for record in steps] == [kept] * 3
    assert [record["policy/lr"] for record in steps] == [5e-3, 1e-2, 1e-2]
    for what in ("hf", "critic_pretrained"):
        for name, tensor in load_file(straight / what / "model.safetensors").items():
            attention = "self_attn" in name or "input_layernorm" in name
            if name in original:
                same = torch.equal(tensor, original[name].to(tensor.dtype))
                assert same == (name in frozen if what == "hf" else attention), (what, name)


@pytest.mark.slow
@pytest.mark.timeout(1500)  # three runs, each with its limit
def test_a_killed_run_of_two_critics_ends_in_the_same_bits(
    folder: Path, vapo: Callable[[str, int], Config]
) -> None:
    """The killed run offloads its two critics, the other does not. The two critics differ."""

    def config_of(name: str, offload: bool) -> Config:
        settings = vapo(name, 4).model_dump()
        settings["recipe"], settings["residency"]["offload"] = "asyppo", offload
        settings["critic"]["count"] = 2
        settings["algorithm"] |= {"entropy_weight": 0.01, "agreement": {"mask": 0.2, "filter": 0.2}}
        return Config.model_validate(settings)

    straight, killed = config_of("two-critics", False), config_of("two-critics-killed", True)
    train(straight)
    start_and_kill(killed)
    checkpoint, _ = find_checkpoint(killed.run_dir)
    assert checkpoint is not None and checkpoint.done < killed.steps, "it was done before it was killed"
    assert f"continues from {checkpoint.path}" in train(killed)
    for what in ("hf", "critic_pretrained", "critic_2_pretrained"):
        assert_same_export(killed.run_dir / what, straight.run_dir / what)
    of_both = [
        [{k: v for k, v in record.items() if not k.startswith("memory")} for record in records(run_dir)]
        for run_dir in (killed.run_dir, straight.run_dir)
    ]
    assert of_both[0] == of_both[1]
    for part in ("actor", "critic", "critic_2"):
        one, other = (
            stored(config.run_dir / "checkpoints/step-000004" / part, folder / f"{config.run_dir.name}.pt")
            for config in (straight, killed)
        )
        assert_same_tensors(one, other)
    critics = (load_file(straight.run_dir / f"critic{n}_pretrained/model.safetensors") for n in ("", "_2"))
    first, second = (of_one["score.weight"] for of_one in critics)
    assert not torch.equal(first, second)
    steps = [record for record in records(straight.run_dir) if record["stage"] == "train"]
    assert all(0.1 < record["policy/agreed"] <= 0.2 for record in steps)


@pytest.mark.slow
def test_a_killed_run_of_adapters_ends_in_the_same_bits(folder: Path) -> None:
    """The reference is the actor with LoRA disabled; no checkpoint stores its weights."""

    def config_of(name: str) -> Config:
        lora = {"rank": 4, "targets": ["q_proj", "v_proj", "down_proj"]}
        actor, algorithm = {"lora": lora}, {"kl_weight": 0.05}
        checkpoint = {"every": 1}
        parallel = {"tp": 2}
        return make_config(
            folder, folder / name, actor=actor, algorithm=algorithm, checkpoint=checkpoint, parallel=parallel
        )

    straight, killed = config_of("adapters"), config_of("adapters-killed")
    train(straight)
    start_and_kill(killed)
    checkpoint, _ = find_checkpoint(killed.run_dir)
    assert checkpoint is not None and checkpoint.step < killed.steps, "it was done before it was killed"
    assert f"continues from {checkpoint.path}" in train(killed)
    assert_same_export(killed.run_dir / "hf", straight.run_dir / "hf")
    halves, others = (
        load_file(config.run_dir / "lora" / "adapter_model.safetensors") for config in (straight, killed)
    )
    assert_same_tensors(halves, others)
    assert records(killed.run_dir) == records(straight.run_dir)
    first, *later = records(straight.run_dir)
    assert 0 <= first["policy/kl_loss"] < later[-1]["policy/kl_loss"], "the reference stays where it began"
    original = load_file(folder / "model/model.safetensors")
    for name, tensor in load_file(straight.run_dir / "hf/model.safetensors").items():
        adapted = name.split(".")[-2] in ("q_proj", "v_proj", "down_proj")
        assert torch.equal(tensor, original[name].to(tensor.dtype)) != adapted, name
    torch.save(torch.zeros(0), empty := io.BytesIO())  # the file format's overhead for each tensor
    parts = FileSystemReader(checkpoint.path / "actor").read_metadata().storage_data
    size = sum(part.length - len(empty.getvalue()) for part in parts.values())
    numbers = sum(half.numel() for half in halves.values())
    assert size < 5 * 4 * numbers, "weights and three numbers of the optimizer each, and no model"


@pytest.mark.slow
def test_a_killed_run_with_muon_ends_in_the_same_bits(folder: Path) -> None:
    pytest.importorskip("emerging_optimizers", reason="pip install 'megarl[muon]' (Python 3.12)")

    def config_of(name: str) -> Config:
        actor, residency = {"optimizer": "muon", "lr": 1e-3}, {"offload": True}
        keys: dict[str, Any] = {"checkpoint": {"every": 1}, "parallel": {"tp": 2}, "residency": residency}
        return make_config(folder, folder / name, actor=actor, **keys)

    straight, killed = config_of("muon"), config_of("muon-killed")
    train(straight)
    start_and_kill(killed)
    checkpoint, _ = find_checkpoint(killed.run_dir)
    assert checkpoint is not None and checkpoint.step < killed.steps, "it was done before it was killed"
    assert f"continues from {checkpoint.path}" in train(killed)
    assert_same_export(killed.run_dir / "hf", straight.run_dir / "hf")
    assert records(killed.run_dir) == records(straight.run_dir)
    names = FileSystemReader(checkpoint.path / "actor").read_metadata().state_dict_metadata
    assert any("momentum_buffer" in name for name in names)


@pytest.fixture(scope="module")
def vapo(folder: Path) -> Iterator[Callable[[str, int], Config]]:
    def make(name: str, steps: int) -> Config:
        return make_config(
            folder,
            folder / name,
            recipe="vapo",
            model={"path": folder / "model", "dtype": "bf16", "layers": "portable"},
            steps=steps,
            algorithm={
                "advantage": "gae",
                "lambda_policy": "length_adaptive",
                "alpha": 0.5,
                "whiten": True,
                "nll_weight": 0.1,
            },
            rollout={"prompts": 6, "group_size": 4, "max_response_tokens": 8},
            data={
                "train": [folder / "train.jsonl"],
                "eval": [folder / "train.jsonl"],
                "template": "raw",
                "max_prompt_tokens": 16,
            },
            evaluation={"every": 1, "samples": 1},
            critic={"lr": 1e-2},
            actor={"lr": 1e-2, "schedule": "constant"},
            value_pretraining={"steps": 2},
            checkpoint={"every": 1, "keep": 1},
        )

    yield make


@pytest.mark.slow
def test_a_run_that_was_done_goes_on_with_more_steps(
    folder: Path, vapo: Callable[[str, int], Config]
) -> None:
    """Critic, optimizer and schedule are restored.

    Value pretraining and the first evaluation are not repeated.
    """
    train(vapo("straight", 3))
    train(vapo("added", 1))
    train(vapo("added", 3))
    for what in ("hf", "critic_pretrained"):
        assert_same_export(folder / "added" / what, folder / "straight" / what)
    assert records(folder / "added") == records(folder / "straight")
    assert [(r["stage"], r["step"]) for r in records(folder / "added")] == [
        ("eval", 0),
        ("value_pretraining", 1),
        ("value_pretraining", 2),
        *((stage, step) for step in (1, 2, 3) for stage in ("train", "eval")),
    ]
    assert (folder / "added/evaluations.jsonl").read_text() == (
        folder / "straight/evaluations.jsonl"
    ).read_text()
    for part in ("actor", "critic"):
        one, other = (
            stored(folder / run / "checkpoints/step-000003" / part, folder / "whole.pt")
            for run in ("straight", "added")
        )
        assert_same_tensors(one, other)
    assert [path.name for path in (folder / "added/checkpoints").iterdir()] == ["step-000003"]


@pytest.mark.slow
def test_no_step_draws_from_a_global_generator(
    folder: Path, vapo: Callable[[str, int], Config], ranks: Any
) -> None:
    """A checkpoint stores no state of a global random generator, so no step may use one."""
    assert ranks(1, 1, 2).run(generators_moved, config=vapo("generators", 1)) == [[], []]


def write_folder(run_dir: Path, step: int, settings: dict[str, Any]) -> Path:
    """Write a checkpoint that is complete according to its manifest."""
    path = run_dir / "checkpoints" / f"step-{step:06d}"
    files = {"actor/__0_0.distcp": b"weights", "state.json": b"{ }"}
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    entries = {name: (len(content), hashlib.sha256(content).hexdigest()) for name, content in files.items()}
    manifest = {
        "format": 2,
        "stage": "train",
        "step": step,
        "settings": settings,
        "versions": {},
        "files": entries,
    }
    (path / "manifest.json").write_text(seal(manifest))
    return path


def made(path: Path, step: int, settings: dict[str, Any]) -> Checkpoint:
    return Checkpoint(path, {"stage": "train", "step": step, "settings": settings})


@example("manifest.json", -1, False)
@given(
    st.sampled_from(["actor/__0_0.distcp", "state.json", "manifest.json"]),
    st.integers(0, 1000),
    st.booleans(),
)
def test_a_damaged_checkpoint_is_named_and_an_older_one_taken(
    tmp_path_factory: pytest.TempPathFactory, name: str, length: int, removed: bool
) -> None:
    run_dir = tmp_path_factory.mktemp("run")
    older, newer = write_folder(run_dir, 4, {}), write_folder(run_dir, 12, {})
    complete, none_skipped = find_checkpoint(run_dir)
    assert complete is not None and (complete.path, complete.step, none_skipped) == (newer, 12, [])
    file = newer / name
    size = file.stat().st_size
    if removed:
        file.unlink()
    else:
        os.truncate(file, length % size)
    found, skipped = find_checkpoint(run_dir)
    if name == "manifest.json" and not removed and length % size == size - 1:
        # The seal covers a manifest's content, not its layout. A manifest that lost only its last newline is
        # valid.
        assert found is not None and (found.path, skipped, found.damage()) == (newer, [], [])
        return
    assert found is not None and found.path == older
    assert len(skipped) == 1 and str(file) in skipped[0] and "\n" not in skipped[0]


def test_a_run_all_of_whose_checkpoints_are_damaged_does_not_begin_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each checkpoint one bit of state.json has changed; only a check of the whole content finds that."""
    alone: Any = SimpleNamespace(rank=0, world=1)
    monkeypatch.setattr("megarl.training.checkpoint.broadcast_from_rank_0", lambda _, value, kind: value)
    monkeypatch.setattr("megarl.training.checkpoint.gather_objects", lambda _, value, kind: [value])
    assert choose_checkpoint(alone, tmp_path) == (None, [])
    older, newer = (write_folder(tmp_path, step, {}) for step in (4, 12))
    for damaged in (newer, older):
        found, _ = choose_checkpoint(alone, tmp_path)
        assert found is not None and found.path == damaged
        content = bytearray((damaged / "state.json").read_bytes())
        content[-1] ^= 1
        (damaged / "state.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"^run_dir: .*: all of its checkpoints are damaged \(.*000012"):
        choose_checkpoint(alone, tmp_path)


@given(st.sampled_from(["actor/__0_0.distcp", "state.json", "manifest.json"]), st.integers(0, 10**6))
def test_a_flipped_bit_is_found(tmp_path_factory: pytest.TempPathFactory, name: str, place: int) -> None:
    run_dir = tmp_path_factory.mktemp("run")
    file = write_folder(run_dir, 4, {"actor.lr": 0.5}) / name
    content = bytearray(file.read_bytes())
    content[place // 8 % len(content)] ^= 1 << place % 8
    file.write_bytes(content)
    found, skipped = find_checkpoint(run_dir)
    lines = skipped if found is None else found.damage()
    # A manifest remains valid if only white space or the case of a letter has changed.
    assert (len(lines) == 1 and str(file) in lines[0]) or (name == "manifest.json" and found is not None)
    if found is not None:
        assert [line for part in range(3) for line in found.damage(part, 3)] == lines


@pytest.mark.parametrize(
    ("own", "others", "key"), [(0.01, 600.0, "checkpoint.timeout"), (300.0, 0.0125, "parallel.timeout")]
)
def test_a_write_that_takes_too_long_names_the_limit(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: float, others: float, key: str
) -> None:
    """A rank may wait for the disk no longer than the other ranks wait for it."""
    monkeypatch.setattr(saving, "gather_to_rank_0", lambda _, value, kind: [value])
    monkeypatch.setattr(saving, "broadcast_from_rank_0", lambda _, value, kind: value)
    config = make_config(folder, tmp_path / "run", checkpoint={"every": 1, "timeout": own})
    alone: Any = SimpleNamespace(rank=0, world=1, timeout=others)
    writer = saving.CheckpointWriter(alone, config, {}, {}, lambda name: None, lambda shares: {}, Any, print)
    writing, written = saving._Writing(tmp_path / "step-000001", {"step": 1}), threading.Event()
    writer._writing = writing
    writing.in_thread(lambda: bool(written.wait(60)))
    try:
        with pytest.raises(CheckpointError) as caught:
            writer.finish()
    finally:
        written.set()
    slow = "rank 0: writing took longer than 0.01 s"
    assert str(caught.value) == f"{writing.final}: cannot be written: {slow} (raise {key})"


def test_an_old_checkpoint_that_cannot_be_removed_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process reads it over NFS. It no longer counts as a checkpoint and is removed the next time."""
    first, second, _ = (write_folder(tmp_path, step, {}) for step in (1, 2, 3))
    remove = shutil.rmtree

    def busy(path: Path) -> None:
        if path == first:
            raise OSError(errno.ENOTEMPTY, "Directory not empty")
        remove(path)

    monkeypatch.setattr(shutil, "rmtree", busy)
    keep = CheckpointConfig(every=1, keep=1)
    assert prune(tmp_path, keep) == [f"{first}: cannot be removed: Directory not empty"]
    found, skipped = find_checkpoint(tmp_path)
    assert found is not None and found.step == 3 and not skipped and not second.exists()
    monkeypatch.setattr(shutil, "rmtree", remove)
    assert prune(tmp_path, keep) == [] and not first.exists()
    assert prune(tmp_path / "nowhere", keep) == []


numbers = (
    st.lists(st.integers(-(2**62), 2**62), max_size=40)
    | st.lists(st.floats(allow_nan=False), max_size=40)
    | st.lists(st.booleans())
)
trees = st.recursive(
    numbers | st.none() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@given(st.dictionaries(st.text(), trees, max_size=4))
def test_state_comes_back_exactly(tmp_path_factory: pytest.TempPathFactory, state: dict[str, Any]) -> None:
    folder = tmp_path_factory.mktemp("state")
    write_state(folder, state)
    assert repr(read_state(folder)) == repr(state)


def test_every_key_that_decides_the_result_is_compared(folder: Path, tmp_path: Path) -> None:
    config = make_config(folder, tmp_path, critic={"path": folder / "model"})
    settings = list_fixed_settings(config)
    for key in (
        "recipe",
        "model.path",
        "algorithm.clip_high",
        "update.mini_batch",
        "rollout.prompts",
        "actor.lr",
        "seed",
        "data.train",
        "parallel.grad_dtype",
    ):
        assert key in settings
    for key in settings:
        with pytest.raises(ConfigError, match=f"^{key}: .*set it back") as error:
            check_continues(config, made(tmp_path, 1, {**settings, key: "another"}))
        assert "\n" not in str(error.value)
    # The settings survive JSON, and the working directory of the command does not matter.
    check_continues(config, made(tmp_path, 1, json.loads(json.dumps(settings))))
    assert not any(key.split(".")[0] in FREE for key in settings if key not in BOUND)


@pytest.mark.parametrize(
    "changed",
    [
        {
            "engine": "sglang_url",
            "urls": ("http://a:1", "http://b:1"),
            "router": "http://r:1",
            "in_flight": 5,
        },
        {"engine": "sglang_url", "urls": ("http://c:1",), "engine_tp": 2, "fingerprint": True},
        {"turns": {"hold": 60.0, "calls": 9}},
    ],
)
def test_how_the_work_is_laid_out_may_change(folder: Path, tmp_path: Path, changed: dict[str, Any]) -> None:
    engine = {key: changed[key] for key in ("engine",) if key in changed}
    begun = make_config(folder, tmp_path, rollout={**engine, "urls": ("http://a:1",)} if engine else {})
    config = make_config(folder, tmp_path, rollout=changed, reward={"max_ungraded": 0.5})
    check_continues(config, made(tmp_path, 1, list_fixed_settings(begun)))


def test_a_run_that_stopped_at_its_limit_may_go_on_as_it_says(folder: Path, tmp_path: Path) -> None:
    """With `stop` the limit has not affected any step, so it may change.

    With `continue` it has affected sampling.
    """
    limits: list[dict[str, Any]] = [{"at_limit": "continue"}, {"max_batches": 20}]
    for limit in limits:
        stopped, gone_on = (
            list_fixed_settings(
                make_config(folder, tmp_path, rollout={"dynamic_sampling": {"at_limit": at_limit}})
            )
            for at_limit in ("stop", "continue")
        )
        config = make_config(folder, tmp_path, rollout={"dynamic_sampling": {"at_limit": "stop"} | limit})
        check_continues(config, made(tmp_path, 1, stopped))
        other = make_config(folder, tmp_path, rollout={"dynamic_sampling": {"max_batches": 20}})
        with pytest.raises(ConfigError, match=r"^rollout\.dynamic_sampling\.max_batches: is 20, the"):
            check_continues(other, made(tmp_path, 1, gone_on))


def test_what_is_frozen_stays_frozen(folder: Path, tmp_path: Path) -> None:
    """This also holds for a checkpoint older than the key."""
    config = make_config(folder, tmp_path, actor={"frozen": "attention"})
    settings = list_fixed_settings(config)
    check_continues(config, made(tmp_path, 1, settings))
    old = {key: value for key, value in settings.items() if "frozen" not in key and "lora" not in key}
    check_continues(make_config(folder, tmp_path), made(tmp_path, 1, old))
    for then in (old, {**settings, "actor.frozen": ["embeddings"]}):
        with pytest.raises(ConfigError, match=r"^actor\.frozen: is \['attention'\], the run there has \["):
            check_continues(config, made(tmp_path, 1, then))
    with pytest.raises(ConfigError, match=r"^actor\.frozen_layers: is 1, the run there has 0"):
        check_continues(make_config(folder, tmp_path, actor={"frozen_layers": 1}), made(tmp_path, 1, old))


def test_adapters_stay_those_of_the_run(folder: Path, tmp_path: Path) -> None:
    """This holds for a continued run and for an evaluation; runs of older versions had no adapters."""
    config = make_config(folder, tmp_path, actor={"lora": {"rank": 4}})
    settings = list_fixed_settings(config)
    old = {key: value for key, value in settings.items() if "lora" not in key}
    for then, named in ((old, "rank: is 4, "), ({**settings, "actor.lora.alpha": 8.0}, r"alpha: is 32\.0, ")):
        checkpoint = made(tmp_path, 1, then)
        for check in (check_continues, check_same_adapters):
            with pytest.raises(ConfigError, match=rf"^actor\.lora\.{named}"):
                check(config, checkpoint)
    same = made(tmp_path, 1, settings)
    check_continues(config, same)
    check_same_adapters(config, same)
    # An evaluation needs no files of the teacher.
    lora, absent = {"lora": {"rank": 4}}, tmp_path / "absent"
    check_same_adapters(make_config(folder, tmp_path, actor=lora, teacher={"path": absent}), same)


def test_free_keys_may_change(folder: Path, tmp_path: Path) -> None:
    settings = list_fixed_settings(make_config(folder, tmp_path))
    other = make_config(
        folder,
        tmp_path / "elsewhere",
        steps=9,
        parallel={"tp": 2, "pp": 2, "timeout": 5},
        log={"samples": 9},
        checkpoint={"every": 1, "keep": 3, "background": False},
        guard={"skipped_steps": 0},
        watchdog={"limit": 9.0},
        evaluation={"every": 3},
        data={"eval": [folder / "train.jsonl", {"path": folder / "train.jsonl", "name": "a", "every": 2}]},
        update={"tokens_per_micro_batch": 999},
    )
    check_continues(other, made(tmp_path, 9, settings))
    with pytest.raises(ConfigError, match=r"^steps: 9, but .* has done 10 already"):
        check_continues(other, made(tmp_path, 10, settings))


def test_a_model_that_was_replaced_is_noticed(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "model", tmp_path / "model")
    config = make_config(folder, tmp_path / "run", model={"path": tmp_path / "model"})
    settings = list_fixed_settings(config)
    changed = json.loads((tmp_path / "model/config.json").read_text()) | {"rope_theta": 5.0}
    (tmp_path / "model/config.json").write_text(json.dumps(changed))
    with pytest.raises(ConfigError, match=r"^model.path/config.json: has changed"):
        check_continues(config, made(tmp_path, 1, settings))


def test_the_folder_of_a_run_is_continued_or_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """This is decided before any rank starts, with exit code 2 and one line."""
    config = make_config(folder, tmp_path / "run")
    claim_run_dir(config, fresh=True)
    (tmp_path / "run/metrics.jsonl").touch()
    with pytest.raises(ConfigError, match="--fresh never overwrites"):
        claim_run_dir(config, fresh=True)
    claim_run_dir(config)  # it ended before its first checkpoint: it is simply run again
    with pytest.raises(ConfigError, match=r"^actor.lr: is 0.5, the run in"):
        claim_run_dir(make_config(folder, tmp_path / "run", actor={"lr": 0.5}))
    with pytest.raises(ConfigError, match="already holds a run, and no complete checkpoint"):
        claim_run_dir(make_config(folder, tmp_path / "run", checkpoint={"every": 0}))
    written = write_folder(tmp_path / "run", 2, list_fixed_settings(config))
    claim_run_dir(config)
    os.truncate(written / "state.json", 1)  # a damaged checkpoint: later records must not be overwritten
    with pytest.raises(ConfigError, match=r"no complete checkpoint.*state.json: has 1 bytes of 3"):
        claim_run_dir(config)
    (written / "state.json").write_bytes(b"{ }")
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(config))
    assert main(["train", str(path), "actor.lr=0.5"]) == 2
    assert capsys.readouterr().err.startswith("megarl: actor.lr: is 0.5, the run there has 0.01")
