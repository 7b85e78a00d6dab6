"""Messages between controller, engine ranks and first trainer, and their sockets."""

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

TRAINER = -1  # number of a first trainer without an engine; engine ranks count from 0
KEEP_ALIVE_SECONDS = 10.0
LINGER = 5000  # milliseconds in which a closed socket may send
_INPROC_ADDRESS = "inproc://controller"


class Message(msgspec.Struct, array_like=True, tag=True, forbid_unknown_fields=True):
    """A msgpack array, checked against its class."""


# In both directions.


class KeepAlive(Message):
    """A sign of life."""


# The controller to an engine rank.


class StartSamples(Message):
    """Start these samples, or continue them from the kept tokens."""

    params: SamplingParams
    terms: bool  # include `reward.terms` in rewards
    window: int  # most new tokens of a sample; 0: no limit
    prompts: list[Prompt]
    samples: list[tuple[int, int, int, int]]  # id, position in `prompts`, position in the group, seed


class AbortSamples(Message):
    """Abort all samples. Keep the tokens of these."""

    ids: list[int]


class SendTokenData(Message):
    ids: list[int]


class RestartEngines(Message):
    """Restart failed engines; all engine ranks take part. failures: (rank, reason)"""

    failures: list[tuple[int, str]]


class RolloutOutcome(msgspec.Struct, array_like=True):
    """A finished rollout. Lists have an entry per group."""

    prompts: list[Prompt]  # without text; empty if all ranks know them
    samples: list[list[Sample]]  # without tokens
    policy_versions: list[int]
    stats: dict[str, int | float]
    errors: dict[str, int]
    seconds: dict[str, float]
    idle: float


class StoreRollout(Message):
    """Store the batch of step `number`, with weights in flight.

    done: last step whose batch nobody needs; forget: samples that no batch needs"""

    number: int
    outcome: RolloutOutcome
    done: int
    forget: list[int]


class EndRollout(Message):
    """The rollout is finished; join the broadcast. keep: samples that are still needed"""

    keep: list[int]


# An engine rank to the controller.


class RankReady(Message):
    """The rank is connected."""


class SamplesFinished(Message):
    version: int
    samples: list[Sample]
    busy: float  # seconds in which the engine had work, in this rollout so far


class ToolWaitCount(Message):
    """The number of episodes that are not `in_engine`."""

    count: int


class RankFailed(Message):
    """version: of the engine's weights, if the error is EngineFailure"""

    error: str
    text: str
    version: int = -1


class SamplesAborted(Message):
    ids: list[int]


class TokenDataReply(Message):
    data: dict[int, TokenData]


# The first trainer to the controller, which forwards them to the engine ranks. The replies follow below.


class SendDataReports(Message):
    """Send DataReports."""


class TransferWeights(Message):
    version: int


class CollectRollout(Message):
    """Collect step `number`. done: last step whose batch is no longer needed"""

    stage: str
    number: int
    done: int


class ReuseStoredRollout(Message):
    source: str
    number: int


class RewindTo(Message):
    step: int
    stage: str


class LoadState(Message):
    state: str


class RunEvaluation(Message):
    step: int


class Shutdown(Message):
    """The run has ended."""


class DataReports(Message):
    reports: dict[str, ReadReport]


class TransferReady(Message):
    """With weights in flight: the engines' ranks begin the transfer of `version`."""

    version: int


class RolloutStored(Message):
    stage: str
    number: int
    metrics: dict[str, int | float]
    errors: dict[str, int]
    events: list[str]


class EvaluationScores(Message):
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
Command = StartSamples | AbortSamples | SendTokenData | RestartEngines | StoreRollout | EndRollout
Report = (
    KeepAlive | RankReady | SamplesFinished | ToolWaitCount | RankFailed | SamplesAborted | TokenDataReply
)
Answer = DataReports | TransferReady | RolloutStored | EvaluationScores
encode_message = encode
_decode = msgspec.msgpack.Decoder(Order | Command | Report | Answer, dec_hook=from_plain).decode


def decode_message(sender: str, data: bytes) -> Message:
    """Decode a message, or raise EngineError."""
    try:
        message: Message = _decode(data)
    except (msgspec.MsgspecError, ValueError, TypeError) as error:
        what = f"rollout: {sender} has sent {len(data)} bytes that are no message"
        raise EngineError(f"{what}: {error} (all ranks must run one version of megarl)") from None
    return message


def pack_prompt(prompt: Prompt, *, whole: bool) -> Prompt:
    """Return the fields that the receiver needs. whole: keep all fields, as episodes of several turns need

    `extra` becomes JSON text, as msgpack has no integers above 64 bits."""
    if not whole:
        return Prompt(prompt.uid, "", prompt.tokens, prompt.answer, entry=prompt.entry)
    return replace(prompt, extra={"json": json.dumps(prompt.extra, default=str)})


def unpack_prompt(prompt: Prompt) -> Prompt:
    return replace(prompt, extra=json.loads(prompt.extra["json"])) if prompt.extra else prompt


def curve_keys(owner: str) -> tuple[bytes, bytes]:
    """Derive a CURVE key pair from the job's secret. owner: "controller" or a rank's number"""
    secret = z85.encode(sign("curve", owner))
    return zmq.curve_public(secret), secret


def make_socket(context: zmq.asyncio.Context, kind: int) -> zmq.asyncio.Socket:
    zmq_socket: zmq.asyncio.Socket = context.socket(kind)
    zmq_socket.set_hwm(0)
    zmq_socket.linger = LINGER
    return zmq_socket


def has_message(source: zmq.asyncio.Socket) -> bool:
    events = source.get(zmq.EVENTS)
    assert isinstance(events, int)
    return bool(events & zmq.POLLIN)


async def receive_frames(source: zmq.asyncio.Socket, seconds: float) -> list[zmq.Frame] | None:
    if not await source.poll(1000 * seconds):
        return None
    frames: list[zmq.Frame] = await source.recv_multipart(copy=False)
    return frames


class Hub:
    """The controller's end of all connections.

    It drops messages without their sender's key, or of types that it may not send."""

    def __init__(self, context: zmq.asyncio.Context, host: str, ranks: int) -> None:
        """Listen. host: this machine's address; "": only for this process"""
        self.socket = make_socket(context, zmq.ROUTER)
        self.socket.router_mandatory = True
        self.dropped: Counter[str] = Counter()
        self._keys: dict[int, str] = {}
        self._guard: AsyncioAuthenticator | None = None
        self.address = ""  # for other processes
        if host:
            for number in (TRAINER, *range(ranks)):
                self._keys[number] = curve_keys(str(number))[0].decode()
            self._guard = AsyncioAuthenticator(context)
            self._guard.start()
            self._guard.configure_curve_callback("ranks", self)
            self.socket.curve_server, self.socket.curve_secretkey = True, curve_keys("controller")[1]
            self.socket.ipv6 = ":" in host
            # zap_enforce_domain: refuse all connections if the guard does not run.
            self.socket.zap_domain, self.socket.zap_enforce_domain = b"ranks", 1
            self.socket.bind(f"tcp://[{host}]:*" if ":" in host else f"tcp://{host}:*")
            self.address = bytes(self.socket.last_endpoint).rstrip(b"\0").decode()  # type: ignore[arg-type]
        self.socket.bind(_INPROC_ADDRESS)
        self.last_heard: dict[int, float] = {}
        self._last_sent: dict[int, float] = {}

    async def send(self, number: int, message: Message) -> None:
        self._last_sent[number] = time.monotonic()
        try:
            await self.socket.send_multipart([str(number).encode(), encode_message(message)])
        except zmq.ZMQError as error:
            raise WaitTimeout(f"rollout: {rank_name(number)} cannot be reached any more: {error}") from None

    async def send_all(self, message: Message) -> None:
        for number in [number for number in self.last_heard if number != TRAINER]:
            await self.send(number, message)

    async def receive(self, seconds: float) -> list[tuple[int, Message]]:
        messages: list[tuple[int, Message]] = []
        start_time = time.monotonic()
        seconds_left = seconds  # dropped messages do not extend the wait
        while (frames := await receive_frames(self.socket, 0.0 if messages else seconds_left)) is not None:
            seconds_left = max(0.0, start_time + seconds - time.monotonic())
            numbered_message = self._accept(frames)
            if numbered_message is not None:
                self.last_heard[numbered_message[0]] = time.monotonic()
                messages.append(numbered_message)
        if time.monotonic() - start_time > seconds + KEEP_ALIVE_SECONDS:
            self.reset_silence()  # this process was blocked
        return messages

    def callback(self, domain: str, key: bytes) -> bool:
        return key.decode() in self._keys.values() or self._drop("a connection without a key of this job")

    def _accept(self, parts: list[zmq.Frame]) -> tuple[int, Message] | None:
        sender = parts[0].bytes
        number = int(sender) if re.fullmatch(rb"-1|[0-9]{1,9}", sender) else None
        try:
            key = str(parts[-1].get("User-Id"))
        except zmq.ZMQError:  # from rank 0, in this process
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
        self.dropped[what] += 1
        if self.dropped[what] == 1:
            line = f"megarl: rollout: dropped {what}; more of these are not reported"
            print(line, file=sys.stderr, flush=True)
        return False

    async def wait_for_ranks(self, ranks: int, limit: float) -> None:
        """Wait for all ranks to connect. Raises WaitTimeout after `limit` seconds."""
        deadline = time.monotonic() + limit
        while missing_ranks := set(range(ranks)) - self.last_heard.keys():
            if time.monotonic() > deadline:
                what = f"{rank_name(min(missing_ranks))} has not connected within {limit:g} s"
                raise WaitTimeout(f"rollout: {what}")
            await self.receive(1.0)

    def reset_silence(self) -> None:
        for number in self.last_heard:
            self.last_heard[number] = time.monotonic()

    async def keep_alive(self) -> None:
        for number in list(self.last_heard):
            if number != TRAINER and time.monotonic() - self._last_sent.get(number, 0.0) > KEEP_ALIVE_SECONDS:
                await self.send(number, KeepAlive())

    def find_silent_rank(self, limit: float) -> int | None:
        now = time.monotonic()
        silent = [n for n, heard in self.last_heard.items() if n != TRAINER and now - heard > limit]
        return min(silent, default=None)

    def close(self) -> None:
        self.socket.close()
        if self._guard is not None:
            self._guard.stop()


class Link:
    """A rank's end of its connection to the controller. here: the controller is in this process."""

    def __init__(
        self, context: zmq.asyncio.Context, address: str, number: int, *, here: bool = False
    ) -> None:
        self.socket = make_socket(context, zmq.DEALER)
        self.socket.identity = str(number).encode()
        if not here:
            self.socket.curve_publickey, self.socket.curve_secretkey = curve_keys(str(number))
            self.socket.curve_serverkey = curve_keys("controller")[0]
            self.socket.ipv6 = "[" in address
        self.socket.connect(_INPROC_ADDRESS if here else address)
        self.last_sent = time.monotonic()

    async def send(self, message: Message) -> None:
        self.last_sent = time.monotonic()
        await self.socket.send(encode_message(message))

    async def receive(self, seconds: float) -> Message | None:
        frames = await receive_frames(self.socket, seconds)
        return None if frames is None else decode_message("the controller", frames[0].bytes)

    def close(self) -> None:
        self.socket.close()


def rank_name(number: int) -> str:
    return "the first trainer" if number == TRAINER else f"engine rank {number}"


def own_address() -> str:
    """Return this machine's address; "" for a job of one process."""
    master, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "1")
    if not master or os.environ.get("WORLD_SIZE", "1") == "1":
        return ""
    family, *_, address = socket.getaddrinfo(master, int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as sock:  # sends nothing; the kernel picks the interface
        sock.connect(address)
        return str(sock.getsockname()[0])
