"""Perfetto traces of steps (`megarl train --profile N`), and NVTX ranges of phases."""

from __future__ import annotations

import gzip
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from megarl.config.files import OptionalFiles
from megarl.config.schema import PRETRAINING, Config
from megarl.parallel.runtime import Runtime

# Layers x tokens above which an in-process engine is not traced: a trace has some 50 kB for each.
OPERATORS_IN_ROLLOUT = 20_000
_PROCESS = re.compile(r'"name": "process_name"')
_NAME = re.compile(r'("name": )"[^"]*"')


class Profiler:
    """Traces `log.profile` steps of the main stage after the first one, which warms up.

    Each step has a trace, which bounds the memory."""

    def __init__(
        self, config: Config, runtime: Runtime, layers: int, dispensable: OptionalFiles | None = None
    ) -> None:
        self.runtime, self.folder = runtime, config.run_dir / "profile"
        self.dispensable = OptionalFiles() if dispensable is None else dispensable
        self.steps, self.done = config.log.profile, 0
        self.gpu = runtime.device.type == "cuda"
        self.activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.gpu else [])]
        rollout = config.rollout
        operators = 0 if rollout.capabilities.continuous_batching else layers * rollout.max_response_tokens
        self.pauses_in = {"rollout"} if operators > OPERATORS_IN_ROLLOUT else set[str]()
        self.trace: profile | None = None

    @contextmanager
    def step(self, stage: str, number: int) -> Iterator[None]:
        self.done += stage != PRETRAINING
        if stage == PRETRAINING or not 1 < self.done <= self.steps + 1:
            yield
            return
        # Otherwise torch reports each trace on stderr.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        self.trace = trace = profile(activities=self.activities)
        trace.start()
        try:
            with record_function(f"{stage} step {number}"):
                yield
        finally:
            self.trace = None
            trace.stop()
        with self.dispensable.file(self.folder):
            self._write(trace, f"{stage}-{number:06d}-rank-{self.runtime.rank:05d}.json.gz")

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name a phase in traces of torch and Nsight."""
        paused_trace = self.trace if name in self.pauses_in else None
        with record_function(name), torch.cuda.nvtx.range(name) if self.gpu else nullcontext():
            if paused_trace is not None:
                paused_trace.toggle_collection_dynamic(False, self.activities)
            yield
            if paused_trace is not None:
                paused_trace.toggle_collection_dynamic(True, self.activities)

    def _write(self, trace: profile, name: str) -> None:
        self.folder.mkdir(exist_ok=True)
        raw_file = self.folder / f".{name}.json"
        partial_file = self.folder / f".{name}"
        try:
            trace.export_chrome_trace(str(raw_file))
            if not raw_file.exists():  # torch ignores a full disk
                raise OSError("torch has not written all of it")
            with (
                raw_file.open(encoding="utf-8") as lines,
                gzip.open(partial_file, "wt", 5, encoding="utf-8") as out,
            ):
                rename_next = False
                for line in lines:
                    if rename_next and _NAME.search(line):
                        line, rename_next = _NAME.sub(rf'\1"rank {self.runtime.rank}"', line), False
                    rename_next = rename_next or bool(_PROCESS.search(line))
                    out.write(line)
            partial_file.rename(self.folder / name)
        finally:
            for leftover in self.folder.glob(f".{name}*"):
                leftover.unlink()
