"""tools/node.sh as two nodes of this machine: a new attempt after a failure, and signals."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch.tool import ROOT

SCRIPT = ROOT / "tools" / "node.sh"
QUICK = [
    "rollout.prompts=4",
    "rollout.group_size=4",
    "update.mini_batch=16",
    "value_pretraining.steps=0",
    "evaluation.max_problems=4",
    "parallel.tp=1",
    "log.report=false",
    "checkpoint.every=1",
]


class Nodes:
    """Two nodes with Kubeflow's variables, or SkyPilot's, and a rank on each of them."""

    def __init__(self, folder: Path, arguments: list[str], *, on: str, **settings: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        self.logs = [folder / f"node{node}.log" for node in range(2)]
        self.processes = []
        for node, log in enumerate(self.logs):
            kubeflow = {
                "PET_NNODES": "2",
                "PET_NPROC_PER_NODE": "1",
                "PET_NODE_RANK": str(node),
                "PET_MASTER_ADDR": "127.0.0.1",
                "PET_MASTER_PORT": port,
            }
            skypilot = {
                "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2",
                "SKYPILOT_NODE_RANK": str(node),
                "SKYPILOT_NUM_GPUS_PER_NODE": "0",
                "MEGARL_PORT": port,
            }
            environment = {"MEGARL_LOGS": str(folder), "MEGARL_LIMIT": "120", "MEGARL_PYTHON": sys.executable}
            environment |= {"GLOO_SOCKET_IFNAME": "lo", "MEGARL_GRACE": "120"} | settings
            with log.open("w") as out:
                self.processes.append(
                    subprocess.Popen(
                        ["bash", str(SCRIPT), *arguments],
                        env=os.environ | environment | (kubeflow if on == "kubeflow" else skypilot),
                        stdout=out,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )

    def wait(self) -> tuple[list[int], str]:
        """Return the exit codes of both nodes and what they printed."""
        try:
            codes = [process.wait(400) for process in self.processes]
        finally:
            for process in self.processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
        return codes, "\n".join(log.read_text() for log in self.logs)

    def rank(self, node: int) -> int:
        """Return the process id of a node's rank: the child of torchrun, which is a child of the script."""
        children = [self.processes[node].pid]
        for _ in range(2):
            text = Path(f"/proc/{children[-1]}/task/{children[-1]}/children").read_text()
            children.append(int(text.split()[-1]))
        return children[-1]


def wait_for_file(pattern: str, folder: Path, text: str = "") -> None:
    end = time.monotonic() + 400
    while not any(text in path.read_text() for path in folder.glob(pattern)):
        assert time.monotonic() < end, f"no {pattern} in {folder}"
        time.sleep(0.2)


def test_without_a_cluster_the_script_says_so() -> None:
    done = subprocess.run(
        ["bash", SCRIPT, "x.yaml"], env={"PATH": os.environ["PATH"]}, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.startswith("node.sh: SKYPILOT_NODE_IPS and PET_MASTER_ADDR: neither is set")


@pytest.mark.slow
def test_after_a_killed_rank_both_nodes_continue_by_themselves(tmp_path: Path, data: list[str]) -> None:
    run_dir = tmp_path / "run"
    nodes = Nodes(
        tmp_path, ["configs/demos/vapo.yaml", *data, *QUICK, "steps=3", f"run_dir={run_dir}"], on="kubeflow"
    )
    wait_for_file("checkpoints/step-*/manifest.json", run_dir)
    os.kill(nodes.rank(1), signal.SIGKILL)
    codes, printed = nodes.wait()
    assert codes == [0, 0], printed
    assert "preflight: 2 nodes over gloo" in printed
    assert len(re.findall(r"node \d of 2, attempt 1", printed)) == 2
    assert (run_dir / "hf" / "model.safetensors").is_file()


@pytest.mark.slow
def test_a_signal_to_one_node_ends_it_with_a_checkpoint(tmp_path: Path, data: list[str]) -> None:
    """The other node then waits for it in the preflight, here for less time than it stays away."""
    run_dir = tmp_path / "run"
    arguments = [
        "configs/demos/vapo.yaml",
        *data,
        *QUICK,
        "steps=60",
        "checkpoint.every=50",
        f"run_dir={run_dir}",
    ]
    nodes = Nodes(tmp_path, arguments, on="skypilot", MEGARL_LIMIT="5")
    wait_for_file("metrics.jsonl", run_dir, '"step": 1,')
    nodes.processes[1].send_signal(signal.SIGTERM)
    codes, printed = nodes.wait()
    assert codes[1] == 143, printed
    assert "signal TERM: the ranks have 120 s to save and leave" in printed
    assert list(run_dir.glob("checkpoints/step-*/manifest.json")), printed
    assert codes[0] == 2 and "preflight failed on node 0" in printed, printed
