"""An SGLang engine's process with one more call: a batch sent directly to SGLang's own `generate`.

For benchmarks/sglang_engine.py and benchmarks/gpu.py."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from megarl.rollout.engines import sglang_host


class Calls(sglang_host.Calls):
    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self.engine = engine

    async def straight(self, path: str, prompts: list[list[int]], tokens: int) -> None:
        """Generate the batch and write its seconds and tokens to `path`."""
        begin = time.perf_counter()
        answers = await self.engine.async_generate(
            input_ids=prompts,
            sampling_params={"max_new_tokens": tokens, "temperature": 1.0},
            return_logprob=True,
        )
        seconds = time.perf_counter() - begin
        Path(path).write_text(
            json.dumps({"seconds": seconds, "tokens": sum(len(answer["output_ids"]) for answer in answers)})
        )


if __name__ == "__main__":
    sglang_host.main(Calls)
