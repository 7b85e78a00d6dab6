"""Checks of tokenizers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from megarl.config.errors import CheckpointError, ConfigError, MegarlError, first_line
from megarl.config.files import read_json
from megarl.config.schema import Config
from megarl.data.chat_template import render_chat, require_template
from megarl.data.limits import memory_limit
from megarl.weights.hf import ModelFolder

# JSON files of a tokenizer, and one for engines.
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    "generation_config.json",
)


class ModelDescription(NamedTuple):
    path: Path
    config: dict[str, Any]


@contextmanager
def prefix_errors(key: str) -> Iterator[None]:
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{key}: {error}") from None


def check_tokenizer(config: Config, folder: ModelFolder | ModelDescription, key: str = "model.path") -> Any:
    """Return the tokenizer. Raises CheckpointError, with the file at fault if known."""
    path = folder.path
    if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise CheckpointError(
            f"{key}: {path}: no tokenizer.json (the model's folder must hold its tokenizer)"
        )
    for name in TOKENIZER_FILES:
        with prefix_errors(key):
            auto_map = (path / name).is_file() and read_json(path / name).get("auto_map")
        if auto_map:
            what = "auto_map: asks for code that lies in the folder, which is never run (remove the key)"
            raise CheckpointError(f"{key}: {path / name}: {what}")
    tokenizer, problem = _load(path)
    if problem:
        raise CheckpointError(f"{key}: {_blame(path, problem)}")
    if not isinstance(tokenizer.eos_token_id, int):
        eos_problem = "its tokenizer has no end-of-sequence token (set eos_token in tokenizer_config.json)"
        raise CheckpointError(f"{key}: {path}: {eos_problem}")
    if config.data.template == "chat":
        _check_template(config, tokenizer)
    check_vocabulary(folder, key, tokenizer)
    return tokenizer


def _load(path: Path) -> tuple[Any, str]:
    from transformers import AutoTokenizer

    return _try(lambda: AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False))


def _try(load: Callable[[], Any]) -> tuple[Any, str]:
    try:
        return load(), ""
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001 (tokenizers raises bare Exceptions, and panics)
        return None, first_line(error)


def _blame(path: Path, problem: str) -> str:
    from tokenizers import Tokenizer

    file, template = path / "tokenizer.json", path / "chat_template.jinja"
    file_problem = _try(lambda: Tokenizer.from_file(str(file)))[1] if file.is_file() else ""
    template_problem = _try(lambda: template.read_text(encoding="utf-8"))[1] if template.is_file() else ""
    culprit = file if file_problem else template if template_problem else path / "tokenizer_config.json"
    culprit = culprit if culprit.is_file() else path
    return f"{culprit}: its tokenizer cannot be loaded: {file_problem or problem}"


def _check_template(config: Config, tokenizer: Any) -> None:
    require_template(tokenizer)
    try:
        messages = [{"role": "user", "content": "1 + 1 = ?"}]
        with memory_limit():
            render_chat(tokenizer, messages, variables=config.data.chat_template_kwargs)
    except MegarlError:
        raise
    except Exception as error:  # noqa: BLE001 (errors of jinja, and of the template's expressions)
        problem = f"the tokenizer's chat template fails: {type(error).__name__}: {error}"
        raise ConfigError(f"data.template: {problem} (fix it, or set data.template=raw)") from None


def check_vocabulary(folder: ModelFolder | ModelDescription, key: str, tokenizer: Any) -> None:
    vocabulary = folder.config["vocab_size"]
    highest = max(tokenizer.get_vocab().values(), default=0)
    if highest >= vocabulary >= len(tokenizer):
        where = f"{key}: {folder.path}/tokenizer.json"
        raise CheckpointError(
            f"{where}: has a token of id {highest}, but config.json's vocab_size is {vocabulary}"
        )
    if len(tokenizer) > vocabulary:
        tokens = f"the {len(tokenizer)} tokens of the actor's tokenizer"
        raise CheckpointError(
            f"{key}: {folder.path}: its vocabulary of {vocabulary} does not hold {tokens} "
            "(they belong to different models)"
        )


def check_same_tokenizer(path: Path, key: str, tokenizer: Any) -> None:
    """Check that a model has (at least) the actor's tokens, with equal ids and splits."""
    other_tokenizer, problem = _load(path)
    if problem:
        raise CheckpointError(f"{key}: {path}: its tokenizer cannot be loaded: {problem}")
    actor_vocab, other_vocab, differences = tokenizer.get_vocab(), other_tokenizer.get_vocab(), []
    for token, token_id in sorted(actor_vocab.items(), key=itemgetter(1)):
        if other_vocab.get(token) != token_id:
            other_entry = f"number {other_vocab[token]}" if token in other_vocab else "missing"
            differences.append(f"{token!r}, token {token_id} of the actor, is {other_entry} there")
            break
    else:
        backends = [json.loads(side.backend_tokenizer.to_str()) for side in (tokenizer, other_tokenizer)]
        special_tokens = [
            {t["content"] for t in side["added_tokens"] if t["special"]} & actor_vocab.keys()
            for side in backends
        ]
        parts = {
            "merges differ": [side["model"].get("merges") for side in backends],
            "special tokens differ": special_tokens,
            "normalisation differs": [side["normalizer"] for side in backends],
            "pre-tokenisation differs": [side["pre_tokenizer"] for side in backends],
        }
        differences += [
            f"their {difference}"
            for difference, (actor_value, other_value) in parts.items()
            if actor_value != other_value
        ]
    if differences:
        remedy = "it is given the actor's tokens: choose one that was trained from the same family"
        raise CheckpointError(f"{key}: {path}: its tokenizer is not the actor's: {differences[0]} ({remedy})")
