"""The regimes of the task family: each compares two rows of a paper's table that differ in one switch, at
equal cost, and its task is what its text says."""

from __future__ import annotations

import importlib.util
import json
import random
from pathlib import Path
from types import ModuleType

import pytest

from megarl.ablation.regimes import Compared, Regime, cost, load_regimes
from megarl.ablation.runs import AblationRow, AblationTable, load_table
from megarl.config import check_config, load_config
from megarl.config.errors import ConfigError
from megarl.demo import family
from megarl.rewards.answer import verify_dapo
from tests.ablation.test_tables import changes, leaves

ROOT = Path(__file__).resolve().parents[2]
REGIMES = load_regimes()
PAIRS = [
    (n, p, one) for n, regime in REGIMES.items() for p, part in regime.parts.items() for one in part.compared
]


def rows_of(name: str, paper: str, one: Compared) -> tuple[AblationTable, AblationRow, AblationRow]:
    table = REGIMES[name].table(name, paper)
    rows = {row.name: row for row in table.rows}
    return table, rows[one.row], rows[one.against]


def success(regime: Regime, draws: int = 3000) -> float:
    """The teacher's on held-out problems, all of whose responses fit."""
    rng, knobs = random.Random(5), regime.knobs
    problems = [family.draw_problem(rng, knobs, (0.0, 0.0), knobs.eval_lines) for _ in range(draws)]
    return sum(verify_dapo(family.teach(p, rng, knobs), p.answer).correct for p in problems) / draws


def test_every_technique_of_both_tables_has_its_regime() -> None:
    for paper, none in (("vapo", "VAPO"), ("dapo", "")):
        compared = [one.row for _, of, one in PAIRS if of == paper]
        assert len(compared) == len(set(compared))
        assert set(compared) == {row.name for row in load_table(paper).rows} - {none}


@pytest.mark.parametrize(("name", "paper", "one"), PAIRS, ids=[f"{n}-{p}-{one.row}" for n, p, one in PAIRS])
class TestPairs:
    def test_differ_as_the_papers_rows_do(self, name: str, paper: str, one: Compared) -> None:
        """In no other key than the 32B files differ in; values that are sizes may be this scale's."""
        table, row, other = rows_of(name, paper, one)
        here = changes(table.config(row, ()), table.config(other, ()))
        at_32b = changes(load_config(table.folder / row.config), load_config(table.folder / other.config))
        assert here and set(here) == set(at_32b)
        assert {k: v for k, v in here.items() if k != "rollout.prompts"} == {
            k: v for k, v in at_32b.items() if k != "rollout.prompts"
        }
        for each in (row, other):
            check_config(table.config(each, ()), each.name)

    def test_cost_the_same(self, name: str, paper: str, one: Compared) -> None:
        table, row, other = rows_of(name, paper, one)
        a, b = table.config(row, ()), table.config(other, ())
        assert a.responses == b.responses and a.evaluation == b.evaluation
        for key in ("steps", "update.mini_batch", "update.epochs", "rollout.max_response_tokens"):
            assert leaves(a)[key] == leaves(b)[key]
        if "dynamic" not in one.row + one.against and "value" not in one.row and one.row != "vanilla PPO":
            # Rows with groups of another size differ in what the teacher's noise drew.
            assert cost(a, REGIMES[name].knobs) == cost(b, REGIMES[name].knobs)

    def test_the_paper_says_what_is_expected(self, name: str, paper: str, one: Compared) -> None:
        _, row, other = rows_of(name, paper, one)
        assert row.paper is not None and other.paper is not None
        assert one.expect == ("better" if row.paper > other.paper else "worse")


@pytest.mark.parametrize("name", [name for name in REGIMES if name != "cut"])
def test_right_work_fits_the_limit(name: str) -> None:
    regime = REGIMES[name]
    assert regime.max_response_tokens >= family.longest_right(regime.knobs)
    assert regime.max_response_tokens + 16 <= family.POSITIONS


def test_long() -> None:
    knobs = REGIMES["long"].knobs
    assert family.response_tokens(knobs.terms[0], knobs.lines[0], knobs.width) == 29
    assert family.longest_right(knobs) == 389


def test_explore() -> None:
    """The reliable way is rare, right far more often, and 16 updates a rollout are what both papers have."""
    common, rare = REGIMES["explore"].knobs.ways
    assert rare[0] < 0.1 < 0.9 < common[0] and (1 - rare[1]) ** 4 > 10 * (1 - common[1]) ** 4
    assert 0.08 < success(REGIMES["explore"]) < 0.16
    for paper in ("vapo", "dapo"):
        table = REGIMES["explore"].table("explore", paper)
        config = table.config(table.rows[0], ())
        assert config.responses / config.update.mini_batch == 16


def test_ramble() -> None:
    regime = REGIMES["ramble"]
    rng, knobs = random.Random(5), regime.knobs
    drawn = [
        family.text_tokens(family.teach(family.draw_problem(rng, knobs), rng, knobs)) for _ in range(2000)
    ]
    short = [length for length in drawn if length <= family.longest_right(knobs)]
    long = [length for length in drawn if length > family.longest_right(knobs)]
    assert min(short) == 35 and max(short) == 51
    assert len(long) / len(drawn) == pytest.approx(0.25, abs=0.04)
    cut = sum(length > regime.max_response_tokens for length in long) / len(long)
    assert 0.5 < cut < 0.8
    assert 5 < sum(long) / len(long) / (sum(short) / len(short)) < 10
    table = regime.table("ramble", "dapo")
    buffer = table.config(table.rows[0], ()).reward.overlong.buffer
    assert min(long) > 3 * max(short) and regime.max_response_tokens - buffer == 155


def test_cut() -> None:
    """Right work fits half of the training prompts and all held-out ones; a guess always does."""
    regime = REGIMES["cut"]
    knobs, limit = regime.knobs, regime.max_response_tokens
    assert family.longest_right(knobs) > limit >= family.longest_right(knobs, knobs.eval_lines)
    rng = random.Random(5)
    problems = [family.draw_problem(rng, knobs) for _ in range(3000)]
    cut = [family.response_tokens(len(p.terms), p.lines, knobs.width) > limit for p in problems]
    assert sum(cut) / len(cut) == pytest.approx(0.5, abs=0.05)
    assert family.text_tokens("Answer: 3") == 3 < limit


def test_rare() -> None:
    assert 0.02 < success(REGIMES["rare"]) < 0.05


def test_mixed() -> None:
    """Of groups of 4 one in seven has signal, and max_batches suffices for a full batch of such."""
    regime = REGIMES["mixed"]
    p = success(regime)
    learnable = 1 - regime.knobs.trivial - regime.knobs.impossible
    signal = learnable * (1 - p**4 - (1 - p) ** 4)
    assert 0.11 < signal < 0.17
    table = regime.table("mixed", "dapo")
    sampling = table.config(table.rows[-1], ()).rollout.dynamic_sampling
    assert sampling.enabled and sampling.max_batches * signal > 1


def test_twenty_seeds_take_less_than_six_hours_of_two_cores() -> None:
    seed = 0.0
    for name, regime in REGIMES.items():
        tables = [regime.table(name, paper) for paper in regime.parts]
        seed += cost(load_config(tables[0].folder / tables[0].warm_start), regime.knobs).seconds
        seed += sum(cost(t.config(row, ()), regime.knobs).seconds for t in tables for row in t.rows)
    assert 20 * seed < 6 * 3600 * 2


def test_cost_by_hand() -> None:
    """One digit's carry and no mistakes in lengths: 64 responses of 29 tokens to 29 tokens."""
    knobs = family.Knobs(lines=(0, 15), width=1, brief=0.0)
    table = REGIMES["long"].table("long", "vapo")
    config = table.config(table.rows[0], ("steps=4", "evaluation.every=2", "evaluation.max_problems=100"))
    found = cost(config, knobs)
    mean = 18 + 4 * 7.5 + 3
    assert found.sampled == pytest.approx((4 + 10) * 64 * mean, rel=0.05)
    assert found.evaluated == pytest.approx(3 * 100 * mean, rel=0.05)
    assert found.trained == pytest.approx((4 + 4 + 40) * 64 * mean, rel=0.05)
    assert found.updates == (4 + 4 + 40) * 2


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("limit: 0.6", "limit: 0.0", "regimes.cut.limit: "),
        ("width: 5", "width: 50", "regimes.long.knobs: lines, width, ramble_lines: prompt and"),
        ("why: As for VAPO.", "because: x", "regimes.ramble.dapo.compared.1.why: Field required"),
    ],
)
def test_damaged_regimes(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = (ROOT / "configs/ablations/regimes.yaml").read_text()
    path = tmp_path / "regimes.yaml"
    path.write_text(text.replace(old, new))
    with pytest.raises(ConfigError) as caught:
        load_regimes(path)
    assert str(caught.value).startswith(f"{path}: {message}") and "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tune_ablation", ROOT / "tools" / "tune_ablation.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class TestTool:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ("nosuch clip_higher", "nosuch: no such regime (one of long, explore, ramble, cut, rare, mixed)"),
            (
                "explore nosuch",
                "nosuch: explore compares no such row (one of without_clip_higher, clip_higher)",
            ),
            ("explore clip_higher --seeds 1,100", "--seeds: must be different and below 100"),
            ("explore clip_higher --seeds 1,1", "--seeds: must be different and below 100"),
            ("explore clip_higher --knobs bare=2", "--knobs: Input should be less than or equal to 1"),
            ("explore clip_higher --set rollout.group_size=7", "explore, + overlong filtering: update.mini"),
        ],
    )
    def test_refusals(
        self,
        tool: ModuleType,
        arguments: str,
        message: str,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
    ) -> None:
        monkeypatch.chdir(tmp_path)
        assert tool.main(arguments.split()) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and message in err
        assert not any(tmp_path.iterdir())

    def test_the_list(self, tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
        assert tool.main([]) == 0
        out = capsys.readouterr().out
        assert all(f"{name}: limit" in out for name in REGIMES) and "hours for 20 seeds" in out

    def test_report_and_log(
        self, tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        one = Compared(row="with", against="without", expect="better", why="x")
        curves = {
            "with": {1: {0: 0.1, 5: 0.5}, 2: {0: 0.1, 5: 0.6}},
            "without": {1: {0: 0.1, 5: 0.3}, 2: {0: 0.2, 5: 0.3}},
        }
        for _ in range(2):
            tool.report(one, curves, tmp_path / "tried.jsonl", {"regime": "explore", "knobs": {"bare": 0.0}})
        out = capsys.readouterr().out
        assert "   5  0.300  0.550  +0.200 +0.300" in out and "at the last step +0.250 [" in out
        lines = [json.loads(line) for line in (tmp_path / "tried.jsonl").read_text().splitlines()]
        assert len(lines) == 2, "every trial is told"
        assert lines[0]["differences"] == pytest.approx({"1": 0.2, "2": 0.3})
        assert lines[0]["mean"] == pytest.approx(0.25)
        assert (lines[0]["regime"], lines[0]["row"], lines[0]["seeds"]) == ("explore", "with", [1, 2])
