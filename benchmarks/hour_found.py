"""Shared code of the stages of hour.py: their options, their results and their models."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from hour import write
from measure import Verdicts

ROOT = Path(__file__).resolve().parents[1]
GIB = 2**30
# Bounds on the mean difference of log-probs of engine and trainer, nats: of FP8 runs, and of others.
FP8_LOGPROBS, ENGINE_LOGPROBS = 0.1, 0.05


class SkipStage(Exception):
    """Raised when something that the stage requires is missing."""


@dataclass
class Given:
    """The command line of a stage.

    machine: the result of `look`; engine_options: additional arguments of SGLang
    fetched: folder with wheels of models and GSM8K's files; trl: command of a Python with TRL"""

    out: Path
    tiny: bool
    model_7b: Path | None
    data: Path | None
    machine: dict[str, Any]
    engine_options: dict[str, Any] = field(default_factory=dict)
    fetched: Path | None = None
    trl: str = ""

    def has(self, what: str) -> bool:
        return what in self.machine["has"]

    @property
    def world(self) -> int:
        """Number of devices that the suite uses: 2 with --tiny, else the largest power of two up to 8."""
        return 2 if self.tiny else 2 ** min(3, self.machine["count"].bit_length() - 1)

    @property
    def tiny_option(self) -> list[str]:
        return ["--tiny"] * self.tiny


class Found(Verdicts):
    """Results of a stage, saved after each check.

    notes: lines for the report; tables: {title, columns, rows} for the report; figures: for report.json"""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path, self.why = path, ""
        self.figures: dict[str, Any] = {}
        self.tables: list[dict[str, Any]] = []
        self.notes: list[str] = []

    def _print(self, *arguments: Any, **options: Any) -> None:
        super()._print(*arguments, **options)
        self.save()

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Add a table, replacing an earlier one with the same title."""
        self.tables = [table for table in self.tables if table["title"] != title]
        self.tables.append({"title": title, "columns": list(columns), "rows": [list(row) for row in rows]})
        self.save()

    def save(self) -> None:
        kept = {"checks": self.rows, "figures": self.figures, "tables": self.tables, "notes": self.notes}
        write(self.path, {**kept, "why": self.why})


def data_sheet(given: Given) -> Any:
    """Return the device's row of the planner's table, or that of an H100."""
    from megarl.plan.sizes import DEVICES

    return DEVICES[kind_of_gpu(given)]


def kind_of_gpu(given: Given) -> str:
    from megarl.plan.sizes import DEVICES

    return next((kind for kind in DEVICES if kind in given.machine["name"]), "H100")


def random_model(
    folder: Path, family: Any, *, hidden: int, heads: int, kv_heads: int, ffn: int, layers: int, vocab: int
) -> None:
    """Write a Hugging Face folder with freshly initialised weights in bf16 and a working tokenizer."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    from tests.tiny_models import make_config, make_tokenizer, use_classic_rope

    config = make_config(
        family,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=2048,
    )
    torch.manual_seed(0)
    config.dtype = torch.bfloat16
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    use_classic_rope(folder / "config.json")
    make_tokenizer(vocab).save_pretrained(folder)
    GenerationConfig(eos_token_id=[1], pad_token_id=0, bos_token_id=2).save_pretrained(folder)


def make_pretrained(given: Given, found: Found, name: str, folder: Path) -> None:
    """Fetch and convert a pretrained model; with --tiny, write a random one.

    Raises MegarlError if it is out of reach."""
    from megarl.weights.gguf import gguf_to_hf
    from megarl_tasks.pretrained import PRETRAINED, fetch

    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    if given.tiny:
        family = "llama" if name == "smollm2" else "qwen2"
        random_model(folder, family, hidden=32, heads=4, kv_heads=2, ffn=48, layers=2, vocab=307)
        found.notes.append(f"{name}: tiny random weights")
    else:
        gguf_to_hf(fetch(PRETRAINED[name], given.fetched or folder.parent), folder)
        found.notes.append(f"{name}: {PRETRAINED[name].title}")
    found.save()


def make_qwen(given: Given, found: Found, name: str) -> None:
    """Make `models`/`name` and GSM8K, unless an earlier stage has; with --tiny, sums.

    Raises SkipStage if one of them is out of reach."""
    from megarl.config.errors import MegarlError
    from megarl_tasks.gsm8k import fetch_gsm8k

    folder = given.out / "models" / name
    try:
        if given.tiny or not (folder / "SHA256SUMS").is_file():  # written last
            make_pretrained(given, found, name, folder)
        if not given.tiny:
            fetch_gsm8k(given.fetched or folder.parent, folder.parent)
    except MegarlError as error:
        raise SkipStage(str(error)) from None
    for part, first, count in (("train", 0, 64), ("eval", 1000, 8)) if given.tiny else ():
        pairs = ((n, n + 1) for n in range(first, first + count))
        rows = ({"question": f"What is {a} + {b}?", "answer": f"#### {a + b}"} for a, b in pairs)
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder.parent / f"gsm8k_{part}.jsonl").write_text(text, encoding="utf-8")


def small(given: Given) -> Path:
    """Return the folder that the stage `model` wrote, or skip this stage."""
    folder = given.out / "small" / "model"
    if not (folder / "config.json").is_file():
        raise SkipStage("stage model has made no model")
    return folder


def start_runtime(timeout: float = 240.0, **sizes: int) -> Any:
    """Start this process as a rank, on a GPU if there is one.

    timeout: seconds of a collective; sizes: keys of `parallel`"""
    from megarl.config.schema import ParallelConfig
    from megarl.parallel import runtime

    parallel = ParallelConfig(**sizes, timeout=timeout)
    return runtime.start(parallel, seed=0, mixture=parallel.ep > 1)
