"""Annotations of parameters that commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option
from typer.models import ArgumentInfo


def _complete_key(incomplete: str) -> list[str]:
    from megarl.config.schema import Config
    from megarl.config.schema.section import fields

    return [f"{key}=" for key, _ in fields(Config) if key.startswith(incomplete)]


def key_values(example: str) -> ArgumentInfo:
    return Argument(
        default_factory=list,
        show_default=False,
        metavar="key=value",
        help=f"values that replace the file's, e.g. {example}",
        autocompletion=_complete_key,
    )


ConfigFile = Annotated[Path, Argument(metavar="config", help="YAML file, e.g. configs/demos/vapo.yaml")]
Overrides = Annotated[list[str], key_values("actor.lr=2e-6 data.train=[a.jsonl,b.jsonl]")]
Wait = Annotated[
    float,
    Option(
        metavar="SECONDS",
        help="longest wait for another command that writes into the run's folder",
    ),
]
PublicModel = Annotated[
    str | None,
    Option(
        "--model", metavar="NAME", help="plan for this public model, e.g. Qwen2.5-7B; default: model.path"
    ),
]
