"""What a model says of an Experience: log-probabilities and entropy, or values, as columns."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megarl.config.errors import NumericalError
from megarl.data.experience import Experience
from megarl.parallel.comm import any_rank, from_last_stage, gather_objects
from megarl.parallel.runtime import Runtime
from megarl.training.learner import Frozen
from megarl.training.micro_batch import MicroBatch


def logprob_columns(policy: Frozen, experience: Experience, micro_batches: Sequence[MicroBatch], runtime: Runtime) -> dict[str, Tensor]:
    """{"logprobs", "entropy"}: float32 [T], 0 outside the responses, on every rank of the replica. NumericalError on every rank of the job
    where one is not finite."""
    return _columns(policy, ("logprobs", "entropy"), experience, micro_batches, runtime)


def value_columns(critic: Frozen, experience: Experience, micro_batches: Sequence[MicroBatch], runtime: Runtime) -> dict[str, Tensor]:
    """{"values"}: float32 [T], 0 outside the responses, on every rank of the replica. Errors as `logprob_columns`."""
    return _columns(critic, ("values",), experience, micro_batches, runtime)


def _columns(
    model: Frozen, names: tuple[str, ...], experience: Experience, micro_batches: Sequence[MicroBatch], runtime: Runtime
) -> dict[str, Tensor]:
    outputs = model.forward(micro_batches)
    columns: dict[str, Tensor] | None = None
    if runtime.is_last_stage:
        columns = {name: torch.zeros(experience.num_tokens) for name in names}
        for batch, output in zip(micro_batches, outputs, strict=True):
            for name, values in zip(names, output if isinstance(output, tuple) else (output,), strict=True):
                columns[name][batch.slots] = values.float().cpu()
    found = from_last_stage(columns, names, experience.num_tokens, runtime)
    bad = [f"{name} of {int((~torch.isfinite(column)).sum())} tokens" for name, column in found.items() if not column.isfinite().all()]
    if any_rank(runtime, bool(bad)):
        first = next(text for texts in gather_objects(runtime, bad) for text in texts)
        raise NumericalError(f"{model.name}: {first} are not finite; nothing was updated with them")
    return found
