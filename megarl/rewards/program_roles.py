"""What the confined processes of programs.py do: run an answer, call its functions, or test them.

An answer's process never has an expected result. Tests with expected results run in another process, which
calls the answer's functions by messages."""

from __future__ import annotations
import __future__

import ast
import builtins
import json
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from types import ModuleType
from typing import IO, Any

from megarl.rewards.plain_values import decode, encode

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
    flags = __future__.annotations.compiler_flag
    exec(compile(source, "answer.py", "exec", flags=flags, dont_inherit=True), module.__dict__)
    return module


def call_function(setup: Mapping[str, Any], descriptors: list[int]) -> int:
    """Call one function with each of `calls`, and write one line for each value: [value], or null."""
    with open(descriptors[0], "w") as results:
        module = _load_answer(setup["source"])
        name = setup["fn_name"]
        function = getattr(module, name, None)
        if function is None:
            function = getattr(module.Solution(), name)
        for arguments in setup["calls"]:
            try:
                line = json.dumps([encode(function(*arguments))])
            except Exception:  # noqa: BLE001 (the answer's: this call has no value)
                line = "null"
            results.write(line + "\n")
            results.flush()
    return 0


def serve_answer(setup: Mapping[str, Any], descriptors: list[int]) -> int:
    """Answer the messages of `run_tests`: [0, handle, name] reads an attribute, [1, handle, arguments,
    keywords] calls. Handle 0 is the answer's module."""
    requests, replies = os.fdopen(descriptors[0]), os.fdopen(descriptors[1], "w")
    objects: list[Any] = [None]

    def keep(value: Any) -> int:
        objects.append(value)
        return len(objects) - 1

    error: BaseException | None = None
    try:
        objects[0] = _load_answer(setup["source"])
    except BaseException as problem:  # noqa: BLE001 (reported to the tests)
        error = problem
    for line in requests:
        arguments: list[Any] = []
        try:
            if error is not None:
                raise error
            message = json.loads(line)
            target = objects[message[1]]
            if message[0] == 0:
                value = getattr(target, message[2])
            else:
                arguments, keywords = (decode(part, objects.__getitem__) for part in message[2:])
                value = target(*arguments, **keywords)
            reply = {"value": encode(value, keep), "arguments": encode(arguments, keep)}
            text = json.dumps(reply)
        except BaseException as problem:  # noqa: BLE001 (reported to the tests)
            text = json.dumps({"error": [type(problem).__name__, str(problem)]})
        replies.write(text + "\n")
        replies.flush()
    return 0


class _Answer:
    """The tests' side of the messages."""

    def __init__(self, replies: IO[str], requests: IO[str]) -> None:
        self._replies, self._requests = replies, requests
        self.has_ended = False

    def read(self, handle: int, name: str) -> Any:
        return self._ask([0, handle, name])[0]

    def call(self, handle: int, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        value, changed = self._ask([1, handle, encode(list(arguments)), encode(keywords)])
        for argument, now in zip(arguments, changed, strict=True):
            if type(argument) in (list, dict) and type(now) is type(argument) and argument != now:
                argument.clear()
                argument.extend(now) if isinstance(argument, list) else argument.update(now)
        return value

    def _ask(self, message: list[Any]) -> tuple[Any, Any]:
        try:
            self._requests.write(json.dumps(message, default=_handle) + "\n")
            self._requests.flush()
            line = self._replies.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self.has_ended = True
            raise RuntimeError("the answer's process has ended")
        reply = json.loads(line)
        if "error" in reply:
            name, text = reply["error"]
            kind = getattr(builtins, str(name), None)
            is_error = isinstance(kind, type) and issubclass(kind, Exception)
            if name in (
                "StopIteration",
                "StopAsyncIteration",
            ):  # would end a loop of the test as if it were done
                is_error = False
            raise (kind if is_error and kind is not None else RuntimeError)(text)
        return decode(reply["value"], self._object), decode(reply["arguments"], self._object)

    def _object(self, handle: int) -> Any:
        return _make_remote(self, handle)


def _handle(value: Any) -> Any:
    raise TypeError(f"{type(value).__name__} cannot be an argument")


def _make_remote(answer: _Answer, handle: int) -> Any:
    """Return a stand-in for an object of the answer: it can be called, and has the object's attributes."""

    class Remote:
        def __call__(self, *arguments: Any, **keywords: Any) -> Any:
            return answer.call(handle, arguments, keywords)

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return answer.read(handle, name)

    return Remote()


class _AnswerModule(ModuleType):
    """What `import solution` gives to tests."""

    def __init__(self, answer: _Answer) -> None:
        super().__init__(_MODULE)
        self._answer = answer

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._answer.read(0, name)


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
    """Run each of `tests` after the code `before`, and write a line for each: true if it passed.

    The test in which the answer's process ends is the last.

    setup: `candidate` names the function that tests call by that name, if not null"""
    answer = _Answer(os.fdopen(descriptors[0]), os.fdopen(descriptors[1], "w"))
    with open(descriptors[2], "w") as results:
        sys.modules[_MODULE] = _AnswerModule(answer)
        space: dict[str, Any] = {"__name__": "tests"}
        codes = [setup["before"], *setup["tests"]]
        free_names = _free_names(codes)
        modules = _find_modules(codes, free_names)
        for name in modules:
            with suppress(ImportError):  # the test that uses it fails
                space[name] = import_module(name)
        names = {name: name for name in free_names - modules}
        if setup["candidate"] is not None:
            names["candidate"] = setup["candidate"]
        for name, target in names.items():
            with suppress(Exception):  # the test that uses it fails
                space[name] = answer.read(0, target)
        exec(compile(setup["before"], "tests.py", "exec"), space)
        for test in setup["tests"]:
            try:
                exec(compile(test, "tests.py", "exec"), space)
                passed = True
            except BaseException:  # noqa: BLE001 (a test that raises has failed)
                passed = False
            results.write(json.dumps(passed) + "\n")
            results.flush()
            if answer.has_ended:
                break
    return 0


ROLES: dict[str, Callable[[Mapping[str, Any], list[int]], int]] = {
    "program": run_program,
    "function": call_function,
    "answer": serve_answer,
    "tests": run_tests,
}
