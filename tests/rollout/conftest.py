"""Tiny random models of every family, made once, and engines that run them."""

from __future__ import annotations

import json
import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megarl.data.batch import RolloutBatch, TrainBatch
from megarl.parallel.delivery import deliver
from megarl.parallel.objects import decode, encode
from megarl.rollout.engines.transformers_engine import TransformersEngine
from megarl.rollout.rank import RolloutRank
from megarl.rollout.state import RolloutShare, join_shares
from tests.engines import load_folder
from tests.tiny_models import make_tiny_model

FAMILIES = ["qwen2", "qwen3", "llama", "glm4", "qwen3_5_text"]
TINIEST = {"layers": 1, "hidden": 16, "heads": 2, "kv_heads": 1, "ffn": 16, "head_dim": 8}
EOS = 1
LIMIT = 120  # seconds to wait for a thread


class Meeting:
    """all_gather among threads. A missing thread breaks the barrier after LIMIT; the test does not hang."""

    def __init__(self, world: int) -> None:
        self.barrier, self.values = threading.Barrier(world), [None] * world
        self.post: Any = defaultdict(queue.Queue)  # by sender and receiver

    def gather(self, rank: int) -> Callable[[Any], list[Any]]:
        def exchange(value: Any) -> list[Any]:
            self.values[rank] = value
            self.barrier.wait(LIMIT)
            result = list(self.values)
            self.barrier.wait(LIMIT)
            return result

        return exchange

    def ranks(self) -> list[Any]:
        world = len(self.values)
        return [
            SimpleNamespace(rank=rank, world=world, gather=self.gather(rank), post=self.post)
            for rank in range(world)
        ]


def threads(world: int) -> list[Any]:
    """Return runtimes for ranks that are threads."""
    return Meeting(world).ranks()


def state_of(rank: RolloutRank) -> dict[str, Any]:
    """Join the snapshots of all ranks, through JSON. Every rank must call this."""
    own = rank.snapshot()
    first, *others = rank.ranks.gather(own if rank.ranks.rank == 0 else encode(own))
    shares = [first, *(decode(blob, RolloutShare, "a rank") for blob in others)]
    state: dict[str, Any] = json.loads(json.dumps(join_shares(shares)))
    return state


def delivered(batch: RolloutBatch) -> TrainBatch:
    """Return the whole batch, if one rank has all of it."""
    return deliver(threads(1)[0], batch, [range(batch.num_sequences)], [[0]])


@pytest.fixture(autouse=True)
def on_loopback(monkeypatch):
    """Let ranks that are threads connect like processes of one machine."""
    monkeypatch.setattr("megarl.rollout.messages.own_address", lambda: "127.0.0.1")
    monkeypatch.setattr("megarl.parallel.secret._secret", bytes(32))


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def gather_by_runtime() -> Iterator[None]:
    """Exchange objects through the test's runtime, as ranks are threads, but encoded as for processes."""

    def gather(runtime, value, kind):
        blobs = runtime.gather(encode(value))
        return [decode(blob, kind, f"rank {rank}") for rank, blob in enumerate(blobs)]

    def exchange(runtime, outgoing, incoming):
        for to, blob in outgoing.items():
            runtime.post[runtime.rank, to].put(bytes(blob.numpy()))
        found = {}
        for rank, size in incoming.items():
            blob = runtime.post[rank, runtime.rank].get(timeout=LIMIT)
            assert len(blob) == size
            found[rank] = torch.frombuffer(bytearray(blob), dtype=torch.uint8)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megarl.sync.weight_sync.gather_objects", gather)
        patch.setattr("megarl.rollout.rank.broadcast_from_rank_0", lambda *given: gather(*given)[0])
        patch.setattr("megarl.parallel.delivery.exchange", exchange)
        yield


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Return a model folder per name.

    qwen3 has tied embeddings and its own head size, llama has llama3 rope and equal head counts. grouped has
    four queries per key. experts is a mixture of experts, latents one with multi-latent attention."""
    root = tmp_path_factory.mktemp("rollout-models")
    return {
        "qwen2": make_tiny_model(root / "qwen2", "qwen2"),
        "qwen3": make_tiny_model(root / "qwen3", "qwen3", tied=True, head_dim=16),
        "llama": make_tiny_model(root / "llama", "llama", kv_heads=4, rope="llama3"),
        "glm4": make_tiny_model(root / "glm4", "glm4", head_dim=12),
        "qwen3_5_text": make_tiny_model(root / "qwen3_5", "qwen3_5_text", head_dim=16),
        "grouped": make_tiny_model(root / "grouped", "qwen3", heads=8, kv_heads=2, head_dim=32),
        "experts": make_tiny_model(root / "experts", "qwen3_moe"),
        "latents": make_tiny_model(root / "latents", "deepseek_v3"),
    }


@pytest.fixture(scope="session")
def make_engine(folders) -> Callable[..., TransformersEngine]:
    def make(family: str = "qwen3", **options) -> TransformersEngine:
        tokenizer = AutoTokenizer.from_pretrained(folders[family])
        engine = TransformersEngine(folders[family], **{"eos_ids": [EOS], "tokenizer": tokenizer, **options})
        engine.start()
        load_folder(engine, version=7)
        return engine

    return make


@pytest.fixture(scope="session")
def reference(folders) -> Callable[[str], torch.nn.Module]:
    """Load the same weights in plain transformers with eager attention."""
    return lambda family: AutoModelForCausalLM.from_pretrained(
        folders[family], dtype=torch.float32, attn_implementation="eager"
    ).eval()
