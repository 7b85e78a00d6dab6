"""Jobs of the ranks in these tests: a real actor and a real SGLang engine, kept from job to job."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megarl.config.errors import EngineError, EngineFailure
from megarl.config.schema import (
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RolloutConfig,
)
from megarl.data.batch import RolloutBatch, TrainBatch
from megarl.data.prompts import Prompt
from megarl.data.sample import TokenData
from megarl.parallel.comm import gather_objects
from megarl.parallel.runtime import Runtime
from megarl.rewards.verdict import Verdict
from megarl.rollout.controller import GroupRequest
from megarl.rollout.engines.base import GenerationRequest
from megarl.rollout.engines.sglang import SGLangEngine
from megarl.rollout.rank import RolloutRank
from megarl.rollout.sampling import SamplingParams
from tests.parallel import jobs as parallel_jobs

SCENES: dict[str, Any] = {}  # of this rank's process
PROMPTS = [(3, 9, 4), (7,) * 11, (20, 5), (3, 9, 4), (5, 6, 7, 8, 9, 10), (41, 40, 39)]
DUMP = "tests.sglang.inside.dump"
PATIENCE = (
    20.0  # seconds without progress until an engine counts as hanging; long enough for a loaded machine
)


class Scene:
    """An actor and an engine that gets its weights."""

    def __init__(self, runtime: Runtime, folder: Path, options: dict[str, Any]) -> None:
        from transformers import AutoTokenizer

        from megarl.model.builder import build_actor
        from megarl.model.hf_config import read_hf_config
        from megarl.rollout.engines.base import load_engine_class
        from megarl.sync.weight_sync import make_weight_sync
        from megarl.training.model import TrainableModel
        from megarl.weights.families import read_config

        inside = {"custom_weight_loader": ["megarl.rollout.engines.sglang_inside.load_shards", DUMP]}
        rollout = {
            "engine": "sglang",
            "max_response_tokens": 64,
            "max_batch": 32,
            "engine_options": inside,
            "engine_start_timeout": 1500,
        }
        self.config = Config(
            recipe="dapo",
            run_dir=folder,
            steps=4,
            model=ModelConfig(path=folder, dtype="fp32"),
            data=DataConfig(max_prompt_tokens=options.pop("max_prompt_tokens", 32)),
            parallel=ParallelConfig(tp=runtime.layout.tp),
            actor=OptimizerConfig(**options.pop("actor", {})),
            rollout=RolloutConfig(**{**rollout, **options}),
        )
        self.runtime, self.folder = runtime, folder
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        model = build_actor(self.config, read_hf_config(folder), runtime)
        parallel_jobs.load(model, folder, runtime)
        self.actor = TrainableModel("actor", model, self.config.critic, self.config.steps, runtime)
        self.engine = load_engine_class(self.config).build(self.config, self.tokenizer, runtime)
        assert isinstance(self.engine, SGLangEngine)
        if self.engine.process is not None:
            self.engine.process.module = "tests.sglang.host"
            # Needed, as the current folder is not searched.
            self.engine.process.environment["PYTHONPATH"] = str(Path(__file__).parents[2])
        self.engine.start()
        self.weight_sync = make_weight_sync(self.config, runtime, read_config(folder), model, self.engine)

    def generate(self, requests: list[GenerationRequest], params: SamplingParams) -> list[TokenData]:
        """Generate on the engine's first rank; return the responses on every rank."""
        leader = self.runtime.rank == 0
        return gather_objects(
            self.runtime, self.engine.generate(requests, params) if leader else None, list[TokenData] | None
        )[0]


def start(runtime: Runtime, name: str, folder: Path, **options: Any) -> list[int]:
    """Start a scene; return the process ids of its engine's host."""
    SCENES[name] = Scene(runtime, folder, options)
    engine = SCENES[name].engine
    return [engine.process.pid] if engine.process else []


def wait(runtime: Runtime, name: str) -> bool:
    """Wait for a while; return whether the engine is ready."""
    return all(gather_objects(runtime, SCENES[name].engine.ready(60.0), bool))


def deliver(runtime: Runtime, name: str, version: int, dump: Path) -> dict[str, Any]:
    """Send the actor's weights to the engine, dump the parameters of SGLang's ranks, and export the actor."""
    from megarl.sync.export import export_hf
    from megarl.weights.families import rename_to_table

    scene = SCENES[name]
    stats = scene.weight_sync.sync(version)
    if runtime.rank == 0:
        scene.engine.process.call(
            "dump", str(dump / "rank{rank}.safetensors"), scene.config.rollout.engine_tp
        )
    named = rename_to_table(dict(scene.actor.model.named_parameters()))
    export_hf(dump / "hf", scene.folder, runtime.layout, runtime.rank, named, dtype=torch.float32)
    children = scene.engine.process.children if scene.engine.process else []
    return {
        "buckets": len(scene.weight_sync.transfers),
        "moved": stats.bytes_received + stats.bytes_local,
        "children": children,
    }


def read(runtime: Runtime, name: str, folder: Path, dump: Path) -> None:
    """Let SGLang load a folder itself, then dump the parameters of its ranks."""
    scene = SCENES[name]
    if runtime.rank == 0:
        scene.engine.process.call("read", str(folder))
        scene.engine.process.call(
            "dump", str(dump / "rank{rank}.safetensors"), scene.config.rollout.engine_tp
        )


def update(runtime: Runtime, name: str) -> float:
    """Take one optimizer step of the actor; return the gradient norm."""
    from megarl.training.batch import make_train_batch
    from megarl.training.objectives import supervised_loss

    scene = SCENES[name]
    config = parallel_jobs.make_config(scene.folder, nll_weight=1.0)
    batch = TrainBatch.build([[3, 4]] * 4, [[5, 6, 7], [8, 9], [10], [11, 12]])
    batch["correct"], batch["truncated"] = torch.ones(4, dtype=torch.bool), torch.zeros(4, dtype=torch.bool)
    local = make_train_batch(RolloutBatch.from_train_batch(batch), config, 4, 0, [scene.actor.model], runtime)
    scene.actor.begin_step()
    return scene.actor.update(local.mini_batches[0], supervised_loss(local)).grad_norm


def sample(
    runtime: Runtime,
    name: str,
    params: SamplingParams,
    count: int = 3,
    asked: Sequence[tuple[int, ...]] = PROMPTS,
) -> tuple[list[TokenData], Any]:
    """Return `count` responses to each prompt, and the trainer's log-probs of their tokens."""
    from megarl.training.micro_batch import make_micro_batches

    scene = SCENES[name]
    prompts = [prompt for prompt in asked for _ in range(count)]
    completions = scene.generate(
        [GenerationRequest(prompt, seed) for seed, prompt in enumerate(prompts)], params
    )
    experience = TrainBatch.build([list(p) for p in prompts], [c.tokens.tolist() for c in completions])
    batches = make_micro_batches(experience, range(len(prompts)), 200, scene.actor.model)
    ours = scene.actor.logprob_columns(experience, batches)["logprobs"][experience.response_mask]
    return completions, ours


def interrupt(
    runtime: Runtime, name: str, params: SamplingParams
) -> tuple[list[TokenData], list[TokenData], list[TokenData]]:
    """Return responses without an abort, the same responses aborted midway, and the latter continued."""
    engine = SCENES[name].engine
    requests = {i: GenerationRequest(PROMPTS[i % len(PROMPTS)], 100 + i) for i in range(40)}
    whole = engine.generate(list(requests.values()), params)
    engine.submit(requests, params)
    ended: dict[int, TokenData] = {}
    while len(ended) < 2:  # of 40 requests 32 run at once: some have ended, some run, some wait
        ended |= dict(engine.poll(5.0))
    ended |= dict(engine.abort())
    begun = [ended[i] for i in requests]
    left = [i for i in requests if ended[i].finish_reason == "abort"]
    engine.submit(
        {i: GenerationRequest(requests[i].prompt_tokens, requests[i].seed, ended[i]) for i in left}, params
    )
    while engine.running:
        ended |= dict(engine.poll(5.0))
    return whole, begun, [ended[i] for i in requests]


def read_late(runtime: Runtime, name: str, params: SamplingParams) -> list[TokenData]:
    """Generate more responses than fit into a socket's buffer, while the reader pauses."""
    engine = SCENES[name].engine
    requests = {i: GenerationRequest(PROMPTS[i % len(PROMPTS)], i) for i in range(300)}
    engine.submit(requests, params)
    time.sleep(10.0)
    ended: dict[int, TokenData] = {}
    while engine.running:
        ended |= dict(engine.poll(5.0))
    return [ended[i] for i in requests]


def sleep_and_wake(runtime: Runtime, name: str, version: int) -> str:
    """Sleep and wake; return the error message of a request before the weights are back."""
    scene = SCENES[name]
    scene.engine.sleep()
    scene.engine.wake()
    try:
        scene.engine.submit({0: GenerationRequest(PROMPTS[0], 0)}, SamplingParams(4))
    except EngineError as error:
        scene.weight_sync.sync(version)
        return str(error)
    return "nothing"


def sleep_of_the_dead(runtime: Runtime, name: str) -> dict[str, Any]:
    """Kill the engine, then call sleep: it restarts, sleeps, and wakes with the actor's weights."""
    scene = SCENES[name]
    weight_sync, process = scene.weight_sync, scene.engine.process
    if process is not None:
        os.kill(process.pid, signal.SIGKILL)
    weight_sync.max_failures, weight_sync.failures = 3, 0
    weight_sync.sleep(("weights", "kv_cache"))
    found = {
        "events": weight_sync.take_events(),
        "asleep": set(weight_sync.asleep),
        "before": weight_sync.complete,
    }
    weight_sync.wake(("weights", "kv_cache"))
    weight_sync.sync(weight_sync.version)
    return {**found, "awake": set(weight_sync.asleep), "after": weight_sync.complete}


class Parity:
    """A verifier that calls texts of even length correct."""

    def verify(self, items: Any) -> list[Verdict]:
        return [Verdict(correct=len(text) % 2 == 0, extracted=text[-1:]) for text, _ in items]


def rollout(runtime: Runtime, name: str, harm: str = "", most_failures: int = 3) -> dict[str, Any]:
    """Generate groups as in a step.

    harm: kill or stop SGLang's scheduler once it generates, or set the weights to NaN before."""
    scene = SCENES[name]
    scene.weight_sync.failures, scene.weight_sync.max_failures = 0, most_failures
    rank = RolloutRank(
        scene.config, runtime, scene.engine, Parity(), scene.tokenizer, scene.weight_sync.recover
    )
    asked = [
        GroupRequest(Prompt(i, "", prompt, ""), [1000 * i + j for j in range(8)])
        for i, prompt in enumerate(PROMPTS)
    ]
    process = scene.engine.process
    process.limit = PATIENCE if harm else 300.0
    before = [process.pid, *process.children]
    if harm == "nan":
        for parameter in scene.actor.model.parameters():
            parameter.data.fill_(float("nan"))
        scene.weight_sync.sync(scene.engine.weight_version + 1)
    submit = scene.engine.submit

    def submit_and_harm(requests: Any, params: SamplingParams) -> None:
        submit(requests, params)
        scene.engine.submit = submit  # type: ignore[method-assign]
        if harm in ("kill", "stop"):
            scheduler = next(
                pid for pid in process.children if b"scheduler" in Path(f"/proc/{pid}/cmdline").read_bytes()
            )
            os.kill(scheduler, {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[harm])

    scene.engine.submit = submit_and_harm  # type: ignore[method-assign]
    error, groups = None, []
    try:
        groups = rank.generate(asked, SamplingParams(scene.config.rollout.max_response_tokens))
    except (EngineError, EngineFailure) as problem:
        error = problem
    rank.close()
    return {
        "responses": [
            (r.data.tokens.tolist(), r.data.logprobs.tolist()) for group in groups for r in group.samples
        ],
        "error": None if error is None else (type(error).__name__, str(error), error.on_every_rank),
        "events": scene.weight_sync.take_events(),
        "failures": scene.weight_sync.failures,
        "before": before,
        "after": [process.pid, *process.children] if error is None else [],
    }


def stop(runtime: Runtime, name: str) -> None:
    SCENES.pop(name).engine.stop()


def alive(pids: list[int]) -> list[int]:
    """Return the processes that still run after at most 30 s."""
    end = time.monotonic() + 30
    while (left := [pid for pid in pids if running(pid)]) and time.monotonic() < end:
        time.sleep(0.1)
    return left


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def dump_draft(runtime: Runtime, name: str, path: Path) -> None:
    """Write the parameters of the draft model."""
    engine = SCENES[name].engine
    engine.process.call("dump", str(path), 1, "draft")
