"""Section `update`."""

from __future__ import annotations

from megarl.config.schema.section import Section, field


class UpdateConfig(Section):
    mini_batch: int = field(
        512, "responses per optimizer step", "responses", "DAPO section 4.1: 16 updates a rollout", ge=1
    )
    epochs: int = field(1, "actor passes over each rollout", "epochs", ge=1)
    tokens_per_micro_batch: int = field(
        32768,
        "packed tokens per micro-batch, divided over context-parallel ranks; "
        "a longer sample gets its own micro-batch",
        "tokens",
        ge=1,
    )
    share_prompts: bool = field(
        False,
        "compute a prompt once for those of its responses that are in one micro-batch; "
        "mini-batches are then made of whole groups; with portable layers, without context parallelism",
    )
    logprob_chunk: int = field(
        1024, "vocabulary entries whose logits exist at once", "entries of a shard", ge=1
    )
