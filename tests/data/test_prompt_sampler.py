"""The prompt sampler: every index once per epoch, exact resumption, an order independent of libraries."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.config.errors import CheckpointError
from megarl.data.prompt_sampler import PromptSampler, epoch_order
from megarl.data.prompts import Prompt, checksum_prompts

GOLDEN = ([8, 4, 1, 5, 0, 9, 2, 7, 3, 6], [9, 1, 3, 8, 2, 7, 0, 5, 6, 4], [2, 9, 1, 0, 8, 6, 3, 4, 5, 7])


@given(st.integers(1, 60), st.integers(0, 2**63), st.booleans(), st.lists(st.integers(0, 150), max_size=12))
def test_every_index_once_an_epoch_however_it_is_taken(
    num_prompts: int, seed: int, shuffle: bool, sizes: list[int]
) -> None:
    sampler = PromptSampler(num_prompts, seed, shuffle)
    parts = [sampler.take(n) for n in sizes]
    assert [len(part) for part in parts] == sizes
    taken = [index for part in parts for index in part]
    assert taken == PromptSampler(num_prompts, seed, shuffle).take(sum(sizes))
    for at in range(0, len(taken) - num_prompts + 1, num_prompts):
        assert sorted(taken[at : at + num_prompts]) == list(range(num_prompts))


@given(st.integers(1, 60), st.integers(0, 9), st.booleans(), st.integers(0, 200), st.integers(0, 200))
def test_a_saved_state_continues_exactly(
    num_prompts: int, seed: int, shuffle: bool, before: int, after: int
) -> None:
    sampler = PromptSampler(num_prompts, seed, shuffle)
    sampler.take(before)
    state = json.loads(json.dumps(sampler.state()))
    resumed = PromptSampler(num_prompts, seed, shuffle)
    resumed.load_state(state)
    assert resumed.take(after) == sampler.take(after)
    assert resumed.state() == sampler.state()


def test_the_order_is_fixed_for_ever() -> None:
    """These numbers may never change: with another order a resumed run would not equal the original."""
    assert epoch_order(10, 0, 0) == GOLDEN[0]
    assert epoch_order(10, 1, 0) == GOLDEN[1]
    assert epoch_order(10, 0, 1) == GOLDEN[2]
    code = (
        "from megarl.data.prompt_sampler import epoch_order; import sys\n"
        "print(epoch_order(10, 0, 0)); sys.exit('torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0 and json.loads(run.stdout) == GOLDEN[0]


def test_shuffled_epochs_differ_and_are_uniform() -> None:
    """Position of index 0 over 4,000 epochs of 8: chi-square, 7 degrees of freedom, 24.3 at p = 0.001."""
    places = [epoch_order(8, 3, epoch).index(0) for epoch in range(4000)]
    assert sum((places.count(place) - 500) ** 2 / 500 for place in range(8)) < 24.3
    assert PromptSampler(5, shuffle=False).take(11) == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0]


@pytest.mark.parametrize(
    ("change", "key"),
    [({"num_prompts": 9}, "data.train"), ({"seed": 1}, "seed"), ({"shuffle": False}, "data.shuffle")]
    + [({"content": "of a file that was edited"}, "data.train")]
    + [({name: value}, "data.train") for name in ("epoch", "position") for value in (-1, None, "2")]
    + [({"position": 11}, "data.train")],
)
def test_a_foreign_state_is_refused(change: dict[str, object], key: str) -> None:
    sampler = PromptSampler(10)
    with pytest.raises(CheckpointError) as caught:
        sampler.load_state({**sampler.state(), **change})
    assert str(caught.value).startswith(f"{key}: ") and "\n" not in str(caught.value)
    assert sampler.take(3) == PromptSampler(10).take(3)


def test_the_content_depends_on_what_is_asked_on_its_answer_and_on_the_order() -> None:
    first, second, other = (
        Prompt(uid=uid, text="", tokens=tokens, answer=answer)
        for uid, tokens, answer in ((1, (5, 6), "7"), (2, (5,), "8"), (1, (5, 6), "8"))
    )
    assert checksum_prompts([first, second]) == checksum_prompts([replace(first), replace(second)])
    lists = [[first, second], [second, first], [other, second], [first], []]
    assert len(set(map(checksum_prompts, lists))) == len(lists)


def test_a_state_of_an_older_version_says_nothing_of_the_content() -> None:
    sampler = PromptSampler(10, content="a")
    sampler.take(3)
    state = sampler.state()
    del state["content"]
    resumed = PromptSampler(10, content="a")
    resumed.load_state(state)
    assert resumed.take(10) == sampler.take(10)


def test_no_prompts_are_refused() -> None:
    with pytest.raises(ValueError, match="num_prompts"):
        PromptSampler(0)
