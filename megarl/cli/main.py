"""`megarl COMMAND`: reads the arguments, calls the command, and turns errors into one line and an exit code.

Exit codes: 0 done, 2 something the user can mend (one line on standard error), 1 a defect (a traceback), 75 told to leave and saved
(the same command continues), 124 a rank hung (a report says where), 130 interrupted, 128 + n a rank was killed by signal n.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from megarl import __version__
from megarl.config.errors import MegarlError

Command = Callable[[argparse.Namespace], int]


class _Parser(argparse.ArgumentParser):
    """Says what is wrong with the arguments in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and gives its exit code."""
    given = _parse(arguments)
    if os.getcwd() not in sys.path:  # a user's own verifier may stand in the current folder, however megarl was started
        sys.path.append(os.getcwd())
    try:
        return given.command(given)
    except MegarlError as error:
        print(f"megarl: {error}", file=sys.stderr, flush=True)
        return error.code
    except KeyboardInterrupt:
        print("megarl: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever read the output (`| head`) has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser()
    given, rest = parser.parse_known_args(arguments)
    # argparse fills `overrides` once: after an option, further overrides come back as unknown.
    if rest and (not hasattr(given, "overrides") or any(text.startswith("-") for text in rest)):
        dashed = next((text for text in rest if text.startswith("--") and "=" in text), None)
        hint = f"; an override has no dashes: {dashed.lstrip('-')}" if dashed and hasattr(given, "overrides") else ""
        parser.error(f"unknown argument {dashed or rest[0]}{hint}")
    if rest:
        given.overrides = [*given.overrides, *rest]
    return given


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="megarl", description="Large-scale reinforcement learning of reasoning language models.")
    parser.add_argument("--version", action="version", version=f"megarl {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)
    for add in (_add_runs, _add_plans, _add_conversions, _add_preflight, _add_views, _add_experiments):
        add(commands)
    return parser


def _add_runs(commands: argparse._SubParsersAction[_Parser]) -> None:
    training = _command(commands, "train", _train, "train by supervised warm start, GRPO, DAPO, PPO or VAPO: the config's recipe")
    training.add_argument("--checked", action="store_true", help=argparse.SUPPRESS)  # set by the launcher, which checked already
    training.add_argument("--fresh", action="store_true", help="refuse a run_dir that holds a run, instead of continuing it")
    training.add_argument("--follow", type=int, metavar="PID", help=argparse.SUPPRESS)  # set by `ablate`, whose end is to be this one's
    _takes_config(training)
    evaluate = _command(commands, "eval", _eval, "answer the problems of data.eval; avg@k, pass@k and majority@k")
    evaluate.add_argument("--checked", action="store_true", help=argparse.SUPPRESS)
    what = "Hugging Face folder, checkpoint or run (its newest one); default: model.path"
    evaluate.add_argument("--checkpoint", type=Path, metavar="FOLDER", help=what)
    evaluate.add_argument("--out", type=Path, metavar="FOLDER", help="where answers and scores are written; default: run_dir/eval")
    _takes_config(evaluate)
    again = _command(commands, "replay", _replay, "do one step of a run again from what is on disk, and compare every recorded number")
    again.add_argument("run", type=Path, metavar="RUN", help="folder of a run that kept checkpoints, and rollouts (checkpoint.rollouts)")
    again.add_argument("--step", type=int, required=True, metavar="K", help="rollout step; its checkpoint is the one of step K - 1")
    again.add_argument("--tolerance", type=float, metavar="X", help="for another layout; default: 1e-3 in fp32, 5e-2 in bf16")
    again.add_argument("--checked", action="store_true", help=argparse.SUPPRESS)
    _takes_overrides(again, "parallel.tp=1 parallel.dp=1")


def _add_plans(commands: argparse._SubParsersAction[_Parser]) -> None:
    planned = _command(commands, "plan", _plan, "memory of GPUs, nodes and disk, time of a step, layouts that fit")
    planned.add_argument("--model", metavar="NAME", help="plan for this public model, e.g. Qwen2.5-7B; default: model.path")
    planned.add_argument("--mean-length", type=float, metavar="TOKENS", help="mean length of responses; default: a third of the longest")
    planned.add_argument("--all", action="store_true", dest="everything", help="list every layout")
    _takes_config(planned)
    config = commands.add_parser("config", help="print, validate or explain a configuration", description="Configurations.")
    whats = config.add_subparsers(required=True, metavar="WHAT", parser_class=_Parser)
    _takes_config(_command(whats, "show", _config_show, "print the configuration with bases, preset, defaults and overrides resolved"))
    _takes_config(_command(whats, "check", _config_check, "find contradictions, and what does not fit the model's folder and the data"))
    _command(whats, "docs", _config_docs, "list every key with its meaning, unit, default and the source of the default")
    weights = commands.add_parser("weights", help="plan the transfer of weights into the engines", description="Weight transfers.")
    whats = weights.add_subparsers(required=True, metavar="WHAT", parser_class=_Parser)
    planned = _command(whats, "plan", _weights_plan, "bytes, memory and seconds of a run's weight transfer, from its configuration alone")
    planned.add_argument("--verify", action="store_true", help="prove that each byte is written exactly once, from the right place")
    planned.add_argument("--ranks", action="store_true", help="print every rank's figures as well")
    planned.add_argument("--model", metavar="NAME", help="plan for this public model, e.g. Qwen2.5-7B; default: model.path")
    _takes_config(planned)


def _add_conversions(commands: argparse._SubParsersAction[_Parser]) -> None:
    convert = commands.add_parser("convert", help="convert a model's folder to Megatron's format and back", description="Conversions.")
    whats = convert.add_subparsers(required=True, metavar="WHAT", parser_class=_Parser)
    forth = _command(whats, "to-megatron", _to_megatron, "write a Hugging Face folder as a Megatron distributed checkpoint")
    forth.add_argument("source", type=Path, metavar="HF_DIR", help="folder with config.json and *.safetensors")
    forth.add_argument("out", type=Path, metavar="OUT", help="folder to make; it appears when it is whole and on disk")
    for size, text in (("tp", "tensor"), ("pp", "pipeline"), ("ep", "expert")):
        what = f"{text}-parallel size that the files are cut for; any other can load them too"
        forth.add_argument(f"--{size}", type=int, default=1, metavar="N", help=what)
    forth.add_argument("--critic", action="store_true", help="with a classifier's value head, or one of zeros, for the output layer")
    back = _command(whats, "to-hf", _to_hf, "write a Megatron distributed checkpoint as a Hugging Face folder")
    back.add_argument("checkpoint", type=Path, metavar="CKPT", help="folder with .metadata and *.distcp, of a run or converted")
    back.add_argument("out", type=Path, metavar="OUT", help="folder to make; it appears when it is whole and on disk")
    back.add_argument("--source", type=Path, metavar="HF_DIR", help="folder with config.json and tokenizer; default: CKPT")
    back.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), help="of every tensor; default: as they are")
    back.add_argument("--max-shard-gb", type=float, default=4.0, metavar="GB", help="of one *.safetensors file (default: %(default)s)")
    for sub in (forth, back):
        sub.add_argument("--verify", action="store_true", help="read the result back from the disk and compare every bit")


def _add_preflight(commands: argparse._SubParsersAction[_Parser]) -> None:
    nodes = _command(
        commands, "preflight", _preflight, "check the nodes of a job before its ranks start: run on each of them, as slurm/ does"
    )
    _takes_config(nodes)
    for option, kind, default, metavar, text in (
        ("--node", int, 0, "N", "which node this is, from 0"),
        ("--nodes", int, 1, "N", "nodes of the job"),
        ("--ranks", int, 1, "N", "ranks, and so GPUs, of a node"),
        ("--host", str, "127.0.0.1", "NAME", "name or address of the first node"),
        ("--port", int, 29400, "N", "free port there"),
        ("--limit", float, 60.0, "SECONDS", "longest wait for any node"),
        ("--host-memory", float, 0.0, "GiB", "memory that must be free on a node; 0: on GPUs what `megarl plan` says"),
        ("--disk", float, 0.0, "GiB", "room that run_dir must have; 0: on GPUs what `megarl plan` says"),
        ("--bandwidth", float, 0.0, "GB/s", "least speed into a node from another one"),
    ):
        nodes.add_argument(option, type=kind, default=default, metavar=metavar, help=f"{text} (default: %(default)s)")


def _add_views(commands: argparse._SubParsersAction[_Parser]) -> None:
    report = _command(commands, "report", _report, "write report.html of one run, or of several laid over each other")
    report.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run folders")
    report.add_argument("--out", type=Path, metavar="FILE", help="file to write; default: report.html in the first run's folder")
    watching = _command(commands, "watch", _watch, "show a run that another process trains, from its folder")
    watching.add_argument("run", type=Path, metavar="RUN", help="run folder")
    watching.add_argument("--once", action="store_true", help="show how it stands and leave")
    _command(commands, "doctor", _doctor, "what is installed, what this machine can run, and how to get what is missing")


def _add_experiments(commands: argparse._SubParsersAction[_Parser]) -> None:
    demo = _command(
        commands, "demo", _demo, "make a tiny model and a task, warm-start it, then train it by reinforcement: minutes on a CPU"
    )
    demo.add_argument("--recipe", choices=("vapo", "dapo"), default="vapo", help="default: %(default)s")
    demo.add_argument("--seed", type=int, default=0, help="of model, task and training (default: %(default)s)")
    where = "everything is written below it, for other seeds than 0 in its seed-N (default: %(default)s)"
    demo.add_argument("--folder", type=Path, default=Path("runs/demo"), help=where)
    demo.add_argument("--data-only", action="store_true", help="write the data and the untrained model, and train nothing")
    _takes_overrides(demo, "parallel.tp=1; they are for the reinforcement run")
    ablate = _command(commands, "ablate", _ablate, "run a paper's ablation table at demo scale: each row with several seeds")
    ablate.add_argument("table", metavar="TABLE", help="vapo, dapo, or the path of a .table.yaml file")
    ablate.add_argument("--base", type=Path, metavar="CONFIG", help="what the rows are put over; default: the table's")
    ablate.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4], metavar="N", help="default: 0 1 2 3 4")
    ablate.add_argument("--rows", nargs="+", metavar="ROW", help="the rows to run, e.g. vapo without_clip_higher; default: all")
    ablate.add_argument("--folder", type=Path, default=Path("runs/ablations"), help="everything is written below it (default: %(default)s)")
    ablate.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at a time (default: %(default)s)")
    ablate.add_argument("--limit", type=float, default=1800.0, metavar="SECONDS", help="longest time for one run (default: %(default)s)")
    ablate.add_argument("--fresh", action="store_true", help="delete and repeat runs that were made with other settings")
    ablate.add_argument("--into", type=Path, metavar="FILE", help="Markdown file that has a place for the table: it is written there too")
    _takes_overrides(ablate, "steps=30 (right after TABLE); they are for the rows, not for the warm start")


def _command(commands: argparse._SubParsersAction[_Parser], name: str, run: Command, text: str) -> argparse.ArgumentParser:
    sub = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
    sub.set_defaults(command=run)
    return sub


def _takes_config(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("config", type=Path, help="YAML file, e.g. configs/demo_vapo.yaml")
    _takes_overrides(sub, "actor.lr=2e-6 data.train=[a.jsonl,b.jsonl]")


def _takes_overrides(sub: argparse.ArgumentParser, example: str) -> None:
    sub.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=f"values that replace the file's, e.g. {example}")


def _check_packages() -> None:
    """For what imports Megatron: one line instead of an ImportError from deep inside it."""
    from megarl.parallel.machine import check_packages

    check_packages()


def _train(given: argparse.Namespace) -> int:
    _check_packages()
    from megarl.cli.train import train

    if given.checked:
        from megarl.parallel.signals import follow_launcher

        follow_launcher()
    if given.follow:
        from megarl.parallel.jobs import follow_parent

        follow_parent(given.follow)
    return train(given.config, given.overrides, checked=given.checked, fresh=given.fresh)


def _eval(given: argparse.Namespace) -> int:
    _check_packages()
    from megarl.cli.evaluate import evaluate

    if given.checked:
        from megarl.parallel.signals import follow_launcher

        follow_launcher()
    return evaluate(given.config, given.overrides, given.checkpoint, given.out, checked=given.checked)


def _replay(given: argparse.Namespace) -> int:
    _check_packages()
    from megarl.cli.replay import replay

    if given.checked:
        from megarl.parallel.signals import follow_launcher

        follow_launcher()
    return replay(given.run, given.step, given.tolerance, given.overrides, checked=given.checked)


def _plan(given: argparse.Namespace) -> int:
    from megarl.cli.plan import plan

    return plan(given.config, given.overrides, model=given.model, mean_length=given.mean_length, everything=given.everything)


def _config_show(given: argparse.Namespace) -> int:
    from megarl.cli.configuration import show

    return show(given.config, given.overrides)


def _config_check(given: argparse.Namespace) -> int:
    from megarl.cli.configuration import check

    return check(given.config, given.overrides)


def _config_docs(given: argparse.Namespace) -> int:
    from megarl.cli.configuration import docs

    return docs()


def _weights_plan(given: argparse.Namespace) -> int:
    from megarl.cli.weights import plan

    return plan(given.config, given.overrides, model=given.model, verify=given.verify, ranks=given.ranks)


def _to_megatron(given: argparse.Namespace) -> int:
    from megarl.cli.convert import to_megatron

    return to_megatron(given.source, given.out, tp=given.tp, pp=given.pp, ep=given.ep, critic=given.critic, verify=given.verify)


def _to_hf(given: argparse.Namespace) -> int:
    from megarl.cli.convert import to_hf

    return to_hf(given.checkpoint, given.out, source=given.source, dtype=given.dtype, max_shard_gb=given.max_shard_gb, verify=given.verify)


def _preflight(given: argparse.Namespace) -> int:
    _check_packages()
    from megarl.cli.preflight import preflight
    from megarl.parallel.nodes import Place

    place = Place(given.node, given.nodes, given.host, given.port, given.limit)
    return preflight(given.config, given.overrides, place, given.ranks, given.host_memory, given.disk, given.bandwidth)


def _report(given: argparse.Namespace) -> int:
    from megarl.observe.report import write_report

    print(write_report(given.runs, given.out or given.runs[0]))
    return 0


def _watch(given: argparse.Namespace) -> int:
    from megarl.observe.terminal import watch

    try:
        watch(given.run, once=given.once)
    except KeyboardInterrupt:
        return 0  # whoever has seen enough; the run goes on
    return 0


def _doctor(given: argparse.Namespace) -> int:
    from megarl.cli.doctor import doctor

    return doctor()


def _demo(given: argparse.Namespace) -> int:
    _check_packages()
    from megarl.cli.demo import demo

    return demo(given.recipe, given.seed, given.folder, given.overrides, data_only=given.data_only)


def _ablate(given: argparse.Namespace) -> int:
    _check_packages()
    from megarl.ablation.command import Settings, ablate

    settings = Settings(
        given.folder, tuple(given.seeds), tuple(given.rows or ()), given.jobs, given.limit, given.fresh, tuple(given.overrides)
    )
    return ablate(given.table, given.base, settings, given.into)
