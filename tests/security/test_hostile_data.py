"""Data files and chat templates of a stranger take neither all memory nor endless time.

What cannot be used is reported in one line that names the file and the row."""

from __future__ import annotations

import json
import resource
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megarl.agents.chat import ChatTurns, check_template
from megarl.config.errors import ConfigError, DataError
from megarl.config.schema import DataConfig
from megarl.data import chat_template, limits, prompts, readers
from megarl.data.prompts import ReadReport, read_pairs, read_prompts
from tests.cli.scene import Scene
from tests.data.test_reader import CHAT, byte_tokenizer

MIB = 1 << 20
LOOP = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3
RAW = DataConfig(template="raw")


def peak() -> int:
    """Return the most bytes that this process has had in memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_tokenizer(CHAT)


def write_repeated(path: Path, values: list[Any], rows: int) -> None:
    """Write a file of `rows` rows, each of the same long values, and little else."""
    index = pa.array(np.zeros(rows, dtype=np.int32))
    columns = [
        pa.nulls(rows) if value is None else pa.DictionaryArray.from_arrays(index, pa.array([value]))
        for value in values
    ]
    table = pa.table(dict(zip(("question", "answer"), columns, strict=True)))
    options: Any = {"compression": "zstd", "write_statistics": False, "store_schema": False}
    pq.write_table(table, path, row_group_size=rows, **options)
    assert path.stat().st_size < 32_768


def test_a_thousand_bytes_of_parquet_that_become_80_gigabytes(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "MEMORY", 256 * MIB)
    file = tmp_path / "bomb.parquet"
    write_repeated(file, ["x" * (20 * MIB), "1"], 4096)
    before = resource.getrlimit(resource.RLIMIT_DATA)
    start = peak()
    with pytest.raises(
        DataError, match=r"bomb\.parquet: rows 1 to 4,096 take more than 256 MiB dec"
    ) as error:
        read_prompts([file], RAW, tokenizer)
    assert "\n" not in str(error.value)
    assert peak() - start < 1600 * MIB and resource.getrlimit(resource.RLIMIT_DATA) == before


def test_one_row_of_parquet_with_a_list_of_33_million(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "MEMORY", 64 * MIB)
    values = pa.array(np.zeros(1 << 25, dtype=np.int8))
    lists = pa.ListArray.from_arrays(pa.array([0, len(values)], pa.int32()), values)
    extra = pa.StructArray.from_arrays([pa.ListArray.from_arrays(pa.array([0, 1], pa.int32()), lists)], ["a"])
    file = tmp_path / "list.parquet"
    pq.write_table(
        pa.table({"question": ["q"], "answer": ["1"], "extra_info": extra}), file, compression="zstd"
    )
    assert file.stat().st_size < 10_000
    with pytest.raises(DataError, match=r"list\.parquet: rows 1 to 1 take more than"):
        read_prompts([file], RAW, tokenizer)


@pytest.mark.parametrize("values", [["x" * 5000, "1"], [None, None]])
def test_a_thousand_bytes_of_parquet_with_millions_of_rows(
    tmp_path: Path, tokenizer: Any, values: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row leaves something behind: a pair, or its number in the report."""
    monkeypatch.setattr(readers, "EXPANSION", 100)
    monkeypatch.setattr(readers, "_EXPANSION_FREE", 8 * MIB)
    file, start = tmp_path / "same.parquet", peak()
    write_repeated(file, values, 4_000_000)
    with pytest.raises(
        DataError, match=r"bytes become [\d,]+ up to row [\d,]+: its rows repeat \(write each"
    ):
        read_pairs(
            [file], DataConfig(template="raw", prompt_key="question"), "answer", tokenizer, ReadReport()
        )
    assert peak() - start < 800 * MIB


def test_rows_may_repeat(tmp_path: Path, tokenizer: Any) -> None:
    """As in the published set of AIME, 32 times each."""
    write_repeated(tmp_path / "same.parquet", ["x" * 2000, "1"], 960)
    found, report = read_prompts([tmp_path / "same.parquet"], RAW, tokenizer)
    assert len(found) == 1 and report.duplicates == 959


def test_a_line_of_50_megabytes(tmp_path: Path, tokenizer: Any) -> None:
    """The line is never held as a whole, and the rows around it are used."""
    file = tmp_path / "long.jsonl"
    with file.open("w") as out:
        out.write('{"question": "first", "answer": "1"}\n')
        out.write('{"answer": "1", "question": [' + "{}," * (50 * MIB // 3) + "{}]}\n")
        out.write('{"question": "last", "answer": "2"}\n')
        out.write('{"question": "' + "x" * (17 * MIB))
    start = peak()
    found, report = read_prompts([file], RAW, tokenizer)
    assert [one.question for one in found] == ["first", "last"] and peak() - start < 200 * MIB
    assert [(row.row, row.reason) for row in report.rejected] == [
        (2, "line is longer than 16 MiB"),
        (4, "line is longer than 16 MiB"),
    ]
    assert f"data: 2 rows: line is longer than 16 MiB: {file}:2, {file}:4" in report.lines()


def test_a_long_prompt_is_not_tokenized(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(CHAT)
    lengths: list[int] = []

    class Counting:
        """Records the lengths of the texts that are tokenized."""

        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

        def __call__(self, texts: list[str], **options: Any) -> Any:
            lengths.extend(map(len, texts))
            return tokenizer(texts, **options)

    rows = [{"question": "x" * 6401, "answer": "1"}, {"question": "y" * 64, "answer": "1"}]
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for template in ("raw", "chat"):
        data = DataConfig(template=template, max_prompt_tokens=64 if template == "raw" else 100)
        if template == "chat":
            file.write_text(json.dumps({"question": "x" * 10001, "answer": "1"}) + "\n" + json.dumps(rows[1]))
        found, report = read_prompts([file], data, Counting())  # type: ignore[arg-type]
        (row,) = report.rejected
        assert row.reason == f"longer than data.max_prompt_tokens {data.max_prompt_tokens}"
        assert row.detail.endswith(" characters") and len(found) == 1 and max(lengths) < 200


def test_a_long_response_is_left_out(tmp_path: Path, tokenizer: Any) -> None:
    file = tmp_path / "a.jsonl"
    rows = [{"prompt": "q", "response": "x" * (5 * MIB)}, {"prompt": "q", "response": "x"}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = ReadReport()
    assert len(read_pairs([file], RAW, "response", tokenizer, report)) == 1
    assert report.rejected[0].reason == "response is longer than 4,194,304 characters"


def test_rows_are_tokenized_in_batches_of_few_characters(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(prompts, "_CHARACTERS_AT_ONCE", 1000)
    rows = iter([prompts._Row("f", i, i, "x" * 400, "y" * 100, "", {}) for i in range(7)])
    assert [len(prompts._take(rows, 1024)) for _ in range(5)] == [2, 2, 2, 1, 0]


@pytest.mark.parametrize("column", ["data_source", "question", "answer", "extra_info", "reward_model"])
def test_half_of_a_surrogate_pair(tmp_path: Path, tokenizer: Any, column: str) -> None:
    row = {"question": "q", "answer": "1", "data_source": "s", "extra_info": {"a": "b"}}
    bad: Any = {"extra_info": {"a": [{"\udc80": "\ud800"}]}, "reward_model": {"ground_truth": "\ud83d"}}
    file = tmp_path / "a.jsonl"
    rows = [row, row | {column: bad.get(column, "x \ud800 y")}, row | {"question": "\U0001f600 \\ud800"}]
    file.write_text("".join(json.dumps(one) + "\n" for one in rows))
    found, report = read_prompts([file], RAW, tokenizer)
    assert [one.question for one in found] == ["q", "\U0001f600 \\ud800"]
    assert [(one.row, one.reason) for one in report.rejected] == [(2, "text is not Unicode")]


def test_parquet_text_that_is_not_utf_8(tmp_path: Path, tokenizer: Any) -> None:
    texts = pa.array([b"first", b"\xed\xa0\x80 \xff", b"last"]).view(pa.string())
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"question": texts, "answer": ["1", "2", "3"]}), file)
    found, report = read_prompts([file], RAW, tokenizer)
    assert [one.question for one in found] == ["first", "last"]
    assert [(one.row, one.reason) for one in report.rejected] == [(2, "text is not Unicode")]


@pytest.mark.parametrize("where", ["data", "conversation", "check"])
def test_a_template_that_never_ends(tmp_path: Path, monkeypatch: Any, where: str) -> None:
    monkeypatch.setattr(chat_template, "SECONDS", 0.3)
    file = tmp_path / "a.jsonl"
    file.write_text('{"question": "q", "answer": "1"}\n')
    tokenizer = byte_tokenizer(CHAT + "{% if messages[0].content == 'q' %}" + LOOP + "{% endif %}")
    tokenizer.name_or_path = "/models/stranger"
    began = time.monotonic()
    with pytest.raises(ConfigError) as error:
        if where == "data":
            read_prompts([file], DataConfig(), tokenizer)
        elif where == "conversation":
            ChatTurns(tokenizer).first([{"role": "user", "content": "q"}])
        else:
            tokenizer.chat_template = CHAT + LOOP
            check_template(tokenizer)
    line = "data.template: the chat template of /models/stranger has not ended within 0.3 s"
    assert str(error.value) == f"{line} (it may loop for ever)" and time.monotonic() - began < 5


@pytest.mark.parametrize("where", ["data", "check"])
def test_a_template_that_takes_all_memory(tmp_path: Path, tokenizer: Any, where: str) -> None:
    begin, loop = "{% set ns = namespace(x='xxxxxxxx') %}", "{% for i in range(60) %}"
    greedy = byte_tokenizer(CHAT + begin + loop + "{% set ns.x = ns.x ~ ns.x %}{% endfor %}")
    start = peak()
    file = tmp_path / "a.jsonl"
    file.write_text('{"question": "q", "answer": "1"}\n')
    if where == "data":
        with pytest.raises(DataError, match=r"no row can be used: 1 x refused by the chat template"):
            read_prompts([file], DataConfig(), greedy)
    else:
        with pytest.raises(
            ConfigError, match=r"^data\.template: the chat template refuses user.*: MemoryError"
        ):
            check_template(greedy)
    assert peak() - start < 1600 * MIB


def test_the_command_says_so(tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(chat_template, "SECONDS", 0.3)
    scene = Scene.make(tmp_path)
    scene.capsys = capsys
    (tmp_path / "model" / "chat_template.jinja").write_text(LOOP)
    line = f"data.template: the chat template of {tmp_path}/model has not ended within 0.3 s"
    assert scene.refused("data", "show", str(scene.config)) == f"{line} (it may loop for ever)"
    assert scene.train_refused() == f"{line} (it may loop for ever)"


def test_a_template_may_not_compute_powers() -> None:
    """9 ** 9 ** 9 is one operation, which no signal interrupts."""
    tokenizer = byte_tokenizer(CHAT + "{{ 9 ** 9 ** 9 }}")
    with pytest.raises(ConfigError, match=r"computes powers"):
        ChatTurns(tokenizer)
    byte_tokenizer(CHAT + "**bold** {# 2 ** 3 #}{{ '**' }}")
    assert "**" in ChatTurns(byte_tokenizer("**" + CHAT + "{{ '**' }}")).render(
        [{"role": "user", "content": ""}]
    )


def test_limits_leave_no_trace() -> None:
    """Nested, in another thread, and after an error, all is as it was."""
    import signal

    before = signal.getsignal(signal.SIGALRM), resource.getrlimit(resource.RLIMIT_DATA)
    signal.setitimer(signal.ITIMER_REAL, 1000)
    with pytest.raises(ZeroDivisionError), limits.time_limit(10, "x"), limits.memory_limit(MIB):
        raise ZeroDivisionError
    assert 900 < signal.setitimer(signal.ITIMER_REAL, 0)[0] <= 1000
    assert (signal.getsignal(signal.SIGALRM), resource.getrlimit(resource.RLIMIT_DATA)) == before
    done: list[int] = []

    def other() -> None:
        with limits.time_limit(10, "x"):
            done.append(1)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert done == [1]
    with pytest.raises(MemoryError), limits.memory_limit(MIB):
        bytearray(64 * MIB)


def test_threads_leave_no_memory_limit() -> None:
    """The limit is the process's. A second thread that met the first one's limit would restore that one at
    last: hours later a library would find no memory, and end the process."""
    before, entered, left = resource.getrlimit(resource.RLIMIT_DATA), threading.Event(), threading.Event()

    def other() -> None:
        with limits.memory_limit(512 * MIB):
            entered.set()
            assert left.wait(60)

    thread = threading.Thread(target=other)
    with limits.memory_limit(512 * MIB):
        thread.start()
        entered.wait(0.5)  # it must not, but might have
    left.set()
    thread.join()
    assert entered.is_set() and resource.getrlimit(resource.RLIMIT_DATA) == before
