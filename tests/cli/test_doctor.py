"""The output of `megarl doctor`, for described machines and for this one."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from dataclasses import replace

import pytest

from megarl.cli.doctor import Gpu, Machine, abilities, look
from megarl.cli.main import main
from megarl.parallel.machine import GIB, matrix_rates

FITTING = {"torch": "2.13.0+cpu", "megatron-core": "0.16.1", "transformers": "5.19.0"}

LAPTOP = Machine((3, 11), "Linux", 8, 32 * GIB, FITTING, frozenset(), frozenset(), (), None)

H100 = Gpu("NVIDIA H100", 79 * GIB, (9, 0))

NODE = replace(LAPTOP, gpus=(H100,) * 8, cuda="13.0", imports=frozenset({"transformer_engine", "sglang"}))


def ready(machine: Machine) -> dict[str, bool]:
    return {ability.name: ability.ready for ability in abilities(machine)}


def command(machine: Machine, name: str) -> str:
    return next(ability.command for ability in abilities(machine) if ability.name == name)


def test_a_laptop_runs_the_demo_and_nothing_of_a_gpu() -> None:
    found = ready(LAPTOP)
    assert [name for name, there in found.items() if there] == ["the demo on CPUs"]
    assert command(LAPTOP, "the SGLang engine") == "make test-sglang"


def test_a_node_with_everything() -> None:
    found = ready(NODE)
    assert all(
        found[name]
        for name in ("training on GPUs, bf16", "Transformer Engine layers", "FP8 layers", "the SGLang engine")
    )


@pytest.mark.parametrize(
    ("change", "name", "command_"),
    [
        ({"imports": frozenset({"sglang"})}, "Transformer Engine layers", "make install-gpu"),
        ({"imports": frozenset({"transformer_engine"})}, "the SGLang engine", "make install-gpu"),
        (
            {"gpus": (), "cuda": None, "programs": frozenset({"nvidia-smi"})},
            "training on GPUs, bf16",
            "pip install --force-reinstall --no-deps torch",
        ),
        ({"gpus": (Gpu("A100", 79 * GIB, (8, 0)),)}, "FP8 layers", ""),
        ({"gpus": (Gpu("V100", 32 * GIB, (7, 0)),)}, "training on GPUs, bf16", ""),
        ({"gpus": (), "problem": "driver too old"}, "training on GPUs, bf16", "nvidia-smi"),
        ({"gpus": (), "driver": "535.54.03"}, "training on GPUs, bf16", "nvidia-smi"),
        ({"broken": "transformer-engine 2.20.2 lacks its compiled half"}, "Transformer Engine layers", ""),
        ({"broken": "transformer-engine 2.20.2 lacks its compiled half"}, "FP8 layers", ""),
        ({"flaws": ("sglang 0.5.23 cannot be imported: No module named 'orjson'",)}, "the SGLang engine", ""),
        ({"system": "Darwin"}, "the demo on CPUs", ""),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_missing_is_said_with_its_command(
    change: dict[str, object], name: str, command_: str
) -> None:
    machine = replace(NODE, **change)
    assert not ready(machine)[name]
    assert command(machine, name) == command_


@pytest.mark.parametrize(
    ("python", "change", "says", "command_"),
    [
        (
            (3, 11),
            {"megatron-core": "0.15.3"},
            "megatron-core 0.15.3: megarl runs with megatron-core>=0.16,<0.20",
            "megatron-core==0.16.1",
        ),
        (
            (3, 12),
            {"megatron-core": "0.20.0rc1"},
            "megatron-core 0.20.0rc1: megarl runs with",
            "megatron-core==0.19.2",
        ),
        ((3, 12), {"megatron-core": None}, "megatron-core is not installed", "megatron-core==0.19.2"),
        (
            (3, 11),
            {"torch": "2.9.1+cu128"},
            "torch 2.9.1+cu128: megarl runs with torch>=2.11,<3",
            "torch>=2.11,<3",
        ),
        (
            (3, 12),
            {"torch": "3.0.0a0+git12ab"},
            "torch 3.0.0a0+git12ab: megarl runs with torch>=2.11,<3",
            "torch>=2.11,<3",
        ),
        (
            (3, 12),
            {"megatron-core": "0.18.2"},
            "megatron-core 0.18.2 imports triton, which is not installed",
            "triton",
        ),
    ],
)
def test_a_package_that_does_not_fit_is_one_line_with_the_version_that_does(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    python: tuple[int, int],
    change: dict[str, str | None],
    says: str,
    command_: str,
) -> None:
    """Every command that trains, and doctor, report it before the import that would fail."""
    versions = {name: version for name, version in (FITTING | change).items() if version is not None}
    monkeypatch.setattr("megarl.parallel.machine.installed", lambda: versions)
    monkeypatch.setattr("megarl.parallel.machine.sys.version_info", (*python, 0))
    for arguments in (
        ["train", "no.yaml"],
        ["eval", "no.yaml"],
        ["demo"],
        ["replay", "no", "--step", "1"],
        ["preflight", "no.yaml"],
    ):
        assert main(arguments) == 2
        line = capsys.readouterr().err
        assert line.startswith(f"megarl: {says}") and line.count("\n") == 1 and command_ in line, line
    machine = replace(LAPTOP, python=python, versions=versions)
    ability = next(abilities(machine))
    assert (
        not ability.ready
        and ability.note.startswith(says)
        and ability.command.startswith("pip install ")
        and command_ in ability.command
    )


@pytest.fixture(scope="module")
def this_machine() -> Iterator[tuple[Machine, str]]:
    """Run `megarl doctor` once; return the machine that it saw and its output."""
    machines: list[Machine] = []

    def record() -> Machine:
        machines.append(look())
        return machines[-1]

    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr("megarl.cli.doctor.look", record)
        # each process imports torch: measure with one instead of one per core
        patch.setattr("megarl.cli.doctor.matrix_rates", lambda processes: matrix_rates(1))
        assert main(["doctor"]) == 0
    yield machines[0], printed.getvalue()


def test_this_machine(this_machine: tuple[Machine, str]) -> None:
    machine, printed = this_machine
    assert machine.versions["torch"] and machine.cores >= 1
    assert "yes  the demo on CPUs" in printed and f"torch {machine.versions['torch']}" in printed


def test_the_sandbox_that_this_machine_has(this_machine: tuple[Machine, str]) -> None:
    """Each protection has a row, and a missing one names its substitute."""
    machine = replace(LAPTOP, sandbox=("seccomp",), denied={"other files": False, "the network": True})
    rows = {one.name: one for one in abilities(machine) if "sandbox" in one.name}
    files = rows["a sandbox that keeps verifiers and tools from other files"]
    assert not files.ready and files.note == "seccomp (docs/verifiers.md)"
    assert rows["a sandbox that keeps verifiers and tools from the network"].ready
    assert set(this_machine[0].denied) == {
        "other processes",
        "other files",
        "the network",
        "the time after its end",
    }
