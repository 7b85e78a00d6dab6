"""A server on loopback that speaks the protocol of the Hugging Face Hub, for the real client."""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Self
from urllib.parse import unquote, urlsplit

Files = dict[str, bytes]


@dataclass
class Repository:
    """branches: revision -> commit. commits: commit -> files."""

    branches: dict[str, str] = field(default_factory=dict)
    commits: dict[str, Files] = field(default_factory=dict)
    gated: bool = False


class Hub:
    """`token` may read gated repositories. downloads: (repository, file) -> number of GETs."""

    token = "hf_test"

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.downloads: Counter[tuple[str, str]] = Counter()
        self.requests = 0
        hub = self

        class Handler(_Handler):
            server_hub = hub

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)

    def __enter__(self) -> Self:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join(timeout=10)

    def push(self, repo: str, files: Files, branch: str = "main") -> str:
        """Commit `files` on a branch. repo: owner/name, or datasets/owner/name."""
        repository = self.repositories.setdefault(repo, Repository())
        content = [(name, hashlib.sha256(data).hexdigest()) for name, data in sorted(files.items())]
        commit = hashlib.sha1(json.dumps([repo, branch, content]).encode()).hexdigest()
        repository.commits[commit] = files
        repository.branches[branch] = commit
        return commit

    def push_folder(self, repo: str, folder: Path, extra: Files | None = None) -> str:
        files = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
        return self.push(repo, files | (extra or {}))

    def environment(self, home: Path, **variables: str) -> dict[str, str]:
        """Return the environment of a process that uses this server and a cache in `home`."""
        port = self.server.server_address[1]
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
        return {
            **kept,
            "HF_ENDPOINT": f"http://127.0.0.1:{port}",
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_XET": "1",
            "NO_PROXY": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONPATH": str(Path(__file__).parents[1]),
            **variables,
        }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_hub: Hub

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub = self.server_hub
        hub.requests += 1
        path = urlsplit(self.path).path.lstrip("/")
        if match := re.fullmatch(
            r"api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+)(/.*)?)?", path
        ):
            kind, repo, what, revision = match[1], match[2], match[3], unquote(match[4] or "main")
            key = f"datasets/{repo}" if kind == "datasets" else repo
            if (commit := self._commit(key, revision)) is not None:
                self._api(key, repo, commit, what)
        elif match := re.fullmatch(r"((?:datasets/)?[^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            if (commit := self._commit(match[1], unquote(match[2]), file=True)) is not None:
                self._file(match[1], commit, unquote(match[3]))
        else:
            self._send(404, b"")

    def _commit(self, key: str, revision: str, *, file: bool = False) -> str | None:
        """Return the commit, or answer with the Hub's error."""
        repository = self.server_hub.repositories.get(key)
        allowed = self.headers.get("Authorization") == f"Bearer {self.server_hub.token}"
        if repository is None:  # 401 without a token: it may be private
            self._send(404 if allowed else 401, b"", {"X-Error-Code": "RepoNotFound"})
            return None
        if file and repository.gated and not allowed:
            code = 403 if "Authorization" in self.headers else 401
            self._send(code, b"", {"X-Error-Code": "GatedRepo"})
            return None
        commit = repository.branches.get(revision, revision)
        if commit not in repository.commits:
            self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
            return None
        return commit

    def _api(self, key: str, repo: str, commit: str, what: str | None) -> None:
        repository = self.server_hub.repositories[key]
        files = repository.commits[commit]
        if what == "tree":
            content: object = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in files.items()
            ]
        else:
            content = {
                "id": repo,
                "sha": commit,
                "gated": "manual" if repository.gated else False,
                "siblings": [{"rfilename": name} for name in files],
            }
        self._send(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _file(self, key: str, commit: str, name: str) -> None:
        data = self.server_hub.repositories[key].commits[commit].get(name)
        if data is None:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
            return
        if self.command == "GET":
            self.server_hub.downloads[key, name] += 1
        etag = f'"{hashlib.sha1(data).hexdigest()}"'
        self._send(200, data, {"ETag": etag, "X-Repo-Commit": commit, "Accept-Ranges": "bytes"})

    def _send(self, code: int, data: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        for header, value in (headers or {}).items():
            self.send_header(header, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)
