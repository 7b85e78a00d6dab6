"""`megarl plan`: what a run needs and how long a step takes, from its configuration alone, on any machine."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from megarl.config import check_config, load_config
from megarl.plan.memory import plan_of
from megarl.plan.text import layouts, lines
from megarl.plan.times import Lengths, default_lengths, estimate, search
from megarl.weights.cost import planning_config


def plan(path: Path, overrides: Sequence[str], *, model: str | None, mean_length: float | None, everything: bool) -> int:
    """Prints the plan and the layouts; 2 where the configuration does not fit, with the words with which `megarl train` would stop."""
    config = load_config(path, overrides)
    check_config(config, str(path))
    where, described = planning_config(config.model.path, model)
    made = plan_of(config, described)
    lengths = default_lengths(made) if mean_length is None else Lengths(mean_length, config.rollout.max_response_tokens)
    print("\n".join(lines(made, where, lengths, estimate(made, lengths))))
    print()
    print("\n".join(layouts(search(made, lengths), made, everything=everything)))
    problem = made.problem()
    if problem:
        print(f"\nmegarl: {path}: {problem}", file=sys.stderr)
    return 2 if problem else 0
