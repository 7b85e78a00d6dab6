"""The parity gate: before the first update after a start, the engine's log-probs are compared with the
trainer's. Where they are further apart than rounding explains the run ends, and says on demand in which layer
the trainer's hidden states part from those of a transformers model with the same weights.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.algorithms.mismatch import mismatch_metrics, mismatch_sums
from megarl.config.errors import MegarlError, ParityError
from megarl.config.files import write_whole
from megarl.config.schema import PRETRAINING, Config
from megarl.data.batch import MicroBatch, TrainBatch
from megarl.model.builder import DTYPES
from megarl.parallel.comm import from_rank_0, gather_objects, gather_on_0, max_over_ranks, sum_over_replicas
from megarl.rollout.engines.transformers_engine import TransformersEngine
from megarl.schedule.models import export_model
from megarl.schedule.run import Run, Step
from megarl.training.batch import make_micro_batches
from megarl.weights.hf import load_into
from megarl.weights.megatron import open_model
from megarl.weights.shards import hf_shards
from megarl.weights.tensor_files import Processes

# Of the mean |difference| of log-probs, nats. A mean: single tokens are off by whole nats where nothing is
# wrong. What was measured, with and without faults: docs/reliability.md.
LIMITS = {"fp32": 1e-3, "bf16": 0.15, "fp8": 0.4}
# Of what one part of a layer makes of the same input: the difference's share of its size.
PART_LIMITS = {"fp32": 1e-3, "bf16": 0.05, "fp8": 0.25}
SEQUENCES, TOKENS = 2, 256  # whose hidden states are compared: of so many responses, so many tokens at most
# A layer's number (-1 before the first, their count behind the last), and what part of it; its whole output.
Part = tuple[int, str]
OUTPUT, HEAD = "residual, or a norm behind attention or MLP", "output layer"
# What a layer consists of, in its order, as Megatron names it.
PARTS = {
    "norm before attention": "input_layernorm",
    "attention": "self_attention",
    "norm before MLP": "pre_mlp_layernorm",
    "MLP": "mlp",
}


def precision(config: Config) -> str:
    """Return the coarsest arithmetic in trainer or engine: a key of LIMITS."""
    options = config.rollout.engine_options if config.rollout.capabilities.takes_options else {}
    own = {str(value) for key, value in options.items() if key in ("dtype", "kv_cache_dtype")}
    fp8 = config.model.fp8.format != "none" or config.rollout.weights_dtype != "model"
    if fp8 or options.get("quantization") or any(value.startswith("fp8") for value in own):
        return "fp8"
    return "bf16" if config.model.dtype == "bf16" or own & {"bfloat16", "float16", "half"} else "fp32"


def comparable(batch: TrainBatch, version: int) -> Tensor:
    """Return the response tokens that were drawn with the weights of `version`, bool [T]. Those that another
    version drew (surplus of dynamic sampling, rollouts that run ahead, the older part of a continued
    response) differ for a reason. Temperature is in both log-probs, top-p and top-k in neither."""
    if "token_versions" in batch:
        of_tokens = batch["token_versions"]
    else:
        of_tokens = batch["policy_version"][batch.sequence_ids]
    return batch.response_mask & (of_tokens == version)


def check_parity(run: Run, step: Step) -> None:
    """Raise ParityError on every rank where engine and trainer are too far apart on this step's tokens.

    Uses the step's old log-probs. Where no phase computes them (value pretraining, and
    algorithm.old_logprobs engine) one pass over the first mini-batch does. Nothing is compared where no token
    was drawn with the present weights: in a step after a resumption that was drawn ahead."""
    guard, batch, kind = run.config.guard, step.batch, precision(run.config)
    if guard.parity == "none":
        return
    limit = LIMITS[kind] if guard.parity == "auto" else guard.parity
    version = 0 if step.stage == PRETRAINING else step.number - 1
    mask = comparable(batch, version)
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
    found = mismatch_metrics(sums, max_over_ranks(run.runtime, float(largest)))
    mean = found["mismatch/logprob_abs_mean"]
    if mean <= limit:  # without a token it is 0
        return
    if guard.parity_layers:
        next_step = f"{_layers(run, step, version)}; nothing was updated (guard.parity is the limit)"
    else:
        next_step = (
            "nothing was updated (guard.parity_layers=true names the layer, guard.parity is the limit)"
        )
    where = f"{step.stage.replace('_', ' ')} step {step.number}"
    raise ParityError(
        f"guard.parity: in {where} the engine's log-probs are {mean:.3g} nats from the trainer's on average "
        f"(largest {found['mismatch/logprob_abs_max']:.3g}), over {int(sums[0])} tokens that the trainer's "
        f"present weights are to have drawn; the limit for {kind} is {limit:g}; {next_step}"
    )


# Layer by layer


@dataclass(frozen=True)
class Difference:
    """How far a part of the trainer is from the reference's, given the same input: root mean square over
    tokens of the difference's share of the output's size."""

    part: Part
    share: float


def _layers(run: Run, step: Step, version: int) -> str:
    """Compare hidden states, write run_dir/parity.txt, and return what was found; every rank calls this."""
    runtime, config = run.runtime, run.config
    own = run.engine if isinstance(run.engine, TransformersEngine) else None
    try:
        run.residency.onload(
            "weight_transfer", {"actor.weights", "engine.weights"} if own else {"actor.weights"}
        )
        weight_sync = run.weight_sync
        if own and weight_sync and not weight_sync.complete:  # it was away while the trainer had the device
            weight_sync.sync(weight_sync.version)
        sequences = _sequences(run, step.batch)
        states = [_trainer_states(run, *sequence) for sequence in sequences]
        reference, said = own or _from_folder(run, version), [""]

        def compare() -> None:
            assert reference is not None  # on the first rank
            temperature, found = config.rollout.temperature, []
            for sequence, ours in zip(sequences, states, strict=True):
                found.append(_compare(reference, *sequence, ours, temperature))
            said[0] = _verdict(run, found, own is not None)

        Processes(runtime.cpu_group).first(compare)
    except MegarlError as error:
        return f"layers could not be compared: {error}"
    finally:
        if runtime.rank == 0:
            shutil.rmtree(config.run_dir / "parity", ignore_errors=True)
    return str(from_rank_0(runtime, said[0], str))


def _verdict(run: Run, found: Sequence[Sequence[Difference]], own: bool) -> str:
    """Return in words the first part that differs, and write the table; on rank 0."""
    config, layers = run.config, run.hf.num_hidden_layers
    kind = "fp8" if config.model.fp8.format != "none" else config.model.dtype
    worst = [Difference(of[0].part, max(one.share for one in of)) for of in zip(*found, strict=True)]
    table = config.run_dir / "parity.txt"
    with run.dispensable.file(table):
        write_whole(table, "".join(f"{_named(one.part, layers)}: {one.share:.3g}\n" for one in worst))
    limit, other = PART_LIMITS[kind], "the engine's" if own else "transformers' on the same weights"
    number = next((i for i, one in enumerate(worst) if not one.share <= limit), None)
    if number is None:
        largest = max(worst, key=lambda one: one.share)
        where = f"no hidden state differs from {other} by over {limit:g} of its size, given the same input"
        least = f"{where} (largest: {largest.share:.2g}, {_named(largest.part, layers)})"
        if own:
            return f"{least}, which leaves the engine's decoding with its cache, or rounding"
        remedy = "rollout.fingerprint=true checks that"
        return f"{least}, so that the engine is off, or the transfer to it ({remedy})"
    first, before = worst[number], max((one.share for one in worst[:number]), default=0.0)
    return (
        f"the trainer's hidden states first differ from {other} in {_named(first.part, layers)}: "
        f"by {first.share:.2g} of their size given the same input, before it by {before:.2g} at most "
        f"(all in {table})"
    )


def _named(part: Part, layers: int) -> str:
    layer, name = part
    return name if layer in (-1, layers) else f"layer {layer} (of 0 to {layers - 1}), {name}"


def _sequences(run: Run, batch: TrainBatch) -> list[tuple[list[int], list[int]]]:
    """Return the beginnings of some responses with their prompts, the same on every rank."""
    order = batch.lengths.clamp(max=TOKENS).argsort(descending=True, stable=True)[:SEQUENCES]
    mine, kind = [], list[tuple[list[int], list[int]]]
    for row in order.tolist():
        of_row = batch.select([row])
        tokens = of_row.tokens[:TOKENS].tolist()
        prompt = min(int(of_row.prompt_lengths), len(tokens) - 1)
        mine.append((tokens[:prompt], tokens[prompt:]))
    return next((theirs for theirs in gather_objects(run.runtime, mine, kind) if theirs), [])


@contextmanager
def _noted(chunks: Sequence[Any]) -> Iterator[dict[Part, Tensor]]:
    """Note what the parts of this rank's chunks give in the first pass within the block, on the host."""
    noted: dict[Part, Tensor] = {}

    def note(part: Part, _module: Any, _inputs: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        noted.setdefault(part, hidden.detach().flatten(0, -2).cpu())

    hooks = []

    def watch(layer: int, name: str, module: Any) -> None:
        # Transformer Engine has the norm in the product behind it, and nothing in its place.
        if type(module).__name__ != "IdentityOp":
            hooks.append(module.register_forward_hook(partial(note, (layer, name))))

    for chunk in chunks:
        if chunk.pre_process:
            watch(-1, "embedding", chunk.embedding)
        for layer in chunk.decoder.layers:
            for name, attribute in PARTS.items():
                watch(layer.layer_number - 1, name, getattr(layer, attribute))
            watch(layer.layer_number - 1, OUTPUT, layer)
        if chunk.post_process:
            watch(chunk.config.num_layers, "final norm", chunk.decoder.final_layernorm)
    try:
        yield noted
    finally:
        for hook in hooks:
            hook.remove()


def _trainer_states(run: Run, prompt: list[int], response: list[int]) -> dict[Part, Tensor]:
    """Return what each part of the trainer's model gives for a sequence, [t, hidden], and the log-probs of
    the response as (layers, HEAD), [r]; on rank 0 alone, of its replica. Routers choose for themselves."""
    runtime, actor, few = run.runtime, run.actor, TrainBatch.build([prompt], [response])
    batches = make_micro_batches(few, [0], few.num_tokens, actor.model)
    with actor.free_routing(), _noted(actor.model.chunks) as noted:
        logprobs = actor.logprob_columns(few, batches)["logprobs"]
    layout, place = runtime.layout, runtime.layout.coords(runtime.rank)
    parts = gather_on_0(runtime, noted if place.dp == 0 else {}, dict[Part, Tensor])
    if parts is None:
        return {}
    whole: dict[Part, Tensor] = {}
    for stage in range(layout.pp):
        ranks = [
            [layout.rank(tp=tp, cp=cp, dp=0, pp=stage) for tp in range(layout.tp)] for cp in range(layout.cp)
        ]
        for part in parts[ranks[0][0]]:
            of_ranks = [[parts[rank][part] for rank in row] for row in ranks]
            whole[part] = _joined(of_ranks, batches[0], sharded=actor.model.config.sequence_parallel)[
                : few.num_tokens
            ]
    whole[run.hf.num_hidden_layers, HEAD] = logprobs[few.response_mask]
    return whole


def _joined(of_ranks: Sequence[Sequence[Tensor]], batch: MicroBatch, *, sharded: bool) -> Tensor:
    """Return the tokens of a pack in their order, [t, hidden], from those of each context-parallel rank's
    tensor-parallel ranks, among which they are `sharded` or which all have them."""
    rows = [torch.cat(list(row)) if sharded else row[0] for row in of_ranks]
    if batch.cut is None:
        return rows[0]
    rank, place = batch.cut
    return torch.stack(rows)[rank, place]


def _from_folder(run: Run, version: int) -> TransformersEngine | None:
    """Return, on rank 0, a transformers model on the host with the trainer's weights: those of the folder
    that it started from, which no transfer has touched, or once it has learned an export's."""
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
def _reference_parts(
    engine: TransformersEngine, tokens: Sequence[int], given: Mapping[Part, Tensor]
) -> dict[Part, Tensor]:
    """Return, in the model's order, what each part gives for a sequence, on the host, [t, hidden]; as
    (layers, HEAD) the logits, float32 [t, vocab].

    A layer's input is what `given` has as the output of the one before it: so a difference stays where it
    arises."""
    body, found, hooks = engine.model.get_decoder(), dict[Part, Tensor](), []
    last = len(body.layers) - 1

    def note(part: Part, _module: Any, _arguments: Any, output: Any) -> None:
        found[part] = (output[0] if isinstance(output, tuple) else output)[0].cpu()

    def replace(before: Part, _module: Any, arguments: Any) -> Any:
        own = arguments[0]
        if before == (-1, "embedding"):
            found[before] = own[0].cpu()
        return given[before][None].to(own), *arguments[1:]

    def watch(module: Any, part: Part, before: Part | None = None) -> None:
        hooks.append(module.register_forward_hook(partial(note, part)))
        if before is not None:
            hooks.append(module.register_forward_pre_hook(partial(replace, before)))

    for number, layer in enumerate(body.layers):
        watch(layer.input_layernorm, (number, "norm before attention"))
        mixer = layer.linear_attn if hasattr(layer, "linear_attn") else layer.self_attn
        watch(mixer, (number, "attention"))
        watch(layer.post_attention_layernorm, (number, "norm before MLP"))
        watch(layer.mlp, (number, "MLP"))
        watch(layer, (number, OUTPUT), (number - 1, OUTPUT) if number else (-1, "embedding"))
    watch(body.norm, (last + 1, "final norm"), (last, OUTPUT))
    try:
        body(input_ids=torch.tensor([tokens], device=engine.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    head = engine.model.get_output_embeddings().weight.cpu().float()
    hidden = given[last + 1, "final norm"].float()  # logits rounded to bf16 would be off by up to 0.06
    return {**found, (last + 1, HEAD): F.linear(hidden, head)}


def _compare(
    reference: TransformersEngine,
    prompt: list[int],
    response: list[int],
    states: Mapping[Part, Tensor],
    temperature: float,
) -> list[Difference]:
    """Compare each part with the reference's, in their order, given the trainer's input. Of the output layer
    it is the mean |difference| of the response's log-probs."""
    theirs = _reference_parts(reference, [*prompt, *response], states)
    found, fused = [], False
    for part, output in theirs.items():
        if part[1] == HEAD:
            logits = output[len(prompt) - 1 : -1].float() / temperature
            logprobs = logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0]
            share = float((states[part] - logprobs).abs().mean())
        elif part in states:
            ours, size = states[part].double(), output.double().norm(dim=-1)
            apart = (ours - output.double()).norm(dim=-1)
            share = float((apart / size.clamp(min=1e-30)).square().mean().sqrt())
        else:
            fused = True
            continue
        layer, name = part
        found.append(Difference((layer, f"{name} with the norm before it" if fused else name), share))
        fused = False
    return found
