"""Observers of a run. A record that cannot be written ends the run."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from megarl.config.errors import MegarlError
from megarl.config.phases import PHASES
from megarl.config.schema import EVALUATION
from megarl.observe.prometheus import Exporter
from megarl.observe.run_log import RunLog
from megarl.observe.terminal import RunHeader, TerminalView
from megarl.observe.timeline import Timeline
from megarl.parallel.comm import gather_objects, run_on_rank_0
from megarl.schedule.profiler import Profiler
from megarl.schedule.run import Run, Step
from megarl.schedule.samples import add_tokens, has_tokens
from megarl.schedule.watchdog import Watchdog

Answers = Iterable[dict[str, Any]]
PLAIN_LINES = 100  # the plain terminal view prints about this many steps of a run


class Listener:
    """Observes a run, with the same calls on every rank."""

    def on_start(self, *, fresh: bool) -> None:
        """Start the run's records. fresh: drop older ones."""

    def run(self) -> AbstractContextManager[None]:
        return nullcontext()

    def rewind(self, stage: str, number: int) -> None:
        """Drop records after this step."""

    def step(self, step: Step) -> AbstractContextManager[None]:
        """Enclose a step, whose metrics are complete at the end."""
        return nullcontext()

    def phase(self, name: str, step: Step | None = None) -> AbstractContextManager[None]:
        """Enclose a phase. step: None for work between steps."""
        return nullcontext()

    def on_evaluation(self, number: int, metrics: Mapping[str, Any], answers: Answers) -> None:
        pass

    def event(self, line: str, *, keep: bool = True) -> None:
        """Report a line. keep: record it, too."""


class Listeners(Listener):
    """Calls all listeners in order."""

    def __init__(self, *listeners: Listener) -> None:
        self._all = listeners

    def run(self) -> AbstractContextManager[None]:
        return _combine([listener.run() for listener in self._all])

    def step(self, step: Step) -> AbstractContextManager[None]:
        return _combine([listener.step(step) for listener in self._all])

    def phase(self, name: str, step: Step | None = None) -> AbstractContextManager[None]:
        return _combine([listener.phase(name, step) for listener in self._all])

    def on_start(self, *, fresh: bool) -> None:
        for listener in self._all:
            listener.on_start(fresh=fresh)

    def rewind(self, stage: str, number: int) -> None:
        for listener in self._all:
            listener.rewind(stage, number)

    def on_evaluation(self, number: int, metrics: Mapping[str, Any], answers: Answers) -> None:
        for listener in self._all:
            listener.on_evaluation(number, metrics, answers)

    def event(self, line: str, *, keep: bool = True) -> None:
        for listener in self._all:
            listener.event(line, keep=keep)


@contextmanager
def _combine(contexts: Iterable[AbstractContextManager[None]]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def make_listeners(run: Run, watchdog: Watchdog | None) -> Listeners:
    """Build the listeners. Their contexts nest: TraceListener is the outermost, Clock the innermost."""
    watchdog_listeners = [] if watchdog is None else [WatchdogListener(watchdog)]
    return Listeners(
        TraceListener(run), RecordListener(run), TimelineListener(run), *watchdog_listeners, Clock()
    )


class TraceListener(Listener):
    def __init__(self, run: Run) -> None:
        self.profiler = Profiler(run.config, run.runtime, run.hf.num_hidden_layers, run.dispensable)

    def step(self, step: Step) -> AbstractContextManager[None]:
        return self.profiler.step(step.stage, step.number)

    def phase(self, name: str, step: Step | None = None) -> AbstractContextManager[None]:
        return nullcontext() if step is None else self.profiler.phase(name)


class TimelineListener(Listener):
    def __init__(self, run: Run) -> None:
        self.timeline = Timeline(run.config.run_dir, run.runtime.rank, run.dispensable)
        self.source, self.remote, self.main_stage = run.source, run.remote, run.config.main_stage

    @contextmanager
    def run(self) -> Iterator[None]:
        yield
        self.timeline.close()

    def step(self, step: Step) -> AbstractContextManager[None]:
        self.timeline.step(step.stage, step.number)
        return nullcontext()

    @contextmanager
    def phase(self, name: str, step: Step | None = None) -> Iterator[None]:
        with self.timeline.phase(name):
            yield
            self.timeline.add_wait(self.source.take_waited())

    def on_start(self, *, fresh: bool) -> None:
        if fresh:
            self.timeline.clear()
            if self.remote is not None:
                self.remote.rewind(0, self.main_stage)

    def rewind(self, stage: str, number: int) -> None:
        self.timeline.truncate_after(number, stage)
        if self.remote is not None:
            self.remote.rewind(number, stage)


class WatchdogListener(Listener):
    def __init__(self, watchdog: Watchdog) -> None:
        self.watchdog = watchdog

    def phase(self, name: str, step: Step | None = None) -> AbstractContextManager[None]:
        self.watchdog.phase(name, *((step.stage, step.number) if step is not None else ()))
        return nullcontext()


class Clock(Listener):
    @contextmanager
    def phase(self, name: str, step: Step | None = None) -> Iterator[None]:
        started = time.perf_counter()
        yield
        if step is not None:
            seconds = time.perf_counter() - started
            step.metrics[f"time/{name}"] = step.metrics.get(f"time/{name}", 0.0) + seconds


class RecordListener(Listener):
    """Records and shows the run on rank 0, whose errors every rank raises."""

    def __init__(self, run: Run) -> None:
        self._run, self.config, self.runtime = run, run.config, run.runtime
        self.facts = describe_run(run)
        every = -(-self.config.steps // PLAIN_LINES)
        mode = self.config.log.terminal if run.runtime.rank == 0 else "quiet"
        self.view = TerminalView(mode, self.facts, every=every)
        self.log: RunLog | None = None

    def on_start(self, *, fresh: bool) -> None:
        log = self.config.log

        def open_log() -> None:
            exporter = Exporter(log.prometheus, log.prometheus_host) if log.prometheus else None
            outputs = log.samples, log.tensorboard, log.wandb, exporter
            self.log = RunLog(self.config.run_dir, not fresh, *outputs, self._run.dispensable)

        run_on_rank_0(self.runtime, open_log)

    @contextmanager
    def run(self) -> Iterator[None]:
        try:
            with self.view:
                for name, report in self._run.source.reports.items():
                    for line in report.lines():
                        self.view.event(f"{name} {line}")
                yield
        except MegarlError as error:
            self._write_events([*self._run.dispensable.take(), str(error)])
            raise
        for lines in gather_objects(self.runtime, self._run.dispensable.take(), list[str]):
            self._write_events(lines)
        run_on_rank_0(self.runtime, self.log.close if self.log is not None else lambda: None)

    def phase(self, name: str, step: Step | None = None) -> AbstractContextManager[None]:
        self.view.phase(name)
        return nullcontext()

    @contextmanager
    def step(self, step: Step) -> Iterator[None]:
        megatron_seconds = count_megatron_seconds(self._run)
        yield
        samples, metrics = list(step.samples.values()), step.metrics
        if self.config.log.samples and has_tokens(step.number, self.facts.total(step.stage)):
            samples = add_tokens(step.samples, step.batch, self._run.tokenizer, self.runtime)
        self._reduce_memory(metrics)
        metrics["time/step"] = time.perf_counter() - step.started
        metrics["inside/megatron"] = count_megatron_seconds(self._run) - megatron_seconds
        metrics |= compute_throughput(metrics)
        for line in step.events:
            self.view.event(line)
        events = {"events": step.events} if step.events else {}
        self._record({"step": step.number, "stage": step.stage, **metrics, **events})
        if self.log is not None:
            self.log.write_samples(
                [replace(sample, step=step.number, stage=step.stage) for sample in samples]
            )
            if step.distributions:
                self.log.write_distributions(step.number, step.stage, step.distributions)

    def on_evaluation(self, number: int, metrics: Mapping[str, Any], answers: Answers) -> None:
        self._record({"step": number, "stage": EVALUATION, **metrics}, answers)

    def rewind(self, stage: str, number: int) -> None:
        def truncate() -> None:
            if self.log is not None:
                self.log.truncate_after(number, stage)

        run_on_rank_0(self.runtime, truncate)

    def event(self, line: str, *, keep: bool = True) -> None:
        self.view.event(line)
        if keep:
            self._write_events([line])

    def _reduce_memory(self, metrics: dict[str, float]) -> None:
        """Reduce memory to the maximum over ranks, memory_all to the sum."""
        memory = {name: size for name, size in metrics.items() if name.startswith("memory")}
        memory["memory/host"] = float(self._run.host.nbytes)
        report_type = tuple[dict[str, float], list[str]]
        reports = gather_objects(self.runtime, (memory, self._run.dispensable.take()), report_type)
        for name in memory:
            sizes = [rank_memory[name] for rank_memory, _ in reports]
            metrics[name] = sum(sizes) if name.startswith("memory_all/") else max(sizes)
        for _, lines in reports:
            self._write_events(lines)

    def _record(self, record: Mapping[str, Any], answers: Answers = ()) -> None:
        def write() -> None:
            if self.log is not None:
                self.view.step(self.log.write_metrics(record))
                self.log.write_answers(record["step"], answers)

        run_on_rank_0(self.runtime, write)

    def _write_events(self, lines: Iterable[str]) -> None:
        if self.log is not None:
            for line in lines:
                self.log.write_event(line)


def describe_run(run: Run) -> RunHeader:
    config, layout, hf = run.config, run.runtime.layout, run.hf
    vpp_text = f" (VPP {layout.vpp})" if layout.vpp > 1 else ""
    cp_text = f" x CP {layout.cp}" if layout.cp > 1 else ""
    return RunHeader(
        name=config.run_dir.name,
        recipe=config.recipe,
        model=f"{hf.model_type} {hf.num_hidden_layers} layers x {hf.hidden_size}",
        layout=f"TP {layout.tp} x PP {layout.pp}{vpp_text} x DP {layout.dp}{cp_text}",
        device=str(run.runtime.device.type),
        steps=config.steps,
        value_pretraining_steps=config.value_pretraining.steps if config.has_critic else 0,
    )


def count_megatron_seconds(run: Run) -> float:
    models = (run.actor, *run.critics, run.reference, run.reward_model, *run.teachers)
    return sum(model.megatron_seconds for model in models if model is not None)


def compute_throughput(metrics: Mapping[str, float]) -> dict[str, float]:
    rates = {}
    if metrics.get("time/rollout") and "rollout/tokens" in metrics and not metrics.get("rollout/reused"):
        # Ranks that only generate report their own seconds as inside/rollout.
        seconds = metrics.get("inside/rollout", metrics["time/rollout"])
        if seconds:  # 0: the rollout comes from the checkpoint
            rates["throughput/rollout_tokens"] = metrics["rollout/tokens"] / seconds
    phase_names = dict.fromkeys(phase.name for phase in PHASES if phase.model)
    seconds = sum(metrics.get(f"time/{name}", 0.0) for name in phase_names)
    if seconds and "train/tokens" in metrics:
        rates["throughput/train_tokens"] = metrics["train/tokens"] / seconds
    return rates
