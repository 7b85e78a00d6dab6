"""Equations, inequalities, names and values: what `math` takes for what, each pair as `Answer: ...` against a
reference.

The hypothesis tests draw equations whose relation is known by construction, and answers that a policy would
try instead.
"""

from __future__ import annotations

import ast
import json
import os
import time
from pathlib import Path

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from megarl_verifier.answer import verify_dapo
from megarl_verifier.symbolic import verify_math

TABLE = Path(__file__).parent / "corpus" / "math_verify.jsonl"

RIGHT = [
    ("\\{x | x > 3\\}", "x>3"),
    ("(3,\\infty)", "\\{x \\mid x > 3\\}"),
    ("k=45, n=2", "n=2,k=45"),
    ("(5,2),(7,2)", "p=5,q=2;p=7,q=2"),
    ("p=7,q=2;p=5,q=2", "p=5,q=2;p=7,q=2"),
    ("\\boxed{1} and \\boxed{2}", "1,2"),
    ("x=5+5+1=1/3\\approx 11", "x=1/3"),
    ("-x>-1", "x<1"),
    ("(x,y)=(5,8) \\text{ and } (8,5)", "(5,8),(8,5)"),
    ("z \\in [-3/2,-1] \\cup [1,3/2]", "1 \\le |z| \\le 3/2"),
    ("7:32", "S_{MBCN}:S=7:32"),
    ("x=-5,\\ p=\\frac{14}{3}", "p=14/3,x=-5"),
    ("x = 4", "4"),
    ("4", "x = 4"),
    ("4 = x", "4"),
    ("4=x", "x=4"),
    ("x=4", "x=4"),
    ("X = 4", "x=4"),
    ("2x+4y=6", "x+2y=3"),
    ("3 = x+2y", "x+2y=3"),
    ("-10x+14y-22z-8=0", "5x - 7y + 11z + 4 = 0"),
    ("5x-7y+11z=-4", "5x - 7y + 11z + 4 = 0"),
    ("y = 2x+3", "2x+3"),
    ("2x+3", "y=2x+3"),
    ("y=2x+3", "2x - y + 3 = 0"),
    ("2x-y+3=0", "y=2x+3"),
    ("f(x)=2x+1", "2x+1"),
    ("2x+1", "f(x)=2x+1"),
    ("x=1, x=2", "x = 1 or 2"),
    ("x=2 or x=1", "x = 1 or 2"),
    ("1, 2", "x=1, x=2"),
    ("x=1,2", "1,2"),
    ("x=\\pm 2", "x=2,x=-2"),
    ("x=2 \\text{ or } x=-2", "x=\\pm 2"),
    ("x=1 or x=2", "\\{1,2\\}"),
    ("a=3, b=4", "b=4, a=3"),
    ("(3,4)", "a=3, b=4"),
    ("3, 4", "a=3, b=4"),
    ("a=3, b=4", "(3,4)"),
    ("(x,y)=(1,2)", "x=1,y=2"),
    ("(1,2)", "(x,y)=(1,2)"),
    ("x=2+t", "x = t+2"),
    ("2+t", "x=2+t"),
    ("x=2+t, y=3-t", "y=3-t, x=2+t"),
    ("x > 3", "3 < x"),
    ("x \\ge 3", "x\\geq 3"),
    ("3 < x \\le 5", "3<x\\leq5"),
    ("5 \\ge x > 3", "3<x\\leq5"),
    ("2x+2y<6", "x+y<3"),
    ("-x-y>-3", "x+y<3"),
    ("(3,\\infty)", "x>3"),
    ("(3,5]", "3<x\\leq5"),
    ("m+n = 3+4 = 7", "7"),
    ("x = 2+2 = 4", "4"),
    ("x=2+2=4", "x=4"),
    ("y=2(x+1)=2x+2", "y=2x+2"),
    ("\\sqrt{16} = 4", "4"),
    ("4", "\\sqrt{16}=4"),
    ("x^2/16 + y^2/12 = 1/4", "x^2/4 + y^2/3 = 1"),
    ("0.5x + y = 1", "x+2y=2"),
    ("\\frac{x}{2}+y=1", "x+2y=2"),
    ("$x = 1$ or $x=2$", "x=1,2"),
    ("The equation is $2x+4y=6$.", "x+2y=3"),
    ("the equation is 2x+4y=6.", "x+2y=3"),
    ("x=1,234", "1234"),
    ("x = 1234", "x=1{,}234"),
    ("\\$18.90", "18.9"),
    ("18.9", "\\$18.90"),
    ("$18.90", "18.9"),
    ("\\boxed{\\$16,386.20}", "16386.20"),
    ("\\boxed{\\$5.5}", "5.50"),
    ("\\boxed{$5.5}", "5.50"),
    ("$\\$5.50$", "5.5"),
    ("5.5\\$", "5.50"),
    ("\\boxed{5!}", "120"),
    ("$5!$", "120"),
    ("5!", "5"),
    ("$5$!", "5"),
    ("\\boxed{5}!", "5"),
    ("Paris!", "Paris"),
    ("5!", "5!"),
    ("n!", "n!"),
    ("(n+1)!", "(n+1) n!"),
    ("3*5!", "360"),
    ("120", "5!"),
    ("x = 5!", "5"),
    ("\\text{No}!", "\\text{No}"),
    ("No!", "\\text{No}"),
    ("32, 349", "(32,349)"),
    ("32, 349", "32, 349"),
    ("32,349", "32349"),
    ("1,\\!234", "1234"),
    ("1{,}234", "1234"),
    ("\\vec{v}=(1,2)", "(1,2)"),
    ("A=\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}"),
    ("AB = 5", "5"),
    ("5", "AB=5"),
    ("\\text{Area} = 5", "A=5"),
    ("\\angle ABC = 30^\\circ", "30"),
    ("x=5 \\text{ cm}", "5"),
    ("x = 50\\%", "0.5"),
    ("2x = 8 \\Rightarrow x = 4", "x=4"),
    ("x=2k\\pi, k \\in \\mathbb{Z}", "x = 2\\pi k"),
    ("\\begin{cases} x=1 \\\\ y=2 \\end{cases}", "x=1,y=2"),
    ("\\left\\{\\begin{aligned} x&=1 \\\\ y&=2 \\end{aligned}\\right.", "x=1,y=2"),
    ("xy=2", "2=xy"),
    ("y=\\frac{2}{x}", "xy=2"),
    ("x \\in (1,2)", "(1,2)"),
    ("y = Ce^x", "y=C e^{x}"),
    ("x=3,y=3", "x=y=3"),
    ("\\frac{x-1}{2}=\\frac{y}{3}=z", "z=\\frac{y}{3}=\\frac{x-1}{2}"),
    ("\\frac{dy}{dx} = 2x", "2x"),
    ("r=2\\sin\\theta", "2\\sin\\theta"),
    ("z=1+2i", "1+2i"),
    ("x = \\frac{1}{3}", "x=\\frac{2}{6}"),
    ("x \\approx 3.14", "3.14"),
    ("x \\ne 3", "3 \\neq x"),
    ("P(A)=1/2", "0.5"),
    ("f^{-1}(x)=x-1", "x-1"),
    ("S_n=\\frac{n(n+1)}{2}", "n(n+1)/2"),
    ("x_1=3,x_2=4", "x_{1} = 3, x_{2}=4"),
    ("$x^2+y^2=25$", "x^2+y^2-25=0"),
    ("x^2+y^2=25", "x^{2}+y^{2}=5^2"),
    ("$\\int_0^1 x dx$", "\\int_0^1 x dx"),
    ("y=3-t, x=t+2", "x = 2 + t, y = 3 - t"),
    ("2 + t", "t+2"),
    ("3 \\cdot 5!", "360"),
    ("1,2,3,\\dots", "1, 2, 3, \\dots"),
    ("y = \\frac{5x + 4}{7}", "5x - 7y + 4 = 0"),
]
WRONG = [
    ("3", "\\{x | x > 3\\}"),
    ("5", "x \\equiv 3 \\pmod 5"),
    ("1.2", "\\langle 1,2 \\rangle"),
    ("5", "1+\\dots+5"),
    ("p=5,q=1;p=7,q=2", "p=5,q=2;p=7,q=1"),
    ("(5,1),(7,2)", "p=5,q=2;p=7,q=1"),
    ("\\{x | 2x > 6\\}", "x>3"),
    ("\\boxed{1} and \\boxed{2}", "2"),
    ("x \\equiv 4 \\pmod 5", "x \\equiv 3 \\pmod 5"),
    ("3", "x \\equiv 3 \\pmod 5"),
    ("0", "5x - 7y + 11z + 4 = 0"),
    ("y=4", "x=4"),
    ("y = 4", "x = 4"),
    ("3", "x+2y=3"),
    ("4", "5x - 7y + 11z + 4 = 0"),
    ("x+2y=4", "x+2y=3"),
    ("x-2y=3", "x+2y=3"),
    ("0 = 0", "5x - 7y + 11z + 4 = 0"),
    ("x=x", "x+2y=3"),
    ("x = 3", "x^2=9"),
    ("9", "x^2=9"),
    ("2x+1=9", "x=4"),
    ("x-4=0", "x=4"),
    ("2x=8", "x=4"),
    ("2x+1>7", "x>3"),
    ("x=3", "x>3"),
    ("3", "x>3"),
    ("x\\ge 3", "x>3"),
    ("x<3", "x>3"),
    ("-x>-3", "x>3"),
    ("x=1", "x=1,x=2"),
    ("1", "x=1,2"),
    ("x=1,x=2,x=3", "x=1,2"),
    ("a=4,b=3", "a=3,b=4"),
    ("(4,3)", "a=3,b=4"),
    ("4,3", "a=3,b=4"),
    ("x^2-3x+2=0", "x=1,x=2"),
    ("x+y=3, x-y=-1", "x=1,y=2"),
    ("a=3,b=4", "4"),
    ("a=3 and b=4", "4"),
    ("x=3=4", "3"),
    ("2x+3", "f(x)=2x+1"),
    ("2x+3", "2x-y+3=0"),
    ("y=2x+3", "y=2x+2"),
    ("x+y<3", "x+y>3"),
    ("x+y \\le 3", "x+y<3"),
    ("x+y=3", "x+y<3"),
    ("x+y<3", "x+y=3"),
    ("0", "x(y+1)=0"),
    ("0", "xy=0"),
    ("0", "x(x+1)=0"),
    ("25", "x^2+y^2=25"),
    ("x=y=z", "x=y"),
    ("x = z", "x=y=z"),
    ("z", "x=y=z"),
    ("x=\\frac{z}{3}", "x=\\frac{y-1}{2}=\\frac{z}{3}"),
    ("\\frac{z}{3}", "x=\\frac{y-1}{2}=\\frac{z}{3}"),
    ("\\boxed{5!}", "5"),
    ("$5!$", "5"),
    ("5", "5!"),
    ("n", "n!"),
    ("32, 349", "32349"),
    ("\\boxed{32, 349}", "32349"),
    ("32,\\ 349", "32349"),
    ("x=2", "x=2k\\pi, k \\in \\mathbb{Z}"),
    ("2", "x=2k\\pi, k \\in \\mathbb{Z}"),
    ("x=3", "|x|=3"),
    ("y=x", "y=|x|"),
    ("x+2y=3, x=1", "x+2y=3"),
    ("x+2y=3 or x+2y=4", "x+2y=3"),
    ("x = 4 or 5", "x=4"),
    ("x=4,y=1", "x=4"),
    ("4, 5", "x=4"),
    ("0.01", "\\frac{x}{100}=y"),
    ("x>3 or x<3", "x>3"),
    ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "5"),
    ("2\\begin{pmatrix}1\\\\2\\end{pmatrix}", "5"),
    ("5", "2\\begin{pmatrix}1\\\\2\\end{pmatrix}"),
    ("5x-7y+11z+4", "5x - 7y + 11z + 4 = 0"),
    ("x", "y=2x+3"),
    ("3", "y=2x+3"),
    ("\\text{0}", "x+y=0"),
    ("=", "x+y=0"),
    ("= 0", "x+y=0"),
    ("x+y=", "x+y=0"),
    ("=4", "x+y=4"),
    ("5x=5x", "5x=5y"),
    ("1000000x+999999y=1", "1000000x+1000000y=1"),
    ("$\\int_0^1 x dx$", "\\frac{1}{2}"),
    ("$\\sum_{k=1}^{10} k$", "55"),
]


@pytest.mark.parametrize(("found", "answer"), RIGHT)
def test_right(found: str, answer: str) -> None:
    verdict = verify_math(f"Answer: {found}", answer)
    assert verdict.correct and verdict.extracted


@pytest.mark.parametrize(("found", "answer"), WRONG)
def test_wrong(found: str, answer: str) -> None:
    assert not verify_math(f"Answer: {found}", answer).correct


def test_a_response_without_a_label() -> None:
    assert verify_math("So the line is $2x - y = -3$.", "y = 2x + 3").correct
    assert verify_math("Therefore \\boxed{2x - y + 3 = 0}.", "y = 2x + 3").correct
    assert verify_math("It costs \\$5.50.", "5.5").correct and verify_math("Hence $x = 4$.", "x = 4").correct
    assert not verify_math("So it is $0$.", "2x - y + 3 = 0").correct
    assert not verify_math("We want $2x - y + 3 = 0$, so 0.", "2x - y + 4 = 0").correct


def test_the_protocol_of_dapo_stays_as_it_is() -> None:
    """Its normalisation compares last sides, whatever stands before, and drops `!`, as the reference
    implementation does."""
    for found, answer in (
        ("0", "5x - 7y = 0"),
        ("y=4", "x=4"),
        ("5!", "5"),
        ("32, 349", "32349"),
        ("m+n = 3+4 = 7", "7"),
    ):
        assert verify_dapo(f"Answer: {found}", answer).correct
    assert (
        not verify_dapo("Answer: \\boxed{5!}", "120").correct
        and not verify_dapo("Answer: 5.5", "\\$5.50").correct
    )


def test_votes_are_for_values() -> None:
    votes = [
        verify_math(f"Answer: {found}", "x = 4").extracted
        for found in ("4", "x = 4", "$x=4$", "\\boxed{x = 4}", "4 = x", "8/2")
    ]
    assert votes == ["4"] * 6
    assert verify_math("Answer: $m + n = 3 + 4 = 7$", "9").extracted == "7"
    assert (
        verify_math("Answer: x + 2y = 3", "x + y = 3").extracted
        != verify_math("Answer: x - y = 3", "x + y = 3").extracted
    )


coefficients = st.integers(-99, 99)
factors = st.tuples(st.integers(-30, 30).filter(bool), st.integers(1, 12))


def equation(numbers: list[int], monomials: list[str], right: int) -> str:
    return (
        " ".join(f"{number:+d}{monomial}" for number, monomial in zip(numbers, monomials, strict=True))
        + f" = {right}"
    )


@pytest.mark.slow  # sympy multiplies out some ten equations an example
@settings(deadline=None, max_examples=15)
@given(
    st.lists(coefficients, min_size=3, max_size=3),
    coefficients,
    factors,
    st.sampled_from([["x", "y", "z"], ["x^2", "xy", "y"], ["\\sin x", "y", "x"], ["a", "b^3", "\\sqrt{2}c"]]),
    st.lists(st.booleans(), min_size=4, max_size=4),
    st.integers(0, 3),
    st.integers(-3, 3).filter(bool),
)
@example(
    [0, 1, 1], 0, (1, 1), ["a", "b^3", "\\sqrt{2}c"], [False] * 4, 0, 1
)  # a last letter that could be a unit
def test_equations(
    numbers: list[int],
    right: int,
    factor: tuple[int, int],
    monomials: list[str],
    moved: list[bool],
    which: int,
    change: int,
) -> None:
    """Scaled, with terms on the other side, with sides exchanged: right. One coefficient altered: wrong. A
    side of it: wrong."""
    assume(sum(map(bool, numbers)) >= 2)
    reference = equation(numbers, monomials, right)
    terms = list(zip([*numbers, -right], [*monomials, ""], strict=True))

    def written(terms: list[tuple[int, str]]) -> str:
        above, below = factor
        sides = ["", ""]
        for (number, monomial), away in zip(terms, moved, strict=True):
            scaled = -number * above if away else number * above
            sides[away] += f"{'-' if scaled < 0 else '+'} \\frac{{{abs(scaled)}}}{{{below}}} {monomial} "
        return " = ".join(side or "0" for side in sides)

    same = written(terms)
    assert verify_math(f"Answer: ${same}$", reference).correct, same
    altered = [(n + change * (i == which), m) for i, (n, m) in enumerate(terms)]
    assert not verify_math(f"Answer: ${written(altered)}$", reference).correct or proportional(altered, terms)
    for bare in (
        str(right),
        "0",
        reference.partition(" = ")[0],
        "= 0",
        "0 = 0",
        "x = x",
        f"x = {right}",
        "1 = 1",
    ):
        assert not verify_math(f"Answer: ${bare}$", reference).correct, bare
    assert not verify_math(f"Answer: ${same}, {written(altered)}$", reference).correct


def proportional(a: list[tuple[int, str]], b: list[tuple[int, str]]) -> bool:
    return all(
        p * s == q * r
        for (p, _), (q, _) in zip(a, b, strict=True)
        for (r, _), (s, _) in zip(a, b, strict=True)
    )


@settings(deadline=None, max_examples=10)
@given(
    st.integers(-50, 50), st.integers(-50, 50), st.sampled_from("xyzn"), st.integers(2, 9), st.integers(-9, 9)
)
def test_solutions(value: int, other: int, name: str, a: int, b: int) -> None:
    """A name and its value, either alone and both ways; not another name, another value, or the equation that
    was to be solved."""
    reference = f"{name} = {value}"
    for found, answer in (
        (reference, reference),
        (str(value), reference),
        (reference, str(value)),
        (f"{value} = {name}", reference),
    ):
        assert verify_math(f"Answer: {found}", answer).correct
    wrong = [
        f"k = {value}",
        f"{a}{name} + {b} = {a * value + b}",
        f"{a}{name} = {a * value}",
        f"{name} - ({value}) = 0",
        f"{name} = {name}",
    ]
    for found in wrong:
        assert not verify_math(f"Answer: {found}", reference).correct, found
    if other != value:
        for found in (
            str(other),
            f"{name} = {other}",
            f"{name} = {value}, {name} = {other}",
            f"{name} = {value} or {other}",
        ):
            assert not verify_math(f"Answer: {found}", reference).correct, found
            assert not verify_math(f"Answer: {reference}", found).correct
        both = f"{name} = {other}, {name} = {value}"
        assert verify_math(f"Answer: {name} = {value} or {other}", both).correct
        assert not verify_math(
            f"Answer: {name}^2 - ({value + other}){name} + ({value * other}) = 0", both
        ).correct


@pytest.mark.slow
@settings(deadline=None, max_examples=8)
@given(
    st.lists(coefficients.filter(bool), min_size=2, max_size=2),
    coefficients,
    factors,
    st.sampled_from(["<", ">", "\\le", "\\ge"]),
)
def test_inequalities(numbers: list[int], right: int, factor: tuple[int, int], operator: str) -> None:
    mirrored = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le"}
    above, below = factor
    left, scaled = (f"{p}x + {q}y" for p, q in (numbers, [n * above for n in numbers]))
    kept, turned = (operator, mirrored[operator]) if above > 0 else (mirrored[operator], operator)
    reference = f"{left} {operator} {right}"
    assert verify_math(
        f"Answer: $\\frac{{{scaled}}}{{{below}}} {kept} \\frac{{{right * above}}}{{{below}}}$", reference
    ).correct
    assert not verify_math(
        f"Answer: ${scaled} {turned} {right * above}$", f"{above}({left}) {kept} {right * above}"
    ).correct
    for found in (f"{scaled} = {right * above}", str(right), f"{left} {operator} {right + 1}"):
        assert not verify_math(f"Answer: {found}", reference).correct


@settings(deadline=None, max_examples=25)
@given(
    st.text(st.sampled_from("=<>,;()[]{}|\\$!&: x1y0.-+^_*/ean\n"), max_size=120),
    st.sampled_from(["x + 2y = 3", "x = 4", "x > 1", "1, 2"]),
)
def test_any_text_gets_a_verdict(text: str, answer: str) -> None:
    start = time.process_time()
    for response, reference in ((f"Answer: {text}", answer), (f"Answer: {answer}", text), (text, answer)):
        verify_math(response, reference)
    assert time.process_time() - start < 10


@pytest.mark.parametrize(
    "unit",
    ["x = ", "=", "(x = 1)", "\\text{a}", "1 < ", "x,", "\\frac{x}{y} = ", "is ", "!", "\\left", "$x=1$ "],
)
def test_long_chains_cost_little(unit: str) -> None:
    start = time.process_time()
    for length in (290, 1000, 100_000):
        text = (unit * length)[:length]
        assert not verify_math(f"Answer: {text}7", "x + 2y = 3").correct
        assert not verify_math("Answer: 8", text).correct
    assert time.process_time() - start < 10


def test_a_number_and_a_multiple_of_a_matrix_differ() -> None:
    """sympy recurses without an end over their difference."""
    matrix = "2\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}"
    assert (
        not verify_math("Answer: 5", matrix).correct and not verify_math(f"Answer: ${matrix}$", "5").correct
    )
    assert verify_math(f"Answer: ${matrix}$", "\\begin{pmatrix} 2 \\\\ 4 \\end{pmatrix}").correct


@pytest.mark.slow
def test_math_verifys_own_table() -> None:
    """What `math` says otherwise is known, with the reason, in corpus/math_verify.jsonl and
    docs/verifiers.md."""
    folder = Path(os.environ.get("MATH_VERIFY_TESTS", ""))
    if not (folder / "test_all.py").is_file():
        pytest.skip(
            "MATH_VERIFY_TESTS does not name the folder `tests` of math-verify 0.9.0's source distribution "
            "(not in its wheel)"
        )
    cases = list(math_verify_cases(folder))
    assert len(cases) == 268
    on_one_line = [case for case in cases if "\n" not in case[1]]
    assert len(on_one_line) == 259
    differ = []
    for gold, found, expected in on_one_line:
        if verify_math(f"Answer: {found}", gold).correct != expected:
            differ.append((gold[:60], found[:60], expected))
    known = [
        (row["answer"], row["response"], row["expected"])
        for row in map(json.loads, TABLE.read_text().splitlines())
    ]
    assert sorted(differ) == sorted(known)


def math_verify_cases(folder: Path) -> list[tuple[str, str, bool]]:
    """(reference, response, whether it is right) of every parametrized case with these three that is written
    out in `folder`."""
    cases = []
    for file in sorted(folder.glob("test_*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if not (isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "parametrize"):
                continue
            try:
                names, rows = (ast.literal_eval(argument) for argument in node.args)
            except ValueError:  # computed ones
                continue
            names = [name.strip() for name in names.split(",")]
            if (
                names[:2] == ["gold", "pred"]
                and names[2] in ("expected", "result")
                and "allow_set_relation_comp" not in names
            ):
                cases += [(row[0], row[1], bool(row[2])) for row in rows]
    return cases


def test_the_known_differences_are_explained() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "verifiers.md").read_text()
    rows = [json.loads(line) for line in TABLE.read_text().splitlines()]
    assert len(rows) == 23 and all(f"| {row['reason']} |" in page for row in rows)
    assert f"{len(rows)} of 259" in page
