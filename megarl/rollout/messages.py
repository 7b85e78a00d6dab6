"""The messages of a rollout, and the sockets that carry them.

They go between the controller, every rank that has an engine, and the first trainer if trainers are other
ranks. docs/design.md shows who sends what to whom. A message is a msgpack array, checked against its class
when it arrives."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import msgspec
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
KEEP_ALIVE_SECONDS = 10.0  # of silence, after which a `KeepAlive` is sent
LINGER = 5000  # milliseconds that a closed socket has for what it has not sent yet
_INPROC_ADDRESS = "inproc://controller"


class Message(msgspec.Struct, array_like=True, tag=True, forbid_unknown_fields=True):
    """The base of all messages."""


# In both directions.


class KeepAlive(Message):
    """A sign of life."""


# The controller to a rank with an engine.


class StartSamples(Message):
    """Generate these samples in addition to those that run.

    terms    whether rewards include `reward.terms`
    window   most new tokens of a sample, after which it comes back unfinished; 0: no limit
    samples  of each: id, position of its prompt in `prompts`, position in its group, seed. The rank continues
             the tokens that it keeps under the id
    """

    params: SamplingParams
    terms: bool
    window: int
    prompts: list[Prompt]
    samples: list[tuple[int, int, int, int]]


class AbortSamples(Message):
    """End all that runs. Keep the tokens of these samples: a later rollout continues them."""

    ids: list[int]


class SendTokenData(Message):
    """Send the tokens of these samples."""

    ids: list[int]


class RestartEngines(Message):
    """Restart engines, together with all ranks that have one. failures: of each, (rank, why)"""

    failures: list[tuple[int, str]]


class EndRollout(Message):
    """The rollout is finished; join the broadcast. keep: ids of the samples whose tokens are still needed"""

    keep: list[int]


# A rank with an engine to the controller.


class RankReady(Message):
    """This rank is connected."""


class SamplesFinished(Message):
    """These samples are finished and graded.

    version  of the engine's weights
    busy     seconds in which the engine had work since the rollout began
    """

    version: int
    samples: list[Sample]
    busy: float


class ToolWaitCount(Message):
    """The number of running episodes that wait for a tool, an environment or an agent.

    The engine has room for the same number of others."""

    count: int


class RankFailed(Message):
    """The rank had an error. error: name of its class"""

    error: str
    text: str


class SamplesAborted(Message):
    """Nothing runs any more. ids: samples of `AbortSamples` that have tokens"""

    ids: list[int]


class TokenDataReply(Message):
    """The answer to `SendTokenData`, by id, without journals."""

    data: dict[int, TokenData]


# The first trainer to the controller, which passes them on to all ranks with engines; then the replies.


class SendDataReports(Message):
    """Send the reports about the data files."""


class TransferWeights(Message):
    """Take part in the transfer of the actor's weights as this version."""

    version: int


class CollectRollout(Message):
    """Collect the rollout of step `number`. done: step up to which batches are no longer needed"""

    stage: str
    number: int
    done: int


class ReuseStoredRollout(Message):
    """Take the batch of step `number` from this folder of a checkpoint."""

    source: str
    number: int


class RewindTo(Message):
    """Drop what was recorded after a step; 0: all."""

    step: int
    stage: str


class LoadState(Message):
    """Continue from the state of a checkpoint, as JSON."""

    state: str


class RunEvaluation(Message):
    """Answer the held-out problems that are due after a step."""

    step: int


class Shutdown(Message):
    """The run has ended."""


class DataReports(Message):
    """The reports about the data files, by key."""

    reports: dict[str, ReadReport]


class RolloutStored(Message):
    """The batch of step `number` is in its folder."""

    stage: str
    number: int
    metrics: dict[str, int | float]
    errors: dict[str, int]
    events: list[str]


class EvaluationScores(Message):
    """The scores, and every answer."""

    stats: dict[str, int | float]
    answers: list[dict[str, Any]]


Order = (
    SendDataReports
    | TransferWeights
    | CollectRollout
    | ReuseStoredRollout
    | RewindTo
    | LoadState
    | RunEvaluation
    | Shutdown
)
Command = StartSamples | AbortSamples | SendTokenData | RestartEngines | EndRollout
Report = (
    KeepAlive | RankReady | SamplesFinished | ToolWaitCount | RankFailed | SamplesAborted | TokenDataReply
)
Answer = DataReports | RolloutStored | EvaluationScores
encode_message = encode
_decode = msgspec.msgpack.Decoder(Order | Command | Report | Answer, dec_hook=from_plain).decode


def decode_message(sender: str, data: bytes) -> Message:
    """Return the message. Raises EngineError where it is none."""
    try:
        message: Message = _decode(data)
    except (msgspec.MsgspecError, ValueError, TypeError) as error:
        what = f"rollout: {sender} has sent {len(data)} bytes that are no message"
        raise EngineError(f"{what}: {error} (all ranks must run one version of megarl)") from None
    return message


def pack_prompt(prompt: Prompt, *, whole: bool) -> Prompt:
    """Return the fields of a prompt that the receiver needs. whole: all, for responses of several turns

    `extra` becomes one JSON text, because its integers may be of any size."""
    if not whole:
        return Prompt(prompt.uid, "", prompt.tokens, prompt.answer, entry=prompt.entry)
    return replace(prompt, extra={"json": json.dumps(prompt.extra, default=str)})


def unpack_prompt(prompt: Prompt) -> Prompt:
    """Return the prompt that `pack_prompt` was given, as far as it was sent."""
    return replace(prompt, extra=json.loads(prompt.extra["json"])) if prompt.extra else prompt


def curve_keys(owner: str) -> tuple[bytes, bytes]:
    """Return the public and the secret CURVE key of the controller or of a rank's number.

    They follow from the job's secret."""
    secret = z85.encode(sign("curve", owner))
    return zmq.curve_public(secret), secret


def make_socket(context: zmq.asyncio.Context, kind: int) -> zmq.asyncio.Socket:
    """Make a socket that queues any number of messages."""
    result: zmq.asyncio.Socket = context.socket(kind)
    result.set_hwm(0)
    result.linger = LINGER
    return result


async def receive_frames(source: zmq.asyncio.Socket, seconds: float) -> list[zmq.Frame] | None:
    """Return the next message of a socket; None where there is none within `seconds`."""
    if not await source.poll(1000 * seconds):
        return None
    frames: list[zmq.Frame] = await source.recv_multipart(copy=False)
    return frames


class Hub:
    """The controller's end of all connections.

    It takes a message only over a connection with the key of the rank that the message names, and only if
    such a rank may send it. Other messages are dropped.

    address     where ranks in other processes connect; "": nowhere
    last_heard  by rank, time of its last message
    dropped     how many messages were dropped, by the reason"""

    def __init__(self, context: zmq.asyncio.Context, host: str, ranks: int) -> None:
        """Listen for `ranks` ranks with engines, and the trainers.

        host: an address of this machine; "": no socket, rank 0 of this process connects alone"""
        self.socket = make_socket(context, zmq.ROUTER)
        self.socket.router_mandatory = True
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
            self.socket.curve_server, self.socket.curve_secretkey = True, curve_keys("controller")[1]
            self.socket.ipv6 = ":" in host
            self.socket.zap_domain, self.socket.zap_enforce_domain = b"ranks", 1  # nobody without the guard
            self.socket.bind(f"tcp://[{host}]:*" if ":" in host else f"tcp://{host}:*")
            self.address = bytes(self.socket.last_endpoint).rstrip(b"\0").decode()  # type: ignore[arg-type]
        self.socket.bind(_INPROC_ADDRESS)
        self.last_heard: dict[int, float] = {}
        self._last_sent: dict[int, float] = {}

    async def send(self, number: int, message: Message) -> None:
        """Send a message; never waits for it to be read."""
        self._last_sent[number] = time.monotonic()
        try:
            await self.socket.send_multipart([str(number).encode(), encode_message(message)])
        except zmq.ZMQError as error:
            raise WaitTimeout(f"rollout: {rank_name(number)} cannot be reached any more: {error}") from None

    async def send_all(self, message: Message) -> None:
        """Send a message to every rank with an engine."""
        for number in [number for number in self.last_heard if number != TRAINER]:
            await self.send(number, message)

    async def receive(self, seconds: float) -> list[tuple[int, Message]]:
        """Return what has arrived, from whom; wait at most `seconds` for the first."""
        found: list[tuple[int, Message]] = []
        began = time.monotonic()
        left = seconds  # messages that are dropped do not extend the wait
        while (parts := await receive_frames(self.socket, 0.0 if found else left)) is not None:
            left = max(0.0, began + seconds - time.monotonic())
            message = self._accept(parts)
            if message is not None:
                self.last_heard[message[0]] = time.monotonic()
                found.append(message)
        if time.monotonic() - began > seconds + KEEP_ALIVE_SECONDS:
            self.reset_silence()  # this process stood still, as in a recovery of all ranks
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
        message = decode_message(rank_name(number), parts[1].bytes)
        if not isinstance(message, Order if number == TRAINER else Report):
            self._drop(f"{type(message).__name__} from {rank_name(number)}, which may not send it")
            return None
        return number, message

    def _drop(self, what: str) -> bool:
        """Count a message or connection that is refused; print a line for the first of its kind."""
        self.dropped[what] += 1
        if self.dropped[what] == 1:
            line = f"megarl: rollout: dropped {what}; more of these are not reported"
            print(line, file=sys.stderr, flush=True)
        return False

    async def wait_for_ranks(self, ranks: int, limit: float) -> None:
        """Wait until `ranks` ranks with engines are connected. Raises WaitTimeout after `limit` seconds."""
        end = time.monotonic() + limit
        while missing := set(range(ranks)) - self.last_heard.keys():
            if time.monotonic() > end:
                raise WaitTimeout(f"rollout: {rank_name(min(missing))} has not connected within {limit:g} s")
            await self.receive(1.0)

    def reset_silence(self) -> None:
        """Count the silence of all ranks from now on."""
        for number in self.last_heard:
            self.last_heard[number] = time.monotonic()

    async def keep_alive(self) -> None:
        """Send a `KeepAlive` to each rank to which nothing was sent for a while."""
        for number in list(self.last_heard):
            if number != TRAINER and time.monotonic() - self._last_sent.get(number, 0.0) > KEEP_ALIVE_SECONDS:
                await self.send(number, KeepAlive())

    def find_silent_rank(self, limit: float) -> int | None:
        """Return a rank that has sent nothing for more than `limit` seconds; None if there is none."""
        late = [n for n, at in self.last_heard.items() if n != TRAINER and time.monotonic() - at > limit]
        return min(late, default=None)

    def close(self) -> None:
        self.socket.close()
        if self._guard is not None:
            self._guard.stop()


class Link:
    """Everybody else's end of the connection to the controller."""

    def __init__(
        self, context: zmq.asyncio.Context, address: str, number: int, *, here: bool = False
    ) -> None:
        """Connect. here: from within the controller's own process."""
        self.number, self.here = number, here
        self.socket = make_socket(context, zmq.DEALER)
        self.socket.identity = str(number).encode()
        if not here:
            self.socket.curve_publickey, self.socket.curve_secretkey = curve_keys(str(number))
            self.socket.curve_serverkey = curve_keys("controller")[0]
            self.socket.ipv6 = "[" in address
        self.socket.connect(_INPROC_ADDRESS if here else address)
        self.last_sent = time.monotonic()

    async def send(self, message: Message) -> None:
        """Send a message; never waits for it to be read."""
        self.last_sent = time.monotonic()
        await self.socket.send(encode_message(message))

    async def receive(self, seconds: float) -> Message | None:
        """Return the next message; None where there is none within `seconds`."""
        parts = await receive_frames(self.socket, seconds)
        return None if parts is None else decode_message("the controller", parts[0].bytes)

    def close(self) -> None:
        self.socket.close()


def rank_name(number: int) -> str:
    """Return the name of a rank for messages to users."""
    return "the first trainer" if number == TRAINER else f"engine rank {number}"


def own_address() -> str:
    """Return the address of this machine that the job's other machines know; "" for a job of one process."""
    master, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "1")
    if not master or os.environ.get("WORLD_SIZE", "1") == "1":
        return ""
    family, *_, there = socket.getaddrinfo(master, int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as one:  # sends nothing: the kernel says which way it would
        one.connect(there)
        return str(one.getsockname()[0])
