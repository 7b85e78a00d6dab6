"""An external SGLang server: `python -m tests.sglang.server --model-path ...`, SGLang's arguments.

Each of its processes has the stubs of megarl's own engine, which a CPU needs."""

from __future__ import annotations

import sys

from megarl.rollout.engines import sglang_host  # noqa: F401 (stands for what a CPU lacks, before sglang is imported)

if __name__ == "__main__":
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args

    run_server(prepare_server_args(sys.argv[1:]))
