"""Good and bad data files: every row is a prompt, a duplicate, or listed with its reason."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from megarl.config.errors import ConfigError, DataError
from megarl.config.schema import DataConfig, EvaluationConfig
from megarl.data.prompts import (
    Prompt,
    ReadReport,
    prompt_uid,
    read_pairs,
    read_problem_sets,
    read_prompts,
    validate_files,
)

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
CHAT = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
NO_ANSWER = "no answer in reward_model.ground_truth or answer or solution or completion or messages"
GOLDEN_UID = 4981130434963473459


def byte_tokenizer(chat: str | None = None, bos: bool = False) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte, `<eos>`, and Llama's `<bos>` before raw texts."""
    vocabulary = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>", "<bos>"])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", 257)]
        )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", bos_token="<bos>")
    if chat:
        fast.chat_template = chat
    return fast


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer(CHAT)


def raw(**settings: Any) -> DataConfig:
    return DataConfig(template="raw", **settings)


def jsonl(path: Path, *rows: object) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def dapo_row(content: str, answer: Any, **more: Any) -> dict[str, Any]:
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": content, "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule"},
        "extra_info": {"index": "a-1"},
        **more,
    }


def test_aime_2024_as_it_is(tokenizer: PreTrainedTokenizerFast) -> None:
    file = SHARED / "aime-2024.parquet"
    if not file.exists():
        pytest.skip(f"{file} is not on this machine")
    prompts, report = read_prompts([file], DataConfig(), tokenizer)
    table = pq.read_table(file).to_pylist()
    contents = list(dict.fromkeys(row["prompt"][0]["content"] for row in table))
    assert len(prompts) == len(contents) == 30
    assert (
        report.rows == {str(file): len(table)}
        and report.duplicates == len(table) - 30
        and not report.rejected
    )
    for prompt, content in zip(prompts, contents, strict=True):
        row = next(row for row in table if row["prompt"][0]["content"] == content)
        assert prompt.text == f"<|user|>{content}<|end|><|assistant|>"
        assert prompt.answer == row["reward_model"]["ground_truth"] and prompt.source == "math_dapo"
        assert prompt.extra["index"] == row["extra_info"]["index"]
        assert bytes(tokenizer.decode(prompt.tokens), "utf-8") == prompt.text.encode()
    validate_files(DataConfig(eval=(file,)))


def test_gsm8k_as_it_is(tokenizer: PreTrainedTokenizerFast) -> None:
    file = SHARED / "gsm8k_test_200.jsonl"
    if not file.exists():
        pytest.skip(f"{file} is not on this machine")
    prompts, report = read_prompts([file], raw(prompt_format="Q: {prompt}\nA:"), tokenizer)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(prompts) == report.kept == 200
    for prompt, row in zip(prompts, rows, strict=True):
        assert prompt.text == f"Q: {row['question']}\nA:"
        assert int(prompt.answer) == int(row["answer"].split("####")[1].replace(",", ""))
    validate_files(raw(train=(file,)))


CLIPS = (
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. "
    "How many clips did Natalia sell altogether in April and May?"
)
CLIPS_SOLVED = (
    "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n"
    "Natalia sold 48+24 = <<48+24=72>>72 clips altogether in April and May.\n#### 72"
)
STEPS = 'Let\'s think step by step and output the final answer after "####".'
EXPANSION = (
    "What is the coefficient of $x^2y^6$ in the expansion of $\\left(\\frac{3}{5}x-\\frac{y}{2}\\right)^8$? "
    "Express your answer as a common fraction."
)
EXPANDED = (
    "To determine the coefficient, use the binomial theorem.\n\n```python\nprint(binomial(8, 6))\n```\n"
    "```output\n63/400\n```\nThe coefficient is $\\boxed{\\frac{63}{400}}$."
)


def said(role: str, content: str) -> dict[str, str]:
    return {"content": content, "role": role}


def verl_gsm8k(*before: dict[str, str], **more: Any) -> dict[str, Any]:
    """Return a row as written by verl's examples/data_preprocess/gsm8k.py.

    With a system message and tools it is that of gsm8k_multiturn_w_tool.py.
    """
    extra = {"split": "train", "index": 0, "answer": CLIPS_SOLVED, "question": CLIPS, **more}
    return {
        "data_source": "openai/gsm8k",
        "prompt": [*before, said("user", f"{CLIPS} {STEPS}")],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "72"},
        "extra_info": extra,
    }


SOLVER = said(
    "system", "You are a math expert. You are given a question and you need to solve it step by step."
)
TOOLS = {
    "need_tools_kwargs": True,
    "tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "72"}}},
}
LIMIT = said("user", "Evaluate the limit: \\[ \\lim_{x \\to \\infty} \\sqrt{x} \\]")
SHAPES: dict[str, tuple[list[dict[str, Any]], list[tuple[str, str, str]]]] = {  # rows; text, answer, source
    "verl, gsm8k.py": (
        [verl_gsm8k()],
        [(f"<|user|>{CLIPS} {STEPS}<|end|><|assistant|>", "72", "openai/gsm8k")],
    ),
    "verl, gsm8k_multiturn_w_tool.py": (
        [verl_gsm8k(SOLVER, **TOOLS)],
        [
            (
                f"<|system|>{SOLVER['content']}<|end|><|user|>{CLIPS} {STEPS}<|end|><|assistant|>",
                "72",
                "openai/gsm8k",
            )
        ],
    ),
    "verl, gsm8k_multiturn_sft.py": (
        [{"messages": [said("user", f"{CLIPS} {STEPS}"), said("assistant", CLIPS_SOLVED)]}],
        [(f"<|user|>{CLIPS} {STEPS}<|end|><|assistant|>", "72", "")],
    ),
    "TRL, DeepMath-103K": (
        [
            {"prompt": [LIMIT], "solution": "$0$"},
            {"prompt": [said("user", "Is 7 prime?")], "solution": "Yes"},
            {"prompt": [said("user", "Find it.")], "solution": "$\\dfrac{1}{4}$"},
        ],
        [
            (f"<|user|>{LIMIT['content']}<|end|><|assistant|>", "0", ""),
            ("<|user|>Is 7 prime?<|end|><|assistant|>", "Yes", ""),
            ("<|user|>Find it.<|end|><|assistant|>", "\\dfrac{1}{4}", ""),
        ],
    ),
    "NuminaMath-TIR": (
        [
            {
                "problem": EXPANSION,
                "solution": EXPANDED,
                "messages": [said("user", EXPANSION), said("assistant", EXPANDED)],
            }
        ],
        [(f"<|user|>{EXPANSION}<|end|><|assistant|>", "\\frac{63}{400}", "")],
    ),
    "TRL, conversational prompt and completion": (
        [{"prompt": [said("user", "What color is the sky?")], "completion": [said("assistant", "Blue")]}],
        [("<|user|>What color is the sky?<|end|><|assistant|>", "Blue", "")],
    ),
    "TRL, prompt and completion": (
        [{"prompt": "The sky is", "completion": " blue."}],
        [("<|user|>The sky is<|end|><|assistant|>", "blue.", "")],
    ),
}


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_of_other_trainers(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, shape: str, kind: str
) -> None:
    rows, wanted = SHAPES[shape]
    file = tmp_path / f"a.{kind}"
    if kind == "jsonl":
        jsonl(file, *rows)
    else:
        pq.write_table(pa.Table.from_pylist(rows), file)
    prompts, report = read_prompts([file], DataConfig(), tokenizer)
    assert [(one.text, one.answer, one.source) for one in prompts] == wanted and not report.rejected


def test_conversations(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """The reply is never part of the prompt, but is a pair's response; other columns take precedence."""
    asked = [said("system", "S"), said("user", "1+1?"), said("assistant", "2"), said("user", "And 2+2?")]
    rows = [
        {"messages": [*asked, said("assistant", "So it is\n\\boxed{4}.")]},
        {"messages": [*asked[3:], said("assistant", "five, I think")]},  # contains no answer
        {"messages": [*asked[3:], said("assistant", "five, I think")], "answer": 4},
        {"messages": [said("user", "no reply")], "answer": 4},
        {"messages": [said("assistant", "4")], "answer": 4},
        {"messages": [], "answer": 4},
        {"messages": [said("user", "a call"), {"role": "assistant", "tool_calls": [1]}]},
        {"prompt": "q", "solution": "It is 4 or so."},
        {"prompt": "q", "solution": "2 + 2 = 4, so\n#### 4"},
        {"prompt": "q", "solution": "$1$ and $2$"},
    ]
    prompts, report = read_prompts([jsonl(tmp_path / "a.jsonl", *rows)], DataConfig(), tokenizer)
    texts = ["<|system|>S<|end|><|user|>1+1?<|end|><|assistant|>2<|end|><|user|>And 2+2?<|end|><|assistant|>"]
    texts += [f"<|user|>{text}<|end|><|assistant|>" for text in ("And 2+2?", "no reply", "q")]
    assert [(one.text, one.answer) for one in prompts] == [(text, "4") for text in texts]
    no_prompt = "no prompt in prompt or question or problem or messages"
    reasons = {2: NO_ANSWER, 5: no_prompt, 6: no_prompt, 7: NO_ANSWER, 8: NO_ANSWER, 10: NO_ANSWER}
    assert {row.row: row.reason for row in report.rejected} == reasons
    key = DataConfig(prompt_key="messages")
    assert read_prompts([tmp_path / "a.jsonl"], key, tokenizer)[0][0] == prompts[0]

    report = ReadReport()
    pairs = read_pairs([tmp_path / "a.jsonl"], DataConfig(), "response", tokenizer, report)
    replies = [tokenizer.decode(response[:-1]) for _, response in pairs]
    assert replies == ["So it is\n\\boxed{4}.", "five, I think", "five, I think"]
    assert tokenizer.decode(pairs[0][0]) == prompts[0].text
    assert (
        Counter(row.reason for row in report.rejected)["no response in response or completion or messages"]
        == 5
    )


def test_sets_of_problems(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Entries without a name form one set, and each name forms another."""

    def file(name: str, first: int, source: str) -> Path:
        rows = [dapo_row(f"{n}?", n, data_source=source) for n in range(first, first + 3)]
        return jsonl(tmp_path / name, *rows)

    a, b, c = file("a.jsonl", 0, "x"), file("b.jsonl", 2, "of y"), file("c.jsonl", 1, "z")
    entries = [a, {"path": c, "name": "c", "every": 5}, b, {"path": c, "name": "d", "samples": 2}]
    evaluation = EvaluationConfig(samples=4)
    sets, reports = read_problem_sets(DataConfig(eval=entries), evaluation, tokenizer)
    facts = [(one.name, one.samples, one.every, [p.answer for p in one.problems]) for one in sets]
    assert facts == [("", 4, None, [*"01234"]), ("c", 4, 5, [*"123"]), ("d", 2, None, [*"123"])]
    kept = {name: (report.kept, report.duplicates) for name, report in reports.items()}
    assert kept == {"eval": (5, 1), "eval c": (3, 0), "eval d": (3, 0)}
    few = EvaluationConfig(samples=4, max_problems=2)
    cut, _ = read_problem_sets(DataConfig(eval=[*entries, {"path": c, "samples": 9}]), few, tokenizer)
    assert [(one.samples, len(one.problems)) for one in cut] == [(4, 2), (4, 2), (2, 2), (9, 2)]
    same = DataConfig(eval=[a, b, {"path": c, "name": "of_y"}])
    with pytest.raises(ConfigError, match=r"^data\.eval\[2\]\.name: of_y is also a data_source of entries"):
        read_problem_sets(same, evaluation, tokenizer)


def test_every_kind_of_unusable_row_is_listed(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [
        (dapo_row("good", "1"), None),
        ("{not json", "malformed JSON"),
        ("[" * 100_000, "malformed JSON"),
        ('{"prompt": "\\ud800', "malformed JSON"),
        ("[1, 2]", "not a JSON object"),
        ("", None),
        ({"answer": "1"}, "no prompt in prompt or question or problem or messages"),
        ({"prompt": "  ", "answer": "1"}, "no prompt in prompt or question or problem or messages"),
        ({"prompt": [], "answer": "1"}, "no prompt in prompt or question or problem or messages"),
        (
            {"prompt": [{"role": "user", "content": " "}], "answer": "1"},
            "no prompt in prompt or question or problem or messages",
        ),
        ({"prompt": 5, "answer": "1"}, "prompt is neither a text nor a list of {role, content}"),
        (
            {"prompt": [{"role": "user"}], "answer": "1"},
            "prompt is neither a text nor a list of {role, content}",
        ),
        ({"prompt": ["a"], "answer": "1"}, "prompt is neither a text nor a list of {role, content}"),
        ({"prompt": "q"}, NO_ANSWER),
        (dapo_row("q", None), NO_ANSWER),
        ({"prompt": "q", "answer": " "}, NO_ANSWER),
        (
            {"prompt": "q", "answer": "worked out ####  "},
            NO_ANSWER,
        ),
        ({"prompt": "q", "answer": True}, "answer is neither a text nor a number"),
        ({"prompt": "q", "answer": ["1"]}, "answer is neither a text nor a number"),
        ('{"prompt": "q", "answer": NaN}', "answer is neither a text nor a number"),
        ({"prompt": "x" * 60, "answer": "1"}, "longer than data.max_prompt_tokens 64"),
        ({"prompt": [{"role": "tool", "content": "t"}], "answer": "1"}, "refused by the chat template"),
        ('{"prompt": "half a pair \\ud800", "answer": "1"}', "text is not Unicode"),
        ({"question": "other names", "answer": 7}, None),
        ({"question": "a float", "answer": 7.0}, None),
        ({"question": "long way", "answer": "so\n#### 1,234"}, None),
        (dapo_row("good", "1"), None),
        (dapo_row("good", "2"), None),
    ]
    file = jsonl(tmp_path / "mixed.jsonl", *[row for row, _ in rows])
    prompts, report = read_prompts([file], DataConfig(max_prompt_tokens=64), tokenizer)
    assert [prompt.answer for prompt in prompts] == ["1", "7", "7", "1234", "2"]
    expected = [(str(file), number, reason) for number, (_, reason) in enumerate(rows, 1) if reason]
    assert [(row.file, row.row, row.reason) for row in report.rejected] == expected
    assert report.rows == {str(file): len(rows) - 1} and report.duplicates == 1  # an empty line is not a row
    assert report.kept + report.duplicates + len(report.rejected) == sum(report.rows.values())
    lines = report.lines(shown=1)
    assert lines[0] == "data: 5 of 27 rows used, 1 duplicates, 21 unusable"
    assert f"data: 3 rows: malformed JSON: {file}:2, ..." in lines
    assert any("(88 tokens)" in line for line in lines)


def test_parquet_of_dapo_with_nulls_and_repeats(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    unique = [dapo_row(f"What is {i}?", str(i)) for i in range(50)]
    rows = [unique[i % 50] for i in range(5000)] + [
        dapo_row("no answer", None),
        {**unique[0], "prompt": None},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    prompts, report = read_prompts([tmp_path / "a.parquet"], raw(), tokenizer)
    assert [prompt.text for prompt in prompts] == [f"What is {i}?" for i in range(50)]
    assert report.duplicates == 4950
    assert [(row.row, row.reason.split(" in ")[0]) for row in report.rejected] == [
        (5001, "no answer"),
        (5002, "no prompt"),
    ]


QUESTION = st.text(min_size=1, max_size=8)
ANSWER = st.integers(-9, 9).map(str)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(rows=st.lists(st.tuples(QUESTION, ANSWER), min_size=1, max_size=20), rng=st.randoms())
def test_uids_do_not_depend_on_files_order_or_template(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, rows: list[tuple[str, str]], rng: Any
) -> None:
    rows = [("q" + question, answer) for question, answer in rows]
    one = jsonl(tmp_path / "one.jsonl", *[{"question": q, "answer": a} for q, a in rows])
    rng.shuffle(rows)
    pq.write_table(pa.Table.from_pylist([dapo_row(q, a) for q, a in rows]), tmp_path / "two.parquet")
    first, _ = read_prompts([one], raw(), tokenizer)
    second, _ = read_prompts([tmp_path / "two.parquet"], DataConfig(), tokenizer)
    assert {p.uid: p.answer for p in first} == {p.uid: p.answer for p in second}
    assert len(first) == len(second) == len(set(rows)) and all(0 <= p.uid < 2**63 for p in first)
    both, report = read_prompts([one, tmp_path / "two.parquet"], raw(), tokenizer)
    assert [p.uid for p in both] == [p.uid for p in first]
    assert report.kept + report.duplicates == 2 * len(rows)


def test_uids_are_fixed_for_ever() -> None:
    assert prompt_uid("What is 1+1?", "2") == GOLDEN_UID
    assert prompt_uid("a", "bc") != prompt_uid("ab", "c")


def test_tools_are_told_of(tmp_path: Path) -> None:
    told = "{% for tool in tools or [] %}{{ tool.function.name }}, {% endfor %}" + CHAT
    file, tools = jsonl(tmp_path / "a.jsonl", dapo_row("2?", "2")), [{"function": {"name": "add"}}]
    tokenizer, data = byte_tokenizer(told), DataConfig(eval=[file])
    (prompt,), _ = read_prompts([file], data, tokenizer, tools=tools)
    (sets,), _ = read_problem_sets(data, EvaluationConfig(), tokenizer, tools)
    (without,), _ = read_prompts([file], data, tokenizer)
    assert prompt.text == sets.problems[0].text == "add, " + without.text
    assert tokenizer.decode(prompt.tokens) == prompt.text and prompt.uid == without.uid
    (begun,), _ = read_prompts([file], data, tokenizer, tools=tools, opening=(7,))
    assert begun.tokens == (7,) and begun.text == prompt.text
    limit = DataConfig(train=[file], max_prompt_tokens=len(without.tokens))
    validate_files(limit, None, tokenizer)
    with pytest.raises(DataError, match=r"longer than data\.max_prompt_tokens"):
        validate_files(limit, None, tokenizer, tools)


def test_templates(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "U{prompt}"}]
    file = jsonl(
        tmp_path / "t.jsonl", {"prompt": messages, "answer": "1"}, {"prompt": "5+2=?\n", "answer": "7"}
    )

    def texts(data: DataConfig, with_: PreTrainedTokenizerFast = tokenizer) -> list[Prompt]:
        return read_prompts([file], data, with_)[0]

    assert [p.text for p in texts(DataConfig())] == [
        "<|system|>S<|end|><|user|>U{prompt}<|end|><|assistant|>",
        "<|user|>5+2=?\n<|end|><|assistant|>",
    ]
    assert [p.text for p in texts(raw(prompt_format="<{prompt}>"))] == ["S\nU{prompt}", "<5+2=?\n>"]
    llama = byte_tokenizer(CHAT, bos=True)
    assert [p.tokens[0] == 257 for p in texts(raw(), llama)] == [True, True]
    assert [p.tokens[0] == 257 for p in texts(DataConfig(), llama)] == [False, False]
    assert texts(raw(), llama)[1].tokens[1:] == texts(raw())[1].tokens
    with pytest.raises(ConfigError, match=r"^data\.template: .* no chat template"):
        texts(DataConfig(), byte_tokenizer())
    with pytest.raises(ConfigError, match=r"^data\.prompt_format: must contain"):
        texts(raw(prompt_format="no place"))


def test_the_question_is_what_the_user_asked_last(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    shown = [
        {"role": "system", "content": "Be careful."},
        {"role": "user", "content": "What is 1 + 1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "What is 5 + 2?"},
    ]
    only_system = [{"role": "system", "content": "Say 7."}]
    rows = [{"prompt": p, "answer": "7"} for p in (shown, "5+2=?", only_system)]
    file = jsonl(tmp_path / "q.jsonl", *rows)
    for data in (DataConfig(prompt_format="<{prompt}>"), raw(prompt_format="<{prompt}>")):
        prompts = read_prompts([file], data, tokenizer)[0]
        assert [p.question for p in prompts] == ["What is 5 + 2?", "5+2=?", "Say 7."]


def test_keys(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    file = jsonl(tmp_path / "k.jsonl", {"a": {"b": {"c": "x"}}, "a.b": "dotted", "text": "q", "answer": "no"})
    for key, answer in (("a.b.c", "x"), ("a.b", "dotted"), ("absent.key", "no")):
        assert read_prompts([file], raw(prompt_key="text", answer_key=key), tokenizer)[0][0].answer == answer


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_columns_of_public_sets(tmp_path: Path, tokenizer: PreTrainedTokenizerFast, kind: str) -> None:
    """GSM8K, MATH, MATH-500 and three sets of AIME, in the formats of the Hub."""
    worked = r"We have $\boxed{1}$ case, so the answer is $\boxed{\frac{1}{2}}$."
    sets = {
        "gsm8k": ({"question": "q", "answer": "2 * 3 = <<2*3=6>>6\n#### 1,006"}, "1006"),
        "math": ({"problem": "q", "level": "Level 5", "type": "Algebra", "solution": worked}, r"\frac{1}{2}"),
        "math500": ({"problem": "q", "solution": worked, "answer": "7", "subject": "Algebra"}, "7"),
        "aime": ({"ID": "2024-I-1", "Problem": "q", "Solution": worked, "Answer": 204}, "204"),
        "aime_years": ({"Year": 1983, "Question": "q", "Answer": "060", "Part": None}, "060"),
        "aime_hub": ({"id": 60, "problem": "q", "solution": worked, "answer": "204", "url": "u"}, "204"),
        "dapo": ({**dapo_row("q", "34"), "solution": "35"}, "34"),
    }
    for name, (row, answer) in sets.items():
        file = tmp_path / f"{name}.{kind}"
        jsonl(file, row) if kind == "jsonl" else pq.write_table(pa.Table.from_pylist([row]), file)
        [prompt], _ = read_prompts([file], raw(), tokenizer)
        assert (prompt.text, prompt.answer) == ("q", answer), name
    both = jsonl(tmp_path / "both.jsonl", sets["math500"][0])  # the key selects the solution
    [prompt], _ = read_prompts([both], raw(answer_key="solution"), tokenizer)
    assert prompt.answer == r"\frac{1}{2}"
    none = [{"problem": "q", "solution": "no box"}, {"problem": "q", "solution": None}]
    _, report = read_prompts([jsonl(tmp_path / "none.jsonl", *none, sets["math"][0])], raw(), tokenizer)
    assert len(report.rejected) == 2 and "or solution" in report.rejected[0].reason


def test_ambiguous_columns_are_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    two = jsonl(tmp_path / "two.jsonl", {"question": "q", "Problem": "p", "answer": "1", "Answer": "2"})
    for settings_, words in (
        (
            {},
            f"{two}: columns question and Problem differ, and either may be meant (set data.prompt_key",
        ),
        ({"prompt_key": "Problem"}, f"{two}: columns answer and Answer differ"),
    ):
        with pytest.raises(DataError, match=re.escape(words)):
            read_prompts([two], raw(**settings_), tokenizer)
        with pytest.raises(DataError, match=re.escape(words)):
            validate_files(raw(train=(two,), **settings_))
    [prompt], _ = read_prompts([two], raw(prompt_key="Problem", answer_key="Answer"), tokenizer)
    assert (prompt.text, prompt.answer) == ("p", "2")
    # The configured column takes precedence, and columns with equal content are not ambiguous.
    same = {"prompt": "p", "question": "q", "problem": "r", "answer": "1", "Answer": "1"}
    [prompt], _ = read_prompts([jsonl(tmp_path / "same.jsonl", same)], raw(), tokenizer)
    assert (prompt.text, prompt.answer) == ("p", "1")


def test_supervised_pairs(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    good = {"prompt": "5+2=?\n", "response": "Answer: 7"}
    file = jsonl(
        tmp_path / "s.jsonl",
        good,
        good,
        {"prompt": "q"},
        {"prompt": "q", "response": 5},
        {"prompt": "x" * 99, "response": "a"},
    )
    report = ReadReport()
    pairs = read_pairs([file], raw(max_prompt_tokens=64), "response", tokenizer, report)
    assert len(pairs) == 2 and pairs[0] == pairs[1]  # the frequency of a text is part of the training data
    assert tokenizer.decode(pairs[0][0]) == "5+2=?\n"
    assert tokenizer.decode(pairs[0][1][:-1]) == "Answer: 7" and pairs[0][1][-1] == tokenizer.eos_token_id
    none = "no response in response or completion or messages"
    reasons = [none, "response is not a text", "longer than data.max_prompt_tokens 64"]
    assert [(row.row, row.reason) for row in report.rejected] == list(zip((3, 4, 5), reasons, strict=True))
    llama = byte_tokenizer(bos=True)
    prompt, response = read_pairs([file], raw(max_prompt_tokens=64), "response", llama, ReadReport())[0]
    assert prompt[0] == 257 and 257 not in response
    llama.eos_token = None
    with pytest.raises(ConfigError, match=r"^model\.path: .*end-of-sequence"):
        read_pairs([file], raw(), "response", llama, ReadReport())


def bad_files(folder: Path) -> list[tuple[Path, str]]:
    (folder / "empty.jsonl").touch()
    (folder / "empty.parquet").touch()
    (folder / "blank.jsonl").write_text("\n \n")
    (folder / "foreign.parquet").write_bytes(b"PAR1 but not really" * 20)
    (folder / "foreign.jsonl").write_bytes(bytes(range(256)) * 4)
    (folder / "notes.txt").write_text("hello")
    jsonl(folder / "useless.jsonl", {"question": "q"}, {"answer": "1"})
    pq.write_table(
        pa.table({"question": pa.array([], pa.string()), "answer": pa.array([], pa.string())}),
        folder / "none.parquet",
    )
    pq.write_table(pa.table({"input": ["q"], "output": ["1"]}), folder / "columns.parquet")
    pq.write_table(pa.table({"question": ["q" * 5000], "answer": ["1"]}), folder / "cut.parquet")
    whole = (folder / "cut.parquet").read_bytes()
    (folder / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    return [
        (folder / "absent.jsonl", "no such file"),
        (folder, "not a file"),
        (folder / "notes.txt", "unknown kind of file '.txt'"),
        (folder / "empty.jsonl", "holds no row"),
        (folder / "blank.jsonl", "holds no row"),
        (folder / "none.parquet", "holds no row"),
        (folder / "empty.parquet", "cannot be read"),
        (folder / "foreign.parquet", "cannot be read"),
        (folder / "cut.parquet", "cannot be read"),
        (folder / "foreign.jsonl", "no row can be used: "),
        (
            folder / "useless.jsonl",
            f"no row can be used: 1 x {NO_ANSWER}; 1 x no",
        ),
        (folder / "columns.parquet", "none of the columns"),
    ]


def test_bad_files_are_named_before_and_after_ranks_are_started(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    good = jsonl(tmp_path / "good.jsonl", {"question": "q", "answer": "1"})
    for file, words in bad_files(tmp_path):
        for check in (
            lambda file=file: read_prompts([good, file], raw(), tokenizer),
            lambda file=file: validate_files(raw(train=(good, file))),
            lambda file=file: validate_files(raw(train=(good,), eval=(file,))),
        ):
            with pytest.raises(DataError) as caught:
                check()
            assert (
                str(caught.value).startswith(f"{file}: ")
                and words in str(caught.value)
                and "\n" not in str(caught.value)
            )
    with pytest.raises(DataError, match="longer than"):
        read_prompts([good], DataConfig(max_prompt_tokens=2), tokenizer)
    with pytest.raises(DataError, match=r"^data\.train: names no file"):
        read_prompts([], raw(), tokenizer)
    validate_files(raw(train=(good,)))
    with pytest.raises(DataError, match="no response in response"):
        validate_files(raw(train=(good,)), response_key="response")
    validate_files(
        raw(train=(jsonl(tmp_path / "sft.jsonl", {"prompt": "q", "response": "r"}),), eval=(good,)),
        response_key="response",
    )


def test_the_check_before_ranks_needs_neither_torch_nor_transformers(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "good.jsonl", {"question": "q", "answer": "1"})
    code = (
        "import sys; from megarl.config.schema import DataConfig\n"
        "from megarl.data.prompts import validate_files\n"
        f"validate_files(DataConfig(train=({str(file)!r},)))\n"
        "sys.exit(bool({'torch', 'transformers', 'tokenizers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def answers(tmp_path: Path, tokenizer: Any, *rows: dict[str, Any]) -> list[str]:
    """Return the reference answers of rows that are all used."""
    file = jsonl(tmp_path / "answers.jsonl", *({"question": f"q{i}", **row} for i, row in enumerate(rows)))
    found, report = read_prompts([file], raw(), tokenizer)
    assert not report.rejected
    return [prompt.answer for prompt in found]


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (r"#### \frac{1}{2}, 3", r"\frac{1}{2}, 3"),
        ("#### 1,234", "1234"),
        ("#### -1,234,567.5", "-1234567.5"),
        ("#### $12,000", "$12000"),
        ("#### 1, 2", "1, 2"),
        ("#### 1,2", "1,2"),
        ("#### (1,234)", "(1234)"),
        ("#### 1,2345", "1,2345"),
        ("#### 1234,567", "1234,567"),
        ("#### 10,00,000", "10,00,000"),
        ("#### 1,234,5", "1,234,5"),
        ("#### 1,234, 5", "1234, 5"),
        ("#### x,y", "x,y"),
    ],
)
def test_only_commas_between_groups_of_digits_go(
    tmp_path: Path, tokenizer: Any, written: str, read: str
) -> None:
    rows = (
        {"answer": f"so\n{written}"},
        {"solution": f"so {written}"},
        {"reward_model": {"ground_truth": written}},
    )
    assert answers(tmp_path, tokenizer, *rows) == [read] * 3


def test_numbers_of_every_kind_are_answers(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """A decimal keeps its digits; a non-finite number is not an answer."""
    file = tmp_path / "a.parquet"
    decimals = pa.array(
        [Decimal("2.50"), Decimal("-0.05"), Decimal("1000000.00"), None], pa.decimal128(12, 2)
    )
    pq.write_table(pa.table({"question": list("abcd"), "answer": decimals}), file)
    found, report = read_prompts([file], raw(), tokenizer)
    assert [prompt.answer for prompt in found] == ["2.50", "-0.05", "1000000.00"]
    assert [row.row for row in report.rejected] == [4]
    pq.write_table(pa.table({"question": list("abcd"), "answer": [1.5, math.inf, -math.inf, math.nan]}), file)
    lines = jsonl(
        tmp_path / "a.jsonl",
        '{"question": "e", "answer": 1e400}',
        '{"question": "f", "answer": -1e999}',
        '{"question": "g", "answer": 2}',
    )
    found, report = read_prompts([file, lines], raw(), tokenizer)
    assert [prompt.answer for prompt in found] == ["1.5", "2"]
    wrong = "answer is neither a text nor a number"
    assert [(row.row, row.reason, row.detail) for row in report.rejected] == [
        *(
            (row, wrong, detail)
            for row, detail in ((2, "inf"), (3, "-inf"), (4, "nan"), (1, "inf"), (2, "-inf"))
        )
    ]


def test_messages_as_json_text(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    texts = [
        json.dumps(messages),
        f" {json.dumps(messages[1:], indent=1)}\n",
        "[1, 2] is a list",
        '["a"]',
        "[]",
        "[" * 9,
    ]
    file = jsonl(tmp_path / "a.jsonl", *({"prompt": text, "answer": str(i)} for i, text in enumerate(texts)))
    found, report = read_prompts([file], DataConfig(), tokenizer)
    assert [prompt.text for prompt in found[:2]] == [
        "<|system|>S<|end|><|user|>U<|end|><|assistant|>",
        "<|user|>U<|end|><|assistant|>",
    ]
    assert [prompt.question for prompt in found] == ["U", "U", *texts[2:]] and not report.rejected


def test_content_in_parts(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    def parts(*texts: str) -> list[dict[str, str]]:
        return [{"type": "text", "text": text} for text in texts]

    picture = [*parts("What is it?"), {"type": "image", "url": "x"}]
    rows = [
        {"prompt": [{"role": "user", "content": parts("5", "+2")}], "answer": "7"},
        {"prompt": [{"role": "user", "content": picture}], "answer": "7"},
        {
            "messages": [
                {"role": "user", "content": parts("6+2")},
                {"role": "assistant", "content": parts("#### ", "8")},
            ]
        },
    ]
    found, report = read_prompts([jsonl(tmp_path / "a.jsonl", *rows)], DataConfig(), tokenizer)
    assert [(prompt.question, prompt.answer) for prompt in found] == [("5+2", "7"), ("6+2", "8")]
    assert [(row.row, row.detail) for row in report.rejected] == [(2, "role or content is not a text")]
    pairs = read_pairs([tmp_path / "a.jsonl"], DataConfig(), "response", tokenizer, ReadReport())
    assert tokenizer.decode(pairs[0][1][:-1]) == "#### 8"


def test_a_prompt_that_the_assistant_has_begun_is_continued(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    begun = [{"role": "user", "content": "5+2=?"}, {"role": "assistant", "content": "Let me see. <think>"}]
    file = jsonl(tmp_path / "a.jsonl", {"prompt": begun, "answer": "7"})
    (prompt,), report = read_prompts([file], DataConfig(), tokenizer)
    assert prompt.text == "<|user|>5+2=?<|end|><|assistant|>Let me see. <think>" and not report.rejected
    assert prompt.question == "5+2=?" and tokenizer.decode(prompt.tokens) == prompt.text
    (prompt,), _ = read_prompts([file], raw(), tokenizer)
    assert prompt.text == "5+2=?\nLet me see. <think>"


def test_a_prompt_has_one_bos_and_nothing_behind_it(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(CHAT, bos=True)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 257), ("<eos>", 256)]
    )
    assert tokenizer("a").input_ids[-1] == 256
    rows = [{"question": q, "answer": "7"} for q in ("5+2=?", "<bos>5+3=?", "a <bos>", "<bos>5+4=?")]
    file = jsonl(tmp_path / "a.jsonl", *rows)
    found, report = read_prompts([file], raw(), tokenizer)
    assert [prompt.tokens.count(257) for prompt in found] == [1, 1, 2, 1]
    assert all(prompt.tokens[0] == 257 and 256 not in prompt.tokens for prompt in found)
    what = "the prompt begins with <bos> already, and gets no other"
    assert report.lines() == [
        "data: 4 of 4 rows used, 0 duplicates, 0 unusable",
        f"data: warning: 2 rows: {what}: {file}:2, {file}:4",
    ]
    pairs = read_pairs(
        [jsonl(tmp_path / "s.jsonl", {"prompt": "q", "response": "r"})], raw(), "response", tokenizer, report
    )
    assert pairs[0][0][0] == 257 and 256 not in pairs[0][0] and pairs[0][1].count(256) == 1


def test_a_prompt_that_was_rendered_already(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer("<bos>" + CHAT)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|end|>", "<|assistant|>"]})
    rendered = "<bos><|user|>5+2=?<|end|><|assistant|>"
    rows = [
        {"prompt": p, "answer": "7"} for p in ("5+2=?", rendered, [{"role": "user", "content": rendered[5:]}])
    ]
    file = jsonl(tmp_path / "a.jsonl", *rows)
    found, report = read_prompts([file], DataConfig(), tokenizer)
    assert [prompt.text.count("<bos>") for prompt in found] == [1, 1, 1]
    what = "a chat template has rendered it already (set data.template=raw)"
    assert [(row.row, row.reason) for row in report.warned] == [
        (row, f"the prompt begins with {token}: {what}") for row, token in ((2, "<bos>"), (3, "<|user|>"))
    ]
    (_, prompt, _), report = read_prompts([file], raw(), tokenizer)
    assert prompt.text == rendered and prompt.tokens.count(257) == 1


def test_variables_of_the_chat_template(tmp_path: Path) -> None:
    """Qwen3's enable_thinking applies to training, evaluation and pairs."""
    tokenizer = byte_tokenizer(CHAT + "{% if enable_thinking is false %}<think></think>{% endif %}")
    file = jsonl(tmp_path / "a.jsonl", {"question": "q", "answer": "7"})
    data = DataConfig(eval=(file,), chat_template_kwargs={"enable_thinking": False})
    assert read_prompts([file], data, tokenizer)[0][0].text == "<|user|>q<|end|><|assistant|><think></think>"
    (held_out,), _ = read_problem_sets(data, EvaluationConfig(), tokenizer)
    assert held_out.problems[0].text.endswith("<think></think>")
    assert read_prompts([file], DataConfig(), tokenizer)[0][0].text.endswith("<|assistant|>")
    pairs = jsonl(tmp_path / "s.jsonl", {"prompt": "q", "response": "r"})
    (pair,) = read_pairs([pairs], data, "response", tokenizer, ReadReport())
    assert tokenizer.decode(pair[0]).endswith("<think></think>")
    with pytest.raises(ValueError, match="must not have tools, which is set for each conversation"):
        DataConfig(chat_template_kwargs={"tools": []})
