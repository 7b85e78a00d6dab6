"""Section `actor`, whose keys `critic` has too."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import field_validator

from megarl.config.schema.section import Section, as_list, field, section

# fmt: off
LoraTarget = Literal[
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "gate_up_proj",
    "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj",  # multi-latent attention
    "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "in_proj_qkvz", "in_proj_ba", "out_proj",  # linear
]
# fmt: on


class LoraConfig(Section):
    """LoRA (arXiv 2106.09685): layers compute W x + scale * B A x. Only A and B are trained."""

    rank: int | None = field(None, "rank of B A; null: no adapters, the model itself is trained", ge=1)
    alpha: float = field(32.0, "scale = alpha / rank", gt=0)
    rank_stabilized: bool = field(False, "scale = alpha / sqrt(rank)", source="arXiv 2312.03732")
    targets: tuple[LoraTarget, ...] = field(
        (),
        "matrices with adapters, by their Hugging Face names, e.g. [q_proj, v_proj]; []: all of the layers'",
    )

    @property
    def scale(self) -> float:
        rank = self.rank or 1
        return self.alpha / (math.sqrt(rank) if self.rank_stabilized else rank)


class MuonConfig(Section):
    """Muon (arXiv 2502.16982, algorithm 1 and equation 4).

    m = momentum m + g; W -= lr (O sqrt(max(rows, columns)) scale + weight_decay W). O is close to U V^T of
    the SVD of g + momentum m: Newton-Schulz steps with Jordan's coefficients (3.4445, -4.775, 2.0315)."""

    momentum: float = field(0.95, "decay of the gradients' sum", source="arXiv 2502.16982", ge=0, lt=1)
    steps: int = field(5, "Newton-Schulz steps", "steps", "arXiv 2502.16982, section 2.1", ge=1)
    scale: float = field(
        0.2,
        "root mean square of a matrix's update at lr 1: as AdamW's, whose lr and weight_decay then fit",
        source="arXiv 2502.16982, equation 4",
        gt=0,
    )


class OptimizerConfig(Section):
    """Optimizer and learning-rate schedule, with one scheduler step per rollout step."""

    optimizer: Literal["adam", "muon"] = field(
        "adam",
        "muon: the layers' matrices by Muon, whole, each on one replica; embeddings, output layer, norms, "
        "biases and value head by AdamW (algorithms.md)",
        source="arXiv 2502.16982",
    )
    muon: MuonConfig = section(MuonConfig)
    lr: float = field(1e-6, "peak learning rate", "", "DAPO section 4.1, VAPO section 5.1: actor 1e-6", gt=0)
    schedule: Literal["constant", "linear", "cosine"] = field(
        "constant", "learning rate after the warm-up", "", "VAPO section 5.1: warm-up-constant"
    )
    warmup_steps: int = field(0, "linear warm-up", "rollout steps", "DAPO section 4.1: 20", ge=0)
    min_lr_ratio: float = field(0.0, "last learning rate / peak, for linear and cosine", ge=0, le=1)
    betas: tuple[float, float] = field((0.9, 0.999), "AdamW betas")
    eps: float = field(1e-8, "AdamW epsilon", gt=0)
    weight_decay: float = field(0.0, "decoupled weight decay", ge=0)
    clip_grad: float = field(1.0, "global gradient norm is clipped to this; 0 turns clipping off", ge=0)
    frozen: tuple[Literal["attention", "embeddings"], ...] = field(
        (),
        "parts of all layers that are not trained, and have no gradients or optimizer state (algorithms.md)",
        source="none in DAPO and VAPO; SAO: the critic's attention",
    )
    frozen_layers: int = field(0, "lowest layers that are not trained, whole", "layers", ge=0)
    lora: LoraConfig = section(LoraConfig)

    _frozen_as_list = field_validator("frozen", mode="before")(as_list)

    @property
    def freezes(self) -> bool:
        return bool(self.frozen or self.frozen_layers or self.lora.rank)
