"""Data sets before a run: `megarl data show` prints what the model will read, `megarl data gym` what
reasoning-gym has, `megarl data integers` turns answers into integers."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean

from megarl.config import check_config, load_config
from megarl.config.errors import ConfigError, DataError
from megarl.config.load import dump_yaml
from megarl.config.schema import DataConfig, DataEntry
from megarl.data.gym import INSTALL
from megarl.data.prompts import (
    ProblemSet,
    Prompt,
    PromptSampler,
    ReadReport,
    read_pairs,
    read_problem_sets,
    read_prompts,
)


def show(path: Path, overrides: Sequence[str], rows: int, held_out: bool, drawn: bool) -> int:
    """Print prompts of data.train as the model reads them (`held_out`: of data.eval), the first of the
    files or, with `drawn`, of the run, and why rows are left out."""
    config = load_config(path, overrides)
    check_config(config, str(path))
    if rows < 0:
        raise ConfigError(f"--rows: must be >= 0 (got {rows})")
    name = "data.train"
    entries: Sequence[DataEntry] = config.data.train
    if held_out:
        name, entries = "data.eval", config.data.eval
    if not entries:
        raise ConfigError(f"{path}: {name}: names no file")
    from megarl.schedule.preflight import check_tokenizer
    from megarl.weights.megatron import open_model

    tokenizer = check_tokenizer(config, open_model(config.model.path))
    report = ReadReport()
    shown: list[tuple[tuple[int, ...], str, str]]  # tokens of the prompt, what is said of it, what follows it
    if not config.has_engine and not held_out:
        pairs = read_pairs(entries, config.data, config.supervised.response_key, tokenizer, report)
        shown = [
            (prompt, f", response of {len(response):,}", text)
            for prompt, response in pairs
            for text in [tokenizer.decode(response, clean_up_tokenization_spaces=False)]
        ]
    else:
        sets: list[ProblemSet] = []
        if config.data.has_gym and not held_out:  # its rows are never those of data.eval
            sets, _ = read_problem_sets(config.data, config.evaluation, tokenizer)
        prompts, report = read_prompts(entries, config.data, tokenizer, sets, name)
        shown = [(one.tokens, f", uid {one.uid}", _reference(one)) for one in prompts]
    print("\n".join(report.lines()))
    lengths = sorted(len(tokens) for tokens, _, _ in shown)
    middle = f"mean {fmean(lengths):,.0f}, median {lengths[len(lengths) // 2]:,}"
    limit = f"data.max_prompt_tokens {config.data.max_prompt_tokens:,}"
    print(f"{name}: prompts of {lengths[0]:,} to {lengths[-1]:,} tokens, {middle} ({limit})")
    order = list(range(min(rows, len(shown))))
    if drawn:
        order = PromptSampler(len(shown), config.seed, config.data.shuffle).take(len(order))
    for index in order:
        tokens, said, follows = shown[index]
        print(f"\n--- {index + 1} of {len(shown):,}: {len(tokens):,} tokens{said}")
        print(tokenizer.decode(tokens, clean_up_tokenization_spaces=False))
        print(f"--- {follows}")
    return 0


def _reference(problem: Prompt) -> str:
    return f"reference answer: {problem.answer or '(none is known; reasoning-gym scores answers)'}"


def gym(tasks: Sequence[str]) -> int:
    """Print the names of reasoning-gym's tasks, or of some the parameters and the first problem."""
    if find_spec("reasoning_gym") is None:
        raise ConfigError(f"reasoning-gym is not installed ({INSTALL})")
    from megarl.rewards.gym import known_answer, make_task, parameters_of, tasks_by_kind

    if not tasks:
        for kind, names in tasks_by_kind().items():
            print(f"{kind}: {', '.join(names)}")
    for name in tasks:
        task = make_task(name, {}, seed=0, size=1)
        entry = task[0]
        print(f"{name}\n{dump_yaml(parameters_of(name)) or '    (no parameters)'}")
        print(
            f"--- a problem\n{entry['question']}\n--- {known_answer(task, entry) or '(no answer is told)'}\n"
        )
    return 0


def integers(
    source: Path, out: Path, refused: Path | None, prompt_key: str, answer_key: str, workers: int
) -> int:
    """Write the rows of a file whose answers are integers or can be turned into one, and the others beside
    them."""
    if not source.is_file():
        raise DataError(f"{source}: no such file")
    refused = refused or out.with_name(f"{out.stem}.refused{out.suffix}")
    for path in (out, refused):
        if path.suffix != source.suffix:
            raise DataError(f"{path}: must end in {source.suffix}, as {source} does")
        if path.exists():
            raise DataError(f"{path}: is there already (delete it, or name another file)")
        if not path.parent.is_dir():
            raise DataError(f"{path}: its folder does not exist (make it first)")
    if out == refused:
        raise DataError(f"{out}: cannot take the refused rows as well (name two files)")
    if workers < 1:
        raise ConfigError(f"--workers: must be >= 1 (got {workers})")
    from megarl.data.integers import convert, write_rows  # sympy, which takes a second to import

    done = convert(source, DataConfig(prompt_key=prompt_key, answer_key=answer_key), workers)
    write_rows(out, done.kept)
    if done.refused:
        write_rows(refused, done.refused)
    print("\n".join(done.report.lines()))
    print(f"{out}: {len(done.kept):,} rows, {done.turned:,} of them turned into integers")
    if done.refused:
        print(f"{refused}: {len(done.refused):,} rows as they were, with the reason")
    return 0
