"""`megarl COMMAND`: read the arguments and call the command, which a row of `COMMANDS` names.

Exit codes: 0 done, 2 something the user can mend (one line on standard error), 1 a defect (a traceback), 75
told to leave and saved (the same command continues), 124 a rank hung (a report says where), 130 interrupted,
128 + n a rank was killed by signal n."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from megarl import __version__
from megarl.cli.ranks import exit_code, quiet_libraries


class Argument:
    """The parameters of `argparse.ArgumentParser.add_argument`."""

    def __init__(self, *names: str, **options: Any) -> None:
        self.names, self.options = names, options


class Command(NamedTuple):
    """A command of one or two words.

    function         module:function, imported when it is called, with the arguments by name; returns the exit
                     code
    help             one line; also the description
    arguments        in the order of `--help`
    check_packages   whether it imports Megatron: a package that does not fit is one line then, not an error
                     in an import"""

    name: str
    function: str
    help: str
    arguments: tuple[Argument, ...] = ()
    check_packages: bool = False


def flag(name: str, text: str, **options: Any) -> Argument:
    """Return an option without a value."""
    return Argument(name, action="store_true", help=text, **options)


def path(name: str, metavar: str | None, text: str, **options: Any) -> Argument:
    """Return the argument for a file or folder."""
    return Argument(name, type=Path, metavar=metavar, help=text, **options)


def number(name: str, metavar: str | None, text: str, **options: Any) -> Argument:
    """Return the option for a number: whole where its default is, else with a fraction."""
    kind = int if isinstance(options.get("default"), int) else float
    return Argument(name, metavar=metavar, help=text, **{"type": kind, **options})


def overrides(example: str) -> Argument:
    """Return the argument for `key=value` words."""
    text = f"values that replace the file's, e.g. {example}"
    return Argument("overrides", nargs="*", default=[], metavar="key=value", help=text)


# Arguments and texts of several commands.
CONFIG = (
    Argument("path", type=Path, metavar="config", help="YAML file, e.g. configs/demo_vapo.yaml"),
    overrides("actor.lr=2e-6 data.train=[a.jsonl,b.jsonl]"),
)
MODEL = Argument(
    "--model", metavar="NAME", help="plan for this public model, e.g. Qwen2.5-7B; default: model.path"
)
OUT = path("out", "OUT", "folder to make; it appears when it is whole and on disk")
VERIFY = flag("--verify", "read the result back from the disk and compare every bit")
DEFAULT = "(default: %(default)s)"
CUT = "parallel size that the files are cut for; any other can load them too"
PLANNED = "0: on GPUs what `megarl plan` says"
BELOW = "everything is written below it"
GROUPS = {  # commands of two words: help and description of the first
    "config": ("print, validate or explain a configuration", "Configurations."),
    "weights": ("plan the transfer of weights into the engines", "Weight transfers."),
    "convert": ("convert a model's folder to Megatron's format and back", "Conversions."),
}
COMMANDS = (
    Command(
        "train",
        "megarl.cli.train:train",
        "train by supervised warm start, GRPO, DAPO, PPO or VAPO: the config's recipe",
        (
            flag("--fresh", "refuse a run_dir that holds a run, instead of continuing it"),
            Argument("--follow", type=int, help=argparse.SUPPRESS),  # of `ablate`: the process to end with
            *CONFIG,
        ),
        check_packages=True,
    ),
    Command(
        "eval",
        "megarl.cli.evaluate:evaluate",
        "answer the problems of data.eval; avg@k, pass@k and majority@k",
        (
            path(
                "--checkpoint",
                "FOLDER",
                "Hugging Face folder, checkpoint or run (its newest one); default: model.path",
            ),
            path("--out", "FOLDER", "where answers and scores are written; default: run_dir/eval"),
            *CONFIG,
        ),
        check_packages=True,
    ),
    Command(
        "replay",
        "megarl.cli.replay:replay",
        "do one step of a run again from what is on disk, and compare every recorded number",
        (
            path("run", "RUN", "folder of a run that kept checkpoints, and rollouts (checkpoint.rollouts)"),
            number(
                "--step",
                "K",
                "rollout step; its checkpoint is the one of step K - 1",
                type=int,
                required=True,
            ),
            number("--tolerance", "X", "for another layout; default: 1e-3 in fp32, 5e-2 in bf16"),
            overrides("parallel.tp=1 parallel.dp=1"),
        ),
        check_packages=True,
    ),
    Command(
        "plan",
        "megarl.cli.plan:plan",
        "memory of GPUs, nodes and disk, time of a step, layouts that fit",
        (
            MODEL,
            number("--mean-length", "TOKENS", "mean length of responses; default: a third of the longest"),
            flag("--all", "list every layout", dest="everything"),
            *CONFIG,
        ),
    ),
    Command(
        "config show",
        "megarl.cli.configuration:show",
        "print the configuration with bases, preset, defaults and overrides resolved",
        CONFIG,
    ),
    Command(
        "config check",
        "megarl.cli.configuration:check",
        "find contradictions, and what does not fit the model's folder and the data",
        CONFIG,
    ),
    Command(
        "config docs",
        "megarl.cli.configuration:docs",
        "list every key with its meaning, unit, default and the source of the default",
    ),
    Command(
        "weights plan",
        "megarl.cli.plan:plan_weights",
        "bytes, memory and seconds of a run's weight transfer, from its configuration alone",
        (
            flag("--verify", "prove that each byte is written exactly once, from the right place"),
            flag("--ranks", "print every rank's figures as well"),
            MODEL,
            *CONFIG,
        ),
    ),
    Command(
        "convert to-megatron",
        "megarl.cli.convert:to_megatron",
        "write a Hugging Face folder as a Megatron distributed checkpoint",
        (
            path("source", "HF_DIR", "folder with config.json and *.safetensors"),
            OUT,
            number("--tp", "N", f"tensor-{CUT}", default=1),
            number("--pp", "N", f"pipeline-{CUT}", default=1),
            number("--ep", "N", f"expert-{CUT}", default=1),
            flag("--critic", "with a classifier's value head, or one of zeros, for the output layer"),
            VERIFY,
        ),
    ),
    Command(
        "convert to-hf",
        "megarl.cli.convert:to_hf",
        "write a Megatron distributed checkpoint as a Hugging Face folder",
        (
            path("checkpoint", "CKPT", "folder with .metadata and *.distcp, of a run or converted"),
            OUT,
            path("--source", "HF_DIR", "folder with config.json and tokenizer; default: CKPT"),
            Argument(
                "--dtype", choices=("bf16", "fp16", "fp32"), help="of every tensor; default: as they are"
            ),
            number("--max-shard-gb", "GB", f"of one *.safetensors file {DEFAULT}", default=4.0),
            VERIFY,
        ),
    ),
    Command(
        "preflight",
        "megarl.cli.preflight:preflight",
        "check the nodes of a job before its ranks start: run on each of them, as slurm/ does",
        (
            *CONFIG,
            number("--node", "N", f"which node this is, from 0 {DEFAULT}", default=0),
            number("--nodes", "N", f"nodes of the job {DEFAULT}", default=1),
            number("--ranks", "N", f"ranks, and so GPUs, of a node {DEFAULT}", default=1),
            Argument(
                "--host",
                default="127.0.0.1",
                metavar="NAME",
                help=f"name or address of the first node {DEFAULT}",
            ),
            number("--port", "N", f"free port there {DEFAULT}", default=29400),
            number("--limit", "SECONDS", f"longest wait for any node {DEFAULT}", default=60.0),
            number(
                "--host-memory",
                "GiB",
                f"memory that must be free on a node; {PLANNED} {DEFAULT}",
                default=0.0,
            ),
            number("--disk", "GiB", f"room that run_dir must have; {PLANNED} {DEFAULT}", default=0.0),
            number("--bandwidth", "GB/s", f"least speed into a node from another one {DEFAULT}", default=0.0),
        ),
        check_packages=True,
    ),
    Command(
        "report",
        "megarl.cli.main:report",
        "write report.html of one run, or of several laid over each other",
        (
            path("runs", "RUN", "run folders", nargs="+"),
            path("--out", "FILE", "file to write; default: report.html in the first run's folder"),
        ),
    ),
    Command(
        "watch",
        "megarl.cli.main:watch",
        "show a run that another process trains, from its folder",
        (path("run", "RUN", "run folder"), flag("--once", "show how it stands and leave")),
    ),
    Command(
        "doctor",
        "megarl.cli.doctor:doctor",
        "what is installed, what this machine can run, and how to get what is missing",
    ),
    Command(
        "demo",
        "megarl.cli.demo:demo",
        "make a tiny model and a task, warm-start it, then train it by reinforcement: minutes on a CPU",
        (
            Argument("--recipe", choices=("vapo", "dapo"), default="vapo", help="default: %(default)s"),
            number("--seed", None, f"of model, task and training {DEFAULT}", default=0),
            path(
                "--folder",
                None,
                f"{BELOW}, for other seeds than 0 in its seed-N {DEFAULT}",
                default=Path("runs/demo"),
            ),
            flag("--data-only", "write the data and the untrained model, and train nothing"),
            overrides("parallel.tp=1; they are for the reinforcement run"),
        ),
        check_packages=True,
    ),
    Command(
        "ablate",
        "megarl.cli.main:ablate",
        "run a paper's ablation table at demo scale: each row with several seeds",
        (
            Argument("table", metavar="TABLE", help="vapo, dapo, or the path of a .table.yaml file"),
            path("--base", "CONFIG", "what the rows are put over; default: the table's"),
            number("--seeds", "N", "default: 0 1 2 3 4", type=int, nargs="+", default=[0, 1, 2, 3, 4]),
            Argument(
                "--rows",
                nargs="+",
                metavar="ROW",
                help="the rows to run, e.g. vapo without_clip_higher; default: all",
            ),
            path("--folder", None, f"{BELOW} {DEFAULT}", default=Path("runs/ablations")),
            number("--jobs", "N", f"runs at a time {DEFAULT}", default=1),
            number("--limit", "SECONDS", f"longest time for one run {DEFAULT}", default=1800.0),
            flag("--fresh", "delete and repeat runs that were made with other settings"),
            path("--into", "FILE", "Markdown file that has a place for the table: it is written there too"),
            overrides("steps=30 (right after TABLE); they are for the rows, not for the warm start"),
        ),
        check_packages=True,
    ),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    given = vars(_parse(arguments))
    quiet_libraries()
    command: Command = given.pop("command")
    if (
        os.getcwd() not in sys.path
    ):  # a user's own verifier may stand in the current folder, however megarl was started
        sys.path.append(os.getcwd())

    def call() -> int:
        if command.check_packages:
            from megarl.parallel.machine import check_packages

            check_packages()
        module, _, function = command.function.partition(":")
        return getattr(import_module(module), function)(**given)

    return exit_code(call)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Say in one line what is wrong with the arguments, and end with code 2."""
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = _Parser(
        prog="megarl", description="Large-scale reinforcement learning of reasoning language models."
    )
    parser.add_argument("--version", action="version", version=f"megarl {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)
    groups: dict[str, Any] = {}
    for command in COMMANDS:
        first, _, second = command.name.partition(" ")
        if second and first not in groups:
            text, description = GROUPS[first]
            group = commands.add_parser(first, help=text, description=description)
            groups[first] = group.add_subparsers(required=True, metavar="WHAT", parser_class=_Parser)
        add = partial(groups[first].add_parser, second) if second else partial(commands.add_parser, first)
        sub = add(help=command.help, description=f"{command.help[0].upper()}{command.help[1:]}.")
        sub.set_defaults(command=command)
        for argument in command.arguments:
            sub.add_argument(*argument.names, **argument.options)

    given, rest = parser.parse_known_args(arguments)
    # argparse fills `overrides` once: after an option, further overrides come back as unknown.
    if rest and (not hasattr(given, "overrides") or any(text.startswith("-") for text in rest)):
        dashed = next((text for text in rest if text.startswith("--") and "=" in text), None)
        hint = (
            f"; an override has no dashes: {dashed.lstrip('-')}"
            if dashed and hasattr(given, "overrides")
            else ""
        )
        parser.error(f"unknown argument {dashed or rest[0]}{hint}")
    if rest:
        given.overrides = [*given.overrides, *rest]
    return given


def report(runs: Sequence[Path], out: Path | None) -> int:
    """Write report.html and print where it is."""
    from megarl.observe.report import write_report

    print(write_report(runs, out or runs[0]))
    return 0


def watch(run: Path, once: bool) -> int:
    """Show a run until it ends, or until Ctrl-C: the run goes on."""
    from megarl.observe.terminal import watch as show

    try:
        show(run, once=once)
    except KeyboardInterrupt:
        return 0
    return 0


def ablate(
    table: str,
    base: Path | None,
    seeds: Sequence[int],
    rows: Sequence[str] | None,
    folder: Path,
    jobs: int,
    limit: float,
    fresh: bool,
    into: Path | None,
    overrides: Sequence[str],
) -> int:
    """Run an ablation table."""
    from megarl.ablation.command import Settings, ablate

    settings = Settings(folder, tuple(seeds), tuple(rows or ()), jobs, limit, fresh, tuple(overrides))
    return ablate(table, base, settings, into)
