"""The rollouts' part of a checkpoint keeps its keys and their meaning when fields are renamed."""

from __future__ import annotations

import json
from typing import Any

from megarl.data.sample import TokenData
from megarl.rollout.state import join_shares, load_state

# As written by a run from before the types of megarl/data/sample.py existed.
STATE: dict[str, Any] = {
    "surplus": [
        {
            "prompt": {
                "uid": 11,
                "text": "1+2=?",
                "tokens": [1, 2],
                "answer": "3",
                "source": "sums",
                "extra": {"row": 0},
                "question": "1+2",
                "entry": "",
            },
            "responses": [
                {
                    "finish": "stop",
                    "correct": True,
                    "extracted": "3",
                    "error": None,
                    "reward": 0.75,
                    "penalty": -0.25,
                    "score": 1.0,
                    "terms": {"short": 0.5},
                    "judged": True,
                    "reflects": False,
                    "turns": 2,
                    "calls": 1,
                    "begun": 0,
                    "tokens": [5, 6, 9],
                    "logprobs": [-0.5, 0.0, -1.5],
                    "versions": [3, 0, 4],
                    "sampled": [True, False, True],
                    "rewards": [0.0, 0.0, 0.25],
                    "routing": ["uint8", [5, 1, 2], "AAECAwQFBgcICQ=="],
                },
                {
                    "finish": "length",
                    "correct": False,
                    "extracted": None,
                    "error": "timeout after 10 s",
                    "reward": -1.0,
                    "penalty": 0.0,
                    "score": None,
                    "terms": {},
                    "judged": False,
                    "reflects": False,
                    "turns": 1,
                    "calls": 0,
                    "begun": 0,
                    "tokens": [7],
                    "logprobs": [-2.0],
                    "versions": None,
                    "sampled": None,
                    "rewards": None,
                    "routing": None,
                },
            ],
            "version": 4,
        }
    ],
    "returned": [
        {
            "prompt": {
                "uid": 12,
                "text": "a",
                "tokens": [1],
                "answer": "b",
                "source": "",
                "extra": {},
                "question": "",
                "entry": "",
            },
            "seeds": [101, 102],
            "begun": [
                {
                    "tokens": [8, 9],
                    "logprobs": [-0.5, -0.75],
                    "finish": "abort",
                    "versions": [3, 4],
                    "routing": None,
                    "sampled": [True, True],
                    "rewards": [0.1, 0.0],
                    "journal": [["turn", 2, "abort"]],
                },
                None,
            ],
        },
        {
            "prompt": {
                "uid": 13,
                "text": "c",
                "tokens": [2],
                "answer": "d",
                "source": "",
                "extra": {},
                "question": "",
                "entry": "",
            },
            "seeds": [103],
            "begun": [],
        },
    ],
    "lengths": [[11, 2.5]],
}


def test_an_old_checkpoint_is_read_and_written_with_the_same_keys() -> None:
    loaded = load_state(STATE, rank=0, engines=1, ranks_per_engine=1)
    (group,) = loaded.surplus
    first, second = group.samples
    assert (group.prompt.uid, group.policy_version, [first.id, second.id]) == (11, 4, [1, 2])
    assert loaded.graded == {1: first, 2: second} and loaded.lengths == {11: 2.5} and loaded.next_id == 5
    assert first.data == TokenData(
        [5, 6, 9],
        [-0.5, 0.0, -1.5],
        "stop",
        [3, 0, 4],
        first.data and first.data.routed_experts,
        [True, False, True],
        [0.0, 0.0, 0.25],
    )
    assert first.data.routed_experts is not None
    assert first.data.routed_experts.ravel().tolist() == list(range(10))
    assert (first.num_sampled, first.num_tokens, first.oldest_version) == (2, 3, 3)
    assert (first.correct, first.extracted, first.score, first.terms) == (True, "3", 1.0, {"short": 0.5})
    assert (first.reward, first.overlong_penalty, first.turns, first.calls) == (0.75, -0.25, 2, 1)
    assert (first.has_turn_rewards, first.experts_format) == (True, ("uint8", (1, 2)))
    assert (second.is_truncated, second.graded, second.error) == (True, False, "timeout after 10 s")
    assert loaded.partials == {
        3: TokenData(
            [8, 9],
            [-0.5, -0.75],
            policy_versions=[3, 4],
            is_sampled=[True, True],
            turn_rewards=[0.1, 0.0],
            journal=[["turn", 2, "abort"]],
        )
    }
    assert [(r.prompt.uid, r.seeds, r.first_id, r.engine_by_response) for r in loaded.returned] == [
        (12, [101, 102], 3, [0, None]),
        (13, [103], None, ()),
    ]
    graded = {i: sample.data for i, sample in loaded.graded.items()}
    share = {"graded": graded, "partials": loaded.partials, "surplus": loaded.surplus}
    share |= {"returned": loaded.returned, "lengths": loaded.lengths}
    assert json.loads(json.dumps(join_shares([share]))) == STATE
