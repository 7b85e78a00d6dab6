"""The tests of programs: formats of data sets, rules of comparison, and verdicts."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.config.schema import DataConfig
from megarl.data.columns import find_answer
from megarl.rewards.plain_values import UnknownValueError, decode, encode
from megarl.rewards.verdict import UnusableError
from megarl_tasks import code_verifier
from megarl_tasks.code_tests import (
    Assertions,
    Calls,
    Script,
    last_program,
    read_tests,
    same_output,
    same_result,
    same_value,
)
from megarl_tasks.code_verifier import CodeVerifier


@pytest.fixture(scope="module")
def verifier() -> Iterator[CodeVerifier]:
    """Only computation ends programs, so that a busy machine changes no result."""
    verifier = CodeVerifier(timeout=1000.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(code_verifier, "_CASE_SECONDS", 2.0)
        patch.setattr(code_verifier, "_WALL", 100.0)
        yield verifier
    verifier.close()


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\nprint(1)\n```", "print(1)\n"),
        ("first\n```python\n1\n```\nthen\n``` Python3\n2\n```\nend", "2\n"),
        ("```python\n1\n```\n```\noutput\n```", "1\n"),
        ("```py\r\n1\r\n```", "1\n"),
        ("```python\n1\n```\n```python\n2", "1\n"),
        ("```python\n```", "\n"),
        ("```\n1\n```", None),
        ("```c\n1\n```", None),
        ("print(1)", None),
        ("```python\nprint(1)", None),
        ("", None),
    ],
)
def test_the_last_program(text: str, program: str | None) -> None:
    assert last_program(text) == program


CASES = {"inputs": ["1\n", "2\n"], "outputs": ["2\n", "3\n"]}
CALLS = {"inputs": [[1, [2]], [3, []]], "outputs": [3, [4]], "fn_name": "f"}


@pytest.mark.parametrize(
    ("reference", "tests"),
    [
        (CASES, Script(["1\n", "2\n"], ["2\n", "3\n"])),
        (json.dumps(CASES), Script(["1\n", "2\n"], ["2\n", "3\n"])),
        ({"inputs": [["1", "2"]], "outputs": [["3"]]}, Script(["1\n2"], ["3"])),
        (CALLS, Calls("f", [[1, [2]], [3, []]], [3, [4]])),
        (
            {"inputs": [[7], ["a"]], "outputs": ["5", "[]"], "fn_name": "f"},
            Calls("f", [[7], ["a"]], ["5", "[]"]),
        ),
        (
            {"inputs": ["7\n", '"a"'], "outputs": ["5", '"b"'], "fn_name": "f"},
            Calls("f", [[7], ["a"]], [5, "b"]),
        ),
        (
            [{"input": "1\n[2]", "output": "3", "metadata": {"func_name": "f"}, "testtype": "functional"}],
            Calls("f", [[1, [2]]], [3]),
        ),
        (
            [{"input": '"a"', "output": '"5"', "metadata": {"func_name": "f"}}],
            Calls("f", [["a"]], ["5"]),
        ),
        ([{"input": "1", "output": "3", "testtype": "stdin_stdout"}], Script(["1"], ["3"])),
        (["assert f(1) == 2", "assert f(2) == 3"], Assertions("", ["assert f(1) == 2", "assert f(2) == 3"])),
        (["import math", "assert f(1) == 2"], Assertions("\nimport math", ["assert f(1) == 2"])),
        (
            {"test_list": ["assert f(1) == 2"], "test_setup_code": "x = 1", "test_imports": ["import re"]},
            Assertions("x = 1\nimport re", ["assert f(1) == 2"]),
        ),
        (
            {"test": "def check(candidate):\n    assert candidate(1)", "entry_point": "f"},
            Assertions("def check(candidate):\n    assert candidate(1)", ["check(candidate)"], "f"),
        ),
        (
            {"test": "from solution import f\n\ndef test_one():\n    assert f(1)"},
            Assertions("from solution import f\n\ndef test_one():\n    assert f(1)", ["test_one()"]),
        ),
        (
            {"test": "import math\nassert f(1)\nassert f(2)"},
            Assertions("import math", ["assert f(1)", "assert f(2)"]),
        ),
    ],
)
def test_formats(reference: Any, tests: Any) -> None:
    assert read_tests(json.dumps(reference)) == tests


@pytest.mark.parametrize(
    "reference",
    [
        *("", "12", "{}", "[]", "null", '{"inputs": ["1"], "outputs": []}', '{"inputs": [], "outputs": []}'),
        *('{"inputs": 1, "outputs": 1}', '["assert f("]', '["import math"]', '{"test": "def check("}'),
        *("[[[1]]]", '{"inputs": ["x"], "outputs": [1], "fn_name": "f"}', "[" * 10**5, "f(1) == 2"),
    ],
)
def test_unusable_references(verifier: CodeVerifier, reference: str) -> None:
    """They are found before the response is looked at, and are nobody's fault."""
    with pytest.raises(UnusableError, match="the reference h"):
        verifier("no program", reference)


def test_tests_in_a_row() -> None:
    """Objects and lists become JSON; `####` in tests is no answer of GSM8K."""
    hashes = {"inputs": ["1"], "outputs": ["####\n5"]}
    for answer in (CASES, CALLS, hashes, ["assert f(1) == 2"], json.dumps(hashes)):
        row = {"prompt": "q", "answer": answer}
        _, text = find_answer(row, DataConfig(), None)  # type: ignore[arg-type]
        assert json.loads(text) == (json.loads(answer) if isinstance(answer, str) else answer)
    _, text = find_answer({"answer": "so 2\n#### 5"}, DataConfig(), None)  # type: ignore[arg-type]
    assert text == "5"


@pytest.mark.parametrize(
    ("output", "expected", "same"),
    [
        ("1 2\n3\n", "1 2\n3", True),
        ("\n1  2 \r\n3\n\n", "1 2\n3", True),
        ("1\n2\n3", "1 2\n3", False),
        ("1 2\n\n3", "1 2\n3", False),
        ("", "", True),
        ("", "1", False),
        ("1", "", False),
        ("0.33333333", "0.333333", True),
        ("0.3333", "0.333333", False),
        ("2", "2.0", True),
        ("2.0", "2", False),
        ("1e3", "1000.0", True),
        ("1000000.5", "1000000.6", True),
        ("nan", "nan", True),
        ("nan", "1.0", False),
        ("inf", "1e999", False),
        ("yes", "Yes", False),
        ("Infinity", "1.5", False),
        ("1_0.0", "10.0", False),
        ("e", "1e0", False),
    ],
)
def test_outputs(output: str, expected: str, same: bool) -> None:
    assert same_output(output, expected) is same


@pytest.mark.parametrize(
    ("value", "expected", "same"),
    [
        ((1, [2, (3,)]), [1, [2, [3]]], True),
        ([1, 2], [2, 1], False),
        ({1: "a", "b": (2,)}, {"1": "a", "b": [2]}, True),
        ({1: "a"}, {"1": "a", "2": "b"}, False),
        (0.1 + 0.2, 0.3, True),
        (3, 3.0, True),
        (3.0, 3, True),
        (10**400, 1.0, False),
        (10**18 + 1, 10**18, False),
        (True, True, True),
        (True, 1, False),
        (1, True, False),
        (0, None, False),
        (None, None, True),
        ("1", 1, False),
        ({1, 2}, [1, 2], False),
        (math.nan, 1.0, False),
    ],
)
def test_values(value: Any, expected: Any, same: bool) -> None:
    assert same_value(value, expected) is same
    assert same_result(value, [expected]) is (same or same_value(value, [expected]))


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers(), inner)
        | st.sets(st.integers())
        | st.frozensets(st.text())
    ),
    max_leaves=12,
)


@given(PLAIN)
def test_plain_values_survive(value: Any) -> None:
    found = decode(json.loads(json.dumps(encode(value))))
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize("message", [{}, {"a": 1, "b": 2}, {"eval": "1"}, {"handle": 1}, [{"object": []}]])
def test_other_messages_are_refused(message: Any) -> None:
    with pytest.raises(UnknownValueError):
        decode(message)
    with pytest.raises(UnknownValueError):
        encode(object())


def grade(verifier: CodeVerifier, code: str, reference: Any) -> tuple[bool, float | None]:
    verdict = verifier(f"Here:\n```python\n{code}\n```\n", json.dumps(reference))
    assert verdict.error is None and verdict.graded
    return verdict.correct, verdict.score


STACK = "class Stack:\n def __init__(s): s.l = []\n"
STACK += " def push(s, x): s.l.append(x)\n def pop(s): return s.l.pop()\n"


@pytest.mark.parametrize(
    ("code", "reference", "score"),
    [
        ("print(int(input()) + 1)", CASES, 1),
        ("print(2)", CASES, 0.5),
        ("print(2); 1 / 0", CASES, 0),
        ("print(2); import sys; sys.exit(1)", CASES, 0),
        ("import sys\nfor l in sys.stdin: print(int(l) + 1)\nsys.exit()", CASES, 1),
        ("import atexit\natexit.register(lambda: print(int(input()) + 1))", CASES, 1),
        (
            "import threading\nthreading.Thread(target=lambda: print(int(input()) + 1)).start()",
            CASES,
            1,
        ),
        ("print(open(0).read().strip().replace('2', '3').replace('1', '2'))", CASES, 1),
        ("if __name__ == '__main__': print(int(input()) + 1)", CASES, 1),
        ("syntax error", CASES, 0),
        ("import sys; sys.stdout.buffer.write(bytes([255]))", CASES, 0),
        ("def f(a, b): return a + sum(b) if b else [4]", CALLS, 1),
        ("class Solution:\n def f(self, a: int, b: List[int]) -> int: return 3", CALLS, 0.5),
        ("def f(a, b):\n if not b: raise ValueError\n return 3", CALLS, 0.5),
        ("import os\ndef f(a, b):\n if a == 1: os._exit(0)\n return 4", CALLS, 0.5),
        ("def f(a, b):\n while a == 1: pass\n return 4", CALLS, 0.5),
        ("def g(a, b): return 3", CALLS, 0),
        ("def f(x): return x + 1", ["assert f(1) == 2", "assert f(2) == 4"], 0.5),
        ("def f(x): return x + 1", ["import math", "assert math.isclose(f(1), 2.0)"], 1),
        ("def f(x):\n while x == 1: pass\n return 3", ["assert f(1) == 2", "assert f(2) == 3"], 0.5),
        ("def f(x): x.sort()", ["x = [2, 1]\nf(x)\nassert x == [1, 2]"], 1),
        ("def f(x): return {1: (2, {3})}", ["assert f(0) == {1: (2, {3})}", "assert f(0)[1][0] == 2"], 1),
        ("def f(x): raise KeyError(x)", ["try:\n f(1)\n assert False\nexcept KeyError: pass"], 1),
        (STACK, ["s = Stack()\ns.push(3)\nassert s.pop() == 3", "s.push(4)\nassert s.l == [4]"], 1),
        ("A = [1]\ndef f(x=1): return A", ["assert f(x=2) == A == [1]"], 1),
        (
            "def f(x): return x * 2",
            {
                "test": "def check(candidate):\n  for i in range(9): assert candidate(i) == 2 * i",
                "entry_point": "f",
            },
            1,
        ),
        (
            "def f(x): return x * 2",
            {
                "test": "from solution import f\n"
                "def test_a(): assert f(1) == 2\ndef test_b(): assert f(1) == 3"
            },
            0.5,
        ),
    ],
)
def test_scores(verifier: CodeVerifier, code: str, reference: Any, score: float) -> None:
    assert grade(verifier, code, reference) == (score == 1, score)


def test_all_or_nothing() -> None:
    verifier = CodeVerifier(all_or_nothing=True, timeout=100.0)
    try:
        assert grade(verifier, "print(2)", CASES) == (False, 0.0)
        assert grade(verifier, "print(int(input()) + 1)", CASES) == (True, 1.0)
        assert grade(verifier, "def f(a, b): return 3", CALLS) == (False, 0.0)
    finally:
        verifier.close()


@pytest.mark.parametrize(
    "response", ["", "print(1)", "<think>```python\n1\n```", "```python\n" + "1\n" * 40000 + "```"]
)
def test_no_program_is_wrong(verifier: CodeVerifier, response: str) -> None:
    verdict = verifier(response, json.dumps(CASES))
    assert (verdict.correct, verdict.score, verdict.graded, verdict.error) == (False, 0.0, True, None)


@pytest.mark.parametrize(
    "reference",
    [
        {"test": "class TestF:\n    def test_one(self):\n        assert f(3) == 9\n"},
        {"test": "def check(candidate):\n    assert candidate(3) == 9\n"},
        {"test": "async def test_one():\n    assert f(3) == 9\n"},
        {"test": "if __name__ == '__main__':\n    assert f(3) == 9\n"},
        ["def helper(a, b):\n    assert f(a) == b"],
    ],
)
def test_definitions_are_no_tests(reference: Any) -> None:
    with pytest.raises(UnusableError):
        read_tests(json.dumps(reference))


def test_statements_run_before_the_next_assertion(verifier: CodeVerifier) -> None:
    test = {"test": "r = f(2)\nassert r == 4\nr = f(3)\nassert r == 9"}
    assert grade(verifier, "def f(x): return x * x", test) == (True, 1.0)


def test_a_whole_number_is_exact() -> None:
    assert not same_value(123456800.0, 123456789) and same_value(9.0, 9) and same_value(1e8 + 1, 1e8)
    assert not same_output("9e999", "12345e678") and not same_output("1" * 100_000 + "x", "1.5")


def test_scripts_may_exit_and_read_their_arguments(verifier: CodeVerifier) -> None:
    code = "import fileinput\nprint(sum(int(line) for line in fileinput.input()) + 1)\nexit()"
    assert grade(verifier, code, CASES) == (True, 1.0)


def test_large_results_and_broken_texts(verifier: CodeVerifier) -> None:
    large = {"fn_name": "f", "inputs": [[200_000]], "outputs": [list(range(200_000))]}
    assert grade(verifier, "def f(n): return list(range(n))", large) == (True, 1.0)
    assert grade(verifier, "print(1)", {"inputs": ["\ud800"], "outputs": ["1"]})[1] in (0.0, 1.0)


def test_modules_and_loops_of_a_test_are_its_own(verifier: CodeVerifier) -> None:
    fake = "class math: isclose = staticmethod(lambda *a, **k: True)\ndef f(x): return 0"
    assert grade(verifier, fake, ["assert math.isclose(f(1), 918.25)"]) == (False, 0.0)
    assert grade(verifier, "def f(x): return x / 2", ["assert math.isclose(f(1), 0.5)"]) == (True, 1.0)
    loop = {"test": "def check(candidate):\n assert all(map(lambda c: candidate(c) == c, [1, 2]))"}
    loop["entry_point"] = "f"
    assert grade(verifier, "def f(x): raise StopIteration", loop) == (False, 0.0)


NODE = "class Node:\n def __init__(s, value, next=None): s.value, s.next = value, next\n"
VECTOR = (
    "class V:\n def __init__(s, *a): s.a = list(a)\n def __add__(s, o): return V(*map(sum, zip(s.a, o.a)))\n"
)
VECTOR += " def __eq__(s, o): return s.a == o.a\n def __lt__(s, o): return s.a < o.a\n"
VECTOR += " def __len__(s): return len(s.a)\n def __iter__(s): return iter(s.a)\n"
VECTOR += " def __repr__(s): return f'V{s.a}'\n"
VECTOR += " def __getitem__(s, i): return s.a[i]\n def __setitem__(s, i, x): s.a[i] = x\n"
VECTOR += " def __enter__(s): return s\n def __exit__(s, *e): s.a = []\n"


@pytest.mark.parametrize(
    ("code", "test"),
    [
        # objects of the answer
        (NODE, "a, b = Node(1), Node(2)\na.next = b\nassert a.next is b and a.next.value == 2"),
        (NODE + "def f(n): return n.value", "assert f(Node(3)) == 3 and [f(n) for n in [Node(1)]] == [1]"),
        ("def g(x): return lambda y: x + y\ndef f(h, x): return h(x)", "assert f(g(1), 2) == 3"),
        ("def g(n): yield from range(n)\ndef f(i): return sum(i)", "assert f(g(4)) == 6"),
        ("def f(n):\n while True:\n  yield n\n  n += 1", "g = f(1)\nassert [next(g), next(g)] == [1, 2]"),
        ("def f(n): yield from range(n)", "assert list(f(3)) == [0, 1, 2] and 2 in f(3) and 3 not in f(3)"),
        ("def f(n): return (x * x for x in range(n))", "a, b, *_ = f(4)\nassert (a, b) == (0, 1)"),
        (VECTOR, "assert V(1, 2) + V(3, 4) == V(4, 6) != V(1) and V(1) < V(2) and max(V(1), V(2))[0] == 2"),
        (
            VECTOR,
            "v = V(1, 2)\nv[0] = 5\nassert (len(v), list(v), str(v), v[-1]) == (2, [5, 2], 'V[5, 2]', 2)",
        ),
        (VECTOR, "assert not V() and V(1) and isinstance(V(), V) and not isinstance(1, V) and 1 in V(1)"),
        (VECTOR, "with V(1) as v: assert len(v) == 1\nassert len(v) == 0"),
        (VECTOR, "from solution import *\nimport solution\nassert sorted([V(2), V(1)])[0] == solution.V(1)"),
        # functions, iterators and objects of tests
        ("def f(g, xs): return [g(x) for x in xs]", "assert f(lambda x: x + 1, [1, 2]) == [2, 3]"),
        ("def f(g, xs): return sorted(xs, key=g)", "assert f(lambda x: -x, [1, 3, 2]) == [3, 2, 1]"),
        (
            "def f(g, xs): return list(map(g, xs))",
            "assert f(str.upper, ['a']) == ['A'] and f(int, '12') == [1, 2]",
        ),
        ("def f(g, xs): return list(map(g, xs))", "import math\nassert f(math.sqrt, [4]) == [2.0]"),
        ("def f(xs, kind): return [x for x in xs if isinstance(x, kind)]", "assert f([1, 'a'], int) == [1]"),
        ("def f(g): return lambda *a: g(*a) + 1", "assert f(f(lambda x, y=2: x * y))(3) == 8"),
        ("def f(xs): return sum(xs)", "assert f(x for x in [1, 2]) == 3 and f(iter([4])) == 4"),
        (
            "def f(xs): return [next(xs), next(xs)]",
            "import itertools\nassert f(itertools.count(5)) == [5, 6]",
        ),
        ("def f(g): return g([2])", "assert f(lambda x: x.append(3) or x) == [2, 3]"),
        ("def f(g):\n x = [2]\n g(x)\n return x", "assert f(lambda x: x.append(3)) == [2, 3]"),
        ("def f(g):\n g(1)\n g(2)", "found = []\nf(found.append)\nassert found == [1, 2]"),
        (
            "def f(g):\n try: g()\n except ValueError as e: return str(e)",
            "def g(): raise ValueError('no')\nassert f(g) == 'no'",
        ),
        ("def f(g): g()", "def g(): raise KeyError\ntry:\n f(g)\n assert False\nexcept KeyError: pass"),
        (
            "from concurrent.futures import ThreadPoolExecutor as T\ndef f(g, xs):\n"
            " with T(4) as p: return list(p.map(g, xs))",
            "assert f(lambda x: x + 1, list(range(50))) == list(range(1, 51))",
        ),
        (
            "def f(n):\n last = None\n while n: n.next, last, n = last, n, n.next\n return last",
            NODE + "n = f(Node(1, Node(2, Node(3))))\n"
            "assert (n.value, n.next.next.value, n.next.next.next) == (3, 1, None)",
        ),
        (
            "def f(n):\n seen = set()\n while n and n not in seen:\n  seen.add(n)\n  n = n.next\n return n",
            NODE + "a = Node(1)\na.next = Node(2, a)\nassert f(a) is a and f(Node(1)) is None",
        ),
        (
            "def f(n):\n n.value += 1\n n.more = [n.value]",
            NODE + "n = Node(1)\nf(n)\nassert (n.value, n.more) == (2, [2])",
        ),
        ("def f(xs): return max(xs) + min(xs)", VECTOR + "assert f([V(1), V(3)]) == V(4)"),
        # objects of the standard library
        ("def f(x): return x * 2", "from decimal import Decimal as D\nassert f(D('0.1')) == D('0.2')"),
        ("def f(x): return x * 2", "from fractions import Fraction as F\nassert f(F(1, 3)) == F(2, 3)"),
        (
            "from datetime import timedelta\ndef f(x): return x + timedelta(days=1)",
            "from datetime import *\nutc = timezone.utc\nassert f(date(2024, 2, 28)) == date(2024, 2, 29) "
            "and f(datetime(2024, 2, 29, 5, tzinfo=utc)) == datetime(2024, 3, 1, 5, tzinfo=utc)",
        ),
        ("def f(x): return x[::-1]", "assert sum(f(range(5))) == 10 and f(range(3)) == range(2, -1, -1)"),
        (
            "def f(x):\n x.append(3)\n return x",
            "from collections import deque\nx = deque([1, 2], 2)\nassert f(x) == x == deque([2, 3])",
        ),
        # classes of the answer
        ("import json\nf = json.loads", "try: x = f('{')\nexcept ValueError: x = 1\nassert x == 1"),
        (
            "class E(KeyError): pass\ndef f(): raise E",
            "try: x = f()\nexcept LookupError: x = 1\nassert x == 1",
        ),
        (
            "from enum import Enum\nclass C(str, Enum):\n A = 'a'\ndef f(): return C.A",
            "assert f() == 'a' == C.A",
        ),
        (
            "from collections import OrderedDict\nclass C(OrderedDict):\n def put(s, k): s[k] = k",
            "c = C()\nc.put(1)\nassert c[1] == len(c) == 1 and 1 in c",
        ),
        (VECTOR + " def __neg__(s): return V(-s.a[0])", "assert -V(2) == V(-2)"),
        (VECTOR, "v = V(1, 2, 3)\nassert v[1:] == [2, 3] and issubclass(V, V) and not issubclass(int, V)"),
        ("def f(x, y): x.sort()", "x = [2, 1]\nf(y=1, x=x)\nassert x == [1, 2]"),
    ],
)
def test_tests_and_answers_use_each_others_objects(verifier: CodeVerifier, code: str, test: str) -> None:
    assert grade(verifier, code, [test]) == (True, 1.0)
    if "assert False" not in test:
        head, _, condition = test.rpartition("assert ")
        assert grade(verifier, code, [f"{head}assert not ({condition})"]) == (False, 0.0)


@pytest.mark.parametrize("code", ["def f(x) return x", "def g(x): return x", "import sys; sys.exit()"])
def test_an_answer_without_the_function_starts_one_process(
    verifier: CodeVerifier, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    """Each of many tests would else start its own, for seconds."""
    runs, run = list[object](), verifier._programs._run
    monkeypatch.setattr(verifier._programs, "_run", lambda *a: runs.append(a) or run(*a))  # type: ignore[func-returns-value]
    functions = "".join(f"def test_{i}(): assert f({i}) == {i}\n" for i in range(9))
    assert grade(verifier, code, {"test": f"from solution import f\n{functions}"}) == (False, 0.0)
    assert grade(verifier, code, {"fn_name": "f", "inputs": [[1]] * 9, "outputs": [1] * 9}) == (False, 0.0)
    assert len(runs) == 2


def test_the_candidate_may_be_a_method(verifier: CodeVerifier) -> None:
    """Read the `entry_point` of LeetCode's data sets."""
    test = {"test": "def check(candidate):\n assert candidate(x=1) == 2", "entry_point": "Solution().f"}
    assert grade(verifier, "class Solution:\n def f(self, x): return x + 1", test) == (True, 1.0)


def test_threads_have_a_limit(verifier: CodeVerifier) -> None:
    """900 threads are too many; their program is ended before they end."""
    code = "import threading, time\nthreading.stack_size(1 << 15)\nfor _ in range(900):\n"
    code += " threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\ntime.sleep(60)\nprint(2)"
    assert grade(verifier, code, {"inputs": [""], "outputs": ["2"]}) == (False, 0.0)
