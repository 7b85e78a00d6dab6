"""`megarl COMMAND`: read the arguments and call the command's function.

Exit codes: 0 done, 2 something the user can mend (one line on standard error), 1 a defect (a traceback), 75
told to leave and saved (the same command continues), 124 a rank hung (a report says where), 130 interrupted,
128 + n a rank was killed by signal n."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from megarl import __version__
from megarl.cli.ranks import exit_code, quiet_libraries
from megarl.config.plugins import plugin
from megarl.config.schema import DataConfig

DEFAULT = "(default: %(default)s)"


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, with the kinds of arguments that commands have."""

    def error(self, message: str) -> NoReturn:
        """Say in one line what is wrong with the arguments, and end with code 2."""
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")

    def flag(self, name: str, text: str, **options: Any) -> None:
        """Add an option without a value."""
        self.add_argument(name, action="store_true", help=text, **options)

    def path(self, name: str, metavar: str | None, text: str, **options: Any) -> None:
        """Add a file or folder."""
        self.add_argument(name, type=Path, metavar=metavar, help=text, **options)

    def number(self, name: str, metavar: str | None, text: str, **options: Any) -> None:
        """Add an option for a number: whole where its default is, else with a fraction."""
        kind = int if isinstance(options.get("default"), int) else float
        self.add_argument(name, metavar=metavar, help=text, **{"type": kind, **options})

    def wait(self) -> None:
        """Add how long to wait for another command that writes into the run's folder."""
        text = f"at most so long for another command that writes into the run's folder to leave {DEFAULT}"
        self.number("--wait", "SECONDS", text, default=0.0)

    def overrides(self, example: str) -> None:
        """Add the `key=value` settings."""
        text = f"values that replace the file's, e.g. {example}"
        self.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=text)

    def config(self) -> None:
        """Add a configuration file and its overrides."""
        self.path("path", "config", "YAML file, e.g. configs/demo_vapo.yaml")
        self.overrides("actor.lr=2e-6 data.train=[a.jsonl,b.jsonl]")

    def model(self) -> None:
        """Add the public model to plan for."""
        text = "plan for this public model, e.g. Qwen2.5-7B; default: model.path"
        self.add_argument("--model", metavar="NAME", help=text)


def build_parser() -> Parser:
    """Return the parser of all commands. Positional arguments, and options, are shown in the order given
    here."""
    parser = Parser(
        prog="megarl", description="Large-scale reinforcement learning of reasoning language models."
    )
    parser.add_argument("--version", action="version", version=f"megarl {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def group(name: str, text: str, description: str) -> Any:
        """Add the first of a command's two words; return where the second ones go."""
        words = commands.add_parser(name, help=text, description=description)
        return words.add_subparsers(required=True, metavar="WHAT")

    def add(into: Any, name: str, function: str, text: str, *, check_packages: bool = False) -> Parser:
        """Add a command.

        function         module:function in megarl, or the words of a command that a package beside it
                         brings (config/plugins.py); imported when it is called, with the arguments by name;
                         returns the exit code
        check_packages   whether it imports Megatron: a package that does not fit is one line then, not an
                         error in an import"""
        command: Parser = into.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        command.set_defaults(function=function, check_packages=check_packages)
        return command

    text = "train by supervised warm start, GRPO, DAPO, PPO or VAPO: the config's recipe"
    train = add(commands, "train", "cli.train:train", text, check_packages=True)
    train.flag("--fresh", "refuse a run_dir that holds a run, instead of continuing it")
    train.wait()
    train.number("--profile", "N", "trace N steps for Perfetto, into run_dir/profile (log.profile)", type=int)
    train.add_argument("--follow", type=int, help=argparse.SUPPRESS)  # of `ablate`: the process to end with
    train.config()

    text = "answer the problems of data.eval; avg@k, pass@k and majority@k"
    evaluate = add(commands, "eval", "cli.evaluate:evaluate", text, check_packages=True)
    text = "Hugging Face folder, checkpoint or run (its newest one); default: model.path"
    evaluate.path("--checkpoint", "FOLDER", text)
    evaluate.path("--out", "FOLDER", "where answers and scores are written; default: run_dir/eval")
    evaluate.config()

    text = "do one step of a run again from what is on disk, and compare every recorded number"
    replay = add(commands, "replay", "cli.train:replay", text, check_packages=True)
    replay.path("run", "RUN", "folder of a run that kept checkpoints, and rollouts (checkpoint.rollouts)")
    text = "rollout step; its checkpoint is the one of step K - 1"
    replay.number("--step", "K", text, type=int, required=True)
    replay.number("--tolerance", "X", "for another layout; default: 1e-3 in fp32, 5e-2 in bf16")
    replay.wait()
    replay.overrides("parallel.tp=1 parallel.dp=1")

    text = "memory of GPUs, nodes and disk, time of a step, layouts that fit"
    plan = add(commands, "plan", "cli.configuration:plan", text)
    plan.model()
    plan.number("--mean-length", "TOKENS", "mean length of responses; default: a third of the longest")
    text = "standard deviation of response lengths; default: as of a log-normal's with sigma 0.6"
    plan.number("--length-deviation", "TOKENS", text)
    plan.flag("--all", "list every layout", dest="everything")
    plan.flag("--best", "print only the overrides of the quickest layout, as a command and as YAML")
    text = "simulate a steady step with drawn lengths: who waits for whom, and the best split of ranks"
    plan.flag("--simulate", text)
    text = "of --simulate: lengths of this run's last steps, from its rollouts or metrics.jsonl"
    plan.path("--lengths", "RUN", text)
    plan.number("--kept", "SHARE", "of --simulate: of the groups, what dynamic sampling keeps; default: 0.5")
    text = "of --simulate: how requests are spread over engines (default: %(default)s)"
    plan.add_argument("--balance", choices=("stretches", "queue", "longest"), default="queue", help=text)
    plan.config()

    config = group("config", "print, validate or explain a configuration", "Configurations.")
    text = "print the configuration with bases, preset, defaults and overrides resolved"
    add(config, "show", "cli.configuration:show", text).config()
    text = "find contradictions, and what does not fit the model's folder and the data"
    add(config, "check", "cli.configuration:check", text).config()
    text = "list every key with its meaning, unit, default and the source of the default"
    add(config, "docs", "cli.configuration:docs", text)

    data = group("data", "show what the model reads, or turn answers into integers", "Data sets.")
    text = "print the first prompts as the model reads them, and which rows are left out and why"
    show = add(data, "show", "cli.data:show", text)
    show.number("--rows", "N", f"prompts that are printed {DEFAULT}", default=3)
    show.flag("--eval", "of data.eval, not of data.train", dest="held_out")
    show.flag("--drawn", "those that the run draws first, not the first of the files")
    show.config()
    text = "list the tasks that reasoning-gym generates, or parameters and a problem of some"
    gym = add(data, "gym", "data-gym", text)
    gym.add_argument("tasks", nargs="*", metavar="TASK", help="a task's name; none: all names")
    text = r"turn answers into integers: for 11 - 2\sqrt{6} the question asks for k + m + n of k - m\sqrt{n}"
    integers = add(data, "integers", "data-integers", text)
    integers.path("source", "DATA", "file with LaTeX answers, .jsonl or .parquet")
    integers.path("out", "OUT", "file to write, of the same kind: every row has an integer as its answer")
    text = "file for the rows that cannot be turned, each with the reason; default: OUT's name with .refused"
    integers.path("--refused", "FILE", text)
    others = {"prompt_key": "question, problem or messages", "answer_key": "answer, or what solution ends in"}
    for key, other in others.items():
        text, default = f"as data.{key}; else {other} {DEFAULT}", DataConfig.model_fields[key].default
        integers.add_argument(f"--{key.replace('_', '-')}", metavar="NAME", help=text, default=default)
    integers.number("--workers", "N", f"processes that verify {DEFAULT}", default=2)

    weights = group("weights", "plan the transfer of weights into the engines", "Weight transfers.")
    text = "bytes, memory and seconds of a run's weight transfer, from its configuration alone"
    plan_weights = add(weights, "plan", "cli.configuration:plan_weights", text)
    plan_weights.flag("--verify", "prove that each byte is written exactly once, from the right place")
    plan_weights.flag("--ranks", "print every rank's figures as well")
    plan_weights.model()
    plan_weights.config()

    convert = group(
        "convert", "convert a model's folder to Megatron's format and back, or from GGUF", "Conversions."
    )
    out = "folder to make; it appears when it is whole and on disk"
    verify = "read the result back from the disk and compare every bit"
    text = "write a Hugging Face folder as a Megatron distributed checkpoint"
    to_megatron = add(convert, "to-megatron", "cli.convert:to_megatron", text)
    to_megatron.path("source", "HF_DIR", "folder with config.json and *.safetensors")
    to_megatron.path("out", "OUT", out)
    for name, kind in (("--tp", "tensor"), ("--pp", "pipeline"), ("--ep", "expert")):
        text = f"{kind}-parallel size that the files are cut for; any other can load them too"
        to_megatron.number(name, "N", text, default=1)
    to_megatron.flag("--critic", "with a classifier's value head, or one of zeros, for the output layer")
    to_megatron.flag("--verify", verify)

    text = "write a Megatron distributed checkpoint as a Hugging Face folder"
    to_hf = add(convert, "to-hf", "cli.convert:to_hf", text)
    to_hf.path("checkpoint", "CKPT", "folder with .metadata and *.distcp, of a run or converted")
    to_hf.path("out", "OUT", out)
    to_hf.path("--source", "HF_DIR", "folder with config.json and tokenizer; default: CKPT")
    text = "of every tensor; default: as they are"
    to_hf.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), help=text)
    to_hf.number("--max-shard-gb", "GB", f"of one *.safetensors file {DEFAULT}", default=4.0)
    to_hf.flag("--verify", verify)

    text = "write a GGUF file (llama.cpp's format) as a Hugging Face folder, dequantised"
    from_gguf = add(convert, "from-gguf", "cli.convert:from_gguf", text)
    from_gguf.path("source", "FILE.gguf", "file of a Llama, Mistral, Qwen2, Qwen3 or Qwen3-MoE model")
    from_gguf.path("out", "OUT", out)
    text = f"of every tensor {DEFAULT}"
    from_gguf.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16", help=text)
    from_gguf.number("--max-shard-gb", "GB", f"of one *.safetensors file {DEFAULT}", default=4.0)
    from_gguf.flag("--verify", verify)

    text = "check the nodes of a job before its ranks start: run on each of them, as slurm/ does"
    nodes = add(commands, "preflight", "cli.preflight:preflight", text, check_packages=True)
    nodes.config()
    nodes.number("--node", "N", f"which node this is, from 0 {DEFAULT}", default=0)
    nodes.number("--nodes", "N", f"nodes of the job {DEFAULT}", default=1)
    nodes.number("--ranks", "N", f"ranks, and so GPUs, of a node {DEFAULT}", default=1)
    text = f"name or address of the first node {DEFAULT}"
    nodes.add_argument("--host", default="127.0.0.1", metavar="NAME", help=text)
    nodes.number("--port", "N", f"free port there {DEFAULT}", default=29400)
    nodes.number("--limit", "SECONDS", f"longest wait for any node {DEFAULT}", default=60.0)
    planned = f"0: on GPUs what `megarl plan` says {DEFAULT}"
    nodes.number("--host-memory", "GiB", f"memory that must be free on a node; {planned}", default=0.0)
    nodes.number("--disk", "GiB", f"room that run_dir must have; {planned}", default=0.0)
    nodes.number("--bandwidth", "GB/s", f"least speed into a node from another one {DEFAULT}", default=0.0)

    text = "write report.html of one run, or of several laid over each other"
    report = add(commands, "report", "report", text)
    report.path("runs", "RUN", "run folders", nargs="+")
    report.path("--out", "FILE", "file to write; default: report.html in the first run's folder")

    text = "show a run that another process trains, from its folder"
    watch = add(commands, "watch", "cli.main:watch", text)
    watch.path("run", "RUN", "run folder")
    watch.flag("--once", "show how it stands and leave")

    text = "what is installed, what this machine can run, and how to get what is missing"
    add(commands, "doctor", "cli.doctor:doctor", text)

    below = "everything is written below it"
    text = "make a tiny model and a task, warm-start it, then train it by reinforcement: minutes on a CPU"
    demo = add(commands, "demo", "demo", text, check_packages=True)
    recipes = ("vapo", "dapo", "sao", "vc_ppo", "rloo", "dr_grpo")
    demo.add_argument("--recipe", choices=recipes, default="vapo", help="default: %(default)s")
    demo.number("--seed", None, f"of model, task and training {DEFAULT}", default=0)
    text = "tiny: made here, a hundred thousand parameters; smollm2: SmolLM2-135M-Instruct, fetched (93 MB)"
    demo.add_argument("--model", choices=("tiny", "smollm2"), default="tiny", help=f"{text} {DEFAULT}")
    text = f"{below}, for other seeds than 0 in its seed-N (default: runs/demo, or runs/ and the model)"
    demo.path("--folder", None, text)
    text = f"of the tiny model; pipeline stages must divide them {DEFAULT}"
    demo.number("--layers", "N", text, default=2)
    text = f"of each layer, of which a token goes to two; 0: a dense model {DEFAULT}"
    demo.number("--experts", "N", text, default=0)
    demo.flag("--data-only", "write the data and the untrained model, and train nothing")
    demo.overrides("parallel.tp=1; they are for the reinforcement run")

    text = "run a paper's ablation table at demo scale: each row with several seeds"
    ablate = add(commands, "ablate", "ablate", text, check_packages=True)
    text = "vapo, dapo, vapo.protocol, or the path of a .table.yaml or .protocol.yaml file"
    ablate.add_argument("name", metavar="TABLE", help=text)
    ablate.path("--base", "CONFIG", "what the rows are put over; default: the table's")
    text = "default: 0 1 2 3 4, or a protocol's own; of a protocol only for tuning, below 100"
    ablate.number("--seeds", "N", text, type=int, nargs="+", default=None)
    text = "the rows to run, e.g. vapo without_clip_higher; default: all"
    ablate.add_argument("--rows", nargs="+", metavar="ROW", default=[], help=text)
    ablate.path("--folder", None, f"{below} {DEFAULT}", default=Path("runs/ablations"))
    ablate.number("--jobs", "N", f"runs at a time {DEFAULT}", default=1)
    ablate.number("--limit", "SECONDS", f"longest time for one run {DEFAULT}", default=1800.0)
    ablate.number("--hours", "H", "begin no run after them; default: no limit", default=None, type=float)
    text = "begin at most so many runs; of a protocol, 0 only says what is missing; default: all"
    ablate.number("--most", "N", text, default=None, type=int)
    ablate.flag("--fresh", "delete and repeat runs that were made with other settings")
    ablate.path("--into", "FILE", "Markdown file that has a place for the table: it is written there too")
    ablate.overrides("steps=30 (right after TABLE or ROW); they are for the rows, not for the warm start")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    parser = build_parser()
    namespace, rest = parser.parse_known_args(arguments)
    given = vars(namespace)
    # argparse fills `overrides` once: after an option, further overrides come back as unknown.
    if rest and ("overrides" not in given or any(text.startswith("-") for text in rest)):
        dashed = next((text for text in rest if text.startswith("--") and "=" in text), "")
        hint = f"; an override has no dashes: {dashed.lstrip('-')}" if dashed and "overrides" in given else ""
        parser.error(f"unknown argument {dashed or rest[0]}{hint}")
    if rest:
        given["overrides"] = [*given["overrides"], *rest]
    quiet_libraries()
    if os.getcwd() not in sys.path:  # of a user's own verifier, however megarl was started
        sys.path.append(os.getcwd())
    function = given.pop("function")
    check_packages = given.pop("check_packages")

    def call() -> int:
        if check_packages:
            from megarl.parallel import machine

            machine.check_packages()
            machine.check_launcher()
        if ":" not in function:
            return plugin("megarl.commands", function)(**given)
        module, _, name = function.partition(":")
        return getattr(import_module(f"megarl.{module}"), name)(**given)

    return exit_code(call)


def watch(run: Path, once: bool) -> int:
    """Show a run until it ends, or until Ctrl-C: the run goes on."""
    from megarl.observe.terminal import watch as show

    try:
        show(run, once=once)
    except KeyboardInterrupt:
        return 0
    return 0
