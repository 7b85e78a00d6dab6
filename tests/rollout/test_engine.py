"""The transformers engine against transformers: tokens, log-probs, batching, stopping, life cycle."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from megarl.config.errors import CheckpointError, EngineError
from megarl.data.sample import TokenData
from megarl.rollout.engines import transformers_decode, transformers_layers
from megarl.rollout.engines.base import GenerationRequest
from megarl.rollout.engines.transformers_decode import DecodeLoop, Stopping, _width, split_prompts
from megarl.rollout.engines.transformers_engine import TransformersEngine
from megarl.rollout.engines.transformers_layers import (
    COLUMNS,
    LARGEST,
    Block,
    BlockLinear,
    KVCache,
    decode_attention,
    find_fewest_rows,
    prefill_attention,
)
from megarl.rollout.sampling import SamplingParams
from tests.engines import load_folder
from tests.rollout.conftest import EOS, FAMILIES
from tests.tiny_models import make_tokenizer


def prompts(count: int, seed: int = 0, low: int = 1, high: int = 23) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    return [tuple(rng.randrange(5, 307) for _ in range(rng.randint(low, high))) for _ in range(count)]


def requests(count: int, group: int = 2, **kwargs) -> list[GenerationRequest]:
    return [
        GenerationRequest(p, 1000 * i + j)
        for i, p in enumerate(prompts(count, **kwargs))
        for j in range(group)
    ]


BATCH_REQUESTS = [
    GenerationRequest(p, 100 * i + j) for i, p in enumerate([*prompts(9, high=40), (7,)]) for j in range(3)
]
# Responses to BATCH_REQUESTS generated as one batch, by family and whether layers count as wide.
TOGETHER: dict[tuple[str, bool], list[TokenData]] = {}


def assert_logprobs(reference, completions, asked, temperature: float = 1.0) -> None:
    for request, completion in zip(asked, completions, strict=True):
        ids = torch.tensor([[*request.prompt_tokens, *completion.tokens.tolist()]])
        with torch.no_grad():
            logits = reference(input_ids=ids).logits[0, len(request.prompt_tokens) - 1 : -1] / temperature
        expected = logits.log_softmax(-1).gather(1, torch.tensor(completion.tokens.tolist())[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.logprobs.tolist()), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=pytest.mark.slow if f in ("qwen2", "llama") else ()) for f in FAMILIES],
)
def test_greedy_equals_generate(family, make_engine, reference):
    asked = [GenerationRequest(p, 0) for p in prompts(9)]
    model = reference(family)
    # Greedy decoding reaches this eos token, so both finish reasons are compared.
    free = make_engine(family, eos_ids=[]).generate(asked, SamplingParams(max_tokens=30, temperature=0))
    eos = free[0].tokens.tolist()[7]
    completions = make_engine(family, eos_ids=[eos], max_batch=4).generate(
        asked, SamplingParams(max_tokens=30, temperature=0)
    )
    for request, completion in zip(asked, completions, strict=True):
        expected = model.generate(
            torch.tensor([request.prompt_tokens]),
            max_new_tokens=30,
            do_sample=False,
            eos_token_id=eos,
            pad_token_id=0,
        )[0, len(request.prompt_tokens) :].tolist()
        assert completion.tokens.tolist() == expected
        assert completion.finish_reason == ("stop" if expected[-1] == eos else "length")
    assert {c.finish_reason for c in completions} == {"stop", "length"}
    assert_logprobs(model, completions, asked)


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_of_sampled_tokens(family, make_engine, reference):
    asked = requests(8)
    params = SamplingParams(max_tokens=40, temperature=0.7, top_p=0.9, top_k=50)
    completions = make_engine(family).generate(asked, params)
    assert_logprobs(reference(family), completions, asked, temperature=0.7)
    assert len({tuple(c.tokens.tolist()) for c in completions}) == len(completions)


@settings(max_examples=1, deadline=None)
@given(
    chance=st.integers(0, 2**32),
    max_batch=st.integers(1, 40),
    family=st.sampled_from(["grouped", "qwen3", "glm4", "qwen3_5_text"]),
    wide=st.booleans(),
)
@example(chance=0, max_batch=1, family="grouped", wide=False)
@example(chance=0, max_batch=1, family="qwen3_5_text", wide=False)
@example(chance=0, max_batch=1, family="grouped", wide=True)
@example(chance=0, max_batch=6, family="qwen3_5_text", wide=True)
def test_a_response_is_the_same_to_the_bit_in_any_company(make_engine, chance, max_batch, family, wide):
    """Tokens and log-probs do not depend on batch composition.

    Requests run with others or alone, in any order, in one batch or several; some join while others run."""
    asked, params, rng = BATCH_REQUESTS, SamplingParams(max_tokens=12), random.Random(chance)
    with patch.object(transformers_layers, "NARROW", 0 if wide else 256):
        if (family, wide) not in TOGETHER:
            TOGETHER[family, wide] = make_engine(family).generate(asked, params)
        engine = make_engine(family, max_batch=max_batch)
    together = TOGETHER[family, wide]
    some = rng.sample(range(len(asked)), rng.randint(1, 20))
    completions = engine.generate([asked[i] for i in some], params)
    assert completions == [together[i] for i in some]
    later, ended = list(some), {}
    while later or engine.running:
        now = [later.pop() for _ in range(rng.randint(0, min(3, len(later))))]
        engine.submit({i: asked[i] for i in now}, params)
        ended |= engine.poll(0.0)  # one decode step or prefill
    assert ended == {i: together[i] for i in some}


def test_a_long_response_is_the_same_to_the_bit_in_any_company(make_engine):
    """Lengths exceed one block of queries or keys of torch's attention."""
    sizes = (3, 60, 190, 191, 193, 300, 420)
    asked = [GenerationRequest(p, i) for i, n in enumerate(sizes) for p in prompts(1, seed=n, low=n, high=n)]
    params = SamplingParams(max_tokens=40)
    engine = make_engine(eos_ids=())
    together = engine.generate(asked, params)
    assert [engine.generate([request], params)[0] for request in asked] == together


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    count=st.integers(1, 200),
    wide_in=st.sampled_from([256, 448, 576, 1536]),
    wide_out=st.sampled_from([192, 576, 1000]),
    bias=st.booleans(),
)
def test_a_row_of_a_wide_layer_is_multiplied_alike_in_any_company(seed, count, wide_in, wide_out, bias):
    generator = torch.Generator().manual_seed(seed)
    layer = BlockLinear(wide_in, wide_out, bias=bias).requires_grad_(False)
    layer.block = Block.make([layer.weight], wide_in)
    for parameter in layer.parameters():
        parameter.normal_(generator=generator)
    rows = torch.randn(count, wide_in, generator=generator)
    together = layer(rows)
    torch.testing.assert_close(together, F.linear(rows, layer.weight, layer.bias), atol=1e-3, rtol=1e-4)
    for row in {0, count // 2, count - 1}:
        assert torch.equal(layer(rows[row]), together[row])


@pytest.mark.parametrize(
    ("other", "fewest"), [((), 8), ((8,), 16), ((16,), 32), ((8, 16), 32), ((32,), 64), ((8, 32), 64)]
)
def test_products_that_add_in_another_order_are_found(monkeypatch, other, fewest):
    """`other`: row counts at which the second matrix is multiplied in two halves."""

    def linear(rows, weight):
        if weight.shape == (300, 512) and len(rows) in other:
            return rows[:, :256] @ weight[:, :256].T + rows[:, 256:] @ weight[:, 256:].T
        return (rows[:, None] * weight).sum(-1)  # one summation order for every row count

    monkeypatch.setattr(F, "linear", linear)
    assert find_fewest_rows([torch.empty(20, 64), torch.empty(300, 512)]) == fewest


@given(rows=st.integers(1, 600), fewest=st.sampled_from([8, 16, 32, 64]))
def test_products_of_a_batch(rows, fewest):
    block = Block(fewest, largest=LARGEST)
    whole = block.pad(rows)
    assert 0 <= whole - rows < max(fewest, rows % LARGEST)
    assert {len(part) for part in torch.empty(whole).split(LARGEST)} <= {fewest, 8, 16, 32, LARGEST}
    assert whole % fewest == 0 and whole == block.pad(whole)
    assert all(begin + block.pad(rows - begin) <= block.get_capacity(rows) for begin in range(rows))


ORDERED = re.compile(
    r"mm|linear|matmul|solve|attention|sum|mean|norm|softmax|cumsum|sort|topk|argmax|searchsorted"
)


class Shapes(TorchDispatchMode):
    """Record each floating-point product and reduction with the shape that decides its summation order.

    For a product this is the shape and memory layout of one matrix, and whether there are several.
    For a reduction it is the length of a reduced row. Entries belong to a phase: a step or a prefill's width.
    Maxima are omitted, as they do not depend on the order. Row counts in `alike` count as one shape."""

    def __init__(self, alike: Sequence[int] = ()) -> None:
        super().__init__()
        self.phase, self.found, self.alike = "", set(), alike

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = operation.overloadpacket.__name__
        tensors = [
            a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor) and a.is_floating_point()
        ]
        if ORDERED.search(name) and tensors:
            if "attention" in name:  # query and key of one head in one row
                shape = [tuple(t.shape[2:]) for t in tensors[:2]]
            elif name in ("bmm", "baddbmm", "matmul", "linalg_solve_triangular"):
                folded = [t.reshape(-1, *t.shape[-2:]) for t in tensors[-2:]]  # as matmul does
                lies = [(tuple(t.shape[1:]), t[0].is_contiguous()) for t in folded]
                shape = [*lies, len(folded[-1]) > 1]
            elif re.search("mm|linear", name):
                rows, *matrix = [tuple(t.shape) for t in tensors[:2]]
                shape = [(max(self.alike), *rows[1:]) if rows[0] in self.alike else rows, *matrix]
            elif name in ("sum", "mean"):
                shape = [tensors[0].shape[d] for d in args[1]]
            else:
                shape = [tensors[0].shape[-1]]
            self.found.add((self.phase, name, str(shape)))
        return operation(*args, **kwargs)


def shapes_of(monkeypatch, engine, asked, params, alike: Sequence[int] = ()) -> set[tuple[str, str, str]]:
    """Return the shapes that occur while these requests are answered."""
    shapes = Shapes(alike)
    step, prefill = DecodeLoop._step, DecodeLoop._prefill

    def named_step(loop):
        shapes.phase = "step"
        step(loop)

    def named_prefill(loop, segments, *more):
        shapes.phase = f"prefill {segments[0].width}"
        prefill(loop, segments, *more)

    with monkeypatch.context() as patched, shapes:
        patched.setattr(DecodeLoop, "_step", named_step)
        patched.setattr(DecodeLoop, "_prefill", named_prefill)
        engine.generate(asked, params)
    return shapes.found


@pytest.mark.parametrize(
    ("family", "alike"),
    [
        ("grouped", ()),
        pytest.param("qwen3", (64,), marks=pytest.mark.slow),
        pytest.param("glm4", (16, 32, 64), marks=pytest.mark.slow),
        ("qwen3_5_text", (8, 16, 32, 64)),
    ],
)
def test_no_shape_that_a_response_meets_depends_on_its_company(make_engine, monkeypatch, family, alike):
    """Shapes that may decide a library's summation order do not depend on batch composition.

    Then results do not either, on any processor. A request runs alone, and with fewer and more others of
    shorter and longer prompts, while the cache grows.
    `alike`: row counts of wide products that the processor sums in the same order, so they may differ."""
    monkeypatch.setattr(transformers_layers, "NARROW", 0 if alike else 256)
    monkeypatch.setattr(transformers_layers, "find_fewest_rows", lambda weights: min(alike))
    sizes = (3, 30, 31, 70, 100, 140, 5, 12, 9, 180)
    asked = [
        GenerationRequest(p, 10 * i + j)
        for i, n in enumerate(sizes)
        for p in prompts(1, i, n, n)
        for j in range(9)
    ]
    # Long enough that the prompts of 30 and 100 tokens need another chunk of keys.
    params = SamplingParams(max_tokens=40, top_p=0.9, top_k=40)
    engine = make_engine(family, eos_ids=())
    company = shapes_of(monkeypatch, engine, asked, params, alike)
    for i in (0, 12, 39):
        alone = shapes_of(monkeypatch, engine, asked[i : i + 1], params, alike)
        own = {"step", f"prefill {_width(asked[i].prompt_tokens)}"}
        assert alone == {shape for shape in company if shape[0] in own}
        assert {phase for phase, *_ in alone} == own and len(alone) > 15
    few = shapes_of(monkeypatch, engine, asked[:9], params, alike)
    assert few <= company
    if len(alike) > 1:  # only those row counts differ
        assert shapes_of(monkeypatch, engine, asked[:9], params) != few


@pytest.mark.parametrize("what", ["attention", "linear"])
def test_the_shapes_show_what_depends_on_company(make_engine, monkeypatch, what):
    """The test above detects torch's own attention and linear layers, whose shapes depend on the batch."""
    if what == "attention":

        def plain(query, key, value, mask, scale):
            return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)

        monkeypatch.setattr(transformers_layers, "decode_attention", plain)
    else:
        monkeypatch.setattr(BlockLinear, "forward", torch.nn.Linear.forward)
    asked = [GenerationRequest(p, 10 * i + j) for i, p in enumerate(prompts(9, high=100)) for j in range(9)]
    engine, params = make_engine(eos_ids=()), SamplingParams(max_tokens=20)
    company = shapes_of(monkeypatch, engine, asked, params)
    alone = shapes_of(monkeypatch, engine, asked[:1], params)
    assert {s for s in alone if s[0] == "step"} != {s for s in company if s[0] == "step"}


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=5),
    groups=st.sampled_from([(1, 1), (2, 2), (3, 3), (1, 4)]),
    more=st.integers(0, 3),
)
def test_chunks_of_keys_are_attention_and_masked_ones_change_no_bit(seed, lengths, groups, more):
    (kv_heads, group), dim = groups, 16
    generator = torch.Generator().manual_seed(seed)
    lengths = [*lengths, *[1] * (16 - len(lengths))]
    columns = -(-max(lengths) // COLUMNS) * COLUMNS

    def attend(rows: slice, columns: int) -> torch.Tensor:
        mask = torch.zeros(16, 1, 1, columns)
        for row, length in enumerate(lengths):
            mask[row, ..., length:] = -torch.inf
        k, v = key[:, :, :columns], value[:, :, :columns]
        return decode_attention(query[rows], k[rows], v[rows], mask[rows], 0.25)

    query = torch.randn(16, kv_heads, group, dim, generator=generator)
    key, value = (
        3 * torch.randn(16, kv_heads, columns + more * COLUMNS, dim, generator=generator) for _ in "kv"
    )
    found = attend(slice(0, 16), columns)
    for row, length in enumerate(lengths):
        scores = (query[row].double() @ key[row, :, :length].double().transpose(1, 2)) * 0.25
        expected = scores.softmax(-1) @ value[row, :, :length].double()
        torch.testing.assert_close(found[row].double(), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(attend(slice(0, 16), columns + more * COLUMNS), found)


def test_poll_comes_back_in_time(make_engine):
    """With a time limit of 0, poll runs one decode step or one prefill and returns."""
    engine, params = make_engine(eos_ids=()), SamplingParams(max_tokens=30)
    engine.submit({7: GenerationRequest((5, 6), 0), 9: GenerationRequest((5, 6), 1)}, params)
    for _ in range(29):
        assert engine.poll(0.0) == [] and engine.running == 2
    engine.submit({8: GenerationRequest((5, 6), 0)}, params)
    assert engine.poll(0.0) == []  # only its prefill
    ended = dict(engine.poll(0.0))
    assert set(ended) == {7, 9} and engine.running == 1
    ended |= engine.poll(100.0)
    assert ended[8] == ended[7] != ended[9] and engine.running == 0


@settings(max_examples=3, deadline=None)
@given(chance=st.integers(0, 2**32), max_batch=st.integers(1, 40))
def test_each_request_has_a_limit_of_its_own(make_engine, chance, max_batch):
    """A response with a limit is a prefix of the response without one, in any batch."""
    rng, params = random.Random(chance), SamplingParams(max_tokens=20)
    if "qwen3" not in TOGETHER:
        TOGETHER["qwen3"] = make_engine("qwen3").generate(BATCH_REQUESTS, params)
    limits = [rng.choice([None, *range(1, 21)]) for _ in BATCH_REQUESTS]
    asked = [
        replace(request, max_tokens=limit) for request, limit in zip(BATCH_REQUESTS, limits, strict=True)
    ]
    found = make_engine("qwen3", max_batch=max_batch).generate(asked, replace(params, max_tokens=20))
    for whole, limit, got in zip(TOGETHER["qwen3"], limits, found, strict=True):
        count = min(len(whole.tokens.tolist()), limit or 20)
        assert (got.tokens.tolist(), got.logprobs.tolist()) == (
            whole.tokens.tolist()[:count],
            whole.logprobs.tolist()[:count],
        )
        assert got.finish_reason == (whole.finish_reason if count == len(whole.tokens.tolist()) else "length")


def test_a_limit_above_that_of_the_params(make_engine):
    """The KV cache grows for the longer response."""
    engine = make_engine(eos_ids=())
    [whole] = engine.generate([GenerationRequest((5, 6), 3)], SamplingParams(150))
    short, long = engine.generate(
        [GenerationRequest((5, 6), 2), GenerationRequest((5, 6), 3, max_tokens=150)], SamplingParams(2)
    )
    assert (len(short.tokens.tolist()), short.finish_reason) == (2, "length") and long == whole


def test_requests_of_other_params_take_turns(make_engine):
    """Requests with different stop texts decode alternately; each response equals that of a separate run."""
    engine, kinds = (
        make_engine(eos_ids=()),
        [SamplingParams(30, stop=stop) for stop in ((), ("~~",), ("^^",))],
    )
    alone = [engine.generate([GenerationRequest((5, 6), i)], params)[0] for i, params in enumerate(kinds)]
    for i, params in enumerate(kinds):
        engine.submit({i: GenerationRequest((5, 6), i)}, params)
    ended = {}
    for _ in range(89):
        ended |= engine.poll(0.0)
        assert len({loop.longest for loop in engine._loops}) <= 2  # as they alternate
    engine.submit({3: GenerationRequest((5, 6), 0)}, kinds[0])
    while engine.running:
        ended |= engine.poll(1.0)
    assert ended == {**dict(enumerate(alone)), 3: alone[0]}


def test_long_responses_outgrow_the_cache_and_late_prompts_join(make_engine, reference, monkeypatch):
    grown = []  # columns before and after each call
    reserve = KVCache.reserve

    def spy(cache: KVCache, rows: int, columns: int) -> None:
        before = cache.columns
        reserve(cache, rows, columns)
        grown.append((before, cache.columns))

    monkeypatch.setattr(KVCache, "reserve", spy)
    # 12 rows at once, prompts of 1 to 350 tokens, responses of up to 150 (lengths depend on the processor).
    # The cache grows for responses, and for the last prompts, which are longer than all earlier ones.
    asked = [
        GenerationRequest(p, i)
        for i, p in enumerate(
            prompts(12, seed=3, high=10)
            + prompts(15, seed=4, low=100, high=150)
            + prompts(8, seed=5, low=340, high=350)
        )
    ]
    engine = make_engine(max_batch=12, eos_ids=range(1, 5))
    completions = engine.generate(asked, SamplingParams(max_tokens=150))
    assert (
        max(len(c.tokens.tolist()) for c in completions) > 100
        and min(len(c.tokens.tolist()) for c in completions) < 20
    )
    assert len(grown) > 2 and all(before < after for before, after in grown)
    assert_logprobs(reference("qwen3"), completions, asked)


def test_prompts_are_prefilled_once(make_engine, monkeypatch):
    engine = make_engine(max_batch=64)
    seen, prefill = [], DecodeLoop._prefill

    def spy(loop, *given):
        hook = loop.body.embed_tokens.register_forward_pre_hook(
            lambda module, args: seen.append(args[0].shape)
        )
        prefill(loop, *given)
        hook.remove()

    monkeypatch.setattr(DecodeLoop, "_prefill", spy)
    engine.generate(requests(6, group=8), SamplingParams(max_tokens=3))
    widths = [16 if len(p) <= 16 else 32 for p in prompts(6)]  # padded
    shapes = sorted((widths.count(width), width) for width in set(widths))
    assert sorted(map(tuple, seen)) == shapes


def branches(seed: int, count: int) -> list[tuple[int, ...]]:
    """Make distinct prompts, each of which extends a prefix of an earlier one."""
    rng, made = random.Random(seed), [(5,) * COLUMNS + (6,)]
    while len(made) < count:
        whole = rng.choice(made)
        begin = whole[: rng.choice((0, 20, COLUMNS - 1, COLUMNS, COLUMNS + 1, 2 * COLUMNS, 3 * COLUMNS))]
        prompt = begin + tuple(rng.randrange(5, 9) for _ in range(rng.choice((1, 2, 30, COLUMNS, 90, 150))))
        if prompt not in made:
            made.append(prompt)
    return made


@given(seed=st.integers(0, 2**32), count=st.integers(1, 30))
def test_what_prompts_begin_with_in_common_is_one_segment(seed, count):
    """Shared segments are whole chunks of the common prefix; the segments of a prompt cover all of it."""
    asked, computed = branches(seed, count), {}
    for segment in split_prompts(asked, shared=True):
        for prompt in segment.prompts:
            computed.setdefault(prompt, []).append(segment)
        stop, first = segment.start + segment.width, asked[segment.prompts[0]]
        assert segment.start % COLUMNS == 0 and all(asked[i][:stop] == first[:stop] for i in segment.prompts)
        if not segment.ends:
            assert segment.width % COLUMNS == 0 and all(len(asked[i]) > stop for i in segment.prompts)
    for i, prompt in enumerate(asked):
        *begin, end = segments = computed[i]
        assert end.ends and end.prompts == [i] and not any(segment.ends for segment in begin)
        assert [segment.start for segment in segments] == [
            0,
            *(segment.start + segment.width for segment in begin),
        ]
        assert end.start + end.width == _width(prompt) >= len(prompt)
    for a, b in itertools.combinations(range(count), 2):
        pairs = zip(asked[a][:-1], asked[b][:-1], strict=False)
        alike = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        both = sum(segment.width for segment in computed[a] if b in segment.prompts)
        assert both == alike // COLUMNS * COLUMNS
    apart = split_prompts(asked, shared=False)
    assert sorted(segment.prompts for segment in apart) == [[i] for i in range(count)]
    assert all(segment.start == 0 and segment.ends for segment in apart)


@pytest.mark.parametrize(
    "family",
    [
        *("grouped", "wide", "qwen3_5_text", "experts"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("glm4", "latents")),
    ],
)
def test_prompts_that_begin_alike_are_answered_as_alone(family, make_engine, reference, monkeypatch):
    """Responses equal those of each request alone: bitwise, or in tokens and experts for mixtures.

    Common prefixes are prefilled once, except by Qwen3.5."""
    mixture = family in ("experts", "latents")
    monkeypatch.setattr(transformers_layers, "NARROW", 0 if family == "wide" else 256)
    engine = make_engine(family := "grouped" if family == "wide" else family, eos_ids=())
    asked = [GenerationRequest(p, 10 * i + j) for i, p in enumerate(branches(2, 14)) for j in range(2)]
    params, tokens = SamplingParams(max_tokens=6, routing=mixture), []
    embed = engine.model.get_input_embeddings()
    hook = embed.register_forward_pre_hook(lambda _, args: tokens.append(args[0].shape))
    together = engine.generate(asked, params)
    hook.remove()
    whole = sum(_width(request.prompt_tokens) for request in asked[::2])
    prefilled = sum(shape.numel() for shape in tokens[: -(params.max_tokens - 1)])
    assert prefilled == whole if family == "qwen3_5_text" else prefilled < 0.7 * whole
    assert_logprobs(reference(family), together, asked)
    for request, answer in zip(asked, together, strict=True):
        alone = engine.generate([request], params)[0]
        if mixture:
            assert (
                alone.tokens.tolist() == answer.tokens.tolist()
                and (alone.routed_experts == answer.routed_experts).all()
            )
        else:
            assert alone == answer


def test_no_shape_depends_on_what_prompts_share(make_engine, monkeypatch):
    """A prefill in segments has the same shapes as the prefill of a whole prompt, on any processor."""
    asked = [GenerationRequest(prompt, i) for i, prompt in enumerate(branches(2, 14))]
    engine, params = make_engine("grouped", eos_ids=()), SamplingParams(max_tokens=1)

    def shapes(requests: Sequence[GenerationRequest]) -> set[tuple[str, str]]:
        return {found[1:] for found in shapes_of(monkeypatch, engine, requests, params)}

    assert shapes(asked) == set.union(*(shapes([request]) for request in asked))


def test_prompts_that_begin_alike_in_bfloat16(make_engine, reference):
    asked = [GenerationRequest(prompt, i) for i, prompt in enumerate(branches(3, 9))]
    completions = make_engine("grouped", dtype=torch.bfloat16).generate(asked, SamplingParams(max_tokens=20))
    apart = GenerationRequest(tuple(reversed(asked[-1].prompt_tokens)), 0)  # no common prefix
    completions += make_engine("grouped", dtype=torch.bfloat16).generate(
        [apart], SamplingParams(max_tokens=20)
    )
    errors = []
    for request, completion in zip([*asked, apart], completions, strict=True):
        ids = torch.tensor([[*request.prompt_tokens, *completion.tokens.tolist()]])
        with torch.no_grad():
            logits = reference("grouped")(input_ids=ids).logits[0, len(request.prompt_tokens) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(completion.tokens.tolist())[:, None])[:, 0]
        errors.append(float((torch.tensor(completion.logprobs.tolist()) - expected).abs().mean()))
    assert max(errors[:-1]) < 3 * errors[-1] + 1e-3


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    chunks=st.integers(0, 4),
    queries=st.integers(1, 150),
    heads=st.sampled_from([(1, 1), (4, 2), (9, 3)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_attention_of_a_segment_is_causal(seed, chunks, queries, heads, dtype):
    generator, (query_heads, kv_heads), dim = torch.Generator().manual_seed(seed), heads, 16
    count = chunks * COLUMNS + queries
    query = torch.randn(2, query_heads, queries, dim, generator=generator).to(dtype)
    key, value = (torch.randn(2, kv_heads, count, dim, generator=generator).to(dtype) for _ in "kv")
    found = prefill_attention(query, key, value, 0.25)
    key, value = (x.double().repeat_interleave(query_heads // kv_heads, 1) for x in (key, value))
    expected = torch.empty(query.shape, dtype=torch.float64)
    for i in range(queries):
        seen = slice(count - queries + i + 1)
        scores = (query[:, :, i, None].double() * key[:, :, seen]).sum(-1) * 0.25
        expected[:, :, i] = (scores.softmax(-1)[..., None] * value[:, :, seen]).sum(2)
    bound = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.double(), expected, atol=bound, rtol=0)


def test_a_long_prefill_is_cut(make_engine, monkeypatch):
    asked, params = requests(12), SamplingParams(max_tokens=12)
    whole = make_engine().generate(asked, params)
    monkeypatch.setattr(transformers_decode, "PREFILL_TOKENS", 40)
    assert [c.tokens.tolist() for c in make_engine().generate(asked, params)] == [
        c.tokens.tolist() for c in whole
    ]


def test_a_prefill_is_cut_by_what_stands_before_it_too(make_engine, monkeypatch):
    """The shared prefix counts towards the limit, as its keys and values are gathered for each prompt."""
    asked = [GenerationRequest((5,) * 2 * COLUMNS + (6 + i,), i) for i in range(20)]
    sizes, prefill = [], DecodeLoop._prefill

    def spy(loop, segments, *more):
        sizes.append((len(segments), segments[0].start, segments[0].width))
        prefill(loop, segments, *more)

    monkeypatch.setattr(DecodeLoop, "_prefill", spy)
    monkeypatch.setattr(transformers_decode, "PREFILL_TOKENS", 9 * (2 * COLUMNS + 32))
    make_engine().generate(asked, SamplingParams(max_tokens=1))
    assert sizes == [(1, 0, 2 * COLUMNS), *((n, 2 * COLUMNS, 32) for n in (9, 9, 2))]


def test_stop_texts(make_engine):
    asked = requests(12)
    engine = make_engine()
    free = engine.generate(asked, SamplingParams(max_tokens=40))
    texts = [engine.tokenizer.decode(c.tokens.tolist(), skip_special_tokens=False) for c in free]
    ascii_pair = next(t[i : i + 2] for t in texts for i in range(2, 30) if t[i : i + 2].isascii())
    stops = (ascii_pair, next(c for c in texts[5] if c.isalpha() and c.isascii()), "never\nthere")
    stopped = engine.generate(asked, SamplingParams(max_tokens=40, stop=stops))
    for alone, cut in zip(free, stopped, strict=True):
        # Reference: the shortest prefix whose text contains a stop text.
        ends = [
            n
            for n in range(1, len(alone.tokens.tolist()) + 1)
            if any(
                s in engine.tokenizer.decode(alone.tokens.tolist()[:n], skip_special_tokens=False)
                for s in stops
            )
        ]
        assert cut.tokens.tolist() == alone.tokens.tolist()[: ends[0] if ends else None]
        assert cut.finish_reason == ("stop" if ends else alone.finish_reason)
    assert sum(len(c.tokens.tolist()) for c in stopped) < sum(len(c.tokens.tolist()) for c in free)


def test_a_stop_text_may_be_a_special_token():
    """Some tokenizers have `</answer>` as a special token, and the template's end of a turn is one."""
    tokenizer = make_tokenizer(300)
    tokenizer.add_special_tokens({"additional_special_tokens": ["</answer>"]})
    (tag,) = tokenizer("</answer>", add_special_tokens=False).input_ids
    stopping = Stopping(("</answer>", "<|im_end|>"), 310, [EOS], tokenizer, torch.device("cpu"))
    assert stopping.ends([50, tag]) and stopping.ends([50, 4]) and stopping.ends([EOS])
    assert not stopping.ends([tag, *[50] * 40]) and stopping.candidates[[tag, 4]].all()


def test_what_was_begun_goes_on(make_engine):
    """A prefix of any length is continued to the same response, alone and in a batch.

    Also with its own token limit, and with a stop text that is cut in two. The prefix keeps its log-probs."""
    engine, params = make_engine(max_batch=16), SamplingParams(max_tokens=24)
    asked = requests(4, seed=3)
    wholes = engine.generate(asked, params)
    cut = [(i, k) for i, whole in enumerate(wholes) for k in (1, 2, 7, len(whole.tokens.tolist()) - 1)]
    cut = [(i, k) for i, k in cut if 0 < k < len(wholes[i].tokens.tolist())]

    def begun(i: int, k: int, max_tokens: int | None = None) -> GenerationRequest:
        given = TokenData(wholes[i].tokens.tolist()[:k], [-0.5] * k)
        return replace(asked[i], prefix=given, max_tokens=max_tokens)

    together = engine.generate([begun(i, k) for i, k in cut], params)
    for (i, k), found in zip(cut, together, strict=True):
        assert (found.tokens.tolist(), found.finish_reason) == (
            wholes[i].tokens.tolist(),
            wholes[i].finish_reason,
        )
        assert found.logprobs.tolist()[:k] == [-0.5] * k
        assert found.logprobs.tolist()[k:] == pytest.approx(wholes[i].logprobs.tolist()[k:], abs=1e-5)
        assert engine.generate([begun(i, k)], params) == [found]
    longest = max(range(len(asked)), key=lambda i: len(wholes[i].tokens.tolist()))
    (short,) = engine.generate([begun(longest, 3, max_tokens=5)], params)
    assert (short.tokens.tolist(), short.finish_reason) == (wholes[longest].tokens.tolist()[:5], "length")
    pair = engine.tokenizer.decode(wholes[longest].tokens.tolist()[3:5], skip_special_tokens=False)
    stopped = SamplingParams(max_tokens=24, stop=(pair,))
    (straight,) = engine.generate([asked[longest]], stopped)
    assert straight.finish_reason == "stop" and len(straight.tokens.tolist()) == 5
    (cut_through,) = engine.generate([begun(longest, 4)], stopped)
    assert (cut_through.tokens.tolist(), cut_through.finish_reason) == (straight.tokens.tolist(), "stop")


def test_what_was_begun_alike_goes_on(make_engine):
    """Two prefixes share a chunk and then differ.

    A third request is prefilled between their common part and the rest."""
    engine, params = make_engine(eos_ids=()), SamplingParams(max_tokens=COLUMNS + 16)
    common = tuple(range(10, 10 + COLUMNS))
    cut = [TokenData([*common, 5 + i], [-0.5] * (COLUMNS + 1)) for i in range(2)]
    asked = [GenerationRequest((7,), i, prefix=given) for i, given in enumerate(cut)]
    found = engine.generate([GenerationRequest((8,) * 70, 3), *asked], params)[1:]
    assert [answer.tokens.tolist()[: COLUMNS + 1] for answer in found] == [
        given.tokens.tolist() for given in cut
    ]
    assert [engine.generate([request], params)[0] for request in asked] == found


def test_sleep_frees_and_wake_needs_an_update(make_engine):
    engine, asked, params = make_engine(), requests(3), SamplingParams(max_tokens=8)
    before = [c.tokens.tolist() for c in engine.generate(asked, params)]
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
    assert [
        c.tokens.tolist() for c in engine.generate(asked, params)
    ] == before and engine.weight_version == 9
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
    target.end_update(source.weight_version)
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
    assert all(-20 < p <= 0 for c in completions for p in c.logprobs.tolist())


def test_nan_logits_name_row_and_version(make_engine):
    engine = make_engine("qwen2")
    poisoned = 200
    engine.parameters()["model.embed_tokens.weight"][poisoned] = torch.nan
    asked = [
        GenerationRequest((5, 6), 0),
        GenerationRequest((5, 6, 9), 1),
        GenerationRequest((5, poisoned), 2),
    ]
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
        make_engine().generate(
            [GenerationRequest((7,), 0), GenerationRequest(prompt, 0)], SamplingParams(max_tokens)
        )


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
        engine.generate([GenerationRequest((5,), 0)], SamplingParams(1))
