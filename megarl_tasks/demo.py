"""`megarl demo`. Recipes with the same seed share task and warm start; each has a folder."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal, NamedTuple

from typer import Option

from megarl.cli.arguments import key_values
from megarl.cli.doctor import Ability, Machine
from megarl.cli.ranks import checks_packages
from megarl.cli.train import train
from megarl.config import check_config, load_config
from megarl.config.errors import ConfigError
from megarl.config.load import config_file, set_key
from megarl.config.schema import Config
from megarl.observe.run_log import OBSERVED
from megarl.parallel.lease import hold_lease, replace_folder
from megarl.parallel.machine import GIB, cores, matrix_rates, unseen_gpu
from megarl_tasks import calculator, code_task, gsm8k, pretrained
from megarl_tasks.pretrained import PRETRAINED, fetch

Model = Literal["tiny", "smollm2", "qwen0.5b"]
Recipe = Literal[
    "vapo", "dapo", "tppo", "sao", "vc_ppo", "asyppo", "rloo", "dr_grpo", "gdpo", "spo", "sppo",
    "dppo", "sapo", "clip_cov", "kl_cov", "fipo",
]  # fmt: skip
Task = Literal["sums", "calculator", "code", "gsm8k"]
Device = Literal["auto", "cpu", "cuda"]
FOLDERS: dict[Model, Path] = {
    "tiny": Path("runs/demo"),
    "smollm2": Path("runs/smollm2"),
    "qwen0.5b": Path("runs/qwen0.5b"),
}
# The default first.
TASKS: dict[Model, tuple[Task, ...]] = {
    "tiny": ("sums",),
    "smollm2": ("sums", "calculator", "code"),
    "qwen0.5b": ("gsm8k",),
}
# The unit of cost is a forward pass over one response.
PARAMETERS, GROUP, RANKS = 135e6, 8, 2
TOKENS: dict[Task, int] = {
    "sums": 32,
    "calculator": 64,
    "code": 48,
}  # per response, with a share of the prompt
ROWS: dict[Task, int] = {
    "sums": pretrained.EVAL_ROWS,
    "calculator": 2 * calculator.EVAL_ROWS,
    "code": code_task.EVAL_ROWS,
}
REACHED = {"fp32": 0.7, "bf16": 0.55}  # share of the core's rate in a forward pass
ASKED = 4.0  # cost of a held-out answer
UPDATE = 1.5  # seconds per update, for memory traffic
COSTS = {"vapo": (10.0, 4), "dapo": (9.0, 2)}  # cost per response, and updates per step
LONG = 1140.0  # seconds of training; QUICK is the target, LONGEST the limit
QUICK: dict[Task, float] = {"sums": 330.0, "calculator": 640.0, "code": 640.0}
LONGEST: dict[Task, float] = {"sums": LONG, "calculator": 780.0, "code": LONG}
# These tasks have their own folders and configurations.
OWN_FILES: tuple[Task, ...] = ("calculator", "code")
LEAST, MOST = 8, 16  # steps
NEVER = 1000  # steps: evaluate only before and after the run
PRETRAINED_MEMORY = 12 * GIB

# Files that a user may put into --folder.
FETCHED = {wheel.file for model in PRETRAINED.values() for wheel in model.wheels}
FETCHED |= {f"gsm8k_{name}.jsonl" for name in gsm8k.FILES}
MARK = ".megarl-demo"  # in --folder: the demo created it
MARK_WARM_START = ".megarl-demo-warm-start"  # checksums of inputs and result
MARK_RUN = ".megarl-demo-run"  # in a folder that the next run may delete


@checks_packages
def demo(
    overrides: Annotated[list[str], key_values("parallel.tp=1; they are for the reinforcement run")],
    *,
    recipe: Annotated[Recipe, Option()] = "vapo",
    seed: Annotated[int, Option(metavar="SEED", help="of model, task and training")] = 0,
    model: Annotated[
        Model,
        Option(
            help="tiny: made here, a hundred thousand parameters; smollm2: SmolLM2-135M-Instruct, fetched "
            "(93 MB); qwen0.5b: Qwen2.5-Coder-0.5B-Instruct, fetched (478 MB), for one GPU"
        ),
    ] = "tiny",
    device: Annotated[
        Device | None,
        Option(help="auto: cuda if there is a GPU; default: cpu, with --model qwen0.5b cuda"),
    ] = None,
    task: Annotated[
        Task | None,
        Option(
            help="sums; calculator: with --model smollm2, word problems with a calculator to call; "
            "code: with --model smollm2, small functions in Python; "
            "gsm8k: with --model qwen0.5b; default: what the model can do"
        ),
    ] = None,
    folder: Annotated[
        Path | None,
        Option(
            metavar="FOLDER",
            help="everything is written below it (seeds other than 0: in its seed-N); default: runs/demo, "
            "or runs/MODEL for the other models",
        ),
    ] = None,
    layers: Annotated[
        int, Option(metavar="N", help="of the tiny model; pipeline stages must divide them")
    ] = 2,
    experts: Annotated[
        int, Option(metavar="N", help="of each layer, of which a token goes to two; 0: a dense model")
    ] = 0,
    data_only: Annotated[
        bool, Option("--data-only", help="write the data and the untrained model, and train nothing")
    ] = False,
) -> int:
    """Make a tiny model, warm-start it, then train it by reinforcement: minutes on a CPU.

    Or fetch a pretrained model, and train that."""
    task = task or TASKS[model][0]
    _check_options(recipe, model, task, layers, experts)
    start_time = time.time()
    folder = folder or FOLDERS[model]
    task_folder = folder / task if task in OWN_FILES else folder
    task_folder = task_folder if seed == 0 else task_folder / f"seed-{seed}"
    task_folder = task_folder / f"experts-{experts}" if experts else task_folder
    recipe_file = _recipe_file(model, task, recipe)
    initial_model = task_folder / "sft" / "hf"
    if model != "tiny":
        initial_model = folder / load_config(recipe_file).model.path.name
    wanted_device = device or load_config(recipe_file, overrides).parallel.device
    rl_overrides = [
        set_key("seed", seed),
        *_data_overrides(task, folder, task_folder),
        set_key("model.path", initial_model),
        set_key("run_dir", task_folder / recipe),
        *_machine_overrides(model, task, recipe, _find_device(wanted_device)),
        *overrides,
    ]
    config = load_config(recipe_file, rl_overrides)
    check_config(config, str(recipe_file))  # before the warm start
    if task == "gsm8k":
        print(_describe_run(config), flush=True)
    _check_folders(config, folder, task_folder)
    # Ranks are forked, so no thread renews the lease: training and the wait for ranks do.
    with hold_lease(folder, "megarl demo", remedy="wait for it, or choose another --folder"):
        (folder / MARK).touch()
        if model == "tiny":
            exit_code = _make_tiny(task_folder, seed, layers, experts, config, data_only=data_only)
        else:
            exit_code = _make_pretrained(model, initial_model, folder, task_folder, seed, task)
        if exit_code:
            return exit_code
        if data_only:
            print(f"data and untrained model written to {task_folder}")
            return 0
        checks = "runs the functions" if task == "code" else "checks final answers"
        what = f"reinforcement learning with a rule that {checks}"
        print(f"[2/2] {config.recipe.upper()}: {what}", flush=True)
        _make_anew(config.run_dir, MARK_RUN)
        if exit_code := train(recipe_file, rl_overrides):
            return exit_code
        _print_result(config, model, task)
        print(f"took {time.time() - start_time:.0f} s")
        return 0


def _check_options(recipe: Recipe, model: Model, task: Task, layers: int, experts: int) -> None:
    if layers < 1:
        raise ConfigError(f"--layers: must be at least 1 (got {layers})")
    if experts and experts < 2:
        raise ConfigError(f"--experts: a token goes to two of them (got {experts}; 0 is a dense model)")
    if model != "tiny" and (experts or layers != 2):
        key = "--experts" if experts else "--layers"
        raise ConfigError(f"{key}: is only for the tiny model, {model} is fixed (leave it out)")
    if model != "tiny" and recipe not in COSTS:
        recipes = " or ".join(COSTS)
        raise ConfigError(f"--recipe: with --model {model} it is {recipes} (got {recipe})")
    if task not in TASKS[model]:
        right_model = next(name for name, tasks in TASKS.items() if task in tasks)
        raise ConfigError(f"--task: {task} is for another model (add --model {right_model})")


def _recipe_file(model: Model, task: Task, recipe: Recipe) -> Path:
    prefix = f"{task}_" if task in OWN_FILES else "" if model == "tiny" else f"{model}_"
    return config_file(f"configs/demos/{prefix}{recipe}.yaml")


def _data_overrides(task: Task, folder: Path, task_folder: Path) -> list[str]:
    train, evaluation = task_folder / "train.jsonl", task_folder / "eval.jsonl"
    if task == "gsm8k":
        train, evaluation = folder / "gsm8k_train.jsonl", folder / "gsm8k_eval.jsonl"
    eval_entries: list[Any] = [evaluation]
    if task == "calculator":
        without_tool = {"path": task_folder / "without_tool.jsonl", "name": "without_tool", "every": NEVER}
        eval_entries.append(without_tool)
    return [set_key("data.train", [train]), set_key("data.eval", eval_entries)]


def _find_device(wanted: Device) -> Literal["cpu", "cuda"]:
    """Raise ConfigError if torch sees no GPU, and one is wanted or has a driver."""
    if wanted == "cpu":
        return "cpu"
    from megarl.parallel.runtime import choose_device  # sets what CUDA reads at its first call

    try:
        return "cuda" if choose_device(wanted).type == "cuda" else "cpu"
    except ConfigError:
        reason = unseen_gpu(os.environ)
        problem = f"{wanted}, but torch sees no GPU{': ' if reason else ''}{reason or ''}"
        remedy = "make install-gpu on a GPU machine, or add --device cpu"
        raise ConfigError(f"--device: {problem} ({remedy})") from None


def _machine_overrides(model: Model, task: Task, recipe: Recipe, device: Literal["cpu", "cuda"]) -> list[str]:
    """Adapt a configuration to the device."""
    if device == "cuda":
        # FlashInfer refuses the tiny model's heads.
        engine = "sglang" if model != "tiny" and find_spec("sglang") else "transformers"
        one_gpu = ["parallel.device=cuda", "parallel.tp=1", "parallel.dp=1"]
        one_gpu += [f"rollout.engine={engine}", "rollout.engine_memory=0.4"]
        if model == "smollm2":
            one_gpu += [
                "model.layers=auto",
                "model.dtype=bf16",
                "update.share_prompts=false",
                f"steps={MOST}",
            ]
        return one_gpu
    if model == "tiny":
        return ["parallel.device=cpu"]
    rates = matrix_rates(min(RANKS, cores()))
    if model == "smollm2":
        sizes = choose_sizes(rates, cores(), recipe, task)
        print(sizes, flush=True)
        return ["parallel.device=cpu", *sizes.overrides()]
    dtype = max(rates, key=lambda precision: rates[precision] * REACHED[precision])
    return [
        *("parallel.device=cpu", "rollout.engine=transformers", "update.tokens_per_micro_batch=2048"),
        *(f"model.dtype={dtype}", set_key("parallel.threads", cores())),
    ]


def _describe_run(config: Config) -> str:
    responses = config.rollout.prompts * config.rollout.group_size
    size = f"{config.steps} steps of {responses} responses, rollouts by {config.rollout.engine}"
    if config.parallel.device == "cuda":
        return f"one GPU: {size} (steps=20 rollout.prompts=32 change that)"
    if responses < 64:
        return size
    smaller = "steps=2 rollout.prompts=2 rollout.group_size=2 update.mini_batch=4 evaluation.max_problems=8"
    return f"{size}: on CPUs each step takes hours ({smaller} make it short)"


def _check_folders(config: Config, folder: Path, place: Path) -> None:
    """Refuse foreign folders, and a run that would delete its inputs."""
    for path, mark, key in (
        (folder, MARK, "--folder"),
        (place / "sft", MARK_WARM_START, "--folder"),
        (config.run_dir, MARK_RUN, "run_dir or --folder"),
    ):
        if path.exists() and not path.is_dir():
            raise ConfigError(f"{path}: not a folder (choose another {key})")
        names = {child.name for child in path.iterdir()} if path.exists() else set()
        if path == folder:
            names -= FETCHED
        if names and mark not in names:
            raise ConfigError(f"{path}: exists and was not made by megarl demo (choose another {key})")
    for input_path in (place / "sft" / "hf", config.model.path, config.critic.path):
        if input_path and input_path.resolve().is_relative_to(config.run_dir.resolve()):
            what = f"is made anew, and holds {input_path}, which the run starts from (choose another)"
            raise ConfigError(f"run_dir: {config.run_dir}: {what}")


def _make_tiny(place: Path, seed: int, layers: int, experts: int, config: Config, *, data_only: bool) -> int:
    from megarl.weights.families import read_config
    from megarl.weights.shards import check_layout
    from megarl_tasks.arithmetic import write_demo

    shutil.rmtree(place / "model", ignore_errors=True)
    write_demo(place, seed, layers, experts)
    parallel = config.parallel
    check_layout(read_config(place / "model"), parallel.tp, parallel.pp, parallel.ep, parallel.vpp)
    if data_only:
        return 0
    sft_overrides = [
        set_key("seed", seed),
        set_key("data.train", [place / "sft.jsonl"]),
        set_key("model.path", place / "model"),
        set_key("run_dir", place / "sft"),
    ]
    return _warm_start(config_file("configs/demos/sft.yaml"), sft_overrides)


def _make_pretrained(
    model: Model, model_folder: Path, folder: Path, place: Path, seed: int, task: Task
) -> int:
    from megarl.weights.gguf import gguf_to_hf

    place.mkdir(parents=True, exist_ok=True)
    if task == "gsm8k":
        print(f"[1/2] data: GSM8K, in {folder} or else from {gsm8k.URL}", flush=True)
        gsm8k.fetch_gsm8k(folder, folder)
    else:
        {"sums": pretrained, "calculator": calculator, "code": code_task}[task].write_task(place, seed)
    source = PRETRAINED[model]
    what = f"{source.title}, from {source.package} {source.version}"
    if (model_folder / "SHA256SUMS").is_file():  # written last
        print(f"[1/2] model: {what}, is in {model_folder}", flush=True)
        return 0
    size = f"{source.megabytes} MB"
    print(f"[1/2] model: {what}: fetched ({size}) and converted to {model_folder}", flush=True)
    gguf = fetch(source, folder)
    gguf_to_hf(gguf, model_folder)
    gguf.unlink()
    return 0


class RunSizes(NamedTuple):
    """A run on a CPU. rates: GFLOP/s per core; seconds: estimate."""

    rates: Mapping[str, float]
    dtype: str
    ranks: int
    threads: int
    prompts: int
    steps: int
    seconds: float

    def overrides(self) -> list[str]:
        return [
            f"model.dtype={self.dtype}",
            set_key("parallel.dp", self.ranks),
            set_key("parallel.threads", self.threads),
            set_key("rollout.prompts", self.prompts),
            set_key("steps", self.steps),
        ]

    def __str__(self) -> str:
        rates = f"{self.rates['fp32']:.0f} GFLOP/s a core in fp32, {self.rates['bf16']:.0f} in bf16"
        size = f"{self.dtype}, {self.steps} steps of {self.prompts * GROUP} responses"
        hint = f"steps=20 rollout.prompts={2 * self.prompts} model.dtype=bf16 change that"
        return f"{rates}: {size}, about {self.seconds / 60:.0f} minutes ({hint})"


def choose_sizes(rates: Mapping[str, float], cores: int, recipe: str, task: Task = "sums") -> RunSizes:
    """Choose precision, responses and steps from a core's rates.

    QUICK seconds if LEAST steps fit, else up to LEAST steps within LONGEST, if necessary of half the
    responses."""
    dtype = max(rates, key=lambda precision: rates[precision] * REACHED[precision])
    ranks = min(RANKS, cores)
    threads = cores // ranks
    flops_per_second = rates[dtype] * REACHED[dtype] * ranks * threads * 1e9
    forward_seconds = TOKENS[task] * 2 * PARAMETERS / flops_per_second
    passes, updates = COSTS[recipe]
    for prompts in (8, 4):
        step_seconds = prompts * GROUP * forward_seconds * passes + updates * UPDATE
        eval_seconds = 2 * ROWS[task] * forward_seconds * ASKED + (
            step_seconds / 2 if recipe == "vapo" else 0
        )
        steps = int((QUICK[task] - eval_seconds) / step_seconds)
        if steps < LEAST:
            steps = min(LEAST, int((LONGEST[task] - eval_seconds) / step_seconds))
        if steps >= LEAST // 2:
            break
    steps = max(2, min(MOST, steps))
    return RunSizes(rates, dtype, ranks, threads, prompts, steps, eval_seconds + steps * step_seconds)


def abilities(machine: Machine) -> Iterator[Ability]:
    """Yield whether the machine can train pretrained models."""
    if machine.gpus:
        yield Ability("a pretrained model on a GPU", True, "make demo MODEL=qwen0.5b DEVICE=cuda")
    if machine.rates is None:
        return
    name = "a pretrained model on CPUs"
    if machine.memory >= PRETRAINED_MEMORY:
        sizes = choose_sizes(machine.rates, machine.cores, "vapo")
        yield Ability(name, True, f"make demo MODEL=smollm2: {sizes}")
    else:
        memory, required_memory = f"{machine.memory / GIB:.0f} GiB", f"{PRETRAINED_MEMORY / GIB:.0f}"
        yield Ability(name, False, f"{memory} of memory, {required_memory} are needed")


def _warm_start(file: Path, overrides: list[str]) -> int:
    """Train supervised, or reuse a result of equal inputs."""
    from megarl.schedule.identity import checksum_files, identity, list_files

    config = load_config(file, overrides)
    mark, hf = config.run_dir / MARK_WARM_START, config.run_dir / "hf"
    input_identity = identity(config)

    def format_mark() -> str:
        return json.dumps({**input_identity, "result": checksum_files(list_files(hf))})

    if hf.is_dir() and mark.read_text(encoding="utf-8") == format_mark():
        message = f"that of {config.run_dir} is used again (same code, settings and data)"
        print(f"[1/2] warm start: {message}", flush=True)
        return 0
    what = "supervised training of a tiny Qwen3 model on noisy sums"
    print(f"[1/2] warm start: {what} ({config.run_dir.parent})", flush=True)
    _make_anew(config.run_dir, MARK_WARM_START)
    if exit_code := train(file, overrides):
        return exit_code
    mark.write_text(format_mark(), encoding="utf-8")
    return 0


def _make_anew(folder: Path, mark: str) -> None:
    try:
        replace_folder(folder)
        (folder / mark).touch()
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written: {error.strerror} (choose another folder)") from None


def _print_result(config: Config, model: Model, task: Task) -> None:
    """Print accuracies, styles of answers, and paths."""
    from megarl.algorithms.scores import interval
    from megarl.observe.run_log import ANSWERS_FILE
    from megarl.observe.runs import read_jsonl
    from megarl_tasks.arithmetic import Style, style_shares

    records = read_jsonl(config.run_dir / ANSWERS_FILE, lambda row: "step" in row).records
    print()
    for name in dict.fromkeys(answer["set"] for answer in records):
        answers_by_step: dict[int, list[dict[str, Any]]] = {}
        for answer in records:
            if answer["set"] == name:
                answers_by_step.setdefault(answer["step"], []).append(answer)
        first_step, last_step = min(answers_by_step), max(answers_by_step)
        accuracy = {}
        for step in (first_step, last_step):
            correct_by_uid: dict[Any, list[bool]] = {}
            for answer in answers_by_step[step]:
                correct_by_uid.setdefault(answer["uid"], []).append(answer["correct"])
            means = [fmean(verdicts) for verdicts in correct_by_uid.values()]
            low, high = interval(means, config.evaluation.samples)
            accuracy[step] = f"{fmean(means):.3f} ({low:.3f} to {high:.3f})"
        change = f"{accuracy[first_step]} before, {accuracy[last_step]} after {last_step} steps"
        condition = ", without the calculator" if name else ""
        print(f"accuracy on {len(correct_by_uid)} held-out problems{condition} (95 % confidence): {change}")
        if task == "calculator" and not name:
            mean_calls = [
                fmean(
                    sum(author == OBSERVED for author, _ in record["turns"] or ())
                    for record in answers_by_step[step]
                )
                for step in (first_step, last_step)
            ]
            print(
                f"calls of the calculator a response: {mean_calls[0]:.2f} before, {mean_calls[1]:.2f} after"
            )
        if model == "tiny":
            shares_before, shares_after = (
                style_shares(
                    [(record["response"], not record["truncated"]) for record in answers_by_step[step]]
                )
                for step in (first_step, last_step)
            )
            style_labels: dict[Style, str] = {
                "chain": "worked out",
                "bare": "guessed",
                "wait": "second thoughts",
                "truncated": "unfinished",
            }
            shares = [
                f"{text} {shares_before[style]:.0%} -> {shares_after[style]:.0%}"
                for style, text in style_labels.items()
            ]
            print(f"answers:    {', '.join(shares)}")
    for label, path in (("report:  ", config.run_dir / "report.html"), ("HF model:", config.run_dir / "hf")):
        if path.exists():
            print(f"{label}   {path}")
