"""The verifier pool with real processes.

A verifier that hangs, dies, needs too much memory or is broken affects its own answer only."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.config.errors import ConfigError
from megarl.config.schema import RewardTerm
from megarl.rewards import GradedResponse, Verdict, VerifierPool, get_verifier, pool
from megarl.rewards.pool import grade

VERIFIERS = '''
import os, signal, sys, threading, time
from megarl.rewards.verdict import Verdict

def acts(response, answer):
    """Does what the response says."""
    print("noise on stdout"); print("noise on stderr", file=sys.stderr)
    if response == "sleep": time.sleep(60)
    if response == "spin": 9**9**9
    if response == "deaf": signal.signal(signal.SIGTERM, signal.SIG_IGN); threading.Event().wait(60)
    if response == "kill": os.kill(os.getpid(), signal.SIGKILL)
    if response == "segfault": os.kill(os.getpid(), signal.SIGSEGV)
    if response == "exit": sys.exit(3)
    if response == "deep":
        def deeper(): return deeper()
        return deeper()
    if response == "refused":
        import socket
        with socket.socket() as free: free.bind(("127.0.0.1", 0)); port = free.getsockname()[1]
        socket.create_connection(("127.0.0.1", port), timeout=2)
    if response == "raise": raise KeyError("no such\\nthing")
    if response == "text": return "yes"
    if response == "score": return Verdict(True, score="0.5")
    if response.startswith("number "): return float(response[7:])
    if response == "graded": return Verdict(True, "a", score=0.5)
    if response == "memory": return len(bytearray(4 << 30)) > 0
    if response == "environment": return Verdict(True, ",".join(sorted(os.environ)))
    if response == "modules": return Verdict(True, ",".join(sorted(sys.modules)))
    if response == "pid": time.sleep(0.2); return Verdict(True, str(os.getpid()))
    if response == "first":  # whoever has it first waits for its end
        if not os.path.exists(answer): open(answer, "w").close(); signal.pause()
        return True
    if response == "long": return Verdict(True, "x" * 10**6)
    if response.startswith("both"): return Verdict(True, response[4:])
    return response == answer

def term(response):
    if response.text == "slow term": time.sleep(60)
    return response.length / response.longest

not_callable = 5
'''


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "pool_test_verifiers.py").write_text(VERIFIERS)
    (tmp_path / "pool_test_broken.py").write_text("raise RuntimeError('half\\ndone')")
    (tmp_path / "pool_test_exits.py").write_text("import sys; sys.exit(4)")
    (tmp_path / "pool_test_fatal_later.py").write_text(
        "import os, sys\nif 'pytest' not in sys.modules:\n"
        "    print('cannot go on', file=sys.stderr, flush=True)\n    os._exit(7)\n"
        "def f(response, answer): return True\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return "pool_test_verifiers:acts"


def gone(pid: int) -> bool:
    """Return whether the process ends within a minute."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)
    return False


def test_order_and_plain_bools(user_module: str) -> None:
    items = [(str(i), str(i if i % 3 else -1)) for i in range(500)]
    with VerifierPool(user_module, workers=2, timeout=30) as pool:
        assert pool.pids == []  # no process starts before it is needed
        assert pool.verify([]) == []
        assert pool.verify(items) == [Verdict(i % 3 > 0) for i in range(500)]
        pids = pool.pids
        assert pool.verify(items[:3]) == [Verdict(False), Verdict(True), Verdict(True)]
        assert pool.pids == pids and len(pids) == 2
        assert pool.verify([(f"both{i}", "") for i in range(9)]) == [Verdict(True, str(i)) for i in range(9)]
    assert pool.pids == [] and all(gone(pid) for pid in pids)
    assert pool.verify(items[1:2]) == [Verdict(True)]  # a closed pool starts again
    pool.close()


@pytest.mark.slow
def test_each_failure_costs_its_own_answer(user_module: str) -> None:
    bad = {
        "sleep": "timeout after 1.5 s",
        "spin": "timeout after 1.5 s",
        "deaf": "timeout after 1.5 s",
        "kill": "verifier died (signal 9)",
        "segfault": "verifier died (signal 11)",
        "exit": "verifier died (exit code 3)",
        "raise": "KeyError: 'no such\\nthing'",
        "text": "verifier returned str, not bool, number, (right, answer) or Verdict",
        "score": "verifier returned a score: str, not a number",
        "number nan": "verifier returned nan, which is not finite",
        "number -inf": "verifier returned -inf, which is not finite",
        "memory": "verifier ran out of memory",
    }
    # The answer may have caused these failures, so it is wrong. The others are ungraded.
    wrong = {"sleep", "spin", "deaf", "kill", "segfault", "exit", "memory"}
    items, expected = [], []
    for name, error in bad.items():
        for i in range(30):
            items.append((str(i), str(i)))
            expected.append(Verdict(True))
        items.append((name, "x"))
        expected.append(Verdict(False, None, error, graded=name in wrong))
    with VerifierPool(user_module, workers=2, timeout=1.5, memory_mib=512) as pool:
        assert pool.verify(items) == expected
        assert pool.verify(items[:5]) == expected[:5]


def test_scores(user_module: str) -> None:
    numbers = (0.0, 0.1, -2.5, 0.9999999999999999, 1.0, 7.25)
    with VerifierPool(user_module, timeout=30) as pool:
        found = pool.verify([*((f"number {number!r}", "") for number in numbers), ("graded", ""), ("a", "a")])
    scores = [Verdict(number >= 1, score=number) for number in numbers]
    assert found == [*scores, Verdict(True, "a", score=0.5), Verdict(True)]


def ungraded(error: str) -> Verdict:
    return Verdict(False, error=error, graded=False)


class Half:
    """Not a number, but convertible to float."""

    def __float__(self) -> float:
        return 0.5


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        (1, Verdict(True, score=1.0)),
        (np.float32(0.25), Verdict(False, score=0.25)),
        (np.float32(0.25) == np.float32(0.25), Verdict(True)),
        (np.bool_(False), Verdict(False)),
        (Verdict(np.bool_(True), score=np.bool_(True)), Verdict(True, score=1.0)),
        (
            np.array([True, False]),
            ungraded("verifier returned ndarray, not bool, number, (right, answer) or Verdict"),
        ),
        (Fraction(1, 4), Verdict(False, score=0.25)),
        (Verdict(False, score=True), Verdict(False, score=1.0)),
        (Verdict(False, "4", score=3), Verdict(False, "4", score=3.0)),
        (Half(), ungraded("verifier returned Half, not bool, number, (right, answer) or Verdict")),
        (None, ungraded("verifier returned NoneType, not bool, number, (right, answer) or Verdict")),
        (
            Verdict(True, score=math.inf),
            ungraded("verifier returned a score: inf, which is not finite"),
        ),
        (10**400, ungraded("OverflowError: int too large to convert to float")),
    ],
)
def test_what_a_verifier_may_return(returned: Any, expected: Verdict) -> None:
    verdict = grade(lambda response, answer: returned, {}, "", "")
    assert verdict == expected and (verdict.score is None or type(verdict.score) is float)


@given(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6), st.floats(-4, 4))
def test_the_reward_of_a_score(correct: float, incorrect: float, score: float) -> None:
    assert Verdict(True).reward(correct, incorrect) == correct  # bitwise, without a score
    assert Verdict(False).reward(correct, incorrect) == incorrect
    exact = Fraction(incorrect) + Fraction(score) * (Fraction(correct) - Fraction(incorrect))
    found = Verdict(False, score=score).reward(correct, incorrect)
    assert abs(Fraction(found) - exact) <= Fraction(2e-14) * Fraction(
        max(abs(correct), abs(incorrect), 1e-300)
    )


def test_terms_see_what_was_graded() -> None:
    seen = []

    def term(response: GradedResponse) -> int:
        seen.append(response)
        return 3

    verdict = grade(lambda *_: 0.25, {"a": term, "b": lambda response: 0.5}, "text", "7", 12, 20, True)
    assert verdict == Verdict(False, score=0.25, terms={"a": 3.0, "b": 0.5})
    assert seen == [GradedResponse("text", "7", 12, 20, True, Verdict(False, score=0.25))]
    # No terms without a size, as in an evaluation, nor for an answer on which the verifier failed.
    assert grade(lambda *_: True, {"a": term}, "text", "7") == Verdict(True)
    assert grade(lambda *_: 1 / 0, {"a": term}, "text", "7", 1, 2, False).terms == {} and len(seen) == 1


@pytest.mark.parametrize(
    ("returned", "error"),
    [
        (math.nan, "reward.terms.a: it returned nan, which is not finite"),
        (None, "reward.terms.a: it returned NoneType, not a number"),
        (KeyError("no\nsuch"), "reward.terms.a: KeyError: 'no\\nsuch'"),
        (MemoryError(), "reward.terms.a: it ran out of memory"),
    ],
)
def test_an_answer_on_which_a_term_fails_is_ungraded(returned: Any, error: str) -> None:
    """Memory is the exception: the answer may have caused that, so it is wrong."""

    def term(response: GradedResponse) -> Any:
        if isinstance(returned, BaseException):
            raise returned
        return returned

    terms = {"b": lambda response: 1.0, "a": term}
    expected = Verdict(False, error=error, graded=isinstance(returned, MemoryError))
    assert grade(lambda *_: True, terms, "x", "7", 1, 2, False) == expected


def test_terms_in_a_worker(user_module: str) -> None:
    terms = {
        "format": RewardTerm(function="megarl.rewards.shaping:matches", arguments={"pattern": "^a.b$"}),
        "acts": RewardTerm(function="pool_test_verifiers:term"),
    }
    with VerifierPool(user_module, workers=1, timeout=60, terms=terms) as pool:
        found = pool.verify([("a\nb", "a\nb", 3, 8, False), ("ab", "c", 2, 8, True), ("a", "a")])
        assert found == [
            Verdict(True, terms={"format": 1.0, "acts": 3 / 8}),
            Verdict(False, terms={"format": 0.0, "acts": 2 / 8}),
            Verdict(True),
        ]
    with VerifierPool(user_module, workers=1, timeout=2.0, terms=terms) as pool:
        late = pool.verify([("slow term", "", 1, 8, False)])
        assert late == [Verdict(False, error="timeout after 2 s")]
    with pytest.raises(ConfigError, match=r"^reward.terms.x.function: pool_test_verifiers has no function"):
        VerifierPool("dapo", terms={"x": RewardTerm(function="pool_test_verifiers:no")})
    with pytest.raises(ConfigError, match=r"^reward.terms.x.function: 'dapo' names no function"):
        VerifierPool("dapo", terms={"x": RewardTerm(function="dapo")})


def test_what_an_answer_brings_about_is_wrong_and_what_it_cannot_is_ungraded(user_module: str) -> None:
    """A refused connection stands for a service that is down."""
    answers = ["kill", "segfault", "exit", "raise", "text", "memory", "deep", "refused", "a"]
    with VerifierPool(user_module, workers=2, timeout=5, memory_mib=256, sandbox="network") as pool:
        found = dict(zip(answers, pool.verify([(text, "a") for text in answers]), strict=True))
    graded = {text: verdict.graded for text, verdict in found.items()}
    assert graded == dict.fromkeys(answers, True) | dict.fromkeys(("raise", "text", "refused"), False)
    assert [text for text, verdict in found.items() if verdict.correct] == ["a"]
    assert found["kill"].error == "verifier died (signal 9)"
    assert found["refused"].error is not None and found["refused"].error.startswith(
        "ConnectionRefusedError: "
    )
    assert found["deep"].error == "verifier ran out of stack"


def test_workers_that_cannot_be_started_any_more_leave_answers_ungraded(
    user_module: str, tmp_path: Path
) -> None:
    with VerifierPool(user_module, workers=2, timeout=20) as pool:
        assert pool.verify([("a", "a")] * 4) == [Verdict(True)] * 4
        (tmp_path / "pool_test_verifiers.py").write_text("raise RuntimeError('gone')")
        for pid in pool.pids:
            os.kill(pid, signal.SIGKILL)
            assert gone(pid)
        later = pool.verify([("a", "a")] * 6)
        assert not any(verdict.graded or verdict.correct for verdict in later)
        assert all("cannot be imported: RuntimeError: gone" in str(verdict.error) for verdict in later)


def test_a_machine_that_starts_no_process_leaves_answers_ungraded(
    user_module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with VerifierPool(user_module, timeout=20) as pool:
        assert pool.verify([("a", "a")]) == [Verdict(True)]
        os.kill(pool.pids[0], signal.SIGKILL)
        with monkeypatch.context() as patch:
            patch.setattr("sys.executable", "/no/such/python")
            later = pool.verify([("a", "a")] * 2)
        assert not any(verdict.graded or verdict.correct for verdict in later)
        error = "reward.verifier: 3 worker processes died at their start (FileNotFoundError: "
        assert all(str(verdict.error).startswith(error) for verdict in later)
        assert pool.verify([("a", "a")]) == [Verdict(True)]


def test_a_worker_killed_from_outside_while_it_works(user_module: str, tmp_path: Path) -> None:
    with VerifierPool(user_module, workers=1, timeout=60, sandbox="off") as pool:
        pool.verify([("a", "a")])
        (pid,) = pool.pids
        begun = tmp_path / "begun"

        def kill() -> None:
            while not begun.exists():
                time.sleep(0.01)
            os.kill(pid, signal.SIGKILL)

        killer = threading.Thread(target=kill, daemon=True)
        killer.start()
        verdicts = pool.verify([*[("first", str(begun))] * 5, *[("a", "a")] * 20])
        killer.join(60)
        assert [verdict.correct for verdict in verdicts] == [True] * 25  # another worker grades its answers
        assert pid not in pool.pids


def test_an_idle_worker_that_was_killed_costs_nothing(user_module: str) -> None:
    with VerifierPool(user_module, workers=2, timeout=20) as pool:
        pool.verify([("a", "a")] * 4)
        killed = pool.pids
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
            assert gone(pid)
        assert pool.verify([("a", "a")] * 50) == [Verdict(True)] * 50
        assert not set(killed) & set(pool.pids)


def test_a_stopped_worker_cannot_block_the_pool(user_module: str) -> None:
    """Megabytes are sent to a process that reads nothing. Writing and waiting must not exceed the limit."""
    with VerifierPool(user_module, workers=1, timeout=3.0) as pool:
        pool.verify([("a", "a")])
        (pid,) = pool.pids
        os.kill(pid, signal.SIGSTOP)
        verdicts = pool.verify([("x" * 5_000_000, "a"), ("a", "a")])  # pytest's own limit ends a hang
        assert verdicts == [Verdict(False), Verdict(True)]  # from another worker
        assert gone(pid)


def test_large_and_odd_texts_travel(user_module: str) -> None:
    odd = ["", "\x00", "\ud800 lone surrogate", "\u2028\n\r", "x" * 3_000_000, "\U0001f600"]
    with VerifierPool(user_module, workers=2, timeout=30) as pool:
        assert pool.verify([(text, text) for text in odd]) == [Verdict(True)] * len(odd)
        assert pool.verify([("long", "")])[0].extracted == "x" * 1000


def test_signals_of_the_job_do_not_end_workers(user_module: str) -> None:
    with VerifierPool(user_module, workers=1, timeout=20) as pool:
        pool.verify([("a", "a")])
        for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
            os.kill(pool.pids[0], number)
        before = pool.pids
        assert pool.verify([("a", "a")]) == [Verdict(True)]
        assert pool.pids == before


def test_a_worker_has_neither_the_runs_environment_nor_torch(
    user_module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    monkeypatch.setenv("RANK", "3")
    with VerifierPool(user_module, workers=1, timeout=20) as pool:
        environment, modules = (
            verdict.extracted or "" for verdict in pool.verify([("environment", ""), ("modules", "")])
        )
    assert "PATH" in environment and "KEY" not in environment and "RANK" not in environment
    assert not {"torch", "megatron", "transformers", "sympy"} & set(modules.split(","))
    code = "import sys, megarl.rewards as r; r.get_verifier('dapo'); "
    code += "sys.exit('torch' in sys.modules or 'sympy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize("work", ["pid", pytest.param("spin", marks=pytest.mark.slow)])
def test_workers_end_when_their_parent_is_killed(user_module: str, tmp_path: Path, work: str) -> None:
    """The worker is idle, or in an endless computation that reads no pipe."""
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from megarl.rewards import VerifierPool\n"
        f"pool = VerifierPool({user_module!r}, workers=1, timeout=2.0)\n"
        "pool.verify([('pid', '')]); print(*pool.pids, flush=True)\n"
        f"pool.verify([({work!r}, '')] * 100)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    time.sleep(0.3)
    parent.kill()
    parent.wait(10)
    parent.stdout.close()
    assert gone(pid)


def test_verifiers_that_cannot_be_had_are_refused_by_name(user_module: str) -> None:
    for name, words in [
        ("minerva", "unknown verifier 'minerva'"),
        (":f", "unknown verifier"),
        ("pool_test_verifiers:absent", "has no function absent"),
        ("pool_test_verifiers:not_callable", "has no function not_callable"),
        ("no.such.module:f", "cannot be imported: ModuleNotFoundError"),
        ("pool_test_broken:f", "cannot be imported: RuntimeError: half "),
        ("pool_test_exits:f", "cannot be imported: SystemExit: 4"),
    ]:
        for make in (get_verifier, VerifierPool):
            with pytest.raises(ConfigError, match=r"^reward\.verifier: ") as caught:
                make(name)
            assert words in str(caught.value) and "\n" not in str(caught.value)


def test_workers_that_die_at_their_start_stop_the_run_with_their_last_words(user_module: str) -> None:
    with VerifierPool("pool_test_fatal_later:f", workers=2) as pool, pytest.raises(ConfigError) as caught:
        pool.verify([("a", "a")])
    assert (
        str(caught.value)
        == "reward.verifier: 3 worker processes died at their start (exit code 7; cannot go on)"
    )
    assert pool.pids == []


@pytest.mark.parametrize("arguments", [{"workers": 0}, {"timeout": 0.0}, {"memory_mib": 1}])
def test_settings_are_checked(arguments: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="expected"):
        VerifierPool("dapo", **arguments)  # type: ignore[arg-type]


@pytest.mark.slow
def test_symbolic_verifier_in_the_pool_survives_towers_of_powers() -> None:
    items = [
        ("\\boxed{\\frac{1}{2}}", "0.5"),
        ("Answer: $9^{9^{9}}$", "\\sqrt{7}"),
        ("Answer: 2\\sqrt{2}", "\\sqrt{8}"),
        ("Answer: 3", "4"),
    ]
    with VerifierPool("math", workers=1, timeout=4.0) as pool:
        verdicts = pool.verify(items)
    assert [verdict.correct for verdict in verdicts] == [True, False, True, False]
    assert [verdict.error for verdict in verdicts] == [None] * 4


def test_throughput() -> None:
    """Compare with the same work without processes under the same load, which shows any wait per answer."""
    response = "Let me think step by step. " * 300
    items = [(f"{response}\nAnswer: {i}", str(i + i % 2)) for i in range(1000)]
    with VerifierPool("dapo", workers=2, timeout=30) as pool:
        pool.verify(items[:4])
        ratios = []
        for _ in range(3):
            start = time.monotonic()
            verdicts = pool.verify(items)
            middle = time.monotonic()
            assert verdicts == [grade(get_verifier("dapo"), {}, *item) for item in items]
            ratios.append((middle - start) / (time.monotonic() - middle))
    assert sum(verdict.correct for verdict in verdicts) == 500
    assert min(ratios) < 10, ratios


def test_a_time_out_of_an_answer_that_calculates_counts_once(
    user_module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a hard answer costs two limits and a new worker.

    On a busy machine it may get too little CPU time to count as calculating."""
    batches, calculated = 0, []
    give, measure = pool._Worker.send_batch, pool._Worker.calculated_since

    def count(self: Any, batch: Iterable[int], items: Sequence[Any]) -> None:
        nonlocal batches
        batches += 1
        give(self, batch, items)

    def record(self: Any, began: float) -> float:
        calculated.append(measure(self, began))
        return calculated[-1]

    monkeypatch.setattr(pool._Worker, "send_batch", count)
    monkeypatch.setattr(pool._Worker, "calculated_since", record)
    with VerifierPool(user_module, timeout=1.0) as workers:
        assert workers.verify([("spin", "")]) == [Verdict(False, error="timeout after 1 s")]
    assert batches == (1 if calculated[0] >= pool._BUSY else 2)


def test_a_slow_start_counts_against_no_answer(user_module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker dies with its answer, and the next one takes too long to start."""
    from megarl.rewards import process

    with VerifierPool(user_module, timeout=20) as pool:
        assert pool.verify([("a", "a")]) == [Verdict(True)]
        connect, starts = process.LimitedProcess.connect, []

        async def slow(self: process.LimitedProcess, settings: dict[str, Any]) -> str | None:
            starts.append(self)
            if len(starts) < 3:
                raise TimeoutError
            return await connect(self, settings)

        monkeypatch.setattr(process.LimitedProcess, "connect", slow)
        verdicts = pool.verify([("a", "a"), ("exit", ""), ("b", "b"), ("c", "c")])
        assert [one.correct for one in verdicts] == [True, False, True, True] and len(starts) >= 3
        assert all(one.graded for one in verdicts)


def test_messages_that_are_no_verdicts(user_module: str, tmp_path: Path) -> None:
    """A verifier writes an answer's text to its pipe: the answer is wrong, and grading continues."""
    (tmp_path / "pool_test_pipes.py").write_text(
        "import os\n"
        "def f(response, answer):\n"
        "    if response == 'a': return True\n"
        "    for pipe in range(3, 12):\n"
        "        try: os.write(pipe, response.encode() + b'\\n')\n"
        "        except OSError: pass\n"
        "    import time; time.sleep(60)\n"
    )
    with VerifierPool("pool_test_pipes:f", timeout=20) as pool:
        found = pool.verify(
            [("no json", ""), ("[1, 2, 3, 4, 5, 6, 7, 8]", ""), ("x" * 2_000_000, ""), ("a", "")]
        )
    assert [one.correct for one in found] == [False, False, False, True] and all(one.graded for one in found)
