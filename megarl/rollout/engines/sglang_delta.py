"""Code in SGLang's processes: a weight loader that applies deltas (sync/delta.py).

Servers start with `--custom-weight-loader megarl.rollout.engines.sglang_delta.load_delta`."""

from __future__ import annotations

import json
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from megarl.sync.delta import REPORT, Receiver

_RECEIVERS: WeakKeyDictionary[torch.nn.Module, Receiver] = WeakKeyDictionary()


@torch.no_grad()
def load_delta(model: Any, named_tensors: list[tuple[str, Tensor]]) -> None:
    """Update the host copy of a bucket, and load the changed tensors as the model loads a checkpoint.

    named_tensors: pairs of a header in JSON (Receiver.apply; formats: dtype and shape by name) and the data.
    An exception would end SGLang, which also ignores a result. So the report is the name of a buffer, which
    /weights_checker returns."""
    receiver = _RECEIVERS.setdefault(model, Receiver())
    for text, data in named_tensors:
        header = json.loads(text)
        names = receiver.apply(header, data.cpu().numpy())
        tensors = []
        for name in names:
            dtype, shape = header["formats"][name]
            values = torch.from_numpy(receiver.tensors[name]).view(getattr(torch, dtype)).view(shape)
            tensors.append((name, values.to(data.device)))
        if tensors:
            model.load_weights(tensors)
        if header["last"] or receiver.problem:
            _report(model, receiver.report)


def _report(model: torch.nn.Module, report: str) -> None:
    for name in [name for name in model._buffers if name.startswith(REPORT)]:
        delattr(model, name)
    # A buffer's name has no dots, which also marks it for the reader.
    name = (REPORT + report).replace(".", ":")[:300]
    model.register_buffer(name, torch.zeros(1, dtype=torch.uint8), persistent=False)
