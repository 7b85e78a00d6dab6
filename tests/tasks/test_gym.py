"""reasoning-gym's problems as rows: by weight, from seeds that do not meet, the same in any process, and none
of data.eval's in data.train."""

from __future__ import annotations

import itertools
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

import megarl_tasks.gym as gym
from megarl.config import load_config
from megarl.config.errors import ConfigError, DataError, WaitTimeout
from megarl.config.schema import DataConfig, EvaluationConfig, GymConfig
from megarl.data.generated import check_tasks
from megarl.data.prompts import read_problem_sets, read_prompts, validate_files
from megarl.rewards.verdict import Reference
from megarl_tasks.gym import BLOCK, HELD_OUT, SHOWN, first_seed, generate, interleave_tasks
from tests.data.test_reader import CHAT, byte_tokenizer

needs_gym = pytest.mark.skipif(
    find_spec("reasoning_gym") is None, reason="reasoning-gym is not installed (pip install 'megarl[gym]')"
)
KEY = "data.train[0].gym"
# Tasks whose problems depend on the order of sets or on the global generators, and one that keeps fractions.
UNSTEADY = (
    "codeio",
    "isomorphic_strings",
    "ransom_note",
    "word_ladder",
    "list_functions",
    "pool_matrix",
    "gsm_symbolic",
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer(CHAT)


def entry(**settings: Any) -> GymConfig:
    return GymConfig.model_validate({"size": 6, "system": None, **settings})


def test_every_prefix_is_mixed_by_weight() -> None:
    weights = {"a": 3.0, "b": 1.0, "c": 0.5}
    rows = list(interleave_tasks(weights, 900))
    assert Counter(task for task, _ in rows) == {"a": 600, "b": 200, "c": 100}
    for task in weights:
        assert [index for one, index in rows if one == task] == list(range(int(900 * weights[task] / 4.5)))
    counts: Counter[str] = Counter()
    for length, (task, _) in enumerate(rows, 1):
        counts[task] += 1
        assert all(abs(counts[one] - length * weights[one] / 4.5) < 1 for one in weights)


def test_seeds_of_training_evaluation_and_examples_cannot_meet() -> None:
    """Item k of a task is drawn by a generator of its seed + k: no two blocks of them share a number."""
    seed = next(limit for limit in GymConfig.model_fields["seed"].metadata if hasattr(limit, "lt")).lt - 1
    size = next(limit for limit in GymConfig.model_fields["size"].metadata if hasattr(limit, "le")).le
    assert size <= BLOCK
    blocks = [
        (first_seed(f"data.{where}[0].gym", s), BLOCK) for where in ("train", "eval") for s in (0, 1, seed)
    ]
    blocks.append((SHOWN, GymConfig(tasks=["lcm"], size=1, examples=64).examples))  # type: ignore[arg-type]
    for (first, length), (second, _) in itertools.pairwise(sorted(blocks)):
        assert first + length <= second
    assert max(first + length for first, length in blocks) <= 2**32  # numpy's seeds
    assert first_seed("data.train[7].gym", seed) + BLOCK <= HELD_OUT


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gym, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as error:
        list(generate({KEY: entry(tasks=["lcm"])}))
    assert str(error.value) == f"{KEY}: reasoning-gym is not installed (pip install 'megarl[gym]')"
    assert list(generate({})) == []  # files alone need none


def test_a_process_that_dies_or_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gym, "find_spec", lambda name: True)
    monkeypatch.setattr(gym, "_BOOT", "import sys; sys.exit('no room')")
    with pytest.raises(DataError, match=rf"^{KEY[:10]}.*'s process died \(exit code 1; no room\)$"):
        list(generate({KEY: entry(tasks=["lcm"])}))
    monkeypatch.setattr(gym, "_BOOT", "import time; time.sleep(600)")
    monkeypatch.setattr(gym, "_LIMIT", 0.2)
    with pytest.raises(WaitTimeout, match=r"took over 0\.2 s for one row"):
        list(generate({KEY: entry(tasks=["lcm"])}))


@needs_gym
def test_rows_as_the_model_reads_them(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Of two entries, and of a file behind them."""
    (tmp_path / "a.jsonl").write_text('{"prompt": "q", "answer": "7"}\n')
    tasks = {"chain_sum": {"weight": 2, "min_terms": 2, "max_terms": 2}, "graph_color": {}}
    plain = {"gym": {"tasks": tasks, "size": 9, "system": None}}
    shown = {"gym": {"tasks": tasks, "size": 9, "system": "simple", "examples": 2, "seed": 3}}
    files = [plain, shown, str(tmp_path / "a.jsonl")]
    data = DataConfig.model_validate({"train": files, "prompt_format": "Q: {prompt}"})
    prompts, report = read_prompts(data.train, data, tokenizer)
    assert list(report.rows.values()) == [9, 9, 1] and list(report.rows)[:2] == [
        f"data.train[{i}].gym" for i in (0, 1)
    ]
    assert report.kept == len(prompts) == 19
    assert Counter(one.source for one in prompts[:9]) == {"chain_sum": 6, "graph_color": 3}
    first, second = prompts[0], prompts[9]
    assert first.source == second.source == "chain_sum" and first.extra == {"index": 0}
    assert first.text == f"<|user|>Q: {first.question}<|end|><|assistant|>"
    sums = first.question.rpartition(": ")[2].removesuffix(" =")
    assert int(first.answer) == sum(int(part) for part in sums.replace("- ", "-").replace("+ ", "").split())
    assert isinstance(first.reference, Reference) and first.reference.answer == first.answer
    # System message, two worked examples of the same task, question.
    parts = second.text.split("<|end|>")
    assert parts[0].startswith("<|system|>You are a helpful assistant") and "<answer>" in parts[0]
    assert parts[5] == f"<|user|>{second.question}" and parts[6] == "<|assistant|>"
    assert all(part.startswith("<|assistant|><answer>") for part in (parts[2], parts[4]))
    of_another = next(one for one in prompts[9:18] if one.source == "graph_color")
    assert of_another.text.split("<|end|>")[1] != parts[1]
    assert not {one.question for one in prompts[:9]} & {one.question for one in prompts[9:18]}
    assert prompts[-1].reference == "7" and prompts[-1].source == ""


@needs_gym
def test_no_question_of_evaluation_is_trained_on(tokenizer: PreTrainedTokenizerFast) -> None:
    """Of sixteen questions in all, those of data.eval, beyond max_problems too, and the example are left
    out."""
    few = {"min_numbers": 2, "max_numbers": 2, "min_value": 1, "max_value": 4}
    data = DataConfig.model_validate(
        {
            "train": [{"gym": {"tasks": {"gcd": few}, "size": 200, "system": None, "examples": 1}}],
            "eval": [{"gym": {"tasks": {"gcd": few}, "size": 5, "system": None}, "name": "held_out"}],
        }
    )
    sets, _ = read_problem_sets(data, EvaluationConfig(max_problems=2), tokenizer)
    prompts, report = read_prompts(data.train, data, tokenizer, sets)
    assert len(sets[0].problems) == 2 < len(sets[0].questions) <= 5
    questions = {one.question for one in prompts}
    reasons = Counter(row.reason for row in report.rejected)
    assert questions and not questions & sets[0].questions
    assert reasons["is a question of data.eval"] > 0 and reasons["is shown as an example"] > 0
    assert report.kept + report.duplicates + len(report.rejected) == 200
    shown = prompts[0].text.split("<|end|>")[0].removeprefix("<|user|>")
    assert shown.startswith("Find the Greatest") and shown not in questions
    assert "rows: is a question of data.eval: data.train[0].gym:" in "\n".join(report.lines())


@needs_gym
@pytest.mark.slow
def test_the_same_rows_in_any_process(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    for seed in ("1", "2"):  # of the parent, which must not reach the child
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        made.append(list(generate({KEY: entry(tasks=list(UNSTEADY), size=3 * len(UNSTEADY))})))
    assert made[0] == made[1] and not any(row.problem for row in made[0])
    other = list(generate({KEY: entry(tasks=list(UNSTEADY), size=len(UNSTEADY), seed=1)}))
    held_out = list(generate({"data.eval[0].gym": entry(tasks=list(UNSTEADY), size=len(UNSTEADY))}))
    questions = [{row.question for row in rows} for rows in (made[0], other, held_out)]
    assert not questions[0] & questions[1] and not (questions[0] | questions[1]) & questions[2]


@needs_gym
def test_bad_input() -> None:
    from megarl_tasks.gym_scorer import make_task

    cases: dict[str, tuple[str, dict[str, Any]]] = {
        "chainsum: reasoning-gym has no such task (did you mean chain_sum or decimal_chain_sum?)": (
            "chainsum",
            {},
        ),
        "qqqqqqqq: reasoning-gym has no such task (megarl data gym lists them)": ("qqqqqqqq", {}),
        "composite: mixes other tasks of reasoning-gym (name those, each with its weight)": ("composite", {}),
        "lcm.max_valu: the task has no such parameter (did you mean max_value or min_value": (
            "lcm",
            {"max_valu": 5},
        ),
        "lcm.wieght: the task has no such parameter (did you mean weight?)": ("lcm", {"wieght": 2}),
        "lcm.max_value: must be a whole number, as the default 100 is (got 1.5)": ("lcm", {"max_value": 1.5}),
        "lcm.max_value: must be a whole number, as the default 100 is (got True)": (
            "lcm",
            {"max_value": True},
        ),
        "lcm: reasoning-gym refuses its parameters {'min_value': 500}: AssertionError: max_value must be >": (
            "lcm",
            {"min_value": 500},
        ),
    }
    for said, (task, parameters) in cases.items():
        with pytest.raises(ConfigError) as error:
            make_task(task, parameters, seed=0, size=1)
        assert str(error.value).startswith(said) and "\n" not in str(error.value)
    with pytest.raises(
        ConfigError, match=r"^data\.train\[0\]\.gym\.tasks\.chainsum: reasoning-gym has no such task"
    ):
        check_tasks({KEY: entry(tasks=["lcm", "chainsum"])})


@needs_gym
@pytest.mark.slow
def test_what_cannot_stand_before_a_question() -> None:
    with pytest.raises(ConfigError) as error:
        check_tasks({KEY: entry(tasks=["lcm", "boxnet"], examples=1)})
    remedy = "so that none can be shown (set it to 0, or leave the task out)"
    assert str(error.value) == f"{KEY}.examples: boxnet tells no answer, {remedy}"
    with pytest.raises(
        ConfigError, match=r"gym\.system: is none of reasoning-gym's \(DeepSeekZero, default,"
    ):
        check_tasks({KEY: entry(tasks=["lcm"], system="defualt")})


@needs_gym
@pytest.mark.slow
def test_what_a_verifier_is_tried_on(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Before a run: a file's answer, and a problem of each task, however little it weighs."""
    (tmp_path / "a.jsonl").write_text('{"prompt": "q", "answer": "7"}\n')
    few = {"gym": {"tasks": {"lcm": {"weight": 0.01}, "gcd": {}}, "size": 5, "system": None}}
    data = DataConfig.model_validate({"train": [few, str(tmp_path / "a.jsonl")]})
    found = validate_files(data, tokenizer=tokenizer)
    assert found[0] == "7" and [type(one) for one in found[1:]] == [Reference, Reference]
    short = data.model_copy(update={"train": data.train[:1], "max_prompt_tokens": 20})
    with pytest.raises(
        DataError, match=r"^data\.train\[0\]\.gym: no row can be used: 32 x longer than data\.max_prompt"
    ):
        validate_files(short, tokenizer=tokenizer)


def test_a_warm_start_has_no_responses_there(tmp_path: Path) -> None:
    from megarl.config.check import check_config

    (tmp_path / "a.yaml").write_text(
        "recipe: sft\nrun_dir: x\nsteps: 1\nmodel: {path: m}\nalgorithm: {nll_weight: 1}\n"
    )
    config = load_config(tmp_path / "a.yaml", ["data.train=[{gym: {tasks: [lcm], size: 5}}]"])
    with pytest.raises(ConfigError, match=r"a\.yaml: data\.train\[0\]\.gym: recipe sft learns from given"):
        check_config(config, "a.yaml")
