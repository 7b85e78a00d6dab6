"""`megarl demo`: separate folders for recipes and seeds, reused warm starts, untouched user files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl.config import load_config
from megarl.config.load import PACKAGE
from megarl.parallel.lease import hold_lease
from megarl.schedule.identity import identity
from megarl_tasks.demo import MARK, MARK_RUN
from tests.cli.processes import megarl
from tests.cli.scene import Scene

# A warm start and runs that take seconds, each in one process.
WARM_START = (
    f"base: {PACKAGE}/configs/demos/sft.yaml\nsteps: %d\nparallel: {{dp: 1}}\nlog: {{report: false}}\n"
)
SHORT = (
    "steps=1",
    "rollout.prompts=8",
    "update.mini_batch=64",
    "parallel.tp=1",
    "evaluation.max_problems=16",
    "log.samples=0",
)
VAPO = (*SHORT, "value_pretraining.steps=1", "value_pretraining.epochs=1")


def demo(folder: Path, *arguments: str) -> str:
    done = megarl("demo", *arguments, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def kept(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Return the modification time and content of every file below a folder."""
    return {
        str(f.relative_to(folder)): (f.stat().st_mtime_ns, f.read_bytes())
        for f in folder.rglob("*")
        if f.is_file()
    }


def weights(folder: Path) -> bytes:
    return (folder / "hf" / "model.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.timeout(1800)  # ten runs, one after the other; each imports torch and Megatron
def test_recipes_and_seeds_lie_side_by_side(tmp_path: Path) -> None:
    (tmp_path / "configs" / "demos").mkdir(parents=True)
    (tmp_path / "configs" / "demos" / "sft.yaml").write_text(WARM_START % 8)
    runs = tmp_path / "runs" / "demo"

    assert "warm start: supervised training" in demo(tmp_path, *VAPO)
    first = {part: kept(runs / part) for part in ("sft", "vapo")}
    bits = {part: weights(runs / part) for part in first}

    # another recipe leaves the first one's run and warm start unchanged
    said = demo(tmp_path, "--recipe", "dapo", *SHORT)
    assert "warm start: that of runs/demo/sft is used again" in said
    assert {part: kept(runs / part) for part in first} == first and (runs / "dapo" / "report.html").is_file()

    # and so does another seed, whose run_dir the user has chosen
    said = demo(tmp_path, "--seed", "1", *VAPO, "run_dir=elsewhere")
    assert "warm start: supervised training" in said and "accuracy on 16 held-out problems (95 %" in said
    assert "report:     elsewhere/report.html" in said and "HF model:   elsewhere/hf" in said
    assert {part: kept(runs / part) for part in first} == first
    assert weights(runs / "seed-1" / "sft") != bits["sft"] and not (runs / "seed-1" / "vapo").exists()

    demo(tmp_path, *VAPO)  # the reused warm start gives a bitwise equal run
    assert (
        weights(runs / "vapo") == bits["vapo"]
        and kept(runs / "vapo") != first["vapo"]
        and kept(runs / "sft") == first["sft"]
    )

    # a damaged warm start is repeated, with a bitwise equal result
    (runs / "sft" / "hf" / "model.safetensors").write_bytes(bits["sft"][:-1])
    assert "warm start: supervised training" in demo(
        tmp_path, *VAPO, "log.report=false", "checkpoint.export_hf=false"
    )
    assert weights(runs / "sft") == bits["sft"] and not (runs / "vapo" / "hf").exists()


class TestIdentity:
    @pytest.fixture
    def configured(self, scene: Scene) -> Any:
        return lambda *overrides: identity(load_config(scene.config, overrides))

    @pytest.mark.parametrize(
        "override", ["seed=1", "parallel.tp=1", "steps=2", "actor.lr=2e-6", "parallel.threads=2"]
    )
    def test_settings(self, configured: Any, override: str) -> None:
        assert configured() == configured() != configured(override)
        assert configured("run_dir=elsewhere") == configured(), "where it lies does not matter"

    def test_what_it_starts_from(
        self, configured: Any, model_copy: Path, scene: Scene, tmp_path: Path
    ) -> None:
        assert configured(f"model.path={model_copy}") == configured()
        (model_copy / "tokenizer_config.json").write_text("{}")
        assert configured(f"model.path={model_copy}") != configured()
        other = tmp_path / "other.jsonl"
        other.write_text((scene.folder / "train.jsonl").read_text().replace("2", "3"))
        assert configured(f"data.train=[{other}]") != configured()

    @pytest.mark.parametrize("part", ["checksum_code", "versions", "torch.backends.cpu.get_cpu_capability"])
    def test_code_packages_and_processor(
        self, configured: Any, part: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = configured()
        monkeypatch.setattr(f"megarl.schedule.identity.{part}", lambda: {"megarl": "0"})
        assert configured() != before


class TestRefusals:
    """Refused before any write: the existing content of run_dir would be deleted."""

    def test_a_run_dir_that_is_somebody_elses(self, scene: Scene, tmp_path: Path) -> None:
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "thesis.txt").write_text("precious")
        line = scene.refused("demo", "--folder", str(tmp_path / "demo"), f"run_dir={tmp_path}/mine")
        assert (
            line
            == f"{tmp_path}/mine: exists and was not made by megarl demo (choose another run_dir or --folder)"
        )
        assert (tmp_path / "mine" / "thesis.txt").exists() and not (tmp_path / "demo").exists()

    @pytest.mark.parametrize(
        ("inside", "says"),
        [
            ("", "run_dir: DEMO: is made anew, and holds DEMO/sft/hf, which the run starts from"),
            ("/sft", "configs/demos/vapo.yaml: model.path: DEMO/sft/hf is one of "),
            ("/sft/hf", "configs/demos/vapo.yaml: run_dir: DEMO/sft/hf is inside model.path DEMO/sft/hf"),
        ],
    )
    def test_a_run_dir_with_the_warm_start_in_it(
        self, scene: Scene, tmp_path: Path, inside: str, says: str
    ) -> None:
        line = scene.refused("demo", "--folder", f"{tmp_path}/demo", f"run_dir={tmp_path}/demo{inside}")
        assert line.startswith(says.replace("DEMO", f"{tmp_path}/demo"))
        assert not (tmp_path / "demo").exists()

    def test_a_model_of_the_run_that_is_to_be_deleted(self, scene: Scene, tmp_path: Path) -> None:
        """`model.path=` the last run's result, to continue from it."""
        (tmp_path / MARK).touch()
        (tmp_path / "vapo" / "hf").mkdir(parents=True)
        (tmp_path / "vapo" / MARK_RUN).touch()
        line = scene.refused("demo", "--folder", str(tmp_path), f"model.path={tmp_path}/vapo/hf")
        assert line.startswith(f"configs/demos/vapo.yaml: model.path: {tmp_path}/vapo/hf is one of ")
        assert (tmp_path / "vapo" / "hf").is_dir()

    def test_what_is_of_the_tiny_model_alone(self, scene: Scene, tmp_path: Path) -> None:
        pretrained = ("demo", "--model", "smollm2", "--folder", str(tmp_path / "x"))
        assert scene.refused(*pretrained, "--experts", "4").startswith(
            "--experts: is only for the tiny model"
        )
        line = scene.refused(*pretrained, "--recipe", "sao")
        assert line == "--recipe: with --model smollm2 it is vapo or dapo (got sao)"

    def test_two_at_once(self, scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("megarl.parallel.lease.PATIENCE", 0.1)
        with hold_lease(tmp_path / "demo", "megarl demo", remedy=""):
            (tmp_path / "demo" / MARK).touch()
            line = scene.refused("demo", "--folder", str(tmp_path / "demo"))
        assert line.startswith(f"{tmp_path}/demo: megarl demo runs there since ")
        assert line.endswith("(wait for it, or choose another --folder)")
