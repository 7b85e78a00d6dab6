"""What megarl calls, replaces or reads in SGLang, Megatron and Transformer Engine, most of it outside what they document: one table, and a
check of it against the sources that are installed, which imports none of them. `megarl doctor` and `make rehearse-gpu` make it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

# What the table was written against: other versions may do as well, these have been run (docs/verified.md).
KNOWN = {"sglang": "0.5.23", "megatron-core": "0.16.1, 0.18.2, 0.19.2", "transformer-engine": "2.20.2"}
REPLACES, CALLS, READS = "replaces", "calls", "reads"


class Internal(NamedTuple):
    """A function, method, class or attribute of `module`.

    how         replaces: a function of ours stands for it, which takes `parameters` first, in this order; calls: ours call it with
                `parameters`, by name; reads: it is there
    why         where, and what for"""

    module: str
    name: str
    how: str
    parameters: str
    why: str


_S, _M, _T = "sglang.srt.", "megatron.core.", "transformer_engine.pytorch."
_INSIDE, _HOST, _CPU = "rollout/sglang_inside.py", "rollout/sglang_host.py", "parallel/cpu_platform.py"
_BUILDER, _MODEL, _CHECKPOINT = "model/builder.py", "training/model.py", "training/sharded.py, saving.py"
_IO, _MANAGER = f"{_S}managers.io_struct", f"{_S}managers.tokenizer_manager"

INTERNALS: dict[str, tuple[Internal, ...]] = {
    "sglang": (
        Internal(f"{_S}entrypoints.engine", "Engine", READS, "", f"{_HOST}: the engine"),
        Internal(
            f"{_S}entrypoints.engine", "Engine.run_scheduler_process_func", READS, "", f"{_HOST}: a scheduler process with our sampler"
        ),
        Internal(f"{_S}entrypoints.engine", "Engine.tokenizer_manager", READS, "", f"{_HOST}: calls that Engine has no method for"),
        Internal(f"{_S}entrypoints.engine", "Engine.loop", READS, "", f"{_HOST}: answers come on it"),
        Internal(
            f"{_S}entrypoints.engine",
            "Engine.async_generate",
            CALLS,
            "input_ids sampling_params return_logprob custom_logit_processor",
            f"{_HOST}: one response",
        ),
        Internal(
            f"{_S}managers.scheduler",
            "run_scheduler_process",
            REPLACES,
            "server_args port_args gpu_id tp_rank pp_rank dp_rank pipe_writer",
            f"{_INSIDE}: the sampler is registered in the scheduler's process",
        ),
        Internal(f"{_S}layers.sampler", "register_sampler_backend", CALLS, "backend factory", f"{_INSIDE}: our sampler"),
        Internal(f"{_S}layers.sampler", "Sampler", READS, "", f"{_INSIDE}: what it derives from"),
        Internal(
            f"{_S}layers.sampler",
            "Sampler.forward",
            REPLACES,
            "self logits_output sampling_info return_logprob top_logprobs_nums token_ids_logprobs positions",
            f"{_INSIDE}: a token follows from its response's seed and position",
        ),
        Internal(
            f"{_S}layers.sampler",
            "Sampler._sync_token_ids_across_tp",
            CALLS,
            "batch_next_token_ids sampling_info",
            f"{_INSIDE}: what the sampler that is replaced does last",
        ),
        Internal(f"{_S}sampling.sampling_batch_info", "SamplingBatchInfo.custom_params", READS, "", f"{_INSIDE}: where the seeds are"),
        Internal(f"{_S}layers.logits_processor", "LogitsProcessorOutput.next_token_logits", READS, "", f"{_INSIDE}: what is drawn from"),
        Internal(f"{_S}layers.logits_processor", "LogitsProcessorOutput.next_token_logprobs", READS, "", f"{_INSIDE}: what is recorded"),
        Internal(
            f"{_S}sampling.custom_logit_processor",
            "CustomLogitProcessor",
            READS,
            "",
            f"{_INSIDE}: a request that names one keeps its custom_params in the batch",
        ),
        Internal(
            f"{_S}sampling.custom_logit_processor",
            "CustomLogitProcessor.__call__",
            REPLACES,
            "self logits custom_param_list",
            f"{_INSIDE}: one that changes nothing",
        ),
        Internal(f"{_S}sampling.custom_logit_processor", "CustomLogitProcessor.to_str", CALLS, "", f"{_HOST}: its name in a request"),
        Internal(_IO, "BeginWeightUpdateReqInput", CALLS, "", f"{_HOST}: from 0.5.23 on updates need it"),
        Internal(_IO, "EndWeightUpdateReqInput", CALLS, "", f"{_HOST}: the same"),
        Internal(
            _IO,
            "UpdateWeightsFromTensorReqInput",
            CALLS,
            "serialized_named_tensors load_format flush_cache weight_version",
            f"{_HOST}: one handle for each rank, and our loader",
        ),
        Internal(_IO, "ReleaseMemoryOccupationReqInput", CALLS, "tags", f"{_HOST}: sleep"),
        Internal(_IO, "ResumeMemoryOccupationReqInput", CALLS, "tags", f"{_HOST}: wake"),
        Internal(_MANAGER, "TokenizerManager.begin_weight_update", CALLS, "obj request", _HOST),
        Internal(_MANAGER, "TokenizerManager.end_weight_update", CALLS, "obj request", _HOST),
        Internal(_MANAGER, "TokenizerManager.update_weights_from_tensor", CALLS, "obj request", _HOST),
        Internal(_MANAGER, "TokenizerManager.release_memory_occupation", CALLS, "obj request", _HOST),
        Internal(_MANAGER, "TokenizerManager.resume_memory_occupation", CALLS, "obj request", _HOST),
        Internal(_MANAGER, "TokenizerManager.flush_cache", CALLS, "", f"{_HOST}: succeeds once nothing runs"),
        Internal(_MANAGER, "TokenizerManager.abort_request", CALLS, "abort_all", _HOST),
        Internal(_MANAGER, "TokenizerManager.last_receive_tstamp", READS, "", f"{_HOST}: whether tokens come"),
        Internal(
            f"{_S}mem_cache.allocation",
            "assign_req_to_token_pool_func",
            READS,
            "",
            f"{_HOST}: the one kernel of a generation on a CPU",
        ),
        Internal(f"{_S}utils.common", "SafeUnpickler.ALLOWED_GLOBALS", READS, "", "rollout/sglang.py: what a handle may name"),
    ),
    "megatron-core": (
        Internal(
            f"{_M}models.gpt.gpt_model",
            "GPTModel",
            CALLS,
            "config transformer_layer_spec vocab_size max_sequence_length pre_process "
            "post_process share_embeddings_and_output_weights position_embedding_type",
            _BUILDER,
        ),
        Internal(
            f"{_M}models.gpt.gpt_model",
            "GPTModel._preprocess",
            REPLACES,
            "self input_ids position_ids",
            f"{_BUILDER}: one row of angles per token",
        ),
        Internal(f"{_M}models.gpt.gpt_model", "GPTModel._postprocess", REPLACES, "self hidden_states", f"{_BUILDER}: it ends there"),
        Internal(f"{_M}models.gpt.gpt_model", "GPTModel.rotary_pos_emb", READS, "", f"{_BUILDER}: its frequencies"),
        Internal(f"{_M}models.gpt.gpt_model", "GPTModel.output_layer", READS, "", f"{_BUILDER}: its weight"),
        Internal(f"{_M}models.gpt.gpt_model", "GPTModel.pg_collection", READS, "", f"{_BUILDER}: the tensor-parallel group"),
        Internal(f"{_M}models.gpt.gpt_model", "GPTModel.shared_embedding_or_output_weight", CALLS, "", f"{_BUILDER}: the tied head"),
        Internal(f"{_M}models.common.embeddings.rotary_pos_embedding", "RotaryEmbedding.inv_freq", READS, "", _BUILDER),
        Internal(
            f"{_M}models.gpt.gpt_layer_specs",
            "get_gpt_layer_local_spec",
            CALLS,
            "normalization qk_layernorm num_experts",
            f"{_BUILDER}: portable layers",
        ),
        Internal(
            f"{_M}models.gpt.gpt_layer_specs",
            "get_gpt_layer_with_transformer_engine_spec",
            CALLS,
            "qk_layernorm num_experts",
            f"{_BUILDER}: Transformer Engine's",
        ),
        Internal(
            f"{_M}packed_seq_params", "PackedSeqParams", CALLS, "qkv_format cu_seqlens_q cu_seqlens_kv max_seqlen_q max_seqlen_kv", _BUILDER
        ),
        Internal(f"{_M}tensor_parallel.layers", "ColumnParallelLinear", READS, "", f"{_BUILDER}: whose parameters are shards"),
        Internal(f"{_M}tensor_parallel.layers", "RowParallelLinear", READS, "", f"{_BUILDER}: the same"),
        Internal(f"{_M}tensor_parallel.layers", "VocabParallelEmbedding", READS, "", f"{_BUILDER}: the same"),
        Internal(
            f"{_M}tensor_parallel.layers",
            "set_tensor_model_parallel_attributes",
            CALLS,
            "tensor is_parallel dim stride",
            f"{_BUILDER}: says so of them",
        ),
        Internal(f"{_M}tensor_parallel.mappings", "copy_to_tensor_model_parallel_region", CALLS, "", _BUILDER),
        Internal(
            f"{_M}tensor_parallel.mappings",
            "gather_from_sequence_parallel_region",
            CALLS,
            "tensor_parallel_output_grad",
            _BUILDER,
        ),
        Internal(f"{_M}transformer.transformer_block", "TransformerBlockSubmodules", CALLS, "layer_specs layer_norm", _BUILDER),
        Internal(
            f"{_M}transformer.transformer_config",
            "TransformerConfig",
            CALLS,
            "num_layers hidden_size num_attention_heads num_query_groups kv_channels layernorm_epsilon normalization qk_layernorm "
            "add_qkv_bias add_bias_linear gated_linear_unit activation_func attention_dropout hidden_dropout "
            "tensor_model_parallel_size pipeline_model_parallel_size sequence_parallel params_dtype pipeline_dtype bf16 "
            "variable_seq_lengths moe_token_dispatcher_type calculate_per_token_loss perform_initialization use_cpu_initialization "
            "gradient_accumulation_fusion bias_activation_fusion bias_dropout_fusion apply_rope_fusion masked_softmax_fusion "
            "num_moe_experts ffn_hidden_size moe_ffn_hidden_size moe_router_topk moe_router_pre_softmax "
            "moe_router_load_balancing_type moe_aux_loss_coeff expert_model_parallel_size expert_tensor_parallel_size "
            "recompute_granularity recompute_method recompute_num_layers fp8 fp8_recipe first_last_layers_bf16 tp_only_amax_red",
            _BUILDER,
        ),
        Internal(f"{_M}transformer.module", "MegatronModule", READS, "", "model/portable.py"),
        Internal(
            f"{_M}transformer.module", "MegatronModule.sharded_state_dict", CALLS, "", f"{_CHECKPOINT}: a critic's, without an output layer"
        ),
        Internal(f"{_M}distributed.finalize_model_grads", "finalize_model_grads", REPLACES, "model num_tokens", f"{_MODEL}: no division"),
        Internal(f"{_M}distributed", "finalize_model_grads", CALLS, "", _MODEL),
        Internal(f"{_M}distributed", "DistributedDataParallel", CALLS, "config ddp_config module", _MODEL),
        Internal(f"{_M}distributed", "DistributedDataParallelConfig", CALLS, "use_distributed_optimizer grad_reduce_in_fp32", _MODEL),
        Internal(f"{_M}distributed", "DistributedDataParallel.buffers", READS, "", "training/tensor_groups.py: what leaves the device"),
        Internal(f"{_M}distributed", "DistributedDataParallel.expert_parallel_buffers", READS, "", "training/tensor_groups.py: the same"),
        Internal(f"{_M}distributed", "DistributedDataParallel.zero_grad_buffer", CALLS, "", _MODEL),
        Internal(f"{_M}distributed", "DistributedDataParallel.no_sync", READS, "", _MODEL),
        Internal(f"{_M}distributed.param_and_grad_buffer", "_ParamAndGradBuffer.param_data", READS, "", "training/tensor_groups.py"),
        Internal(f"{_M}distributed.param_and_grad_buffer", "_ParamAndGradBuffer.grad_data", READS, "", "training/tensor_groups.py"),
        Internal(
            f"{_M}optimizer",
            "OptimizerConfig",
            CALLS,
            "optimizer lr min_lr weight_decay adam_beta1 adam_beta2 adam_eps clip_grad bf16 params_dtype use_distributed_optimizer",
            _MODEL,
        ),
        Internal(f"{_M}optimizer", "get_megatron_optimizer", CALLS, "config model_chunks", _MODEL),
        Internal(f"{_M}optimizer.distrib_optimizer", "DistributedOptimizer.sharded_state_dict", CALLS, "is_loading metadata", _CHECKPOINT),
        Internal(
            f"{_M}optimizer.distrib_optimizer", "DistributedOptimizer.load_parameter_state_from_fully_reshardable", CALLS, "", _CHECKPOINT
        ),
        Internal(f"{_M}optimizer.distrib_optimizer", "DistributedOptimizer.model_param_group_index_map", READS, "", _CHECKPOINT),
        Internal(
            f"{_M}optimizer_param_scheduler",
            "OptimizerParamScheduler",
            CALLS,
            "optimizer init_lr max_lr min_lr lr_warmup_steps lr_decay_steps lr_decay_style start_wd end_wd wd_incr_steps wd_incr_style",
            _MODEL,
        ),
        Internal(f"{_M}pipeline_parallel", "get_forward_backward_func", CALLS, "", _MODEL),
        Internal(
            f"{_M}pipeline_parallel.schedules",
            "forward_backward_pipelining_without_interleaving",
            CALLS,
            "forward_step_func data_iterator model num_microbatches seq_length micro_batch_size forward_only",
            _MODEL,
        ),
        Internal(f"{_M}dist_checkpointing", "load", CALLS, "sharded_state_dict checkpoint_dir", _CHECKPOINT),
        Internal(f"{_M}dist_checkpointing.core", "CheckpointingException", READS, "", _CHECKPOINT),
        Internal(f"{_M}dist_checkpointing.mapping", "LocalNonpersistentObject", READS, "", _CHECKPOINT),
        Internal(f"{_M}dist_checkpointing.mapping", "ShardedTensor", READS, "", _CHECKPOINT),
        Internal(f"{_M}dist_checkpointing.mapping", "ShardedTensor.prepend_axis_num", READS, "", _CHECKPOINT),
        Internal(f"{_M}dist_checkpointing.mapping", "ShardedObject.unique_key", READS, "", _CHECKPOINT),
        Internal(f"{_M}dist_checkpointing.mapping", "ShardedBase", READS, "", _CHECKPOINT),
        Internal(f"{_M}dist_checkpointing.mapping", "apply_factories", CALLS, "sharded_state_dict", _CHECKPOINT),
        Internal(f"{_M}dist_checkpointing.mapping", "is_main_replica", CALLS, "replica_id", _CHECKPOINT),
        Internal(f"{_M}dist_checkpointing.dict_utils", "extract_matching_values", CALLS, "x predicate", _CHECKPOINT),
        Internal(f"{_M}dist_checkpointing.dict_utils", "nested_values", CALLS, "x", _CHECKPOINT),
        Internal(
            f"{_M}parallel_state",
            "initialize_model_parallel",
            CALLS,
            "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size expert_model_parallel_size "
            "expert_tensor_parallel_size distributed_timeout_minutes",
            "parallel/runtime.py",
        ),
        Internal(f"{_M}parallel_state", "get_pipeline_model_parallel_last_rank", CALLS, "", "parallel/comm.py"),
        Internal(f"{_M}tensor_parallel.random", "model_parallel_cuda_manual_seed", CALLS, "seed", "parallel/runtime.py"),
        Internal(f"{_M}tensor_parallel.random", "get_cuda_rng_tracker", CALLS, "", "parallel/runtime.py: a checkpoint's random states"),
        Internal(f"{_M}tensor_parallel.random", "_set_cuda_rng_state", REPLACES, "new_state device graph_safe", _CPU),
        Internal(f"{_M}tensor_parallel.random", "_get_cuda_rng_state", REPLACES, "device clone graph_safe", _CPU),
        Internal(f"{_M}transformer.moe.token_dispatcher", "maybe_move_tensor_to_cpu", REPLACES, "tensor as_numpy record_stream", _CPU),
        Internal(f"{_M}pipeline_parallel.schedules", "torch", READS, "", f"{_CPU}: its factories are led to the CPU"),
    ),
    "transformer-engine": (
        Internal(
            f"{_T}module.base", "TransformerEngineBaseModule._fp8_workspaces", READS, "", "training/tensor_groups.py: FP8 copies of weights"
        ),
        Internal(f"{_T}module.base", "TransformerEngineBaseModule.get_extra_state", READS, "", f"{_CHECKPOINT}: delayed scaling's history"),
        Internal(f"{_T}optimizers", "FusedAdam", READS, "", f"{_CHECKPOINT}: the optimizer that Megatron takes beside it"),
    ),
}


def changed(package: str) -> list[str]:
    """Where what is installed is not what the table says, a line each; nothing where the package is not installed."""
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        return []
    return [
        f"{package} {version}: {entry.module}.{entry.name}: {problem}, which {entry.why.partition(':')[0]} relies on "
        f"(run with {KNOWN[package]})"
        for entry in INTERNALS[package]
        if (problem := _problem(entry))
    ]


def _problem(entry: Internal) -> str:
    found = _find(entry.module, entry.name)
    if found is None:
        return "is not there"
    wanted = entry.parameters.split()
    if entry.how == READS or not wanted:
        return ""
    first, names, anything = _parameters(*found)
    if entry.how == REPLACES and first[: len(wanted)] != wanted:
        return f"takes {', '.join(first)} and not first {', '.join(wanted)}"
    missing = [name for name in wanted if name not in names and not anything]
    return f"has no parameter {missing[0]}" if missing else ""


def _parameters(module: str, node: ast.AST) -> tuple[list[str], set[str], bool]:
    """(those that can be given by position, all names, whether any other name is taken) of a function, or of what makes a class."""
    if isinstance(node, ast.ClassDef):
        made = _member(module, node, "__init__")
        if made is not None:
            return _parameters(*made)
        fields = list(_fields(module, node))
        return fields, set(fields), False
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return [], set(), True
    given = node.args
    first = [argument.arg for argument in (*given.posonlyargs, *given.args)]
    return first, {*first, *(argument.arg for argument in given.kwonlyargs)}, given.kwarg is not None


def _fields(module: str, node: ast.ClassDef) -> Iterator[str]:
    """Of a dataclass, or of a struct: its bases' first."""
    for home, base in _bases(module, node):
        yield from _fields(home, base)
    yield from (line.target.id for line in node.body if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name))


def _bases(module: str, node: ast.ClassDef) -> Iterator[tuple[str, ast.ClassDef]]:
    for base in node.bases:
        name = base.id if isinstance(base, ast.Name) else ""
        found = _find(module, name) if name else None
        if found is not None and isinstance(found[1], ast.ClassDef):
            yield found[0], found[1]


def _find(module: str, name: str) -> tuple[str, ast.AST] | None:
    """Where `name` (or `Class.member`) is defined, through imports of it: (module, node)."""
    tree = _tree(module)
    if tree is None:
        return None
    name, _, member = name.partition(".")
    for node in _statements(tree.body):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name and (found := _find(_origin(module, node), alias.name)):
                    return _member(*found, member) if member else found
        elif isinstance(node, ast.Import) and any((alias.asname or alias.name) == name for alias in node.names):
            return module, node
        elif name in _named(node):
            return _member(module, node, member) if member else (module, node)
    return None


def _member(module: str, node: ast.AST, name: str) -> tuple[str, ast.AST] | None:
    """A method, a class attribute or one that a method sets, of the class or of one of its bases."""
    if not isinstance(node, ast.ClassDef):
        return None
    for line in node.body:
        if name in _named(line):
            return module, line
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute) and inner.attr == name and isinstance(inner.ctx, ast.Store):
            return module, inner
    return next((found for home, base in _bases(module, node) if (found := _member(home, base, name))), None)


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Of a module, those within `if` and `try` too: the first definition of a name is what a complete installation has, a fallback for a
    missing package comes after it."""
    for node in body:
        yield node
        for inner in ("body", "orelse", "finalbody"):
            if isinstance(node, ast.If | ast.Try):
                yield from _statements(getattr(node, inner, []))


def _named(node: ast.AST) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _origin(module: str, node: ast.ImportFrom) -> str:
    """The module that a `from ... import` names."""
    if not node.level:
        return node.module or ""
    path = _path(module)
    parts = module.split(".") if path is not None and path.name == "__init__.py" else module.split(".")[:-1]
    parts = parts[: len(parts) - node.level + 1]
    return ".".join([*parts, *([node.module] if node.module else [])])


@cache
def _tree(module: str) -> ast.Module | None:
    path = _path(module)
    return None if path is None else ast.parse(path.read_text(encoding="utf-8"))


def _path(module: str) -> Path | None:
    """A module's file, without importing anything: a package may not import without a GPU."""
    top, *rest = module.split(".")
    spec = find_spec(top) if top else None
    for location in (spec.submodule_search_locations or ()) if spec else ():
        place = Path(location).joinpath(*rest)
        for path in (place.with_suffix(".py"), place / "__init__.py"):
            if path.is_file():
                return path
    return None
