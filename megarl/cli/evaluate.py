"""`megarl eval`: avg@k, pass@k and majority@k of a model or a checkpoint on the config's held-out problems, with confidence intervals."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megarl.cli.quiet import quiet_libraries
from megarl.cli.ranks import on_rank_0, start_ranks, work
from megarl.config import load_config
from megarl.config.check import real
from megarl.config.errors import ConfigError
from megarl.config.schema import Config

if TYPE_CHECKING:
    from megarl.parallel.runtime import Runtime
    from megarl.rollout.batch import EvaluationResult

SHOWN = 20  # problems in the terminal, the hardest; problems.jsonl has all


def evaluate(path: Path, overrides: Sequence[str], given: Path | None, out: Path | None, *, checked: bool = False) -> int:
    """Answers every problem `evaluation.samples` times, on as many ranks as the layout has; writes answers.jsonl, problems.jsonl, data.json
    and scores.json to `out`.

    given: see `find_policy`. checked: the process that launched this one has done the checks."""
    config = load_config(path, overrides)
    out = out or config.run_dir / "eval"
    quiet_libraries()
    from megarl.parallel.launch import ranks_here
    from megarl.parallel.runtime import is_launched, launched_rank

    if not checked and not on_rank_0(lambda: _check(config, str(path), given, out, claim=launched_rank() == 0)):
        return 2
    if not is_launched() and ranks_here(config.parallel) > 1:
        options = ["--out", str(out), *(["--checkpoint", str(given)] if given else [])]
        return start_ranks(config, ["eval", "--checked", *options, str(path), *overrides], out)
    from megarl.schedule.evaluation import find_policy

    policy, weights = find_policy(config, given)
    return work(policy, lambda runtime: _evaluate(policy, weights, out, runtime), launched=checked)


def _check(config: Config, where: str, given: Path | None, out: Path, claim: bool) -> None:
    from megarl.schedule.evaluation import find_policy
    from megarl.schedule.preflight import preflight_evaluation

    policy, weights = find_policy(config, given)
    key = "model.path" if policy.model.path == config.model.path else "--checkpoint"
    preflight_evaluation(policy, where, key, weights=weights is None)
    if real(out).is_relative_to(real(policy.model.path)):
        place = f"is in the model's folder {policy.model.path}, where nothing is to be written"
        raise ConfigError(f"{out}: {place} (choose another with --out)")
    try:
        if claim:
            out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{out}: cannot be written: {error.strerror} (choose another folder with --out)") from None


def _evaluate(config: Config, weights: Path | None, out: Path, runtime: Runtime) -> None:
    """One rank's part; rank 0 shows and writes."""
    from megarl.schedule.evaluation import Evaluation

    evaluation = Evaluation(config, weights, runtime)
    try:
        if runtime.rank == 0:
            print(*evaluation.report.lines(), sep="\n")
            print(f"{len(evaluation.problems):,} problems x {config.evaluation.samples} answers by {evaluation.policy}", flush=True)
        result = evaluation.answer()
    finally:
        evaluation.close()
    if runtime.rank:
        return
    scores, counts, stats = result.scores(), result.counts(), result.stats()
    summary = {
        "policy": str(evaluation.policy),
        "problems": len(result.groups),
        "samples": result.k,
        "confidence": 0.95,
        "scores": scores,
        "answers": counts,
        "length_mean": stats["eval/length_mean"],
    }
    _write(out / "data.json", [asdict(evaluation.report)])
    _write(out / "answers.jsonl", result.answers(evaluation.tokenizer), indent=None)
    _write(out / "problems.jsonl", result.table(), indent=None)
    _write(out / "scores.json", [summary])
    _show(result, scores, counts)
    print(f"answers and scores: {out}")


def _write(path: Path, objects: Iterable[Mapping[str, Any]], indent: int | None = 1) -> None:
    with open(path, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.writelines(json.dumps(item, ensure_ascii=False, indent=indent) + "\n" for item in objects)


def _show(result: EvaluationResult, scores: Mapping[str, Mapping[str, float]], counts: Mapping[str, int]) -> None:
    console = Console()
    hardest = sorted(result.table(), key=lambda row: row["avg"])[:SHOWN]
    problems = Table("problem", "answer", "right", "most frequent", "tokens", "cut", title=_title(len(hardest), len(result.groups)))
    for row in hardest:
        vote = "-" if row["vote"] is None else f"{row['vote'][:24]} ({row['votes']})"
        cells = (" ".join(row["prompt"].split())[:60], row["answer"][:24], f"{row['right']}/{result.k}", vote)
        problems.add_row(*map(Text, cells), f"{row['length_mean']:.0f}", f"{row['truncated']:.0%}")
    console.print(problems)
    measures = Table("measure", "value", "95 % confidence", title=f"{len(result.groups):,} problems")
    for name, score in scores.items():
        measures.add_row(name, f"{score['mean']:.4f}", f"{score['low']:.4f} to {score['high']:.4f}")
    for name, count in counts.items():
        measures.add_row(f"answers, {name.replace('_', ' ')}", f"{count:,}", "")
    console.print(measures)


def _title(shown: int, all_: int) -> str:
    return "all problems, hardest first" if shown == all_ else f"the {shown} hardest of {all_:,} problems (all: problems.jsonl)"
