"""GSM8K's download: from an HTTP server on loopback, with made-up files."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace

import pytest

from megarl.config.errors import DataError
from megarl_tasks import gsm8k

CONTENT = {
    "train": b'{"question": "1 + 1?", "answer": "#### 2"}\n' * 3,
    "test": b'{"question": "1"}\n{"question": "2"}\n{"question": "3"}\n',
}


class Server(ThreadingHTTPServer):
    """Serve `files` by name; `requests` lists the paths; with `stall` a body stops after its first byte."""

    daemon_threads = True

    def __init__(self) -> None:
        self.files = {f"/{name}.jsonl": data for name, data in CONTENT.items()}
        self.requests: list[str] = []
        self.stall: Event | None = None
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.requests.append(self.path)
        if (data := self.server.files.get(self.path)) is None:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[:1])
        if self.server.stall:
            self.server.stall.wait()
        self.wfile.write(data[1:])

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    files = {name: (len(data), hashlib.sha256(data).hexdigest()) for name, data in CONTENT.items()}
    monkeypatch.setattr(gsm8k, "FILES", files)
    monkeypatch.setattr(gsm8k, "EVAL_ROWS", 2)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Server() as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def test_files_are_fetched_once(server: Server, tmp_path: Path) -> None:
    for _ in range(2):
        gsm8k.fetch_gsm8k(tmp_path, tmp_path, server.url)
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
            "gsm8k_train.jsonl": CONTENT["train"],
            "gsm8k_test.jsonl": CONTENT["test"],
            "gsm8k_eval.jsonl": b'{"question": "1"}\n{"question": "2"}\n',
        }
    assert server.requests == ["/train.jsonl", "/test.jsonl"]


def test_another_folder_gets_what_a_run_reads(server: Server, tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    out.mkdir()
    gsm8k.fetch_gsm8k(source, out, server.url)
    assert {path.name for path in source.iterdir()} == {"gsm8k_train.jsonl", "gsm8k_test.jsonl"}
    assert {path.name for path in out.iterdir()} == {"gsm8k_train.jsonl", "gsm8k_eval.jsonl"}
    assert (out / "gsm8k_train.jsonl").read_bytes() == CONTENT["train"]


def test_a_file_put_there_by_hand(server: Server, tmp_path: Path) -> None:
    (tmp_path / "gsm8k_train.jsonl").write_bytes(CONTENT["train"])
    gsm8k.fetch_gsm8k(tmp_path, tmp_path, server.url)
    assert server.requests == ["/test.jsonl"]


def test_a_file_with_other_content(server: Server, tmp_path: Path) -> None:
    (tmp_path / "gsm8k_train.jsonl").write_bytes(b"other\n")
    with pytest.raises(DataError, match=r"gsm8k_train.jsonl: its SHA-256 is .* \(delete it and try again\)$"):
        gsm8k.fetch_gsm8k(tmp_path, tmp_path, server.url)


@pytest.mark.parametrize("data", [b"x" * len(CONTENT["train"]), b"short", CONTENT["train"] * 1000])
def test_a_server_with_other_content(server: Server, tmp_path: Path, data: bytes) -> None:
    server.files["/train.jsonl"] = data
    with pytest.raises(DataError) as error:
        gsm8k.fetch_gsm8k(tmp_path, tmp_path, server.url)
    line = str(error.value)
    assert line.startswith(f"{server.url}/train.jsonl: its SHA-256 is ") and "\n" not in line
    assert line.endswith(f"(put the file into {tmp_path} by hand, as gsm8k_train.jsonl)")
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_gone(server: Server, tmp_path: Path) -> None:
    del server.files["/test.jsonl"]
    with pytest.raises(DataError, match=r"test.jsonl: cannot be read: HTTP Error 404: Not Found \(try again"):
        gsm8k.fetch_gsm8k(tmp_path, tmp_path, server.url)
    assert [path.name for path in tmp_path.iterdir()] == ["gsm8k_train.jsonl"]


def test_a_server_that_stalls(server: Server, tmp_path: Path) -> None:
    server.stall = Event()
    try:
        with pytest.raises(DataError, match=r"train.jsonl: cannot be read: timed out \(try again, or put"):
            gsm8k.fetch_gsm8k(tmp_path, tmp_path, server.url, limit=0.2)
    finally:
        server.stall.set()
    assert not list(tmp_path.iterdir())


def test_a_server_that_is_slow(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each read is in time, and all of them together are not."""
    ticks = iter(range(0, 10_000, 100))
    monkeypatch.setattr(gsm8k, "time", SimpleNamespace(monotonic=lambda: float(next(ticks))))
    with pytest.raises(DataError, match=r"train.jsonl: cannot be read: not complete within 90 s "):
        gsm8k.fetch_gsm8k(tmp_path, tmp_path, server.url, limit=90.0)


def test_nobody_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with (
        socket.socket() as bound,
        pytest.raises(DataError, match=r"cannot be read: .*Connection refused \(try again, or put the file"),
    ):
        bound.bind(("127.0.0.1", 0))  # and does not listen
        gsm8k.fetch_gsm8k(tmp_path, tmp_path, f"http://127.0.0.1:{bound.getsockname()[1]}")


def test_sizes_and_checksums_are_those_of_the_published_files() -> None:
    folder = Path(__file__).parents[3] / "shared" / "data"
    for name, (size, sha256) in gsm8k.FILES.items():
        path = folder / f"gsm8k_{name}.jsonl"
        if not path.exists():
            pytest.skip(f"{path} is not on this machine")
        data = path.read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (size, sha256)
