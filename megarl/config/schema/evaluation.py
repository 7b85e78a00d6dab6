"""Section `evaluation`."""

from __future__ import annotations

from megarl.config.schema.section import Section, field


class EvaluationConfig(Section):
    """avg@k, pass@k and majority@k on `data.eval`."""

    every: int = field(0, "steps between evaluations; 0: at start and end only", "rollout steps", ge=0)
    samples: int = field(32, "k: responses per problem", "responses", "DAPO section 4.1: avg@32", ge=1)
    temperature: float = field(1.0, "sampling temperature; 0: greedy", source="DAPO section 4.1", ge=0)
    top_p: float = field(0.7, "nucleus", source="DAPO section 4.1", gt=0, le=1)
    max_problems: int = field(
        0,
        "first rows that are used, of each name in data.eval and of the entries without one; 0: all",
        "problems",
        ge=0,
    )
