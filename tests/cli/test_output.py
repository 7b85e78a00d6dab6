"""What the commands print when all is well: help, the resolved configuration, the list of knobs."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.cli.configuration import documented
from megarl.cli.main import main
from megarl.config import Config, load_config
from megarl.config.load import parse_yaml
from megarl.config.schema import fields
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
    COMMANDS = ("train", "eval", "config", "data", "report", "demo")

    def test_lists_every_command(self, capsys: pytest.CaptureFixture[str]) -> None:
        text = printed(capsys, "--help")
        assert all(f"\n    {command} " in text for command in self.COMMANDS)

    @pytest.mark.parametrize(
        "command", [*COMMANDS, "config show", "config check", "config docs", "data show", "data integers"]
    )
    def test_of_a_command(self, capsys: pytest.CaptureFixture[str], command: str) -> None:
        text = printed(capsys, *command.split(), "--help")
        assert text.startswith(f"usage: megarl {command} ")
        assert "--follow" not in text, "what `ablate` says to its runs is nobody else's"
        assert all(len(line) <= 80 for line in text.splitlines())

    def test_version(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert printed(capsys, "--version").startswith("megarl ")


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
            == f"{scene.config}: the configuration holds\n"
        )
        text = printed(scene.capsys, "config", "check", str(scene.config), "model.path=/no/such/model")
        assert "the configuration holds; model.path /no/such/model is not on this machine" in text
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
            "    number; default 0.2 (grpo 0.2, dapo 0.28, ppo 0.2, vapo 0.28, gspo 0.0004, cispo 4.0, "
            "sao 3.0); source: DAPO eq. 8, VAPO eq. 8: 0.28"
        )
        assert said["actor.betas"] == "    list of 2 numbers; default [0.9, 0.999]; source: our choice"
        assert said["parallel.dp"] == "    whole number or null, in devices; default null; source: our choice"
        assert said["recipe"].startswith("    sft or grpo or dapo or ppo or vapo or sao or vc_ppo or orz or ")
        assert said["recipe"].endswith("; required; source: our choice")
        assert said["actor.lr"].startswith("    number; default 1.0e-06; source: DAPO")
        assert said["rollout.dynamic_sampling.enabled"].startswith(
            "    true or false; default false (dapo true, cispo true); source: DAPO eq. 11"
        )
