"""`megarl eval`: evaluate a Hugging Face folder or a checkpoint."""

from __future__ import annotations

from pathlib import Path

from megarl.config.errors import CheckpointError
from megarl.config.schema import Config, JudgeConfig, OverlongConfig
from megarl.data.generated import list_entry_verifiers
from megarl.data.prompts import read_problem_sets
from megarl.model.builder import build_actor
from megarl.model.hf_config import read_hf_config
from megarl.parallel.comm import broadcast_from_rank_0
from megarl.parallel.runtime import Runtime
from megarl.rewards.pool import VerifierPool
from megarl.rollout.engines.base import load_engine_class
from megarl.rollout.episode import load_prompt_options
from megarl.rollout.rank import RolloutRank
from megarl.schedule.models import load_tokenizer, load_weights
from megarl.schedule.scores import EvaluationResult
from megarl.schedule.source import start_engine
from megarl.sync.weight_sync import make_weight_sync
from megarl.training.checkpoint import (
    FOLDER,
    MANIFEST,
    check_same_adapters,
    find_checkpoint,
    hash_file,
    open_checkpoint,
)
from megarl.training.sharded import load_model
from megarl.weights.families import read_config
from megarl.weights.megatron import open_model


def find_policy(config: Config, path: Path | None) -> tuple[Config, Path | None]:
    """Resolve `--checkpoint`: a Hugging Face folder, a checkpoint, or a run (its newest checkpoint).

    Returns the config with its `model.path`, and the checkpoint's actor folder, or None if `model.path` has
    the weights. Raises CheckpointError."""
    if path is None:
        return config, None
    if not path.is_dir():
        raise CheckpointError(f"--checkpoint: {path}: {'not a' if path.exists() else 'no such'} folder")
    if (path / "config.json").is_file():
        return config.model_copy(update={"model": config.model.model_copy(update={"path": path})}), None
    if (path / FOLDER).is_dir():
        checkpoint, skipped = find_checkpoint(path)
        if checkpoint is None:
            hint = f" (its exported model is in {path / 'hf'})" if (path / "hf").is_dir() else ""
            problem = f"--checkpoint: {path}: the run has no complete checkpoint{hint}"
            raise CheckpointError("; ".join([problem, *skipped]))
    elif (path / MANIFEST).exists() or path.name.startswith("."):
        checkpoint = open_checkpoint(path)
    else:
        raise CheckpointError(
            f"--checkpoint: {path}: neither a Hugging Face folder (config.json) nor a checkpoint "
            "(manifest.json) nor a run (checkpoints/)"
        )
    description = config.model.path / "config.json"
    if not description.is_file():
        raise CheckpointError(
            f"model.path: {description}: no such file "
            f"(it describes the model whose weights are in {checkpoint.path})"
        )
    recorded_hash = checkpoint.settings.get("model.path/config.json")
    if recorded_hash is not None and recorded_hash != hash_file(description):
        raise CheckpointError(
            f"--checkpoint: {checkpoint.path}: was written with another model than model.path describes, "
            f"{description} (use the run's configuration)"
        )
    if not checkpoint.pretraining:
        check_same_adapters(config, checkpoint)
    return config, None if checkpoint.pretraining else checkpoint.path / "actor"


class Evaluation:
    def __init__(self, config: Config, weights: Path | None, runtime: Runtime) -> None:
        config = config.model_copy(
            update={"reward": config.reward.model_copy(update={"overlong": OverlongConfig(), "terms": {}})}
        )
        self.config, self.runtime = config, runtime
        # A run may be writing there: use rank 0's choice.
        self.weights = broadcast_from_rank_0(runtime, weights, Path | None)
        self.tokenizer = load_tokenizer(config.model.path)
        options = load_prompt_options(config, self.tokenizer)
        self.sets, self.reports = read_problem_sets(config.data, config.evaluation, self.tokenizer, **options)
        self.engine = load_engine_class(config).build(config, self.tokenizer, runtime)
        path, lora = config.model.path, config.actor.lora.rank is not None
        if self.weights is None:
            config = config.without_adapters()
        model = build_actor(config, read_hf_config(path), runtime).requires_grad_(False)
        if self.weights is None or lora:
            load_weights(model, open_model(path), runtime)
        if self.weights is not None:
            load_model(model, self.weights)
        start_engine(self.engine, runtime)  # the actor keeps its memory for the sync
        make_weight_sync(config, runtime, read_config(path), model, self.engine).sync(version=0)

    @property
    def policy(self) -> Path:
        return self.weights or self.config.model.path

    def answer(self) -> EvaluationResult:
        reward, eval_data = self.config.reward, self.config.data.model_copy(update={"train": ()})
        entry_verifiers = list_entry_verifiers(eval_data)
        limits = reward.workers, reward.timeout, reward.memory
        config = self.config
        if reward.judge_is_term:  # an evaluation asks no judge, so it needs no key
            config = config.model_copy(update={"reward": reward.model_copy(update={"judge": JudgeConfig()})})
        with VerifierPool(
            reward.verifier, *limits, entry_verifiers=entry_verifiers, sandbox=reward.sandbox
        ) as verifiers:
            rollout_rank = RolloutRank(config, self.runtime, self.engine, verifiers, self.tokenizer)
            try:
                return EvaluationResult(rollout_rank.evaluate(self.sets))
            finally:
                rollout_rank.close()

    def close(self) -> None:
        self.engine.stop()
