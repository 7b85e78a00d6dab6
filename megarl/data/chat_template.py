"""Render chat templates, which are untrusted programs."""

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

MARK = "\ue000"  # private-use character, in no text
_USER: Message = {"role": "user", "content": "?"}
SECONDS = 10.0  # per rendering


def require_template(
    tokenizer: Any, remedy: str = "set data.template=raw, or add one to the model's folder"
) -> None:
    """Raise ConfigError if the tokenizer has no chat template."""
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError(f"data.template: the tokenizer has no chat template ({remedy})")


def render_chat(
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    variables: Mapping[str, Any] = MappingProxyType({}),
    generate: bool = True,
) -> str:
    """Apply the tokenizer's chat template.

    Args:
        tools: JSON schemas of functions
        variables: data.chat_template_kwargs
        generate: end with the start of the assistant's turn, or leave a last assistant message open

    Raises the template's errors, and ConfigError if it may not end."""
    template = tokenizer.chat_template
    description = f"data.template: the chat template of {tokenizer.name_or_path or 'the tokenizer'}"
    for source in template.values() if isinstance(template, dict) else [template]:
        if _has_power(source):
            # time_limit cannot interrupt a single operation.
            raise ConfigError(f"{description} computes powers (`**`), which may never end (take it out)")
    resumes = generate and bool(messages) and messages[-1].get("role") == "assistant"
    with time_limit(SECONDS, description):
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
    except TemplateSyntaxError:  # rendering reports it
        return False


class ChatTemplate:
    """A tokenizer's chat template and its control tokens.

    control: token -> text; named: pattern of these texts; closing: tokens that end an assistant's turn"""

    def __init__(
        self,
        tokenizer: Any,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.tokenizer, self.tools, self.variables = tokenizer, list(tools), variables
        source = str(tokenizer.chat_template)
        # Qwen's <tool_call> is a control token, but not `special`.
        self.control = {
            i: token.content
            for i, token in tokenizer.added_tokens_decoder.items()
            if token.special or (token.content in source and re.search(r"[^\w\s]", token.content))
        }
        control_texts = sorted(filter(None, self.control.values()), key=len, reverse=True)
        self.named = re.compile("|".join(map(re.escape, control_texts))) if control_texts else None
        tokens_behind = self.encode(self.text_behind([], generate=False))
        end_index = next((i for i, token in enumerate(tokens_behind) if token in self.control), None)
        self.closing = [] if end_index is None else tokens_behind[: end_index + 1]

    @cached_property
    def end(self) -> int | None:
        """The token that ends an assistant's turn, in GLM's template the start of a user's turn; or None."""
        if self.closing:
            return self.closing[-1]
        next_tokens = self.encode(self.text_behind([_USER]))[:1]
        return next_tokens[0] if next_tokens and next_tokens[0] in self.control else None

    def render(self, messages: Sequence[Message], generate: bool = True) -> str:
        """Render messages. Raises ValueError if the template refuses them."""
        try:
            return render_chat(
                self.tokenizer, messages, tools=self.tools, variables=self.variables, generate=generate
            )
        except MegarlError:
            raise
        except Exception as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise ValueError(f"the chat template refuses {roles}: {first_line(error)}") from error

    def text_behind(self, messages: Sequence[Message], mark: str = MARK, generate: bool = True) -> str:
        """Return the text after an assistant's message that precedes `messages`.

        Args:
            mark: a character absent from the messages
            generate: include the start of the assistant's next turn

        Raises ValueError if the template omits the message."""
        content = f"{mark}said{mark}"
        turns = [_USER, {"role": "assistant", "content": content}, *messages]
        _, separator, following_text = self.render(turns, generate).partition(content)
        if not separator:
            raise ValueError("the chat template leaves out what an assistant has written")
        return following_text

    def encode(self, text: str, first: bool = False) -> list[int]:
        """Tokenize part of a rendered text. Only the `first` gets the space that some tokenizers prepend."""
        prefix = "" if first else self.tokenizer.eos_token or ""
        tokens = self.tokenizer(prefix + text, add_special_tokens=False).input_ids
        return list(tokens[1:] if prefix and tokens[:1] == [self.tokenizer.eos_token_id] else tokens)
