"""A run's logs: records are read back after any truncation; a resumed run leaves no trace of the kill."""

from __future__ import annotations

import math
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.config.errors import ConfigError, DataError
from megarl.observe.run_log import METRICS_FILE, RunLog, SampleRecord, choose_samples, shorten
from megarl.observe.runs import load_run, read_metrics

NAMES = st.sampled_from(["policy/loss", "reward/mean", "eval/avg", "time/step", "throughput/rollout_tokens"])
VALUES = st.one_of(st.floats(), st.integers(-(2**60), 2**60), st.none(), st.text(max_size=5))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.dictionaries(NAMES, VALUES), max_size=6))
def test_what_is_written_is_read(metrics: list[dict[str, object]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        with RunLog(Path(folder)) as log:
            for step, record in enumerate(metrics):
                log.write_metrics({"step": step, "stage": "train", **record})
        found = read_metrics(Path(folder))
    assert found.unreadable == []
    assert [r["step"] for r in found.records] == list(range(len(metrics)))
    for record, read in zip(metrics, found.records, strict=True):
        bad = [
            name for name, value in record.items() if isinstance(value, float) and not math.isfinite(value)
        ]
        assert [text.split(":")[0] for text in read.pop("alarms", [])] == bad
        for name, value in record.items():
            if name in bad:
                assert read[name] is None
            elif isinstance(value, float):
                assert read[name] == pytest.approx(value, rel=5e-9, abs=1e-320)
            else:
                assert read[name] == value


def test_tensors_and_nested_values(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        returned = log.write_metrics(
            {
                "step": np.int64(3),
                "stage": "train",
                "policy/loss": torch.tensor(1 / 3, dtype=torch.float64),
                "gae/lambda_mean": np.float32(0.5),
                "per_rank": [1.0, float("inf")],
                "events": ["checkpoint written"],
            }
        )
    (read,) = read_metrics(tmp_path).records
    assert read == returned
    assert read["step"] == 3 and read["policy/loss"] == 0.333333333 and read["gae/lambda_mean"] == 0.5
    assert (
        read["per_rank"] == [1.0, None]
        and read["alarms"] == ["per_rank[1]: inf"]
        and read["events"] == ["checkpoint written"]
    )


@pytest.mark.parametrize(
    "record",
    [{"stage": "train"}, {"step": 1}, {"step": 1.5, "stage": "train"}, {"step": 1, "stage": "other"}],
)
def test_a_record_without_its_place_is_refused(tmp_path: Path, record: dict[str, object]) -> None:
    with RunLog(tmp_path) as log, pytest.raises(ValueError, match="stage"):
        log.write_metrics(record)
    assert read_metrics(tmp_path).records == []


def test_a_file_cut_anywhere_is_read_and_continued(tmp_path: Path) -> None:
    with RunLog(tmp_path / "whole") as log:
        for step in range(3):
            log.write_metrics({"step": step, "stage": "train", "reward/mean": step / 3, "note": "päp"})
    content = (tmp_path / "whole" / METRICS_FILE).read_bytes()
    ends = [i for i, byte in enumerate(content) if byte == ord("\n")]
    for cut in range(len(content) + 1):
        run_dir = tmp_path / "cut"
        run_dir.mkdir(exist_ok=True)
        (run_dir / METRICS_FILE).write_bytes(content[:cut])
        complete = sum(end <= cut for end in ends)  # a line that lacks only its newline is complete
        ragged = cut > 0 and cut not in ends and cut - 1 not in ends
        found = read_metrics(run_dir)
        assert len(found.records) == complete
        assert found.unreadable == ([complete + 1] if ragged else [])
        with RunLog(run_dir, append=True) as log:
            log.write_metrics({"step": 7, "stage": "train"})
        mended = read_metrics(run_dir)
        assert [r["step"] for r in mended.records] == [*range(complete), 7]
        assert mended.unreadable == []


def test_without_append_the_file_starts_anew(tmp_path: Path) -> None:
    for append, count in ((False, 1), (True, 2), (False, 1)):
        with RunLog(tmp_path, append=append) as log:
            log.write_metrics({"step": 1, "stage": "train"})
        assert len(read_metrics(tmp_path).records) == count


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 4), st.integers(1, 8), st.integers(1, 3), st.booleans(), st.data())
def test_truncation_leaves_what_was_written_before(
    pretraining: int, steps: int, every: int, cut_line: bool, data: st.DataObject
) -> None:
    """Continuing after any step of an uninterrupted run keeps exactly the lines up to it."""
    lines = [(0, "eval")] + [(s, "value_pretraining") for s in range(1, pretraining + 1)]
    for step in range(1, steps + 1):
        lines += [(step, "train")] + ([(step, "eval")] if step % every == 0 else [])
    last = data.draw(st.sampled_from([line for line in lines if line[1] != "eval"]))
    after_it = lines.index(last) + 1
    if last[1] == "train" and last[0] % every == 0:
        after_it += 1  # the evaluation of that step
    with tempfile.TemporaryDirectory() as folder, RunLog(Path(folder)) as log:
        for step, stage in lines:
            log.write_metrics({"step": step, "stage": stage})
        if cut_line:
            with (Path(folder) / METRICS_FILE).open("ab") as file:
                file.write(b'{"step": 9, "sta')
        assert log.truncate_after(*last) == len(lines) - after_it + cut_line
        log.write_metrics({"step": 99, "stage": "train"})
        found = read_metrics(Path(folder))
        assert [(r["step"], r["stage"]) for r in found.records] == [*lines[:after_it], (99, "train")]
        assert found.unreadable == []


def test_errors_name_file_and_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"metrics.jsonl: cannot be written: .*choose another run_dir"):
        RunLog(tmp_path / "file")
    with pytest.raises(DataError, match=r"metrics.jsonl: cannot be read"):
        read_metrics(tmp_path)


@pytest.mark.parametrize(("tracker", "module"), [("tensorboard", "tensorboard"), ("wandb", "wandb")])
def test_a_missing_tracker_names_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tracker: str, module: str
) -> None:
    # the marker that Python uses for a module that must not be imported
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"log\.{tracker}: .*megarl\[track\]"):
        RunLog(tmp_path, **{tracker: True})
    assert not (tmp_path / METRICS_FILE).exists()


def test_tensorboard_gets_the_same_numbers(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with RunLog(tmp_path, tensorboard=True) as log:
        log.write_metrics({"step": 1, "stage": "value_pretraining", "value/loss": 0.5})
        for step in (1, 2, 3):
            log.write_metrics(
                {"step": step, "stage": "train", "value/loss": step / 8, "policy/loss": float("nan")}
            )
        log.truncate_after(2)
        log.write_metrics({"step": 3, "stage": "train", "value/loss": 9.0})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("value/loss")] == [(1, 0.125), (2, 0.25), (3, 9.0)]
    assert [e.value for e in events.Scalars("value_pretraining/value/loss")] == [0.5]
    assert "policy/loss" not in events.Tags()["scalars"]


SAMPLES = st.builds(
    SampleRecord,
    step=st.just(1),
    prompt=st.sampled_from(["a", "b", "c"]),
    response=st.text(max_size=40),
    reward=st.one_of(st.none(), st.integers(-8, 8).map(lambda n: n / 8)),
    correct=st.booleans(),
    truncated=st.booleans(),
    length=st.integers(0, 20480),
    answer=st.text(max_size=5),
    advantage_mean=st.one_of(st.none(), st.integers(-8, 8).map(lambda n: n / 8)),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(SAMPLES, max_size=12), st.integers(0, 8))
def test_samples_round_trip_and_bound(samples: list[SampleRecord], limit: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        with RunLog(Path(folder), samples=limit) as log:
            log.write_samples(samples)
        run = load_run(Path(folder))
    assert run.samples == choose_samples(samples, limit) and run.unreadable == 0
    assert len(run.samples) == min(limit, len(samples))
    remaining = list(samples)
    for sample in run.samples:
        remaining.remove(sample)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.booleans(), min_size=2, max_size=16), st.integers(2, 8))
def test_a_mixed_group_shows_both_verdicts(verdicts: list[bool], limit: int) -> None:
    group = [SampleRecord(1, "p", str(i), 0.0, verdict, False, 1) for i, verdict in enumerate(verdicts)]
    chosen = choose_samples(group, limit)
    assert {s.correct for s in chosen} == set(verdicts)
    assert chosen == sorted(chosen, key=lambda s: int(s.response))


@settings(deadline=None)
@given(st.text(), st.integers(2, 50))
def test_shortened_text_keeps_both_ends(text: str, limit: int) -> None:
    short = shorten(text, limit)
    if len(text) <= limit:
        assert short == text
    else:
        kept = limit // 2
        assert (
            short.startswith(text[:kept])
            and short.endswith(text[-kept:])
            and f"{len(text) - 2 * kept} characters left out" in short
        )


def test_long_responses_are_shortened_and_later_samples_dropped(tmp_path: Path) -> None:
    with RunLog(tmp_path, samples=4) as log:
        for step in (1, 2, 3):
            log.write_samples(
                [SampleRecord(step, "q" * 30_000, "x" * 50_000 + "Answer: 5", 1.0, True, False, 300)]
            )
        assert log.truncate_after(1) == 2
    with (tmp_path / "samples.jsonl").open("ab") as file:
        file.write(b'{"step": 4, "prompt": "foreign"}\n{"step": 5, "pro')
    run = load_run(tmp_path)
    (sample,) = run.samples
    assert sample.step == 1 and sample.response.endswith("Answer: 5")
    assert all(20_000 <= len(text) < 20_100 for text in (sample.prompt, sample.response))
    assert run.unreadable == 2


def test_distributions_are_written_read_and_cut_back(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        for stage, step in (("value_pretraining", 1), ("train", 1), ("train", 2), ("train", 3)):
            log.write_distributions(step, stage, {"mismatch": {"tokens": [1.0, step / 3]}})
        assert log.truncate_after(1) == 2
    with (tmp_path / "distributions.jsonl").open("ab") as file:
        file.write(b'{"step": 2, "stage": "tr')
    run = load_run(tmp_path)
    records = run.distributions
    assert [(r["stage"], r["step"]) for r in records] == [("value_pretraining", 1), ("train", 1)]
    assert records[1]["mismatch"] == {"tokens": [1.0, 0.333333333]} and run.unreadable == 1
    RunLog(tmp_path, append=True).close()
    mended = load_run(tmp_path)
    assert mended.distributions == records and mended.unreadable == 0


def test_answers_are_written_as_they_are_and_cut_back(tmp_path: Path) -> None:
    for append, stage, expected in ((False, "train", [0, 2]), (True, "value_pretraining", [0])):
        with RunLog(tmp_path, append) as log:
            for step in () if append else (0, 2, 4):
                log.write_answers(step, [{"uid": "a", "response": "päp"}])
            log.truncate_after(2, stage)
        lines = [f'{{"step": {step}, "uid": "a", "response": "päp"}}\n' for step in expected]
        assert (tmp_path / "evaluations.jsonl").read_text(encoding="utf-8") == "".join(lines)


def test_events_survive_a_restart(tmp_path: Path) -> None:
    for append, text in ((False, "rank 3 <died>"), (True, "continues from step-000001")):
        with RunLog(tmp_path, append) as log:
            log.write_event(text)
            log.truncate_after(0)
    with (tmp_path / "events.jsonl").open("ab") as file:
        file.write(b'{"time": "yesterday", "event": "foreign"}\n')
    run = load_run(tmp_path)
    assert [event["event"] for event in run.events] == ["rank 3 <died>", "continues from step-000001"]
    assert all(abs(event["time"] - time.time()) < 60 for event in run.events) and run.unreadable == 1


def test_a_run_without_the_other_files_has_none_of_their_records(tmp_path: Path) -> None:
    (tmp_path / METRICS_FILE).write_text("")
    run = load_run(tmp_path)
    assert run.samples == run.distributions == run.events == [] and run.unreadable == 0
