"""Ranks for tests: persistent processes, one set per layout, so that torch starts only once.

`ranks(tp, pp, dp).run(job, **arguments)` calls `job(runtime, **arguments)` on every rank and returns the
results by rank. Process groups are created once per process, because gloo's threads survive a destroyed group
and spin.

Ranks are forked from one process that has imported everything. These imports take ten seconds; repeated in
each rank, they were half of the tests' cost. All ranks have the same hash seed, whereas ranks that
`megarl train` starts have different ones (the slow tests start such ranks).
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from megarl.config.schema import ParallelConfig

LIMIT = 240.0  # seconds for one job
PR_SET_PDEATHSIG = 1  # linux/prctl.h
FORK = multiprocessing.get_context("forkserver")
FORK.set_forkserver_preload(
    [
        "tests.ranks",
        "megarl.cli.train",
        "megarl.schedule.replay",
        "megarl.schedule.evaluation",
        "megarl.schedule.trainer",
        "megatron.core.dist_checkpointing",
        "transformers.models.qwen3.modeling_qwen3",
        # imports of test files whose functions ranks call: half a second per rank otherwise
        "pytest",
        "hypothesis.strategies",
        "tests.families",
        "tests.parallel.jobs",
        "transformers.models.glm4_moe.modeling_glm4_moe",
    ]
)
USED_AT_START: list[
    tuple[list[int], str]
] = []  # in a rank: members and name of each group in which it ran an all-reduce at start

SENT_AT_START: list[tuple[int, str]] = []  # in a rank: destination and group of each isend at start


class RankPool:
    """The ranks of one layout on this machine.

    A job that fails on any rank raises RuntimeError with that rank's traceback.
    """

    def __init__(
        self, tp: int, pp: int, dp: int, ep: int = 1, cp: int = 1, vpp: int = 1, *, forked: bool = True
    ) -> None:
        """Start the ranks; forked=False: each rank imports for itself, with the current environment."""
        from megarl.parallel.secret import make_secret

        context: Any = FORK if forked else multiprocessing.get_context("spawn")
        config = ParallelConfig(tp=tp, pp=pp, ep=ep, cp=cp, vpp=vpp, device="cpu", timeout=120)
        self.folder = tempfile.TemporaryDirectory(prefix="megarl-test-ranks-")
        make_secret(Path(self.folder.name, "secret"))
        self.pipes: list[Connection] = []
        self.processes = []
        world = tp * pp * dp * cp
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(rank, world, self.folder.name, config, theirs, list(sys.path)),
                daemon=True,
            )
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, job: Callable[..., Any], **arguments: Any) -> list[Any]:
        self._signal(signal.SIGCONT)
        for pipe in self.pipes:
            pipe.send((job, arguments))
        answers = []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(LIMIT):
                self.close()
                raise RuntimeError(f"rank {rank} did not answer {job.__name__} within {LIMIT:.0f} s")
            answers.append(pipe.recv())
        for rank, (ok, value) in enumerate(answers):
            if not ok:
                self.close()  # its peers may be inside a collective
                raise RuntimeError(f"rank {rank}:\n{value}")
        # each of gloo's threads wakes a hundred times a second, and a rank has dozens
        self._signal(signal.SIGSTOP)
        return [value for _, value in answers]

    def _signal(self, number: signal.Signals) -> None:
        for process in self.processes:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, number)

    @property
    def alive(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(30)


def in_a_fork(job: Callable[..., Any], *arguments: Any, limit: float = LIMIT) -> Any:
    """Run the job in a separate process that has imported everything, and return its result.

    Args:
        limit: seconds.
    """
    with ProcessPoolExecutor(1, mp_context=FORK, initializer=end_with_the_tests) as pool:
        return pool.submit(job, *arguments).result(limit)


def end_with_the_tests() -> None:
    """Have the kernel kill this process when its parent ends, usually the fork server.

    The fork server ends with the tests, however they end. A stopped rank could not react by itself.
    Python passes to forked processes the descriptor that keeps the fork server alive: close it, or each
    process would wait for the other."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    server: Any = forkserver._forkserver
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None


def _serve(
    rank: int, world: int, folder: str, config: ParallelConfig, pipe: Connection, path: list[str]
) -> None:
    end_with_the_tests()
    sys.path[:] = path
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1", GLOO_SOCKET_IFNAME="lo")
    os.environ.update(MEGARL_STORE_FILE=f"{folder}/store", MEGARL_SECRET_FILE=f"{folder}/secret")
    import torch.distributed as dist

    from megarl.parallel import runtime as parallel

    summed = dist.all_reduce

    def spy(tensor: Any, *arguments: Any, **options: Any) -> Any:
        group = options.get("group") or dist.group.WORLD
        USED_AT_START.append((dist.get_process_group_ranks(group), group.group_desc))
        return summed(tensor, *arguments, **options)

    send = dist.isend

    def spy_of_sends(tensor: Any, dst: int, group: Any = None, **options: Any) -> Any:
        SENT_AT_START.append((dst, group.group_desc))
        return send(tensor, dst, group, **options)

    dist.all_reduce, dist.isend = spy, spy_of_sends
    runtime = parallel.start(config, seed=0, mixture=True)  # jobs use dense and mixture models
    dist.all_reduce, dist.isend = summed, send
    gc.freeze()  # as `megarl train` does
    while True:
        try:
            job, arguments = pipe.recv()
        except EOFError:
            return
        try:
            answer = (True, job(runtime, **arguments))
        except Exception:  # noqa: BLE001 (any error of a job is the test's result)
            answer = (False, traceback.format_exc())
        pipe.send(answer)
