"""The SGLang rollout engine on a job's ranks. The leader has the EngineProcess."""

from __future__ import annotations

import base64
import json
import math
import os
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import torch
from msgspec import structs
from packaging.version import InvalidVersion, Version

from megarl.config.drafts import ALGORITHM, check_draft, count_steps, has_draft
from megarl.config.errors import ConfigError, EngineError, EngineFailure
from megarl.config.schema import Config
from megarl.data.response_text import end_tokens
from megarl.data.sample import TokenData, join_sampling_sets
from megarl.parallel.launch import environment_of_children
from megarl.parallel.machine import allocator_problem, cuda_runtime_folders, list_unmet_requirements
from megarl.parallel.runtime import Runtime
from megarl.rollout.engines.base import GenerationRequest, RolloutEngine, check_positions
from megarl.rollout.engines.sglang_http import OLDEST, PAUSE_MODES
from megarl.rollout.engines.sglang_process import EngineProcess
from megarl.rollout.sampling import SamplingParams, routing_array
from megarl.weights.families import EXPERT_KEYS, Sizes, get_family, read_config
from megarl.weights.shards import full_attention_interval

LOADER = "megarl.rollout.engines.sglang_inside.load_shards"
TAGS = ("weights", "kv_cache")
GRAPHS = "cuda_graph"
LOGPROB_ABOVE_ZERO = 1e-3  # rounding of a probability of 1
FP8_CONFIG = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
MOE_RUNNER = "triton"  # has the expert layout of `weights/shards.py`


class SGLangRequests(RolloutEngine):
    """Requests to SGLang. eos_ids: beyond those of the model's folder"""

    def __init__(self, config: Config, hf_config: Mapping[str, Any], eos_ids: Sequence[int]) -> None:
        self.config, self.hf_config, self.eos_ids = config, hf_config, tuple(eos_ids)
        self._outstanding: dict[int, tuple[GenerationRequest, SamplingParams]] = {}
        self._failure: EngineFailure | None = None
        self._has_weights = self._aborting = False
        self.pause_mode = PAUSE_MODES[config.schedule.in_flight]

    def submit(self, requests: Mapping[int, GenerationRequest], params: SamplingParams) -> None:
        """See RolloutEngine. Raises EngineError without weights, or if a request does not fit."""
        if not requests:
            return
        if not self._has_weights:
            raise EngineError(
                "rollout engine: submit was called while it has no weights: "
                "an update must follow start and wake"
            )
        positions = self.hf_config.get("max_position_embeddings", math.inf)
        check_positions(requests.values(), params, positions)
        new_requests = {number: (request, params) for number, request in requests.items()}
        self._outstanding |= new_requests
        self._send(new_requests)

    @abstractmethod
    def _send(self, requests: Mapping[int, tuple[GenerationRequest, SamplingParams]]) -> None:
        """Send requests to SGLang."""

    @property
    def running(self) -> int:
        return len(self._outstanding)

    def refuse_after_failure(self) -> None:
        """Raise a failure that no restart has followed, so that an update restarts the engine."""
        if self._failure is not None:
            raise self._failure

    def _token_data(
        self,
        request: GenerationRequest,
        answer: Any,
        params: SamplingParams,
        *,
        names: str = "",
        oldest: int = 0,
    ) -> TokenData:
        """Return the request's prefix and SGLang's answer, or raise EngineFailure.

        Args:
            answer: (tokens, log-probs, finish reason, versions, experts in base64, sampling sets, drafts), or
                an error. versions: a pair for each run of tokens that one version sampled: its name and the
                end; the last version's name if SGLang reports no more. drafts: accepted tokens of a draft
                model, and passes that verified them
            names: what versions' names have before the number
            oldest: version of all servers when the request was sent
        """
        if isinstance(answer, str):
            raise EngineFailure(f"SGLang: generate: {answer}")
        tokens, logprobs, finish, named_versions, routing, sets, (accepted, verifications) = answer
        prefix = request.prefix or TokenData()
        count, vocab = len(tokens), self.hf_config["vocab_size"]
        is_known_finish = finish in ("stop", "length", "abort")
        experts, (new_versions, problem) = None, self._read_versions(named_versions, count, names, oldest)
        if problem:
            raise EngineFailure(f"SGLang answered {problem}")
        if not is_known_finish or len(logprobs) != count or (not tokens and finish != "abort"):
            problem = f"{count} tokens with {len(logprobs)} log-probabilities, ended by {finish}"
        elif not all(0 <= token < vocab for token in tokens):
            problem = f"a token outside of the vocabulary of {vocab}"
        elif not all(-math.inf < logprob <= LOGPROB_ABOVE_ZERO for logprob in logprobs):
            problem = "a log-probability that is not a finite number below 0"
        elif params.routing and finish != "abort":
            # Of the whole sequence: these weights have prefilled the prefix again.
            length = len(request.prompt_tokens) + prefix.num_tokens + count
            experts, problem = _decode_routing(routing or "", length, self.hf_config)
        sampling_sets = None
        if params.sampling_sets and not problem:
            new_sets, problem = _pad_sets(sets or [], tokens, vocab)
            sampling_sets = join_sampling_sets(((prefix.num_tokens, prefix.sampling_sets), (count, new_sets)))
        if problem:
            raise EngineFailure(f"SGLang answered {problem}")
        prefix_versions: Any = () if prefix.policy_versions is None else prefix.policy_versions
        versions = np.array([*prefix_versions, *new_versions])
        columns = np.array([*prefix.tokens, *tokens]), np.array([*prefix.logprobs, *logprobs])
        return TokenData(
            *columns,
            finish,
            versions,
            experts,
            sampling_sets=sampling_sets,
            accepted_drafts=accepted + prefix.accepted_drafts,
            verifications=verifications + prefix.verifications,
        )

    def _read_versions(
        self, named_versions: str | Sequence[tuple[str, int]], count: int, names: str, oldest: int
    ) -> tuple[list[int], str]:
        """Return the version of each new token, and a problem or "".

        Without updates in flight there is only the present version. Else raises ConfigError if SGLang does
        not report each token's version."""
        versions: list[int] = []
        if not count:
            return versions, ""
        if isinstance(named_versions, str):
            if self.pause_mode is not None:
                problem = f"this SGLang does not report each token's version (update it to {OLDEST} or later"
                raise ConfigError(f"schedule.in_flight: {problem}, or set it to none)")
            named_versions = [(named_versions, count)]
        oldest = self.weight_version if self.pause_mode is None else oldest
        for name, end in named_versions:
            number = name.removeprefix(names)
            is_number = name.startswith(names) and number.isdecimal()
            if not is_number or not oldest <= int(number) <= self.weight_version:
                return [], f"with weights of version {name}, not {names}{self.weight_version}"
            versions += [int(number)] * (min(end, count) - len(versions))
        if len(versions) != count or versions != sorted(versions):
            return [], f"{count} tokens, of which weights' versions are {named_versions}"
        return versions, ""

    def _sort_answer(self, number: int, data: TokenData) -> list[tuple[int, TokenData]]:
        """Return a finished response. Send one again that an update has aborted."""
        request, params = self._outstanding[number]
        data = end_at_limit(data, request, params)
        if data.finish_reason == "abort" and self.pause_mode == "abort" and not self._aborting:
            self._outstanding[number] = replace(request, prefix=data), params
            self._send({number: self._outstanding[number]})
            return []
        del self._outstanding[number]
        return [(number, data)]


def end_at_limit(data: TokenData, request: GenerationRequest, params: SamplingParams) -> TokenData:
    """Return a response that an abort left at its limit as one that the limit has ended."""
    is_full = data.finish_reason == "abort" and data.num_tokens >= request.limit(params)
    return structs.replace(data, finish_reason="length") if is_full else data


def is_older_sglang() -> bool:
    """Return whether the installed SGLang is older than OLDEST. Custom builds are not."""
    with suppress(PackageNotFoundError, InvalidVersion):
        return Version(version("sglang")) < Version(OLDEST)
    return False


class SGLangEngine(SGLangRequests):
    """An engine on `rollout.engine_tp` ranks: rank r has shard r % engine_tp of engine r // engine_tp."""

    @classmethod
    def build(cls, config: Config, tokenizer: Any, runtime: Runtime) -> SGLangEngine:
        hf_config, eos_ids = read_config(config.model.path), end_tokens(tokenizer)
        return cls(config, hf_config, runtime.rank, runtime.device, eos_ids)

    @classmethod
    def check_machine(cls, config: Config, device: str) -> None:
        if device == "cpu" and config.rollout.routing_replay:
            problem = "SGLang records experts on a GPU only (set it to false, or use transformers)"
            raise ConfigError(f"rollout.routing_replay: {problem}")
        if has_draft(config.rollout) and is_older_sglang():
            problem = f"needs SGLang {OLDEST} or later, whose updates can leave a draft model alone"
            raise ConfigError(f"rollout.engine_options: {problem} (update it)")
        if config.rollout.sampling_replay and is_older_sglang():
            problem = f"needs SGLang {OLDEST} or later, which returns sampling sets"
            raise ConfigError(f"rollout.sampling_replay: {problem} (update it, or set it to false)")
        if config.schedule.in_flight != "none" and is_older_sglang():
            problem = f"needs SGLang {OLDEST} or later, which reports each token's version"
            raise ConfigError(f"schedule.in_flight: {problem} (update it, or set it to none)")
        if device == "cuda" and (lines := list(list_unmet_requirements("sglang"))):
            raise ConfigError(f"rollout.engine: {lines[0]}")

    @classmethod
    def check_engines(
        cls, config: Config, hf_config: Mapping[str, Any], device: torch.device, engines: int
    ) -> None:
        """Raise ConfigError if a draft does not fit, or SGLang would repack FP8 weights on this GPU."""
        if has_draft(config.rollout):
            check_draft(config.rollout, hf_config)
            family = get_family(hf_config)
            if device.type == "cpu" and (family.is_linear or family.is_latent):
                problem = "drafts of this model family are not verified on a CPU (leave it out)"
                raise ConfigError(f"rollout.engine_options: {ALGORITHM}: {problem}")
        if config.rollout.weights_dtype != "fp8_block" or device.type == "cpu":
            return
        capability = torch.cuda.get_device_capability(device)
        problem = ""
        if capability >= (10, 0):
            problem = "on Blackwell SGLang packs the blocks' scales"
        elif capability < (8, 9):  # can_auto_enable_marlin_fp8, SGLang 0.5.23
            problem = "on GPUs before Ada and Hopper SGLang repacks the weights for Marlin's kernels"
        if problem:
            limitation = "which megarl does not write (set it to model)"
            raise ConfigError(f"rollout.weights_dtype: fp8_block: {problem}, {limitation}")

    @classmethod
    def machine_note(cls, device: str) -> str | None:
        return allocator_problem() if device == "cuda" else None

    def __init__(
        self,
        config: Config,
        hf_config: Mapping[str, Any],
        rank: int,
        device: torch.device,
        eos_ids: Sequence[int],
    ) -> None:
        super().__init__(config, hf_config, eos_ids)
        self.rank, self.device = rank, device
        self._dtype = {"bf16": "bfloat16", "fp32": "float32"}[config.model.dtype]
        rollout = config.rollout
        self.process: EngineProcess | None = None
        if rank % rollout.engine_tp == 0:
            environment = environment_of_children() | self._environment()
            limits = rollout.engine_timeout, rollout.engine_start_timeout
            self.process = EngineProcess(self._arguments(), environment, *limits)
        self._restarted = False

    def _arguments(self) -> dict[str, Any]:
        config, rollout = self.config, self.config.rollout
        arguments: dict[str, Any] = {
            "model_path": str(config.model.path),
            "load_format": "dummy",
            "dtype": self._dtype,
            "tp_size": rollout.engine_tp,
            "max_running_requests": rollout.max_batch,
            "random_seed": 0,
            "skip_server_warmup": True,
            "sleep_on_idle": True,  # else its scheduler keeps a core busy
            "skip_tokenizer_init": not (rollout.stop or rollout.is_multi_turn),
            "sampling_backend": "pytorch",
            "enable_custom_logit_processor": True,
            "custom_weight_loader": [LOADER],
            "log_level": "warning",
            "trust_remote_code": False,
        }
        if self.pause_mode == "in_place":
            arguments["disable_overlap_schedule"] = True  # a running pass may not read half-written weights
        if rollout.routing_replay:
            arguments["enable_return_routed_experts"] = True
        if get_family(self.hf_config).has("shared_experts.linear_fc1.weight"):
            # Fusion would append these to routed experts' weights.
            arguments["disable_shared_experts_fusion"] = True
        is_cpu, family = self.device.type == "cpu", get_family(self.hf_config)
        if overrides := self._model_overrides():
            arguments["json_model_override_args"] = json.dumps(overrides)
        if is_cpu:
            # SGLang's default caches take most of the memory.
            max_length = config.data.max_prompt_tokens + rollout.max_extent
            arguments |= {"device": "cpu", "attention_backend": "torch_native", "disable_cuda_graph": True}
            arguments |= {"max_total_tokens": rollout.max_batch * max_length}
            if family.is_linear:
                # Three states per request, including prefixes'; other strategies need a GPU.
                arguments |= {"max_mamba_cache_size": 3 * rollout.max_batch}
                arguments |= {"mamba_radix_cache_strategy": "no_buffer", "disable_overlap_schedule": True}
        else:
            arguments |= {"base_gpu_id": self.device.index, "mem_fraction_static": rollout.engine_memory}
            arguments |= {"enable_memory_saver": True, "disable_prefill_cuda_graph": True}  # see _environment
            if any(self.hf_config.get(key) for key in EXPERT_KEYS):
                # Other runners, like Blackwell's default, order an expert's gate and up differently
                # (FusedMoE._weight_loader_impl), and do not return routed experts.
                arguments["moe_runner_backend"] = MOE_RUNNER
        if has_draft(rollout):
            arguments |= self._draft_arguments(arguments)
        return arguments | rollout.engine_options

    def _model_overrides(self) -> dict[str, Any]:
        """Return keys of config.json that SGLang gets with other values."""
        family, overrides = get_family(self.hf_config), dict[str, Any]()
        if self.config.rollout.weights_dtype == "fp8_block":
            overrides["quantization_config"] = FP8_CONFIG
        if family.is_latent:  # transformers does not write these to config.json
            overrides |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}
            rope = self.hf_config.get("rope_scaling") or self.hf_config.get("rope_parameters") or {}
            if self.device.type == "cpu" and not rope.get("factor"):
                # SGLang has only YaRN there (get_rope_cpu), which does not scale with factor 1.
                positions = self.hf_config["max_position_embeddings"]
                rope_parameters = {
                    "rope_type": "yarn",
                    "factor": 1.0,
                    "original_max_position_embeddings": positions,
                }
                overrides["rope_parameters"] = rope_parameters
        if family.is_linear:  # SGLang reads no `layer_types`
            overrides["full_attention_interval"] = full_attention_interval(self.hf_config)
        return overrides

    def _draft_arguments(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return defaults for a draft model, which transfers leave alone: its folder has its weights."""
        steps = count_steps(self.config.rollout)
        chain: dict[str, Any] = {
            "speculative_num_steps": steps,
            "speculative_num_draft_tokens": steps + 1,
            "speculative_eagle_topk": 1,
            "speculative_draft_load_format": "auto",
        }
        if self.device.type == "cpu":
            # Slots of chains, of which SGLang allocates two in advance.
            slots = 2 * (steps + 1) * self.config.rollout.max_batch
            return chain | {"max_total_tokens": arguments["max_total_tokens"] + slots}
        return chain | {"enable_draft_weights_cpu_backup": True}  # `sleep` frees the draft too

    def _environment(self) -> dict[str, str]:
        # By default, states of linear attention's convolutions are bf16.
        conv_dtype = {"SGLANG_MAMBA_CONV_DTYPE": self._dtype} if get_family(self.hf_config).is_linear else {}
        if self.device.type != "cpu":
            # Graphs can sleep only if the memory saver manages them from the start. It refuses "breakable"
            # ones, prefill's default (BreakableCudaGraphBackend.__init__).
            options = self.config.rollout.engine_options
            can_sleep = options.get("disable_prefill_cuda_graph", True) and "breakable" not in str(options)
            environment = {"SGLANG_MEMORY_SAVER_CUDA_GRAPH": "1" if can_sleep else "0"}
            # 1 would permute experts' rows at each load, even those that a transfer leaves out.
            environment["SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED"] = "0"
            # Ranks that sampled different tokens would deadlock.
            environment["SYNC_TOKEN_IDS_ACROSS_TP"] = "1"
            # The memory saver's preloaded library needs CUDA's runtime before Python starts.
            paths = [*cuda_runtime_folders(), os.environ.get("LD_LIBRARY_PATH", "")]
            return environment | conv_dtype | {"LD_LIBRARY_PATH": os.pathsep.join(filter(None, paths))}
        cores = sorted(os.sched_getaffinity(0))
        ranks = range(self.rank, self.rank + self.config.rollout.engine_tp)
        return conv_dtype | {
            "SGLANG_USE_CPU_ENGINE": "1",
            "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(cores[rank % len(cores)]) for rank in ranks),
            "OMP_NUM_THREADS": str(self.config.parallel.threads),
            "GLOO_SOCKET_IFNAME": "lo",
        }

    def start(self) -> None:
        if self.process is not None:
            self.process.start()

    def ready(self, seconds: float) -> bool:
        return self.process is None or self.process.ready(seconds)

    def restart(self) -> None:
        self._has_weights, self._failure, self.weight_version = False, None, -1
        self._restarted = True
        if self.process is not None:
            self.process.end()
            self.process.start()

    def stop(self) -> None:
        if self.process is not None:
            self.process.end()
        self._outstanding.clear()
        self._has_weights = False

    def _call(self, name: str, *arguments: Any) -> None:
        if self.process is not None:
            self.process.call(name, *arguments)

    def begin_update(self) -> None:
        self.refuse_after_failure()
        self._has_weights = False
        self._call("begin", self.pause_mode)

    def load_shared(self, handles: Sequence[bytes | None], version: int, *, last: bool) -> None:
        # A flush needs an engine without running requests.
        self._call("load", list(handles), version, last, last and self.pause_mode != "in_place")

    def end_update(self, version: int) -> None:
        """See RolloutEngine. The last bucket has dropped the prefix cache."""
        self._call("end", self.pause_mode)
        self._has_weights, self.weight_version = True, version
        if self._restarted:  # else SGLang still has the requests
            self._send(self._outstanding)
        self._restarted = False

    def _send(self, requests: Mapping[int, tuple[GenerationRequest, SamplingParams]]) -> None:
        for params in dict.fromkeys(params for _, params in requests.values()):
            assert self.process is not None, "only the leader takes requests"
            rows = []
            for number, (request, request_params) in requests.items():
                if request_params == params:
                    fields = len(request.prompt_tokens), request.seed, request.left(params)
                    rows.append((number, list(request.context), *fields))
            settings = vars(params) | {"stop": list(params.stop), "stop_token_ids": list(self.eos_ids)}
            if self.pause_mode == "in_place":  # else prefixes of older weights would match
                settings["cache_salt"] = str(self.weight_version)
            self.process.submit(rows, settings)

    def poll(self, seconds: float) -> list[tuple[int, TokenData]]:
        if not self._outstanding:
            return []
        self.refuse_after_failure()
        assert self.process is not None
        responses = []
        for number, answer in self.process.poll(seconds):
            try:
                request, params = self._outstanding[number]
                data = self._token_data(request, answer, params)
                responses += self._sort_answer(number, data)
            except EngineFailure as failure:
                self._failure = failure  # the next call raises it
        return responses

    def abort(self) -> list[tuple[int, TokenData]]:
        responses, self._aborting = [], True
        try:
            while self._outstanding:
                assert self.process is not None
                self.process.abort()  # repeatedly: it misses requests on their way
                responses += self.poll(0.2)
        finally:
            self._outstanding.clear()
            self._aborting = False
        return responses

    def sleep(self, tags: Sequence[str] = TAGS) -> None:
        """See RolloutEngine. CUDA graphs are freed with the KV cache."""
        if "weights" in tags:
            self._has_weights = False
        self._call("sleep", _with_graphs(tags))

    def wake(self, tags: Sequence[str] = TAGS) -> None:
        self._call("wake", _with_graphs(tags))


def _with_graphs(tags: Sequence[str]) -> list[str]:
    return [*tags, GRAPHS] if "kv_cache" in tags else list(tags)


def _decode_routing(encoded: str, length: int, hf_config: Mapping[str, Any]) -> tuple[np.ndarray | None, str]:
    """Return a sequence's experts (`routing_array`), and a problem or "".

    encoded: int32 [length - 1, layers, topk] in base64 (srt/state_capturer/routed_experts.py)"""
    experts = Sizes.from_config(hf_config).experts
    shape = length - 1, hf_config["num_hidden_layers"], hf_config["num_experts_per_tok"]
    chosen_experts = np.frombuffer(base64.b64decode(encoded), dtype=np.int32)
    if chosen_experts.size != math.prod(shape):
        return None, f"{chosen_experts.size} chosen experts for {length} tokens, not {math.prod(shape)}"
    if chosen_experts.size and not 0 <= chosen_experts.min() <= chosen_experts.max() < experts:
        return None, f"an expert outside of 0 to {experts - 1}"
    return routing_array(chosen_experts.reshape(shape), length, experts), ""


def _pad_sets(sets: Sequence[Sequence[int]], tokens: Sequence[int], vocab: int) -> tuple[np.ndarray, str]:
    """Return sampling sets, int32 [tokens, k], ids, then -1, and a problem or ""."""
    padded = np.full((len(tokens), max(map(len, sets), default=0)), -1, np.int32)
    if len(sets) != len(tokens):
        return padded, f"{len(sets)} sampling sets for {len(tokens)} tokens"
    for row, (ids, token) in enumerate(zip(sets, tokens, strict=True)):
        if token not in ids:
            return padded, f"token {token}, which is not in its sampling set of {len(ids)}"
        if not all(0 <= other < vocab for other in ids):
            return padded, f"a sampling set with a token outside of the vocabulary of {vocab}"
        padded[row, : len(ids)] = ids
    return padded, ""
