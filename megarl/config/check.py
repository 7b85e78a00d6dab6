"""Contradictions between keys, found before a process group or a GPU is taken. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config.errors import ConfigError
from megarl.config.schema import Config


def check_config(config: Config, where: str) -> None:
    """Raises ConfigError `where: key: what is wrong (what to do)` for the first contradiction."""
    for problem in _problems(config):
        raise ConfigError(f"{where}: {problem}")


def _problems(c: Config) -> Iterator[str]:
    a, r = c.algorithm, c.rollout
    if not c.data.train:
        yield "data.train: must name at least one file"
    for key, optimizer in (("actor", c.actor), ("critic", c.critic)):
        if not all(0 <= beta < 1 for beta in optimizer.betas):
            yield f"{key}.betas: both must be in [0, 1) (got {list(optimizer.betas)})"
    if c.recipe == "sft":
        if a.nll_weight <= 0:
            yield "algorithm.nll_weight: must be > 0 for recipe sft, which has no other loss"
        return
    if a.advantage == "group" and r.group_size < 2:
        yield f"rollout.group_size: must be >= 2 for group-normalised advantages (got {r.group_size}; or set algorithm.advantage=gae)"
    if r.dynamic_sampling.enabled and r.group_size < 2:
        yield f"rollout.dynamic_sampling.enabled: needs rollout.group_size >= 2 (got {r.group_size}): one response is never mixed"
    if a.lambda_policy == "length_adaptive" and a.advantage != "gae":
        yield "algorithm.lambda_policy: length_adaptive needs a critic (set algorithm.advantage=gae)"
    if c.value_pretraining.steps and a.advantage != "gae":
        yield "value_pretraining.steps: there is no critic to pretrain (set algorithm.advantage=gae, or steps to 0)"
    if isinstance(a.lambda_policy, float) and not 0 <= a.lambda_policy <= 1:
        yield f"algorithm.lambda_policy: must be in [0, 1] or length_adaptive (got {a.lambda_policy})"
    if c.responses % c.update.mini_batch:
        yield (
            f"update.mini_batch: must divide the {c.responses} responses of a step, "
            f"rollout.prompts * rollout.group_size (got {c.update.mini_batch})"
        )
    if "" in r.stop:
        yield "rollout.stop: must not hold an empty text, which would end every response at once"
    if c.reward.overlong.soft_punishment and c.reward.overlong.buffer > r.max_response_tokens:
        yield f"reward.overlong.buffer: must be <= rollout.max_response_tokens {r.max_response_tokens} (got {c.reward.overlong.buffer})"
    if c.reward.correct <= c.reward.incorrect:
        yield f"reward.correct: must be greater than reward.incorrect {c.reward.incorrect} (got {c.reward.correct})"
    if c.evaluation.every and not c.data.eval:
        yield "evaluation.every: needs data.eval files"
    positions = c.model.max_positions
    if positions and c.data.max_prompt_tokens + r.max_response_tokens > positions:
        yield (
            f"rollout.max_response_tokens: data.max_prompt_tokens {c.data.max_prompt_tokens} + {r.max_response_tokens} tokens exceed "
            f"the model's {positions} positions (lower one of them)"
        )
