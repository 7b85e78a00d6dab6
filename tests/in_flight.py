"""What must hold at the end of a run with weights in flight, however it was interrupted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from megarl.config import load_config
from megarl.config.schema import PRETRAINING, Config
from megarl.schedule.rollouts import manifest_path, read_manifest
from megarl.weights.megatron import megatron_to_hf

TOLERANCE = 2e-4  # of log-probs in float32


def find_problems(run_dir: Path) -> list[str]:
    """Return what is wrong with a finished run in float32 with `checkpoint.rollouts` and all checkpoints.

    Each step is recorded once, and trained on a full batch. No prompt is lost or trained on twice. Each
    token's version is at most `max_staleness` older than the weights that its update started from. Unless
    caches are kept, its log-prob is that of a forward pass of this version over all earlier tokens."""
    config = load_config(run_dir / "config.yaml")
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    steps = [record["step"] for record in records if record["stage"] == "train"]
    num_pretraining = sum(record["stage"] == PRETRAINING for record in records)
    problems = [] if steps == list(range(1, config.steps + 1)) else [f"recorded steps: {steps}"]
    exact = config.schedule.in_flight != "keep"
    for step in range(1, config.steps + 1):
        count = 0
        for path in sorted((run_dir / "rollouts" / f"step-{step:06d}").glob("*.safetensors")):
            batch = load_file(path)
            ends = batch["cu_seqlens"].tolist()
            count += len(ends) - 1
            for begin, end in pairwise(ends):
                sequence = {
                    name: batch[key][begin:end]
                    for name, key in (
                        ("tokens", "tokens"),
                        ("mask", "response_mask"),
                        ("versions", "column.token_versions"),
                        ("logprobs", "column.engine_logprobs"),
                    )
                }
                what = f"step {step}, tokens {begin} to {end} of {path.name}"
                problems += [f"{what}: {problem}" for problem in _check(config, sequence, step, exact=exact)]
        if count != config.responses:
            problems.append(f"step {step} has {count} responses")
        if not config.rollout.dynamic_sampling.enabled:
            state = read_manifest(manifest_path(run_dir / "rollouts", step))["state"]["samplers"]
            prompts, num_pending = state["prompts"], len(state["rollout"]["returned"])
            taken = prompts["epoch"] * prompts["num_prompts"] + prompts["position"]
            if taken != (trained := config.rollout.prompts * (num_pretraining + step)) + num_pending:
                problems.append(f"step {step}: {taken} prompts, {trained} trained, {num_pending} pending")
    return problems


def _check(config: Config, sequence: dict[str, torch.Tensor], step: int, *, exact: bool) -> Sequence[str]:
    run_dir, mask = config.run_dir, sequence["mask"].bool()
    versions = sequence["versions"][mask]
    if not len(versions):
        return []
    if versions.tolist() != sorted(versions.tolist()):
        return [f"versions {versions.tolist()}"]
    if versions.max() > step - 1 or step - 1 - versions.min() > config.schedule.max_staleness:
        return [f"versions {sorted(set(versions.tolist()))}"]
    problems = []
    for version in sorted(set(versions.tolist())) if exact else ():
        model = _load_version(run_dir, version)
        with torch.no_grad():
            logits = model(sequence["tokens"][None].long()).logits[0, :-1] / config.rollout.temperature
        expected = logits.log_softmax(-1).gather(-1, sequence["tokens"][1:, None].long())[:, 0]
        chosen = (mask & (sequence["versions"] == version))[1:]
        difference = float((expected - sequence["logprobs"][1:])[chosen].abs().max())
        if difference > TOLERANCE:
            problems.append(f"log-probs of version {version} differ by {difference:.1e}")
    return problems


@cache
def _load_version(run_dir: Path, version: int) -> torch.nn.Module:
    config = load_config(run_dir / "config.yaml")
    folder = config.model.path
    if version:
        folder = run_dir / f"version-{version}"
        if not folder.exists():
            actor = run_dir / "checkpoints" / f"step-{version:06d}" / "actor"
            megatron_to_hf(actor, folder, source=config.model.path)
    disable_progress_bar()
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model
