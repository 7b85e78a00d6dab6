"""Lets every Python process that has this folder on PYTHONPATH compute Transformer Engine's modules on its
CPU.

PYTHONPATH=.te-cpu:tests/te/compiled, where .te-cpu holds the pure-Python package (`make test-te` installs
it). Python imports a module of this name at its start; whoever first imports transformer_engine, Megatron for
one, finds the compiled half in plain torch.
"""

import importlib
import sys
from importlib.machinery import ModuleSpec, PathFinder


class Emulated:
    """Wraps the import of transformer_engine in `transformer_engine_torch.emulated()`."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> "ModuleSpec | None":
        if name != "transformer_engine":
            return None
        spec = PathFinder.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: object) -> None:
            with importlib.import_module("transformer_engine_torch").emulated():
                execute(module)
                importlib.import_module("transformer_engine.pytorch.optimizers")

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Emulated)
