"""What kind of engine `rollout.engine` names: what checks, planner and weight transfers must know of it.
Imports without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

EngineName = Literal["transformers", "sglang", "sglang_url"]


@dataclass(frozen=True)
class EngineKind:
    """A kind of engine.

    sharded  it is divided over rollout.engine_tp ranks, each of which has SGLang's tensors (`sglang_shards`
             in weights/shards.py), in block FP8 where that is wanted; else each rank has a whole one, with
             the tensors of Hugging Face's files
    streams  it has processes of its own, which may hang and be started again: requests end one by one, its
             KV cache is what rollout.engine_memory leaves, weights go through staging memory; else it decodes
             in the rank, rollout.max_batch responses at once, and weights are written in place
    remote   it is servers that somebody else runs, at rollout.urls, and takes nothing of the ranks: the first
             of every rollout.engine_tp ranks is a client of some of them, and has the tensors of Hugging
             Face's files, a bucket at a time
    backend  that brings it new weights: a row of sync/backends
    package  that must be installed for it, besides what megarl needs
    install  how"""

    sharded: bool = False
    streams: bool = False
    remote: bool = False
    backend: str = "in_place"
    package: str = ""
    install: str = ""


ENGINES: dict[EngineName, EngineKind] = {
    "transformers": EngineKind(),
    "sglang": EngineKind(
        sharded=True,
        streams=True,
        backend="shared_memory",
        package="sglang",
        install="make install-gpu",
    ),
    "sglang_url": EngineKind(
        streams=True,
        remote=True,
        backend="http",
        package="aiohttp",
        install="pip install 'megarl[agents]'",
    ),
}
