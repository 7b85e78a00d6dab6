"""Replace names of the Hugging Face Hub in a configuration by local paths, before any rank starts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from megarl.config import Config, check_config
from megarl.config.errors import ConfigError
from megarl.config.schema import DataEntry
from megarl.config.schema.section import Section
from megarl.config.text import printable
from megarl.parallel import hub

MODEL = "model.path"
DATA = ("data.train", "data.eval")
SectionT = TypeVar("SectionT", bound=Section)


def local_config(
    config: Config,
    where: str,
    *,
    data: Sequence[str] = DATA,
    models: Sequence[str] | None = None,
    level: hub.Level = "weights",
    folder: Path | None = None,
    first: bool | None = None,
    cached: bool = False,
) -> Config:
    """Return the configuration with local paths only; nothing changes if it names nothing on the Hub.

    where: the configuration, which is checked before anything is downloaded
    data: lists of which the files are needed
    models: keys of models that are needed in full, up to `level`, the others' config.json only; None: all
    folder: keeps the commits in hub.json, which the other ranks and a later start use; None: written nowhere
    first: whether this process finds the commits; None: rank 0 does
    cached: without network and waits"""
    names = [name for key, path in _models(config).items() if (name := hub.parse_name(path, key, "model"))]
    sets = [name for key in data for name in _sets(config, key).values()]
    if not names and not sets:
        return config
    from megarl.parallel.runtime import launched_rank

    pins = hub.read_pins(config.run_dir) | (hub.read_pins(folder) if folder else {})
    first = launched_rank() == 0 if first is None else first
    if first:
        check_config(config, where)
    missing = [name for name in (*names, *sets) if name.pin not in pins]
    if folder is not None and missing and first:
        pins |= {name.pin: hub.find_commit(name) for name in missing}
        hub.write_pins(folder, pins)
    elif folder is not None and missing:
        pins |= hub.wait_for_pins(missing, folder)
    folders: dict[str, Path] = {}
    for name in names:
        depth: hub.Level = level if models is None or name.key in models else "config"
        folders[name.key] = hub.fetch_model(name, pins.get(name.pin), depth, cached=cached)
    files: dict[str, list[Path]] = {}
    for name in sets:
        files[name.text], _ = hub.fetch_split(name, pins.get(name.pin), cached=cached)
    return _replaced(config, folders, data, files)


def names_hub(config: Config) -> bool:
    """Return whether a model or a file of data is named on the Hub."""
    models = [hub.parse_name(path, key, "model") for key, path in _models(config).items()]
    return any(models) or any(_sets(config, key) for key in DATA)


def planned_config(config: Config, where: str, model: str | None = None) -> Config:
    """Return the configuration with the models' config.json, for a plan.

    model: the public model to plan instead of model.path. If the Hub cannot be read, known sizes count."""
    from megarl.weights.known_models import planning_config

    try:
        return local_config(config, where, data=(), level="config")
    except ConfigError as error:
        planning_config(config.model.path, model)  # raises if nothing is known of it
        print(f"megarl: {error}", file=sys.stderr, flush=True)
        return config


def local_model(path: Path, key: str, *, level: hub.Level = "weights") -> Path:
    """Return the local folder of a path or name on a command line.

    Of several processes none may be the first to look up a branch, so they need a commit."""
    from megarl.parallel.runtime import launched_world

    name = hub.parse_name(path, key, "model")
    if name is None:
        return path
    if launched_world() > 1 and not hub.COMMIT.fullmatch(name.revision or ""):
        raise name.error(f"several processes need the same one (give a commit: {name.repo}@<40 digits>)")
    folder = hub.fetch_model(name, None, level)
    print(printable(f"{key}: {name.repo}@{folder.name}"))
    return folder


def _models(config: Config) -> dict[str, Path | None]:
    """Return all models' paths by key."""
    by_source = {f"teacher.by_source.{source}": path for source, path in config.teacher.by_source.items()}
    return {
        MODEL: config.model.path,
        "critic.path": config.critic.path,
        "reward.model.path": config.reward.model.path,
        "teacher.path": config.teacher.path,
        **by_source,
    }


def _entries(config: Config, key: str) -> tuple[DataEntry, ...]:
    return config.data.train if key == DATA[0] else config.data.eval


def _sets(config: Config, key: str) -> dict[int, hub.HubName]:
    names = {
        i: hub.parse_name(entry.path, f"{key}[{i}]", "dataset")
        for i, entry in enumerate(_entries(config, key))
    }
    return {i: name for i, name in names.items() if name is not None}


def _replaced(
    config: Config, folders: dict[str, Path], data: Sequence[str], files: dict[str, list[Path]]
) -> Config:
    """Return the configuration with local paths: an entry of data becomes one for each file."""
    for key, path in folders.items():
        if key.startswith("teacher.by_source."):
            sources = config.teacher.by_source | {key.removeprefix("teacher.by_source."): path}
            config = _set(config, ("teacher", "by_source"), sources)
        else:
            config = _set(config, key.split("."), path)
    for key in data:
        names = _sets(config, key)
        entries = tuple(
            entry.model_copy(update={"path": path})
            for i, entry in enumerate(_entries(config, key))
            for path in (files[names[i].text] if i in names else [entry.path])
        )
        config = _set(config, key.split("."), entries)
    return config


def _set(section: SectionT, key: Sequence[str], value: object) -> SectionT:
    name, *rest = key
    return section.model_copy(update={name: _set(getattr(section, name), rest, value) if rest else value})
