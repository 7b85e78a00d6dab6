"""docs/extending.md: its edits and files are applied to a copy of the tree and used.

Each extension is tested alone as far as one process can, and all together in `megarl train` on tiny models.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import AsyncMock

import pytest
import torch
from transformers import AutoTokenizer, Ernie4_5Config

from megarl.agents.episode import Policy
from megarl.algorithms.losses import policy_loss
from megarl.config.engines import ENGINES, EngineCapabilities, EngineEntry
from megarl.config.errors import CheckpointError, EngineFailure
from megarl.config.plugins import plugins
from megarl.config.schema import Config
from megarl.data import prompts, readers
from megarl.data.sample import TokenData
from megarl.parallel.layout import Layout
from megarl.parallel.runtime import Runtime
from megarl.rewards.pool import VerifierPool
from megarl.rewards.verdict import verifier_path
from megarl.rollout.engines.base import GenerationRequest
from megarl.rollout.engines.transformers_engine import TransformersEngine
from megarl.rollout.episode import EngineClient, EpisodeAborted
from megarl.rollout.sampling import SamplingParams, turn_seed
from megarl.sync.backends import BACKENDS
from megarl.sync.plan import engine_plan
from megarl.weights import families
from tests.engines import load_folder
from tests.families import ROWS, Row
from tests.tiny_models import make_tiny_model

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
OF_MEGARL = ("megarl", "megarl_experiments", "megarl_report", "megarl_tasks", "megarl_verifier")
FILES: dict[str, str] = dict(re.findall(r"^```python\n# (\S+\.py)\n(.*?)^```$", PAGE, flags=re.M | re.S))
MOST = 3  # files of megarl that one extension may touch


def edits() -> Iterator[tuple[str, str, list[tuple[str, str]]]]:
    """Yield the section, file and (old, new) texts of each edit on the page."""
    for section in PAGE.split("\n## ")[1:]:
        for block in re.findall(r"^```diff\n(.*?)^```$", section, flags=re.M | re.S):
            for part in re.split(r"^--- ", block, flags=re.M)[1:]:
                file, _, text = part.partition("\n")
                hunks = [hunk.splitlines() for hunk in re.split(r"^@@\n", text, flags=re.M)]
                pairs = [
                    tuple(
                        "".join(f"{line[1:]}\n" for line in hunk if line[0] in kept) for kept in (" -", " +")
                    )
                    for hunk in hunks
                ]
                yield section.partition("\n")[0], file, pairs  # type: ignore[misc]


def added(file: str) -> str:
    """Return the lines that the page adds to a file."""
    [block] = [
        text
        for text in re.findall(r"^--- (.*?)(?=^--- |^```)", PAGE, flags=re.M | re.S)
        if text.startswith(file)
    ]
    return "".join(f"{line[1:]}\n" for line in block.splitlines() if line.startswith("+"))


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy megarl and its sibling packages, and apply all files and edits of the page."""
    folder = tmp_path_factory.mktemp("extended")
    for package in OF_MEGARL:
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name, body in FILES.items():
        (folder / (f"megarl/{name}" if "/" in name else name)).write_text(body)
    for section, file, hunks in edits():
        path = folder / "megarl" / file
        text = path.read_text()
        for old, new in hunks:
            assert text.count(old) == 1, f"{section}: {file} does not hold once:\n{old}"
            text = text.replace(old, new)
        path.write_text(text)
    return folder


def module_of(name: str, body: str) -> ModuleType:
    """Load a module of the page in this process."""
    module = ModuleType(name)
    exec(compile(body, name, "exec"), vars(module))
    return module


def in_tree(tree: Path, *arguments: str, limit: float = 240) -> str:
    """Run Python with megarl from the copy and return its output."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=limit,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def config_of(folder: Path, recipe: str = "grpo", **sections: Any) -> dict[str, Any]:
    """Return a configuration of a tiny run on the sums in `folder`."""
    return {
        "recipe": recipe,
        "run_dir": str(folder / f"run_{recipe}"),
        "steps": 2,
        "model": {"path": str(folder / "model"), "dtype": "fp32"},
        "parallel": {"device": "cpu"},
        "data": {
            "train": [str(folder / ("pairs.jsonl" if recipe == "sft" else "sums.csv"))],
            "max_prompt_tokens": 64,
        },
        "log": {"report": False, "terminal": "quiet"},
        **sections,
    }


TWICE: dict[str, Any] = {"episode": "twice:again", "turns": {"max_tokens": 40}}
OURS: dict[str, Any] = {
    "rollout": {"engine": "plain", "prompts": 4, "group_size": 4, "max_response_tokens": 12, **TWICE},
    "reward": {"verifier": "nearness:near"},
    "algorithm": {"surrogate": "simple", "advantage_limit": 0.5},
    "update": {"mini_batch": 8},
}


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a tiny model and a table of sums."""
    folder = tmp_path_factory.mktemp("sums")
    make_tiny_model(folder / "model", "qwen3")
    rows = [f"{a}+{b}=?,{a + b}\n" for a in range(4) for b in range(4)]
    (folder / "sums.csv").write_text("question,answer\n" + "".join(rows))
    return folder


def test_no_more_files_than_the_page_promises() -> None:
    touched: dict[str, set[str]] = {}
    for section, file, _ in edits():
        touched.setdefault(section, set()).add(file)
    table = {
        title: re.findall(r"`((?:\w+/)+\w+\.py)`", files) + ["its own"] * ("of its own" in files)
        for title, files in re.findall(r"^\| \[.*?\]\(#([\w-]+)\) \|.*?\| (.+?) \|$", PAGE, flags=re.M)
    }
    assert len(touched) == 7
    for section, files in touched.items():
        own = {name for name in FILES if f"# {name}\n" in PAGE.split(f"## {section}\n")[1].split("\n## ")[0]}
        promised = table[section.lower().replace(" ", "-")]
        made = sum("/" in name for name in own)
        assert len(files) + made <= MOST and len(promised) == len(files) + made, section
        assert files <= set(promised), section


def test_the_edits_fit_and_the_configuration_knows_them(tree: Path, sums: Path) -> None:
    """The page's configuration loads without torch, and the phase is at its place."""
    (sums / "ours.json").write_text(json.dumps(config_of(sums, **OURS)))
    program = (
        "import sys; from megarl.config import load_config, check_config; from pathlib import Path\n"
        "from megarl.config.phases import select_phases, check_phases\n"
        "config = load_config(Path(sys.argv[1])); check_config(config, 'ours')\n"
        "phases = select_phases(config); check_phases(phases); assert 'torch' not in sys.modules\n"
        "import megarl.weights.families as families; assert 'ernie4_5' in families.FAMILIES\n"
        "print(*(phase.name for phase in phases))"
    )
    names = in_tree(tree, "-c", program, str(sums / "ours.json")).split()
    assert names[names.index("limit_advantages") - 1 :] == [
        *("group_advantages", "limit_advantages", "actor_update", "weight_transfer")
    ]
    for path in tree.rglob("megarl/**/*.py"):
        compile(path.read_text(), str(path), "exec")


def test_a_verifier_and_its_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nearness.py").write_text(FILES["nearness.py"])
    [package] = re.findall(r"^```toml\n(.*?)^```$", PAGE, flags=re.M | re.S)
    (tmp_path / "nearness-1.dist-info").mkdir()
    (tmp_path / "nearness-1.dist-info" / "METADATA").write_text("Name: nearness\nVersion: 1\n")
    [(group, points)] = tomllib.loads(package)["project"]["entry-points"].items()
    lines = "".join(f"{name} = {value}\n" for name, value in points.items())
    (tmp_path / "nearness-1.dist-info" / "entry_points.txt").write_text(f"[{group}]\n{lines}")
    monkeypatch.syspath_prepend(str(tmp_path))
    plugins.cache_clear()
    try:
        assert verifier_path("near") == "nearness:near"
        with VerifierPool("near", 1, 10.0) as pool:
            verdicts = pool.verify([("it is 12", "12"), ("12, or 9", "12"), ("twelve", "12")])
    finally:
        plugins.cache_clear()
    assert [(verdict.correct, verdict.score) for verdict in verdicts] == [
        (True, 1),
        (False, 0.25),
        (False, 0),
    ]


def test_a_file_format(sums: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = dict(vars(readers))
    exec(added("data/readers.py"), names)
    monkeypatch.setattr(readers, "READERS", names["READERS"])
    rows = list(prompts.file_rows(sums / "sums.csv"))
    assert len(rows) == 16 and rows[1] == (2, {"question": "0+1=?", "answer": "1"})
    (sums / "bad.csv").write_text("question,answer\n1+1=?,2\n1+2=?,3,4\n")
    assert list(prompts.file_rows(sums / "bad.csv"))[1] == (2, "more fields than columns")
    data = Config(**config_of(sums)).data
    tokenizer = AutoTokenizer.from_pretrained(sums / "model")
    found, report = prompts.read_prompts(data.train, data, tokenizer)
    assert report.kept == 16 and found[5].answer == "2"


def test_a_batch_source_goes_on_from_where_it_stood(sums: Path) -> None:
    made = module_of("successors", FILES["schedule/successors.py"]).Successors
    config = Config(**config_of(sums, "sft", supervised={"batch": 3}))
    tokenizer = AutoTokenizer.from_pretrained(sums / "model")
    source, again = made(config, tokenizer), made(config, tokenizer)
    source.rollout("sft", 1)
    state = json.loads(json.dumps(source.join([source.snapshot()])))
    batch = source.rollout("sft", 2).local
    again.load_state_dict(state)
    assert torch.equal(again.rollout("sft", 2).local.tokens, batch.tokens)
    texts = tokenizer.batch_decode(batch.tokens.split(batch.lengths.tolist()), skip_special_tokens=True)
    assert texts == ["3+1=4", "4+1=5", "5+1=6"]


@pytest.fixture(scope="module")
def engines(sums: Path) -> list[TransformersEngine]:
    """Return the page's engine and the transformers one, with the same weights."""
    made = module_of("plain_engine", FILES["rollout/engines/plain_engine.py"]).PlainEngine
    found = [kind(sums / "model", eos_ids=[1]) for kind in (made, TransformersEngine)]
    for engine in found:
        engine.start()
        load_folder(engine, version=3)
    return found


def test_an_engine_draws_what_others_draw(engines: list[TransformersEngine]) -> None:
    params = SamplingParams(max_tokens=8)
    requests = [GenerationRequest((5, 6, 7), seed) for seed in range(4)] + [GenerationRequest((9,), 4)]
    plain, other = (engine.generate(requests, params) for engine in engines)
    for mine, theirs in zip(plain, other, strict=True):
        assert (mine.tokens.tolist(), mine.finish_reason) == (theirs.tokens.tolist(), theirs.finish_reason)
        assert mine.logprobs.tolist() == pytest.approx(theirs.logprobs.tolist(), abs=1e-5)


def syncs_by_files(runtime: Runtime, folder: Path) -> list[dict[str, Any]]:
    """Sync weights from the actor into the page's engine by the page's backend, in buckets of 16 KiB.

    Rank 0's engine fails in the second sync and is restarted without weights.
    """
    from megarl.model.builder import build_actor
    from megarl.model.hf_config import read_hf_config
    from megarl.sync.weight_sync import make_weight_sync
    from tests.parallel import jobs

    backend = module_of("files", FILES["sync/backends/files.py"]).FilesBackend
    backend.bucket_bytes = 2**14
    config = jobs.make_config(folder)
    model = build_actor(config, read_hf_config(folder), runtime)
    jobs.load(model, folder, runtime)
    engine = module_of("plain_engine", FILES["rollout/engines/plain_engine.py"]).PlainEngine(folder, [1])
    engine.start()
    failing: list[EngineFailure] = []
    load_file = engine.load_file

    def load(path: Path) -> None:
        if failing:
            raise failing.pop()
        load_file(path)

    engine.load_file, engine.restart = load, engine.start
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(BACKENDS, "files", backend)
        patch.setitem(ENGINES, "transformers", EngineEntry("", EngineCapabilities(weight_backend="files")))
        sync = make_weight_sync(config, runtime, families.read_config(folder), model, engine)
    found = []
    for version in range(2):
        if version == 1 and runtime.rank == 0:
            failing.append(EngineFailure("died while it read a file"))
        sync.sync(version)
        named = {name: parameter.detach() for name, parameter in model.named_parameters()}
        found.append(
            {
                "actor": jobs._in_hf_names(named, folder, runtime, critic=False),
                "engine": {name: tensor.clone() for name, tensor in engine.parameters().items()},
                "version": engine.weight_version,
                "buckets": len(sync.transfers),
                "events": sync.take_events(),
            }
        )
        for parameter in model.parameters():
            parameter.data.add_(0.5)
    return found


def test_a_weight_backend(ranks: Any, tmp_path: Path) -> None:
    """Each rank's engine has weights bitwise equal to the actor's, which is sharded over two ranks.

    This includes the restarted engine.
    """
    folder = make_tiny_model(tmp_path / "model", "qwen3")
    for rank in (found := ranks(2, 1, 1).run(syncs_by_files, folder=folder)):
        for version, sync in enumerate(rank):
            actor = found[0][version]["actor"]
            assert actor.keys() == sync["engine"].keys() and sync["buckets"] > 3
            assert all(torch.equal(tensor, actor[name]) for name, tensor in sync["engine"].items())
            assert sync["version"] == version and len(sync["events"]) == version
    assert "engine of rank 0 failed" in found[0][1]["events"][0]
    assert not list(folder.glob("weights-*"))


def test_an_episode(engines: list[TransformersEngine], sums: Path) -> None:
    """The episode's tokens are those that the engine samples after the context, with one seed per turn.

    The result is the same when it is replayed from its journal and cut off in its second turn.
    """
    episode, prompt = module_of("twice", FILES["twice.py"]).again, prompts.Prompt(1, "", (5, 6, 7), "")
    tokenizer, params = AutoTokenizer.from_pretrained(sums / "model"), SamplingParams(40)

    async def run(begun: TokenData | None) -> TokenData:
        with ThreadPoolExecutor(1) as threads:
            client = EngineClient(engines[1], threads, continuous_batching=False)
            running = asyncio.create_task(client.keep_busy(AsyncMock()))
            policy = Policy(prompt, client, 3, params, begun, tokenizer)
            await episode(prompt, policy)
            running.cancel()
            return policy.result()

    found = asyncio.run(run(None))
    shown = tokenizer(" Again: ", add_special_tokens=False).input_ids
    [first] = engines[0].generate([GenerationRequest(prompt.tokens, 3, max_tokens=4)], params)
    behind = (*prompt.tokens, *first.tokens.tolist(), *shown)
    left = 40 - len(first.tokens.tolist()) - len(shown)
    [second] = engines[0].generate([GenerationRequest(behind, turn_seed(3, 1), max_tokens=left)], params)
    assert found.tokens.tolist() == [*first.tokens.tolist(), *shown, *second.tokens.tolist()]
    assert found.is_sampled.tolist() == [True] * len(first.tokens.tolist()) + [False] * len(shown) + [
        True
    ] * len(second.tokens.tolist())
    assert found.finish_reason == second.finish_reason
    assert asyncio.run(run(found)).tokens.tolist() == found.tokens.tolist()

    class Ends:
        async def generate(self, *_: object, **__: object) -> TokenData:
            return TokenData([4], [-1.0], "abort", [2])

    policy = Policy(prompt, Ends(), 3, params, None, tokenizer)  # type: ignore[arg-type]
    with pytest.raises(EpisodeAborted):
        asyncio.run(episode(prompt, policy))
    cut = policy.result()
    assert (cut.tokens, cut.finish_reason, cut.journal) == (
        [4],
        "abort",
        [["turn", 1, "abort"]],
    ) or not cut.journal


def test_a_policy_loss() -> None:
    """SPO's objective is maximal where the ratio is at the interval's end on the advantage's side."""
    simple = module_of("simple", FILES["algorithms/methods/simple.py"]).simple
    advantages, old = torch.tensor([1.0, -2.0, 3.0]), torch.tensor([-1.0, -0.5, -2.0]).double()
    ends = torch.tensor([1.2, 0.8, 1.2]).double().log()
    for away, sign in ((0.0, 0), (0.1, 1), (-0.1, -1)):
        logprobs = (old + ends + away).requires_grad_()
        loss, stats = policy_loss(logprobs, old, advantages, torch.ones(3) / 3, 0.2, 0.2, surrogate=simple)
        [gradient] = torch.autograd.grad(loss, logprobs)
        assert torch.equal(gradient.sign(), torch.full((3,), float(sign))) or (
            sign == 0 and gradient.abs().max() < 1e-6
        )
    assert float(stats["policy/tokens"]) == 3


@pytest.fixture
def ernie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a tiny model of the page's family, which no table contains yet."""
    monkeypatch.setitem(ROWS, "ernie4_5", Row(Ernie4_5Config))
    return make_tiny_model(tmp_path / "model", "ernie4_5", vocab=101, head_dim=12)  # type: ignore[arg-type]


def ernie_family() -> families.Family:
    [row] = added("weights/families.py").strip().removesuffix(",").splitlines()
    family = eval(row, vars(families))
    assert isinstance(family, families.Family)
    return family


def test_a_family(ernie: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every byte of an engine's tensors comes from the trainers', sharded according to the table.

    The tensors are exactly those of the file.
    """
    with pytest.raises(CheckpointError, match="'ernie4_5' is not a known family"):
        families.read_config(ernie)
    monkeypatch.setitem(families.FAMILIES, "ernie4_5", ernie_family())
    hf_config = families.read_config(ernie)
    config = Config(**{**config_of(ernie.parent), "model": {"path": ernie}})
    plan = engine_plan(config, hf_config, Layout(tp=2, pp=2), cpu=True)
    plan.verify()
    engine = TransformersEngine(ernie)
    engine.start()
    assert set(plan.targets[0]) == set(engine.parameters())


def with_ernie(runtime: Any, **arguments: Any) -> Any:
    """Return the log-probs of a model of the page's family, on a rank."""
    from tests.parallel import jobs

    families.FAMILIES["ernie4_5"] = ernie_family()
    return jobs.logprobs(runtime, **arguments)


@pytest.mark.slow
def test_a_family_computes_what_hugging_face_does(ernie: Path, ranks: Any) -> None:
    from tests.parallel.test_parity import hf_logprobs, sequences

    asked, answers = sequences(101)
    expected, _ = hf_logprobs(ernie, asked, answers, 1.0)
    for tp in (1, 2):
        for found, _ in ranks(tp, 1, 1).run(with_ernie, folder=ernie, prompts=asked, responses=answers):
            assert (found - expected).abs().max() <= 1e-5


@pytest.mark.slow
def test_runs_with_all_of_it(tree: Path, sums: Path) -> None:
    """RL uses the page's engine, episode, verifier, file format, phase and loss; SFT its batch source."""
    (sums / "pairs.jsonl").write_text('{"prompt": "1+1=", "response": "2"}\n')
    for recipe, sections in (
        ("grpo", OURS),
        ("sft", {"supervised": {"batch": 4}}),
    ):
        (sums / f"{recipe}.json").write_text(json.dumps(config_of(sums, recipe, **sections)))
        in_tree(tree, "-m", "megarl", "train", str(sums / f"{recipe}.json"))
    run = sums / "run_grpo"
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2]
    assert all(record["mismatch/kl"] < 1e-6 for record in records)
    assert any(0 < record["advantage/limited"] < 1 for record in records)
    assert all(record["reward/unverified"] == record["reward/ungraded"] == 0 for record in records)
    records = [json.loads(line) for line in (sums / "run_sft" / "metrics.jsonl").read_text().splitlines()]
    # A step has four rows: `n+1=`, a digit and the end. Rows of the file are longer by their template.
    assert [(record["step"], record["train/tokens"]) for record in records] == [(1, 24), (2, 24)]
