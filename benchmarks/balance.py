"""Measure the gain of balancing responses between engines, on two ranks over gloo.

Each rank has a transformers engine with a fixed time per decoding step, like a GPU. The first engine is three
times slower. The reference is the ideal split: with all lengths known in advance, each engine gets at once
the share that makes both finish together.

python benchmarks/balance.py [--responses 2048] [--at-once 32] [--step 0.02]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import queue
import sys
import tempfile
import time
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from measure import Verdicts, machine
from rollout import make_engine, make_requests

from megarl.config.schema import Config
from megarl.data.prompts import Prompt
from megarl.parallel.runtime import STORE_FILE, join_store
from megarl.parallel.secret import SECRET_FILE, make_secret
from megarl.rewards.verdict import Verdict
from megarl.rollout.controller import GroupRequest
from megarl.rollout.rank import RolloutRank
from megarl.rollout.sampling import SamplingParams, response_seed

SLOWER = (3.0, 1.0)  # slowdown factor by engine
GROUP = 8
LIMIT = 600  # seconds to wait for the ranks


class NoText:
    """A tokenizer and verifier that take no time, so that no engine waits for them."""

    def batch_decode(self, rows: list[list[int]], **options: Any) -> list[str]:
        return [""] * len(rows)

    def verify(self, items: list[Any]) -> list[Verdict]:
        return [Verdict(False)] * len(items)


def work(rank: int, args: argparse.Namespace, results: Any) -> None:
    """Run one rank: generate a batch in equal parts, balanced, and by the ideal split."""
    torch.set_num_threads(1)
    ended = []
    with tempfile.TemporaryDirectory() as folder:
        # Before init_process_group: later only rank 0 would save a model.
        engine = make_engine(Path(folder), args.at_once)
        store = join_store(None, LIMIT)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=len(SLOWER))
        ranks: Any = SimpleNamespace(rank=rank, world=len(SLOWER), cpu_group=dist.group.WORLD)
        began = time.monotonic()

        def pace(module: Any, inputs: Any) -> None:
            """Sleep until a step's fixed time is over; runs before the output layer of a forward pass."""
            nonlocal began
            time.sleep(max(0.0, began + args.step * SLOWER[rank] - time.monotonic()))
            began = time.monotonic()

        engine.model.get_output_embeddings().register_forward_pre_hook(pace)
        requests = make_requests(args.responses // GROUP, GROUP, 1)
        groups = [
            GroupRequest(
                Prompt(uid, "", requests[uid * GROUP].prompt_tokens, ""),
                [response_seed(0, 1, uid, i) for i in range(GROUP)],
            )
            for uid in range(args.responses // GROUP)
        ]
        for in_flight in (0, None):
            config = Config(
                recipe="dapo",
                run_dir=Path(folder),
                steps=1,
                model={"path": Path(folder)},
                rollout={"max_batch": args.at_once, "in_flight": in_flight},
            )
            text: Any = NoText()
            worker = RolloutRank(config, ranks, engine, text, text)
            dist.barrier()
            start = time.perf_counter()
            found = worker.generate(groups, SamplingParams(args.max_tokens))
            seconds = time.perf_counter() - start
            drawn = {  # only the engine that generated a response has its data
                (g, r): (response.data.tokens.tolist(), response.data.logprobs.tobytes())
                for g, group in enumerate(found)
                for r, response in enumerate(group.samples)
                if response.data is not None
            }
            moved = worker.controller.dispatcher.rebalanced if worker.controller else 0
            ended.append((seconds, moved, worker.seconds["idle"], drawn))
            worker.close()
        parts: list[Any] = [None] * len(SLOWER)
        dist.all_gather_object(parts, {key: len(tokens) for key, (tokens, _) in drawn.items()})
        lengths = {key: n for part in parts for key, n in part.items()}
        speeds = [1 / slower for slower in SLOWER]
        first, last = (sum(lengths.values()) * sum(speeds[:end]) / sum(speeds) for end in (rank, rank + 1))
        so_far = accumulate((lengths[key] for key in sorted(lengths)), initial=0)
        own = [request for request, before in zip(requests, so_far, strict=False) if first <= before < last]
        dist.barrier()
        start = time.perf_counter()
        completions = engine.generate(own, SamplingParams(args.max_tokens))
        ended.append((time.perf_counter() - start, sum(len(one.tokens) for one in completions)))
    results.put((rank, ended))
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--responses", type=int, default=2048)
    parser.add_argument("--at-once", type=int, default=32, help="rollout.max_batch")
    parser.add_argument("--step", type=float, default=0.02, help="seconds of a decoding step")
    parser.add_argument("--max-tokens", type=int, default=80)
    args = parser.parse_args()
    print(machine())
    context = multiprocessing.get_context("spawn")
    private = tempfile.TemporaryDirectory()
    make_secret(Path(private.name, "secret"))
    os.environ.update({STORE_FILE: f"{private.name}/store", SECRET_FILE: f"{private.name}/secret"})
    results = context.Queue()
    os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    os.environ.update(MASTER_ADDR="127.0.0.1", WORLD_SIZE=str(len(SLOWER)))
    processes = [
        context.Process(target=work, args=(rank, args, results), daemon=True) for rank in range(len(SLOWER))
    ]
    for process in processes:
        process.start()
    answers: dict[int, Any] = {}
    end = time.monotonic() + LIMIT
    while len(answers) < len(processes):
        try:
            rank, ended = results.get(timeout=1)
        except queue.Empty:
            for rank, process in enumerate(processes):
                if process.exitcode:  # the other rank would wait forever
                    sys.exit(f"rank {rank} ended with exit code {process.exitcode} (its error stands above)")
            if time.monotonic() > end:
                missing = [rank for rank in range(len(processes)) if rank not in answers]
                sys.exit(f"no result of rank {missing[0]} after {LIMIT} s")
        else:
            answers[rank] = ended
    for process in processes:
        process.join(timeout=LIMIT)
    (equal, *_), (balanced, moved, idle, _), _ = answers[0]
    alone = [own[2] for own in answers.values()]
    drawn, again = ({k: v for own in answers.values() for k, v in own[run][3].items()} for run in (0, 1))
    tokens = sum(len(response) for response, _ in drawn.values())
    ideal = max(seconds for seconds, _ in alone)
    engines = "one of two engines three times that"
    given = f"{tokens} tokens, {args.at_once} at once, {args.step:g} s a step, {engines}"
    print(
        f"{args.responses} responses, {given}: ideal split {ideal:.2f} s, equal parts {equal:.2f} s "
        f"({equal / ideal:.2f}), balanced {balanced:.2f} s, of which idle {idle:.2f} s, {moved} moved"
    )
    verdicts = Verdicts()
    verdicts.holds("the same responses to the bit", again == drawn)
    verdicts.holds("the ideal split draws as many tokens", sum(n for _, n in alone) == tokens)
    verdicts.at_most("seconds of a balanced batch over the ideal split's", balanced / ideal, 1.15, " x")
    return verdicts.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
