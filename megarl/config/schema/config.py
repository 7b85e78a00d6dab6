"""A whole configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from megarl.config.methods import GAE, WINDOW_GAE
from megarl.config.schema.actor import LoraConfig, OptimizerConfig
from megarl.config.schema.algorithm import AlgorithmConfig
from megarl.config.schema.checkpoint import CheckpointConfig
from megarl.config.schema.cluster import ClusterConfig
from megarl.config.schema.critic import CriticConfig
from megarl.config.schema.data import DataConfig
from megarl.config.schema.evaluation import EvaluationConfig
from megarl.config.schema.guard import GuardConfig
from megarl.config.schema.log import LogConfig
from megarl.config.schema.model import ModelConfig
from megarl.config.schema.parallel import ParallelConfig
from megarl.config.schema.residency import ResidencyConfig, TensorGroup
from megarl.config.schema.reward import RewardConfig
from megarl.config.schema.rollout import RolloutConfig
from megarl.config.schema.schedule import ScheduleConfig
from megarl.config.schema.section import Section, field, section
from megarl.config.schema.stages import TRAIN, main_stage
from megarl.config.schema.supervised import SupervisedConfig
from megarl.config.schema.teacher import TeacherConfig
from megarl.config.schema.update import UpdateConfig
from megarl.config.schema.value_pretraining import ValuePretrainingConfig
from megarl.config.schema.watchdog import WatchdogConfig


class Config(Section):
    recipe: Literal[
        "sft", "grpo", "dapo", "ppo", "vapo", "tppo", "sao",
        "vc_ppo", "asyppo", "orz", "r1_zero", "dr_grpo", "rloo", "reinforce_pp", "gspo", "cispo",
        "dppo", "sapo", "clip_cov", "kl_cov", "fipo",
        "gdpo", "spo", "sppo",
    ] = field(..., "algorithm; sets the defaults of the switches (see config/recipes.py)")  # fmt: skip
    run_dir: Path = field(..., "folder of this run: config, metrics, samples, checkpoints, report")
    steps: int = field(..., "rollout steps", "rollout steps", ge=1)
    seed: int = field(0, "seed of everything that is random", ge=0, lt=2**63)
    model: ModelConfig = field(..., "see ModelConfig")
    parallel: ParallelConfig = section(ParallelConfig)
    residency: ResidencyConfig = section(ResidencyConfig)
    actor: OptimizerConfig = section(OptimizerConfig)
    critic: CriticConfig = section(CriticConfig)
    data: DataConfig = section(DataConfig)
    rollout: RolloutConfig = section(RolloutConfig)
    cluster: ClusterConfig = section(ClusterConfig)
    reward: RewardConfig = section(RewardConfig)
    algorithm: AlgorithmConfig = section(AlgorithmConfig)
    teacher: TeacherConfig = section(TeacherConfig)
    update: UpdateConfig = section(UpdateConfig)
    value_pretraining: ValuePretrainingConfig = section(ValuePretrainingConfig)
    supervised: SupervisedConfig = section(SupervisedConfig)
    schedule: ScheduleConfig = section(ScheduleConfig)
    evaluation: EvaluationConfig = section(EvaluationConfig)
    checkpoint: CheckpointConfig = section(CheckpointConfig)
    guard: GuardConfig = section(GuardConfig)
    watchdog: WatchdogConfig = section(WatchdogConfig)
    log: LogConfig = section(LogConfig)

    @property
    def main_stage(self) -> str:
        return main_stage(self.recipe)

    @property
    def has_engine(self) -> bool:
        """Return whether an engine samples responses."""
        return self.main_stage == TRAIN

    @property
    def has_critic(self) -> bool:
        return self.has_engine and bool(self.algorithm.advantage_method.critic)

    @property
    def has_prompt_critic(self) -> bool:
        return self.has_engine and self.algorithm.advantage_method.critic == "prompts"

    @property
    def gae_function(self) -> str:
        """Return the function of phase gae_advantages."""
        return GAE if self.rollout.window is None else WINDOW_GAE

    @property
    def has_reward_model(self) -> bool:
        return self.has_engine and self.reward.model.path is not None

    @property
    def has_teacher(self) -> bool:
        has_any = self.teacher.weights is not None or bool(self.teacher.folders)
        return has_any and self.has_engine

    @property
    def has_self_teacher(self) -> bool:
        """Return whether the teacher is the actor with a longer prompt."""
        return self.teacher.weights is not None and self.has_engine

    @property
    def model_folders(self) -> dict[str, Path]:
        """Return key -> folder of each model."""
        folders = {"critic.path": self.critic.path, "reward.model.path": self.reward.model.path}
        folders |= self.teacher.folders
        return {"model.path": self.model.path} | {key: path for key, path in folders.items() if path}

    def evaluates(self, step: int, every: int | None = None) -> bool:
        """Return whether a data.eval entry is evaluated after `step`. every: the entry's own interval"""
        interval = every or self.evaluation.every
        return step in (0, self.steps) or (interval > 0 and step % interval == 0)

    def has_group(self, group: TensorGroup) -> bool:
        is_present = {"actor": True, "critic": self.has_critic, "engine": self.has_engine}
        has_reference_model = self.algorithm.has_reference and self.actor.lora.rank is None
        is_present |= {"reference": has_reference_model, "reward": self.has_reward_model}
        is_present |= {"teacher": self.has_teacher and self.teacher.weights != "current"}
        return is_present[group.partition(".")[0]]

    def without_adapters(self) -> Config:
        models = {"actor": self.actor, "critic": self.critic}
        return self.model_copy(
            update={name: model.model_copy(update={"lora": LoraConfig()}) for name, model in models.items()}
        )

    @property
    def responses(self) -> int:
        """Return the trained responses per step."""
        if not self.has_engine:
            return self.supervised.batch
        return self.rollout.prompts * self.rollout.group_size

    @property
    def mini_batch(self) -> int:
        """Return the responses per optimizer step of the actor."""
        return self.update.mini_batch if self.has_engine else self.supervised.batch
