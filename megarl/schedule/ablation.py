"""The runs of an ablation as they lie on disk: what each is to be, what it starts from, whether it is finished and still the same."""

from __future__ import annotations

import hashlib
import importlib
import json
import platform
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import megarl
from megarl.config import dump_config, load_config
from megarl.config.ablation import AblationRow, AblationTable
from megarl.config.errors import ConfigError
from megarl.config.load import set_key
from megarl.config.schema import Config
from megarl.observe.runs import read_metrics
from megarl.parallel.jobs import Job
from megarl.schedule.preflight import versions

MARK = "ablation.json"  # in what was made here; in a run's folder with `seconds` once it has ended well
PLAN = "planned.yaml"
LOG = "log.txt"
OURS = ("seed", "run_dir", "model.path", "data.train", "data.eval")
ONE_PROCESS = ("parallel.tp=1", "parallel.pp=1", "parallel.dp=1", "log.report=false", "log.terminal=plain", "checkpoint.every=0")
NOTHING_KEPT = ("checkpoint.export_hf=false", "log.samples=0")


@dataclass(frozen=True)
class Settings:
    """How the command was given. rows: slugs, none for all; limit: seconds a run; overrides: for the rows."""

    folder: Path
    seeds: tuple[int, ...]
    rows: tuple[str, ...] = ()
    jobs: int = 1
    limit: float = 1800.0
    fresh: bool = False
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class Planned:
    """One run as it is to be, in `config.run_dir`; the warm start of a seed, or a row with a seed."""

    name: str
    seed: int
    config: Config
    row: str = ""

    @property
    def folder(self) -> Path:
        return self.config.run_dir

    def inputs(self) -> str:
        """A checksum of what the run starts from: weights, tokenizer and problems."""
        return inputs(self.config)

    def job(self) -> Job:
        """Makes the run's folder anew and gives the command that fills it."""
        make_anew(self.folder)
        write_json(self.folder / MARK, {"inputs": self.inputs(), "code": _code()})
        (self.folder / PLAN).write_text(dump_config(self.config), encoding="utf-8")
        return Job(self.name, ("train", str(self.folder / PLAN)), self.folder / LOG)

    def mark_finished(self, seconds: float) -> None:
        write_json(self.folder / MARK, {**self.mark(), "seconds": round(seconds, 1)})

    def mark(self) -> dict[str, Any]:
        """What was noted of the run when it started and when it ended."""
        return _read_json(self.folder / MARK)

    def seconds(self) -> float | None:
        """How long the finished run took; None where there is none. ConfigError where the folder is somebody else's."""
        if not self.folder.exists() or not any(self.folder.iterdir()):
            return None
        if not (self.folder / MARK).is_file():
            raise ConfigError(f"{self.folder}: exists and was not made by megarl ablate (choose another --folder)")
        seconds = self.mark().get("seconds")
        return seconds if seconds is not None and self._has_ended() else None

    def _has_ended(self) -> bool:
        if self.config.recipe == "sft":
            return (self.folder / "hf" / "config.json").is_file()
        return self.config.steps in self.curve()

    def curve(self) -> dict[int, float]:
        """step -> accuracy on the held-out problems."""
        return {
            r["step"]: r["eval/avg"] for r in read_metrics(self.folder).records if r["stage"] == "eval" and r.get("eval/avg") is not None
        }

    def changed(self) -> str:
        """What is other today than when the finished run was made; empty where nothing is."""
        try:
            then, now = (_settings(config) for config in (load_config(self.folder / PLAN), self.config))
        except ConfigError as error:
            return str(error)
        changed = [f"{key} {then.get(key)}, now {now.get(key)}" for key in {**then, **now} if then.get(key) != now.get(key)]
        if not changed and self.mark().get("inputs") != self.inputs():
            changed = ["the model or the data that it starts from"]
        return "; ".join(changed)


def task_writer(name: str) -> Callable[[Path, int], None]:
    """What `module:function` names; ConfigError where there is none."""
    module, _, attribute = name.partition(":")
    try:
        found: Callable[[Path, int], None] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"task: {name}: {error} (it must be module:function)") from None
    return found


def _seed_folder(settings: Settings, seed: int) -> Path:
    return settings.folder / "warm_start" / f"seed-{seed}"


def warm_start(table: AblationTable, settings: Settings, seed: int) -> Planned:
    """The supervised training of a seed, which all rows start from."""
    folder = _seed_folder(settings, seed)
    task = folder / "task"
    ours = [set_key("seed", seed), set_key("data.train", [task / "sft.jsonl"]), set_key("model.path", task / "model")]
    config = load_config(
        table.folder / table.warm_start, [*ONE_PROCESS, "checkpoint.export_hf=true", *ours, set_key("run_dir", folder / "sft")]
    )
    return Planned(f"warm start, seed {seed}", seed, config)


def row_run(table: AblationTable, settings: Settings, row: AblationRow, seed: int) -> Planned:
    """A row with a seed."""
    folder = _seed_folder(settings, seed)
    ours = (
        set_key("seed", seed),
        set_key("data.train", [folder / "task" / "train.jsonl"]),
        set_key("data.eval", [folder / "task" / "eval.jsonl"]),
        set_key("model.path", folder / "sft" / "hf"),
        set_key("run_dir", settings.folder / table.name / row.slug / f"seed-{seed}"),
    )
    config = table.config(row, (*ONE_PROCESS, *NOTHING_KEPT, *settings.overrides, *ours))
    return Planned(f"{row.name}, seed {seed}", seed, config, row.slug)


def make_task(table: AblationTable, settings: Settings, seed: int) -> None:
    """The task's files; made again to see whether the task is still the one that was run."""
    folder = _seed_folder(settings, seed)
    task, made = folder / "task", folder / "task.new"
    shutil.rmtree(made, ignore_errors=True)
    task_writer(table.task)(made, seed)
    if task.exists() and _contents(task) != _contents(made):
        if not settings.fresh:
            raise ConfigError(f"{task}: another task than {table.task} makes today (give --fresh to start over, or another --folder)")
        shutil.rmtree(task)
    if task.exists():
        shutil.rmtree(made)
    else:
        made.rename(task)


def make_anew(folder: Path) -> None:
    """Empties a folder, private to the user. It goes as a whole: one that is half deleted would have lost its mark."""
    old = folder.with_name(f"{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
        shutil.rmtree(old)
    folder.mkdir(parents=True, mode=0o700)


def identity(config: Config) -> dict[str, Any]:
    """Everything that the bits of a run's result depend on. Two runs of which it is equal end in the same weights."""
    models = [line for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if line.startswith("model name")]
    return {
        "settings": _settings(config),  # layout and seed among them
        "inputs": inputs(config),
        "code": _code(),
        "versions": {"python": platform.python_version(), **versions()},
        "processor": [torch.backends.cpu.get_cpu_capability(), *models[:1]],  # kernels are chosen by it
    }


def inputs(config: Config) -> str:
    """A checksum of what a run starts from: weights, tokenizer and problems."""
    return checksum([*files_of(config.model.path), *config.data.train, *config.data.eval])


def files_of(folder: Path) -> list[Path]:
    """The files in a folder, by name."""
    return [file for file in sorted(folder.iterdir()) if file.is_file()]


def checksum(files: Sequence[Path]) -> str:
    """One checksum for the contents of all these files."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _settings(config: Config) -> dict[str, Any]:
    """What must be equal for two runs to be the same: all but where they lie, since `inputs` says what lies there."""

    def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
        leaves: dict[str, Any] = {}
        for key, value in tree.items():
            leaves |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
        return leaves

    return {key: value for key, value in flat(config.model_dump(mode="json")).items() if key not in OURS or key == "seed"}


def _code() -> str:
    """A checksum of megarl's own files, so that a table says whether all its runs were made by the same code."""
    return checksum(sorted(Path(megarl.__file__).parent.rglob("*.py")))[:10]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except ValueError:  # cut when its writer was killed: the run is not finished
        return {}


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
