"""Configurations of the runs that the stages of hour.py start.

Each is a file of configs/ with overrides for this machine: real sizes, or tiny ones with --tiny."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hour import CUDA, SGLANG, TE
from hour_found import GIB, ROOT, Given, SkipStage, kind_of_gpu, small


def given_frozen(given: Given) -> dict[str, Any]:
    """Return the actor and critic settings that freeze the fewest layers with which `megarl plan` fits.

    The optimizer must fit one GPU and this host, with a tenth of the GPU to spare. The number of frozen
    layers grows in steps of 2. Frozen layers imply frozen embeddings."""
    from megarl.plan.fit import find_problem
    from megarl.weights.families import Sizes, read_config

    assert given.model_7b is not None
    layers = Sizes.from_config(read_config(given.model_7b)).layers
    for frozen in range(0, layers, 2):
        settings: dict[str, Any] = {"frozen_layers": frozen, "frozen": ["embeddings"]} if frozen else {}
        overrides = [*get_overrides("seven_vapo", given), *set_both_models(settings)]
        plan = plan_run(given, "seven_vapo", overrides)
        if find_problem(plan, room=0.1 * plan.device.memory) is None:
            return settings
    raise SkipStage("megarl plan finds no number of frozen layers with which it fits")


def set_both_models(settings: Mapping[str, Any]) -> list[str]:
    return [f"{model}.{k}={json.dumps(v)}" for model in ("actor", "critic") for k, v in settings.items()]


def get_demo_overrides(given: Given, folder: Path, dp: int = 1) -> list[str]:
    """Return the overrides that run the pretrained demo on this machine's devices."""
    task = given.out / "small"
    return [
        *(f"model.path={folder}", f"data.train=[{task / 'train.jsonl'}]"),
        *(f"data.eval=[{task / 'eval.jsonl'}]", "evaluation.every=0", f"parallel.dp={dp}"),
        "rollout.dynamic_sampling.enabled=false",
        *get_machine_overrides(given),
    ]


def get_machine_overrides(given: Given) -> list[str]:
    """Return the overrides that choose this machine's device, layers, precision and engine."""
    cuda, te = given.has(CUDA), given.has(TE)
    engine = "sglang" if cuda and given.has(SGLANG) else "transformers"
    return [
        f"parallel.device={'cuda' if cuda else 'auto'}",
        *(f"model.layers={'te' if te else 'portable'}", f"model.dtype={'bf16' if cuda or te else 'fp32'}"),
        *(f"rollout.engine={engine}", "rollout.engine_memory=0.4"),
        *(["update.share_prompts=false"] if te else []),
        *([f"rollout.engine_options={json.dumps(given.engine_options)}"] if given.engine_options else []),
        *describe_machine(given),
    ]


def describe_machine(given: Given) -> list[str]:
    """Return the overrides that describe this machine to the planner and reduce the log output."""
    host = given.machine["host_memory"] / GIB
    devices = [f"cluster.gpu={kind_of_gpu(given)}", f"cluster.host_memory={host:.0f}"]
    return [*devices, "log.terminal=plain", "log.report=false"]


QWEN = "demos/qwen0.5b_{}.yaml"
FP8 = ["model.fp8.format=hybrid", "model.fp8.recipe=tensorwise"]
# The example of PPO in verl that one GPU runs: its batch, KL reward and plain losses.
VERL_PPO = (
    *("rollout.prompts=256", "rollout.group_size=1", "update.mini_batch=64", "algorithm.kl_reward=0.001"),
    *("algorithm.clip_high=0.2", "algorithm.nll_weight=0", "algorithm.lambda_policy=1.0"),
    *(
        "value_pretraining.steps=0",
        "rollout.dynamic_sampling.enabled=false",
        "reward.overlong.soft_punishment=false",
    ),
)
LARGE = (
    *("steps=3", "value_pretraining.steps=1"),
    *("update.tokens_per_micro_batch=16384", "rollout.engine_memory=0.25"),
)
# Runs on GSM8K: configuration, size of the model, overrides.
GSM8K_RUNS: dict[str, tuple[str, str, Sequence[str]]] = {
    "qwen_vapo": ("vapo", "0.5b", ("checkpoint.every=10", "checkpoint.export_hf=false")),
    "qwen_fp8": ("vapo", "0.5b", ("steps=20", *FP8)),
    "qwen_blockwise": (
        "vapo",
        "0.5b",
        ("steps=3", "model.fp8.format=e4m3", "model.fp8.recipe=blockwise"),
    ),
    "qwen_dapo": (
        "dapo",
        "0.5b",
        ("steps=5", "rollout.dynamic_sampling.enabled=true"),
    ),
    "qwen_ppo": ("vapo", "0.5b", ("steps=4", *VERL_PPO)),
    "qwen_trl": (
        "dapo",
        "0.5b",
        ("steps=5", "rollout.dynamic_sampling.enabled=false", "actor.schedule=constant"),
    ),
    "qwen_large": ("vapo", "1.5b", LARGE),
    "qwen_large_kept": ("vapo", "1.5b", (*LARGE, "residency.offload=false")),
}
# Runs on random or small models: folder in `models`, overrides.
SMALL_RUNS: dict[str, tuple[str, Sequence[str]]] = {
    "shared_gpu": ("random", ("rollout.engine=transformers",)),
    "restart": ("smollm2", ("rollout.prompts=16", "update.mini_batch=64", "steps=3")),
    "mixture": ("mixture", ("rollout.routing_replay=true", "steps=2")),
    "endurance": ("smollm2", ("rollout.prompts=8", "update.mini_batch=32", "steps=100")),
}
# Tokens of the tiny tokenizer are letters.
TINY = ("data.max_prompt_tokens=900", "rollout.prompts=2", "rollout.group_size=2", "update.mini_batch=4")
TINY_GSM8K = (
    *TINY,
    *("rollout.max_response_tokens=24", "reward.overlong.buffer=8", "rollout.max_batch=8"),
    *("update.tokens_per_micro_batch=2048", "reward.workers=1", "steps=2"),
)
EVALUATED = ("qwen_vapo", "qwen_fp8")
CONSTANT = ("actor.schedule=constant", "critic.schedule=constant")  # other schedules depend on `steps`


def get_gsm8k_overrides(name: str, given: Given) -> list[str]:
    """Return the overrides of one of GSM8K_RUNS."""
    _, size, more = GSM8K_RUNS[name]
    folder = get_model(given, f"qwen{size}")
    made = [
        f"model.path={folder}",
        f"data.train=[{folder.parent / 'gsm8k_train.jsonl'}]",
        *get_machine_overrides(given),
    ]
    made += [*more, *(TINY_GSM8K if given.tiny else ())]
    if name not in EVALUATED:
        return [*made, "data.eval=[]", "evaluation.every=0"]
    every = 1 if given.tiny else 10
    return [*made, f"data.eval=[{folder.parent / 'gsm8k_eval.jsonl'}]", f"evaluation.every={every}"]


def get_small_overrides(name: str, given: Given) -> list[str]:
    """Return the overrides of one of SMALL_RUNS, which train on sums."""
    model, more = SMALL_RUNS[name]
    folder = small(given) if model == "smollm2" else get_model(given, model)
    made = [*get_demo_overrides(given, folder), "data.eval=[]", "value_pretraining.steps=0", *CONSTANT, *more]
    made += ["checkpoint.export_hf=false", "data.max_prompt_tokens=900"]
    if model != "smollm2" or given.tiny:
        made += ["rollout.prompts=4", "rollout.group_size=2", "update.mini_batch=8"]
    return [*made, "steps=8"] if given.tiny and name == "endurance" else made


def get_model(given: Given, name: str) -> Path:
    """Return a folder that an earlier stage made, or skip this stage."""
    folder = given.out / "models" / name
    if not (folder / "config.json").is_file():
        raise SkipStage(f"no earlier stage has made {name}")
    return folder


def get_overrides(name: str, given: Given) -> list[str]:
    """Return the overrides of a stage's run."""
    if name in GSM8K_RUNS:
        return get_gsm8k_overrides(name, given)
    if name in SMALL_RUNS:
        return get_small_overrides(name, given)
    world = given.world
    tiny = ["data.max_prompt_tokens=900", "data.eval=[]", "checkpoint.export_hf=false"]  # tokens are letters
    if name in ("vapo_bf16", "vapo_fp8"):
        made = get_demo_overrides(given, small(given))
        made += ["model.fp8.format=hybrid", "model.fp8.recipe=tensorwise"] if name == "vapo_fp8" else []
        if given.tiny:
            made += [*tiny, "steps=2", "rollout.prompts=2", "rollout.group_size=2", "update.mini_batch=4"]
            return made
        made += ["steps=8", "rollout.prompts=64", "update.mini_batch=256", "rollout.max_batch=512"]
        return [*made, "update.tokens_per_micro_batch=16384"]
    if name == "seven_vapo":
        assert given.model_7b is not None
        return [
            *get_demo_overrides(given, given.model_7b),
            *("rollout.prompts=16", "rollout.max_response_tokens=512", "reward.overlong.buffer=128"),
            *("rollout.max_batch=128", "rollout.engine_memory=0.6", "data.max_prompt_tokens=256"),
            *("update.mini_batch=64", "update.tokens_per_micro_batch=8192", "model.recompute=full"),
            *("actor.lr=1e-6", "critic.lr=2e-6", "steps=4", "data.eval=[]", "checkpoint.export_hf=false"),
        ]
    if name == "resume":
        made = [
            *get_demo_overrides(given, small(given), world),
            *("rollout.group_size=4", f"rollout.prompts={2 * world}"),
        ]
        made += [f"update.mini_batch={8 * world}", "checkpoint.every=1", "checkpoint.export_hf=false"]
        made += ["data.eval=[]", "value_pretraining.steps=0"]
        made += ["actor.schedule=constant", "critic.schedule=constant"]  # other schedules depend on `steps`
        return [*made, *(tiny if given.tiny else [])]
    if given.model_7b is None:
        made = get_demo_overrides(given, small(given), world)
        if given.tiny:
            return [
                *made,
                *tiny,
                "steps=2",
                "rollout.prompts=4",
                "rollout.group_size=2",
                "update.mini_batch=8",
            ]
        made += ["steps=20", f"rollout.prompts={32 * world}", f"update.mini_batch={128 * world}"]
        return [*made, "rollout.max_batch=256"]
    task = given.data or given.out / "small" / "train.jsonl"
    return [  # the recipe, reduced to fit an hour
        *(
            f"model.path={given.model_7b}",
            f"parallel.dp={world // 2}",
            f"data.train=[{task}]",
            "data.eval=[]",
        ),
        *("evaluation.every=0", "rollout.prompts=64", "update.mini_batch=128", "data.max_prompt_tokens=1024"),
        *("rollout.max_response_tokens=2048", "reward.overlong.buffer=512", "steps=20"),
        *("update.tokens_per_micro_batch=16384", "value_pretraining.steps=3", "checkpoint.every=0"),
        *("checkpoint.export_hf=false", *describe_machine(given)),
    ]


def get_config(name: str, given: Given) -> str:
    if name in GSM8K_RUNS:
        return f"configs/{QWEN.format(GSM8K_RUNS[name][0])}"
    large = name == "vapo_20" and given.model_7b is not None
    return f"configs/{'vapo_7b' if large else 'demos/smollm2_vapo'}.yaml"


def plan_run(given: Given, name: str, overrides: Sequence[str]) -> Any:
    """Return the planner's inputs for a stage's run on this GPU."""
    from megarl.config import load_config
    from megarl.plan.inputs import make_plan_inputs
    from megarl.weights.families import read_config

    loaded = load_config(ROOT / get_config(name, given), overrides)
    return make_plan_inputs(loaded, read_config(loaded.model.path), memory=given.machine["memory"] or None)
