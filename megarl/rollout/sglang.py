"""The SGLang rollout engine as its ranks see it. Each of its ranks holds the memory in which a weight transfer leaves one SGLang rank's
shard; the first of them, the leader, starts, watches and stops the engine's processes.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor

from megarl.config.errors import EngineError, EngineFailure
from megarl.config.schema import Config
from megarl.parallel.launch import environment_of_children
from megarl.rollout.engine import TAGS, Completion, Request, SamplingParams
from megarl.rollout.sglang_process import EngineProcess
from megarl.weights.plan import Plan
from megarl.weights.transfer import Staging

LOADER = "megarl.rollout.sglang_inside.load_shards"
ALIGN = 256  # bytes; tensors of a bucket begin at multiples of this
GRAPHS = "cuda_graph"  # SGLang's tag of the memory that captured graphs keep, of which decoding alone has need
LOGPROB_ABOVE_ZERO = 1e-3  # rounding of a probability of 1
FP8_CONFIG = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


@dataclass(frozen=True)
class Place:
    """A rank among the ranks of its engine, and its engine among the job's engines: rank r is part r % tp of engine r // tp."""

    rank: int
    tp: int
    device: torch.device

    @property
    def engine(self) -> int:
        return self.rank // self.tp

    @property
    def part(self) -> int:
        return self.rank % self.tp


@dataclass
class _Bucket:
    """Tensors that are delivered together: name -> (first byte in the memory, shape, dtype)."""

    tensors: dict[str, tuple[int, list[int], str]]
    complete: list[str]


class SGLangEngine:
    """A RolloutEngine over `rollout.engine_tp` ranks. Only the leader is given requests, and only it can meet an EngineFailure; `restart`
    and an update of the weights must follow one, and what was unfinished is then sent again with the same seeds.

    hf_config: of the model's folder; eos_ids: tokens that end a response, besides those that the folder's configs name."""

    streams = True

    def __init__(self, config: Config, hf_config: Mapping[str, Any], place: Place, eos_ids: Sequence[int]) -> None:
        self.config, self.hf_config, self.place, self.eos_ids = config, hf_config, place, tuple(eos_ids)
        self.weight_version = -1
        self._dtype = {"bf16": "bfloat16", "fp32": "float32"}[config.model.dtype]
        rollout = config.rollout
        self.process: EngineProcess | None = None
        if place.part == 0:
            environment = environment_of_children() | self._environment()
            self.process = EngineProcess(self._arguments(), environment, rollout.engine_timeout, rollout.engine_start_timeout)
        self._memory: Tensor | None = None
        self._buckets: list[_Bucket] = []
        self._outstanding: dict[int, tuple[Request, SamplingParams]] = {}
        self._fault: EngineFailure | None = None
        self._ready = False

    def _arguments(self) -> dict[str, Any]:
        """Of sglang.Engine. Its weights are undefined until a transfer."""
        config, rollout, device = self.config, self.config.rollout, self.place.device
        arguments: dict[str, Any] = {
            "model_path": str(config.model.path),
            "load_format": "dummy",
            "dtype": self._dtype,
            "tp_size": rollout.engine_tp,
            "max_running_requests": rollout.max_batch,
            "random_seed": 0,
            "skip_server_warmup": True,
            "skip_tokenizer_init": not rollout.stop,
            "sampling_backend": "pytorch",
            "enable_custom_logit_processor": True,
            "custom_weight_loader": [LOADER],
            "log_level": "warning",
            "trust_remote_code": False,
        }
        if rollout.weights_dtype == "fp8_block":
            arguments["json_model_override_args"] = json.dumps({"quantization_config": FP8_CONFIG})
        if device.type == "cpu":
            # SGLang would give most of the machine's memory to the KV cache.
            longest = config.data.max_prompt_tokens + rollout.max_response_tokens
            arguments |= {"device": "cpu", "attention_backend": "torch_native", "disable_cuda_graph": True}
            arguments |= {"max_total_tokens": rollout.max_batch * longest}
        else:
            arguments |= {"base_gpu_id": device.index, "mem_fraction_static": rollout.engine_memory, "enable_memory_saver": True}
            arguments |= {"disable_prefill_cuda_graph": True}  # see _environment
        return arguments | rollout.engine_options

    def _environment(self) -> dict[str, str]:
        if self.place.device.type != "cpu":
            # Graphs can sleep only where SGLang's memory saver has their memory in hand from the start. It ends the start for "breakable"
            # graphs, its default for prefill (BreakableCudaGraphBackend.__init__): whoever asks for those does without.
            options = self.config.rollout.engine_options
            sleeps = options.get("disable_prefill_cuda_graph", True) and "breakable" not in str(options)
            return {"SGLANG_MEMORY_SAVER_CUDA_GRAPH": "1" if sleeps else "0"}
        cores = sorted(os.sched_getaffinity(0))
        mine = [str(cores[(self.place.rank + part) % len(cores)]) for part in range(self.place.tp)]
        return {
            "SGLANG_USE_CPU_ENGINE": "1",
            "SGLANG_CPU_OMP_THREADS_BIND": "|".join(mine),
            "OMP_NUM_THREADS": str(self.config.parallel.threads),
            "GLOO_SOCKET_IFNAME": "lo",
        }

    def start(self) -> None:
        """Begins the start of the processes; the first update awaits its end."""
        if self.process is not None:
            self.process.start()

    def ready(self, seconds: float) -> bool:
        """Whether the start has ended; waits for it, at most `seconds`."""
        return self.process is None or self.process.ready(seconds)

    def restart(self) -> None:
        """Ends what is left of the engine and starts it anew. An update must follow."""
        self._ready, self._fault, self.weight_version = False, None, -1
        if self.process is not None:
            self.process.end()
            self.process.start()

    def is_one_of(self, ranks: Sequence[int]) -> bool:
        return any(rank // self.place.tp == self.place.engine for rank in ranks)

    def buckets(self, plan: Plan, memory: Staging) -> list[tuple[Plan, dict[str, Tensor]]]:
        """The plan in parts, each with the tensors of this rank that it writes. All parts use the same memory, of at most
        `rollout.transfer_bucket` (or the largest tensor): each is to be delivered before the next is written. On a CPU that is a file,
        which another process can open."""
        shards = plan.targets[self.place.rank]
        names: list[list[str]] = [[]]
        self._buckets, start, size = [_Bucket({}, [])], 0, 0
        for name, shard in shards.items():
            dtype = plan.formats.get(name, self._dtype)
            needed = -(-math.prod(shard.shape) * _itemsize(dtype) // ALIGN) * ALIGN
            if start and start + needed > self.config.rollout.transfer_bucket * 2**20:
                self._buckets.append(_Bucket({}, []))
                names.append([])
                start = 0
            self._buckets[-1].tensors[name] = (start, list(shard.shape), dtype)
            names[-1].append(name)
            start += needed
            size = max(size, start)
        self._buckets[-1].complete = list(shards)
        if self.place.device.type == "cpu":
            self._memory = self._shared_file(size)
        else:
            memory.reserve(size)
            self._memory = memory.take()
        tensors = [{name: self._view(*entry) for name, entry in bucket.tensors.items()} for bucket in self._buckets]
        return list(zip([_part(plan, set(some)) for some in names], tensors, strict=True))

    def _shared_file(self, size: int) -> Tensor:
        """Memory of a file that exists as long as this process has it open."""
        self._file = os.memfd_create("megarl-weights")
        os.truncate(self._file, size)
        return torch.from_file(f"/proc/self/fd/{self._file}", shared=True, size=size, dtype=torch.uint8)

    def _view(self, start: int, shape: list[int], dtype: str) -> Tensor:
        assert self._memory is not None
        return self._memory[start : start + math.prod(shape) * _itemsize(dtype)].view(getattr(torch, dtype)).view(shape)

    def handle(self, bucket: int) -> bytes:
        """Where SGLang's rank finds this rank's part; for one delivery (a CUDA handle is good for one)."""
        assert self._memory is not None
        # An alias with a storage of its own: torch wraps a storage once more at each sharing, and keeps what belongs to that as long as it.
        memory, place = torch.from_dlpack(self._memory), {}
        if self.place.device.type == "cpu":
            place = {"path": f"/proc/{os.getpid()}/fd/{self._file}", "size": memory.numel()}
            memory = torch.empty(0, dtype=torch.uint8)
        part = {"tensors": self._buckets[bucket].tensors, "complete": self._buckets[bucket].complete, **place}
        return bytes(ForkingPickler.dumps([(json.dumps(part), memory)]))

    def begin_update(self) -> None:
        """Before the first delivery."""
        self._ready = False
        if self.process is not None:
            self.process.call("begin")

    def deliver(self, bucket: int, handles: Sequence[bytes], version: int) -> None:
        """`handles`: of all ranks of the job, by rank, each of which has written the bucket."""
        if self.process is not None:
            mine = list(handles[self.place.rank : self.place.rank + self.place.tp])
            self.process.call("load", mine, version, bucket == len(self._buckets) - 1)

    def end_update(self, version: int) -> None:
        """After the last delivery, with which the prefix cache was dropped. What was unfinished when the engine failed goes on."""
        if self.process is not None:
            self.process.call("end")
        self._ready, self.weight_version = True, version
        for params in dict.fromkeys(params for _, params in self._outstanding.values()):
            self._send({number: request for number, (request, own) in self._outstanding.items() if own == params}, params)

    def submit(self, requests: Mapping[int, Request], params: SamplingParams) -> None:
        """Begins generating. The keys, which `poll` gives back, must be free."""
        if not requests:
            return
        if not self._ready:
            raise EngineError("rollout engine: submit was called while it has no weights: an update must follow start and wake")
        self._check(requests, params)
        self._outstanding |= {number: (request, params) for number, request in requests.items()}
        self._send(requests, params)

    def _send(self, requests: Mapping[int, Request], params: SamplingParams) -> None:
        assert self.process is not None, "requests are the leader's"
        rows = [(n, [*r.prompt, *(r.begun.tokens if r.begun else ())], len(r.prompt), r.seed) for n, r in requests.items()]
        settings = {
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "stop": list(params.stop),
            "stop_token_ids": list(self.eos_ids),
        }
        self.process.submit(rows, settings)

    def _check(self, requests: Mapping[int, Request], params: SamplingParams) -> None:
        longest = max(len(r.prompt) for r in requests.values())
        positions = self.hf_config.get("max_position_embeddings", math.inf)
        if longest + params.max_tokens > positions:
            raise EngineError(
                f"rollout: a prompt of {longest} tokens and {params.max_tokens} response tokens do not fit "
                f"the model's {positions} positions (lower rollout.max_response_tokens or data.max_prompt_tokens)"
            )

    @property
    def running(self) -> int:
        """Requests that have not come back."""
        return len(self._outstanding)

    def poll(self, seconds: float) -> list[tuple[int, Completion]]:
        """What has ended; waits at most `seconds` for the first. EngineFailure where the engine is dead, hangs or talks nonsense."""
        if not self._outstanding:
            return []
        if self._fault is not None:
            raise self._fault
        assert self.process is not None
        ended = []
        for number, answer in self.process.poll(seconds):
            try:
                ended.append((number, self._completion(self._outstanding[number][0], answer)))
            except EngineFailure as fault:
                self._fault = fault  # for the next call: what is good of this one is not lost
                continue
            del self._outstanding[number]
        return ended

    def _completion(self, request: Request, answer: Any) -> Completion:
        """Raises EngineFailure for what cannot be an answer."""
        if isinstance(answer, str):
            raise EngineFailure(f"SGLang: generate: {answer}")
        tokens, logprobs, finish, version = answer
        vocab = self.hf_config["vocab_size"]
        if version != str(self.weight_version):
            raise EngineFailure(f"SGLang answered with weights of version {version}, not {self.weight_version}")
        if finish not in ("stop", "length", "abort") or len(logprobs) != len(tokens) or (not tokens and finish != "abort"):
            raise EngineFailure(f"SGLang answered {len(tokens)} tokens with {len(logprobs)} log-probabilities, ended by {finish}")
        if not all(0 <= token < vocab for token in tokens):
            raise EngineFailure(f"SGLang answered a token outside of the vocabulary of {vocab}")
        if not all(-math.inf < logprob <= LOGPROB_ABOVE_ZERO for logprob in logprobs):
            raise EngineFailure("SGLang answered a log-probability that is not a finite number below 0")
        return (request.begun or Completion()).extended(tokens, logprobs, finish, self.weight_version)

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Completion]:
        """One completion per request, in their order."""
        self.submit(dict(enumerate(requests)), params)
        ended: dict[int, Completion] = {}
        while self._outstanding:
            ended |= self.poll(1.0)
        return [ended[i] for i in range(len(requests))]

    def abort(self) -> list[tuple[int, Completion]]:
        """Ends what runs and gives it back, with finish "abort" unless it has just ended; where the engine fails, it is forgotten."""
        ended = []
        try:
            while self._outstanding:
                assert self.process is not None
                self.process.abort()  # again and again: it does not reach what is only just on its way
                ended += self.poll(0.2)
        finally:
            self._outstanding.clear()
        return ended

    def sleep(self, tags: Sequence[str] = TAGS) -> None:
        """`weights` and `kv_cache`, the latter with the graphs of decoding: their device memory is freed, on all ranks of the engine when
        this ends. A CPU build of SGLang accepts it and does nothing."""
        if "weights" in tags:
            self._ready = False
        if self.process is not None:
            self.process.call("sleep", _with_graphs(tags))

    def wake(self, tags: Sequence[str] = TAGS) -> None:
        """Undoes `sleep`; weights are undefined until an update."""
        if self.process is not None:
            self.process.call("wake", _with_graphs(tags))

    def stop(self) -> None:
        if self.process is not None:
            self.process.end()
        self._outstanding.clear()
        self._ready = False
        if self._memory is not None and self.place.device.type == "cpu":
            os.close(self._file)
        self._memory = None


def _with_graphs(tags: Sequence[str]) -> list[str]:
    return [*tags, GRAPHS] if "kv_cache" in tags else list(tags)


def _itemsize(dtype: str) -> int:
    itemsize: int = getattr(torch, dtype).itemsize
    return itemsize


def _part(plan: Plan, names: set[str]) -> Plan:
    """The plan of some of the target tensors."""
    targets = {rank: {name: shard for name, shard in shards.items() if name in names} for rank, shards in plan.targets.items()}
    copies, relays = (tuple(copy for copy in them if copy.dst_name in names) for them in (plan.copies, plan.relays))
    return replace(plan, copies=copies, relays=relays, targets=targets)
