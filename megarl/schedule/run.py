"""A run on one rank: the parts that the phases work with, and the step that they fill."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import AutoTokenizer

from megarl.config.errors import ConfigError
from megarl.config.schema import Config
from megarl.data.experience import Experience
from megarl.data.prompts import Prompt
from megarl.data.reader import ReadReport, read_pairs, read_prompts
from megarl.data.sampler import PromptSampler
from megarl.model.builder import DTYPES, build_actor, build_critic, read_hf_config
from megarl.observe.run_log import Sample
from megarl.parallel.comm import barrier, gather_objects
from megarl.parallel.offload import HostPool, empty_cache
from megarl.parallel.runtime import Runtime
from megarl.rewards.pool import VerifierPool
from megarl.rollout.batch import RolloutBatch
from megarl.rollout.delivery import Delivery, Failures
from megarl.rollout.engine import RolloutEngine
from megarl.rollout.sampler import RolloutSampler
from megarl.rollout.seeds import shuffle_seed
from megarl.rollout.sglang import Place, SGLangEngine
from megarl.rollout.transformers_engine import TransformersEngine
from megarl.rollout.wave import give_up
from megarl.schedule.kept_rollouts import KeptRollouts
from megarl.schedule.residency import EngineTenant, Residency, kept
from megarl.training.batches import LocalBatch
from megarl.training.learner import Frozen, Learner
from megarl.training.tenants import tenants_of
from megarl.weights.engine_plan import engine_plan
from megarl.weights.export import export_hf
from megarl.weights.families import table_names
from megarl.weights.hf_io import ModelFolder, load_into, read_config
from megarl.weights.layout import megatron_layout
from megarl.weights.megatron_folder import open_model
from megarl.weights.publish import Team
from megarl.weights.transfer import Staging, Transfer

Made = TypeVar("Made", bound=Frozen)


def load_tokenizer(folder: Path) -> Any:
    """The model's tokenizer; its end-of-sequence token ends responses."""
    return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def make_engine(config: Config, tokenizer: Any, runtime: Runtime) -> RolloutEngine:
    """The rollout engine that `rollout.engine` names, not started."""
    if config.rollout.engine == "sglang":
        place = Place(runtime.rank, config.rollout.engine_tp, runtime.device)
        return SGLangEngine(config, read_config(config.model.path), place, (tokenizer.eos_token_id,))
    return TransformersEngine(
        config.model.path,
        dtype=DTYPES[config.model.dtype],
        device=runtime.device,
        max_batch=config.rollout.max_batch,
        eos_ids=(tokenizer.eos_token_id,),
        tokenizer=tokenizer,
    )


def start_engine(engine: RolloutEngine, runtime: Runtime) -> None:
    """Begins its start once all ranks have given back what they do not use of the device: SGLang refuses GPUs of which unlike shares are
    free, and makes its KV cache as large as what is."""
    empty_cache(runtime.device)
    barrier(runtime)
    engine.start()


def load_weights(model: torch.nn.Module, folder: ModelFolder, runtime: Runtime, *, critic: bool = False) -> None:
    """This rank's slices of a model's folder into its part of the model. CheckpointError on every rank if one cannot use its slices."""
    shards = megatron_layout(folder.config, runtime.layout, critic=critic)[runtime.rank][1]
    Team(runtime.cpu_group).run(lambda: load_into(table_names(dict(model.named_parameters())), shards, folder))


def make_delivery(
    config: Config, runtime: Runtime, described: Mapping[str, Any], model: torch.nn.Module, engine: RolloutEngine
) -> Delivery:
    """The delivery of the actor `model` to the engine of every rank. `described`: the model's config.json."""
    plan = engine_plan(config, described, runtime.layout, cpu=runtime.device.type == "cpu")
    sources = table_names(dict(model.named_parameters()))
    dtype, size = DTYPES[config.model.dtype], config.rollout.transfer_bucket * 2**20
    staging, memory = Staging(runtime.device), Staging(runtime.device)
    transfers = [
        Transfer(part, runtime.rank, sources, targets, size, dtype=dtype, staging=staging) for part, targets in engine.buckets(plan, memory)
    ]
    failures, check = config.rollout.engine_failures, config.rollout.fingerprint
    made = Delivery(engine, transfers, lambda value: gather_objects(runtime, value), failures, check, (staging, memory))
    empty_cache(runtime.device)  # what the buckets were laid out in: the engine, which is starting, is to find it free
    return made


def make_sampler(
    config: Config,
    runtime: Runtime,
    engine: RolloutEngine,
    verifier: VerifierPool,
    tokenizer: Any,
    draw: Callable[[int], Sequence[Prompt]] = lambda n: [],
    recover: Callable[[Failures], None] = give_up,
) -> RolloutSampler:
    """A sampler whose work is shared by all ranks. `draw` and `recover`: see RolloutSampler; an evaluation needs none."""
    return RolloutSampler(
        config,
        engine,
        draw,
        verifier,
        tokenizer,
        rank=runtime.rank,
        world=runtime.world,
        gather=lambda value: gather_objects(runtime, value),
        oversample=config.rollout.dynamic_sampling.oversample,
        recover=recover,
    )


class Run:
    """Everything that lives for the whole run on one rank."""

    def __init__(self, config: Config, runtime: Runtime) -> None:
        self.config, self.runtime = config, runtime
        self.tokenizer = load_tokenizer(config.model.path)
        self.folder = open_model(config.model.path)
        self.hf = read_hf_config(config.model.path)
        self.residency = Residency(runtime.device, kept(config, runtime.device))
        self.host = HostPool(runtime.device)
        # One after the other, each off the device before the next is made.
        self.actor = self._settled(self._actor)
        self.critic = self._settled(self._critic) if config.has_critic else None
        self.reference = self._settled(self._reference) if config.algorithm.kl_weight else None
        if config.recipe == "sft":
            self._prepare_pairs()
        else:
            self._prepare_rollout()

    def _settled(self, make: Callable[[], Made]) -> Made:
        with self.residency.explained("start"):
            model = make()
        self.residency.add(tenants_of(model, self.host))
        self.residency.enter("start", ())
        return model

    def _actor(self) -> Learner:
        model = build_actor(self.config, self.hf, self.runtime)
        load_weights(model, self.folder, self.runtime)
        return Learner("actor", model, self.config.actor, self.config.steps, self.runtime, self.config.parallel)

    def _critic(self) -> Learner:
        folder = open_model(self.config.critic.path or self.config.model.path, critic=True)
        hf = read_hf_config(folder.path)
        if hf.vocab_size < len(self.tokenizer):
            raise ConfigError(
                f"critic.path: {folder.path}: its vocabulary of {hf.vocab_size} does not hold the {len(self.tokenizer)} tokens of the actor"
            )
        model = build_critic(self.config, hf, self.runtime)
        load_weights(model, folder, self.runtime, critic=True)
        return Learner("critic", model, self.config.critic, self.config.steps, self.runtime, self.config.parallel)

    def _reference(self) -> Frozen:
        model = build_actor(self.config, self.hf, self.runtime)
        load_weights(model, self.folder, self.runtime)
        return Frozen("reference", model.requires_grad_(False), self.runtime)

    def _prepare_pairs(self) -> None:
        config = self.config
        report = ReadReport()
        self.data_reports = {"train": report}
        self.pairs = read_pairs(config.data.train, config.data, config.supervised.response_key, self.tokenizer, report)
        self.pair_sampler = PromptSampler(len(self.pairs), config.seed, config.data.shuffle)

    def _prepare_rollout(self) -> None:
        config, runtime = self.config, self.runtime
        self.prompts, report = read_prompts(config.data.train, config.data, self.tokenizer)
        self.data_reports, self.problems = {"train": report}, []
        if config.data.eval:
            problems, self.data_reports["eval"] = read_prompts(config.data.eval, config.data, self.tokenizer)
            self.problems = problems[: config.evaluation.max_problems or None]
        self.prompt_sampler = PromptSampler(len(self.prompts), config.seed, config.data.shuffle)
        self.verifiers = VerifierPool(config.reward.verifier, config.reward.workers, config.reward.timeout, config.reward.memory)
        self.engine = make_engine(config, self.tokenizer, runtime)
        start_engine(self.engine, runtime)
        self.delivery = make_delivery(config, runtime, self.folder.config, self.actor.model, self.engine)
        sizes = {"weights": self.delivery.nbytes, "kv_cache": 0}
        self.residency.add({f"engine.{tag}": EngineTenant(self.delivery, tag, runtime.device, size) for tag, size in sizes.items()})
        self.sampler = make_sampler(
            config,
            runtime,
            self.engine,
            self.verifiers,
            self.tokenizer,
            draw=lambda n: [self.prompts[i] for i in self.prompt_sampler.take(n)],
            recover=self._recover,
        )

    def _recover(self, failures: Failures) -> None:
        with self.residency.also("rollout", {"actor.weights"}):
            self.delivery.recover(failures)

    def make_resident(self, phase: str, wanted: Collection[str]) -> None:
        """Moves tenants so that `wanted` are on the device. Engines whose weights left it get the actor's again, unless `wanted` says that
        the phase itself has them delivered."""
        needs_weights = "engine.weights" in wanted and "actor.weights" not in wanted
        if needs_weights and not self.delivery.delivered:
            self.residency.enter(phase, {"actor.weights", "engine.weights"})
            self.delivery.run(self.delivery.version)
        self.residency.enter(phase, wanted)
        if needs_weights and not self.delivery.delivered:  # an engine failed when it was to wake up
            with self.residency.also(phase, {"actor.weights"}):
                self.delivery.run(self.delivery.version)

    def transfer_weights(self, version: int) -> dict[str, float]:
        """The actor's present weights into the engine, which then carries `version`."""
        return self.delivery.run(version).metrics()

    def pairs_batch(self) -> Experience:
        """The next batch of supervised pairs, all counted as right."""
        chosen = [self.pairs[i] for i in self.pair_sampler.take(self.config.supervised.batch)]
        batch = Experience.build([prompt for prompt, _ in chosen], [response for _, response in chosen])
        batch["correct"] = torch.ones(len(chosen), dtype=torch.bool)
        batch["truncated"] = torch.zeros(len(chosen), dtype=torch.bool)
        return batch

    def megatron_seconds(self) -> float:
        """Time that this rank has spent in Megatron's forward and backward passes and optimizers."""
        return sum(model.megatron_seconds for model in (self.actor, self.critic, self.reference) if model is not None)

    def export(self, which: str, out: Path) -> None:
        """Writes `actor` or `critic` as a Hugging Face folder; every rank takes part."""
        learner = self.actor if which == "actor" else self.critic
        assert learner is not None
        source = self.config.model.path
        export_hf(
            out,
            source if which == "actor" else self.config.critic.path or source,
            self.runtime.layout,
            self.runtime.rank,
            table_names(dict(learner.model.named_parameters())),
            critic=which == "critic",
            dtype=DTYPES[self.config.model.dtype],
            control=self.runtime.cpu_group,
        )

    @property
    def learners(self) -> dict[str, Learner]:
        """What a checkpoint holds weights and optimizers of."""
        return {"actor": self.actor} if self.critic is None else {"actor": self.actor, "critic": self.critic}

    def state_dict(self) -> dict[str, Any]:
        """What the next step needs besides the learners: where the samplers stand. The same on every rank, as JSON holds it."""
        return self.snapshot()()

    def snapshot(self) -> Callable[[], dict[str, Any]]:
        """The present `state_dict`, put together when it is called, at any later time and in any thread."""
        if self.config.recipe == "sft":
            pairs = self.pair_sampler.state()
            return lambda: {"pairs": pairs}
        prompts, rollout = self.prompt_sampler.state(), self.sampler.snapshot()
        return lambda: {"prompts": prompts, "rollout": rollout()}

    def depths(self) -> dict[str, Callable[[], int]]:
        """What waits in this rank's queues, for the report of a hang."""
        if self.config.recipe == "sft":
            return {}
        return {"responses in the engine": lambda: self.engine.running, "answers at the verifiers": lambda: self.verifiers.waiting}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undoes `state_dict`. Raises CheckpointError where the data files have changed."""
        if self.config.recipe == "sft":
            self.pair_sampler.load_state(state["pairs"])
        else:
            self.prompt_sampler.load_state(state["prompts"])
            self.sampler.load_state_dict(state["rollout"])

    def close(self) -> None:
        """Ends the engine and the verifiers."""
        if self.config.recipe != "sft":
            self.engine.stop()
            self.verifiers.close()


@dataclass
class Step:
    """One rollout step: what the phases read and write.

    index   what seeds derive from: 1, 2, ... in the main stage, -1, -2, ... in value pretraining
    kept    value pretraining's rollouts on disk
    events  lines to be shown
    batch   the whole step's Experience, the same on every rank
    local   this replica's share of it
    samples        responses to be shown to people, by their row of the batch
    distributions  tables for distributions.jsonl
    """

    run: Run
    stage: str
    number: int
    index: int
    metrics: dict[str, float] = field(default_factory=dict)
    rollout: RolloutBatch | None = None
    kept: KeptRollouts | None = None
    events: list[str] = field(default_factory=list)
    samples: dict[int, Sample] = field(default_factory=dict)
    distributions: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    started: float = field(default_factory=time.perf_counter)
    _batch: Experience | None = None
    _local: LocalBatch | None = None

    @property
    def batch(self) -> Experience:
        assert self._batch is not None, "no phase has made the batch yet"
        return self._batch

    @batch.setter
    def batch(self, batch: Experience) -> None:
        self._batch = batch

    @property
    def local(self) -> LocalBatch:
        assert self._local is not None, "no phase has divided the batch yet"
        return self._local

    @local.setter
    def local(self, local: LocalBatch) -> None:
        self._local = local

    def count_tokens(self, passes: int) -> None:
        """Adds a phase's tokens to train/tokens: those of the batch as often as they go through a model."""
        self.metrics["train/tokens"] = self.metrics.get("train/tokens", 0.0) + passes * self.batch.num_tokens

    @property
    def seed(self) -> int:
        """Of everything random in this step outside sampling."""
        return shuffle_seed(self.run.config.seed, self.index)

    @property
    def mini_batch(self) -> int:
        """Sequences per optimizer step."""
        config = self.run.config
        return config.supervised.batch if self.stage == "sft" else config.update.mini_batch

    @property
    def critic_epochs(self) -> int:
        config = self.run.config
        return config.value_pretraining.epochs if self.stage == "value_pretraining" else config.critic.epochs
