"""The table of rollout engines: for each name of `rollout.engine` its class and its capabilities.

Checks and planner read it without torch. A new engine is a row here, its name in `EngineName`, and a file in
rollout/engines.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

EngineName = Literal["transformers", "sglang", "sglang_url"]


@dataclass(frozen=True)
class EngineCapabilities:
    """What an engine can do, as checks, planner, controller and weight sync read it.

    continuous_batching  requests end one by one, in processes of the engine, which may hang and be restarted.
                         Its KV cache is what rollout.engine_memory leaves. Without it the engine decodes in
                         the rank, rollout.max_batch responses at once
    sharded              an engine spans rollout.engine_tp ranks, each with SGLang's tensors (`sglang_shards`
                         in weights/shards.py), in block FP8 if wanted. Without it each rank has an engine,
                         with the tensors of Hugging Face's files
    remote               servers at rollout.urls, which take nothing of the ranks. The first of every
                         rollout.engine_tp ranks is a client of some of them, with the tensors of Hugging
                         Face's files
    takes_options        rollout.engine_options are arguments of it
    weight_backend       brings new weights into it: a row of `BACKENDS` in sync/backends
    """

    continuous_batching: bool = False
    sharded: bool = False
    remote: bool = False
    takes_options: bool = False
    weight_backend: str = "in_place"


@dataclass(frozen=True)
class EngineEntry:
    """One engine.

    implementation  its class, as module:class
    package         to be installed for it, in addition to megarl's requirements
    install         command that installs the package
    import_test     statement that a sound installation of the package runs
    """

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
        # megarl's module stands for what a CPU lacks.
        import_test="import megarl.rollout.engines.sglang_host, sglang.srt.entrypoints.engine",
    ),
    "sglang_url": EngineEntry(
        "megarl.rollout.engines.sglang_servers:SGLangServers",
        EngineCapabilities(continuous_batching=True, remote=True, weight_backend="http"),
        package="aiohttp",
        install="pip install 'megarl[agents]'",
    ),
}
