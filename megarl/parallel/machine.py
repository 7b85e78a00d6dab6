"""What this machine has, and what of megarl it can therefore run: facts gathered in one place, judged in another."""

from __future__ import annotations

import importlib.metadata as metadata
import platform
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import NamedTuple

import psutil

from megarl.config.errors import ConfigError

GIB = 2**30
PACKAGES = (
    "torch",
    "megatron-core",
    "triton",
    "transformers",
    "transformer-engine",
    "sglang",
    "nemo-run",
    "tensorboard",
    "wandb",
    "numpy",
    "math-verify",
)
# What megarl runs on, as in pyproject.toml: the oldest version, and the first that is too new.
SUPPORTED = {"torch": ((2, 11), (3,)), "megatron-core": ((0, 16), (0, 20)), "transformers": ((5, 12), (6,))}
MEGATRON = {False: "0.16.1", True: "0.19.2"}  # the newest one that was tried, by whether Python is 3.12 or later
IMPORTS_TRITON = (0, 18)  # megatron-core from here on, on any device, without saying so among its requirements
FP8_FROM = (8, 9)  # compute capability: Ada and Hopper have FP8 matrix units


class Gpu(NamedTuple):
    """memory: bytes; capability: CUDA's compute capability."""

    name: str
    memory: int
    capability: tuple[int, int]


@dataclass(frozen=True)
class Machine:
    """versions: package -> version; imports: modules that are there; programs: commands in PATH; problem: why CUDA does not work."""

    python: tuple[int, int]
    system: str
    cores: int
    memory: int
    versions: Mapping[str, str]
    imports: frozenset[str]
    programs: frozenset[str]
    gpus: tuple[Gpu, ...]
    cuda: str | None
    problem: str | None = None


class Ability(NamedTuple):
    """Something that can be run here, or what is missing and the command that gets it."""

    name: str
    ready: bool
    note: str
    command: str = ""


def look() -> Machine:
    """This machine."""
    import torch

    gpus, problem = [], None
    try:
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            gpus.append(Gpu(properties.name, properties.total_memory, (properties.major, properties.minor)))
    except RuntimeError as error:
        problem = str(error).splitlines()[0]
    programs = ("nvidia-smi", "nvcc", "sbatch", "apptainer", "make")
    return Machine(
        python=sys.version_info[:2],
        system=platform.system(),
        cores=len(psutil.Process().cpu_affinity()) if platform.system() == "Linux" else psutil.cpu_count() or 1,
        memory=psutil.virtual_memory().total,
        versions=installed(),
        imports=frozenset(name for name in ("transformer_engine", "sglang", "nemo_run", "wandb", "tensorboard") if find_spec(name)),
        programs=frozenset(name for name in programs if shutil.which(name)),
        gpus=tuple(gpus),
        cuda=torch.version.cuda,
        problem=problem,
    )


def installed() -> dict[str, str]:
    """The versions of `PACKAGES` that are there, by what pip knows of them: nothing is imported."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if find_spec("triton"):  # some builds of torch bring it under another name
        versions.setdefault("triton", "with torch")
    return versions


def misfit(versions: Mapping[str, str], python: tuple[int, int]) -> str | None:
    """The first package that megarl cannot run with, and what to install instead, on one line; None where all fit."""
    works = {"megatron-core": f"=={MEGATRON[python >= (3, 12)]}"}
    for name, (oldest, newer) in SUPPORTED.items():
        bounds = f">={'.'.join(map(str, oldest))},<{'.'.join(map(str, newer))}"
        install = f"pip install '{name}{works.get(name, bounds)}'"
        if name not in versions:
            return f"{name} is not installed ({install})"
        if not oldest <= _numbers(versions[name]) < newer:
            return f"{name} {versions[name]}: megarl runs with {name}{bounds} ({install})"
    if _numbers(versions["megatron-core"]) >= IMPORTS_TRITON and "triton" not in versions:
        return f"megatron-core {versions['megatron-core']} imports triton, which is not installed (pip install triton)"
    return None


def check_packages() -> None:
    """ConfigError where an installed package is one that megarl cannot run with. To be called before any of them is imported."""
    problem = misfit(installed(), sys.version_info[:2])
    if problem is not None:
        raise ConfigError(problem)


def _numbers(version: str) -> tuple[int, ...]:
    """(2, 13, 0) of 2.13.0+cpu."""
    return tuple(int(number) for number in re.findall(r"\d+", version.split("+")[0])[:3])


def abilities(machine: Machine) -> Iterator[Ability]:
    """What the machine can run, and for the rest the exact command."""
    yield _cpu(machine)
    yield (gpu := _gpu(machine))
    te = "transformer_engine" in machine.imports
    if gpu.ready and te:
        yield Ability("Transformer Engine layers", True, f"transformer-engine {machine.versions.get('transformer-engine', '')}")
    else:
        missing = "transformer-engine is not installed" if gpu.ready else "needs a GPU"
        yield Ability("Transformer Engine layers", False, missing, "pip install --no-build-isolation 'megarl[te]'" if gpu.ready else "")
    yield _fp8(machine, gpu.ready and te)
    yield _sglang(machine, gpu.ready)
    slurm = "sbatch" in machine.programs
    yield Ability("jobs by Slurm", slurm, "sbatch slurm/demo.sbatch" if slurm else "no sbatch: this is no login node of a Slurm cluster")
    for name, module, extra in (
        ("sweeps by NeMo-Run", "nemo_run", "launch"),
        ("TensorBoard", "tensorboard", "track"),
        ("Weights & Biases", "wandb", "track"),
    ):
        if module in machine.imports:
            yield Ability(name, True, "")
        else:
            yield Ability(name, False, f"{module.replace('_', '-')} is not installed", f"pip install 'megarl[{extra}]'")


def _cpu(machine: Machine) -> Ability:
    name = "the demo on CPUs"
    if problem := misfit(machine.versions, machine.python):
        what, _, install = problem.rpartition(" (")
        return Ability(name, False, what, install.rstrip(")"))
    if machine.system != "Linux":
        return Ability(name, False, f"{machine.system}: gloo and the verifiers' limits are tested on Linux only")
    if machine.cores < 2 or machine.memory < 4 * GIB:
        return Ability(name, True, f"slowly: {machine.cores} cores and {machine.memory / GIB:.0f} GiB, two and 4 are better", "")
    return Ability(name, True, "make demo")


def _gpu(machine: Machine) -> Ability:
    name = "training on GPUs, bf16"
    if machine.gpus and machine.problem is None:
        old = [gpu.name for gpu in machine.gpus if gpu.capability < (8, 0)]
        if old:
            return Ability(name, False, f"{old[0]} is older than Ampere and has no bf16")
        kinds = ", ".join(sorted({f"{gpu.name}, {gpu.memory / GIB:.0f} GiB" for gpu in machine.gpus}))
        return Ability(name, True, f"{len(machine.gpus)} x {kinds}")
    if machine.cuda is None and "nvidia-smi" in machine.programs:
        return Ability(name, False, "there is a driver, but torch is a build for CPUs", "pip install --force-reinstall --no-deps torch")
    if machine.cuda is None:
        return Ability(name, False, "no GPU driver (nvidia-smi), and torch is a build for CPUs")
    return Ability(name, False, f"torch sees no GPU: {machine.problem or 'nvidia-smi shows whether the driver does'}", "nvidia-smi")


def _fp8(machine: Machine, ready: bool) -> Ability:
    name = "FP8 layers"
    if machine.gpus and min(gpu.capability for gpu in machine.gpus) < FP8_FROM:
        return Ability(name, False, f"{machine.gpus[0].name} has no FP8 units (Hopper and later have)")
    return Ability(name, ready, "" if ready else "needs Transformer Engine layers")


def _sglang(machine: Machine, gpu: bool) -> Ability:
    name = "the SGLang engine"
    if "sglang" in machine.imports:
        return Ability(name, True, f"sglang {machine.versions.get('sglang', '')}{'' if gpu else ', on CPUs'}")
    if gpu:
        return Ability(name, False, "sglang is not installed", "pip install 'megarl[sglang]'")
    return Ability(name, False, "sglang is not installed; on CPUs it has an environment of its own", "make test-sglang")
