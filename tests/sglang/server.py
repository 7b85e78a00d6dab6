"""An SGLang server as somebody else runs it: `python -m tests.sglang.server --model-path ...`, with SGLang's
own arguments. The stubs that a CPU needs are those of megarl's own engine, in each of its processes."""

from __future__ import annotations

import sys

from megarl.rollout.engines import sglang_host  # noqa: F401 (stands for what a CPU lacks, before sglang is imported)

if __name__ == "__main__":
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args

    run_server(prepare_server_args(sys.argv[1:]))
