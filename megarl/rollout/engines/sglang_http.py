"""HTTP calls of external SGLang servers, and checks that they fit the run.

Written against SGLang 0.5.23. Needs aiohttp, the extra `agents`."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Coroutine, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from packaging.version import InvalidVersion, Version

from megarl.config.errors import ConfigError, MegarlError
from megarl.config.schema import Config
from megarl.sync.delta import LOADER
from megarl.weights.families import read_config
from megarl.weights.shards import hf_shapes

if TYPE_CHECKING:
    import aiohttp

OLDEST = "0.5.23"  # earlier versions have no weight-update sessions
CONNECTION = 5.0  # seconds
QUESTION = 30.0  # timeout of calls without generation, seconds; a health check takes up to 20
# SGLang's modes of pause_generation, by `schedule.in_flight`; None: no request runs during an update.
PAUSE_MODES = {"none": None, "retract": "retract", "keep": "in_place", "abort": "abort"}
_RANGE = re.compile(r"valid range is \[0, (\d+)\)")
T = TypeVar("T")


class Unanswered(Exception):
    """A server did not answer, or answered with an error. code: HTTP status; 0: no answer."""

    def __init__(self, text: str, code: int = 0) -> None:
        super().__init__(text)
        self.code = code


class ModelInfo(msgspec.Struct):
    model_path: str
    weight_version: str
    served_model_name: str = ""
    is_generation: bool = True
    model_type: str | None = None
    architectures: list[str] | None = None
    preferred_sampling_params: Any = None


class ServerInfo(msgspec.Struct):
    version: str
    max_total_num_tokens: int
    tp_size: int = 1
    dp_size: int = 1
    skip_tokenizer_init: bool = False
    disable_overlap_schedule: bool = False
    disaggregation_mode: str = "null"
    speculative_algorithm: str | None = None
    custom_weight_loader: list[str] | None = None


class Card(msgspec.Struct):
    """A model of /v1/models."""

    max_model_len: int | None = None


class Models(msgspec.Struct):
    data: list[Card]


class Done(msgspec.Struct):
    """The result of a command, such as a weight update."""

    success: bool
    message: str = ""


class RankChecksums(msgspec.Struct):
    checksums: dict[str, str]  # by SGLang's tensor name


class Checksums(msgspec.Struct):
    """Checksums of a server's weights, by tensor-parallel rank."""

    ranks: list[RankChecksums]


class Span(msgspec.Struct):
    """Consecutive tokens that one weight version sampled."""

    version: str
    end: int = 0


class Meta(msgspec.Struct):
    finish_reason: dict[str, Any]
    weight_version: str
    output_token_logprobs: list[tuple[float, int, str | None]] = []
    output_token_sampling_logprobs: list[float] = []
    output_token_sampling_mask: list[list[int]] = []
    weight_versions: list[Span] = []


class Generated(msgspec.Struct):
    meta_info: Meta
    output_ids: list[int] = []


async def call(session: aiohttp.ClientSession, url: str, limit: float, kind: type[T], body: Any = None) -> T:
    """GET a URL, or POST `body` (JSON, encoded or not), and return the answer as `kind`.

    Raises Unanswered without an answer of status 200 and this type."""
    import aiohttp

    path = "/" + url.split("/", 3)[-1]
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    try:
        async with session.request(
            "GET" if body is None else "POST",
            url,
            data=data,
            headers={"Content-Type": "application/json"},
            timeout=aiohttp.ClientTimeout(total=limit, sock_connect=CONNECTION),
            allow_redirects=False,
        ) as answer:
            content = await answer.read()
    except aiohttp.ConnectionTimeoutError:
        raise Unanswered(f"{path}: no connection within {CONNECTION:g} s") from None
    except TimeoutError:
        raise Unanswered(f"{path} was not answered within {limit:g} s") from None
    except (aiohttp.ClientError, OSError) as error:
        raise Unanswered(f"{path}: {type(error).__name__}: {error}") from None
    if answer.status != 200:
        text = content[:300].decode(errors="replace")
        raise Unanswered(f"{path} was answered {answer.status}: {text}", answer.status)
    try:
        return msgspec.json.decode(content, type=kind) if kind is not type(None) else kind()
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Unanswered(f"{path} was answered with an unexpected body: {error}") from None


async def open_session() -> aiohttp.ClientSession:
    """Open a session that uses each connection once.

    A server may close a kept-alive connection just as it is used again."""
    import aiohttp

    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    return aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())


async def identify(
    session: aiohttp.ClientSession, url: str, config: Config, hf_config: Mapping[str, Any]
) -> ServerInfo:
    """Return a server's description. Raises ConfigError if it does not fit the run, or Unanswered."""
    limit = min(QUESTION, config.rollout.engine_timeout)
    model = await call(session, f"{url}/model_info", limit, ModelInfo)
    server = await call(session, f"{url}/server_info", limit, ServerInfo)
    models = await call(session, f"{url}/v1/models", limit, Models)
    try:
        is_old = Version(server.version) < Version(OLDEST)
    except InvalidVersion:
        is_old = False  # a custom build
    max_length = config.data.max_prompt_tokens + config.rollout.max_extent
    room = min([server.max_total_num_tokens, *(card.max_model_len or max_length for card in models.data)])
    expected_model = hf_config.get("model_type"), hf_config.get("architectures")
    server_model = model.model_type, model.architectures
    difference = model.is_generation and _differs(model, config.model.path, hf_config)
    problem = ""
    if is_old:
        problem = f"is SGLang {server.version} (update it to {OLDEST} or later)"
    elif not model.is_generation or expected_model != server_model:
        problem = (
            f"runs {server_model[0]} {server_model[1]}, "
            f"not the run's {expected_model[0]} {expected_model[1]} (start it on model.path)"
        )
    elif difference:
        problem = difference
    elif room < max_length:
        needed_tokens = f"{config.data.max_prompt_tokens} + {config.rollout.max_extent}"
        problem = (
            f"has room for {room} tokens, but prompt and response need {needed_tokens} (give it more room)"
        )
    elif server.dp_size > 1:
        problem = "has data-parallel replicas, whose weights cannot be replaced (start one server for each)"
    elif server.disaggregation_mode != "null" or server.speculative_algorithm:
        problem = "uses prefill disaggregation or speculative decoding (start it without them)"
    elif server.skip_tokenizer_init and (config.rollout.stop or config.rollout.is_multi_turn):
        problem = "has no tokenizer, which stop texts need (start it without --skip-tokenizer-init)"
    elif config.schedule.in_flight == "keep" and not server.disable_overlap_schedule:
        problem = "has the overlap scheduler, which schedule.in_flight keep excludes "
        problem += "(start it with --disable-overlap-schedule)"
    elif config.rollout.weight_backend == "delta" and LOADER not in (server.custom_weight_loader or ()):
        problem = f"does not load deltas (start it with --custom-weight-loader {LOADER})"
    elif model.preferred_sampling_params:
        problem = "has its own sampling parameters (start it without --preferred-sampling-params)"
    else:
        vocab_size = hf_config["vocab_size"]
        server_vocab_size = await _get_vocabulary_size(session, url, vocab_size, limit)
        if server_vocab_size != str(vocab_size):
            problem = (
                f"has a vocabulary of {server_vocab_size} tokens, not {vocab_size} (start it on model.path)"
            )
    if problem:
        raise ConfigError(f"rollout.urls: {url}: {problem}")
    return server


def _differs(model: ModelInfo, ours: Path, hf_config: Mapping[str, Any]) -> str:
    """Describe how a server's model differs from the run's, or return "".

    Compares tensor shapes if the server's folder exists on this machine, else only the name. Weights of other
    shapes would crash the server."""
    folder = Path(model.model_path)
    if (folder / "config.json").is_file():
        try:
            shapes_match = hf_shapes(read_config(folder)) == hf_shapes(hf_config)
        except MegarlError:
            shapes_match = False
        what = f"runs {folder}, whose tensors differ from those of {ours} (start it on that)"
        return "" if shapes_match else what
    if ours.name in (folder.name, Path(model.served_model_name).name):
        return ""
    remedy = f"start it on that model, or with --served-model-name {ours.name} if it is the same"
    return f"runs {model.model_path}, and model.path is {ours} ({remedy})"


async def _get_vocabulary_size(session: aiohttp.ClientSession, url: str, expected: int, limit: float) -> str:
    # A client killed during an update leaves the server paused.
    await call(session, f"{url}/continue_generation", limit, type(None), {})
    # The refusal of a token just beyond the vocabulary names the valid range.
    request = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1}}
    probe = request | {"return_logprob": True, "token_ids_logprob": [expected]}
    try:
        await call(session, f"{url}/generate", limit, Generated, probe)
    except Unanswered as problem:
        if problem.code == 400 and (match := _RANGE.search(str(problem))):
            return match[1]
        raise
    return f"more than {expected}"


def check_servers(config: Config, hf_config: Mapping[str, Any], engines: int) -> None:
    """Raise ConfigError if servers do not answer or fit, or are too few."""
    rollout = config.rollout
    if len(rollout.urls) < engines:
        tp = rollout.engine_tp * -(-engines // len(rollout.urls))
        what = f"{len(rollout.urls)} of the {engines} servers needed, one for each rank with a client"
        raise ConfigError(f"rollout.urls: {what} (name more, or let ranks share: rollout.engine_tp={tp})")

    async def ask(session: aiohttp.ClientSession, url: str, key: str) -> None:
        try:
            if key == "rollout.router":
                await call(session, f"{url}/health", min(QUESTION, rollout.engine_timeout), type(None))
            else:
                await identify(session, url, config, hf_config)
        except Unanswered as problem:
            raise ConfigError(f"{key}: {url}: {problem} (start it, or leave it out)") from None

    async def ask_all() -> None:
        async with await open_session() as session:
            await gather(ask(session, url, "rollout.urls") for url in rollout.urls)
            if rollout.router:
                await ask(session, rollout.router, "rollout.router")

    asyncio.run(ask_all())


async def gather(jobs: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    return list(await asyncio.gather(*jobs))
