"""A real SGLang engine on a CPU with the weights of a Megatron actor: weights, samples, failures.

Tests with the fixture `one` share its engine at tp=1, which restarts only if a test kills it. Their order
matters little.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from megarl.rollout.engines.base import GenerationRequest
from megarl.rollout.engines.transformers_engine import TransformersEngine
from megarl.rollout.sampling import SamplingParams
from megarl.weights.hf import HFFolder, load_into
from megarl.weights.shards import sglang_shards
from tests.engines import load_folder
from tests.families import YARN
from tests.parallel.test_parity import hf_logprobs
from tests.ranks import RankPool
from tests.sglang import jobs
from tests.tiny_models import make_tiny_model

START = 1500  # seconds
# Like published Qwen3.5, whose text has the same position in all three sections.
MROPE = {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.25}
MROPE |= {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
pytestmark = pytest.mark.timeout(1800)  # a start takes 20 s, but minutes on a busy machine


def begin(pool: RankPool, name: str, folder: Path, **options: Any) -> None:
    pool.run(jobs.start, name=name, folder=folder, **options)
    for _ in range(START // 60):
        if all(pool.run(jobs.wait, name=name)):
            return
    raise AssertionError("SGLang did not start")


@pytest.fixture(scope="module")
def one(ranks: Callable[..., RankPool], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """Yield a rank with an engine at tp=1 that has the folder's weights as version 0."""
    folder = make_tiny_model(
        tmp_path_factory.mktemp("qwen3"), "qwen3", tied=True, vocab=307, head_dim=16, hidden=64, ffn=96
    )
    pool = ranks(1, 1, 1)
    begin(pool, "one", folder, max_response_tokens=100)
    pool.run(jobs.deliver, name="one", version=0, dump=tmp_path_factory.mktemp("dump"))
    yield pool
    if pool.alive:
        pool.run(jobs.stop, name="one")


def check_weights(dump: Path, tp: int) -> None:
    """Check that SGLang's parameters are bitwise those of the exported folder, in SGLang's layout."""
    exported = HFFolder(dump / "hf")
    for rank in range(tp):
        shards = sglang_shards(exported.config, tp, rank, cpu=True)
        expected = {name: torch.zeros(shard.shape) for name, shard in shards.items()}
        load_into(expected, shards, exported)
        held = load_file(dump / f"rank{rank}.safetensors")
        for name in [name for name in held if name.endswith((".w13_weight", ".w2_weight"))]:
            held |= {f"{name}.{expert}": rows for expert, rows in enumerate(held.pop(name))}
        assert held.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(held[name], tensor), (rank, name)


def check_samples(pool: RankPool, name: str, dump: Path, params: SamplingParams, version: int) -> None:
    """Check log-probs against the trainer and Hugging Face, and tokens against the transformers engine.

    The reference uses the exported folder and the same seeds."""
    (completions, ours), *_ = pool.run(jobs.sample, name=name, params=params)
    theirs = torch.tensor([x for c in completions for x in c.logprobs.tolist()])
    assert {v for c in completions for v in c.policy_versions.tolist()} == {version}
    prompts = [prompt for prompt in jobs.PROMPTS for _ in range(3)]
    if params.temperature == 1:
        assert (theirs - ours).abs().max() <= 1e-4
        exact, _ = hf_logprobs(
            dump / "hf", [list(p) for p in prompts], [c.tokens.tolist() for c in completions], 1.0
        )
        assert (theirs - exact).abs().max() <= 1e-4
    engine = TransformersEngine(dump / "hf", eos_ids=(1,))
    engine.start()
    load_folder(engine)
    reference = engine.generate(
        [GenerationRequest(prompt, seed) for seed, prompt in enumerate(prompts)], params
    )
    same = [a.tokens.tolist() == b.tokens.tolist() for a, b in zip(completions, reference, strict=True)]
    assert sum(same) >= len(same) - 1  # a rounding error may change one sampled token in some thousand
    for a, b, equal in zip(completions, reference, same, strict=True):
        if equal:
            assert a.finish_reason == b.finish_reason
            assert torch.allclose(
                torch.tensor(a.logprobs.tolist()), torch.tensor(b.logprobs.tolist()), atol=1e-4
            )
            if params.sampling_sets:
                assert np.array_equal(a.sampling_sets, b.sampling_sets)
            else:
                assert a.sampling_sets is None


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(48),
        SamplingParams(24, 0.7, 0.8, 10),
        SamplingParams(24, 0.0),
        SamplingParams(24, 0.7, 0.8, 10, sampling_sets=True),
    ],
    ids=str,
)
def test_samples_as_the_transformers_engine(one: RankPool, params: SamplingParams, tmp_path: Path) -> None:
    one.run(jobs.deliver, name="one", version=0, dump=tmp_path)
    check_samples(one, "one", tmp_path, params, 0)


@pytest.mark.shows("SGLang", family="qwen3")
def test_weights_after_an_update_are_the_exported_ones(one: RankPool, tmp_path: Path) -> None:
    [(before, _)] = one.run(jobs.sample, name="one", params=SamplingParams(24))
    assert one.run(jobs.update, name="one")[0] > 0
    [report] = one.run(jobs.deliver, name="one", version=1, dump=tmp_path)
    assert report["buckets"] == 1
    check_weights(tmp_path, 1)
    check_samples(one, "one", tmp_path, SamplingParams(24), 1)
    [(after, _)] = one.run(jobs.sample, name="one", params=SamplingParams(24))
    assert any(a.logprobs.tolist() != b.logprobs.tolist() for a, b in zip(before, after, strict=True))


@pytest.mark.shows("SGLang", family="llama")
def test_a_pretrained_model(smollm2: Path, ranks: Callable[..., RankPool], tmp_path: Path) -> None:
    """SmolLM2 has nine query heads, three key heads and its own chat template.

    SGLang's shards equal the folder's, and its log-probs equal Megatron's."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    questions = ("What is 23 + 45?", "Name a colour.", "Why is the sky blue? Answer in one sentence.")
    asked = [
        tuple(
            tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)[
                "input_ids"
            ]
        )
        for text in questions
    ]
    pool = ranks(1, 1, 1)
    begin(pool, "real", smollm2, max_response_tokens=32, max_prompt_tokens=96)
    try:
        pool.run(jobs.deliver, name="real", version=0, dump=tmp_path)
        check_weights(tmp_path, 1)
        [(completions, ours)] = pool.run(
            jobs.sample, name="real", params=SamplingParams(24), count=2, asked=asked
        )
        theirs = torch.tensor([x for c in completions for x in c.logprobs.tolist()])
        assert (theirs - ours).abs().max() <= 2e-4 and all(c.tokens.tolist() for c in completions)
    finally:
        if pool.alive:
            pool.run(jobs.stop, name="real")


def test_an_aborted_response_goes_on_as_if_nothing_had_happened(one: RankPool) -> None:
    [(whole, begun, gone_on)] = one.run(jobs.interrupt, name="one", params=SamplingParams(100))
    aborted = [c for c in begun if c.finish_reason == "abort"]
    assert aborted
    assert any(0 < len(c.tokens.tolist()) < 100 for c in aborted)
    same = sum(
        a.tokens.tolist() == b.tokens.tolist() and a.finish_reason == b.finish_reason
        for a, b in zip(whole, gone_on, strict=True)
    )
    assert same >= len(whole) - 1
    for start, end in zip(begun, gone_on, strict=True):
        assert end.tokens.tolist()[: len(start.tokens.tolist())] == start.tokens.tolist()
        assert len(end.logprobs.tolist()) == len(end.policy_versions.tolist()) == len(end.tokens.tolist())


def test_a_reader_that_is_late_loses_nothing(one: RankPool) -> None:
    [completions] = one.run(jobs.read_late, name="one", params=SamplingParams(100))
    assert all(c.tokens.tolist() and c.finish_reason in ("stop", "length") for c in completions)
    # bytes as sent, against Linux's default size of a socket buffer
    assert sum(len(c.tokens.tolist()) for c in completions) * 12 > 212_992


def test_sleep_and_wake_by_tags(one: RankPool) -> None:
    [message] = one.run(jobs.sleep_and_wake, name="one", version=1)
    assert "no weights" in message
    [(completions, ours)] = one.run(jobs.sample, name="one", params=SamplingParams(8))
    assert (torch.tensor([x for c in completions for x in c.logprobs.tolist()]) - ours).abs().max() <= 1e-4


def check_own_loading(pool: RankPool, name: str, dump: Path, other: Path, tp: int) -> None:
    """Compare the transferred parameters with those that SGLang itself loads from the exported folder.

    SGLang reads the folder over other weights."""
    other.mkdir()
    pool.run(jobs.read, name=name, folder=dump / "hf", dump=other)
    for rank in range(tp):
        ours, theirs = (load_file(folder / f"rank{rank}.safetensors") for folder in (dump, other))
        assert ours.keys() == theirs.keys()
        for parameter, tensor in ours.items():
            assert torch.equal(tensor, theirs[parameter]), (rank, parameter)


@pytest.mark.shows("SGLang")
@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("qwen2", {}),
        ("glm4", {}),
        ("mistral", {}),
        ("glm4_moe", {}),
        ("deepseek_v3", {"rope_parameters": YARN}),
        ("deepseek_v3", {"q_lora_rank": None}),
        ("qwen3_5_text", {"rope_style": "parameters", "rope_parameters": MROPE}),
        ("qwen3_next", {}),
    ],
    ids=["qwen2", "glm4", "mistral", "glm4_moe", "deepseek_v3", "moonlight", "qwen3_5_text", "qwen3_next"],
)
def test_an_engine_over_two_ranks(
    family: Any, keys: dict[str, Any], ranks: Callable[..., RankPool], tmp_path: Path
) -> None:
    """Untied models with a padded vocabulary, biases and several buckets; the trainer has TP 2 as well.

    GLM-4 has gate and up in one tensor, and each half is padded on a rank. GLM-4.5 has a dense layer, and a
    mixture with a float32 router, an untrained bias and a shared expert. DeepSeek-V3 has multi-latent
    attention with YaRN, Moonlight without YaRN or query latents. Qwen3.5 has a linear-attention layer, and
    Qwen3-Next a mixture after it whose shared expert has a gate."""
    folder = make_tiny_model(
        tmp_path / "model", family, vocab=4099, hidden=128, ffn=160, heads=4, kv_heads=2, **keys
    )
    pool = ranks(2, 1, 1)
    begin(pool, "two", folder, engine_tp=2, transfer_bucket=1)
    for version in (0, 1):
        dump = tmp_path / str(version)
        dump.mkdir()
        reports = pool.run(jobs.deliver, name="two", version=version, dump=dump)
        assert reports[0]["buckets"] > 2
        check_weights(dump, 2)
        check_samples(pool, "two", dump, SamplingParams(24), version)
        pool.run(jobs.update, name="two")
    check_own_loading(pool, "two", tmp_path / "0", tmp_path / "read", 2)
    children = reports[0]["children"]
    assert len(children) >= 3
    assert jobs.alive(children[:1])
    pool.run(jobs.stop, name="two")
    assert jobs.alive(children) == []


@pytest.mark.shows("SGLang")
@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("deepseek_v3", {"rope_parameters": YARN}),
        ("qwen3_5_text", {"linear_num_value_heads": 4, "rope_style": "parameters"}),
        ("qwen3_5_moe_text", {"rope_style": "parameters"}),
        ("qwen3_moe", {}),
    ],
    ids=["deepseek_v3", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_moe"],
)
def test_an_engine_of_one_rank(
    family: Any, keys: dict[str, Any], ranks: Callable[..., RankPool], tmp_path: Path
) -> None:
    """Families for which SGLang runs different code.

    Two value heads per key head, as in Qwen3.5-9B, have another order in SGLang's projection."""
    folder = make_tiny_model(tmp_path / "model", family, hidden=64, layers=4, **keys)
    pool = ranks(1, 1, 1)
    begin(pool, "alone", folder)
    try:
        for version in (0, 1):
            dump = tmp_path / str(version)
            dump.mkdir()
            pool.run(jobs.deliver, name="alone", version=version, dump=dump)
            check_weights(dump, 1)
            check_samples(pool, "alone", dump, SamplingParams(24), version)
            pool.run(jobs.update, name="alone")
        check_own_loading(pool, "alone", tmp_path / "0", tmp_path / "read", 1)
    finally:
        if pool.alive:
            pool.run(jobs.stop, name="alone")


@pytest.mark.parametrize("harm", ["kill", "stop"])
def test_a_failed_engine_is_started_anew_and_nothing_is_lost(one: RankPool, harm: str) -> None:
    [undisturbed] = one.run(jobs.rollout, name="one")
    [disturbed] = one.run(jobs.rollout, name="one", harm=harm)
    assert disturbed["error"] is None
    assert disturbed["failures"] == 1
    assert (
        len(disturbed["events"]) == 1
        and "engine of rank 0 failed (1 of at most 3): SGLang" in disturbed["events"][0]
    )
    same = sum(a[0] == b[0] for a, b in zip(undisturbed["responses"], disturbed["responses"], strict=True))
    assert same >= len(undisturbed["responses"]) - 1  # same seeds and weights
    assert not set(disturbed["before"]) & set(disturbed["after"])
    assert jobs.alive(disturbed["before"]) == []


def test_after_too_many_failures_the_run_stops_with_a_message(one: RankPool) -> None:
    """No restart fixes the invalid responses of NaN weights."""
    [report] = one.run(jobs.rollout, name="one", harm="nan", most_failures=0)
    kind, message, on_every_rank = report["error"]
    assert kind == "EngineError" and on_every_rank
    assert "1 engine failures since the last weight transfer, rollout.engine_failures allows 0" in message
    assert "a log-probability that is not a finite number" in message


def test_frozen_weights_stay_in_the_engine(ranks: Callable[..., RankPool], tmp_path: Path) -> None:
    """Each transfer after the first one brings only the trained weights.

    An engine that is killed before it sleeps is started again, sleeps, and gets all weights."""
    folder = make_tiny_model(
        tmp_path / "model", "qwen3", tied=True, vocab=307, head_dim=16, hidden=64, ffn=96
    )
    pool = ranks(1, 1, 1)
    begin(pool, "frozen", folder, actor={"frozen": ["attention", "embeddings"]})
    moved = []
    for version in range(3):
        if version == 2:
            [found] = pool.run(jobs.sleep_of_the_dead, name="frozen")
        dump = tmp_path / str(version)
        dump.mkdir()
        [report] = pool.run(jobs.deliver, name="frozen", version=version, dump=dump)
        moved.append(report["moved"])
        check_weights(dump, 1)
        check_samples(pool, "frozen", dump, SamplingParams(24), version)
        pool.run(jobs.update, name="frozen")
    pool.run(jobs.stop, name="frozen")
    assert moved[1] == moved[2] < 0.7 * moved[0]
    assert len(found["events"]) == 1 and "engine of rank 0 failed (1 of at most 3)" in found["events"][0]
    assert found["asleep"] == {"weights", "kv_cache"} and not found["before"]
    assert found["awake"] == set() and found["after"]
