"""The typed configuration, its checks, and errors; imports no torch.

Names are imported at first use, since verifiers and tools need only the errors."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megarl.config.check import check_config
    from megarl.config.load import dump_config, load_config
    from megarl.config.schema import Config

__all__ = ["Config", "check_config", "dump_config", "load_config"]

_MODULES = {"Config": "schema", "check_config": "check", "dump_config": "load", "load_config": "load"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
