"""Run the files of examples/: each alone, and verifier, term and episode in `megarl train`."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import re
import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest

from megarl.agents.chat_turns import ChatTurns
from megarl.config import check_config, load_config
from megarl.data.sample import TokenData
from megarl.rewards.pool import VerifierPool
from megarl.rollout.engines.base import GenerationRequest
from megarl.rollout.engines.transformers_engine import TransformersEngine
from megarl.rollout.sampling import SamplingParams
from tests.agents.talk import ScriptedPolicy, merging_tokenizer, prompt_of
from tests.commands import run_command
from tests.docs.test_docs import ROOT, commands
from tests.engines import load_folder
from tests.judge_server import right_if_reference, serve
from tests.tiny_models import make_tiny_model

EXAMPLES = ROOT / "examples"
RUNS = ("own_reward", "own_episode", "self_distillation", "sampling_replay", "method")
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
MAX_LINES = 59


def example(module: str) -> Any:
    return importlib.import_module(module)


@pytest.fixture(autouse=True)
def examples_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


def test_every_example_is_short_and_listed() -> None:
    readme = (EXAMPLES / "README.md").read_text()
    for path in EXAMPLES.iterdir():
        if path.suffix in (".py", ".sh", ".yaml"):
            assert path.read_text().count("\n") <= MAX_LINES, path.name
            assert f"({path.name})" in readme, path.name


@pytest.mark.parametrize("name", [*RUNS, "own_code"])
def test_configurations_hold(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    check_config(load_config(EXAMPLES / f"{name}.yaml"), name)
    told = [command[-1] for command in commands(EXAMPLES / "README.md", f"PYTHONPATH={EXAMPLES.name}")]
    assert f"examples/{name}.yaml" in told


def test_the_configuration_of_a_draft_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/sglang/test_draft.py trains with it."""
    monkeypatch.chdir(ROOT)
    check_config(load_config(EXAMPLES / "draft.yaml"), "draft")


def test_judge_configuration_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = load_config(EXAMPLES / "judge.yaml")
    check_config(config, "judge")
    assert config.reward.judge_is_term and config.reward.term_weights == {"judge": 0.2}
    # own_*.yaml come first; the rest need a server.
    assert "examples/judge.yaml" in [command[-1] for command in commands(EXAMPLES / "README.md", "megarl")]


def test_reward() -> None:
    terms = load_config(EXAMPLES / "own_reward.yaml").reward.terms
    with VerifierPool("own_reward:near", 1, 10.0, terms=terms) as pool:
        right, close, none = pool.verify(
            [(text, "12", 20, 80, False) for text in ("Answer: 12", "Answer: 15", "12")]
        )
    assert (right.correct, right.score, right.extracted) == (True, 1.0, "12")
    assert (close.correct, close.score) == (False, 0.25) and not none.correct
    assert right.terms == {"brevity": 0.75} and close.terms == {"brevity": 0.0}


def test_code() -> None:
    """Each row's tests are readable, and a right program passes them."""
    programs = (
        "a, b = map(int, input().split()); print(a + b)",
        "def double(x): return 2 * x",
        "largest = max",
        "def is_even(n): return n % 2 == 0",
    )
    rows = [json.loads(line) for line in (EXAMPLES / "own_code.jsonl").read_text().splitlines()]
    answers = [f"```python\n{program}\n```" for program in programs]
    with VerifierPool("megarl_tasks.code_verifier:verify", 1) as pool:
        verdicts = pool.verify([(text, row["answer"]) for text, row in zip(answers, rows, strict=True)])
    assert [verdict.score for verdict in verdicts] == [1.0] * len(rows)


@pytest.mark.parametrize(
    ("script", "score"), [(["Answer: 3"], 1.0), (["4", "Answer: 3"], 0.5), (["4", "5"], 0)]
)
def test_episode(script: list[str], score: float) -> None:
    tokenizer = merging_tokenizer()
    prompt = prompt_of(ChatTurns(tokenizer).first([{"role": "user", "content": "1 + 2?"}]), "1 + 2?")
    policy = ScriptedPolicy(prompt, tokenizer, script)
    own = example("own_episode")
    verdict = asyncio.run(own.two_attempts(prompt, policy))
    assert (verdict.correct, verdict.score) == (score > 0, score)
    assert (own.HINT in tokenizer.decode(policy.tokens)) == (len(script) == 2)


def test_loss(capsys: pytest.CaptureFixture[str]) -> None:
    """The printed table is correct, and beyond the interval the gradient pulls the ratio back."""
    own = runpy.run_path(str(EXAMPLES / "own_loss.py"), run_name="__main__")
    rows = [line.split()[:3] for line in capsys.readouterr().out.splitlines()[1:]]
    assert [float(ratio) for ratio, _, _ in rows] == [0.6, 0.8, 1.0, 1.2, 1.4]
    assert float(rows[-1][1]) == 0 and float(rows[-1][2]) > 0
    assert own["gradient"](own["simple"], 1.2, 1.0) == pytest.approx(0.0, abs=1e-9)


def test_loss_and_engine_are_those_of_the_page() -> None:
    """The test of docs/extending.md builds both into megarl and trains with them."""
    _, _, engine = (EXAMPLES / "own_engine.py").read_text().partition("\n")
    # The page's engine has a new weight backend, the example's engine the usual one.
    page = re.sub(r"from safetensors\.torch import \w+\n", "", PAGE)
    page = re.sub(
        r"    def load_file\(self, path: Path\) -> None:\n        own = .*?\n\n", "", page, flags=re.S
    )
    assert engine in page
    [loss] = re.findall(r"^def simple.*?\n\n\n", (EXAMPLES / "own_loss.py").read_text(), flags=re.M | re.S)
    assert loss.rstrip() in PAGE


def test_engine(tmp_path: Path) -> None:
    """It samples the same tokens as the transformers engine, also after a prefix."""
    folder = make_tiny_model(tmp_path / "model", "qwen3")
    requests = [GenerationRequest((5, 6, 7), seed) for seed in range(3)] + [GenerationRequest((9,), 4)]
    requests.append(GenerationRequest((5, 6), 7, TokenData([2, 3], [-1.0, -2.0])))
    found = []
    for kind in (example("own_engine").PlainEngine, TransformersEngine):
        engine = kind(folder, eos_ids=[1])
        engine.start()
        load_folder(engine, version=3)
        found.append(engine.generate(requests, SamplingParams(max_tokens=8)))
    for own, other in zip(*found, strict=True):
        assert (own.tokens.tolist(), own.finish_reason) == (other.tokens.tolist(), other.finish_reason)
        assert own.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    assert found[0][-1].tokens[:2].tolist() == [2, 3] and found[0][-1].num_tokens > 2


@pytest.mark.slow
@pytest.mark.parametrize("name", [*RUNS, "judge"])
def test_runs(name: str, tmp_path: Path) -> None:
    """The README's commands run for one step, from random weights."""
    from megarl_tasks.arithmetic import write_demo

    demo = tmp_path / "runs" / "demo"
    write_demo(demo, 0)
    shutil.copytree(demo / "model", demo / "sft" / "hf")
    small = (
        "steps=1",
        "rollout.prompts=8",
        "update.mini_batch=32",
        "evaluation.max_problems=16",
        "log.report=false",
    )
    environment = os.environ | {"PYTHONPATH": f"{EXAMPLES}:{ROOT}", "OMP_NUM_THREADS": "1"}
    with serve(right_if_reference) as endpoint:
        address = (f"reward.judge.url={endpoint.url}",) if name == "judge" else ()
        command = ["train", str(EXAMPLES / f"{name}.yaml"), *small, *address]
        done = run_command(command, cwd=tmp_path, env=environment, timeout=300)
        calls = len(endpoint.bodies)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    lines = (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()
    [record] = [record for record in map(json.loads, lines) if record["stage"] == "train"]
    assert record["reward/ungraded"] == 0
    assert ("reward/term_brevity" in record) == (name == "own_reward")
    assert ("reward/term_judge" in record) == (name == "judge")
    if name == "judge":
        # A loaded machine may need retries, whose failed calls have no tokens.
        answered = record["reward/judge_calls"] - record["reward/judge_retries"]
        assert 0 < answered <= calls - 1  # the first call is of the check
        assert record["reward/judge_prompt_tokens"] == 100 * answered
