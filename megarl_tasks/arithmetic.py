"""The demo's task: sums of 3 to 7 numbers, solved by an error-prone teacher."""

from __future__ import annotations

import json
import random
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.core_model_loading import revert_weight_conversion

from megarl.config.errors import DataError

Style = Literal["bare", "chain", "wait", "truncated"]
STYLES: tuple[Style, ...] = ("bare", "chain", "wait", "truncated")

ANSWER = re.compile(r"Answer:\s*(-?\d+)\s*$")
MAX_NEW_TOKENS = 80  # some teacher responses are longer
MAX_POSITIONS = 256

MIN_TERMS, MAX_TERMS, MAX_TERM = 3, 7, 5
BARE, WAIT = 0.25, 0.15  # shares of bare answers, and of chains repeated after "Wait"
# Share of wrong additions: a copy of the teacher is correct about a third of the time.
ERROR = 0.12
AGAIN = 0.7
MAX_CHAINS = 4  # prompt and response must fit MAX_POSITIONS

SFT_ROWS = 450 * 64
TRAIN_ROWS = 8192
EVAL_ROWS = 512

EOS, PAD = "<eos>", "<pad>"
ALPHABET = "0123456789+=?\n :AWaeinrstw"
WORDS = ("Answer: ", "Wait", "=?\n")


class HasPrompt(Protocol):
    """A problem."""

    @property
    def prompt(self) -> str: ...
    @property
    def answer(self) -> str: ...


P = TypeVar("P", bound=HasPrompt)


class Sum(NamedTuple):
    terms: tuple[int, ...]

    @property
    def prompt(self) -> str:
        """E.g. `5+2+4+3=?` and a newline."""
        return "+".join(map(str, self.terms)) + "=?\n"

    @property
    def answer(self) -> str:
        return str(sum(self.terms))


def sample_problem(rng: random.Random) -> Sum:
    return Sum(tuple(rng.randint(1, MAX_TERM) for _ in range(rng.randint(MIN_TERMS, MAX_TERMS))))


def chain(problem: Sum, rng: random.Random, error: float = ERROR) -> tuple[str, int]:
    """Return one addition per line, and the resulting sum. Errors carry over to later lines.

    They are up to 3, as errors of 1 would often cancel."""
    total, lines = problem.terms[0], []
    for term in problem.terms[1:]:
        result = total + term
        if rng.random() < error:
            wrong_results = [result + sign * distance for distance in (1, 2, 3) for sign in (-1, 1)]
            result = rng.choice([number for number in wrong_results if number > 0])
        lines.append(f"{total}+{term}={result}\n")
        total = result
    return "".join(lines), total


def teach(problem: Sum, rng: random.Random) -> str:
    """Return the teacher's response, without end-of-sequence token."""
    chance = rng.random()
    work, total = chain(problem, rng)
    if chance < BARE:
        work = ""
    elif chance < BARE + WAIT:
        for num_chains in range(1, MAX_CHAINS):
            if num_chains > 1 and rng.random() >= AGAIN:
                break
            repetition, total = chain(problem, rng)
            work += "Wait\n" + repetition
    return f"{work}Answer: {total}"


def style(response: str, finished: bool = True) -> Style:
    """Classify a response; truncated: unfinished, or without an answer at its end."""
    if not finished or not ANSWER.search(response):
        return "truncated"
    if "Wait" in response:
        return "wait"
    return "bare" if response.startswith("Answer:") else "chain"


def style_shares(responses: Iterable[tuple[str, bool]]) -> dict[Style, float]:
    styles = [style(text, finished) for text, finished in responses]
    return {name: styles.count(name) / max(len(styles), 1) for name in STYLES}


def write_demo(folder: Path, seed: int, layers: int = 2, experts: int = 0) -> None:
    """Write the demo's files, equal for equal arguments.

    model/       untrained model and tokenizer in Hugging Face's format
    sft.jsonl    rows prompt, response, answer
    train.jsonl  unique rows prompt, answer
    eval.jsonl   likewise, held out, the same for every seed

    experts: per layer; 0: dense. Raises DataError if writing fails."""

    write_task_files(
        folder,
        seed,
        sample_problem,
        lambda problem, rng: (problem, teach(problem, rng)),
        SFT_ROWS,
        TRAIN_ROWS,
        build_tokenizer(),
        layers=layers,
        experts=experts,
    )


def held_out(prompt: str) -> bool:
    """Hold out one prompt in ten by CRC; sum(x * 31**i) % 10 would be the digit sum."""
    return zlib.crc32(prompt.encode()) % 10 == 0


def write_task_files(
    folder: Path,
    seed: int,
    sample: Callable[[random.Random], P],
    answer: Callable[[P, random.Random], tuple[P, str]],
    sft_rows: int,
    train_rows: int,
    tokenizer: PreTrainedTokenizerFast,
    *,
    layers: int = 2,
    experts: int = 0,
    sample_eval: Callable[[random.Random], P] | None = None,
) -> None:
    """Write a task's files, as `write_demo`.

    sample_eval  for eval.jsonl, if that differs
    answer       returns the problem and response of the warm start"""

    def problems(rng: random.Random, *, evaluation: bool = False) -> Iterator[P]:
        while True:
            problem = sample_eval(rng) if evaluation and sample_eval else sample(rng)
            if held_out(problem.prompt) == evaluation:
                yield problem

    def make_sft_rows() -> Iterator[dict[str, str]]:
        rng = random.Random(f"{seed}/sft")
        for sampled in islice(problems(rng), sft_rows):
            problem, response = answer(sampled, rng)
            yield {"prompt": problem.prompt, "response": response, "answer": problem.answer}

    def make_unique_rows(sampled: Iterator[P], count: int) -> Iterator[dict[str, str]]:
        unique_problems: set[P] = set()
        while len(unique_problems) < count:
            problem = next(sampled)
            if problem not in unique_problems:
                unique_problems.add(problem)
                yield {"prompt": problem.prompt, "answer": problem.answer}

    rows_by_name = {
        "sft": make_sft_rows(),
        "train": make_unique_rows(problems(random.Random(f"{seed}/train")), train_rows),
        "eval": make_unique_rows(problems(random.Random("eval"), evaluation=True), EVAL_ROWS),
    }
    path = folder
    try:
        path.mkdir(parents=True, exist_ok=True)
        for name, rows in rows_by_name.items():
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (path / f"{name}.jsonl").write_text(text, encoding="utf-8")
        path = folder / "model"
        model = build_model(tokenizer, seed, layers, experts)
        # save_pretrained would show a progress bar.
        weights = revert_weight_conversion(model, model.state_dict())
        del weights["lm_head.weight"]  # tied
        tokenizer.save_pretrained(path)
        model.config.save_pretrained(path)
        model.generation_config.save_pretrained(path)
        save_file(
            {name: tensor.contiguous() for name, tensor in weights.items()},
            path / "model.safetensors",
            metadata={"format": "pt"},
        )
    except OSError as error:
        problem = f"cannot be written: {error.strerror or error} (choose another folder)"
        raise DataError(f"{path}: {problem}") from error


def build_tokenizer(
    alphabet: str = ALPHABET, words: Sequence[str] = WORDS, positions: int = MAX_POSITIONS
) -> PreTrainedTokenizerFast:
    """Build a BPE tokenizer of characters and words. Other characters are lost."""
    vocabulary = {PAD: 0, EOS: 1} | {character: i + 2 for i, character in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    for word in words:
        for end in range(1, len(word)):
            merges.append((word[:end], word[end]))
            vocabulary[word[: end + 1]] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.decoder = decoders.Fuse()  # else spaces join tokens
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=positions,
        clean_up_tokenization_spaces=False,
    )


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int, layers: int = 2, experts: int = 0) -> Any:
    """Build an untrained Qwen3 from a seed, keeping torch's generator.

    experts: per layer; each token uses two"""
    classes = (Qwen3MoeConfig, Qwen3MoeForCausalLM) if experts else (Qwen3Config, Qwen3ForCausalLM)
    moe_options = {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
    config_class, model_class = classes
    config = config_class(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=tokenizer.model_max_length,
        initializer_range=0.06,  # with Qwen's 0.02 a narrow model learns much slower
        tie_word_embeddings=True,
        architectures=[model_class.__name__],
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
        **(moe_options | {"norm_topk_prob": True} if experts else {}),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return model_class(config)
