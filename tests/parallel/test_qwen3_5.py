"""Features that only Qwen3.5 has: sequences do not share the states of its gated delta nets.

Also the language model of a published folder. Its row in tests/families.py covers log-probabilities,
gradients, values and checkpoints."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import GenerationConfig, Qwen3_5Config, Qwen3_5ForConditionalGeneration

from megarl.config.errors import CheckpointError
from megarl.model.hf_config import check_buildable
from megarl.weights.families import read_config
from megarl.weights.hf import HFFolder
from tests.families import ROWS
from tests.parallel import jobs
from tests.parallel.test_parity import sequences, tiny
from tests.ranks import RankPool
from tests.tiny_models import make_tokenizer

Ranks = Callable[..., RankPool]


@pytest.mark.parametrize("layout", [(1, 1, 1), (1, 1, 1, 1, 2)], ids=str)
def test_no_state_of_one_response_reaches_another(
    layout: tuple[int, ...], ranks: Ranks, tmp_path: Path
) -> None:
    """Changing one sequence of a micro-batch changes only its log-probabilities; others are bitwise equal.

    Some sequences share a bucket, in which shorter rows are padded."""
    folder = tiny(tmp_path, "qwen3_5_text", vocab=101, **ROWS["qwen3_5_text"].models[0])
    prompts, responses = sequences(101)
    pool, ends = ranks(*layout), torch.tensor([0, *map(len, responses)]).cumsum(0)

    def logprobs() -> Tensor:
        found = pool.run(jobs.logprobs, folder=folder, prompts=prompts, responses=responses)
        return found[0][0]

    before = logprobs()
    for changed in range(len(prompts)):
        own = slice(ends[changed], ends[changed + 1])
        kept, prompts[changed] = prompts[changed], [(t + 1) % 101 for t in prompts[changed]]
        after, prompts[changed] = logprobs(), kept
        others = torch.ones(len(before), dtype=torch.bool)
        others[own] = False
        assert torch.equal(after[others], before[others]), changed
        assert not torch.equal(after[own], before[own]), changed


def take_language_model(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the program of docs/families.md on a published folder."""
    page = (Path(__file__).parents[2] / "docs/families.md").read_text()
    program = dedent(page.partition("Qwen3.5-9B-text <<'EOF'\n")[2].partition("  EOF\n")[0])
    monkeypatch.setattr(sys, "argv", ["-", str(source), str(out)])
    exec(compile(program, "docs/families.md", "exec"), {})
    check_buildable(out)


def test_the_language_model_of_a_published_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The program of docs/families.md makes a trainable folder with bitwise the published weights."""
    source, out = tmp_path / "published", tmp_path / "text"
    text = read_config(tiny(tmp_path / "tiny", "qwen3_5_text", vocab=307, tied=True))
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    config = Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=True)
    Qwen3_5ForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(source)
    make_tokenizer(307).save_pretrained(source)
    GenerationConfig(eos_token_id=[1]).save_pretrained(source)
    with pytest.raises(CheckpointError, match="model_type: 'qwen3_5' is a model of images and text"):
        read_config(source)
    take_language_model(source, out, monkeypatch)
    assert HFFolder(out).extra == () and (out / "tokenizer.json").is_file()
    prefix = "model.language_model."
    published = load_file(source / "model.safetensors")
    own = {n.replace(prefix, "model."): x for n, x in published.items() if n.startswith(prefix)}
    saved = load_file(out / "model.safetensors")
    assert saved.keys() == own.keys() and all(torch.equal(saved[name], own[name]) for name in own)
