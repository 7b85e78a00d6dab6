"""Render chat templates. A template is a program that comes with the model's folder, so it has limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from jinja2 import Environment, TemplateSyntaxError

from megarl.config.errors import ConfigError
from megarl.data.limits import time_limit

SECONDS = 10.0  # that one rendering may take


def render_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    variables: Mapping[str, Any] = MappingProxyType({}),
    generate: bool = True,
) -> str:
    """Return messages as the tokenizer's chat template writes them.

    Args:
        tools: schemas of functions that the template presents to the model
        variables: data.chat_template_kwargs
        generate: whether the model writes next. It continues a last message of the assistant's, else it
            begins a turn.

    Raises ConfigError for a template that does not end, and whatever else the template raises."""
    template = tokenizer.chat_template
    name = f"data.template: the chat template of {tokenizer.name_or_path or 'the tokenizer'}"
    for source in template.values() if isinstance(template, dict) else [template]:
        if _has_power(source):
            # A power of powers cannot be interrupted: it is one operation of Python's.
            raise ConfigError(f"{name} computes powers (`**`), which may never end (take it out)")
    resumes = generate and bool(messages) and messages[-1].get("role") == "assistant"
    with time_limit(SECONDS, name):
        text = tokenizer.apply_chat_template(
            list(messages),
            tools=list(tools) or None,
            add_generation_prompt=generate and not resumes,
            continue_final_message=resumes,
            tokenize=False,
            **variables,
        )
    return str(text)


@lru_cache(maxsize=8)
def _has_power(source: str | None) -> bool:
    try:
        return ("operator", "**") in {token[1:] for token in Environment().lex(source or "")}
    except TemplateSyntaxError:  # rendering raises it too
        return False
