"""The demo's task: sums of 3 to 7 numbers, worked out in a chain of additions by a teacher who makes mistakes.

Makes everything that `megarl demo` starts from, from a seed alone: a Qwen3 model of 101,000 parameters with its 40-token
tokenizer, text for the supervised warm start, problems for training and held-out problems for evaluation.
"""

from __future__ import annotations

import json
import random
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from megarl.config.errors import DataError

Problem = tuple[int, ...]
Style = Literal["bare", "chain", "wait", "truncated"]

ANSWER = re.compile(r"Answer:\s*(-?\d+)\s*$")
MAX_NEW_TOKENS = 80
"""Length limit of the demo's responses. Some of the teacher's texts are longer, so that there is something to unlearn."""
MAX_POSITIONS = 256

MIN_TERMS, MAX_TERMS, MAX_TERM = 3, 7, 5
BARE, WAIT = 0.25, 0.15
ERROR = 0.12
"""Share of wrong additions. A model that copies the teacher well is then right about a third of the time: far to go, and not hopeless."""
AGAIN = 0.7
MAX_CHAINS = 4
"""At most this many chains in one response: prompt and response then fit into the model's 256 positions."""

SFT_ROWS = 450 * 64
TRAIN_ROWS = 8192
EVAL_ROWS = 512

EOS, PAD = "<eos>", "<pad>"
ALPHABET = "0123456789+=?\n :AWaeinrstw"
WORDS = ("Answer: ", "Wait", "=?\n")


def draw_problem(rng: random.Random) -> Problem:
    """3 to 7 numbers in 1..5."""
    return tuple(rng.randint(1, MAX_TERM) for _ in range(rng.randint(MIN_TERMS, MAX_TERMS)))


def prompt(problem: Problem) -> str:
    """The problem as the model reads it, e.g. `5+2+4+3=?` and a newline."""
    return "+".join(map(str, problem)) + "=?\n"


def held_out(text: str) -> bool:
    """Whether this prompt belongs to evaluation: one in ten. A checksum, since a plain hash like sum(x * 31**i) % 10 is the digit sum."""
    return zlib.crc32(text.encode()) % 10 == 0


def draw_problems(rng: random.Random, *, evaluation: bool) -> Iterator[Problem]:
    """Endless problems, from the held-out tenth or from the rest."""
    while True:
        problem = draw_problem(rng)
        if held_out(prompt(problem)) == evaluation:
            yield problem


def chain(problem: Problem, rng: random.Random, error: float = ERROR) -> tuple[str, int]:
    """One addition a line, and the sum arrived at. Each addition is off by up to 3 with probability `error`; the mistake carries on.

    Were it always off by one, mistakes would cancel and a guess without work would be right as often as a chain: the policy would
    learn to guess."""
    total, lines = problem[0], []
    for term in problem[1:]:
        result = total + term
        if rng.random() < error:
            result = rng.choice([wrong for off in (1, 2, 3) for wrong in (result - off, result + off) if wrong > 0])
        lines.append(f"{total}+{term}={result}\n")
        total = result
    return "".join(lines), total


def teach(problem: Problem, rng: random.Random) -> str:
    """A response of the teacher: 25 % a bare answer, 60 % one chain, 15 % a chain, `Wait` and the chain again, maybe more than once."""
    kind = rng.random()
    work, total = chain(problem, rng)
    if kind < BARE:
        work = ""
    elif kind < BARE + WAIT:
        for done in range(1, MAX_CHAINS):
            if done > 1 and rng.random() >= AGAIN:
                break
            again, total = chain(problem, rng)
            work += "Wait\n" + again
    return f"{work}Answer: {total}"


def style(response: str, finished: bool = True) -> Style:
    """The kind of a response's text, for showing how the shares move: without an answer at its end, or not finished (no
    end-of-sequence token), it is truncated; else it has second thoughts (wait), nothing but the answer (bare), or a chain."""
    if not finished or not ANSWER.search(response):
        return "truncated"
    if "Wait" in response:
        return "wait"
    return "bare" if response.startswith("Answer:") else "chain"


def style_shares(responses: Iterable[tuple[str, bool]]) -> dict[Style, float]:
    """The share of each style among responses given as (text, finished)."""
    found = [style(text, finished) for text, finished in responses]
    names: tuple[Style, ...] = ("bare", "chain", "wait", "truncated")
    return {name: found.count(name) / max(len(found), 1) for name in names}


def build_tokenizer(alphabet: str = ALPHABET, words: Sequence[str] = WORDS) -> PreTrainedTokenizerFast:
    """BPE, of 40 tokens for this task: each character of the alphabet, and `Answer: `, `Wait` and `=?` with its newline built up by merges.

    Digits never merge, so that the model sees numbers digit by digit. Text with other characters loses them.
    """
    vocabulary = {PAD: 0, EOS: 1} | {character: i + 2 for i, character in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    for word in words:
        for end in range(1, len(word)):
            merges.append((word[:end], word[end]))
            vocabulary[word[: end + 1]] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.decoder = decoders.Fuse()  # without it the tokens are joined by spaces
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=EOS, pad_token=PAD, model_max_length=MAX_POSITIONS, clean_up_tokenization_spaces=False
    )


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """An untrained Qwen3 of 2 layers, drawn from the seed; torch's own generator is left as it was."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=MAX_POSITIONS,
        initializer_range=0.06,  # Qwen's 0.02 is for wide models: at width 64 it learns much later
        tie_word_embeddings=True,
        architectures=["Qwen3ForCausalLM"],
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)


def sft_rows(seed: int) -> Iterator[dict[str, str]]:
    """The teacher's text for the warm start, no prompt of it held out. `response` has no end-of-sequence token."""
    rng = random.Random(f"{seed}/sft")
    for problem, _ in zip(draw_problems(rng, evaluation=False), range(SFT_ROWS), strict=False):
        yield {"prompt": prompt(problem), "response": teach(problem, rng), "answer": str(sum(problem))}


def problem_rows(rng: random.Random, count: int, *, evaluation: bool) -> Iterator[dict[str, str]]:
    """`count` different problems with their right answers."""
    seen: set[Problem] = set()
    for problem in draw_problems(rng, evaluation=evaluation):
        if problem not in seen:
            seen.add(problem)
            yield {"prompt": prompt(problem), "answer": str(sum(problem))}
        if len(seen) == count:
            return


def write_jsonl(path: Path, rows: Iterable[dict[str, str]]) -> None:
    """One JSON object a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_model(folder: Path, seed: int, tokenizer: PreTrainedTokenizerFast) -> None:
    """The Hugging Face folder of the untrained model and its tokenizer."""
    model = build_model(tokenizer, seed)
    tokenizer.save_pretrained(folder)
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    # Not model.save_pretrained: for 0.4 MB it draws a progress bar over the demo's own output.
    weights = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}  # tied to the embedding
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def write_demo(folder: Path, seed: int) -> None:
    """Writes what the demo starts from into `folder`, the same bytes for the same seed.

    model/       Hugging Face folder: untrained model and tokenizer
    sft.jsonl    28,800 rows prompt, response, answer: 450 steps of 64
    train.jsonl  8,192 different problems (prompt, answer), none held out
    eval.jsonl   512 held-out problems, the same for every seed

    Raises DataError where the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_jsonl(folder / "sft.jsonl", sft_rows(seed))
        write_jsonl(folder / "train.jsonl", problem_rows(random.Random(f"{seed}/train"), TRAIN_ROWS, evaluation=False))
        write_jsonl(folder / "eval.jsonl", problem_rows(random.Random("eval"), EVAL_ROWS, evaluation=True))
        write_model(folder / "model", seed, build_tokenizer())
    except OSError as error:
        raise DataError(f"{folder}: cannot be written: {error.strerror or error} (choose another folder)") from error
