"""Build Megatron models from a Hugging Face configuration.

Only the critic's head is initialised here; megarl/weights loads the rest."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings import RotaryEmbedding
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor
from torch.nn.utils import skip_init
from transformers import PretrainedConfig

from megarl.config.errors import ConfigError
from megarl.config.schema import Config, ModelConfig, OptimizerConfig
from megarl.model.fp8 import check_device, fp8_options
from megarl.model.hf_config import rope_frequencies, yarn_softmax
from megarl.model.logprob_head import vocab_parallel_logprobs, vocab_parallel_top_k
from megarl.model.lora import attach_adapters
from megarl.model.portable import (
    AddToResidual,
    GatedAttention,
    GatedDeltaNet,
    LatentAttention,
    PackedAttention,
    PackedPlan,
    Prompts,
    RMSNorm,
)
from megarl.model.routing import Routing, watch_routers
from megarl.parallel.cpu_platform import on_cpu
from megarl.parallel.layout import padded_vocab
from megarl.parallel.machine import transformer_engine_problem
from megarl.parallel.runtime import Runtime
from megarl.weights.families import Family, Sizes, get_family, is_frozen, rename_to_table
from megarl.weights.shards import parameters

LAYER = re.compile(r"(?<=decoder\.layers\.)\d+")
MODULES = {"attention": "core_attn", "mlp": "mlp"}  # model.recompute_modules: Megatron's names
# Norms of latents use this, not rms_norm_eps (DeepseekV3RMSNorm in transformers).
LATENT_EPS = 1e-6
_ATTENTION = "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention"
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def choose_layers(model: ModelConfig, device: torch.device) -> str:
    """Return `te` or `portable`.

    Raises ConfigError if te or FP8 is wanted and CUDA, Transformer Engine or FP8 hardware is missing."""
    fp8 = model.fp8.format != "none"
    expert_keys = [key for key in ("grouped_experts", "permute_fusion") if getattr(model, key)]
    requires_te = model.layers == "te" or fp8 or expert_keys
    if not requires_te and (model.layers == "portable" or device.type != "cuda"):
        return "portable"
    problem = transformer_engine_problem(device.type)
    if problem and requires_te:
        key = "model.fp8.format: " if fp8 else "model.layers: te "
        key = f"model.{expert_keys[0]}: " if expert_keys else key
        raise ConfigError(f"{key}{problem} (make install-gpu, or use portable layers without FP8)")
    if fp8:
        check_device(model.fp8.recipe, device)
    return "portable" if problem else "te"


def warn_unfused_attention(model: ModelConfig) -> str:
    """Return a warning if Transformer Engine's last pass used unfused attention; empty if not.

    In float32 it has no other kernel."""
    module = sys.modules.get(_ATTENTION)
    is_unfused = module and vars(module)["_attention_backends"]["use_unfused_attention"]
    if not is_unfused or model.dtype == "fp32" or model.attention != "auto":
        return ""
    problem = "attention is unfused and keeps all scores in memory: no fused kernel takes these shapes"
    return f"{problem} (NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 shows why; model.attention=fused makes it an error)"


def _has_apex() -> bool:
    try:
        importlib.import_module("fused_weight_gradient_mlp_cuda")
    except ImportError:
        return False
    return True


class _Body(GPTModel):
    """GPTModel over packed sequences that stops at the hidden states."""

    def __init__(
        self, config: Config, hf: PretrainedConfig, runtime: Runtime, vp_stage: int, *, tied: bool
    ) -> None:
        family = get_family(hf.to_dict())
        layers_kind = "portable" if family.is_linear else choose_layers(config.model, runtime.device)
        sizes = Sizes.from_config(hf.to_dict())
        transformer_config = _transformer_config(config, hf, runtime, layers_kind, family, sizes)
        lora = config.critic.lora if isinstance(self, Critic) else config.actor.lora
        layer_indices = runtime.layout.layers(sizes.layers, runtime.pp_rank)
        layers_per_chunk = len(layer_indices) // runtime.layout.vpp
        layer_indices = layer_indices[layers_per_chunk * vp_stage : layers_per_chunk * (vp_stage + 1)]
        super().__init__(
            config=transformer_config,
            transformer_layer_spec=_block_spec(
                transformer_config, layers_kind, family, sizes, layer_indices, adapters=lora.rank is not None
            ),
            vocab_size=padded_vocab(hf.vocab_size, runtime.layout.tp),
            max_sequence_length=hf.max_position_embeddings,
            pre_process=runtime.pp_rank == 0 and vp_stage == 0,
            post_process=runtime.is_last_stage and vp_stage == runtime.layout.vpp - 1,
            share_embeddings_and_output_weights=tied,
            position_embedding_type="rope",
            vp_stage=vp_stage,
        )
        if config.update.share_prompts and layers_kind != "portable":
            what = f"needs portable layers, and model.layers {config.model.layers} chose {layers_kind}"
            raise ConfigError(f"update.share_prompts: {what} here (set it to false, or layers to portable)")
        self.layers_kind = layers_kind
        self.input_needs_gradient = False  # see _prepare
        if family.is_latent:  # Megatron creates a rotary embedding in each layer; share one
            self.rotary_pos_emb = RotaryEmbedding(
                hf.qk_rope_head_dim,
                1.0,
                use_cpu_initialization=transformer_config.use_cpu_initialization,
                cp_group=self.pg_collection.cp,
            )
            for attention in (layer.self_attention for layer in self.decoder.layers):
                if layers_kind == "te":
                    attention.rotary_pos_emb = self.rotary_pos_emb
                for norm in (attention.kv_layernorm, getattr(attention, "q_layernorm", None)):
                    if norm is not None:
                        norm.eps = LATENT_EPS
        self.rotary_pos_emb.inv_freq = rope_frequencies(hf).to(runtime.device)
        # Angles of all positions; `_preprocess` or Transformer Engine selects this rank's.
        self.rotary_pos_emb.cp_group = None
        self.cp_rank = runtime.cp_rank
        self.routings = watch_routers(self, runtime.device)
        for layer in self.decoder.layers if family.has("router.expert_bias") else ():
            if hasattr(layer.mlp, "router"):
                # Megatron would update its buffer. A frozen parameter is also loaded, saved and transferred.
                bias = torch.zeros(sizes.experts, dtype=torch.float32)
                layer.mlp.router.expert_bias = torch.nn.Parameter(bias, requires_grad=False)

    def pack(self, cu_seqlens: Tensor, prompts: Prompts | None = None) -> Any:
        """Return Megatron's description of packed sequences; `routing` and `real_tokens` are None.

        Args:
            cu_seqlens: int64 [n+1] on the host, of the whole pack
            prompts: see model/portable.py"""
        device, cp = self.rotary_pos_emb.inv_freq.device, self.config.context_parallel_size
        packed: Any
        if self.layers_kind == "portable":
            packed = PackedPlan.make(cu_seqlens, device, cp, self.cp_rank, prompts)
        else:
            max_seqlen = int(cu_seqlens.diff().max())
            max_lengths = {"max_seqlen_q": max_seqlen, "max_seqlen_kv": max_seqlen}
            device_cu_seqlens = cu_seqlens.to(device, torch.int32)
            packed = PackedSeqParams(
                qkv_format="thd",
                cu_seqlens_q=device_cu_seqlens,
                cu_seqlens_kv=device_cu_seqlens,
                **max_lengths,
            )
            if cp > 1:  # Transformer Engine's ring attention needs these (context_parallel.py)
                packed.cu_seqlens_q_padded = packed.cu_seqlens_kv_padded = device_cu_seqlens
        packed.real_tokens = packed.routing = None
        return packed

    def forward(
        self, tokens: Tensor, positions: Tensor, packed: PackedSeqParams, indices: Tensor, labels: Tensor
    ) -> Any:
        """Return the head's output; before the last pipeline stage, the hidden states.

        Under context parallelism all arguments are this rank's part.

        Args:
            tokens, positions: int64 [1, t]
            indices: int64 [r], positions in the pack that predict a token
            labels: int64 [r] or [r, m], the predicted tokens or m candidates"""
        hidden = super().forward(tokens, positions, None, packed_seq_params=packed)
        return self._head(hidden, indices, labels) if self.post_process else hidden

    def _head(self, hidden: Tensor, indices: Tensor, labels: Tensor) -> Any:
        raise NotImplementedError

    def _preprocess(self, *args: Any, position_ids: Tensor, **kwargs: Any) -> Any:
        outputs = super()._preprocess(*args, position_ids=position_ids, **kwargs)
        if self.input_needs_gradient and torch.is_grad_enabled():
            outputs[0].requires_grad_()
        if self.layers_kind == "portable":
            # One row of angles per token lets Megatron rotate the whole pack at once.
            if isinstance(self.config, MLATransformerConfig):
                packed = kwargs["packed_seq_params"]
                angles = self.rotary_pos_emb(packed.max_seqlen_q)
                packed.angles = angles.index_select(0, position_ids.flatten()).squeeze(1)
                return outputs
            angles = outputs[1].index_select(0, position_ids.flatten())
            outputs = (outputs[0], angles, *outputs[2:])
        return outputs

    def _postprocess(self, hidden_states: Tensor, **_: Any) -> Tensor:
        return hidden_states


class Actor(_Body):
    """forward(...) -> logprobs, float32 like the labels, and entropy, float32 [r].

    With `sums_squares`, also sum_v p(v)^2, float32 [r].
    With `top_k` = (k, limit): the top k tokens below `limit`, as logprobs float32 and tokens int64 [r, k]."""

    top_k: tuple[int, int] | None = None
    sums_squares = False

    def __init__(self, config: Config, hf: PretrainedConfig, runtime: Runtime, vp_stage: int) -> None:
        super().__init__(config, hf, runtime, vp_stage, tied=bool(hf.tie_word_embeddings))
        shard = padded_vocab(hf.vocab_size, runtime.layout.tp) // runtime.layout.tp
        self.vocab_start = shard * runtime.tp_rank
        self.vocab_shard_size = max(0, min(shard, hf.vocab_size - self.vocab_start))
        self.temperature, self.chunk = config.rollout.temperature, config.update.logprob_chunk

    def _head(self, hidden: Tensor, indices: Tensor, labels: Tensor) -> Any:
        group = self.pg_collection.tp if self.config.tensor_model_parallel_size > 1 else None
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        elif group is not None:
            hidden = copy_to_tensor_model_parallel_region(hidden)
        is_tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if is_tied else self.output_layer.weight
        head_inputs = hidden.squeeze(1).index_select(0, indices), weight
        options: dict[str, Any] = {
            "vocab_start": self.vocab_start,
            "vocab_shard_size": self.vocab_shard_size,
            "temperature": self.temperature,
            "chunk": self.chunk,
            "group": group,
        }
        if self.top_k is not None:
            return vocab_parallel_top_k(*head_inputs, *self.top_k, **options)
        return vocab_parallel_logprobs(*head_inputs, labels, sums_squares=self.sums_squares, **options)


class Critic(_Body):
    """forward(...) -> values, float32 [r]."""

    def __init__(self, config: Config, hf: PretrainedConfig, runtime: Runtime, vp_stage: int) -> None:
        super().__init__(config, hf, runtime, vp_stage, tied=False)
        if self.post_process:
            del self.output_layer
            self.value_head = skip_init(
                torch.nn.Linear, hf.hidden_size, 1, bias=False, dtype=torch.float32, device=runtime.device
            )
            torch.nn.init.zeros_(self.value_head.weight)
            # Each rank has part of the tokens; Megatron sums marked gradients.
            self.value_head.weight.sequence_parallel = self.config.sequence_parallel
            # Megatron's Muon leaves marked parameters to Adam.
            self.value_head.weight.is_embedding_or_output_parameter = True

    def _head(self, hidden: Tensor, indices: Tensor, labels: Tensor) -> Tensor:
        values = self.value_head(hidden.float()).squeeze(-1)
        if self.config.sequence_parallel:
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values.squeeze(1).index_select(0, indices)


class ModelChunks(torch.nn.Module):
    """A rank's part of a model: one chunk per virtual stage, in forward order."""

    def __init__(
        self, kind: type[Actor | Critic], config: Config, hf: PretrainedConfig, runtime: Runtime
    ) -> None:
        super().__init__()
        with on_cpu():
            chunks = [kind(config, hf, runtime, stage) for stage in range(runtime.layout.vpp)]
        self.chunks: Any = torch.nn.ModuleList(chunks)

    @property
    def config(self) -> TransformerConfig:
        """Return the first chunk's config, the only one that Megatron's schedule reads."""
        return self.chunks[0].config

    @property
    def device(self) -> torch.device:
        return self.chunks[0].rotary_pos_emb.inv_freq.device

    @property
    def routings(self) -> list[Routing]:
        return [routing for chunk in self.chunks for routing in chunk.routings]

    def pack(self, cu_seqlens: Tensor, prompts: Prompts | None = None) -> Any:
        """See `_Body.pack`."""
        return self.chunks[0].pack(cu_seqlens, prompts)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        """Number layers through all chunks of the rank."""
        layer_offset = 0
        for chunk in self.chunks:
            for name, parameter in chunk.named_parameters(*args, **kwargs):
                yield LAYER.sub(lambda match: str(int(match[0]) + layer_offset), name), parameter  # noqa: B023
            layer_offset += len(chunk.decoder.layers)


def build_actor(config: Config, hf: PretrainedConfig, runtime: Runtime) -> ModelChunks:
    """Build this rank's part of the actor, with undefined weights."""
    model = ModelChunks(Actor, config, hf, runtime)
    return _prepare(model, hf, config.actor, config.seed, runtime)


def build_critic(config: Config, hf: PretrainedConfig, runtime: Runtime) -> ModelChunks:
    """Build this rank's part of the critic, with undefined weights except the value head's."""
    model = ModelChunks(Critic, config, hf, runtime)
    if model.chunks[-1].post_process and config.critic.head_std:
        weight = model.chunks[-1].value_head.weight.data
        generator = torch.Generator().manual_seed(config.seed)  # the same on all ranks
        weight.copy_(config.critic.head_std * torch.randn(weight.shape, generator=generator))
    return _prepare(model, hf, config.critic, config.seed, runtime)


def _prepare(
    model: ModelChunks, hf: PretrainedConfig, optimizer: OptimizerConfig, seed: int, runtime: Runtime
) -> ModelChunks:
    for chunk in model.chunks if optimizer.lora.rank is not None else ():
        attach_adapters(chunk, hf.to_dict(), optimizer.lora, seed, runtime)
    modules: Iterator[Any] = model.modules()
    for module in modules:
        # Transformer Engine's linears then add gradients to Megatron's FP32 buffer. Megatron's option
        # gradient_accumulation_fusion would need apex for the output layer.
        if hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = True
        _mark_shards(module)
    for name, parameter in model.named_parameters():
        _mark_replication(name, parameter)
    if optimizer.freezes:
        _freeze(model, hf, optimizer, runtime)
    return model.to(runtime.device)


def _mark_shards(module: Any) -> None:
    """Mark tensor-parallel shards, as Megatron does when it initialises weights, which we skip.

    Without marks the gradient norm would count only one rank's shards."""
    shards: list[tuple[torch.nn.Parameter, int]] = []
    if isinstance(module, ColumnParallelLinear | VocabParallelEmbedding):
        shards = [(parameter, 0) for parameter in module.parameters(recurse=False)]
    elif isinstance(module, RowParallelLinear):
        shards = [(module.weight, 1)]
    for parameter, dim in shards:
        if not hasattr(parameter, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=dim, stride=1)


def _mark_replication(name: str, parameter: Any) -> None:
    """Correct the marks that say which ranks' gradients are summed or counted."""
    if ".experts." in name:
        # Megatron marks experts only with ep > 1. Without the mark, tensor-parallel ranks with the same
        # experts and different tokens would not sum their gradients.
        parameter.allreduce = False
        # Ranks with the same expert shard its optimizer, so each must count its part of the gradient norm.
        # Transformer Engine and Megatron before 0.19 do not mark grouped weights.
        parameter.tensor_model_parallel = True
        parameter.partition_dim = 1 if ".linear_fc2." in name else 0
        parameter.partition_stride = 1
    if name.endswith("_down_proj.weight"):
        # Transformer Engine marks this replicated weight as a shard; the gradient norm would count it once
        # per rank.
        parameter.tensor_model_parallel = False


def _freeze(model: ModelChunks, hf: PretrainedConfig, optimizer: OptimizerConfig, runtime: Runtime) -> None:
    """Freeze parameters before Megatron's DDP and optimizer are built, which skip them."""
    is_critic = isinstance(model.chunks[0], Critic)
    stage_parameters = parameters(hf.to_dict(), runtime.layout, runtime.pp_rank, 0, critic=is_critic)
    frozen_names = {name for name, pair, layer, _ in stage_parameters if is_frozen(pair, layer, optimizer)}
    for name, parameter in rename_to_table(dict(model.named_parameters())).items():
        parameter.requires_grad_(name not in frozen_names)
    # A recomputed module gets no weight gradients if its input needs none, as after frozen embeddings.
    first_chunk, c = model.chunks[0], model.config
    recomputes_mlp = c.recompute_granularity == "full" or (
        c.recompute_granularity == "selective" and "mlp" in c.recompute_modules
    )
    has_trained_layers = any(parameter.requires_grad for parameter in first_chunk.decoder.layers.parameters())
    first_chunk.input_needs_gradient = first_chunk.pre_process and recomputes_mlp and has_trained_layers


def _recompute_options(model: ModelConfig) -> dict[str, Any]:
    if model.recompute == "none":
        return {}
    if model.recompute == "selective":
        modules = [MODULES[name] for name in model.recompute_modules]
        return {"recompute_granularity": "selective", "recompute_modules": modules}
    method, layers = "uniform", 1
    if model.recompute_layers is not None:
        method, layers = "block", model.recompute_layers  # the first layers of a stage
    return {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": layers}


def _attention_options(hf: PretrainedConfig, family: Family, sizes: Sizes) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if sizes.linear:
        options["linear_attention_freq"] = [int(layer in sizes.linear) for layer in range(sizes.layers)]
    if family.is_latent:
        factor, mscale = yarn_softmax(hf)
        options |= {
            "q_lora_rank": hf.q_lora_rank,
            "kv_lora_rank": hf.kv_lora_rank,
            "qk_head_dim": hf.qk_nope_head_dim,
            "qk_pos_emb_head_dim": hf.qk_rope_head_dim,
            "v_head_dim": hf.v_head_dim,
            # `_Body` sets the frequencies. Megatron still scales YaRN's softmax by these two.
            "rope_type": "rope",
            "rotary_scaling_factor": factor,
            "mscale_all_dim": mscale,
        }
    return options


def _mlp_options(
    model: ModelConfig, hf: PretrainedConfig, ep: int, family: Family, sizes: Sizes
) -> dict[str, Any]:
    mlp: dict[str, Any] = {"ffn_hidden_size": sizes.ffn}
    if family.is_moe:
        # Dropless, so that a token's output does not depend on other tokens.
        mlp = {
            "num_moe_experts": sizes.experts,
            "ffn_hidden_size": sizes.ffn if sizes.dense else sizes.expert_ffn,
            "moe_ffn_hidden_size": sizes.expert_ffn,
            "moe_router_topk": hf.num_experts_per_tok,
            # A softmax over the chosen experts equals the full softmax normalised over them.
            "moe_router_pre_softmax": not getattr(hf, "norm_topk_prob", True),
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "expert_model_parallel_size": ep,
            "expert_tensor_parallel_size": 1,
            "moe_grouped_gemm": model.grouped_experts,
            # In model.dtype, rounding would decide near ties and round the experts' weights.
            "moe_router_dtype": "fp32" if model.router_dtype == "fp32" else None,
            "moe_permute_fusion": model.permute_fusion,
        }
    if sizes.dense:
        mlp["moe_layer_freq"] = [0] * sizes.dense + [1] * (sizes.layers - sizes.dense)
    if sizes.shared_ffn:
        mlp["moe_shared_expert_intermediate_size"] = sizes.shared_ffn
        mlp["moe_shared_expert_gate"] = family.has("shared_experts.gate_weight")
    if family.has("router.expert_bias"):
        mlp |= {
            "moe_router_score_function": "sigmoid",
            "moe_router_pre_softmax": False,
            "moe_router_topk_scaling_factor": hf.routed_scaling_factor,
        }
        if hf.n_group > 1:
            mlp |= {"moe_router_num_groups": hf.n_group, "moe_router_group_topk": hf.topk_group}
    return mlp


def _transformer_config(
    config: Config, hf: PretrainedConfig, runtime: Runtime, layers: str, family: Family, sizes: Sizes
) -> TransformerConfig:
    layout, dtype = runtime.layout, DTYPES[config.model.dtype]
    sequence_parallel = layout.tp > 1 and config.parallel.sequence_parallel is not False
    if family.is_moe and layout.tp > 1 and not sequence_parallel:
        problem = "false, but experts under tensor parallelism need it (leave it out)"
        raise ConfigError(f"parallel.sequence_parallel: {problem}")
    config_class = MLATransformerConfig if family.is_latent else TransformerConfig
    return config_class(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_key_value_heads,
        kv_channels=sizes.head_dim,
        layernorm_epsilon=hf.rms_norm_eps,
        normalization="RMSNorm",
        qk_layernorm=family.has("q_layernorm.weight") or family.is_latent,
        layernorm_zero_centered_gamma=family.zero_centred,
        attention_output_gate=family.is_linear,
        add_qkv_bias=family.has("linear_qkv.bias"),
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=layout.tp,
        context_parallel_size=layout.cp,
        pipeline_model_parallel_size=layout.pp,
        sequence_parallel=sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        variable_seq_lengths=layout.pp > 1,
        # The interleaved schedule must overlap its messages. If batched, four stages over gloo deadlock in
        # the exchange of pack lengths, and two stages mix up activations and gradients.
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        overlap_p2p_comm=layout.vpp > 1,
        overlap_p2p_comm_warmup_flush=layout.vpp > 1 and config.parallel.overlap_warmup_flush,
        batch_p2p_comm=layout.vpp == 1,
        # Only old versions of torch need to synchronise after each exchange.
        batch_p2p_sync=False,
        # Free outputs once they are sent; the backward pass needs only their graph. With virtual stages,
        # megatron-core 0.16 does not wait for their messages.
        deallocate_pipeline_outputs=layout.pp > 1 and layout.vpp == 1,
        moe_token_dispatcher_type="alltoall",  # variable_seq_lengths requires it, even in dense models
        calculate_per_token_loss=True,  # see `_finalize` in training/model.py
        perform_initialization=False,
        use_cpu_initialization=runtime.device.type == "cpu",
        # This is apex's kernel; `_prepare` sets Transformer Engine's.
        gradient_accumulation_fusion=runtime.device.type == "cuda" and _has_apex(),
        bias_activation_fusion=layers == "te",
        bias_dropout_fusion=layers == "te",
        rotary_interleaved=family.rotary_pairs,
        # megatron-core 0.16 cannot rotate pairs with Transformer Engine's kernel for packed sequences.
        apply_rope_fusion=layers == "te" and not family.rotary_pairs and not family.is_latent,
        masked_softmax_fusion=False,
        attention_backend=AttnBackend[config.model.attention],
        **_attention_options(hf, family, sizes),
        **_mlp_options(config.model, hf, layout.ep, family, sizes),
        **_recompute_options(config.model),
        **fp8_options(config),
    )


def _block_spec(
    config: TransformerConfig,
    kind: str,
    family: Family,
    sizes: Sizes,
    layers: Sequence[int],
    *,
    adapters: bool,
) -> TransformerBlockSubmodules:
    """Return the specs of layers, given by their indices in the model."""
    norm: Any = RMSNorm
    if kind == "te":
        from megatron.core.extensions.transformer_engine import TENorm

        norm = TENorm
    specs = {}
    layer_kinds = [(sizes.experts > 0 and layer >= sizes.dense, layer in sizes.linear) for layer in layers]
    for is_mixture, is_linear in set(layer_kinds):
        if kind == "te":
            layer = _te_layer_spec(config, family, is_mixture, adapters=adapters)
        else:
            layer = _portable_layer_spec(config, family, is_mixture)
        modules = layer.submodules
        if config.attention_output_gate:
            modules.self_attention.module = GatedAttention
        if is_linear:
            modules.self_attention = ModuleSpec(module=GatedDeltaNet, params={"sizes": sizes})
        if family.has("_bda.output_norm.weight"):
            residual_spec = ModuleSpec(module=AddToResidual, params={"config": config, "norm": norm})
            modules.self_attn_bda = modules.mlp_bda = residual_spec
        specs[is_mixture, is_linear] = layer
    return TransformerBlockSubmodules(layer_specs=[specs[kind] for kind in layer_kinds], layer_norm=norm)


def _te_layer_spec(config: TransformerConfig, family: Family, is_mixture: bool, *, adapters: bool) -> Any:
    """Return the spec of a Transformer Engine layer. Its linears include the norm before them."""
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm

    layer = get_gpt_layer_with_transformer_engine_spec(
        qk_layernorm=config.qk_layernorm,
        num_experts=config.num_moe_experts if is_mixture else None,
        moe_grouped_gemm=config.moe_grouped_gemm and is_mixture,
        multi_latent_attention=family.is_latent,
    )
    modules: Any = layer.submodules
    if family.is_latent:  # separate norms
        attention, modules.self_attention.module = modules.self_attention.submodules, LatentAttention
        attention.q_layernorm = TENorm if family.has("q_layernorm.weight") else IdentityOp
        attention.kv_layernorm = TENorm
        attention.linear_q_up_proj = attention.linear_kv_up_proj = TEColumnParallelLinear
    if adapters:  # they need the norm's output, which fused layers hide
        modules.input_layernorm = modules.pre_mlp_layernorm = TENorm
        if not family.is_latent:
            modules.self_attention.submodules.linear_qkv = TEColumnParallelLinear
        if not is_mixture:
            modules.mlp.submodules.linear_fc1 = TEColumnParallelLinear
    return layer


def _portable_layer_spec(config: TransformerConfig, family: Family, is_mixture: bool) -> Any:
    """Return the spec of a layer in plain torch, under the names of Transformer Engine's checkpoints."""
    layer = get_gpt_layer_local_spec(
        normalization="RMSNorm",
        qk_layernorm=config.qk_layernorm,
        num_experts=config.num_moe_experts if is_mixture else None,
        multi_latent_attention=family.is_latent,
    )
    modules: Any = layer.submodules
    modules.input_layernorm = modules.pre_mlp_layernorm = RMSNorm
    attention = modules.self_attention.submodules
    attention.core_attention = PackedAttention
    if family.is_latent:
        modules.self_attention.module = LatentAttention
        attention.q_layernorm = RMSNorm if family.has("q_layernorm.weight") else IdentityOp
        attention.kv_layernorm = RMSNorm
        modules.sharded_state_dict_keys_map = {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
    elif config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    if is_mixture:
        # Transformer Engine fuses this norm only in dense layers.
        del modules.sharded_state_dict_keys_map["pre_mlp_layernorm."]
    return layer
