"""Let tests and an answer use each other's objects, from two processes that exchange lines of JSON.

Plain values are copied. Other objects stay in their process, and the other process has a stand-in for each.
Each end may ask the other, also while it is itself being asked."""

from __future__ import annotations

import builtins
import json
import operator
from _thread import RLock
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from itertools import islice
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, MethodType
from typing import IO, Any

from megarl.rewards.plain_values import decode, encode

_WITH_ONE = ("len", "bool", "iter", "str", "repr", "hash", "int", "float", "abs", "round")
_UNARY = ("neg", "pos", "invert")
_WITH_ITEMS = ("getitem", "setitem", "delitem")
_WITH_TWO = (
    *("eq", "ne", "lt", "le", "gt", "ge", "and", "or", "xor"),
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "matmul", "pow"),
)
_OPERATIONS: Mapping[str, Callable[..., Any]] = {
    **{name: getattr(builtins, name) for name in ("getattr", "setattr", *_WITH_ONE)},
    **{name: getattr(operator, f"__{name}__") for name in ("call", *_UNARY, *_WITH_ITEMS, *_WITH_TWO)},
    "next": lambda items: list(islice(items, 1)),  # empty at the end
    "isinstance": lambda kind, value: isinstance(value, kind),
    "issubclass": lambda kind, value: issubclass(value, kind),
    "enter": lambda context: type(context).__enter__(context),
    "exit": lambda context: type(context).__exit__(context, None, None, None),
}
_MUTABLE = (list, dict, set, deque)
# Objects of the standard library that are copied: arguments that make an equal one.
_COPIED: Mapping[str, Callable[[Any], Sequence[Any]]] = {
    "builtins:range": operator.attrgetter("start", "stop", "step"),
    "builtins:slice": operator.attrgetter("start", "stop", "step"),
    "collections:deque": lambda value: (list(value), value.maxlen),
    "decimal:Decimal": lambda value: (str(value),),
    "fractions:Fraction": operator.attrgetter("numerator", "denominator"),
    "datetime:date": operator.attrgetter("year", "month", "day"),
    "datetime:time": operator.attrgetter("hour", "minute", "second", "microsecond", "tzinfo"),
    "datetime:datetime": operator.attrgetter(
        *("year", "month", "day", "hour", "minute", "second", "microsecond", "tzinfo")
    ),
    "datetime:timedelta": operator.attrgetter("days", "seconds", "microseconds"),
    "datetime:timezone": lambda value: (value.utcoffset(None),),
}


class StandIn:
    """An object of the other process.

    An operator with two operands asks only if both are stand-ins: in `f(1) == 2` or `abs(f(1) - 2) < 1e-6`,
    an object of the answer must neither see the 2 nor decide. `in` iterates for the same reason."""

    __slots__ = ("__number__", "__peer__")
    __peer__: Peer
    __number__: int

    def __init__(self, peer: Peer, number: int) -> None:
        object.__setattr__(self, "__peer__", peer)
        object.__setattr__(self, "__number__", number)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.__peer__.ask(self, "getattr", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self.__peer__.ask(self, "setattr", name, value)

    def __call__(self, /, *arguments: Any, **keywords: Any) -> Any:
        return self.__peer__.ask(self, "call", *arguments, **keywords)

    def __next__(self) -> Any:
        for item in self.__peer__.ask(self, "next"):
            return item
        raise StopIteration

    def __instancecheck__(self, value: Any) -> bool:
        return type(value) is StandIn and self.__peer__.ask(self, "isinstance", value) is True

    def __subclasscheck__(self, kind: Any) -> bool:
        return type(kind) is StandIn and self.__peer__.ask(self, "issubclass", kind) is True

    def __exit__(self, *_: object) -> None:  # it cannot hide an exception
        self.__peer__.ask(self, "exit")


def _make_special_method(name: str) -> Callable[..., Any]:
    def ask(self: StandIn, *arguments: Any) -> Any:
        if name in _WITH_TWO and type(arguments[0]) is not StandIn:
            return NotImplemented
        return self.__peer__.ask(self, name, *arguments)

    return ask


for _name in ("enter", *_WITH_ONE, *_UNARY, *_WITH_ITEMS, *_WITH_TWO):
    setattr(StandIn, f"__{_name}__", _make_special_method(_name))


class Peer:
    """One end. Tags of messages: `mine` and `yours` are numbers of objects, seen from the sender."""

    def __init__(self, incoming: IO[str], outgoing: IO[str]) -> None:
        self._incoming, self._outgoing, self._lock = incoming, outgoing, RLock()
        self._objects, self._number_by_id = list[Any](), dict[int, int]()
        self._stand_ins: dict[int, StandIn] = {}  # by number, so that `is` works
        self.has_ended = False  # the other process

    def share(self, value: Any) -> int:
        """Return the number of an object for the other process; the first has number 0."""
        number = self._number_by_id.setdefault(id(value), len(self._objects))
        if number == len(self._objects):
            self._objects.append(value)
        return number

    def get_stand_in(self, number: int) -> StandIn:
        return self._stand_ins.setdefault(number, StandIn(self, number))

    def ask(self, target: StandIn, operation: str, /, *arguments: Any, **keywords: Any) -> Any:
        """Return the result of an operation in the other process, and update changed arguments as it did.

        Raises its exception if that is a built-in one, else RuntimeError."""
        encoded = (encode(part, self._describe) for part in (list(arguments), keywords))
        message = [operation, target.__number__, *encoded]
        with self._lock:
            self._send(json.dumps({"ask": message}))
            reply = self.serve()
        if "error" in reply:
            name, text = reply["error"]
            kind = getattr(builtins, str(name), None)
            is_error = isinstance(kind, type) and issubclass(kind, Exception)
            if not is_error or kind in (StopIteration, StopAsyncIteration):  # they would end a test's loop
                kind = RuntimeError
            raise kind(text)  # type: ignore[misc]
        value, changed = (decode(reply[part], self._find) for part in ("value", "arguments"))
        for argument, now in zip((*arguments, *keywords.values()), changed, strict=True):
            if type(argument) in _MUTABLE and type(now) is type(argument) and argument != now:
                argument.clear()
                argument.extend(now) if isinstance(argument, list | deque) else argument.update(now)
        return value

    def serve(self) -> dict[str, Any]:
        """Answer requests until a reply comes, and return it.

        Raises RuntimeError when the other process has ended."""
        for line in iter(self._incoming.readline, ""):
            message = json.loads(line)
            if "ask" not in message:
                return dict(message)
            self._send(self._perform(*message["ask"]))
        self.has_ended = True
        raise RuntimeError("the other process has ended")

    def _send(self, text: str) -> None:
        with suppress(BrokenPipeError):  # then no reply comes
            self._outgoing.write(text + "\n")
            self._outgoing.flush()

    def _perform(self, operation: str, number: int, arguments: Any, keywords: Any) -> str:
        try:
            target = self._objects[number]
            arguments, keywords = (decode(part, self._find) for part in (arguments, keywords))
            if type(arguments) is not list or type(keywords) is not dict:  # else `_check` sees other ones
                raise TypeError("a request has a list and a dict of arguments")
            self._check(target, operation, arguments)
            value = _OPERATIONS[operation](target, *arguments, **keywords)
            reply = {"value": value, "arguments": [*arguments, *keywords.values()]}
            return json.dumps({name: encode(part, self._describe) for name, part in reply.items()})
        except BaseException as error:  # noqa: BLE001 (reported to the other process)
            name = next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins")
            return json.dumps({"error": [name, self._describe_error(error)]})

    def _describe(self, value: Any) -> Any:
        if type(value) is StandIn:
            return {"yours": value.__number__}
        path = f"{type(value).__module__}:{type(value).__qualname__}"
        if path in _COPIED:
            return {"copy": [path, encode(list(_COPIED[path](value)), self._describe)]}
        return self._describe_object(value)

    def _describe_object(self, value: Any) -> Any:
        return {"mine": self.share(value)}

    def _find(self, tag: str, content: Any) -> Any:
        if tag == "global":
            return _import(content)
        if tag == "copy":
            path, arguments = content
            if path not in _COPIED:
                raise TypeError("objects of this class are not copied")
            return _import(path)(*decode(arguments, self._find))
        return self._objects[content] if tag == "yours" else self.get_stand_in(content)

    def _check(self, target: Any, operation: str, arguments: list[Any]) -> None:
        """Raise if the other process may not ask this."""

    def _describe_error(self, error: BaseException) -> str:
        return str(error)


class TestsPeer(Peer):
    """The tests' end. An answer may call what tests give to it, iterate, and use public attributes.

    namespace: the globals of the tests' code"""

    def __init__(self, incoming: IO[str], outgoing: IO[str], namespace: dict[str, Any]) -> None:
        super().__init__(incoming, outgoing)
        self._namespace = namespace
        self.has_failed = False  # an assertion within a call by the answer, which could catch its error

    def _describe_object(self, value: Any) -> Any:
        for kind in (list, dict, set):  # of a class of the tests
            if isinstance(value, kind):
                return encode(kind(value), self._describe)
        if not self._may_share(value):
            return {"global": _find_path(value)}
        return super()._describe_object(value)

    def _may_share(self, value: Any) -> bool:
        function = value.__func__ if isinstance(value, MethodType) else value
        if isinstance(function, FunctionType):
            return function.__globals__ is self._namespace
        if isinstance(value, BuiltinFunctionType):  # such as `found.append`
            return isinstance(value.__self__, list | dict | set | str)
        is_iterator = hasattr(type(value), "__next__")
        return is_iterator or self._is_defined_here(value) or self._is_defined_here(type(value))

    def _is_defined_here(self, kind: Any) -> bool:
        return isinstance(kind, type) and kind.__module__ == self._namespace["__name__"]

    def _find(self, tag: str, content: Any) -> Any:
        if tag not in ("mine", "yours", "copy"):
            raise TypeError("an answer may not name globals")
        return super()._find(tag, content)

    def _check(self, target: Any, operation: str, arguments: list[Any]) -> None:
        if operation in ("getattr", "setattr"):
            name = arguments[0]
            may_read = isinstance(name, str) and name[:1] != "_" and self._is_defined_here(type(target))
            is_method = operation == "setattr" and callable(getattr(type(target), name, None))
            if not may_read or is_method:
                raise AttributeError("an answer may not use this attribute")
        if operation in _WITH_TWO and id(arguments[0]) not in self._number_by_id:
            raise TypeError("an answer may not compare an object of the tests with a value")

    def _describe_error(self, error: BaseException) -> str:
        if isinstance(error, Exception) and not isinstance(error, AssertionError):
            return str(error)  # the others include the error of `pytest.fail`
        self.has_failed = True
        return ""  # the text may hold an expected result


def _find_path(value: Any) -> str:
    """Return the name of a type or function that the answer can import itself. Raises TypeError."""
    if isinstance(value, type | FunctionType | BuiltinFunctionType | MethodDescriptorType):
        path = f"{getattr(value, '__objclass__', value).__module__}:{value.__qualname__}"
        with suppress(ImportError, AttributeError):
            if _import(path) is value:
                return path
    raise TypeError(f"{type(value).__name__} cannot be an argument")


def _import(path: str) -> Any:
    module, _, name = path.partition(":")
    return operator.attrgetter(name)(import_module(module))
