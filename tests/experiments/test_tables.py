"""Ablation tables: each row changes only what its paper changes, at 32B and at demo scale."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from megarl.config import Config, check_config, load_config
from megarl.config.errors import ConfigError
from megarl.config.schema.section import fields
from megarl_experiments.tables import AblationRow, AblationTable, load_table

FOLDER = Path(__file__).resolve().parents[2] / "configs" / "ablations"
TABLES = {
    name: load_table(str(FOLDER / f"{name}.table.yaml"))
    for name in ("vapo", "dapo", "critic_free", "critic", "tppo")
}
ROWS = [(table, row) for table in TABLES.values() for row in table.rows]

# Each row's changes to its 32B file and its points, copied independently from VAPO Table 1 and DAPO Table 1.
OFF = {
    "value_pretraining.steps": 0,
    "algorithm.lambda_critic": 0.95,
    "algorithm.lambda_policy": 0.95,
    "algorithm.clip_high": 0.2,
    "algorithm.aggregation": "sample",
    "algorithm.nll_weight": 0.0,
}
SINGLE = {"rollout.prompts": 8192, "rollout.group_size": 1}
ROWS_OF_VAPO = [
    ("value pretraining", 11, ["value_pretraining.steps"]),
    ("decoupled GAE (critic 0.95)", 33, ["algorithm.lambda_critic"]),
    ("decoupled GAE (one lambda 0.95)", 33, ["algorithm.lambda_critic", "algorithm.lambda_policy"]),
    ("length-adaptive GAE", 45, ["algorithm.lambda_policy"]),
    ("clip-higher", 46, ["algorithm.clip_high"]),
    ("token-level loss", 53, ["algorithm.aggregation"]),
    ("positive-example LM loss", 54, ["algorithm.nll_weight"]),
]
VAPO: dict[str, tuple[float, dict[str, Any]]] = {
    "VAPO": (60, {}),
    **{f"without {name}": (points, {key: OFF[key] for key in keys}) for name, points, keys in ROWS_OF_VAPO},
    "without group sampling": (55, SINGLE),
    "vanilla PPO": (5, {"recipe": "ppo", **OFF, **SINGLE}),
}
SWITCHES = (
    *("recipe", "reward.overlong.filter", "algorithm.clip_high", "reward.overlong.soft_punishment"),
    *("algorithm.aggregation", "rollout.dynamic_sampling.enabled"),
)
DAPO: dict[str, tuple[float, tuple[Any, ...]]] = {
    "naive GRPO": (30, ("grpo", False, 0.2, False, "sample", False)),
    "+ overlong filtering": (36, ("grpo", True, 0.2, False, "sample", False)),
    "+ clip-higher": (38, ("grpo", True, 0.28, False, "sample", False)),
    "+ soft overlong punishment": (41, ("grpo", False, 0.28, True, "sample", False)),
    "+ token-level loss": (42, ("grpo", False, 0.28, True, "token", False)),
    "+ dynamic sampling (DAPO)": (50, ("dapo", False, 0.28, True, "token", True)),
}

# Other methods: their differences from dapo_32b.yaml and vapo_32b.yaml, from their papers.
GRPO = {
    "recipe": "grpo",
    "algorithm.clip_high": 0.2,
    "algorithm.aggregation": "sample",
    "reward.overlong.soft_punishment": False,
    "rollout.dynamic_sampling.enabled": False,
}
DPPO = {
    **GRPO,
    "recipe": "dppo",
    "algorithm.advantage": "group_mean",
    "algorithm.aggregation": "constant",
    "algorithm.surrogate": "dppo_tv",
    "algorithm.old_logprobs": "engine",
    "algorithm.clip_low": 0.15,
    "algorithm.clip_high": 0.15,
}
CRITIC_FREE: dict[str, tuple[float | None, dict[str, Any]]] = {
    "DAPO": (50, {}),
    "GRPO with KL (R1-Zero)": (47, {**GRPO, "recipe": "r1_zero", "algorithm.kl_weight": 0.001}),
    "Dr. GRPO": (
        None,
        {
            **GRPO,
            "recipe": "dr_grpo",
            "algorithm.advantage": "group_mean",
            "algorithm.aggregation": "constant",
        },
    ),
    "RLOO": (
        None,
        {
            **GRPO,
            "recipe": "rloo",
            "algorithm.advantage": "leave_one_out",
            "algorithm.aggregation": "constant",
        },
    ),
    "REINFORCE++": (
        None,
        {
            **GRPO,
            "recipe": "reinforce_pp",
            "algorithm.advantage": "return",
            "algorithm.whiten": True,
            "algorithm.kl_reward": 0.001,
            "algorithm.aggregation": "token",
        },
    ),
    "GSPO": (
        None,
        {
            **GRPO,
            "recipe": "gspo",
            "algorithm.surrogate": "gspo",
            "algorithm.clip_low": 3e-4,
            "algorithm.clip_high": 4e-4,
            "update.mini_batch": 2048,
        },
    ),
    "CISPO": (
        None,
        {
            "recipe": "cispo",
            "algorithm.surrogate": "cispo",
            "algorithm.clip_low": 1.0,
            "algorithm.clip_high": 4.0,
        },
    ),
    "DPPO": (None, DPPO),
    "DPPO by KL": (
        None,
        {**DPPO, "algorithm.surrogate": "dppo_kl", "algorithm.clip_low": 0.05, "algorithm.clip_high": 0.05},
    ),
    "DPPO by top K": (
        None,
        {**DPPO, "algorithm.old_logprobs": "trainer", "algorithm.dppo.top_k": 20},
    ),
    "SAPO": (None, {**GRPO, "recipe": "sapo", "algorithm.surrogate": "sapo"}),
    "Clip-Cov": (
        None,
        {
            "recipe": "clip_cov",
            "reward.overlong.soft_punishment": False,
            "algorithm.surrogate": "clip_cov",
            "algorithm.clip_low": 1.0,
            "algorithm.clip_high": 1.0,
        },
    ),
    "KL-Cov": (
        None,
        {
            "recipe": "kl_cov",
            "reward.overlong.soft_punishment": False,
            "algorithm.surrogate": "kl_cov",
            "algorithm.clip_high": 0.2,
        },
    ),
    "FIPO": (None, {"recipe": "fipo", "algorithm.surrogate": "fipo", "algorithm.dual_clip": 10.0}),
    "GDPO": (
        None,
        {
            **GRPO,
            "recipe": "gdpo",
            "algorithm.advantage": "per_reward",
            "reward.overlong.soft_punishment": True,
        },
    ),
    "SPO": (
        None,
        {
            **GRPO,
            "recipe": "spo",
            "algorithm.advantage": "tracked",
            "algorithm.aggregation": "token",
            "algorithm.clip_high": 0.28,
            "algorithm.dual_clip": 10.0,
            "rollout.prompts": 8192,
            "rollout.group_size": 1,
            "update.mini_batch": 1024,
        },
    ),
}
VANILLA = {"recipe": "ppo", **OFF, **SINGLE}
SAO = {
    "recipe": "sao",
    "steps": 1000,
    "rollout.prompts": 128,
    "rollout.group_size": 1,
    "update.mini_batch": 128,
    "algorithm.old_logprobs": "engine",
    "algorithm.alpha": 1.5,
    "algorithm.surrogate": "masked",
    "algorithm.clip_low": 0.3,
    "algorithm.clip_high": 5.0,
    "algorithm.nll_weight": 0.0,
    "value_pretraining.steps": 10,
    "critic.lr": 5e-6,
    "critic.epochs": 2,
    "critic.frozen": ("attention",),
}
CRITIC: dict[str, tuple[float | None, dict[str, Any]]] = {
    "vanilla PPO": (5, VANILLA),
    "VC-PPO": (
        None,
        {**VANILLA, "recipe": "vc_ppo", "algorithm.lambda_critic": 1.0, "value_pretraining.steps": 50},
    ),
    "Open-Reasoner-Zero": (
        None,
        {
            **VANILLA,
            "recipe": "orz",
            "rollout.prompts": 128,
            "rollout.group_size": 64,
            "reward.incorrect": 0.0,
            "reward.overlong.soft_punishment": False,
            "algorithm.lambda_critic": 1.0,
            "algorithm.lambda_policy": 1.0,
            "algorithm.whiten": True,
            "algorithm.aggregation": "token",
            "critic.lr": 5e-6,
            "critic.warmup_steps": 50,
            "critic.mini_batch": 512,
            "update.mini_batch": 8192,
            "actor.warmup_steps": 50,
        },
    ),
    "AsyPPO": (
        None,
        {
            "recipe": "asyppo",
            "algorithm.lambda_policy": 1.0,
            "algorithm.nll_weight": 0.0,
            "algorithm.entropy_weight": 0.001,
            "algorithm.agreement.mask": 0.1,
            "algorithm.agreement.filter": 0.2,
            "value_pretraining.steps": 0,
            "critic.count": 2,
        },
    ),
    "VAPO": (60, {}),
    "SAO": (None, SAO),
    "SAO with a pass for old log-probs": (None, {**SAO, "algorithm.old_logprobs": "trainer"}),
    "SAO with clipping": (
        None,
        {**SAO, "algorithm.surrogate": "ppo", "algorithm.clip_low": 0.2, "algorithm.clip_high": 0.28},
    ),
    "SAO with one critic update": (None, {**SAO, "critic.epochs": 1}),
    "SAO without frozen attention": (None, {k: v for k, v in SAO.items() if k != "critic.frozen"}),
    "SAO without value pretraining": (None, {**SAO, "value_pretraining.steps": 0}),
    "SAO without length-adaptive GAE": (None, {**SAO, "algorithm.lambda_policy": 0.95}),
    "SPPO": (
        None,
        {
            **{key: value for key, value in VANILLA.items() if key != "algorithm.lambda_critic"},
            "recipe": "sppo",
            "algorithm.advantage": "prompt_value",
            "algorithm.aggregation": "token",
            "reward.overlong.soft_punishment": False,
            "algorithm.dual_clip": 3.0,
            "actor.weight_decay": 0.1,
            "critic.lr": 1e-5,
            "critic.weight_decay": 0.01,
            "critic.warmup_steps": 0,
        },
    ),
}
TPPO: dict[str, tuple[float | None, dict[str, Any]]] = {
    "VAPO": (60, {}),
    "T-PPO": (
        None,
        {
            "recipe": "tppo",
            "rollout.window": 8192,
            "algorithm.lambda_floor": 0.95,
            "algorithm.window_tail": 8,
            "algorithm.whiten": True,
            "algorithm.dual_clip": 10.0,
            "value_pretraining.steps": 10,
            "actor.lr": 8e-7,
            "actor.weight_decay": 0.1,
            "critic.weight_decay": 0.1,
        },
    ),
}
FULL = {"vapo": "vapo", "dapo": "dapo", "critic_free": "dapo", "critic": "vapo", "tppo": "vapo"}
"""The 32B file of a table."""


def leaves(config: Config) -> dict[str, Any]:
    return {key: attrgetter(key)(config) for key, _ in fields(Config)}


def changes(config: Config, base: Config) -> dict[str, Any]:
    """Return the keys in which `config` differs from `base`, except its folder."""
    before = leaves(base)
    return {key: value for key, value in leaves(config).items() if value != before[key] and key != "run_dir"}


@pytest.mark.parametrize(("table", "row"), ROWS, ids=[f"{table.name}-{row.slug}" for table, row in ROWS])
class TestRows:
    def expected(self, table: AblationTable, row: AblationRow) -> tuple[float | None, dict[str, Any]]:
        if table.name != "dapo":
            rows: dict[str, Any] = {"vapo": VAPO, "critic_free": CRITIC_FREE, "critic": CRITIC, "tppo": TPPO}
            found: tuple[float | None, dict[str, Any]] = rows[table.name][row.name]
            return found
        points, values = DAPO[row.name]
        return points, dict(zip(SWITCHES, values, strict=True))

    def test_at_32b(self, table: AblationTable, row: AblationRow) -> None:
        points, expected = self.expected(table, row)
        full = load_config(FOLDER.parent / f"{FULL[table.name]}_32b.yaml")
        config = load_config(FOLDER / row.config)
        check_config(config, row.name)
        assert row.paper == points
        assert changes(config, full) == {
            key: value for key, value in expected.items() if value != leaves(full)[key]
        }
        assert config.responses == (128 if config.recipe == "sao" else 8192)

    def test_at_demo_scale(self, table: AblationTable, row: AblationRow) -> None:
        """The same switches on the small base; only the table's overrides change sizes."""
        small = load_config(table.folder / table.base)
        config = table.config(row, ())
        check_config(config, row.name)
        expected = {
            key: value for key, value in self.expected(table, row)[1].items() if value != leaves(small)[key]
        }
        for override in row.overrides:
            key, _, value = override.partition("=")
            expected[key] = type(leaves(small)[key] or 0)(value)
        base = leaves(small)
        assert changes(config, small) == {k: value for k, value in expected.items() if value != base[k]}
        assert config.responses == small.responses


def test_runs_have_folders_of_their_own() -> None:
    files = {(FOLDER / row.config).resolve() for _, row in ROWS}
    assert len({load_config(file).run_dir for file in files}) == len(files)


def test_every_file_of_the_folder_is_a_row() -> None:
    for folder in (Path(), Path("../methods")):
        kinds = (".table.yaml", ".protocol.yaml", ".tasks.yaml")
        names = {f.name for f in (FOLDER / folder).glob("*.yaml") if not f.name.endswith(kinds)}
        files = {name for name in names if not name.startswith("ablation_")}  # bases and warm starts of rows
        rows = {row.config.name for _, row in ROWS if row.config.parent == folder}
        # A method is a file and a row of config/methods.py: its preset may be in no table.
        assert rows <= files if folder.name == "methods" else rows == files
    assert [row.name for row in TABLES["critic_free"].rows] == list(CRITIC_FREE)
    assert [row.name for row in TABLES["critic"].rows] == list(CRITIC)
    assert [row.name for row in TABLES["tppo"].rows] == list(TPPO)
    assert {row.name for row in TABLES["vapo"].rows} == set(VAPO) and [
        row.name for row in TABLES["dapo"].rows
    ] == list(DAPO)


def test_the_last_row_of_dapo_is_dapo() -> None:
    assert (
        changes(
            load_config(FOLDER / "dapo_dynamic_sampling.yaml"), load_config(FOLDER.parent / "dapo_32b.yaml")
        )
        == {}
    )


def test_another_base(tmp_path: Path) -> None:
    """The new base and its bases come first, then the files above the old root, then overrides.

    The old root has no effect.
    """
    for name, text in {
        "root": "recipe: dapo\nseed: 9\nrun_dir: x\nsteps: 5\nmodel: {path: m}\nactor: {eps: 0.5}\n",
        "middle": "base: root.yaml\nactor: {lr: 1.0}\nsteps: 6\n",
        "row": "base: middle.yaml\nalgorithm: {clip_high: 0.7}\n",
        "grand": "recipe: grpo\nrun_dir: y\nmodel: {path: n}\nactor: {lr: 2.0, weight_decay: 0.25}\n",
        "small": "base: grand.yaml\nsteps: 3\nseed: 4\n",
    }.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    config = load_config(tmp_path / "row.yaml", ["algorithm.clip_low=0.3"], base=tmp_path / "small.yaml")
    assert (config.recipe, config.steps, config.seed, str(config.run_dir)) == ("grpo", 6, 4, "y")
    assert (config.actor.lr, config.actor.weight_decay, config.actor.eps) == (1.0, 0.25, 1e-8)
    assert (config.algorithm.clip_high, config.algorithm.clip_low) == (0.7, 0.3)
    assert load_config(tmp_path / "root.yaml", base=tmp_path / "small.yaml") == load_config(
        tmp_path / "small.yaml"
    )


TABLE = (
    "title: x\nbase: b.yaml\nwarm_start: w.yaml\ntask: a.b:c\nfull: A\nrows: [{name: A, config: a.yaml}]\n"
)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("full: A", "full: B", "full: no row is named 'B'"),
        ("{name: A,", "{name: a, config: c.yaml}, {name: A,", "rows: two rows have the same name"),
        ("task: a.b:c", "task: a.b", "task: String should match pattern"),
        ("title: x\n", "", "title: Field required"),
        ("config: a.yaml", "file: a.yaml", "rows.0.config: Field required"),
        ("rows: [{name: A, config: a.yaml}]", "rows: []", "rows: "),
        ("full: A", "full: A\nlast: 0", "last: "),
    ],
)
def test_damaged_tables(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "x.table.yaml"
    path.write_text(TABLE.replace(old, new))
    with pytest.raises(ConfigError) as caught:
        load_table(str(path))
    assert str(caught.value).startswith(f"{path}: {message}")
