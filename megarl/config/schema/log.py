"""Section `log`."""

from __future__ import annotations

from typing import Literal

from megarl.config.schema.section import Section, field


class LogConfig(Section):
    """metrics.jsonl is always written."""

    terminal: Literal["auto", "live", "plain", "quiet"] = field(
        "auto", "live view; auto: live on a terminal, else plain lines"
    )
    samples: int = field(4, "responses kept in samples.jsonl per step", "responses", ge=0)
    reflection_words: tuple[str, ...] = field(
        ("wait", "however", "rethink", "recheck", "double-check", "let me check", "on second thought"),
        "whole words or phrases, case-insensitive; responses with one count in reflection/*; []: none",
        source="DAPO section 4.4, table 2: `However, wait a moment, let's rethink`; the rest is our choice",
    )
    report: bool = field(True, "write report.html at the end")
    tensorboard: bool = field(False, "also write TensorBoard events (extra `track`)")
    wandb: bool = field(False, "also log to Weights & Biases (extra `track`)")
    profile: int = field(
        0,
        "steps that are traced on every rank into run_dir/profile, after the first of each start; "
        "`megarl train --profile N` sets it",
        "steps",
        ge=0,
    )
    prometheus: int = field(0, "port at which rank 0 serves the newest metrics; 0: none", ge=0, le=65535)
    prometheus_host: str = field("127.0.0.1", "address that it listens at, e.g. 0.0.0.0: every interface")
