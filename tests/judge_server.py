"""An OpenAI-compatible endpoint for tests: a real HTTP server in a thread, whose replies a function makes."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from megarl.config.schema import JudgeConfig

# A request -> a reply's text, or (status, headers, content).
Reply = str | tuple[int, dict[str, str], Any]
CODE = re.compile(r"\[begin NAME (\w+)\]")


def get_message(body: dict[str, Any]) -> str:
    [message] = body["messages"]
    assert message["role"] == "user"
    return str(message["content"])


def get_code(body: dict[str, Any]) -> str:
    """Return the code of a request's quotes, from megarl's own first lines."""
    found = CODE.search(get_message(body))
    assert found is not None
    return found[1]


def split_quotes(body: dict[str, Any]) -> tuple[str, dict[str, str]]:
    """Return a request's text outside its quotes, and the quotes by name."""
    code, quotes = get_code(body), {}
    parts = re.split(
        rf"^\[begin (\w+) {code}\]\n(.*?)\n\[end \1 {code}\]$", get_message(body), flags=re.M | re.S
    )
    for name, text in zip(parts[1::3], parts[2::3], strict=True):
        quotes[name] = text
    return "\n".join(parts[::3]), quotes


def completion(text: str, finish: str = "stop", **message: Any) -> dict[str, Any]:
    return {
        "id": "1",
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "finish_reason": finish,
                "message": {"role": "assistant", "content": text, **message},
            }
        ],
        "usage": {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110},
    }


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256  # with the usual 5, many connections at once wait for seconds


class Endpoint:
    """url; bodies and headers of its requests; `most`: requests at the same time"""

    def __init__(self, answer: Callable[[dict[str, Any]], Reply]) -> None:
        self.answer = answer
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.most = self._now = 0
        self._lock = threading.Lock()
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                endpoint.handle(self)

            def log_message(self, *_: object) -> None:
                pass

        self.server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1"

    def handle(self, request: BaseHTTPRequestHandler) -> None:
        body = json.loads(request.rfile.read(int(request.headers["Content-Length"])))
        assert request.path == "/v1/chat/completions"
        with self._lock:
            self.bodies.append(body)
            self.headers.append(dict(request.headers))
            self._now += 1
            self.most = max(self.most, self._now)
        reply = self.answer(body)
        with self._lock:
            self._now -= 1
        status, headers, content = (200, {}, completion(reply)) if isinstance(reply, str) else reply
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        request.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            request.send_header(name, value)
        request.end_headers()
        request.wfile.write(data)

    def config(self, **settings: Any) -> JudgeConfig:
        return JudgeConfig(url=self.url, model="judge", **({"retries": 0} | settings))


@contextmanager
def serve(answer: Callable[[dict[str, Any]], Reply]) -> Iterator[Endpoint]:
    endpoint = Endpoint(answer)
    thread = threading.Thread(target=endpoint.server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield endpoint
    finally:
        endpoint.server.shutdown()
        endpoint.server.server_close()
        thread.join(10)


def right_if_reference(body: dict[str, Any]) -> str:
    """Score 10 if the response holds the reference, else 2; the reason comes first."""
    _, quotes = split_quotes(body)
    score = 10 if quotes["reference"] in quotes["response"] else 2
    return f"The response was compared.\nScore {get_code(body)}: {score}"
