"""`megarl demo`: a newcomer's first run. A tiny model and a task are made, warm-started and trained by reinforcement."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from megarl.cli.train import train
from megarl.config import check_config, load_config
from megarl.config.errors import ConfigError
from megarl.config.load import set_key

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
MARK = ".megarl-demo"  # a folder that bears it was made here and may be made anew


def demo(recipe: str, seed: int, folder: Path, overrides: Sequence[str], *, data_only: bool = False) -> int:
    """Warm start, then DAPO or VAPO; everything below `folder`, which is made anew. data_only: the data and the untrained model alone."""
    from megarl.data.arithmetic import write_demo
    from megarl.observe.metrics import read_metrics

    started = time.time()
    configs = Path("configs") if Path("configs/demo_sft.yaml").is_file() else CONFIGS
    if not (configs / "demo_sft.yaml").is_file():
        raise ConfigError("configs/demo_sft.yaml: no such file (run megarl demo from a checkout of megarl)")
    run = folder / recipe
    warm_start = [set_key("seed", seed), set_key("data.train", [folder / "sft.jsonl"]), set_key("model.path", folder / "model")]
    warm_start.append(set_key("run_dir", folder / "sft"))
    reinforcement = [
        set_key("seed", seed),
        set_key("data.train", [folder / "train.jsonl"]),
        set_key("data.eval", [folder / "eval.jsonl"]),
        set_key("model.path", folder / "sft" / "hf"),
        set_key("run_dir", run),
        *overrides,
    ]
    # A mistake in the overrides is found now, not after the warm start.
    check_config(load_config(configs / f"demo_{recipe}.yaml", reinforcement), str(configs / f"demo_{recipe}.yaml"))
    _clear(folder)
    write_demo(folder, seed)
    (folder / MARK).touch()
    if data_only:
        print(f"data and untrained model written to {folder}")
        return 0
    print(f"[1/2] warm start: supervised training of a tiny Qwen3 model on noisy sums ({folder})", flush=True)
    if code := train(configs / "demo_sft.yaml", warm_start):
        return code
    print(f"[2/2] {recipe.upper()}: reinforcement learning, with nothing but a rule that checks the final answers", flush=True)
    if code := train(configs / f"demo_{recipe}.yaml", reinforcement):
        return code
    scores = [record for record in read_metrics(run).records if record["stage"] == "eval"]
    first, last = scores[0], scores[-1]
    print()
    print(
        f"accuracy on {first['eval/problems']} held-out problems: {first['eval/avg']:.3f} before, "
        f"{last['eval/avg']:.3f} after {last['step']} steps"
    )
    _print_styles(run / "evaluations.jsonl", first["step"], last["step"])
    print(f"report:     {run / 'report.html'}")
    print(f"HF model:   {run / 'hf'}")
    print(f"took {time.time() - started:.0f} s")
    return 0


def _print_styles(answers: Path, first: int, last: int) -> None:
    """How the shares of the kinds of answers moved: what the policy has learned to do, besides being right more often."""
    from megarl.data.arithmetic import Style, style_shares

    found: dict[int, list[tuple[str, bool]]] = {first: [], last: []}
    for line in answers.read_text(encoding="utf-8").splitlines():
        answer = json.loads(line)
        if answer["step"] in found:
            found[answer["step"]].append((answer["response"], not answer["truncated"]))
    before, after = style_shares(found[first]), style_shares(found[last])
    names: dict[Style, str] = {"chain": "worked out", "bare": "guessed", "wait": "second thoughts", "truncated": "unfinished"}
    print("answers:    " + ", ".join(f"{text} {before[style]:.0%} -> {after[style]:.0%}" for style, text in names.items()))


def _clear(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder}: not a folder (choose another --folder)")
    if folder.exists():
        if any(folder.iterdir()) and not (folder / MARK).exists():
            raise ConfigError(f"{folder}: exists and was not made by megarl demo (choose another --folder)")
        shutil.rmtree(folder)
