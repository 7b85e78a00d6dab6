"""Prompts of a teacher that is the actor with a demonstration (self-distillation)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megarl.config.schema import TeacherConfig
from megarl.config.schema.teacher import EXTRA
from megarl.data.chat_template import MARK
from megarl.data.prompts import Prompt

# Entries of the column `teacher_prompts` that are no tokens.
PADDING, SIBLING = -1, -2


def pad_teacher_prompts(prompts: Sequence[Sequence[int]]) -> Tensor:
    """Return the teacher's prompts, int32 [n, longest].

    SIBLING stands for the tokens of another response, PADDING for the end. A row of PADDING has no
    demonstration."""
    longest = max(map(len, prompts), default=0)
    padded = [[*prompt, *[PADDING] * (longest - len(prompt))] for prompt in prompts]
    return torch.tensor(padded, dtype=torch.int32).view(len(prompts), longest)


def make_teacher_prompt(prompt: Prompt, config: TeacherConfig, tokenizer: Any) -> list[int]:
    """Return the prompt's tokens with `config.template` as the last user message.

    [] without a demonstration, or where the chat template changes the question. The rest of the prompt,
    such as the system message, stays as it is."""
    demonstration = find_demonstration(prompt, config.demonstration)
    question = prompt.question.strip()
    if demonstration is None or not question or MARK in prompt.text:
        return []
    before, found, after = prompt.text.rpartition(question)
    if not found:
        return []
    message = config.template.replace("{demonstration}", MARK).replace("{question}", question)
    if demonstration != MARK:
        message = message.replace(MARK, demonstration)
    parts = [
        tokenizer(part, add_special_tokens=False)["input_ids"]
        for part in (before + message + after).split(MARK)
    ]
    leading = len(prompt.tokens) - len(tokenizer(prompt.text, add_special_tokens=False)["input_ids"])
    tokens = [*prompt.tokens[: max(0, leading)]]  # special tokens before a raw prompt
    for number, part in enumerate(parts):
        tokens += [*([SIBLING] if number else []), *part]
    return tokens


def find_demonstration(prompt: Prompt, name: str) -> str | None:
    """Return the text of `teacher.demonstration`, MARK for a sibling, or None."""
    if name == "sibling":
        return MARK
    value = prompt.extra.get(name.removeprefix(EXTRA)) if name.startswith(EXTRA) else prompt.answer
    return None if value is None or not str(value).strip() else str(value)
