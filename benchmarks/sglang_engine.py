"""Compare the throughput of rollouts through megarl with direct calls of SGLang, on one CPU engine.

    .venv-sglang/bin/python benchmarks/sglang_engine.py [--responses 256] [--tokens 96] [--repeats 3]

"straight" is one call of SGLang's `generate` with the whole batch, in the engine's process, with SGLang's own
sampler and no seeds. "megarl" is a generation batch: requests and responses cross the process boundary, each
response has a seed, and is decoded and verified. The model has no end-of-sequence token, so that both
generate the same number of tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from measure import Verdicts, machine

ROOT = Path(__file__).resolve().parents[1]


def make_engine(folder: Path, responses: int, tokens: int) -> Any:
    """Make an engine of the demo's shape, with SGLang's dummy weights until `deliver`."""
    from megarl.config.schema import Config
    from megarl.rollout.engines.sglang import SGLangEngine
    from megarl.weights.families import read_config
    from tests.tiny_models import make_tiny_model

    make_tiny_model(
        folder, "qwen3", tied=True, vocab=307, hidden=64, ffn=192, head_dim=16, max_positions=1024
    )
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((folder / name).read_text()) | {"eos_token_id": None}
        (folder / name).write_text(json.dumps(settings))
    rollout = {
        "engine": "sglang",
        "max_batch": responses,
        "max_response_tokens": tokens,
        "engine_start_timeout": 1500,
    }
    config = Config(
        recipe="dapo",
        run_dir=folder,
        steps=1,
        model={"path": folder, "dtype": "fp32"},
        data={"max_prompt_tokens": 16},
        rollout=rollout,
    )
    engine = SGLangEngine(config, read_config(folder), 0, torch.device("cpu"), ())
    assert engine.process is not None
    engine.process.module = "benchmarks.sglang_straight"
    return engine


def deliver(engine: Any, folder: Path) -> None:
    """Send the folder's weights to the engine, as version 0."""
    from megarl.sync.backends.shared_memory import SharedMemoryBackend
    from megarl.sync.plan import Plan
    from megarl.sync.transfer import Staging
    from megarl.weights.hf import HFFolder, load_into
    from megarl.weights.shards import sglang_shards

    source = HFFolder(folder)
    shards = sglang_shards(source.config, 1, 0, cpu=True)
    backend = SharedMemoryBackend(engine.config, 0, engine.device, torch.float32)
    [tensors] = backend.connect(engine, [Plan((), {}, {0: shards})], Staging(engine.device))
    load_into(tensors, shards, source)
    backend.begin()
    backend.send(0, [backend.handle(0)], 0)
    backend.finish(0)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Rollouts through megarl against the same requests sent straight to SGLang."
    )
    parser.add_argument("--responses", type=int, default=256)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    torch.set_num_threads(1)
    from transformers import AutoTokenizer

    from megarl.config.schema import ParallelConfig
    from megarl.data.prompts import Prompt
    from megarl.parallel import runtime as parallel
    from megarl.rewards.pool import VerifierPool
    from megarl.rollout.controller import GroupRequest
    from megarl.rollout.rank import RolloutRank
    from megarl.rollout.sampling import SamplingParams

    verdicts = Verdicts()
    print(f"sglang: {machine()}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        engine = make_engine(folder, args.responses, args.tokens)
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        prompts = [
            Prompt(i, f"{i}+1=?", tuple(tokenizer(f"{i}+1=?").input_ids), "7")
            for i in range(args.responses // args.group)
        ]
        runtime = parallel.start(ParallelConfig(device="cpu"), seed=0)
        engine.start()
        try:
            while not engine.ready(60.0):
                pass
            deliver(engine, folder)
            with VerifierPool("dapo", 1, 10.0) as verifier:
                speeds: dict[str, list[float]] = {"straight": [], "megarl": []}
                for repeat in range(args.repeats + 1):  # the first round warms up both
                    first = [repeat * 10_000 + p.uid * args.group for p in prompts]
                    requests = [
                        GroupRequest(p, range(n, n + args.group)) for p, n in zip(prompts, first, strict=True)
                    ]
                    rows = [list(p.tokens) for p in prompts for _ in range(args.group)]
                    engine.process.call("straight", str(Path(name) / "straight.json"), rows, args.tokens)
                    straight = json.loads((Path(name) / "straight.json").read_text())
                    worker = RolloutRank(engine.config, runtime, engine, verifier, tokenizer)
                    begin = time.perf_counter()
                    groups = worker.generate(requests, SamplingParams(args.tokens))
                    seconds = time.perf_counter() - begin
                    worker.close()
                    made = sum(r.num_sampled for group in groups for r in group.samples)
                    assert made == straight["tokens"] == args.tokens * len(rows), (made, straight["tokens"])
                    print(
                        f"straight {made / straight['seconds']:,.0f} tokens/s, megarl "
                        f"{made / seconds:,.0f} tokens/s ({worker.seconds})"
                    )
                    if repeat:
                        speeds["straight"].append(made / straight["seconds"])
                        speeds["megarl"].append(made / seconds)
        finally:
            engine.stop()
    share = statistics.median(speeds["megarl"]) / statistics.median(speeds["straight"])
    verdicts.at_least(
        f"rollouts of {args.responses} responses through megarl / straight to SGLang", share, 0.9
    )
    return verdicts.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
