"""Random configurations and Hugging Face folders whose every number is different, so that mistakes show."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from megarl.parallel.layout import Layout
from megarl.sync.plan import Plan
from megarl.weights.families import FAMILIES
from megarl.weights.hf import HFFolder, load_into
from megarl.weights.shards import Shards, hf_shapes

PREFIX = {
    name: family.prefix for name, family in FAMILIES.items() if not family.is_moe and not family.is_linear
}


def described(
    model_type: str, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, **keys: Any
) -> dict[str, Any]:
    """Return a config.json of these sizes."""
    return {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        **keys,
    }


def set_config(folder: Path, **changes: Any) -> None:
    """Change keys of a folder's config.json."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


@st.composite
def hf_configs(
    draw: st.DrawFn, tps: tuple[int, ...] = (1, 2, 4), pps: tuple[int, ...] = (1, 2, 4)
) -> tuple[dict[str, Any], list[Layout]]:
    """A config.json and two layouts that fit it: 1 to 7 queries per group, prime vocabularies, head_dim
    unlike hidden / heads."""
    layouts = [
        Layout(tp=draw(st.sampled_from(tps)), pp=draw(st.sampled_from(pps)), dp=draw(st.integers(1, 3)))
        for _ in range(2)
    ]
    kv_heads = (
        4 * draw(st.integers(1, 2)) if any(layout.tp > 1 for layout in layouts) else draw(st.integers(1, 3))
    )
    heads = kv_heads * draw(st.sampled_from((1, 2, 7)))
    family = draw(st.sampled_from(sorted(PREFIX)))
    config = {
        "model_type": family,
        "architectures": [f"{PREFIX[family]}ForCausalLM"],
        "num_hidden_layers": max(layout.pp for layout in layouts) * draw(st.integers(1, 2)),
        "hidden_size": heads * 2 * draw(st.integers(1, 2)),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": 4 * draw(st.integers(1, 3)),
        "vocab_size": draw(st.sampled_from((1, 2, 5, 13, 31, 32))),
        "tie_word_embeddings": draw(st.booleans()),
    }
    for key in {pair.switch for pair in FAMILIES[family].layer} - {""}:
        config[key] = draw(st.booleans())
    if draw(st.booleans()):
        config["head_dim"] = 2 * draw(st.integers(1, 3))  # rotary embeddings turn pairs
    return config, layouts


def numbered(config: dict[str, Any], *, critic: bool = False) -> dict[str, Tensor]:
    """Every element of the model has a number of its own, exact in float32."""
    tensors, start = {}, 1
    for name, shape in hf_shapes(config, critic=critic).items():
        size = prod(shape)
        tensors[name] = torch.arange(start, start + size, dtype=torch.float32).view(shape)
        start += size
    assert start < 2**24
    return tensors


def write_folder(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """config.json and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def folder_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a folder's safetensors files."""
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Return whether both have the same tensors, NaNs with their payloads among them."""
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype and torch.equal(a[name].view(torch.uint8), b[name].view(torch.uint8))
        for name in a
    )


def loaded(
    layout: list[tuple[int, Shards]], folder: HFFolder, dtype: torch.dtype = torch.float32
) -> dict[int, dict[str, Tensor]]:
    """Return rank -> local tensors read from the folder; what is not written stays NaN."""
    ranks = {}
    for rank, shards in layout:
        ranks[rank] = {
            name: torch.full(shard.shape, torch.nan, dtype=dtype) for name, shard in shards.items()
        }
        assert load_into(ranks[rank], shards, folder) == []
    return ranks


def sliced(shards: Shards, hf: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a rank's tensors, cut out of the whole ones."""
    tensors = {}
    for name, shard in shards.items():
        tensors[name] = torch.zeros(shard.shape, dtype=next(iter(hf.values())).dtype)
        for region in shard.regions:
            to, from_ = (tuple(slice(*ends) for ends in box) for box in (region.local_box, region.hf_box))
            tensors[name][to] = hf[region.hf_name][from_]
    return tensors


def execute(plan: Plan, sources: dict[int, dict[str, Tensor]]) -> dict[int, dict[str, Tensor]]:
    """Carry out a plan by plain slicing in one process; target elements that no copy writes stay NaN."""
    targets = {
        r: {n: torch.full(s.shape, torch.nan) for n, s in shards.items()}
        for r, shards in plan.targets.items()
    }
    for copies, from_ in ((plan.copies, sources), (plan.relays, targets)):
        for copy in copies:
            src, dst = (tuple(slice(*ends) for ends in box) for box in (copy.src_box, copy.dst_box))
            targets[copy.dst_rank][copy.dst_name][dst] = from_[copy.src_rank][copy.src_name][src]
    return targets
