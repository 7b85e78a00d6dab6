"""The demo's task: what the teacher says, that nothing held out leaks, and that the tokenizer loses
nothing."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from megarl.config.errors import DataError
from megarl_tasks import arithmetic
from megarl_tasks.arithmetic import Sum

problems = st.lists(st.integers(1, 5), min_size=3, max_size=7).map(lambda terms: Sum(tuple(terms)))
seeds = st.integers(0, 2**32)
TOKENIZER = arithmetic.build_tokenizer()


def rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    arithmetic.write_demo(folder, seed=0)
    return folder


@pytest.mark.slow
def test_teacher_statistics(demo: Path) -> None:
    """Lengths at p10/50/90 of 4/28/77 tokens and a quarter of bare answers, as in the recipe that was
    tried."""
    sft = rows(demo / "sft.jsonl")
    texts = [row["response"] for row in sft]
    lengths = sorted(len(ids) + 1 for ids in TOKENIZER(texts).input_ids)
    p10, p50, p90 = (lengths[int(q * len(lengths))] for q in (0.1, 0.5, 0.9))
    assert p10 == 4
    assert 26 <= p50 <= 30
    assert 68 <= p90 <= 82
    shares = arithmetic.style_shares((text, True) for text in texts)
    assert shares["bare"] == pytest.approx(0.25, abs=0.015)
    assert shares["chain"] == pytest.approx(0.60, abs=0.015)
    assert shares["wait"] == pytest.approx(0.15, abs=0.015)
    assert 0.06 < sum(n > arithmetic.MAX_NEW_TOKENS for n in lengths) / len(lengths) < 0.12
    longest = max(
        len(ids) + 1 for ids in TOKENIZER([row["prompt"] + row["response"] for row in sft]).input_ids
    )
    assert longest <= arithmetic.MAX_POSITIONS


def test_share_of_wrong_additions(demo: Path) -> None:
    additions = wrong = 0
    for row in rows(demo / "sft.jsonl")[:4000]:
        for line in row["response"].splitlines():
            if "=" in line:
                left, result = line.split("=")
                additions += 1
                wrong += sum(map(int, left.split("+"))) != int(result)
    assert wrong / additions == pytest.approx(arithmetic.ERROR, abs=0.015)


def test_nothing_held_out_is_trained_on(demo: Path) -> None:
    evaluation = {row["prompt"] for row in rows(demo / "eval.jsonl")}
    train = [row["prompt"] for row in rows(demo / "train.jsonl")]
    warm = {row["prompt"] for row in rows(demo / "sft.jsonl")}
    assert len(evaluation) == len(rows(demo / "eval.jsonl")) == 512
    assert len(train) == len(set(train)) == arithmetic.TRAIN_ROWS
    assert evaluation.isdisjoint(train) and evaluation.isdisjoint(warm)
    assert all(map(arithmetic.held_out, evaluation)) and not any(map(arithmetic.held_out, warm | set(train)))
    sums = Counter(int(row["answer"]) % 10 for row in rows(demo / "eval.jsonl"))
    assert len(sums) == 10, f"the split follows the answer's last digit: {sums}"


def test_answers_are_the_sums(demo: Path) -> None:
    for name in ("sft", "train", "eval"):
        for row in rows(demo / f"{name}.jsonl"):
            assert int(row["answer"]) == sum(map(int, row["prompt"].removesuffix("=?\n").split("+")))


@given(problems, seeds)
def test_right_chain_verifies(problem: Sum, seed: int) -> None:
    work, total = arithmetic.chain(problem, random.Random(seed), error=0.0)
    match = arithmetic.ANSWER.search(f"{work}Answer: {total}")
    assert match is not None and match[1] == problem.answer == str(sum(problem.terms))
    assert work.count("\n") == len(problem.terms) - 1


@given(problems, seeds)
def test_mistakes_carry_on(problem: Sum, seed: int) -> None:
    """With every addition wrong each line starts from the wrong result of the line before, and stays in the
    tokenizer's alphabet."""
    work, total = arithmetic.chain(problem, random.Random(seed), error=1.0)
    at = problem.terms[0]
    for line, term in zip(work.splitlines(), problem.terms[1:], strict=True):
        left, result = line.split("=")
        assert left == f"{at}+{term}"
        assert 1 <= abs(int(result) - at - term) <= 3
        assert int(result) > 0, "the tokenizer has no minus sign"
        at = int(result)
    assert total == at


def test_mistakes_rarely_cancel(demo: Path) -> None:
    """Were they to cancel often, guessing would pay as much as working: a chain with a mistake must hardly
    ever end right."""
    ends: Counter[bool] = Counter()
    for row in rows(demo / "sft.jsonl"):
        lines = [line.split("=") for line in row["response"].splitlines() if "=" in line]
        if "Wait" not in row["response"] and any(
            sum(map(int, left.split("+"))) != int(result) for left, result in lines
        ):
            ends[arithmetic.ANSWER.search(row["response"])[1] == row["answer"]] += 1
    assert ends[True] / ends.total() < 0.08


@given(problems, seeds)
def test_tokenizer_round_trip_of_the_task(problem: Sum, seed: int) -> None:
    text = problem.prompt + arithmetic.teach(problem, random.Random(seed))
    ids = TOKENIZER(text).input_ids
    assert TOKENIZER.decode(ids) == text
    assert len(TOKENIZER(problem.prompt).input_ids) == 2 * len(problem.terms)


@given(st.text(alphabet="0123456789+=?\n :AWaeinrstw", max_size=80))
def test_tokenizer_round_trip_of_any_text(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER(text).input_ids) == text


@given(
    st.text(alphabet="0123456789+=?\n :AWaeinrstw", max_size=40),
    st.text(alphabet="0123456789+=\n", max_size=40),
)
def test_prompt_and_response_are_tokenised_apart_as_together(before: str, response: str) -> None:
    """The rollout sees prompt and response as two runs of tokens; the warm start must see the same ones."""
    together = TOKENIZER(before + "=?\n" + response).input_ids
    assert together == TOKENIZER(before + "=?\n").input_ids + TOKENIZER(response).input_ids


def test_tokenizer_has_40_tokens_and_these_are_single() -> None:
    assert len(TOKENIZER) == 40
    for text in (*"0123456789", "Answer: ", "Wait", "=?\n"):
        assert len(TOKENIZER(text).input_ids) == 1, text
    assert (TOKENIZER.pad_token_id, TOKENIZER.eos_token_id) == (0, 1)


def test_model_folder_loads(demo: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(demo / "model")
    tokenizer = AutoTokenizer.from_pretrained(demo / "model")
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert model.dtype == torch.float32
    assert sum(p.numel() for p in model.parameters()) == 101_248
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.model.layers[0].mlp.up_proj.weight.std().item() == pytest.approx(0.06, rel=0.03)
    for name, tensor in arithmetic.build_model(TOKENIZER, seed=0).state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name
    text = "5+2+4=?\n5+2=7\nWait\n7+4=11\nAnswer: 11"
    assert tokenizer(text).input_ids == TOKENIZER(text).input_ids
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)


@pytest.mark.slow
def test_same_seed_same_bytes_and_evaluation_is_fixed(demo: Path, tmp_path: Path) -> None:
    """A file's bytes depend on its seed and on nothing else, torch's own generator included, which is left
    alone."""
    state = torch.manual_seed(11).get_state()
    arithmetic.write_demo(tmp_path / "again", seed=0)
    assert torch.equal(torch.get_rng_state(), state)
    arithmetic.write_demo(tmp_path / "other", seed=1)
    files = sorted(path.relative_to(demo) for path in demo.rglob("*") if path.is_file())
    assert {str(f) for f in files} >= {
        "sft.jsonl",
        "train.jsonl",
        "eval.jsonl",
        "model/model.safetensors",
        "model/tokenizer.json",
    }
    differing = set()
    for file in files:
        assert (demo / file).read_bytes() == (tmp_path / "again" / file).read_bytes(), file
        if (demo / file).read_bytes() != (tmp_path / "other" / file).read_bytes():
            differing.add(str(file))
    assert differing == {"sft.jsonl", "train.jsonl", "model/model.safetensors"}


@pytest.mark.parametrize(
    ("text", "finished", "expected"),
    [
        ("Answer: 14", True, "bare"),
        ("5+2=7\n7+4=11\nAnswer: 11", True, "chain"),
        ("5+2=7\nWait\n5+2=7\nAnswer: 7", True, "wait"),
        ("5+2=7\nWait\n5+2=7\nAnswer: 7", False, "truncated"),
        ("5+2=7\n7+4", True, "truncated"),
        ("Answer: ", True, "truncated"),
        ("", True, "truncated"),
    ],
)
def test_style(text: str, finished: bool, expected: str) -> None:
    assert arithmetic.style(text, finished) == expected


def test_style_shares_sum_to_one() -> None:
    shares = arithmetic.style_shares(
        [("Answer: 14", True), ("Answer: 14", False), ("5+2=7\nAnswer: 7", True), ("Answer: 1", True)]
    )
    assert shares == {"bare": 0.5, "chain": 0.25, "wait": 0.0, "truncated": 0.25}
    assert sum(arithmetic.style_shares([]).values()) == 0.0


def test_unwritable_folder_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(
        DataError, match=r"file/demo: cannot be written: .* \(choose another folder\)"
    ) as raised:
        arithmetic.write_demo(tmp_path / "file" / "demo", seed=0)
    assert "\n" not in str(raised.value)
