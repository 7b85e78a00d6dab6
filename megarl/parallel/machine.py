"""What this machine has, and what of megarl it can therefore run: facts gathered in one place, judged in another."""

from __future__ import annotations

import importlib
import importlib.metadata as metadata
import ipaddress
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import psutil
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from megarl.config.errors import ConfigError
from megarl.parallel.internals import changed

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
DRIVERS = {12: "525.60.13", 13: "580.65.06"}  # the oldest that runs programs of this CUDA (CUDA toolkit's release notes)
LOCK = Path(__file__).parents[2] / "requirements-gpu.txt"  # of the checkout
LOCKED_FIRST = ("torch", "transformer-engine", "transformer-engine-torch", "megatron-core", "sglang", "sglang-kernel", "transformers")
INSTALL = "make install-gpu"
NEEDS_TE = "needs a CUDA device and transformer-engine"
# In a process of its own: an import of SGLang changes the process.
SGLANG_IMPORT = "import megarl.rollout.sglang_host, sglang.srt.entrypoints.engine"  # the former stands for what a CPU lacks
ALLOCATOR = {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"}
EXPANDABLE = re.compile(r"(?:^|,)\s*expandable_segments\s*:\s*(\w*)", re.IGNORECASE)


class Gpu(NamedTuple):
    """memory: bytes; capability: CUDA's compute capability."""

    name: str
    memory: int
    capability: tuple[int, int]


@dataclass(frozen=True)
class Machine:
    """versions: package -> version; imports: modules that are there; programs: commands in PATH; problem: why CUDA does not work.

    broken: why the Transformer Engine that is there cannot be imported; driver: of NVIDIA, as its kernel module says; flaws: what else is
    there and does not fit, each with its remedy."""

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
    driver: str | None = None
    flaws: tuple[str, ...] = field(default=())


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
        broken=broken_transformer_engine(),
        driver=driver_version(),
        flaws=tuple(_flaws(torch.version.cuda)),
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


def _flaws(cuda: str | None) -> Iterator[str]:
    """What a run would stumble over later: packages that do not fit each other, settings, names."""
    if cuda:
        yield from unmet("sglang")
        if LOCK.exists() and (line := lock_problem(LOCK.read_text(encoding="utf-8"))):
            yield line
    if find_spec("sglang") and (line := import_problem("sglang", SGLANG_IMPORT)):
        yield line
    for package in ("megatron-core", "sglang", "transformer-engine"):
        yield from changed(package)
    yield from (line for line in (allocator_problem(), hostname_problem()) if line)


def unmet(package: str) -> list[str]:
    """What an installed package asks for and does not find; empty where it is not installed, or does not say."""
    try:
        asked = metadata.requires(package) or []
    except metadata.PackageNotFoundError:
        return []
    lines = []
    for text in asked:
        try:
            wanted = Requirement(text)
        except InvalidRequirement:
            continue
        if wanted.marker and not wanted.marker.evaluate({"extra": ""}):
            continue
        found = version_of(wanted.name)
        if found is None or not wanted.specifier.contains(found, prereleases=True):
            there = f"{wanted.name} {found}" if found else f"no {wanted.name}"
            lines.append(f"{package} {version_of(package)} needs {wanted.name}{wanted.specifier}, there is {there} ({INSTALL})")
    return lines


def version_of(package: str) -> str | None:
    """Its version."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def lock_problem(lock: str) -> str | None:
    """How the packages differ from those of requirements-gpu.txt; None where they do not."""
    pins: dict[str, str] = dict(re.findall(r"^([\w.-]+)==(\S+)", lock, re.MULTILINE))
    off = {name: version_of(name) for name, version in pins.items() if _public(version_of(name)) != version}
    if not off:
        return None
    shown = sorted(off, key=lambda name: (canonicalize_name(name) not in LOCKED_FIRST, name))[:4]
    listed = ", ".join(f"{name} {off[name] or 'missing'} (there {pins[name]})" for name in shown)
    return f"{len(off)} of {len(pins)} packages are not as in requirements-gpu.txt: {listed}{', ...' if len(off) > 4 else ''} ({INSTALL})"


def _public(version: str | None) -> str | None:
    """Without the build that torch's own index adds: 2.14.1+cu130 is 2.14.1."""
    return version and version.partition("+")[0]


def broken_transformer_engine() -> str:
    """Says why the Transformer Engine that is here cannot be imported; empty where it can be, or where there is none.

    Megatron imports whatever has its name, and does not survive a package without its compiled half, or a folder that one left."""
    spec = find_spec("transformer_engine")
    if spec is None:
        return ""
    folder = next(iter(spec.submodule_search_locations or ()), "")
    if spec.origin is None:
        return f"{folder}: a folder without a package in the place of Transformer Engine (remove it)"
    version = version_of("transformer-engine")
    parts = {name: version_of(name) for name in ("transformer-engine-torch", "transformer-engine-cu13", "transformer-engine-cu12")}
    for name, found in parts.items():
        if found not in (None, version):
            return f"{folder}: transformer-engine {version} does not go with {name} {found} ({INSTALL})"
    if find_spec("transformer_engine_torch") is None:
        return f"{folder}: transformer-engine {version} lacks its compiled half, transformer-engine-torch ({INSTALL}, or uninstall it)"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns of what it then raises
            importlib.import_module("transformer_engine.pytorch")
    except Exception as error:  # noqa: BLE001 (what is missing decides about the kind of error)
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        mend = f"{'compiled for another torch? ' if 'undefined symbol' in reason else ''}{INSTALL}, or uninstall it"
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


def import_problem(package: str, code: str, limit: float = 300.0) -> str | None:
    """Why an installed package cannot be imported: a package that it lacks, or a compiled part made for another torch."""
    command = [sys.executable, "-c", code]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, stdin=subprocess.DEVNULL, check=False)
    except subprocess.TimeoutExpired:
        return f"{package}: its import takes more than {limit:.0f} s (a slow disk?)"
    if done.returncode == 0:
        return None
    last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    hint = ", compiled for another torch?" if "undefined symbol" in last else ""
    return f"{package} {version_of(package)} cannot be imported: {last[:300]}{hint} ({INSTALL})"


def allocator_problem(environment: Mapping[str, str] = os.environ) -> str | None:
    """Say that torch's expandable segments, usual on clusters, are taken from the engine's environment (parallel/launch.py)."""
    for name in sorted(ALLOCATOR):
        if (found := EXPANDABLE.search(environment.get(name, ""))) and found[1].lower() == "true":
            return f"{name}: SGLang runs without expandable_segments, which its memory saver refuses (unset {name} for both)"
    return None


def hostname_problem() -> str | None:
    """Why other nodes would not reach this one over gloo, which goes by the hostname where no interface is set."""
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return None
    name, remedy = (
        socket.gethostname(),
        "for jobs of several nodes correct /etc/hosts, or set GLOO_SOCKET_IFNAME to the network's interface",
    )
    try:
        found = [str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    except OSError:
        return f"hostname {name} does not resolve ({remedy})"
    if ipaddress.ip_address(found[0].partition("%")[0]).is_loopback:
        return f"hostname {name} resolves to {found[0]}, where no other node reaches it ({remedy})"
    return None


def unseen_gpu(environment: Mapping[str, str]) -> str | None:
    """Why torch, which sees no GPU, might be wrong: NVIDIA's driver is loaded, and nobody has hidden the devices."""
    driver = driver_version()
    if driver is None or environment.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1"):
        return None
    import torch

    if torch.version.cuda is None:
        return "torch is a build for CPUs"
    return driver_problem(driver, torch.version.cuda) or f"nvidia-smi tells more; its driver is {driver}"


def driver_version(file: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """NVIDIA's kernel driver; None where none is loaded."""
    try:
        found = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)", file.read_text(encoding="utf-8"))
    except OSError:
        return None
    return found and found[1]


def driver_problem(driver: str | None, cuda: str | None) -> str | None:
    """Whether the driver is too old for torch's CUDA. Newer ones of its major version come with compatibility packages only."""
    if driver is None or cuda is None:
        return None
    needed = DRIVERS.get(int(cuda.split(".")[0]))
    if needed and [int(n) for n in driver.split(".")] < [int(n) for n in needed.split(".")]:
        return f"driver {driver} is too old for CUDA {cuda}, of which torch is: {needed} or newer"
    return None


def abilities(machine: Machine) -> Iterator[Ability]:
    """What the machine can run, and for the rest the exact command."""
    yield _cpu(machine)
    yield (gpu := _gpu(machine))
    yield (te := _te(machine, gpu.ready))
    yield _fp8(machine, te.ready)
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
    why = driver_problem(machine.driver, machine.cuda) or machine.problem or "nvidia-smi shows whether the driver does"
    return Ability(name, False, f"torch sees no GPU: {why}", "nvidia-smi")


def _te(machine: Machine, gpu: bool) -> Ability:
    name = "Transformer Engine layers"
    if machine.broken or not gpu:
        return Ability(name, False, machine.broken or "needs a GPU")
    if "transformer_engine" not in machine.imports:
        return Ability(name, False, "transformer-engine is not installed", INSTALL)
    return Ability(name, True, f"transformer-engine {machine.versions.get('transformer-engine', '')}")


def _fp8(machine: Machine, ready: bool) -> Ability:
    name = "FP8 layers"
    if machine.gpus and min(gpu.capability for gpu in machine.gpus) < FP8_FROM:
        return Ability(name, False, f"{machine.gpus[0].name} has no FP8 units (Hopper and later have)")
    return Ability(name, ready, "" if ready else "needs Transformer Engine layers")


def _sglang(machine: Machine, gpu: bool) -> Ability:
    name = "the SGLang engine"
    if flaw := next((flaw for flaw in machine.flaws if flaw.startswith("sglang ")), None):
        return Ability(name, False, flaw)
    if "sglang" in machine.imports:
        return Ability(name, True, f"sglang {machine.versions.get('sglang', '')}{'' if gpu else ', on CPUs'}")
    if gpu:
        return Ability(name, False, "sglang is not installed", INSTALL)
    return Ability(name, False, "sglang is not installed; on CPUs it has an environment of its own", "make test-sglang")
