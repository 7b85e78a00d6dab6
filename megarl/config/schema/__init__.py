"""Keys of the configuration, without torch: each file but `config.py` and `section.py` is one section."""

# ruff: noqa: F401 (other packages import the names from here)

from megarl.config.schema.actor import LoraConfig, MuonConfig, OptimizerConfig
from megarl.config.schema.algorithm import AgreementConfig, AlgorithmConfig, MismatchConfig
from megarl.config.schema.checkpoint import CheckpointConfig
from megarl.config.schema.cluster import ClusterConfig
from megarl.config.schema.config import Config
from megarl.config.schema.critic import CriticConfig
from megarl.config.schema.data import DataConfig, DataEntry, EvaluationSet, GymConfig
from megarl.config.schema.evaluation import EvaluationConfig
from megarl.config.schema.guard import GuardConfig
from megarl.config.schema.judge import JUDGE, JudgeConfig
from megarl.config.schema.log import LogConfig
from megarl.config.schema.model import ModelConfig
from megarl.config.schema.parallel import ParallelConfig
from megarl.config.schema.reward import OverlongConfig, RewardConfig, RewardTerm
from megarl.config.schema.rollout import DynamicSamplingConfig, RolloutConfig, TurnsConfig
from megarl.config.schema.schedule import ScheduleConfig
from megarl.config.schema.stages import EVALUATION, PRETRAINING, SUPERVISED, TRAIN
from megarl.config.schema.teacher import TeacherConfig
from megarl.config.schema.update import UpdateConfig
from megarl.config.schema.watchdog import WatchdogConfig
