"""Write checkpoints in tests, of one model or a whole run, and wait for them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.config.errors import CheckpointError
from megarl.parallel.comm import barrier, gather_objects
from megarl.schedule.run import Run
from megarl.training.checkpoint import FOLDER, folder_name
from megarl.training.model import TrainableModel
from megarl.training.saving import CheckpointWriter, HostCopier, WrittenPart, cannot_be_written
from megarl.training.sharded import FAILURES, reason


def save_model(model: TrainableModel, folder: Path) -> int:
    """Write into the empty `folder` and return the bytes that this rank wrote; every rank calls this.

    Raises: CheckpointError on every rank if one cannot write.
    """
    copy = HostCopier(model.runtime).copy_model(model)
    failure, size = None, copy.nbytes
    try:
        copy.write(folder)
    except FAILURES as error:
        failure = reason(error)
    kind = tuple[str | None, list[WrittenPart]]
    failures, results = zip(*gather_objects(model.runtime, (failure, copy.results), kind), strict=True)
    if model.runtime.rank == 0 and not any(failures):
        copy.write_index(folder, list(results))
    barrier(model.runtime)  # other ranks may read the checkpoint at once
    if any(failures):
        raise CheckpointError(cannot_be_written(next(text for text in failures if text)))
    return size


def save_checkpoint(run: Run, step: int, state: Mapping[str, Any], versions: Mapping[str, str]) -> Path:
    """Write one checkpoint of the main stage and wait for it; every rank calls this.

    Raises: the errors of CheckpointWriter.
    """
    of_source = run.source.join, run.source.share
    writer = CheckpointWriter(
        run.runtime, run.config, run.models, versions, lambda name: None, *of_source, print
    )
    writer.save("train", step, tuple(run.models), state, now=True)
    return run.config.run_dir / FOLDER / folder_name("train", step)
