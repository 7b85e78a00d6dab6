"""Layers of a configuration: preset, bases, file, overrides; allowed values and error messages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from megarl.config import Config, check_config, dump_config, load_config
from megarl.config.engines import ENGINES, EngineName
from megarl.config.errors import ConfigError
from megarl.config.recipes import PRESETS
from megarl.config.schema import AgreementConfig
from megarl.config.schema.section import Section, fields, section_model
from tests.methods import methods_without_recipe

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
MINIMUM = "recipe: grpo\nrun_dir: runs/x\nsteps: 3\nmodel: {path: m}\n"


@pytest.fixture
def minimum(tmp_path: Path) -> Path:
    path = tmp_path / "minimum.yaml"
    path.write_text(MINIMUM)
    return path


def refusal(path: Path, *overrides: str) -> str:
    """Return the message with which a configuration is refused."""
    with pytest.raises(ConfigError) as caught:
        check_config(load_config(path, overrides), str(path))
    message = str(caught.value)
    assert "\n" not in message
    return message


class TestLayers:
    def test_later_layers_win_over_earlier_ones(self, tmp_path: Path) -> None:
        (tmp_path / "grandparent.yaml").write_text(
            "recipe: dapo\nsteps: 1\nseed: 1\nmodel: {path: a, dtype: fp32}\nactor: {lr: 1.0e-3}\n"
        )
        (tmp_path / "parent.yaml").write_text(
            "base: grandparent.yaml\nsteps: 2\nseed: 2\nactor: {weight_decay: 0.5}\n"
        )
        (tmp_path / "other.yaml").write_text("seed: 3\n")
        child = tmp_path / "child.yaml"
        child.write_text("base: [parent.yaml, other.yaml]\nrun_dir: runs/x\nactor:\n  eps: 1.0e-5\n")
        config = load_config(child, ["steps=7", "model.path=b", "model.path=c"])
        assert (config.steps, config.seed, config.model.path, config.model.dtype) == (7, 3, Path("c"), "fp32")
        # Sections are merged key by key: preset (warm-up), grandparent, parent, file; then defaults.
        actor = config.actor
        assert (actor.warmup_steps, actor.lr, actor.weight_decay, actor.eps, actor.clip_grad) == (
            20,
            1e-3,
            0.5,
            1e-5,
            1.0,
        )

    def test_bases_are_relative_to_the_file_that_names_them(self, tmp_path: Path) -> None:
        (tmp_path / "deep").mkdir()
        (tmp_path / "root.yaml").write_text(MINIMUM)
        (tmp_path / "deep" / "middle.yaml").write_text("base: ../root.yaml\n")
        (tmp_path / "leaf.yaml").write_text("base: deep/middle.yaml\n")
        assert load_config(tmp_path / "leaf.yaml") == load_config(tmp_path / "root.yaml")

    def test_a_base_shared_by_two_bases_is_no_circle(self, tmp_path: Path) -> None:
        (tmp_path / "root.yaml").write_text(MINIMUM)
        for name in "ab":
            (tmp_path / f"{name}.yaml").write_text("base: root.yaml\n")
        (tmp_path / "leaf.yaml").write_text("base: [a.yaml, b.yaml]\nsteps: 9\n")
        assert load_config(tmp_path / "leaf.yaml").steps == 9

    @pytest.mark.parametrize("length", [1, 2, 5])
    def test_a_circle_of_bases_is_shown(self, tmp_path: Path, length: int) -> None:
        for i in range(length):
            (tmp_path / f"{i}.yaml").write_text(f"base: {(i + 1) % length}.yaml\n")
        message = refusal(tmp_path / "0.yaml")
        assert "base: the files name each other in a circle" in message
        assert message.count(" -> ") == length

    def test_a_missing_base_says_who_named_it(self, tmp_path: Path) -> None:
        (tmp_path / "x.yaml").write_text("base: gone.yaml\n")
        assert (
            refusal(tmp_path / "x.yaml") == f"{tmp_path}/gone.yaml: no such file (base of {tmp_path}/x.yaml)"
        )

    def test_an_override_may_be_a_whole_section(self, minimum: Path) -> None:
        config = load_config(minimum, ["rollout={prompts: 8, group_size: 4}", "rollout.prompts=16"])
        assert (config.rollout.prompts, config.rollout.group_size) == (16, 4)

    def test_a_key_with_a_new_name_works_and_says_so(
        self, minimum: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        config = load_config(minimum, ["watchdog.limits.divide=5"])
        assert config.watchdog.limits == {"distribute": 5.0}
        said = capsys.readouterr().err
        assert said == "megarl: command line: watchdog.limits.divide is now watchdog.limits.distribute\n"
        assert load_config(minimum, ["reward.max_unjudged=0.5"]).reward.max_ungraded == 0.5
        said = capsys.readouterr().err
        assert said == "megarl: command line: reward.max_unjudged is now reward.max_ungraded\n"

    def test_merge_keys_of_yaml_work(self, tmp_path: Path) -> None:
        path = tmp_path / "x.yaml"
        path.write_text(MINIMUM + "actor: &a {lr: 2.0e-6, eps: 1.0e-7}\ncritic: {<<: *a, lr: 3.0e-6}\n")
        config = load_config(path)
        assert (config.critic.lr, config.critic.eps, config.actor.lr) == (3e-6, 1e-7, 2e-6)


class TestPresets:
    # The papers' switches, copied independently: DAPO section 2 and 4.1, VAPO section 4 and 5.1.
    EXPECTED = {
        "grpo": {
            "advantage": "group",
            "aggregation": "sample",
            "clip_high": 0.2,
            "nll_weight": 0.0,
            "kl_weight": 0.0,
        },
        "dapo": {
            "advantage": "group",
            "aggregation": "token",
            "clip_high": 0.28,
            "nll_weight": 0.0,
            "kl_weight": 0.0,
        },
        "ppo": {
            "advantage": "gae",
            "aggregation": "sample",
            "clip_high": 0.2,
            "lambda_critic": 0.95,
            "lambda_policy": 0.95,
        },
        "vapo": {
            "advantage": "gae",
            "aggregation": "token",
            "clip_low": 0.2,
            "clip_high": 0.28,
            "lambda_critic": 1.0,
            "lambda_policy": "length_adaptive",
            "alpha": 0.05,
            "nll_weight": 0.1,
        },
        # Other methods, from their papers (docs/algorithms.md).
        "tppo": {
            "advantage": "gae",
            "aggregation": "token",
            "clip_low": 0.2,
            "clip_high": 0.28,
            "dual_clip": 10.0,
            "lambda_critic": 1.0,
            "lambda_policy": "length_adaptive",
            "lambda_floor": 0.95,
            "window_tail": 8,
            "whiten": True,
            "nll_weight": 0.1,
        },
        "vc_ppo": {"advantage": "gae", "aggregation": "sample", "lambda_critic": 1.0, "lambda_policy": 0.95},
        "asyppo": {
            "advantage": "gae",
            "lambda_critic": 1.0,
            "lambda_policy": 1.0,
            "clip_high": 0.28,
            "entropy_weight": 0.001,
            "agreement": AgreementConfig(mask=0.1, filter=0.2),
        },
        "orz": {"advantage": "gae", "lambda_critic": 1.0, "lambda_policy": 1.0, "kl_weight": 0.0},
        "r1_zero": {"advantage": "group", "aggregation": "sample", "kl_weight": 0.001, "kl_reward": 0.0},
        "dr_grpo": {"advantage": "group_mean", "aggregation": "constant", "kl_weight": 0.0},
        "rloo": {"advantage": "leave_one_out", "aggregation": "constant", "kl_weight": 0.0},
        "reinforce_pp": {"advantage": "return", "whiten": True, "kl_reward": 0.001, "kl_weight": 0.0},
        "gspo": {"surrogate": "gspo", "aggregation": "sample", "clip_low": 3e-4, "clip_high": 4e-4},
        "cispo": {"surrogate": "cispo", "aggregation": "token", "clip_low": 1.0, "clip_high": 4.0},
        "dppo": {
            "surrogate": "dppo_tv",
            "advantage": "group_mean",
            "aggregation": "constant",
            "old_logprobs": "engine",
            "clip_low": 0.15,
            "clip_high": 0.15,
        },
        "sapo": {"surrogate": "sapo", "advantage": "group", "aggregation": "sample"},
        "clip_cov": {"surrogate": "clip_cov", "aggregation": "token", "clip_low": 1.0, "clip_high": 1.0},
        "kl_cov": {"surrogate": "kl_cov", "aggregation": "token"},
        "fipo": {"surrogate": "fipo", "aggregation": "token", "clip_high": 0.28, "dual_clip": 10.0},
        "sppo": {"advantage": "prompt_value", "aggregation": "token", "nll_weight": 0.0, "dual_clip": 3.0},
        "spo": {
            "advantage": "tracked",
            "aggregation": "token",
            "tracker_rho": 0.875,
            "kl_weight": 0.0,
            "clip_low": 0.2,
            "clip_high": 0.28,
            "dual_clip": 10.0,
        },
        "gdpo": {"advantage": "per_reward", "aggregation": "sample", "clip_high": 0.2, "kl_weight": 0.0},
        "sao": {
            "advantage": "gae",
            "surrogate": "masked",
            "old_logprobs": "engine",
            "lambda_critic": 1.0,
            "lambda_policy": "length_adaptive",
            "alpha": 1.5,
            "clip_low": 0.3,
            "clip_high": 5.0,
        },
    }
    PRETRAINED = {"vapo": 50, "vc_ppo": 50, "tppo": 10, "sao": 10}
    UPDATES = {"gspo": 4, "spo": 8, "sao": 1}  # policy updates in a step; all others have 16, as DAPO
    DECAYS = {"tppo": (0.1, 0.1), "sppo": (0.1, 0.01)}  # of actor and critic

    def test_all_are_here(self) -> None:
        assert set(self.EXPECTED) == set(PRESETS) - {"sft"}

    def test_a_warm_start_raises_no_alarm_about_entropy(self, minimum: Path) -> None:
        assert load_config(minimum, ["recipe=sft"]).guard.entropy_collapse is None

    @pytest.mark.parametrize("recipe", EXPECTED)
    def test_switches(self, minimum: Path, recipe: str) -> None:
        config = load_config(minimum, [f"recipe={recipe}"])
        assert {key: getattr(config.algorithm, key) for key in self.EXPECTED[recipe]} == self.EXPECTED[recipe]
        filters = ("dapo", "cispo", "clip_cov", "kl_cov", "fipo")
        assert config.rollout.dynamic_sampling.enabled == (recipe in filters)
        assert config.reward.overlong.soft_punishment == (
            recipe in ("dapo", "vapo", "tppo", "cispo", "fipo", "gdpo")
        )
        assert config.rollout.window == (8192 if recipe == "tppo" else None)
        assert config.value_pretraining.steps == self.PRETRAINED.get(recipe, 0)
        assert config.responses == (128 if recipe == "sao" else 8192)
        assert config.responses / config.update.mini_batch == self.UPDATES.get(recipe, 16)
        decays = config.actor.weight_decay, config.critic.weight_decay
        assert decays == self.DECAYS.get(recipe, (0.0, 0.0))
        with_critic = ("ppo", "vapo", "vc_ppo", "asyppo", "orz", "tppo", "sao", "sppo")
        assert config.has_critic == (recipe in with_critic)
        assert config.critic.count == (2 if recipe == "asyppo" else 1)

    def test_a_file_turns_a_switch_of_its_recipe_off(self, minimum: Path) -> None:
        config = load_config(minimum, ["recipe=vapo", "algorithm.clip_high=0.2", "value_pretraining.steps=0"])
        assert (config.algorithm.clip_high, config.value_pretraining.steps, config.algorithm.nll_weight) == (
            0.2,
            0,
            0.1,
        )


class TestFilesOfTheProject:
    FILES = sorted(
        file for file in CONFIGS.rglob("*.yaml") if not file.stem.endswith((".table", ".protocol", ".tasks"))
    )

    def bases(self) -> set[Path]:
        lines = [
            (file, line)
            for file in self.FILES
            for line in file.read_text().splitlines()
            if line.startswith("base:")
        ]
        return {
            (file.parent / name.strip(" []")).resolve()
            for file, line in lines
            for name in line.partition(":")[2].split(",")
        }

    @pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(CONFIGS)))
    def test_parses_and_holds(self, file: Path) -> None:
        # A base may be incomplete; its values must be valid in a complete run.
        rest = (
            []
            if "recipe:" in file.read_text()
            else ["recipe=dapo", "run_dir=x", "steps=1", "model.path=m", "data.train=[x.jsonl]"]
        )
        rest = rest if file.resolve() in self.bases() else []
        check_config(load_config(file, rest), str(file))

    def test_reinforce_pp_with_a_baseline(self) -> None:
        """The overrides named in its file are consistent, and equal OpenRLHF's (reinforce_baseline)."""
        file = CONFIGS / "methods" / "reinforce_pp.yaml"
        (line,) = (line for line in file.read_text().splitlines() if line.startswith("# algorithm."))
        config = load_config(file, line.removeprefix("# ").split())
        check_config(config, file.name)
        a = config.algorithm
        assert (a.advantage, a.whiten, a.aggregation) == ("group_mean", True, "token")
        assert (a.kl_reward, a.kl_weight, a.kl_estimator) == (0.0, 1e-5, "k2")

    def test_each_method_has_a_recipe_or_a_file(self) -> None:
        for switch, name in methods_without_recipe():
            config = load_config(CONFIGS / "methods" / f"{name}.yaml")
            assert getattr(config.algorithm, switch) == name

    def test_there_are_such_files(self) -> None:
        names = {str(file.relative_to(CONFIGS)) for file in self.FILES}
        assert {"demos/vapo.yaml", "demos/dapo.yaml", "dapo_32b.yaml", "vapo_32b.yaml"} <= names

    def test_32b_files_have_the_papers_numbers(self) -> None:
        for name in ("dapo_32b", "vapo_32b"):
            config = load_config(CONFIGS / f"{name}.yaml")
            assert config.responses // config.update.mini_batch == 16
            assert config.rollout.max_response_tokens == 16384 + config.reward.overlong.buffer == 20480
            assert (config.evaluation.samples, config.evaluation.top_p, config.actor.lr) == (32, 0.7, 1e-6)


class TestKnobs:
    def test_every_knob_says_what_it_is_and_where_its_default_comes_from(self) -> None:
        for key, field in fields(Config):
            extra = field.json_schema_extra
            assert isinstance(extra, dict) and set(extra) == {"unit", "source"}, key
            assert field.description and len(field.description) > 2, key
            assert isinstance(extra["unit"], str) and isinstance(extra["source"], str) and extra["source"], (
                key
            )

    def test_a_section_is_in_the_file_of_its_name(self) -> None:
        sections = {name: section_model(field) for name, field in Config.model_fields.items()}
        for name, section in sections.items():
            assert section is None or section.__module__ == f"megarl.config.schema.{name}"

    def test_every_leaf_of_the_resolved_configuration_is_a_knob(self, minimum: Path) -> None:
        def leaves(section: Section, prefix: str = "") -> set[str]:
            found = set()
            for name in type(section).model_fields:
                value = getattr(section, name)
                found |= leaves(value, f"{prefix}{name}.") if isinstance(value, Section) else {prefix + name}
            return found

        assert leaves(load_config(minimum)) == {key for key, _ in fields(Config)}

    def test_nothing_here_imports_torch(self, minimum: Path) -> None:
        code = (
            "import sys; from megarl.cli.main import main; import megarl.config\n"
            "assert main(['config', 'show', sys.argv[1], 'actor.lr=2e-6']) == 0\n"
            "heavy = {'torch', 'numpy', 'transformers', 'pyarrow', 'matplotlib'} & set(sys.modules)\n"
            "assert not heavy, heavy"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, str(minimum)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "lr: 2.0e-06" in done.stdout


class TestRefusals:
    """Each message states where the value was set, which key it is, and what is wrong."""

    CASES = {
        "rollout.groupsize=3": (
            "command line: rollout.groupsize: unknown key (did you mean rollout.group_size?)"
        ),
        "lr=3": "command line: lr: unknown key (did you mean actor.lr or critic.lr or value_pretraining.lr?)",
        "dynamic_sampling.enabled=true": (
            "command line: dynamic_sampling: unknown key (did you mean rollout.dynamic_sampling?)"
        ),
        "supervised.foo=1": "command line: supervised.foo: unknown key (known here: response_key, batch)",
        "rollout.group_size=abc": "command line: rollout.group_size: must be a whole number (got 'abc')",
        "rollout.group_size=2.5": "command line: rollout.group_size: must be a whole number (got 2.5)",
        "rollout.group_size=": "command line: rollout.group_size: must be a whole number (got None)",
        "actor.lr=fast": "command line: actor.lr: must be a number (got 'fast')",
        "actor.lr=.inf": "command line: actor.lr: must be a finite number (got inf)",
        "actor.lr=.nan": "command line: actor.lr: must be a finite number (got nan)",
        "actor.lr=-1": "command line: actor.lr: must be greater than 0 (got -1)",
        "seed=true": "command line: seed: must not be true or false (got True)",
        "actor.betas=[true, 0.9]": "command line: actor.betas: must not be true or false (got [True, 0.9])",
        "actor.betas=[0.9]": "command line: actor.betas: has too few values (got [0.9])",
        "actor.betas=[0.9, 0.9, 0.9]": "command line: actor.betas: has too many values (got [0.9, 0.9, 0.9])",
        "actor.betas=[0.9, x]": "command line: actor.betas: must be a number (got 'x')",
        "data.train=x.parquet": "command line: data.train: must be a list, written [a, b] (got 'x.parquet')",
        "data.shuffle=maybe": "command line: data.shuffle: must be true or false (got 'maybe')",
        "model.path=12": "command line: model.path: must be a path, as text (got 12)",
        "data.prompt_format={prompt}": (
            "command line: data.prompt_format: must be a text (quotes make one of anything) (got "
            "{'prompt': None})"
        ),
        "reward.terms.a.weight=1": "reward.terms.a.function: must be given",
        "reward.terms.a={function: m:f, wieght: 1}": (
            "command line: reward.terms.a.wieght: unknown key (did you mean reward.terms.a.weight?)"
        ),
        "reward.terms.a={function: m:f, weight: x}": (
            "command line: reward.terms.a.weight: must be a number (got 'x')"
        ),
        "reward.terms.a=m:f": "command line: reward.terms.a: must be a section of `key: value` lines",
        "reward.terms.a={function: m:f, arguments: [1]}": "command line: reward.terms.a.arguments: must be a",
        "data.eval=[a, {path: b, evry: 2}]": (
            "command line: data.eval[1].evry: unknown key (did you mean data.eval[1].every?)"
        ),
        "data.eval=[a, {path: b, every: 0}]": (
            "command line: data.eval[1].every: must be greater than or equal to 1 (got 0)"
        ),
        "data.eval=[{path: a, samples: 0}]": (
            "command line: data.eval[0].samples: must be greater than or equal to 1 (got 0)"
        ),
        "data.eval=[{path: a, every: true}]": "command line: data.eval[0].every: must not be true or false",
        "data.eval=[a, {name: b}]": (
            "command line: data.eval[1]: must have the key path or the key gym, one of the two "
            "(got {'name': 'b'})"
        ),
        "data.eval=[a, 3]": (
            "command line: data.eval[1]: must be a path, as text, or a section with the key path or gym "
            "(got 3)"
        ),
        "data.eval=a": "command line: data.eval: must be a list, written [a, b] (got 'a')",
        "critic.frozen=mlp": "command line: critic.frozen: must be 'attention' or 'embeddings' (got 'mlp')",
        "actor.frozen_layers=-1": (
            "command line: actor.frozen_layers: must be greater than or equal to 0 (got -1)"
        ),
        "actor.lora.rank=0": "command line: actor.lora.rank: must be greater than or equal to 1 (got 0)",
        "actor.lora.alpha=0": "command line: actor.lora.alpha: must be greater than 0 (got 0)",
        "actor.lora.targets=[q]": "command line: actor.lora.targets: must be 'q_proj', 'k_proj', 'v_proj",
        "recipe=dappo": "command line: recipe: must be 'sft', 'grpo', 'dapo', 'ppo', 'vapo', 'tppo', ",
        "rollout=": "command line: rollout: is an empty section: give it keys, or leave it out (got None)",
        "rollout=3": "command line: rollout: must be a section of `key: value` lines (got 3)",
        "rollout={1: 2}": "command line: rollout.1: a key must be a text, not 1",
        "algorithm.lambda_policy=abc": (
            "command line: algorithm.lambda_policy: must be a number or 'length_adaptive' (got 'abc')"
        ),
        "run_dir=[a": (
            "command line: run_dir: line 1: not valid YAML: expected ',' or ']', but got '<stream end>'"
        ),
        'run_dir="a\\0b"': "command line: run_dir: must not hold a NUL character (got 'a\\x00b')",
        "base=other.yaml": "command line: base: unknown key",
        "noequals": "command line: 'noequals': an override is written key=value",
        "=3": "command line: '=3': an override is written key=value",
        "a..b=3": "command line: 'a..b=3': an override is written key=value",
    }

    @pytest.mark.parametrize("override", CASES)
    def test_overrides(self, minimum: Path, override: str) -> None:
        message = refusal(minimum, override)
        expected = self.CASES[override]
        assert (
            message.startswith(expected)
            if "unknown key" in expected or "noequals" in override
            else expected in message
        )

    FILES = {
        "": "x.yaml: must hold `key: value` lines",
        "- a\n": "x.yaml: must hold `key: value` lines",
        "steps: 1\nseed: 2\nsteps: 3\n": 'x.yaml: line 3: not valid YAML: found duplicate key "steps"',
        "model: {path: a}\nrollout:\n  prompts: 1\n  prompts: 2\n": (
            'x.yaml: line 4: not valid YAML: found duplicate key "prompts"'
        ),
        "steps: [1\nseed: 2\n": "x.yaml: line 2: not valid YAML: expected ',' or ']', but got ':'",
        "\tsteps: 1\n": "x.yaml: line 1: not valid YAML: found character '\\t' that cannot start any token",
        "steps: !!bool x\n": "x.yaml: not valid YAML: a value does not fit its tag",
        "steps: !!python/name:os.system\n": (
            "x.yaml: line 1: not valid YAML: could not determine a constructor"
        ),
        "base: 3\n": "x.yaml: base: must be a file name or a list of file names",
        "base: ['']\n": "x.yaml: base: must be a file name or a list of file names",
        "recipe: dapo\nrun_dir: x\nsteps: 1\n": "x.yaml: model: must be given",
        "recipe: dapo\nrun_dir: x\nsteps: 1\nmodel: {dtype: fp32}\n": "x.yaml: model.path: must be given",
        MINIMUM + "rollout: &a {prompts: *a}\n": (
            "x.yaml: line 5: rollout: sections within sections, more than 8 deep"
        ),
        MINIMUM + "rollout: {stop: &a [*a]}\n": "x.yaml: line 5: rollout.stop: must be a text",
        MINIMUM + "rollout:\n  prompts: 1\n  groupsize: 2\n": (
            "x.yaml: line 7: rollout.groupsize: unknown key (did you mean rollout.group_size?)"
        ),
        MINIMUM + "data:\n  eval:\n    - a\n    - path: b\n      evry: 2\n": (
            "x.yaml: line 9: data.eval[1].evry: unknown key (did you mean data.eval[1].every?)"
        ),
        MINIMUM
        + "actor: &a\n  lr: x\ncritic: {<<: *a}\n": "x.yaml: line 6: actor.lr: must be a number (got 'x')",
        MINIMUM + "actor: &a\n  momentum: 1\n  lr: 1\ncritic:\n  <<: *a\n  lr: x\n": (
            "x.yaml: line 6: actor.momentum: unknown key"
        ),
        MINIMUM + "rollout:\n  3: 4\n": "x.yaml: line 6: rollout.3: a key must be a text, not 3",
    }

    @pytest.mark.parametrize("content", FILES)
    def test_files(self, tmp_path: Path, content: str) -> None:
        (tmp_path / "x.yaml").write_text(content)
        assert refusal(tmp_path / "x.yaml").startswith(f"{tmp_path}/{self.FILES[content]}")

    def test_the_file_that_set_the_value_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "base.yaml").write_text(MINIMUM + "rollout: {prompts: -1}\n")
        (tmp_path / "x.yaml").write_text("base: base.yaml\nsteps: 2\nrollout: {group_size: 4}\n")
        assert refusal(tmp_path / "x.yaml").startswith(f"{tmp_path}/base.yaml: line 5: rollout.prompts: ")
        assert refusal(tmp_path / "x.yaml", "rollout.prompts=0").startswith("command line: rollout.prompts: ")

    def test_further_problems_are_counted(self, minimum: Path) -> None:
        assert refusal(minimum, "rollout.prompts=0", "actor.lr=0", "foo=1").endswith(" [and 2 more]")

    def test_not_text(self, tmp_path: Path) -> None:
        (tmp_path / "x.yaml").write_bytes(b"steps: \xff\n")
        assert refusal(tmp_path / "x.yaml") == f"{tmp_path}/x.yaml: not a UTF-8 text: byte 7 is 0xff"

    def test_not_a_file(self, tmp_path: Path) -> None:
        assert refusal(tmp_path) == f"{tmp_path}: cannot be read: Is a directory"
        assert refusal(tmp_path / "gone.yaml") == f"{tmp_path}/gone.yaml: no such file"


class TestContradictions:
    CASES = {
        "data.train=[]": "data.train: must name at least one file",
        "parallel.cp=64 data.max_prompt_tokens=50 rollout.max_response_tokens=70": (
            "parallel.cp: 64 ranks cut each sequence into 128 chunks, and none has over 120 tokens (lower it)"
        ),
        "rollout.group_size=1": (
            "rollout.group_size: must be >= 2 for algorithm.advantage group, which compares a group's "
            "responses (got 1"
        ),
        "recipe=rloo rollout.group_size=1": (
            "rollout.group_size: must be >= 2 for algorithm.advantage leave_one_out"
        ),
        "recipe=dr_grpo rollout.group_size=1": (
            "rollout.group_size: must be >= 2 for algorithm.advantage group_mean"
        ),
        "recipe=gdpo reward.overlong.soft_punishment=false": (
            "algorithm.advantage: per_reward needs several rewards, and there is one (verifier) "
            "(give others a weight, or set it to group)"
        ),
        "recipe=gdpo algorithm.kl_reward=0.1": (
            "algorithm.kl_reward: cannot be combined with algorithm.advantage per_reward (set it to 0"
        ),
        "recipe=gdpo rollout.group_size=1": (
            "rollout.group_size: must be >= 2 for algorithm.advantage per_reward"
        ),
        "recipe=spo algorithm.kl_reward=0.1": (
            "algorithm.kl_reward: cannot be combined with algorithm.advantage tracked (set it to 0"
        ),
        "recipe=spo rollout.group_size=4 rollout.dynamic_sampling.enabled=true": (
            "rollout.dynamic_sampling.enabled: drops groups that are all right or all wrong, which "
            "algorithm.advantage tracked needs (set it to false)"
        ),
        "recipe=spo reward.weight=0 reward.terms.x.function=a:b": (
            "reward.weight: must be > 0 for algorithm.advantage tracked, which expects the verifier's reward"
        ),
        "recipe=sppo algorithm.kl_reward=0.1": (
            "algorithm.kl_reward: cannot be combined with algorithm.advantage prompt_value (set it"
        ),
        "recipe=sppo algorithm.value_clip=0.2": (
            "algorithm.value_clip: prompt_value fits the critic by cross-entropy, which is not clipped"
        ),
        "recipe=sppo rollout.episode=a:b": (
            "algorithm.advantage: prompt_value treats a response as one action, but episodes have several"
        ),
        "recipe=sppo reward.weight=0 reward.terms.x.function=a:b": (
            "reward.weight: must be > 0 for algorithm.advantage prompt_value, which expects the verifier's"
        ),
        "recipe=sppo algorithm.lambda_policy=length_adaptive": (
            "algorithm.lambda_policy: length_adaptive needs a critic of all tokens (set algorithm.advantage"
        ),
        "algorithm.tracker_rho=0.96": (
            "algorithm.tracker_rho: has no effect with algorithm.advantage group (leave it out, or set that "
            "to tracked)"
        ),
        "algorithm.gamma=0.9": (
            "algorithm.gamma: has no effect with algorithm.advantage group (leave it out, or set that to gae "
            "or return)"
        ),
        "recipe=sppo algorithm.gamma=0.9": "algorithm.gamma: has no effect with algorithm.advantage prompt_",
        "recipe=spo algorithm.gamma=0.9": "algorithm.gamma: has no effect with algorithm.advantage tracked",
        "recipe=sao rollout.group_size=2": (
            "rollout.group_size: recipe sao takes one response a prompt (got 2; set it to 1)"
        ),
        "recipe=sao algorithm.mismatch.weight=token": (
            "algorithm.mismatch: has nothing to correct with algorithm.old_logprobs engine"
        ),
        "recipe=dapo rollout.window=8192": (
            "rollout.window: an unfinished response has no reward, so its value must come from a "
            "critic (set algorithm.advantage=gae, or leave it out)"
        ),
        "recipe=tppo rollout.window=20480": (
            "rollout.window: 20480 must be less than rollout.max_response_tokens 20480"
        ),
        "recipe=tppo rollout.window=8": "algorithm.window_tail: must be less than rollout.window 8 (got 8)",
        "recipe=tppo rollout.window=null": "algorithm.window_tail: has no effect without rollout.window",
        "recipe=tppo rollout.dynamic_sampling.enabled=true": (
            "rollout.dynamic_sampling.enabled: rollout.window trains on a response before it and its "
            "group are finished (set it to false)"
        ),
        "recipe=tppo reward.overlong.filter=true": (
            "reward.overlong.filter: rollout.window trains on a response "
        ),
        "recipe=tppo rollout.continue_partial=true": (
            "rollout.continue_partial: has no effect with rollout.window"
        ),
        "recipe=tppo algorithm.surrogate=fipo": (
            "algorithm.surrogate: fipo needs whole responses, which rollout.window cuts"
        ),
        "recipe=tppo algorithm.surrogate=trust_region algorithm.dual_clip=0 algorithm.old_logprobs=engine": (
            "algorithm.surrogate: trust_region needs whole responses, which rollout.window cuts"
        ),
        "recipe=vapo rollout.group_size=1 update.share_prompts=true": (
            "update.share_prompts: has no effect with rollout.group_size 1 "
        ),
        "recipe=tppo rollout.episode=a:b": "rollout.window: works with responses of one turn only",
        "recipe=tppo reward.model.path=m": "reward.model.path: scores whole responses, and with rollout.",
        "recipe=tppo algorithm.lambda_policy=0.95": (
            "algorithm.lambda_floor: has no effect unless algorithm.lambda_policy is length_adaptive"
        ),
        "recipe=sft rollout.window=8": "rollout.window: recipe sft learns from given responses",
        "algorithm.dual_clip=1": "algorithm.dual_clip: must be 0, or > 1",
        "recipe=cispo algorithm.dual_clip=3": (
            "algorithm.dual_clip: must be 0, or > 1 with algorithm.surrogate ppo, gspo or fipo (got "
            "3 with cispo)"
        ),
        "recipe=dapo algorithm.dppo.ratio_cap=3": (
            "algorithm.dppo.ratio_cap: has no effect with algorithm.surrogate ppo "
            "(leave it out, or set that to dppo_tv or dppo_kl)"
        ),
        "recipe=clip_cov algorithm.covariance.kl_weight=0.1": (
            "algorithm.covariance.kl_weight: has no effect with algorithm.surrogate clip_cov "
            "(leave it out, or set that to kl_cov)"
        ),
        "recipe=kl_cov algorithm.covariance.high=9": (
            "algorithm.covariance.high: has no effect with algorithm.surrogate kl_cov"
        ),
        "recipe=dapo algorithm.sapo.tau_negative=2": (
            "algorithm.sapo.tau_negative: has no effect with algorithm.surrogate ppo"
        ),
        "recipe=clip_cov algorithm.covariance.low=5": (
            "algorithm.covariance.low: must be less than high 5 (got 5)"
        ),
        "recipe=fipo algorithm.fipo.low=1.3": "algorithm.fipo.low: must be less than high 1.2 (got 1.3)",
        "recipe=fipo update.mini_batch=8192": (
            "algorithm.surrogate: fipo has no effect in the first update of a rollout, and there is "
            "only one (lower update.mini_batch)"
        ),
        "recipe=kl_cov update.mini_batch=8192": "algorithm.surrogate: kl_cov has no effect in the first",
        "recipe=dppo algorithm.dppo.top_k=20": (
            "algorithm.dppo.top_k: no engine returns the log-probs of its top-k tokens (set "
            "algorithm.old_logprobs=trainer, or it to 0)"
        ),
        "recipe=vapo critic.count=2 rollout.group_size=1": (
            "critic.count: several critics need algorithm.advantage gae, and a response each in "
            "every group (got 2 with groups of 1 and gae; set it to 1)"
        ),
        "recipe=sppo critic.count=2 rollout.prompts=512 rollout.group_size=16": (
            "critic.count: several critics need algorithm.advantage gae, and a response each in every group"
        ),
        "recipe=dapo critic.count=2": "critic.count: there is no critic",
        "recipe=vapo algorithm.agreement.mask=0.1": (
            "algorithm.agreement.mask: has no effect with fewer than two critics (set "
            "critic.count=2, or it to 0)"
        ),
        "recipe=asyppo algorithm.entropy_weight=0": (
            "algorithm.agreement.filter: has no effect without an entropy term "
            "(set algorithm.entropy_weight, or it to 0)"
        ),
        "recipe=dapo algorithm.dppo.top_k=20": (
            "algorithm.dppo.top_k: has no effect with algorithm.surrogate ppo"
        ),
        "recipe=dppo algorithm.mismatch.weight=token": (
            "algorithm.mismatch: has nothing to correct with algorithm.old_logprobs engine"
        ),
        "recipe=ppo rollout.dynamic_sampling.enabled=true": (
            "rollout.dynamic_sampling.enabled: needs rollout.group_size >= 2 (got 1)"
        ),
        "algorithm.lambda_policy=length_adaptive": "algorithm.lambda_policy: length_adaptive needs a critic",
        "recipe=vapo algorithm.advantage=group algorithm.lambda_policy=0.9": (
            "value_pretraining.steps: there is no critic to pretrain"
        ),
        "recipe=vapo algorithm.lambda_policy=1.5": (
            "algorithm.lambda_policy: must be in [0, 1] or length_adaptive (got 1.5)"
        ),
        "update.mini_batch=500": "update.mini_batch: must divide the 8192 responses of a step",
        "update.mini_batch=16384": "update.mini_batch: must divide the 8192 responses of a step",
        "recipe=dapo rollout.max_response_tokens=100": (
            "reward.overlong.buffer: must be <= rollout.max_response_tokens 100 (got 4096)"
        ),
        "reward.correct=-1": "reward.correct: must be greater than reward.incorrect -1.0 (got -1.0)",
        "evaluation.every=5": "evaluation.every: needs data.eval files",
        "data.eval=[a,{'path':b,'name':n},{'path':c,'name':n}]": (
            "data.eval[2].name: data.eval[1] has the name n already (choose another name)"
        ),
        "data.eval=[{'path':b,'every':2}]": "data.eval[0].name: must be given with `every`",
        "data.eval=[{'path':b,'name':n/m}]": "data.eval[0].name: must be of letters, digits and _ . + -",
        "model.max_positions=1000": (
            "rollout.max_response_tokens: data.max_prompt_tokens 2048 + 20480 tokens exceed the model's 1000"
        ),
        "rollout.stop=['']": "rollout.stop: must not hold an empty text",
        "log.reflection_words=['']": "log.reflection_words: must not hold an empty text",
        "actor.betas=[0.9, 1.0]": "actor.betas: both must be in [0, 1) (got [0.9, 1.0])",
        "recipe=sft algorithm.nll_weight=0": "algorithm.nll_weight: must be 1 for recipe sft, which has no",
        "recipe=sft algorithm.nll_weight=0.5": "algorithm.nll_weight: must be 1 for recipe sft",
        "recipe=sft data.train=[]": "data.train: must name at least one file",
        "critic.lr=1e-3": "critic.lr: there is no critic (leave it out, or set algorithm.advantage=gae)",
        "recipe=dapo critic.path=m": "critic.path: there is no critic",
        "value_pretraining.rollouts=x": "value_pretraining.rollouts: there is no critic",
        "algorithm.value_clip=0.2": "algorithm.value_clip: there is no critic",
        "recipe=vapo critic.mini_batch=500": (
            "critic.mini_batch: must divide the 8192 responses of a step, and divide update.mini_batch"
        ),
        "recipe=vapo rollout.prompts=6 rollout.group_size=1 update.mini_batch=2 critic.mini_batch=3": (
            "critic.mini_batch: must divide the 6 responses of a step, and divide update.mini_batch 2 or "
            "be a multiple of it (got 3)"
        ),
        "algorithm.mismatch.mask=token algorithm.mismatch.mask_low=3": (
            "algorithm.mismatch.mask_low: must be less than mask_high 2.0"
        ),
        "algorithm.mismatch.cap=3": (
            "algorithm.mismatch.cap: has no effect while algorithm.mismatch.weight is none"
        ),
        "algorithm.mismatch.mask_high=3": (
            "algorithm.mismatch.mask_high: has no effect while algorithm.mismatch.mask is none"
        ),
        "recipe=sft algorithm.fipo.high=1.3": "algorithm.fipo.high: recipe sft learns from given responses",
        "recipe=sft algorithm.mismatch.weight=token": (
            "algorithm.mismatch.weight: recipe sft learns from given responses"
        ),
        # Values that the preset of schedule.ahead would set are not reported.
        "recipe=sft parallel.rollout_ranks=1 schedule.ahead=1": "parallel.rollout_ranks: recipe sft",
        "checkpoint.time_limit=60": "checkpoint.time_limit: has no effect while checkpoint.every is 0",
        "checkpoint.keep_every=5": "checkpoint.keep_every: has no effect while checkpoint.every is 0",
        "recipe=sft rollout.dynamic_sampling.enabled=true": "rollout.dynamic_sampling.enabled: recipe sft",
        "recipe=sft reward.overlong.soft_punishment=true": "reward.overlong.soft_punishment: recipe sft",
        "recipe=sft value_pretraining.steps=3": "value_pretraining.steps: recipe sft",
        "recipe=sft algorithm.kl_weight=0.1": "algorithm.kl_weight: recipe sft",
        "algorithm.kl_estimator=k2": "algorithm.kl_estimator: has no effect while algorithm.kl_weight is 0",
        "recipe=sft reward.terms.a.function=m:f": "reward.terms: recipe sft learns from given responses",
        "reward.weight=0": "reward.weight: 0, and neither a term of reward.terms nor a judge or reward model",
        "reward.weight=0 reward.terms.a.function=m:f reward.terms.a.weight=0": "reward.weight: 0, and ",
        "reward.weight=0 reward.model.path=m reward.model.weight=0": "reward.weight: 0, and neither a term",
        "recipe=dapo reward.weight=0 reward.model.path=m rollout.dynamic_sampling.by=score": (
            "rollout.dynamic_sampling.by: score: only the reward model rewards, and groups are"
        ),
        "teacher.weight=2": "teacher.weight: has no effect without a teacher (set teacher.path)",
        "teacher.top_k=4": "teacher.top_k: has no effect without a teacher (set teacher.path)",
        "teacher.alone=true": "teacher.alone: has no effect without a teacher (set teacher.path)",
        "teacher.path=m teacher.alpha=1": "teacher.alpha: has no effect without teacher.top_k (set it)",
        "teacher.path=m teacher.demonstration=answer": "teacher.demonstration: has no effect on a separate",
        "teacher.path=m teacher.weights=initial": "teacher.weights: initial and teacher.path: choose one",
        "teacher.weights=current teacher.average_rate=0.1": "teacher.average_rate: has no effect without",
        "teacher.weights=average actor.lora.rank=4": "teacher.weights: average: the average of adapters",
        "teacher.weights=initial teacher.demonstration=hint": "teacher.demonstration: must be sibling",
        "teacher.weights=initial teacher.template=x": "teacher.template: must have {demonstration}",
        "recipe=ppo teacher.weights=initial rollout.group_size=1": (
            "teacher.demonstration: sibling: a group has one response"
        ),
        "teacher.weights=initial teacher.max_context_tokens=99999999": "teacher.max_context_tokens: 99999999",
        "recipe=sft teacher.weights=initial": "teacher.weights: recipe sft learns from given responses",
        "run_dir=s/run teacher.by_source.a=s": "run_dir: s/run is inside teacher.by_source.a s",
        "recipe=sft teacher.by_source.a=m": "teacher.by_source: recipe sft learns from given responses",
        "recipe=sft teacher.path=m": "teacher.path: recipe sft learns from given responses",
        "residency.keep=[teacher.weights]": "residency.keep: teacher.weights: this run has none",
        "run_dir=s/run teacher.path=s": "run_dir: s/run is inside teacher.path s",
        "reward.model.weight=2": "reward.model.weight: has no effect without a reward model",
        "recipe=sft reward.model.path=m": "reward.model.path: recipe sft learns from given responses",
        "recipe=sft algorithm.surrogate=gspo": "algorithm.surrogate: recipe sft learns from given responses",
        "recipe=sft algorithm.old_logprobs=engine": "algorithm.old_logprobs: recipe sft learns from",
        "recipe=sft guard.parity=none": "guard.parity: recipe sft learns from given responses",
        "guard.parity=-0.1": "guard.parity: must be >= 0, auto or none (got -0.1)",
        "guard.parity=none guard.parity_layers=true": (
            "guard.parity_layers: has no effect with guard.parity none"
        ),
        "model.recompute_layers=4": "model.recompute_layers: has no effect with model.recompute none",
        "residency.keep=[reward.weights]": "residency.keep: reward.weights: this run has none",
        "run_dir=s/run reward.model.path=s": "run_dir: s/run is inside reward.model.path s",
        "reward.terms.a/b.function=m:f": (
            "reward.terms: a name must be of letters, digits and _, as its metric is reward/term_<name> "
            "(got 'a/b')"
        ),
        "recipe=sft algorithm.kl_reward=0.1": "algorithm.kl_reward: recipe sft",
        "schedule.ahead=1": "schedule.ahead: 1 needs ranks that generate while others train",
        "parallel.rollout_ranks=3 rollout.engine=sglang rollout.engine_tp=2": (
            "parallel.rollout_ranks: 3 is not a multiple of rollout.engine_tp 2"
        ),
        "parallel.vpp=2": "parallel.vpp: 2 virtual stages need a pipeline of several ranks",
        "parallel.pp=2 parallel.overlap_warmup_flush=true": "parallel.overlap_warmup_flush: has no effect",
        "recipe=sft algorithm.entropy_weight=0.1": "algorithm.entropy_weight: recipe sft",
        "recipe=sft algorithm.whiten=true": "algorithm.whiten: recipe sft",
    }

    @pytest.mark.parametrize("overrides", CASES)
    def test_are_found(self, minimum: Path, overrides: str) -> None:
        given = ["data.train=[x.jsonl]", *overrides.replace(", ", ",").split(" ")]
        assert refusal(minimum, *given).startswith(f"{minimum}: {self.CASES[overrides]}")

    @pytest.mark.parametrize("recipe", PRESETS)
    def test_a_consistent_one_passes_and_so_does_what_it_resolves_to(
        self, minimum: Path, tmp_path: Path, recipe: str
    ) -> None:
        config = load_config(minimum, [f"recipe={recipe}", "data.train=[x.jsonl]"])
        check_config(config, str(minimum))
        (tmp_path / "resolved.yaml").write_text(dump_config(config))
        check_config(load_config(tmp_path / "resolved.yaml"), "resolved.yaml")

    def test_entries_of_data_eval(self, minimum: Path) -> None:
        """Plain paths stay paths in the dump, and every entry can be loaded again."""
        given = "data.eval=[a.jsonl, {path: ~/b.jsonl, name: b, every: 2}, {path: c.jsonl, samples: 3}]"
        config = load_config(minimum, ["data.train=[x.jsonl]", given])
        check_config(config, str(minimum))
        home = str(Path.home())
        assert config.model_dump(mode="json")["data"]["eval"] == [
            "a.jsonl",
            {"path": f"{home}/b.jsonl", "name": "b", "every": 2},
            {"path": "c.jsonl", "samples": 3},
        ]
        assert [entry.path.name for entry in config.data.eval] == ["a.jsonl", "b.jsonl", "c.jsonl"]
        assert Config.model_validate(config.model_dump()) == config

    def test_what_is_drawn_ahead_is_corrected_for(self, minimum: Path) -> None:
        given = ["recipe=dapo", "data.train=[x.jsonl]", "parallel.rollout_ranks=1"]
        for keys, weight in (
            (["schedule.ahead=1"], "token"),
            (["schedule.ahead=0"], "none"),
            (["schedule.ahead=2", "algorithm.mismatch.weight=none"], "none"),
            (["schedule.ahead=1", "algorithm.old_logprobs=engine"], "none"),
            (["schedule.ahead=1", "recipe=sao", "rollout.group_size=1"], "none"),
        ):
            assert load_config(minimum, [*given, *keys]).algorithm.mismatch.weight == weight

    def test_critic_mini_batches_of_other_sizes_pass(self, minimum: Path) -> None:
        for size in (1, 256, 512, 1024, 8192):
            check_config(
                load_config(minimum, ["recipe=vapo", "data.train=[x.jsonl]", f"critic.mini_batch={size}"]),
                str(minimum),
            )


class TestNumbersAndTexts:
    """YAML 1.1 reads 1e-6 as text, `no` as false, 010 as 8 and 2024-01-01 as a date; megarl does not."""

    @pytest.mark.parametrize("text", ["1e-6", "1.0e-6", "0.000001", "1E-6", "+1e-06", ".000001"])
    def test_small_numbers(self, minimum: Path, text: str) -> None:
        assert load_config(minimum, [f"actor.lr={text}"]).actor.lr == 1e-6

    @pytest.mark.parametrize("name", ["no", "on", "2024-01-01", "1:30", "1_0x", "0o17", "=", "~x", "a b"])
    def test_paths_that_look_like_something_else(self, minimum: Path, name: str) -> None:
        assert load_config(minimum, [f"run_dir={name}"]).run_dir == Path(name)

    def test_leading_zeros_are_decimal(self, minimum: Path) -> None:
        assert load_config(minimum, ["seed=010"]).seed == 10

    @pytest.mark.parametrize(
        ("text", "value"), [("true", True), ("False", False), ("yes", True), ("off", False)]
    )
    def test_switches(self, minimum: Path, text: str, value: bool) -> None:
        assert load_config(minimum, [f"data.shuffle={text}"]).data.shuffle is value

    def test_a_union_takes_either(self, minimum: Path) -> None:
        for text, value in (("1", 1.0), ("0.5", 0.5), ("9e-1", 0.9), ("length_adaptive", "length_adaptive")):
            assert load_config(minimum, [f"algorithm.lambda_policy={text}"]).algorithm.lambda_policy == value

    def test_home(self, minimum: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", "/somewhere")
        config = load_config(
            minimum, ["model.path=~/m", "data.train=[~/a.jsonl, b~/c.jsonl]", "critic.path=null"]
        )
        assert config.model.path == Path("/somewhere/m")
        assert [entry.path for entry in config.data.train] == [Path("/somewhere/a.jsonl"), Path("b~/c.jsonl")]

    def test_nothing_changes_after_loading(self, minimum: Path) -> None:
        config = load_config(minimum)
        with pytest.raises(ValueError, match="frozen"):
            config.steps = 4  # type: ignore[misc]
        assert dump_config(config) == dump_config(load_config(minimum))


def test_every_engine_has_a_row() -> None:
    assert set(get_args(EngineName)) == set(ENGINES)


def test_an_evaluation_may_be_greedy(minimum: Path) -> None:
    """Training must sample: log-probs at temperature 0 are meaningless."""
    assert load_config(minimum, ["evaluation.temperature=0"]).evaluation.temperature == 0
    assert "evaluation.temperature: must be" in refusal(minimum, "evaluation.temperature=-1")
    assert "rollout.temperature: must be" in refusal(minimum, "rollout.temperature=0")


def test_variables_of_the_chat_template(minimum: Path) -> None:
    config = load_config(minimum, ["data.chat_template_kwargs={enable_thinking: false, lines: [a, 2]}"])
    variables = {"enable_thinking": False, "lines": ["a", 2]}
    assert config.data.chat_template_kwargs == variables
    minimum.write_text(dump_config(config))
    assert load_config(minimum).data.chat_template_kwargs == variables
    line = refusal(minimum, "data.chat_template_kwargs.messages=[]")
    assert "data.chat_template_kwargs: must not have messages" in line
