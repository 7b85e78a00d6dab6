"""Section `supervised`."""

from __future__ import annotations

from megarl.config.schema.section import Section, field


class SupervisedConfig(Section):
    """Recipe `sft`: warm start on prompt/response pairs."""

    response_key: str = field(
        "response",
        "column of the response text, else `completion` or the last of `messages`; "
        "the end-of-sequence token is added",
    )
    batch: int = field(64, "pairs per optimizer step", "pairs", ge=1)
