"""Target tensors that are not of the model's dtype: block-quantised FP8 with scales, as regions. Imports without torch.

The convention is SGLang's and that of published block-FP8 checkpoints: `weight` float8_e4m3fn and, for every block of 128 x 128 of the
Hugging Face tensor, one float32 in `weight_scale_inv`, so that weight * scale is the original. The linear layers are quantised;
embeddings, the output layer, norms, biases and routers are not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from megarl.config.errors import ConfigError
from megarl.weights.families import Shape
from megarl.weights.layout import Box, Region, Shard, Shards, full_box

BLOCK = 128
SUFFIX = "_scale_inv"
FP8, FP32 = "float8_e4m3fn", "float32"
BYTES = {FP8: 1, FP32: 4}


def format_bytes(formats: Mapping[str, str], name: str, itemsize: int) -> int:
    """Bytes of an element of a target tensor; `itemsize`: of the model's dtype."""
    return BYTES[formats[name]] if name in formats else itemsize


def is_linear(hf_name: str) -> bool:
    """Whether block-FP8 checkpoints quantise this Hugging Face tensor."""
    return hf_name.endswith("_proj.weight")


def fp8_block(
    targets: Iterable[tuple[int, Shards]], shapes: Mapping[str, Shape]
) -> tuple[list[tuple[int, Shards]], Shards, dict[str, str]]:
    """Targets in FP8: (targets with scale tensors added, the scales as a source that every rank holds, formats by target name).

    `shapes`: of the Hugging Face tensors. In Hugging Face coordinates the scales of tensor x are x_scale_inv [rows / 128, columns / 128],
    rounded up. ConfigError, naming the tensor, if a shard does not begin and end with whole blocks; SGLang would refuse it as well.
    """
    done: dict[int, Shards] = {}
    formats: dict[str, str] = {}
    quantised = []
    for rank, shards in targets:
        if id(shards) not in done:
            mine = done[id(shards)] = dict[str, Shard]()
            for name, shard in shards.items():
                mine[name] = shard
                if shard.regions and all(is_linear(region.hf_name) for region in shard.regions):
                    mine[name + SUFFIX] = _scales(name, shard, shapes)
                    formats |= {name: FP8, name + SUFFIX: FP32}
        quantised.append((rank, done[id(shards)]))
    scales: Shards = {}
    for name, shape in shapes.items():
        if is_linear(name):
            blocks = _whole_blocks(full_box(shape))
            scales[name + SUFFIX] = Shard(tuple(stop for _, stop in blocks), (Region(name + SUFFIX, blocks, blocks),))
    return quantised, scales, formats


def _scales(name: str, shard: Shard, shapes: Mapping[str, Shape]) -> Shard:
    """The scales of a quantised target tensor."""
    if shard.padding:
        raise ConfigError(f"rollout.weights_dtype: fp8_block: the engine pads {name} {shard.shape} (choose a smaller rollout.engine_tp)")
    regions = []
    for region in shard.regions:
        shape = shapes[region.hf_name]
        for (start, stop), size, (first, _) in zip(region.hf_box, shape, region.local_box, strict=True):
            if start % BLOCK or first % BLOCK or (stop % BLOCK and stop != size):
                raise ConfigError(
                    f"rollout.weights_dtype: fp8_block: {name} of an engine's rank begins or ends within a block of {BLOCK}: it holds "
                    f"{start} to {stop} of {size} of {region.hf_name} {shape} (choose another rollout.engine_tp, or model)"
                )
        regions.append(Region(region.hf_name + SUFFIX, _whole_blocks(region.hf_box), _whole_blocks(region.local_box)))
    return Shard(tuple(-(-size // BLOCK) for size in shard.shape), tuple(regions))


def _whole_blocks(box: Box) -> Box:
    """A box that begins with a block, in blocks."""
    return tuple((start // BLOCK, -(-stop // BLOCK)) for start, stop in box)
