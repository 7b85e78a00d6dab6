"""The parity gate: compares log-probs of engine and trainer before a start's first update.

With guard.parity_layers the error names the first layer that differs from transformers."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from operator import itemgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.algorithms.mismatch import mismatch_metrics, mismatch_sums
from megarl.config.errors import MegarlError, ParityError
from megarl.config.files import write_atomic
from megarl.config.schema import PRETRAINING, Config
from megarl.data.batch import TrainBatch
from megarl.model.builder import DTYPES
from megarl.parallel.comm import (
    gather_objects,
    gather_to_rank_0,
    max_over_ranks,
    run_on_rank_0,
    sum_over_replicas,
)
from megarl.rollout.engines.transformers_engine import TransformersEngine
from megarl.schedule.models import export_model
from megarl.schedule.run import Run, Step
from megarl.training.micro_batch import make_micro_batches
from megarl.weights.hf import load_into
from megarl.weights.megatron import open_model
from megarl.weights.shards import hf_shards

# Limits of the mean |difference| of log-probs, in nats.
LIMITS = {"fp32": 1e-3, "bf16": 0.15, "fp8": 0.4}
# Relative limits of a part's output.
PART_LIMITS = {"fp32": 1e-3, "bf16": 0.05, "fp8": 0.25}
SEQUENCES, TOKENS = 2, 256
# Layer (-1: before the first; number of layers: after the last), and part.
Part = tuple[int, str]
OUTPUT, HEAD = "residual, or a norm behind attention or MLP", "output layer"
PARTS = {
    "norm before attention": "input_layernorm",
    "attention": "self_attention",
    "norm before MLP": "pre_mlp_layernorm",
    "MLP": "mlp",
}


def get_precision(config: Config) -> str:
    options = config.rollout.engine_options if config.rollout.capabilities.takes_options else {}
    dtypes = {str(value) for key, value in options.items() if key in ("dtype", "kv_cache_dtype")}
    uses_fp8 = config.model.fp8.format != "none" or config.rollout.weights_dtype != "model"
    if uses_fp8 or options.get("quantization") or any(value.startswith("fp8") for value in dtypes):
        return "fp8"
    return "bf16" if config.model.dtype == "bf16" or dtypes & {"bfloat16", "float16", "half"} else "fp32"


def mask_comparable(batch: TrainBatch, version: int) -> Tensor:
    """Return the response tokens sampled with the weights of `version`, bool [T].

    Both log-probs include temperature, neither top-p nor top-k."""
    if "token_versions" in batch:
        versions = batch["token_versions"]
    else:
        versions = batch["policy_version"][batch.sequence_ids]
    return batch.response_mask & (versions == version)


def check_parity(run: Run, step: Step) -> None:
    """Raise ParityError on every rank if engine and trainer differ too much.

    Without old log-probs, a pass computes those of the first mini-batch."""
    guard, batch, precision = run.config.guard, step.batch, get_precision(run.config)
    limit = LIMITS[precision] if guard.parity == "auto" else float(guard.parity)
    version = 0 if step.stage == PRETRAINING else step.number - 1
    mask = mask_comparable(batch, version)
    if "old_logprobs" in batch:
        trainer = batch["old_logprobs"]
    else:
        micro_batches = step.batch.mini_batches[0]
        trainer = run.actor.logprob_columns(batch, micro_batches)["logprobs"]
        computed_mask = torch.zeros_like(mask)
        for micro_batch in micro_batches:
            computed_mask[micro_batch.token_indices] = True
        mask &= computed_mask
    engine = batch["engine_logprobs"]
    sums, largest = mismatch_sums(trainer, engine, mask)
    sums = sum_over_replicas(run.runtime, sums)
    metrics = mismatch_metrics(sums, max_over_ranks(run.runtime, float(largest)))
    mean = metrics["mismatch/logprob_abs_mean"]
    if mean <= limit:
        return
    if guard.parity_layers:
        details = f"{compare_layers(run, step, version)}; nothing was updated (guard.parity is the limit)"
    else:
        details = "nothing was updated (guard.parity_layers=true names the layer, guard.parity is the limit)"
    where = f"{step.stage.replace('_', ' ')} step {step.number}"
    raise ParityError(
        f"guard.parity: in {where} the engine's log-probs are {mean:.3g} nats from the trainer's on average "
        f"(largest {metrics['mismatch/logprob_abs_max']:.3g}), over {int(sums[0])} tokens sampled with the "
        f"trainer's current weights; the limit for {precision} is {limit:g}; {details}"
    )


def compare_layers(run: Run, step: Step, version: int) -> str:
    """Describe the first layer whose output differs from a reference's, given the trainer's input.

    Collective. The reference is the model of a transformers engine, or else one that rank 0 builds."""
    runtime, config = run.runtime, run.config
    engine = run.engine if isinstance(run.engine, TransformersEngine) else None
    try:
        run.residency.onload(
            "weight_transfer", {"actor.weights", "engine.weights"} if engine else {"actor.weights"}
        )
        weight_sync = run.weight_sync
        if engine and weight_sync and not weight_sync.complete:
            weight_sync.sync(weight_sync.version)
        sequences = _choose_sequences(run, step.batch)
        outputs = [_run_trainer(run, *sequence) for sequence in sequences]
        reference = engine or _build_reference(run, version)

        def compare() -> str:
            assert reference is not None
            differences = [
                _compare(reference, *sequence, trainer_outputs, config.rollout.temperature)
                for sequence, trainer_outputs in zip(sequences, outputs, strict=True)
            ]
            return _describe(run, differences, engine is not None)

        return run_on_rank_0(runtime, compare, str)
    except MegarlError as error:
        return f"layers could not be compared: {error}"
    finally:
        if runtime.rank == 0:
            shutil.rmtree(config.run_dir / "parity", ignore_errors=True)


def _describe(run: Run, differences: Sequence[Mapping[Part, float]], is_engine: bool) -> str:
    """Write parity.txt, and describe the first part above its limit.

    is_engine: the reference is the engine's model"""
    config, layers = run.config, run.hf.num_hidden_layers
    precision = "fp8" if config.model.fp8.format != "none" else config.model.dtype
    maxima = [
        (part, max(sequence_differences[part] for sequence_differences in differences))
        for part in differences[0]
    ]
    table = config.run_dir / "parity.txt"
    with run.dispensable.file(table):  # a failed write is only reported
        write_atomic(table, "".join(f"{_name_part(part, layers)}: {size:.3g}\n" for part, size in maxima))
    limit = PART_LIMITS[precision]
    reference = "the engine's" if is_engine else "transformers' on the same weights"
    index = next((i for i, (_, size) in enumerate(maxima) if not size <= limit), None)
    if index is None:
        part, largest = max(maxima, key=itemgetter(1))
        agreement = (
            f"no hidden state differs from {reference} by over {limit:g} of its size, given the same input"
        )
        finding = f"{agreement} (largest: {largest:.2g}, {_name_part(part, layers)})"
        if is_engine:
            return f"{finding}, so the engine's cached decoding or rounding is at fault"
        remedy = "rollout.fingerprint=true checks that"
        return f"{finding}, so the engine or the weight transfer is at fault ({remedy})"
    (part, difference), earlier_max = maxima[index], max((size for _, size in maxima[:index]), default=0.0)
    return (
        f"the trainer's hidden states first differ from {reference} in {_name_part(part, layers)}: "
        f"by {difference:.2g} of their size given the same input, before it by {earlier_max:.2g} at most "
        f"(all in {table})"
    )


def _name_part(part: Part, layers: int) -> str:
    layer, name = part
    return name if layer in (-1, layers) else f"layer {layer} (of 0 to {layers - 1}), {name}"


def _choose_sequences(run: Run, batch: TrainBatch) -> list[tuple[list[int], list[int]]]:
    order = batch.lengths.clamp(max=TOKENS).argsort(descending=True, stable=True)[:SEQUENCES]
    sequences, list_type = [], list[tuple[list[int], list[int]]]
    for row in order.tolist():
        sequence = batch.select([row])
        tokens = sequence.tokens[:TOKENS].tolist()
        prompt_length = min(int(sequence.prompt_lengths), len(tokens) - 1)
        sequences.append((tokens[:prompt_length], tokens[prompt_length:]))
    return next((pairs for pairs in gather_objects(run.runtime, sequences, list_type) if pairs), [])


@contextmanager
def _record_outputs(chunks: Sequence[Any]) -> Iterator[dict[Part, Tensor]]:
    """Yield this rank's outputs of the first forward pass in the `with` block, on the host."""
    outputs: dict[Part, Tensor] = {}

    def record(part: Part, _module: Any, _inputs: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        outputs.setdefault(part, hidden.detach().flatten(0, -2).cpu())

    with ExitStack() as hooks:

        def watch(layer: int, name: str, module: Any) -> None:
            # Transformer Engine fuses the norm into the next module.
            if type(module).__name__ != "IdentityOp":
                hooks.enter_context(module.register_forward_hook(partial(record, (layer, name))))

        for chunk in chunks:
            if chunk.pre_process:
                watch(-1, "embedding", chunk.embedding)
            for layer in chunk.decoder.layers:
                for name, attribute in PARTS.items():
                    watch(layer.layer_number - 1, name, getattr(layer, attribute))
                watch(layer.layer_number - 1, OUTPUT, layer)
            if chunk.post_process:
                watch(chunk.config.num_layers, "final norm", chunk.decoder.final_layernorm)
        yield outputs


def _run_trainer(run: Run, prompt: list[int], response: list[int]) -> dict[Part, Tensor]:
    """Return the trainer's outputs, [t, hidden], on rank 0; response log-probs, [r], at (layers, HEAD)."""
    runtime, actor, batch = run.runtime, run.actor, TrainBatch.build([prompt], [response])
    micro_batches = make_micro_batches(batch, [0], batch.num_tokens, actor.model)
    # free_routing: the trainer's routers choose the experts, without routing replay.
    with actor.free_routing(), _record_outputs(actor.model.chunks) as outputs:
        logprobs = actor.logprob_columns(batch, micro_batches)["logprobs"]
    layout, coords = runtime.layout, runtime.layout.coords(runtime.rank)
    outputs_by_rank = gather_to_rank_0(runtime, outputs if coords.dp == 0 else {}, dict[Part, Tensor])
    if outputs_by_rank is None:
        return {}
    outputs = {}
    for stage in range(layout.pp):
        ranks = [
            [layout.rank(tp=tp, cp=cp, dp=0, pp=stage) for tp in range(layout.tp)] for cp in range(layout.cp)
        ]
        for part in outputs_by_rank[ranks[0][0]]:
            rows = [[outputs_by_rank[rank][part] for rank in row] for row in ranks]
            pieces = [torch.cat(row) if actor.model.config.sequence_parallel else row[0] for row in rows]
            cp_places = micro_batches[0].cp_places
            tokens = pieces[0] if cp_places is None else torch.stack(pieces)[cp_places]
            outputs[part] = tokens[: batch.num_tokens]
    outputs[run.hf.num_hidden_layers, HEAD] = logprobs[batch.response_mask]
    return outputs


def _build_reference(run: Run, version: int) -> TransformersEngine | None:
    """Build a transformers model with the trainer's weights on rank 0.

    Version 0 comes from the original folder, which no transfer has touched."""
    config, folder = run.config, run.folder
    if version:
        export_model(run.actor, config, run.runtime, config.run_dir / "parity")
        folder = open_model(config.run_dir / "parity")
    if run.runtime.rank:
        return None
    engine = TransformersEngine(config.model.path, DTYPES[config.model.dtype])
    engine.start()
    load_into(engine.parameters(), hf_shards(folder.config), folder)
    return engine


@torch.inference_mode()
def _run_reference(
    engine: TransformersEngine, tokens: Sequence[int], trainer_outputs: Mapping[Part, Tensor]
) -> dict[Part, Tensor]:
    """Return the reference's outputs, [t, hidden]; logits, [t, vocab], at (layers, HEAD).

    Each layer's input is the trainer's, so that a difference shows only where it arises."""
    decoder, outputs = engine.model.get_decoder(), dict[Part, Tensor]()
    last_layer = len(decoder.layers) - 1

    def record(part: Part, _module: Any, _arguments: Any, output: Any) -> None:
        outputs[part] = (output[0] if isinstance(output, tuple) else output)[0].cpu()

    def replace_input(source: Part, _module: Any, arguments: Any) -> Any:
        layer_input = arguments[0]
        if source == (-1, "embedding"):
            outputs[source] = layer_input[0].cpu()
        return trainer_outputs[source][None].to(layer_input), *arguments[1:]

    with ExitStack() as hooks:

        def watch(module: Any, part: Part, source: Part | None = None) -> None:
            """Record a module's output. source: the part whose output in the trainer is its input"""
            hooks.enter_context(module.register_forward_hook(partial(record, part)))
            if source is not None:
                hooks.enter_context(module.register_forward_pre_hook(partial(replace_input, source)))

        source = (-1, "embedding")
        for layer_index, layer in enumerate(decoder.layers):
            watch(layer.input_layernorm, (layer_index, "norm before attention"))
            mixer = layer.linear_attn if hasattr(layer, "linear_attn") else layer.self_attn
            watch(mixer, (layer_index, "attention"))
            watch(layer.post_attention_layernorm, (layer_index, "norm before MLP"))
            watch(layer.mlp, (layer_index, "MLP"))
            watch(layer, (layer_index, OUTPUT), source)
            source = (layer_index, OUTPUT)
        watch(decoder.norm, (last_layer + 1, "final norm"), source)
        decoder(input_ids=torch.tensor([tokens], device=engine.device), use_cache=False)
    head = engine.model.get_output_embeddings().weight.cpu().float()
    # Logits in bf16 would be off by up to 0.06.
    hidden = trainer_outputs[last_layer + 1, "final norm"].float()
    return {**outputs, (last_layer + 1, HEAD): F.linear(hidden, head)}


def _compare(
    reference: TransformersEngine,
    prompt: list[int],
    response: list[int],
    trainer_outputs: Mapping[Part, Tensor],
    temperature: float,
) -> dict[Part, float]:
    """Return each part's RMS over tokens of |difference| / |output|; for HEAD the mean |difference|."""
    outputs = _run_reference(reference, [*prompt, *response], trainer_outputs)
    differences, is_norm_fused = dict[Part, float](), False
    for part, output in outputs.items():
        if part[1] == HEAD:
            logits = output[len(prompt) - 1 : -1].float() / temperature
            logprobs = logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0]
            difference = float((trainer_outputs[part] - logprobs).abs().mean())
        elif part in trainer_outputs:
            norm = output.double().norm(dim=-1)
            distance = (trainer_outputs[part].double() - output.double()).norm(dim=-1)
            difference = float((distance / norm.clamp(min=1e-30)).square().mean().sqrt())
        else:  # the trainer's norm is fused into its next part
            is_norm_fused = True
            continue
        layer, name = part
        differences[layer, f"{name} with the norm before it" if is_norm_fused else name] = difference
        is_norm_fused = False
    return differences
