"""Section `rollout`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

from megarl.config.engines import ENGINES, EngineCapabilities, EngineName
from megarl.config.schema.section import Section, field, section


class DynamicSamplingConfig(Section):
    """Replace groups whose responses are all right or all wrong (DAPO eq. 11)."""

    enabled: bool = field(False, "keep groups with 0 < correct < group_size", "", "DAPO eq. 11; not in VAPO")
    by: Literal["accuracy", "score"] = field(
        "accuracy",
        "what must differ within a kept group: accuracy, or the whole reward (standard deviation > 1e-6)",
        source="DAPO eq. 11: accuracy",
    )
    max_batches: int = field(10, "generation batches per step, then `at_limit` applies", "batches", ge=1)
    at_limit: Literal["continue", "stop"] = field(
        "continue", "at max_batches: fill up with rejected groups, or stop the run with a message"
    )
    oversample: float = field(
        1.0, "first generation batch / groups needed; the next step uses the surplus", ge=1
    )


Sandbox = Literal["strict", "network", "off"]


class TurnsConfig(Section):
    """Limits of an episode with several turns."""

    max: int = field(16, "turns of the policy; an episode that wants more is truncated", "turns", ge=1)
    max_tokens: int | None = field(
        None,
        "tokens after the prompt, with observations; null: rollout.max_response_tokens, which always limits "
        "the policy's own tokens",
        "tokens",
        ge=1,
    )
    seconds: float = field(30.0, "longest call of a tool, or step of an environment", "seconds", gt=0)
    hold: float = field(
        5.0,
        "longest that an episode or agent blocks the event loop before its line is reported",
        "seconds",
        gt=0,
    )
    observation: int = field(
        8192, "longest observation that the policy gets from one result; the rest is cut", "bytes", ge=16
    )
    calls: int = field(2, "processes for tools and environments of one engine", "processes", ge=1)
    memory: int = field(2048, "data memory of one of these processes", "MiB", ge=128)
    sandbox: Sandbox = field(
        "strict",
        "permissions of these processes: strict (read most files, write in their own temporary folder, "
        "start programs), network (strict plus network access), off (all of the user's); docs/episodes.md",
    )


class WeightsConfig(Section):
    """How new weights reach the engines."""

    backend: Literal["colocated", "http", "broadcast", "disk", "delta"] | None = field(
        None, "way to move weights (docs/weights.md); null: the engine's own"
    )
    folder: Path | None = field(
        None, "of backend disk, on a file system that the servers share; null: run_dir/weights"
    )


class RolloutConfig(Section):
    engine: EngineName = field(
        "transformers",
        "rollout engine; sglang_url: SGLang servers that megarl does not start (docs/sglang.md)",
    )
    urls: tuple[str, ...] = field((), "SGLang servers of engine sglang_url, `http://host:port` each")
    router: str | None = field(
        None,
        "sglang's router in front of them, `http://host:port`; null: requests go to each server's URL",
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
    stop: tuple[str, ...] = field((), "texts that end a response, in addition to the end-of-sequence token")
    episode: str | None = field(
        None,
        "`module:function`, an `async def f(prompt, policy)` run for each response (docs/episodes.md); "
        "null: a single turn, or the episode that tools, environment or agent define",
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
        "responses in flight per engine (sglang_url: per server) if there are several, without those that "
        "wait for a tool; each further response goes to the first engine with room; null: max_batch; "
        "0: all at once, divided equally",
        "responses",
        ge=0,
    )
    dynamic_sampling: DynamicSamplingConfig = section(DynamicSamplingConfig)
    engine_tp: int = field(
        1,
        "tensor-parallel size of one engine; the number of engines is devices / this. "
        "sglang_url: ranks that share a client of its servers",
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
        False, "continue responses aborted at a step's end in the next one; false: sample their prompts again"
    )
    window: int | None = field(
        None,
        "tokens of a response that one step samples and trains on; an unfinished response continues in the "
        "next step, before new prompts fill the batch; null: whole responses",
        "tokens",
        "T-PPO, arXiv 2506.15050: 8192",
        ge=1,
    )
    routing_replay: bool = field(
        False,
        "record the experts that the engine chose for each token, and replay them in the actor's routers",
        source="R3, arXiv 2510.11370",
    )
    sampling_replay: bool = field(
        False,
        "record the ids that top_k and top_p leave for each token, and renormalise over them: the log-probs "
        "and gradients of the actor, and the log-probs of engine, reference and teacher",
        source="SGLang's return_sampling_mask, slime's top-p replay",
    )
    routing_compare: bool = field(
        False, "one more log-prob pass a step, without replay, to compare the engine's log-probs with"
    )
    engine_options: dict[str, bool | int | float | str | tuple[str, ...]] = field(
        {}, "further arguments of sglang.Engine, e.g. {attention_backend: triton}"
    )
    weights: WeightsConfig = section(WeightsConfig)
    transfer_bucket: int = field(256, "staging memory of a weight transfer", "MiB", ge=1)
    fingerprint: bool = field(
        False, "compare the engine's and the actor's weights by hashes after each transfer"
    )

    @property
    def is_multi_turn(self) -> bool:
        """Return whether episodes may have several turns."""
        return bool(self.episode or self.tools or self.environment or self.agent)

    @property
    def max_extent(self) -> int:
        """Return the maximum tokens after a prompt."""
        return (self.turns.max_tokens if self.is_multi_turn else None) or self.max_response_tokens

    @property
    def windows(self) -> int:
        """Return the maximum number of steps that sample one response."""
        return math.ceil(self.max_response_tokens / (self.window or self.max_response_tokens))

    @property
    def capabilities(self) -> EngineCapabilities:
        return ENGINES[self.engine].capabilities

    @property
    def weight_backend(self) -> str:
        """Return the row of `BACKENDS` in sync/backends."""
        backend = self.weights.backend
        return self.capabilities.weight_backend if backend in (None, "colocated") else backend
