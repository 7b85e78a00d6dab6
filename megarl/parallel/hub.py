"""Models and data sets of the Hugging Face Hub, by name, as local folders and files.

The first rank of all finds a name's commit. The first rank of each node downloads it into Hugging Face's
cache, and the others wait. Code from the Hub is neither downloaded nor run."""

from __future__ import annotations

import glob
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

from filelock import FileLock, Timeout

from megarl.config.errors import ConfigError, WaitTimeout, first_line
from megarl.config.files import mark_required, read_json, to_storage_error, write_atomic
from megarl.config.load import parse_yaml
from megarl.config.text import printable
from megarl.data.hub_files import (
    DESCRIPTION,
    INDEX,
    PARTIAL,
    choose_split,
    list_splits,
    tokenizer_files,
    weight_files,
)

Kind = Literal["model", "dataset"]
Level = Literal["config", "tokenizer", "weights"]  # how much of a model

PINS = "hub.json"  # of a run's folder: name -> commit
CONVERTED = "refs/convert/parquet"  # where the Hub keeps a data set that it has converted
COMMIT = re.compile(r"[0-9a-f]{40}")
_NAME = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[^:@]+))?"
    r"(:(?P<split>[\w.-]+(/[\w.-]+)?))?"
)
_NOT_OWNERS = ("models", "datasets", "spaces", "data", "runs")  # folders of our examples, pages of the Hub
_FILES = re.compile(r"\.(parquet|jsonl?|csv|txt|ya?ml|gz|zst|gguf|safetensors|bin|pt|py)$")
AGREED = 300.0  # seconds until the first rank has found all commits
DOWNLOADED = 6 * 3600.0  # seconds until another process has downloaded a repository
# Seconds between checks, until the first report, and between reports.
_POLL, _PATIENCE, _REPORT = 0.2, 2.0, 60.0


class HubName(NamedTuple):
    """key: of the configuration. text: as given. split: `split` or `subset/split` of a data set"""

    key: str
    text: str
    kind: Kind
    repo: str
    revision: str | None
    split: str | None

    @property
    def pin(self) -> str:
        """Return the name in hub.json, where a model and a data set may have the same one."""
        return f"datasets/{self.text}" if self.kind == "dataset" else self.text

    def error(self, what: str) -> ConfigError:
        return ConfigError(f"{self.key}: {self.text}: {what}")


def parse_name(path: Path | None, key: str, kind: Kind) -> HubName | None:
    """Return the Hub's name in `path`, or None. A path that exists always wins."""
    match = _NAME.fullmatch(str(path)) if path is not None else None
    if match is None or path is None or path.exists():
        return None
    repo, split = match["repo"], match["split"]
    owner, name = repo.split("/")
    if owner in _NOT_OWNERS or _FILES.search(name) or (split and kind == "model"):
        return None
    return HubName(key, str(path), kind, repo, match["revision"], split)


def is_first_of_node() -> bool:
    return int(os.environ.get("LOCAL_RANK", "0")) == 0


def read_pins(folder: Path) -> dict[str, str]:
    """Return a run's commits by name."""
    path = folder / PINS
    if not path.is_file():
        return {}
    pins = read_json(path)
    for text, commit in pins.items():
        if not isinstance(commit, str) or not COMMIT.fullmatch(commit):
            raise ConfigError(f"{path}: {text}: must be a commit of 40 hexadecimal digits (delete the file)")
    return pins


def write_pins(folder: Path, pins: Mapping[str, str]) -> None:
    with mark_required(folder / PINS):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomic(folder / PINS, json.dumps(dict(pins), indent=1) + "\n")


def wait_for_pins(names: list[HubName], folder: Path) -> dict[str, str]:
    """Wait until the first rank has written the commits of all names."""
    for _ in _waits(AGREED, f"{folder / PINS}: waiting for the first rank, which looks up names on the Hub"):
        pins = read_pins(folder)
        if all(name.pin in pins for name in names):
            return pins
    remedy = "all nodes must see run_dir, and the first rank says why it failed"
    raise WaitTimeout(f"{folder / PINS}: has not been written within {AGREED:g} s ({remedy})")


def find_commit(name: HubName) -> str:
    """Return the commit of a name, without its large files."""
    repository = Repository(name, None)
    with _one_process(name):
        if name.kind == "model":
            _list_model_files(repository, "tokenizer")
        else:
            _list_split_files(repository)
    return repository.revision


def fetch_model(name: HubName, commit: str | None, level: Level = "weights", *, cached: bool = False) -> Path:
    """Return the local folder with a model's files, downloaded if need be. cached: without network"""
    repository = Repository(name, commit, cached=cached)
    return repository.fetch(lambda: _list_model_files(repository, level))[0]


def fetch_split(name: HubName, commit: str | None, *, cached: bool = False) -> tuple[list[Path], str]:
    """Return (files, commit) of a data set's split, downloaded if need be. cached: without network"""
    repository = Repository(name, commit, cached=cached)
    folder, files = repository.fetch(lambda: _list_split_files(repository))
    return [folder / file for file in files], folder.name


def _list_model_files(repository: Repository, level: Level) -> list[str]:
    if level == "config":
        return list(DESCRIPTION)
    name, names = repository.name, repository.names()
    small = tokenizer_files(names)
    if DESCRIPTION[0] not in small:
        raise name.error("has no config.json (name a model in transformers' format)")
    if level == "tokenizer":
        return [file for file in small if file != INDEX]
    index = read_json(repository.snapshot(small) / INDEX) if INDEX in small else None
    weights = weight_files(names, index)
    if not weights or not set(weights) <= set(names):
        what = "has no *.safetensors" if not weights else f"lacks files of {INDEX}"
        remedy = "pickles are never read: name a repository, or a revision, that has them"
        raise name.error(f"{what} ({remedy})")
    return [*small, *weights]


def _list_split_files(repository: Repository) -> list[str]:
    """Return the files of the name's split. If its files are of other formats, go to the Hub's conversion."""
    name, is_open = repository.name, repository.revision == "main"
    names = repository.names()
    card = _card(repository.snapshot(["README.md"]), name) if "README.md" in names else {}
    splits = list_splits(names, card, name.split)
    if not splits and not is_open:
        remedy = f"leave the revision out, for the Hub's conversion, or give @{CONVERTED}"
        raise name.error(f"has no parquet or jsonl files there ({remedy})")
    if not splits:
        repository.move(CONVERTED)
        names = repository.names()
        splits = list_splits(names, {}, name.split)
    if not splits:
        partly = "only a part is converted" if any(PARTIAL in file for file in names) else "no file"
        remedy = "download and convert it, and name the files"
        raise name.error(f"has no parquet or jsonl files, and {partly} in {CONVERTED} ({remedy})")
    chosen, problem = choose_split(splits, name.split, training=name.key.startswith("data.train"))
    if problem:
        raise name.error(problem)
    return chosen


def _card(folder: Path, name: HubName) -> Mapping[str, Any]:
    """Return the YAML at the head of README.md."""
    text = (folder / "README.md").read_text(encoding="utf-8", errors="replace")
    match = re.match(r"---\s*\n(.*?)\n---\s*(\n|$)", text, re.DOTALL)
    card = parse_yaml(match[1], f"{name.key}: {name.text}: README.md") if match else None
    return card if isinstance(card, dict) else {}


class Repository:
    """A repository at one commit, in Hugging Face's cache.

    commit: as pinned; None: that of the name's revision. cached: neither download nor wait"""

    def __init__(self, name: HubName, commit: str | None, *, cached: bool = False) -> None:
        self.name, self.revision = name, commit or name.revision or "main"
        from huggingface_hub import constants

        # Another process of this node downloads.
        self.waits = not cached and not constants.HF_HUB_OFFLINE and not is_first_of_node()
        self.offline = cached or self.waits
        self._names: list[str] | None = None

    def fetch(self, list_files: Callable[[], list[str]]) -> tuple[Path, list[str]]:
        """Return the snapshot and its needed files, after one process has downloaded them."""
        if self.waits:
            return self._wait(list_files)
        if self.offline:
            files = list_files()
            return self.snapshot(files), files
        with _one_process(self.name):
            files = list_files()
            return self.snapshot(files), files

    def _wait(self, list_files: Callable[[], list[str]]) -> tuple[Path, list[str]]:
        revision = self.revision
        report = f"{self.name.key}: {self.name.text}: waiting for this node's first rank, which downloads it"
        problem: ConfigError | None = None
        for _ in _waits(DOWNLOADED, report):
            try:
                files = list_files()
                return self.snapshot(files), files
            except _Absent as error:
                problem = error
                self.move(revision)
        raise WaitTimeout(f"{problem} [waited {DOWNLOADED:g} s]")

    def move(self, revision: str) -> None:
        self.revision, self._names = revision, None

    def names(self) -> list[str]:
        """Return the names of all files, and settle the commit.

        They are kept beside the cache, so that a later start needs no network."""
        if self._names is None:
            from huggingface_hub import HfApi, constants

            if not (COMMIT.fullmatch(self.revision) and self._record.is_file()):
                heads = ["README.md", ".gitattributes"] if self.name.kind == "dataset" else [*DESCRIPTION]
                self.revision = self._download(heads).name
            if self._record.is_file():
                self._names = list(map(str, read_json(self._record).get("files", [])))
            elif self.waits:
                raise _Absent(f"{self.name.key}: {self.name.text}: its files are not known yet")
            elif self.offline or constants.HF_HUB_OFFLINE:
                folder = self._folder
                self._names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
            else:
                kind, revision = self.name.kind, self.revision
                with self._explained():
                    names = HfApi().list_repo_files(self.name.repo, repo_type=kind, revision=revision)
                self._names = names
                with mark_required(self._record):
                    self._record.parent.mkdir(parents=True, exist_ok=True)
                    write_atomic(self._record, json.dumps({"files": names}) + "\n")
            self._names.sort()
        return self._names

    @property
    def _folder(self) -> Path:
        """Return the snapshot of a commit, by the layout of Hugging Face's cache."""
        from huggingface_hub import constants

        repository = f"{self.name.kind}s--{self.name.repo.replace('/', '--')}"
        return Path(constants.HF_HUB_CACHE, repository, "snapshots", self.revision)

    @property
    def _record(self) -> Path:
        from huggingface_hub import constants

        folder = self._folder
        return Path(constants.HF_HOME, "megarl", folder.parents[1].name, f"{folder.name}.json")

    def snapshot(self, files: list[str]) -> Path:
        """Return the folder of the commit, with all `files` in it."""
        from huggingface_hub import constants

        if COMMIT.fullmatch(self.revision) and all((self._folder / file).is_file() for file in files):
            return self._folder
        folder = self._download(files)
        for file in files:
            if not (folder / file).is_file():
                if not self.offline and not constants.HF_HUB_OFFLINE:
                    raise self.name.error(f"has no file {file} (name another repository, or revision)")
                raise _explain(self.name, self.revision, FileNotFoundError(f"{file} is not there"))
        return folder

    def _download(self, files: list[str]) -> Path:
        """Let the client download those of `files` that exist."""
        from huggingface_hub import snapshot_download
        from huggingface_hub.utils import disable_progress_bars

        if not sys.stderr.isatty():
            disable_progress_bars()
        patterns = [glob.escape(file) for file in files]
        with self._explained():
            folder = snapshot_download(
                self.name.repo,
                repo_type=self.name.kind,
                revision=self.revision,
                allow_patterns=patterns,
                local_files_only=self.offline,
            )
        return Path(folder)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn the client's errors into one line."""
        from huggingface_hub import errors

        try:
            yield
        except (errors.HFValidationError, OSError, errors.HfHubHTTPError) as error:
            raise _explain(self.name, self.revision, error) from None
        except Exception as error:
            if not type(error).__module__.startswith(("httpx", "httpcore", "hf_xet")):
                raise
            raise _explain(self.name, self.revision, error) from None


class _Absent(ConfigError):
    """The cache lacks files, and the network was not asked."""


def _explain(name: HubName, revision: str, error: BaseException) -> ConfigError:
    """Return the line for an error of huggingface_hub, with what to do."""
    from huggingface_hub import constants, errors

    cache = f"the cache {constants.HF_HUB_CACHE}"
    page = f"{constants.ENDPOINT}/{'datasets/' if name.kind == 'dataset' else ''}{name.repo}"
    absent = "no such folder, and " if name.kind == "model" else "no such file, and "
    causes = [error, *(cause for cause in (error.__cause__, error.__context__) if cause is not None)]
    if any(isinstance(cause, errors.GatedRepoError) for cause in causes):
        remedy = f"accept its terms at {page}, and set HF_TOKEN or run `hf auth login`"
        return name.error(f"is gated, and this account may not read it ({remedy})")
    if any(isinstance(cause, errors.RevisionNotFoundError) for cause in causes):
        return name.error(f"has no revision {revision} (give a branch, a tag or a commit that {page} has)")
    if any(isinstance(cause, errors.RepositoryNotFoundError) for cause in causes):
        remedy = "correct the name; a private one needs HF_TOKEN or `hf auth login`"
        return name.error(f"{absent}no such {name.kind} at {constants.ENDPOINT} ({remedy})")
    if any(isinstance(cause, errors.RemoteEntryNotFoundError) for cause in causes):
        return name.error(f"a file of it is missing at {page} (name another revision)")
    if isinstance(error, errors.HFValidationError):
        return name.error(f"{absent}not a name of the Hub: {first_line(error)} (write owner/name)")
    if constants.HF_HUB_OFFLINE:
        remedy = "unset it, or fill the cache where there is a network and set HF_HOME"
        return _Absent(f"{name.key}: {name.text}: {absent}not in {cache}; HF_HUB_OFFLINE is set ({remedy})")
    if isinstance(error, FileNotFoundError) and error.__cause__ is None:
        return _Absent(f"{name.key}: {name.text}: {absent}not, or not all, in {cache}")
    if isinstance(error, OSError) and (storage := to_storage_error(error)) is not None:
        return name.error(str(storage))
    cause = error.__cause__ or error
    remedy = "check network and HF_ENDPOINT; without a network give a folder, or fill the cache elsewhere"
    return name.error(f"{absent}{constants.ENDPOINT} cannot be read: {first_line(cause)} ({remedy})")


@contextmanager
def _one_process(name: HubName) -> Iterator[None]:
    """Let one process of this cache download a repository; others wait."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:  # nothing is downloaded, and the cache may be read-only
        yield
        return
    path = Path(constants.HF_HUB_CACHE, ".locks", f"megarl-{name.kind}-{name.repo.replace('/', '--')}.lock")
    lock = FileLock(path, mode=0o664)
    with mark_required(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    for _ in _waits(DOWNLOADED, f"{name.key}: {name.text}: waiting for another process, which downloads it"):
        try:
            lock.acquire(timeout=0)
            break
        except Timeout:
            continue
    else:
        remedy = f"end it, if it hangs; it holds {path}"
        raise WaitTimeout(
            f"{name.key}: {name.text}: another process downloads it for {DOWNLOADED:g} s ({remedy})"
        )
    try:
        yield
    finally:
        lock.release()


def _waits(limit: float, what: str) -> Iterator[None]:
    """Yield between checks until the limit, and report a wait each minute."""
    start = time.monotonic()
    reported = start - _REPORT + _PATIENCE
    while True:
        yield
        now = time.monotonic()
        if now - start > limit:
            return
        if now - reported > _REPORT:
            reported = now
            print(printable(f"megarl: {what} (at most {limit:g} s)"), file=sys.stderr, flush=True)
        time.sleep(_POLL)
