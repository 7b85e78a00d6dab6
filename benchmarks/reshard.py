"""Compare the weight transfer with gathering whole tensors on every rank, on 4 CPU processes.

The model is tied and has 400 MB. The actor has tp 2 and pp 2, and two engines of tp 2 use SGLang's fused
layout. Also measure seconds and memory of plan and proof for Qwen2.5-32B on 128 and 1,024 GPUs.
CPU seconds distinguish a busy machine from slow code.

    .venv/bin/python benchmarks/reshard.py             # all of it
    .venv/bin/python benchmarks/reshard.py --untied    # a model with a separate output layer
    .venv/bin/python benchmarks/reshard.py --only plan
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import statistics
import sys
import tempfile
import time
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from measure import Verdicts, in_fresh_process, machine
from torch import Tensor

from megarl.config.schema import ClusterConfig
from megarl.parallel.layout import Layout
from megarl.sync.cost import direct_cost
from megarl.sync.plan import Plan, make_plan
from megarl.sync.transfer import Transfer
from megarl.weights.boxes import view
from megarl.weights.known_models import KNOWN_MODELS
from megarl.weights.shards import Region, Shards, hf_shapes, megatron_layout, sglang_shards

LAYOUT, ENGINE_TP = Layout(tp=2, pp=2), 2
BUCKET = 64 << 20
REPEATS = 5


def model(tied: bool) -> dict[str, Any]:
    """Return the sizes of Qwen2.5-0.5B with fewer layers and a smaller vocabulary: about 400 MB in bf16."""
    return KNOWN_MODELS["Qwen2.5-0.5B"] | {
        "num_hidden_layers": 12,
        "vocab_size": 32000,
        "tie_word_embeddings": tied,
    }


def fused_plan(config: dict[str, Any], layout: Layout, tp: int) -> Plan:
    shards = [sglang_shards(config, tp, rank) for rank in range(tp)]
    return make_plan(
        megatron_layout(config, layout), [(rank, shards[rank % tp]) for rank in range(layout.world)]
    )


class FullGather:
    """The usual transfer, without its avoidable costs.

    Whole Hugging Face tensors are gathered bucket by bucket. One of the owners of a shard broadcasts it, and
    every rank slices its part."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        config: dict[str, Any],
        sources: dict[str, Tensor],
        targets: dict[str, Tensor],
    ) -> None:
        self.rank, self.sources, self.targets = rank, sources, targets
        self.shapes = hf_shapes(config)
        self.owners: dict[str, list[tuple[int, str, Region]]] = {name: [] for name in self.shapes}
        seen = set()
        for owner, shards in plan.sources.items():
            for name, shard in shards.items():
                for region in shard.regions:
                    if (region.hf_name, region.hf_box) not in seen:
                        seen.add((region.hf_name, region.hf_box))
                        self.owners[region.hf_name].append((owner, name, region))
        self.wanted: dict[str, list[tuple[str, Region]]] = {name: [] for name in self.shapes}
        for name, shard in plan.targets[rank].items():
            for region in shard.regions:
                self.wanted[region.hf_name].append((name, region))
        self.padding = [
            view(targets[name], box) for name, shard in plan.targets[rank].items() for box in shard.padding
        ]
        self.buckets: list[list[str]] = [[]]
        size = 0
        for name, shape in self.shapes.items():
            nbytes = prod(shape) * 2
            if self.buckets[-1] and size + nbytes > BUCKET:
                self.buckets.append([])
                size = 0
            self.buckets[-1].append(name)
            size += nbytes

    def run(self) -> int:
        """Transfer once and return the bytes that this rank received."""
        received = 0
        for part in self.padding:
            part.zero_()
        for names in self.buckets:
            # One message per owner and bucket: the owner's shards of the bucket's tensors, concatenated.
            parts: dict[int, list[tuple[str, Region]]] = {}
            for hf_name in names:
                for owner, name, region in self.owners[hf_name]:
                    parts.setdefault(owner, []).append((name, region))
            gathered = {name: torch.empty(self.shapes[name], dtype=torch.bfloat16) for name in names}
            for owner, pieces in sorted(parts.items()):
                sizes = [prod(stop - start for start, stop in region.hf_box) for _, region in pieces]
                flat = torch.empty(sum(sizes), dtype=torch.bfloat16)
                if owner == self.rank:
                    torch.cat(
                        [view(self.sources[name], region.local_box).reshape(-1) for name, region in pieces],
                        out=flat,
                    )
                else:
                    received += flat.nbytes
                dist.broadcast(flat, owner)
                for (_, region), part in zip(pieces, flat.split(sizes), strict=True):
                    there = view(gathered[region.hf_name], region.hf_box)
                    there.copy_(part.view(there.shape))
            for hf_name in names:
                for name, region in self.wanted[hf_name]:
                    view(self.targets[name], region.local_box).copy_(view(gathered[hf_name], region.hf_box))
        return received


def fill(shapes: Shards) -> dict[str, Tensor]:
    """Make this rank's source tensors.

    An element's value depends on its index in the Hugging Face tensor, so that replicas are equal."""
    tensors = {}
    for name, shard in shapes.items():
        tensors[name] = torch.zeros(shard.shape, dtype=torch.bfloat16)
        for region in shard.regions:
            rows = (
                torch.arange(*region.hf_box[0])[:, None]
                if len(region.hf_box) == 2
                else torch.arange(*region.hf_box[0])
            )
            columns = torch.arange(*region.hf_box[1]) if len(region.hf_box) == 2 else 0
            values = (rows * 31 + columns * 17 + len(region.hf_name)) % 251
            view(tensors[name], region.local_box).copy_(values)
    return tensors


def work(rank: int, folder: str, tied: bool, results: Any) -> None:
    """Run one of the four ranks: alternate both transfers and compare their targets."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", LAYOUT.world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=LAYOUT.world)
    config = model(tied)
    plan = fused_plan(config, LAYOUT, ENGINE_TP)
    sources = fill(plan.sources[rank])
    ours, theirs = (
        {n: torch.full(s.shape, torch.nan, dtype=torch.bfloat16) for n, s in plan.targets[rank].items()}
        for _ in range(2)
    )
    transfer = Transfer(plan, rank, sources, ours, BUCKET, dtype=torch.bfloat16)
    gather = FullGather(plan, rank, config, sources, theirs)
    times: dict[str, list[float]] = {"plan": [], "gather": []}
    cpu: dict[str, list[float]] = {"plan": [], "gather": []}
    moved = {"plan": 0, "gather": 0}
    for _ in range(REPEATS + 1):
        for name, run in (("plan", lambda: transfer.run().bytes_received), ("gather", gather.run)):
            dist.barrier()
            started, busy = time.perf_counter(), time.process_time()
            moved[name] = run()
            cpu[name].append(time.process_time() - busy)
            dist.barrier()
            times[name].append(time.perf_counter() - started)
    same = all(torch.equal(ours[name], theirs[name]) for name in ours)
    transfer.check()
    medians = [
        {name: statistics.median(seconds[1:]) for name, seconds in each.items()} for each in (times, cpu)
    ]
    results.put((rank, moved, *medians, same))
    dist.barrier()
    dist.destroy_process_group()


def compare(tied: bool, verdicts: Verdicts) -> None:
    """Compare both transfers on four processes."""
    context = multiprocessing.get_context("spawn")
    private = tempfile.TemporaryDirectory()
    results = context.Queue()
    os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    ranks = [
        context.Process(target=work, args=(rank, private.name, tied, results)) for rank in range(LAYOUT.world)
    ]
    for process in ranks:
        process.start()
    answers = sorted((results.get(timeout=600) for _ in ranks), key=lambda answer: answer[0])
    for process in ranks:
        process.join()
    size = sum(map(prod, hf_shapes(model(tied)).values())) * 2
    kind = "tied" if tied else "untied"
    print(
        f"{size / 1e6:.0f} MB ({kind}), actor tp 2 pp 2 on 4 CPU processes -> 2 engines of tp 2; median of "
        f"{REPEATS} runs"
    )
    data, seconds, cpu = {}, answers[0][2], {}
    for name, title in (("gather", "full gather"), ("plan", "the plan")):
        data[name], cpu[name] = (
            sum(answer[1][name] for answer in answers),
            sum(answer[3][name] for answer in answers),
        )
        speed = f"{data[name] / seconds[name] / 1e9:5.2f} GB/s moved, {cpu[name]:6.3f} CPU s of all ranks"
        print(f"  {title:12s} {data[name] / 1e6:8.1f} MB moved   {seconds[name]:6.3f} s   {speed}")
    verdicts.holds(f"{kind}: both ways write the same bytes", all(answer[4] for answer in answers))
    # Tied embeddings are on both stages, so that a rank keeps more of its data. The untied model is harder:
    # missing the data target is then no error.
    verdicts.at_least(
        f"{kind}: data of a full gather over the plan's", data["gather"] / data["plan"], 3, " x", must=tied
    )
    verdicts.at_least(
        f"{kind}: seconds of a full gather over the plan's", seconds["gather"] / seconds["plan"], 1.5, " x"
    )
    print(f"  CPU seconds: {cpu['gather'] / cpu['plan']:.1f} x")


def plan_times(verdicts: Verdicts) -> None:
    """Measure plan and proof of Qwen2.5-32B, each layout in a separate process."""
    for dp, limit, memory in ((4, 10, 2), (32, 60, None)):
        found = in_fresh_process(__file__, "--dp", str(dp))
        what = f"Qwen2.5-32B tp 8 pp 4 dp {dp}, {32 * dp:,} GPUs -> {4 * dp} engines of tp 8"
        print(
            f"{what}: plan {found['plan']:.1f} s, proof {found['proof']:.1f} s ({found['cpu']:.1f} CPU s), "
            f"{found['memory']:.2f} GB"
        )
        verdicts.at_most(f"{32 * dp:,} GPUs: plan and proof", found["plan"] + found["proof"], limit, " s")
        if memory:
            verdicts.at_most(f"{32 * dp:,} GPUs: memory", found["memory"], memory, " GB", must=True)
        verdicts.at_most(
            f"{32 * dp:,} GPUs: received per GPU", found["received"], 1.02, " x model / 8", must=True
        )


def plan_time(dp: int) -> dict[str, float]:
    """Measure one plan and its proof.

    Returns: wall and CPU seconds, memory in GB, the most that a GPU receives / its share of the model"""
    layout, config = Layout(tp=8, pp=4, dp=dp), KNOWN_MODELS["Qwen2.5-32B"]
    started, cpu = time.perf_counter(), time.process_time()
    plan = fused_plan(config, layout, 8)
    planned = time.perf_counter()
    plan.verify()
    proved, cpu = time.perf_counter(), time.process_time() - cpu
    memory = (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9
    )
    share = sum(map(prod, hf_shapes(config).values())) * 2 / 8
    most = max(cost.received for cost in direct_cost(plan, 2, 256 << 20, ClusterConfig()).values()) / share
    return {
        "plan": planned - started,
        "proof": proved - planned,
        "cpu": cpu,
        "memory": memory,
        "received": most,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=("plan", "transfer"), help="one of the two parts")
    parser.add_argument("--untied", action="store_true", help="a model with an output layer of its own")
    parser.add_argument("--dp", type=int, help=argparse.SUPPRESS)  # one plan, in a separate process
    given = parser.parse_args()
    if given.dp:
        print(json.dumps(plan_time(given.dp)))
        return 0
    print(machine())
    verdicts = Verdicts()
    if given.only != "plan":
        compare(not given.untied, verdicts)
    if given.only != "transfer":
        plan_times(verdicts)
    return verdicts.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
