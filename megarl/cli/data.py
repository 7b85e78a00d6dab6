"""`megarl data show`."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option, Typer

from megarl.cli.arguments import ConfigFile, Overrides
from megarl.config import Config, check_config, load_config
from megarl.config.errors import ConfigError
from megarl.config.hub import ACTOR, RECORD, local_inputs
from megarl.config.schema import DataEntry
from megarl.config.text import printable

if TYPE_CHECKING:
    from megarl.data.prompts import ReadReport

Example = tuple[tuple[int, ...], str, str]  # prompt tokens, note, following text

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
    from megarl.data.prompt_sampler import PromptSampler

    config = load_config(path, overrides)
    check_config(config, str(path))
    if rows < 0:
        raise ConfigError(f"--rows: must be >= 0 (got {rows})")
    name = "data.eval" if held_out else "data.train"
    if not attrgetter(name)(config):
        raise ConfigError(f"{path}: {name}: names no file")
    # Rows of generated tasks exclude those of data.eval.
    needed = (ACTOR, name, "data.eval") if config.data.has_gym else (ACTOR, name)
    config = local_inputs(config, None, config.run_dir / RECORD, tokenizer_only=True, only=needed)
    entries: Sequence[DataEntry] = attrgetter(name)(config)
    from megarl.schedule.tokenizer_checks import ModelDescription, check_tokenizer
    from megarl.weights.families import read_config

    tokenizer = check_tokenizer(config, ModelDescription(config.model.path, read_config(config.model.path)))
    if config.has_engine or held_out:
        examples, report = _read_prompts(config, name, entries, tokenizer, held_out=held_out, mcp=mcp)
    else:
        examples, report = _read_pairs(config, entries, tokenizer)
    print("\n".join(report.lines()))
    lengths = sorted(len(tokens) for tokens, _, _ in examples)
    averages = f"mean {fmean(lengths):,.0f}, median {lengths[len(lengths) // 2]:,}"
    limit = f"data.max_prompt_tokens {config.data.max_prompt_tokens:,}"
    print(f"{name}: prompts of {lengths[0]:,} to {lengths[-1]:,} tokens, {averages} ({limit})")
    indices = list(range(min(rows, len(examples))))
    if drawn:
        indices = PromptSampler(len(examples), config.seed, config.data.shuffle).take(len(indices))
    for index in indices:
        tokens, note, text = examples[index]
        print(f"\n--- {index + 1} of {len(examples):,}: {len(tokens):,} tokens{note}")
        print(printable(tokenizer.decode(tokens, clean_up_tokenization_spaces=False)))
        print(printable(f"--- {text}"))
    return 0


def _read_pairs(
    config: Config, entries: Sequence[DataEntry], tokenizer: Any
) -> tuple[list[Example], ReadReport]:
    from megarl.data.prompts import ReadReport, read_pairs

    report = ReadReport()
    pairs = read_pairs(entries, config.data, config.supervised.response_key, tokenizer, report)
    examples = []
    for prompt, response in pairs:
        text = tokenizer.decode(response, clean_up_tokenization_spaces=False)
        examples.append((prompt, f", response of {len(response):,}", text))
    return examples, report


def _read_prompts(
    config: Config, name: str, entries: Sequence[DataEntry], tokenizer: Any, *, held_out: bool, mcp: bool
) -> tuple[list[Example], ReadReport]:
    from megarl.agents.chat import schemas
    from megarl.agents.mcp_tools import MCP
    from megarl.data.prompts import ProblemSet, read_problem_sets, read_prompts

    sets: list[ProblemSet] = []
    if config.data.has_gym and not held_out:  # whose rows data.eval excludes
        sets, _ = read_problem_sets(config.data, config.evaluation, tokenizer)
    # MCP servers are commands: only --mcp starts them.
    skipped_servers = [] if mcp else [tool for tool in config.rollout.tools if tool.startswith(MCP)]
    tools = schemas(tool for tool in config.rollout.tools if tool not in skipped_servers)
    for server in skipped_servers:
        print(printable(f"rollout.tools: {server}: its tools are left out (--mcp starts the server)"))
    prompts, report = read_prompts(entries, config.data, tokenizer, sets, name, list(tools.values()))
    default = "(none is known; reasoning-gym scores answers)"
    return [(p.tokens, f", uid {p.uid}", f"reference answer: {p.answer or default}") for p in prompts], report
