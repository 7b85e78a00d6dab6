"""`megarl COMMAND`: find the command, read its arguments, call it.

A command is a function with annotated parameters, and its docstring is its help (https://typer.tiangolo.com).
Other packages add commands by entry points of the group `megarl.commands`; `data-NAME` is for
`megarl data NAME`.

To list commands Typer would import all, which is slow and fails if one package is broken. So `Words` imports
a command when it is called, and `summary` reads help texts from source.

docs/public_api.md lists the exit codes."""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache, partial
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from typer import Exit, Option, Typer
from typer.core import CompletionItem, TyperCommand, TyperGroup
from typer.exceptions import TyperException
from typer.main import get_command, get_group

from megarl import __version__

GROUP = "megarl.commands"  # of entry points
COMMANDS = {
    "train": "megarl.cli.train:train",
    "eval": "megarl.cli.evaluate:evaluate",
    "replay": "megarl.cli.train:replay",
    "plan": "megarl.cli.configuration:plan",
    "config": "megarl.cli.configuration:app",
    "data": "megarl.cli.data:app",
    "weights": "megarl.cli.weights:app",
    "convert": "megarl.cli.convert:app",
    "preflight": "megarl.cli.nodes:preflight",
    "watch": "megarl.cli.watch:watch",
    "doctor": "megarl.cli.doctor:doctor",
}


class Command(TyperCommand):
    """A command that, unlike Typer's, accepts `--seeds 0 1`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        multiple_options = {
            name for param in self.params if getattr(param, "multiple", False) for name in param.opts
        }
        expanded_args: list[str] = []
        option = ""  # of the following values
        for word, next_word in zip(args, [*args[1:], "-"], strict=False):
            if option and not word.startswith("-"):
                expanded_args += [option, word]
                continue
            option = word if word in multiple_options else ""
            if not option or next_word.startswith("-"):  # Typer raises an error
                expanded_args.append(word)
        return super().parse_args(ctx, expanded_args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        records: dict[str, list[Any]] = {"argument": [], "option": []}
        param: Any
        for param in self.get_params(ctx):
            if record := param.get_help_record(ctx):
                # Without the type that Typer appends.
                label = record[0] if param.param_type_name == "option" else param.display_name_raw
                records[param.param_type_name].append((label, record[1]))
        for param_type, rows in records.items():
            if rows:
                with formatter.section(f"{param_type.title()}s"):
                    formatter.write_dl(rows)


class Words(TyperGroup):
    """Commands with the same first word."""

    word = ""

    def places(self) -> dict[str, str]:
        """Return command -> module:object."""
        return _added(self.word)

    def summaries(self) -> dict[str, str]:
        registered_summaries = {name: _paragraph(command.help) for name, command in self.commands.items()}
        return {**{name: summary(place) for name, place in self.places().items()}, **registered_summaries}

    def list_commands(self, ctx: Any) -> list[str]:
        return list({**self.places(), **self.commands})

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in self.commands:
            return self.commands[cmd_name]
        if place := self.places().get(cmd_name):
            return load(cmd_name, place)
        if not _added():
            from megarl.config.plugins import plugin

            # Raises ConfigError: megarl is older than its entry points.
            plugin(GROUP, "-".join(filter(None, (self.word, cmd_name))))
        commands: Any = dict.fromkeys(self.list_commands(ctx))
        self.commands = commands  # for suggestions in the error
        return None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(self.summaries().items()))

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        words = {name: text for name, text in self.summaries().items() if name.startswith(incomplete)}
        return [CompletionItem(name, help=text) for name, text in words.items()]


class Commands(Words):
    def places(self) -> dict[str, str]:
        return COMMANDS | _added()

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        place = COMMANDS.get(cmd_name)  # entry points are slow
        return load(cmd_name, place) if place else super().get_command(ctx, cmd_name)

    def invoke(self, ctx: Any) -> Any:
        from megarl.cli.ranks import exit_code, quiet_libraries

        quiet_libraries()
        return exit_code(partial(super().invoke, ctx))


def load(name: str, place: str) -> Any:
    """Import a command or group. Raises ConfigError if another package's cannot be imported."""
    try:
        target = EntryPoint(name, place, GROUP).load()
    except ImportError as error:
        if place in COMMANDS.values():
            raise
        from megarl.config.errors import ConfigError

        raise ConfigError(
            f"{name}: {place} cannot be imported: {error} (install its package again)"
        ) from None
    app = target if isinstance(target, Typer) else Typer(add_completion=False)
    if app is not target:
        app.command(name)(target)
    app.rich_markup_mode, app.info.cls = None, Words
    for command in app.registered_commands:
        command.cls = Command
    if app is not target:
        return get_command(app)
    group: Any = get_group(app)
    group.word = name
    return group


@cache
def _added(word: str = "") -> dict[str, str]:
    """Return command -> module:object of other packages, of those after `word`."""
    places = {entry_point.name: entry_point.value for entry_point in entry_points(group=GROUP)}
    if word:
        prefix = f"{word}-"
        return {name.removeprefix(prefix): places[name] for name in places if name.startswith(prefix)}
    return {name: place for name, place in places.items() if name.partition("-")[0] not in COMMANDS}


def summary(place: str) -> str:
    """Return from source the first paragraph of a docstring, or the `help` of a Typer."""
    module, _, name = place.partition(":")
    with suppress(ImportError, OSError, SyntaxError, ValueError):
        spec = find_spec(module)
        source = Path(spec.origin).read_text(encoding="utf-8") if spec and spec.origin else ""
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef) and node.name == name:
                return _paragraph(ast.get_docstring(node))
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
                help_values = [keyword.value for keyword in node.value.keywords if keyword.arg == "help"]  # type: ignore[attr-defined]
                return str(ast.literal_eval(help_values[0]))
    return ""


def _paragraph(docstring: str | None) -> str:
    return " ".join((docstring or "").partition("\n\n")[0].split())


app = Typer(cls=Commands, rich_markup_mode=None, context_settings={"help_option_names": ["-h", "--help"]})


def _print_version(asked: bool) -> None:
    if asked:
        print(f"megarl {__version__}")
        raise Exit


@app.callback()
def megarl(
    version: Annotated[
        bool, Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Large-scale reinforcement learning of reasoning language models."""


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        code = get_command(app).main(arguments, prog_name="megarl", standalone_mode=False)
    except TyperException as error:
        print(_complaint(error), file=sys.stderr)
        return 2
    return code or 0


def _complaint(error: TyperException) -> str:
    from pydantic import ValidationError

    from megarl.config.load import PLAINER
    from megarl.config.text import printable

    where = context.command_path if (context := getattr(error, "ctx", None)) else "megarl"
    text = " ".join(error.format_message().split()).replace("Value error, ", "").rstrip(".")
    if isinstance(error.__cause__, ValidationError):
        problem = error.__cause__.errors()[0]
        if message := PLAINER.get(problem["type"]):
            text = f"{text.partition(':')[0]}: {message} (got {problem['input']!r})"
    option = getattr(error, "option_name", "")
    if "." in option:
        text += f"; an override has no dashes: {option.lstrip('-')}=..."
    return printable(f"{where}: {text[:1].lower()}{text[1:]} (see {where} --help)")
