"""`megarl data show` and `megarl data integers`, as a user calls them."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from megarl.cli.main import main
from megarl.data.prompt_sampler import epoch_order
from tests.agents.talk import QWEN25
from tests.cli.scene import QUESTIONS, Scene, write_jsonl


def printed(scene: Scene, *arguments: str) -> str:
    assert scene.capsys is not None
    scene.capsys.readouterr()
    assert main(arguments) == 0
    out, err = scene.capsys.readouterr()
    assert err == ""
    return out


def test_show_prints_what_the_model_reads(scene: Scene, tmp_path: Path) -> None:
    text = printed(scene, "data", "show", str(scene.config), "--rows", "2")
    assert text.startswith("data: 9 of 9 rows used, 0 duplicates, 0 unusable\ndata.train: prompts of ")
    assert "<|im_start|>user\nWhat is 0 + 1?<|im_end|>\n<|im_start|>assistant\n" in text
    assert text.count("<|im_start|>user") == 2 and text.endswith("--- reference answer: 1\n")
    bad = [*QUESTIONS, {"question": "no answer"}, QUESTIONS[0], {"question": "long " * 200, "answer": "1"}]
    given = f"data.train=[{write_jsonl(tmp_path / 'bad.jsonl', bad)}]"
    text = printed(scene, "data", "show", str(scene.config), given, "data.template=raw", "--rows", "0")
    assert text.startswith("data: 9 of 12 rows used, 1 duplicates, 2 unusable\n")
    assert f"longer than data.max_prompt_tokens 128: {tmp_path}/bad.jsonl:12 (" in text
    assert "What is" not in text
    drawn = printed(scene, "data", "show", str(scene.config), "--drawn", "--rows", "9", "--eval")
    assert "data.eval: prompts of" in drawn
    order = [int(a) * 3 + int(b) for a, b in re.findall(r"What is (\d) \+ (\d)\?", drawn)]
    assert order == epoch_order(9, seed=0, epoch=0) != sorted(order)
    pairs = write_jsonl(tmp_path / "sft.jsonl", [{"prompt": "1 + 1 = ?", "response": "Answer: 2"}])
    sft = tmp_path / "sft.yaml"
    sft.write_text(
        f"{{recipe: sft, run_dir: {tmp_path}/run, steps: 1, parallel: {{device: cpu}}, "
        f"model: {{path: {scene.folder}/model, dtype: fp32}}, data: {{train: [{pairs}]}}}}"
    )
    text = printed(scene, "data", "show", str(sft))
    assert "1 + 1 = ?" in text and "--- Answer: 2<eos>\n" in text
    assert not (scene.folder / "run").exists()


def test_show_starts_no_command(scene: Scene, tmp_path: Path) -> None:
    """Showing another person's configuration must not run its commands."""
    (scene.folder / "tools").mkdir()
    model = scene.folder / "tools" / "model"
    shutil.copytree(scene.folder / "model", model)
    (model / "chat_template.jinja").write_text(QWEN25.replace("<|im_end|>", "<eos>"))
    given = (f"model.path={model}", f"rollout.tools=['mcp:touch {tmp_path}/started']")
    text = printed(scene, "data", "show", str(scene.config), *given, "data.max_prompt_tokens=200")
    assert not (tmp_path / "started").exists() and "What is 0 + 0?" in text
    line = f"rollout.tools: mcp:touch {tmp_path}/started: its tools are left out (--mcp starts the server)\n"
    assert text.startswith(line)
    refused = scene.refused("data", "show", str(scene.config), *given, "--mcp")
    assert "no MCP server answers" in refused and (tmp_path / "started").exists()


def test_show_renders_with_the_variables_of_the_template(scene: Scene, model_copy: Path) -> None:
    template = model_copy / "chat_template.jinja"
    template.write_text(template.read_text() + "{% if enable_thinking is false %}<think></think>{% endif %}")
    given = f"model.path={model_copy}", "data.chat_template_kwargs={enable_thinking: false}"
    text = printed(scene, "data", "show", str(scene.config), *given, "--rows", "1")
    assert "<|im_start|>assistant\n<think></think>\n---" in text


def test_show_refuses(scene: Scene) -> None:
    config = str(scene.config)
    assert scene.refused("data", "show", config, "data.train=[/no.jsonl]") == "/no.jsonl: no such file"
    assert scene.refused("data", "show", config, "--rows", "-1") == "--rows: must be >= 0 (got -1)"
    assert "data.eval: names no file" in scene.refused("data", "show", config, "--eval", "data.eval=[]")
    assert "/no/model/config.json: no" in scene.refused("data", "show", config, "model.path=/no/model")


def test_integers(scene: Scene, tmp_path: Path) -> None:
    rows = [{"question": "q", "answer": r"11 - 2\sqrt{6}"}, {"question": "r", "answer": "x"}]
    source = write_jsonl(tmp_path / "in.jsonl", [*rows, {"question": "s", "answer": "5"}])
    out, refused = tmp_path / "out.jsonl", tmp_path / "out.refused.jsonl"
    text = printed(scene, "data", "integers", str(source), str(out), "--workers", "1")
    assert text.splitlines() == [
        "data: 2 of 3 rows used, 0 duplicates, 1 unusable",
        f"data: 1 rows: letters in it: {source}:2",
        f"{out}: 2 rows, 1 of them turned into integers",
        f"{refused}: 1 rows as they were, with the reason",
    ]
    assert [json.loads(line)["answer"] for line in out.read_text().splitlines()] == ["19", "5"]
    assert json.loads(refused.read_text()) == {**rows[1], "refused": "letters in it", "refused_row": 2}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl", "out.refused.jsonl"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("{x}/no.jsonl", "{x}/o.jsonl"), "{x}/no.jsonl: no such file"),
        (("{x}", "{x}/o"), "{x}: no such file"),
        (("{x}/in.jsonl", "{x}/o.parquet"), "{x}/o.parquet: must end in .jsonl, as {x}/in.jsonl does"),
        (
            ("{x}/in.jsonl", "{x}/in.jsonl"),
            "{x}/in.jsonl: is there already (delete it, or name another file)",
        ),
        (("{x}/in.jsonl", "{x}/no/o.jsonl"), "{x}/no/o.jsonl: its folder does not exist (make it first)"),
        (("{x}/in.jsonl", "{x}/o.jsonl", "--workers", "0"), "--workers: must be >= 1 (got 0)"),
        (("{x}/in.jsonl", "{x}/o.jsonl", "--refused", "{x}/o.jsonl"), "{x}/o.jsonl: cannot take the refused"),
        (("{x}/in.txt", "{x}/o.txt"), "{x}/in.txt: unknown kind of file '.txt' (use .parquet or .jsonl)"),
        (("{x}/in.jsonl", "{x}/o.jsonl"), "{x}/in.jsonl: no row can be used: 1 x letters in it"),
    ],
)
def test_integers_refuses(scene: Scene, tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    write_jsonl(tmp_path / "in.jsonl", [{"question": "q", "answer": "x + 1"}])
    (tmp_path / "in.txt").touch()
    given = [one.format(x=tmp_path) for one in arguments]
    assert scene.refused("data", "integers", *given).startswith(said.format(x=tmp_path))
    assert not list(tmp_path.glob("o*"))
