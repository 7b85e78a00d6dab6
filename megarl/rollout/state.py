"""The state of rollouts between steps, as JSON in a checkpoint.

Its keys do not change when fields are renamed, see SAMPLE_KEYS and TOKEN_KEYS."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

import numpy as np
from msgspec import structs

from megarl.data.prompts import Prompt
from megarl.data.sample import Sample, SampleGroup, TokenData
from megarl.rollout.controller import GroupRequest

SAMPLE_KEYS = {
    "finish_reason": "finish",
    "correct": "correct",
    "extracted": "extracted",
    "error": "error",
    "reward": "reward",
    "overlong_penalty": "penalty",
    "score": "score",
    "terms": "terms",
    "graded": "judged",
    "reflects": "reflects",
    "turns": "turns",
    "calls": "calls",
    "prefix_tokens": "begun",
    "judge": "judge",
}
TOKEN_KEYS = {
    "tokens": "tokens",
    "logprobs": "logprobs",
    "policy_versions": "versions",
    "is_sampled": "sampled",
    "turn_rewards": "rewards",
}


class RolloutShare(TypedDict, total=False):
    """Tokens on a rank other than the first, by sample id."""

    graded: dict[int, TokenData | None]
    partials: dict[int, TokenData]


def pack_journal(data: TokenData) -> TokenData:
    """Return tokens with their journal as one JSON text, see `pack_prompt`."""
    return structs.replace(data, journal=[json.dumps(data.journal)]) if data.journal else data


def unpack_journal(data: TokenData) -> TokenData:
    return structs.replace(data, journal=json.loads(data.journal[0])) if data.journal else data


def join_shares(shares: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the shares of all ranks, in order, into one state."""
    if not shares:
        return {}
    graded, partials = dict(shares[0]["graded"]), dict(shares[0]["partials"])
    for share in shares[1:]:
        graded |= {i: data and unpack_journal(data) for i, data in share["graded"].items()}
        partials |= {i: unpack_journal(data) for i, data in share["partials"].items()}
    return {
        "surplus": [
            group_state(group, [graded.get(sample.id) for sample in group.samples])
            for group in shares[0]["surplus"]
        ],
        "returned": [_request_state(request, partials) for request in shares[0]["returned"]],
        "lengths": list(shares[0]["lengths"].items()),
    }


@dataclass
class LoadedState:
    """A rank's result of `load_state`. graded, partials: by sample id"""

    surplus: list[SampleGroup] = field(default_factory=list)
    returned: list[GroupRequest] = field(default_factory=list)
    lengths: dict[int, float] = field(default_factory=dict)
    graded: dict[int, Sample] = field(default_factory=dict)
    partials: dict[int, TokenData] = field(default_factory=dict)
    next_id: int = 1


def load_state(state: Mapping[str, Any], rank: int, engines: int, ranks_per_engine: int) -> LoadedState:
    """Invert `join_shares` for one rank. Engines get equal shares of samples."""
    loaded_state = LoadedState(lengths=dict(state.get("lengths", ())))
    for i, entry in enumerate(state["surplus"]):
        owner = i % engines * ranks_per_engine
        group = group_from_state(entry, owner)
        for sample in group.samples:
            sample.id, loaded_state.next_id = loaded_state.next_id, loaded_state.next_id + 1
            if owner == rank:
                loaded_state.graded[sample.id] = sample
        loaded_state.surplus.append(group)
    for i, entry in enumerate(state.get("returned", ())):
        engine, prompt, seeds = i % engines, _prompt_from_state(entry["prompt"]), entry["seeds"]
        if not entry["begun"]:
            loaded_state.returned.append(GroupRequest(prompt, seeds))
            continue
        first_id = loaded_state.next_id
        for j, response in enumerate(entry["begun"]):
            if response and engine * ranks_per_engine == rank:
                loaded_state.partials[first_id + j] = _token_data(
                    response, response["finish"], response.get("journal", ())
                )
        engine_by_response = [engine if response else None for response in entry["begun"]]
        loaded_state.returned.append(
            GroupRequest(prompt, seeds, first_id=first_id, engine_by_response=engine_by_response)
        )
        loaded_state.next_id += len(seeds)
    return loaded_state


def group_state(group: SampleGroup, tokens: Sequence[TokenData | None] | None = None) -> dict[str, Any]:
    """Return a group for JSON. tokens: of its samples; None: `Sample.data`"""
    responses = []
    for sample, data in zip(group.samples, tokens or [s.data for s in group.samples], strict=True):
        assert data is not None
        fields = {key: getattr(sample, name) for name, key in SAMPLE_KEYS.items()}
        if not sample.judge:  # without a judge, the keys are those of earlier versions
            del fields["judge"]
        responses.append(fields | _token_state(data))
    return {"prompt": _prompt_state(group.prompt), "responses": responses, "version": group.policy_version}


def group_from_state(state: Mapping[str, Any], owner: int = 0) -> SampleGroup:
    """Invert `group_state`. owner: rank that keeps the tokens"""
    samples = []
    for response in state["responses"]:
        fields = {name: response[key] for name, key in SAMPLE_KEYS.items() if key in response}
        finish = response["finish"] if response["finish"] != "window" else "abort"
        samples.append(Sample.from_data(_token_data(response, finish), owner, **fields))
    return SampleGroup(_prompt_from_state(state["prompt"]), samples, state["version"])


def _request_state(request: GroupRequest, partials: Mapping[int, TokenData]) -> dict[str, Any]:
    token_states: list[dict[str, Any] | None] = []
    if request.first_id is not None:
        for sample_id in range(request.first_id, request.first_id + len(request.seeds)):
            if (data := partials.get(sample_id)) is None:
                token_states.append(None)
            else:
                fields = {"finish": data.finish_reason, "journal": data.journal}
                token_states.append(_token_state(data) | fields)
    return {"prompt": _prompt_state(request.prompt), "seeds": list(request.seeds), "begun": token_states}


def _prompt_state(prompt: Prompt) -> dict[str, Any]:
    return vars(prompt) | {"tokens": list(prompt.tokens)}


def _prompt_from_state(state: Mapping[str, Any]) -> Prompt:
    return Prompt(**{**state, "tokens": tuple(state["tokens"])})


def _token_state(data: TokenData) -> dict[str, Any]:
    columns = {key: getattr(data, name) for name, key in TOKEN_KEYS.items()}
    experts, routing = data.routed_experts, None
    if experts is not None:
        routing = [str(experts.dtype), experts.shape, base64.b64encode(experts.tobytes()).decode()]
    lists = {key: None if column is None else column.tolist() for key, column in columns.items()}
    if (sets := data.sampling_sets) is not None:
        lists["sets"] = [sets.shape[1], base64.b64encode(sets.astype("<i4").tobytes()).decode()]
    return lists | {"routing": routing}


def _token_data(saved: Mapping[str, Any], finish_reason: Any, journal: Sequence[Any] = ()) -> TokenData:
    columns: dict[str, Any] = {name: saved.get(key) for name, key in TOKEN_KEYS.items()}
    if saved.get("routing") is not None:
        dtype, shape, encoded = saved["routing"]
        columns["routed_experts"] = np.frombuffer(base64.b64decode(encoded), dtype=dtype).reshape(shape)
    if saved.get("sets") is not None:
        width, encoded = saved["sets"]
        columns["sampling_sets"] = np.frombuffer(base64.b64decode(encoded), dtype="<i4").reshape(-1, width)
    return TokenData(finish_reason=finish_reason, journal=[*journal], **columns)
