"""Check that installed packages fit megarl, each other and the driver.

The checks return one line about a problem, else None or "".
"""

from __future__ import annotations

import importlib
import importlib.metadata as metadata
import ipaddress
import os
import re
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from megarl.config.engines import ENGINES, EngineName
from megarl.config.errors import ConfigError, first_line
from megarl.parallel.internals import changed

GIB = 2**30
PACKAGES = (
    *("torch", "megatron-core", "triton", "transformers", "transformer-engine", "sglang"),
    *("nemo-run", "tensorboard", "wandb", "numpy", "math-verify", "reasoning-gym"),
)
# From pyproject.toml: oldest version, first that is too new.
SUPPORTED = {"torch": ((2, 11), (3,)), "megatron-core": ((0, 16), (0, 20)), "transformers": ((5, 12), (6,))}
# Tested version; True: Python 3.12 or later.
MEGATRON = {False: "0.16.1", True: "0.19.2"}
# The first megatron-core that imports triton without requiring it.
IMPORTS_TRITON = (0, 18)
# The oldest driver by CUDA's major version.
DRIVERS = {12: "525.60.13", 13: "580.65.06"}
LOCK = Path(__file__).parents[2] / "requirements-gpu.txt"
LOCKED_FIRST = (
    *("torch", "transformer-engine", "transformer-engine-torch", "megatron-core"),
    *("sglang", "sglang-kernel", "transformers"),
)
INSTALL = "make install-gpu"
NEEDS_TE = "needs a CUDA device and transformer-engine"
# Matrices of a small model.
MATRIX_RATES = """
import time, torch
for dtype in (torch.float32, torch.bfloat16):
    rows, weights = torch.ones(512, 576, dtype=dtype), torch.ones(576, 1536, dtype=dtype)
    torch.mm(rows, weights)
    count, start = 0, time.perf_counter()
    while (taken := time.perf_counter() - start) < 0.5:
        torch.mm(rows, weights)
        count += 1
    print(count * 2 * 512 * 576 * 1536 / taken / 1e9)
"""
ALLOCATOR = {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"}
EXPANDABLE = re.compile(r"(?:^|,)\s*expandable_segments\s*:\s*(\w*)", re.IGNORECASE)


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def matrix_rates(processes: int) -> dict[str, float]:
    """Measure one core's GFLOP/s in `fp32` and `bf16`, while `processes` processes multiply.

    This process may fork ranks, so it starts no torch threads."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-c", MATRIX_RATES]
    children = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(processes)
    ]
    rates_by_child = [list(map(float, child.communicate(timeout=120)[0].split())) for child in children]
    means = [sum(rates) / processes for rates in zip(*rates_by_child, strict=True)]
    return dict(zip(("fp32", "bf16"), means, strict=True))


def get_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def installed() -> dict[str, str]:
    versions = {name: version for name in PACKAGES if (version := get_version(name))}
    if find_spec("triton"):
        versions.setdefault("triton", "with torch")
    return versions


def find_misfit(versions: Mapping[str, str], python: tuple[int, int]) -> str | None:
    """Find the first unsuitable package."""
    tested_bounds = {"megatron-core": f"=={MEGATRON[python >= (3, 12)]}"}
    for name, (oldest, too_new) in SUPPORTED.items():
        bounds = f">={'.'.join(map(str, oldest))},<{'.'.join(map(str, too_new))}"
        install = f"pip install '{name}{tested_bounds.get(name, bounds)}'"
        if name not in versions:
            return f"{name} is not installed ({install})"
        if not oldest <= _numbers(versions[name]) < too_new:
            return f"{name} {versions[name]}: megarl runs with {name}{bounds} ({install})"
    if _numbers(versions["megatron-core"]) >= IMPORTS_TRITON and "triton" not in versions:
        megatron = f"megatron-core {versions['megatron-core']}"
        return f"{megatron} imports triton, which is not installed (pip install triton)"
    return None


def check_packages() -> None:
    """Raise ConfigError for an unsuitable package, before any is imported."""
    if problem := find_misfit(installed(), sys.version_info[:2]):
        raise ConfigError(problem)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version.split("+")[0])[:3])


def flaws(cuda: str | None) -> Iterator[str]:
    """Yield problems that would make a run fail later."""
    problems: list[str | None] = []
    if cuda:
        yield from list_unmet_requirements("sglang")
        problems.append(cudnn_problem())
        if LOCK.exists():
            problems.append(lock_problem(LOCK.read_text(encoding="utf-8")))
    problems.append(engine_import_problem("sglang"))
    if cuda and find_spec("sglang"):
        problems.append(memory_saver_problem(cuda))
    yield from filter(None, problems)
    for package in ("torch", "megatron-core", "sglang", "transformer-engine"):
        yield from changed(package)
    yield from filter(None, (allocator_problem(), hostname_problem()))


def cuda_runtime_folders() -> list[str]:
    """Find CUDA's runtime in NVIDIA's wheels, where the loader does not search."""
    spec = find_spec("nvidia")
    roots = [Path(root) for root in (spec.submodule_search_locations or ())] if spec else []
    return sorted({str(path.parent) for root in roots for path in root.glob("*/lib/libcudart.so.*")})


def memory_saver_problem(cuda: str) -> str | None:
    """Check that SGLang's memory saver can be preloaded."""
    spec = find_spec("torch_memory_saver")
    if spec is None or spec.origin is None:
        return None
    name = f"torch_memory_saver_hook_mode_preload_cu{cuda.partition('.')[0]}.abi3.so"
    library = Path(spec.origin).parents[1] / name
    if not library.exists():
        return None  # other names: SGLang reports problems itself
    paths = os.pathsep.join(filter(None, [*cuda_runtime_folders(), os.environ.get("LD_LIBRARY_PATH", "")]))
    environment = {**os.environ, "LD_PRELOAD": str(library), "LD_LIBRARY_PATH": paths}
    command = [sys.executable, "-S", "-c", ""]
    try:
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        return f"sglang's memory saver cannot be preloaded: Python did not start within 60 s ({INSTALL})"
    if result.returncode == 0:
        return None
    last_line = (result.stderr.strip().splitlines() or [f"exit code {result.returncode}"])[-1]
    return f"sglang's memory saver cannot be preloaded: {last_line} ({INSTALL})"


def list_unmet_requirements(package: str) -> list[str]:
    version, lines = get_version(package), []
    for text in (metadata.requires(package) or []) if version else []:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        name, specifier = requirement.name, requirement.specifier
        found = get_version(name)
        if found is None or not specifier.contains(found, prereleases=True):
            there = f"there is {name} {found}" if found else f"there is no {name}"
            lines.append(f"{package} {version} needs {name}{specifier}, {there} ({INSTALL})")
    return lines


def lock_problem(lock: str) -> str | None:
    pins: dict[str, str] = dict(re.findall(r"^([\w.-]+)==(\S+)", lock, re.MULTILINE))
    versions = {name: get_version(name) for name in pins}
    # Ignores the build in 2.14.1+cu130.
    mismatches = [name for name, pin in pins.items() if (versions[name] or "").partition("+")[0] != pin]
    if not mismatches:
        return None
    examples = sorted(mismatches, key=lambda name: (canonicalize_name(name) not in LOCKED_FIRST, name))[:4]
    texts = [f"{name} {versions[name] or 'missing'} (there {pins[name]})" for name in examples]
    examples_text = ", ".join([*texts, "..."] if len(mismatches) > 4 else texts)
    count = f"{len(mismatches)} of {len(pins)} packages"
    return f"{count} are not as in requirements-gpu.txt: {examples_text} ({INSTALL})"


def broken_transformer_engine() -> str:
    """Check that an installed Transformer Engine can be imported.

    Megatron imports anything of that name, even a leftover folder."""
    spec = find_spec("transformer_engine")
    if spec is None:
        return ""
    folder = next(iter(spec.submodule_search_locations or ()), "")
    if spec.origin is None:
        return f"{folder}: a folder without a package in the place of Transformer Engine (remove it)"
    version = get_version("transformer-engine")
    for name in ("transformer-engine-torch", "transformer-engine-cu13", "transformer-engine-cu12"):
        if (part_version := get_version(name)) not in (None, version):
            return (
                f"{folder}: transformer-engine {version} does not go with {name} {part_version} ({INSTALL})"
            )
    # Only the package itself puts the compiled module's folder on the path.
    if get_version("transformer-engine-torch") is None and find_spec("transformer_engine_torch") is None:
        problem = f"transformer-engine {version} lacks its compiled half, transformer-engine-torch"
        return f"{folder}: {problem} ({INSTALL}, or uninstall it)"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns before it raises
            importlib.import_module("torch")  # loads libraries that the compiled half needs
            importlib.import_module("transformer_engine.pytorch")
    except Exception as error:  # noqa: BLE001 (the kind depends on the missing part)
        reason = first_line(error)
        hint = "compiled for another torch? " if "undefined symbol" in reason else ""
        failure = f"this Transformer Engine cannot be imported: {reason.rstrip('.')}"
        return f"{folder}: {failure} ({hint}{INSTALL}, or uninstall it)"
    return ""


def transformer_engine_problem(device_type: str) -> str:
    """Check that Transformer Engine can run on this device type. Takes seconds."""
    if find_spec("transformer_engine") is None:
        return NEEDS_TE
    if problem := broken_transformer_engine():
        return problem
    # The real kernels need CUDA; those of tests/te name their devices.
    device_types = getattr(importlib.import_module("transformer_engine_torch"), "device_types", ("cuda",))
    return "" if device_type in device_types else NEEDS_TE


@cache  # torch reports it only once
def cudnn_problem() -> str:
    """Check that the loader finds no older cuDNN than torch's.

    Transformer Engine would silently not use cuDNN's attention."""
    torch = importlib.import_module("torch")
    try:
        torch.backends.cudnn.version()
    except RuntimeError as error:
        versions = [numbers.replace(", ", ".") for numbers in re.findall(r"\((\d+, \d+, \d+)\)", str(error))]
        if len(versions) < 2:
            return f"cuDNN cannot be used: {first_line(error)} ({INSTALL})"
        remedy = f"take another cuDNN off LD_LIBRARY_PATH, or {INSTALL}"
        return f"cuDNN {versions[1]} is found, and torch was compiled with {versions[0]} ({remedy})"
    return ""


def muon_problem() -> str:
    version = get_version("megatron-core") or "0"
    if _numbers(version) < (0, 18):
        return f"needs megatron-core 0.18 or later, and there is {version}"
    return "" if find_spec("emerging_optimizers") else "needs emerging-optimizers, which is not installed"


def import_problem(package: str, code: str, limit: float = 300.0) -> str | None:
    command, no_input = [sys.executable, "-c", code], subprocess.DEVNULL
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=limit, stdin=no_input, check=False
        )
    except subprocess.TimeoutExpired:
        return f"{package}: its import takes more than {limit:.0f} s (a slow disk?)"
    if result.returncode == 0:
        return None
    last_line = (result.stderr.strip().splitlines() or [f"exit code {result.returncode}"])[-1]
    hint = ", compiled for another torch?" if "undefined symbol" in last_line else ""
    return f"{package} {get_version(package)} cannot be imported: {last_line[:300]}{hint} ({INSTALL})"


def engine_import_problem(name: EngineName) -> str | None:
    entry = ENGINES[name]
    if not entry.import_test or not find_spec(entry.package):
        return None
    return import_problem(entry.package, entry.import_test)


def allocator_problem(environment: Mapping[str, str] = os.environ) -> str | None:
    """Note that the engine runs without torch's expandable segments."""
    for name in sorted(ALLOCATOR):
        if (match := EXPANDABLE.search(environment.get(name, ""))) and match[1].lower() == "true":
            problem = "SGLang runs without expandable_segments, which its memory saver refuses"
            return f"{name}: {problem} (unset {name} for both)"
    return None


def attention_problem(attention: str, environment: Mapping[str, str] = os.environ) -> str:
    """Check that Transformer Engine's variables do not contradict `model.attention`."""
    for kernels in ("flash", "fused", "unfused"):
        name, expected = f"NVTE_{kernels.upper()}_ATTN", str(int(attention in ("auto", kernels)))
        if (value := environment.get(name, expected)) != expected:
            return f"{name}: {value}, and model.attention is {attention} (unset it, and set that instead)"
    return ""


def measure_usable_memory(root: Path = Path("/")) -> int:
    """Return bytes of memory, as limited by control groups (v1 or v2)."""
    total_match = re.search(r"MemTotal:\s+(\d+) kB", (root / "proc/meminfo").read_text())
    limits = [int(total_match[1]) * 1024] if total_match else []
    try:
        cgroup_lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # a kernel without control groups
        cgroup_lines = []
    for line in cgroup_lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        subfolder, name = ("", "memory.max") if not controllers else ("memory", "memory.limit_in_bytes")
        mount, group_path = root / "sys/fs/cgroup" / subfolder, Path(path.lstrip("/"))
        for folder in (group_path, *group_path.parents):
            # A container may see its group at the top.
            file = mount / folder / name
            text = file.read_text().strip() if file.is_file() else ""
            limits += [int(text)] if text.isdecimal() else []
    return min(limits, default=0)


def hostname_problem() -> str | None:
    """Check that other nodes can reach the hostname's address, which gloo uses by default."""
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return None
    name = socket.gethostname()
    remedy = (
        "for jobs of several nodes correct /etc/hosts, or set GLOO_SOCKET_IFNAME to the network's interface"
    )
    try:
        addresses = [str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    except OSError:
        return f"hostname {name} does not resolve ({remedy})"
    if ipaddress.ip_address(addresses[0].partition("%")[0]).is_loopback:
        return f"hostname {name} resolves to {addresses[0]}, where no other node reaches it ({remedy})"
    return None


def check_launcher(environment: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError for unusable variables of torchrun or Slurm.

    With only some of torchrun's, this process would wait for ranks that nobody starts."""
    remedy = "torchrun sets them all; unset RANK and WORLD_SIZE to start without it"

    def read_number(name: str, least: int, below: int | None = None, why: str = "") -> int | None:
        text = environment.get(name)
        if text is None:
            return None
        if not re.fullmatch(r"-?[0-9]{1,9}", text.strip()):
            raise ConfigError(f"{name}: {text!r} is not a whole number ({remedy})")
        value = int(text)
        if value < least or (below is not None and value >= below):
            upper = "" if below is None else f" to {below - 1}{why}"
            raise ConfigError(f"{name}: must be {least}{upper or ' or more'} (got {value}; {remedy})")
        return value

    world = read_number("WORLD_SIZE", 1)
    read_number("RANK", 0, world, ", as WORLD_SIZE says")
    local_world = read_number(
        "LOCAL_WORLD_SIZE", 1, None if world is None else world + 1, ", as WORLD_SIZE says"
    )
    read_number(
        "LOCAL_RANK", 0, local_world or world, f", as {'LOCAL_' if local_world else ''}WORLD_SIZE says"
    )
    port = read_number("MASTER_PORT", 1, 65536)
    set_names = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name in environment]
    if {"RANK", "WORLD_SIZE"} & {*set_names} and len(set_names) < 4:
        unset_names = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} - {*set_names}
        raise ConfigError(f"{set_names[0]}: is set, but not {', '.join(sorted(unset_names))} ({remedy})")
    if "RANK" in environment:
        host = environment["MASTER_ADDR"]
        try:
            socket.getaddrinfo(host or " ", port)
        except (OSError, UnicodeError) as error:
            raise ConfigError(f"MASTER_ADDR: {host!r}: {error} (name the node of rank 0)") from None
    end_time = environment.get("SLURM_JOB_END_TIME", "0")
    if not re.fullmatch(r"[0-9]+(\.[0-9]*)?", end_time):
        what = f"{end_time!r} is not a time in seconds since 1970 (Slurm sets it)"
        raise ConfigError(f"SLURM_JOB_END_TIME: {what}")


def unseen_gpu(environment: Mapping[str, str]) -> str | None:
    """Return why torch sees no GPU, if a driver is loaded."""
    driver = driver_version()
    if driver is None or environment.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1"):
        return None
    import torch

    if torch.version.cuda is None:
        return "torch is a build for CPUs"
    return driver_problem(driver, torch.version.cuda) or f"see nvidia-smi; the driver is {driver}"


def driver_version(file: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    try:
        match = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)", file.read_text(encoding="utf-8"))
    except OSError:
        return None
    return match and match[1]


def driver_problem(driver: str | None, cuda: str | None) -> str | None:
    """Check that the driver is new enough for the major version of CUDA."""
    if driver is None or cuda is None:
        return None
    oldest_driver = DRIVERS.get(int(cuda.split(".")[0]))
    if oldest_driver and _numbers(driver) < _numbers(oldest_driver):
        return f"driver {driver} is too old for CUDA {cuda}, of which torch is: {oldest_driver} or newer"
    return None
