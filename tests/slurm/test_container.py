"""A GPU node's environment as text: the image's file by BuildKit's parser, the job's scripts by shellcheck,
the container's options by pyxis' rules, and by pyxis itself where it is there.

pyxis is a plugin of Slurm that has to be compiled: `make` in a checkout of github.com/NVIDIA/pyxis, with the
system's libslurm-dev. MEGARL_TEST_PYXIS=/path/spank_pyxis.so then lets srun load it.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import dockerfile
import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "docker" / "Dockerfile"
SCRIPTS = [
    *sorted((ROOT / "slurm").iterdir()),
    ROOT / "tests" / "slurm" / "install.sh",
    ROOT / "tools" / "node.sh",
    ROOT / "examples" / "launch.sh",
]
PLUGIN = os.environ.get("MEGARL_TEST_PYXIS")
# Settings of a job, and what must not pass. The image is what enroot imports, or a file of it.
GOOD = [
    {"MEGARL_CONTAINER": "org/megarl:1"},
    {
        "MEGARL_CONTAINER": "registry.example.org#org/megarl:1",
        "MEGARL_MOUNTS": "/a:/a,/data:/data:ro+rprivate",
    },
    {"MEGARL_CONTAINER": "/images/megarl.sqsh", "MEGARL_MOUNTS": "/a,/data:/data"},
]
BAD = [
    ({"MEGARL_MOUNTS": ":/b"}, "invalid format"),
    ({"MEGARL_MOUNTS": "/a:/a,data:/data"}, "mount source"),
    ({"MEGARL_MOUNTS": "/a:b"}, "mount target"),
]


def commands() -> list[tuple[str, tuple[str, ...]]]:
    """The instructions of the Dockerfile with their words."""
    return [(found.cmd.upper(), found.value) for found in dockerfile.parse_file(str(DOCKERFILE))]


def copied() -> dict[str, str]:
    """What the image has of the checkout: source -> target."""
    found = {}
    for command, words in commands():
        if command == "COPY":
            *sources, target = words
            found |= {source: f"{target}{source}" if target.endswith("/") else target for source in sources}
    return found


def test_the_image_has_what_its_installation_needs(tmp_path: Path) -> None:
    """What is copied is there, with what its links lead to; make finds all that it would build from; the
    path leads to where it puts the environment."""
    image = tmp_path / "image"
    image.mkdir()
    for source, target in copied().items():
        where = ROOT / source
        assert where.exists(), source
        copy = shutil.copytree if where.is_dir() else shutil.copy
        copy(where, image / target, **({"symlinks": True} if where.is_dir() else {}))
    dangling = [path for path in image.rglob("*") if path.is_symlink() and not path.exists()]
    assert not dangling
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert kept == set(copied()), "the builder is sent what is copied"
    words, ran = dict(commands()), [words[0] for command, words in commands() if command == "RUN"]
    [settings] = [found[1].split() for run in ran if (found := re.search(r"make (install-gpu .*?) &&", run))]
    # This Python instead of the image's: none of the lines is carried out.
    shell = ["make", "--no-print-directory", "-n", *settings, f"PYTHON_GPU={sys.executable}"]
    done = subprocess.run(shell, cwd=image, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "requirements-gpu.txt" in done.stdout and "transformer-engine-torch" in done.stdout
    [made] = re.findall(r"-m venv (\S+)", done.stdout)
    environment = dict(zip(words["ENV"][::2], words["ENV"][1::2], strict=True))
    assert environment["PATH"] == f"{words['WORKDIR'][0]}/{made}/bin:$PATH"
    assert "compute" in environment["NVIDIA_DRIVER_CAPABILITIES"].split(",")
    assert f" {settings[1].removeprefix('PYTHON_GPU=')} " in ran[0], "apt installs what make is told to take"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(script: Path) -> None:
    program = Path(sys.executable).with_name("shellcheck")
    options = ["--external-sources", "--source-path", str(ROOT), "--severity", "style"]
    done = subprocess.run(
        [program, *options, script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


class Pyxis(argparse.ArgumentParser):
    """The options of pyxis 0.24 (its args.c), and those of srun that megarl gives."""

    def __init__(self) -> None:
        super().__init__(prog="srun", add_help=False, allow_abbrev=False)
        for name in ("image", "workdir", "name", "save", "env", "unshare"):
            self.add_argument(f"--container-{name}", type=self.not_empty)
        self.add_argument("--container-mounts", type=self.mounts)
        for name in ("mount-home", "remap-root", "entrypoint"):
            self.add_argument(f"--container-{name}", action="store_true")
            self.add_argument(f"--no-container-{name}", action="store_true")
        for name in ("entrypoint-log", "writable", "readonly"):
            self.add_argument(f"--container-{name}", action="store_true")
        for name in ("nodes", "ntasks", "ntasks-per-node", "kill-on-bad-exit"):
            self.add_argument(f"--{name}", type=int, required=True)
        self.add_argument("command", nargs=argparse.REMAINDER)

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)

    @staticmethod
    def not_empty(text: str) -> str:
        if not text:
            raise argparse.ArgumentTypeError("argument required")
        return text

    @staticmethod
    def mounts(text: str) -> list[tuple[str, str]]:
        """SRC[:DST[:FLAGS]],... A path begins with a slash or a dot."""
        found = []
        for entry in text.split(","):
            source, _, rest = entry.partition(":")
            target = rest.partition(":")[0] if ":" in entry else source
            if not source or not target:
                raise argparse.ArgumentTypeError(f"invalid format: {entry}")
            if source[0] not in "./" and source not in ("tmpfs", "umount"):
                raise argparse.ArgumentTypeError(f"mount source must be a path: {source}")
            if target[0] not in "./":
                raise argparse.ArgumentTypeError(f"mount target must be a path: {target}")
            found.append((source, target))
        return found


def srun(folder: Path, code: str, srun: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """Code after common.sh, in a job of two nodes whose srun is the given script. "" leaves a setting out."""
    program = folder / "srun"
    program.write_text(f"#!/usr/bin/env bash\n{srun}\n")
    program.chmod(0o755)
    scontrol = folder / "scontrol"
    scontrol.write_text("#!/usr/bin/env bash\necho node1\n")
    scontrol.chmod(0o755)
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "MEGARL"))}
    environment |= {
        "REAL_PATH": environment["PATH"],
        "PATH": f"{folder}:{environment['PATH']}",
        "MEGARL_HOME": str(ROOT),
        "MEGARL_LOGS": str(folder / "logs"),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "FOLDER": str(folder),
        **settings,
    }
    environment = {name: value for name, value in environment.items() if value}
    return subprocess.run(
        ["bash", "-c", f". {ROOT}/slurm/common.sh\n{code}"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def given(folder: Path, code: str, **settings: str) -> list[argparse.Namespace]:
    """What srun is given, call by call."""
    calls = folder / "calls"
    calls.unlink(missing_ok=True)
    srun(
        folder,
        code,
        r"""printf '%s\0' "$@" >>"$FOLDER/calls"; printf '\n\0' >>"$FOLDER/calls" """,
        **settings,
    )
    lines = calls.read_text().split("\0\n\0")[:-1]
    return [Pyxis().parse_args(line.split("\0")) for line in lines]


@pytest.mark.parametrize("settings", GOOD, ids=lambda settings: settings["MEGARL_CONTAINER"])
def test_pyxis_takes_the_options(settings: dict[str, str], tmp_path: Path) -> None:
    [call] = given(tmp_path, "megarl_srun bash -c 'echo --nodes=9'", **settings)
    assert (call.nodes, call.ntasks, call.ntasks_per_node, call.kill_on_bad_exit) == (2, 2, 1, 1)
    assert call.container_image == settings["MEGARL_CONTAINER"]
    assert call.container_workdir == str(ROOT)
    assert call.command == ["bash", "-c", "echo --nodes=9"]
    asked = Pyxis.mounts(settings["MEGARL_MOUNTS"]) if "MEGARL_MOUNTS" in settings else []
    assert call.container_mounts == [(str(ROOT), str(ROOT)), *asked]


def test_the_checkout_is_where_sbatch_was_called(tmp_path: Path) -> None:
    """The preflight calls srun in a shell of its own, for a time limit: what common.sh sets must reach it."""
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    settings = {"MEGARL_CONTAINER": "org/megarl:1", "MEGARL_HOME": "", "SLURM_SUBMIT_DIR": str(checkout)}
    [call] = given(tmp_path, "megarl_prepare configs/vapo_32b.yaml", **settings)
    assert call.container_workdir == str(checkout)
    assert call.container_mounts == [(str(checkout), str(checkout))]


@pytest.mark.parametrize(("settings", "message"), BAD)
def test_wrong_mounts_do_not_pass(settings: dict[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        given(tmp_path, "megarl_srun true", **settings, MEGARL_CONTAINER="org/megarl:1")


def test_what_is_asked_once_is_asked_in_the_container(tmp_path: Path) -> None:
    """The node's own Python may have nothing of what megarl imports: run_dir comes from the container's, of
    one node."""
    code = "megarl_train configs/vapo_32b.yaml || true"
    first, *_ = given(tmp_path, code, MEGARL_CONTAINER="org/megarl:1")
    assert (first.nodes, first.ntasks, first.container_image) == (1, 1, "org/megarl:1")
    assert first.command == ["python", "-P", "-m", "megarl", "config", "show", "configs/vapo_32b.yaml"]


@pytest.mark.skipif(PLUGIN is None or shutil.which("srun") is None, reason="needs srun and MEGARL_TEST_PYXIS")
@pytest.mark.parametrize(("settings", "message"), [*((good, "") for good in GOOD), *BAD])
def test_pyxis_itself(settings: dict[str, str], message: str, tmp_path: Path) -> None:
    """srun reads its options, the plugin's among them, before it speaks to anybody; --help behind them ends
    it."""
    (tmp_path / "plugstack.conf").write_text(f"required {PLUGIN}\n")
    (tmp_path / "slurm.conf").write_text(
        "ClusterName=tests\nSlurmctldHost=localhost(127.0.0.1)\nAuthType=auth/munge\nCredType=cred/munge\n"
        f"PlugStackConfig={tmp_path}/plugstack.conf\nNodeName=node1\nPartitionName=all Nodes=ALL\n"
        + os.environ.get("MEGARL_TEST_SLURM_CONF", "")
    )
    real = (
        'flags=(); while [ "${1#--}" != "$1" ]; do flags+=("$1"); shift; done\n'
        'PATH=$REAL_PATH exec srun "${flags[@]}" --help'
    )
    settings = {"MEGARL_CONTAINER": "org/megarl:1", "SLURM_CONF": str(tmp_path / "slurm.conf"), **settings}
    done = srun(tmp_path, "megarl_srun true", real, **settings)
    assert (done.returncode == 0) == (not message), done.stderr
    assert message in done.stderr
    if not message:
        assert "--container-image" in done.stdout, "the plugin was loaded"
