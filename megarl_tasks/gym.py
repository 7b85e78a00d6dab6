"""Generate the rows of `gym` entries with reasoning-gym.

Some problems depend on the order of sets, so a process with a fixed hash seed generates them. Others use the
global generators of Python and numpy, which are seeded before each row."""

from __future__ import annotations

import json
import os
import random
import select
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from megarl.config.errors import ConfigError, DataError, WaitTimeout
from megarl.config.schema import GymConfig
from megarl.data.generated import GeneratedRow
from megarl.rewards.process import follow_parent, plain_environment
from megarl.rewards.sandbox import STRICT, Supervised, restrict

INSTALL = "pip install 'megarl[gym]'"
VERIFIER = "megarl_tasks.gym_scorer:verify"
# Most tasks use seed + k for item k. So each seed of an entry selects a block of seeds that fits the longest
# entry.
# Training, evaluation and examples have disjoint ranges. numpy's seeds end at 2 ** 32.
BLOCK = 2**18
TRAINING, HELD_OUT, SHOWN = 0, 2**31, 3 * 2**30
_LIMIT = 300.0  # seconds per row
_BOOT = (
    "import sys; sys.path.extend(p for p in sys.argv[1:] if p not in sys.path); "
    "from megarl_tasks.gym import work; work()"
)


def first_seed(key: str, seed: int) -> int:
    return (HELD_OUT if key.startswith("data.eval") else TRAINING) + seed * BLOCK


def interleave_tasks(weights: Mapping[str, float], size: int) -> Iterator[tuple[str, int]]:
    """Yield (task, index within it) of `size` rows by smooth weighted round-robin."""
    total, credit, count = sum(weights.values()), dict.fromkeys(weights, 0.0), dict.fromkeys(weights, 0)
    for _ in range(size):
        for task, weight in weights.items():
            credit[task] += weight / total
        task = max(credit, key=lambda name: credit[name])
        credit[task] -= 1.0
        yield task, count[task]
        count[task] += 1


def first_rows(entries: Mapping[str, GymConfig], rounds: int = 16) -> Iterator[GeneratedRow]:
    """Yield `rounds` rows of each task, alternating between an entry's tasks."""
    small_entries = {}
    for key, entry in entries.items():
        tasks = {name: task.model_copy(update={"weight": 1.0}) for name, task in entry.tasks.items()}
        small_entries[key] = entry.model_copy(update={"tasks": tasks, "size": rounds * len(tasks)})
    return generate(small_entries)


def generate(entries: Mapping[str, GymConfig]) -> Iterator[GeneratedRow]:
    """Check all parameters, then yield the rows. Raises as in `megarl.data.generated`."""
    if not entries:
        return
    first_key = next(iter(entries))
    if find_spec("reasoning_gym") is None:
        raise ConfigError(f"{first_key}: reasoning-gym is not installed ({INSTALL})")
    request = {
        key: {
            "seed": first_seed(key, entry.seed),
            "size": entry.size,
            "system": entry.system,
            "examples": entry.examples,
            "tasks": {name: [task.weight, task.parameters] for name, task in entry.tasks.items()},
        }
        for key, entry in entries.items()
    }
    with tempfile.TemporaryFile() as stderr:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _BOOT, *(path or os.getcwd() for path in sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            bufsize=0,
            env=plain_environment(),
        )
        try:
            yield from _rows(_messages(process, request, stderr, first_key))
        finally:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()


def _messages(
    process: subprocess.Popen[bytes], request: dict[str, Any], stderr: IO[bytes], at: str
) -> Iterator[dict[str, Any]]:
    """Send the request and yield the answers. at: key in progress."""
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(json.dumps(request).encode() + b"\n")
        process.stdin.flush()
    except BrokenPipeError:
        pass  # the read below reports the death
    pipe, unread = process.stdout.fileno(), b""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    while True:
        if not poll.poll(_LIMIT * 1000):
            raise WaitTimeout(
                f"{at}: reasoning-gym took over {_LIMIT:g} s for one row (change its parameters)"
            )
        chunk = os.read(pipe, 1 << 20)
        if not chunk:
            code = process.wait()
            stderr.seek(0)
            lines = stderr.read().decode(errors="replace").strip().splitlines()
            exit_text = f"signal {-code}" if code < 0 else f"exit code {code}"
            raise DataError(
                f"{at}: reasoning-gym's process died ({exit_text}; {lines[-1] if lines else 'no reason'})"
            )
        *lines_read, unread = (unread + chunk).split(b"\n")
        for line in lines_read:
            message = json.loads(line)
            if "refused" in message:
                raise ConfigError(message["refused"])
            if "end" in message:
                return
            at = f"{message['key']}.tasks.{message['task']}" if "task" in message else at
            yield message


def _rows(messages: Iterator[dict[str, Any]]) -> Iterator[GeneratedRow]:
    opening_by_task: dict[tuple[str, str], list[dict[str, str]]] = {}
    for message in messages:
        key, task = message["key"], message["task"]
        if "before" in message:
            opening_by_task[key, task] = message["before"]
            continue
        row = GeneratedRow(**{**message, "problem": tuple(message.get("problem") or ()) or None})
        opening = opening_by_task[key, task]
        if row.problem is None and any(turn["content"] == row.question for turn in opening):
            row = GeneratedRow(key, task, row.index, problem=("is shown as an example", task))
        elif row.problem is None:
            prompt = [*opening, {"role": "user", "content": row.question}] if opening else row.question
            row = GeneratedRow(key, task, row.index, row.question, prompt, row.answer, row.entry)
        yield row


def work() -> None:
    """Run the generating process.

    Writes JSON lines: prompts and examples by task, all rows, and an end or the first error."""
    # Some tasks (codeio) run code of their data set.
    restrict(Supervised(STRICT, Path(os.devnull), (os.getppid(),)))
    follow_parent()
    sink = os.fdopen(os.dup(1), "w", encoding="utf-8")
    request = json.loads(sys.stdin.readline())
    null_file = os.open(os.devnull, os.O_RDWR)
    os.dup2(null_file, 1)  # some generators print

    def write(**message: Any) -> None:
        sink.write(json.dumps(message) + "\n")
        sink.flush()

    try:
        for message in _generate_messages(request):
            write(**message)
    except ConfigError as error:
        write(refused=str(error))
    else:
        write(end=True)


def _generate_messages(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    import numpy as np

    key = next(iter(request))
    try:
        from reasoning_gym.utils import SYSTEM_PROMPTS

        from megarl_tasks.gym_scorer import OPENING, known_answer, make_task, pack_entry
    except ImportError as error:
        raise ConfigError(f"{key}: reasoning-gym cannot be imported: {error} ({INSTALL})") from None

    def set_seed(seed: int) -> None:
        random.seed(seed)
        np.random.seed(seed)

    def make_item(task: Any, name: str, parameters: dict[str, Any], seed: int, index: int) -> dict[str, Any]:
        set_seed(seed + index)
        try:
            entry = task[index]
            answer = known_answer(task, entry)
            packed = pack_entry(name, parameters, entry, answer)
            return {"question": str(entry["question"]), "answer": answer, "entry": packed}
        except Exception as error:  # noqa: BLE001 (reported as an unusable row)
            text = f"{name} {index}: {type(error).__name__}: {error}".split("\n")[0]
            return {"problem": ("the task fails to generate it", text)}

    tasks: dict[tuple[str, str], Any] = {}
    for key, entry in request.items():
        weights = {name: weight for name, (weight, _) in entry["tasks"].items()}
        counts = Counter(name for name, _ in interleave_tasks(weights, entry["size"]))
        system = entry["system"]
        if system is not None and OPENING not in (system := SYSTEM_PROMPTS.get(system, system)):
            known_names = ", ".join(SYSTEM_PROMPTS)
            raise ConfigError(
                f"{key}.system: is none of reasoning-gym's ({known_names}), and another text must ask for "
                f"{OPENING} tags (got {system[:60]!r})"
            )
        for name, (_, parameters) in entry["tasks"].items():
            try:
                set_seed(entry["seed"])
                tasks[key, name] = make_task(name, parameters, entry["seed"], max(counts[name], 1))
                set_seed(SHOWN)
                example_task = make_task(name, parameters, SHOWN, max(entry["examples"], 1))
            except ConfigError as problem:
                raise ConfigError(f"{key}.tasks.{problem}") from None
            opening = [] if system is None else [{"role": "system", "content": system.strip()}]
            for index in range(entry["examples"]):
                example = make_item(example_task, name, parameters, SHOWN, index)
                if not example.get("answer"):
                    why = example["problem"][1] if "problem" in example else f"{name} tells no answer"
                    remedy = "set it to 0, or leave the task out"
                    raise ConfigError(f"{key}.examples: {why}, so that none can be shown ({remedy})")
                opening.append({"role": "user", "content": example["question"]})
                answer = f"{OPENING}{example['answer']}</answer>"
                opening.append({"role": "assistant", "content": answer})
            yield {"key": key, "task": name, "before": opening}
    for key, entry in request.items():
        weights = {name: weight for name, (weight, _) in entry["tasks"].items()}
        for name, index in interleave_tasks(weights, entry["size"]):
            item = make_item(tasks[key, name], name, entry["tasks"][name][1], entry["seed"], index)
            yield {"key": key, "task": name, "index": index, **item}
