"""The check of a job's nodes names each problem with its node within seconds; a sound job passes."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from megarl.cli.nodes import planned_needs
from megarl.parallel import node_checks
from megarl.parallel.node_checks import Findings, NodeNeeds, NodePlace, check_nodes, networks
from tests.ranks import FORK

SAME = {"torch": "2.13.0"}
CONFIG = Path(__file__).parents[2] / "configs" / "vapo_32b.yaml"


def node(place: NodePlace, needs: NodeNeeds, versions: dict[str, str], clock_off: float) -> Findings:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    node_checks.VISIBLE = node_checks.HEARD = 1.0  # both nodes are on this machine, in forked processes
    return check_nodes(place, needs, versions, lambda: time.time() + clock_off)


@pytest.fixture(scope="module")
def job() -> Any:
    """Run two nodes: `job(needs of each, versions of each, clock of the second)` returns both findings."""
    pool = ProcessPoolExecutor(2, mp_context=FORK)

    def run(
        needs: list[NodeNeeds],
        versions: list[dict[str, str]],
        clock: float = 0.0,
        nodes: int = 2,
        limit: float = 120.0,
        work: Callable[..., Findings] = node,
    ) -> list[Findings]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        places = [NodePlace(i, nodes, "127.0.0.1", port, limit, name=f"node{i + 1}") for i in range(2)]
        calls = [
            pool.submit(work, *each, clock * i)
            for i, each in enumerate(zip(places, needs, versions, strict=True))
        ]
        return [call.result(timeout=500) for call in calls]

    yield run
    pool.shutdown()


Run = Callable[..., list[Findings]]


def test_sound_nodes_pass_and_are_measured(job: Run, tmp_path: Path) -> None:
    findings = job([NodeNeeds(tmp_path / "run")] * 2, [SAME] * 2)
    assert findings[0].problems == [] and findings[0] == findings[1]
    assert findings[0].notes[0].startswith("2 nodes over gloo: all-reduce ")
    assert list((tmp_path / "run").iterdir()) == []  # no file is left


@pytest.mark.parametrize(
    ("second", "versions", "clock", "expected"),
    [
        ({"devices": 8}, SAME, 0.0, "node2: 0 GPUs, 8 were asked for"),
        ({"host_bytes": 1e15}, SAME, 0.0, "node2: .* GiB of memory are free, the run needs 931322.6"),
        ({"disk_bytes": 1e18}, SAME, 0.0, "node2: .* GiB are free in .*run, the run needs"),
        (
            {"folder": Path("/nowhere/run")},
            SAME,
            0.0,
            "node2: does not see the first node's file in /nowhere/run",
        ),
        ({}, {"torch": "2.12.0"}, 0.0, "node2: torch 2.12.0, but node1 has 2.13.0"),
        ({}, {**SAME, "sglang": "0.5"}, 0.0, "node2: sglang 0.5, but node1 has none"),
        ({}, SAME, 90.0, "node2: its clock is (89|90|91) s ahead of node1's"),
        ({}, SAME, -90.0, "node2: its clock is (89|90|91) s behind node1's"),
    ],
    ids=["gpus", "memory", "disk", "folder", "version", "missing", "ahead", "behind"],
)
def test_a_bad_node_is_named(
    job: Run, tmp_path: Path, second: dict[str, Any], versions: dict[str, str], clock: float, expected: str
) -> None:
    import re

    needs = [NodeNeeds(tmp_path / "run"), NodeNeeds(**{"folder": tmp_path / "run", **second})]
    findings = job(needs, [SAME, versions], clock)
    for found in findings:
        assert len(found.problems) == 1 and re.match(expected, found.problems[0]), found


def over_two_networks(
    place: NodePlace, needs: NodeNeeds, versions: dict[str, str], clock_off: float
) -> Findings:
    """Run `node` as on GPUs, with gloo in place of NCCL; the second network carries control messages."""
    original, node_checks.networks = (
        node_checks.networks,
        lambda needs: [("gloo", 2**22, 1e-3), ("gloo", node_checks.CONTROL, None)],
    )
    try:
        return node(place, needs, versions, clock_off)
    finally:
        node_checks.networks = original


def test_jobs_on_gpus_are_measured_on_both_networks(job: Run, tmp_path: Path) -> None:
    """Control messages go over gloo, so the preflight must check it in addition to NCCL."""
    assert [(name, least) for name, _, least in networks(NodeNeeds(tmp_path, devices=8, bandwidth=5.0))] == [
        ("nccl", 5.0),
        ("gloo", None),
    ]
    assert [(name, least) for name, _, least in networks(NodeNeeds(tmp_path, bandwidth=5.0))] == [
        ("gloo", 5.0)
    ]
    findings = job([NodeNeeds(tmp_path / "run")] * 2, [SAME] * 2, work=over_two_networks)
    # each rank measured its own times
    assert findings[0].problems == [] and len(findings[0].notes) == 2 and findings[1].problems == []


def loopback(place: NodePlace, needs: NodeNeeds, versions: dict[str, str], clock_off: float) -> Findings:
    """Check a node whose name resolves to loopback (/etc/hosts on Debian), with no interface configured."""
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    original = socket.getaddrinfo
    socket.getaddrinfo = lambda *_, **__: [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    try:
        return check_nodes(
            place, needs, versions, problems=["sglang cannot be imported"] if place.node else []
        )
    finally:
        socket.getaddrinfo = original


def test_names_that_lead_nowhere_and_what_was_found_before(job: Run, tmp_path: Path) -> None:
    """Without this check a run failed only at its first gloo message."""
    findings = job([NodeNeeds(tmp_path / "run")] * 2, [SAME] * 2, work=loopback)
    name = socket.gethostname()
    found = [line.split(",")[0] for line in findings[1].problems]
    assert found == [
        f"node1: hostname {name} resolves to 127.0.1.1",
        "node2: sglang cannot be imported",
        f"node2: hostname {name} resolves to 127.0.1.1",
    ]


def test_too_slow_a_network_is_named(job: Run, tmp_path: Path) -> None:
    findings = job([NodeNeeds(tmp_path / "run", bandwidth=1e6)] * 2, [SAME] * 2)
    assert [line.split(":")[0] for line in findings[0].problems] == ["node1", "node2"]
    assert "GB/s into it over gloo, at least 1000000.00 are wanted" in findings[0].problems[1]


def test_a_silent_node_is_named_within_the_limit(job: Run, tmp_path: Path) -> None:
    started = time.monotonic()
    findings = job([NodeNeeds(tmp_path / "run")] * 2, [SAME] * 2, nodes=3, limit=6.0)
    assert findings[0].problems == ["node 2 of 3 has not reported within 6 s (those that have: node1, node2)"]
    assert time.monotonic() - started < 100  # a limit ended it, not an endless wait


def test_a_first_node_that_is_out_of_reach() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))  # the port is taken, but nothing listens
        found = check_nodes(
            NodePlace(1, 2, "127.0.0.1", probe.getsockname()[1], 0.5, name="node2"),
            NodeNeeds(Path("x")),
            SAME,
        )
    assert len(found.problems) == 1 and found.problems[0].startswith("node2: cannot reach 127.0.0.1:")


def test_what_a_large_run_needs_of_its_nodes() -> None:
    """The plan needs hundreds of GiB of memory, and disk for the kept checkpoints plus one in writing."""
    from megarl.config import load_config

    config = load_config(CONFIG)
    host, disk = planned_needs(config, 128)
    assert 200e9 < host < 1200e9
    assert disk == pytest.approx(3 * 2 * 14 * 32.4e9, rel=0.02)
    everything = load_config(CONFIG, ["checkpoint.every=100", "checkpoint.keep=0", "steps=1000"])
    assert planned_needs(everything, 128)[1] == pytest.approx((10 * 2 + 1) * 14 * 32.4e9, rel=0.02)
