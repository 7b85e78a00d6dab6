"""`megarl eval`: avg@k, pass@k and majority@k of a Hugging Face folder on the config's held-out problems, in one process."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from megarl.cli.quiet import quiet_libraries
from megarl.config import load_config
from megarl.config.errors import ConfigError
from megarl.config.schema import Config

if TYPE_CHECKING:
    from megarl.rollout.batch import EvaluationResult


def evaluate(path: Path, overrides: Sequence[str], checkpoint: Path | None, out: Path | None) -> int:
    """Answers every problem `evaluation.samples` times; writes answers.jsonl, problems.jsonl, data.json and scores.json to `out`."""
    config = load_config(path, overrides)
    if checkpoint is not None:
        config = config.model_copy(update={"model": config.model.model_copy(update={"path": checkpoint})})
    quiet_libraries()
    from megarl.schedule.preflight import preflight_evaluation

    preflight_evaluation(config, str(path), "model.path" if checkpoint is None else "--checkpoint")
    out = out or config.run_dir / "eval"
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{out}: cannot be written: {error.strerror} (choose another folder with --out)") from None
    _evaluate(config, out)
    return 0


def _evaluate(config: Config, out: Path) -> None:
    from megarl.data.reader import read_prompts
    from megarl.parallel.runtime import choose_device, limit_threads
    from megarl.rewards.pool import VerifierPool
    from megarl.rollout.sampler import RolloutSampler
    from megarl.schedule.run import load_tokenizer, make_engine

    limit_threads(config.parallel.threads)
    tokenizer = load_tokenizer(config.model.path)
    problems, report = read_prompts(config.data.eval, config.data, tokenizer)
    for line in report.lines():
        print(line)
    problems = problems[: config.evaluation.max_problems or None]
    print(f"{len(problems):,} problems x {config.evaluation.samples} answers by {config.model.path}", flush=True)
    engine = make_engine(config, tokenizer, choose_device(config.parallel.device))
    engine.start()
    try:
        engine.load_folder()
        with VerifierPool(config.reward.verifier, config.reward.workers, config.reward.timeout) as pool:
            result = RolloutSampler(config, engine, lambda n: [], pool, tokenizer).evaluate(problems)
    finally:
        engine.stop()
    counts = _counts(result)
    _write(out / "data.json", [asdict(report)])
    _write(out / "scores.json", [{**result.stats(), **counts}])
    _write(out / "answers.jsonl", result.answers(tokenizer), indent=None)
    _write(out / "problems.jsonl", result.table(), indent=None)
    _show({**result.stats(), **counts})
    print(f"answers and scores: {out}")


def _counts(result: EvaluationResult) -> dict[str, int]:
    """What became of the answers, as whole numbers. Unverified: the verifier failed on it, and it counts as wrong."""
    answers = [answer for group in result.groups for answer in group.responses]
    return {
        "answers": len(answers),
        "answers/right": sum(answer.correct for answer in answers),
        "answers/without_answer": sum(answer.extracted is None for answer in answers),
        "answers/truncated": sum(answer.truncated for answer in answers),
        "answers/unverified": sum(answer.error is not None for answer in answers),
    }


def _write(path: Path, objects: Iterable[Mapping[str, Any]], indent: int | None = 1) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(item, ensure_ascii=False, indent=indent) + "\n" for item in objects)


def _show(scores: Mapping[str, float]) -> None:
    table = Table("measure", "value")
    for name, value in scores.items():
        table.add_row(name, f"{value:,}" if isinstance(value, int) else f"{value:.4f}")
    Console().print(table)
