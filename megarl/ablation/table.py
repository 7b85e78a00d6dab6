"""An ablation table as data: its rows, each a run's configuration, and the small-scale base that they are put
over."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from megarl.config.errors import ConfigError
from megarl.config.load import PACKAGE, config_file, load_config, read_yaml
from megarl.config.schema import Config, Section

SUFFIX = ".table.yaml"


class AblationRow(Section):
    """One row.

    config     its file, based on the paper's 32B file
    paper      AIME 2024 avg@32 points in the paper
    overrides  settings at demo scale"""

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

    base, warm_start  configurations at demo scale
    task              `module:function` of (folder, seed): writes model/, sft.jsonl, train.jsonl, eval.jsonl
    full              the row of the whole system
    against           what each row is compared with: the full system, the row above, or both
    last              a run's score is the mean of its last so many evaluations"""

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
        """Return the row at demo scale: its files over `base` in place of the 32B file, then its overrides
        and these."""
        return load_config(
            self.folder / row.config, (*row.overrides, *overrides), base=self.folder / self.base
        )


def find_table(name: str) -> Path:
    """Return the file of a table given by its name or path. Raises ConfigError for an unknown name."""
    if name.endswith(".yaml"):
        return Path(name)
    folder = Path("configs/ablations")
    path = config_file(folder / f"{name}{SUFFIX}")
    if not path.is_file():
        files = [*(PACKAGE / folder).glob(f"*{SUFFIX}"), *folder.glob(f"*{SUFFIX}")]
        known = ", ".join(dict.fromkeys(sorted(file.name.removesuffix(SUFFIX) for file in files)))
        raise ConfigError(f"TABLE: {name}: no such table (one of {known}, or the path of a {SUFFIX} file)")
    return path


def load_table(path: Path, base: Path | None = None) -> AblationTable:
    """Read a table; `base` takes the place of its own. Raises ConfigError `file: key: what is wrong`."""
    content: dict[str, Any] = read_yaml(path) | {
        "name": path.name.removesuffix(SUFFIX),
        "folder": path.parent,
    }
    if base is not None:
        content["base"] = base.absolute()
    try:
        return AblationTable.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        problem = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{path}: {key + ': ' if key else ''}{problem}") from None
