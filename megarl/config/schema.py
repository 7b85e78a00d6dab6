"""The typed configuration: every field with its unit, its default and where that default comes from.

Imports without torch. `megarl config docs` prints what `field(default, doc, unit, source)` keeps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic.fields import FieldInfo

from megarl.config.engines import ENGINES, EngineCapabilities, EngineName

OURS = "our choice"


def field(default: Any, doc: str, unit: str = "", source: str = OURS, **bounds: Any) -> Any:
    """Declare a documented field. `source` cites a paper's section or equation, or says that it is our
    choice."""
    return Field(default, description=doc, json_schema_extra={"unit": unit, "source": source}, **bounds)


def section(kind: type[Section]) -> Any:
    """Declare a section with its defaults."""
    return field(kind(), f"see {kind.__name__}")


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """Return the model of a section, None for any other field."""
    return None if get_origin(field.annotation) in (dict, tuple) else _model_in(field)


def held_section_of(field: FieldInfo) -> type[BaseModel] | None:
    """Return the model of the sections that a field holds by names of the user's (`reward.terms`) or as a
    list (`data.eval`), None for any other field."""
    return _model_in(field) if get_origin(field.annotation) in (dict, tuple) else None


def _model_in(field: FieldInfo) -> type[BaseModel] | None:
    kinds = [kind for kind in (field.annotation, *get_args(field.annotation)) if isinstance(kind, type)]
    return next((kind for kind in kinds if issubclass(kind, BaseModel)), None)


def fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield every leaf of the schema with its dotted key."""
    for name, info in model.model_fields.items():
        below = section_of(info)
        if below is not None:
            yield from fields(below, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", info


class Section(BaseModel):
    """Base of every section: unknown keys are refused, values are checked, nothing changes after loading."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, protected_namespaces=(), allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _plausible(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse what pydantic would let pass (true as the number 1, a NUL in a path); replace a leading ~ of
        paths."""
        annotation = cls.model_fields[str(info.field_name)].annotation
        kinds = (annotation, *get_args(annotation))
        parts = value if isinstance(value, list) else [value]
        if isinstance(value, dict) and Path in kinds:
            parts = [*value.values()]
        if any(isinstance(part, bool) for part in parts) and bool not in kinds:
            raise ValueError("must not be true or false")
        if any(isinstance(part, str) and "\0" in part for part in parts):
            raise ValueError("must not hold a NUL character")
        if Path not in kinds:
            return value
        # A shell leaves the ~ of `model.path=~/x` as it is.
        paths = [Path(p).expanduser() if isinstance(p, str) and p.startswith("~/") else p for p in parts]
        if isinstance(value, dict):
            return dict(zip(value, paths, strict=True))
        return paths if isinstance(value, list) else paths[0]


class Fp8Config(Section):
    """FP8 matrix products in the layers of actor, critic, reference and reward model.

    Weights stay in model.dtype; the engine gets those. Embedding, heads, norms and attention are not
    touched."""

    format: Literal["none", "hybrid", "e4m3"] = field(
        "none", "none: model.dtype; hybrid: e4m3, and e5m2 for gradients of activations; e4m3: for everything"
    )
    recipe: Literal["tensorwise", "delayed", "blockwise", "mxfp8"] = field(
        "tensorwise",
        "scale: of the tensor as it is, of what it was (delayed), of 1 x 128 and 128 x 128 blocks, "
        "or of 32 values (mxfp8, Blackwell)",
    )
    first_last_layers_bf16: bool = field(
        False, "first and last layer in model.dtype; not with recipe delayed"
    )


class ModelConfig(Section):
    """The actor's model."""

    path: Path = field(
        ..., "folder to start from: Hugging Face's (config.json, *.safetensors, tokenizer) or a converted one"
    )
    dtype: Literal["bf16", "fp32"] = field(
        "bf16", "of weights and activations; optimizer states and gradients are fp32"
    )
    layers: Literal["auto", "portable", "te"] = field(
        "auto", "Transformer Engine's layers or plain torch; auto: te where CUDA and Transformer Engine are"
    )
    attention: Literal["auto", "flash", "fused", "unfused"] = field(
        "auto",
        "kernels of Transformer Engine's layers: FlashAttention 2 or 3, cuDNN's (fused), or plain products; "
        "auto: cuDNN's, where it has none for a shape FlashAttention's, else plain products",
        source="Megatron's attention_backend",
    )
    fp8: Fp8Config = section(Fp8Config)
    grouped_experts: bool = field(
        False,
        "all experts of a rank in one grouped product of Transformer Engine, instead of one after the other",
    )
    router_dtype: Literal["fp32", "model"] = field(
        "fp32",
        "of a mixture's router: its product, its scores and what experts are weighed by; its weights are in "
        "model.dtype",
        source="Megatron's moe_router_dtype, which it advises for many experts",
    )
    permute_fusion: bool = field(
        False,
        "tokens are put in the order of their experts, and back, by Transformer Engine's kernels",
        source="Megatron's moe_permute_fusion",
    )
    recompute: Literal["none", "selective", "full"] = field(
        "none", "activation recomputation of Megatron: of recompute_modules, or of whole layers"
    )
    recompute_modules: tuple[Literal["attention", "mlp"], ...] = field(
        ("attention",),
        "with recompute selective: what is computed again in each layer (mlp: of dense models)",
        source="Megatron's recompute_modules core_attn and mlp",
    )
    recompute_layers: int | None = field(
        None,
        "with recompute full: so many lowest layers of each stage (of a pipeline rank or a virtual one) are "
        "recomputed, the others keep their activations; null, or more than there are: all",
        "layers",
        ge=1,
    )
    max_positions: int | None = field(
        None, "longest prompt + response; null: the model's own", "tokens", ge=2
    )

    @field_validator("recompute_modules", mode="before")
    @classmethod
    def _as_list(cls, value: Any) -> Any:
        """Accept one module without brackets."""
        return [value] if isinstance(value, str) else value


class ParallelConfig(Section):
    """How the devices are divided. data-parallel size = (devices - rollout_ranks) / (tp * pp * cp)."""

    tp: int = field(1, "tensor-parallel size", "devices", ge=1)
    pp: int = field(1, "pipeline-parallel size", "devices", ge=1)
    dp: int | None = field(
        None, "data-parallel size; null: what the launcher gives (1 where megarl launches)", "devices", ge=1
    )
    cp: int = field(1, "context-parallel size: ranks over which each sequence is cut", "devices", ge=1)
    ep: int = field(1, "ranks of a stage (tp x cp x dp) that share a mixture's experts", "devices", ge=1)
    rollout_ranks: int = field(
        0,
        "ranks that have engines and nothing else, behind those that train; 0: all ranks do both",
        "devices",
        ge=0,
    )
    vpp: int = field(
        1,
        "virtual stages of each pipeline rank: the interleaved schedule",
        "stages",
        "arXiv 2104.04473",
        ge=1,
    )
    overlap_warmup_flush: bool = field(
        False,
        "with vpp > 1 stages send and receive beside computing while the pipeline fills and empties too",
        "",
        "Megatron's overlap_p2p_comm_warmup_flush",
    )
    sequence_parallel: bool | None = field(None, "Megatron's sequence parallelism; null: on whenever tp > 1")
    overlap_grad_reduce: bool | None = field(
        None, "reduce gradients over data-parallel ranks during the backward pass; null: where dp x cp > 4"
    )
    overlap_param_gather: bool | None = field(
        None, "between updates of a step gather weights during the next forward pass; null: where dp x cp > 4"
    )
    grad_dtype: Literal["fp32", "bf16"] = field(
        "fp32",
        "in which micro-batches' gradients add up and travel; bf16: half of memory and messages, and those "
        "of replicas are still added up in fp32",
        source="Megatron's reduce_scatter_with_fp32_accumulation",
    )
    overlap_bucket: int | None = field(
        None, "weights of one message in an overlap; null: 40 million, or dp million if more", "weights", ge=1
    )
    device: Literal["auto", "cuda", "cpu"] = field("auto", "auto takes cuda where there is one")
    threads: int = field(1, "torch threads per process on a CPU", "threads", ge=1)
    timeout: float = field(600.0, "longest wait in one collective before the run stops", "seconds", gt=0)
    restarts: int = field(0, "restarts after a rank died or hung, where megarl launches", "restarts", ge=0)


TensorGroup = Literal[
    "actor.weights", "actor.gradients", "actor.optimizer",
    "critic.weights", "critic.gradients", "critic.optimizer",
    "reference.weights", "reward.weights", "teacher.weights",
    "engine.weights", "engine.kv_cache",
]  # fmt: skip


class ResidencyConfig(Section):
    """Which tensors stay on the GPU in each phase (see docs/gpu.md)."""

    offload: bool | None = field(None, "move what a phase does not need to pinned host memory; null: on CUDA")
    keep: tuple[TensorGroup, ...] = field(
        (), "groups that never leave, e.g. [actor.optimizer]: quicker steps, less room for engine.kv_cache"
    )


# fmt: off
LoraTarget = Literal[
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "gate_up_proj",
    "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj",  # multi-latent attention
    "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "in_proj_qkvz", "in_proj_ba", "out_proj",  # linear
]
# fmt: on


class LoraConfig(Section):
    """LoRA (arXiv 2106.09685): beside W x in the layers stands scale * B A x; A and B alone are trained."""

    rank: int | None = field(None, "rows of A, columns of B; null: no adapters, the model is trained", ge=1)
    alpha: float = field(32.0, "scale = alpha / rank", gt=0)
    rank_stabilized: bool = field(False, "scale = alpha / sqrt(rank)", source="arXiv 2312.03732")
    targets: tuple[LoraTarget, ...] = field(
        (),
        "matrices with adapters, by their Hugging Face names, e.g. [q_proj, v_proj]; []: all of the layers'",
    )

    @property
    def scale(self) -> float:
        """Return what B A is multiplied with."""
        rank = self.rank or 1
        return self.alpha / (math.sqrt(rank) if self.rank_stabilized else rank)


class MuonConfig(Section):
    """Muon (arXiv 2502.16982, algorithm 1 and equation 4): m = momentum m + g; W -= lr (O sqrt(max(rows,
    columns)) scale + weight_decay W), where O is what Newton-Schulz steps with Jordan's coefficients (3.4445,
    -4.775, 2.0315) make of g + momentum m: nearly U V^T of its singular value decomposition."""

    momentum: float = field(0.95, "of the gradients' moving sum", source="arXiv 2502.16982", ge=0, lt=1)
    steps: int = field(5, "Newton-Schulz steps", "steps", "arXiv 2502.16982, section 2.1", ge=1)
    scale: float = field(
        0.2,
        "root mean square of a matrix's update at lr 1: as AdamW's, whose lr and weight_decay then fit",
        source="arXiv 2502.16982, equation 4",
        gt=0,
    )


class OptimizerConfig(Section):
    """AdamW in Megatron's distributed optimizer, and its learning-rate schedule. One scheduler step is one
    rollout step."""

    optimizer: Literal["adam", "muon"] = field(
        "adam",
        "muon: the layers' matrices by Muon, whole, each on one replica; embeddings, output layer, norms, "
        "biases and value head by AdamW (algorithms.md)",
        source="arXiv 2502.16982",
    )
    muon: MuonConfig = section(MuonConfig)
    lr: float = field(1e-6, "peak learning rate", "", "DAPO section 4.1, VAPO section 5.1: actor 1e-6", gt=0)
    schedule: Literal["constant", "linear", "cosine"] = field(
        "constant", "after the warm-up", "", "VAPO section 5.1: warm-up-constant"
    )
    warmup_steps: int = field(0, "linear warm-up", "rollout steps", "DAPO section 4.1: 20", ge=0)
    min_lr_ratio: float = field(0.0, "last learning rate / peak, for linear and cosine", ge=0, le=1)
    betas: tuple[float, float] = field((0.9, 0.999), "AdamW betas")
    eps: float = field(1e-8, "AdamW epsilon", gt=0)
    weight_decay: float = field(0.0, "decoupled weight decay", ge=0)
    clip_grad: float = field(1.0, "global gradient norm is clipped to this; 0 turns clipping off", ge=0)
    frozen: tuple[Literal["attention", "embeddings"], ...] = field(
        (),
        "parts of all layers that are not trained, and have no gradients or optimizer state (algorithms.md)",
        source="none in DAPO and VAPO; SAO: the critic's attention",
    )
    frozen_layers: int = field(0, "lowest layers that are not trained, whole", "layers", ge=0)
    lora: LoraConfig = section(LoraConfig)

    @field_validator("frozen", mode="before")
    @classmethod
    def _as_list(cls, value: Any) -> Any:
        """Accept one part without brackets."""
        return [value] if isinstance(value, str) else value

    @property
    def freezes(self) -> bool:
        """Return whether some of the model is not trained."""
        return bool(self.frozen or self.frozen_layers or self.lora.rank)


class CriticConfig(OptimizerConfig):
    """The value model. It exists where `algorithm.advantage` is `gae` or `prompt_value`."""

    lr: float = field(2e-6, "peak learning rate", source="VAPO section 5.1: critic 2e-6", gt=0)
    path: Path | None = field(
        None,
        "Hugging Face folder of the critic's body, or of a one-label reward model, "
        "or of a critic that megarl saved; null: the actor's",
        source="VAPO section 4.1 starts it from a reward model",
    )
    head_std: float = field(
        0.0, "standard deviation of a new value head (a folder without score.weight); 0: zeros", ge=0
    )
    count: int = field(
        1,
        "critics, alike but for what they learn from: each from its own share of every group's responses; "
        "the mean of their values counts",
        "critics",
        "AsyPPO, arXiv 2510.01656: 2",
        ge=1,
        le=2,
    )
    epochs: int = field(1, "passes over each rollout", "epochs", ge=1)
    mini_batch: int | None = field(
        None, "responses per update; null: update.mini_batch; one must divide the other", "responses", ge=1
    )


class GymTask(Section):
    """A task of reasoning-gym. Keys other than `weight` are parameters of the task itself, which
    reasoning-gym checks before a run."""

    model_config = ConfigDict(extra="allow")

    weight: float = field(1.0, "share of the rows, relative to the other tasks' weights", gt=0)

    @model_validator(mode="before")
    @classmethod
    def _named_alone(cls, value: Any) -> Any:
        """Accept a name with nothing after it; refuse what the entry sets for all tasks."""
        if isinstance(value, dict) and (
            set_for_all := next((k for k in ("seed", "size") if k in value), None)
        ):
            raise ValueError(f"must not have {set_for_all}, which belongs beside `tasks`")
        return {} if value is None else value

    @property
    def parameters(self) -> dict[str, Any]:
        """Return the task's own parameters."""
        return dict(self.model_extra or {})


class GymConfig(Section):
    """Problems that reasoning-gym generates and scores (extra `gym`): the same rows from the same section in
    any process, rows of data.train and data.eval from seeds that cannot meet."""

    tasks: dict[str, GymTask] = field(
        ..., "name -> {weight, and the task's own parameters}, or a list of names"
    )
    size: int = field(..., "rows of all tasks together", "rows", ge=1, le=2**18)
    seed: int = field(
        0,
        "another one, other rows; data.eval's rows are never data.train's, whatever the two seeds",
        ge=0,
        lt=2**12,
    )
    system: str | None = field(
        "default",
        "system message: the name of one of reasoning-gym's (default, simple, direct, DeepSeekZero, "
        "chain_of_draft) or a text of your own that asks for <answer> tags; null: none",
    )
    examples: int = field(
        0,
        "problems of the same task with their answers in tags, shown before each question",
        "problems",
        ge=0,
        le=64,
    )

    @field_validator("tasks", mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        """Accept a list of names."""
        if isinstance(value, list) and all(isinstance(name, str) for name in value):
            twice = next((name for i, name in enumerate(value) if name in value[:i]), None)
            if twice is not None:
                raise ValueError(f"must name {twice} once (a weight gives it more rows)")
            value = {name: {} for name in value}
        if not isinstance(value, dict) or not value:
            raise ValueError(
                "must be the names of tasks, at least one, each with its settings, or a list of names"
            )
        return value


class DataEntry(Section):
    """An entry of data.train: a path, or a section with the path, or with what reasoning-gym generates."""

    path: Path | None = field(None, "parquet or jsonl file; an entry with nothing else may be the path alone")
    gym: GymConfig | None = field(None, "instead of a path: problems that reasoning-gym generates and scores")

    @model_validator(mode="before")
    @classmethod
    def _from_path(cls, value: Any) -> Any:
        """Accept a plain path."""
        if isinstance(value, str | Path):
            return {"path": value}
        if not isinstance(value, dict | cls):
            raise ValueError("must be a path, as text, or a section with the key path or gym")
        return value

    @model_validator(mode="after")
    def _either(self) -> Self:
        if (self.path is None) == (self.gym is None):
            raise ValueError("must have the key path or the key gym, one of the two")
        return self

    @model_serializer(mode="wrap")
    def _as_given(self, plain: SerializerFunctionWrapHandler) -> Any:
        """Write an entry with nothing of its own as its path."""
        given = {key: value for key, value in plain(self).items() if value is not None}
        return given["path"] if list(given) == ["path"] else given


class EvaluationSet(DataEntry):
    """An entry of data.eval: a path, or a section with it or with `gym`, and what is the entry's own."""

    name: str | None = field(
        None, "of its scores: eval/<name>/avg and so on; null: they are shown by the rows' data_source"
    )
    every: int | None = field(
        None,
        "steps between its evaluations (needs a name; its scores stay out of eval/avg); "
        "null: evaluation.every, and they count there",
        "rollout steps",
        ge=1,
    )
    samples: int | None = field(None, "responses per problem; null: evaluation.samples", "responses", ge=1)


# Arguments of transformers' apply_chat_template that are no variables of a template.
_RENDERING = frozenset(
    {
        *("conversation", "messages", "tools", "documents", "chat_template"),
        *("add_generation_prompt", "continue_final_message", "tokenize", "tokenizer_kwargs"),
        *("padding", "truncation", "max_length"),
        *("return_tensors", "return_dict", "return_assistant_tokens_mask"),
    }
)


class DataConfig(Section):
    """Prompts and reference answers."""

    train: tuple[DataEntry, ...] = field(
        (),
        "parquet or jsonl files, with the columns of DAPO-Math, GSM8K, MATH, verl or TRL; or sections {gym}",
    )
    eval: tuple[EvaluationSet, ...] = field(
        (), "held-out files, same formats: paths, or sections {path or gym, name, every, samples}"
    )
    prompt_key: str = field(
        "prompt", "column of a text or of messages; else `question`, `problem` or `messages`"
    )
    answer_key: str = field(
        "reward_model.ground_truth",
        "column, dots descend; else `answer`, or what `solution`, `completion` or the last of `messages` "
        "ends in",
    )
    template: Literal["chat", "raw"] = field("chat", "the tokenizer's chat template; raw: contents joined")
    chat_template_kwargs: dict[str, Any] = field(
        {},
        "variables that the chat template is always given, such as `{enable_thinking: false}`",
    )
    prompt_format: str = field("{prompt}", "text put around a plain-text prompt; `{prompt}` is replaced")
    max_prompt_tokens: int = field(2048, "longer prompts are left out and counted", "tokens", ge=1)
    shuffle: bool = field(True, "new order each epoch, from the run's seed")

    @field_validator("chat_template_kwargs")
    @classmethod
    def _free_names(cls, value: dict[str, Any]) -> dict[str, Any]:
        """Refuse names that the conversation itself, or how it is rendered, has."""
        if taken := sorted(_RENDERING & value.keys()):
            raise ValueError(f"must not have {taken[0]}, which is set for each conversation")
        return value

    @property
    def has_gym(self) -> bool:
        """Return whether reasoning-gym generates, and scores, some of the rows."""
        return any(entry.gym for entry in (*self.train, *self.eval))


class DynamicSamplingConfig(Section):
    """Groups whose responses are all right or all wrong carry no group-relative signal and are replaced (DAPO
    eq. 11)."""

    enabled: bool = field(False, "keep groups with 0 < correct < group_size", "", "DAPO eq. 11; not in VAPO")
    by: Literal["accuracy", "score"] = field(
        "accuracy",
        "what must differ within a group that is kept: right and wrong, or its rewards, of whatever parts "
        "(standard deviation > 1e-6)",
        source="DAPO eq. 11: accuracy",
    )
    max_batches: int = field(10, "generation batches per step, then `at_limit` applies", "batches", ge=1)
    at_limit: Literal["continue", "stop"] = field(
        "continue", "at max_batches: fill up with rejected groups, or stop the run with a message"
    )
    oversample: float = field(1.0, "first generation batch / groups needed; the rest is used next step", ge=1)


Sandbox = Literal["strict", "network", "off"]


class TurnsConfig(Section):
    """Limits of an episode with several turns, tools or an environment."""

    max: int = field(16, "turns of the policy; an episode that wants more is truncated", "turns", ge=1)
    max_tokens: int | None = field(
        None,
        "tokens behind the prompt, what the policy is shown included; null: rollout.max_response_tokens. "
        "What the policy writes itself is limited by that in any case",
        "tokens",
        ge=1,
    )
    seconds: float = field(30.0, "longest call of a tool, or step of an environment", "seconds", gt=0)
    hold: float = field(
        5.0, "that an episode or agent may hold the event loop before its line is said", "seconds", gt=0
    )
    observation: int = field(8192, "what the policy is shown of one result; the rest is cut", "bytes", ge=16)
    calls: int = field(2, "processes for tools and environments of one engine", "processes", ge=1)
    memory: int = field(2048, "data memory of such a process", "MiB", ge=128)
    sandbox: Sandbox = field(
        "strict",
        "what such a process may do: strict (read most files, write in a temporary folder of its own, start "
        "programs), network (the same, and the network), off (all that this user may); docs/episodes.md",
    )


class RolloutConfig(Section):
    """Sampling of responses."""

    engine: EngineName = field(
        "transformers", "rollout engine; sglang_url: servers that somebody else runs (docs/sglang.md)"
    )
    urls: tuple[str, ...] = field((), "SGLang servers of engine sglang_url, `http://host:port` each")
    router: str | None = field(
        None,
        "sglang's router in front of them, `http://host:port`; null: each is asked by its own URL",
    )
    prompts: int = field(
        512, "effective prompts a step", "prompts", "DAPO section 4.1, VAPO section 5.1", ge=1
    )
    group_size: int = field(
        16, "responses per prompt", "responses", "DAPO section 4.1, VAPO section 5.1: group sampling 16", ge=1
    )
    max_response_tokens: int = field(
        20480, "L_max: longer responses are cut", "tokens", "DAPO section 4.1: 16,384 + 4,096", ge=1
    )
    temperature: float = field(1.0, "sampling temperature", source="DAPO section 4.1", gt=0)
    top_p: float = field(1.0, "nucleus", gt=0, le=1)
    top_k: int = field(0, "0: off", "tokens", ge=0)
    stop: tuple[str, ...] = field((), "texts that end a response, besides the end-of-sequence token")
    episode: str | None = field(
        None,
        "`module:function`, an `async def f(prompt, policy)` run for each response (docs/episodes.md); "
        "null: one turn, or what tools, environment or agent say",
    )
    tools: tuple[str, ...] = field(
        (), "`module:function` each, plain functions that the policy may call by its chat template's format"
    )
    environment: str | None = field(None, "`module:Class` that answers each turn of the policy")
    environment_arguments: dict[str, bool | int | float | str] = field(
        {}, "arguments of the environment's class, by name"
    )
    agent: str | None = field(
        None, "`module:function`, an `async def f(base_url, api_key, row)` that talks to an OpenAI endpoint"
    )
    turns: TurnsConfig = section(TurnsConfig)
    max_batch: int = field(256, "sequences that one engine decodes at once", "sequences", ge=1)
    in_flight: int | None = field(
        None,
        "responses that one of several engines is given at once (of sglang_url: for each of its servers), "
        "beside those that wait for a tool; the others wait, and go to whichever engine has room first; "
        "null: max_batch; 0: all, in equal parts",
        "responses",
        ge=0,
    )
    dynamic_sampling: DynamicSamplingConfig = section(DynamicSamplingConfig)
    engine_tp: int = field(
        1,
        "tensor-parallel size of one engine; their number is devices / this. "
        "Of sglang_url: ranks that share a client of its servers",
        "devices",
        ge=1,
    )
    weights_dtype: Literal["model", "fp8_block"] = field(
        "model",
        "the engine's weights: model.dtype, "
        "or float8_e4m3fn in blocks of 128 x 128 with float32 scales, quantised before they are sent",
        source="the format of published block-FP8 checkpoints, which SGLang reads",
    )
    engine_memory: float = field(0.8, "share of a GPU for an awake engine's weights and KV cache", gt=0, lt=1)
    engine_timeout: float = field(
        300.0, "longest time without progress before an engine counts as hanging", "seconds", gt=0
    )
    engine_start_timeout: float = field(900.0, "longest start of an engine", "seconds", gt=0)
    engine_failures: int = field(
        3, "failures since the last weight transfer after which no engine is restarted", "failures", ge=0
    )
    continue_partial: bool = field(
        False, "continue responses aborted at a step's end in the next one; false: draw their prompts anew"
    )
    window: int | None = field(
        None,
        "tokens of a response that one step draws and trains the policy on; one that has not ended then goes "
        "on in the next step, before new prompts fill the batch; null: whole responses",
        "tokens",
        "T-PPO, arXiv 2506.15050: 8192",
        ge=1,
    )
    routing_replay: bool = field(
        False,
        "record which experts the engine chose for each token, and have the actor's routers choose them too",
        source="R3, arXiv 2510.11370",
    )
    routing_compare: bool = field(
        False, "one more log-prob pass a step, without replay: how far the engine's log-probs are from that"
    )
    engine_options: dict[str, bool | int | float | str | tuple[str, ...]] = field(
        {}, "further arguments of sglang.Engine, e.g. {attention_backend: triton}"
    )
    transfer_bucket: int = field(256, "staging memory of a weight transfer", "MiB", ge=1)
    fingerprint: bool = field(
        False, "compare the engine's and the actor's weights by hashes after each transfer"
    )

    @property
    def acts(self) -> bool:
        """Return whether responses may have several turns."""
        return bool(self.episode or self.tools or self.environment or self.agent)

    @property
    def max_extent(self) -> int:
        """Return the most tokens behind a prompt: the policy's, and what it is shown."""
        return (self.turns.max_tokens if self.acts else None) or self.max_response_tokens

    @property
    def windows(self) -> int:
        """Return the most steps that draw tokens of one response."""
        return math.ceil(self.max_response_tokens / (self.window or self.max_response_tokens))

    @property
    def capabilities(self) -> EngineCapabilities:
        """Return what the engine can do."""
        return ENGINES[self.engine].capabilities


class ClusterConfig(Section):
    """The machines, for plans and estimates. gpus_per_node also decides which way weights take to the
    engines, not what arrives. Speeds are one GPU's, in one direction; the defaults are peak figures of data
    sheets."""

    gpu: str = field(
        "H100", "H100, H200, H800, H20, GB200, A100 (megarl/plan/sizes.py); else give all figures"
    )
    gpu_memory: float | None = field(None, "of one GPU, as nvidia-smi has it; null: the table's", "GiB", gt=0)
    gpu_tflops: float | None = field(None, "dense bf16; null: the table's", "TFLOP/s", gt=0)
    gpu_memory_speed: float | None = field(None, "of its own memory; null: the table's", "GB/s", gt=0)
    host_speed: float | None = field(None, "between host and GPU; null: the table's", "GB/s", gt=0)
    host_memory: float = field(2048.0, "of a node", "GiB", "DGX H100 data sheet: 2 TB", gt=0)
    gpus_per_node: int = field(8, "rank r is on node r // this", "devices", "DGX H100 data sheet", ge=1)
    copy_speed: float = field(
        1675.0, "copies in a GPU", "GB/s", "H100 SXM data sheet: 3.35 TB/s of memory, read and written", gt=0
    )
    node_speed: float = field(
        450.0, "between a node's GPUs", "GB/s", "H100 SXM data sheet: NVLink, 900 GB/s both ways", gt=0
    )
    network_speed: float = field(
        50.0, "between nodes", "GB/s", "DGX H100 data sheet: one 400 Gb/s adapter per GPU", gt=0
    )


class OverlongConfig(Section):
    """What happens to responses that reach the length limit (DAPO section 3.4)."""

    filter: bool = field(
        False, "mask truncated responses out of the loss", source="DAPO section 3.4, overlong filtering"
    )
    soft_punishment: bool = field(False, "a length penalty is added to the reward", source="DAPO eq. 13")
    buffer: int = field(4096, "L_cache: width of the punished interval", "tokens", "DAPO section 4.1", ge=1)


class RewardTerm(Section):
    """A function of a response whose value is added to the reward."""

    function: str = field(
        ...,
        "`module:function`, called as f(response, **arguments) with a `megarl.rewards.Judged`; "
        "returns a finite number (megarl/rewards/shaping.py has some)",
    )
    weight: float = field(1.0, "factor of its value; 0: only measured")
    arguments: dict[str, bool | int | float | str] = field({}, "further arguments, by name")


class RewardModelConfig(Section):
    """A reward model on the same ranks, whose score of each response is added to its reward."""

    path: Path | None = field(
        None,
        "Hugging Face folder of a sequence classifier of one label, with the actor's tokenizer; null: none",
    )
    weight: float = field(1.0, "factor of its score; 0: only measured")


class RewardConfig(Section):
    """What a response is worth: weight * (the verifier's reward) + the terms and the reward model's score,
    each by its weight, + the penalty of `overlong`."""

    verifier: str = field(
        "dapo",
        "dapo (last `Answer:` line, normalised), math (symbolic), "
        "or a dotted path `module:function` of your own",
        source="DAPO eq. 7",
    )
    correct: float = field(1.0, "reward of a right answer", source="DAPO eq. 7")
    incorrect: float = field(-1.0, "reward of a wrong answer", source="DAPO eq. 7; VAPO speaks of 0 and 1")
    weight: float = field(1.0, "factor of the verifier's reward; 0: it only says right or wrong", ge=0)
    terms: dict[str, RewardTerm] = field(
        {}, "name -> {function, weight, arguments}: added to the reward; reward/term_<name> is its mean"
    )
    model: RewardModelConfig = section(RewardModelConfig)
    timeout: float = field(
        10.0, "longest time for one answer, which is then wrong and recorded", "seconds", gt=0
    )
    workers: int = field(1, "verifier processes per rank", "processes", ge=1)
    memory: int = field(
        2048, "data memory of a verifier; an answer that takes more is wrong and recorded", "MiB", ge=128
    )
    sandbox: Sandbox = field(
        "strict",
        "what the process of a verifier or term of your own may do, as rollout.turns.sandbox says; megarl's "
        "own may only calculate (docs/verifiers.md)",
    )
    max_unjudged: float = field(
        0.1,
        "share of a step's responses that may stay unjudged (left out), since a failure of the verifier's "
        "process, function or service says nothing of them; above it the run ends",
        ge=0,
        le=1,
    )
    overlong: OverlongConfig = section(OverlongConfig)

    @property
    def parts(self) -> dict[str, float]:
        """Return the weight of each part of the reward that has one, by the part's key; the reward model's
        comes last."""
        parts = {"verifier": self.weight, "overlong": float(self.overlong.soft_punishment)}
        parts |= {f"terms.{name}": term.weight for name, term in self.terms.items()}
        parts["model"] = self.model.weight if self.model.path else 0.0
        return {name: weight for name, weight in parts.items() if weight}


class MismatchConfig(Section):
    """Corrections where the engine's probabilities differ from the trainer's.

    Factors, from the ratio trainer / engine, of the token weights of the policy loss and the KL term.
    Denominators stay as they are. `mismatch/*` is recorded in any case."""

    weight: Literal["none", "token", "sequence"] = field(
        "none",
        "truncated importance sampling: each token by min(ratio, cap), "
        "of its own ratio or of the product over its response",
        source="truncated importance sampling (Ionides 2008); none in DAPO and VAPO",
    )
    cap: float = field(2.0, "largest importance weight", gt=0)
    mask: Literal["none", "token", "sequence"] = field(
        "none",
        "leave out tokens whose ratio, or responses the geometric mean of whose ratios, "
        "is outside [mask_low, mask_high]",
        source="none in DAPO and VAPO",
    )
    mask_low: float = field(0.5, "smallest ratio that is kept", ge=0)
    mask_high: float = field(2.0, "largest ratio that is kept; a geometric mean wants about 1.01", gt=0)

    @property
    def enabled(self) -> bool:
        """Return whether the policy loss has such factors."""
        return self.weight != "none" or self.mask != "none"


class DppoConfig(Section):
    """DPPO's own numbers. Its thresholds are clip_low and clip_high, of probabilities (dppo_tv) or of their
    divergence (dppo_kl)."""

    ratio_cap: float = field(
        20.0, "largest ratio that a token is weighted with", "", "arXiv 2602.04879", gt=0
    )
    top_k: int = field(
        0,
        "likeliest tokens of pi_old that the divergence tells apart, beside the sampled one; 0: it alone "
        "against all others",
        "tokens",
        "arXiv 2602.04879, DPPO-TopK: 20",
        ge=0,
    )


class SapoConfig(Section):
    """The slopes of SAPO's gate."""

    tau_positive: float = field(1.0, "of tokens of positive advantage", source="SAPO", gt=0)
    tau_negative: float = field(1.05, "of the others, whose gradient falls off faster", source="SAPO", gt=0)


class CovarianceConfig(Section):
    """Which tokens Clip-Cov and KL-Cov select in a mini-batch, by the product of their advantage and
    log-prob, each less its mean."""

    share: float = field(
        2e-4, "of its tokens, at least one; KL-Cov of 7B: 2e-3", "", "arXiv 2505.22617", gt=0, le=1
    )
    low: float = field(1.0, "clip_cov: what the covariance must be above", source="arXiv 2505.22617")
    high: float = field(5.0, "clip_cov: what it must be below", source="arXiv 2505.22617")
    kl_weight: float = field(1.0, "kl_cov: of |log ratio|", "", "arXiv 2505.22617", ge=0)


class AgreementConfig(Section):
    """What is made of how far the values of two critics are apart, as shares of a step's tokens."""

    mask: float = field(
        0.0,
        "those on which they agree most, which have no advantage",
        "",
        "AsyPPO, arXiv 2510.01656; 0.1 in a reimplementation",
        ge=0,
        lt=1,
    )
    filter: float = field(
        0.0,
        "those on which they agree least, which the entropy term leaves out",
        "",
        "AsyPPO; 0.2 in a reimplementation",
        ge=0,
        lt=1,
    )


class FipoConfig(Section):
    """The factors of FIPO's advantages."""

    half_life: float = field(32.0, "after which a later token counts half", "tokens", "FIPO's script", gt=0)
    low: float = field(1.0, "smallest factor; FIPO of 7B: 0.8", "", "FIPO's script", gt=0)
    high: float = field(1.2, "largest factor", "", "FIPO's script", gt=0)
    limit: float = field(10.0, "tokens of a larger ratio are left out of the sum", "", "FIPO's script", gt=1)


Advantage = Literal[
    "group", "group_mean", "leave_one_out", "per_reward", "tracked", "return", "gae", "prompt_value"
]


class AlgorithmConfig(Section):
    """Every technique of both papers' ablation tables is one key here, in `rollout`, `reward.overlong` or
    `value_pretraining`."""

    advantage: Advantage = field(
        "group",
        "gae: by a critic; without one: reward less the group's mean, over its standard deviation (group) or "
        "not (group_mean), less the mean of the group's others (leave_one_out), or the return alone; "
        "per_reward: group of each part of the reward by itself, their sum over the batch's deviation; "
        "tracked: reward less what earlier answers to the prompt let expect, normalised over the batch; "
        "prompt_value: reward less what a critic that reads the prompt alone lets expect",
        source="DAPO eq. 9; Dr. GRPO; RLOO; REINFORCE++; VAPO eq. 3; GDPO; SPO; SPPO",
    )
    tracker_rho: float = field(
        0.875,
        "with advantage tracked: share of what is known of a prompt that counts on when it is answered again",
        source="SPO: 0.875 to 0.96, by how far the policy has moved",
        gt=0,
        le=1,
    )
    gamma: float = field(1.0, "discount", source="VAPO section 2", gt=0, le=1)
    lambda_critic: float = field(
        1.0,
        "lambda of value targets; 1: Monte-Carlo returns",
        "",
        "VAPO section 4.1, decoupled GAE",
        ge=0,
        le=1,
    )
    lambda_policy: float | Literal["length_adaptive"] = field(
        0.95,
        "lambda of the policy's advantages, or length_adaptive: 1 - 1 / (alpha * length), clamped to [0, 1]",
        source="VC-PPO 0.95; VAPO eq. 5",
    )
    alpha: float = field(0.05, "alpha of the length-adaptive lambda", source="VAPO eq. 5; SAO: 1.5", gt=0)
    lambda_floor: float = field(
        0.0, "lowest length-adaptive lambda", "", "T-PPO, arXiv 2506.15050: 0.95", ge=0, le=1
    )
    window_tail: int = field(
        0,
        "last tokens of a window that goes on (rollout.window) whose advantage is 0, as little is known of "
        "what follows",
        "tokens",
        "T-PPO's implementation: 8",
        ge=0,
    )
    whiten: bool = field(
        False, "whiten advantages over the tokens of the step that count in the loss", source="REINFORCE++"
    )
    surrogate: Literal[
        "ppo", "gspo", "cispo", "masked", "dppo_tv", "dppo_kl", "sapo", "clip_cov", "kl_cov", "fipo"
    ] = field(
        "ppo",
        "ppo: clipped; gspo: with one ratio a sequence; cispo: clipped ratio times log-prob, no gradient "
        "through it; masked: tokens outside the interval have no gradient, on both sides; dppo_tv, dppo_kl: "
        "bounded by how far probabilities moved; sapo: a smooth gate; clip_cov, kl_cov: tokens of high "
        "covariance left out or held back; fipo: ppo, advantages by how the rest of the response moved",
        source="DAPO eq. 8, VAPO eq. 8; GSPO eq. 5; CISPO eq. 4; SAO; DPPO; SAPO; arXiv 2505.22617; FIPO",
    )  # fmt: skip
    old_logprobs: Literal["trainer", "engine"] = field(
        "trainer",
        "pi_old of the ratio: computed by the trainer before the updates, or the engine's own of the "
        "sampling, which saves that pass",
        source="engine: SAO",
    )
    clip_low: float = field(0.2, "epsilon_low; 1: none", source="DAPO eq. 8, VAPO eq. 8", gt=0, le=1)
    clip_high: float = field(0.2, "epsilon_high; clip-higher: 0.28", "", "DAPO eq. 8, VAPO eq. 8: 0.28", gt=0)
    dual_clip: float = field(
        0.0, "c: a negative advantage's loss is at most c |A|; 0: off", "", "arXiv 1912.09729: 3", ge=0
    )
    aggregation: Literal["token", "sample", "constant"] = field(
        "token",
        "mean over the mini-batch's tokens, over responses' means, "
        "or over responses' sums / rollout.max_response_tokens",
        source="VAPO eq. 7 and 6; Dr. GRPO",
    )
    nll_weight: float = field(0.0, "mu, of the positive-example LM loss", source="VAPO eq. 10: 0.1", ge=0)
    kl_weight: float = field(
        0.0, "beta, of the KL to the initial policy in the loss", "", "GRPO; 0 in DAPO and VAPO", ge=0
    )
    kl_estimator: Literal["k2", "k3"] = field(
        "k3",
        "estimate of that KL by the sampled token, d = log pi - log pi_ref; k3: exp(-d) - 1 + d, "
        "k2: d^2 / 2, whose gradient is on average that of KL(pi || pi_ref)",
        source="k3: GRPO; k2: REINFORCE++ with baseline, as in OpenRLHF",
    )
    kl_reward: float = field(
        0.0,
        "beta, of the KL to the initial policy in each token's reward",
        "",
        "VAPO eq. 1, whose beta is 0",
        ge=0,
    )
    entropy_weight: float = field(
        0.0, "factor of the policy's entropy, which is maximised", "", "none in DAPO and VAPO", ge=0
    )
    value_clip: float = field(0.0, "largest move of a value before its loss is clipped; 0: off", ge=0)
    mismatch: MismatchConfig = section(MismatchConfig)
    dppo: DppoConfig = section(DppoConfig)
    sapo: SapoConfig = section(SapoConfig)
    covariance: CovarianceConfig = section(CovarianceConfig)
    fipo: FipoConfig = section(FipoConfig)
    agreement: AgreementConfig = section(AgreementConfig)

    @property
    def compares(self) -> bool:
        """Return whether a response's advantage comes from those of its group."""
        return self.advantage in ("group", "group_mean", "leave_one_out", "per_reward")

    @property
    def surrogate_options(self) -> dict[str, float]:
        """Return the numbers that the surrogate's function takes, by name."""
        match self.surrogate:
            case "dppo_tv" | "dppo_kl":
                return {"ratio_cap": self.dppo.ratio_cap}
            case "sapo":
                return self.sapo.model_dump()
            case "fipo":
                return self.fipo.model_dump()
            case "kl_cov":
                return {"kl_weight": self.covariance.kl_weight}
        return {}

    @property
    def selects_tokens(self) -> bool:
        """Return whether the surrogate needs to know of tokens of the whole mini-batch."""
        return self.surrogate in ("clip_cov", "kl_cov")

    @property
    def has_reference(self) -> bool:
        """Return whether a term compares the policy with the initial one."""
        return bool(self.kl_weight or self.kl_reward)

    @property
    def old_column(self) -> str:
        """Return the column that holds log pi_old."""
        return "engine_logprobs" if self.old_logprobs == "engine" else "old_logprobs"


class TeacherConfig(Section):
    """On-policy distillation: a teacher on the same ranks judges each token that the policy has sampled, and
    its judgement is added to the token's advantage; or what it would have said there is a term of the
    loss."""

    path: Path | None = field(
        None,
        "Hugging Face folder of a causal model of any size, with the actor's tokenizer; null: none",
    )
    by_source: dict[str, Path] = field(
        {},
        "teachers by the rows' data_source, e.g. {openai/gsm8k: models/a}, one on the device at a time; "
        "other rows have that of `path`, or none",
        source="verl's distillation.teacher_models with teacher_key data_source",
    )
    weight: float = field(
        1.0,
        "c: c (log pi_teacher - log pi_old) is added to each token's advantage, after any whitening; "
        "with top_k the factor of the loss term",
        source="Thinking Machines, On-Policy Distillation: the reverse KL of each token, undiscounted",
        gt=0,
    )
    top_k: int | None = field(
        None,
        "k: the KL from a teacher to the policy over the teacher's k likeliest tokens at each place is a "
        "term of the loss, and advantages stay as they are; null: the sampled token's log-ratio is added",
        "tokens",
        "verl's forward_kl_topk, which has 32",
        ge=1,
    )

    @property
    def folders(self) -> dict[str, Path]:
        """Return each teacher's folder by the first key that names it, `teacher.path` or
        `teacher.by_source.<data_source>`."""
        found: dict[str, Path] = {}
        by_source = {f"teacher.by_source.{source}": path for source, path in self.by_source.items()}
        for key, path in {"teacher.path": self.path, **by_source}.items():
            if path is not None and path not in found.values():
                found[key] = path
        return found

    def number(self, source: str) -> int:
        """Return which of `folders` judges rows of this data_source; -1: none."""
        path = self.by_source.get(source, self.path)
        return -1 if path is None else [*self.folders.values()].index(path)


class UpdateConfig(Section):
    """How a rollout becomes optimizer steps."""

    mini_batch: int = field(
        512, "responses per optimizer step", "responses", "DAPO section 4.1: 16 updates a rollout", ge=1
    )
    epochs: int = field(1, "actor passes over each rollout", "epochs", ge=1)
    tokens_per_micro_batch: int = field(
        32768,
        "packed tokens per micro-batch, of which a context-parallel rank has its share; "
        "one longer sample has a micro-batch of its own",
        "tokens",
        ge=1,
    )
    share_prompts: bool = field(
        False,
        "compute a prompt once for those of its responses that are in one micro-batch; "
        "mini-batches are then made of whole groups; with portable layers, without context parallelism",
    )
    logprob_chunk: int = field(
        1024, "vocabulary entries whose logits exist at once", "entries of a shard", ge=1
    )


class ValuePretrainingConfig(Section):
    """The critic is fitted to Monte-Carlo returns of the frozen initial policy before anything else (VAPO
    section 4.1)."""

    steps: int = field(
        0, "rollouts of the frozen policy; 0: no pretraining", "rollout steps", "VAPO section 5.1: 50", ge=0
    )
    epochs: int = field(1, "passes over each of these rollouts", "epochs", ge=1)
    lr: float | None = field(None, "constant learning rate meanwhile; null: critic.lr", gt=0)
    explained_variance: float = field(1.0, "end early once a new rollout's is at least this; 1: never", le=1)
    rollouts: Path | None = field(
        None,
        "folder of these rollouts, which are kept, and reused where it holds them already; "
        "null: value_pretraining/ in run_dir",
        source="VAPO section 4.1, step 3, keeps the critic; keeping its data costs about 13 bytes a token",
    )


class ScheduleConfig(Section):
    """The order of the phases of neighbouring steps."""

    ahead: Literal[0, 1, 2] = field(
        0,
        "steps that rollouts are ahead: those of step k are drawn with the weights after step k - 1 - ahead",
        "steps",
    )


class EvaluationConfig(Section):
    """avg@k, pass@k and majority@k on `data.eval`."""

    every: int = field(0, "steps between evaluations; 0: at start and end only", "rollout steps", ge=0)
    samples: int = field(32, "k: responses per problem", "responses", "DAPO section 4.1: avg@32", ge=1)
    temperature: float = field(1.0, "sampling temperature; 0: greedy", source="DAPO section 4.1", ge=0)
    top_p: float = field(0.7, "nucleus", source="DAPO section 4.1", gt=0, le=1)
    max_problems: int = field(
        0,
        "first rows that are used, of each name in data.eval and of the entries without one; 0: all",
        "problems",
        ge=0,
    )


class CheckpointConfig(Section):
    """What is kept on disk."""

    every: int = field(
        0, "steps between checkpoints, and one at the end; 0: none, no resuming", "rollout steps", ge=0
    )
    keep: int = field(2, "newest checkpoints kept; 0: all", "checkpoints", ge=0)
    keep_every: int = field(0, "checkpoints of every so many steps stay too; 0: none", "rollout steps", ge=0)
    background: bool = field(True, "write while the next step runs; false: the run waits for the disk")
    timeout: float = field(
        300.0, "longest wait for a checkpoint, at most 0.8 of parallel.timeout", "seconds", gt=0
    )
    time_limit: float | None = field(
        None, "save and leave before this has passed; null: SLURM_JOB_END_TIME, if set", "seconds", gt=0
    )
    time_margin: float = field(120.0, "kept free besides the longest step and save", "seconds", ge=0)
    grace: float = field(
        300.0, "longest from SIGTERM or SIGUSR1 to a saved end; then ranks are ended", "seconds", gt=0
    )
    rollouts: bool = field(
        False, "keep every step's rollout in rollouts/, for `megarl replay`", source="about 13 bytes a token"
    )
    export_hf: bool = field(True, "write the final actor as a Hugging Face folder")


class GuardConfig(Section):
    """Limits that stop a step or raise an alarm.

    Numbers that are not finite end a step before its weights change. Metrics beyond the limits, and steps
    without a verdict, are recorded as events."""

    skipped_steps: int = field(
        3, "non-finite steps in a row skipped, their batches kept, before the run stops", "steps", ge=0
    )
    unverified_steps: int = field(3, "steps in a row without any verdict that stop the run", "steps", ge=1)
    entropy_low: float | None = field(None, "alarm where policy/entropy is below; null: none", "nats")
    entropy_collapse: float | None = field(
        0.1,
        "alarm where policy/entropy / the highest of the run falls below; null: none",
        source="our choice; DAPO section 3.1, figure 2b, shows a collapse",
        gt=0,
        lt=1,
    )
    length_collapse: float | None = field(
        0.5,
        "alarm where mean response length / the longest of the run is below, by more than noise; null: none",
        gt=0,
        lt=1,
    )
    length_growth: float | None = field(
        2.0,
        "alarm where mean response length / the last steps' is above, by more than noise; null: none",
        gt=1,
    )
    clip_fraction: float | None = field(
        0.3, "alarm where the share of clipped tokens is above; null: none", gt=0, le=1
    )
    parity: float | Literal["auto", "none"] = field(
        "auto",
        "before the first update of each start, the run ends where the engine's and the trainer's log-probs "
        "of the same tokens differ by more on average; auto: 0.001 in fp32, 0.15 in bf16, 0.4 with FP8",
        "nats",
        source="our choice, from what was measured with and without faults (docs/reliability.md)",
    )
    parity_layers: bool = field(
        False,
        "where that ends the run, compare hidden states layer by layer with transformers on the same weights "
        "and name the first layer that differs",
    )


class WatchdogConfig(Section):
    """A thread on each rank that looks for hangs. It writes run_dir/heartbeat/, and reports into
    run_dir/hang-*.txt."""

    limit: float = field(3600.0, "longest time of a phase before the run ends with a report", "seconds", gt=0)
    limits: dict[str, Annotated[float, Field(gt=0)]] = field(
        {}, "of single phases, e.g. {rollout: 7200, weight_transfer: 300}", "seconds"
    )
    silence: float = field(
        180.0,
        "longest time that a rank's heartbeat may stand still; after twice that "
        "another start may take the run's folder over",
        "seconds",
        gt=0,
    )
    period: float = field(5.0, "between heartbeats", "seconds", gt=0)


class LogConfig(Section):
    """What is shown and recorded. metrics.jsonl is always written."""

    terminal: Literal["auto", "live", "plain", "quiet"] = field(
        "auto", "live view; auto: live on a terminal, else plain lines"
    )
    samples: int = field(4, "responses kept in samples.jsonl per step", "responses", ge=0)
    reflection_words: tuple[str, ...] = field(
        ("wait", "however", "rethink", "recheck", "double-check", "let me check", "on second thought"),
        "whole words or phrases, in any case, that make a response one of reflection/*; []: none",
        source="DAPO section 4.4, table 2: `However, wait a moment, let's rethink`; the rest is our choice",
    )
    report: bool = field(True, "write report.html at the end")
    tensorboard: bool = field(False, "also write TensorBoard events (extra `track`)")
    wandb: bool = field(False, "also log to Weights & Biases (extra `track`)")
    profile: int = field(
        0,
        "steps that are traced on every rank into run_dir/profile, after the first of each start; "
        "`megarl train --profile N` sets it",
        "steps",
        ge=0,
    )
    prometheus: int = field(0, "port at which rank 0 serves the newest metrics; 0: none", ge=0, le=65535)
    prometheus_host: str = field("127.0.0.1", "address for that, e.g. 0.0.0.0: every interface")


class SupervisedConfig(Section):
    """Recipe `sft` only: warm start on prompt/response pairs."""

    response_key: str = field(
        "response",
        "column of the response text, else `completion` or the last of `messages`; "
        "the end-of-sequence token is added",
    )
    batch: int = field(64, "pairs per optimizer step", "pairs", ge=1)


# Stages of a run, as its records name them: its steps, those of the recipe that learns from pairs, those of
# value pretraining before them, and what is between two.
TRAIN, SUPERVISED, PRETRAINING, EVALUATION = "train", "sft", "value_pretraining", "eval"


def main_stage(recipe: str) -> str:
    """Return the stage of a run's steps in its records, but for those of value pretraining."""
    return SUPERVISED if recipe == SUPERVISED else TRAIN


class Config(Section):
    """A run."""

    recipe: Literal[
        "sft", "grpo", "dapo", "ppo", "vapo", "tppo", "sao",
        "vc_ppo", "asyppo", "orz", "r1_zero", "dr_grpo", "rloo", "reinforce_pp", "gspo", "cispo",
        "dppo", "sapo", "clip_cov", "kl_cov", "fipo",
        "gdpo", "spo", "sppo",
    ] = field(..., "algorithm; sets the defaults of the switches (see config/recipes.py)")  # fmt: skip
    run_dir: Path = field(..., "folder of this run: config, metrics, samples, checkpoints, report")
    steps: int = field(..., "rollout steps", "rollout steps", ge=1)
    seed: int = field(0, "seed of everything that is random", ge=0, lt=2**63)
    model: ModelConfig = field(..., "see ModelConfig")
    parallel: ParallelConfig = section(ParallelConfig)
    residency: ResidencyConfig = section(ResidencyConfig)
    actor: OptimizerConfig = section(OptimizerConfig)
    critic: CriticConfig = section(CriticConfig)
    data: DataConfig = section(DataConfig)
    rollout: RolloutConfig = section(RolloutConfig)
    cluster: ClusterConfig = section(ClusterConfig)
    reward: RewardConfig = section(RewardConfig)
    algorithm: AlgorithmConfig = section(AlgorithmConfig)
    teacher: TeacherConfig = section(TeacherConfig)
    update: UpdateConfig = section(UpdateConfig)
    value_pretraining: ValuePretrainingConfig = section(ValuePretrainingConfig)
    supervised: SupervisedConfig = section(SupervisedConfig)
    schedule: ScheduleConfig = section(ScheduleConfig)
    evaluation: EvaluationConfig = section(EvaluationConfig)
    checkpoint: CheckpointConfig = section(CheckpointConfig)
    guard: GuardConfig = section(GuardConfig)
    watchdog: WatchdogConfig = section(WatchdogConfig)
    log: LogConfig = section(LogConfig)

    @property
    def main_stage(self) -> str:
        """Return the stage of this run's steps in its records, but for those of value pretraining."""
        return main_stage(self.recipe)

    @property
    def has_engine(self) -> bool:
        """Return whether an engine draws this run's responses; else they are given."""
        return self.main_stage == TRAIN

    @property
    def has_critic(self) -> bool:
        """Return whether this run trains a value model."""
        return self.has_engine and self.algorithm.advantage in ("gae", "prompt_value")

    @property
    def values_prompts(self) -> bool:
        """Return whether that model reads prompts alone."""
        return self.has_engine and self.algorithm.advantage == "prompt_value"

    @property
    def has_reward_model(self) -> bool:
        """Return whether a reward model scores this run's responses."""
        return self.has_engine and self.reward.model.path is not None

    @property
    def has_teacher(self) -> bool:
        """Return whether a teacher judges the tokens of this run's responses."""
        return self.has_engine and bool(self.teacher.folders)

    def evaluates(self, step: int, every: int | None = None) -> bool:
        """Return whether a set of data.eval with this `every` is evaluated after a step. Before the first and
        after the last all are."""
        interval = every or self.evaluation.every
        return step in (0, self.steps) or (interval > 0 and step % interval == 0)

    def has_group(self, group: TensorGroup) -> bool:
        """Return whether this run has such tensors on its devices."""
        present = {"actor": True, "critic": self.has_critic, "engine": self.has_engine}
        own = self.algorithm.has_reference and self.actor.lora.rank is None
        present |= {"reference": own, "reward": self.has_reward_model}
        present |= {"teacher": self.has_teacher}
        return present[group.partition(".")[0]]

    def without_adapters(self) -> Config:
        """Return the configuration of the models alone, as they were before LoRA adapters."""
        models = {"actor": self.actor, "critic": self.critic}
        return self.model_copy(
            update={name: model.model_copy(update={"lora": LoraConfig()}) for name, model in models.items()}
        )

    @property
    def responses(self) -> int:
        """Return the responses per step that are trained on."""
        if not self.has_engine:
            return self.supervised.batch
        return self.rollout.prompts * self.rollout.group_size

    @property
    def mini_batch(self) -> int:
        """Return the responses of one optimizer step of the actor."""
        return self.update.mini_batch if self.has_engine else self.supervised.batch
