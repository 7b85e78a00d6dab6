"""Compare the log-prob head with a plain implementation at a 32B model's vocabulary, in float32.

Compared are log-probs, entropy and the gradients of hidden states and output layer. Each measurement runs in
a separate process on the same inputs.

The plain implementation is the leanest usual one: log_softmax(hidden @ weight.T), gather, and the entropy
without a gradient (no loss here has one). Extra memory is the growth of the peak resident memory beyond the
inputs; with a backward pass, also beyond the two gradients, which both implementations need. Times are
compared in CPU seconds, which depend less on other work than wall time does.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
from measure import PeakMemory, Verdicts, in_fresh_process, machine
from torch import Tensor

from megarl.config.schema import UpdateConfig
from megarl.model.logprob_head import vocab_parallel_logprobs


def inputs(tokens: int, words: int, hidden_size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Make hidden states, output layer, labels and the gradient of the log-probs.

    The largest of 152k logits is near 4: a policy so flat that no token's probability is negligible."""
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, hidden_size, generator=g)
    weight = torch.empty(words, hidden_size).normal_(0, hidden_size**-0.5, generator=g)
    return hidden, weight, torch.randint(0, words, (tokens,), generator=g), torch.randn(tokens, generator=g)


def plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    table = (hidden @ weight.T).log_softmax(-1)
    logprobs = table.gather(-1, labels[:, None]).squeeze(-1)
    with torch.no_grad():
        entropy = -(table.exp() * table).sum(-1)
    return logprobs, entropy


def measure(
    way: str, backward: bool, tokens: int, words: int, hidden_size: int, chunk: int, save: str
) -> dict[str, float]:
    hidden, weight, labels, factors = inputs(tokens, words, hidden_size)
    hidden.requires_grad_(backward)
    weight.requires_grad_(backward)
    # The first call sets up buffers of the libraries, which should not count.
    (hidden[:8].detach() @ weight[:64].detach().T).log_softmax(-1)
    memory = PeakMemory()
    wall, cpu = time.perf_counter(), time.process_time()
    if way == "plain":
        logprobs, entropy = plain(hidden, weight, labels)
    else:
        logprobs, entropy = vocab_parallel_logprobs(
            hidden, weight, labels, vocab_start=0, vocab_shard_size=words, temperature=1.0, chunk=chunk
        )
    if backward:
        logprobs.backward(factors)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    extra = memory.growth()
    result = {"logprobs": logprobs.detach(), "entropy": entropy}
    if backward:
        assert hidden.grad is not None and weight.grad is not None
        result |= {"gradient of the hidden states": hidden.grad, "gradient of the output layer": weight.grad}
        extra -= (hidden.numel() + weight.numel()) * 4
    if save:
        torch.save(result, save)
    return {"wall": wall, "cpu": cpu, "extra": extra}


def compare(ours: Path, theirs: Path, verdicts: Verdicts) -> None:
    """Check the largest difference of each result, relative to its largest entry."""
    a, b = torch.load(ours, mmap=True), torch.load(theirs, mmap=True)
    for name in b:
        error = float((a[name] - b[name]).abs().max() / b[name].abs().max())
        verdicts.at_most(f"log-prob head, {name}, difference / largest", error, 1e-5, must=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--words", type=int, default=152064)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument(
        "--chunk",
        type=int,
        default=UpdateConfig().logprob_chunk,
        help="update.logprob_chunk (default %(default)s)",
    )
    parser.add_argument(
        "--repeats", type=int, default=2, help="the fastest of so many counts (default %(default)s)"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--one", choices=("plain", "megarl"), help=argparse.SUPPRESS)
    parser.add_argument("--backward", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--save", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.one:
        print(
            json.dumps(
                measure(
                    args.one, bool(args.backward), args.tokens, args.words, args.hidden, args.chunk, args.save
                )
            )
        )
        return 0

    print(
        f"{machine()}\n{args.tokens} tokens x {args.words} words, hidden {args.hidden}, chunks of "
        f"{args.chunk} words, float32"
    )
    sizes = [f"--{name}={getattr(args, name)}" for name in ("tokens", "words", "hidden", "chunk", "threads")]
    verdicts = Verdicts()
    with tempfile.TemporaryDirectory() as folder:
        for backward in (0, 1):
            best: dict[str, dict[str, float]] = {}
            for repeat in range(args.repeats):
                for way in ("plain", "megarl"):  # alternate: a change of load affects both
                    save = f"{folder}/{way}" if backward and repeat == 0 else ""
                    found = in_fresh_process(
                        __file__, f"--one={way}", f"--backward={backward}", f"--save={save}", *sizes
                    )
                    best[way] = {key: min(value, best.get(way, found)[key]) for key, value in found.items()}
            title = "forward and backward" if backward else "forward only"
            for way, found in best.items():
                print(
                    f"{title}, {way}: {found['wall']:.1f} s ({found['cpu']:.1f} s of CPU time), "
                    f"{found['extra'] / 2**20:,.0f} MiB extra"
                )
            ratio = {key: best["megarl"][key] / best["plain"][key] for key in best["plain"]}
            verdicts.at_most(f"log-prob head, {title}, extra memory / plain", ratio["extra"], 1 / 8)
            verdicts.at_most(f"log-prob head, {title}, CPU time / plain", ratio["cpu"], 1.15, " x")
            print(f"          the same by the clock: {ratio['wall']:.3g} x")
        compare(Path(folder, "megarl"), Path(folder, "plain"), verdicts)
    return verdicts.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
