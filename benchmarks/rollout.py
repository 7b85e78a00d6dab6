"""Measure the speed of the transformers engine at the demo's size, on one thread.

The model is Qwen3 with hidden 64 and 2 layers; 32 prompts have 8 responses each. Also measured, alternately
with the variant that they are compared with:

- the cost of batch invariance, relative to torch's linear layers and attention in the same engine, at
  hidden 64 and, with 32 responses, at hidden 576
- the gain of matrix products with few rows, at hidden 576
- the gain of sharing prompt prefixes in prefill, at both sizes

python benchmarks/rollout.py [--repeats 5] [--profile]
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
import torch.nn.functional as F
from measure import Verdicts, machine
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from megarl.rollout.engines import transformers_decode, transformers_layers
from megarl.rollout.engines.base import GenerationRequest
from megarl.rollout.engines.transformers_engine import TransformersEngine
from megarl.rollout.sampling import SamplingParams, response_seed

VOCAB, EOS = 40, 1
DEMO = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 192,
}
WIDE = {  # SmolLM2-135M's layers
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "intermediate_size": 1536,
}


def make_engine(folder: Path, max_batch: int, sizes: Mapping[str, int] = DEMO) -> TransformersEngine:
    """Make an engine with a random model of two layers.

    The logits are nearly flat, so that EOS has a probability of about 1/40. Lengths are geometric, cut at 80,
    with mean 35, which is harder to batch than the demo's lengths."""
    config = Qwen3Config(
        vocab_size=VOCAB,
        num_hidden_layers=2,
        tie_word_embeddings=True,
        max_position_embeddings=256,
        initializer_range=0.02,
        **sizes,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    model.save_pretrained(folder)
    engine = TransformersEngine(folder, max_batch=max_batch, eos_ids=[EOS])
    engine.start()
    engine.begin_update()
    weights = dict(model.named_parameters())
    for name, parameter in engine.parameters().items():
        parameter.copy_(weights[name].data)
    engine.end_update(0)
    return engine


def make_requests(prompts: int, group: int, step: int) -> list[GenerationRequest]:
    """Make prompts of 7 to 15 tokens with `group` requests each."""
    rng = random.Random(step)
    requests = []
    for uid in range(prompts):
        prompt = tuple(rng.randrange(2, VOCAB) for _ in range(rng.choice((7, 9, 11, 13, 15))))
        requests += [GenerationRequest(prompt, response_seed(0, step, uid, i)) for i in range(group)]
    return requests


@contextmanager
def free_order() -> Iterator[None]:
    """Give up batch invariance in engines that are made and used in this context.

    They use torch's linear layers and attention, multiply any number of rows, and pad keys to multiples of
    16."""

    def plain(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)

    block = transformers_layers.Block
    with (
        patch.object(transformers_layers, "decode_attention", plain),
        patch.object(transformers_layers, "COLUMNS", 16),
        patch.object(transformers_decode, "COLUMNS", 16),
        patch.object(transformers_layers.BlockLinear, "forward", torch.nn.Linear.forward),
        patch.object(block, "make", staticmethod(lambda weights, hidden: block(16))),
    ):
        yield


def with_examples(prompts: int) -> list[GenerationRequest]:
    """Make one request per prompt: 140 tokens of examples of one of four tasks, then 20 to 50 tokens."""
    rng = random.Random(0)
    examples = [tuple(rng.randrange(2, VOCAB) for _ in range(140)) for _ in range(4)]
    questions = [tuple(rng.randrange(2, VOCAB) for _ in range(rng.randint(20, 50))) for _ in range(prompts)]
    return [GenerationRequest(examples[i % 4] + question, i) for i, question in enumerate(questions)]


@contextmanager
def prompts_apart() -> Iterator[None]:
    """Make engines prefill each prompt separately."""
    cut = transformers_decode.split_prompts
    with patch.object(transformers_decode, "split_prompts", lambda prompts, shared: cut(prompts, False)):
        yield


@contextmanager
def large_products() -> Iterator[None]:
    """Make new engines multiply wide layers only in products of LARGEST rows.

    Processors whose smaller products add up in another order need that."""
    with patch.object(transformers_layers, "find_fewest_rows", lambda weights: transformers_layers.LARGEST):
        yield


def cost(
    measured: Callable[[], float], other: Callable[[], AbstractContextManager[None]], repeats: int
) -> float:
    """Return the median ratio of CPU times, unchanged / within `other`, measured alternately."""
    ratios = []
    for _ in range(repeats + 1):
        ours = measured()
        with other():
            ratios.append(ours / measured())
    return statistics.median(ratios[1:])


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Speed of the transformers engine at the demo's size, on one thread."
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--max-batch", type=int, default=256)
    parser.add_argument("--max-tokens", type=int, default=80)
    parser.add_argument("--profile", action="store_true", help="print the operators that take the time")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        engine = make_engine(Path(folder), args.max_batch)
        params = SamplingParams(max_tokens=args.max_tokens)
        requests = make_requests(args.prompts, args.group, 0)
        engine.generate(requests, params)
        for step in range(1, args.repeats + 1):
            requests = make_requests(args.prompts, args.group, step)
            wall, cpu = time.perf_counter(), time.process_time()
            completions = engine.generate(requests, params)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            tokens = sum(len(c.tokens) for c in completions)
            print(
                f"{len(requests)} responses, mean length {tokens / len(requests):.1f}: "
                f"{wall:.3f} s wall, {cpu:.3f} s CPU, {tokens / wall:,.0f} tokens/s, {tokens / cpu:,.0f} "
                "tokens/CPU s"
            )

        def generation(
            sizes: Mapping[str, int], asked: Sequence[GenerationRequest], params: SamplingParams = params
        ) -> float:
            with tempfile.TemporaryDirectory() as other:
                of_its_own = make_engine(Path(other), args.max_batch, sizes)  # with the current patches
            of_its_own.generate(asked[:8], params)
            cpu = time.process_time()
            of_its_own.generate(asked, params)
            return time.process_time() - cpu

        verdicts, repeats = Verdicts(), 2 * args.repeats
        narrow = partial(generation, DEMO, requests)
        wide = partial(generation, WIDE, requests[:32])
        what = "CPU time of generation, with / without an order of sums that company does not change"
        verdicts.at_most(what, cost(narrow, free_order, repeats), 1.10)
        verdicts.at_most(f"{what}, wide layers", cost(wide, free_order, repeats), 1.10)
        what = f"wide layers: products of few rows / of {transformers_layers.LARGEST} alone"
        verdicts.at_most(what, cost(wide, large_products, repeats), 1.0)
        for name, sizes, most in (("narrow", DEMO, 0.7), ("wide", WIDE, 0.5)):
            prefill = partial(generation, sizes, with_examples(64), SamplingParams(max_tokens=1))
            what = f"{name} layers: prefill of 64 prompts with the examples of 4 tasks, shared / apart"
            verdicts.at_most(what, cost(prefill, prompts_apart, args.repeats), most)
        if args.profile:
            with torch.profiler.profile() as profile:
                engine.generate(requests, params)
            print(
                profile.key_averages().table(
                    sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=40
                )
            )


if __name__ == "__main__":
    main()
