"""Registry of rollout engines: class and capabilities of each `rollout.engine`.

Checks and planner read it without torch. A new engine is a row here, its name in `EngineName`, and a file in
rollout/engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

EngineName = Literal["transformers", "sglang", "sglang_url"]


@dataclass(frozen=True)
class EngineCapabilities:
    """Capabilities of an engine, read by checks, planner, controller and weight sync.

    continuous_batching  requests end one by one in engine processes, which may hang and be restarted. The KV
                         cache takes what rollout.engine_memory leaves. Without it the engine decodes in the
                         rank, rollout.max_batch responses at once
    sharded              an engine spans rollout.engine_tp ranks, each with SGLang's tensors (`sglang_shards`
                         in weights/shards.py), optionally in block FP8. Without it each rank has an engine
                         with Hugging Face's tensors
    remote               servers at rollout.urls that use no resources of the ranks. The first of every
                         rollout.engine_tp ranks is a client of some of them, with Hugging Face's tensors
    takes_options        accepts rollout.engine_options
    weight_backend       transfers new weights: a row of `BACKENDS` in sync/backends"""

    continuous_batching: bool = False
    sharded: bool = False
    remote: bool = False
    takes_options: bool = False
    weight_backend: str = "in_place"


@dataclass(frozen=True)
class EngineEntry:
    """One engine.

    implementation  its class, as module:class
    package         extra package that it needs
    install         command that installs the package
    import_test     statement that runs if the package is installed correctly"""

    implementation: str
    capabilities: EngineCapabilities = EngineCapabilities()
    package: str = ""
    install: str = ""
    import_test: str = ""


ENGINES: dict[EngineName, EngineEntry] = {
    "transformers": EngineEntry("megarl.rollout.engines.transformers_engine:TransformersEngine"),
    "sglang": EngineEntry(
        "megarl.rollout.engines.sglang:SGLangEngine",
        EngineCapabilities(
            continuous_batching=True, sharded=True, takes_options=True, weight_backend="shared_memory"
        ),
        package="sglang",
        install="make install-gpu",
        # megarl's module stubs GPU modules on a CPU.
        import_test="import megarl.rollout.engines.sglang_host, sglang.srt.entrypoints.engine",
    ),
    "sglang_url": EngineEntry(
        "megarl.rollout.engines.sglang_servers:SGLangServers",
        EngineCapabilities(continuous_batching=True, remote=True, weight_backend="http"),
        package="aiohttp",
        install="pip install 'megarl[agents]'",
    ),
}
