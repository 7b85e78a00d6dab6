"""Registry of rollout engines, which checks and planner read without torch.

docs/extending.md shows how to add one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

EngineName = Literal["transformers", "sglang", "sglang_url"]


@dataclass(frozen=True)
class EngineCapabilities:
    """Capabilities of an engine.

    continuous_batching  requests end one by one in engine processes, which can be restarted. Else the engine
                         decodes in the rank, rollout.max_batch responses at once
    sharded              an engine spans rollout.engine_tp ranks, each with SGLang's tensors (`sglang_shards`
                         in weights/shards.py). Else each rank has an engine with Hugging Face's tensors
    remote               servers at rollout.urls that use no resources of the ranks. The first of every
                         rollout.engine_tp ranks is a client of some of them, with Hugging Face's tensors
    takes_options        accepts rollout.engine_options
    returns_sampling_sets  returns the ids that each token was sampled from (`TokenData.sampling_sets`)
    weight_backend       its own way to get weights: a row of `BACKENDS` in sync/backends
    weight_backends      values of rollout.weights.backend that it supports; colocated: weight_backend"""

    continuous_batching: bool = False
    sharded: bool = False
    remote: bool = False
    takes_options: bool = False
    returns_sampling_sets: bool = False
    weight_backend: str = "in_place"
    weight_backends: tuple[str, ...] = ("colocated",)


@dataclass(frozen=True)
class EngineEntry:
    """One engine.

    implementation  module:class
    package         package that it needs
    install         command that installs it
    import_test     statement that raises if it is broken"""

    implementation: str
    capabilities: EngineCapabilities = EngineCapabilities()
    package: str = ""
    install: str = ""
    import_test: str = ""


ENGINES: dict[EngineName, EngineEntry] = {
    "transformers": EngineEntry(
        "megarl.rollout.engines.transformers_engine:TransformersEngine",
        EngineCapabilities(returns_sampling_sets=True),
    ),
    "sglang": EngineEntry(
        "megarl.rollout.engines.sglang:SGLangEngine",
        EngineCapabilities(
            continuous_batching=True,
            sharded=True,
            takes_options=True,
            returns_sampling_sets=True,
            weight_backend="shared_memory",
        ),
        package="sglang",
        install="make install-gpu",
        # megarl's module stubs GPU modules on a CPU.
        import_test="import megarl.rollout.engines.sglang_host, sglang.srt.entrypoints.engine",
    ),
    "sglang_url": EngineEntry(
        "megarl.rollout.engines.sglang_servers:SGLangServers",
        EngineCapabilities(
            continuous_batching=True,
            remote=True,
            returns_sampling_sets=True,
            weight_backend="http",
            weight_backends=("http", "broadcast", "disk", "delta"),
        ),
        package="aiohttp",
        install="pip install 'megarl[agents]'",
    ),
}
