"""`megarl demo`: a newcomer's first run. A tiny model and a task are made, warm-started and trained by
reinforcement.

A seed's task and warm start are shared by the recipes, whose runs lie side by side; only the run of the same
recipe is made anew."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from megarl.cli.train import train
from megarl.config import check_config, load_config
from megarl.config.errors import ConfigError
from megarl.config.load import config_file, set_key
from megarl.config.schema import Config
from megarl.parallel.lease import leased

MARK = ".megarl-demo"  # in --folder: it was made here
MARK_WARM_START = ".megarl-demo-warm-start"  # after a warm start: what it was made from and came to
MARK_RUN = ".megarl-demo-run"  # in a run's folder, which the next run of its recipe may delete


def demo(
    recipe: str,
    seed: int,
    folder: Path,
    overrides: Sequence[str],
    *,
    layers: int = 2,
    experts: int = 0,
    data_only: bool = False,
) -> int:
    """Warm start, then DAPO or VAPO, in `folder` (seed 0) or its seed-N; with `experts` a layer in experts-N
    there. data_only: write the data and the untrained model alone."""
    from megarl.demo.arithmetic import write_demo
    from megarl.weights.families import read_config
    from megarl.weights.layout import check_layout

    if layers < 1:
        raise ConfigError(f"--layers: must be at least 1 (got {layers})")
    started = time.time()
    if experts and experts < 2:
        raise ConfigError(f"--experts: a token goes to two of them (got {experts}; 0 is a dense model)")
    place = folder if seed == 0 else folder / f"seed-{seed}"
    place = place / f"experts-{experts}" if experts else place
    file = config_file(f"configs/demo_{recipe}.yaml")
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
    config = load_config(file, reinforcement)
    check_config(config, str(file))  # a mistake in the overrides is found now, not after the warm start
    run_dir = config.run_dir
    for made, mark, key in (
        (folder, MARK, "--folder"),
        (place / "sft", MARK_WARM_START, "--folder"),
        (run_dir, MARK_RUN, "run_dir or --folder"),
    ):
        if made.exists() and not made.is_dir():
            raise ConfigError(f"{made}: not a folder (choose another {key})")
        if made.exists() and any(made.iterdir()) and not (made / mark).exists():
            raise ConfigError(f"{made}: exists and was not made by megarl demo (choose another {key})")
    for needed in (place / "sft" / "hf", config.model.path, config.critic.path):
        if needed and needed.resolve().is_relative_to(run_dir.resolve()):
            what = f"is made anew, and holds {needed}, which the run starts from (choose another)"
            raise ConfigError(f"run_dir: {run_dir}: {what}")
    # Not kept by a thread: ranks are forked from this process. What trains, or waits for ranks, renews it.
    with leased(folder, "megarl demo", remedy="wait for it, or choose another --folder"):
        (folder / MARK).touch()
        shutil.rmtree(place / "model", ignore_errors=True)
        write_demo(place, seed, layers, experts)
        sizes = config.parallel
        check_layout(read_config(place / "model"), sizes.tp, sizes.pp, sizes.ep, sizes.vpp)
        if data_only:
            print(f"data and untrained model written to {place}")
            return 0
        if code := _warm_start(config_file("configs/demo_sft.yaml"), supervised):
            return code
        what = "reinforcement learning, with nothing but a rule that checks the final answers"
        print(f"[2/2] {config.recipe.upper()}: {what}", flush=True)
        _make_anew(run_dir, MARK_RUN)
        if code := train(file, reinforcement):
            return code
        _print_result(config)
        print(f"took {time.time() - started:.0f} s")
        return 0


def _warm_start(file: Path, overrides: Sequence[str]) -> int:
    """Train supervised, or use an earlier result for which everything that its bits depend on was the
    same."""
    from megarl.ablation.runs import checksum, files_of, identity

    config = load_config(file, overrides)
    mark, hf = config.run_dir / MARK_WARM_START, config.run_dir / "hf"
    wanted = identity(config)

    def note() -> str:
        return json.dumps({**wanted, "result": checksum(files_of(hf))})

    if hf.is_dir() and mark.read_text(encoding="utf-8") == note():
        again = f"that of {config.run_dir} is used again (same code, settings and data)"
        print(f"[1/2] warm start: {again}", flush=True)
        return 0
    what = "supervised training of a tiny Qwen3 model on noisy sums"
    print(f"[1/2] warm start: {what} ({config.run_dir.parent})", flush=True)
    _make_anew(config.run_dir, MARK_WARM_START)
    if code := train(file, overrides):
        return code
    mark.write_text(note(), encoding="utf-8")
    return 0


def _make_anew(folder: Path, mark: str) -> None:
    from megarl.ablation.runs import make_anew

    try:
        make_anew(folder)
        (folder / mark).touch()
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written: {error.strerror} (choose another folder)") from None


def _print_result(config: Config) -> None:
    """Print accuracy before and after, how the shares of the kinds of answers moved (what the policy learned
    besides being right more often), and where report and model are."""
    from megarl.demo.arithmetic import Style, style_shares
    from megarl.observe.runs import read_metrics

    print()
    scores = [record for record in read_metrics(config.run_dir).records if "eval/avg" in record]
    if scores:
        first, last = scores[0], scores[-1]
        accuracy = f"{first['eval/avg']:.3f} before, {last['eval/avg']:.3f} after {last['step']} steps"
        print(f"accuracy on {first['eval/problems']} held-out problems: {accuracy}")
        found: dict[int, list[tuple[str, bool]]] = {first["step"]: [], last["step"]: []}
        for line in (config.run_dir / "evaluations.jsonl").read_text(encoding="utf-8").splitlines():
            answer = json.loads(line)
            if answer["step"] in found:
                found[answer["step"]].append((answer["response"], not answer["truncated"]))
        before, after = style_shares(found[first["step"]]), style_shares(found[last["step"]])
        names: dict[Style, str] = {
            "chain": "worked out",
            "bare": "guessed",
            "wait": "second thoughts",
            "truncated": "unfinished",
        }
        shares = [f"{text} {before[style]:.0%} -> {after[style]:.0%}" for style, text in names.items()]
        print(f"answers:    {', '.join(shares)}")
    for name, path in (("report:  ", config.run_dir / "report.html"), ("HF model:", config.run_dir / "hf")):
        if path.exists():
            print(f"{name}   {path}")
