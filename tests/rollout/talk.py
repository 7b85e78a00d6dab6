"""A tokenizer with merges, chat templates, and a policy that says what a test has written for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megarl.data.prompts import Prompt
from megarl.rollout.episode import EpisodeTruncated, ToolError

SPECIALS = ("<pad>", "<eos>", "<bos>", "<|im_start|>", "<|im_end|>", "<|eot|>")
END = 4
MERGES = [("o", "n"), ("on", "e"), ("t", "w"), ("tw", "o"), ("Ġ", "one"), ("a", "n"), ("an", "s")]

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Qwen2.5's: tools in the system's turn, consecutive results of tools in one turn of the user's.
QWEN25 = """\
{%- if tools %}<|im_start|>system
{{ messages[0].content if messages[0].role == 'system' else 'You are helpful.' }}
# Tools
<tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
</tools>
Answer with <tool_call>
{"name": <name>, "arguments": <arguments>}
</tool_call><|im_end|>
{% elif messages[0].role != 'system' %}<|im_start|>system
You are helpful.<|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
<tool_response>
{{ m.content }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}
{%- elif not (tools and loop.first and m.role == 'system') %}<|im_start|>{{ m.role }}
{{ m.content }}
{%- for call in m.tool_calls or [] %}
<tool_call>
{{ call.function | tojson }}
</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
# As Llama 3's: contents trimmed, results of tools as JSON, a first token of its own.
LLAMA3 = """\
<bos>{%- if tools %}<|im_start|>system<|im_end|>

Respond with {"name": function name, "parameters": dictionary of arguments}.
{%- for tool in tools %}{{ tool | tojson }}{% endfor %}<|eot|>{% endif %}
{%- for m in messages %}<|im_start|>{{ 'ipython' if m.role == 'tool' else m.role }}<|im_end|>

{{ m.content | tojson if m.role == 'tool' else m.content | trim }}<|eot|>
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant<|im_end|>

{% endif %}"""


def merging_tokenizer(template: str | None = CHATML, end: str = "<|im_end|>") -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer with a few merges: most texts have several spellings in tokens."""
    encode = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pieces = [*SPECIALS, *sorted(encode.alphabet()), *("".join(pair) for pair in MERGES)]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, MERGES))
    tokenizer.pre_tokenizer, tokenizer.decoder = encode, decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token=end, clean_up_tokenization_spaces=False
    )
    fast.chat_template = template
    return fast


@dataclass(frozen=True)
class Spoken:
    text: str
    tokens: tuple[int, ...]
    finish: str = "stop"


@dataclass
class ScriptedPolicy:
    """Says the turns of `script`, each tokens or a text that is ended; keeps what it was shown."""

    prompt: Prompt
    tokenizer: Any
    script: Sequence[str | Sequence[int]]
    tools: dict[str, Callable[..., Any]] = field(default_factory=dict)
    seed: int = 0
    waiting: str = ""
    said: list[tuple[int, ...]] = field(default_factory=list)
    shown: list[tuple[int, ...]] = field(default_factory=list)  # before each turn
    asked: list[dict[str, Any]] = field(default_factory=list)
    _new: tuple[int, ...] = ()

    @property
    def tokens(self) -> tuple[int, ...]:
        parts = [token for pair in zip(self.shown, self.said, strict=True) for part in pair for token in part]
        return (*self.prompt.tokens, *parts, *self._new)

    async def generate(self, stop: Sequence[str] = (), max_tokens: int | None = None) -> Spoken:
        if len(self.said) == len(self.script):
            raise EpisodeTruncated
        turn = self.script[len(self.said)]
        tokens = tuple(turn) if not isinstance(turn, str) else (*encode(self.tokenizer, turn), END)
        self.shown.append(self._new)
        self.said.append(tokens)
        self.asked.append({"stop": tuple(stop), "max_tokens": max_tokens})
        self._new = ()
        return Spoken(self.tokenizer.decode(tokens, skip_special_tokens=True), tokens)

    def observe(self, shown: str | Sequence[int]) -> None:
        if isinstance(shown, str):
            shown = self.tokenizer(shown, add_special_tokens=False, split_special_tokens=True).input_ids
        self._new = (*self._new, *shown)

    async def call(self, tool: str, /, *arguments: Any, **keywords: Any) -> str:
        try:
            return str(self.tools[tool](*arguments, **keywords))
        except Exception as error:
            raise ToolError(f"{type(error).__name__}: {error}") from error


def add(a: int) -> int:
    """Add one.

    Args:
        a: to this
    """
    return a + 1


def encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def prompt_of(tokens: Sequence[int], question: str = "") -> Prompt:
    return Prompt(
        uid=7, text=question, tokens=tuple(tokens), answer="3", question=question, extra={"level": 2}
    )
