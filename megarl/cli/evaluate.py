"""`megarl eval`: avg@k, pass@k and majority@k of a model or a checkpoint on the config's held-out problems,
with confidence intervals."""

from __future__ import annotations

import json
from contextlib import ExitStack, closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer import Option

from megarl.cli.arguments import ConfigFile, Overrides
from megarl.cli.ranks import checks_packages, passes_on_rank_0, run_rank, start_ranks, starts_ranks
from megarl.config import load_config
from megarl.config.check import real
from megarl.config.errors import ConfigError, StorageError
from megarl.config.files import essential, whole_file
from megarl.config.schema import Config
from megarl.config.text import printable

if TYPE_CHECKING:
    from megarl.parallel.lease import Lease
    from megarl.parallel.runtime import Runtime
    from megarl.schedule.evaluation import Evaluation
    from megarl.schedule.scores import EvaluationResult

SHOWN = 20  # problems in the terminal, the hardest; problems.jsonl has all


@checks_packages
def evaluate(
    path: ConfigFile,
    overrides: Overrides,
    *,
    checkpoint: Annotated[
        Path | None,
        Option(
            metavar="FOLDER",
            help="Hugging Face folder, checkpoint or run (its newest one); default: model.path",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        Option(metavar="FOLDER", help="where answers and scores are written; default: run_dir/eval"),
    ] = None,
) -> int:
    """Answer the problems of data.eval; avg@k, pass@k and majority@k.

    On as many ranks as the layout has. Writes answers.jsonl, problems.jsonl, data.json and scores.json."""
    config = load_config(path, overrides)
    # Every rank has an engine here, and none draws ahead.
    shared = config.parallel.model_copy(update={"rollout_ranks": 0})
    in_turn = config.schedule.model_copy(update={"ahead": 0})
    config = config.model_copy(update={"parallel": shared, "schedule": in_turn})
    folder = out or config.run_dir / "eval"
    from megarl.schedule.evaluation import find_policy

    def check() -> None:
        from megarl.schedule.preflight import preflight_evaluation

        policy, weights = find_policy(config, checkpoint)
        key = "model.path" if policy.model.path == config.model.path else "--checkpoint"
        preflight_evaluation(policy, str(path), key, weights=weights is None)
        if real(folder).is_relative_to(real(policy.model.path)):
            place = f"is in the model's folder {policy.model.path}, where nothing is to be written"
            raise ConfigError(f"{folder}: {place} (choose another with --out)")

    if not passes_on_rank_0(check):
        return 2
    policy, weights = find_policy(config, checkpoint)
    with ExitStack() as held:
        from megarl.parallel.lease import leased
        from megarl.parallel.runtime import launched_rank

        lease = None
        if launched_rank() == 0:
            remedy = "wait for it, or choose another folder with --out"
            lease = held.enter_context(leased(folder, "megarl eval", remedy=remedy))
        if starts_ranks(policy):
            main = partial(_evaluate, policy, weights, folder, lease, launched=True)
            return start_ranks(main, policy, folder)
        return _evaluate(policy, weights, folder, lease, launched=False)


def _evaluate(config: Config, weights: Path | None, out: Path, lease: Lease | None, *, launched: bool) -> int:
    """Be one rank of an evaluation; rank 0 shows and writes the result."""

    def job(runtime: Runtime) -> None:
        from megarl.schedule.evaluation import Evaluation

        with closing(Evaluation(config, weights, runtime)) as evaluation:
            if runtime.rank == 0:
                for name, report in evaluation.reports.items():
                    lead = name.removeprefix("eval").lstrip()  # what is not of a set with a name stands alone
                    print(*(f"{lead} {line}".lstrip() for line in report.lines()), sep="\n")
                for one in evaluation.sets:
                    answers = f"{len(one.problems):,} problems x {one.samples} answers"
                    print(printable(f"{one.name} {answers} by {evaluation.policy}".lstrip()), flush=True)
            result = evaluation.answer()
        if runtime.rank == 0:
            _publish(evaluation, result, out)

    return run_rank(config, job, lease, out, launched=launched)


def _publish(evaluation: Evaluation, result: EvaluationResult, out: Path) -> None:
    """Write the result to `out`, and print the hardest problems and the scores."""
    headline, parts, stats = result.headline, result.by_name(), result.stats()
    scores, counts = headline.scores(), headline.counts()
    summary = {
        "policy": str(evaluation.policy),
        "problems": len(headline.groups),
        "samples": headline.k,  # None where it differs from set to set
        "confidence": 0.95,
        "scores": scores,
        "answers": counts,
        "length_mean": stats.get("eval/length_mean"),  # None where no problem was judged
        "score_mean": stats.get("eval/score"),  # None where the verifier says right or wrong only
        "sources": {
            name: {
                "problems": len(one.groups),
                "samples": one.k,
                "scores": one.scores(),
                "answers": one.counts(),
            }
            for name, one in parts.items()
        },
    }
    table, unwritten = result.table(), None
    for name, objects, indent in (
        ("scores.json", [summary], 1),
        ("data.json", [{name: asdict(report) for name, report in evaluation.reports.items()}], 1),
        ("problems.jsonl", table, None),
        ("answers.jsonl", result.answers(evaluation.tokenizer), None),
    ):
        try:
            with essential(out / name), whole_file(out / name) as file:
                for item in objects:
                    text = json.dumps(item, ensure_ascii=False, indent=indent) + "\n"
                    file.write(text.encode("utf-8", "backslashreplace"))
        except StorageError as error:  # the terminal may still get what was found
            unwritten = unwritten or error

    console, total = Console(), sum(len(groups) for _, groups in result.sets)
    hardest = sorted(table, key=lambda row: row["avg"])[:SHOWN]
    title = f"the {len(hardest)} hardest of {total:,} problems (all: problems.jsonl)"
    if len(hardest) == total:
        title = "all problems, hardest first"
    problems = Table("problem", "answer", "right", "most frequent", "tokens", "cut", title=title)
    for row in hardest:
        vote = "-" if row["vote"] is None else f"{row['vote'][:24]} ({row['votes']})"
        asked = " ".join(row["question"].split())
        asked = asked if len(asked) <= 60 else f"{asked[:38]} ... {asked[-17:]}"
        cells = (asked, row["answer"][:24], f"{row['right']}/{row['samples']}", vote)
        texts = [Text(printable(" ".join(cell.split()))) for cell in cells]
        problems.add_row(*texts, f"{row['length_mean']:.0f}", f"{row['truncated']:.0%}")
    console.print(problems)
    measured = f"{len(headline.groups):,} problems"
    if len(headline.groups) < total:
        measured += ", sets with `every` apart"
    measures = Table("measure", "value", "95 % confidence", title=measured)
    for name, score in scores.items():
        measures.add_row(name, f"{score['mean']:.4f}", f"{score['low']:.4f} to {score['high']:.4f}")
    if summary["score_mean"] is not None:
        measures.add_row("verifier's score", f"{summary['score_mean']:.4f}", "")
    for name, count in counts.items():
        measures.add_row(f"answers, {name.replace('_', ' ')}", f"{count:,}", "")
    if headline.groups:
        console.print(measures)
    if parts:
        alike = {one.k for one in parts.values()} == {headline.k}
        heads = list(scores) if alike else ["samples", "avg", "pass", "majority"]
        by_name = Table("source", "problems", *heads, "tokens", title="sets and data sources")
        for name, one in parts.items():
            found, length = one.scores(), stats.get(f"eval/{name}/length_mean")
            means = {measure: f"{score['mean']:.4f}" for measure, score in found.items()}
            if not alike:  # of pass@1, pass@2 ... pass@k the last
                means = {measure.partition("@")[0]: mean for measure, mean in means.items()}
                means["samples"] = str(one.k or "-")
            tokens = "-" if length is None else f"{length:.0f}"
            by_name.add_row(
                Text(printable(name)),
                f"{len(one.groups):,}",
                *(means.get(head, "-") for head in heads),
                tokens,
            )
        console.print(by_name)
    if unwritten is not None:
        raise unwritten
    print(printable(f"answers and scores: {out}"))
