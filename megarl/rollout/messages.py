"""The messages of a rollout, and the sockets that carry them: between the controller and every rank that has
an engine, and the trainers where they are other ranks. docs/design.md shows who says what to whom.

A message is a msgpack array, checked against its class when it arrives. Numbers of responses are the
controller's, and no two responses have the same.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.utils import z85

from megarl.config.errors import EngineError, WaitTimeout
from megarl.data.prompts import Prompt, ReadReport
from megarl.data.sample import Sample, TokenData
from megarl.parallel.objects import encode, from_plain
from megarl.parallel.secret import sign
from megarl.rollout.sampling import SamplingParams

TRAINER = -1  # the first trainer's number, where trainers are other ranks; ranks with engines count from 0
ALIVE = 10.0  # seconds of silence after which an `Alive` is sent
LINGER = 5000  # milliseconds that a closed socket has for what it has not sent yet
_DOOR = "inproc://controller"


class Message(msgspec.Struct, array_like=True, tag=True, forbid_unknown_fields=True):
    """What one side tells the other."""


class Question(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """What a rank must know of a prompt. tokens: int32; answer, entry: as in Prompt; and the rest of it where
    responses may have several turns. extra: JSON, as integers there may be of any size"""

    uid: int
    tokens: bytes
    answer: str
    entry: str
    text: str = ""
    source: str = ""
    question: str = ""
    extra: str = "{}"

    @staticmethod
    def of(prompt: Prompt, *, whole: bool = False) -> Question:
        """Return what is sent of a prompt."""
        needed = prompt.uid, pack(prompt.tokens, np.int32), prompt.answer, prompt.entry
        if not whole:
            return Question(*needed)
        extra = json.dumps(prompt.extra, default=str)  # a row's columns may be of any type
        return Question(*needed, prompt.text, prompt.source, prompt.question, extra)

    @property
    def prompt(self) -> Prompt:
        """Return the prompt, as far as it was sent."""
        tokens = tuple(np.frombuffer(self.tokens, np.int32).tolist())
        rest = self.source, json.loads(self.extra), self.question, self.entry
        return Prompt(self.uid, self.text, tokens, self.answer, *rest)


class Work(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """One response to be drawn. question: its place in the message; index: its place in the group. What an
    earlier step began lies on the rank, under the same number, and goes on."""

    number: int
    question: int
    index: int
    seed: int


# Either way.


class Alive(Message):
    """Nothing new."""


# The controller to a rank with an engine.


class Begin(Message):
    """Draw these responses beside those that you draw. terms: whether the reward's terms are wanted too;
    window: the most tokens that each gets, and then comes back unfinished; 0: no such limit."""

    params: SamplingParams
    terms: bool
    window: int
    questions: list[Question]
    work: list[Work]


class Abort(Message):
    """End what runs. Of these responses, keep what there is: they go on in a later rollout."""

    numbers: list[int]


class Fetch(Message):
    """Send the bodies of these responses."""

    numbers: list[int]


class Recover(Message):
    """Start engines again, together with all ranks that have any. failures: of each, (rank, why)."""

    failures: list[tuple[int, str]]


class End(Message):
    """The rollout has ended: come for what came of it. keep: the responses whose bodies are still wanted."""

    keep: list[int]


# A rank with an engine to the controller.


class Hello(Message):
    """Here is this rank (or the trainers)."""


class Ended(Message):
    """These responses have ended and are verified. version: of the engine's weights; busy: seconds in which
    the engine had something to do since the rollout began."""

    version: int
    samples: list[Sample]
    busy: float


class Unseated(Message):
    """Of the responses that run on this rank, so many wait for a tool, an environment or an agent: the engine
    has room for as many others."""

    count: int


class Failed(Message):
    """The rank has met an error: the name of its class, and its text."""

    error: str
    text: str


class Aborted(Message):
    """Nothing runs any more. held: the responses of `Abort` of which there is something."""

    held: list[int]


class Bodies(Message):
    """What `Fetch` wanted, by number; without journals."""

    data: dict[int, TokenData]


# The trainers to the controller, which passes them on to all ranks with engines; one is carried out after the
# other. And what it answers.


class SendReports(Message):
    """Send what was read of the data files."""


class Sync(Message):
    """Take part in the transfer of the actor's weights as this version."""

    version: int


class Draw(Message):
    """Draw the responses of a step. done: the step up to which batches are needed no more."""

    stage: str
    number: int
    done: int


class Take(Message):
    """A checkpoint has the batch of a step already, in this folder."""

    source: str
    number: int


class Continue(Message):
    """Forget what was recorded after a step; 0: all."""

    step: int
    stage: str


class Load(Message):
    """Continue from what a snapshot gave, as JSON."""

    state: str


class Evaluate(Message):
    """Answer the held-out problems that are due after a step."""

    step: int


class Leave(Message):
    """The run has ended."""


class Reports(Message):
    """What was read of the data files."""

    reports: dict[str, ReadReport]


class Drawn(Message):
    """The batch of a step is in its folder."""

    stage: str
    number: int
    metrics: dict[str, int | float]
    errors: dict[str, int]
    events: list[str]


class Evaluated(Message):
    """The scores, and every answer."""

    stats: dict[str, int | float]
    answers: list[dict[str, Any]]


ORDERS = (SendReports, Sync, Draw, Take, Continue, Load, Evaluate, Leave)
Order = SendReports | Sync | Draw | Take | Continue | Load | Evaluate | Leave


ENGINES = (Alive, Hello, Ended, Unseated, Failed, Aborted, Bodies)  # what a rank with an engine may send
Answer = Reports | Drawn | Evaluated
encoded = encode
_decode = msgspec.msgpack.Decoder(
    Order | Alive | Begin | Abort | Fetch | Recover | End | Hello | Ended | Unseated | Failed | Aborted
    | Bodies | Answer,
    dec_hook=from_plain,
).decode  # fmt: skip


def pack(numbers: Iterable[float], kind: Any) -> bytes:
    """Return numbers as bytes."""
    return np.array(numbers, dtype=kind).tobytes()


def decoded(sender: str, data: bytes) -> Message:
    """Return the message. Raises EngineError where it is none."""
    try:
        message: Message = _decode(data)
    except (msgspec.MsgspecError, ValueError, TypeError) as error:
        what = f"rollout: {sender} has sent {len(data)} bytes that are no message"
        raise EngineError(f"{what}: {error} (all ranks must run one version of megarl)") from None
    return message


def curve_keys(owner: str) -> tuple[bytes, bytes]:
    """Return the public and the secret CURVE key of the controller or of a rank's number. They follow from
    the job's secret: every rank knows whose key is which, and nobody else has one."""
    secret = z85.encode(sign("curve", owner))
    return zmq.curve_public(secret), secret


class _Incoming:
    """What arrives at a socket; a wait that is given up loses nothing."""

    def __init__(self, one: zmq.asyncio.Socket) -> None:
        self.socket = one
        self._next: asyncio.Future[list[zmq.Frame]] | None = None

    async def wait(self, seconds: float) -> list[zmq.Frame] | None:
        """Return the next message; None where there is none within `seconds`."""
        if self._next is None:
            self._next = asyncio.ensure_future(self.socket.recv_multipart(copy=False))
        done, _ = await asyncio.wait({self._next}, timeout=seconds)
        if not done:
            return None
        found, self._next = self._next.result(), None
        return found

    def close(self) -> None:
        """Close the socket, once what was sent is gone or LINGER is over."""
        if self._next is not None:
            self._next.cancel()
        self.socket.close()


class Hub:
    """The controller's end of all connections.

    It takes a message only over a connection with the key of the rank that the message names, and only if
    such a rank may send it. Other messages are dropped.

    address  where ranks in other processes connect; "": nowhere
    heard    by number, when somebody last said something
    dropped  how many messages were dropped, by the reason"""

    def __init__(self, context: zmq.asyncio.Context, host: str, ranks: int) -> None:
        """Listen for `ranks` ranks with engines, and the trainers.

        host: an address of this machine; "": no socket, rank 0 of this process connects alone"""
        self.socket = context.socket(zmq.ROUTER)
        _set(self.socket, zmq.ROUTER_MANDATORY, 1)
        self.dropped: Counter[str] = Counter()
        self._keys: dict[int, str] = {}
        self._guard: AsyncioAuthenticator | None = None
        self.address = ""
        if host:
            for number in (TRAINER, *range(ranks)):
                self._keys[number] = curve_keys(str(number))[0].decode()
            self._guard = AsyncioAuthenticator(context)
            self._guard.start()
            self._guard.configure_curve_callback("ranks", self)
            secret = curve_keys("controller")[1]
            _set(self.socket, zmq.CURVE_SERVER, 1, zmq.CURVE_SECRETKEY, secret, zmq.IPV6, int(":" in host))
            _set(self.socket, zmq.ZAP_DOMAIN, b"ranks", zmq.ZAP_ENFORCE_DOMAIN, 1)  # nobody without the guard
            self.socket.bind(f"tcp://[{host}]:*" if ":" in host else f"tcp://{host}:*")
            self.address = bytes(self.socket.last_endpoint).rstrip(b"\0").decode()  # type: ignore[arg-type]
        self.socket.bind(_DOOR)
        self._incoming = _Incoming(self.socket)
        self.heard: dict[int, float] = {}
        self._told: dict[int, float] = {}

    async def send(self, number: int, message: Message) -> None:
        """Send a message; never waits for it to be read."""
        self._told[number] = time.monotonic()
        try:
            await self.socket.send_multipart([str(number).encode(), encoded(message)])
        except zmq.ZMQError as error:
            raise WaitTimeout(f"rollout: {name_of(number)} cannot be reached any more: {error}") from None

    async def send_all(self, message: Message) -> None:
        """Send a message to every rank with an engine."""
        for number in [number for number in self.heard if number != TRAINER]:
            await self.send(number, message)

    async def receive(self, seconds: float) -> list[tuple[int, Message]]:
        """Return what has arrived, from whom; wait at most `seconds` for the first."""
        found: list[tuple[int, Message]] = []
        began = time.monotonic()
        while (parts := await self._incoming.wait(0.0 if found else seconds)) is not None:
            message = self._accept(parts)
            if message is not None:
                self.heard[message[0]] = time.monotonic()
                found.append(message)
        if time.monotonic() - began > seconds + ALIVE:
            self.expect()  # this process stood still, as in a recovery of all ranks: nobody else's silence
        return found

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether a connection with this public key is let in; called by the guard."""
        return key.decode() in self._keys.values() or self._drop("a connection without a key of this job")

    def _accept(self, parts: list[zmq.Frame]) -> tuple[int, Message] | None:
        """Return who sends a message, and the message; None where it is dropped."""
        sender = parts[0].bytes
        number = int(sender) if re.fullmatch(rb"-1|[0-9]{1,9}", sender) else None
        try:
            key = str(parts[-1].get("User-Id"))
        except zmq.ZMQError:  # from this process, whose rank is the first
            key = self._keys.get(0, "") if number == 0 else "none"
        if number is None or len(parts) != 2 or key != self._keys.get(number, ""):
            self._drop("a message whose sender's key is not that of the rank it names")
            return None
        message = decoded(name_of(number), parts[1].bytes)
        if not isinstance(message, ORDERS if number == TRAINER else ENGINES):
            self._drop(f"{type(message).__name__} from {name_of(number)}, which may not send it")
            return None
        return number, message

    def _drop(self, what: str) -> bool:
        """Count a message or connection that is refused; print a line for the first of its kind."""
        self.dropped[what] += 1
        if self.dropped[what] == 1:
            line = f"megarl: rollout: dropped {what}; more of these are not reported"
            print(line, file=sys.stderr, flush=True)
        return False

    async def meet(self, ranks: int, limit: float) -> None:
        """Wait until so many ranks with engines have said hello. Raises WaitTimeout after `limit` seconds."""
        end = time.monotonic() + limit
        while missing := set(range(ranks)) - self.heard.keys():
            if time.monotonic() > end:
                raise WaitTimeout(f"rollout: {name_of(min(missing))} has not connected within {limit:g} s")
            await self.receive(1.0)

    def expect(self) -> None:
        """Begin to count the seconds of silence of all ranks with engines now."""
        for number in self.heard:
            self.heard[number] = time.monotonic()

    async def keep_alive(self) -> None:
        """Tell those to whom nothing was said for a while that all is well."""
        for number in list(self.heard):
            if number != TRAINER and time.monotonic() - self._told.get(number, 0.0) > ALIVE:
                await self.send(number, Alive())

    def silent(self, limit: float) -> int | None:
        """Return a rank that has said nothing for more than `limit` seconds."""
        late = [n for n, at in self.heard.items() if n != TRAINER and time.monotonic() - at > limit]
        return min(late, default=None)

    def close(self) -> None:
        self._incoming.close()
        if self._guard is not None:
            self._guard.stop()


class Link:
    """Everybody else's end of the connection to the controller."""

    def __init__(
        self, context: zmq.asyncio.Context, address: str, number: int, *, here: bool = False
    ) -> None:
        """Connect. here: from within the controller's own process."""
        self.number, self.here = number, here
        self.socket = context.socket(zmq.DEALER)
        _set(self.socket, zmq.IDENTITY, str(number).encode())
        if not here:
            public, secret = curve_keys(str(number))
            server = curve_keys("controller")[0]
            _set(self.socket, zmq.CURVE_SERVERKEY, server, zmq.CURVE_PUBLICKEY, public)
            _set(self.socket, zmq.CURVE_SECRETKEY, secret, zmq.IPV6, int("[" in address))
        self.socket.connect(_DOOR if here else address)
        self._incoming = _Incoming(self.socket)
        self.told = time.monotonic()

    async def send(self, message: Message) -> None:
        """Send a message; never waits for it to be read."""
        self.told = time.monotonic()
        await self.socket.send(encoded(message))

    async def receive(self, seconds: float) -> Message | None:
        """Return the next message; None where there is none within `seconds`."""
        parts = await self._incoming.wait(seconds)
        return None if parts is None else decoded("the controller", parts[0].bytes)

    def close(self) -> None:
        self._incoming.close()


def name_of(number: int) -> str:
    """Return who has a number, for messages."""
    return "the first trainer" if number == TRAINER else f"engine rank {number}"


def address_here() -> str:
    """Return the address of this machine that the job's other machines know; "" for a job of one process."""
    master, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "1")
    if not master or os.environ.get("WORLD_SIZE", "1") == "1":
        return ""
    family, *_, there = socket.getaddrinfo(master, int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as one:  # sends nothing: the kernel says which way it would
        one.connect(there)
        return str(one.getsockname()[0])


def _set(one: zmq.asyncio.Socket, *options: Any) -> None:
    """Set options of a socket, and those that all have: no message waits for another one to be read."""
    common = (zmq.SNDHWM, 0, zmq.RCVHWM, 0, zmq.LINGER, LINGER)
    for option, value in zip((*options, *common)[::2], (*options, *common)[1::2], strict=True):
        one.setsockopt(option, value)
