"""Files on a full disk, simulated by the kernel's file size limit and by /dev/full."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.config.errors import ConfigError, StorageError
from megarl.config.files import OptionalFiles, atomic_file, write_atomic
from megarl.config.schema import RolloutConfig, WatchdogConfig
from megarl.data.batch import TrainBatch, read_batch, write_batch
from megarl.observe.run_log import JsonlWriter, RunLog, SampleRecord
from megarl.observe.timeline import Timeline
from megarl.parallel.launch import write_error_file
from megarl.parallel.lease import hold_lease
from megarl.schedule.profiler import Profiler
from megarl.schedule.watchdog import WIDTH, Watchdog

ROOT = Path(__file__).parents[2]


@contextmanager
def no_file_longer_than(size: int) -> Iterator[None]:
    """Limit this process's files to `size` bytes inside the block."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    sys.dont_write_bytecode = True  # Python 3.11 would truncate bytecode files and trust them
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        sys.dont_write_bytecode = False
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def read(path: Path) -> list[Any]:
    """Return the records of a file in which every line must be complete."""
    return [json.loads(line) for line in path.read_text().splitlines()]


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=60), more=st.integers(0, 100), dispensable=st.booleans())
def test_a_record_is_there_whole_or_not_at_all(
    tmp_path_factory: pytest.TempPathFactory, text: str, more: int, dispensable: bool
) -> None:
    path = tmp_path_factory.mktemp("run") / "records.jsonl"
    spare = OptionalFiles() if dispensable else None
    writer = JsonlWriter(path, append=False, dispensable=spare)
    writer.write({"first": text})
    record = {"second": text}
    room = more > len(json.dumps(record))
    with no_file_longer_than(path.stat().st_size + more), redirect_stderr(StringIO()):
        try:
            writer.write(record)
        except StorageError as error:
            assert not dispensable and not room
            assert str(error).startswith(f"{path}: cannot be written: File too large (make room; ")
    assert read(path) == [{"first": text}, *([record] if room else [])]
    writer.write({"third": text})
    writer.close()  # no unwritten record is left
    assert read(path)[-1] == {"third": text} and len(read(path)) == 2 + room
    if spare is not None:
        assert len(spare.take()) == (not room)


def test_half_a_line_that_could_not_be_cut_off_is_gone_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = JsonlWriter(tmp_path / "records.jsonl", append=False)
    writer.write({"first": 1})

    def fails(descriptor: int, size: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch, no_file_longer_than(writer.path.stat().st_size + 4):
        patch.setattr(os, "ftruncate", fails)
        with pytest.raises(StorageError, match="Input/output error"):
            writer.write({"second": 2})
    assert writer.path.read_bytes() == b'{"first": 1}\n{"se'
    writer.write({"third": 3})
    writer.close()
    assert read(writer.path) == [{"first": 1}, {"third": 3}]


def test_it_is_said_once_of_each_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spare = OptionalFiles()
    timeline = Timeline(tmp_path, 1, spare)
    with RunLog(tmp_path, samples=4, dispensable=spare) as log, no_file_longer_than(0):
        for step in (1, 2):
            timeline.step("train", step)
            timeline.enter("rollout")
            log.write_samples([SampleRecord(step, "1+1", "2", 1.0, True, False, 1)])
            log.write_event("something")
            log.write_distributions(step, "train", {"mismatch": {"tokens": [1.0]}})
        timeline.close()
        with pytest.raises(StorageError, match=r"metrics\.jsonl: cannot be written: File too large"):
            log.write_metrics({"step": 1, "stage": "train"})
        with pytest.raises(StorageError, match=r"evaluations\.jsonl: cannot be written: File too large"):
            log.write_answers(1, [{"uid": "a"}])
    lines = capsys.readouterr().err.splitlines()
    names = ("timeline/rank-00001", "samples", "events", "distributions")
    assert len(lines) == len(names)
    for name in names:
        (line,) = (line for line in lines if f"{name}.jsonl: cannot be written: File too large" in line)
        assert line.startswith(f"megarl: {tmp_path}") and "the run continues without it (make room" in line
    assert [f"megarl: {line}" for line in spare.take()] == lines and spare.take() == []


def test_what_is_later_than_the_checkpoint_is_dropped_without_room(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        for step in (1, 2, 3):
            log.write_metrics({"step": step, "stage": "train"})
        with no_file_longer_than(0):
            assert log.truncate_after(1) == 2
        assert [record["step"] for record in read(tmp_path / "metrics.jsonl")] == [1]
        log.write_metrics({"step": 2, "stage": "train"})
    assert [record["step"] for record in read(tmp_path / "metrics.jsonl")] == [1, 2]


@pytest.mark.usefixtures("capsys")  # pytest's output file would exceed the limit too
def test_nothing_is_written_behind_lines_that_could_not_be_dropped(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    before = b'{"step": 1}\n{"step": 2, "cut\n{"step": 3}\n'  # removing the second line rewrites the third
    path.write_bytes(before)
    with no_file_longer_than(5):
        with pytest.raises(ConfigError, match="cannot be written: File too large"):
            JsonlWriter(path, append=True)
        writer = JsonlWriter(path, append=True, dispensable=OptionalFiles())
        writer.keep(lambda record: bool(record["step"] != 1))
    with no_file_longer_than(len(before) + 100):
        assert path.read_bytes() == before
        writer.write({"step": 4})
        assert [record["step"] for record in read(path)] == [3, 4]
    assert sorted(tmp_path.iterdir()) == [path]


def test_a_file_keeps_its_content_until_the_next_is_whole(tmp_path: Path) -> None:
    path, aside = tmp_path / "settings.json", tmp_path / ".settings.json.partial"
    write_atomic(path, "before")
    aside.mkdir()
    with pytest.raises(OSError, match="Is a directory"):
        write_atomic(path, "after")
    aside.rmdir()
    with no_file_longer_than(3), pytest.raises(OSError, match="File too large"):
        write_atomic(path, "after")
    with pytest.raises(ZeroDivisionError), atomic_file(path) as file:
        file.write(b"%d" % (1 // 0))
    assert path.read_text() == "before" and sorted(tmp_path.iterdir()) == [path]
    write_atomic(path, "after\ud800")
    assert path.read_text() == "after\\ud800"
    (link := tmp_path / "link").symlink_to(path)
    write_atomic(link, "through a link")
    assert link.is_symlink() and path.read_text() == "through a link"
    with pytest.raises(OSError, match="No space left"):
        write_atomic(Path("/dev/full"), "to a device")
    assert Path("/dev/full").is_char_device()


def test_tensorboard_goes_on_where_there_is_room_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with RunLog(tmp_path, tensorboard=True) as log:
        tracker = log._trackers[0]
        tracker.log(1, {"loss": 1.0})
        (file,) = (tmp_path / "tensorboard").iterdir()
        with no_file_longer_than(file.stat().st_size + 9):
            for step in (2, 3):
                tracker.log(step, {"loss": float(step)})
        tracker.log(4, {"loss": 4.0})
    (line,) = capsys.readouterr().err.splitlines()
    assert "tensorboard: cannot be written: File too large; the run continues" in line
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 1.0), (4, 4.0)]


def test_a_trace_is_whole_or_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config: Any = SimpleNamespace(
        run_dir=tmp_path,
        log=SimpleNamespace(profile=1),
        rollout=RolloutConfig(max_response_tokens=1),
    )
    runtime: Any = SimpleNamespace(rank=0, device=torch.device("cpu"))
    profiler = Profiler(config, runtime, layers=1)
    with no_file_longer_than(3000):
        for number in (1, 2):
            with profiler.step("train", number), profiler.phase("rollout"):
                for _ in range(20):
                    torch.ones(2, 2) @ torch.ones(2, 2)
    assert "profile: cannot be written: " in capsys.readouterr().err
    assert list((tmp_path / "profile").iterdir()) == []


def test_a_part_of_a_rollout_is_whole_or_not_there(tmp_path: Path) -> None:
    path, part = tmp_path / "rank-00000.safetensors", TrainBatch.build([[1, 2]], [[3, 4, 5]])
    with no_file_longer_than(64), pytest.raises(OSError, match=r"too large|serializ"):
        write_batch(path, part)
    assert not path.exists()
    checksum = write_batch(path, part)
    assert read_batch(path, checksum).tokens.tolist() == [1, 2, 3, 4, 5]


def test_a_lease_that_cannot_be_written_keeps_nobody_out(tmp_path: Path) -> None:
    lease = hold_lease(tmp_path, "megarl test", remedy="wait")
    with no_file_longer_than(9), pytest.raises(ConfigError, match="cannot be written: File too large"), lease:
        pass
    assert list(tmp_path.iterdir()) == []
    with hold_lease(tmp_path, "megarl test", remedy="wait"):
        assert len(list(tmp_path.iterdir())) == 1


def test_a_last_line_that_finds_no_room_is_printed_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error"))
    with no_file_longer_than(9):
        assert not write_error_file("no room", 2)
    assert list(tmp_path.iterdir()) == []
    assert write_error_file("no room", 2) and read(tmp_path / "error")[0]["line"] == "no room"


PRINTS = """
import resource, sys
from megarl.cli.ranks import exit_code

def command():
    print("first")
    resource.setrlimit(resource.RLIMIT_FSIZE, (6, 6))
    print("second")
    print("third", file=sys.stderr)
    return 75

sys.exit(exit_code(command))
"""


def test_a_command_ends_as_it_would_where_its_output_finds_no_room(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", PRINTS]
        found = subprocess.run(command, stdout=log, stderr=log, env=environment, timeout=120, check=False)
    assert found.returncode == 75
    assert (tmp_path / "log").read_text() == "first\n"


def test_a_rank_without_a_heartbeat_says_why_and_ends(tmp_path: Path) -> None:
    said, speaks = os.pipe()
    child = os.fork()
    if not child:
        os.dup2(speaks, 2)
        sys.stderr = os.fdopen(2, "w")
        config = WatchdogConfig(limit=600, silence=1, period=0.1)
        with Watchdog(tmp_path, 0, 1, config):
            resource.setrlimit(resource.RLIMIT_FSIZE, (WIDTH - 1, WIDTH - 1))
            signal.alarm(120)  # ends a failed test
            signal.pause()
        os._exit(99)
    os.close(speaks)
    with os.fdopen(said) as lines:
        line = lines.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    where = f"megarl: rank 0: {tmp_path}/heartbeat/rank-00000.json: cannot be written for "
    assert line.startswith(where) and "it is cut off (make room; the same command continues" in line
