"""Plugins of packages next to megarl: found by entry points, one line if the installation lacks them."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from megarl.config.errors import ConfigError
from megarl.config.plugins import plugin, plugins
from megarl.rewards.verdict import verifier_path

GROUPS = ("commands", "verifiers", "answers", "generators", "reports", "abilities")
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("group", GROUPS)
def test_what_is_declared_is_there(group: str) -> None:
    names = plugins(f"megarl.{group}")
    assert names, "megarl was installed before its entry points were there: make install"
    for name, one in names.items():
        assert plugin(f"megarl.{group}", name) is not None
        assert one.value.partition(".")[0] in (
            "megarl_experiments",
            "megarl_report",
            "megarl_tasks",
            "megarl_verifier",
        )


def test_a_verifiers_name_is_its_path() -> None:
    assert verifier_path("mine:judge") == "mine:judge"
    for name in ("code", "code_all", "dapo", "math"):
        module, _, function = verifier_path(name).partition(":")
        assert callable(getattr(import_module(module), function))
    with pytest.raises(
        ConfigError,
        match=r"unknown verifier 'minerva' \(use code, code_all, dapo, math, judge or package.module:fun",
    ):
        verifier_path("minerva")


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (
            "from megarl.cli.main import main; sys.exit(main(['report', 'x']))",
            "entry point report of megarl.commands",
        ),
        (
            "from megarl.cli.main import main; sys.exit(main(['data', 'gym']))",
            "entry point data-gym of megarl.comm",
        ),
        (
            "from megarl.cli.ranks import exit_code; from megarl.rewards import get_verifier\n"
            "sys.exit(exit_code(lambda: get_verifier('math')))",
            "reward.verifier: unknown verifier 'math'",
        ),
    ],
)
def test_an_installation_from_before(tmp_path: Path, program: str, said: str) -> None:
    """A checkout installed before plugins existed: one line explains how to update it."""
    (tmp_path / "megarl-0.0.1.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: megarl\nVersion: 0.0.1\n"
    (tmp_path / "megarl-0.0.1.dist-info" / "METADATA").write_text(metadata)
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{program}"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert said in done.stderr and "run `make install`, or `pip install -e .`, again" in done.stderr
