"""A tokenizer with merges, chat templates, and a policy with scripted turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megarl.agents.episode import Policy
from megarl.agents.tools import Answer, Result
from megarl.config.schema import TurnsConfig
from megarl.data.prompts import Prompt
from megarl.data.sample import TokenData
from megarl.rewards.verdict import Verdict, as_verdict
from megarl.rollout.sampling import SamplingParams

SPECIALS = ("<pad>", "<eos>", "<bos>", "<|im_start|>", "<|im_end|>", "<|eot|>")
END = 4
MERGES = [("o", "n"), ("on", "e"), ("t", "w"), ("tw", "o"), ("Ġ", "one"), ("a", "n"), ("an", "s")]

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Like Qwen2.5's: tools in the system turn, consecutive tool results in one user turn.
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
# Like Llama 3's: trimmed contents, tool results as JSON, a first token <bos>.
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


class ScriptedClient:
    """An engine that returns the turns of `script` (tokens, or a text to be ended) for any request.

    asked  context, sampling parameters and token limit of each request"""

    def __init__(self, tokenizer: Any, script: Sequence[str | Sequence[int]]) -> None:
        self.tokenizer, self.script = tokenizer, script
        self.said: list[tuple[int, ...]] = []
        self.asked: list[tuple[tuple[int, ...], SamplingParams, int | None]] = []

    async def generate(
        self, tokens: tuple[int, ...], seed: int, params: SamplingParams, prefix: Any, max_tokens: int
    ) -> TokenData:
        turn = self.script[len(self.said)]
        made = [*encode(self.tokenizer, turn), self.tokenizer.eos_token_id] if isinstance(turn, str) else turn
        self.asked.append((tokens, params, max_tokens))
        self.said.append(tuple(made))
        return TokenData(list(made), [-1.0] * len(made), "stop", [3] * len(made))


class Functions:
    """Tools by name, and an environment by class, that run in this process."""

    def __init__(self, functions: Mapping[str, Callable[..., Any]], environment: Any = None) -> None:
        self.functions, self.environment = functions, environment

    async def call(self, name: str, arguments: Any, keywords: Any, seed: int) -> Result[str]:
        try:
            return Result(str(self.functions[name](*arguments, **keywords)))
        except Exception as error:  # noqa: BLE001 (a tool's)
            return Result(None, f"{type(error).__name__}: {error}")

    async def step(self, key: int, row: Any, seed: int, said: Sequence[str], state: Any) -> Result[Answer]:
        made = self.environment()
        step = Answer(made.reset(row, seed), 0.0, False)
        for text in said:
            step = Answer(*made.step(text))
        return Result(step)

    async def verdict(self, key: int, row: Any, seed: int, said: Sequence[str], state: Any) -> Verdict:
        made = self.environment()
        made.reset(row, seed)
        for text in said:
            made.step(text)
        return as_verdict(made.verdict(), "it")


class ScriptedPolicy(Policy):
    """A policy whose turns are those of `script` and no others."""

    client: Any

    def __init__(
        self,
        prompt: Prompt,
        tokenizer: Any,
        script: Sequence[str | Sequence[int]],
        tools: Mapping[str, Callable[..., Any]] | None = None,
        earlier: TokenData | None = None,
    ) -> None:
        limits = TurnsConfig(max=max(1, len(script)), max_tokens=10_000)
        client: Any = ScriptedClient(tokenizer, script)
        pool: Any = Functions(tools or {})
        super().__init__(prompt, client, 5, SamplingParams(10_000), earlier, tokenizer, limits, pool)

    @property
    def said(self) -> list[tuple[int, ...]]:
        return self.client.said

    @property
    def shown(self) -> list[tuple[int, ...]]:
        """The tokens observed before each turn, without the prompt."""
        found, behind = [], len(self.prompt.tokens)
        for (tokens, *_), said in zip(self.client.asked, self.said, strict=True):
            found.append(tokens[behind:])
            behind = len(tokens) + len(said)
        return found


def trained_on(policy: Policy) -> list[tuple[int, ...]]:
    """Return the turns of a finished response that are trained on."""
    written = policy.result()
    sampled = [True] * written.num_tokens if written.is_sampled is None else written.is_sampled.tolist()
    runs = groupby(zip(written.tokens, sampled, strict=True), key=lambda pair: pair[1])
    return [tuple(token for token, _ in run) for mine, run in runs if mine]


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
