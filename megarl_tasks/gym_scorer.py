"""reasoning-gym's tasks (extra `gym`), and their scorers as a verifier.

Import this only in a process with a fixed PYTHONHASHSEED, on which some tasks depend. Verifier workers
and gym.py's generator have one."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from fractions import Fraction
from functools import lru_cache
from numbers import Integral, Real
from typing import Any, cast

from reasoning_gym.dataset import ProceduralDataset
from reasoning_gym.factory import DATASETS

from megarl.config.errors import ConfigError
from megarl.rewards.verdict import Verdict
from megarl_tasks.gym_answers import restrict_answer

OPENING, CLOSING = "<answer>", "</answer>"
_SUGGESTED = 3
# Metadata's keys of a correct answer.
_EXAMPLES = ("example_correct_answer", "example_answer", "possible_answer")
_MIXES = "composite"  # reasoning-gym's task that mixes others; use the key `tasks` of a `gym` entry instead


def make_task(name: str, parameters: Mapping[str, Any], seed: int, size: int) -> ProceduralDataset:
    """Return a task of `size` items. Raises ConfigError if it or a parameter is invalid."""
    if name not in DATASETS or name == _MIXES:
        if name == _MIXES:
            raise ConfigError(
                f"{name}: mixes other tasks of reasoning-gym (name those, each with its weight)"
            )
        raise ConfigError(f"{name}: reasoning-gym has no such task{_near(name, DATASETS)}")
    dataset, configuration = DATASETS[name]
    defaults = get_defaults(configuration)
    arguments = {}
    for key, value in parameters.items():
        if key not in defaults:
            raise ConfigError(
                f"{name}.{key}: the task has no such parameter{_near(key, {**defaults, 'weight': 1})}"
            )
        default = defaults[key]
        for default_type, type_name in _KINDS:
            if isinstance(default, default_type) and (
                not isinstance(value, _ACCEPTED.get(default_type, default_type))
                or (isinstance(value, bool) and default_type is not bool)
            ):
                raise ConfigError(
                    f"{name}.{key}: must be {type_name}, as the default {default!r} is (got {value!r})"
                )
        arguments[key] = _like(default, value)
    try:
        config = configuration(**arguments, seed=seed, size=size)
        if hasattr(config, "validate"):
            config.validate()
        return cast(ProceduralDataset, dataset(config))
    except Exception as error:  # reasoning-gym raises many types for invalid values
        what = f"{type(error).__name__}: {error}".split("\n")[0]
        raise ConfigError(f"{name}: reasoning-gym refuses its parameters {arguments}: {what}") from error


def get_defaults(configuration: Any) -> dict[str, Any]:
    defaults = {}
    for field in fields(configuration):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if field.name not in ("seed", "size"):  # set by the entry
            defaults[field.name] = (
                float(default) if type(default) is int and "float" in str(field.type) else default
            )
    return defaults


def get_parameters(name: str) -> dict[str, Any]:
    def to_plain(value: Any) -> Any:
        if isinstance(value, tuple | list):
            return [to_plain(item) for item in value]
        return value if value is None or isinstance(value, bool | int | float | str) else str(value)

    return {key: to_plain(value) for key, value in get_defaults(DATASETS[name][1]).items()}


def tasks_by_kind() -> dict[str, list[str]]:
    names: dict[str, list[str]] = {}
    for name in sorted(DATASETS):
        if name != _MIXES:
            names.setdefault(DATASETS[name][0].__module__.split(".")[1], []).append(name)
    return dict(sorted(names.items()))


_KINDS: tuple[tuple[type, str], ...] = (
    (bool, "true or false"),
    (int, "a whole number"),
    (float, "a number"),
    (str, "a text"),
    (tuple, "a list"),
    (list, "a list"),
    (dict, "a section"),
)
_ACCEPTED: dict[type, Any] = {float: (int, float), tuple: list}


def _near(name: str, known: Mapping[str, Any]) -> str:
    matches = difflib.get_close_matches(
        name, [candidate for candidate in known if candidate != _MIXES], _SUGGESTED, 0.5
    )
    if matches:
        return f" (did you mean {' or '.join(matches)}?)"
    return f" (it has {', '.join(known)})" if len(known) < 20 else " (megarl data gym lists them)"


def _like(default: Any, value: Any) -> Any:
    if isinstance(value, list) and isinstance(default, tuple | list):
        items = [_like(default[0] if default else None, item) for item in value]
        return tuple(items) if isinstance(default, tuple) else items
    return value


def known_answer(task: ProceduralDataset, entry: Mapping[str, Any]) -> str:
    """Return a correct answer, or ""."""
    if isinstance(entry["answer"], str):
        return entry["answer"]
    examples = (entry["metadata"][name] for name in _EXAMPLES if name in entry["metadata"])
    for answer in (example if isinstance(example, str) else json.dumps(example) for example in examples):
        if task.score_answer(answer, entry) >= 1:
            return answer
    return ""


def pack_entry(task: str, parameters: Mapping[str, Any], entry: Mapping[str, Any], answer: str) -> str:
    """Return JSON for `verify`. Raises TypeError for a value that `_packed` cannot convert."""
    record = {"task": task, "parameters": dict(parameters), "entry": _packed(dict(entry)), "answer": answer}
    return json.dumps(record, ensure_ascii=False)


def _packed(value: Any) -> Any:
    """Convert to JSON. Types that JSON lacks become {"$kind": contents}."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):  # also numpy's and enumerations
        return str.__str__(value)
    if isinstance(value, Integral):  # also numpy's
        return int(value)
    if isinstance(value, Fraction):
        return {"$fraction": str(value)}
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, tuple):
        return {"$tuple": [_packed(item) for item in value]}
    if isinstance(value, list):
        return [_packed(item) for item in value]
    if isinstance(value, set | frozenset):
        return {"$set": [_packed(item) for item in sorted(value, key=repr)]}
    if isinstance(value, dict):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {str.__str__(key): _packed(item) for key, item in value.items()}
        return {"$dict": [[_packed(key), _packed(item)] for key, item in value.items()]}
    raise TypeError(f"{type(value).__module__}.{type(value).__name__} cannot be kept as JSON")


def _unpacked(value: Any) -> Any:
    if isinstance(value, list):
        return [_unpacked(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "$tuple" in value:
        return tuple(_unpacked(item) for item in value["$tuple"])
    if "$fraction" in value:
        return Fraction(value["$fraction"])
    if "$set" in value:
        return {_unpacked(item) for item in value["$set"]}
    if "$dict" in value:
        return {_unpacked(key): _unpacked(item) for key, item in value["$dict"]}
    return {key: _unpacked(item) for key, item in value.items()}


def unpack_entry(text: str) -> dict[str, Any]:
    record = json.loads(text)
    return {**record, "entry": _unpacked(record["entry"])}


def extract_answer(response: str) -> str | None:
    """Return the last `<answer>`'s contents, or None, in linear time, unlike reasoning-gym's function."""
    answer, position = None, 0
    while (opening := response.find(OPENING, position)) >= 0:
        closing = response.find(CLOSING, opening + len(OPENING))
        if closing < 0:
            break
        answer, position = response[opening + len(OPENING) : closing].strip(), closing + len(CLOSING)
    return answer


@lru_cache(maxsize=256)
def _scorer(task: str, parameters: str) -> Callable[[str, dict[str, Any]], Any]:
    return make_task(task, json.loads(parameters), seed=0, size=1).score_answer


def verify(response: str, entry: str) -> Verdict:
    """Grade the `<answer>` with its task's scorer. A score of 1 or more is correct.

    A response without tags is wrong. So is an answer that is code, or for which the scorer raises. If the
    scorer also raises for the known answer, the error propagates and the response is ungraded."""
    extracted = extract_answer(response)
    if extracted is None:
        return Verdict(False, score=0.0)
    record = unpack_entry(entry)
    scorer = _scorer(record["task"], json.dumps(record["parameters"]))
    answer, code = restrict_answer(record["task"], extracted, record["entry"])
    try:
        score = float(scorer(answer, record["entry"]))
    except (MemoryError, RecursionError):
        raise
    except Exception as error:  # noqa: BLE001 (recorded with the verdict)
        correct_answer, _ = restrict_answer(record["task"], record["answer"], record["entry"])
        # If the scorer also raises here, it is at fault, and the error propagates.
        float(scorer(correct_answer, unpack_entry(entry)["entry"]))
        text = str(error).split("\n")[0]
        return Verdict(
            False,
            extracted,
            f"{record['task']}: its scorer refuses the answer: {type(error).__name__}: {text}",
        )
    problem = None if code is None else f"{record['task']}: the answer is code ({code}), which is not run"
    return Verdict(score >= 1, extracted, problem, score=score)
