"""Replace names of the Hugging Face hub, such as `openai/gsm8k:main/train`, by local paths.

`local_inputs` downloads the files before ranks start, and replaces each name by its path in the hub's cache.
Nothing else knows of the hub. Its files are read as data: code from the hub never runs."""

from __future__ import annotations

import glob
import json
import os
import re
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from megarl.config.errors import CheckpointError, ConfigError, MegarlError, WaitTimeout, first_line
from megarl.config.files import describe_error, mark_required, read_json, write_atomic
from megarl.config.hub_splits import READABLE, choose_files, find_splits, read_card
from megarl.config.schema import Config
from megarl.config.schema.section import Section

Kind = Literal["model", "dataset"]
Answer = TypeVar("Answer")
ACTOR = "model.path"
RECORD = "hub.json"  # of a run: the revisions and files of its names
NAME = re.compile(
    r"(?P<repository>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>[\w./-]+))?(?::(?P<part>.+))?", re.ASCII
)
COMMIT = re.compile(r"[0-9a-f]{40}")
CACHED = re.compile(r"(model|dataset)s--([^/]+)--([^/]+)/snapshots/([0-9a-f]{40})(?:/(.+))?")
# First parts of paths in megarl's own configurations. A missing file there is no name of the hub.
LOCAL_FOLDERS = ("configs", "data", "models", "runs")
FILE_SUFFIXES = (
    *(".parquet", ".jsonl", ".json", ".csv", ".txt", ".yaml", ".yml", ".gz", ".zip", ".zst", ".arrow"),
    *(".gguf", ".safetensors", ".bin", ".pt", ".py", ".distcp"),
)
CONVERTED = "refs/convert/parquet"  # the hub's parquet copy of a data set, also of one that has a script
DESCRIPTION, CARD, INDEX, SINGLE = (
    "config.json",
    "README.md",
    "model.safetensors.index.json",
    "model.safetensors",
)
# No file that Python could import or unpickle.
MODEL_FILES = re.compile(
    r"(config|generation_config|special_tokens_map|added_tokens|chat_template)\.json|chat_template\.jinja"
    r"|additional_chat_templates/[^/]+\.jinja|(tokenizer|vocab|merges)[^/]*\.(json|txt|model)"
    r"|[^/]+\.(model|tiktoken)|model\.safetensors\.index\.json"
)
DOWNLOAD_LIMIT, REPORT_EVERY = 6 * 3600.0, 30.0  # seconds that a process waits for another's download
RECORD_LIMIT = 600.0  # seconds that a rank waits for the revisions that rank 0 finds
ANSWER_LIMIT = 30.0  # seconds for an answer of the hub


@dataclass(frozen=True)
class HubName:
    """`owner/name`, with a revision and, of a data set, a split or a file."""

    kind: Kind
    repository: str
    revision: str = "main"
    part: str = ""
    key: str = ""  # of the configuration
    held_out: bool = False  # of data.eval, whose default split is `test`
    cached_only: bool = False

    @property
    def text(self) -> str:
        revision = "" if self.revision == "main" else f"@{self.revision}"
        return f"{self.repository}{revision}{self.part and f':{self.part}'}"

    @property
    def id(self) -> str:
        return f"{self.kind}{' (held out)' if self.held_out else ''} {self.text}"

    @property
    def cache(self) -> Path:
        """Return the repository's folder in the hub's cache."""
        from huggingface_hub import constants

        folder = f"{self.kind}s--{self.repository.replace('/', '--')}"
        return Path(constants.HF_HUB_CACHE).expanduser() / folder

    @property
    def is_offline(self) -> bool:
        from huggingface_hub import constants

        return self.cached_only or constants.HF_HUB_OFFLINE

    def problem(self, what: str) -> ConfigError:
        return ConfigError(f"{self.key}: {self.text}: {what}")


class Selection(NamedTuple):
    """The files of a name at a commit."""

    commit: str
    files: tuple[str, ...]

    def folder(self, name: HubName) -> Path:
        return name.cache / "snapshots" / self.commit

    def missing(self, name: HubName) -> list[str]:
        return [file for file in self.files if not (self.folder(name) / file).is_file()]


def parse_name(path: Path, kind: Kind, key: str, *, held_out: bool = False) -> HubName | None:
    """Return the name that a path spells, or None for a path. What exists is a path."""
    match = NAME.fullmatch(str(path))
    if match is None or os.path.lexists(path) or ".." in str(path):
        return None
    is_explicit = match["revision"] or match["part"]
    if not is_explicit and (path.suffix in FILE_SUFFIXES or path.parts[0] in LOCAL_FOLDERS):
        return None
    name = HubName(kind, match["repository"], match["revision"] or "main", match["part"] or "", key, held_out)
    if kind == "model" and name.part:
        raise name.problem("a model has no part after a colon (write owner/name or owner/name@revision)")
    return name


def pinned(path: Path) -> Path:
    """Return `owner/name@commit` of a path in a hub's cache, `owner/name@commit:file` of a data file."""
    parts = path.parts
    start = len(parts) - 2 - parts[::-1].index("snapshots") if "snapshots" in parts[1:] else 0
    match = CACHED.fullmatch("/".join(parts[start:]))
    if match is None:
        return path
    _, owner, name, commit, file = match.groups()
    return Path(f"{owner}/{name}@{commit}{f':{file}' if file else ''}")


def local_inputs(
    config: Config,
    record: Path | None = None,
    *known: Path,
    first: bool = True,
    tokenizer_only: bool = False,
    cached_only: bool = False,
    only: tuple[str, ...] = (),
) -> Config:
    """Download what the names of a configuration need, and return it with local paths.

    Args:
        record: the run's hub.json. Names in it keep their commits and files
        known: other records, which are only read. Their commits win over those of `record`
        first: this process adds names to `record`; others wait until it has done so
        tokenizer_only: of models only the actor's tokenizer and config.json
        cached_only: as with HF_HUB_OFFLINE
        only: prefixes of keys whose names are replaced; (): all
    Raises ConfigError, and WaitTimeout after a limit."""
    names = find_names(config)
    if only:
        names = {place: name for place, name in names.items() if name.key.startswith(only)}
    if tokenizer_only:
        names = {place: name for place, name in names.items() if name.kind == "dataset" or name.key == ACTOR}
    if not names:
        return config
    if cached_only:
        names = {place: replace(name, cached_only=True) for place, name in names.items()}
    chosen = _select_all(names.values(), record, known, first=first, tokenizer_only=tokenizer_only)
    for name in names.values():
        selection = chosen[name.id]
        if tokenizer_only:
            files = (file for file in selection.files if not file.endswith(".safetensors"))
            selection = selection._replace(files=tuple(files))
        _download(name, selection)
    return _with_paths(config, {place: _paths(name, chosen[name.id]) for place, name in names.items()})


def describe_models(config: Config) -> Config:
    """Download the config.json of each model, for a plan. A model that is not found keeps its name."""
    paths: dict[tuple[str, Path], list[Path]] = {}
    recorded: dict[str, Selection] = {}
    for place, name in find_names(config).items():
        if name.kind != "model":
            continue
        recorded = recorded or _read_record(config.run_dir / RECORD)
        try:
            known_selection = recorded.get(name.id)
            commit = known_selection.commit if known_selection else _list_files(name).commit
            _download(name, selection := Selection(commit, (DESCRIPTION,)), quiet=True)
            paths[place] = _paths(name, selection)
        except ConfigError as problem:  # its sizes may be known
            print(f"megarl: {problem}", file=sys.stderr, flush=True)
    return _with_paths(config, paths)


def local_folder(path: Path, key: str, record: Path | None = None, *known: Path, first: bool = True) -> Path:
    """Return a model's folder, downloaded if `path` is a name of the hub.

    record, known, first: as of local_inputs, so that all ranks use one commit"""
    name = parse_name(path, "model", key)
    if name is None:
        return path
    selection = _select_all([name], record, known, first=first)[name.id]
    _download(name, selection)
    return selection.folder(name)


def pin_names(config: Config) -> Config:
    """Return a configuration with names at their commits in place of paths in this process's cache."""
    if "huggingface_hub" not in sys.modules:  # no name was downloaded
        return config
    from huggingface_hub import constants

    def pin(path: Path, key: str, kind: Kind, held_out: bool) -> list[Path]:
        is_cached = path.is_relative_to(Path(constants.HF_HUB_CACHE).expanduser())
        return [pinned(path) if is_cached else path]

    return _map_paths(config, pin)


def find_names(config: Config) -> dict[tuple[str, Path], HubName]:
    """Return the names of a configuration by key and path."""
    names: dict[tuple[str, Path], HubName] = {}

    def collect(path: Path, key: str, kind: Kind, held_out: bool) -> list[Path]:
        if name := parse_name(path, kind, key, held_out=held_out):
            names[key, path] = name
        return [path]

    _map_paths(config, collect)
    return names


def _with_paths(config: Config, paths: Mapping[tuple[str, Path], list[Path]]) -> Config:
    return _map_paths(config, lambda path, key, kind, held_out: paths.get((key, path), [path]))


def _map_paths(config: Config, change: Callable[[Path, str, Kind, bool], list[Path]]) -> Config:
    """Replace the paths of models and data. A data entry may become several."""

    def model(section: Section, field: str, key: str) -> Section:
        path: Path | None = getattr(section, field)
        if path is None:
            return section
        [changed] = change(path, f"{key}.{field}", "model", False)
        return section if changed == path else section.model_copy(update={field: changed})

    teacher = model(config.teacher, "path", "teacher")
    by_source = {
        source: change(path, f"teacher.by_source.{source}", "model", False)[0]
        for source, path in config.teacher.by_source.items()
    }
    data = {}
    for field in ("train", "eval"):
        entries: list[Any] = []
        for i, entry in enumerate(getattr(config.data, field)):
            key = f"data.{field}[{i}]"
            paths = [None] if entry.path is None else change(entry.path, key, "dataset", field == "eval")
            entries += [entry.model_copy(update={"path": path}) for path in paths]
        data[field] = tuple(entries)
    return config.model_copy(
        update={
            "model": model(config.model, "path", "model"),
            "critic": model(config.critic, "path", "critic"),
            "reward": config.reward.model_copy(
                update={"model": model(config.reward.model, "path", "reward.model")}
            ),
            "teacher": teacher.model_copy(update={"by_source": by_source}),
            "data": config.data.model_copy(update=data),
        }
    )


def _paths(name: HubName, selection: Selection) -> list[Path]:
    folder = selection.folder(name)
    return [folder] if name.kind == "model" else [folder / file for file in selection.files]


# The record of a run.


def _select_all(
    names: Collection[HubName],
    record: Path | None,
    known: Collection[Path],
    *,
    first: bool,
    tokenizer_only: bool = False,
) -> dict[str, Selection]:
    """Return the selection of each name by id: that of `known`, else of `record`, else the hub's newest."""
    selections: dict[str, Selection] = {}
    for file in known:
        selections |= _read_record(file)
    if not first and record is not None:
        ids = {name.id for name in names}
        chosen = {id: selections[id] for id in ids & selections.keys()}
        return chosen | _wait_for_record(record, ids - chosen.keys())
    if record is not None:
        selections = _read_record(record) | selections
    chosen = {
        name.id: selections.get(name.id) or _select(name, tokenizer_only=tokenizer_only) for name in names
    }
    if record is not None:
        _write_record(record, chosen)
    return chosen


def _read_record(path: Path) -> dict[str, Selection]:
    if not path.is_file():
        return {}
    selections = {}
    for id, entry in read_json(path).items():
        commit, files = (entry.get("commit"), entry.get("files")) if isinstance(entry, dict) else (None, None)
        is_valid = isinstance(commit, str) and COMMIT.fullmatch(commit) and isinstance(files, list)
        if not is_valid or not all(isinstance(file, str) and _is_inside(file) for file in files or []):
            what = f"{id}: is no commit with its files (remove the file: names are then looked up again)"
            raise CheckpointError(f"{path}: {what}")
        selections[id] = Selection(str(commit), tuple(files or []))
    return selections


def _is_inside(file: str) -> bool:
    return not Path(file).is_absolute() and ".." not in Path(file).parts and "\0" not in file


def _write_record(path: Path, selections: Mapping[str, Selection]) -> None:
    recorded = _read_record(path)
    if selections.items() <= recorded.items():
        return
    entries = {id: selection._asdict() for id, selection in (recorded | dict(selections)).items()}
    with mark_required(path):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomic(path, json.dumps(entries, indent=1) + "\n")


def _wait_for_record(path: Path, needed: set[str]) -> dict[str, Selection]:
    deadline = time.monotonic() + RECORD_LIMIT
    while not needed <= (recorded := _read_record(path)).keys():
        if time.monotonic() > deadline:
            what = f"rank 0 has not written it within {RECORD_LIMIT:g} s (all nodes must see this file)"
            raise WaitTimeout(f"{path}: {what}")
        time.sleep(0.2)
    return {id: recorded[id] for id in needed}


# The hub and its cache.


class Listing(NamedTuple):
    """The files of a commit. failure: why they are only those in the cache, which may lack some"""

    commit: str
    files: tuple[str, ...]
    failure: ConfigError | None


def _select(name: HubName, *, tokenizer_only: bool = False) -> Selection:
    """Find the commit of a name and the files that it needs."""
    if COMMIT.fullmatch(name.revision) and name.part.endswith(READABLE):
        return Selection(name.revision, (name.part,))
    commit, files, failure = listing = _list_files(name)
    if name.kind == "model":
        return Selection(commit, _model_files(name, listing, tokenizer_only=tokenizer_only))
    card: Mapping[str, Any] = {}
    if CARD in files:
        _download(name, Selection(commit, (CARD,)), quiet=True)
        card = read_card(Selection(commit, ()).folder(name) / CARD)
    chosen = choose_files(find_splits(files, card), files, name.part, held_out=name.held_out)
    if isinstance(chosen, str) and name.revision == "main":
        try:
            commit, files, failure = _list_files(replace(name, revision=CONVERTED))
        except ConfigError:
            raise failure or name.problem(chosen) from None  # no copy: report the files that there are
        chosen = choose_files(find_splits(files, {}), files, name.part, held_out=name.held_out)
    if isinstance(chosen, str):
        raise failure or name.problem(chosen)
    if failure and chosen != (name.part,):
        what = f"{len(chosen)} files of it are in the cache, which has no list of all (connect once to check)"
        print(f"megarl: {name.problem(what)}", file=sys.stderr, flush=True)
    return Selection(commit, chosen)


def _model_files(name: HubName, listing: Listing, *, tokenizer_only: bool) -> tuple[str, ...]:
    commit, files, failure = listing
    if DESCRIPTION not in files:
        raise name.problem(f"has no {DESCRIPTION} (choose a model in the format of transformers)")
    chosen = [file for file in files if MODEL_FILES.fullmatch(file)]
    if tokenizer_only:
        return tuple(chosen)
    if INDEX not in files:
        if SINGLE not in files:
            what = f"has neither {SINGLE} nor {INDEX} (choose a revision or a copy with safetensors)"
            raise failure or name.problem(what)
        return (*chosen, SINGLE)
    index = Selection(commit, (INDEX,))
    _download(name, index, quiet=True)
    weight_map = read_json(index.folder(name) / INDEX).get("weight_map")
    weights = sorted(set(map(str, weight_map.values()))) if isinstance(weight_map, dict) else []
    if not weights or not all(_is_inside(file) and file.endswith(".safetensors") for file in weights):
        raise name.problem(f"{INDEX}: weight_map does not name *.safetensors files")
    return (*chosen, *weights)


def _list_files(name: HubName) -> Listing:
    """Return the commit of a revision and its files: the hub's, else those in the cache."""
    from huggingface_hub import HfApi

    failure = name.problem(_offline_problem(name))
    if not name.is_offline:
        api = HfApi(library_name="megarl")
        get_info = api.model_info if name.kind == "model" else api.dataset_info
        found = _ask_hub(
            name, lambda: get_info(name.repository, revision=name.revision, timeout=ANSWER_LIMIT)
        )
        if isinstance(found, ConfigError):
            failure = found
        elif COMMIT.fullmatch(commit := str(found.sha)):
            names = (file.rfilename for file in found.siblings or ())
            files = tuple(file for file in names if _is_inside(file))
            _cache_listing(name, Selection(commit, files))
            return Listing(commit, files, None)
        else:
            failure = name.problem("the hub answers with no commit (try again later)")
    ref = name.cache / "refs" / name.revision
    commit = name.revision if COMMIT.fullmatch(name.revision) else ref.read_text() if ref.is_file() else ""
    folder = name.cache / "snapshots" / commit
    if not COMMIT.fullmatch(commit) or not folder.is_dir():
        raise failure
    if not name.is_offline:
        print(f"megarl: {failure}; its files in the cache are used", file=sys.stderr, flush=True)
    if listing := _read_record(_listing_file(name, commit)).get(name.repository):
        return Listing(commit, listing.files, None)
    files = tuple(sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()))
    return Listing(commit, files, failure)


def _listing_file(name: HubName, commit: str) -> Path:
    return name.cache / ".megarl" / f"{commit}.json"  # huggingface_hub has .no_exist there


def _cache_listing(name: HubName, listing: Selection) -> None:
    """Note a commit's files and a branch's commit in the cache, to know offline which files are missing.

    huggingface_hub notes the commit in the same file. A cache that cannot be written stays as it is."""
    entries = {_listing_file(name, listing.commit): json.dumps({name.repository: listing._asdict()}) + "\n"}
    if name.revision != listing.commit:
        entries[name.cache / "refs" / name.revision] = listing.commit
    try:
        if all(file.is_file() and file.read_text() == text for file, text in entries.items()):
            return
        with _lock(name):  # two processes would use the same partial file
            for file, text in entries.items():
                file.parent.mkdir(parents=True, exist_ok=True)
                write_atomic(file, text)
    except OSError as error:
        what = f"{error.filename or name.cache}: {describe_error(error)}"
        print(
            f"megarl: {name.key}: the cache does not note the newest commit: {what}",
            file=sys.stderr,
            flush=True,
        )


def _download(name: HubName, selection: Selection, *, quiet: bool = False) -> None:
    """Download the files that the cache lacks. One process of a machine does it, others wait."""
    if not selection.missing(name):
        return
    from huggingface_hub import snapshot_download

    if name.is_offline:
        raise name.problem(_offline_problem(name, selection.missing(name)))

    def fetch() -> None:
        with _lock(name):
            missing = selection.missing(name)
            if not missing:
                return
            if not quiet:
                what = f"{len(missing)} files of commit {selection.commit[:12]} to {name.cache}"
                print(f"megarl: {name.key}: downloads {name.text}: {what}", file=sys.stderr, flush=True)
            snapshot_download(
                name.repository,
                repo_type=name.kind,
                revision=selection.commit,
                allow_patterns=[glob.escape(file) for file in missing],
                library_name="megarl",
            )

    if failure := _ask_hub(name, fetch):
        raise failure
    if missing := selection.missing(name):
        raise name.problem(f"the hub did not send {missing[0]} (run the same command again)")


@contextmanager
def _lock(name: HubName) -> Iterator[None]:
    """Hold the lock of a repository in the cache; report and limit the wait for it."""
    from filelock import FileLock, Timeout

    path = name.cache.parent / ".locks" / f"megarl-{name.cache.name}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    lock, deadline = FileLock(path), time.monotonic() + DOWNLOAD_LIMIT
    while True:
        try:
            lock.acquire(timeout=REPORT_EVERY)
            break
        except Timeout:
            if time.monotonic() > deadline:
                what = f"another process has downloaded it for {DOWNLOAD_LIMIT / 3600:g} hours ({path})"
                raise WaitTimeout(f"{name.key}: {name.text}: {what}") from None
            what = f"waits for another process that downloads {name.text}"
            print(f"megarl: {name.key}: {what}", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        lock.release()


def _offline_problem(name: HubName, missing: list[str] | None = None) -> str:
    what = f"{missing[0]} is" if missing else f"no such {_local_word(name)}, and it is"
    remedy = "unset it, copy a cache there, or give a local path"
    return f"{what} not in the hub's cache {name.cache.parent}, and HF_HUB_OFFLINE is set ({remedy})"


def _local_word(name: HubName) -> str:
    return "folder" if name.kind == "model" else "file"


def _ask_hub(name: HubName, call: Callable[[], Answer]) -> Answer | ConfigError:
    """Call huggingface_hub. Returns the error if the hub cannot be reached, and raises its other errors."""
    from huggingface_hub import constants, errors

    page = f"{constants.ENDPOINT}/{'datasets/' if name.kind == 'dataset' else ''}{name.repository}"
    try:
        return call()
    except errors.GatedRepoError:
        what = f"is gated (accept its terms at {page}, and set HF_TOKEN to a token of that account)"
        raise name.problem(what) from None
    except errors.RepositoryNotFoundError:
        what = f"no such {_local_word(name)}, and the hub has no public {name.kind} of that name"
        raise name.problem(f"{what} (correct it; for a private one set HF_TOKEN)") from None
    except errors.RevisionNotFoundError:
        remedy = f"name a branch, a tag or a commit of {page}"
        raise name.problem(f"has no revision {name.revision} ({remedy})") from None
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            raise name.problem(f"the hub refuses access with status {status} (check HF_TOKEN)") from None
        return name.problem(f"the hub answers with status {status} (try again later)")
    except errors.HFValidationError as error:
        raise name.problem(f"no name of the hub: {first_line(error)}") from None
    except PermissionError as error:
        raise name.problem(f"{error.filename}: cannot be written (set HF_HOME to another folder)") from None
    except MegarlError:
        raise
    except Exception as error:
        if not _is_network_failure(error):
            raise
        cause = error.__cause__ or error
        is_page = isinstance(cause, json.JSONDecodeError | errors.FileMetadataError)
        reason = "a proxy or a login page answers in its place" if is_page else first_line(cause)
        what = f"no such {_local_word(name)} here, and {constants.ENDPOINT} cannot be reached"
        remedy = "connect, give a local path, or set HF_HUB_OFFLINE=1 to use the cache alone"
        return name.problem(f"{what}: {reason} ({remedy})")


def _is_network_failure(error: Exception) -> bool:
    """Return whether the hub did not answer. hf_xet raises plain RuntimeErrors."""
    from huggingface_hub import errors

    kinds = (errors.LocalEntryNotFoundError, errors.FileMetadataError, ConnectionError, json.JSONDecodeError)
    is_client = type(error).__module__.partition(".")[0] in ("httpx", "httpx2", "httpcore")
    return is_client or isinstance(error, kinds) or type(error) is RuntimeError
