"""reasoning-gym's scorers as a verifier: answers in tags, entries as they were generated, graded scores, and
what a scorer does that raises."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.config.schema import GymConfig
from megarl.data.generated import reference_to
from megarl.rewards import VerifierPool
from megarl_tasks.gym import VERIFIER, GeneratedRow, generate

pytestmark = pytest.mark.skipif(
    find_spec("reasoning_gym") is None, reason="reasoning-gym is not installed (pip install 'megarl[gym]')"
)
# rearc compares tuples, graph_color looks up keys that are numbers, and it and propositional_logic name no
# answer.
TASKS = ["lcm", "rearc", "graph_color", "propositional_logic", "prime_factorization", "letter_jumble"]


@pytest.fixture(scope="module")
def rows() -> dict[str, GeneratedRow]:
    made = generate({"data.train[0].gym": GymConfig.model_validate({"tasks": TASKS, "size": len(TASKS)})})
    return {row.task: row for row in made}


def test_scores_in_the_pool(rows: dict[str, GeneratedRow]) -> None:
    """Beside answers for reward.verifier, in workers that have the scorers from their start on."""
    items = [
        (f"<answer>0</answer> <answer> {row.answer}\n</answer>.", reference_to(row.answer, row.entry))
        for row in rows.values()
    ]
    jumbled = reference_to(rows["letter_jumble"].answer, rows["letter_jumble"].entry)
    half = f"{rows['letter_jumble'].answer.split()[0]} and no more"
    with VerifierPool("dapo", entry_verifiers=[VERIFIER]) as pool:
        verdicts = pool.verify(
            [*items, (f"<answer>{half}</answer>", jumbled), ("Answer: 7", jumbled), ("Answer: 7", "7")]
        )
        [with_terms] = pool.verify([(*items[0], 5, 9, False)])
    right, (partly, untagged, by_dapo) = verdicts[: len(items)], verdicts[len(items) :]
    assert [(one.correct, one.score, one.error) for one in right] == [(True, 1.0, None)] * len(items)
    assert right[0].extracted == rows["lcm"].answer and with_terms.correct
    assert not partly.correct and partly.score is not None and 0 < partly.score < 1 and partly.graded
    assert partly.reward(1.0, 0.0) == partly.score
    assert (untagged.correct, untagged.score, untagged.extracted, untagged.graded) == (False, 0.0, None, True)
    assert by_dapo.correct and by_dapo.score is None and by_dapo.reward(1.0, -1.0) == 1.0


def test_a_scorer_that_raises(rows: dict[str, GeneratedRow]) -> None:
    """An answer on which only its scorer raises is wrong, or a policy would learn to write such answers.

    If the scorer also raises for the known answer, the response is ungraded."""
    row = rows["prime_factorization"]
    broken = {**json.loads(row.entry), "entry": {}}
    with VerifierPool("dapo", entry_verifiers=[VERIFIER]) as pool:
        refused, failed = pool.verify(
            [
                ("<answer>two</answer>", reference_to(row.answer, row.entry)),
                (f"<answer>{row.answer}</answer>", reference_to(row.answer, json.dumps(broken))),
            ]
        )
    assert not refused.correct and refused.graded and refused.extracted == "two"
    assert refused.error and refused.error.startswith(
        "prime_factorization: its scorer refuses the answer: ValueError:"
    )
    assert not failed.graded and failed.error == "KeyError: 'answer'"


def test_entries_as_they_were(rows: dict[str, GeneratedRow]) -> None:
    from fractions import Fraction

    import numpy as np

    from megarl_tasks.gym_scorer import make_task, pack_entry, unpack_entry

    task = make_task("rearc", {}, seed=0, size=1)
    for entry in (
        task[0],
        {"a": {1: (2, [3.5, None])}, "$b": {"x", "y"}, "c": Fraction(1, 3), "d": True, "e": {"$tuple": [1]}},
    ):
        kept = unpack_entry(pack_entry("rearc", {}, entry, "7"))
        assert repr_sorted(kept["entry"]) == repr_sorted(entry)
    numbers = unpack_entry(
        pack_entry("rearc", {}, {"a": np.int64(3), "b": np.float64(0.5), "c": np.str_("x")}, "")
    )
    assert repr(numbers["entry"]) == "{'a': 3, 'b': 0.5, 'c': 'x'}"
    with pytest.raises(TypeError, match=r"^builtins\.object cannot be kept as JSON$"):
        pack_entry("rearc", {}, {"a": object()}, "")


def repr_sorted(value: object) -> str:
    """A text that tells tuples from lists and 1 from 1.0 and True, whatever the order of sets."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{one!r}: {repr_sorted(value[one])}' for one in value)}}}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}({', '.join(map(repr_sorted, value))})"
    return f"set({sorted(map(repr, value))})" if isinstance(value, set) else repr(value)


PIECES = st.lists(
    st.sampled_from(["<answer>", "</answer>", "<answer", "4", " ", "\n", "<", "/answer>"]), max_size=12
)


@settings(max_examples=300, deadline=None)
@given(pieces=PIECES)
def test_answers_are_extracted_as_by_reasoning_gym(pieces: list[str]) -> None:
    from reasoning_gym.utils import extract_answer

    from megarl_tasks.gym_scorer import extract_answer as ours

    assert ours("".join(pieces)) == extract_answer("".join(pieces))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_task() -> None:
    """All that are registered: the same rows twice, the known answer right, no score outside 0 and 1, and no
    answer that a scorer would leave ungraded."""
    from megarl_tasks.gym_scorer import make_task, tasks_by_kind, unpack_entry, verify

    names = [name for names in tasks_by_kind().values() for name in names]
    assert len(names) == 105
    entry = GymConfig.model_validate({"tasks": names, "size": 3 * len(names)})
    first, second = (list(generate({"data.eval[0].gym": entry})) for _ in range(2))
    assert first == second and not [row.problem for row in first if row.problem]
    untold = set()
    for row in first:
        if row.answer:
            verdict = verify(f"It is <answer>{row.answer}</answer>", row.entry)
            assert verdict.correct and verdict.score == 1.0, (row.task, row.index, verdict)
            kept = unpack_entry(row.entry)
            scorer = make_task(row.task, kept["parameters"], 0, 1)
            assert scorer.score_answer(row.answer, kept["entry"]) == 1.0  # without a grammar before it
        else:
            untold.add(row.task)
        for wrong in ("", "zzz", "0", "[1, 2]", '{"a": 1}', "(("):
            verdict = verify(f"<answer>{wrong}</answer>", row.entry)
            assert verdict.error or (verdict.score is not None and 0 <= verdict.score <= 1), (row.task, wrong)
    assert untold == {"boxnet", "rush_hour"}
