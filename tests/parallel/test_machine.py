"""Unsuitable packages, drivers and host names are each reported in one line with the remedy."""

from __future__ import annotations

import importlib.metadata as metadata
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from megarl.config.errors import ConfigError
from megarl.parallel import internals
from megarl.parallel import machine as module
from megarl.parallel.internals import Internal, Package, changed, read_table
from megarl.parallel.machine import (
    LOCK,
    MEGATRON,
    SUPPORTED,
    allocator_problem,
    attention_problem,
    broken_transformer_engine,
    check_launcher,
    cuda_runtime_folders,
    cudnn_problem,
    driver_problem,
    driver_version,
    hostname_problem,
    import_problem,
    list_unmet_requirements,
    lock_problem,
    memory_saver_problem,
    muon_problem,
)
from megarl.parallel.runtime import choose_device

PYPROJECT, CONSTRAINTS = (
    Path(__file__).parents[2] / name for name in ("pyproject.toml", "constraints-cpu.txt")
)


def test_what_fits_is_what_the_package_asks_for() -> None:
    """SUPPORTED and MEGATRON, checked before the first import, match pyproject.toml and pip constraints."""
    asked = {
        found.name: found
        for found in map(Requirement, tomllib.loads(PYPROJECT.read_text())["project"]["dependencies"])
    }
    for name, (oldest, newer) in SUPPORTED.items():
        assert {str(part) for part in asked[name].specifier} == {
            f">={'.'.join(map(str, oldest))}",
            f"<{'.'.join(map(str, newer))}",
        }
    pins = [
        Requirement(line)
        for line in CONSTRAINTS.read_text().splitlines()
        if line.startswith("megatron-core==")
    ]
    for late, version in MEGATRON.items():
        environment = {"python_version": "3.12" if late else "3.11"}
        assert [str(pin.specifier) for pin in pins if pin.marker and pin.marker.evaluate(environment)] == [
            f"=={version}"
        ]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a packages folder that precedes all others; `install` adds a package to it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def install(site: Path, package: str, version: str, *requires: str, module: str = "") -> None:
    info = site / f"{package.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    lines = [f"Name: {package}", f"Version: {version}", *(f"Requires-Dist: {need}" for need in requires)]
    (info / "METADATA").write_text("Metadata-Version: 2.1\n" + "\n".join(lines) + "\n")
    if module:
        (site / module).mkdir()
        (site / module / "__init__.py").write_text("")


class TestTransformerEngine:
    """With a broken Transformer Engine, megatron-core 0.19 fails with a FileNotFoundError (D5)."""

    def test_none_is_no_problem(self, site: Path) -> None:
        assert broken_transformer_engine() == ""

    def test_without_its_compiled_half(self, site: Path) -> None:
        install(site, "transformer_engine", "2.20.2", module="transformer_engine")
        found = broken_transformer_engine()
        assert found.endswith(
            "transformer-engine 2.20.2 lacks its compiled half, transformer-engine-torch "
            "(make install-gpu, or uninstall it)"
        )

    def test_a_compiled_half_that_only_the_package_itself_finds(self, site: Path) -> None:
        """transformer-engine-torch may lie in a folder that the package itself adds to the path."""
        install(site, "transformer_engine", "2.20.2", module="transformer_engine")
        install(site, "transformer_engine_torch", "2.20.2")
        folder = site / "transformer_engine"
        (folder / "wheel_lib").mkdir()
        (folder / "wheel_lib" / "transformer_engine_torch.py").write_text("")
        (folder / "__init__.py").write_text(
            "import sys; assert 'torch' in sys.modules; sys.path.insert(0, __path__[0] + '/wheel_lib')"
        )
        (folder / "pytorch.py").write_text("import transformer_engine_torch")
        found = broken_transformer_engine()
        sys.path.remove(str(folder / "wheel_lib"))
        for name in [name for name in sys.modules if name.startswith("transformer_engine")]:
            del sys.modules[name]
        assert found == ""

    def test_parts_of_different_versions(self, site: Path) -> None:
        install(site, "transformer_engine", "2.20.2", module="transformer_engine")
        install(site, "transformer_engine_torch", "2.19.0", module="transformer_engine_torch")
        install(site, "transformer_engine_cu12", "2.20.2")
        found = broken_transformer_engine()
        assert found.endswith(
            "transformer-engine 2.20.2 does not go with transformer-engine-torch 2.19.0 (make install-gpu)"
        )

    def test_a_leftover_folder(self, site: Path) -> None:
        folder = site / "transformer_engine"
        folder.mkdir()
        without = "a folder without a package in the place of Transformer Engine (remove it)"
        assert broken_transformer_engine() == f"{folder}: {without}"

    def test_compiled_for_another_torch(self, site: Path) -> None:
        install(site, "transformer_engine", "2.20.2", module="transformer_engine")
        install(site, "transformer_engine_torch", "2.20.2", module="transformer_engine_torch")
        (site / "transformer_engine" / "pytorch.py").write_text(
            "raise ImportError('te.so: undefined symbol: _ZN3c10')"
        )
        found = broken_transformer_engine()
        sys.modules.pop("transformer_engine", None)  # half imported; monkeypatch would restore it
        assert found.endswith(
            "undefined symbol: _ZN3c10 (compiled for another torch? make install-gpu, or uninstall it)"
        )


def test_requirements_that_are_not_met(site: Path) -> None:
    elsewhere = ["absent; extra == 'all'", "absent; python_version < '3'"]
    install(site, "engine", "1.0", "torch==9.9", "nothing-of-this-name>=2", "numpy>=1", *elsewhere)
    torch = metadata.version("torch")
    assert list_unmet_requirements("engine") == [
        f"engine 1.0 needs torch==9.9, there is torch {torch} (make install-gpu)",
        "engine 1.0 needs nothing-of-this-name>=2, there is no nothing-of-this-name (make install-gpu)",
    ]
    assert list_unmet_requirements("nothing-of-this-name") == [] == list_unmet_requirements("megarl")


def test_how_an_environment_differs_from_the_lock() -> None:
    numpy, torch = metadata.version("numpy"), metadata.version("torch")
    assert lock_problem(f"numpy=={numpy}\ntorch=={torch.partition('+')[0]}\n# comment\n") is None
    assert lock_problem(f"aaa==1\nnumpy=={numpy}\ntorch==9.9\n") == (
        f"2 of 3 packages are not as in requirements-gpu.txt: torch {torch} (there 9.9), "
        "aaa missing (there 1) (make install-gpu)"
    )


def test_the_lock_holds_what_megarl_asks_for() -> None:
    """The lock pins one exact version of each requirement, and one of all parts of Transformer Engine."""
    from packaging.requirements import Requirement

    lines = [Requirement(line) for line in LOCK.read_text().splitlines() if line and not line.startswith("#")]
    pins = {line.name: next(iter(line.specifier)) for line in lines}
    assert len(pins) == len(lines) and all(
        pin.operator == "==" and "*" not in pin.version for pin in pins.values()
    )
    wanted = [Requirement(text) for text in metadata.requires("megarl") or [] if "extra" not in text]
    locked = {need.name: pins[canonicalize_name(need.name)].version for need in wanted}
    assert [need.name for need in wanted if not need.specifier.contains(locked[need.name])] == []
    engines = {pin.version for name, pin in pins.items() if name.startswith("transformer-engine")}
    assert len(engines) == 1 and not {"nemo-run", "megarl"} & set(pins)


def test_an_import_that_fails_is_one_line() -> None:
    assert import_problem("engine", "import json") is None
    assert import_problem("numpy", "import nothing_of_this_name") == (
        f"numpy {metadata.version('numpy')} cannot be imported: "
        "ModuleNotFoundError: No module named 'nothing_of_this_name' (make install-gpu)"
    )
    line = import_problem("numpy", "raise ImportError('x.so: undefined symbol: _ZN3c10')")
    assert (
        line is not None
        and "undefined symbol: _ZN3c10, compiled for another torch? (make install-gpu)" in line
    )
    assert (
        import_problem("numpy", "import time; time.sleep(60)", limit=0.5)
        == "numpy: its import takes more than 0 s (a slow disk?)"
    )


@pytest.mark.parametrize(
    ("driver", "cuda", "problem"),
    [
        ("580.65.06", "13.0", None),
        ("595.10", "13.0", None),
        (
            "570.86.10",
            "13.0",
            "driver 570.86.10 is too old for CUDA 13.0, of which torch is: 580.65.06 or newer",
        ),
        ("570.86.10", "12.8", None),
        ("515.1", "12.1", "driver 515.1 is too old for CUDA 12.1, of which torch is: 525.60.13 or newer"),
        (None, "13.0", None),
        ("570.86.10", None, None),
    ],
)
def test_drivers(driver: str | None, cuda: str | None, problem: str | None) -> None:
    assert driver_problem(driver, cuda) == problem


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue Sep 23\nGCC version: 12",
            "580.95.05",
        ),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.10  Release Build\n", "570.86.10"),
        ("", None),
    ],
)
def test_the_driver_as_its_module_says(tmp_path: Path, text: str, version: str | None) -> None:
    (tmp_path / "version").write_text(text)
    assert driver_version(tmp_path / "version") == version
    assert driver_version(tmp_path / "none") is None


def test_auto_does_not_take_the_cpu_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert choose_device("auto").type == "cpu"
    monkeypatch.setattr(module, "driver_version", lambda: "515.0")
    monkeypatch.setattr("torch.version.cuda", "13.0")
    with pytest.raises(ConfigError, match=r"torch sees no GPU: driver 515.0 is too old for CUDA 13.0"):
        choose_device("auto")
    monkeypatch.setattr("torch.version.cuda", None)
    with pytest.raises(
        ConfigError, match=r"torch is a build for CPUs \(repair it, or set parallel.device=cpu\)"
    ):
        choose_device("auto")
    assert choose_device("cpu").type == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # hidden on purpose
    assert choose_device("auto").type == "cpu"


def test_what_cuda_reads_at_its_first_question_is_set_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    import torch

    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    seen: list[str | None] = []
    monkeypatch.setattr(
        torch.cuda, "is_available", lambda: bool(seen.append(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")))
    )
    choose_device("auto")
    assert seen[0] == "1"


@pytest.mark.parametrize(
    ("name", "value", "refused"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512,expandable_segments:True", True),
        ("PYTORCH_ALLOC_CONF", "expandable_segments: true", True),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False", False),
    ],
)
def test_allocators_that_sglang_cannot_sleep_with(name: str, value: str, refused: bool) -> None:
    problem = allocator_problem({name: value})
    assert (problem is not None) == refused and (
        problem is None or problem.startswith(f"{name}: SGLang runs without expandable_segments")
    )


@pytest.mark.parametrize(
    ("attention", "set_to", "refused"),
    [
        ("auto", {}, None),
        ("auto", {"NVTE_FUSED_ATTN": "1"}, None),
        ("fused", {"NVTE_FLASH_ATTN": "0"}, None),
        ("auto", {"NVTE_UNFUSED_ATTN": "0"}, "NVTE_UNFUSED_ATTN: 0, and model.attention is auto (unset"),
        ("unfused", {"NVTE_FLASH_ATTN": "1"}, "NVTE_FLASH_ATTN: 1, and model.attention is unfused (unset"),
    ],
)
def test_variables_that_choose_other_kernels_of_attention(
    attention: str, set_to: dict[str, str], refused: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron refuses the same variables, with an AssertionError while it builds the model."""
    from megatron.core.models.common.language_module.language_module import LanguageModule
    from megatron.core.transformer.enums import AttnBackend

    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        monkeypatch.setenv(name, set_to.get(name, ""))
        if name not in set_to:
            monkeypatch.delenv(name)
    asked = SimpleNamespace(config=SimpleNamespace(attention_backend=AttnBackend[attention]))
    if refused is None:
        assert attention_problem(attention, os.environ) == ""
        LanguageModule._set_attention_backend(asked)  # type: ignore[arg-type]
    else:
        assert attention_problem(attention, os.environ).startswith(refused)
        with pytest.raises(AssertionError, match="NVTE_"):
            LanguageModule._set_attention_backend(asked)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("found", "problem"),
    [((9, 19, 0), "cuDNN 9.19.0 is found, and torch was compiled with 9.24.0 (take"), ((9, 25, 1), "")],
)
def test_an_older_cudnn_than_torchs(
    found: tuple[int, ...], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run torch's own check, which a build without CUDA skips."""
    library = SimpleNamespace(
        getVersionInt=lambda: 91900,
        getRuntimeVersion=lambda: found,
        getCompileVersion=lambda: (9, 24, 0),
        is_cuda=True,
    )
    monkeypatch.setattr(torch._C, "_cudnn", library, raising=False)
    name, folder = "torch.backends.cudnn_again", Path(torch.backends.cudnn.__file__).parent
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None
    again = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, again)
    spec.loader.exec_module(again)
    monkeypatch.setattr(torch.backends.cudnn, "version", again.version)
    cudnn_problem.cache_clear()
    try:
        said = [cudnn_problem(), cudnn_problem()]
        assert said[0] == said[1] and said[0].startswith(problem) and bool(said[0]) == bool(problem)
    finally:
        cudnn_problem.cache_clear()


@pytest.mark.parametrize(
    ("addresses", "problem"),
    [(["127.0.1.1", "10.0.0.5"], "resolves to 127.0.1.1"), (["10.0.0.5"], None), ([], "does not")],
)
def test_hostnames(monkeypatch: pytest.MonkeyPatch, addresses: list[str], problem: str | None) -> None:
    def resolve(*_: object, **__: object) -> list[tuple[object, ...]]:
        if not addresses:
            raise socket.gaierror("Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    found = hostname_problem()
    assert (
        (found is None)
        if problem is None
        else (found is not None and problem in found and "GLOO_SOCKET_IFNAME" in found)
    )
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    assert hostname_problem() is None


def test_the_table_of_internals_holds_for_what_is_installed() -> None:
    assert [line for package in read_table() for line in changed(package)] == []


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        (Internal("lib.api", "gone", "reads", "", "x.py"), "is not there"),
        (Internal("lib.gone", "f", "reads", "", "x.py"), "is not there"),
        (Internal("lib.api", "f", "calls", "b new", "x.py"), "has no parameter new"),
        (Internal("lib.api", "f", "calls", "a b", "x.py"), ""),
        (Internal("lib.api", "f", "replaces", "b", "x.py"), "takes a, b and not first b"),
        (Internal("lib", "f", "calls", "a", "x.py"), ""),
        (Internal("lib", "Fields", "calls", "one two", "x.py"), ""),
        (Internal("lib", "Fields", "calls", "three", "x.py"), "has no parameter three"),
        (Internal("lib", "Made", "calls", "anything", "x.py"), ""),
        (Internal("lib", "Made.there", "reads", "", "x.py"), ""),
        (Internal("lib", "Made.inherited", "calls", "self", "x.py"), ""),
        (Internal("lib", "Made.gone", "reads", "", "x.py"), "is not there"),
        (Internal("lib", "Made.gone", "reads", "", "x.py", "3.1"), "is not there"),
        (Internal("lib", "Made.gone", "reads", "", "x.py", "3.2"), ""),
    ],
)
def test_the_check_of_the_table(
    site: Path, monkeypatch: pytest.MonkeyPatch, entry: Internal, problem: str
) -> None:
    """The check parses sources without importing them.

    It finds re-exports, dataclasses and their bases, and attributes that a method sets."""
    install(site, "lib", "3.1", module="lib")
    (site / "lib" / "__init__.py").write_text("from .api import f, Fields\nfrom lib.api import Made\n")
    (site / "lib" / "api.py").write_text(
        "import nothing_of_this_name\ntry:\n    def f(a, b): ...\nexcept ImportError:\n    f = None\n"
        "class Base:\n    one: int\n    def inherited(self): ...\nclass Fields(Base):\n    two: int = 0\n"
        "class Made(Base):\n    def __init__(self, **rest): self.there = 1\n"
    )
    internals._tree.cache_clear()
    monkeypatch.setitem(read_table(), "lib", Package("3.0", [entry]))
    lines = (
        [f"lib 3.1: {entry.module}.{entry.name}: {problem}, which x.py relies on (run with 3.0)"]
        if problem
        else []
    )
    assert changed("lib") == lines


def test_everything_that_megarl_imports_is_in_the_table() -> None:
    """A new import needs an entry in the table, which is checked on each version."""
    import ast

    entries = [entry for package in read_table().values() for entry in package.internals]
    names = {entry.name.partition(".")[0] for entry in entries}
    modules = tuple(entry.module for entry in entries)
    missing = []
    for file in sorted((Path(module.__file__).parents[1]).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in (
                "megatron",
                "sglang",
                "transformer_engine",
            ):
                found = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
                missing += [
                    path
                    for name, path in found.items()
                    if name not in names and not any(m.startswith(path) for m in modules)
                ]
    assert missing == []


LAUNCHED = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "SLURM_JOB_END_TIME": "1790000000",
}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"RANK": "one"}, "RANK: 'one' is not a whole number"),
        ({"RANK": ""}, "RANK: '' is not a whole number"),
        ({"RANK": "-1"}, "RANK: must be 0 to 3, as WORLD_SIZE says (got -1"),
        ({"RANK": "4"}, "RANK: must be 0 to 3, as WORLD_SIZE says (got 4"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE: must be 1 or more (got 0"),
        ({"WORLD_SIZE": "1e3"}, "WORLD_SIZE: '1e3' is not a whole number"),
        ({"LOCAL_WORLD_SIZE": "8"}, "LOCAL_WORLD_SIZE: must be 1 to 4, as WORLD_SIZE says (got 8"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK: must be 0 to 1, as LOCAL_WORLD_SIZE says (got 2"),
        ({"LOCAL_RANK": "x"}, "LOCAL_RANK: 'x' is not a whole number"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT: must be 1 to 65535 (got 70000"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT: 'http' is not a whole number"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR: '': "),
        ({"MASTER_ADDR": "no such host"}, "MASTER_ADDR: 'no such host': "),
        ({"MASTER_ADDR": None}, "RANK: is set, but not MASTER_ADDR (torchrun sets them all; "),
        ({"RANK": None, "MASTER_PORT": None}, "WORLD_SIZE: is set, but not MASTER_PORT, RANK ("),
        ({"SLURM_JOB_END_TIME": "soon"}, "SLURM_JOB_END_TIME: 'soon' is not a time in seconds since 1970"),
        ({"SLURM_JOB_END_TIME": "-5"}, "SLURM_JOB_END_TIME: '-5' is not a time"),
    ],
)
def test_a_variable_of_a_launcher_that_cannot_be_used_is_named(
    changed: dict[str, str | None], said: str
) -> None:
    environment = {name: value for name, value in (LAUNCHED | changed).items() if value is not None}
    with pytest.raises(ConfigError) as error:
        check_launcher(environment)
    assert str(error.value).startswith(said) and "\n" not in str(error.value)


def test_launchers_that_can_be() -> None:
    """Also accepted: a process without a launcher, on a node with a leftover address of another job."""
    check_launcher(LAUNCHED)
    check_launcher({})
    check_launcher({"MASTER_ADDR": "gone", "MASTER_PORT": "1", "SLURM_JOB_END_TIME": "1790000000.5"})


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_what_the_memory_saver_preloads_finds_the_runtime_in_nvidias_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A preloaded object finds its CUDA library only through the wheel's folder.

    Uses real shared objects: without the folder no process starts. Without the library the problem is
    reported. Version 99 of the runtime exists on no machine."""
    wheel, package = tmp_path / "nvidia" / "cu13" / "lib", tmp_path / "torch_memory_saver"
    package.mkdir()
    (package / "__init__.py").touch()
    wheel.mkdir(parents=True)
    source = tmp_path / "empty.c"
    source.write_text("int cudart_is_here(void) { return 1; }")
    runtime = wheel / "libcudart.so.99"
    preloaded = tmp_path / "torch_memory_saver_hook_mode_preload_cu13.abi3.so"
    shared = ["cc", "-shared", "-fPIC"]
    subprocess.run([*shared, source, "-Wl,-soname,libcudart.so.99", "-o", runtime], check=True)
    subprocess.run([*shared, source, "-Wl,--no-as-needed", runtime, "-o", preloaded], check=True)
    alone = subprocess.run(
        [sys.executable, "-S", "-c", ""],
        env={**os.environ, "LD_PRELOAD": str(preloaded)},
        capture_output=True,
    )
    assert alone.returncode == 127
    monkeypatch.syspath_prepend(str(tmp_path))
    assert str(wheel) in cuda_runtime_folders()
    assert memory_saver_problem("13.0") is None
    runtime.unlink()
    line = memory_saver_problem("13.0")
    assert line is not None and "libcudart.so.99" in line and line.endswith(f"({module.INSTALL})")


def test_muon_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "get_version", lambda _: "0.16.1")
    assert muon_problem() == "needs megatron-core 0.18 or later, and there is 0.16.1"
    monkeypatch.setattr(module, "get_version", lambda _: "0.18.2")
    monkeypatch.setattr(module, "find_spec", lambda _: None)
    assert muon_problem() == "needs emerging-optimizers, which is not installed"
    monkeypatch.setattr(module, "find_spec", lambda _: object())
    assert muon_problem() == ""
