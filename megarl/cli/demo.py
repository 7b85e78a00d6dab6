"""`megarl demo`: a newcomer's first run. A tiny model and a task are made, warm-started and trained by reinforcement.

A seed's task and warm start are shared by the recipes, whose runs lie side by side; only the run of the same recipe is made anew.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from megarl.ablation.jobs import locked
from megarl.cli.train import train
from megarl.config import check_config, load_config
from megarl.config.errors import ConfigError
from megarl.config.load import config_file, set_key
from megarl.config.schema import Config

MARK = ".megarl-demo"  # in --folder: it was made here
MARK_WARM_START = (
    ".megarl-demo-warm-start"  # what a warm start was made from and came to, once it has ended well
)
MARK_RUN = ".megarl-demo-run"  # in a run's folder, which the next run of its recipe may delete


def demo(recipe: str, seed: int, folder: Path, overrides: Sequence[str], *, data_only: bool = False) -> int:
    """Warm start, then DAPO or VAPO, in `folder` (seed 0) or its seed-N. data_only: the data and the untrained model alone."""
    from megarl.demo.arithmetic import write_demo

    started = time.time()
    place = folder if seed == 0 else folder / f"seed-{seed}"
    teaching, file = config_file("configs/demo_sft.yaml"), config_file(f"configs/demo_{recipe}.yaml")
    supervised = [
        set_key("seed", seed),
        set_key("data.train", [place / "sft.jsonl"]),
        set_key("model.path", place / "model"),
        set_key("run_dir", place / "sft"),
    ]
    reinforcement = [
        set_key("seed", seed),
        set_key("data.train", [place / "train.jsonl"]),
        set_key("data.eval", [place / "eval.jsonl"]),
        set_key("model.path", place / "sft" / "hf"),
        set_key("run_dir", place / recipe),
        *overrides,
    ]
    # A mistake in the overrides is found now, not after the warm start.
    config = load_config(file, reinforcement)
    check_config(config, str(file))
    _check_made_here(folder, MARK, "--folder")
    _check_made_here(place / "sft", MARK_WARM_START, "--folder")
    _check_made_here(config.run_dir, MARK_RUN, "run_dir or --folder")
    for needed in (place / "sft" / "hf", config.model.path, config.critic.path):
        if needed and needed.resolve().is_relative_to(config.run_dir.resolve()):
            raise ConfigError(
                f"run_dir: {config.run_dir}: is made anew, and holds {needed}, which the run starts from (choose another)"
            )
    with locked(folder, "megarl demo"):
        (folder / MARK).touch()
        shutil.rmtree(place / "model", ignore_errors=True)
        write_demo(place, seed)
        if data_only:
            print(f"data and untrained model written to {place}")
            return 0
        if code := _warm_start(teaching, supervised):
            return code
        print(
            f"[2/2] {config.recipe.upper()}: reinforcement learning, with nothing but a rule that checks the final answers",
            flush=True,
        )
        _make_anew(config.run_dir, MARK_RUN)
        if code := train(file, reinforcement):
            return code
        _print_end(config)
        print(f"took {time.time() - started:.0f} s")
        return 0


def _warm_start(file: Path, overrides: Sequence[str]) -> int:
    """Supervised training, or the result of an earlier one of which everything that its bits depend on was the same."""
    from megarl.ablation.runs import checksum, files_of, identity

    config = load_config(file, overrides)
    mark, hf = config.run_dir / MARK_WARM_START, config.run_dir / "hf"
    wanted = identity(config)
    if hf.is_dir() and mark.read_text(encoding="utf-8") == json.dumps(
        {**wanted, "result": checksum(files_of(hf))}
    ):
        print(
            f"[1/2] warm start: that of {config.run_dir} is used again (same code, settings and data)",
            flush=True,
        )
        return 0
    print(
        f"[1/2] warm start: supervised training of a tiny Qwen3 model on noisy sums ({config.run_dir.parent})",
        flush=True,
    )
    _make_anew(config.run_dir, MARK_WARM_START)
    if code := train(file, overrides):
        return code
    mark.write_text(json.dumps({**wanted, "result": checksum(files_of(hf))}), encoding="utf-8")
    return 0


def _print_end(config: Config) -> None:
    from megarl.observe.runs import read_metrics

    print()
    scores = [record for record in read_metrics(config.run_dir).records if record["stage"] == "eval"]
    if scores:
        first, last = scores[0], scores[-1]
        problems = first["eval/problems"]
        before, after = first["eval/avg"], last["eval/avg"]
        print(
            f"accuracy on {problems} held-out problems: {before:.3f} before, {after:.3f} after {last['step']} steps"
        )
        _print_styles(config.run_dir / "evaluations.jsonl", first["step"], last["step"])
    for name, path in (("report:  ", config.run_dir / "report.html"), ("HF model:", config.run_dir / "hf")):
        if path.exists():
            print(f"{name}   {path}")


def _print_styles(answers: Path, first: int, last: int) -> None:
    """Return how the shares of the kinds of answers moved: what the policy learned besides being right more often."""
    from megarl.demo.arithmetic import Style, style_shares

    found: dict[int, list[tuple[str, bool]]] = {first: [], last: []}
    for line in answers.read_text(encoding="utf-8").splitlines():
        answer = json.loads(line)
        if answer["step"] in found:
            found[answer["step"]].append((answer["response"], not answer["truncated"]))
    before, after = style_shares(found[first]), style_shares(found[last])
    names: dict[Style, str] = {
        "chain": "worked out",
        "bare": "guessed",
        "wait": "second thoughts",
        "truncated": "unfinished",
    }
    print(
        "answers:    "
        + ", ".join(f"{text} {before[style]:.0%} -> {after[style]:.0%}" for style, text in names.items())
    )


def _check_made_here(folder: Path, mark: str, key: str) -> None:
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder}: not a folder (choose another {key})")
    if folder.exists() and any(folder.iterdir()) and not (folder / mark).exists():
        raise ConfigError(f"{folder}: exists and was not made by megarl demo (choose another {key})")


def _make_anew(folder: Path, mark: str) -> None:
    from megarl.ablation.runs import make_anew

    try:
        make_anew(folder)
        (folder / mark).touch()
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written: {error.strerror} (choose another folder)") from None
