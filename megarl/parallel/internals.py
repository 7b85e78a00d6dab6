"""What megarl calls, replaces or reads in SGLang, Megatron and Transformer Engine, most of it undocumented
there: one table, and a check of it against the installed sources, which imports none of them. `megarl doctor`
and `make rehearse-gpu` run the check."""

from __future__ import annotations

import ast
import re
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

    how          replaces: a function of ours takes its place, with `parameters` first, in this order; calls:
                 we call it with `parameters`, by name; reads: it exists
    parameters   separated by spaces
    why          the file of ours, and what for"""

    module: str
    name: str
    how: str
    parameters: str
    why: str


def _parse(prefix: str, table: str) -> tuple[Internal, ...]:
    """Return the entries of a table. Its lines: a module without `prefix`, at the margin; below it `how
    name(parameters) -- why`, indented by 2; further indented, the rest of the line before."""
    entries, module = [], ""
    for line in re.sub(r"\n {3,}", " ", table).splitlines():
        if found := re.fullmatch(r" +(\w+) ([\w.]+)(?:\((.*?)\))? -- (.*)", line):
            entries.append(Internal(prefix + module, found[2], found[1], found[3] or "", found[4]))
        else:
            module = line.strip()
    return tuple(entries)


_SGLANG = """\
entrypoints.engine
  reads Engine -- rollout/sglang_host.py: the engine
  reads Engine.run_scheduler_process_func -- rollout/sglang_host.py: a scheduler process with our sampler
  reads Engine.tokenizer_manager -- rollout/sglang_host.py: calls that Engine has no method for
  reads Engine.loop -- rollout/sglang_host.py: answers come on it
  calls Engine.async_generate(input_ids sampling_params return_logprob custom_logit_processor) --
      rollout/sglang_host.py: one response
managers.scheduler
  replaces run_scheduler_process(server_args port_args gpu_id tp_rank pp_rank dp_rank pipe_writer) --
      rollout/sglang_inside.py: the sampler is registered in the scheduler's process
layers.sampler
  calls register_sampler_backend(backend factory) -- rollout/sglang_inside.py: our sampler
  reads Sampler -- rollout/sglang_inside.py: what it derives from
  replaces Sampler.forward(self logits_output sampling_info return_logprob top_logprobs_nums
      token_ids_logprobs positions) -- rollout/sglang_inside.py: a token follows from its response's seed and
      position
  calls Sampler._sync_token_ids_across_tp(batch_next_token_ids sampling_info) -- rollout/sglang_inside.py:
      what the sampler that is replaced does last
sampling.sampling_batch_info
  reads SamplingBatchInfo.custom_params -- rollout/sglang_inside.py: where the seeds are
layers.logits_processor
  reads LogitsProcessorOutput.next_token_logits -- rollout/sglang_inside.py: what is drawn from
  reads LogitsProcessorOutput.next_token_logprobs -- rollout/sglang_inside.py: what is recorded
sampling.custom_logit_processor
  reads CustomLogitProcessor -- rollout/sglang_inside.py: a request that names one keeps its custom_params in
      the batch
  replaces CustomLogitProcessor.__call__(self logits custom_param_list) -- rollout/sglang_inside.py: one that
      changes nothing
  calls CustomLogitProcessor.to_str -- rollout/sglang_host.py: its name in a request
managers.io_struct
  calls BeginWeightUpdateReqInput -- rollout/sglang_host.py: from 0.5.23 on updates need it
  calls EndWeightUpdateReqInput -- rollout/sglang_host.py: the same
  calls UpdateWeightsFromTensorReqInput(serialized_named_tensors load_format flush_cache weight_version) --
      rollout/sglang_host.py: one handle for each rank, and our loader
  calls ReleaseMemoryOccupationReqInput(tags) -- rollout/sglang_host.py: sleep
  calls ResumeMemoryOccupationReqInput(tags) -- rollout/sglang_host.py: wake
managers.tokenizer_manager
  calls TokenizerManager.begin_weight_update(obj request) -- rollout/sglang_host.py
  calls TokenizerManager.end_weight_update(obj request) -- rollout/sglang_host.py
  calls TokenizerManager.update_weights_from_tensor(obj request) -- rollout/sglang_host.py
  calls TokenizerManager.release_memory_occupation(obj request) -- rollout/sglang_host.py
  calls TokenizerManager.resume_memory_occupation(obj request) -- rollout/sglang_host.py
  calls TokenizerManager.flush_cache -- rollout/sglang_host.py: succeeds once nothing runs
  calls TokenizerManager.abort_request(abort_all) -- rollout/sglang_host.py
  reads TokenizerManager.last_receive_tstamp -- rollout/sglang_host.py: whether tokens come
mem_cache.allocation
  reads assign_req_to_token_pool_func -- rollout/sglang_host.py: the one kernel of a generation on a CPU
utils.common
  reads SafeUnpickler.ALLOWED_GLOBALS -- rollout/sglang.py: what a handle may name
"""
_MEGATRON = """\
models.gpt.gpt_model
  calls GPTModel(config transformer_layer_spec vocab_size max_sequence_length pre_process post_process
      share_embeddings_and_output_weights position_embedding_type) -- model/builder.py
  replaces GPTModel._preprocess(self input_ids position_ids) -- model/builder.py: one row of angles per token
  replaces GPTModel._postprocess(self hidden_states) -- model/builder.py: it ends there
  reads GPTModel.rotary_pos_emb -- model/builder.py: its frequencies
  reads GPTModel.output_layer -- model/builder.py: its weight
  reads GPTModel.pg_collection -- model/builder.py: the tensor-parallel group
  calls GPTModel.shared_embedding_or_output_weight -- model/builder.py: the tied head
models.common.embeddings.rotary_pos_embedding
  reads RotaryEmbedding.inv_freq -- model/builder.py
models.gpt.gpt_layer_specs
  calls get_gpt_layer_local_spec(normalization qk_layernorm num_experts) -- model/builder.py: portable layers
  calls get_gpt_layer_with_transformer_engine_spec(qk_layernorm num_experts) -- model/builder.py: Transformer
      Engine's
packed_seq_params
  calls PackedSeqParams(qkv_format cu_seqlens_q cu_seqlens_kv max_seqlen_q max_seqlen_kv) -- model/builder.py
tensor_parallel.layers
  reads ColumnParallelLinear -- model/builder.py: whose parameters are shards
  reads RowParallelLinear -- model/builder.py: the same
  reads VocabParallelEmbedding -- model/builder.py: the same
  calls set_tensor_model_parallel_attributes(tensor is_parallel dim stride) -- model/builder.py: says so of
      them
tensor_parallel.mappings
  calls copy_to_tensor_model_parallel_region -- model/builder.py
  calls gather_from_sequence_parallel_region(tensor_parallel_output_grad) -- model/builder.py
transformer.transformer_block
  calls TransformerBlockSubmodules(layer_specs layer_norm) -- model/builder.py
transformer.transformer_config
  calls TransformerConfig(num_layers hidden_size num_attention_heads num_query_groups kv_channels
      layernorm_epsilon normalization qk_layernorm add_qkv_bias add_bias_linear gated_linear_unit
      activation_func attention_dropout hidden_dropout tensor_model_parallel_size pipeline_model_parallel_size
      sequence_parallel params_dtype pipeline_dtype bf16 variable_seq_lengths moe_token_dispatcher_type
      calculate_per_token_loss perform_initialization use_cpu_initialization gradient_accumulation_fusion
      bias_activation_fusion bias_dropout_fusion apply_rope_fusion masked_softmax_fusion num_moe_experts
      ffn_hidden_size moe_ffn_hidden_size moe_router_topk moe_router_pre_softmax
      moe_router_load_balancing_type moe_aux_loss_coeff expert_model_parallel_size expert_tensor_parallel_size
      recompute_granularity recompute_method recompute_num_layers fp8 fp8_recipe first_last_layers_bf16
      tp_only_amax_red) -- model/builder.py
transformer.module
  reads MegatronModule -- model/portable.py
  calls MegatronModule.sharded_state_dict -- training/sharded.py, saving.py: a critic's, without an output
      layer
distributed.finalize_model_grads
  replaces finalize_model_grads(model num_tokens) -- training/model.py: no division
distributed
  calls finalize_model_grads -- training/model.py
  calls DistributedDataParallel(config ddp_config module) -- training/model.py
  calls DistributedDataParallelConfig(use_distributed_optimizer grad_reduce_in_fp32) -- training/model.py
  reads DistributedDataParallel.buffers -- training/model.py: what leaves the device
  reads DistributedDataParallel.expert_parallel_buffers -- training/model.py: the same
  calls DistributedDataParallel.zero_grad_buffer -- training/model.py
  reads DistributedDataParallel.no_sync -- training/model.py
distributed.param_and_grad_buffer
  reads _ParamAndGradBuffer.param_data -- training/model.py
  reads _ParamAndGradBuffer.grad_data -- training/model.py
optimizer
  calls OptimizerConfig(optimizer lr min_lr weight_decay adam_beta1 adam_beta2 adam_eps clip_grad bf16
      params_dtype use_distributed_optimizer) -- training/model.py
  calls get_megatron_optimizer(config model_chunks) -- training/model.py
optimizer.distrib_optimizer
  calls DistributedOptimizer.sharded_state_dict(is_loading metadata) -- training/sharded.py, saving.py
  calls DistributedOptimizer.load_parameter_state_from_fully_reshardable -- training/sharded.py, saving.py
  reads DistributedOptimizer.model_param_group_index_map -- training/sharded.py, saving.py
optimizer_param_scheduler
  calls OptimizerParamScheduler(optimizer init_lr max_lr min_lr lr_warmup_steps lr_decay_steps lr_decay_style
      start_wd end_wd wd_incr_steps wd_incr_style) -- training/model.py
pipeline_parallel
  calls get_forward_backward_func -- training/model.py
pipeline_parallel.schedules
  calls forward_backward_pipelining_without_interleaving(forward_step_func data_iterator model
      num_microbatches seq_length micro_batch_size forward_only) -- training/model.py
dist_checkpointing
  calls load(sharded_state_dict checkpoint_dir) -- training/sharded.py, saving.py
dist_checkpointing.core
  reads CheckpointingException -- training/sharded.py, saving.py
dist_checkpointing.mapping
  reads LocalNonpersistentObject -- training/sharded.py, saving.py
  reads ShardedTensor -- training/sharded.py, saving.py
  reads ShardedTensor.prepend_axis_num -- training/sharded.py, saving.py
  reads ShardedObject.unique_key -- training/sharded.py, saving.py
  reads ShardedBase -- training/sharded.py, saving.py
  calls apply_factories(sharded_state_dict) -- training/sharded.py, saving.py
  calls is_main_replica(replica_id) -- training/sharded.py, saving.py
dist_checkpointing.dict_utils
  calls extract_matching_values(x predicate) -- training/sharded.py, saving.py
  calls nested_values(x) -- training/sharded.py, saving.py
parallel_state
  calls initialize_model_parallel(tensor_model_parallel_size pipeline_model_parallel_size
      context_parallel_size expert_model_parallel_size expert_tensor_parallel_size
      distributed_timeout_minutes) -- parallel/runtime.py
  calls get_pipeline_model_parallel_last_rank -- parallel/comm.py
tensor_parallel.random
  calls model_parallel_cuda_manual_seed(seed) -- parallel/runtime.py
  calls get_cuda_rng_tracker -- parallel/runtime.py: a checkpoint's random states
  replaces _set_cuda_rng_state(new_state device graph_safe) -- parallel/cpu_platform.py
  replaces _get_cuda_rng_state(device clone graph_safe) -- parallel/cpu_platform.py
transformer.moe.token_dispatcher
  replaces maybe_move_tensor_to_cpu(tensor as_numpy record_stream) -- parallel/cpu_platform.py
pipeline_parallel.schedules
  reads torch -- parallel/cpu_platform.py: its factories are led to the CPU
"""
_TRANSFORMER_ENGINE = """\
module.base
  reads TransformerEngineBaseModule._fp8_workspaces -- training/model.py: FP8 copies of weights
  reads TransformerEngineBaseModule.get_extra_state -- training/sharded.py, saving.py: delayed scaling's
      history
optimizers
  reads FusedAdam -- training/sharded.py, saving.py: the optimizer that Megatron takes beside it
"""
INTERNALS: dict[str, tuple[Internal, ...]] = {
    "sglang": _parse("sglang.srt.", _SGLANG),
    "megatron-core": _parse("megatron.core.", _MEGATRON),
    "transformer-engine": _parse("transformer_engine.pytorch.", _TRANSFORMER_ENGINE),
}


def changed(package: str) -> list[str]:
    """Return where an installed package is not what the table says, a line each."""
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        return []
    lines = []
    for entry in INTERNALS[package]:
        if problem := _problem(entry):
            user = entry.why.partition(":")[0]
            what = f"{package} {version}: {entry.module}.{entry.name}: {problem}"
            lines.append(f"{what}, which {user} relies on (run with {KNOWN[package]})")
    return lines


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
    """Return (parameters that can be given by position, all names, whether any other name is taken) of a
    function, or of the constructor of a class."""
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
    """Yield the fields of a dataclass or struct: its bases' first."""
    for home, base in _bases(module, node):
        yield from _fields(home, base)
    yield from (
        line.target.id
        for line in node.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    )


def _bases(module: str, node: ast.ClassDef) -> Iterator[tuple[str, ast.ClassDef]]:
    for base in node.bases:
        name = base.id if isinstance(base, ast.Name) else ""
        found = _find(module, name) if name else None
        if found is not None and isinstance(found[1], ast.ClassDef):
            yield found[0], found[1]


def _find(module: str, name: str) -> tuple[str, ast.AST] | None:
    """Return (module, node) where `name` (or `Class.member`) is defined, following imports; None where it is
    not."""
    tree = _tree(module)
    if tree is None:
        return None
    name, _, member = name.partition(".")
    for node in _statements(tree.body):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name and (
                    found := _find(_origin(module, node), alias.name)
                ):
                    return _member(*found, member) if member else found
        elif isinstance(node, ast.Import) and any(
            (alias.asname or alias.name) == name for alias in node.names
        ):
            return module, node
        elif name in _named(node):
            return _member(module, node, member) if member else (module, node)
    return None


def _member(module: str, node: ast.AST, name: str) -> tuple[str, ast.AST] | None:
    """Return (module, node) of a method, class attribute or attribute that a method sets, of a class or of
    one of its bases."""
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
    """Yield a module's statements, those within `if` and `try` too. The first definition of a name is that of
    a complete installation; a fallback for a missing package comes after it."""
    for node in body:
        yield node
        for inner in ("body", "orelse", "finalbody"):
            if isinstance(node, ast.If | ast.Try):
                yield from _statements(getattr(node, inner, []))


def _named(node: ast.AST) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    targets = (
        node.targets
        if isinstance(node, ast.Assign)
        else [node.target]
        if isinstance(node, ast.AnnAssign)
        else []
    )
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _origin(module: str, node: ast.ImportFrom) -> str:
    """Return the module that a `from ... import` names."""
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
    """Return a module's file, without importing it: some packages cannot be imported without a GPU."""
    top, *rest = module.split(".")
    spec = find_spec(top) if top else None
    for location in (spec.submodule_search_locations or ()) if spec else ():
        place = Path(location).joinpath(*rest)
        for path in (place.with_suffix(".py"), place / "__init__.py"):
            if path.is_file():
                return path
    return None
