"""The sample browser: whose tokens get which colour, and that whatever a response holds is text."""

from __future__ import annotations

import re
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.observe.metrics import MetricsLog
from megarl.observe.page import document
from megarl.observe.runs import Run, load_run
from megarl.observe.sample_browser import LEVELS, browser, level, pick_steps
from megarl.observe.samples import Sample, SampleLog

EVIL = ["<script>alert(1)</script>", "</pre>", '" onload="x', "&lt;", "\n", "<eos>"]


class Tokens(HTMLParser):
    """(class, title, text) of each span within a response, and every tag that there is."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.spans: list[list[str]] = []
        self.tags: list[str] = []
        self.inside = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        found = dict(attrs)
        self.inside = tag == "span" and "title" in found
        if self.inside:
            self.spans.append([found["class"] or "", found["title"] or "", ""])

    def handle_endtag(self, tag: str) -> None:
        self.inside = False

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.spans[-1][2] += data


def run_of(samples: list[Sample]) -> Run:
    return Run("run", [], samples, {}, {}, 0)


def sample(step: int = 1, **fields: object) -> Sample:
    return Sample(
        **{"step": step, "prompt": "p", "response": "r", "reward": 1.0, "correct": True, "truncated": False, "length": 6} | fields
    )


def test_tokens_are_coloured_by_what_they_are_worth() -> None:
    made = sample(
        prompt="1+1=?",
        answer="2",
        group_size=8,
        group_right=5,
        tokens=["a", "b", "c", "d", "\n", "[... 3 tokens left out ...]", "e"],
        advantages=[2.0, 1.0, 1.0, 0.0, -1.0, None, -2.0],
        values=[0.5, 0.5, 0.5, 0.5, -0.25, None, 0.0],
    )
    html = browser(run_of([made]), 0, named=False)
    assert Tokens(html).spans == [
        ["ap4 vp4", "advantage +2, value +0.5", "a"],
        ["ap2 vp4", "advantage +1, value +0.5", "bc"],
        ["vp4", "advantage +0, value +0.5", "d"],
        ["an2 vn2", "advantage -1, value -0.25", "↵\n"],
        ["an4", "advantage -2, value +0", "e"],
    ]
    assert "</span>[... 3 tokens left out ...]<span" in html
    assert "answer 2 · 5 of its 8 responses right" in html and "reward +1" in html
    assert html.count('type="radio"') == 3 and html.count("checked") == 1 and 'class="by-advantage" checked' in html
    style = document("", [html])
    for name in ("an4", "ap1", "vn2", "vp4"):
        assert f".by-{'advantage' if name[0] == 'a' else 'value'}:checked ~ .samples .{name}" in style


@pytest.mark.parametrize("numbers", [None, [1.0, -1.0, 0.5, 0.1, 0.0, -0.2]])
def test_hostile_responses_are_text(numbers: list[float] | None, tmp_path: Path) -> None:
    evil = "".join(EVIL)
    made = [sample(step, prompt=evil, response=evil, answer=evil, tokens=EVIL, advantages=numbers) for step in range(1, 12)]
    MetricsLog(tmp_path).close()
    with SampleLog(tmp_path, 4) as log:
        log.write(made)
        for one in made:
            log.write([one])
    html = browser(load_run(tmp_path), 0, named=True)
    found = Tokens(html)
    assert "script" not in found.tags and html.count("</pre>") == html.count("<pre>")
    if numbers is None:
        assert "radio" not in html and not found.spans
    else:
        assert [text.replace("↵", "") for _, _, text in found.spans[: len(EVIL)]] == EVIL
    assert unescape(html).count(evil) > 10


def test_more_steps_are_folded_and_steps_with_tokens_chosen() -> None:
    plain = [sample(step, prompt=f"{step}") for step in range(1, 41)]
    with_tokens = [sample(step, prompt=f"{step}", tokens=["x"], advantages=[1.0]) for step in (5, 10, 15, 20)]
    assert pick_steps(plain) == {"Early": 1, "Middle": 21, "Late": 40}
    assert pick_steps([*plain, *with_tokens]) == {"Early": 5, "Middle": 15, "Late": 20}
    html = browser(run_of(plain), 0, named=False)
    assert len(re.findall(r"<h3>Samples", html)) == 6 and "6 more steps" in html and "radio" not in html
    assert browser(run_of([]), 0, named=False) == "" and "<details>" not in browser(run_of(plain[:3]), 0, named=False)


def test_a_long_run_makes_a_small_page() -> None:
    tokens = ["wörd "] * 512
    worth = [(i % 100) / 100 - 0.5 for i in range(512)]
    made = [sample(step, response="x" * 20_000, tokens=tokens, advantages=worth, values=worth) for step in range(1, 101) for _ in range(4)]
    assert len(browser(run_of(made), 0, named=False)) < 1_000_000


@settings(deadline=None)
@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_levels_are_symmetric_and_bounded(number: float, scale: float) -> None:
    assert level(number, scale) == -level(-number, scale)
    assert abs(level(number, scale)) <= LEVELS and (abs(number) < scale or abs(level(number, scale)) == LEVELS)
