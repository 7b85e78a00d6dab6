"""Workers of these tests run as those of tests/rollout do."""

from tests.rollout.conftest import gather_by_runtime, on_loopback, one_thread  # noqa: F401 (fixtures)
