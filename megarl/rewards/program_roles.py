"""What the confined processes of programs.py do: run an answer, call its functions, or test them.

An answer's process never has an expected result. Tests with expected results run in another process, which
calls the answer's functions by messages (remote_objects.py)."""

from __future__ import annotations

import ast
import builtins
import json
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from types import ModuleType
from typing import Any

from megarl.rewards.plain_values import encode
from megarl.rewards.remote_objects import Peer, TestsPeer

_MODULE = "solution"  # the name by which tests may import the answer


def run_program(setup: Mapping[str, Any], descriptors: list[int]) -> int:
    """Run an answer as a script; return its exit code. descriptors: standard input and output."""
    for stream, descriptor in enumerate(descriptors):
        os.dup2(descriptor, stream)
        os.close(descriptor)
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    try:
        module = sys.modules["__main__"] = type(sys)("__main__")  # pickle finds the answer's classes there
        exec(compile(setup["source"], "answer.py", "exec"), vars(module))
        code = 0
    except SystemExit as end:
        code = int(end.code not in (None, 0))
    if "threading" in sys.modules:
        sys.modules["threading"]._shutdown()  # waits for the answer's threads, as Python does at its end
    if "atexit" in sys.modules:
        sys.modules["atexit"]._run_exitfuncs()
    sys.stdout.flush()
    return code


def _load_answer(source: str) -> ModuleType:
    """Run an answer as a module, whose annotations are not evaluated: data sets leave out their imports."""
    module = ModuleType(_MODULE)
    sys.modules[_MODULE] = module
    flags = annotations.compiler_flag
    exec(compile(source, "answer.py", "exec", flags=flags, dont_inherit=True), module.__dict__)
    return module


def call_function(setup: Mapping[str, Any], descriptors: list[int]) -> int:
    """Call one function with each of `calls`, and write one line for each value: [value], or null."""
    with open(descriptors[0], "w") as results:
        try:
            module = _load_answer(setup["source"])
            name = setup["fn_name"]
            function = getattr(module, name, None)
            if function is None:
                function = getattr(module.Solution(), name)
        except BaseException:  # noqa: BLE001 (the answer's: no call has a value)
            results.write("null\n" * len(setup["calls"]))
            return 1
        for arguments in setup["calls"]:
            try:
                line = json.dumps([encode(function(*arguments))])
            except Exception:  # noqa: BLE001 (the answer's: this call has no value)
                line = "null"
            results.write(line + "\n")
            results.flush()
    return 0


def serve_answer(setup: Mapping[str, Any], descriptors: list[int]) -> int:
    """Let tests use the answer, whose module is object 0, until they end."""
    peer = Peer(os.fdopen(descriptors[0]), os.fdopen(descriptors[1], "w"))
    with suppress(BaseException):  # the tests find no object 0
        peer.share(_load_answer(setup["source"]))
    with suppress(RuntimeError):
        peer.serve()
    return 0


def _free_names(codes: list[str]) -> set[str]:
    """Return names that tests use and neither define nor import."""
    used, defined = set[str](), set(dir(builtins))
    for code in codes:
        for node in ast.walk(ast.parse(code)):
            match node:
                case ast.Name(name, ast.Load()):
                    used.add(name)
                case ast.Name(name) | ast.FunctionDef(name) | ast.ClassDef(name) | ast.arg(name):
                    defined.add(name)
                case ast.alias(name, alias):
                    defined.add(alias or name.partition(".")[0])
    return used - defined


def _find_modules(codes: list[str], names: set[str]) -> set[str]:
    """Return the names that tests use as modules of the standard library: they are not the answer's."""
    read, called = set[str](), set[str]()
    for code in codes:
        for node in ast.walk(ast.parse(code)):
            match node:
                case ast.Attribute(ast.Name(name)):
                    read.add(name)
                case ast.Call(ast.Name(name)):
                    called.add(name)
    return {name for name in names & read - called if name in sys.stdlib_module_names}


def run_tests(setup: Mapping[str, Any], descriptors: list[int]) -> int:
    """Run `tests` from `first` on after the code `before`; write a line for each: true if it passed.

    The test in which the answer's process ends is the last.

    setup: `candidate` is the function that tests call by that name, such as `f` or `Solution().f`. Tests
    before `first` do not run, but the names that they define never come from the answer."""
    space: dict[str, Any] = {"__name__": "tests"}
    peer = TestsPeer(os.fdopen(descriptors[0]), os.fdopen(descriptors[1], "w"), space)
    answer, module = peer.get_stand_in(0), ModuleType(_MODULE)
    vars(module)["__getattr__"] = answer.__getattr__
    sys.modules[_MODULE] = module
    with open(descriptors[2], "w") as results:
        codes = [setup["before"], *setup["tests"]]
        free_names = _free_names(codes)
        modules = _find_modules(codes, free_names)
        for name in modules:
            with suppress(ImportError):  # the test that uses it fails
                space[name] = import_module(name)
        for name in free_names - modules - {"candidate"}:
            with suppress(Exception):
                space[name] = getattr(answer, name)
        with suppress(Exception):
            root = setup["candidate"].partition("(")[0].partition(".")[0]
            space["candidate"] = eval(setup["candidate"], {root: getattr(answer, root)})
        tests = setup["tests"][setup["first"] :]
        try:
            exec(compile(setup["before"], "tests.py", "exec"), space)
        except BaseException:  # noqa: BLE001 (so all tests have failed, and no process need try the next)
            results.write("false\n" * len(tests))
            return 1
        for test in tests:
            peer.has_failed = False
            try:
                exec(compile(test, "tests.py", "exec"), space)
                passed = not peer.has_failed
            except BaseException:  # noqa: BLE001 (a test that raises has failed)
                passed = False
            results.write(json.dumps(passed) + "\n")
            results.flush()
            if peer.has_ended:
                break
    return 0


ROLES: dict[str, Callable[[Mapping[str, Any], list[int]], int]] = {
    "program": run_program,
    "function": call_function,
    "answer": serve_answer,
    "tests": run_tests,
}
