"""`megarl config phases`: the phase order of the shipped configurations, and the groups on the GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.cli.main import main
from megarl.config import load_config
from megarl.config.errors import ConfigError
from megarl.config.phases import COLUMNS, PHASES, check_phases, select_phases, select_stages

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))

VAPO_32B = """\
stage value_pretraining, at most 50 steps
  phase                on the GPU
  rollout              engine.weights engine.kv_cache
  distribute           engine.weights engine.kv_cache
  parity               actor.weights
  values               critic.weights
  monte_carlo_returns  critic.weights
  critic_update        critic.weights critic.gradients critic.optimizer
parity: only in the first step after each start

stage train, 313 steps
  phase            on the GPU
  rollout          engine.weights engine.kv_cache
  distribute       engine.weights engine.kv_cache
  old_logprobs     actor.weights
  parity           actor.weights
  values           critic.weights
  gae_advantages   critic.weights
  critic_update    critic.weights critic.gradients critic.optimizer
  actor_update     actor.weights actor.gradients actor.optimizer
  weight_transfer  actor.weights engine.weights
parity: only in the first step after each start
"""
PRETRAINING = "rollout distribute parity values monte_carlo_returns critic_update"
CRITIC = "values gae_advantages critic_update actor_update weight_transfer"
DAPO = "rollout distribute old_logprobs parity group_advantages actor_update weight_transfer"


def find_config(name: str) -> str:
    (path,) = (ROOT / "configs").rglob(name)
    return str(path)


def print_phases(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert main(["config", "phases", *arguments]) == 0
    return capsys.readouterr().out


def read_names(printed: str) -> list[str]:
    """Return the phases of each stage, in the order printed."""
    tables = [table.splitlines()[2:] for table in printed.split("\n\n")]
    return [" ".join(line.split()[0] for line in lines if line.startswith("  ")) for lines in tables]


def test_vapo_32b(capsys: pytest.CaptureFixture[str]) -> None:
    assert print_phases(capsys, find_config("vapo_32b.yaml")) == VAPO_32B


@pytest.mark.parametrize(
    ("arguments", "stages"),
    [
        (["dapo_32b.yaml"], [DAPO]),
        (["tppo_32b.yaml"], [PRETRAINING, f"rollout distribute old_logprobs parity {CRITIC}"]),
        (["sao_32b.yaml"], [PRETRAINING, f"rollout distribute parity {CRITIC}"]),
        (["dapo_32b.yaml", "guard.parity=none"], [DAPO.replace("parity ", "")]),
        (
            ["dapo_32b.yaml", "algorithm.kl_weight=0.01"],
            [DAPO.replace("group_", "reference_logprobs group_")],
        ),
        (
            ["dapo_32b.yaml", "reward.model.path=scorer"],
            [DAPO.replace("group_", "reward_model group_")],
        ),
        (
            ["dapo_32b.yaml", "teacher.path=teacher"],
            [DAPO.replace("actor_update", "teacher_advantages actor_update")],
        ),
        (
            ["methods/sdft.yaml"],
            [DAPO.replace("actor_update", "teacher_logprobs actor_update")],
        ),
        (
            ["dapo_32b.yaml", "teacher.path=teacher", "teacher.top_k=8"],
            [DAPO.replace("actor_update", "teacher_top_k actor_update")],
        ),
        (["demos/spo.yaml"], [DAPO.replace("group_", "tracked_")]),
        (
            ["demos/sppo.yaml"],
            [
                PRETRAINING,
                f"rollout distribute old_logprobs parity {CRITIC}".replace("gae_", "prompt_"),
            ],
        ),
        (
            ["vapo_32b.yaml", "value_pretraining.steps=0"],
            [f"rollout distribute old_logprobs parity {CRITIC}"],
        ),
        (["demos/sft.yaml"], ["read_pairs distribute supervised_update"]),
    ],
)
def test_order(arguments: list[str], stages: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    file, *overrides = arguments
    assert read_names(print_phases(capsys, find_config(file), *overrides)) == stages


def test_where_tensors_stay(capsys: pytest.CaptureFixture[str]) -> None:
    """The reference of a LoRA run is the actor; an engine on other ranks uses no memory of this GPU."""
    file = find_config("dapo_32b.yaml")
    adapters = print_phases(capsys, file, "algorithm.kl_weight=0.01", "actor.lora.rank=8")
    assert "  reference_logprobs  actor.weights\n" in adapters
    ranks = print_phases(capsys, file, "parallel.rollout_ranks=64")
    assert "engine." not in ranks
    assert "rollout: on 64 separate ranks (parallel.rollout_ranks), with the engine\n" in ranks
    kept = print_phases(capsys, file, "residency.keep=[actor.optimizer]")
    assert "  rollout           actor.optimizer engine.weights engine.kv_cache\n" in kept


def test_contradictions_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    file = find_config("dapo_32b.yaml")
    assert main(["config", "phases", file, "value_pretraining.steps=5"]) == 2
    assert "value_pretraining.steps: there is no critic to pretrain" in capsys.readouterr().err


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_shipped_configuration_can_run(path: Path) -> None:
    try:
        config = load_config(path)
    except ConfigError:
        pytest.skip("tables and protocols of `megarl ablate` are not configurations of a run")
    for stage in select_stages(config):
        check_phases(select_phases(config, stage, first_step=True))


def test_a_step_has_a_phase_once() -> None:
    for path in (find_config("vapo_32b.yaml"), find_config("dapo_32b.yaml")):
        for overrides in (["algorithm.kl_weight=0.1"], ["algorithm.kl_weight=0.1", "actor.lora.rank=8"]):
            names = [phase.name for phase in select_phases(load_config(Path(path), overrides))]
            assert len(names) == len(set(names)) and "reference_logprobs" in names


def test_columns_are_of_phases() -> None:
    assert {name for row in COLUMNS for name in row.phases.split()} <= {phase.name for phase in PHASES}
