"""Time TRL's GRPOTrainer on the demo's task, or on another model and data file of the same format.

It needs a separate virtual environment:

    make trl
    .venv-trl/bin/python benchmarks/trl_reference.py runs/demo/sft/hf runs/demo/train.jsonl --threads 2

A rollout is 32 prompts x 8 responses, then 4 optimizer updates of 64 responses each, without dynamic
sampling, in fp32 on a CPU, unless the options say otherwise. With --vllm it is on a GPU that vLLM shares.
Prints one JSON object; megarl is not imported.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

ANSWER = re.compile(r"Answer:\s*(-?\d+)\s*$")
BOXED = re.compile(r"\\boxed\{\s*\$?(-?[\d,]+)[^}]*\}")
ASK_FOR_BOX = "\nPlease reason step by step, and put your final answer within \\boxed{}."


class Clock(TrainerCallback):
    """Record wall and CPU seconds at the end of each rollout's last update.

    A rollout's time thus includes generation and updates."""

    def __init__(self, updates: int, progress: Path | None) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self.updates, self.progress = updates, progress

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.updates == 0:
            self.wall.append(time.perf_counter())
            self.cpu.append(time.process_time())
            if self.progress is not None:
                with open(self.progress, "a", encoding="utf-8") as file:
                    file.write(f"{len(self.wall)}\n")


class Rule:
    """The demo's reward, +1 or -1, which also records response tokens and accuracy of each rollout."""

    __name__ = "rule"

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self.pattern = pattern
        self.tokens: list[int] = []
        self.accuracy: list[float] = []

    def __call__(
        self, completions: list[Any], completion_ids: list[list[int]], answer: list[str], **kwargs: Any
    ) -> list[float]:
        """Score responses: texts, or messages if the prompts are messages."""
        texts = [one if isinstance(one, str) else one[0]["content"] for one in completions]
        found = [self.pattern.findall(text) for text in texts]
        right = [
            bool(answers) and answers[-1].replace(",", "") == expected
            for answers, expected in zip(found, answer, strict=True)
        ]
        self.tokens.append(sum(map(len, completion_ids)))
        self.accuracy.append(sum(right) / len(right))
        return [1.0 if r else -1.0 for r in right]


def read_rows(path: Path, gsm8k: bool) -> list[dict[str, Any]]:
    """Return prompts and answers; GSM8K's as chats that ask for a boxed answer."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    if not gsm8k:
        return [{"prompt": row["prompt"], "answer": row["answer"]} for row in rows]
    return [
        {
            "prompt": [{"role": "user", "content": row["question"] + ASK_FOR_BOX}],
            "answer": row["answer"].rpartition("####")[2].strip().replace(",", ""),
        }
        for row in rows
    ]


def time_generation(trainer: GRPOTrainer) -> list[float]:
    """Record the seconds of each rollout's generation, with the transfer of weights to vLLM."""
    seconds: list[float] = []
    generate = trainer._generate

    def timed(*arguments: Any, **keys: Any) -> Any:
        begin = time.perf_counter()
        result = generate(*arguments, **keys)
        seconds.append(time.perf_counter() - begin)
        return result

    trainer._generate = timed
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="Hugging Face folder with its tokenizer")
    parser.add_argument("data", type=Path, help="jsonl with prompt and answer")
    parser.add_argument("--rollouts", type=int, default=5, help="timed rollouts (default: %(default)s)")
    parser.add_argument(
        "--warmup",
        type=int,
        default=2,
        help="rollouts before these, not timed, at least 1 (default: %(default)s)",
    )
    parser.add_argument("--threads", type=int, default=2, help="torch threads (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=32, help="of a rollout (default: %(default)s)")
    parser.add_argument("--group", type=int, default=8, help="responses to each (default: %(default)s)")
    parser.add_argument("--updates", type=int, default=4, help="of a rollout (default: %(default)s)")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="(default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=80, help="longest response (default: %(default)s)")
    parser.add_argument(
        "--lr",
        type=float,
        default=1e-6,
        help="small, so that the lengths of the responses stay (default: %(default)s)",
    )
    parser.add_argument("--gsm8k", action="store_true", help="data is GSM8K's: question and answer")
    parser.add_argument("--vllm", action="store_true", help="on a GPU, generated by vLLM on the same one")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of an update (default: 1)")
    parser.add_argument("--out", type=Path, help="file for the JSON object (default: stdout)")
    parser.add_argument("--progress", type=Path, help="gets a line at the end of each rollout, as it ends")
    given = parser.parse_args()
    if given.warmup < 1 or given.rollouts < 1:
        parser.error("--warmup and --rollouts must be at least 1")
    torch.set_num_threads(given.threads)

    clock = Clock(given.updates, given.progress)
    rule = Rule(BOXED if given.gsm8k else ANSWER)
    dtype = torch.bfloat16 if given.dtype == "bf16" else torch.float32
    rollouts = given.warmup + given.rollouts
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            max_steps=rollouts * given.updates,
            per_device_train_batch_size=given.prompts * given.group // given.updates // given.accumulate,
            gradient_accumulation_steps=given.accumulate,
            steps_per_generation=given.updates * given.accumulate,
            num_generations=given.group,
            num_iterations=1,
            max_completion_length=given.max_tokens,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            beta=0.0,  # no KL term and no reference model
            epsilon=0.2,
            epsilon_high=0.28,
            loss_type="dapo",
            learning_rate=given.lr,
            lr_scheduler_type="constant",
            max_grad_norm=1.0,
            gradient_checkpointing=False,  # TRL's default is on, which would cost it a second forward pass
            use_cpu=not given.vllm,
            use_vllm=given.vllm,
            vllm_mode="colocate",
            vllm_gpu_memory_utilization=0.4,
            vllm_max_model_length=given.max_tokens + 512,
            bf16=given.dtype == "bf16",
            seed=0,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(given.model, dtype=dtype, trust_remote_code=False),
            processing_class=AutoTokenizer.from_pretrained(given.model, trust_remote_code=False),
            reward_funcs=rule,
            args=config,
            train_dataset=Dataset.from_list(read_rows(given.data, given.gsm8k)),
            callbacks=[clock],
        )
        generation = time_generation(trainer)
        trainer.remove_callback(PrinterCallback)  # stdout must have nothing but the JSON
        trainer.train()

    if len(clock.wall) != rollouts or len(rule.tokens) != rollouts:
        raise SystemExit(
            f"trl_reference: {len(clock.wall)} rollouts timed and {len(rule.tokens)} generated instead of "
            f"{rollouts}"
        )
    first = given.warmup - 1
    result = json.dumps(
        {
            "seconds_per_rollout": [
                round(b - a, 4) for a, b in zip(clock.wall[first:], clock.wall[first + 1 :], strict=False)
            ],
            "cpu_seconds_per_rollout": [
                round(b - a, 4) for a, b in zip(clock.cpu[first:], clock.cpu[first + 1 :], strict=False)
            ],
            "generation_seconds_per_rollout": [round(took, 4) for took in generation[given.warmup :]],
            "response_tokens_per_rollout": rule.tokens[given.warmup :],
            "accuracy_per_rollout": [round(a, 3) for a in rule.accuracy[given.warmup :]],
            "responses_per_rollout": given.prompts * given.group,
            "updates_per_rollout": given.updates,
            "threads": torch.get_num_threads(),
            "versions": {
                "trl": trl.__version__,
                "transformers": transformers.__version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
        }
    )
    if given.out is None:
        print(result)
    else:
        given.out.write_text(result, encoding="utf-8")


if __name__ == "__main__":
    main()
