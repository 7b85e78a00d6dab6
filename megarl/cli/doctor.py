"""`megarl doctor`."""

from __future__ import annotations

import platform
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import NamedTuple

import psutil

from megarl import __version__
from megarl.config.errors import first_line
from megarl.config.plugins import REINSTALL, plugin, plugins
from megarl.parallel.machine import (
    GIB,
    INSTALL,
    PACKAGES,
    broken_transformer_engine,
    cores,
    driver_problem,
    driver_version,
    find_misfit,
    flaws,
    installed,
    matrix_rates,
)
from megarl.rewards.sandbox import probe

FP8_FROM = (8, 9)  # compute capability: Ada, Hopper


class Gpu(NamedTuple):
    name: str
    memory: int
    capability: tuple[int, int]


@dataclass(frozen=True)
class Machine:
    python: tuple[int, int]
    system: str
    cores: int
    memory: int  # bytes
    versions: Mapping[str, str]  # package -> version
    imports: frozenset[str]  # modules
    programs: frozenset[str]  # commands in PATH
    gpus: tuple[Gpu, ...]
    cuda: str | None  # torch's
    problem: str | None = None  # why CUDA does not work
    broken: str = ""  # why Transformer Engine cannot be imported
    driver: str | None = None  # NVIDIA's kernel module
    rates: Mapping[str, float] | None = None  # precision -> GFLOP/s of one core, while all are busy
    flaws: tuple[str, ...] = ()  # of packages, each with its remedy
    sandbox: tuple[str, ...] = ()  # layers
    denied: Mapping[str, bool] = field(default_factory=dict)  # resource -> the sandbox denies it


class Ability(NamedTuple):
    """Something that this machine can run, or lacks, with the command that installs it."""

    name: str
    ready: bool
    note: str = ""
    command: str = ""


def doctor() -> int:
    """List what is installed, what this machine can run, and how to get the rest.

    The exit code is 0 if at least the demo runs."""
    machine = look()
    python = ".".join(map(str, machine.python))
    hardware = f"{machine.cores} cores, {machine.memory / GIB:.0f} GiB of memory"
    print(f"megarl {__version__}, Python {python}, {machine.system}, {hardware}")
    if machine.driver or machine.cuda:
        print(f"driver     {machine.driver or 'none'}, torch for CUDA {machine.cuda or 'none'}")
    installed_packages = [f"{name} {machine.versions[name]}" for name in PACKAGES if name in machine.versions]
    print(f"installed  {', '.join(installed_packages)}\n")
    ability_list = list(abilities(machine))
    for ability in ability_list:
        note = f": {ability.note}" if ability.note else ""
        print(f"{'yes' if ability.ready else 'no ':4s} {ability.name}{note}")
        if ability.command:
            print(f"       {ability.command}")
    for flaw in machine.flaws:
        print(f"look {flaw}")
    if "demo" not in plugins("megarl.commands"):
        print(f"look this installation of megarl is older than its files ({REINSTALL})")
    return 0 if ability_list[0].ready else 1


def look() -> Machine:
    import torch

    gpus, problem = [], None
    try:
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            gpus.append(Gpu(properties.name, properties.total_memory, (properties.major, properties.minor)))
    except RuntimeError as error:
        problem = first_line(error)
    layers, denied = probe()
    modules = ("transformer_engine", "sglang", "nemo_run", "wandb", "tensorboard")
    return Machine(
        python=sys.version_info[:2],
        system=platform.system(),
        cores=cores(),
        memory=psutil.virtual_memory().total,
        versions=installed(),
        imports=frozenset(name for name in modules if find_spec(name)),
        programs=frozenset(name for name in ("nvidia-smi", "sbatch") if shutil.which(name)),
        gpus=tuple(gpus),
        cuda=torch.version.cuda,
        problem=problem,
        broken=broken_transformer_engine(),
        driver=driver_version(),
        rates=matrix_rates(min(2, cores())),
        flaws=tuple(flaws(torch.version.cuda)),
        sandbox=tuple(layers),
        denied=denied,
    )


def abilities(machine: Machine) -> Iterator[Ability]:
    """Yield abilities that the machine has or lacks, the demo first."""
    yield _demo(machine)
    for one in plugins("megarl.abilities"):
        yield from plugin("megarl.abilities", one)(machine)

    gpu_ability = _gpu(machine)
    yield gpu_ability

    name = "Transformer Engine layers"
    has_te = gpu_ability.ready and not machine.broken and "transformer_engine" in machine.imports
    if machine.broken or not gpu_ability.ready:
        yield Ability(name, False, machine.broken or "needs a GPU")
    elif has_te:
        yield Ability(name, True, f"transformer-engine {machine.versions.get('transformer-engine', '')}")
    else:
        yield Ability(name, False, "transformer-engine is not installed", INSTALL)
    if machine.gpus and min(one.capability for one in machine.gpus) < FP8_FROM:
        fp8_note = f"{machine.gpus[0].name} has no FP8 units (Hopper and later have)"
        yield Ability("FP8 layers", False, fp8_note)
    else:
        yield Ability("FP8 layers", has_te, "" if has_te else "needs Transformer Engine layers")

    name = "the SGLang engine"
    if flaw := next((flaw for flaw in machine.flaws if flaw.startswith("sglang ")), None):
        yield Ability(name, False, flaw)
    elif "sglang" in machine.imports:
        device_note = "" if gpu_ability.ready else ", on CPUs"
        yield Ability(name, True, f"sglang {machine.versions.get('sglang', '')}{device_note}")
    elif gpu_ability.ready:
        yield Ability(name, False, "sglang is not installed", INSTALL)
    else:
        sglang_note = "sglang is not installed; on CPUs it has an environment of its own"
        yield Ability(name, False, sglang_note, "make test-sglang")

    has_slurm = "sbatch" in machine.programs
    slurm_note = "no sbatch: this is no login node of a Slurm cluster"
    yield Ability("jobs by Slurm", has_slurm, "sbatch slurm/demo.sbatch" if has_slurm else slurm_note)
    for name, module, extra in (
        ("sweeps by NeMo-Run", "nemo_run", "launch"),
        ("TensorBoard", "tensorboard", "track"),
        ("Weights & Biases", "wandb", "track"),
    ):
        if module in machine.imports:
            yield Ability(name, True)
        else:
            package_note = f"{module.replace('_', '-')} is not installed"
            yield Ability(name, False, package_note, f"pip install 'megarl[{extra}]'")

    layers = ", ".join(machine.sandbox) or "no namespaces, no Landlock, no seccomp"
    for resource, is_denied in machine.denied.items():
        name = f"a sandbox that keeps verifiers and tools from {resource}"
        yield Ability(name, is_denied, layers if is_denied else f"{layers} (docs/verifiers.md)")


def _demo(machine: Machine) -> Ability:
    name = "the demo on CPUs"
    if problem := find_misfit(machine.versions, machine.python):
        what, _, install = problem.rpartition(" (")
        return Ability(name, False, what, install.rstrip(")"))
    if machine.broken:
        return Ability(name, False, "Megatron cannot import the broken Transformer Engine (below)")
    if machine.system != "Linux":
        reason = "gloo and the verifiers' limits are tested on Linux only"
        return Ability(name, False, f"{machine.system}: {reason}")
    if machine.cores < 2 or machine.memory < 4 * GIB:
        resources = f"{machine.cores} cores and {machine.memory / GIB:.0f} GiB"
        return Ability(name, True, f"slowly: {resources}, two and 4 are better")
    return Ability(name, True, "make demo")


def _gpu(machine: Machine) -> Ability:
    name = "training on GPUs, bf16"
    if machine.gpus and machine.problem is None:
        old_gpu_names = [gpu.name for gpu in machine.gpus if gpu.capability < (8, 0)]
        if old_gpu_names:
            return Ability(name, False, f"{old_gpu_names[0]} is older than Ampere and has no bf16")
        gpu_kinds = ", ".join(sorted({f"{gpu.name}, {gpu.memory / GIB:.0f} GiB" for gpu in machine.gpus}))
        return Ability(name, True, f"{len(machine.gpus)} x {gpu_kinds}")
    if machine.cuda is None and "nvidia-smi" in machine.programs:
        reinstall = "pip install --force-reinstall --no-deps torch"
        return Ability(name, False, "there is a driver, but torch is a build for CPUs", reinstall)
    if machine.cuda is None:
        return Ability(name, False, "no GPU driver (nvidia-smi), and torch is a build for CPUs")
    reason = driver_problem(machine.driver, machine.cuda) or machine.problem
    reason = reason or "nvidia-smi shows whether the driver does"
    return Ability(name, False, f"torch sees no GPU: {reason}", "nvidia-smi")
