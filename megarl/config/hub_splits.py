"""Find the files of a split in a data set's repository, without the package `datasets`.

Its sets are parquet or jsonl files, or the hub has a parquet copy of them. The README's header, the folders
or the names say which files belong to a split."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

from megarl.config.errors import ConfigError

Splits = dict[tuple[str, str], tuple[str, ...]]  # (configuration, split) -> files

READABLE = (".parquet", ".jsonl")
DEFAULT, TRAIN, TEST = "default", "train", "test"
_SPLIT_WORDS = {
    **dict.fromkeys(("train", "training"), TRAIN),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), TEST),
}
# The layout of the hub's parquet copy. `partial-` is a copy of the first 5 GB.
_COPY = re.compile(r"([^/]+)/((?:partial-)?[^/]+)/\d{4}\.parquet")
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.")
_HEADER = re.compile(r"\A\ufeff?---\r?\n(.*?)\r?\n---", re.DOTALL)
_MAX_CARD = 4 << 20  # bytes
_SHOWN = 8  # splits in a message


def read_card(path: Path) -> Mapping[str, Any]:
    """Return the YAML header of a README, or {} if there is none that can be read."""
    from megarl.config.load import parse_yaml

    if path.stat().st_size > _MAX_CARD:
        return {}
    header = _HEADER.match(path.read_text(encoding="utf-8", errors="replace"))
    if header is None:
        return {}
    try:
        content = parse_yaml(header[1], str(path))
    except ConfigError:  # then the names of the files decide
        return {}
    return content if isinstance(content, dict) else {}


def find_splits(files: Sequence[str], card: Mapping[str, Any]) -> Splits:
    """Return the splits of a repository: those of its README, else by folders and names."""
    declared = _declared_splits(files, card)
    if declared:
        return declared
    readable = [file for file in files if file.endswith(READABLE)]
    copies = [_COPY.fullmatch(file) for file in readable]
    grouped: dict[tuple[str, str], list[str]] = {}
    for file, copy in zip(readable, copies, strict=True):
        place = (copy[1], copy[2]) if copy and all(copies) else _place(file)
        grouped.setdefault(place, []).append(file)
    return {place: tuple(sorted(group)) for place, group in grouped.items()}


def _declared_splits(files: Sequence[str], card: Mapping[str, Any]) -> Splits:
    splits: dict[tuple[str, str], list[str]] = {}
    configs = card.get("configs")
    for config in configs if isinstance(configs, list) else ():
        if not isinstance(config, dict) or "data_files" not in config:
            continue
        name, entries = str(config.get("config_name", DEFAULT)), config["data_files"]
        for entry in entries if isinstance(entries, list) else [entries]:
            split, patterns = TRAIN, entry
            if isinstance(entry, dict):
                split, patterns = str(entry.get("split", TRAIN)), entry.get("path", ())
            for pattern in patterns if isinstance(patterns, list) else [patterns]:
                glob = str(pattern).removeprefix("./").split("/")
                matches = [file for file in files if _matches(glob, file)]
                splits.setdefault((name, split), []).extend(sorted(matches))
    return {place: tuple(dict.fromkeys(group)) for place, group in splits.items() if group}


def _matches(glob: Sequence[str], file: str) -> bool:
    """Return whether the parts of a glob match, as `datasets` reads it: `**` for any folders.

    Many stars, which a README may have, do not make it slow."""
    reached = {0}  # counts of the glob's parts that match the folders so far
    for part in (*file.split("/"), None):
        for i, pattern in enumerate(glob):
            if pattern == "**" and i in reached:
                reached.add(i + 1)  # it matches no further folder
        if part is None:
            break
        reached = {
            i + (glob[i] != "**")
            for i in reached
            if i < len(glob) and (glob[i] == "**" or fnmatchcase(part, glob[i]))
        }
    return len(glob) in reached


def _place(file: str) -> tuple[str, str]:
    """Return (configuration, split) by the words of a file's name, else of its folders."""
    path = PurePosixPath(file)
    split = None
    for part in (path.stem, *reversed(path.parent.parts)):
        words = [word for word in re.split(r"[^a-z]+", part.lower()) if word in _SPLIT_WORDS]
        if words and split is None:
            split = _SPLIT_WORDS[words[0]]
    folders = [part for part in path.parent.parts if part != "data" and part.lower() not in _SPLIT_WORDS]
    return "/".join(folders) or DEFAULT, split or TRAIN


def choose_files(
    splits: Splits, files: Sequence[str], part: str, *, held_out: bool = False
) -> tuple[str, ...] | str:
    """Return the files of `part`, or a problem in words.

    part: `config/split`, `split`, `config`, or a file; "": the only configuration. Without a split it is
    train, of data.eval test, and no other: data.train and data.eval must not get the same files"""
    if part in files and part.endswith(READABLE):
        return (part,)
    named = {place: group for place, group in splits.items() if f"{place[0]}/{place[1]}" == part}
    named = named or {place: group for place, group in splits.items() if place[1] == part}
    found = named or {place: group for place, group in splits.items() if part in ("", place[0])}
    is_part = bool(found)
    if len(found) > 1 and any(config == DEFAULT for config, _ in found):
        found = {place: group for place, group in found.items() if place[0] == DEFAULT}
    wanted = TEST if held_out else TRAIN
    if not named and len({config for config, _ in found}) == 1:
        found = {
            place: group for place, group in found.items() if place[1].removeprefix("partial-") == wanted
        }
    if len(found) != 1:
        names = [f":{config}/{split}" for config, split in splits]
        listed = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
        if not splits:
            return f"has no {' or '.join(READABLE)} file (convert one, and give its path)"
        what = f"has no {'split ' + wanted if is_part else part}" if not found else "has several splits"
        return f"{what} (write one of {listed} after the name)"
    [(place, group)] = found.items()
    if unreadable := next((file for file in group if not file.endswith(READABLE)), None):
        return f"{unreadable} is neither {' nor '.join(READABLE)} (convert it, and give its path)"
    if place[1].startswith("partial-"):
        return f"the hub has converted only the first part of {place[1].removeprefix('partial-')}"
    return _check_shards(group)


def _check_shards(group: tuple[str, ...]) -> tuple[str, ...] | str:
    """Refuse a part of the files `NAME-00000-of-00005`, which an incomplete cache may have."""
    counts: dict[str, int] = {}
    for file in group:
        if shard := _SHARD.search(file):
            stem = f"{file[: shard.start()]}-of-{shard[2]}"
            counts[stem] = counts.get(stem, 0) + 1
    for stem, count in counts.items():
        if count != int(stem[-5:]):
            return f"{stem}: {count} of {int(stem[-5:])} files are there (download it again)"
    return group
