"""`megarl demo`: separate folders for recipes and seeds, reused warm starts, untouched user files."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from megarl.cli.main import main
from megarl.config import Config, check_config, load_config
from megarl.config.load import PACKAGE
from megarl.parallel.lease import hold_lease
from megarl.plan.fit import find_problem
from megarl.plan.inputs import make_plan_inputs
from megarl.schedule.identity import identity
from megarl.weights.known_models import KNOWN_MODELS
from megarl_tasks.demo import MARK, MARK_RUN
from megarl_tasks.pretrained import QWEN_05B
from tests.cli.processes import megarl
from tests.cli.scene import Scene
from tests.rehearsal.fakecuda import pretend

ROOT = Path(__file__).parents[2]

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

    def test_a_task_of_another_model(self, scene: Scene) -> None:
        line = scene.refused("demo", "--model", "qwen0.5b", "--task", "sums")
        assert line == "--task: sums is for another model (add --model tiny)"

    @pytest.mark.parametrize("arguments", [("--model", "qwen0.5b"), ("--device", "cuda")])
    def test_no_gpu(
        self, scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
    ) -> None:
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
        monkeypatch.setattr("megarl_tasks.demo.unseen_gpu", lambda _: "torch is a build for CPUs")
        line = scene.refused("demo", *arguments, "--folder", str(tmp_path / "x"))
        assert line.startswith("--device: cuda, but torch sees no GPU: torch is a build for CPUs (")
        assert line.endswith("or add --device cpu)") and not (tmp_path / "x").exists()

    def test_make_asks_for_a_driver_before_it_installs(self, tmp_path: Path) -> None:
        if any(Path(path).exists() for path in ("/proc/driver/nvidia/version", "/dev/dxg")):
            pytest.skip("there is a driver")
        command = ["make", "-n", "--no-print-directory", "demo", "MODEL=qwen0.5b", "DEVICE=cuda"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 2 and not done.stdout
        assert "DEVICE=cuda: no NVIDIA driver is loaded" in done.stderr and done.stderr.count("\n") == 1

    def test_two_at_once(self, scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("megarl.parallel.lease.PATIENCE", 0.1)
        with hold_lease(tmp_path / "demo", "megarl demo", remedy=""):
            (tmp_path / "demo" / MARK).touch()
            line = scene.refused("demo", "--folder", str(tmp_path / "demo"))
        assert line.startswith(f"{tmp_path}/demo: megarl demo runs there since ")
        assert line.endswith("(wait for it, or choose another --folder)")


class TestDevice:
    """The run that `megarl demo` starts on another device."""

    @pytest.fixture
    def started(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> Callable[..., tuple[Config, str]]:
        """Return the configuration that would be trained, and the output; nothing is fetched."""
        configs: list[Config] = []

        def train(file: Path, overrides: Sequence[str]) -> int:
            configs.append(load_config(file, overrides))
            return 0

        monkeypatch.setattr("megarl_tasks.demo.train", train)
        monkeypatch.setattr("megarl_tasks.demo.matrix_rates", lambda _: {"fp32": 80.0, "bf16": 300.0})
        for function in ("_make_tiny", "_make_pretrained"):
            monkeypatch.setattr(f"megarl_tasks.demo.{function}", lambda *_, **__: 0)
        monkeypatch.setattr("megarl_tasks.demo._print_result", lambda *_: None)

        def start(*arguments: str) -> tuple[Config, str]:
            assert main(["demo", "--folder", str(tmp_path / "demo"), *arguments]) == 0
            return configs[-1], capsys.readouterr().out

        return start

    @pytest.mark.parametrize("recipe", ["vapo", "dapo"])
    @pytest.mark.parametrize("engine", ["sglang", "transformers"])
    def test_qwen_on_a_gpu(
        self, started: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str, engine: str
    ) -> None:
        pretend(monkeypatch, devices=1)
        monkeypatch.setattr("megarl_tasks.demo.find_spec", lambda name: engine == "sglang" or None)
        config, printed = started("--model", "qwen0.5b", "--recipe", recipe)
        check_config(config, "x")
        assert (config.recipe, config.parallel.device, config.rollout.engine) == (recipe, "cuda", engine)
        assert config.data.train[0].path == tmp_path / "demo" / "gsm8k_train.jsonl"
        assert f"one GPU: 40 steps of 512 responses, rollouts by {engine} (" in printed
        for layers in ("auto", "portable"):
            plan = make_plan_inputs(
                load_config(f"configs/demos/qwen0.5b_{recipe}.yaml", [f"model.layers={layers}"]),
                {**KNOWN_MODELS["Qwen2.5-Coder-0.5B"], "tie_word_embeddings": False},  # as in the GGUF file
                world=1,
            )
            assert plan.device.memory < 86e9 and find_problem(plan) is None

    def test_qwen_on_a_cpu(self, started: Any) -> None:
        config, printed = started("--model", "qwen0.5b", "--device", "cpu", "steps=2", "rollout.prompts=16")
        check_config(config, "x")
        assert (config.parallel.device, config.rollout.engine) == ("cpu", "transformers")
        assert (config.steps, config.model.dtype, config.update.tokens_per_micro_batch) == (2, "bf16", 2048)
        assert "2 steps of 128 responses" in printed and "on CPUs each step takes hours (steps=2 " in printed

    def test_a_folder_with_nothing_but_fetched_files(self, started: Any, tmp_path: Path) -> None:
        arguments = ("--model", "qwen0.5b", "--device", "cpu")
        folder = tmp_path / "demo"
        folder.mkdir()
        for name in (QWEN_05B.wheels[2].file, "gsm8k_train.jsonl"):
            (folder / name).touch()
        (folder / "thesis.txt").write_text("precious")
        assert main(["demo", *arguments, "--folder", str(folder)]) == 2
        (folder / "thesis.txt").unlink()
        started(*arguments)
        assert (folder / MARK).exists()

    def test_other_models_on_a_gpu(self, started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        pretend(monkeypatch, devices=1)
        monkeypatch.setattr("megarl_tasks.demo.find_spec", lambda name: True)
        for model, engine, dtype in (("tiny", "transformers", "fp32"), ("smollm2", "sglang", "bf16")):
            for arguments in ((), ("--recipe", "dapo"), ("--task", "calculator"))[
                : 2 if model == "tiny" else 3
            ]:
                config, _ = started("--model", model, "--device", "cuda", *arguments)
                check_config(config, "x")
                parallel = config.parallel
                assert (parallel.device, parallel.tp, parallel.dp) == ("cuda", 1, 1)
                assert (config.rollout.engine, config.model.dtype) == (engine, dtype)

    def test_an_override_wins(self, started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        pretend(monkeypatch, devices=1)
        arguments = ("--model", "smollm2", "rollout.engine=transformers", "steps=3")
        config, _ = started(*arguments, "--device", "cuda")
        assert (config.parallel.device, config.rollout.engine, config.steps) == ("cuda", "transformers", 3)
        config, _ = started(*arguments)
        assert config.parallel.device == "cpu"
        config, _ = started(*arguments, "--device", "auto")
        assert config.parallel.device == "cuda"

    def test_auto_with_a_driver_that_torch_does_not_use(
        self, scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
        arguments = ("demo", "--folder", str(tmp_path / "x"), "--device", "auto")
        for module in ("megarl_tasks.demo", "megarl.parallel.runtime"):
            monkeypatch.setattr(f"{module}.unseen_gpu", lambda _: "torch is a build for CPUs")
        line = scene.refused(*arguments)
        assert line.startswith("--device: auto, but torch sees no GPU: torch is a build for CPUs (")
