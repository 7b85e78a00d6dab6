"""megarl's code inside SGLang's processes, without an engine: device copies and waits, loading, sleep."""

from __future__ import annotations

import asyncio
import json
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megarl.rollout.sampling import SamplingParams, choose

if find_spec("sglang") is not None:  # otherwise conftest.py skips these tests
    from megarl.rollout.engines import sglang_host  # noqa: F401 (installs the stubs)
# Tensors made from Python numbers, and tensors that Python reads: on a GPU each is a blocking copy.
BLOCKING = {
    "aten.lift_fresh.default",
    "aten._local_scalar_dense.default",
    "aten.nonzero.default",
    "aten._pin_memory.default",
}


class Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(str(func))
        return func(*args, **(kwargs or {}))


def make_sampler() -> Any:
    from megarl.rollout.engines.sglang_inside import SeededSampler

    sampler = SeededSampler.__new__(SeededSampler)  # its constructor needs a running scheduler
    torch.nn.Module.__init__(sampler)
    sampler._sync_token_ids_across_tp = lambda tokens, info: None
    return sampler


def row(seed: int, prompt: int, **changes: Any) -> dict[str, Any]:
    return {"seed": seed, "prompt": prompt, "temperature": 1.0, "top_p": 1.0, "top_k": 0, **changes}


def step(sampler: Any, info: Any, positions: list[int]) -> tuple[list[int], set[str]]:
    """Sample a token per row, compare it with the reference, and return the device operations too."""
    logits = torch.randn(len(positions), 300, generator=torch.Generator().manual_seed(sum(positions)))
    at = torch.tensor(positions)
    with Watch() as watch:
        output = SimpleNamespace(next_token_logits=logits)
        tokens = sampler(output, info, True, [], [], at)
    for i, own in enumerate(info.custom_params):
        params = SamplingParams(0, own["temperature"], own["top_p"], own["top_k"])
        expected, _ = choose(
            logits[i : i + 1],
            torch.tensor([own["seed"]]),
            torch.tensor([positions[i] + 1 - own["prompt"]]),
            params,
        )
        assert tokens[i] == expected[0]
    if any(own.get("sampling_sets") for own in info.custom_params):
        mask, rows = output.sampling_mask_output, info.sampling_mask_batch_indices.tolist()
        assert mask.token_ids.shape == (len(rows), 5) and mask.lengths.tolist() == [5] * len(rows)
        assert all(tokens[row] in ids for row, ids in zip(rows, mask.token_ids.tolist(), strict=True))
    return tokens.tolist(), watch.seen


@pytest.mark.parametrize("changes", [{}, {"temperature": 0.7, "top_p": 0.9}], ids=["one kind", "two kinds"])
def test_nothing_is_copied_from_token_to_token(changes: dict[str, Any]) -> None:
    """An unchanged batch needs no copies; after requests leave or join, the new rows are used at once."""
    sampler = make_sampler()
    info = SimpleNamespace(custom_params=[row(11, 3), row(12, 5), row(13, 4, **changes)])
    assert step(sampler, info, [2, 4, 3])[1] & BLOCKING
    for token in range(1, 4):
        copy = SimpleNamespace(custom_params=info.custom_params)  # SamplingBatchInfo.copy_for_forward
        assert not step(sampler, copy, [2 + token, 4 + token, 3 + token])[1] & BLOCKING
    info.custom_params.extend([row(14, 7)])  # merge_batch
    step(sampler, info, [6, 8, 7, 6])
    info.custom_params = [info.custom_params[i] for i in (1, 3)]  # filter_batch
    step(sampler, info, [9, 7])
    assert not step(sampler, info, [10, 8])[1] & BLOCKING


def test_a_chains_tokens_are_those_of_its_request() -> None:
    """Each position of each request is sampled with the request's own seed and settings."""
    from megarl.rollout.engines.sglang_inside import SeededRows

    rows = [row(11, 3), row(12, 5, temperature=0.7, top_p=0.9), row(13, 4)]
    positions = torch.tensor([[7, 8, 9, 10], [5, 6, 7, 8], [4, 5, 6, 7]])
    logits = torch.randn(12, 300, generator=torch.Generator().manual_seed(0))
    chosen = SeededRows().choose(rows, logits, positions.flatten(), 4)
    assert chosen is not None
    for i, (own, place) in enumerate(
        (own, place) for own, line in zip(rows, positions, strict=True) for place in line
    ):
        params = SamplingParams(0, own["temperature"], own["top_p"], own["top_k"])
        index = torch.tensor([int(place) + 1 - own["prompt"]])
        token, logprob = choose(logits[i : i + 1], torch.tensor([own["seed"]]), index, params)
        assert chosen[0][i] == token[0] and chosen[1][i] == logprob[0]


def test_sets_are_those_of_the_rows_that_want_them() -> None:
    """Recording copies nothing from token to token, and may differ from row to row."""
    sampler, recorded = make_sampler(), {"top_k": 5, "sampling_sets": True}
    info = SimpleNamespace(custom_params=[row(11, 3), row(12, 5, **recorded), row(13, 4, **recorded)])
    info.sampling_mask_batch_indices = torch.tensor([1, 2])
    step(sampler, info, [2, 4, 3])
    assert not step(sampler, info, [3, 5, 4])[1] & BLOCKING
    info = SimpleNamespace(custom_params=info.custom_params[1:], sampling_mask_batch_indices=torch.arange(2))
    step(sampler, info, [6, 5])


def test_the_device_has_read_a_bucket_when_its_loader_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bucket's memory is overwritten as soon as SGLang has answered."""
    from megarl.rollout.engines.sglang_inside import load_shards

    model = torch.nn.Linear(4, 3, bias=False)
    values = torch.arange(12.0).view(3, 4)
    found: list[bool] = []
    monkeypatch.setattr(
        torch.cpu, "synchronize", lambda *arguments: found.append(torch.equal(model.weight.data, values))
    )
    part = {"tensors": {"weight": (0, [3, 4], "float32")}, "complete": ["weight"]}
    load_shards(model, [(json.dumps(part), values.view(-1).view(torch.uint8))])
    assert found == [True]


def test_scales_of_a_kv_cache_are_the_engines_own_and_one() -> None:
    """With FP8 weights, attention has these scales as parameters, and a sleep leaves them undefined."""
    from megarl.rollout.engines.sglang_inside import load_shards

    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.zeros(3, 4))
    model.attn = torch.nn.Module()
    for name in ("k_scale", "v_scale"):
        model.attn.register_parameter(name, torch.nn.Parameter(torch.tensor(torch.nan), requires_grad=False))
    layer = torch.nn.Module()
    layer.self_attn = model
    part = {"tensors": {"self_attn.weight": (0, [3, 4], "float32")}, "complete": ["self_attn.weight"]}
    memory = torch.arange(12.0).view(torch.uint8)
    load_shards(layer, [(json.dumps(part), memory)])
    assert (model.attn.k_scale, model.attn.v_scale) == (1.0, 1.0)
    assert torch.equal(model.weight, torch.arange(12.0).view(3, 4))
    layer.other = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(ValueError, match=r"do not share: \['other'\]"):
        load_shards(layer, [(json.dumps(part), memory)])


def test_what_sglang_derives_from_weights_follows_them() -> None:
    """Norms around zero buffer 1 + weight for kernels that fuse the all-reduce with the norm."""
    from sglang.srt.layers.layernorm import GemmaRMSNorm

    from megarl.rollout.engines.sglang_inside import load_shards

    model = torch.nn.Module()
    model.norm = GemmaRMSNorm(4)
    values = torch.tensor([0.5, -1.0, 0.0, 2.0])
    part = {"tensors": {"norm.weight": (0, [4], "float32")}, "complete": ["norm.weight"]}
    load_shards(model, [(json.dumps(part), values.view(torch.uint8))])
    assert torch.equal(model.norm.weight, values)
    assert torch.equal(model.norm.gemma_weight, 1 + values)


def test_sleep_ends_when_all_ranks_have_freed_their_memory() -> None:
    """SGLang answers for its first rank only, so a call that ends in a barrier follows."""
    from megarl.rollout.engines.sglang_host import Calls

    order: list[Any] = []

    async def flush() -> Any:
        return SimpleNamespace(success=True)

    async def release(request: Any, _: Any) -> None:
        order.append(request.tags)

    manager = SimpleNamespace(flush_cache=flush, release_memory_occupation=release)
    engine: Any = SimpleNamespace(
        tokenizer_manager=manager, collective_rpc=lambda method: order.append(method)
    )
    asyncio.run(Calls(engine).sleep(["kv_cache", "cuda_graph"]))
    assert order == [["kv_cache", "cuda_graph"], "flush_cache"]


def test_sglang_knows_all_that_it_is_told_on_a_gpu() -> None:
    import inspect

    from sglang.srt.server_args import ServerArgs

    from megarl.config import load_config
    from megarl.rollout.engines.sglang import SGLangEngine

    for weights in ("model", "fp8_block"):
        config = load_config(
            Path(__file__).parents[2] / "configs/vapo_32b.yaml", [f"rollout.weights_dtype={weights}"]
        )
        mixture = {"model_type": "glm4_moe", "n_routed_experts": 2, "n_shared_experts": 1}
        arguments = SGLangEngine(config, mixture, 0, torch.device("cuda", 0), (1,))._arguments()
        assert not arguments.keys() - inspect.signature(ServerArgs).parameters.keys()
