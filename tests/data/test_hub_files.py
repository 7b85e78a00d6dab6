"""Which files of a repository are chosen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl.config.schema import DataConfig
from megarl.data.columns import find_answer, find_prompt
from megarl.data.hub_files import choose_split, list_splits, tokenizer_files, weight_files

GSM8K = ["README.md", "main/train-0.parquet", "main/test-0.parquet", "socratic/train-0.parquet"]
SHARDS = ["README.md", "data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"]


def chosen(names: list[str], wanted: str | None, card: Any = None, *, training: bool = True) -> Any:
    files, problem = choose_split(list_splits(names, card or {}, wanted), wanted, training=training)
    return problem or files


@pytest.mark.parametrize(
    ("names", "wanted", "expected"),
    [
        (GSM8K, "main/train", ["main/train-0.parquet"]),
        (GSM8K, "socratic", ["socratic/train-0.parquet"]),
        (SHARDS, None, SHARDS[1:]),
        (SHARDS, "train", SHARDS[1:]),
        (["data/dapo-math-17k.parquet"], None, ["data/dapo-math-17k.parquet"]),  # names no split
        (["default/train/0000.parquet", "default/train/0001.parquet"], "train", None),
        (["train.jsonl", "own_split.jsonl"], "own_split", ["own_split.jsonl"]),
        (["train.jsonl", "test.jsonl", "x.json", "y.py"], "default/test", ["test.jsonl"]),
    ],
)
def test_by_folders_and_names(names: list[str], wanted: str | None, expected: list[str] | None) -> None:
    assert chosen(names, wanted) == (expected or names)


def test_by_the_card() -> None:
    card = {
        "configs": [
            {
                "config_name": "all",
                "data_files": [{"split": "train", "path": ["a/*.jsonl", "b/**/x-?.jsonl"]}],
            },
            {"config_name": "raw", "data_files": "raw/*.json"},  # not readable: left out
        ]
    }
    names = ["a/1.jsonl", "a/deep/2.jsonl", "b/x-1.jsonl", "b/c/x-2.jsonl", "raw/1.json", "test.jsonl"]
    assert chosen(names, None, card) == ["a/1.jsonl", "b/c/x-2.jsonl", "b/x-1.jsonl"]


def test_what_is_ambiguous_or_missing_says_what_there_is() -> None:
    there = "main/train, main/test, socratic/train"
    assert chosen(GSM8K, None) == f"has several subsets (name one after a colon: {there})"
    assert chosen(GSM8K, "main/dev") == f"has no split 'main/dev' (it has {there})"
    assert chosen(SHARDS[:2], None) == "has 1 of the 2 files of default/train (download all)"
    # An evaluation never takes training data by default.
    assert chosen(GSM8K, "main") == ["main/train-0.parquet"]
    assert "several splits" in chosen(GSM8K, "main", training=False)
    assert list_splits(["default/partial-train/0000.parquet"], {}, None) == {}


def test_files_of_a_model() -> None:
    small = ["config.json", "tokenizer.json", "generation_config.json"]
    names = [*small, "model.safetensors", "consolidated.safetensors", "original/x.safetensors"]
    names += ["pytorch_model.bin", "modeling_x.py", "training_args.bin", "README.md"]
    assert tokenizer_files(names) == small
    assert weight_files(names, None) == ["model.safetensors"]
    index = {"weight_map": {"a": "m-2.safetensors", "b": "m-1.safetensors", "c": "m-1.safetensors"}}
    assert weight_files(names, index) == ["m-1.safetensors", "m-2.safetensors"]


@pytest.mark.parametrize(
    ("row", "prompt", "answer"),
    [
        ({"question": "1 + 1?", "answer": "Add.\n#### 1,002"}, "1 + 1?", "1002"),  # GSM8K
        ({"problem": "1 + 1?", "solution": r"It is $\boxed{2}$."}, "1 + 1?", "2"),  # MATH, NuminaMath-CoT
        ({"problem": "1 + 1?", "solution": "Long.", "answer": "2", "messages": []}, "1 + 1?", "2"),
        (  # Open-Reasoner-Zero
            {
                "0": {"from": "human", "value": "1 + 1?"},
                "1": {"from": "assistant", "ground_truth": {"value": "2"}},
            },
            "1 + 1?",
            "2",
        ),
        (  # DAPO-Math-17k
            {
                "prompt": [{"role": "user", "content": "1 + 1?"}],
                "reward_model": {"ground_truth": "2", "style": "rule"},
            },
            [{"role": "user", "content": "1 + 1?"}],
            "2",
        ),
    ],
)
def test_known_columns(row: dict[str, Any], prompt: Any, answer: str) -> None:
    data = DataConfig()
    assert find_prompt(row, data, Path("x"))[1] == prompt
    assert find_answer(row, data, Path("x"))[1] == answer
