"""Rows 1 to 9 of `make gpu`: whole runs on one GPU, in the order of what they decide.

They train on GSM8K (Qwen2.5-Coder), on sums (SmolLM2), or random models where only equality counts."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from hour import CUDA, MARK, marked
from hour_configs import get_machine_overrides, get_model, get_overrides, plan_run
from hour_found import ENGINE_LOGPROBS, GIB, ROOT, Found, Given, SkipStage, make_qwen
from hour_runs import compare_layouts, run, torchrun, train_command

# NCCL may then have several ranks on a GPU; each rank allocates channels, and too few of them hang.
SHARED_GPU = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "2"}
LAYOUTS: dict[str, dict[str, int]] = {
    "tp 2": {"tp": 2},
    "pp 2": {"pp": 2},
    "dp 2": {"dp": 2},
    "cp 2": {"cp": 2},
    "tp 2 pp 2": {"tp": 2, "pp": 2},
}
MIXTURE_LAYOUTS: dict[str, dict[str, int]] = {"ep 2": {"dp": 2, "ep": 2}}
LAYOUT_LIMIT, RUN_LIMIT = 90.0, 180.0  # seconds of a comparison of a layout, and of a run in it
DETERMINISTIC = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
TRL_LIMIT = 400.0  # seconds
KILL_LIMIT = 300.0  # seconds until the phase in which a rank is killed
SAMPLE_EVERY = 1.0  # seconds between two looks at a run's processes
# Phases that compute; all others are overhead.
COMPUTING = ("rollout", "old_logprobs", "values", "critic_update", "actor_update", "reference_logprobs")


def seconds_by_phase(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the median seconds of the phases of all steps but the first."""
    steps = [record for record in records if record["stage"] == "train"]
    steady = steps[1:] or steps
    keys = {key for record in steady for key in record if key.startswith("time/")}
    return {
        key.removeprefix("time/"): statistics.median(record.get(key, 0.0) for record in steady)
        for key in sorted(keys)
    }


def check_speed(
    given: Given, found: Found, name: str, records: Sequence[Mapping[str, Any]], share: float, transfer: float
) -> None:
    """Check a run on a GPU against the plan's seconds, the device's peak, and limits of overhead.

    share: of the bf16 peak, wanted of an update; transfer: seconds wanted of a weight transfer"""
    found.figures["seconds"] = seconds = seconds_by_phase(records)
    if not given.has(CUDA):
        return
    [table] = [table for table in found.tables if table["title"].startswith(f"Phases of {name} beside")]
    rows = {row[0]: dict(zip(table["columns"], row, strict=True)) for row in table["rows"]}
    planned = found.figures["runs"][name]["planned"]
    found.at_most("a step's seconds / megarl plan's", seconds["step"] / planned["step"], 1.3)
    reached = [
        rows[phase]["of the data sheet"] for phase in ("critic_update", "actor_update") if phase in rows
    ]
    if reached := [one for one in reached if one is not None]:
        found.at_least("updates: share of the card's bf16 peak", min(reached), share)
    found.at_most("weight transfer", seconds["weight_transfer"], transfer, " s")
    overhead = 1 - sum(seconds.get(phase, 0.0) for phase in COMPUTING) / seconds["step"]
    moved = planned["residency"] / planned["step"]
    found.notes.append(f"{name}: the plan moves tensors for {moved:.3f} of a step")
    found.at_most("what neither generates nor computes / a step", overhead, 0.08)


def intervals(records: Sequence[Mapping[str, Any]]) -> list[tuple[int, float, float, float]]:
    """Return step, accuracy, and its 95 % interval of each evaluation."""
    from megarl.algorithms.scores import binary_interval

    found = []
    for record in records:
        if record["stage"] == "eval" and "eval/avg" in record:
            mean = float(record["eval/avg"])
            low, high = binary_interval(mean, int(record["eval/problems"]))
            found.append((int(record["step"]), mean, low, high))
    return found


def qwen_vapo(given: Given, found: Found) -> None:
    """Row 1: VAPO on GSM8K learns."""
    make_qwen(given, found, "qwen0.5b")
    is_fresh = not (given.out / "qwen_vapo.json").is_file()  # it was cut short: continue
    records = run(given, found, "qwen_vapo", fresh=is_fresh)
    scores = intervals(records)
    found.table("Held-out accuracy on GSM8K", ("step", "accuracy", "95 % from", "to"), scores)
    found.figures["held_out"] = scores
    explained = [record["value/explained_variance"] for record in records if record["stage"] == "train"]
    late = statistics.median(explained[-max(1, len(explained) // 4) :])
    found.notes.append(f"explained variance, last quarter: {late:.2f}")
    found.holds("accuracy was measured before and after", len(scores) >= 2)
    if given.has(CUDA):
        found.holds("accuracy before and after: intervals do not overlap", scores[-1][2] > scores[0][3])
        found.at_least("explained variance, median of the last quarter", late, 0.2)
    check_speed(given, found, "qwen_vapo", records, 0.25, 0.1)


def shared_gpu(given: Given, found: Found) -> None:
    """Row 2: several ranks over NCCL on one GPU compute what one rank does, train, and resume."""
    environment = SHARED_GPU if given.has(CUDA) else {}
    launch: dict[str, Any] = {"limit": LAYOUT_LIMIT, "environment": environment}
    dense, experts = get_model(given, "random"), get_model(given, "mixture")
    layouts = {"tp 2": LAYOUTS["tp 2"]} if given.tiny else LAYOUTS
    try:
        torchrun(given, 2, "rank_nccl", count=2**16, **launch)
    except SystemExit as error:
        found.notes.append(str(error))
        found.holds("two ranks exchange messages", False)
        return
    ended = compare_layouts(given, found, dense, layouts, **launch)
    ended += compare_layouts(given, found, experts, MIXTURE_LAYOUTS, **launch)
    for name in ended:
        sizes = (LAYOUTS | MIXTURE_LAYOUTS)[name]
        keys = [f"parallel.{key}={size}" for key, size in {"dp": 1, **sizes}.items()]
        keys += [f"model.path={experts if name in MIXTURE_LAYOUTS else dense}", "checkpoint.every=1"]
        options = {**launch, "label": f"shared_gpu, {name}", "limit": RUN_LIMIT}
        try:
            run(given, found, "shared_gpu", *keys, "steps=1", **options)
            records = run(given, found, "shared_gpu", *keys, "steps=2", fresh=False, **options)
        except SystemExit as error:
            found.notes.append(f"{name}: {error}")
            found.holds(f"{name}: a step, a weight transfer, a checkpoint and a resume", False)
            continue
        steps = [record["step"] for record in records if record["stage"] == "train"]
        found.holds(f"{name}: a step, a weight transfer, a checkpoint and a resume", steps == [1, 2])


def restart(given: Given, found: Found) -> None:
    """Row 3: two runs of one seed, and one that is killed and resumed, end in the same weights."""
    sglang = "rollout.engine=sglang" in get_machine_overrides(given)
    options = json.dumps({**given.engine_options, "enable_deterministic_inference": True})
    keys = [f"rollout.engine_options={options}"] if sglang else []
    keys += ["checkpoint.every=1", "checkpoint.export_hf=true"]
    environment = DETERMINISTIC if given.has(CUDA) else {}
    first = run(given, found, "restart", *keys, environment=environment)
    expected = hash_weights(given.out / "restart")
    again = run(given, found, "restart", *keys, label="restart, again", environment=environment)
    found.notes.append(f"two runs of one seed: {first_difference(first, again)}")
    found.holds(
        "two runs of one seed: the same weights, bit for bit", hash_weights(given.out / "restart") == expected
    )
    kill_in_update(given, *keys, environment=environment)
    records = run(
        given, found, "restart", *keys, fresh=False, label="restart, resumed", environment=environment
    )
    steps = [record["step"] for record in records if record["stage"] == "train"]
    found.holds("after kill -9 the run resumes", steps == [1, 2, 3])
    found.holds("resumed: the same weights, bit for bit", hash_weights(given.out / "restart") == expected)
    if given.has(CUDA):
        other = run(given, found, "restart", label="restart, not deterministic")
        ratio = seconds_by_phase(first)["step"] / seconds_by_phase(other)["step"]
        found.notes.append(f"deterministic: a step takes {ratio:.2f} of the time without")


def kill_in_update(given: Given, *keys: str, environment: Mapping[str, str]) -> None:
    """Start the run `restart`, and kill (-9) its first rank in the update of step 2 or later."""
    from megarl.schedule.watchdog import read_beat

    run_dir = given.out / "restart"
    shutil.rmtree(run_dir, ignore_errors=True)
    command = train_command(given, "restart", *keys)
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"} | {**environment})
    end = time.monotonic() + KILL_LIMIT
    try:
        while True:
            beat = read_beat(run_dir / "heartbeat", 0) or {}
            if beat.get("phase") == "actor_update" and beat["stage"] == "train" and beat["step"] >= 2:
                os.kill(int(beat["pid"]), signal.SIGKILL)
                break
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"restart: no update of step 2 to kill within {KILL_LIMIT:.0f} s")
            time.sleep(0.005)
        process.wait(KILL_LIMIT)
    finally:
        if process.poll() is None:
            process.terminate()


def hash_weights(run_dir: Path) -> dict[str, bytes]:
    """Return the checksums of an exported model's tensors."""
    from safetensors import safe_open

    found = {}
    for path in sorted((run_dir / "hf").glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                tensor = file.get_tensor(name).contiguous()
                found[name] = hashlib.sha256(tensor.view(torch.uint8).numpy()).digest()
    if not found:
        raise SystemExit(f"{run_dir}/hf: no exported weights")
    return found


def first_difference(first: Sequence[Mapping[str, Any]], second: Sequence[Mapping[str, Any]]) -> str:
    """Name the first step in which a figure of two runs differs, and the figures; not times and memory."""
    timing = ("time/", "throughput/", "memory")
    for one, other in zip(first, second, strict=False):
        names = [
            name
            for name in one
            if "/" in name and not name.startswith(timing) and one[name] != other.get(name)
        ]
        if names:
            return f"{one['stage']} {one['step']} differs in {', '.join(names[:5])}"
    return "no figure differs"


def qwen_fp8(given: Given, found: Found) -> None:
    """Row 4: the run of row 1 in FP8, tensorwise; then some steps blockwise."""
    records = run(given, found, "qwen_fp8")
    scores = intervals(records)
    found.table("Held-out accuracy on GSM8K, FP8", ("step", "accuracy", "95 % from", "to"), scores)
    before = given.out / "qwen_vapo.json"
    if before.is_file():
        bf16 = json.loads(before.read_text())["figures"]
        at = {step: (low, high) for step, _, low, high in bf16.get("held_out", [])}
        for step, mean, low, high in scores:
            if step in at and given.has(CUDA):
                inside = low <= at[step][1] and high >= at[step][0]
                found.holds(f"step {step}: FP8's accuracy {mean:.3f} and bf16's overlap", inside)
        fp8, seconds = seconds_by_phase(records), bf16.get("seconds", {})
        rows = [[phase, seconds[phase], fp8[phase]] for phase in fp8 if phase in seconds]
        found.table("Seconds of phases: bf16 and FP8", ("phase", "bf16", "FP8"), rows)
    if not given.tiny:  # the tiny model's matrix sides are not multiples of 128
        run(given, found, "qwen_blockwise")


def qwen_methods(given: Given, found: Found) -> None:
    """Row 5: DAPO with dynamic sampling, and PPO with the batch of verl's example for one GPU."""
    for name in ("qwen_dapo", "qwen_ppo"):
        records = run(given, found, name)
        seconds = seconds_by_phase(records)
        found.figures[f"seconds of {name}"] = seconds
        found.notes.append(f"{name}: {seconds['step']:.2f} s a step")


def trl(given: Given, found: Found) -> None:
    """Row 6: compare DAPO with TRL and vLLM at the same model, prompts, lengths and updates."""
    if not given.trl:
        raise SkipStage("needs TRL with vLLM: --trl COMMAND, a Python that has both")
    records = run(given, found, "qwen_trl")
    seconds = seconds_by_phase(records)
    model = get_model(given, "qwen0.5b")
    data = model.parent / "gsm8k_train.jsonl"
    command = [
        *shlex.split(given.trl),
        "-P",  # this folder has modules with names of packages
        str(Path(__file__).with_name("trl_reference.py")),
        str(model),
        str(data),
    ]
    sizes = "--prompts 2 --group 2 --updates 1 --max-tokens 24"
    if given.has(CUDA):
        sizes = "--vllm --dtype bf16 --prompts 64 --accumulate 4 --max-tokens 512"
    command += ["--gsm8k", "--rollouts", "3", "--warmup", "1", *sizes.split()]
    answer = given.out / "trl.answer.json"
    answer.unlink(missing_ok=True)
    # TRL must not import megarl's packages.
    packages = ("PYTHONPATH", "LD_LIBRARY_PATH", "CUDNN_HOME")
    environment = {name: value for name, value in os.environ.items() if name not in packages}
    command += ["--out", str(answer)]
    done = subprocess.run(command, cwd=ROOT, env=environment, timeout=TRL_LIMIT, check=False)
    if done.returncode:
        raise SystemExit(f"TRL: exit code {done.returncode}")
    theirs = json.loads(answer.read_text())
    found.figures["trl"], found.figures["megarl"] = theirs, seconds
    step = statistics.median(theirs["seconds_per_rollout"])
    generation = statistics.median(theirs["generation_seconds_per_rollout"])
    ours = seconds["rollout"] + seconds["weight_transfer"]
    rows = [
        ["a step", seconds["step"], step],
        ["generation and weight transfer", ours, generation],
        ["the rest", seconds["step"] - ours, step - generation],
    ]
    found.table("megarl and TRL, seconds", ("", "megarl", "TRL"), rows)
    if given.has(CUDA):
        found.at_most("a step / TRL's with vLLM", seconds["step"] / step, 0.5)


def qwen_large(given: Given, found: Found) -> None:
    """Row 7: 1.5B with actor and critic, with offload, and without if that fits."""
    from megarl.plan.fit import find_problem

    make_qwen(given, found, "qwen1.5b")
    records = run(given, found, "qwen_large")
    check_speed(given, found, "qwen_large", records, 0.4, 0.2)
    if problem := find_problem(plan_run(given, "qwen_large_kept", get_overrides("qwen_large_kept", given))):
        found.notes.append(f"without offload: {problem}")
        return
    kept = seconds_by_phase(run(given, found, "qwen_large_kept"))
    rows = [[phase, of, kept[phase]] for phase, of in seconds_by_phase(records).items() if phase in kept]
    found.table("1.5B, seconds: with offload and without", ("phase", "offload", "without"), rows)


def mixture(given: Given, found: Found) -> None:
    """Row 8: a small mixture of experts; the trainer replays the engine's choice of experts."""
    records = run(given, found, "mixture")
    steps = [record for record in records if record["stage"] == "train"]
    apart = max(record["mismatch/logprob_abs_mean"] for record in steps)
    found.at_most("log-probs of engine and trainer, mean difference", apart, ENGINE_LOGPROBS, " nats")


class Sampler(threading.Thread):
    """Sample memory and file descriptors of this process's descendants until `stop` is set.

    It begins once `metrics` has records: before, the run starts."""

    def __init__(self, metrics: Path) -> None:
        super().__init__(daemon=True)
        self.metrics = metrics
        self.stop, self.samples = threading.Event(), list[tuple[float, int]]()

    def run(self) -> None:
        while not self.stop.wait(SAMPLE_EVERY):
            if not self.metrics.is_file():
                continue
            memory, descriptors = 0.0, 0
            for process in psutil.Process().children(recursive=True):
                try:
                    memory += process.memory_full_info().pss
                    descriptors += process.num_fds()
                except psutil.Error:
                    continue
            self.samples.append((memory, descriptors))


def endurance(given: Given, found: Found) -> None:
    """Row 9: memory of device and host stays flat over many steps, and nothing is left behind."""
    shutil.rmtree(given.out / "endurance", ignore_errors=True)
    shared, sampler = Path("/dev/shm"), Sampler(given.out / "endurance" / "metrics.jsonl")
    before = {path.name for path in shared.iterdir()}
    sampler.start()
    records = run(given, found, "endurance")
    sampler.stop.set()
    sampler.join()
    steps = [record for record in records if record["stage"] == "train"]
    half = len(sampler.samples) // 2
    early, late = sampler.samples[half // 2 : half], sampler.samples[-max(1, half // 2) :]
    rows = []
    for name, index, size in (("host memory, GiB", 0, GIB), ("file descriptors", 1, 1)):
        a, b = (max((sample[index] for sample in part), default=0) / size for part in (early, late))
        rows.append([name, a, b])
        if not given.tiny:
            found.at_most(f"{name}: last quarter / second quarter", b / a if a else 1.0, 1.02)
    for key in sorted({key for record in steps for key in record if key.startswith("memory_device/")}):
        quarter = len(steps) // 4
        a, b = (
            max(record.get(key, 0.0) for record in part) / GIB
            for part in (steps[quarter : 2 * quarter], steps[-quarter:])
        )
        rows.append([f"{key}, GiB", a, b])
        if given.has(CUDA) and a:
            found.at_most(f"{key}: last quarter / second quarter", b / a, 1.02)
    found.table("Highest values", ("", "second quarter of the steps", "last quarter"), rows)
    left = [process.name() for process in marked(os.environ[MARK]) if process.pid != os.getpid()]
    files = sorted({path.name for path in shared.iterdir()} - before)
    found.notes += [f"left: {', '.join([*left, *files])}"] if left or files else []
    found.holds("no process and no shared memory is left", not left and not files)
