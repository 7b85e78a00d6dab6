"""The typed configuration: every knob with its unit, its default and where that default comes from.

Imports without torch. `knob(default, doc, unit, source)` keeps the three facts beside the field, from where
`megarl config docs` and the documentation take them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

OURS = "our choice"


def knob(default: Any, doc: str, unit: str = "", source: str = OURS, **bounds: Any) -> Any:
    """A documented field. `source` cites a paper's section or equation, or says that the default is our choice."""
    return Field(default, description=doc, json_schema_extra={"unit": unit, "source": source}, **bounds)


class Section(BaseModel):
    """Base of every section: unknown keys are refused, values are checked, nothing changes after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, protected_namespaces=(), allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _plausible(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuses what pydantic would let pass (true as the number 1, a NUL in a path) and replaces a leading ~ of paths."""
        annotation = cls.model_fields[str(info.field_name)].annotation
        kinds = (annotation, *get_args(annotation))
        parts = value if isinstance(value, list) else [value]
        if any(isinstance(part, bool) for part in parts) and bool not in kinds:
            raise ValueError("must not be true or false")
        if any(isinstance(part, str) and "\0" in part for part in parts):
            raise ValueError("must not hold a NUL character")
        if Path not in kinds:
            return value
        paths = [_home(part) for part in parts]
        return paths if isinstance(value, list) else paths[0]


def _home(value: Any) -> Any:
    """A shell leaves the ~ of `model.path=~/x` as it is."""
    return Path(value).expanduser() if isinstance(value, str) and value.startswith("~/") else value


class Fp8Config(Section):
    """FP8 matrix products in the layers of actor, critic and reference. Weights stay in model.dtype, and are what the engine gets; the
    embedding, the heads, norms and attention are not touched."""

    format: Literal["none", "hybrid", "e4m3"] = knob(
        "none", "none: model.dtype; hybrid: e4m3, and e5m2 for gradients of activations; e4m3: for everything"
    )
    recipe: Literal["tensorwise", "delayed", "blockwise", "mxfp8"] = knob(
        "tensorwise",
        "scale: of the tensor as it is, of what it was (delayed), of 1 x 128 and 128 x 128 blocks, or of 32 values (mxfp8, Blackwell)",
    )
    first_last_layers_bf16: bool = knob(False, "the first and the last layer in model.dtype; not with recipe delayed")


class ModelConfig(Section):
    """The actor's model."""

    path: Path = knob(
        ..., "Hugging Face folder (config.json, *.safetensors, tokenizer) that the actor starts from, or what `megarl convert` made of one"
    )
    dtype: Literal["bf16", "fp32"] = knob("bf16", "dtype of weights and activations; optimizer states and gradients are fp32")
    layers: Literal["auto", "portable", "te"] = knob(
        "auto", "layer implementation: Transformer Engine, or plain torch; auto takes te where CUDA and Transformer Engine are"
    )
    fp8: Fp8Config = knob(Fp8Config(), "see Fp8Config")
    recompute: Literal["none", "selective", "full"] = knob("none", "activation recomputation of Megatron")
    max_positions: int | None = knob(None, "longest prompt + response; null: what the model's config says", "tokens", ge=2)


class ParallelConfig(Section):
    """How the devices are divided. data-parallel size = number of devices / (tp * pp * cp)."""

    tp: int = knob(1, "tensor-parallel size", "devices", ge=1)
    pp: int = knob(1, "pipeline-parallel size", "devices", ge=1)
    dp: int | None = knob(None, "data-parallel size; null: whatever the launcher gives (1 when megarl launches itself)", "devices", ge=1)
    cp: int = knob(1, "context-parallel size (only 1 is implemented)", "devices", ge=1, le=1)
    ep: int = knob(1, "ranks of a pipeline stage (tp x dp) that share out the experts of a mixture", "devices", ge=1)
    sequence_parallel: bool | None = knob(None, "Megatron's sequence parallelism; null: on whenever tp > 1")
    overlap_grad_reduce: bool | None = knob(
        None, "gradients are reduced over data-parallel ranks while the backward pass still runs; null: where these are more than 4"
    )
    overlap_param_gather: bool | None = knob(
        None, "between two updates of a step, weights are gathered beside the next forward pass; null: where dp is above 4"
    )
    overlap_bucket: int | None = knob(
        None, "weights that travel together in an overlap; null: 40 million, or a million per data-parallel rank if more", "weights", ge=1
    )
    device: Literal["auto", "cuda", "cpu"] = knob("auto", "auto takes cuda where there is one")
    threads: int = knob(1, "torch threads per process on a CPU", "threads", ge=1)
    timeout: float = knob(600.0, "longest wait in one collective before the run stops", "seconds", gt=0)
    restarts: int = knob(
        0, "times that the ranks are started anew after one was killed or hung, where megarl launches them itself", "restarts", ge=0
    )


TensorGroup = Literal[
    "actor.weights",
    "actor.gradients",
    "actor.optimizer",
    "critic.weights",
    "critic.gradients",
    "critic.optimizer",
    "reference.weights",
    "engine.weights",
    "engine.kv_cache",
]


class ResidencyConfig(Section):
    """What is on the device while what runs (see design.md). Each phase says what it needs there."""

    offload: bool | None = knob(
        None, "before a phase, what it does not need leaves the device for pinned host memory; null: on CUDA, and not on a CPU"
    )
    keep: tuple[TensorGroup, ...] = knob(
        (), "tensor groups that never leave, e.g. [actor.optimizer]: quicker steps, less room for engine.kv_cache"
    )


class OptimizerConfig(Section):
    """AdamW in Megatron's distributed optimizer, and its learning-rate schedule. One scheduler step is one rollout step."""

    lr: float = knob(1e-6, "peak learning rate", source="DAPO section 4.1, VAPO section 5.1: actor 1e-6", gt=0)
    schedule: Literal["constant", "linear", "cosine"] = knob("constant", "after the warm-up", source="VAPO section 5.1: warm-up-constant")
    warmup_steps: int = knob(0, "linear warm-up", "rollout steps", "DAPO section 4.1: 20", ge=0)
    min_lr_ratio: float = knob(0.0, "learning rate at the last step / peak, for linear and cosine", ge=0, le=1)
    betas: tuple[float, float] = knob((0.9, 0.999), "AdamW betas")
    eps: float = knob(1e-8, "AdamW epsilon", gt=0)
    weight_decay: float = knob(0.0, "decoupled weight decay", ge=0)
    clip_grad: float = knob(1.0, "global gradient norm is clipped to this; 0 turns clipping off", ge=0)


class CriticConfig(OptimizerConfig):
    """The value model. It exists where `algorithm.advantage` is `gae`."""

    lr: float = knob(2e-6, "peak learning rate", source="VAPO section 5.1: critic 2e-6", gt=0)
    path: Path | None = knob(
        None,
        "Hugging Face folder of the critic's body, or of a one-label reward model, or of a critic that megarl saved; null: the actor's",
        source="VAPO section 4.1 starts it from a reward model",
    )
    head_std: float = knob(
        0.0, "standard deviation of the value head's first weights, where the folder has no head (score.weight); 0: they are zeros", ge=0
    )
    epochs: int = knob(1, "passes over each rollout", "epochs", ge=1)
    mini_batch: int | None = knob(
        None, "responses per optimizer step of the critic; null: update.mini_batch; one must divide the other", "responses", ge=1
    )


class DataConfig(Section):
    """Prompts and reference answers."""

    train: tuple[Path, ...] = knob((), "parquet or jsonl files; rows in the DAPO-Math schema or with question/answer")
    eval: tuple[Path, ...] = knob((), "held-out files, same formats")
    prompt_key: str = knob("prompt", "column of the prompt: a text or a list of {role, content}; `question` is tried as well")
    answer_key: str = knob("reward_model.ground_truth", "column of the reference answer, dots descend; `answer` is tried as well")
    template: Literal["chat", "raw"] = knob("chat", "chat: the tokenizer's chat template; raw: contents joined, as they are")
    prompt_format: str = knob("{prompt}", "text put around a plain-text prompt; `{prompt}` is replaced")
    max_prompt_tokens: int = knob(2048, "longer prompts are left out and counted", "tokens", ge=1)
    shuffle: bool = knob(True, "new order each epoch, from the run's seed")


class DynamicSamplingConfig(Section):
    """Groups whose responses are all right or all wrong carry no group-relative signal and are replaced (DAPO eq. 11)."""

    enabled: bool = knob(False, "keep only groups with 0 < correct < group_size", source="DAPO eq. 11; VAPO does not list it")
    max_batches: int = knob(10, "generation batches per step before the step goes on with what it has or stops", "batches", ge=1)
    at_limit: Literal["continue", "stop"] = knob("continue", "at max_batches: fill up with rejected groups, or stop the run with a message")
    oversample: float = knob(
        1.0, "first generation batch of a step / groups that it is short of; what is left over is used next step", ge=1
    )


class RolloutConfig(Section):
    """Sampling of responses."""

    engine: Literal["transformers", "sglang"] = knob("transformers", "rollout engine")
    prompts: int = knob(512, "effective prompts per step", "prompts", "DAPO section 4.1, VAPO section 5.1", ge=1)
    group_size: int = knob(16, "responses per prompt", "responses", "DAPO section 4.1, VAPO section 5.1: group sampling 16", ge=1)
    max_response_tokens: int = knob(20480, "L_max: longer responses are cut", "tokens", "DAPO section 4.1: 16,384 + 4,096", ge=1)
    temperature: float = knob(1.0, "sampling temperature", source="DAPO section 4.1", gt=0)
    top_p: float = knob(1.0, "nucleus", gt=0, le=1)
    top_k: int = knob(0, "0: off", "tokens", ge=0)
    stop: tuple[str, ...] = knob((), "texts that end a response, besides the end-of-sequence token")
    max_batch: int = knob(256, "sequences that one engine decodes at once", "sequences", ge=1)
    dynamic_sampling: DynamicSamplingConfig = knob(DynamicSamplingConfig(), "see DynamicSamplingConfig")
    engine_tp: int = knob(1, "tensor-parallel size of one engine; the number of engines is the number of devices / this", "devices", ge=1)
    weights_dtype: Literal["model", "fp8_block"] = knob(
        "model",
        "the engine's weights: model.dtype, or float8_e4m3fn in blocks of 128 x 128 with float32 scales, quantised before they are sent",
        source="the format of published block-FP8 checkpoints, which SGLang reads",
    )
    engine_memory: float = knob(0.8, "share of a GPU's memory for the engine's weights and KV cache, while it is awake", gt=0, lt=1)
    engine_timeout: float = knob(300.0, "longest time without a sign of progress before an engine counts as hanging", "seconds", gt=0)
    engine_start_timeout: float = knob(900.0, "longest start of an engine", "seconds", gt=0)
    engine_failures: int = knob(
        3, "failures of engines, since the last transfer of weights, after which they are no longer started anew", "failures", ge=0
    )
    continue_partial: bool = knob(
        False,
        "responses aborted once a step has its groups go on in the next, under new weights; false: their prompts are drawn anew",
    )
    engine_options: dict[str, bool | int | float | str | tuple[str, ...]] = knob(
        {}, "further arguments of sglang.Engine, e.g. {attention_backend: triton}"
    )
    transfer_bucket: int = knob(256, "staging memory of a weight transfer", "MiB", ge=1)
    fingerprint: bool = knob(False, "compare the engine's weights with the actor's by 64-bit hashes after each transfer")


class ClusterConfig(Section):
    """The machines, for plans and estimates alone. Speeds are one GPU's, in one direction; the defaults are peak figures of data sheets."""

    gpu: str = knob("H100", "H100, H200, H800 or A100, whose figures megarl/plan/sizes.py has; or another name, with all figures below")
    gpu_memory: float | None = knob(None, "of one GPU, as nvidia-smi shows it; null: the table's", "GiB", gt=0)
    gpu_tflops: float | None = knob(None, "dense bf16; null: the table's", "TFLOP/s", gt=0)
    gpu_memory_speed: float | None = knob(None, "of its own memory; null: the table's", "GB/s", gt=0)
    host_speed: float | None = knob(None, "between host and GPU; null: the table's", "GB/s", gt=0)
    host_memory: float = knob(2048.0, "of a node", "GiB", "DGX H100 data sheet: 2 TB", gt=0)
    gpus_per_node: int = knob(8, "rank r is on node r // gpus_per_node", "devices", "DGX H100 data sheet", ge=1)
    copy_speed: float = knob(1675.0, "copies within a GPU", "GB/s", "H100 SXM data sheet: 3.35 TB/s of memory, read and written", gt=0)
    node_speed: float = knob(450.0, "between GPUs of a node", "GB/s", "H100 SXM data sheet: NVLink, 900 GB/s in both directions", gt=0)
    network_speed: float = knob(50.0, "between nodes", "GB/s", "DGX H100 data sheet: one 400 Gb/s adapter per GPU", gt=0)


class OverlongConfig(Section):
    """What happens to responses that reach the length limit (DAPO section 3.4)."""

    filter: bool = knob(False, "truncated responses are masked out of the loss", source="DAPO section 3.4, overlong filtering")
    soft_punishment: bool = knob(False, "a length penalty is added to the reward", source="DAPO eq. 13")
    buffer: int = knob(4096, "L_cache: width of the punished interval below max_response_tokens", "tokens", "DAPO section 4.1", ge=1)


class RewardConfig(Section):
    """The rule that judges final answers."""

    verifier: str = knob(
        "dapo",
        "dapo (last `Answer:` line, normalised), math (symbolic), or a dotted path `module:function` of your own",
        source="DAPO eq. 7",
    )
    correct: float = knob(1.0, "reward of a right answer", source="DAPO eq. 7")
    incorrect: float = knob(-1.0, "reward of a wrong answer", source="DAPO eq. 7; VAPO speaks of 0 and 1")
    timeout: float = knob(10.0, "longest time for one answer; then it counts as wrong and is recorded", "seconds", gt=0)
    workers: int = knob(1, "verifier processes per rank", "processes", ge=1)
    memory: int = knob(
        2048, "data memory of one verifier process; an answer that takes more counts as wrong and is recorded", "MiB", ge=128
    )
    overlong: OverlongConfig = knob(OverlongConfig(), "see OverlongConfig")


class MismatchConfig(Section):
    """What is done where the engine's probabilities differ from the trainer's: factors of the policy loss' token weights (and the
    KL term's), from the ratio trainer / engine. The denominators stay as they are. `mismatch/*` is recorded in any case."""

    weight: Literal["none", "token", "sequence"] = knob(
        "none",
        "truncated importance sampling: each token by min(ratio, cap), of its own ratio or of the product over its response",
        source="truncated importance sampling (Ionides 2008); none in DAPO and VAPO",
    )
    cap: float = knob(2.0, "largest importance weight", gt=0)
    mask: Literal["none", "token", "sequence"] = knob(
        "none",
        "leave out tokens whose ratio, or responses the geometric mean of whose ratios, is outside [mask_low, mask_high]",
        source="none in DAPO and VAPO",
    )
    mask_low: float = knob(0.5, "smallest ratio that is kept", ge=0)
    mask_high: float = knob(2.0, "largest ratio that is kept; a geometric mean wants something like 1.01", gt=0)

    @property
    def enabled(self) -> bool:
        """Whether the policy loss has such factors."""
        return self.weight != "none" or self.mask != "none"


class AlgorithmConfig(Section):
    """Every technique of both papers' ablation tables is one key here, in `rollout`, `reward.overlong` or `value_pretraining`."""

    advantage: Literal["group", "gae"] = knob(
        "group", "group: normalised within the group, no critic; gae: needs the critic", source="DAPO eq. 9; VAPO eq. 3"
    )
    gamma: float = knob(1.0, "discount", source="VAPO section 2", gt=0, le=1)
    lambda_critic: float = knob(
        1.0, "lambda of the value targets; 1.0 gives Monte-Carlo returns", source="VAPO section 4.1, decoupled GAE", ge=0, le=1
    )
    lambda_policy: float | Literal["length_adaptive"] = knob(
        0.95,
        "lambda of the policy's advantages, or length_adaptive: 1 - 1 / (alpha * length), clamped to [0, 1]",
        source="VC-PPO 0.95; VAPO eq. 5",
    )
    alpha: float = knob(0.05, "alpha of the length-adaptive lambda", source="VAPO eq. 5", gt=0)
    whiten: bool = knob(False, "whiten GAE advantages over the batch")
    clip_low: float = knob(0.2, "epsilon_low", source="DAPO eq. 8, VAPO eq. 8", gt=0, lt=1)
    clip_high: float = knob(0.2, "epsilon_high; 0.28 is clip-higher", source="DAPO eq. 8, VAPO eq. 8: 0.28", gt=0)
    aggregation: Literal["token", "sample"] = knob(
        "token", "mean over all tokens of the mini-batch, or over responses of their means", source="VAPO eq. 7 and 6"
    )
    nll_weight: float = knob(0.0, "mu, weight of the positive-example LM loss", source="VAPO eq. 10: 0.1", ge=0)
    kl_weight: float = knob(0.0, "beta, weight of the KL to the initial policy (k3 estimate); DAPO and VAPO use none", source="GRPO", ge=0)
    value_clip: float = knob(0.0, "values may move this far from the old ones before their loss is clipped; 0: off", ge=0)
    mismatch: MismatchConfig = knob(MismatchConfig(), "see MismatchConfig")


class UpdateConfig(Section):
    """How a rollout becomes optimizer steps."""

    mini_batch: int = knob(512, "responses per optimizer step", "responses", "DAPO section 4.1: 16 updates a rollout", ge=1)
    epochs: int = knob(1, "actor passes over each rollout", "epochs", ge=1)
    tokens_per_micro_batch: int = knob(
        32768, "packed tokens per micro-batch; one longer sample has a micro-batch of its own", "tokens", ge=1
    )
    logprob_chunk: int = knob(1024, "words of a rank's vocabulary whose logits exist at once in the log-prob head", "words", ge=1)


class ValuePretrainingConfig(Section):
    """The critic is fitted to Monte-Carlo returns of the frozen initial policy before anything else (VAPO section 4.1)."""

    steps: int = knob(0, "rollouts of the frozen policy; 0: no value pretraining", "rollout steps", "VAPO section 5.1: 50", ge=0)
    epochs: int = knob(1, "passes over each of these rollouts", "epochs", ge=1)
    lr: float | None = knob(None, "constant learning rate meanwhile; null: critic.lr", gt=0)
    explained_variance: float = knob(1.0, "end early once a fresh rollout's explained variance is at least this; 1: never", le=1)
    rollouts: Path | None = knob(
        None,
        "folder of these rollouts, which are kept, and reused where it holds them already; null: value_pretraining/ in run_dir",
        source="VAPO section 4.1, step 3, keeps the critic; keeping its data costs about 13 bytes a token",
    )


class EvaluationConfig(Section):
    """avg@k, pass@k and majority@k on `data.eval`."""

    every: int = knob(0, "rollout steps between evaluations; 0: only at the start and the end", "rollout steps", ge=0)
    samples: int = knob(32, "k: responses per problem", "responses", "DAPO section 4.1: avg@32", ge=1)
    temperature: float = knob(1.0, "sampling temperature", source="DAPO section 4.1", gt=0)
    top_p: float = knob(0.7, "nucleus", source="DAPO section 4.1", gt=0, le=1)
    max_problems: int = knob(0, "first rows of data.eval that are used; 0: all", "problems", ge=0)


class CheckpointConfig(Section):
    """What is kept on disk."""

    every: int = knob(0, "rollout steps between checkpoints, and one at the end; 0: none, the run cannot continue", "rollout steps", ge=0)
    keep: int = knob(2, "newest checkpoints kept; 0: all", "checkpoints", ge=0)
    keep_every: int = knob(0, "checkpoints of every so many steps are kept besides; 0: none", "rollout steps", ge=0)
    background: bool = knob(True, "write while the next step runs; false: the run waits until a checkpoint is on disk")
    timeout: float = knob(300.0, "longest wait, at most 0.8 of parallel.timeout, for one checkpoint to be written", "seconds", gt=0)
    time_limit: float | None = knob(
        None, "the run saves and leaves in time to be gone after so long; null: Slurm's SLURM_JOB_END_TIME, if it is set", "seconds", gt=0
    )
    time_margin: float = knob(120.0, "kept free before the time limit, besides the longest step and save so far", "seconds", ge=0)
    grace: float = knob(
        300.0, "longest time from SIGTERM or SIGUSR1 until the run has saved and left; then its ranks are ended", "seconds", gt=0
    )
    rollouts: bool = knob(False, "keep every step's rollout in rollouts/, for `megarl replay`", source="about 13 bytes a token")
    export_hf: bool = knob(True, "write the final actor as a Hugging Face folder")


class GuardConfig(Section):
    """Numbers that are not finite end a step before its weights change; others that run away are recorded as events, as
    are steps without a verdict."""

    skipped_steps: int = knob(
        3,
        "steps in a row that are skipped as a number was not finite, before the run stops; their batches are kept",
        "steps",
        ge=0,
    )
    unverified_steps: int = knob(3, "steps in a row in which the verifier failed on every answer, at which the run stops", "steps", ge=1)
    entropy_low: float | None = knob(None, "policy/entropy below this is an alarm; null: none", "nats")
    length_growth: float | None = knob(2.0, "mean response length over that of the step before, above which is an alarm; null: none", gt=1)
    clip_fraction: float | None = knob(0.3, "share of tokens clipped at either side, above which is an alarm; null: none", gt=0, le=1)


# Everything that a run does, as its heartbeat calls it: the phases of megarl/config/phases.py, and what the trainer does beside them.
WatchedPhase = Literal[
    "start",
    "choose a checkpoint",
    "resume",
    "rollout",
    "group_advantages",
    "divide",
    "old_logprobs",
    "reference_logprobs",
    "values",
    "gae_advantages",
    "monte_carlo_returns",
    "critic_update",
    "actor_update",
    "weight_transfer",
    "read_pairs",
    "supervised_update",
    "residency",
    "evaluation",
    "checkpoint",
    "export actor",
    "export critic",
]


class WatchdogConfig(Section):
    """A thread on each rank that looks for hangs. It writes run_dir/heartbeat/, and reports into run_dir/hang-*.txt."""

    limit: float = knob(3600.0, "longest time that a phase may take before the run ends with a report", "seconds", gt=0)
    limits: dict[WatchedPhase, Annotated[float, Field(gt=0)]] = knob(
        {}, "of single phases, e.g. {rollout: 7200, weight_transfer: 300}", "seconds"
    )
    silence: float = knob(180.0, "longest time that a rank's heartbeat may stand still", "seconds", gt=0)
    period: float = knob(5.0, "between heartbeats", "seconds", gt=0)


class LogConfig(Section):
    """What is shown and recorded. metrics.jsonl is always written."""

    terminal: Literal["auto", "live", "plain", "quiet"] = knob("auto", "live view; auto: live on a terminal, else plain lines")
    samples: int = knob(4, "responses kept in samples.jsonl per step", "responses", ge=0)
    report: bool = knob(True, "write report.html at the end")
    tensorboard: bool = knob(False, "also write TensorBoard events (extra `track`)")
    wandb: bool = knob(False, "also log to Weights & Biases (extra `track`)")


class SupervisedConfig(Section):
    """Recipe `sft` only: warm start on prompt/response pairs."""

    response_key: str = knob("response", "column of the response text; the end-of-sequence token is added")
    batch: int = knob(64, "pairs per optimizer step", "pairs", ge=1)


class Config(Section):
    """A run."""

    recipe: Literal["sft", "grpo", "dapo", "ppo", "vapo"] = knob(
        ..., "algorithm; sets the defaults of the switches (see config/recipes.py)"
    )
    run_dir: Path = knob(..., "folder of this run: config, metrics, samples, checkpoints, report")
    steps: int = knob(..., "rollout steps", "rollout steps", ge=1)
    seed: int = knob(0, "seed of everything that is random", ge=0, lt=2**63)
    model: ModelConfig = knob(..., "see ModelConfig")
    parallel: ParallelConfig = knob(ParallelConfig(), "see ParallelConfig")
    residency: ResidencyConfig = knob(ResidencyConfig(), "see ResidencyConfig")
    actor: OptimizerConfig = knob(OptimizerConfig(), "see OptimizerConfig")
    critic: CriticConfig = knob(CriticConfig(), "see CriticConfig")
    data: DataConfig = knob(DataConfig(), "see DataConfig")
    rollout: RolloutConfig = knob(RolloutConfig(), "see RolloutConfig")
    cluster: ClusterConfig = knob(ClusterConfig(), "see ClusterConfig")
    reward: RewardConfig = knob(RewardConfig(), "see RewardConfig")
    algorithm: AlgorithmConfig = knob(AlgorithmConfig(), "see AlgorithmConfig")
    update: UpdateConfig = knob(UpdateConfig(), "see UpdateConfig")
    value_pretraining: ValuePretrainingConfig = knob(ValuePretrainingConfig(), "see ValuePretrainingConfig")
    supervised: SupervisedConfig = knob(SupervisedConfig(), "see SupervisedConfig")
    evaluation: EvaluationConfig = knob(EvaluationConfig(), "see EvaluationConfig")
    checkpoint: CheckpointConfig = knob(CheckpointConfig(), "see CheckpointConfig")
    guard: GuardConfig = knob(GuardConfig(), "see GuardConfig")
    watchdog: WatchdogConfig = knob(WatchdogConfig(), "see WatchdogConfig")
    log: LogConfig = knob(LogConfig(), "see LogConfig")

    @property
    def has_critic(self) -> bool:
        """Whether this run trains a value model."""
        return self.recipe != "sft" and self.algorithm.advantage == "gae"

    def has_group(self, group: TensorGroup) -> bool:
        """Whether this run has such a thing on its devices."""
        present = {
            "actor": True,
            "critic": self.has_critic,
            "reference": bool(self.algorithm.kl_weight),
            "engine": self.recipe != "sft",
        }
        return present[group.partition(".")[0]]

    @property
    def responses(self) -> int:
        """Responses per step that are trained on."""
        return self.rollout.prompts * self.rollout.group_size
