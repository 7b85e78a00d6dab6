"""Text from data, models and policies cannot steer the terminal that shows it, nor run in the report."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from rich.console import Console

from megarl.cli.evaluate import _publish
from megarl.cli.main import main
from megarl.config.errors import ConfigError
from megarl.config.text import printable
from megarl.data.prompts import ReadReport, RejectedRow
from megarl.observe.terminal import RunHeader, TerminalView, watch
from megarl_report.report import write_report
from tests.cli.scene import Scene, write_jsonl
from tests.report.synthetic_run import write_run

# What sets a window's title, clears the screen, overwrites the line, reverses text, or ends a line unseen.
CONTROLS = "\x1b]0;owned\x07\x1b[2J\r\b\x7f\x9b31m\u202e\u2066\u200f\u200e\u061c\u2028\u2029"
HOSTILE = f"ok {CONTROLS} [bold]loud[/bold] [link=http://x.y]z[/link]"
FORBIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Scene.make(tmp_path_factory.mktemp("scene")).folder


@pytest.fixture
def scene(folder: Path, capsys: pytest.CaptureFixture[str]) -> Scene:
    return Scene(folder, capsys)


def harmless(text: str) -> str:
    """Return the text, in which there is no control character and no markup was obeyed."""
    assert not FORBIDDEN.search(text), ascii(FORBIDDEN.search(text))
    return text


def test_all_that_a_terminal_obeys_is_an_escape() -> None:
    assert printable("a\tb\nc \x1b[0m\r\x9b\u202e\udc80") == "a\tb\nc \\x1b[0m\\r\\x9b\\u202e\\udc80"
    assert printable("Ünï 中文 ✓ العربية 👩‍🔬") == "Ünï 中文 ✓ العربية 👩‍🔬"
    everything = "".join(map(chr, range(0x3000))) + "".join(map(chr, range(0xD7F0, 0xE010)))
    harmless(printable(everything))


def test_an_error_line() -> None:
    error = ConfigError(f"{HOSTILE}\x85next: wrong\nhere")
    assert "\\x1b[2J" in harmless(str(error)) and "\n" not in str(error) and "[bold]loud[/bold]" in str(error)


@pytest.mark.parametrize("mode", ["plain", "live"])
def test_the_view_of_a_run(mode: Any) -> None:
    out = io.StringIO()
    console = Console(file=out, width=300, height=60, force_terminal=False)
    facts = RunHeader(HOSTILE, HOSTILE, HOSTILE, HOSTILE, HOSTILE, 2)
    record = {
        "step": 1,
        "stage": "eval",
        "eval/avg": 0.5,
        f"eval/{HOSTILE}/avg": 0.5,
        "eval/other/avg": 0.5,
        "eval/problems": HOSTILE,
    }
    with TerminalView(mode, facts, console) as view:
        view.phase(HOSTILE)
        view.event(HOSTILE)
        view.step(record)
        view.step({"step": 1, "stage": "train", "reward/accuracy": 0.5, "alarms": [HOSTILE]})
    text = harmless(out.getvalue())
    assert "[bold]loud[/bold]" in text and "\\x1b]0;owned\\x07" in text


def test_watch_a_folder_of_a_stranger(tmp_path: Path) -> None:
    run = write_run(tmp_path / f"run{CONTROLS.replace('/', '')}", steps=2)
    settings = yaml.safe_load((run / "config.yaml").read_text())
    settings["recipe"] = settings["parallel"]["device"] = HOSTILE
    (run / "config.yaml").write_text(yaml.safe_dump(settings))
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": HOSTILE, "num_hidden_layers": HOSTILE}))
    settings["model"]["path"] = str(model)
    (run / "config.yaml").write_text(yaml.safe_dump(settings))
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 2, "stage": "eval", "events": [HOSTILE], f"eval/{HOSTILE}/avg": 1.0}))
        file.write("\n")
    out = io.StringIO()
    watch(run, once=True, console=Console(file=out, width=400, force_terminal=False))
    assert "\\x1b[2J" in harmless(out.getvalue())


def test_rows_that_were_read() -> None:
    hostile = RejectedRow(HOSTILE, 1, HOSTILE, HOSTILE)
    lines = ReadReport({HOSTILE: 1}, 1, 0, [hostile], [hostile]).lines()
    assert len(lines) == 3 and all(harmless(line) for line in lines)


def test_prompts_that_are_shown(scene: Scene, tmp_path: Path) -> None:
    rows = [{"question": HOSTILE, "answer": f"1{CONTROLS}2"}, {"question": "q", "answer": 3.5e400}]
    file = write_jsonl(tmp_path / "a.jsonl", rows)
    assert scene.capsys is not None
    assert main(["data", "show", str(scene.config), f"data.train=[{file}]"]) == 0
    out, err = scene.capsys.readouterr()
    assert "[bold]loud[/bold]" in harmless(out) and "--- reference answer: 1\\x1b" in out and err == ""


def test_names_in_what_the_command_refuses(scene: Scene, tmp_path: Path) -> None:
    harmless(
        scene.refused("data", "show", str(scene.config), f"data.train=[{tmp_path}/a\x9b31m\u202e.jsonl]")
    )
    harmless(scene.refused("data", "show", f"{tmp_path}/a\x1b[2J\u202e.yaml"))
    named = tmp_path / "a\x1b[2J\u202e.yaml"
    named.write_text(scene.config.read_text().replace("tp: 2", "tp: 1"))
    assert scene.capsys is not None
    for command in ("config", "check"), ("config", "show"), ("plan",):
        assert main([*command, str(named), f"run_dir={tmp_path}/run"]) in (0, 2)
        out, err = scene.capsys.readouterr()
        assert harmless(out + err)
        assert command[-1] != "check" or "a\\x1b[2J\\u202e.yaml" in out + err
    harmless(scene.refused("data", "show", str(scene.config), f"--rows=\x1b[2J{CONTROLS}"))


def test_the_scores_of_an_evaluation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    score = {"mean": 0.5, "low": 0.4, "high": 0.6}
    one = SimpleNamespace(groups=[1], k=1, scores=lambda: {"avg@1": score}, counts=lambda: {"all": 1})
    row = {"question": HOSTILE, "answer": f"1\n{CONTROLS}", "right": 1, "samples": 1, "avg": 1.0}
    row |= {"vote": f"{CONTROLS}", "votes": 1, "length_mean": 3.0, "truncated": 0.0}
    result: Any = SimpleNamespace(
        headline=one,
        by_name=lambda: {HOSTILE: one},
        stats=dict,
        table=lambda: [row],
        answers=lambda tokenizer: [],
        sets=[(None, [1])],
    )
    evaluation: Any = SimpleNamespace(policy=HOSTILE, reports={}, tokenizer=None)
    (tmp_path / "out").mkdir()
    _publish(evaluation, result, tmp_path / "out")
    out = harmless(capsys.readouterr().out)
    assert "bold" in out and "link" in out and "\\x1b" in out


def test_the_report_holds_texts_as_texts(tmp_path: Path) -> None:
    script = f"<script>alert(1)</script><img src=x onerror=alert(1)>{HOSTILE}"
    run = write_run(tmp_path / "run", steps=2)
    (run / "config.yaml").write_text(yaml.safe_dump({"recipe": script, "data": {script: script}}))
    (run / "versions.json").write_text(json.dumps({script: script}))
    samples = (run / "samples.jsonl").read_text().splitlines()
    sample = json.loads(samples[0])
    texts = {"prompt": script, "response": script, "answer": script, "question": script}
    texts |= {"tokens": [script] * len(sample["tokens"]), "turns": [["policy", script], ["observed", script]]}
    (run / "samples.jsonl").write_text(json.dumps(sample | texts) + "\n")
    with (run / "metrics.jsonl").open("a") as file:
        for step in (3, 4):
            record = {"step": step, "stage": "eval", "eval/avg": 1.0, f"eval/{script}/avg": 1.0}
            record |= {"events": [script], "alarms": [script]}
            file.write(json.dumps(record) + "\n")
    html = write_report([run], tmp_path / "report.html").read_text()
    harmless(html)
    assert "<script" not in html and "<img" not in html and "&lt;script&gt;alert(1)" in html
