"""Print the size of each package, and figures that should stay small with their targets.

python tools/size.py --step  # also list the files whose functions are called in the demo's second step
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tempfile
import threading
import tokenize
from contextlib import redirect_stdout
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CORE = "megarl"
STEP = ("steps=2", "value_pretraining.steps=1", "rollout.prompts=8", "rollout.max_response_tokens=40")
ONE_RANK = ("parallel.tp=1", "parallel.pp=1", "parallel.dp=1", "checkpoint.every=0", "log.report=false")
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def code_lines(source: str) -> int:
    """Return the number of lines with tokens other than comments and docstrings."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            statement = node.body[0] if node.body else None
            if (
                isinstance(statement, ast.Expr)
                and isinstance(statement.value, ast.Constant)
                and ast.get_docstring(node)
            ):
                docstrings.update(range(statement.lineno, (statement.end_lineno or statement.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def sizes(package: Path) -> tuple[int, int, int]:
    """Return a package's files, lines and lines of code."""
    sources = [file.read_text(encoding="utf-8") for file in sorted(package.rglob("*.py"))]
    return len(sources), sum(text.count("\n") for text in sources), sum(map(code_lines, sources))


def longest(package: Path, kinds: tuple[type[ast.AST], ...]) -> tuple[int, str]:
    """Return the lines of the longest definition of these kinds, and its name and file."""
    definitions = [(0, "")]
    for file in package.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, kinds):
                assert isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
                size = (node.end_lineno or node.lineno) - node.lineno + 1
                definitions.append((size, f"{node.name} in {file.name}"))
    return max(definitions)


def path_of_a_prompt(page: str) -> tuple[set[str], set[str]]:
    """Return the files and the sample types in the design page's table "From a prompt to its gradient".

    A type that is a field of another, `Sample.data`, counts as part of it."""
    section = page.partition("\n## From a prompt to its gradient\n")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| [")]
    files = {name for row in rows for cell in row[:2] for name in re.findall(r"\(\.\./megarl/(\S+?)\)", cell)}
    return files, {name for row in rows for name in re.findall(r"`(\w+)`", row[2])}


def targets() -> list[tuple[str, int, int]]:
    """Return (name, present figure, target)."""
    core = ROOT / CORE
    files, types = path_of_a_prompt((ROOT / "docs/design.md").read_text(encoding="utf-8"))
    class_size, class_name = longest(core / "rollout", (ast.ClassDef,))
    size, name = longest(core / "rollout", (ast.FunctionDef, ast.AsyncFunctionDef))
    return [
        ("files from a prompt to its gradient", len(files), 18),
        ("sample types on that path", len(types), 6),
        (f"lines of the longest class of rollout/: {class_name}", class_size, 300),
        (f"lines of the longest function of rollout/: {name}", size, 60),
        ("lines of the core", sizes(core)[1], 31_000),
        ("lines of code of the core", sizes(core)[2], 22_500),
        ("lines of rollout/", sizes(core / "rollout")[1], 5_000),
    ]


def files_of_a_step(folder: Path) -> list[str]:
    """Train the demo for two steps in `folder`; return megarl's files that the second one crosses."""
    from megarl.cli.train import train
    from megarl.config.load import set_key
    from megarl.schedule.trainer import Trainer
    from megarl_tasks.arithmetic import write_demo

    prefix, crossed_files, in_second_step = f"{ROOT / CORE}/", set[str](), threading.Event()

    def record_call(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if (
            event == "call"
            and in_second_step.is_set()
            and code.co_name != "<module>"
            and code.co_filename.startswith(prefix)
        ):
            crossed_files.add(code.co_filename)

    def step(self: Trainer, step: Any) -> None:
        if (step.stage, step.number) != ("train", 2):
            return original_step(self, step)
        in_second_step.set()
        sys.setprofile(record_call)
        try:
            return original_step(self, step)
        finally:
            sys.setprofile(None)
            in_second_step.clear()

    original_step, Trainer.step = Trainer.step, step  # type: ignore[method-assign]
    threading.setprofile(record_call)  # in later threads
    write_demo(folder, seed=0)
    paths = {"data.train": [folder / "train.jsonl"], "data.eval": [folder / "eval.jsonl"]}
    paths |= {"model.path": folder / "model", "run_dir": folder / "run"}
    with redirect_stdout(io.StringIO()):
        train(
            ROOT / "configs/demos/vapo.yaml",
            [*STEP, *ONE_RANK, *(set_key(key, path) for key, path in paths.items())],
        )
    return sorted(str(Path(file).relative_to(prefix)) for file in crossed_files)


def main() -> None:
    """Print the tables."""
    print(f"{'':20} files  lines   code")
    for package in (ROOT / CORE, *sorted(ROOT.glob(f"{CORE}_*/"))):
        files, lines, code = sizes(package)
        print(f"{package.name:20} {files:5} {lines:6} {code:6}")
    print(f"\n{'should stay small':72} {'now':>6} {'target':>6}")
    for name, figure, target in targets():
        print(f"{name:72} {figure:6} {target:6}{'  over' if figure > target else ''}")
    if "--step" in sys.argv[1:]:
        sys.path.insert(0, str(ROOT))
        with tempfile.TemporaryDirectory() as folder:
            crossed_files = files_of_a_step(Path(folder))
        print(f"a VAPO step crosses {len(crossed_files)} files of {CORE}: {', '.join(crossed_files)}")


if __name__ == "__main__":
    main()
