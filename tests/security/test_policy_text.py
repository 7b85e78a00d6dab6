"""A policy's text is data: reasoning-gym's scorers, some of which evaluate it, never run it as code."""

from __future__ import annotations

import ast
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from megarl.config.schema import GymConfig

pytestmark = pytest.mark.skipif(
    find_spec("reasoning_gym") is None, reason="reasoning-gym is not installed (pip install 'megarl[gym]')"
)
EVALUATED = [
    *("binary_matrix", "n_queens", "spiral_matrix", "string_insertion", "countdown", "puzzle24"),
    *("polynomial_multiplication", "simple_integration", "intermediate_integration"),
]
PAYLOADS = [
    "open({0!r}, 'w')",
    "__import__('os').system('touch {0}')",
    "(lambda: open({0!r}, 'w'))()",
    "[open({0!r}, 'w') for _ in (1,)]",
    "[x := open({0!r}, 'w'), 1]",
    "f'{{open({0!r}, \"w\")}}'",
    "{{**{{1: open({0!r}, 'w')}}}}",
    "().__class__.__base__.__subclasses__()[0].__init__.__globals__ or open({0!r}, 'w')",
    "[c for c in ().__class__.__mro__[1].__subclasses__() if open({0!r}, 'w')]",
    "1 if open({0!r}, 'w') else 2",
    "x*0 + exec(\"open({0!r}, 'w')\")",
    "sin(open({0!r}, 'w'))",
    "(open({0!r}, 'w'))!",
    "lambda x: open({0!r}, 'w')",
    "sqrt(x, **{{'a': open({0!r}, 'w')}})",
    "[1, 2][open({0!r}, 'w').fileno()]",
    "eval(chr(111)+chr(112))",
    "sympify(\"open({0!r}, 'w')\")",
    "Symbol(open({0!r}, 'w').name)",
    "1 + \\\nopen({0!r}, 'w').fileno()",
]
# What a policy may answer by rights, and the scorer's mark for it.
HONEST = {
    "binary_matrix": lambda answer: json.dumps([[int(x) for x in row.split()] for row in answer.split("\n")]),
    "spiral_matrix": lambda answer: json.dumps([int(x) for x in answer.split()]),
    "string_insertion": lambda answer: repr(list(answer)),
    "n_queens": lambda answer: repr([row.split() for row in answer.split("\n")]),
    "countdown": lambda answer: f"({answer})",
    "puzzle24": lambda answer: f" +({answer})",
    "polynomial_multiplication": lambda answer: f"0 + {answer}*1",
    "simple_integration": lambda answer: answer.replace("C", "7/2"),
    "intermediate_integration": lambda answer: f"{answer} - k + sqrt(2)",
    "coin_flip": lambda answer: f"+{answer}",
}


@pytest.fixture(scope="module")
def rows() -> dict[str, list[Any]]:
    from megarl_tasks.gym import generate

    made: dict[str, list[Any]] = {}
    entry = GymConfig.model_validate({"tasks": list(HONEST), "size": 8 * len(HONEST)})
    for row in generate({"data.train[0].gym": entry}):
        made.setdefault(row.task, []).append(row)
    return made


@pytest.mark.parametrize("task", EVALUATED)
def test_answers_are_not_run(rows: dict[str, list[Any]], task: str, tmp_path: Path) -> None:
    from megarl_tasks.gym_scorer import verify

    marker = tmp_path / "taken"
    for payload in PAYLOADS:
        text = payload.format(str(marker))
        verdict = verify(f"<answer>{text}</answer>", rows[task][0].entry)
        assert not marker.exists(), text
        assert not verdict.correct and verdict.graded and (verdict.score or 0) < 0.1, (text, verdict)
    code = verify("<answer>open('taken', 'w')</answer>", rows[task][0].entry)
    assert code.error == f"{task}: the answer is code (Call), which is not run"


def test_the_question_is_no_answer(rows: dict[str, list[Any]]) -> None:
    """An integral that is written down again differentiates to its integrand."""
    from megarl_tasks.gym_scorer import unpack_entry, verify

    for row in rows["intermediate_integration"]:
        metadata = unpack_entry(row.entry)["entry"]["metadata"]
        again = f"Integral({metadata['integrand']}, {metadata['variable']})"
        assert raw_score(row, again) == 1.0
        assert not verify(f"<answer>{again}</answer>", row.entry).correct


def raw_score(row: Any, answer: str) -> float:
    from megarl_tasks.gym_scorer import make_task, unpack_entry

    kept = unpack_entry(row.entry)
    return float(make_task(kept["task"], kept["parameters"], 0, 1).score_answer(answer, kept["entry"]))


@pytest.mark.parametrize("task", list(HONEST))
def test_honest_answers_score_as_before(rows: dict[str, list[Any]], task: str) -> None:
    from megarl_tasks.gym_scorer import verify

    for row in rows[task]:
        # Some known answers are integrals that sympy has not solved: right, but nobody else's answer.
        other = HONEST[task](row.answer) if "Integral" not in row.answer else row.answer
        for answer in (row.answer, other, "prose, no answer", "1", "[1, 2]"):
            verdict = verify(f"<answer>{answer}</answer>", row.entry)
            assert verdict.score == raw_score(row, answer) and verdict.error is None, (answer, verdict)
        assert raw_score(row, other) >= 0.1


@pytest.mark.parametrize(
    ("task", "answer"),
    [
        ("countdown", "9**9**9"),
        ("puzzle24", "((9**99)**99)**99"),
        ("simple_integration", "(((2*X)**99)**99)**99"),
        ("polynomial_multiplication", "-" * 5000 + "1"),
        ("polynomial_multiplication", "(" * 5000 + "1" + ")" * 5000),
        ("spiral_matrix", "[" * 5000 + "]" * 5000),
        ("binary_matrix", "1" * 5000),
        ("countdown", "1e999999999"),
        ("coin_flip", "1e99999999"),
        ("coin_flip", "1e999"),
        ("coin_flip", "1/0"),
    ],
)
@pytest.mark.timeout(60)
def test_answers_that_would_eat_time_or_memory(rows: dict[str, list[Any]], task: str, answer: str) -> None:
    from megarl_tasks.gym_scorer import verify

    verdict = verify(f"<answer>{answer}</answer>", rows[task][0].entry)
    assert not verdict.correct and verdict.graded


@pytest.mark.parametrize(
    ("task", "answer"),
    [
        ("countdown", "({sum})*(y-y)+{target}*(y/y)"),
        ("puzzle24", "6*4*1*1"),
        ("coin_flip", "0"),
        ("complex_arithmetic", "nan"),
        ("complex_arithmetic", "nan + nanj"),
        ("number_sorting", "[{nans}]"),
        ("game_of_life_halting", "banana"),
    ],
)
def test_wrong_answers_that_the_scorer_itself_finds_right(task: str, answer: str) -> None:
    from megarl_tasks.gym_scorer import known_answer, make_task, pack_entry, verify

    made = make_task(task, {}, seed=5, size=6)
    for number in range(6):
        entry = made[number]
        numbers = entry["metadata"].get("numbers", []) if task in ("countdown", "puzzle24") else []
        if task == "puzzle24" and sorted(numbers) == [1, 1, 4, 6]:
            continue
        text = answer.format(
            sum="+".join(map(str, numbers)),
            target=entry["metadata"].get("target"),
            nans=", ".join(["NaN"] * entry["answer"].count("'") if "'" in entry["answer"] else ["NaN"]),
        )
        known = known_answer(made, entry)
        packed = pack_entry(task, {}, entry, known)
        assert not verify(f"<answer>{text}</answer>", packed).correct, text
        assert verify(f"<answer>{known}</answer>", packed).correct


# What evaluates text, or may be made to take very long by a short one. sympy's functions parse texts.
EVALUATING = {"eval", "exec", "compile", "parse_expr", "sympify", "parse_latex", "literal_eval", "Fraction"}
EVALUATING |= {"lambdify", "import_module", "__import__", "system", "Popen", "loadtxt", "safe_load", "loads"}
# (file, function, call): why it may stay beside the grammars.
KNOWN = {
    **dict.fromkeys(
        [
            *[("algorithmic/game_of_life.py", "score_answer", "json.loads")],
            *[("algorithmic/graph_color.py", "score_answer", "json.loads")],
            *[("algorithmic/group_anagrams.py", "score_answer", "json.loads")],
            *[("algorithmic/jugs.py", "score_answer", "json.loads")],
            *[("algorithmic/palindrome_partitioning.py", "score_answer", "json.loads")],
            *[("code/codeio.py", "score_answer", "json.loads")],
            *[("games/boxnet.py", "score_answer", "json.loads")],
            *[("games/knight_swap.py", "score_answer", "json.loads")],
        ],
        "JSON, which runs nothing; a deep one raises RecursionError",
    ),
    ("algorithmic/pool_matrix.py", "score_answer", "np.loadtxt"): "numbers, one a word",
    ("arithmetic/bitwise_arithmetic.py", "verify_solution", "eval"): "of the entry's own problem",
    ("logic/propositional_logic.py", "parse_expr", "parse_expr"): "the module's own parser, of letters",
    ("logic/propositional_logic.py", "from_string", "parse_expr"): "the module's own parser, of letters",
}


@pytest.mark.slow
def test_no_other_scorer_evaluates_text() -> None:
    """A version of reasoning-gym with a new one fails here, before it is used."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    from megarl_tasks.gym_answers import GRAMMARS

    root = Path(reasoning_gym.__file__).parent
    guarded = {DATASETS[task][0].__module__ for task in GRAMMARS}
    found = set()
    scorers = 0
    for file in root.rglob("*.py"):
        name = str(file.relative_to(root))
        tree = ast.parse(file.read_text(encoding="utf-8"))
        functions = {
            node.name: node
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        if "score_answer" not in functions:
            continue
        scorers += 1
        if "reasoning_gym." + name.removesuffix(".py").replace("/", ".") in guarded:
            continue
        # All that score_answer may reach in its file, by name.
        reached, new = set[str](), {"score_answer"}
        while new:
            reached |= new
            names = {
                part
                for function in new
                for node in ast.walk(functions[function])
                for part in (getattr(node, "attr", None), getattr(node, "id", None))
            }
            new = {one for one in functions if one in names} - reached
        for function in reached:
            for node in ast.walk(functions[function]):
                if isinstance(node, ast.Call):
                    called = ast.unparse(node.func)
                    if called.rpartition(".")[2] in EVALUATING:
                        found.add((name, function, called))
    assert scorers > 70
    assert found == set(KNOWN)
    # Other modules' helpers: scorers share these only, and none of them evaluates.
    for file in ("utils.py", "arc/board_format.py", "dataset.py"):
        calls = [
            node for node in ast.walk(ast.parse((root / file).read_text())) if isinstance(node, ast.Call)
        ]
        assert not {ast.unparse(node.func).rpartition(".")[2] for node in calls} & EVALUATING, file
