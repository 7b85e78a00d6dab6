"""`megarl eval`: avg@k, pass@k and majority@k of a model or a checkpoint on the config's held-out problems,
with confidence intervals."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megarl.cli.ranks import passes_on_rank_0, run_rank, start_ranks, starts_ranks
from megarl.config import load_config
from megarl.config.check import real
from megarl.config.errors import ConfigError
from megarl.config.schema import Config

if TYPE_CHECKING:
    from megarl.parallel.runtime import Runtime
    from megarl.rollout.batch import EvaluationResult
    from megarl.schedule.evaluation import Evaluation

SHOWN = 20  # problems in the terminal, the hardest; problems.jsonl has all


def evaluate(path: Path, overrides: Sequence[str], checkpoint: Path | None, out: Path | None) -> int:
    """Answer every problem `evaluation.samples` times, on as many ranks as the layout has, and write
    answers.jsonl, problems.jsonl, data.json and scores.json to `out`. Return the exit code. checkpoint: see
    `find_policy`."""
    config = load_config(path, overrides)
    # Every rank has an engine here, and none draws ahead.
    shared = config.parallel.model_copy(update={"rollout_ranks": 0})
    in_turn = config.schedule.model_copy(update={"ahead": 0})
    config = config.model_copy(update={"parallel": shared, "schedule": in_turn})
    folder = out or config.run_dir / "eval"
    from megarl.schedule.evaluation import find_policy

    def check() -> None:
        from megarl.parallel.runtime import launched_rank
        from megarl.schedule.preflight import preflight_evaluation

        policy, weights = find_policy(config, checkpoint)
        key = "model.path" if policy.model.path == config.model.path else "--checkpoint"
        preflight_evaluation(policy, str(path), key, weights=weights is None)
        if real(folder).is_relative_to(real(policy.model.path)):
            place = f"is in the model's folder {policy.model.path}, where nothing is to be written"
            raise ConfigError(f"{folder}: {place} (choose another with --out)")
        try:
            if launched_rank() == 0:
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            problem = f"cannot be written: {error.strerror} (choose another folder with --out)"
            raise ConfigError(f"{folder}: {problem}") from None

    if not passes_on_rank_0(check):
        return 2
    policy, weights = find_policy(config, checkpoint)
    if starts_ranks(config):
        return start_ranks(partial(_evaluate, policy, weights, folder, launched=True), policy, folder)
    return _evaluate(policy, weights, folder, launched=False)


def _evaluate(config: Config, weights: Path | None, out: Path, *, launched: bool) -> int:
    """Be one rank of an evaluation; rank 0 shows and writes the result."""

    def job(runtime: Runtime) -> None:
        from megarl.schedule.evaluation import Evaluation

        with closing(Evaluation(config, weights, runtime)) as evaluation:
            if runtime.rank == 0:
                print(*evaluation.report.lines(), sep="\n")
                answers = f"{len(evaluation.problems):,} problems x {config.evaluation.samples} answers"
                print(f"{answers} by {evaluation.policy}", flush=True)
            result = evaluation.answer()
        if runtime.rank == 0:
            _publish(evaluation, result, out)

    return run_rank(config, job, launched=launched)


def _publish(evaluation: Evaluation, result: EvaluationResult, out: Path) -> None:
    """Write the result to `out`, and print the hardest problems and the scores."""
    scores, counts, stats = result.scores(), result.counts(), result.stats()
    summary = {
        "policy": str(evaluation.policy),
        "problems": len(result.groups),
        "samples": result.k,
        "confidence": 0.95,
        "scores": scores,
        "answers": counts,
        "length_mean": stats.get("eval/length_mean"),  # None where no problem was judged
        "score_mean": stats.get("eval/score"),  # None where the verifier says right or wrong only
        "sources": {
            name: {"problems": len(one.groups), "scores": one.scores(), "answers": one.counts()}
            for name, one in result.by_source().items()
        },
    }
    for name, objects, indent in (
        ("data.json", [asdict(evaluation.report)], 1),
        ("answers.jsonl", result.answers(evaluation.tokenizer), None),
        ("problems.jsonl", result.table(), None),
        ("scores.json", [summary], 1),
    ):
        with open(out / name, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.writelines(json.dumps(item, ensure_ascii=False, indent=indent) + "\n" for item in objects)

    console, total = Console(), len(result.groups)
    hardest = sorted(result.table(), key=lambda row: row["avg"])[:SHOWN]
    title = f"the {len(hardest)} hardest of {total:,} problems (all: problems.jsonl)"
    if len(hardest) == total:
        title = "all problems, hardest first"
    problems = Table("problem", "answer", "right", "most frequent", "tokens", "cut", title=title)
    for row in hardest:
        vote = "-" if row["vote"] is None else f"{row['vote'][:24]} ({row['votes']})"
        asked = " ".join(row["question"].split())
        asked = asked if len(asked) <= 60 else f"{asked[:38]} ... {asked[-17:]}"
        cells = (asked, row["answer"][:24], f"{row['right']}/{result.k}", vote)
        problems.add_row(*map(Text, cells), f"{row['length_mean']:.0f}", f"{row['truncated']:.0%}")
    console.print(problems)
    measures = Table("measure", "value", "95 % confidence", title=f"{total:,} problems")
    for name, score in scores.items():
        measures.add_row(name, f"{score['mean']:.4f}", f"{score['low']:.4f} to {score['high']:.4f}")
    if summary["score_mean"] is not None:
        measures.add_row("verifier's score", f"{summary['score_mean']:.4f}", "")
    for name, count in counts.items():
        measures.add_row(f"answers, {name.replace('_', ' ')}", f"{count:,}", "")
    console.print(measures)
    if parts := result.by_source():
        by_source = Table("source", "problems", *scores, "tokens", title="data sources")
        for name, one in parts.items():
            found, length = one.scores(), stats.get(f"eval/{name}/length_mean")
            means = [f"{found[measure]['mean']:.4f}" if measure in found else "-" for measure in scores]
            tokens = "-" if length is None else f"{length:.0f}"
            by_source.add_row(name, f"{len(one.groups):,}", *means, tokens)
        console.print(by_source)
    print(f"answers and scores: {out}")
