"""Keeps libraries from talking over the commands' own output."""

from __future__ import annotations

import warnings


def quiet_libraries() -> None:
    """Megatron and transformers warn, in every process, of what is missing on a CPU and is meant to be."""
    for module in ("megatron", "transformers", "torch"):
        warnings.filterwarnings("ignore", module=module)
