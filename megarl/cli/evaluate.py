"""`megarl eval`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer import Option

from megarl.cli.arguments import ConfigFile, Overrides
from megarl.cli.ranks import checks_packages, passes_on_rank_0, run_ranks
from megarl.config import load_config
from megarl.config.check import real
from megarl.config.errors import ConfigError, StorageError
from megarl.config.files import atomic_file, mark_required
from megarl.config.hub import ACTOR, RECORD, local_folder, local_inputs
from megarl.config.schema import Config, ScheduleConfig
from megarl.config.text import printable

if TYPE_CHECKING:
    from megarl.parallel.runtime import Runtime
    from megarl.schedule.evaluation import Evaluation
    from megarl.schedule.scores import EvaluationResult, Scores

SHOWN = 20  # hardest problems in the terminal


@checks_packages
def evaluate(
    path: ConfigFile,
    overrides: Overrides,
    *,
    checkpoint: Annotated[
        Path | None,
        Option(
            metavar="FOLDER",
            help="Hugging Face folder, checkpoint, or run (its newest checkpoint); default: model.path",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        Option(metavar="FOLDER", help="folder for answers and scores; default: run_dir/eval"),
    ] = None,
) -> int:
    """Answer the problems of data.eval; avg@k, pass@k and majority@k.

    Runs on the ranks of the layout. Writes answers.jsonl, problems.jsonl, data.json and scores.json."""
    config = load_config(path, overrides)
    # In an evaluation every rank has an engine, and nothing is asynchronous.
    parallel = config.parallel.model_copy(update={"rollout_ranks": 0})
    config = config.model_copy(update={"parallel": parallel, "schedule": ScheduleConfig()})
    folder, weights = out or config.run_dir / "eval", None
    from megarl.parallel.runtime import launched_rank

    def check() -> None:
        nonlocal config, weights
        from megarl.schedule.evaluation import find_policy
        from megarl.schedule.preflight import preflight_evaluation

        known, first = config.run_dir / RECORD, launched_rank() == 0
        record = folder / RECORD
        config = local_inputs(config, record, known, first=first, only=(ACTOR, "data.eval"))
        policy = checkpoint and local_folder(checkpoint, "--checkpoint", record, known, first=first)
        model_path = config.model.path
        config, weights = find_policy(config, policy)
        key = "model.path" if config.model.path == model_path else "--checkpoint"
        preflight_evaluation(config, str(path), key, weights=weights is None)
        if real(folder).is_relative_to(real(config.model.path)):
            problem = f"is in the model's folder {config.model.path}, where nothing is to be written"
            raise ConfigError(f"{folder}: {problem} (choose another with --out)")

    if not passes_on_rank_0(check):
        return 2
    from megarl.parallel.lease import hold_lease

    remedy = "wait for it, or choose another folder with --out"
    lease_context = (
        hold_lease(folder, "megarl eval", remedy=remedy) if launched_rank() == 0 else nullcontext()
    )
    with lease_context as lease:
        return run_ranks(config, partial(_evaluate, config, weights, folder), lease, folder)


def _evaluate(config: Config, weights: Path | None, out: Path, runtime: Runtime) -> None:
    from megarl.schedule.evaluation import Evaluation

    with closing(Evaluation(config, weights, runtime)) as evaluation:
        if runtime.rank == 0:
            for name, report in evaluation.reports.items():
                prefix = name.removeprefix("eval").lstrip()
                print(*(f"{prefix} {line}".lstrip() for line in report.lines()), sep="\n")
            for eval_set in evaluation.sets:
                answers = f"{len(eval_set.problems):,} problems x {eval_set.samples} answers"
                print(printable(f"{eval_set.name} {answers} by {evaluation.policy}".lstrip()), flush=True)
        result = evaluation.answer()
    if runtime.rank == 0:
        _publish(evaluation, result, out)


def _publish(evaluation: Evaluation, result: EvaluationResult, out: Path) -> None:
    headline, scores_by_source, stats = result.headline, result.by_name(), result.stats()
    summary = {
        "policy": str(evaluation.policy),
        "problems": len(headline.groups),
        "samples": headline.k,  # None if sets differ
        "confidence": 0.95,
        "scores": headline.scores(),
        "answers": headline.counts(),
        "length_mean": stats.get("eval/length_mean"),  # None if nothing was graded
        "score_mean": stats.get("eval/score"),  # None if binary
        "sources": {
            name: {
                "problems": len(scores.groups),
                "samples": scores.k,
                "scores": scores.scores(),
                "answers": scores.counts(),
            }
            for name, scores in scores_by_source.items()
        },
    }
    problem_rows, write_error = result.table(), None
    for name, objects, indent in (
        ("scores.json", [summary], 1),
        ("data.json", [{name: asdict(report) for name, report in evaluation.reports.items()}], 1),
        ("problems.jsonl", problem_rows, None),
        ("answers.jsonl", result.answers(evaluation.tokenizer), None),
    ):
        try:
            with mark_required(out / name), atomic_file(out / name) as file:
                for item in objects:
                    text = json.dumps(item, ensure_ascii=False, indent=indent) + "\n"
                    file.write(text.encode("utf-8", "backslashreplace"))
        except StorageError as error:  # print the scores first
            write_error = write_error or error
    console, total = Console(), sum(len(groups) for _, groups in result.sets)
    console.print(_problem_table(problem_rows, total))
    if headline.groups:
        console.print(_score_table(headline, total, stats.get("eval/score")))
    if scores_by_source:
        console.print(_source_table(scores_by_source, headline, stats))
    if write_error is not None:
        raise write_error
    print(printable(f"answers and scores: {out}"))


def _problem_table(rows: Sequence[Mapping[str, Any]], total: int) -> Table:
    hardest = sorted(rows, key=lambda row: row["avg"])[:SHOWN]
    title = f"the {len(hardest)} hardest of {total:,} problems (all: problems.jsonl)"
    if len(hardest) == total:
        title = "all problems, hardest first"
    table = Table("problem", "answer", "right", "most frequent", "tokens", "cut", title=title)
    for row in hardest:
        vote_text = "-" if row["vote"] is None else f"{row['vote'][:24]} ({row['votes']})"
        question = " ".join(row["question"].split())
        question = question if len(question) <= 60 else f"{question[:38]} ... {question[-17:]}"
        cells = (question, row["answer"][:24], f"{row['right']}/{row['samples']}", vote_text)
        texts = [Text(printable(" ".join(cell.split()))) for cell in cells]
        table.add_row(*texts, f"{row['length_mean']:.0f}", f"{row['truncated']:.0%}")
    return table


def _score_table(headline: Scores, total: int, score_mean: float | None) -> Table:
    title = f"{len(headline.groups):,} problems"
    if len(headline.groups) < total:
        title += ", without sets with `every`"
    table = Table("measure", "value", "95 % confidence", title=title)
    for name, score in headline.scores().items():
        table.add_row(name, f"{score['mean']:.4f}", f"{score['low']:.4f} to {score['high']:.4f}")
    if score_mean is not None:
        table.add_row("verifier's score", f"{score_mean:.4f}", "")
    for name, count in headline.counts().items():
        table.add_row(f"answers, {name.replace('_', ' ')}", f"{count:,}", "")
    return table


def _source_table(parts: Mapping[str, Scores], headline: Scores, stats: Mapping[str, float]) -> Table:
    has_same_k = {scores.k for scores in parts.values()} == {headline.k}
    heads = list(headline.scores()) if has_same_k else ["samples", "avg", "pass", "majority"]
    table = Table("source", "problems", *heads, "tokens", title="sets and data sources")
    for name, scores in parts.items():
        length = stats.get(f"eval/{name}/length_mean")
        means = {measure: f"{score['mean']:.4f}" for measure, score in scores.scores().items()}
        if not has_same_k:
            means = {measure.partition("@")[0]: mean for measure, mean in means.items()}
            means["samples"] = str(scores.k or "-")
        tokens = "-" if length is None else f"{length:.0f}"
        cells = (means.get(head, "-") for head in heads)
        table.add_row(Text(printable(name)), f"{len(scores.groups):,}", *cells, tokens)
    return table
