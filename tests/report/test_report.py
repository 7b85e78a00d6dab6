"""The report: one file that refers to nothing outside itself, with every figure that the data allows.

The sample browser: whose tokens get which colour, and that whatever a response holds is text."""

from __future__ import annotations

import json
import re
from html import unescape
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algorithms.scores import interval
from megarl.config import phases
from megarl.config.errors import ConfigError, DataError
from megarl.observe.run_log import RunLog, SampleRecord
from megarl.observe.runs import RecordedRun, compute_group_shares, load_run
from megarl_report.figures import PHASES, SECTIONS, average_curves, group_families
from megarl_report.plots import (
    MAX_POINTS,
    Line,
    average_neighbours,
    draw_lines,
    format_value,
    moving_average,
    spread_heights,
)
from megarl_report.report import (
    LEVELS,
    colour_level,
    flatten,
    make_headline,
    pick_steps,
    render,
    tabulate_sources,
    write_report,
)

from .synthetic_run import write_run

VOID = {"meta", "br", "hr", "img", "input", "link"}
TITLES = [spec.title for specs in SECTIONS.values() for spec in specs]


class Page(HTMLParser):
    """Checks that tags are closed in the order of their opening; collects references, ids, headings, text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.references: list[str] = []
        self.ids: list[str] = []
        self.headings: list[str] = []
        self.text: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self._note(attrs)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._note(attrs)

    def _note(self, attrs: list[tuple[str, str | None]]) -> None:
        self.references += [
            v or "" for k, v in attrs if k in ("src", "href", "xlink:href", "action", "data", "srcset")
        ]
        self.references += [m for _, v in attrs for m in re.findall(r"url\((.*?)\)", v or "")]
        self.ids += [v or "" for k, v in attrs if k == "id"]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "h3" in self.open[-2:]:
            self.headings.append(data.strip())
        self.text.append(data)


def page(run_dirs: list[Path], out: Path) -> tuple[Page, str]:
    html = write_report(run_dirs, out).read_text(encoding="utf-8")
    return Page(html), html


@pytest.fixture(scope="module")
def vapo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "demo-vapo", "vapo", steps=40, k=8)


@pytest.fixture(scope="module")
def dapo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "demo-dapo", "dapo", steps=25, seed=1, k=1)


def left_out(parsed: Page) -> set[str]:
    note = next((text for text in parsed.text if text.startswith("Left out")), ": .")
    return set(note.split(": ", 1)[1].rstrip(".").split(", ")) - {""}


def test_report_of_a_vapo_run(vapo: Path, tmp_path: Path) -> None:
    parsed, html = page([vapo], tmp_path / "new" / "report.html")
    assert all(reference.startswith("#") for reference in parsed.references)
    assert {reference[1:] for reference in parsed.references} <= set(parsed.ids)
    assert len(parsed.ids) == len(set(parsed.ids))
    assert (
        "http" not in re.sub(r'xmlns(:xlink)?="[^"]*"', "", html)
        and "@import" not in html
        and "<script" not in html
    )
    assert left_out(parsed) == {
        "Calls and turns of an episode",
        "Filter waste",
        "Load of the experts",
        "Parts of the reward",
        "Peak memory per phase",
        "Supervised loss",
        "Supervised learning rate",
        "Supervised gradient norm",
    }
    assert set(TITLES) - set(parsed.headings) == left_out(parsed)
    assert html.count("<svg") == len(TITLES) - 8
    text = " ".join(parsed.text)
    run = load_run(vapo)
    first, last = (
        run.points("eval", "eval/avg")[0],
        run.points("eval", "eval/avg")[max(run.points("eval", "eval/avg"))],
    )
    assert f"{first:.3f} → {last:.3f}" in text
    for fact in (
        "runs/demo/warm_start/hf",
        "TP 2 x PP 1 x DP 1",
        "40 of 40",
        "32 prompts x 8",
        "torch 2.13.0",
        "actor.betas",
        "Early",
        "Middle",
        "Late",
    ):
        assert fact in text, fact
    assert "✓ right" in text and "✗ wrong" in text and "reward -1" in text
    assert "Alarms and events" not in text


def test_a_run_without_critic_says_what_is_left_out(dapo: Path, tmp_path: Path) -> None:
    parsed, html = page([dapo], tmp_path)
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == html
    missing = left_out(parsed)
    assert {
        "Explained variance",
        "Value loss",
        "Length-adaptive lambda",
        "Value loss in pretraining",
    } <= missing
    assert missing.isdisjoint(parsed.headings) and missing | set(parsed.headings) >= set(TITLES)
    # With one sample a problem pass and majority are avg again.
    drawn = re.search(r'aria-label="Evaluation accuracy".*?</svg>', html, re.DOTALL)
    assert drawn and "maj" not in drawn[0]


def test_several_runs_lie_over_each_other(vapo: Path, dapo: Path, tmp_path: Path) -> None:
    parsed, html = page([vapo, dapo], tmp_path / "both.html")
    legend = re.search(r'<ul class="legend runs">(.*?)</ul>', html)
    assert legend and re.findall(r"var\((--s\d)\)\"></i>([\w-]+)<", legend[1]) == [
        ("--s0", "demo-vapo"),
        ("--s1", "demo-dapo"),
    ]
    for title, colours in (
        ("Reward", {"--s0", "--s1"}),
        ("Explained variance", {"--s0"}),
        ("Groups sampled", {"--s0", "--s1"}),
    ):
        drawn = re.search(rf'aria-label="{title}".*?</svg>', html, re.DOTALL)
        assert drawn and set(re.findall(r"var\((--s\d)\)", drawn[0])) == colours
    text = " ".join(parsed.text)
    assert (
        "Samples of demo-vapo" in text
        and "Samples of demo-dapo" in text
        and "demo-vapo and demo-dapo" in text
    )
    configuration = html[html.index("<h2>Configuration") :]
    before_fold = configuration[: configuration.index("<details>")]
    assert "recipe" in before_fold and "seed" in before_fold and "actor.lr" not in before_fold


def test_phases_that_keep_their_colours_are_phases() -> None:
    assert not {*PHASES} - {phase.name for phase in phases.PHASES}


def test_colours_are_left_to_the_page(vapo: Path, tmp_path: Path) -> None:
    _, html = page([vapo], tmp_path)
    drawn = "".join(re.findall(r"<svg.*?</svg>", html, re.DOTALL))
    assert re.findall(r"(?:fill|stroke): #[0-9a-f]{6}", drawn) == []


def test_texts_are_escaped_and_troubles_shown(tmp_path: Path) -> None:
    evil = '<script src="http://x">&</pre>'
    with RunLog(tmp_path, samples=4) as log:
        log.write_metrics(
            {
                "step": 1,
                "stage": "train",
                "reward/mean": float("nan"),
                "reward/accuracy": 0.5,
                "events": [evil],
            }
        )
        log.write_samples([SampleRecord(1, evil, evil, None, False, True, 3, answer=evil)])
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 2, "st')
    (tmp_path / "config.yaml").write_text(f"model: {{path: '{evil}'}}\n")
    parsed, html = page([tmp_path], tmp_path)
    assert "<script" not in html and html.count("</pre>") == 2
    text = " ".join(parsed.text)
    assert text.count(evil) == 6
    assert "not finite: reward/mean: nan" in text and "1 cut or foreign lines" in text and "truncated" in text
    assert "Reward" in left_out(parsed) and "Training accuracy" in parsed.headings


@pytest.mark.parametrize(
    "records",
    [
        [],
        [{"step": 1, "stage": "sft", "policy/nll_loss": 2.0}],
        [{"step": 0, "stage": "eval", "eval/avg": 0.0}],
    ],
)
def test_a_run_that_has_hardly_begun(tmp_path: Path, records: list[dict[str, object]]) -> None:
    with RunLog(tmp_path) as log:
        for record in records:
            log.write_metrics(record)
    parsed, html = page([tmp_path], tmp_path)
    assert html.count("<svg") == len(records) and len(left_out(parsed)) == len(TITLES) - len(records)
    assert make_headline(load_run(tmp_path))[1] == (
        "" if not records else "2.000" if records[0]["stage"] == "sft" else "0.000"
    )


@pytest.mark.parametrize("k", [1, 2])
def test_the_headline_has_the_intervals_of_single_answers(tmp_path: Path, k: int) -> None:
    with RunLog(tmp_path) as log:
        for step, accuracy in ((0, 0.05), (4, 0.3), (8, 0.333), (12, 1 / 3)):
            record = {"eval/avg": accuracy, "eval/problems": 18 if step else 20, "eval/k": k}
            log.write_metrics({"step": step, "stage": "eval", **record})
    remark = make_headline(load_run(tmp_path))[2]
    low, high = (interval([1.0] * right + [0.0] * (n - right), 1) for right, n in ((1, 20), (6, 18)))
    expected = f"; 95 % confidence: {low[0]:.3f} to {low[1]:.3f} → {high[0]:.3f} to {high[1]:.3f}"
    assert remark == f"step 0 to 12, avg@{k} over 18 problems" + (expected if k == 1 else "")


def test_memory_and_unknown_phases_are_drawn(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        for step in (1, 2):
            log.write_metrics(
                {
                    "step": step,
                    "stage": "train",
                    "time/rollout": 1.0,
                    "time/juggling": 2.0,
                    "time/step": 3.5,
                    "memory/rollout": step * 2**31,
                }
            )
    parsed, _ = page([tmp_path], tmp_path)
    text = " ".join(parsed.text)
    assert "juggling 2 s, 57%" in text and "other 0.5 s, 14%" in text
    assert "4 GiB" in text and {"Time per phase", "Peak memory per phase"} <= set(parsed.headings)


def test_zero_and_constant_curves_are_drawn() -> None:
    for values, log in (
        ([0.0, 0.0], False),
        ([0.0, 0.0], True),
        ([0.0, 1e-6], True),
        ([1.0, 1.0], True),
        ([5.0], False),
        ([-3e9, 2e-9], False),
    ):
        svg = draw_lines([Line(dict(enumerate(values)), "#2b6cd4")], "step", log=log)
        assert "nan" not in svg and f">{format_value(values[-1])}</text>" in svg


def test_a_band_down_to_zero_on_a_logarithmic_scale() -> None:
    """The means of two seeds, of which one is 0 at times."""
    seeds = ([0.0, 1e-4, 2e-4], [3e-4, 3e-4, 0.0])
    mean, band = average_curves([dict(enumerate(seed)) for seed in seeds])
    svg = draw_lines([Line(mean, "#2b6cd4", band=band)], "step", log=True)
    assert "nan" not in svg and f">{format_value(1e-4)}</text>" in svg


def test_errors_of_the_user(tmp_path: Path, vapo: Path) -> None:
    with pytest.raises(DataError, match="no run folder"):
        write_report([], tmp_path)
    with pytest.raises(DataError, match=r"metrics\.jsonl: cannot be read"):
        write_report([tmp_path], tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_report([vapo], tmp_path / "file" / "report.html")
    RunLog(tmp_path).close()
    for name, content in (("config.yaml", "a: [1"), ("versions.json", "{"), ("versions.json", "[1]")):
        (tmp_path / name).write_text(content)
        with pytest.raises(DataError, match=rf"{name}: (cannot be parsed|holds no mapping)"):
            write_report([tmp_path], tmp_path)
        (tmp_path / name).unlink()


def test_a_step_that_was_done_again_counts_once(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        for value in (0.1, 0.7):
            log.write_metrics({"step": 5, "stage": "eval", "eval/avg": value, "time/step": 2.0})
    run = load_run(tmp_path)
    assert run.points("eval", "eval/avg") == {5: 0.7} and run.seconds == 2.0


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(-0.2, 1.2), min_size=1, max_size=6), st.floats(0.01, 0.16))
def test_labels_are_moved_apart(heights: list[float], gap: float) -> None:
    heights = sorted(heights)
    placed = spread_heights(heights, gap)
    assert all(b - a >= gap - 1e-9 for a, b in pairwise(placed))
    assert placed[0] >= -1e-9 and placed[-1] <= 1 + 1e-9
    if all(b - a >= gap for a, b in pairwise(heights)) and heights[0] >= 0 and heights[-1] <= 1:
        assert placed == pytest.approx(heights, abs=1e-9)


@settings(deadline=None)
@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=3 * MAX_POINTS))
def test_thinning_and_smoothing_keep_the_course(values: list[float]) -> None:
    xs, ys = average_neighbours(dict(enumerate(values)))
    assert len(xs) == len(ys) <= MAX_POINTS
    assert xs == sorted(xs) and min(values) - 1e-9 <= min(ys) and max(ys) <= max(values) + 1e-9
    smooth = moving_average(ys)
    assert len(smooth) == len(ys) and min(ys) - 1e-9 <= min(smooth) and max(smooth) <= max(ys) + 1e-9


@settings(deadline=None)
@given(st.integers(1, 300), st.floats(-5, 5), st.floats(-5, 5))
def test_smoothing_does_not_bend_a_line(n: int, start: float, slope: float) -> None:
    line = [start + slope * i for i in range(n)]
    assert moving_average(line) == pytest.approx(line, abs=1e-8)


def test_shares_of_groups() -> None:
    counts = {"rollout/groups_kept": 24, "rollout/groups_all_right": 6, "rollout/groups_all_wrong": 2}
    assert compute_group_shares(counts) == {"kept": 0.75, "all_right": 0.1875, "all_wrong": 0.0625}
    assert compute_group_shares({k: v / 32 for k, v in counts.items()}) == compute_group_shares(counts)
    assert compute_group_shares({}) is None and compute_group_shares(dict.fromkeys(counts, 0)) is None


def test_picked_steps_and_flat_keys() -> None:
    assert pick_steps([2, 4, 6, 8, 10]) == {"Early": 2, "Middle": 6, "Late": 10}
    assert (
        pick_steps([2, 4]) == {"Early": 2, "Middle": 4}
        and pick_steps([2]) == {"Early": 2}
        and pick_steps([]) == {}
    )
    assert flatten({"a": {"b": 1, "c": {}}, "d": None}) == {"a.b": "1", "a.c": "{}", "d": ""}


def test_events_and_hangs_are_shown_in_the_order_of_their_times(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        log.write_metrics({"step": 1, "stage": "train", "reward/accuracy": 0.5})
    (tmp_path / "hang-20261121-100000.txt").write_text("culprit: rank 1 is behind\nwhy now: ...")
    events = [{"time": 9e9, "event": "continues from step-000001"}, {"time": 0, "event": "rank 3 <died>"}]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    html = render([load_run(tmp_path)])
    hang = "hang, culprit: rank 1 is behind (hang-20261121-100000.txt)"
    shown = ("1970-01-01 00:00 UTC", "rank 3 &lt;died&gt;", hang, "continues from step-000001")
    places = [html.index(text) for text in shown]
    assert places == sorted(places)


def seeds(folder: Path, values: dict[int, list[float]], **config: object) -> list[Path]:
    """Runs of several seeds with these accuracies."""
    made = []
    for seed, course in values.items():
        run = folder / f"seed{seed}"
        run.mkdir(parents=True)
        (run / "config.yaml").write_text(
            yaml.safe_dump({"recipe": "dapo", "seed": seed, "run_dir": str(run), **config})
        )
        records = [
            {"step": t, "stage": "train", "reward/accuracy": value} for t, value in enumerate(course, 1)
        ]
        (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        made.append(run)
    return made


def test_seeds_are_one_run_with_a_band(tmp_path: Path) -> None:
    low = seeds(tmp_path / "low", {0: [0.1, 0.2, 0.3], 1: [0.3, 0.4, 0.5], 2: [0.2, 0.3]})
    high = seeds(tmp_path / "high", {0: [0.5, 0.6, 0.7]}, steps=9)
    runs = [load_run(folder) for folder in (*low, *high)]
    assert [[run.name for run in family] for family in group_families(runs)] == [
        ["seed0", "seed1", "seed2"],
        ["seed0"],
    ]
    mean, band = average_curves([run.points("train", "reward/accuracy") for run in runs[:3]])
    # as far as all of them have come
    assert mean == pytest.approx({1: 0.2, 2: 0.3}) and band == {
        1: (0.1, 0.3),
        2: (0.2, 0.4),
    }
    html = render(runs)
    assert "seed0, seed1, seed2: 3 seeds, mean and range" in html
    shaded = [line for line in html.split("<path") if "fill-opacity: 0.18" in line or "opacity: 0.18" in line]
    assert len(shaded) == 1  # the band, and none around a run alone
    assert "opacity: 0.18" not in render([runs[0], runs[3]])


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


def browser(samples: list[SampleRecord]) -> str:
    """The page of a run that has nothing but samples, without its style sheet."""
    return render([RecordedRun("run", [], samples)]).split("</style>")[1]


def sample(step: int = 1, **fields: object) -> SampleRecord:
    return SampleRecord(
        **{
            "step": step,
            "prompt": "p",
            "response": "r",
            "reward": 1.0,
            "correct": True,
            "truncated": False,
            "length": 6,
        }
        | fields
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
    html = browser([made])
    assert Tokens(html).spans == [
        ["ap4 vp4", "advantage +2, value +0.5", "a"],
        ["ap2 vp4", "advantage +1, value +0.5", "bc"],
        ["vp4", "advantage +0, value +0.5", "d"],
        ["an2 vn2", "advantage -1, value -0.25", "↵\n"],
        ["an4", "advantage -2, value +0", "e"],
    ]
    assert "</span>[... 3 tokens left out ...]<span" in html
    assert "answer 2 · 5 of its 8 responses right" in html and "reward +1" in html
    assert (
        html.count('type="radio"') == 3
        and html.count("checked") == 1
        and 'class="by-advantage" checked' in html
    )
    style = render([]).split("</style>")[0]
    for name in ("an4", "ap1", "vn2", "vp4"):
        assert f".by-{'advantage' if name[0] == 'a' else 'value'}:checked ~ .samples .{name}" in style


@pytest.mark.parametrize("numbers", [None, [1.0, -1.0, 0.5, 0.1, 0.0, -0.2]])
def test_hostile_responses_are_text(numbers: list[float] | None, tmp_path: Path) -> None:
    evil = "".join(EVIL)
    made = [
        sample(step, prompt=evil, response=evil, answer=evil, tokens=EVIL, advantages=numbers)
        for step in range(1, 12)
    ]
    with RunLog(tmp_path, samples=4) as log:
        log.write_samples(made)
        for one in made:
            log.write_samples([one])
    html = browser(load_run(tmp_path).samples)
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
    html = browser(plain)
    steps = r'<h3>(\w+) <span class="unit">step (\d+)</span>'
    assert re.findall(steps, html)[:3] == [("Early", "1"), ("Middle", "21"), ("Late", "40")]
    assert len(re.findall(r"<h3>Samples", html)) == 6 and "6 more steps" in html and "radio" not in html
    tokens = re.findall(steps, browser([*plain, *with_tokens]))
    assert tokens == [("Early", "5"), ("Middle", "15"), ("Late", "20"), ("Samples", "10")]
    assert "Samples" not in browser([]) and "<details>" not in browser(plain[:3])


def test_a_long_run_makes_a_small_page() -> None:
    tokens = ["wörd "] * 512
    worth = [(i % 100) / 100 - 0.5 for i in range(512)]
    made = [
        sample(step, response="x" * 20_000, tokens=tokens, advantages=worth, values=worth)
        for step in range(1, 101)
        for _ in range(4)
    ]
    assert len(browser(made)) < 1_000_000


@settings(deadline=None)
@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_levels_are_symmetric_and_bounded(number: float, scale: float) -> None:
    assert colour_level(number, scale) == -colour_level(-number, scale)
    assert abs(colour_level(number, scale)) <= LEVELS and (
        abs(number) < scale or abs(colour_level(number, scale)) == LEVELS
    )


def test_data_sources_have_a_table(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        for step, accuracy in ((0, 0.25), (10, 0.75)):
            own = {
                "eval/gsm/avg": accuracy,
                "eval/gsm/problems": 8,
                "eval/aime/avg": 0.0,
                "eval/aime/problems": 2,
            }
            log.write_metrics({"step": step, "stage": "eval", "eval/avg": 0.1, **own})
        for step in range(1, 11):
            log.write_metrics({"step": step, "stage": "train", "source/gsm/accuracy": step / 10})
        rare = {"eval/rare/avg": 0.5, "eval/rare/problems": 1}  # a set that is evaluated at steps of its own
        log.write_metrics({"step": 7, "stage": "eval", **rare})
    found = tabulate_sources(load_run(tmp_path))
    rows = [dict(zip(found["heads"], cells, strict=True)) for cells, _ in found["rows"]]
    assert [row["source"] for row in rows] == ["aime", "gsm", "rare"]
    assert rows[2]["avg"] == "0.500" and make_headline(load_run(tmp_path))[1] == "0.100 → 0.100"
    assert (rows[1]["avg"], rows[1]["problems"], rows[1]["trained: accuracy"]) == (
        "0.250 to 0.750",
        "8",
        "1.000",
    )
    assert (rows[0]["avg"], rows[0]["trained: accuracy"], rows[0]["score"]) == ("0.000", "-", "-")
    html = (write_report([tmp_path], tmp_path)).read_text()
    assert "<h2>Data sources</h2>" in html and "0.250 to 0.750" in html


def test_turns_are_folded_and_what_was_shown_stands_out() -> None:
    """The text of an episode is whole whether it has its tokens or not, and what the policy was shown is
    never among what it wrote."""
    turns = [["policy", "Call: calc(1 + 2)\n"], ["observed", "Result: <3>\n"], ["policy", "Answer: 3\n"]]
    tokens = ["Call: ", "calc(1 + 2)\n", "Result: ", "<3>\n", "Answer: 3\n"]
    observed = [False, False, True, True, False]
    worth = [1.0, 1.0, None, None, -1.0]
    for fields in (
        {"turns": turns},
        {"turns": turns, "tokens": tokens, "observed": observed, "advantages": worth},
    ):
        html = browser([sample(response="".join(text for _, text in turns), **fields)])
        assert html.count('<details class="turn" open>') == 2 and "2 turns" in html
        assert re.findall(r'<pre class="observed">(.*?)</pre>', html, re.DOTALL) == ["Result: &lt;3&gt;\n"]
        said = re.findall(r"<pre>(.*?)</pre>", html, re.DOTALL)
        assert all("Result" not in text for text in said)
        plain = [unescape(re.sub("<[^>]*>", "", text)).replace("↵", "") for text in said]
        assert plain[-2:] == ["Call: calc(1 + 2)\n", "Answer: 3\n"]
    many = [["policy", f"look {i}\n"] if i % 2 == 0 else ["observed", f"seen {i}\n"] for i in range(11)]
    html = browser([sample(turns=many)])
    assert html.count('<details class="turn">') == 5 and html.count('<details class="turn" open>') == 1
    one = browser([sample()])
    assert 'class="turn"' not in one and "<pre>r</pre>" in one
