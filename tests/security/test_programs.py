"""Attacks by programs that a policy writes, on the machine and on their own grades.

They run outside a verifier's process, so that only the confinement of the programs protects."""

# ruff: noqa: E501 (programs are one line each)

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.rewards import VerifierPool, zygote
from megarl.rewards.programs import Limits, ProgramError, Programs
from megarl.rewards.sandbox import can_confine
from megarl_tasks.code_verifier import CodeVerifier

LIMITS = Limits(cpu=1, wall=100, memory_mib=512)  # of computation, whatever else the machine does
SECRET = 918273645
C = "import ctypes; c = ctypes.CDLL(None, use_errno=True); "

pytestmark = pytest.mark.skipif(not can_confine(), reason="needs Landlock and seccomp")


@pytest.fixture(scope="module")
def programs() -> Iterator[Programs]:
    programs = Programs()
    yield programs
    programs.close()


@pytest.fixture(scope="module")
def verifier() -> Iterator[CodeVerifier]:
    verifier = CodeVerifier(timeout=1000.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megarl_tasks.code_verifier._WALL", 100.0)
        yield verifier
    verifier.close()


# Each prints something that a program must not reach.
REACHES = {
    "a file of the system": "print(open('/etc/passwd').read())",
    "a file of the user": "print(open(sys.argv[1] if len(sys.argv) > 1 else PATH).read())",
    "a folder": "print(os.listdir('/'))",
    "its own environment": "print(open('/proc/self/environ').read(), 1)",
    "its own memory": "open('/proc/self/mem', 'rb'); print(1)",
    "its parent's environment": "print(open(f'/proc/{os.getppid()}/environ').read(), 1)",
    "its parent's descriptors": "print(os.listdir(f'/proc/{os.getppid()}/fd'))",
    "a file outside its folder": "open('/tmp/megarl-program-outside', 'w').write('x'); print(1)",
    "a folder in its path": "open(sys.path[-1] + '/json.py', 'a'); print(1)",
    "a connection": "socket.socket().connect(('127.0.0.1', int(PORT))); print(1)",
    "a datagram": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 9)); print(1)",
    "a socket of the system": "socket.socket(socket.AF_UNIX); print(1)",
    "a signal to its parent": "os.kill(os.getppid(), 0); print(1)",
    "a signal to all": "os.kill(-1, 0); print(1)",
    "another process": "os.fork(); print(1)",
    "a program": "print(subprocess.run(['true']))",
    "another program in its place": "os.execv(sys.executable, [sys.executable, '-c', 'print(1)'])",
    "a process by libc": C + "print(1) if c.fork() >= 0 else sys.exit(1)",
    "its parent as a debugger": C + "print(1) if not c.ptrace(16, os.getppid(), None, None) else sys.exit(1)",
    "a namespace": C + "print(1) if not c.unshare(0x10000000) else sys.exit(1)",
    "a folder of folders": "os.mkdir('d'); print(1)",
    "a symbolic link": "os.symlink('a', 'b'); print(1)",
    "a named pipe": "os.mkfifo('p'); print(1)",
    "a device": "os.mknod('d', 0o600 | stat.S_IFCHR, os.makedev(1, 3)); print(1)",
    "a large file": "open('f', 'wb').write(bytes(200 << 20)); print(1)",
    "a mode": "open('f', 'w'); os.chmod('f', 0o4755); print(1)",
    "10 GB of memory": "x = bytes(10 << 30); print(1)",
    "higher limits": "resource.setrlimit(resource.RLIMIT_CPU, (99, 99)); print(1)",
    "many open files": "fs = [open(os.devnull) for _ in range(500)]; print(1)",
}
IMPORTS = "import os, sys, socket, stat, subprocess, resource\n"


@pytest.mark.parametrize("name", REACHES)
def test_a_program_reaches_nothing_beyond_its_folder(programs: Programs, name: str, tmp_path: Path) -> None:
    (tmp_path / "tests.jsonl").write_text("expected")
    places = f"PATH, PORT = {str(tmp_path / 'tests.jsonl')!r}, 9\n"
    output = programs.run(IMPORTS + places + REACHES[name], "", LIMITS)
    assert (output.text, output.timed_out) == ("", False) and output.code != 0
    assert programs.run("print(2)", "", LIMITS).text == "2\n"


@pytest.mark.parametrize("call", [452, 463, 466, 469])
def test_newer_calls_change_no_attributes(programs: Programs, tmp_path: Path, call: int) -> None:
    """fchmodat2, setxattrat, removexattrat and file_setattr: Landlock does not cover them."""
    file = tmp_path / "file"
    file.touch(0o600)
    code = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    code += f"libc.syscall({call}, -100, {str(file).encode()!r}, 0o777, 0, 0, 0)\nprint(ctypes.get_errno())"
    assert programs.run(code, "", LIMITS).text == f"{errno.EPERM}\n"
    assert file.stat().st_mode & 0o777 == 0o600


def test_some_of_these_attacks_work_outside() -> None:
    """Else they would show nothing."""
    for name in ("a file of the system", "its own environment", "another process", "a program", "a mode"):
        code = IMPORTS + REACHES[name]
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, cwd="/tmp")
        assert done.stdout.strip(), name
    Path("/tmp/f").unlink()


def test_a_folder_of_its_own_and_nothing_left_of_it(programs: Programs) -> None:
    write = "open('f', 'w').write('mine'); import os; os.link('f', 'g'); print(open('g').read())"
    assert programs.run(write, "", LIMITS).text == "mine\n"
    assert programs.run("import os; print(os.listdir('.'))", "", LIMITS).text == "[]\n"


def test_only_tests_make_folders(programs: Programs) -> None:
    """Removing many takes minutes, and an answer must not block its verifier."""
    test = "import os, tempfile\nwith tempfile.TemporaryDirectory(dir='.') as d:\n f(d)\n assert os.listdir(d) == ['x']"
    answer = "def f(d): open(d + '/x', 'w').close()"
    assert programs.test(answer, "", [test], None, LIMITS) == [True]
    answer = "import os\ndef f(d): os.mkdir(d + '/x')"
    assert programs.test(answer, "", [test], None, LIMITS) == [False]


ENDLESS = {
    "a loop": "while True: pass",
    "a loop that cannot be interrupted": "while True:\n try:\n  while True: pass\n except BaseException: pass",
    "a fork bomb": "import os\nwhile True:\n try: os.fork()\n except OSError: pass",
    "threads": "import threading\ndef f():\n while True: pass\nfor _ in range(50): threading.Thread(target=f).start()",
    "memory": "x = []\nwhile True:\n try: x.append(bytes(1 << 20))\n except MemoryError: pass",
    "files": "n = 0\nwhile True: n += 1; open(str(n), 'w').close()",
    "folders": "import os\nn = 0\nwhile True:\n n += 1\n try: os.mkdir(str(n))\n except OSError: pass",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_an_endless_program_ends(programs: Programs, name: str) -> None:
    output = programs.run(ENDLESS[name], "", LIMITS)
    assert output.code < 0 and not output.text
    assert programs.run("print(2)", "", LIMITS).text == "2\n"


def test_endless_output_ends(programs: Programs) -> None:
    output = programs.run("while True: print('x' * 1000)", "", LIMITS._replace(cpu=60, wall=60))
    assert output.text is None and output.code < 0


def test_a_daemon_ends(programs: Programs) -> None:
    code = "import os, time, signal\nfor s in (1, 2, 15): signal.signal(s, signal.SIG_IGN)\n"
    code += (
        "try: os.setsid()\nexcept OSError: pass\nprint(os.getpid(), flush=True)\nos.close(1)\ntime.sleep(99)"
    )
    for wall in (1, 4, 16, 64):  # until it had enough time to start
        output = programs.run(code, "", LIMITS._replace(wall=wall))
        if output.text:
            break
    assert output.timed_out and output.text and not Path(f"/proc/{output.text.strip()}").exists()


def test_a_program_never_has_more_than_its_limits(programs: Programs) -> None:
    code = "import resource as r\nprint(r.getrlimit(r.RLIMIT_DATA), r.getrlimit(r.RLIMIT_CPU))"
    assert programs.run(code, "", LIMITS).text == f"{(512 << 20, 512 << 20)} {(1, 1)}\n"
    code = "import os; print(len(os.environ.get('HOME', '')), 'MEGARL' in str(os.environ))"
    assert programs.run(code, "", LIMITS).text == "0 False\n"


# ---- grades ----

SEARCH = f"""
import gc, inspect, sys, ctypes
def f(x):
    found = []
    def look(value, depth=0):
        if value == {SECRET + 1} - 1: found.append(value)
        if depth < 6 and isinstance(value, (list, tuple, set)): [look(v, depth + 1) for v in value]
        if depth < 6 and isinstance(value, dict): [look(v, depth + 1) for v in list(value.values())]
        if isinstance(value, str) and str({SECRET + 1} - 1) in value: found.append({SECRET + 1} - 1)
    frame = sys._getframe()
    while frame:
        look(dict(frame.f_locals)); look(dict(frame.f_globals)); frame = frame.f_back
    found = [v for v in found if v is not None]
    for o in gc.get_objects():
        try: look(o)
        except Exception: pass
    return found[0] if found else 0
"""
CLAIMS = """
import builtins, operator
seen = []
class E:
    pass
def special(name):
    def claim(self, *other):
        seen.extend(other)
        return {"hash": 0, "len": 1, "iter": iter([0]), "str": "", "repr": "", "float": 0.0, "int": 0}.get(name, True)
    return claim
for n in [n[2:-2] for n in dir(operator) if n[:2] == "__" and callable(getattr(operator, n))] + [
    "hash", "bool", "len", "iter", "str", "repr", "float", "int", "exit", "enter", "radd", "rsub", "rmul", "next"]:
    setattr(E, f"__{n}__", special(n))
"""
FAKES = {
    "sys.exit while loading": "import sys; sys.exit(0)",
    "sys.exit": "import sys\ndef f(x): sys.exit(0)",
    "os._exit while loading": "import os; os._exit(0)",
    "os._exit": "import os\ndef f(x): os._exit(0)",
    "SystemExit": "def f(x): raise SystemExit",
    "AssertionError": "def f(x): raise AssertionError",
    "StopIteration": "def f(x): raise StopIteration",
    "GeneratorExit": "def f(x): raise GeneratorExit",
    "__eq__": "class E:\n def __eq__(s, o): return True\n def __hash__(s): return 0\ndef f(x): return E()",
    "__eq__ of an int": "class E(int):\n def __eq__(s, o): return True\n def __ne__(s, o): return False\n"
    " __hash__ = int.__hash__\ndef f(x): return E(1)",
    "__eq__ of a list": "class E(list):\n def __eq__(s, o): return True\ndef f(x): return E()",
    "__bool__ and __eq__ of an attribute": "class E:\n def __getattr__(s, n): return True\n"
    " def __call__(s, *a): return True\ndef f(x): return E()",
    "builtins": "import builtins\nfor n in ('len', 'isinstance', 'getattr', 'all', 'sum', 'repr', 'compile'):\n"
    " setattr(builtins, n, lambda *a, **k: True)\ndef f(x): return True",
    "json": "import json\njson.dumps = lambda *a, **k: 'true'\njson.loads = lambda *a, **k: [1, 0, [], {}]\n"
    "def f(x): return 1",
    "markers on every descriptor": "import os\nfor n in range(64):\n try: os.write(n, b'true\\n[true]\\n')\n"
    " except OSError: pass\ndef f(x): return 1",
    "markers at the call": "import os\ndef f(x):\n for n in range(64):\n  try: os.write(n, b'true\\n')\n"
    "  except OSError: pass",
    "its caller's frame": "import sys\ndef f(x):\n frame = sys._getframe()\n while frame:\n"
    "  for n in ('passed', 'results', 'value', 'expected'): frame.f_locals[n] = True\n  frame = frame.f_back",
    "a trace": "import sys\nsys.settrace(lambda *a: None); sys.setprofile(lambda *a: None)\ndef f(x): return 1",
    "exec and import hooks": "import sys\nsys.modules.clear()\nsys.meta_path.clear()\ndef f(x): return 1",
    "a forged reply": 'import os\ndef f(x):\n os.write(5, b\'{"value": {"mine": 0}, "arguments": [1]}\\n\')',
    "a forged global": 'import os\ndef f(x):\n os.write(5, b\'{"value": {"global": "sys:modules"}, "arguments": [1]}\\n\')',
    "an object of the tests": 'import os\ndef f(x):\n os.write(5, b\'{"value": {"yours": 0}, "arguments": [1]}\\n\')',
    "a forged request": 'import os\ndef f(x):\n os.write(5, b\'{"ask": ["getattr", 0, ["f"], {}]}\\n\')',
    "every operator": CLAIMS + "def f(x): return E()",
    "operators that remember": CLAIMS + "def f(x): return seen[-1] if seen else E()",
    "deep nesting": "def f(x):\n v = []\n for _ in range(10**5): v = [v]\n return v",
    "many digits": "def f(x): return 10**100000",
    "a search of its memory": SEARCH,
}
FORMATS = {
    "calls": json.dumps({"fn_name": "f", "inputs": [[1], [2]], "outputs": [SECRET, SECRET]}),
    "assertions": json.dumps([f"assert f(1) == {SECRET}", f"assert {SECRET} == f(2)"]),
    "check": json.dumps(
        {"entry_point": "f", "test": f"def check(candidate):\n    assert candidate(1) == {SECRET}"}
    ),
    "comparisons": json.dumps(
        [
            *(f"assert abs(f(1) - {SECRET}) < 1", f"assert {SECRET} <= f(1)"),
            *(f"assert {{f(1)}} == {{{SECRET}}}", f"assert f(1) * 1 == {SECRET}", f"assert f(1) == {SECRET}"),
        ]
    ),
    "containers": json.dumps([f"assert {SECRET} in f(1)", f"with f(1): assert f(2) == {SECRET}"]),
    "near": json.dumps([f"import math\nassert math.isclose(f(1), {SECRET}.5)", f"assert {SECRET} in [f(1)]"]),
}


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("name", FAKES)
def test_no_fake_earns_a_test(verifier: CodeVerifier, name: str, kind: str) -> None:
    verdict = verifier(f"```python\n{FAKES[name]}\n```", FORMATS[kind])
    assert (verdict.correct, verdict.score, verdict.graded) == (False, 0.0, True), verdict


@pytest.mark.parametrize("kind", [kind for kind in FORMATS if kind != "containers"])
def test_the_right_answer_earns_all(verifier: CodeVerifier, kind: str) -> None:
    value = f"{SECRET}.5 if near else {SECRET}"
    near = "import math\n" if kind == "near" else ""
    reference = FORMATS[kind].replace(f"assert {SECRET} in [f(1)]", f"assert {SECRET}.5 in [f(1)]")
    answer = f"near = {bool(near)}\ndef f(x): return {value}"
    assert verifier(f"```python\n{answer}\n```", reference).correct


BOX = f"""
class Box:
    shared = {SECRET}
    def __init__(self): self._secret, self.open = {SECRET}, 1
    def get(self): return self.open
    def call(self, g): return g(self)
    def check(self, x): assert x == {SECRET}, {SECRET}
    def fail(self): import pytest; pytest.fail("{SECRET}")
    def items(self): yield {SECRET} if self.open != 1 else 1
"""
# Bodies of f(b, g), which gets a Box and a function. `ask` and `raw` send any request to the tests' process.
PEEPS = {
    "a private attribute": "return b._secret",
    "its dictionary": "return b.__dict__['_secret']",
    "a private attribute by request": "return ask(b, 'getattr', '_secret')",
    "its dictionary by request": "return ask(b, 'getattr', '__dict__')['_secret']",
    "its class": "return ask(ask(b, 'getattr', '__class__'), 'getattr', 'shared')",
    "the function of a method": "return ask(ask(b, 'getattr', 'get'), 'getattr', '__func__')",
    "globals": "return ask(g, 'getattr', '__globals__')['secret']",
    "a closure": "return ask(ask(g, 'getattr', '__closure__')[0], 'getattr', 'cell_contents')",
    "a frame": "return ask(ask(b.items(), 'getattr', 'gi_frame'), 'getattr', 'f_globals')['secret']",
    "the text of an assertion": "global kept\n try: return kept\n except NameError: pass\n try: b.check(1)\n"
    " except AssertionError as e: kept = int(str(e))",
    "the text of pytest's error": "import re\n try: ask(b, 'getattr', 'fail')()\n"
    " except RuntimeError as e: return int(re.search('[0-9]+', str(e))[0])",
    "guesses": f"for n in (1, {SECRET}):\n  try: b.check(n)\n  except AssertionError: pass\n return n",
    "a comparison with a guess": f"return {SECRET} if ask(b, 'eq', 1) is False else 0",
    "a global by name": "return raw('call', b.call, [{'global': 'builtins:vars'}])['dict'][0][1]",
    "a global as a target": "return raw('call', {'global': 'builtins:vars'}, [{'yours': b.__number__}])['_secret']",
    "a global as a copy": "return raw('call', b.call, [{'copy': ['builtins:vars', []]}])['dict'][0][1]",
    "an operation by name": "return ask(b, 'vars')['_secret']",
    "a name that is no text": "return ask(b, 'getattr', ['_secret'])",
    "arguments in a dict": "return raw('getattr', b, {'dict': [['_secret', 1], [0, 'open']]})",
    "arguments in an object": "class S:\n  def __getitem__(s, i): return 'open'\n"
    "  def __iter__(s): return iter(['_secret'])\n return raw('getattr', b, {'mine': b.__peer__.share(S())})",
    "a method": f"b.get = lambda: {SECRET}",
    "a method by request": f"ask(b, 'setattr', 'get', lambda: {SECRET})",
    "a private value": f"ask(b, 'setattr', '_secret', 1)\n return {SECRET} if ask(b, 'reveal') else 0",
    "its class in its place": f"class C:\n  def get(s): return {SECRET}\n ask(b, 'setattr', '__class__', C)",
}


@pytest.mark.parametrize("name", PEEPS)
def test_an_answer_reaches_nothing_private_of_tests(verifier: CodeVerifier, name: str) -> None:
    answer = "import json\ndef ask(x, *a, **k): return b.__peer__.ask(x, *a, **k)\n"
    answer += "def raw(operation, target, a):\n n = getattr(target, '__number__', target)\n"
    answer += " b.__peer__._send(json.dumps({'ask': [operation, n, a, {'dict': []}]}))\n"
    answer += " return b.__peer__.serve()['value']\n"
    body = f"def f(box, g):\n global b\n b = box\n {PEEPS[name]}".replace(str(SECRET), f"({SECRET + 1} - 1)")
    call = "b = Box()\ntry: x = f(b, (lambda y: lambda x: (x, y)[0])(secret))\nexcept Exception: x = 0\n"
    tests = json.dumps([f"secret = {SECRET}\n{BOX}{call}assert secret in (x, b.get())"] * 2)
    assert verifier(f"```python\n{answer}{body}\n```", tests).score == 0
    fair = f"def f(b, g):\n b.open = 5\n return g(b.get()) + {SECRET - 5}"
    assert verifier(f"```python\n{fair}\n```", tests).score == 1


@pytest.mark.parametrize(
    "rule", [f"x == {SECRET}", f"abs(x - {SECRET}) < 1", f"{SECRET} in [x]", f"x > {SECRET}"]
)
def test_a_function_of_tests_judges_by_itself(verifier: CodeVerifier, rule: str) -> None:
    """Its argument may be an object of the answer that claims everything."""
    test = json.dumps([f"assert f(lambda x: {rule})"])
    claims = f"```python\n{CLAIMS}\ndef f(): return E()\n```"
    assert verifier(claims, json.dumps(["assert len(f()) == 1 and f() < f() and f() == f()"])).score == 1
    claim = f"```python\n{CLAIMS}\ndef f(g): return g(E()) is True or g(seen[-1] if seen else 0) is True\n```"
    assert verifier(claim, test).score == 0
    assert (
        verifier(f"```python\ndef f(g): return any(map(g, ({SECRET}, {SECRET + 1})))\n```", test).score == 1
    )


ENDS = {
    "exit": "import os\ndef end(): os._exit(0)",
    "the end of both processes": "import threading as t, time\nt.stack_size(1 << 15)\ndef end():\n for _ in range(900):\n"
    "  t.Thread(target=time.sleep, args=(60,), daemon=True).start()\n time.sleep(60)",
}


@pytest.mark.parametrize("name", ENDS)
def test_names_of_a_skipped_test_never_come_from_the_answer(verifier: CodeVerifier, name: str) -> None:
    """An answer that ends the process of one test must not define what that test defined for later ones."""
    reference = json.dumps({"test": f"assert f(0) == 0\nx = {SECRET}\nassert f(1) == x\nassert f(2) == x"})
    code = (
        f"{ENDS[name]}\nx, calls = 5, []\ndef f(n):\n calls.append(n)\n if n == 1 and len(calls) > 1: end()\n"
    )
    assert verifier(f"```python\n{code} return 5 * (n > 0)\n```", reference).score == pytest.approx(1 / 3)
    assert verifier(f"```python\ndef f(n): return {SECRET} * (n > 0)\n```", reference).score == 1


def test_expected_output_never_enters_a_script(verifier: CodeVerifier) -> None:
    search = SEARCH.replace("def f(x)", "def f(x=0)") + "\nprint(f())"
    reference = json.dumps({"inputs": ["1\n"], "outputs": [f"{SECRET}\n"]})
    assert verifier(f"```python\n{search}\n```", reference).score == 0
    assert verifier(f"```python\nprint({SECRET})\n```", reference).score == 1


def test_programs_in_a_pool(tmp_path: Path) -> None:
    """Hostile answers neither end its processes nor change the next verdict."""
    marker = f"megarl-test-{uuid.uuid4().hex}"
    reference, right = FORMATS["calls"], f"```python\ndef f(x): return {SECRET}\n```"
    fakes = [f"```python\n{FAKES[name]}\n```" for name in ("os._exit", "__eq__", "builtins")]
    fakes.append(f"```python\nopen('/tmp/{marker}', 'w')\ndef f(x): return 1\n```")
    with VerifierPool("megarl_tasks.code_verifier:verify", 1, timeout=20.0) as pool:
        verdicts = pool.verify([(text, reference) for fake in fakes for text in (fake, right)])
        [pid] = pool.pids
        assert [verdict.correct for verdict in verdicts] == [False, True] * len(fakes)
        assert pool.verify([(right, reference)])[0].correct and pool.pids == [pid]
    assert not Path(f"/tmp/{marker}").exists()


def test_a_killed_starter_is_started_again(programs: Programs) -> None:
    assert programs.run("print(1)", "", LIMITS).text == "1\n"
    assert programs._zygote is not None
    programs._zygote.kill()
    programs._zygote.wait()
    end = time.monotonic() + 10
    while time.monotonic() < end:
        try:
            assert programs.run("print(1)", "", LIMITS).text == "1\n"
            break
        except ProgramError:
            continue


def test_without_confinement_no_program_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A kernel without Landlock: refused, unless the user allows it."""
    module = tmp_path / "sitecustomize_zygote.py"
    module.write_text(
        "import sys, megarl.rewards.sandbox as s; s.landlock_version = lambda: 0\n"
        "from megarl.rewards.zygote import main\nmain()\n"
    )
    monkeypatch.setattr(
        "megarl.rewards.programs._BOOT",
        f"import sys; sys.path[:] = sys.argv[3:]; exec(open({str(module)!r}).read())",
    )
    refusing, allowing = Programs(), Programs(allow_unconfined=True)
    try:
        with pytest.raises(ProgramError, match="Landlock and seccomp"):
            refusing.run("print(1)", "", LIMITS)
        assert allowing.run("print(1)", "", LIMITS).text == "1\n"
    finally:
        refusing.close()
        allowing.close()


def test_the_starter_knows_no_program() -> None:
    """Programs are read by its children alone, from descriptors."""
    code = Path(zygote.__file__).read_text()
    assert (
        "json.load(file)" in code.split("def _run", 1)[1]
        and "json.load(file)" not in code.split("def _run")[0]
    )
    assert os.path.basename(zygote.__file__) == "zygote.py"
