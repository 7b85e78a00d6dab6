"""Portable layers in bf16 on the GPU, with Qwen2.5-0.5B's shape: updates, offloading, peak memory."""

from __future__ import annotations

import pytest
import torch

from megarl.parallel.runtime import Runtime
from tests.gpu.scene import UPDATE, Scene, get_sizes


@pytest.fixture(scope="module")
def scene(runtime: Runtime, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return Scene(
        runtime, tmp_path_factory.mktemp("small"), get_sizes("Qwen2.5-0.5B"), model={"layers": "portable"}
    )


def test_a_step_learns(scene: Scene) -> None:
    local = scene.local(8, 512)
    before = scene.logprobs(local).mean()
    norms = [scene.update(local).grad_norm for _ in range(3)]
    assert all(0 < norm < 1e3 for norm in norms)
    assert scene.logprobs(local).mean() > before


def test_groups_free_the_device_and_come_back_to_the_bit(scene: Scene) -> None:
    scene.offload.onload("actor_update", UPDATE)
    parameters = dict(scene.actor.model.named_parameters())
    before = {name: parameter.data.cpu() for name, parameter in parameters.items()}
    size, torch_size = scene.offload.nbytes, torch.cuda.memory_allocated()
    host = 0
    for _ in range(2):
        scene.offload.onload("nothing", ())
        freed = torch_size - torch.cuda.memory_allocated()
        assert size <= freed <= 1.02 * size + 2**24, "torch rounds each block up to 512 bytes"
        scene.offload.onload("actor_update", UPDATE)
        assert host in (0, scene.host.nbytes), "pinned memory is used again"
        host = scene.host.nbytes
    torch.cuda.synchronize()
    assert all(torch.equal(before[name], parameter.data.cpu()) for name, parameter in parameters.items())


def test_the_peak_of_a_phase_is_recorded(scene: Scene) -> None:
    local, metrics = scene.local(8, 512), dict[str, float]()
    scene.offload.onload("actor_update", UPDATE)
    with scene.offload.measure_memory("actor_update", metrics):
        scene.update(local)
    assert scene.offload.nbytes < metrics["memory/actor_update"] <= metrics["memory_reserved/actor_update"]
    assert metrics["memory_reserved/actor_update"] <= metrics["memory_device/actor_update"]
