"""Fixtures of tests/rollout that these tests share."""

from tests.rollout.conftest import gather_by_runtime, on_loopback, one_thread  # noqa: F401 (fixtures)
