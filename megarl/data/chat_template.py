"""Render chat templates, and find the token that ends a turn.

A template is a program that comes with the model's folder, so it has limits."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Any

from jinja2 import Environment, TemplateSyntaxError

from megarl.config.errors import ConfigError, MegarlError, first_line
from megarl.data.limits import time_limit

Message = Mapping[str, Any]

MARK = "\ue000"  # the first character that no text has a use for
_USER: Message = {"role": "user", "content": "?"}
SECONDS = 10.0  # that one rendering may take


def render_chat(
    tokenizer: Any,
    messages: Sequence[Message],
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


class ChatTemplate:
    """A tokenizer's chat template and the control tokens that it writes.

    Args:
        tools: schemas of functions that the template presents to the model
        variables: data.chat_template_kwargs

    Attributes:
        control: names of control tokens, by token
        named: pattern of these names; None if there is no control token
        closing: tokens that end an assistant's turn; empty if the template writes none
    """

    def __init__(
        self,
        tokenizer: Any,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.tokenizer, self.tools, self.variables = tokenizer, list(tools), variables
        source = str(tokenizer.chat_template)
        # <tool_call> is no special token of Qwen's, but a control token all the same.
        self.control = {
            i: token.content
            for i, token in tokenizer.added_tokens_decoder.items()
            if token.special or (token.content in source and re.search(r"[^\w\s]", token.content))
        }
        names = sorted(filter(None, self.control.values()), key=len, reverse=True)
        self.named = re.compile("|".join(map(re.escape, names))) if names else None
        closing = self.encode(self.text_behind([], generate=False))
        found = next((i for i, token in enumerate(closing) if token in self.control), None)
        self.closing = [] if found is None else closing[: found + 1]

    @cached_property
    def end(self) -> int | None:
        """Return the control token that ends an assistant's turn; None if the template has none.

        GLM's template writes no end. There it is the token that begins a user's turn."""
        if self.closing:
            return self.closing[-1]
        following = self.encode(self.text_behind([_USER]))[:1]
        return following[0] if following and following[0] in self.control else None

    def render(self, messages: Sequence[Message], generate: bool = True) -> str:
        """Return the text of a conversation; with `generate`, also the beginning of the policy's next turn.

        Raises ValueError with the template's words if it refuses the messages."""
        try:
            return render_chat(
                self.tokenizer, messages, tools=self.tools, variables=self.variables, generate=generate
            )
        except MegarlError:
            raise
        except Exception as error:  # a template may raise any error
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise ValueError(f"the chat template refuses {roles}: {first_line(error)}") from error

    def text_behind(self, messages: Sequence[Message], mark: str = MARK, generate: bool = True) -> str:
        """Return the template's text after an assistant's turn in which `messages` follow.

        Args:
            mark: a character that the messages do not contain
            generate: whether the text includes the beginning of the assistant's next turn

        Raises ValueError if the template omits the assistant's words."""
        said = f"{mark}said{mark}"
        begun = [_USER, {"role": "assistant", "content": said}]
        _, found, behind = self.render([*begun, *messages], generate).partition(said)
        if not found:
            raise ValueError("the chat template leaves out what an assistant has written")
        return behind

    def encode(self, text: str, first: bool = False) -> list[int]:
        """Tokenize a text that the template writes.

        Some tokenizers put a blank before every text. Unless the text is `first`, it is tokenized as it
        stands after a control token, where they add none."""
        before = "" if first else self.tokenizer.eos_token or ""
        tokens = self.tokenizer(before + text, add_special_tokens=False).input_ids
        return list(tokens[1:] if before and tokens[:1] == [self.tokenizer.eos_token_id] else tokens)
