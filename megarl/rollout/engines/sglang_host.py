"""The process that runs one SGLang engine. Written against SGLang 0.5.23.

Usage: `python -m megarl.rollout.engines.sglang_host FD PID`. FD is a socket to the rank PID.

It is not the rank, as SGLang kills the parent process if one of its children fails. These children import
this module first, for CPU stubs and to keep Megatron out."""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
import os
import queue
import signal
import sys
import threading
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

import torch
from transformers.utils import is_torchvision_available

from megarl.rollout.engines.sglang_kernels import MODULES, OPS

PROGRESS = 0.5
KERNELS, VISION = "sgl_kernel", "torchvision"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def install_cpu_stubs() -> None:
    """Install stubs of packages on a CPU. Their calls raise.

    Must run in each of SGLang's processes before it imports sglang.

    sgl_kernel    its importers run torch-native code or sglang_kernels.py
    torchvision   the package index has only a CUDA build, which breaks transformers with a CPU torch
    """
    if torch.cuda.is_available():
        return
    is_torchvision_available()  # first, as transformers caches the answer
    for package in (KERNELS, VISION):
        if package not in sys.modules and find_spec(package) is None:
            sys.meta_path.append(_Stub(package))
            if package == KERNELS:
                # SGLang looks this one up, for attention without gates.
                kernel = "fused_qk_gemma_rmsnorm_cpu"
                vars(torch.ops.sgl_kernel).update(OPS, **{kernel: _Missing(kernel)})


class _Missing:
    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        where = "a stub of megarl/rollout/engines/sglang_host.py"
        raise NotImplementedError(f"{self.__name__} does not exist on a CPU: {where}")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"{self.__name__} has no {name}")
        return _Missing(f"{self.__name__}.{name}")


class _Stub(MetaPathFinder, Loader):
    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.split(".")[0] == self.package else None

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__getattr__"] = _Missing(module.__name__).__getattr__
        vars(module).update(MODULES.get(module.__name__, {}))
        if module.__name__ == KERNELS:
            vars(module).update(__version__="0")


def leave_out_megatron() -> None:
    """Keep SGLang's dumper from importing Megatron.

    Megatron sets a mode of the memory saver (inference/contexts/dynamic_context.py) in which SGLang crashes
    at its first CUDA graph."""
    sys.modules.setdefault("megatron.core", None)  # type: ignore[arg-type]


install_cpu_stubs()
if multiprocessing.current_process().name != "MainProcess":  # a child of SGLang; else `main` does it
    leave_out_megatron()


class Calls:
    """Calls of SGLang by name. Failures raise RuntimeError.

    0.5.15 has no weight-update sessions; 0.5.23 refuses updates without one."""

    def __init__(self, engine: Any, has_draft: bool = False) -> None:
        from sglang.srt.managers import io_struct

        self.engine, self.manager, self.io = engine, engine.tokenizer_manager, io_struct
        # Else an update would write the target's weights into the draft model too.
        self.only_target = {"selector": "target"} if has_draft else {}

    @staticmethod
    def _check(what: str, result: Any) -> None:
        if not isinstance(result, tuple):
            result = result.success, getattr(result, "message", "")
        success, message = result
        if not success:
            raise RuntimeError(f"{what}: {message}")

    async def begin(self, pause: str | None) -> None:
        """Begin an update. pause: mode of SGLang's pause_generation; None: no request is running"""
        if pause is not None:
            await self.manager.pause_generation(self.io.PauseGenerationReqInput(mode=pause))
        if hasattr(self.manager, "begin_weight_update"):
            request = self.io.BeginWeightUpdateReqInput(**self.only_target)
            self._check("begin_weight_update", await self.manager.begin_weight_update(request, None))

    async def load(self, payloads: list[bytes], version: int, last: bool, flush: bool) -> None:
        """Load a bucket, a payload per rank. The `last` sets `version`. flush: drop the prefix cache"""
        from megarl.rollout.engines.sglang_inside import load_shards

        request = self.io.UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=payloads,
            load_format=f"{load_shards.__module__}.{load_shards.__name__}",
            flush_cache=flush,
            weight_version=str(version) if last else None,
            **self.only_target,
        )
        self._check(
            "update_weights_from_tensor", await self.manager.update_weights_from_tensor(request, None)
        )

    async def end(self, pause: str | None) -> None:
        if hasattr(self.manager, "end_weight_update"):
            request = self.io.EndWeightUpdateReqInput()
            self._check("end_weight_update", await self.manager.end_weight_update(request, None))
        if pause is not None:
            await self.manager.continue_generation(self.io.ContinueGenerationReqInput())

    async def sleep(self, tags: list[str]) -> None:
        """Free memory when no request is running; else SGLang would crash."""
        while not (await self.manager.flush_cache()).success:
            await asyncio.sleep(0.1)
        await self.manager.release_memory_occupation(self.io.ReleaseMemoryOccupationReqInput(tags=tags), None)
        # That call ends with SGLang's first rank, this one after a barrier of all ranks
        # (Scheduler.handle_rpc_request).
        await asyncio.to_thread(self.engine.collective_rpc, "flush_cache")

    async def wake(self, tags: list[str]) -> None:
        await self.manager.resume_memory_occupation(self.io.ResumeMemoryOccupationReqInput(tags=tags), None)


class Host:
    """Answers messages (kind, ...) until the connection closes:

    submit [(id, prompt and partial response, prompt length, seed, most new tokens), ...], params
                                                       -> done [(id, answer), ...]
    abort                                              -> done, of running requests
    call name, arguments of a method of Calls          -> answer error or ""
    """

    def __init__(self, engine: Any, connection: Connection, calls: Calls) -> None:
        from megarl.rollout.engines.sglang_inside import KeepParams

        self.engine, self.connection, self.calls = engine, connection, calls
        self.processor = KeepParams.to_str()
        self.outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()  # a slow reader must not block the engine
        self.finished: list[tuple[int, Any]] = []
        self.tasks: set[asyncio.Task[None]] = set()
        self.children = multiprocessing.active_children()
        self.generating = 0

    def serve(self) -> None:
        loop = self.engine.loop
        loop.create_task(self._watch())
        # Threads: an event loop needs a non-blocking socket, whose buffer messages may exceed.
        for target in (self._send, self._receive):
            threading.Thread(target=target, daemon=True).start()
        self.outbox.put(("ready", [child.pid for child in self.children]))
        loop.run_forever()

    def _send(self) -> None:
        while True:
            try:
                self.connection.send(self.outbox.get())
            except OSError:
                os._exit(1)

    def _receive(self) -> None:
        while True:
            try:
                message = self.connection.recv()
            except (EOFError, OSError):
                os._exit(1)  # the rank has ended; SGLang's children follow
            self.engine.loop.call_soon_threadsafe(self._answer, *message)

    def _answer(self, kind: str, *content: Any) -> None:
        if kind == "abort":
            self.calls.manager.abort_request(abort_all=True)
        elif kind == "submit":
            self._submit(*content)
        else:
            self._start(self._call(*content))

    def _start(self, work: Any) -> None:
        task = self.engine.loop.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _call(self, name: str, arguments: tuple[Any, ...]) -> None:
        problem = ""
        try:
            await getattr(self.calls, name)(*arguments)
        except Exception as error:  # noqa: BLE001 (the rank raises it)
            problem = f"{type(error).__name__}: {error}"
        self.outbox.put(("answer", problem))

    def _submit(self, requests: list[tuple[int, list[int], int, int, int]], params: dict[str, Any]) -> None:
        shared_params = {key: params[key] for key in ("temperature", "top_p", "top_k", "sampling_sets")}
        for number, prompt, prompt_length, seed, max_new_tokens in requests:
            sampling = {
                "max_new_tokens": max_new_tokens,
                "stop_token_ids": params["stop_token_ids"],
                "stop": params["stop"] or None,
                "custom_params": {"seed": seed, "prompt": prompt_length, **shared_params},
            }
            self.generating += 1
            # Older SGLangs do not know the argument.
            options: dict[str, Any] = {"return_routed_experts": True} if params["routing"] else {}
            if params["sampling_sets"]:
                options["return_sampling_mask"] = True
                sampling["top_k"] = params["top_k"]  # SGLang wants it; SeededSampler reads custom_params
            if "cache_salt" in params:
                options["cache_salt"] = params["cache_salt"]
            self._start(self._generate(number, prompt, sampling, options))

    async def _generate(
        self, number: int, prompt: list[int], sampling: dict[str, Any], more: dict[str, Any]
    ) -> None:
        try:
            # Engine.async_generate does the same, but has no return_sampling_mask in 0.5.23.
            request = self.calls.io.GenerateReqInput(
                input_ids=prompt,
                sampling_params=sampling,
                return_logprob=True,
                custom_logit_processor=self.processor,
                **more,
            )
            answer = await anext(self.calls.manager.generate_request(request, None))
            meta = answer["meta_info"]
            logprobs = [entry[0] for entry in meta["output_token_logprobs"]]
            tokens, finish = answer["output_ids"], meta["finish_reason"]["type"]
            spans = meta.get("weight_versions") or ()  # older SGLangs have none
            versions = [(span["version"], span["end"]) for span in spans] or meta["weight_version"]
            sets = meta.get("output_token_sampling_mask")
            drafts = meta.get("spec_num_correct_drafts", 0), meta.get("spec_verify_ct", 0)
            result: Any = (tokens, logprobs, finish, versions, meta.get("routed_experts"), sets, drafts)
        except Exception as error:  # noqa: BLE001 (the rank raises it)
            result = f"{type(error).__name__}: {error}"
        self.generating -= 1
        self.finished.append((number, result))
        if len(self.finished) == 1:
            self.engine.loop.call_soon(self._flush)

    def _flush(self) -> None:
        self.outbox.put(("done", self.finished))
        self.finished = []

    async def _watch(self) -> None:
        """Report progress, and end when one of SGLang's processes does."""
        previous_time = 0.0
        while True:
            await asyncio.sleep(PROGRESS)
            for child in self.children:
                if not child.is_alive():
                    print(f"{child.name} has ended", file=sys.stderr, flush=True)
                    os._exit(1)
            receive_time = self.calls.manager.last_receive_tstamp
            if self.generating and receive_time != previous_time:
                self.outbox.put(("progress",))
            previous_time = receive_time


def main(calls: type[Calls] = Calls) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[2]):
        raise SystemExit("the rank that started this engine has ended")
    connection = Connection(int(sys.argv[1]))
    arguments = connection.recv()
    leave_out_megatron()
    from sglang.srt.entrypoints.engine import Engine

    from megarl.rollout.engines.sglang_inside import run_scheduler

    class SeededEngine(Engine):
        run_scheduler_process_func = staticmethod(run_scheduler)

    engine = SeededEngine(**arguments)
    has_draft = "speculative_algorithm" in arguments
    Host(engine, connection, calls(engine, has_draft)).serve()


if __name__ == "__main__":
    main()
