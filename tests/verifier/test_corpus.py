"""Answers as models write them, with what `dapo` and `math` say of them; and answers that mean harm. Both go
through the real pool.

corpus/answers.jsonl: response, reference answer, and whether each verifier takes it. `math` says what is
mathematically so as far as math-verify reads it (units are not compared); `dapo` says what its normalisation
makes equal as text. corpus/hostile.jsonl: pieces of a response, some of them repeated; every one is wrong.
"""

from __future__ import annotations

import json
import resource
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from megarl.rewards import VerifierPool

FOLDER = Path(__file__).parent / "corpus"
TIMEOUT = 5.0  # seconds for one answer
MEMORY = 512  # MiB of a worker


def lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FOLDER / name).read_text().splitlines()]


def text(pieces: list[Any]) -> str:
    return "".join(piece if isinstance(piece, str) else piece[0] * piece[1] for piece in pieces)


ANSWERS = lines("answers.jsonl")


def test_the_corpus_is_what_it_should_be() -> None:
    kinds = Counter(row["kind"] for row in ANSWERS)
    assert len(ANSWERS) >= 120 and len({(row["response"], row["answer"]) for row in ANSWERS}) == len(ANSWERS)
    wanted = "fraction unit separator boxed lines degree percent unicode interval set tuple root scientific"
    wanted += " expression"
    assert set(wanted.split()) == set(kinds) and min(kinds.values()) >= 8
    for name in ("dapo", "math"):
        by_kind = Counter((row["kind"], row[name]) for row in ANSWERS)
        # Nothing is evaluated by dapo, so that no number in another notation is right.
        right = kinds.keys() - {"scientific"} if name == "dapo" else kinds.keys()
        assert all(by_kind[kind, False] for kind in kinds) and all(by_kind[kind, True] for kind in right)
    # The one thing that a reward must not do: the text protocol takes nothing that the symbolic verifier
    # finds to be different.
    assert not [row for row in ANSWERS if row["dapo"] and not row["math"]]


@pytest.mark.parametrize("name", ["dapo", pytest.param("math", marks=pytest.mark.slow)])
def test_answers(name: str) -> None:
    with VerifierPool(name, workers=2, timeout=30, memory_mib=MEMORY) as pool:
        verdicts = pool.verify([(row["response"], row["answer"]) for row in ANSWERS])
    pairs = zip(ANSWERS, verdicts, strict=True)
    wrong = [
        (row["response"], row["answer"], verdict) for row, verdict in pairs if verdict.correct != row[name]
    ]
    assert wrong == [] and all(verdict.error is None for verdict in verdicts)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dapo", "math"])
def test_hostile_answers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong, each within its limit, in bounded memory, and nothing that they say is done: no canary
    appears."""
    monkeypatch.chdir(tmp_path)  # where a command that was executed would leave its CANARY
    rows = [(text(row["response"]), row["answer"]) for row in lines("hostile.jsonl")]
    with VerifierPool(name, workers=1, timeout=TIMEOUT, memory_mib=MEMORY) as pool, Watch(pool) as watch:
        for response, answer in rows:
            started = time.monotonic()
            [verdict] = pool.verify([(response, answer)])
            # The limit, and a fresh worker where the last one was killed: imports on a busy machine.
            assert time.monotonic() - started < TIMEOUT + 30, response[:80]
            assert not verdict.correct, response[:80]
            assert verdict.error is None or name == "math", f"{response[:80]}: {verdict.error}"
    assert list(tmp_path.iterdir()) == []
    assert 0 < watch.peak < (MEMORY + 256) << 20, f"{watch.peak >> 20} MiB"


def test_the_canary_would_sing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A verifier that does evaluate what it is given leaves the file that the test above looks for."""
    (tmp_path / "corpus_test_evaluates.py").write_text(
        "def f(response, answer):\n    return bool(eval(response.partition(': ')[2]))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    commands = [
        text(row["response"])
        for row in lines("hostile.jsonl")
        if text(row["response"]).startswith("Answer: __import__")
    ]
    with VerifierPool("corpus_test_evaluates:f", timeout=20, sandbox="off") as pool:
        pool.verify([(command, "") for command in commands])
    assert commands and (tmp_path / "CANARY").exists()


class Watch:
    """The largest resident memory that any worker of a pool has been seen with, bytes."""

    def __init__(self, pool: VerifierPool) -> None:
        self.pool, self.peak, self.over = pool, 0, threading.Event()
        self.thread = threading.Thread(target=self._look)

    def __enter__(self) -> Watch:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.thread.join()

    def _look(self) -> None:
        while not self.over.wait(0.02):
            for pid in self.pool.pids:
                try:
                    self.peak = max(self.peak, psutil.Process(pid).memory_info().rss)
                except psutil.NoSuchProcess:
                    continue


GREEDY = """
import mmap, os, resource
from megarl.rewards.verdict import Verdict

def f(response, answer):
    if response == "data": return len(bytearray(4 << 30)) > 0
    if response == "list": return len([0] * (1 << 30)) > 0
    if response == "shared": return len(mmap.mmap(-1, 8 << 30)) > 0
    if response == "grow":
        parts = []
        while True: parts.append(b"x" * (1 << 20))
    if response == "environ": return Verdict(True, " ".join(sorted(os.environ)))
    if response == "proc": return Verdict(True, open("/proc/self/environ").read())
    if response == "limits": return Verdict(True, str(resource.getrlimit(resource.RLIMIT_AS)[0] >> 20))
    return True
"""


@pytest.fixture
def greedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "corpus_test_greedy.py").write_text(GREEDY)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "corpus_test_greedy:f"


def test_a_verifier_that_eats_memory_is_contained(greedy: str) -> None:
    limit = resource.getrlimit(resource.RLIMIT_AS)
    with VerifierPool(greedy, workers=1, timeout=20, memory_mib=256) as pool, Watch(pool) as watch:
        verdicts = pool.verify([(how, "") for how in ("data", "list", "shared", "grow", "right")])
    assert [verdict.correct for verdict in verdicts] == [False] * 4 + [True]
    assert [verdict.error for verdict in verdicts[:2]] == ["verifier ran out of memory"] * 2
    assert (
        verdicts[2].error
        and ("memory" in verdicts[2].error)
        and verdicts[3].error == "verifier ran out of memory"
    )
    assert 0 < watch.peak < 512 << 20
    assert resource.getrlimit(resource.RLIMIT_AS) == limit, "the limit is the worker's, not this process's"


def test_a_verifier_sees_nothing_of_the_runs_environment(
    greedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither in os.environ nor in what the kernel kept of the start."""
    for name in (
        "WANDB_API_KEY",
        "HF_TOKEN",
        "RANK",
        "MASTER_ADDR",
        "PYTHONPATH",
        "CUDA_VISIBLE_DEVICES",
    ):
        monkeypatch.setenv(name, "secret-of-the-run")
    with VerifierPool(greedy, workers=1, timeout=20) as pool:
        environ, proc = (verdict.extracted or "" for verdict in pool.verify([("environ", ""), ("proc", "")]))
    allowed = {
        "HOME",
        "LANG",
        "LC_ALL",
        "LC_CTYPE",
        "LD_LIBRARY_PATH",
        "OMP_NUM_THREADS",
        "PATH",
        "PYTHONHASHSEED",
        "PYTHONHOME",
        "TMPDIR",
    }
    assert set(environ.split()) <= allowed and "PYTHONHASHSEED" in environ
    assert "secret-of-the-run" not in proc and "PYTHONHASHSEED=0" in proc
