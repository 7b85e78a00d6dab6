"""Texts and end tokens of responses."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megarl.config.errors import ConfigError
from megarl.config.files import read_json
from megarl.data.chat_template import ChatTemplate
from megarl.data.limits import memory_limit


def end_tokens(tokenizer: Any) -> tuple[int, ...]:
    """Return the end-of-sequence tokens of the tokenizer, generation_config.json and config.json."""
    return tuple(dict.fromkeys((tokenizer.eos_token_id, *_configured_ends(str(tokenizer.name_or_path)))))


@lru_cache(maxsize=8)
def _configured_ends(folder: str) -> tuple[int, ...]:
    ends: list[Any] = []
    for path in (Path(folder, name) for name in ("generation_config.json", "config.json")):
        settings = read_json(path) if path.is_file() else {}
        for part in (settings, settings.get("text_config")):
            ids = part.get("eos_token_id") if isinstance(part, dict) else None
            ends += ids if isinstance(ids, list) else [ids]
    return tuple(token for token in ends if isinstance(token, int))


def policy_text(tokenizer: Any, tokens: Sequence[int]) -> str:
    return policy_texts(tokenizer, [tokens])[0]


def policy_texts(tokenizer: Any, sequences: Sequence[Sequence[int]]) -> list[str]:
    """Decode responses without padding and end tokens.

    Others stay, for verifiers and parsers: `<answer>`, `<tool_call>`."""
    hidden_tokens = _hidden(tokenizer)
    visible_tokens = [[token for token in tokens if token not in hidden_tokens] for tokens in sequences]
    return list(tokenizer.batch_decode(visible_tokens, skip_special_tokens=False))


@lru_cache(maxsize=8)
def _hidden(tokenizer: Any) -> frozenset[int]:
    hidden_tokens = {*end_tokens(tokenizer), tokenizer.pad_token_id}
    if tokenizer.chat_template:
        with suppress(ValueError):  # the template cannot render an assistant's turn
            hidden_tokens.add(ChatTemplate(tokenizer).end)
    return frozenset(hidden_tokens - {None})


def check_end_of_turn(
    tokenizer: Any, stop: Collection[str], variables: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """Raise ConfigError if the chat template's end-of-turn token does not end a response.

    stop: rollout.stop; variables: data.chat_template_kwargs"""
    with suppress(ValueError), memory_limit():
        check_end(ChatTemplate(tokenizer, variables=variables), stop)


def check_end(chat: ChatTemplate, stop: Collection[str]) -> None:
    if chat.end is None or chat.end in end_tokens(chat.tokenizer):
        return
    end_text = chat.tokenizer.decode([chat.end])
    if end_text not in stop:
        what = f"the chat template ends a turn with {end_text}, which does not end a response"
        remedy = "make it the tokenizer's eos_token, or add it to rollout.stop"
        raise ConfigError(f"data.template: {what} ({remedy})")
