"""SGLang on a CPU: import stubs of two packages of which it imports names and then uses none. Only where there is no CUDA.

sgl_kernel    Imported at the top of many modules (srt/mem_cache/allocation.py, srt/layers/moe/topk.py, ...) whose torch-native code is then
              taken. Nothing is registered in `torch.ops.sgl_kernel`, by which SGLang sees that there are no CPU kernels
              (srt/utils/common.py).
torchvision   srt/multimodal/internvl_utils.py, which srt/configs imports. The package index has a build for CUDA alone, which cannot be
              imported beside a CPU torch and would break transformers too.

Every name is there, calling one raises. Written against SGLang 0.5.23.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from transformers.utils import is_torchvision_available

KERNELS, VISION = "sgl_kernel", "torchvision"


class _Missing:
    """A function, class or module that is not there."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{self.__name__} is not there on a CPU: megarl/rollout/sglang_cpu.py stands for it")

    def __getattr__(self, name: str) -> Any:
        return _attribute(self.__name__, name)


def _attribute(owner: str, name: str) -> _Missing:
    if name.startswith("__"):
        raise AttributeError(f"{owner} has no {name}")
    return _Missing(f"{owner}.{name}")


class _Stub(MetaPathFinder, Loader):
    """Finds a package and every module below it."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.split(".")[0] == self.package else None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        vars(module)["__getattr__"] = lambda attribute: _attribute(name, attribute)
        if name == KERNELS:
            vars(module)["__version__"] = "0"
            vars(module)["assign_req_to_token_pool_cpu"] = _assign_req_to_token_pool


def _assign_req_to_token_pool(
    req_pool_indices: Tensor, req_to_token: Tensor, start_offset: Tensor, end_offset: Tensor, out_cache_loc: Tensor, pool_len: int
) -> None:
    """The one kernel on the path of a generation (srt/mem_cache/allocation.py: assign_req_to_token_pool_func): each request's new
    cache slots, one request after the other in `out_cache_loc`, into its row of `req_to_token`."""
    taken = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        req_to_token[row, start:end] = out_cache_loc[taken : taken + end - start].to(req_to_token.dtype)
        taken += end - start


def install() -> None:
    """Before the first import of sglang, in each of its processes. Nothing happens where there is CUDA."""
    if torch.cuda.is_available():
        return
    # transformers remembers its first answer, and must go on without torchvision.
    is_torchvision_available()
    for package in (KERNELS, VISION):
        if package not in sys.modules and find_spec(package) is None:
            sys.meta_path.append(_Stub(package))
