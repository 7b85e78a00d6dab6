"""The regimes of the ablations' task family as tables that `megarl ablate`'s machinery runs: each row of the
papers' tables where its technique can show what it is for, with what it costs."""

from __future__ import annotations

import math
import random
import statistics
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import Field, ValidationError

from megarl.ablation.runs import AblationTable, load_table
from megarl.config import Config
from megarl.config.errors import ConfigError
from megarl.config.load import config_file, read_yaml
from megarl.config.schema import Section
from megarl.demo.arithmetic import EVAL_ROWS
from megarl.demo.family import (
    Knobs,
    Problem,
    draw_problem,
    longest_right,
    taught_problem,
    teach,
    text_tokens,
)

TASK = "megarl.demo.family:write_family"
# Seconds of a run on one core: what docs/ablations.md measured on the delayed task, 57 s a VAPO run (249,000
# tokens sampled, 333,000 evaluated, 666,000 trained in 120 updates) and 33 s a DAPO run, divided by hand.
START, SAMPLED, TRAINED, UPDATE = 8.0, 32e-6, 40e-6, 0.02
DRAWN = 500  # of the teacher's responses, for their mean length


class Compared(Section):
    """Two rows of a paper's table, in the regime that is to tell them apart."""

    row: str
    against: str
    expect: Literal["better", "worse"]  # what the paper says of `row`
    why: str  # this regime brings it out

    @property
    def names(self) -> tuple[str, str]:
        return self.against, self.row


class Part(Section):
    """The rows of one paper's table in a regime."""

    settings: tuple[str, ...] = ()
    compared: tuple[Compared, ...] = Field(min_length=1)


class Regime(Section):
    """Knobs of the task family, and what is compared with them."""

    what: str
    knobs: Knobs
    limit: float = Field(gt=0)  # rollout.max_response_tokens / the longest right response
    settings: tuple[str, ...] = ()
    vapo: Part | None = None
    dapo: Part | None = None

    @property
    def parts(self) -> dict[str, Part]:
        """Return paper -> its part, of those that there are."""
        return {name: part for name in ("vapo", "dapo") if (part := getattr(self, name))}

    @property
    def max_response_tokens(self) -> int:
        return math.ceil(self.limit * longest_right(self.knobs))

    def table(self, name: str, paper: str) -> AblationTable:
        """Return the rows that are compared as a table of their own; each is the paper's row over the same
        small base, with this regime's settings. Raises ConfigError for a row that the paper's table lacks."""
        part, whole = self.parts[paper], load_table(paper)
        named = [row for one in part.compared for row in one.names]
        if unknown := set(named) - {row.name for row in whole.rows}:
            raise ConfigError(f"regime {name}: {min(unknown)}: no such row in {paper}.table.yaml")
        common = (f"rollout.max_response_tokens={self.max_response_tokens}", *self.settings, *part.settings)
        rows = [
            row.model_copy(update={"overrides": (*common, *row.overrides)})
            for row in whole.rows
            if row.name in named
        ]
        update = {"title": f"{whole.title}, {name}", "name": paper, "task": TASK, "rows": tuple(rows)}
        knobs = self.knobs.model_dump(exclude_unset=True)
        return whole.model_copy(update={**update, "knobs": knobs, "full": named[0], "against": ("full",)})


def load_regimes(path: Path | None = None) -> dict[str, Regime]:
    """Read regimes.yaml. Raises ConfigError `file: key: what is wrong`."""
    path = path or config_file(Path("configs/ablations/regimes.yaml"))

    class Regimes(Section):
        regimes: dict[str, Regime] = Field(min_length=1)

    try:
        return Regimes.model_validate(read_yaml(path)).regimes
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{path}: {key}: {first['msg'].removeprefix('Value error, ')}") from None


class Cost(NamedTuple):
    """What one run takes, as the teacher's text has it: the policy's own length changes while it learns."""

    sampled: int  # tokens of rollouts
    evaluated: int  # tokens of evaluations
    trained: int  # tokens that actor and critic learn from
    updates: int  # of actor and critic
    seconds: float  # rough


def cost(config: Config, knobs: Knobs) -> Cost:
    """Estimate tokens, updates and seconds of a run, that of the warm start too.

    Dynamic sampling is taken to draw until the batch is full at the teacher's rate of success, at most
    max_batches times the batch."""
    rng = random.Random(0)
    if config.recipe == "sft":
        lengths = [text_tokens(teach(taught_problem(rng, knobs), rng, knobs)) for _ in range(DRAWN)]
        trained = config.steps * config.supervised.batch * statistics.fmean(lengths)
        return Cost(0, 0, int(trained), config.steps, START + TRAINED * trained + UPDATE * config.steps)

    def mean(problems: list[Problem]) -> tuple[float, float]:
        texts = [teach(problem, rng, knobs) for problem in problems]
        right = (t.endswith(f" {p.answer}") for t, p in zip(texts, problems, strict=True))
        limit = config.rollout.max_response_tokens
        return statistics.fmean(min(text_tokens(text), limit) for text in texts), statistics.fmean(right)

    length, _ = mean([draw_problem(rng, knobs) for _ in range(DRAWN)])
    held_out, success = mean([draw_problem(rng, knobs, (0.0, 0.0), knobs.eval_lines) for _ in range(DRAWN)])
    again, sampling, group = 1.0, config.rollout.dynamic_sampling, config.rollout.group_size
    if sampling.enabled:
        mixed = (1 - knobs.trivial - knobs.impossible) * (1 - success**group - (1 - success) ** group)
        again = min(sampling.max_batches, 1 / max(mixed, 1e-9))
    pretraining = config.value_pretraining.steps if config.has_critic else 0
    problems = min(config.evaluation.max_problems or EVAL_ROWS, EVAL_ROWS) * config.evaluation.samples
    evaluations = (config.steps // config.evaluation.every if config.evaluation.every else 1) + 1
    actor = config.steps * config.update.epochs
    critic = config.steps * config.critic.epochs + pretraining * config.value_pretraining.epochs
    critic *= config.has_critic
    critic_batch = config.critic.mini_batch or config.update.mini_batch
    updates = config.responses * (actor / config.update.mini_batch + critic / critic_batch)
    batch = config.responses * length
    sampled, evaluated = (config.steps * again + pretraining) * batch, evaluations * problems * held_out
    trained = (actor + critic) * batch
    seconds = START + SAMPLED * (sampled + evaluated) + TRAINED * trained + UPDATE * updates
    return Cost(int(sampled), int(evaluated), int(trained), int(updates), seconds)
