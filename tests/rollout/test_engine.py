"""The transformers engine against transformers itself: greedy answers, log-probs, batches, stopping, and its
life cycle."""

from __future__ import annotations

import random
import threading

import pytest
import torch

from megarl.config.errors import CheckpointError, EngineError
from megarl.rollout import transformers_engine
from megarl.rollout.sampling import Request, SamplingParams
from megarl.rollout.transformers_engine import KVCache, TransformersEngine
from tests.engines import load_folder
from tests.rollout.conftest import EOS, FAMILIES


def prompts(count: int, seed: int = 0, low: int = 1, high: int = 23) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    return [tuple(rng.randrange(5, 307) for _ in range(rng.randint(low, high))) for _ in range(count)]


def requests(count: int, group: int = 2, **kwargs) -> list[Request]:
    return [Request(p, 1000 * i + j) for i, p in enumerate(prompts(count, **kwargs)) for j in range(group)]


def assert_logprobs(reference, completions, asked, temperature: float = 1.0) -> None:
    for request, completion in zip(asked, completions, strict=True):
        ids = torch.tensor([[*request.prompt, *completion.tokens]])
        with torch.no_grad():
            logits = reference(input_ids=ids).logits[0, len(request.prompt) - 1 : -1] / temperature
        expected = logits.log_softmax(-1).gather(1, torch.tensor(completion.tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_generate(family, make_engine, reference):
    asked = [Request(p, 0) for p in prompts(9)]
    model = reference(family)
    # eos is a token that greedy decoding does reach, so that both ways of ending are compared.
    free = make_engine(family, eos_ids=[]).generate(asked, SamplingParams(max_tokens=30, temperature=0))
    eos = free[0].tokens[7]
    completions = make_engine(family, eos_ids=[eos], max_batch=4).generate(
        asked, SamplingParams(max_tokens=30, temperature=0)
    )
    for request, completion in zip(asked, completions, strict=True):
        expected = model.generate(
            torch.tensor([request.prompt]),
            max_new_tokens=30,
            do_sample=False,
            eos_token_id=eos,
            pad_token_id=0,
        )[0, len(request.prompt) :].tolist()
        assert completion.tokens == expected
        assert completion.finish == ("stop" if expected[-1] == eos else "length")
    assert {c.finish for c in completions} == {"stop", "length"}
    assert_logprobs(model, completions, asked)


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_of_sampled_tokens(family, make_engine, reference):
    asked = requests(8)
    params = SamplingParams(max_tokens=40, temperature=0.7, top_p=0.9, top_k=50)
    completions = make_engine(family).generate(asked, params)
    assert_logprobs(reference(family), completions, asked, temperature=0.7)
    assert len({tuple(c.tokens) for c in completions}) == len(completions)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_response_in_any_company(make_engine):
    asked, params = requests(10, group=3), SamplingParams(max_tokens=40)
    asked += asked[4:6]  # the same request twice
    engine = make_engine()
    together = engine.generate(asked, params)
    assert {c.finish for c in together} == {"stop", "length"}
    for i in (0, 7, 29):
        assert engine.generate([asked[i]], params)[0].tokens == together[i].tokens
    assert [c.tokens for c in together[-2:]] == [c.tokens for c in together[4:6]]
    order = random.Random(1).sample(range(len(asked)), len(asked))
    for max_batch in (1, 2, 5, 7, 32):
        permuted = make_engine(max_batch=max_batch).generate([asked[i] for i in order], params)
        assert [c.tokens for c in permuted] == [together[i].tokens for i in order]
        assert [c.finish for c in permuted] == [together[i].finish for i in order]


def test_long_responses_outgrow_the_cache_and_late_prompts_join(make_engine, reference, monkeypatch):
    moved = []  # (column before, column after) of every new layout with live rows
    relayout = KVCache.relayout

    def spy(cache: KVCache, column: int, columns: int) -> None:
        if cache.rows:
            moved.append((cache.column, column))
        relayout(cache, column, columns)

    monkeypatch.setattr(KVCache, "relayout", spy)
    # 12 rows at once, prompts of 1 to 150 tokens, responses of up to 300: the cache grows, shifts and takes
    # rows longer than itself.
    asked = [
        Request(p, i)
        for i, p in enumerate(
            prompts(12, seed=3, high=10) + prompts(15, seed=4, low=100, high=150) + prompts(8, seed=5)
        )
    ]
    engine = make_engine(max_batch=12, eos_ids=range(1, 5))
    completions = engine.generate(asked, SamplingParams(max_tokens=300))
    assert max(len(c.tokens) for c in completions) > 150 and min(len(c.tokens) for c in completions) < 20
    assert any(after > before for before, after in moved) and any(after < before for before, after in moved)
    assert_logprobs(reference("qwen3"), completions, asked)


def test_attention_sees_an_aligned_mask_where_the_device_asks_for_one(make_engine, reference, monkeypatch):
    monkeypatch.setitem(transformers_engine.ALIGNMENT, "cpu", 8)
    seen = []
    decode_mask = KVCache.decode_mask

    def spy(cache: KVCache) -> torch.Tensor:
        mask = decode_mask(cache)
        seen.append((mask.storage_offset() % 8, mask.stride(0) % 8, cache.first % 8))
        return mask

    monkeypatch.setattr(KVCache, "decode_mask", spy)
    asked = requests(8)
    completions = make_engine(max_batch=5).generate(asked, SamplingParams(max_tokens=40))
    assert_logprobs(reference("qwen3"), completions, asked)
    assert all(offset == stride == 0 for offset, stride, _ in seen) and any(first for *_, first in seen)


def test_prompts_are_prefilled_once(make_engine):
    engine = make_engine(max_batch=64)
    seen = []
    hook = engine._model.get_decoder().embed_tokens.register_forward_pre_hook(
        lambda module, args: seen.append(args[0].shape)
    )
    engine.generate(requests(6, group=8), SamplingParams(max_tokens=3))
    hook.remove()
    assert [tuple(shape) for shape in seen if shape[1] > 1] == [(6, max(map(len, prompts(6))))]


def test_a_long_prefill_is_cut(make_engine, monkeypatch):
    asked, params = requests(12), SamplingParams(max_tokens=12)
    whole = make_engine().generate(asked, params)
    monkeypatch.setattr("megarl.rollout.transformers_engine.PREFILL_TOKENS", 40)
    assert [c.tokens for c in make_engine().generate(asked, params)] == [c.tokens for c in whole]


def test_stop_texts(make_engine):
    asked = requests(12)
    engine = make_engine()
    free = engine.generate(asked, SamplingParams(max_tokens=40))
    texts = [engine.tokenizer.decode(c.tokens, skip_special_tokens=True) for c in free]
    ascii_pair = next(t[i : i + 2] for t in texts for i in range(2, 30) if t[i : i + 2].isascii())
    stops = (ascii_pair, next(c for c in texts[5] if c.isalpha() and c.isascii()), "never\nthere")
    stopped = engine.generate(asked, SamplingParams(max_tokens=40, stop=stops))
    for alone, cut in zip(free, stopped, strict=True):
        # By hand: the shortest beginning whose text holds a stop text.
        ends = [
            n
            for n in range(1, len(alone.tokens) + 1)
            if any(s in engine.tokenizer.decode(alone.tokens[:n], skip_special_tokens=True) for s in stops)
        ]
        assert cut.tokens == alone.tokens[: ends[0] if ends else None]
        assert cut.finish == ("stop" if ends else alone.finish)
    assert sum(len(c.tokens) for c in stopped) < sum(len(c.tokens) for c in free)


def test_abort_from_another_thread(make_engine):
    engine = make_engine(max_batch=4, eos_ids=[])
    steps = []

    def abort_after_ten(module, args) -> None:
        steps.append(0)
        if len(steps) == 10:
            thread = threading.Thread(target=engine.abort)
            thread.start()
            thread.join()

    hook = engine._model.get_output_embeddings().register_forward_pre_hook(abort_after_ten)
    completions = engine.generate(requests(4), SamplingParams(max_tokens=400))
    hook.remove()
    assert [len(c.tokens) for c in completions] == [10] * 4 + [0] * 4
    assert {c.finish for c in completions} == {"abort"} and len(steps) == 10
    assert [c.finish for c in engine.generate(requests(1), SamplingParams(max_tokens=2))] == ["length"] * 2


def test_sleep_frees_and_wake_needs_an_update(make_engine):
    engine, asked, params = make_engine(), requests(3), SamplingParams(max_tokens=8)
    before = [c.tokens for c in engine.generate(asked, params)]
    parameters = engine.parameters()
    engine.sleep()
    assert sum(p.untyped_storage().nbytes() for p in parameters.values()) == 0
    for call in (lambda: engine.generate(asked, params), engine.parameters, lambda: engine.end_update(8)):
        with pytest.raises(EngineError, match="asleep"):
            call()
    engine.wake()
    with pytest.raises(EngineError, match="update must follow"):
        engine.generate(asked, params)
    assert all(p.untyped_storage().nbytes() == p.numel() * 4 for p in parameters.values())
    load_folder(engine, version=9)
    assert [c.tokens for c in engine.generate(asked, params)] == before and engine.weight_version == 9
    engine.stop()
    with pytest.raises(EngineError, match="not started"):
        engine.generate(asked, params)


def test_written_parameters_are_what_generates(make_engine, folders):
    source, target = make_engine("qwen2"), TransformersEngine(folders["qwen2"], eos_ids=[EOS])
    target.start()
    with pytest.raises(EngineError, match="update must follow"):
        target.generate(requests(1), SamplingParams(4))
    target.begin_update()
    for name, tensor in target.parameters().items():
        tensor.copy_(source.parameters()[name])
    target.end_update(1)
    asked, params = requests(4), SamplingParams(max_tokens=20)
    assert target.generate(asked, params) == source.generate(asked, params)
    target.begin_update()
    with pytest.raises(EngineError, match="update must follow"):
        target.generate(asked, params)


def test_tied_weights_are_listed_once(make_engine):
    assert "lm_head.weight" not in make_engine("qwen3").parameters()
    assert "lm_head.weight" in make_engine("qwen2").parameters()


def test_bfloat16(make_engine):
    engine = make_engine(dtype=torch.bfloat16)
    assert {p.dtype for p in engine.parameters().values()} == {torch.bfloat16}
    completions = engine.generate(requests(4), SamplingParams(max_tokens=20))
    assert all(-20 < p <= 0 for c in completions for p in c.logprobs)


def test_nan_logits_name_row_and_version(make_engine):
    engine = make_engine("qwen2")
    poisoned = 200
    engine.parameters()["model.embed_tokens.weight"][poisoned] = torch.nan
    asked = [Request((5, 6), 0), Request((5, 6, 9), 1), Request((5, poisoned), 2)]
    with pytest.raises(EngineError, match=r"NaN logits in row 2, response token 0, with weight version 7"):
        engine.generate(asked, SamplingParams(max_tokens=1))


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        ((), 4, "empty"),
        ((5, 307), 4, "vocabulary of 307"),
        ((-1,), 4, "vocabulary"),
        ((5,) * 500, 13, "512 positions"),
        ((5,), 0, "do not fit"),
    ],
)
def test_requests_that_do_not_fit(make_engine, prompt, max_tokens, message):
    with pytest.raises(EngineError, match=message):
        make_engine().generate([Request((7,), 0), Request(prompt, 0)], SamplingParams(max_tokens))


def test_stop_texts_need_a_tokenizer(make_engine):
    with pytest.raises(EngineError, match=r"rollout\.stop"):
        make_engine(tokenizer=None).generate(requests(1), SamplingParams(4, stop=("x",)))


def test_nothing_asked_nothing_answered(make_engine):
    assert make_engine().generate([], SamplingParams(4)) == []


def test_unusable_folders(folders, tmp_path):
    with pytest.raises(CheckpointError, match="not the folder of a causal language model"):
        TransformersEngine(tmp_path).start()
    engine = TransformersEngine(folders["qwen2"])
    engine.start()
    with pytest.raises(EngineError, match="update must follow"):
        engine.generate([Request((5,), 0)], SamplingParams(1))
