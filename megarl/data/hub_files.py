"""Which files of a Hugging Face Hub repository are needed, from their names alone."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

Splits = dict[tuple[str, str], list[str]]  # (subset, split) -> files

DEFAULT, TRAIN = "default", "train"
PARTIAL = "partial-"  # of refs/convert/parquet: only the first gigabytes of a split
_KNOWN = ("train", "test", "validation", "valid", "val", "dev")
TOKENIZER = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json"),
)
DESCRIPTION = ("config.json",)
INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"^(.*)-(\d{5})-of-(\d{5})\.[^/]+$")
EXTRA = re.compile(r"additional_chat_templates/[^/]+\.jinja|generation_config\.json")


def tokenizer_files(names: Iterable[str]) -> list[str]:
    """Return a model's files without weights: configuration, tokenizer and templates."""
    return [name for name in names if name in (*DESCRIPTION, *TOKENIZER, INDEX) or EXTRA.fullmatch(name)]


def weight_files(names: Iterable[str], index: Mapping[str, Any] | None) -> list[str]:
    """Return the *.safetensors files that a model is read from.

    With an index these are the files in it. Else all at the top, but Mistral's second copy `consolidated`."""
    if index is not None:
        files = index.get("weight_map")
        return sorted(map(str, {*files.values()})) if isinstance(files, dict) else []
    return [name for name in names if re.fullmatch(r"(?!consolidated)[^/]+\.safetensors", name)]


def list_splits(names: Sequence[str], card: Mapping[str, Any], wanted: str | None) -> Splits:
    """Return the splits whose files can be read: those of the card's `configs`, else by folders and names.

    names: all files of the repository. card: YAML at the head of README.md. wanted: as in a name"""
    from megarl.data.readers import READERS  # and pyarrow

    readable = [name for name in names if PurePosixPath(name).suffix in READERS and PARTIAL not in name]
    entries = card.get("configs")
    if isinstance(entries, list) and (declared := _declared(names, entries)):
        return {key: files for key, files in declared.items() if set(files) <= set(readable)}
    splits: Splits = {}
    for name in readable:
        splits.setdefault(_place(name, wanted), []).append(name)
    # As `datasets` does: files that name no split are for training.
    unnamed = {subset: files for (subset, split), files in splits.items() if not split}
    for subset, files in unnamed.items():
        del splits[subset, ""]
        if not any(other == subset for other, _ in splits):
            splits[subset, TRAIN] = files
    return splits


def _declared(names: Sequence[str], entries: list[Any]) -> Splits:
    splits: Splits = {}
    for entry in entries:
        if not isinstance(entry, Mapping) or "data_files" not in entry:
            continue
        subset, given = str(entry.get("config_name", DEFAULT)), entry["data_files"]
        for part in given if isinstance(given, list) else [given]:
            split, globs = TRAIN, part
            if isinstance(part, Mapping):
                split, globs = str(part.get("split", TRAIN)), part.get("path", [])
            patterns = [_pattern(str(glob)) for glob in (globs if isinstance(globs, list) else [globs])]
            files = [name for name in names if any(pattern.fullmatch(name) for pattern in patterns)]
            if files:
                splits.setdefault((subset, split), []).extend(files)
    return splits


def _pattern(glob: str) -> re.Pattern[str]:
    """Return the pattern of a glob: `*` within a folder, `**` across folders."""
    pattern = ""
    for part in re.split(r"(\*\*/|\*\*|\*|\?|\[[^\]/]+\])", glob.removeprefix("./")):
        known = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}.get(part)
        is_set = part.startswith("[") and part.endswith("]")
        pattern += known or (part.replace("[!", "[^") if is_set else re.escape(part))
    return re.compile(pattern)


def _place(name: str, wanted: str | None) -> tuple[str, str]:
    """Return (subset, split) of a file by its folders and name; the split is "" if none is named."""
    asked = wanted.rpartition("/")[2] if wanted else ""
    parts = PurePosixPath(name).with_suffix("").parts
    words = [re.split(r"[._-]", part) for part in parts]
    # A name that is asked for may be a subset's: only a file of exactly this name comes before known splits.
    split, where = (asked, len(parts) - 1) if asked and parts[-1] == asked else ("", len(parts))
    for known in () if split else (_KNOWN, (asked,)):
        found = [(word, i) for i, part in enumerate(parts) for word in (*words[i], part) if word in known]
        if found and found[0][0]:
            split, where = found[0]
            break
    folders = [part for part in parts[: min(where, len(parts) - 1)] if part != "data"]
    return ("/".join(folders) or DEFAULT), split


def choose_split(splits: Splits, wanted: str | None, *, training: bool) -> tuple[list[str], str]:
    """Return (files, problem), one of them empty.

    wanted: `split`, `subset`, `subset/split` or None, for the only one; of several a training run takes
    `train`."""
    subsets = list(dict.fromkeys(subset for subset, _ in splits))
    there = ", ".join(f"{subset}/{split}" for subset, split in splits)
    only = DEFAULT if DEFAULT in subsets else subsets[0] if len(subsets) == 1 else None
    first, _, second = (wanted or "").partition("/")
    if second:
        subset, split = first, second
    elif first in subsets and (only is None or (only, first) not in splits):
        subset, split = first, ""
    elif only is None:
        return [], f"has several subsets (name one after a colon: {there})"
    else:
        subset, split = only, first
    if not split:
        own = [name for other, name in splits if other == subset]
        if len(own) > 1 and not (training and TRAIN in own):
            return [], f"has several splits (name one after a colon: {there})"
        split = TRAIN if TRAIN in own else own[0]
    if (subset, split) not in splits:
        return [], f"has no split {wanted!r} (it has {there})"
    files = sorted(splits[subset, split])
    shards = Counter((match[1], match[3]) for file in files if (match := _SHARD.match(file)))
    for (_, total), count in shards.items():
        if count != int(total):
            return [], f"has {count} of the {int(total)} files of {subset}/{split} (download all)"
    return files, ""
