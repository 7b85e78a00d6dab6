"""What `megarl doctor` says: of machines given as facts, and of this one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megarl.cli.main import main
from megarl.parallel.machine import GIB, Gpu, Machine, abilities, look

LAPTOP = Machine((3, 11), "Linux", 8, 32 * GIB, {"torch": "2.13.0"}, frozenset(), frozenset(), (), None)
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
    assert all(found[name] for name in ("training on GPUs, bf16", "Transformer Engine layers", "FP8 layers", "the SGLang engine"))


@pytest.mark.parametrize(
    ("change", "name", "command_"),
    [
        ({"imports": frozenset({"sglang"})}, "Transformer Engine layers", "pip install --no-build-isolation 'megarl[te]'"),
        ({"imports": frozenset({"transformer_engine"})}, "the SGLang engine", "pip install 'megarl[sglang]'"),
        (
            {"gpus": (), "cuda": None, "programs": frozenset({"nvidia-smi"})},
            "training on GPUs, bf16",
            "pip install --force-reinstall --no-deps torch",
        ),
        ({"gpus": (Gpu("A100", 79 * GIB, (8, 0)),)}, "FP8 layers", ""),
        ({"gpus": (Gpu("V100", 32 * GIB, (7, 0)),)}, "training on GPUs, bf16", ""),
        ({"gpus": (), "problem": "driver too old"}, "training on GPUs, bf16", "nvidia-smi"),
        ({"system": "Darwin"}, "the demo on CPUs", ""),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_missing_is_said_with_its_command(change: dict[str, object], name: str, command_: str) -> None:
    machine = replace(NODE, **change)
    assert not ready(machine)[name]
    assert command(machine, name) == command_


def test_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    machine = look()
    assert machine.versions["torch"] and machine.cores >= 1
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert "yes  the demo on CPUs" in printed and f"torch {machine.versions['torch']}" in printed
