"""Output of commands in normal use: help, the resolved configuration, the list of keys."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.cli.configuration import documented
from megarl.cli.main import COMMANDS, _added, main
from megarl.config import Config, load_config
from megarl.config.load import parse_yaml
from megarl.config.schema.section import fields
from tests.cli.scene import Scene


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    try:
        code = main(arguments)
    except SystemExit as exit_:
        code = exit_.code
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    return out


class TestHelp:
    def test_lists_every_command(self, capsys: pytest.CaptureFixture[str]) -> None:
        text = printed(capsys, "--help")
        assert all(re.search(rf"\n  {command}  +[A-Z].* ", text) for command in COMMANDS)

    @pytest.mark.parametrize(
        "command",
        [
            *COMMANDS,
            *(
                "config show",
                "config check",
                "config phases",
                "config docs",
                "data show",
                "data gym",
                "data integers",
            ),
            *("weights plan", "convert to-megatron", "convert to-hf", "convert from-gguf"),
        ],
    )
    def test_of_a_command(self, capsys: pytest.CaptureFixture[str], command: str) -> None:
        text = printed(capsys, *command.split(), "--help")
        assert text.startswith(f"Usage: megarl {command} ")
        assert "--follow" not in text, "what `ablate` says to its runs is nobody else's"
        assert all(len(line) <= 80 for line in text.splitlines())

    def test_version(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert printed(capsys, "--version").startswith("megarl ")

    def test_no_command_is_imported_for_the_list_of_them(self) -> None:
        code = (
            "import sys; from megarl.cli.main import COMMANDS, _added, main; assert main(['--help']) == 0\n"
            "heavy = {'torch', 'pydantic', 'rich', *(place.split(':')[0] for place in COMMANDS.values())}\n"
            "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


class TestCommandsOfOthers:
    """A package next to megarl, with a function and several functions that share their first word."""

    MODULE = '''
from typing import Annotated
from typer import Option, Typer

app = Typer(help="Look after tables.")

def bake(cakes: Annotated[list[int], Option(metavar="N", help="their sizes")], layers: int = 2) -> int:
    """Bake some cakes.

    With cream."""
    print(sum(cakes) * layers)
    return 7

@app.command()
def lay(name: str = "it") -> int:
    """Lay a table with everything that belongs on it, which is said here in more words than fit on a line."""
    print(f"laid {name}")
    return 0
'''

    @pytest.fixture
    def bakery(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        (tmp_path / "bakery_of_a_test.py").write_text(self.MODULE)
        info = tmp_path / "bakery-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bakery\nVersion: 1.0\n")
        names = {"bake": "bake", "table": "app", "train": "bake", "data-bake": "bake", "hot-pot": "bake"}
        points = [f"{name} = bakery_of_a_test:{function}" for name, function in names.items()]
        points.append("stale = bakery_of_yesterday:bake")
        (info / "entry_points.txt").write_text("\n".join(["[megarl.commands]", *points]))
        monkeypatch.syspath_prepend(tmp_path)
        _added.cache_clear()
        yield
        _added.cache_clear()
        sys.modules.pop("bakery_of_a_test", None)

    def test_they_are_listed_without_being_imported(
        self, bakery: None, capsys: pytest.CaptureFixture[str]
    ) -> None:
        text = printed(capsys, "--help")
        assert re.search(r"\n  bake +Bake some cakes\.\n  table +Look after tables\.\n", text)
        assert text.count("\n  train ") == 1, "megarl's own commands cannot be taken over"
        assert "bakery_of_a_test" not in sys.modules

    def test_they_are_called(self, bakery: None, capsys: pytest.CaptureFixture[str]) -> None:
        assert "cakes" in printed(capsys, "bake", "--help")
        assert main(["bake", "--cakes", "1", "2", "--layers", "3"]) == 7
        assert main(["bake", "--cakes", "4", "--cakes", "5", "6"]) == 7
        assert capsys.readouterr().out == "9\n30\n"
        assert main(["table", "lay", "--name", "x"]) == 0
        assert capsys.readouterr().out == "laid x\n"
        assert "more words than" in printed(capsys, "table", "--help")
        assert "completion" not in printed(capsys, "table", "--help")

    def test_they_may_have_two_words(self, bakery: None, capsys: pytest.CaptureFixture[str]) -> None:
        text = printed(capsys, "data", "--help")
        assert re.search(r"\n  bake +Bake some cakes\.\n", text) and "\n  show " in text
        assert "bakery_of_a_test" not in sys.modules and "data-bake" not in printed(capsys, "--help")
        assert main(["data", "bake", "--cakes", "1"]) == 7
        assert main(["hot-pot", "--cakes", "1"]) == 7  # no command `hot` exists, so this is one word

    def test_one_that_is_gone(self, bakery: None, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["stale"]) == 2
        assert capsys.readouterr().err == (
            "megarl: stale: bakery_of_yesterday:bake cannot be imported: No module named "
            "'bakery_of_yesterday' (install its package again)\n"
        )


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("megarl pr", "preflight"),
        ("megarl config ", "show check phases docs"),
        ("megarl train x.yaml rollout.gr", "rollout.group_size="),
        ("megarl plan x.yaml --balance l", "longest"),
        ("megarl convert to-hf --m", "--max-shard-gb"),
    ],
)
def test_what_a_shell_offers(line: str, offered: str) -> None:
    words = line.split(" ")
    asked = {"_MEGARL_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    done = subprocess.run(
        [sys.executable, "-m", "megarl"], capture_output=True, text=True, check=False, env=os.environ | asked
    )
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.split() == offered.split()


class TestConfig:
    def test_show_prints_what_can_be_loaded_again(self, scene: Scene, tmp_path: Path) -> None:
        assert scene.capsys is not None
        text = printed(
            scene.capsys, "config", "show", str(scene.config), "actor.lr=2e-6", "reward.verifier=math"
        )
        (tmp_path / "y.yaml").write_text(text)
        assert load_config(tmp_path / "y.yaml") == load_config(
            scene.config, ["actor.lr=2e-6", "reward.verifier=math"]
        )
        assert parse_yaml(text, "")["rollout"]["dynamic_sampling"]["enabled"] is True, (
            "the preset's switches are shown"
        )

    def test_check(self, scene: Scene) -> None:
        assert scene.capsys is not None
        assert (
            printed(scene.capsys, "config", "check", str(scene.config))
            == f"{scene.config}: the configuration is valid\n"
        )
        text = printed(scene.capsys, "config", "check", str(scene.config), "model.path=/no/such/model")
        assert "the configuration is valid; model.path /no/such/model is not on this machine" in text
        assert not (scene.folder / "run").exists()

    def test_docs_say_everything_about_every_knob(self, capsys: pytest.CaptureFixture[str]) -> None:
        lines = printed(capsys, "config", "docs").splitlines()
        heads, meanings, facts = lines[::3], lines[1::3], lines[2::3]
        knobs = list(documented())
        assert heads == [key for key, _ in knobs] and {key for key, _ in fields(Config)} < set(heads)
        assert "data.eval[].every" in heads and "reward.terms.<name>.weight" in heads
        for (key, field), meaning, fact in zip(knobs, meanings, facts, strict=True):
            extra = field.json_schema_extra
            assert isinstance(extra, dict)
            assert meaning == f"    {field.description}"
            assert str(extra["unit"]) in fact and fact.endswith(f"source: {extra['source']}"), key
        said = dict(zip(heads, facts, strict=True))
        assert said["algorithm.clip_high"] == (
            "    number; default 0.2 (grpo 0.2, dapo 0.28, ppo 0.2, vapo 0.28, tppo 0.28, asyppo 0.28, "
            "gspo 0.0004, cispo 4.0, dppo 0.15, clip_cov 1.0, fipo 0.28, spo 0.28, sao 5.0); "
            "source: DAPO eq. 10, VAPO eq. 8"
        )
        assert said["actor.betas"] == "    list of 2 numbers; default [0.9, 0.999]; source: our choice"
        assert said["parallel.dp"] == "    whole number or null, in devices; default null; source: our choice"
        assert said["recipe"].startswith(
            "    sft or grpo or dapo or ppo or vapo or tppo or sao or vc_ppo or asyppo or "
        )
        assert said["recipe"].endswith("; required; source: our choice")
        assert said["actor.lr"].startswith("    number; default 1.0e-06 (tppo 8.0e-07); source: DAPO")
        assert said["rollout.dynamic_sampling.enabled"].startswith(
            "    true or false; default false (dapo true, cispo true, clip_cov true, kl_cov true, "
            "fipo true); source: DAPO eq. 11"
        )
