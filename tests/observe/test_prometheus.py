"""`log.prometheus`: scrapes follow the format's grammar, and clients may hang or disconnect."""

from __future__ import annotations

import re
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import generate_latest

from megarl.config.errors import ConfigError
from megarl.observe.prometheus import Exporter
from megarl.observe.run_log import RunLog

# The grammar of the text format: a sample with one label, and comments for help and type.
SAMPLE = re.compile(r'([a-zA-Z_:][a-zA-Z0-9_:]*)\{stage="([a-z_]+)"\} (\S+)')
HELP = re.compile(r"# HELP ([a-zA-Z_:][a-zA-Z0-9_:]*) of metrics\.jsonl")
TYPE = re.compile(r"# TYPE ([a-zA-Z_:][a-zA-Z0-9_:]*) gauge")


def scrape(port: int) -> dict[tuple[str, str], float]:
    """Return the samples by name and stage. Every line must match the grammar, with help and type first."""
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        return parse(answer.read().decode())


def parse(text: str) -> dict[tuple[str, str], float]:
    found: dict[tuple[str, str], float] = {}
    helped: list[str] = []
    typed: list[str] = []
    for line in text.splitlines():
        if match := HELP.fullmatch(line):
            assert match[1] not in helped
            helped.append(match[1])
        elif match := TYPE.fullmatch(line):
            assert match[1] not in typed and match[1] == helped[-1]
            typed.append(match[1])
        else:
            sample = SAMPLE.fullmatch(line)
            assert sample and sample[1] == typed[-1] and (sample[1], sample[2]) not in found, line
            found[sample[1], sample[2]] = float(sample[3])
    return found


def test_a_scrape_gives_the_newest_record_of_each_stage(tmp_path: Path) -> None:
    exporter = Exporter(0)
    with RunLog(tmp_path, exporter=exporter) as log:
        assert scrape(exporter.port) == {}
        for step in (1, 2):
            record = {"policy/entropy": step / 8, "policy/loss": float("nan"), "events": ["text"]}
            log.write_metrics({"step": step, "stage": "train", **record})
        log.write_metrics({"step": 2, "stage": "eval", "eval/accuracy": 0.5, "pass@4": 1})
        found = scrape(exporter.port)
        with pytest.raises(HTTPError, match="404"):
            urlopen(f"http://127.0.0.1:{exporter.port}/other", timeout=10)
    recorded = {stage: found.pop(("megarl_recorded_seconds", stage)) for stage in ("train", "eval")}
    assert all(0 <= time.time() - moment < 60 for moment in recorded.values())
    assert found == {
        ("megarl_step", "train"): 2.0,
        ("megarl_policy_entropy", "train"): 0.25,
        ("megarl_step", "eval"): 2.0,
        ("megarl_eval_accuracy", "eval"): 0.5,
        ("megarl_pass_4", "eval"): 1.0,
    }
    Exporter(exporter.port).close()  # the port is free again


@settings(max_examples=40)
@given(st.dictionaries(st.text(min_size=1, max_size=9), st.floats(allow_nan=False), max_size=5))
def test_any_name_and_number_is_within_the_grammar(numbers: dict[str, float]) -> None:
    exporter = Exporter.__new__(Exporter)  # without a port
    exporter._records = {}
    exporter.update("train", numbers)
    found = parse(generate_latest(exporter).decode())
    assert set(numbers.values()) >= {v for (name, _), v in found.items() if name != "megarl_recorded_seconds"}


def test_clients_that_hang_or_leave_hold_nobody_up(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("megarl.observe.prometheus.PATIENCE", 1.5)
    exporter = Exporter(0)
    silent = socket.create_connection(("127.0.0.1", exporter.port))
    leaves = socket.create_connection(("127.0.0.1", exporter.port))
    leaves.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # reset, not closed
    leaves.sendall(b"GET /metrics HTTP/1.1\r\n")
    leaves.close()
    started = time.perf_counter()
    exporter.update("train", {"step": 1.0})
    assert time.perf_counter() - started < 1.0  # no wait for the silent client
    assert scrape(exporter.port)["megarl_step", "train"] == 1.0
    exporter.close()
    silent.close()
    assert capfd.readouterr() == ("", "")


def test_a_client_that_is_never_silent_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.observe.prometheus.PATIENCE", 0.5)
    exporter, over = Exporter(0), threading.Event()
    slow = socket.create_connection(("127.0.0.1", exporter.port))

    def trickle() -> None:
        with suppress(OSError):
            while not over.wait(0.1):
                slow.sendall(b"G")

    thread = threading.Thread(target=trickle)
    thread.start()
    ends = threading.Thread(target=exporter.close)
    ends.start()
    ends.join(60)
    in_time = not ends.is_alive()
    over.set()
    thread.join()
    slow.close()
    ends.join()
    assert in_time


def test_a_port_that_is_taken_is_refused() -> None:
    exporter = Exporter(0)
    with pytest.raises(ConfigError, match=rf"^log\.prometheus: 127\.0\.0\.1:{exporter.port} cannot be .*use"):
        Exporter(exporter.port)
    with pytest.raises(ConfigError, match=r"^log\.prometheus: no\.such\.host\.invalid:0 cannot be "):
        Exporter(0, "no.such.host.invalid")
    exporter.close()
