"""Serve a run's newest metrics to Prometheus at http://host:port/metrics (`log.prometheus`).

prometheus_client's `start_http_server` queries DNS, keeps a thread per silent client, and prints a traceback
if a client disconnects."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from socketserver import TCPServer
from typing import Any

from prometheus_client import CollectorRegistry, MetricsHandler
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from megarl.config.errors import ConfigError

PATIENCE = 2.0  # seconds that a client may be silent


class Exporter(Collector):
    """Serves each stage's newest record as gauges: `megarl_policy_entropy{stage="train"}`.

    One client at a time, for at most 2 * PATIENCE, so that none delays a step. Raises ConfigError if the port
    is taken."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self._records: dict[str, dict[str, float]] = {}
        registry = CollectorRegistry()
        registry.register(self)
        handler: Any = _Handler.factory(registry)
        handler.timeout = PATIENCE
        try:
            self._server = _Server((host, port), handler)
        except OSError as error:
            what = f"{host}:{port} cannot be used: {error.strerror} (choose another port, 0: none)"
            raise ConfigError(f"log.prometheus: {what}") from None
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="prometheus", daemon=True
        )
        self._thread.start()

    def update(self, stage: str, numbers: Mapping[str, float]) -> None:
        # Seconds since 1970, for alarms on hangs.
        self._records = {**self._records, stage: {**numbers, "recorded_seconds": time.time()}}

    def collect(self) -> Iterator[GaugeMetricFamily]:
        series: dict[str, dict[str, float]] = {}  # name -> stage -> number
        for stage, record in self._records.items():
            for key, number in record.items():
                series.setdefault("megarl_" + re.sub("[^a-zA-Z0-9_]", "_", key), {})[stage] = float(number)
        for name, numbers in sorted(series.items()):
            gauge = GaugeMetricFamily(name, "of metrics.jsonl", labels=["stage"])
            for stage, number in numbers.items():
                gauge.add_metric([stage], number)
            yield gauge

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(TCPServer):
    allow_reuse_address = True  # soon after another run


class _Handler(MetricsHandler):
    def do_GET(self) -> None:
        if self.path.partition("?")[0] in ("/", "/metrics"):
            super().do_GET()
        else:
            self.send_error(404, "metrics are at /metrics")

    def handle(self) -> None:
        timer = threading.Timer(2 * PATIENCE, self._hang_up)  # a slow client is never silent
        timer.start()
        try:
            with suppress(OSError):  # disconnected, or too slow
                super().handle()
        finally:
            timer.cancel()

    def _hang_up(self) -> None:
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
