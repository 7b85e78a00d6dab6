"""Run one stage of hour.py in this process:

    python benchmarks/hour_stages.py NAME --out FOLDER [--tiny] [--model-7b FOLDER]

A stage writes NAME.partial.json after each result, so that a terminated stage keeps its earlier results.
The figures come from existing code: the parts of gpu.py, the scene and the tests of tests/gpu,
`megarl train` with its metrics, and `megarl plan`.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import gpu
import psutil
import torch
from hour import COMMIT, CUDA, NODE, SGLANG, TE
from hour_configs import given_frozen
from hour_found import (
    ENGINE_LOGPROBS,
    GIB,
    ROOT,
    Found,
    Given,
    SkipStage,
    data_sheet,
    make_pretrained,
    random_model,
    small,
    start_runtime,
)
from hour_list import (
    endurance,
    mixture,
    qwen_fp8,
    qwen_large,
    qwen_methods,
    qwen_vapo,
    restart,
    shared_gpu,
    trl,
)
from hour_runs import (
    layouts,
    nccl,
    rank_layout,
    rank_nccl,
    rank_transfer,
    resume,
    seven_vapo,
    transfer_between,
    vapo,
    vapo_20,
)
from measure import in_fresh_process

# The machine


def look(tiny: bool) -> dict[str, Any]:
    """Return the properties of this machine that the runner and the report need."""
    from megarl.parallel.machine import driver_version, installed, transformer_engine_problem

    cuda = torch.cuda.is_available()
    count, has = torch.cuda.device_count() if cuda else 0, [CUDA] * cuda
    name, memory, capability = "a CPU", 0, (0, 0)
    if cuda:
        properties = torch.cuda.get_device_properties(0)
        name, memory, capability = (
            properties.name,
            properties.total_memory,
            (properties.major, properties.minor),
        )
    if not transformer_engine_problem("cuda" if cuda else "cpu"):  # on a CPU: the emulation in tests/te
        has += [TE, *(["FP8"] if capability >= (8, 9) or not cuda else [])]
    has += [SGLANG] * ("sglang" in installed()) + [NODE] * (count > 1 or tiny)
    size = f" ({memory / GIB:.1f} GiB)" if cuda else ""
    git = partial(subprocess.run, cwd=ROOT, capture_output=True, text=True, check=False)
    try:
        commit = git(["git", "rev-parse", "--short=10", "HEAD"]).stdout.strip()
        commit = commit or os.environ.get(COMMIT, "unknown")
        commit += " with changes" if git(["git", "status", "--porcelain"]).stdout.strip() else ""
    except FileNotFoundError:
        commit = os.environ.get(COMMIT, "unknown (no git)")
    return {
        "device": f"{max(1, count)} x {name}{size}",
        "name": name,
        "count": count,
        "memory": memory,
        "host_memory": psutil.virtual_memory().total,
        "capability": capability,
        "driver": f"{driver_version() or 'none'}, torch for CUDA {torch.version.cuda or 'none'}",
        "packages": ", ".join(f"{package} {version}" for package, version in installed().items()),
        "host": f"Python {platform.python_version()}, {psutil.cpu_count()} cores, "
        f"{psutil.virtual_memory().total / GIB:.0f} GiB",
        "code": commit,
        "has": has,
    }


def environment(given: Given, found: Found) -> None:
    """Run `megarl doctor` and nvidia-smi."""
    done = subprocess.run(
        [sys.executable, "-m", "megarl", "doctor"], cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    print(done.stdout, done.stderr, flush=True)
    lines = done.stdout.splitlines()
    found.notes += [line for line in lines if line.startswith(("no ", "look "))]
    found.holds("megarl doctor ends with 0", done.returncode == 0)
    if given.has(CUDA):
        found.holds(
            "megarl doctor finds training on GPUs",
            any(line.startswith("yes  training on GPUs") for line in lines),
        )
    if shutil.which("nvidia-smi"):
        fields = (
            "name,power.limit,clocks.max.sm,clocks.max.memory,temperature.gpu,memory.used,mig.mode.current"
        )
        for query in (["--query-gpu=" + fields, "--format=csv,noheader"], ["topo", "-m"]):
            said = subprocess.run(["nvidia-smi", *query], capture_output=True, text=True, timeout=60).stdout
            print(said, flush=True)
            found.notes += said.splitlines() if query[0] != "topo" else []


# Attention of a 7B model (28 heads of size 128, 4 groups) and of SmolLM2 (9 heads of size 64, 3 groups).
SHAPES = {
    "7B's heads": ("Qwen2.5-7B", {}),
    "SmolLM2's heads": ("tiny", {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3}),
}


def kernels(given: Given, found: Found) -> None:
    """Measure peak rates and report which attention Transformer Engine selects for packed sequences."""
    found.figures = rates = in_fresh_process(str(Path(gpu.__file__)), "--one=rates", *given.tiny_option)
    columns = ("bf16 products, TFLOP/s", "copies, GB/s", "to the host", "from the host")
    found.table("At best", columns, [list(rates.values())])
    if given.has(CUDA):
        sheet = data_sheet(given)
        found.at_least("bf16 matrix product / data sheet", rates["matmul_tflops"] / sheet.tflops, 0.5)
        found.at_least(
            "copies from pinned memory / data sheet", rates["from_host_gb"] / sheet.host_speed, 0.5
        )
    if not (given.has(CUDA) and given.has(TE)):
        found.notes.append("Transformer Engine's kernels were left out: they are not there")
        return
    debug, passes = {"NVTE_DEBUG": "1", "NVTE_DEBUG_LEVEL": "2"}, []
    for shape in SHAPES:
        command = [sys.executable, __file__, "attention", "--out", str(given.out), *given.tiny_option]
        done = subprocess.run(
            [*command, "--with", json.dumps({"shape": shape})],
            cwd=ROOT,
            env=os.environ | debug,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        )
        print(done.stdout, flush=True)
        found.holds(f"a pass through Transformer Engine's layers, {shape}", done.returncode == 0)
        chosen = sorted(set(re.findall(r"Running with \w+ backend.*|Selected backend = .*", done.stdout)))
        refused = sorted(set(re.findall(r"Disabling FusedAttention.*", done.stdout)))
        said = [*chosen, *refused] or ["Transformer Engine does not say which"]
        found.notes += [f"attention, {shape}: {line}" for line in said]
        found.holds(
            f"attention over packs is FlashAttention's or cuDNN's, {shape}",
            any(re.search("Flash|Fused", line) for line in chosen)
            and not any("Unfused" in line for line in chosen),
        )
        if done.returncode == 0:
            seconds = json.loads(
                next(line for line in done.stdout.splitlines()[::-1] if line.startswith("{"))
            )
            passes.append([shape, *seconds.values()])
            found.table("Log-probs of a pack through two layers, s", ("attention", *seconds), passes)


def attention(given: Given, shape: str) -> dict[str, float]:
    """Time forward passes over packs after one update of Transformer Engine layers.

    Transformer Engine requests a cuDNN plan whenever the number of sequences or tokens changes."""
    from tests.gpu.scene import Scene, get_sizes

    name, changes = SHAPES[shape]
    sizes = get_sizes(name, num_hidden_layers=2, vocab_size=16000, **changes)
    scene = Scene(start_runtime(), given.out / "attention", sizes, model={"layers": "te"})
    scene.update(scene.local(6, 300))

    def seconds(tokens: int) -> float:
        local = scene.local(6, tokens)
        begin = time.perf_counter()
        scene.logprobs(local)
        return time.perf_counter() - begin

    return {
        "first": seconds(300),
        "again": seconds(300),
        "other lengths": seconds(290),
        "and again": seconds(290),
    }


def model(given: Given, found: Found) -> None:
    """Prepare SmolLM2, which learns sums, and two random models for stages in which only equality counts."""
    from megarl.config.errors import MegarlError
    from megarl_tasks.pretrained import write_task
    from tests.tiny_models import make_tiny_model

    models = given.out / "models"
    models.mkdir(exist_ok=True)
    small_folder = given.out / "small"
    small_folder.mkdir(exist_ok=True)
    write_task(small_folder, 0)
    try:
        make_pretrained(given, found, "smollm2", small_folder / "model")
    except MegarlError as error:
        sizes = {"hidden": 576, "heads": 9, "kv_heads": 3, "ffn": 1536, "layers": 30, "vocab": 49152}
        random_model(small_folder / "model", "llama", **sizes)
        found.notes.append(f"random weights of SmolLM2's sizes: {error}")
    sizes = (
        {"hidden": 32, "ffn": 48, "layers": 2} if given.tiny else {"hidden": 512, "ffn": 1536, "layers": 8}
    )
    for name, family in (("random", "qwen2"), ("mixture", "qwen3_moe")):
        shutil.rmtree(models / name, ignore_errors=True)
        make_tiny_model(models / name, family, max_positions=2048, dtype=torch.bfloat16, experts=8, **sizes)


# Numbers


def some_text(folder: Path, count: int, tokens: int) -> tuple[list[list[int]], list[list[int]]]:
    """Cut our documentation, tokenized with the folder's tokenizer, into prompts and responses.

    Each prompt has 8 tokens. Prompt and response together have at most `tokens`, a different number each."""
    from megarl.schedule.models import load_tokenizer

    words = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    ids, prompts, responses, at = load_tokenizer(folder)(words)["input_ids"], [], [], 0
    for number in range(count):
        length = tokens - number * tokens // (2 * count)
        prompts.append(ids[at : at + 8])
        responses.append(ids[at + 8 : at + length])
        at += length
    return prompts, responses


def theirs(
    folder: Path,
    prompts: list[list[int]],
    responses: list[list[int]],
    dtype: torch.dtype,
    device: torch.device,
    fp8: bool = False,
) -> torch.Tensor:
    """Compute Hugging Face's log-probs of the responses.

    fp8: round the inputs of the layers' matrix products to e4m3"""
    from transformers import AutoModelForCausalLM

    from tests.gpu.scene import round_products

    network = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device)
    if fp8:
        round_products(network)
    found = []
    for prompt, response in zip(prompts, responses, strict=True):
        with torch.no_grad():
            logits = network(torch.tensor([prompt + response], device=device)).logits[0, len(prompt) - 1 : -1]
        picked = torch.tensor(response, device=device)[:, None]
        found.append(logits.float().log_softmax(-1).gather(-1, picked)[:, 0].cpu())
    return torch.cat(found)


def parity(given: Given, found: Found, folder: Path | None = None, kinds: Sequence[str] = ()) -> None:
    """Compare log-probs with those of Hugging Face in float32.

    fp32 has an absolute bound. The bounds of bf16 and FP8 are relative to Hugging Face's own error in bf16,
    and in float32 with matrix product inputs rounded to e4m3."""
    from tests.parallel import jobs

    folder, runtime = folder or small(given), start_runtime()
    prompts, responses = some_text(folder, *((4, 40) if given.tiny else (8, 400)))
    exact = theirs(folder, prompts, responses, torch.float32, runtime.device)
    yardsticks = {
        "bf16": theirs(folder, prompts, responses, torch.bfloat16, runtime.device),
        "e4m3": theirs(folder, prompts, responses, torch.float32, runtime.device, fp8=True),
    }
    off = {name: float((theirs - exact).abs().mean()) for name, theirs in yardsticks.items()}
    found.figures["Hugging Face"] = off
    ways: dict[str, dict[str, Any]] = {
        "portable fp32": {"layers": "portable", "dtype": "fp32"},
        "portable bf16": {"layers": "portable", "dtype": "bf16"},
    }
    if given.has(TE):
        ways["Transformer Engine bf16"] = {"layers": "te", "dtype": "bf16"}
    if given.has("FP8"):
        fp8 = {"format": "hybrid", "recipe": "tensorwise"}
        ways["Transformer Engine FP8 tensorwise"] = {"layers": "te", "dtype": "bf16", "fp8": fp8}
    rows: list[list[Any]] = [[f"Hugging Face {name}", mean, None] for name, mean in off.items()]
    for name, settings in ways.items():
        if kinds and not any(kind in name for kind in kinds):
            continue
        gc.collect()
        if runtime.device.type == "cuda":
            torch.cuda.empty_cache()
        options = {"layers": settings["layers"], **({"fp8": settings["fp8"]} if "fp8" in settings else {})}
        ours, _ = jobs.logprobs(
            runtime,
            folder,
            prompts,
            responses,
            model=options,
            dtype=settings["dtype"],
            budget=1024,
            chunk=1024,
        )
        difference = (ours.cpu() - exact).abs()
        mean, most = float(difference.mean()), float(difference.max())
        rows.append([name, mean, most])
        found.table("Log-probs beside Hugging Face fp32, |difference|", ("", "mean", "largest"), rows)
        if "fp32" in name:
            found.at_most(f"{name}: largest difference from Hugging Face", most, 1e-3, " nats", must=True)
        else:
            format = "e4m3" if "FP8" in name else "bf16"
            what = f"{name}: mean difference / that of Hugging Face in {format}"
            found.at_most(what, mean / off[format], 1.5)


def tests(given: Given, found: Found, *arguments: str) -> None:
    """Run tests of tests/gpu. Raises SkipStage if all are skipped."""
    xml = given.out / f"{found.path.name.partition('.')[0]}.xml"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "gpu",
        "-o",
        "junit_logging=system-out",
        f"--junitxml={xml}",
    ]
    code = subprocess.run([*command, *arguments], cwd=ROOT, check=False).returncode
    if not xml.is_file() or not read_tests(xml, found):
        raise SystemExit(f"pytest: exit code {code}")


def read_tests(xml: Path, found: Found) -> int:
    """Add pytest's results, and as notes the printed differences of log-probs. Return the number of tests.

    Raises SkipStage if all tests are skipped."""
    cases, reason = [*ElementTree.parse(xml).iter("testcase")], ""
    for case in cases:
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        if (skipped := case.find("skipped")) is not None:
            reason = f"skipped: {skipped.get('message')}"
            found.notes.append(f"{name}: {reason}")
            continue
        said = (case.findtext("system-out") or "").strip().splitlines()
        found.notes += [f"{name}: {line}" for line in said if "log-probs" in line or "difference" in line]
        found.holds(name, case.find("failure") is None and case.find("error") is None)
    found.save()
    if cases and not found.rows:
        raise SkipStage(f"all {len(cases)} tests are {reason}")
    return len(cases)


def engine(given: Given, found: Found, folder: Path | None = None) -> None:
    """Check SGLang on this GPU.

    Its weights after a transfer must be bitwise equal to the folder's. Then two rounds of generation and
    training show how far its log-probs are from the trainer's."""
    from safetensors.torch import load_file

    from megarl.rollout.engines.sglang import LOADER
    from megarl.weights.hf import HFFolder, load_into
    from megarl.weights.shards import sglang_shards
    from tests.gpu.scene import Scene, colocated

    folder, runtime, dump = folder or small(given), start_runtime(), given.out / "dump.safetensors"
    rollout = {"engine": "sglang", "fingerprint": True, "engine_memory": 0.4}
    rollout["engine_options"] = {
        **given.engine_options,
        "custom_weight_loader": (LOADER, "tests.sglang.inside.dump"),
    }
    actor = {"lr": 1e-3}
    if folder == given.model_7b:
        actor = {"lr": 1e-4, **given_frozen(given)}
    scene = Scene(runtime, given.out / "engine", folder, rollout=rollout, actor=actor)
    scene.engine.process.module = "tests.sglang.host"
    try:
        scene.transfer(0)
        scene.engine.process.call("dump", str(dump), 1)
        source = HFFolder(folder)
        shards = sglang_shards(source.config, 1, 0)
        expected = {name: torch.empty(shard.shape, dtype=torch.bfloat16) for name, shard in shards.items()}
        load_into(expected, shards, source)
        held = load_file(dump)
        different = sorted(expected.keys() ^ held.keys())
        different += [
            name for name in expected if name in held and not torch.equal(held[name], expected[name])
        ]
        found.notes += [f"different in SGLang: {', '.join(different[:8])}"] if different else []
        found.holds(f"SGLang's {len(expected)} tensors are the folder's, bit for bit", not different)
        dump.unlink()
        del expected, held
        rounds = colocated(scene)
        found.holds(
            "after an update fingerprints agree, and answers differ",
            rounds["answers"][0] != rounds["answers"][1],
        )
        for number, difference in enumerate(rounds["differences"]):
            what = f"log-probs of engine and trainer, round {number + 1}, mean difference"
            found.at_most(what, float(difference.mean()), ENGINE_LOGPROBS, " nats")
        found.figures["GB/s"] = scene.transfer(2)
    finally:
        scene.engine.stop()
        found.save()


def parts(given: Given, found: Found, *names: str) -> None:
    """Run parts of gpu.py and check their targets."""
    found.figures = figures = gpu.report(names, given.tiny, found)
    if "memory" in figures:
        of = figures["memory"]
        rows = [
            [phase, size / GIB, of["peaks"][f"memory/{phase}"] / GIB, of["planned"][phase] / GIB]
            for phase, size in of["groups"].items()
        ]
        columns = ("phase", "tensor groups, GiB", "peak", "planned peak")
        found.table("Memory of this process, 7B-wide layers", columns, rows)
    if "train, te" in figures and given.has(CUDA):
        bf16 = figures["train, te"]["tflops"]
        found.at_least("bf16: TFLOP/s / data sheet", bf16 / data_sheet(given).tflops, 0.5)
        fp8 = figures["train, te, FP8 tensorwise"]["tflops"]
        found.at_least("FP8 tensorwise: TFLOP/s / bf16's", fp8 / bf16, 1.25)
    found.save()


def one_curve(given: Given, layers: str, recipe: str) -> dict[str, Any]:
    """Return loss and gradient norm of 20 updates (4 with --tiny) on one batch, which the model memorises."""
    from megarl.training.objectives import supervised_loss
    from tests.gpu.scene import UPDATE

    hybrid = "hybrid" if recipe in ("delayed", "tensorwise") else "e4m3"
    fp8 = {"format": "none"} if recipe == "none" else {"format": hybrid, "recipe": recipe}
    responses, tokens, steps = (4, 60, 4) if given.tiny else (8, 1020, 20)
    model = {"layers": layers, "fp8": fp8, **({"dtype": "bf16"} if layers == "te" else {})}
    settings: dict[str, Any] = {"model": model, "actor": {"lr": 2e-4, "warmup_steps": 0}}
    scene = gpu.make_scene(str(given.out / "curves"), given.tiny, **settings)
    losses, norms = [], []
    local = scene.local(responses, tokens)
    scene.offload.onload("actor_update", UPDATE)
    for _ in range(steps):
        loss = supervised_loss(local)
        metrics = scene.actor.update_mini_batches(local.mini_batches, loss, 1, "policy")
        losses.append(metrics["policy/nll_loss"])
        norms.append(metrics["policy/grad_norm"])
    return {"losses": losses, "norms": norms}


def curves(given: Given, found: Found) -> None:
    """Compare the losses of the same updates in bf16 and in each FP8 recipe that this device supports."""
    from megarl.model.fp8 import RECIPES, device_problem

    ways = [("portable", "none")]
    if given.has(TE):
        ways.append(("te", "none"))
    if given.has("FP8"):
        device = (
            (tuple(given.machine["capability"]), torch.version.cuda) if given.has(CUDA) else ((9, 0), "13.0")
        )
        ways += [("te", recipe) for recipe in RECIPES if not device_problem(recipe, *device)]
        if given.tiny:  # the tiny model's matrix sides are not multiples of 128
            ways = [(layers, recipe) for layers, recipe in ways if recipe != "blockwise"]
    drawn: dict[str, list[float]] = {}
    for layers, recipe in ways:
        name = layers if recipe == "none" else f"FP8 {recipe}"
        arguments = json.dumps({"layers": layers, "recipe": recipe})
        made = in_fresh_process(
            __file__, "one_curve", "--out", str(given.out), *given.tiny_option, "--with", arguments
        )
        drawn[name], found.figures[name] = made["losses"], made
        rows = [[step + 1, *losses] for step, losses in enumerate(zip(*drawn.values(), strict=True))]
        found.table("Loss of updates on the same random tokens, 7B-wide layers", ("update", *drawn), rows)
        if recipe != "none":
            pairs = zip(drawn[name], drawn["te"], strict=True)
            apart = statistics.mean(abs(a - b) for a, b in pairs)
            found.at_most(f"loss curve, {name} beside bf16: mean difference", apart, 0.1, " nats")
    first, *_, last = drawn["te" if "te" in drawn else "portable"]
    found.at_most("loss of the last update / of the first", last / first, 0.998)


def seven_of(stage: Callable[..., None]) -> Callable[[Given, Found], None]:
    """Bind a stage to the folder of the 7B model."""

    def with_folder(given: Given, found: Found) -> None:
        stage(given, found, folder=given.model_7b)

    return with_folder


STAGES: dict[str, Callable[[Given, Found], None]] = {
    "environment": environment,
    "model": model,
    "qwen_vapo": qwen_vapo,
    "shared_gpu": shared_gpu,
    "restart": restart,
    "qwen_fp8": qwen_fp8,
    "qwen_methods": qwen_methods,
    "trl": trl,
    "qwen_large": qwen_large,
    "mixture": mixture,
    "endurance": endurance,
    "kernels": kernels,
    "parity": parity,
    "te": lambda given, found: tests(given, found, "tests/gpu/test_transformer_engine.py"),
    "engine": engine,
    "memory": lambda given, found: parts(given, found, "memory"),
    "vapo_bf16": partial(vapo, fp8=False),
    "vapo_fp8": partial(vapo, fp8=True),
    "curves": curves,
    "speed": lambda given, found: parts(given, found, "train"),
    "seven_parity": seven_of(partial(parity, kinds=("Transformer Engine",))),
    "seven_engine": seven_of(engine),
    "seven_vapo": seven_vapo,
    "groups": lambda given, found: tests(
        given, found, "tests/gpu/test_portable.py", "tests/gpu/test_sglang.py"
    ),
    "transfer": lambda given, found: parts(given, found, "transfer"),
    "rollout": lambda given, found: parts(given, found, "rollout"),
    "nccl": nccl,
    "layouts": layouts,
    "transfer_between": transfer_between,
    "resume": resume,
    "vapo_20": vapo_20,
}
# Parts of a stage that run in other processes: one that prints a JSON object last, or several ranks.
PARTS: dict[str, Callable[..., Any]] = {
    "attention": attention,
    "one_curve": one_curve,
    "rank_nccl": rank_nccl,
    "rank_layout": rank_layout,
    "rank_transfer": rank_transfer,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=("look", *STAGES, *PARTS), metavar="NAME", help=", ".join(STAGES))
    parser.add_argument("--out", type=Path, help="folder of the results")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--model-7b", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--engine-options", type=json.loads, default={})
    parser.add_argument("--fetched", type=Path)
    parser.add_argument("--trl", default="")
    parser.add_argument("--with", type=json.loads, default={}, dest="arguments", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.name == "look":
        print(json.dumps(look(options.tiny)))
        return 0
    if options.out is None:
        parser.error("--out is needed")
    machine_file = options.out / "machine.json"
    machine = json.loads(machine_file.read_text()) if machine_file.is_file() else look(options.tiny)
    given = Given(
        options.out.resolve(),
        options.tiny,
        options.model_7b,
        options.data,
        machine,
        options.engine_options,
        options.fetched,
        options.trl,
    )
    if options.name in PARTS:
        print(json.dumps(PARTS[options.name](given, **options.arguments)))
        return 0

    def ended(number: int, _: object) -> NoReturn:  # the runner sends SIGTERM at the time limit
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, ended)
    found = Found(given.out / f"{options.name}.partial.json")
    try:
        STAGES[options.name](given, found)
    except SkipStage as reason:
        found.why = str(reason)
    found.save()
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    raise SystemExit(main())
