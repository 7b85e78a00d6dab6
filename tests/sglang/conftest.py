"""All tests here need sglang (`make test-sglang` makes an environment with it) and are slow."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.pretrained import smollm2

__all__ = ["smollm2"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/sglang/" in item.nodeid:
            item.add_marker(pytest.mark.slow)
            if find_spec("sglang") is None:
                item.add_marker(pytest.mark.skip(reason="sglang is not installed: make test-sglang"))
