"""A run's folder with metrics and samples of realistic shape, for the tests and for looking at the report:

python tests/report/synthetic_run.py FOLDER writes a VAPO, a DAPO and a warm-start run with their reports."""

from __future__ import annotations

import json
import math
import random
import re
import sys
from dataclasses import replace
from pathlib import Path

import yaml

from megarl.observe.run_log import RunLog, SampleRecord
from megarl.observe.timeline import Timeline
from megarl_report.report import write_report

PHASES = {
    "rollout": 0.41,
    "old_logprobs": 0.06,
    "values": 0.05,
    "gae_advantages": 0.004,
    "critic_update": 0.17,
    "actor_update": 0.19,
    "weight_transfer": 0.02,
}


def train_record(
    step: int, steps: int, recipe: str, rng: random.Random, scale: float = 1.0
) -> dict[str, object]:
    """A training step whose accuracy climbs from a third to nine tenths."""
    progress = 1 - math.exp(-3 * step / steps)
    accuracy = min(1.0, max(0.0, 0.36 + 0.57 * progress + rng.gauss(0, 0.025)))
    kept = round(32 * (0.92 - 0.5 * progress + rng.gauss(0, 0.04)))
    right = round((32 - kept) * progress)
    times = {
        f"time/{name}": s * scale * rng.uniform(0.9, 1.15)
        for name, s in PHASES.items()
        if recipe == "vapo" or name not in ("values", "critic_update")
    }
    record = {
        "step": step,
        "stage": "train",
        "reward/mean": 2 * accuracy - 1.02,
        "reward/accuracy": accuracy,
        "reward/truncated": 0.08 * (1 - progress),
        "reward/unverified": 0.0,
        "response/length_mean": 30 + 4 * progress * scale + rng.gauss(0, 0.6),
        "response/length_right": 30 + 5 * progress * scale + rng.gauss(0, 0.8),
        "response/length_wrong": 30 + 12 * progress * scale + rng.gauss(0, 2.5),
        "reflection/share": 0.02 + 0.1 * progress + abs(rng.gauss(0, 0.004)),
        "reflection/accuracy": accuracy * (0.7 + 0.25 * progress),
        "reflection/accuracy_without": accuracy * 1.02,
        "response/length_min": 4,
        "response/length_max": 80,
        "rollout/groups_kept": kept,
        "rollout/groups_all_right": right,
        "rollout/groups_all_wrong": 32 - kept - right,
        "rollout/share_all_right": right / 32,
        "rollout/share_all_wrong": (32 - kept - right) / 32,
        "rollout/tokens": 8000,
        "rollout/waste": (32 - kept) / 32 if recipe == "dapo" else 0.0,
        "policy/entropy": 0.21 * math.exp(-2.4 * progress) + abs(rng.gauss(0, 0.004)),
        "policy/mean_prob": 0.86 + 0.12 * progress + rng.gauss(0, 0.004),
        "policy/clip_fraction_low": 0.002 * rng.uniform(0.5, 1.6),
        "policy/clip_fraction_high": 0.0035 * rng.uniform(0.5, 1.6),
        # Late steps may clip no token: then there is no such mean.
        **({"policy/clip_prob_high": rng.uniform(0.1, 0.3)} if step < 5 or rng.random() < 0.8 else {}),
        "policy/grad_norm": 0.6 * rng.lognormvariate(0, 0.25),
        "policy/lr": 4e-4 * (1 - 0.9 * step / steps),
        "policy/loss": rng.gauss(0, 0.02),
        "mismatch/logprob_abs_mean": 3e-6 * rng.uniform(0.8, 1.3),
        "mismatch/logprob_abs_max": 6e-5 * rng.uniform(0.5, 2),
        "throughput/rollout_tokens": 43_000 * rng.uniform(0.93, 1.05) / scale,
        "throughput/train_tokens": 36_500 * rng.uniform(0.95, 1.03),
        **times,
        "time/step": sum(times.values()) + 0.03,
    }
    if recipe == "vapo":
        record |= {
            "policy/nll_loss": 0.22 * math.exp(-2 * progress),
            "gae/lambda_mean": 0.937 + 0.01 * progress,
            "value/explained_variance": 0.2 + 0.1 * math.sin(step / 9) + rng.gauss(0, 0.05),
            "value/loss": 0.34 * math.exp(-1.5 * progress) + abs(rng.gauss(0, 0.02)),
            "value/grad_norm": 1.4 * rng.lognormvariate(0, 0.3),
            "value/lr": 2e-3,
        }
    return record


def tables(recipe: str, progress: float, rng: random.Random) -> dict[str, dict[str, list[float]]]:
    """A step of distributions.jsonl: errors grow towards a response's end and shrink as the critic learns."""
    found = {"mismatch": {"tokens": [float(round(8000 * 10.0 ** (-abs(i - 15) / 1.4))) for i in range(31)]}}
    entropy = [320 * (0.3 - 0.008 * i) * (1 - 0.8 * progress) * rng.uniform(0.9, 1.1) for i in range(25)]
    found["entropy"] = {"tokens": [320.0] * 25, "entropy": entropy}
    if recipe == "vapo":
        responses = [float(round(60 * math.exp(-(((i - 10 - 4 * progress) / 4) ** 2)))) for i in range(24)]
        lam = [n * (1 - 1 / (0.3 * (i + 0.5) * 80 / 24 + 1)) for i, n in enumerate(responses)]
        error = [320 * rng.gauss(-0.05, 0.02) for _ in range(25)]
        absolute = [320 * (0.5 + 0.01 * i) * (1 - 0.5 * progress) for i in range(25)]
        found["lambda"] = {"responses": responses, "lambda": lam}
        found["value_error"] = {"tokens": [320.0] * 25, "error": error, "absolute": absolute}
    return found


def samples(step: int, steps: int, rng: random.Random, values: bool) -> list[SampleRecord]:
    """Two groups of four sums with chains of thought, their tokens worth the more the later they are."""
    found = []
    for _ in range(2):
        terms = [rng.randint(1, 5) for _ in range(rng.randint(3, 6))]
        for _ in range(4):
            total, lines = terms[0], []
            for term in terms[1:]:
                wrong = rng.random() < 0.25 * (1 - step / steps)
                lines.append(f"{total}+{term}={total + term + wrong}")
                total += term + wrong
            correct = total == sum(terms)
            text = "\n".join([*lines, f"Answer: {total}"])
            advantage = 0.6 if correct else -0.9
            tokens = [*re.findall(r"\w+|\W", text), "<eos>"]
            worth = [advantage * (at + 1) / len(tokens) for at in range(len(tokens))]
            found.append(
                SampleRecord(
                    step,
                    "+".join(map(str, terms)) + "=?\n",
                    text,
                    1.0 if correct else -1.0,
                    correct,
                    False,
                    5 * len(terms),
                    str(sum(terms)),
                    "train",
                    advantage,
                    advantage - 0.3,
                    advantage + 0.2,
                    4,
                    2,
                    tokens,
                    worth,
                    [1 - abs(x) for x in worth] if values else None,
                )
            )
    return found


def write_run(
    run_dir: Path, recipe: str = "vapo", steps: int = 60, seed: int = 0, k: int = 1, scale: float = 1.0
) -> Path:
    """Writes metrics.jsonl, samples.jsonl, config.yaml and versions.json."""
    rng = random.Random(seed)
    run_dir.mkdir(parents=True, exist_ok=True)
    config = {
        "recipe": recipe,
        "run_dir": f"runs/{run_dir.name}",
        "steps": steps,
        "seed": seed,
        "model": {"path": "runs/demo/warm_start/hf", "dtype": "fp32"},
        "parallel": {"tp": 2, "pp": 1, "dp": 1, "cp": 1, "device": "cpu"},
        "rollout": {
            "prompts": 32,
            "group_size": 8,
            "max_response_tokens": 80,
            "dynamic_sampling": {"enabled": recipe == "dapo"},
        },
        "actor": {"lr": 4e-4, "betas": [0.9, 0.95]},
        "log": {"terminal": "auto"},
    }
    (run_dir / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    versions = {
        "megarl": "0.1.0",
        "python": "3.11.7",
        "torch": "2.13.0",
        "megatron-core": "0.16.1",
        "transformers": "5.19.0",
    }
    (run_dir / "versions.json").write_text(json.dumps(versions))
    with RunLog(run_dir, samples=8) as log:
        if recipe == "sft":
            for step in range(1, steps + 1):
                log.write_metrics(
                    {
                        "step": step,
                        "stage": "sft",
                        "policy/nll_loss": 0.3 + 2.5 * math.exp(-step / 30) + abs(rng.gauss(0, 0.02)),
                        "policy/lr": 3e-3,
                        "time/step": 0.09,
                    }
                )
            return run_dir
        for step in range(1, 5 if recipe == "vapo" else 0):
            log.write_metrics(
                {
                    "step": step,
                    "stage": "value_pretraining",
                    "value/loss": 0.3 + 0.7 / step,
                    "value/explained_variance": 0.21 * (1 - 0.9**step),
                    "time/step": 1.5,
                }
            )
        for step in range(steps + 1):
            if step:
                log.write_metrics(train_record(step, steps, recipe, rng, scale))
                found = samples(step, steps, rng, recipe == "vapo")
                log.write_samples(
                    found
                    if step % -(-steps // 100) == 0
                    else [replace(sample, tokens=None) for sample in found]
                )
                log.write_distributions(step, "train", tables(recipe, step / steps, rng))
            if step % max(1, steps // 6) == 0:
                average = 0.36 + 0.56 * (1 - math.exp(-3 * step / steps)) + rng.gauss(0, 0.012)
                spread = (
                    {"eval/pass": min(1.0, average + 0.12), "eval/majority": min(1.0, average + 0.06)}
                    if k > 1
                    else {"eval/pass": average, "eval/majority": average}
                )
                log.write_metrics(
                    {
                        "step": step,
                        "stage": "eval",
                        "eval/avg": average,
                        **spread,
                        "eval/k": k,
                        "eval/problems": 512,
                        "time/step": 1.1,
                    }
                )
    write_timeline(run_dir, steps)
    return run_dir


def write_timeline(run_dir: Path, steps: int, trainers: int = 2, engines: int = 0) -> None:
    """Writes the timeline of a run of steps of 2.4 s. With `engines` ranks for them alone, two of each, it is
    one step ahead: of the 2.2 s that the trainers take an engine decodes 1.7 s, and its neighbour 2 s."""
    now = [0.0]
    for rank in range(trainers + engines):
        now[0] = 1.7e9
        timeline = Timeline(run_dir, rank, clock=lambda: now[0])

        def phase(name: str, seconds: float, waited: float = 0.0, timeline: Timeline = timeline) -> None:
            timeline.enter(name)
            timeline.add_wait(waited)
            now[0] += seconds
            timeline.leave()

        for step in range(1, steps + 1):
            timeline.step("train", step)
            if rank >= trainers:
                idle = (0.5, 2.2, 0.2, 2.2)[(rank - trainers) % 4]  # the second of each is told nothing
                phase("rollout", 2.2, waited=idle)
                phase("weight_transfer", 0.2)
                continue
            phase("wait for batch" if engines else "rollout", 0.1 if engines else 1.2, 0.05 * rank)
            phase("old_logprobs", 0.3)
            phase("actor_update", 1.8 if engines else 0.7)
            phase("weight_transfer", 0.2)
            if step == 7:
                phase("evaluation", 3.0)
        timeline.close()


if __name__ == "__main__":
    root = Path(sys.argv[1])
    vapo = write_run(root / "demo-vapo", "vapo", k=8)
    dapo = write_run(root / "demo-dapo", "dapo", seed=1, scale=1.25)
    warm = write_run(root / "warm-start", "sft", steps=450)
    long = write_run(root / "long", "vapo", steps=5000, seed=2, k=32)
    for run_dirs, name in (
        ([vapo], "vapo"),
        ([dapo], "dapo"),
        ([warm], "warm"),
        ([long], "long"),
        ([vapo, dapo], "both"),
    ):
        print(write_report(run_dirs, root / f"{name}.html"))
