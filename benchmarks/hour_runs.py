"""Stages of hour.py that train or use several GPUs.

They compare the metrics of `megarl train` with `megarl plan`, and start ranks by torchrun for each layout."""

from __future__ import annotations

import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gpu
import psutil
import torch
from hour import CUDA, TE, write
from hour import STAGES as SCRIPT
from hour_configs import get_config, get_overrides, given_frozen, plan_run, set_both_models
from hour_found import (
    ENGINE_LOGPROBS,
    FP8_LOGPROBS,
    GIB,
    ROOT,
    Found,
    Given,
    random_model,
    start_runtime,
)
from measure import phase_flops

RANK_TIMEOUT = 60.0  # seconds of a collective of `rank_layout`, below the limit of its command
CURVES = {
    "reward": "reward/mean",
    "policy loss": "policy/loss",
    "NLL of right ones": "policy/nll_loss",
    "value loss": "value/loss",
    "entropy": "policy/entropy",
    "gradient norm": "policy/grad_norm",
    "trainer - engine": "mismatch/logprob_abs_mean",
}


def train_command(given: Given, name: str, *more: str) -> list[str]:
    overrides = [*get_overrides(name, given), *more, f"run_dir={given.out / name}"]
    return [sys.executable, "-m", "megarl", "train", str(ROOT / get_config(name, given)), *overrides]


def run(
    given: Given,
    found: Found,
    name: str,
    *more: str,
    fresh: bool = True,
    label: str = "",
    limit: float | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> list[dict[str, Any]]:
    """Train and return the records of a stage's run; a run that fails is summarised up to its failure.

    more: further overrides; fresh: delete an earlier run instead of continuing it; limit: seconds
    label: name in the report, if the stage has several runs of this name"""
    run_dir, records = given.out / name, list[dict[str, Any]]()
    if fresh:
        shutil.rmtree(run_dir, ignore_errors=True)
    overrides = [*get_overrides(name, given), *more, f"run_dir={run_dir}"]
    try:
        code = run_limited(train_command(given, name, *more), limit, environment)
    finally:
        if (metrics := run_dir / "metrics.jsonl").is_file():
            lines = metrics.read_text(encoding="utf-8").splitlines(keepends=True)
            records = [json.loads(line) for line in lines if line.endswith("\n")]
        if any(record["stage"] == "train" for record in records):
            summarise(given, found, label or name, plan_run(given, name, overrides), records)
    if code:
        raise SystemExit(f"megarl train: exit code {code}")
    return records


def run_limited(
    command: Sequence[str], limit: float | None, environment: Mapping[str, str] = MappingProxyType({})
) -> int:
    """Run a command and return its exit code. Raises SystemExit after `limit` seconds.

    All its processes are then ended, as a rank that hangs would keep the GPU."""
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"} | {**environment})
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        raise SystemExit(f"{' '.join(command[:4])}: not done within {limit:.0f} s") from None
    finally:
        if process.poll() is None:
            left = [*psutil.Process(process.pid).children(recursive=True), process]
            for one in left:
                with suppress(psutil.NoSuchProcess):
                    one.kill()
            process.wait()


def summarise(given: Given, found: Found, name: str, plan: Any, records: Sequence[Mapping[str, Any]]) -> None:
    """Add a run's curves, and compare its phases with the plan: seconds, shares of the peak, memory."""
    from megarl.plan.times import Lengths, estimate

    steps = [record for record in records if record["stage"] == "train"]
    steady = steps[1:] or steps  # the first step warms up
    config, world = plan.config, plan.layout.world

    def median(key: str) -> float | None:
        values = [record[key] for record in steady if key in record]
        return statistics.median(values) if values else None

    curves = {title: [record.get(key) for record in steps] for title, key in CURVES.items()}
    accuracy = [record["eval/avg"] for record in records if record["stage"] == "eval"]
    figures = {"curves": curves, "steps": steps, "accuracy": accuracy}
    found.figures.setdefault("runs", {})[name] = figures
    shown = {title: values for title, values in curves.items() if any(v is not None for v in values)}
    rows: list[list[Any]] = [[i + 1, *row] for i, row in enumerate(zip(*shown.values(), strict=True))]
    found.table(f"Curves of {name}", ("step", *shown), rows)

    middle = dict(sorted(steady, key=lambda record: record["time/step"])[len(steady) // 2])
    tokens = middle["rollout/tokens"] / config.responses
    passes = sum(f"time/{phase.name}" in middle for phase in plan.phases if phase.model)
    prompt = max(1.0, middle["train/tokens"] / max(1, passes) / config.responses - tokens)
    expected = estimate(plan, Lengths(tokens, config.rollout.max_response_tokens, prompt)).parts
    expected["residency"] = expected.pop("on and off the device", 0.0)
    figures["planned"] = {"step": sum(expected.values()), **expected}
    work = (
        phase_flops(plan.actor.sizes, middle, config.rollout.group_size)
        if not plan.actor.sizes.experts
        else {}
    )
    rates = given.out / "kernels.json"
    measured = json.loads(rates.read_text())["figures"].get("matmul_tflops") if rates.is_file() else None
    planned = gpu.planned(config, plan.actor.config, world)
    rows, ratios = [], dict[str, float]()
    for phase in [key.removeprefix("time/") for key in middle if key.startswith("time/")]:
        seconds, peak, device = (median(f"{kind}/{phase}") for kind in ("time", "memory", "memory_device"))
        if phase not in expected and phase not in planned and phase != "step":
            continue
        reached = work[phase] / seconds / world / 1e12 if phase in work and seconds else None
        own, all_of_it = planned.get(phase, (None, None))
        if own and peak is not None:
            ratios[phase] = peak / own
        share = reached / measured if reached and measured else None
        sheet = reached / plan.device.tflops if reached and given.has(CUDA) else None
        gib = [None if size is None else size / GIB for size in (peak, own, device, all_of_it)]
        rows.append([phase, seconds, figures["planned"].get(phase), share, sheet, *gib])
    columns = ["phase", "s", "plan's s", "share of bf16 products as measured", "of the data sheet"]
    columns += ["peak, GiB", "planned", "device, GiB", "planned"]
    found.table(f"Phases of {name} beside megarl plan, medians of {len(steady)} steps", columns, rows)
    speeds = {key: median(f"throughput/{key}") for key in ("rollout_tokens", "train_tokens", "transfer")}
    figures["throughput"] = speeds
    found.notes.append(
        f"{name}, tokens/s: " + ", ".join(f"{k} {v:,.0f}" for k, v in speeds.items() if v is not None)
    )
    if given.has(CUDA):
        for phase, ratio in ratios.items():
            found.at_most(f"{name}, {phase}: peak of this process / megarl plan's", ratio, 1.05)
        if (apart := median("mismatch/logprob_abs_mean")) is not None:
            bound = ENGINE_LOGPROBS if config.model.fp8.format == "none" else FP8_LOGPROBS
            found.at_most(f"{name}: log-probs of engine and trainer, mean difference", apart, bound, " nats")
    found.save()


def vapo(given: Given, found: Found, *, fp8: bool) -> None:
    """Run some steps of the SmolLM2 demo with VAPO; with fp8, compare the curves with those of bf16."""
    run(given, found, "vapo_fp8" if fp8 else "vapo_bf16")
    others = given.out / "vapo_bf16.json"
    if fp8 and others.is_file():
        runs = json.loads(others.read_text())["figures"].get("runs", {})
        theirs = runs.get("vapo_bf16", {}).get("curves", {})
        ours = found.figures["runs"]["vapo_fp8"]["curves"]
        both = {name: list(zip(theirs[name], ours[name], strict=False)) for name in ours if name in theirs}
        rows = [
            [step + 1, *(value for name in both for value in both[name][step])]
            for step in range(min(map(len, both.values()), default=0))
        ]
        columns = [f"{name}, {kind}" for name in both for kind in ("bf16", "FP8")]
        found.table("VAPO on SmolLM2: bf16 and FP8", ("step", *columns), rows)
        found.holds("FP8 is at work: its curves are others", any(row[1::2] != row[2::2] for row in rows))
        for name in ("reward", "entropy"):
            apart = [abs(a - b) for a, b in both.get(name, ()) if a is not None and b is not None]
            if apart:
                found.at_most(
                    f"{name}, FP8 beside bf16: mean difference of the curves", statistics.mean(apart), 0.25
                )


def seven_vapo(given: Given, found: Found) -> None:
    """Train the 7B model on one GPU, with the number of frozen layers that the plan requires."""
    settings = given_frozen(given)
    found.notes.append(f"what is not trained: {settings or 'nothing'}")
    run(given, found, "seven_vapo", *set_both_models(settings))


# Several GPUs


def torchrun(
    given: Given,
    world: int,
    name: str,
    limit: float | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
    **arguments: Any,
) -> dict[str, Any]:
    """Run the function `name` of this file on `world` ranks and return rank 0's answer.

    Raises SystemExit if that fails or takes more than `limit` seconds."""
    from megarl.parallel.secret import SECRET_FILE, make_secret

    answer = given.out / f"{name}.answer.json"
    answer.unlink(missing_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command += [
        "--nproc-per-node",
        str(world),
        str(SCRIPT),
        name,
        "--out",
        str(given.out),
        *given.tiny_option,
    ]
    command += ["--with", json.dumps({**arguments, "answer": str(answer)})]
    loopback = {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")}
    with tempfile.TemporaryDirectory() as private:
        secret = Path(private, "secret")
        make_secret(secret)
        code = run_limited(command, limit, loopback | {**environment, SECRET_FILE: str(secret)})
    if code or not answer.is_file():
        raise SystemExit(f"{name} on {world} ranks: exit code {code}")
    made: dict[str, Any] = json.loads(answer.read_text())
    return made


def rank_nccl(given: Given, answer: str, count: int) -> None:
    """Measure GB/s of an all-reduce (bus bandwidth, as in NCCL's tests) and of a ring of messages.

    count: elements of a message, in bf16"""
    import torch.distributed as dist

    runtime = start_runtime()
    device = runtime.device
    mine, other = (torch.ones(count, dtype=torch.bfloat16, device=device) for _ in range(2))
    world, rank = dist.get_world_size(), dist.get_rank()

    def ring() -> None:
        messages = [
            dist.P2POp(dist.isend, mine, (rank + 1) % world),
            dist.P2POp(dist.irecv, other, (rank - 1) % world),
        ]
        for message in dist.batch_isend_irecv(messages):
            message.wait()

    bus = 2 * (world - 1) / world * mine.nbytes / gpu.seconds(lambda: dist.all_reduce(mine)) / 1e9
    sent = mine.nbytes / gpu.seconds(ring) / 1e9
    if rank == 0:
        write(Path(answer), {"all_reduce_bus_gb": bus, "ring_gb": sent})


def nccl(given: Given, found: Found) -> None:
    from megarl.config.schema import ClusterConfig

    found.figures = made = torchrun(given, given.world, "rank_nccl", count=2**16 if given.tiny else 2**29)
    speed = ClusterConfig().node_speed
    found.table(f"Messages of {given.world} ranks, GB/s", list(made), [list(made.values())])
    if given.has(CUDA):
        found.at_least(
            "all-reduce, GB/s of the bus / NVLink's data sheet", made["all_reduce_bus_gb"] / speed, 0.6
        )
        found.at_least("ring of messages, GB/s / NVLink's data sheet", made["ring_gb"] / speed, 0.5)


def rank_layout(
    given: Given, sizes: dict[str, int], model: str, layers: str, dtype: str, answer: str
) -> None:
    """Compute log-probs, the gradient norms of three updates, and the log-probs after them.

    sizes: keys of `parallel`; model: folder"""
    import torch.distributed as dist

    from megarl.parallel.runtime import stop
    from tests.gpu.scene import Scene

    runtime = start_runtime(RANK_TIMEOUT, **sizes)
    settings: dict[str, Any] = {"parallel": sizes, "model": {"layers": layers, "dtype": dtype}}
    scene = Scene(runtime, given.out / "layouts", Path(model), **settings)
    batch = scene.make_batch(8, 60)
    local = scene.share(batch)
    before = scene.compute_all_logprobs(batch).tolist()
    norms = [scene.update(local).grad_norm for _ in range(3)]
    after = scene.compute_all_logprobs(batch).tolist()
    if runtime.rank == 0:
        write(Path(answer), {"before": before, "norms": norms, "after": after})
    dist.barrier(group=runtime.cpu_group)  # NCCL's ranks must end together
    stop()


def compare_layouts(
    given: Given, found: Found, folder: Path, layouts: Mapping[str, Mapping[str, int]], **launch: Any
) -> list[str]:
    """Compare layouts with a single rank; return those that ended.

    layouts: keys of `parallel` by name; launch: limit and environment of each command"""
    kinds = [("portable", "fp32"), *([("te", "bf16")] if given.has(TE) else [])]
    rows, failed = [], set[str]()
    columns = ("", "log-probs", "gradient norms, relative", "log-probs after 3 updates")
    for layers, dtype in kinds:
        exact, arguments = dtype == "fp32", {"model": str(folder), "layers": layers, "dtype": dtype}
        alone = torchrun(given, 1, "rank_layout", **launch, sizes={}, **arguments)
        for name, sizes in layouts.items():
            if "cp" in sizes and layers == "portable" and given.has(CUDA):
                continue  # ring attention on GPUs is Transformer Engine's
            if name in failed:
                found.notes.append(f"{layers} {dtype}, {name}: not tried, as it failed with portable layers")
                continue
            ranks = math.prod(size for key, size in sizes.items() if key != "ep")
            what = f"{layers} {dtype}, {name}"
            try:
                made = torchrun(given, ranks, "rank_layout", **launch, sizes=dict(sizes), **arguments)
            except SystemExit as error:
                found.notes.append(f"{what}: {error}")
                found.holds(f"{what}: ends", False)
                failed.add(name)
                continue
            before, after = (
                statistics.mean(abs(a - b) for a, b in zip(made[key], alone[key], strict=True))
                for key in ("before", "after")
            )
            norm = max(abs(a - b) / b for a, b in zip(made["norms"], alone["norms"], strict=True))
            rows.append([what, before, norm, after])
            found.table(f"Layouts of {folder.name} beside one rank: mean |difference|", columns, rows)
            found.at_most(f"{what}: log-probs", before, 1e-4 if exact else 0.03, " nats", must=exact)
            found.at_most(f"{what}: gradient norms", norm, 1e-3 if exact else 0.05, must=exact)
    return [name for name in layouts if name not in failed]


def layouts(given: Given, found: Found) -> None:
    """Compare every layout of this node with a single rank."""
    folder = given.out / "layouts" / "model"
    sizes = {"hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 64, "layers": 4, "vocab": 307}
    if not given.tiny:
        sizes = {"hidden": 1024, "heads": 16, "kv_heads": 8, "ffn": 4096, "layers": 8, "vocab": 32000}
    if not (folder / "config.json").is_file():
        random_model(folder, "qwen2", **sizes)
    pairs = [(tp, pp) for tp in (1, 2, 4, 8) for pp in (1, 2, 4) if 1 < tp * pp <= given.world]
    compare_layouts(given, found, folder, {f"tp {tp} pp {pp}": {"tp": tp, "pp": pp} for tp, pp in pairs})


def rank_transfer(given: Given, tp: int, pp: int, engine_tp: int, answer: str) -> None:
    """Run the plan's transfer on this node, check it, and report seconds and planned bytes of each rank."""
    import torch.distributed as dist

    from megarl.config.schema import ClusterConfig
    from megarl.parallel.comm import gather_objects
    from megarl.sync.cost import direct_cost
    from tests.gpu.scene import Scene, get_sizes

    runtime = start_runtime(tp=tp, pp=pp)
    sizes = get_sizes("tiny" if given.tiny else "Qwen2.5-7B", tie_word_embeddings=False)
    settings: dict[str, Any] = {
        "parallel": {"tp": tp, "pp": pp},
        "rollout": {"engine": "sglang", "engine_tp": engine_tp},
        "model": {"dtype": "bf16" if given.has(CUDA) else "fp32"},
    }
    scene = Scene(runtime, given.out / "transfer_between.models", sizes, **settings)
    plan, parts = gpu.transfers(scene)
    received = sent = 0
    for one in parts:  # one bucket at a time: they share memory
        stats = one.run()
        one.check()
        received, sent = received + stats.bytes_received, sent + stats.bytes_sent

    def all_parts() -> None:
        for one in parts:
            one.run()
        dist.barrier(group=runtime.cpu_group)

    took = gpu.seconds(all_parts)
    size = {"bf16": 2, "fp32": 4}[scene.config.model.dtype]
    cost = direct_cost(plan, size, 2**28, ClusterConfig())[runtime.rank]
    mine = {
        "seconds": took,
        "received": received,
        "planned": cost.node_received + cost.network_received,
        "planned_seconds": cost.seconds,
        "sent": sent,
    }
    everybody = gather_objects(runtime, mine, dict[str, float])
    if runtime.rank == 0:
        write(Path(answer), {"ranks": everybody})


def transfer_between(given: Given, found: Found) -> None:
    world, rows = given.world, []
    for tp, pp, engine_tp in ((world, 1, 1), (max(1, world // 2), 2, 1), (1, 2, 2), (2, 2, 2)):
        if tp * pp > world or engine_tp > world or (given.tiny and tp * pp * engine_tp > 2):
            continue
        if not given.tiny and 4 % tp:  # Qwen2.5-7B has 4 key/value heads
            continue
        made = torchrun(given, world, "rank_transfer", tp=tp, pp=pp, engine_tp=engine_tp)["ranks"]
        name = f"tp {tp} pp {pp} dp {world // (tp * pp)} to engines of tp {engine_tp}"
        most = max(made, key=lambda rank: rank["received"])
        speed = most["received"] / most["seconds"] / 1e9
        estimate = max(rank["planned_seconds"] for rank in made)
        rows.append([name, most["received"] / 1e9, most["planned"] / 1e9, most["seconds"], estimate, speed])
        columns = ("", "GB into a GPU", "planned", "s", "plan's s", "GB/s into a GPU")
        found.table("Transfer of a 7B model's weights between GPUs", columns, rows)
        found.figures[name] = made
        found.holds(
            f"{name}: bytes are the plan's on every rank", all(r["received"] == r["planned"] for r in made)
        )
        if given.has(CUDA) and most["received"]:
            found.at_most(f"{name}: seconds / the plan's", most["seconds"] / estimate, 2.0)


def resume(given: Given, found: Found) -> None:
    """Compare a run of two steps that a second command continues for a third with an uninterrupted run."""
    whole = run(given, found, "resume", "steps=3")
    run(given, found, "resume", "steps=2")
    records = run(given, found, "resume", "steps=3", fresh=False)
    done = [record["step"] for record in records if record["stage"] == "train"]
    found.holds("a second command continues from the checkpoint", done == [1, 2, 3])
    last, undisturbed = records[-1], next(r for r in whole if r["stage"] == "train" and r["step"] == 3)
    keys = [key for key in CURVES.values() if key in last and key in undisturbed]
    apart = {key: abs(last[key] - undisturbed[key]) for key in keys}
    found.figures["third step, continued beside undisturbed"] = apart
    found.notes.append(
        "third step, continued beside undisturbed: " + ", ".join(f"{k} {v:.3g}" for k, v in apart.items())
    )
    saves = [record["time/checkpoint"] for record in records if record.get("time/checkpoint")]
    found.notes.append(
        f"a checkpoint holds the run up for {statistics.mean(saves):.2f} s" if saves else "no saves"
    )
    if not given.has(CUDA):
        found.holds("the third step is the undisturbed run's, bit for bit", not any(apart.values()))


def vapo_20(given: Given, found: Found) -> None:
    """Run VAPO's first 20 steps on all GPUs: vapo_7b.yaml with shorter responses, or SmolLM2."""
    run(given, found, "vapo_20")
