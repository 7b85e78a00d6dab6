"""Transformer Engine's own modules on kernels in plain torch (compiled/): `make test-te` installs its Python
half and runs this."""

from __future__ import annotations

from importlib.util import find_spec

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if find_spec("transformer_engine_torch") and find_spec("transformer_engine"):
        return
    for item in items:
        if "tests/te/" in item.nodeid:
            item.add_marker(pytest.mark.skip(reason="needs Transformer Engine's Python half: make test-te"))
