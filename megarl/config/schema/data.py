"""Section `data`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import (
    ConfigDict,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from megarl.config.schema.section import Section, field


class GymTask(Section):
    """A task of reasoning-gym; other keys are its parameters, checked before a run."""

    model_config = ConfigDict(extra="allow")

    weight: float = field(1.0, "share of the rows, relative to the other tasks' weights", gt=0)

    @model_validator(mode="before")
    @classmethod
    def _named_alone(cls, value: Any) -> Any:
        """Accept a name without a section; refuse keys of the whole entry."""
        if isinstance(value, dict) and (
            set_for_all := next((k for k in ("seed", "size") if k in value), None)
        ):
            raise ValueError(f"must not have {set_for_all}, which belongs next to `tasks`")
        return {} if value is None else value

    @property
    def parameters(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class GymConfig(Section):
    """Problems that reasoning-gym generates and scores (extra `gym`), the same in any process."""

    tasks: dict[str, GymTask] = field(
        ..., "name -> {weight, and the task's own parameters}, or a list of names"
    )
    size: int = field(..., "rows of all tasks together", "rows", ge=1, le=2**18)
    seed: int = field(
        0,
        "seed of the rows; data.train and data.eval share no rows, whatever their seeds",
        ge=0,
        lt=2**12,
    )
    system: str | None = field(
        "default",
        "system message: the name of one of reasoning-gym's (default, simple, direct, DeepSeekZero, "
        "chain_of_draft) or a text of your own that asks for <answer> tags; null: none",
    )
    examples: int = field(
        0,
        "problems of the same task with their answers in tags, shown before each question",
        "problems",
        ge=0,
        le=64,
    )

    @field_validator("tasks", mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        if isinstance(value, list) and all(isinstance(name, str) for name in value):
            duplicate = next((name for i, name in enumerate(value) if name in value[:i]), None)
            if duplicate is not None:
                raise ValueError(f"must name {duplicate} once (a weight gives it more rows)")
            value = {name: {} for name in value}
        if not isinstance(value, dict) or not value:
            raise ValueError(
                "must be the names of tasks, at least one, each with its settings, or a list of names"
            )
        return value


class DataEntry(Section):
    """An entry of data.train: a path, or a section with `path` or `gym`."""

    path: Path | None = field(None, "parquet or jsonl file; an entry with nothing else may be the path alone")
    gym: GymConfig | None = field(None, "instead of a path: problems that reasoning-gym generates and scores")

    @model_validator(mode="before")
    @classmethod
    def _from_path(cls, value: Any) -> Any:
        """Accept a plain path."""
        if isinstance(value, str | Path):
            return {"path": value}
        if not isinstance(value, dict | cls):
            raise ValueError("must be a path, as text, or a section with the key path or gym")
        return value

    @model_validator(mode="after")
    def _either(self) -> Self:
        if (self.path is None) == (self.gym is None):
            raise ValueError("must have the key path or the key gym, one of the two")
        return self

    @model_serializer(mode="wrap")
    def _as_given(self, plain: SerializerFunctionWrapHandler) -> Any:
        """Write a section with only a path as that path."""
        values = {key: value for key, value in plain(self).items() if value is not None}
        return values["path"] if list(values) == ["path"] else values


class EvaluationSet(DataEntry):
    """An entry of data.eval."""

    name: str | None = field(
        None, "name in metrics: eval/<name>/avg and so on; null: scores are grouped by the rows' data_source"
    )
    every: int | None = field(
        None,
        "steps between its evaluations (needs a name; its scores do not count in eval/avg); "
        "null: evaluation.every, and its scores count",
        "rollout steps",
        ge=1,
    )
    samples: int | None = field(None, "responses per problem; null: evaluation.samples", "responses", ge=1)


# Arguments of transformers' apply_chat_template that are not template variables.
_RENDERING = frozenset(
    {
        *("conversation", "messages", "tools", "documents", "chat_template"),
        *("add_generation_prompt", "continue_final_message", "tokenize", "tokenizer_kwargs"),
        *("padding", "truncation", "max_length"),
        *("return_tensors", "return_dict", "return_assistant_tokens_mask"),
    }
)


class DataConfig(Section):
    train: tuple[DataEntry, ...] = field(
        (),
        "parquet or jsonl files, with the columns of DAPO-Math, GSM8K, MATH, verl or TRL; "
        "data sets of the hub, owner/name:configuration/split; or sections {gym}",
    )
    eval: tuple[EvaluationSet, ...] = field(
        (), "held-out files, same formats: paths, or sections {path or gym, name, every, samples}"
    )
    prompt_key: str = field(
        "prompt", "column of a text or of messages; else `question`, `problem` or `messages`"
    )
    answer_key: str = field(
        "reward_model.ground_truth",
        "column, dots select nested fields; else `answer`, or what `solution`, `completion` or the last of "
        "`messages` ends in",
    )
    template: Literal["chat", "raw"] = field("chat", "the tokenizer's chat template; raw: contents joined")
    chat_template_kwargs: dict[str, Any] = field(
        {},
        "variables that the chat template is always given, such as `{enable_thinking: false}`",
    )
    prompt_format: str = field("{prompt}", "text put around a plain-text prompt; `{prompt}` is replaced")
    max_prompt_tokens: int = field(2048, "longer prompts are left out and counted", "tokens", ge=1)
    shuffle: bool = field(True, "new order each epoch, from the run's seed")

    @field_validator("chat_template_kwargs")
    @classmethod
    def _free_names(cls, value: dict[str, Any]) -> dict[str, Any]:
        """Refuse arguments of apply_chat_template that megarl sets."""
        if reserved_names := sorted(_RENDERING & value.keys()):
            raise ValueError(f"must not have {reserved_names[0]}, which is set for each conversation")
        return value

    @property
    def has_gym(self) -> bool:
        """Return whether some rows are generated."""
        return any(entry.gym for entry in (*self.train, *self.eval))
