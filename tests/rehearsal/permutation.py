"""Compare Transformer Engine's token permutation kernels with Megatron's operations.

`model.permute_fusion` selects the kernels, which sort a mixture's tokens by expert. Prints the names of
unequal results, or "equal". This is a program, because Triton's interpreter must be enabled before the first
kernel is defined."""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch
from triton.runtime.autotuner import Autotuner

from megarl.parallel.cpu_platform import _TorchWithoutCuda


def kernels() -> Any:
    """Import the functions that call the kernels, without the compiled half of their package."""
    found = importlib.util.find_spec("transformer_engine")
    assert found is not None and found.submodule_search_locations
    [root] = map(Path, found.submodule_search_locations)
    loaded = dict.fromkeys(
        ("transformer_engine", "transformer_engine.common", "transformer_engine.common.triton")
    )
    for name in loaded:
        sys.modules[name] = types.ModuleType(name)
    for name, path in {
        "transformer_engine.common.triton.permutation": root / "common/triton/permutation.py",
        "callers": root / "pytorch/triton/permutation.py",
    }.items():
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    for name in (*loaded, "transformer_engine.common.triton.permutation"):
        del sys.modules[name]
    vars(module)["torch"] = _TorchWithoutCuda("torch")
    return module


def unequal(fused: Any, dtype: torch.dtype, tokens: int, hidden: int, experts: int, topk: int) -> list[str]:
    """Return which results of permute, unpermute and sorting ranks' chunks differ from Megatron's."""
    from megatron.core.transformer.moe.moe_utils import permute, sort_chunks_by_idxs, unpermute

    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, hidden, generator=generator).to(dtype)
    scores, chosen = torch.randn(tokens, experts, generator=generator).softmax(-1).topk(topk)
    weights = torch.zeros(tokens, experts).scatter(1, chosen, scores)
    routing = weights > 0
    ours = permute(x, routing, probs=weights, num_out_tokens=tokens * topk)
    rows = fused.make_row_id_map(routing, tokens, experts)
    out, _, probs = fused.permute_with_mask_map(
        x, rows, weights, None, None, tokens, experts, tokens * topk, hidden, None
    )
    same = {"tokens": torch.equal(out, ours[0]), "weights": torch.equal(probs, ours[1])}

    made = (out.float() * probs[:, None]).to(dtype)
    back, _ = fused.unpermute_with_mask_map(made, rows, None, None, None, tokens, experts, hidden)
    exact = unpermute(made.double(), ours[2], restore_shape=x.shape, routing_map=routing)
    limit = 1e-6 if dtype == torch.float32 else 0.02
    same["sums"] = bool((back.double() - exact).abs().max() < limit)

    sizes = torch.randint(0, 5, (2 * experts,), generator=generator)  # chunks of two ranks; some are empty
    order, total = torch.arange(2 * experts).reshape(2, experts).T.ravel(), int(sizes.sum())
    chunks, of_each = torch.randn(total, hidden, generator=generator).to(dtype), torch.rand(total)
    ours = sort_chunks_by_idxs(chunks, sizes, order, probs=of_each)
    places = fused.make_chunk_sort_map(sizes, order, total, 2 * experts)
    theirs = fused.sort_chunks_by_map(chunks, places, of_each, total, hidden, is_forward=True)
    same["chunks"] = all(map(torch.equal, ours, theirs))
    return [f"{name} in {dtype}" for name, good in same.items() if not good]


if __name__ == "__main__":
    # The autotuner would time its settings: use the first.
    Autotuner.run = lambda self, *a, **k: self.fn.run(*a, **k, **self.configs[0].kwargs)  # type: ignore[method-assign]
    fused = kernels()
    sizes = ((37, 64, 8, 3), (16, 128, 16, 8))
    found = [
        text
        for dtype in (torch.float32, torch.bfloat16)
        for size in sizes
        for text in unequal(fused, dtype, *size)
    ]
    print(*(found or ["equal"]), sep="\n")
