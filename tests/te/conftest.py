"""Transformer Engine's own modules on kernels in plain torch (compiled/): `make test-te` installs its Python
half and runs this."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

# Files that take longest, in this order. A worker that got one of them last would leave the other idle.
LONGEST = ("test_training.py", "test_layouts.py", "test_hour.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if all("tests/te/" in item.nodeid for item in items):
        items.sort(key=lambda item: (*LONGEST, item.path.name).index(item.path.name))
    if find_spec("transformer_engine_torch") and find_spec("transformer_engine"):
        return
    for item in items:
        if "tests/te/" in item.nodeid:
            item.add_marker(pytest.mark.skip(reason="needs Transformer Engine's Python half: make test-te"))
