"""README and docs can be followed: links and names exist, documented commands and examples run."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megarl.cli.main import Command, main
from megarl.config import Config, check_config, load_config
from megarl.config.load import parse_yaml
from megarl.config.recipes import PRESETS
from megarl.config.schema import RewardConfig
from megarl.config.schema.section import fields
from tests.commands import run_command

ROOT = Path(__file__).parents[2]
ROOT_PAGES = ("README.md", "CONTRIBUTING.md", "examples/README.md")
PAGES = [*(ROOT / name for name in ROOT_PAGES), *sorted((ROOT / "docs").glob("*.md"))]
EVIDENCE = sorted((ROOT / "docs" / "evidence").rglob("*.md"))  # records; their commands may be outdated
KNOBS = dict(fields(Config))
OWN_TASK = ROOT / "docs" / "your_own_task.md"
OURS = ("sums.yaml", "configs/x.yaml")  # files that the reader creates


def blocks(page: Path, language: str) -> list[str]:
    """Return the fenced blocks of a page that are marked with `language`."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), flags=re.M | re.S)


def commands(page: Path, program: str) -> Iterator[list[str]]:
    """Yield the arguments of each documented command of `program`, without comments."""
    for block in blocks(page, "bash"):
        for line in block.splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == [program]:
                yield words[1:]


def written(page: str) -> dict[str, str]:
    """Return the files that a page shows: blocks whose first line is a comment with a file name."""
    text = (ROOT / "docs" / page).read_text()
    return dict(re.findall(r"^```\w+\n# (\w+\.\w+)\n(.*?)^```$", text, flags=re.M | re.S))


def test_there_is_something_to_check() -> None:
    assert len(PAGES) >= 8
    assert sum(len(list(commands(page, "megarl"))) for page in PAGES) >= 10


@pytest.mark.parametrize("page", PAGES + EVIDENCE, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target.split("#")[0]).exists(), target
    for name in re.findall(r"\bconfigs/[\w/]+\.yaml", text):
        assert name in OURS or (ROOT / name).is_file(), name
    for name in re.findall(r"\bbenchmarks/\w+\.py|\btests/[\w/]+\.py|\bmegarl\w*/[\w/]+\.py", text):
        assert (ROOT / name).is_file(), name


@pytest.mark.parametrize("page", PAGES + EVIDENCE, ids=lambda page: page.name)
def test_named_functions_and_tests_exist(page: Path) -> None:
    text = page.read_text()
    for module, name in re.findall(r"`(megarl\w*(?:\.\w+)+):(\w+)`", text):
        assert hasattr(importlib.import_module(module), name), f"{module}:{name}"
    for file, name in re.findall(r"\b([\w/]+\.py)::(\w+)", text):
        assert re.search(
            rf"^(def|class) {name}\b", (ROOT / "tests" / file.removeprefix("tests/")).read_text(), flags=re.M
        ), f"{file}::{name}"


WRITTEN = [page for page in PAGES if page.name != "keys.md"]  # keys.md is generated from the schema


@pytest.mark.parametrize("page", WRITTEN + EVIDENCE, ids=lambda page: page.name)
def test_named_keys_exist(page: Path) -> None:
    sections = {key.split(".")[0] for key in KNOBS if "." in key}
    text = re.sub(r"^```text\n.*?^```$", "", page.read_text(), flags=re.M | re.S)  # output of programs
    for key in re.findall(r"(?<![\w/.-])([a-z_]+(?:\.[a-z_]+)+)(?![\w/(-])", text):
        if key.split(".")[0] in sections and key.rsplit(".", 1)[1] not in (
            "py",
            "json",
            "jsonl",
            "html",
            "md",
            "yaml",
            "safetensors",
        ):
            assert key in KNOBS or any(known.startswith(f"{key}.") for known in KNOBS), key


def test_every_equation_has_a_function_and_a_test() -> None:
    """algorithms.md covers DAPO's equations 1 to 13 and VAPO's 1 to 10.

    Tests above check that the names in it exist.
    """
    rows = re.findall(
        r"^\| (DAPO|VAPO) eq\. (\d+) \|[^|]*\|([^|]*)\|([^|]*)\|$",
        (ROOT / "docs" / "algorithms.md").read_text(),
        flags=re.M,
    )
    assert [(paper, int(number)) for paper, number, *_ in rows] == [("DAPO", n) for n in range(1, 14)] + [
        ("VAPO", n) for n in range(1, 11)
    ]
    for *equation, functions, tests in rows:
        assert re.fullmatch(r"\s*(`megarl\w*(?:\.\w+)+:\w+`(, )?)+\s*", functions), equation
        assert re.fullmatch(r"\s*(`[\w/]+\.py::test_\w+`(, )?)+\s*", tests), equation
    known = {(paper, number) for paper, number, *_ in rows}
    for key, field in KNOBS.items():
        source = str((field.json_schema_extra or {}).get("source"))
        assert set(re.findall(r"\b(DAPO|VAPO) eq\. (\d+)", source)) <= known, key


def test_the_table_of_recipes_is_that_of_the_presets() -> None:
    rows = re.findall(
        r"^\| (`.*) \| (.*) \| (.*) \| (.*) \| (.*) \|$",
        (ROOT / "docs" / "algorithms.md").read_text(),
        flags=re.M,
    )
    assert len(rows) >= 9
    for keys, *cells in rows:
        names = re.findall(r"`([\w.]+)`", keys.split("(")[0])
        for recipe, cell in zip(("grpo", "dapo", "ppo", "vapo"), cells, strict=True):
            values = re.split(r" / | x ", re.sub(r" \(.*\)", "", cell))
            for key, value in zip(names, values, strict=False):
                if value != "-":
                    assert preset(recipe, key) == value, (recipe, key)


def preset(recipe: str, key: str) -> str:
    """Return a key's value under a recipe alone, as the table writes it."""
    found: object = PRESETS[recipe]
    for part in key.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    value = KNOBS[key].default if found is None else found
    return (
        str(value).lower()
        if isinstance(value, bool)
        else f"{value:g}"
        if isinstance(value, float) and value != 1.0
        else str(value)
    )


def test_ablation_rows_load() -> None:
    text = (ROOT / "docs" / "algorithms.md").read_text().split("## Ablation rows")[1]
    base = "configs/vapo_32b.yaml"
    rows = 0
    for line in text.splitlines():
        overrides = re.findall(r"`([\w.]+=\S+?)`", line)
        base = "configs/dapo_32b.yaml" if "progressive table" in line else base
        if line.startswith("|") and overrides:
            check_config(load_config(ROOT / base, overrides), base)
            rows += 1
    assert rows == 12


@pytest.mark.parametrize(
    "arguments",
    [
        command
        for page in PAGES
        for command in commands(page, "megarl")
        if command[0] == "config" and command[-1] != "sums.yaml"
    ],
    ids=" ".join,
)
def test_config_commands(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)  # independent of this checkout's runs/
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    expected = {
        "show": "recipe:",
        "check": "the configuration is valid",
        "docs": "update.mini_batch",
        "phases": "weight_transfer",
    }
    assert expected[arguments[1]] in printed


@pytest.mark.parametrize(
    "arguments", [c for page in PAGES for c in commands(page, "megarl") if c[0] != "config"], ids=" ".join
)
def test_other_commands_are_understood(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Documented commands too slow to run here are parsed, and their configuration is consistent."""
    taken: list[dict[str, Any]] = []
    monkeypatch.setattr(Command, "invoke", lambda self, context: taken.append(context.params))
    assert main(arguments) == 0
    config = taken[0].get("path")
    if config is not None and str(config) not in OURS:
        check_config(load_config(ROOT / config, taken[0]["overrides"]), str(config))


@pytest.mark.parametrize(
    ("page", "arguments"),
    [
        ("docs/configuration.md", ["config", "show", "configs/demos/vapo.yaml", "rollout.groupsize=4"]),
        ("docs/sglang.md", ["train", "configs/vapo_32b.yaml"]),
    ],
)
def test_messages_are_those_that_are_printed(
    page: str, arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(arguments) == 2
    assert capsys.readouterr().err.strip() in (ROOT / page).read_text()


def test_jobs_are_there_and_take_their_overrides() -> None:
    """`sbatch FILE key=value`; tests/slurm tests that such jobs run."""
    found = [words for page in PAGES for words in commands(page, "sbatch")]
    assert len(found) >= 3
    for words in found:
        file = next(word for word in words if word.endswith(".sbatch"))
        config = re.search(r"configs/(?!demos/sft)[\w/]+\.yaml", (ROOT / file).read_text())
        assert config is not None
        load_config(ROOT / config[0], words[words.index(file) + 1 :])


def test_sweeps_resolve() -> None:
    """`python tools/launch.py`; tests/launch tests that NeMo-Run runs the sweeps."""
    spec = importlib.util.spec_from_file_location("launch", ROOT / "tools" / "launch.py")
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    found = [
        words[1:] for page in PAGES for words in commands(page, "python") if words[:1] == ["tools/launch.py"]
    ]
    assert len(found) >= 3
    for words in found:
        given = tool.parse(words)
        given.configs = [ROOT / path for path in given.configs]
        assert list(tool.jobs(given))


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for page in PAGES:
        for words in commands(page, "make"):
            assert re.search(rf"^{words[0]}:", makefile, flags=re.M), words


def test_one_answer_to_which_python() -> None:
    """README, guides and `make` follow pyproject.toml's `>=3.11` or `>=3.11,<3.14`."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    bounds = re.fullmatch(r">=3\.(\d+)(?:,<3\.(\d+))?", settings["project"]["requires-python"])
    assert bounds is not None
    least, above = int(bounds[1]), int(bounds[2] or 0)
    wanted = f"Python 3.{least} or newer" + (f", up to 3.{above - 1}" if above else "")
    for file in ("README.md", "CONTRIBUTING.md", "docs/first_run.md", "Makefile"):
        first = re.search(
            r"Python (?:>= ?)?3\.\d+(?: or newer)?(?:, up to 3\.\d+)?", (ROOT / file).read_text()
        )
        assert first is not None and first[0] == wanted, file
    check = next(
        line for line in (ROOT / "Makefile").read_text().splitlines() if "sys.version_info <" in line
    )
    assert (
        f"version_info < (3, {least}))" in check
        and f"older than Python 3.{least} (set PYTHON=python3.{least})" in check
    )
    assert (
        settings["tool"]["ruff"]["target-version"] == f"py3{least}"
        and settings["tool"]["mypy"]["python_version"] == f"3.{least}"
    )


@pytest.mark.parametrize(
    "page",
    # Blocks of the excluded pages run in test_extending.py, test_episodes.py and below.
    [page for page in PAGES if page.name not in ("your_own_task.md", "extending.md", "episodes.md")],
    ids=lambda page: page.name,
)
def test_python_blocks_run(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for block in blocks(page, "python"):
        exec(compile(block, str(page), "exec"), {})
        assert capsys.readouterr().out


@pytest.fixture
def own_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with the files that the reader of your_own_task.md writes."""
    files = written(OWN_TASK.name)
    assert set(files) == {"make_sums.py", "tolerance.py", "brevity.py", "sums.yaml"}
    for name, body in files.items():
        (tmp_path / name).write_text(body)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    exec(compile(files["make_sums.py"], "make_sums.py", "exec"), {})
    return tmp_path


def test_generated_problems_on_the_page(tmp_path: Path) -> None:
    """The page's entries are valid; tasks and parameters are checked if reasoning-gym is installed."""
    from megarl.data.generated import check_tasks, gym_entries

    (block,) = (block for block in blocks(OWN_TASK, "yaml") if "- gym:" in block)
    rest = "recipe: dapo\nrun_dir: x\nsteps: 1\nmodel: {path: m}\n"
    (tmp_path / "gym.yaml").write_text(rest + block)
    config = load_config(tmp_path / "gym.yaml")
    check_config(config, "gym.yaml")
    entries = gym_entries(config.data)
    assert list(entries) == ["data.train[0].gym", "data.eval[0].gym"]
    assert entries["data.train[0].gym"].tasks["chain_sum"].parameters == {"min_terms": 2, "max_terms": 3}
    if importlib.util.find_spec("reasoning_gym"):
        check_tasks(entries)


def test_own_task(own_task: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from megarl.data.prompts import validate_files
    from megarl.rewards.pool import VerifierPool

    train, held_out = (
        [json.loads(line) for line in (own_task / f"sums_{part}.jsonl").read_text().splitlines()]
        for part in ("train", "eval")
    )
    assert len(held_out) == 200 and len(train) > 1900
    assert not {row["question"] for row in train} & {row["question"] for row in held_out}
    assert main(["config", "check", "sums.yaml"]) == 0
    config = load_config("sums.yaml")
    validate_files(config.data)
    with VerifierPool(config.reward.verifier, 1, 10.0) as pool:
        verdicts = pool.verify(
            [("1+1=2\nAnswer: 23", "24"), ("Answer: 22", "24"), ("23", "24"), ("Answer: many", "24")]
        )
    assert [verdict.correct for verdict in verdicts] == [True, False, False, False]
    assert verdicts[0].extracted == "23"
    (terms,) = (block for block in blocks(OWN_TASK, "yaml") if "  terms:" in block)
    reward = parse_yaml(terms, "")["reward"]
    with VerifierPool("dapo", terms=RewardConfig(**reward).terms) as pool:
        right, wrong = pool.verify(
            [("Answer: 3", "3", 20, 80, False), ("<think></think>\\boxed{4}", "3", 20, 80, False)]
        )
    assert right.terms == {"format": 1.0, "tags": 0.0, "brevity": 0.75}
    assert wrong.terms == {"format": 1.0, "tags": 1.0, "brevity": 0.0}


@pytest.mark.slow
def test_own_task_trains(own_task: Path) -> None:
    """The page's commands for one step, with random weights, on the layout of the page's base."""
    from megarl_tasks.arithmetic import write_demo

    write_demo(own_task / "made", 0)
    shutil.copytree(own_task / "made" / "model", own_task / "runs" / "demo" / "vapo" / "hf")
    environment = os.environ | {"PYTHONPATH": f"{own_task}:{ROOT}", "OMP_NUM_THREADS": "1"}
    small = [
        "steps=1",
        "rollout.prompts=8",
        "update.mini_batch=32",
        "evaluation.max_problems=16",
        "log.report=false",
        "log.terminal=quiet",
    ]

    def megarl(*arguments: str) -> None:
        done = run_command(arguments, cwd=own_task, env=environment, timeout=240)
        assert done.returncode == 0, done.stderr

    megarl("config", "check", "sums.yaml")
    megarl("eval", "sums.yaml", "--out", "runs/sums_before", "evaluation.max_problems=16")
    assert json.loads((own_task / "runs/sums_before/scores.json").read_text())["problems"] == 16
    megarl("train", "sums.yaml", *small)
    assert (own_task / "runs/sums/hf/model.safetensors").is_file()
    records = [json.loads(line) for line in (own_task / "runs/sums/metrics.jsonl").read_text().splitlines()]
    assert [record["stage"] for record in records] == ["eval", "train", "eval"]
    assert records[1]["reward/unverified"] == 0


def test_the_page_of_keys_is_printed_by_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "docs", "--markdown"]) == 0
    page = (ROOT / "docs" / "keys.md").read_text()
    assert page == capsys.readouterr().out, "write it again: megarl config docs --markdown > docs/keys.md"
