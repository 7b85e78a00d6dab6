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
    broadcast_from_rank_0,
    gather_objects,
    gather_to_rank_0,
    max_over_ranks,
    sum_over_replicas,
)
from megarl.rollout.engines.transformers_engine import TransformersEngine
from megarl.schedule.models import export_model
from megarl.schedule.run import Run, Step
from megarl.training.batch import make_micro_batches
from megarl.weights.hf import load_into
from megarl.weights.megatron import open_model
from megarl.weights.shards import hf_shards
from megarl.weights.tensor_files import Processes

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
    own = {str(value) for key, value in options.items() if key in ("dtype", "kv_cache_dtype")}
    fp8 = config.model.fp8.format != "none" or config.rollout.weights_dtype != "model"
    if fp8 or options.get("quantization") or any(value.startswith("fp8") for value in own):
        return "fp8"
    return "bf16" if config.model.dtype == "bf16" or own & {"bfloat16", "float16", "half"} else "fp32"


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
    guard, batch, kind = run.config.guard, step.batch, get_precision(run.config)
    if guard.parity == "none":
        return
    limit = LIMITS[kind] if guard.parity == "auto" else guard.parity
    version = 0 if step.stage == PRETRAINING else step.number - 1
    mask = mask_comparable(batch, version)
    if "old_logprobs" in batch:
        trainer = batch["old_logprobs"]
    else:
        batches = step.batch.mini_batches[0]
        trainer = run.actor.logprob_columns(batch, batches)["logprobs"]
        passed = torch.zeros_like(mask)
        for micro_batch in batches:
            passed[micro_batch.token_indices] = True
        mask &= passed
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
        f"trainer's current weights; the limit for {kind} is {limit:g}; {details}"
    )


def compare_layers(run: Run, step: Step, version: int) -> str:
    runtime, config = run.runtime, run.config
    own = run.engine if isinstance(run.engine, TransformersEngine) else None
    try:
        run.residency.onload(
            "weight_transfer", {"actor.weights", "engine.weights"} if own else {"actor.weights"}
        )
        weight_sync = run.weight_sync
        if own and weight_sync and not weight_sync.complete:
            weight_sync.sync(weight_sync.version)
        sequences = _choose_sequences(run, step.batch)
        states = [_run_trainer(run, *sequence) for sequence in sequences]
        reference, verdict = own or _build_reference(run, version), ""

        def compare() -> None:
            nonlocal verdict
            assert reference is not None
            differences = [
                _compare(reference, *sequence, ours, config.rollout.temperature)
                for sequence, ours in zip(sequences, states, strict=True)
            ]
            verdict = _describe(run, differences, own is not None)

        Processes(runtime.cpu_group).first(compare)
    except MegarlError as error:
        return f"layers could not be compared: {error}"
    finally:
        if runtime.rank == 0:
            shutil.rmtree(config.run_dir / "parity", ignore_errors=True)
    return str(broadcast_from_rank_0(runtime, verdict, str))


def _describe(run: Run, differences: Sequence[Mapping[Part, float]], own: bool) -> str:
    config, layers = run.config, run.hf.num_hidden_layers
    kind = "fp8" if config.model.fp8.format != "none" else config.model.dtype
    worst = [(part, max(one[part] for one in differences)) for part in differences[0]]
    table = config.run_dir / "parity.txt"
    with run.dispensable.file(table):
        write_atomic(table, "".join(f"{_name_part(part, layers)}: {size:.3g}\n" for part, size in worst))
    limit, other = PART_LIMITS[kind], "the engine's" if own else "transformers' on the same weights"
    number = next((i for i, (_, size) in enumerate(worst) if not size <= limit), None)
    if number is None:
        part, largest = max(worst, key=itemgetter(1))
        where = f"no hidden state differs from {other} by over {limit:g} of its size, given the same input"
        least = f"{where} (largest: {largest:.2g}, {_name_part(part, layers)})"
        if own:
            return f"{least}, so the engine's cached decoding or rounding is at fault"
        remedy = "rollout.fingerprint=true checks that"
        return f"{least}, so the engine or the weight transfer is at fault ({remedy})"
    (part, first), before = worst[number], max((size for _, size in worst[:number]), default=0.0)
    return (
        f"the trainer's hidden states first differ from {other} in {_name_part(part, layers)}: "
        f"by {first:.2g} of their size given the same input, before it by {before:.2g} at most "
        f"(all in {table})"
    )


def _name_part(part: Part, layers: int) -> str:
    layer, name = part
    return name if layer in (-1, layers) else f"layer {layer} (of 0 to {layers - 1}), {name}"


def _choose_sequences(run: Run, batch: TrainBatch) -> list[tuple[list[int], list[int]]]:
    order = batch.lengths.clamp(max=TOKENS).argsort(descending=True, stable=True)[:SEQUENCES]
    mine, kind = [], list[tuple[list[int], list[int]]]
    for row in order.tolist():
        sequence = batch.select([row])
        tokens = sequence.tokens[:TOKENS].tolist()
        prompt = min(int(sequence.prompt_lengths), len(tokens) - 1)
        mine.append((tokens[:prompt], tokens[prompt:]))
    return next((theirs for theirs in gather_objects(run.runtime, mine, kind) if theirs), [])


@contextmanager
def _record_outputs(chunks: Sequence[Any]) -> Iterator[dict[Part, Tensor]]:
    """Yield this rank's outputs of the block's first pass, on the host."""
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
    batches = make_micro_batches(batch, [0], batch.num_tokens, actor.model)
    with actor.free_routing(), _record_outputs(actor.model.chunks) as outputs:
        logprobs = actor.logprob_columns(batch, batches)["logprobs"]
    layout, place = runtime.layout, runtime.layout.coords(runtime.rank)
    parts = gather_to_rank_0(runtime, outputs if place.dp == 0 else {}, dict[Part, Tensor])
    if parts is None:
        return {}
    outputs = {}
    for stage in range(layout.pp):
        ranks = [
            [layout.rank(tp=tp, cp=cp, dp=0, pp=stage) for tp in range(layout.tp)] for cp in range(layout.cp)
        ]
        for part in parts[ranks[0][0]]:
            rows = [[parts[rank][part] for rank in row] for row in ranks]
            pieces = [torch.cat(row) if actor.model.config.sequence_parallel else row[0] for row in rows]
            cut = batches[0].cut
            tokens = pieces[0] if cut is None else torch.stack(pieces)[cut]
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
    engine: TransformersEngine, tokens: Sequence[int], given: Mapping[Part, Tensor]
) -> dict[Part, Tensor]:
    """Return the reference's outputs, [t, hidden]; logits, [t, vocab], at (layers, HEAD).

    Each layer's input is the trainer's, so that a difference shows only where it arises."""
    body, outputs = engine.model.get_decoder(), dict[Part, Tensor]()
    last = len(body.layers) - 1

    def record(part: Part, _module: Any, _arguments: Any, output: Any) -> None:
        outputs[part] = (output[0] if isinstance(output, tuple) else output)[0].cpu()

    def replace(before: Part, _module: Any, arguments: Any) -> Any:
        own = arguments[0]
        if before == (-1, "embedding"):
            outputs[before] = own[0].cpu()
        return given[before][None].to(own), *arguments[1:]

    with ExitStack() as hooks:

        def watch(module: Any, part: Part, before: Part | None = None) -> None:
            hooks.enter_context(module.register_forward_hook(partial(record, part)))
            if before is not None:
                hooks.enter_context(module.register_forward_pre_hook(partial(replace, before)))

        for number, layer in enumerate(body.layers):
            watch(layer.input_layernorm, (number, "norm before attention"))
            mixer = layer.linear_attn if hasattr(layer, "linear_attn") else layer.self_attn
            watch(mixer, (number, "attention"))
            watch(layer.post_attention_layernorm, (number, "norm before MLP"))
            watch(layer.mlp, (number, "MLP"))
            watch(layer, (number, OUTPUT), (number - 1, OUTPUT) if number else (-1, "embedding"))
        watch(body.norm, (last + 1, "final norm"), (last, OUTPUT))
        body(input_ids=torch.tensor([tokens], device=engine.device), use_cache=False)
    head = engine.model.get_output_embeddings().weight.cpu().float()
    hidden = given[last + 1, "final norm"].float()  # logits in bf16 would be off by up to 0.06
    return {**outputs, (last + 1, HEAD): F.linear(hidden, head)}


def _compare(
    reference: TransformersEngine,
    prompt: list[int],
    response: list[int],
    states: Mapping[Part, Tensor],
    temperature: float,
) -> dict[Part, float]:
    """Return each part's RMS over tokens of |difference| / |output|; for HEAD the mean |difference|."""
    outputs = _run_reference(reference, [*prompt, *response], states)
    differences, fused = dict[Part, float](), False
    for part, output in outputs.items():
        if part[1] == HEAD:
            logits = output[len(prompt) - 1 : -1].float() / temperature
            logprobs = logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0]
            relative = float((states[part] - logprobs).abs().mean())
        elif part in states:
            own, size = states[part].double(), output.double().norm(dim=-1)
            distance = (own - output.double()).norm(dim=-1)
            relative = float((distance / size.clamp(min=1e-30)).square().mean().sqrt())
        else:
            fused = True
            continue
        layer, name = part
        differences[layer, f"{name} with the norm before it" if fused else name] = relative
        fused = False
    return differences
