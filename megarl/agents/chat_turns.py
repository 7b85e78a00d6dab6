"""Render messages for the policy with the tokenizer's chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from megarl.data.chat_template import MARK, ChatTemplate, Message
from megarl.data.response_text import end_tokens

_MARKS = range(ord(MARK), 0x110000), range(0x3400, 0xD800)


class ChatTurns(ChatTemplate):
    def first(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the tokens before the first turn. Raises ValueError if the template fails.

        Special tokens in contents become plain text."""
        neutral_messages, control_texts, mark = self._neutral(messages)
        return tuple(self._tokens(self.render(neutral_messages), control_texts, mark, first=True))

    def after(self, messages: Sequence[Message], ended_with: Sequence[int]) -> tuple[int, ...]:
        """Return the tokens that show `messages` after a turn, as `first` does.

        ended_with: that turn's tokens, whose end-of-turn or next start-of-turn token is not repeated."""
        neutral_messages, control_texts, mark = self._neutral(messages)
        tokens = self._tokens(self.text_behind(neutral_messages, mark), control_texts, mark)
        last_token = list(ended_with[-1:])
        if last_token and last_token[0] in (*end_tokens(self.tokenizer), self.end):
            closing_length = len(self.closing)
            if closing_length and tokens[:closing_length] == self.closing:
                tokens = tokens[closing_length:]
            elif tokens[:1] == last_token:
                tokens = tokens[1:]
        return tuple(tokens)

    def _neutral(self, messages: Sequence[Message]) -> tuple[list[dict[str, Any]], list[str], str]:
        """Replace texts of control tokens; return messages, texts and delimiter."""
        used_characters = set(json.dumps(messages, ensure_ascii=False, default=str))
        mark = next((mark for mark in map(chr, chain(*_MARKS)) if mark not in used_characters), None)
        if mark is None:
            raise ValueError("the messages hold every character that could stand for a control token")
        control_texts: list[str] = []

        def hide(found: re.Match[str]) -> str:
            control_texts.append(found[0])
            return f"{mark}{len(control_texts) - 1}{mark}"

        def neutralise(value: Any) -> Any:
            if isinstance(value, str):  # an unpaired surrogate cannot be encoded
                value = value.encode(errors="replace").decode()
                return self.named.sub(hide, value) if self.named else value
            if isinstance(value, Mapping):
                return {neutralise(key): neutralise(part) for key, part in value.items()}
            return [neutralise(part) for part in value] if isinstance(value, (list, tuple)) else value

        neutral_messages = [
            {k: v if k in ("role", "type") else neutralise(v) for k, v in m.items()} for m in messages
        ]
        return neutral_messages, control_texts, mark

    def _tokens(self, text: str, hidden: Sequence[str], mark: str, first: bool = False) -> list[int]:
        tokens: list[int] = []
        for i, part in enumerate(re.split(f"{mark}(\\d+){mark}", text)):
            if i % 2:
                tokens += self._plain(hidden[int(part)])
            elif part:
                tokens += self.encode(part, first and i == 0)
        return tokens

    def _plain(self, text: str) -> list[int]:
        tokens = self.tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
        if len(text) > 1 and not self.control.keys().isdisjoint(tokens):  # the option did not split it
            return [*self._plain(text[0]), *self._plain(text[1:])]
        return list(tokens)
