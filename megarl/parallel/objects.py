"""Encode messages as msgpack, and decode them as the type that the receiver names.

Integers have at most 64 bits, so a user's JSON is sent as text.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from megarl.config.errors import MegarlError, MessageError, error_class


def as_plain(value: Any) -> Any:
    """Convert a value for msgspec."""
    match value:
        case Tensor():
            data = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            return str(value.dtype).removeprefix("torch."), value.shape, data
        case np.ndarray():
            return value.dtype.str, value.shape, value.tobytes()
        case np.generic():
            return value.item()
        case Path():
            return str(value)
        case MegarlError():
            error_type = next(c for c in type(value).__mro__ if error_class(c.__name__) is c)
            flags = {name: flag for name, flag in vars(value).items() if isinstance(flag, bool)}
            return error_type.__name__, [str(argument) for argument in value.args], flags
    raise TypeError(f"{type(value).__name__} is no type that is sent")


def from_plain(kind: type, plain: Any) -> Any:
    """Invert `as_plain`. Raises ValueError or TypeError."""
    if issubclass(kind, Tensor):
        name, shape, data = plain
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype) or math.prod(shape) * dtype.itemsize != len(data):
            raise ValueError(f"{len(data)} bytes are no tensor {name} {shape}")
        if not data:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)
    if issubclass(kind, np.ndarray):
        name, shape, data = plain
        return np.frombuffer(data, name).reshape(shape)
    if issubclass(kind, Path):
        return Path(plain)
    if issubclass(kind, MegarlError):
        name, texts, flags = plain
        error = error_class(name)(*texts)
        vars(error).update((flag, bool(flags[flag])) for flag in ("on_every_rank", "fatal") if flag in flags)
        return error
    raise TypeError(f"{kind.__name__} is no type that is sent")


encode = msgspec.msgpack.Encoder(enc_hook=as_plain).encode


def decode(data: bytes, kind: Any, sender: str) -> Any:
    """Decode `data` as `kind`. Raises MessageError if that fails."""
    try:
        return msgspec.msgpack.decode(data, type=kind, dec_hook=from_plain)
    except (msgspec.MsgspecError, ValueError, TypeError) as error:
        what = f"{sender} has sent {len(data)} bytes that cannot be decoded: {error}"
        raise MessageError(f"{what} (all ranks must run one version of megarl)") from None
