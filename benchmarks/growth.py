"""Measure how a step's time and memory grow with responses, length, vocabulary and ranks.

One axis varies at a time, from a small base setting. The model has random weights, and its responses reach
the maximum length. The result is each phase's slope in a log-log plot: slope 1 means twice the time for twice
the size. A step may not grow faster than its work.

    make bench BENCH=growth                                  # 10 minutes; not among all
    make bench BENCH=growth ARGS='--plot docs/images/growth.png'

Seconds are the minimum of two steps. The responses per data-parallel rank are constant. On two cores the time
is therefore proportional to the number of ranks, if there are at least two.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from measure import Verdicts, machine
from step import ROOT, megarl

sys.path.insert(0, str(ROOT))

from tests.tiny_models import make_tiny_model

FOLDER = ROOT / "runs" / "growth"
# BASE is the base setting. AXES has the values of each axis and the largest slope: that of the work.
# Attention, a part of the work at these lengths, grows with the square of the length.
BASE = {"responses": 32, "length": 64, "vocabulary": 4096, "ranks": 1}
AXES: dict[str, tuple[tuple[int, ...], float]] = {
    "responses": ((8, 16, 32, 64, 128, 256), 1.0),
    "length": ((32, 64, 128, 256, 512, 1024), 2.0),
    "vocabulary": ((1024, 4096, 16384, 65536), 1.0),
    "ranks": ((1, 2, 4, 8), 1.0),
}
NOISE = 0.15  # tolerance of a slope
MEMORY = "memory, MiB"
STEPS = 3  # the first is not timed


def run(responses: int, length: int, vocabulary: int, ranks: int) -> dict[str, float]:
    """Measure the seconds of each phase of a VAPO step, and the peak memory of all processes in it.

    responses: per rank"""
    model = FOLDER / f"model-{vocabulary}"
    if not model.is_dir():
        sizes: dict[str, Any] = {
            "layers": 2,
            "hidden": 128,
            "heads": 4,
            "kv_heads": 2,
            "ffn": 384,
            "max_positions": 2048,
        }
        make_tiny_model(model, "qwen3", vocab=vocabulary, tied=True, **sizes)
    data = FOLDER / "train.jsonl"
    rows = ({"prompt": f"{n:05d}", "answer": "1"} for n in range(2048))
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    run_dir, group = FOLDER / "run", 4
    shutil.rmtree(run_dir, ignore_errors=True)
    megarl(
        *("train", "configs/demos/vapo.yaml", f"model.path={model}", f"data.train=[{data}]", "data.eval=[]"),
        *(f"run_dir={run_dir}", f"steps={STEPS}", "value_pretraining.steps=0", "evaluation.every=0"),
        *(f"rollout.prompts={responses * ranks // group}", f"rollout.group_size={group}"),
        *(f"rollout.max_response_tokens={length}", f"reward.overlong.buffer={length // 4}"),
        *("parallel.tp=1", f"parallel.dp={ranks}", f"update.mini_batch={responses * ranks}"),
        *(f"update.tokens_per_micro_batch={max(2048, length + 64)}", "actor.lr=1e-9", "critic.lr=1e-9"),
        "rollout.temperature=0.1",  # tied random weights then repeat a token and rarely sample EOS
        *("log.report=false", "checkpoint.export_hf=false"),
    )
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [record for line in lines if (record := json.loads(line))["stage"] == "train"][1:]
    drawn = {round(record["response/length_mean"] / length, 1) for record in steps}
    if drawn != {1.0}:
        raise SystemExit(f"growth: responses were {drawn} of {length} tokens, and should reach it")
    found = {n[5:]: min(record[n] for record in steps) for n in steps[0] if n.startswith("time/")}
    peaks = [size for record in steps for n, size in record.items() if n.startswith("memory_all/")]
    return {**found, MEMORY: max(peaks) / 2**20}


def slope(values: list[int], figures: list[float]) -> float:
    """Fit the slope of the upper half in a log-log plot; constant costs dominate the lower half."""
    upper = slice(-max(3, len(values) // 2), None)
    return float(np.polyfit(np.log(values[upper]), np.log(np.maximum(figures[upper], 1e-6)), 1)[0])


def draw(found: dict[str, list[dict[str, float]]], path: Path) -> None:
    """Plot the step and its largest phases over each axis."""
    figure = Figure(figsize=(11, 3.2), layout="constrained")
    largest = max(found["responses"], key=lambda one: one["step"])
    phases = sorted((n for n in largest if n != MEMORY), key=lambda n: -largest[n])[:7]
    for axes, (axis, runs) in zip(figure.subplots(1, len(found), sharey=True), found.items(), strict=True):
        values = AXES[axis][0]
        for name in phases:
            width = 2.5 if name == "step" else 1.2
            figures = [one[name] for one in runs]
            axes.loglog(values, figures, marker="o", markersize=3, linewidth=width, label=name)
        axes.set(xlabel=axis, xticks=values, xticklabels=[f"{value:,}" for value in values])
        axes.minorticks_off()
        axes.tick_params(axis="x", labelrotation=45)
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("seconds of a step")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right", fontsize=8)
    figure.savefig(path, dpi=150)
    print(path)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--axes", nargs="*", choices=AXES, default=AXES)
    parser.add_argument("--plot", type=Path, help="write the log-log plots there")
    given = parser.parse_args()
    print(machine())
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    verdicts, found = Verdicts(), dict[str, list[dict[str, float]]]()
    for axis in given.axes:
        values, work = AXES[axis]
        print(f"\n{axis} (else {', '.join(f'{v} {k}' for k, v in BASE.items() if k != axis)})")
        sizes: list[dict[str, Any]] = [{**BASE, axis: value} for value in values]
        runs = found[axis] = [run(**size) for size in sizes]
        print(f"{'':24}" + "".join(f"{value:>10,}" for value in values) + "     slope")
        for name in runs[0]:
            figures = [one[name] for one in runs]
            if name == MEMORY or max(figures) > 0.02 * max(one["step"] for one in runs):
                shown = "".join(f"{f:10,.0f}" if name == MEMORY else f"{f:10.4f}" for f in figures)
                print(f"{name:24}{shown}{slope([*values], figures):10.2f}")
        grown = slope([*values], [one["step"] for one in runs])
        verdicts.at_most(f"growth, slope of a step's seconds with {axis}", grown, work + NOISE)
    if given.plot:
        draw(found, given.plot)
    return verdicts.exit_code


if __name__ == "__main__":
    sys.exit(main())
