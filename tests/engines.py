"""A transformers engine with the weights of a folder, without a trainer."""

from __future__ import annotations

from safetensors.torch import load_file

from megarl.rollout.engines.transformers_engine import TransformersEngine


def load_folder(engine: TransformersEngine, version: int = 0) -> None:
    """Update the engine's weights from the safetensors of the engine's folder."""
    files = sorted(engine.folder.glob("*.safetensors"))
    tensors = {name: tensor for path in files for name, tensor in load_file(path).items()}
    engine.begin_update()
    for name, parameter in engine.parameters().items():
        assert parameter.shape == tensors[name].shape, name
        parameter.copy_(tensors[name])
    engine.end_update(version)
