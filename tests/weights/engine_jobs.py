"""What ranks do in the tests of engine targets: quantised and checked transfers between real processes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megarl.config.errors import TransferError
from megarl.parallel.layout import Layout
from megarl.parallel.runtime import Runtime
from megarl.weights.layout import Shards, hf_shapes, megatron_layout, sglang_shards
from megarl.weights.plan import fp8_block, make_plan
from megarl.weights.transfer import FORMAT_DTYPES, Transfer


def whole_model(config: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """The Hugging Face tensors, normal, with outliers and one block of zeros."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in hf_shapes(config).items():
        tensors[name] = torch.randn(shape, generator=generator) * torch.rand((), generator=generator) * 0.1
        tensors[name].view(-1)[::997] *= 30
        if "down_proj" in name:
            tensors[name][:128, :128] = 0
    return tensors


def sliced(shards: Shards, hf: dict[str, Tensor]) -> dict[str, Tensor]:
    """A rank's tensors out of the whole ones."""
    tensors = {}
    for name, shard in shards.items():
        tensors[name] = torch.zeros(shard.shape, dtype=next(iter(hf.values())).dtype)
        for region in shard.regions:
            to, from_ = (tuple(slice(*ends) for ends in box) for box in (region.local_box, region.hf_box))
            tensors[name][to] = hf[region.hf_name][from_]
    return tensors


def into_engines(
    runtime: Runtime, config: dict[str, Any], layout: Layout, tps: list[tuple[int, int]], fp8: bool, bucket: int, dtype: torch.dtype
) -> tuple[dict[str, Tensor], str, list[str], int]:
    """Every rank r is rank tps[r][1] of an engine of tensor-parallel size tps[r][0]; two ranks are a node. Returns its tensors after two
    transfers of weights that changed in between, what the check says after one bit of a tensor of rank 1 was turned, what it said before,
    and how many copies go from one rank of a node to the other when it has received them."""
    sources = megatron_layout(config, layout)
    shards = {place: sglang_shards(config, *place) for place in tps}
    targets = [(rank, shards[place]) for rank, place in enumerate(tps)]
    formats: dict[str, str] = {}
    if fp8:
        sources, targets, formats = fp8_block(sources, targets, hf_shapes(config))
    plan = make_plan(sources, targets, formats=formats, gpus_per_node=2)
    plan.verify()
    weights = sliced({n: s for n, s in plan.sources[runtime.rank].items() if not n.endswith("_scale_inv")}, whole_model(config, 1))
    mine = plan.targets[runtime.rank]
    out = {n: torch.zeros(s.shape, dtype=FORMAT_DTYPES[formats[n]] if n in formats else dtype) for n, s in mine.items()}
    transfer = Transfer(plan, runtime.rank, weights, out, bucket, dtype=dtype)
    failed = []
    for seed in (1, 2):
        for name, tensor in sliced({n: plan.sources[runtime.rank][n] for n in weights}, whole_model(config, seed)).items():
            weights[name].copy_(tensor)
        transfer.run()
        try:
            transfer.check()
        except TransferError as error:
            failed.append(str(error))
    result = {name: tensor.clone() for name, tensor in out.items()}
    if runtime.rank == 1:
        name = next(name for name in out if "norm" in name)
        out[name].view(torch.int16 if dtype.itemsize == 2 else torch.int32)[3] ^= 1
    try:
        transfer.check()
        said = ""
    except TransferError as error:
        said = str(error)
    return result, said, failed, len(plan.relays)
