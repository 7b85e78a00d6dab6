"""Measure one GPU's matrix product and copy rates, and compare megarl's rates with them.

Each part runs in a separate process. Some stages of `make gpu` (hour.py) run these parts.

python benchmarks/gpu.py                     # all parts, about 8 minutes
python benchmarks/gpu.py --only rates train  # some
python benchmarks/gpu.py --tiny              # a tiny model on any device: do the parts run? (no real figures)

rates     bf16 matrix products (TFLOP/s), copies within the device, to and from pinned host memory (GB/s)
train     forward, backward and optimizer of 7B-shaped layers: portable, Transformer Engine in bf16, in FP8
memory    peak of each phase, compared with its tensor groups and `megarl plan`; GB/s of offload and onload
transfer  the actor's weights into SGLang's layout on the same device
rollout   SGLang inside megarl and alone, and the time that offloading and transfers add to a step
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch
from measure import Verdicts, in_fresh_process, machine

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

PARTS = ("rates", "train", "memory", "transfer", "rollout")
STACK = {"num_hidden_layers": 8, "vocab_size": 32000}
SGLANG_OPTIONS = {"attention_backend": "triton", "disable_cuda_graph": True}


def sync() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(work: Callable[[], object], repeats: int = 5) -> float:
    """Return the median time of `repeats` calls, after two to warm up."""
    times = []
    for repeat in range(repeats + 2):
        sync()
        begin = time.perf_counter()
        work()
        sync()
        if repeat >= 2:
            times.append(time.perf_counter() - begin)
    return statistics.median(times)


def rates(tiny: bool) -> dict[str, float]:
    """Measure the device's peak rates. Matrix products use random data, because zeros take less power."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    n, size = (256, 2**20) if tiny else (8192, 2**32)
    a, b = (torch.randn(n, n, dtype=torch.bfloat16, device=device) for _ in range(2))
    source, target = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    host = torch.empty(size, dtype=torch.uint8, pin_memory=device == "cuda")
    return {
        "matmul_tflops": 2 * n**3 * 10 / seconds(lambda: [a @ b for _ in range(10)]) / 1e12,
        "copy_gb": size / seconds(lambda: target.copy_(source)) / 1e9,
        "to_host_gb": size / seconds(lambda: host.copy_(source, non_blocking=True)) / 1e9,
        "from_host_gb": size / seconds(lambda: target.copy_(host, non_blocking=True)) / 1e9,
    }


def make_scene(folder: str, tiny: bool, **overrides: Any) -> Any:
    from megarl.config.schema import ParallelConfig
    from megarl.parallel import runtime as parallel
    from tests.gpu.scene import Scene, get_sizes

    sizes = get_sizes("tiny") if tiny else get_sizes("Qwen2.5-7B", **STACK)
    runtime = parallel.start(ParallelConfig(), seed=0)
    if tiny:
        overrides["model"] = {"dtype": "fp32", **overrides.get("model", {})}
    return Scene(runtime, Path(folder), sizes, **overrides)


def flops(sizes: dict[str, Any], lengths: list[int], responses: int) -> float:
    """Count the FLOPs of a step's forward and backward passes.

    They are 6 per token and matrix parameter, plus the head's at response tokens, plus causal attention's.
    Recomputation does not count."""
    from megarl.weights.families import Sizes

    s = Sizes.from_config(sizes)
    matrices = s.layers * s.hidden * (2 * s.q + 2 * s.kv + 3 * s.ffn)
    return 6 * (matrices * sum(lengths) + s.hidden * s.vocab * responses) + 6 * s.layers * s.q * sum(
        n * n for n in lengths
    )


def train(tiny: bool, layers: str, recipe: str) -> dict[str, float]:
    """Measure the TFLOP/s and tokens/s of an update."""
    responses, tokens = (4, 60) if tiny else (8, 4092)
    fp8 = {"format": "none"} if recipe == "none" else {"format": "hybrid", "recipe": recipe}
    model = {"layers": layers, "fp8": fp8, "recompute": "selective"}
    with tempfile.TemporaryDirectory() as folder:
        scene = make_scene(folder, tiny, model=model, update={"tokens_per_micro_batch": 8192})
        local = scene.local(responses, tokens)
        scene.update(local)
        took = seconds(lambda: scene.update(local))
    work = flops(scene.sizes, local.lengths.tolist(), int(local.response_mask.sum()))
    return {"tflops": work / took / 1e12, "tokens_per_second": responses * (tokens + 4) / took}


def planned(config: Any, sizes: dict[str, Any], world: int = 1) -> dict[str, tuple[float, float]]:
    """Return the bytes that `megarl plan` expects on the fullest GPU in each phase.

    world: number of devices of the run
    Returns: by phase, the bytes without the engine and the contexts, and the total"""
    from megarl.plan.inputs import make_plan_inputs
    from megarl.plan.memory import gpu_needs

    sizes_of_layout = config.parallel.tp * config.parallel.pp * config.parallel.cp
    parallel = config.parallel.model_copy(update={"dp": world // sizes_of_layout})
    plan = make_plan_inputs(config.model_copy(update={"parallel": parallel}), sizes)
    found = {}
    for need in gpu_needs(plan):
        others = sum(size for part, size in need.parts.items() if part.startswith(("engine.", "contexts")))
        found[need.phase] = (need.total - others, need.total)
    return found


def memory(tiny: bool) -> dict[str, Any]:
    """Measure each phase's peak, tensor groups and planned peak in bytes, and GB/s of offload plus onload."""
    from tests.gpu.scene import UPDATE, WEIGHTS

    responses, tokens = (4, 60) if tiny else (8, 4092)
    with tempfile.TemporaryDirectory() as folder:
        scene = make_scene(
            folder, tiny, model={"recompute": "selective"}, update={"tokens_per_micro_batch": 8192}
        )
        local, peaks, groups = scene.local(responses, tokens), dict[str, float](), dict[str, float]()
        scene.update(local)
        for phase, needs, work in (
            ("old_logprobs", WEIGHTS, scene.logprobs),
            ("actor_update", UPDATE, scene.update),
        ):
            scene.offload.onload(phase, needs)
            groups[phase] = float(scene.offload.nbytes)
            with scene.offload.measure_memory(phase, peaks):
                work(local)
        plan = {phase: own for phase, (own, _) in planned(scene.config, scene.sizes).items()}

        def there_and_back() -> None:
            scene.offload.onload("nothing", ())
            scene.offload.onload("actor_update", UPDATE)

        took = seconds(there_and_back)
        # An onload zeroes gradients instead of copying them: leave them out of the copied bytes.
        scene.offload.onload("nothing", ("actor.gradients",))
        copied = groups["actor_update"] - scene.offload.nbytes
    return {
        "peaks": peaks,
        "groups": groups,
        "planned": {phase: plan[phase] for phase in groups},
        "host": float(scene.host.nbytes),
        "move_gb": 2 * copied / took / 1e9,
    }


def transfers(scene: Any) -> tuple[Any, list[Any]]:
    """Return the plan and the transfers, one a bucket, of the actor's weights into SGLang's layout.

    SGLang itself does not run."""
    from megarl.sync.backends.shared_memory import SharedMemoryBackend
    from megarl.sync.plan import engine_plan
    from megarl.sync.transfer import Staging, Transfer
    from megarl.weights.families import rename_to_table
    from tests.gpu.scene import WEIGHTS

    scene.offload.onload("weight_transfer", WEIGHTS)
    device, rank = scene.runtime.device, scene.runtime.rank
    plan = engine_plan(scene.config, scene.sizes, scene.runtime.layout, cpu=device.type == "cpu")
    sources = rename_to_table(dict(scene.actor.model.named_parameters()))
    dtype = next(iter(sources.values())).dtype
    staging, memory = Staging(device), Staging(device)
    backend, no_engine = SharedMemoryBackend(scene.config, rank, device, dtype), cast(Any, None)
    plans = [plan.part(names) for names in backend.split(plan)]
    parts = [
        Transfer(part, rank, sources, targets, 2**28, dtype=dtype, staging=staging)
        for part, targets in zip(plans, backend.connect(no_engine, plans, memory), strict=True)
    ]
    return plan, parts


def transfer(tiny: bool) -> dict[str, float]:
    """Measure GB/s of the plan's copies into SGLang's layout."""
    with tempfile.TemporaryDirectory() as folder:
        _, parts = transfers(make_scene(folder, tiny, rollout={"engine": "sglang"}))
        size = sum(part.target_bytes for part in parts)
        return {"gb": size / seconds(lambda: [part.run() for part in parts]) / 1e9, "bytes": float(size)}


def rollout(tiny: bool) -> dict[str, float]:
    """Compare tokens per second of megarl's engine with direct calls of SGLang's `generate`.

    Also measure the seconds of offloading and transfer that a colocated step adds."""
    from tests.gpu.scene import ENGINE, TRANSFER, UPDATE

    count, tokens = (4, 16) if tiny else (256, 512)
    options = SGLANG_OPTIONS if torch.cuda.is_available() else {}
    settings = {
        "engine": "sglang",
        "max_batch": count,
        "max_response_tokens": tokens,
        "engine_options": options,
        "engine_memory": 0.5,
    }
    prompts = [[3 + i, 9, 4, 5] for i in range(count)]
    with tempfile.TemporaryDirectory() as folder:
        scene = make_scene(folder, tiny, rollout=settings)
        scene.engine.process.module = "benchmarks.sglang_straight"
        try:
            scene.transfer(0)
            local, answer = scene.local(8, 64 if tiny else 4092), Path(folder) / "straight.json"
            inside = straight = 0.0
            for _ in range(3):  # the first round warms up both
                begin = time.perf_counter()
                completions = scene.generate(prompts, tokens)
                inside = sum(len(c.tokens) for c in completions) / (time.perf_counter() - begin)
                scene.engine.process.call("straight", str(answer), prompts, tokens)
                told = json.loads(answer.read_text())
                straight = told["tokens"] / told["seconds"]
            moves, steps = [], []
            for version in range(1, 4):
                began = time.perf_counter()
                scene.offload.onload("actor_update", UPDATE)
                sync()
                moved = time.perf_counter() - began
                scene.update(local)
                sync()
                begin = time.perf_counter()
                scene.offload.onload("weight_transfer", TRANSFER)
                scene.transfer(version)
                scene.offload.onload("rollout", ENGINE)
                sync()
                moves.append(moved + time.perf_counter() - begin)
                scene.generate(prompts, tokens)
                steps.append(time.perf_counter() - began)
        finally:
            scene.engine.stop()
    overhead = statistics.median(moves)
    return {
        "inside": inside,
        "straight": straight,
        "overhead_seconds": overhead,
        "overhead": overhead / statistics.median(steps),
    }


def part(name: str, *arguments: str, tiny: bool) -> dict[str, Any]:
    """Run a part in a separate process and return its figures."""
    result = in_fresh_process(str(Path(__file__)), f"--one={name}", *arguments, *(["--tiny"] * tiny))
    print(f"{' '.join((name, *arguments))}: {json.dumps(result)}", flush=True)
    return result


def report(only: Sequence[str], tiny: bool, verdicts: Verdicts) -> dict[str, Any]:
    """Run the parts, compare their figures with the targets, and return the figures by name."""
    figures: dict[str, Any] = {"rates": (best := part("rates", tiny=tiny))}
    if "train" in only:
        kinds = [("portable", "none")]
        if torch.cuda.is_available() and find_spec("transformer_engine"):
            kinds += [("te", "none"), ("te", "tensorwise"), ("te", "delayed")]
        for layers, recipe in kinds:
            found = part("train", f"--layers={layers}", f"--recipe={recipe}", tiny=tiny)
            name = layers if recipe == "none" else f"{layers}, FP8 {recipe}"
            figures[f"train, {name}"] = found
            share, what = found["tflops"] / best["matmul_tflops"], "TFLOP/s / those of a bf16 matrix product"
            verdicts.at_least(f"training, {name}: {what}", share, 0.4)
    if "memory" in only:
        figures["memory"] = found = part("memory", tiny=tiny)
        what = "moves to the host and back / copies from pinned memory"
        verdicts.at_least(what, found["move_gb"] / best["from_host_gb"], 0.5)
        for phase, size in found["planned"].items() if torch.cuda.is_available() else ():
            peak = found["peaks"][f"memory/{phase}"]
            verdicts.at_most(f"{phase}, peak / megarl plan's", peak / size, 1.1)
            verdicts.at_least(f"{phase}, peak / megarl plan's", peak / size, 0.8)
    if "transfer" in only:
        figures["transfer"] = found = part("transfer", tiny=tiny)
        verdicts.at_least("transfer GB/s / copies within the device", found["gb"] / best["copy_gb"], 0.5)
    if "rollout" in only and find_spec("sglang"):
        figures["rollout"] = found = part("rollout", tiny=tiny)
        what = "rollout tokens/s inside megarl / SGLang alone"
        verdicts.at_least(what, found["inside"] / found["straight"], 0.9)
        verdicts.at_most("moves and transfer / a step", found["overhead"], 0.05)
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--one", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--layers", default="portable", help=argparse.SUPPRESS)
    parser.add_argument("--recipe", default="none", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.one:
        if not (args.tiny or torch.cuda.is_available()):
            print("gpu: needs a CUDA device (docs/gpu.md); --tiny runs anywhere", file=sys.stderr)
            return 2
        verdicts = Verdicts()
        print(f"gpu: {torch.cuda.get_device_name() if torch.cuda.is_available() else 'a CPU'}; {machine()}")
        report(args.only or PARTS, args.tiny, verdicts)
        for package in ("transformer_engine", "sglang"):
            if not find_spec(package):
                print(f"{package} is not installed: its parts were left out")
        return verdicts.exit_code
    extra = (args.layers, args.recipe) if args.one == "train" else ()
    parts: dict[str, Callable[..., dict[str, Any]]] = dict(
        zip(PARTS, (rates, train, memory, transfer, rollout), strict=True)
    )
    print(json.dumps(parts[args.one](args.tiny, *extra)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
