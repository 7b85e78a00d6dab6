"""The engine's process with two more calls for tests: `dump` of parameters and `read` of a folder."""

from __future__ import annotations

from multiprocessing.reduction import ForkingPickler

import torch

from megarl.rollout.engines import sglang_host

DUMP = "tests.sglang.inside.dump"


class Calls(sglang_host.Calls):
    async def dump(self, path: str, ranks: int, selector: str = "target") -> None:
        """Write each rank's parameters to `path`, formatted with its rank. selector: target or draft"""
        payload = bytes(ForkingPickler.dumps([(path, torch.empty(0))]))
        await self.begin(None)
        request = self.io.UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[payload] * ranks,
            load_format=DUMP,
            flush_cache=False,
            selector=selector,
        )
        self._check("dump", await self.manager.update_weights_from_tensor(request, None))
        await self.end(None)

    async def read(self, folder: str) -> None:
        """Load Hugging Face's tensors of `folder` with SGLang's own loader."""
        request = self.io.UpdateWeightFromDiskReqInput(model_path=folder, load_format="auto")
        success, message, _ = await self.manager.update_weights_from_disk(request, None)
        self._check("read", (success, message))


if __name__ == "__main__":
    sglang_host.main(Calls)
