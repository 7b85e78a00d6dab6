"""Turns of a conversation as tokens, by the tokenizer's chat template.

They are the end of the policy's turn, its text, and the tokens of the messages that follow it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megarl.config.errors import MegarlError, first_line
from megarl.config.files import read_json
from megarl.data.chat_template import render_chat

Message = Mapping[str, Any]

_MARK = "\ue000"  # the first character that no text has a use for
_MARKS = range(0xE000, 0x110000), range(0x3400, 0xD800)
_USER: Message = {"role": "user", "content": "?"}


def end_tokens(tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens that end a response of the policy, each once.

    They are the tokenizer's end-of-sequence token, and all that generation_config.json and config.json in
    its folder name: those of GLM and Llama name several."""
    return tuple(dict.fromkeys((tokenizer.eos_token_id, *_configured_ends(str(tokenizer.name_or_path)))))


@lru_cache(maxsize=8)
def _configured_ends(folder: str) -> tuple[int, ...]:
    ends: list[Any] = []
    for name in ("generation_config.json", "config.json"):
        if (path := Path(folder, name)).is_file():
            settings = read_json(path)
            for part in (settings, settings.get("text_config")):
                ids = part.get("eos_token_id") if isinstance(part, dict) else None
                ends += ids if isinstance(ids, list) else [ids]
    return tuple(token for token in ends if isinstance(token, int))


def policy_text(tokenizer: Any, tokens: Sequence[int]) -> str:
    """Return what the policy wrote as text, as `policy_texts`."""
    return policy_texts(tokenizer, [tokens])[0]


def policy_texts(tokenizer: Any, sequences: Sequence[Sequence[int]]) -> list[str]:
    """Return texts without padding and the tokens that end a turn.

    Other special tokens stay: `<answer>` and `<tool_call>` are special tokens of some models, and verifiers
    and parsers look for them."""
    hidden = _hidden(tokenizer)
    shown = [[token for token in tokens if token not in hidden] for tokens in sequences]
    return list(tokenizer.batch_decode(shown, skip_special_tokens=False))


@lru_cache(maxsize=8)
def _hidden(tokenizer: Any) -> frozenset[int]:
    """Return the tokens that `policy_texts` leaves out."""
    hidden = {*end_tokens(tokenizer), tokenizer.pad_token_id}
    if tokenizer.chat_template:
        with suppress(ValueError):  # a template that cannot show an assistant's turn ends none
            hidden.add(ChatTurns(tokenizer).end)
    return frozenset(hidden - {None})


class ChatTurns:
    """Makes the tokens that the policy is shown, by the tokenizer's chat template.

    tools      schemas of functions that the template presents to the policy, as `schemas` makes them
    variables  data.chat_template_kwargs"""

    def __init__(
        self,
        tokenizer: Any,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.tokenizer, self.tools, self.variables = tokenizer, list(tools), variables
        source = str(tokenizer.chat_template)
        # <tool_call> is no special token of Qwen's, but a control token all the same.
        self._control = {
            i: token.content
            for i, token in tokenizer.added_tokens_decoder.items()
            if token.special or (token.content in source and re.search(r"[^\w\s]", token.content))
        }
        names = sorted(filter(None, self._control.values()), key=len, reverse=True)
        self.named = re.compile("|".join(map(re.escape, names))) if names else None
        closing = self._encode(self._text_behind([], _MARK, generate=False))
        found = next((i for i, token in enumerate(closing) if token in self._control), None)
        self._closing = [] if found is None else closing[: found + 1]

    @cached_property
    def end(self) -> int | None:
        """Return the control token by which the template ends an assistant's turn. Where it writes none, as
        GLM's, that is the one by which a user's turn begins; None where that is none either."""
        if self._closing:
            return self._closing[-1]
        following = self._encode(self.text_behind([_USER]))[:1]
        return following[0] if following and following[0] in self._control else None

    def first(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the tokens before the policy's first turn. Special tokens in the contents are plain text.
        Raises ValueError with the template's words where it refuses the messages."""
        neutral, hidden, mark = self._neutral(messages)
        return tuple(self._tokens(self.render(neutral), hidden, mark, first=True))

    def after(self, messages: Sequence[Message], ended_with: Sequence[int]) -> tuple[int, ...]:
        """Return the tokens between the policy's turn and its next one, in which `messages` are shown.

        ended_with: the turn's tokens. Where the last one ends a turn, the template's own end is left out, and
        so is a marker of the next turn that the policy has written. Special tokens in the contents are plain
        text. Raises as `first`."""
        neutral, hidden, mark = self._neutral(messages)
        tokens = self._tokens(self._text_behind(neutral, mark), hidden, mark)
        last = list(ended_with[-1:])
        if last and last[0] in (*end_tokens(self.tokenizer), self.end):
            until = len(self._closing)
            if until and tokens[:until] == self._closing:
                tokens = tokens[until:]
            elif tokens[:1] == last:
                tokens = tokens[1:]
        return tuple(tokens)

    def render(self, messages: Sequence[Message], generate: bool = True) -> str:
        """Return the text of a conversation, with the beginning of the policy's next turn if `generate`."""
        try:
            return render_chat(
                self.tokenizer, messages, tools=self.tools, variables=self.variables, generate=generate
            )
        except MegarlError:
            raise
        except Exception as error:  # its own errors, and whatever Python raises in a template
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise ValueError(f"the chat template refuses {roles}: {first_line(error)}") from error

    def text_behind(self, messages: Sequence[Message]) -> str:
        """Return what the template writes behind an assistant's turn up to the next one."""
        return self._text_behind(messages, _MARK)

    def _text_behind(self, messages: Sequence[Message], mark: str, generate: bool = True) -> str:
        said = f"{mark}said{mark}"
        begun = [_USER, {"role": "assistant", "content": said}]
        _, found, behind = self.render([*begun, *messages], generate).partition(said)
        if not found:
            raise ValueError("the chat template leaves out what an assistant has written")
        return behind

    def _neutral(self, messages: Sequence[Message]) -> tuple[list[dict[str, Any]], list[str], str]:
        """Return the messages with marks in place of what in them looks like a control token, these texts,
        and the character by which marks are known."""
        used = set(json.dumps(messages, ensure_ascii=False, default=str))
        mark = next((character for character in map(chr, chain(*_MARKS)) if character not in used), None)
        if mark is None:
            raise ValueError("the messages hold every character that could stand for a control token")
        hidden: list[str] = []

        def hide(found: re.Match[str]) -> str:
            hidden.append(found[0])
            return f"{mark}{len(hidden) - 1}{mark}"

        def neutral(value: Any) -> Any:
            if isinstance(value, str):  # half of a surrogate pair is no text
                value = value.encode(errors="replace").decode()
                return self.named.sub(hide, value) if self.named else value
            if isinstance(value, Mapping):
                return {neutral(key): neutral(part) for key, part in value.items()}
            return [neutral(part) for part in value] if isinstance(value, (list, tuple)) else value

        # Roles are the template's to compare.
        made = [{k: v if k in ("role", "type") else neutral(v) for k, v in m.items()} for m in messages]
        return made, hidden, mark

    def _tokens(self, text: str, hidden: Sequence[str], mark: str, first: bool = False) -> list[int]:
        tokens: list[int] = []
        for i, part in enumerate(re.split(f"{mark}(\\d+){mark}", text)):
            if i % 2:
                tokens += self._plain(hidden[int(part)])
            elif part:
                tokens += self._encode(part, first and i == 0)
        return tokens

    def _encode(self, text: str, first: bool = False) -> list[int]:
        """Return the tokens of a text of the template's; of one that is not `first` as they are behind a
        control token: some tokenizers begin every text with a blank."""
        before = "" if first else self.tokenizer.eos_token or ""
        tokens = self.tokenizer(before + text, add_special_tokens=False).input_ids
        return list(tokens[1:] if before and tokens[:1] == [self.tokenizer.eos_token_id] else tokens)

    def _plain(self, text: str) -> list[int]:
        """Return the tokens of a control token's name, none of them a control token."""
        tokens = self.tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
        if len(text) > 1 and not self._control.keys().isdisjoint(tokens):  # none that is split by this option
            return [*self._plain(text[0]), *self._plain(text[1:])]
        return list(tokens)
