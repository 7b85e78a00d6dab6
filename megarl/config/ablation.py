"""The table of an ablation as data: its rows, each a run's configuration, and the small-scale base that they are put over."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from megarl.config.errors import ConfigError
from megarl.config.load import load_config, read_yaml
from megarl.config.schema import Config, Section

SUFFIX = ".table.yaml"


class AblationRow(Section):
    """One row. config: its file, based on the paper's 32B file; paper: AIME 2024 avg@32 points there; overrides: at demo scale."""

    name: str = Field(min_length=1)
    config: Path
    paper: float | None = None
    overrides: tuple[str, ...] = ()

    @property
    def slug(self) -> str:
        """The row's name on the command line and in paths."""
        return re.sub(r"[^a-z0-9]+", "_", self.name.lower()).strip("_")


class AblationTable(Section):
    """A paper's table. Files are relative to the table's own.

    base, warm_start: configurations at demo scale.
    task: `module:function`, called with (folder, seed), writes model/, sft.jsonl, train.jsonl and eval.jsonl.
    full: the row of the whole system; against: what each row is compared with; last: a run's score is the mean of its last so many
    evaluations.
    """

    name: str
    folder: Path
    title: str
    base: Path
    warm_start: Path
    task: str = Field(pattern=r"^[\w.]+:\w+$")
    full: str
    against: tuple[Literal["full", "previous"], ...] = Field(("full",), min_length=1)
    last: int = Field(1, ge=1)
    rows: tuple[AblationRow, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _distinct(self) -> AblationTable:
        slugs = [row.slug for row in self.rows]
        if len(set(slugs)) < len(slugs):
            raise ValueError("rows: two rows have the same name")
        if self.full not in {row.name for row in self.rows}:
            raise ValueError(f"full: no row is named {self.full!r}")
        return self

    def config(self, row: AblationRow, overrides: tuple[str, ...]) -> Config:
        """The row at demo scale: what its files say, over `base` in place of the 32B file; then its overrides and these."""
        return load_config(self.folder / row.config, (*row.overrides, *overrides), base=self.folder / self.base)


def load_table(path: Path, base: Path | None = None) -> AblationTable:
    """Reads a table; `base` takes the place of its own. Raises ConfigError `file: key: what is wrong`."""
    content: dict[str, Any] = read_yaml(path)
    given = {"base": base.absolute()} if base is not None else {}
    try:
        return AblationTable.model_validate({**content, **given, "name": path.name.removesuffix(SUFFIX), "folder": path.parent})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{path}: {key + ': ' if key else ''}{first['msg'].removeprefix('Value error, ')}") from None
