"""`megarl data show`: print the prompts that the model will read."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Annotated

from typer import Option, Typer

from megarl.cli.arguments import ConfigFile, Overrides
from megarl.config import check_config, load_config
from megarl.config.errors import ConfigError
from megarl.config.schema import DataEntry
from megarl.config.text import printable

app = Typer(help="Show what the model reads, or turn answers into integers.")


@app.command()
def show(
    path: ConfigFile,
    overrides: Overrides,
    *,
    rows: Annotated[int, Option(metavar="N", help="number of prompts to print")] = 3,
    held_out: Annotated[bool, Option("--eval", help="show data.eval instead of data.train")] = False,
    drawn: Annotated[
        bool, Option("--drawn", help="show the first prompts of the run, not the first of the files")
    ] = False,
    mcp: Annotated[
        bool, Option("--mcp", help="start the MCP servers of rollout.tools to show their tools, too")
    ] = False,
) -> int:
    """Print the first prompts as the model reads them, and the rows that are left out with the reasons."""
    from megarl.data.prompts import (
        ProblemSet,
        PromptSampler,
        ReadReport,
        read_pairs,
        read_problem_sets,
        read_prompts,
    )

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
    from megarl.agents.chat import schemas
    from megarl.agents.tools import MCP
    from megarl.schedule.preflight import check_tokenizer
    from megarl.weights.megatron import open_model

    tokenizer = check_tokenizer(config, open_model(config.model.path))
    report = ReadReport()
    shown: list[tuple[tuple[int, ...], str, str]]  # prompt tokens, note, text that follows
    if not config.has_engine and not held_out:
        pairs = read_pairs(entries, config.data, config.supervised.response_key, tokenizer, report)
        shown = [
            (prompt, f", response of {len(response):,}", text)
            for prompt, response in pairs
            for text in [tokenizer.decode(response, clean_up_tokenization_spaces=False)]
        ]
    else:
        sets: list[ProblemSet] = []
        if config.data.has_gym and not held_out:  # its rows are excluded from data.eval
            sets, _ = read_problem_sets(config.data, config.evaluation, tokenizer)
        # MCP servers are commands of the configuration: only --mcp starts them.
        unasked = [] if mcp else [tool for tool in config.rollout.tools if tool.startswith(MCP)]
        tools = schemas(tool for tool in config.rollout.tools if tool not in unasked)
        for server in unasked:
            print(printable(f"rollout.tools: {server}: its tools are left out (--mcp starts the server)"))
        prompts, report = read_prompts(entries, config.data, tokenizer, sets, name, list(tools.values()))
        unknown = "(none is known; reasoning-gym scores answers)"
        shown = [
            (one.tokens, f", uid {one.uid}", f"reference answer: {one.answer or unknown}") for one in prompts
        ]
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
        print(printable(tokenizer.decode(tokens, clean_up_tokenization_spaces=False)))
        print(printable(f"--- {follows}"))
    return 0
