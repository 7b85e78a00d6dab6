"""The newest metrics of a run in Prometheus's text format, at http://host:port/metrics (`log.prometheus`).

https://prometheus.io/docs/instrumenting/exposition_formats/ (text format 0.0.4)
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer
from typing import Any

from megarl.config.errors import ConfigError

PATIENCE = 2.0  # seconds that a client may take for its request, and for taking the answer


class Exporter:
    """Serves gauges such as `megarl_policy_entropy{stage="train"}`, the newest record of each stage, from a
    thread of its own. Raises ConfigError where the port cannot be had.

    One client after the other, each at most PATIENCE twice: whatever clients do, a step does not wait."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self._records: dict[str, dict[str, float]] = {}
        self._page = b""
        exporter = self

        class Handler(BaseHTTPRequestHandler):
            timeout = PATIENCE

            def do_GET(self) -> None:
                found = self.path.partition("?")[0] in ("/", "/metrics")
                body = exporter._page if found else b"metrics are at /metrics\n"
                self.send_response(200 if found else 404)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def handle(self) -> None:
                with suppress(OSError):  # a client that has gone, or was too slow
                    super().handle()

            def log_message(self, *_: Any) -> None:
                """Say nothing of requests on the terminal, which is the run's."""

        class Server(TCPServer):
            allow_reuse_address = True  # of a run that has just ended, not of one that listens

        try:
            self._server = Server((host, port), Handler)
        except OSError as error:
            what = f"{host}:{port} cannot be listened at: {error.strerror} (choose another port, 0: none)"
            raise ConfigError(f"log.prometheus: {what}") from None
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="prometheus", daemon=True
        )
        self._thread.start()

    def update(self, stage: str, numbers: Mapping[str, float]) -> None:
        """Show a record from now on, in place of the one before of its stage."""
        self._records[stage] = {
            "megarl_" + re.sub("[^a-zA-Z0-9_]", "_", name): float(number) for name, number in numbers.items()
        } | {"megarl_recorded_seconds": time.time()}  # since 1970: an alarm for runs that stand still
        lines = []
        for name in sorted({name for record in self._records.values() for name in record}):
            lines.append(f"# TYPE {name} gauge\n")
            lines += [
                f'{name}{{stage="{stage}"}} {record[name]!r}\n'
                for stage, record in self._records.items()
                if name in record
            ]
        self._page = "".join(lines).encode()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
