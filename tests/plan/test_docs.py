"""docs/planning.md and docs/evidence/planning.md show the command's output.

`python tests/plan/test_docs.py` writes both."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest

from megarl.cli.main import main
from megarl.config.load import load_config
from megarl.plan.disk import checkpoint_bytes
from megarl.plan.fit import find_problem
from megarl.plan.inputs import make_plan_inputs
from megarl.plan.memory import gpu_needs
from megarl.plan.sizes import GIB
from megarl.weights.known_models import KNOWN_MODELS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "planning.md"
PAGES = (PAGE, ROOT / "docs" / "evidence" / "planning.md")
SHOWN = re.compile(r"(```bash\nmegarl (plan .*)\n```\n(?:(?!```).*\n)*?```text\n)((?:.*\n)*?)(```\n)")


def printed(command: str) -> str:
    """Return the output of a plan that fits, else the errors."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(ROOT), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(shlex.split(command))
    return out.getvalue() if code == 0 else err.getvalue().strip() + "\n"


@pytest.mark.slow
def test_the_page_shows_what_is_printed() -> None:
    assert len(find_shown(at_scale=False)) + len(find_shown(at_scale=True)) == 11
    check_shown(at_scale=False)


@pytest.mark.slow
def test_the_page_shows_simulations_at_scale() -> None:
    """It simulates up to 1,024 GPUs, nearly as much work as all other commands of the pages together."""
    check_shown(at_scale=True)


def find_shown(*, at_scale: bool) -> list[tuple[str, str]]:
    """Return the commands of the pages with their output. at_scale: those with the option --scale."""
    found = [shown for page in PAGES for shown in SHOWN.findall(page.read_text())]
    return [(command, block) for _, command, block, _ in found if ("--scale" in command) == at_scale]


def check_shown(*, at_scale: bool) -> None:
    for command, block in find_shown(at_scale=at_scale):
        assert block == printed(command), f"python {Path(__file__).relative_to(ROOT)} writes the pages anew"


def test_what_adapters_fit_on_one_card() -> None:
    """The table of docs/lora.md matches the plan of the command above it."""
    page = (ROOT / "docs" / "lora.md").read_text()
    words = shlex.split(re.findall(r"^megarl (plan .*)$", page, re.MULTILINE)[0])
    overrides = [word for word in words if "=" in word and "lora" not in word]
    rows = re.findall(r"^\| ((?:Qwen).*) \|$", page, re.MULTILINE)
    assert len(rows) == 5
    for name, *shown in (row.split(" | ") for row in rows):
        whole, adapted = (
            make_plan_inputs(load_config(ROOT / words[1], [*overrides, *own]), KNOWN_MODELS[name], world=1)
            for own in ([], ["actor.lora.rank=32"])
        )
        needs = [{need.phase: need.total / GIB for need in gpu_needs(plan)} for plan in (whole, adapted)]
        updates = [f"{need['actor_update']:.1f}" for need in needs]
        sizes = [f"{checkpoint_bytes(whole) / GIB:.1f}", f"{checkpoint_bytes(adapted) / GIB:.2f}"]
        fit = ["no" if find_problem(plan) else "yes" for plan in (whole, adapted)]
        assert shown == [*updates, f"{needs[1]['weight_transfer']:.1f}", *sizes, *fit], name


def test_it_does_not_fit_in_the_same_words_and_with_an_exit_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    command = SHOWN.findall(PAGE.read_text())[-1][1]
    assert main(shlex.split(command)) == 2
    assert re.search(r"phase \w+ needs [\d.]+ GiB of the 79.2 of each H100", capsys.readouterr().err)


@pytest.mark.slow
def test_all_layouts_are_listed_on_demand(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(["plan", "configs/dapo_32b.yaml", "--all", "--mean-length", "2000"]) == 0
    text = capsys.readouterr().out
    fit, rest = map(int, re.findall(r"(\d+) fit, (\d+) do not", text)[0])
    rows = [line for line in text.splitlines() if line.startswith("  tp ") and "<-" not in line]
    refused = [line for line in text.splitlines() if line.startswith("    not ")]
    assert len(rows) == fit and len(refused) == rest
    assert "responses of 2,000 tokens" in text and "(--all)" not in text


@pytest.mark.parametrize(
    "options",
    [
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("vapo_32b", "dapo_30b_a3b --best")),
        "dapo_72b --best",
    ],
)
def test_no_torch_is_needed_and_the_work_is_little(options: str) -> None:
    """A plan takes less than six million function calls, which take two to four seconds.

    Calls are the same on any machine. Importing torch and Megatron would take longer than the plan. The
    schema's import, 0.2 s, is not counted."""
    import subprocess
    import sys

    code = (
        "import sys, cProfile, pstats; import megarl.config.check; from megarl.cli.main import main;"
        "profile = cProfile.Profile();"
        "profile.runcall(main, ['plan', *sys.argv[1:]]); calls = pstats.Stats(profile).total_calls;"
        "assert not {'torch', 'megatron', 'transformers'} & set(sys.modules);"
        "assert 100_000 < calls < 6_000_000, calls"
    )
    name, *more = options.split()
    given = [f"configs/{name}.yaml", *more]
    done = subprocess.run(
        [sys.executable, "-c", code, *given], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(SHOWN.sub(lambda found: found[1] + printed(found[2]) + found[4], page.read_text()))
