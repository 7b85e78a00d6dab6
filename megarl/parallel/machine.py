"""What this machine has, and what of megarl it can therefore run: facts gathered in one place, judged in another."""

from __future__ import annotations

import importlib
import importlib.metadata as metadata
import platform
import shutil
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import NamedTuple

import psutil

GIB = 2**30
PACKAGES = (
    "torch",
    "megatron-core",
    "transformers",
    "transformer-engine",
    "sglang",
    "nemo-run",
    "tensorboard",
    "wandb",
    "numpy",
    "math-verify",
)
FP8_FROM = (8, 9)  # compute capability: Ada and Hopper have FP8 matrix units
NEEDS_TE = "needs a CUDA device and transformer-engine"


class Gpu(NamedTuple):
    """memory: bytes; capability: CUDA's compute capability."""

    name: str
    memory: int
    capability: tuple[int, int]


@dataclass(frozen=True)
class Machine:
    """versions: package -> version; imports: modules that are there; programs: commands in PATH; problem: why CUDA does not work;
    broken: why the Transformer Engine that is there cannot be imported."""

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
    broken: str = ""


class Ability(NamedTuple):
    """Something that can be run here, or what is missing and the command that gets it."""

    name: str
    ready: bool
    note: str
    command: str = ""


def look() -> Machine:
    """This machine."""
    import torch

    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
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
        versions=versions,
        imports=frozenset(name for name in ("transformer_engine", "sglang", "nemo_run", "wandb", "tensorboard") if find_spec(name)),
        programs=frozenset(name for name in programs if shutil.which(name)),
        gpus=tuple(gpus),
        cuda=torch.version.cuda,
        problem=problem,
        broken=broken_transformer_engine(),
    )


def broken_transformer_engine() -> str:
    """Says why the Transformer Engine that is here cannot be imported; empty where it can be, or where there is none.

    Megatron imports whatever has its name, and does not survive a package without its compiled half, or a folder that one left."""
    spec = find_spec("transformer_engine")
    if spec is None:
        return ""
    folder = next(iter(spec.submodule_search_locations or ()), "")
    if spec.origin is None:
        return f"{folder}: a folder without a package in the place of Transformer Engine (remove it)"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns of what it then raises
            importlib.import_module("transformer_engine.pytorch")
    except Exception as error:  # noqa: BLE001 (what is missing decides about the kind of error)
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        mend = "pip install --no-build-isolation 'megarl[te]', or uninstall it"
        return f"{folder}: this Transformer Engine cannot be imported: {reason.rstrip('.')} ({mend})"
    return ""


def transformer_engine_problem(device_type: str) -> str:
    """Says why Transformer Engine's layers cannot run on such a device; empty where they can. Imports it, which takes seconds."""
    if find_spec("transformer_engine") is None:
        return NEEDS_TE
    if broken := broken_transformer_engine():
        return broken
    # Its own kernels are CUDA's; those of tests/te are plain torch and say where they run.
    device_types = getattr(importlib.import_module("transformer_engine_torch"), "device_types", ("cuda",))
    return "" if device_type in device_types else NEEDS_TE


def abilities(machine: Machine) -> Iterator[Ability]:
    """What the machine can run, and for the rest the exact command."""
    yield _cpu(machine)
    yield (gpu := _gpu(machine))
    te = "transformer_engine" in machine.imports and not machine.broken
    if machine.broken:
        yield Ability("Transformer Engine layers", False, machine.broken)
    elif gpu.ready and te:
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
    if machine.broken:
        return Ability(name, False, "Megatron does not get past the broken Transformer Engine (below)")
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
