"""A local HTTP server that speaks the protocol of the Hugging Face hub, for the real client.

It serves repositories from memory: information, tree and files with ETag and X-Repo-Commit, gated and missing
repositories, and downloads that break off."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

API = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree)/(.+))?")
FILE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
TOKEN = "hf_of_the_test"


def commit_hash(text: str) -> str:
    return hashlib.sha1(text.encode()).hexdigest()


@dataclass
class Repository:
    """revisions: branch -> commit; files_by_commit: commit -> name -> content. gated: only for TOKEN."""

    revisions: dict[str, str] = field(default_factory=dict)
    files_by_commit: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: bool = False

    def push(self, files: dict[str, bytes], branch: str = "main") -> str:
        """Add a commit with these files, and return its hash."""
        commit = commit_hash(f"{branch} {len(self.files_by_commit)} {sorted(files)}")
        self.files_by_commit[commit] = files
        self.revisions[branch] = commit
        return commit


class HubServer(ThreadingHTTPServer):
    """requests: (method, path, Range) in order. broken: files whose next download breaks off halfway.

    pages: paths with this text get the HTML of a login page"""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.models: dict[str, Repository] = {}
        self.datasets: dict[str, Repository] = {}
        self.requests: list[tuple[str, str, str | None]] = []
        self.broken: set[str] = set()
        self.pages: str | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def downloads(self) -> list[str]:
        """Return the names of files in the order of their downloads."""
        return [
            FILE.fullmatch(path)[4]
            for method, path, _ in self.requests
            if method == "GET" and FILE.fullmatch(path)
        ]  # type: ignore[index]


class _Handler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append((self.command, path, self.headers.get("Range")))
        if self.server.pages is not None and self.server.pages in path:
            self._send(200, b"<html>Log in</html>")
        elif match := API.fullmatch(path):
            kind, repository, word, revision = match.groups()
            self._answer(kind, repository, revision or "main", word)
        elif match := FILE.fullmatch(path):
            datasets, repository, revision, file = match.groups()
            self._answer("datasets" if datasets else "models", repository, revision, "resolve", file)
        else:
            self._send(404, b"")

    def _answer(self, kind: str, name: str, revision: str, word: str | None, file: str = "") -> None:
        repository = getattr(self.server, kind).get(name)
        if repository is None:
            return self._send(401, b'{"error":"Repository not found"}', error="RepoNotFound")
        commit = repository.revisions.get(revision, revision)
        files = repository.files_by_commit.get(commit)
        if files is None:
            return self._send(404, b"{}", error="RevisionNotFound")
        if word == "tree":
            tree = [self._entry(path, content) for path, content in files.items()]
            return self._send(200, json.dumps(tree).encode())
        if word != "resolve":
            siblings = [{"rfilename": path} for path in files]
            info = {"id": name, "sha": commit, "siblings": siblings, "private": False, "tags": []}
            return self._send(200, json.dumps(info).encode())
        if repository.gated and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._send(403, b"{}", error="GatedRepo")
        if file not in files:
            return self._send(404, b"", error="EntryNotFound")
        return self._send_file(file, files[file], commit)

    @staticmethod
    def _entry(path: str, content: bytes) -> dict[str, Any]:
        return {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}

    def _send(self, status: int, body: bytes, error: str | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if error:
            self.send_header("X-Error-Code", error)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _send_file(self, name: str, content: bytes, commit: str) -> None:
        start = int(re.findall(r"\d+", self.headers.get("Range") or "0")[0])
        part = content[start:]
        self.send_response(206 if start else 200)
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Content-Length", str(len(part)))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if self.command == "HEAD":
            return
        if name in self.server.broken:
            self.server.broken.remove(name)
            self.wfile.write(part[: len(part) // 2])
            self.close_connection = True
            return
        self.wfile.write(part)


@contextmanager
def serve_hub() -> Iterator[HubServer]:
    server = HubServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def folder_files(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder, to push them."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def use_hub(monkeypatch: pytest.MonkeyPatch, url: str, cache: Path, *, offline: bool = False) -> None:
    """Let this process use a hub. huggingface_hub reads its environment at import, once for all tests."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
