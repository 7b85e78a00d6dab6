"""Parse formulas and compare their values, with letters at random points.

Refuses bases, primes and transposed numbers, which `latex2sympy2_extended` drops or guesses. Huge numbers,
such as `9^{9^9}`, are never evaluated."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from math import inf, log10
from typing import Any, TypeVar

import sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, NormalizationConfig, normalize_latex
from latex2sympy2_extended.latex2sympy2 import _Latex2Sympy as Latex2Sympy
from math_verify import verify
from math_verify.grader import should_treat_as_complex
from sympy import Basic, Derivative, Expr, Float, Integer, Interval, MatrixBase, Pow, Rational, Symbol
from sympy.core.function import AppliedUndef
from sympy.functions.elementary.trigonometric import InverseTrigonometricFunction

T = TypeVar("T")

_NORMALIZATION = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=False, nits=True, boxed="none"
)
_UNDONE = (sympy.Integral, sympy.Sum, sympy.Product, sympy.Limit, Derivative)  # never evaluated
_MAX_DIGITS = 5000  # of an intermediate number
# sympy slowly raises denominators to their root's degree.
_MAX_ROOT_DIGITS = 100_000
_GUARD_DIGITS = 50  # beyond those of a formula's numbers
_SLOW_DIGITS = 200  # more take seconds in gamma functions or floor(x^x)
_LOST_DIGITS = 20  # lost to rounding at most
_LARGEST, _SMALLEST = 3.0, 0.2  # of letters
_POINTS, _TRIES, _ENOUGH = 8, 40, 3
_SCALES, _CONSTANTS = (10, 100, 1000), 8  # for functions like |x|
_BENT = (
    sympy.Abs, sympy.Max, sympy.Min, sympy.floor, sympy.ceiling, sympy.sign, sympy.Mod,
    InverseTrigonometricFunction,
)  # fmt: skip


class Unreadable(Exception):
    """A part cannot be parsed, or a number is too large."""


class _Undefined(Exception):
    """A formula has no real value at a point."""


class _Parser(Latex2Sympy):
    def __init__(self, *, is_real: bool) -> None:
        super().__init__(is_real=is_real, config=ConversionConfig(lowercase_symbols=False))

    def convert_postfix_list(self, arr: Any, i: int = 0) -> Any:
        """Multiply `(2)(3)`, which the parent reads as a mixed number, 5."""
        left = self.convert_postfix(arr[i])
        if isinstance(left, list) or i == len(arr) - 1:
            return super().convert_postfix_list(arr, i)
        right = self.convert_postfix_list(arr, i + 1)
        has_matrix = getattr(left, "is_Matrix", False) or getattr(right, "is_Matrix", False)
        return self.mat_mul_flat(left, right) if has_matrix else self.mul_flat(left, right)

    def convert_postfix(self, postfix: Any) -> Any:
        value = super().convert_postfix(postfix)
        for op in postfix.postfix_op():
            if op.degree() or op.eval_at() or (op.transpose() and not getattr(value, "is_Matrix", False)):
                raise Unreadable
        return value

    def convert_atom(self, atom: Any) -> Any:
        if (number := atom.number_subexpr()) and number.subexpr():
            raise Unreadable
        return super().convert_atom(atom)

    def convert_comp(self, comp: Any) -> Any:
        if comp.dot_product():
            raise Unreadable
        return super().convert_comp(comp)

    def convert_interval(self, expr: Any) -> Any:
        """Refuse ends that are equal roots in different forms, which sympy compares slowly."""
        ends = [self.convert_expr(end) for end in expr.expr()]
        names = sorted({symbol.name for end in ends for symbol in end.free_symbols})
        point = near_point(names, random.Random(0), _GUARD_DIGITS)
        for end in ends:
            _check_size(end)
        values = [attempt(_evaluate, end, point, str, _GUARD_DIGITS, False) for end in ends]
        are_exact = isinstance(values[0], Rational) and isinstance(values[1], Rational)
        if None not in values and not are_exact and _close(values[0], values[1], _GUARD_DIGITS):
            raise Unreadable
        return super().convert_interval(expr)

    def convert_binom(self, binom: Any) -> Any:
        upper, lower = self.convert_expr(binom.upper), self.convert_expr(binom.lower)
        return sympy.binomial(upper, lower, evaluate=False)

    def convert_func(self, func: Any) -> Any:
        if func.FUNC_SQRT() and func.root:
            _check_size(self.convert_expr(func.root))
        return super().convert_func(func)

    def handle_gcd_lcm(self, f: str, args: Any) -> Any:
        for argument in args:
            if argument.free_symbols:  # sympy returns 1
                raise Unreadable
            _check_size(argument)
        return super().handle_gcd_lcm(f, args)


def parse(formula: str) -> Basic | MatrixBase:
    text = normalize_latex(formula, _NORMALIZATION)
    try:
        value = _Parser(is_real=not should_treat_as_complex(text)).parse(text)
    except MemoryError:  # the pool's limit
        raise
    except Exception as error:  # the parser raises any class
        raise Unreadable from error
    if not isinstance(value, Basic | MatrixBase):
        raise Unreadable
    _check_size(value)
    return value


def equal(gold: Basic | MatrixBase, mine: Basic | MatrixBase) -> bool:
    """Return whether two parsed answers have the same value.

    An integral, sum, product, limit or derivative equals only itself: evaluation may take minutes, and would
    make the question its own answer."""
    if is_undone(gold) or is_undone(mine):
        return bool(gold.as_dummy() == mine.as_dummy())
    return _equal(gold, mine)


def is_undone(value: Basic | MatrixBase) -> bool:
    return bool(value.has(*_UNDONE))


def _equal(gold: Basic | MatrixBase, mine: Basic | MatrixBase) -> bool:
    lists = [_list_entries(one) for one in (gold, mine)]
    if isinstance(gold, Interval) and isinstance(mine, Interval):
        are_equally_open = gold.left_open == mine.left_open and gold.right_open == mine.right_open
        return are_equally_open and _equal(gold.start, mine.start) and _equal(gold.end, mine.end)
    if isinstance(gold, MatrixBase) and isinstance(mine, MatrixBase):
        return gold.shape == mine.shape and all(map(_equal, gold.flat(), mine.flat()))
    if isinstance(gold, Expr) and isinstance(mine, Expr) and not _has_matrix(gold, mine):
        return _equal_expressions(gold, mine)
    gold_entries, predicted_entries = lists
    if gold_entries is not None and predicted_entries is not None:
        are_sets = isinstance(gold, sympy.FiniteSet) and isinstance(mine, sympy.FiniteSet)
        are_sets |= isinstance(gold, sympy.Union) and isinstance(mine, sympy.Union)
        if are_sets:
            return _contains_all(gold_entries, predicted_entries) and _contains_all(
                predicted_entries, gold_entries
            )
        return len(gold_entries) == len(predicted_entries) and all(
            map(_equal, gold_entries, predicted_entries)
        )
    for one, other in ((gold_entries, mine), (predicted_entries, gold)):  # {5} and 5
        if one is not None and len(one) == 1 and isinstance(other, Expr):
            return isinstance(one[0], Expr) and _equal_expressions(one[0], other)
    if isinstance(gold, Expr) or isinstance(mine, Expr):
        return _has_matrix(gold, mine) and _verify(gold, mine)
    return _verify(gold, mine)


def _verify(gold: Basic | MatrixBase, mine: Basic | MatrixBase) -> bool:
    return bool(verify([gold], [mine], timeout_seconds=None))


def _has_matrix(*values: Basic) -> bool:
    return any(isinstance(value, Basic) and value.has(sympy.MatrixBase, sympy.MatrixExpr) for value in values)


def _list_entries(value: Basic | MatrixBase) -> list[Any] | None:
    """Return entries of a set, tuple or union, else None. An open interval may be a pair."""
    if isinstance(value, sympy.FiniteSet):
        return list(getattr(value, "_unsorted_args", value.args))
    if isinstance(value, sympy.Tuple | sympy.Union):
        return list(value.args)
    if isinstance(value, Interval) and value.left_open and value.right_open:
        return [value.start, value.end]
    return None


def _contains_all(entries: list[Any], wanted: list[Any]) -> bool:
    return all(any(_equal(value, entry) for entry in entries) for value in wanted)


def _equal_expressions(gold: Expr, mine: Expr) -> bool:
    r"""Return whether two expressions are equal at all points where both are real.

    `\sqrt{L}/\sqrt{g}` equals `\sqrt{L/g}`; `\sqrt{x^2}` is not `x`."""
    if gold == mine:
        return not gold.has(sympy.nan, sympy.zoo)
    are_infinite = [expression.has(sympy.oo, sympy.zoo, sympy.nan) for expression in (gold, mine)]
    if any(are_infinite):
        return all(are_infinite) and gold.doit() == mine.doit() != sympy.nan
    is_exact = not (gold.has(Float) or mine.has(Float))
    digits = _GUARD_DIGITS + int(2 * max(_check_size(gold), _check_size(mine)))
    is_slow = any(_has_gamma(expression) or has_bend(expression) for expression in (gold, mine))
    if digits > _SLOW_DIGITS and is_slow:
        return False
    gold, mine = map(_plain_symbols, (gold, mine))
    names = sorted({symbol.name for expression in (gold, mine) for symbol in expression.free_symbols})
    case = symbol_case(gold, mine)
    if not names:
        values = [attempt(_evaluate, expression, {}, case, digits, False) for expression in (gold, mine)]
        return None not in values and _close(values[0], values[1], digits, is_exact)
    value_pairs = list(_evaluate_both(gold, mine, sorted(set(map(case, names))), case, digits))
    return len(value_pairs) >= _ENOUGH and all(_close(a, b, digits) for a, b in value_pairs)


def _evaluate_both(
    gold: Expr, mine: Expr, names: Sequence[str], case: Callable[[str], str], digits: int
) -> Iterator[tuple[Expr, Expr]]:
    """Yield values at random points where both are real, else at positive points."""
    rng = random.Random(0)
    signs = [(1, 1)] * _ENOUGH + [(-1, 1)] * (_TRIES - _ENOUGH)
    near_points = (near_point(names, rng, digits, pair) for pair in signs)
    distant_points = iter(far_points(names, rng, digits, (gold, mine)))
    positive_points = (near_point(names, rng, digits, (1, 1)) for _ in range(_ENOUGH))
    count = 0
    for points, require_real, max_count in (
        (near_points, True, _POINTS),
        (distant_points, True, inf),
        (positive_points, False, inf),
    ):
        if count and not require_real:
            return
        for point in points:
            pair = [
                attempt(_evaluate, expression, point, case, digits, require_real)
                for expression in (gold, mine)
            ]
            if pair[0] is None or pair[1] is None:
                continue
            count += 1
            yield pair[0], pair[1]
            if not _close(pair[0], pair[1], digits):
                return
            if count == max_count:
                break


def near_point(
    names: Iterable[str], draw: random.Random, digits: int, signs: tuple[int, int] = (-1, 1)
) -> dict[str, Float]:
    return {name: Float(draw.uniform(_SMALLEST, _LARGEST) * draw.choice(signs), digits) for name in names}


def far_points(
    names: Sequence[str], draw: random.Random, digits: int, expressions: Iterable[Expr]
) -> list[dict[str, Float]]:
    r"""Return points around constants and at larger scales for bends like `|x - 4|`."""
    if not any(map(has_bend, expressions)):
        return []
    nodes = (
        node
        for expression in expressions
        for node in sympy.preorder_traversal(expression)
        if not node.free_symbols
    )
    values = (attempt(_evaluate, node, {}, str, digits, True) for node in nodes)
    constants = sorted({abs(value) for value in values if value is not None})[-_CONSTANTS:]
    scales = [*_SCALES, *(scale * constants[-1] for scale in _SCALES if constants)]
    sizes = [scale * draw.uniform(_SMALLEST, _LARGEST) for scale in scales]
    for constant in constants:
        offset = draw.uniform(_SMALLEST, 1)
        sizes += [abs(constant - offset), constant + offset]
    points = []
    for index, value in enumerate(sign * size for size in sizes for sign in (1, -1)):
        point = near_point(names, draw, digits)
        far_point = {name: Float(draw.choice(sizes) * draw.choice((-1, 1)), digits) for name in names}
        point |= {name: coordinate for name, coordinate in far_point.items() if draw.random() < 0.5}
        points.append(point | {names[index // 2 % len(names)]: Float(value, digits)})
    return points


def has_bend(expression: Expr) -> bool:
    """Return whether an expression may be piecewise, such as |x|."""
    has_even_root = any(
        isinstance(power.exp, Rational) and power.exp.q % 2 == 0 and not power.base.is_Atom
        for power in expression.atoms(Pow)
        if power.free_symbols
    )
    return has_even_root or any(node.free_symbols for node in expression.atoms(*_BENT))


def _has_gamma(expression: Expr) -> bool:
    """Return whether a factorial, gamma function or binomial has a non-integer argument."""
    functions = expression.atoms(sympy.factorial, sympy.gamma, sympy.binomial)
    return any(not argument.is_Integer for function in functions for argument in function.args)


def _plain_symbols(expression: Expr) -> Expr:
    """Replace unknown functions f(x) by symbols."""
    functions = expression.atoms(AppliedUndef)
    return (
        expression.xreplace({function: Symbol(str(function)) for function in functions})
        if functions
        else expression
    )


def symbol_case(*expressions: Expr) -> Callable[[str], str]:
    """Return `str` if a letter occurs in both cases, else `str.lower`."""
    for expression in expressions:
        names = {symbol.name for symbol in expression.free_symbols}
        if len({name.lower() for name in names}) < len(names):
            return str
    return str.lower


def _evaluate(
    node: Basic, point: Mapping[str, Expr], case: Callable[[str], str], digits: int, real: bool
) -> Expr:
    """Return a Rational if possible, else a number with `digits` digits.

    real: raise _Undefined if a part is not real."""
    if isinstance(node, Symbol):
        return point[case(node.name)]
    if isinstance(node, Float):
        return Rational(str(node))
    if isinstance(node, Rational):
        return node
    arguments = [_evaluate(argument, point, case, digits, real) for argument in node.args]
    if isinstance(node, sympy.UnevaluatedExpr):
        return arguments[0]
    value = node.func(*arguments) if arguments else node
    if isinstance(node, Pow) and _is_odd_root(*arguments):
        root = Pow(-arguments[0], arguments[1])  # sympy's root is complex
        value = -root if arguments[1].p % 2 else root
    if not isinstance(value, Rational):
        value = value.evalf(digits)
    if not value.is_number or value.is_finite is False or value.has(sympy.nan):
        raise _Undefined
    if real and value.is_real is False:
        raise _Undefined
    return value


def _is_odd_root(base: Expr, exponent: Expr) -> bool:
    """Return whether it is an odd root of a negative number, real here."""
    is_odd = isinstance(exponent, Rational) and exponent.q > 1 and exponent.q % 2 == 1
    return is_odd and base.is_negative is True


def _close(a: Expr, b: Expr, digits: int, exact: bool = True) -> bool:
    if exact and isinstance(a, Rational) and isinstance(b, Rational):
        return bool(a == b)
    scale = max(abs(a), abs(b))
    if exact:
        return bool(abs(a - b) <= scale * Float(10, digits) ** (_LOST_DIGITS - digits))
    have_same_places = all(_six_places(part(a)) == _six_places(part(b)) for part in (sympy.re, sympy.im))
    return have_same_places and bool(abs(a - b) * 1000 <= scale)


def equal_numbers(p: Fraction, p_is_decimal: bool, q: Fraction, q_is_decimal: bool) -> bool:
    """Compare decimals to six places and three digits."""
    if p == q or not (p_is_decimal or q_is_decimal):
        return p == q
    return round(p, 6) == round(q, 6) and abs(p - q) * 1000 <= max(abs(p), abs(q))


def rational(number: Basic | MatrixBase) -> Rational | None:
    """Return the exact rational value, else None."""
    if not isinstance(number, Expr) or number.free_symbols or is_undone(number):
        return None
    value = _evaluate(number, {}, str, _GUARD_DIGITS, False)
    return value if isinstance(value, Rational) else None


def _six_places(value: Expr) -> int:
    return int(sympy.floor(value * 10**6 + Rational(1, 2)))


def _check_size(node: Basic | MatrixBase) -> float:
    """Bound all numbers' digits before or after the point. Raises Unreadable above _MAX_DIGITS."""
    try:
        size = _estimate_digits(node)
    except (OverflowError, RecursionError) as error:
        raise Unreadable from error
    if not size <= _MAX_DIGITS:
        raise Unreadable
    return size


def _estimate_digits(node: Any) -> float:
    if isinstance(node, Float):
        node = abs(node)
        return abs(float(sympy.log(node, 10))) + 17 if node.is_finite and node != 0 else 17
    if isinstance(node, Rational):
        return max(_digits(node.p), _digits(node.q))
    arguments = node.flat() if isinstance(node, MatrixBase) else node.args
    sizes = [_check_size(one) for one in arguments]
    max_digits = max(sizes, default=1.0)
    if isinstance(node, Pow):
        base_digits, exponent = max(sizes[0], 1.0), node.exp
        if not isinstance(exponent, Rational | Float):
            return base_digits * _magnitude(sizes[1])
        if base_digits * Rational(str(exponent)).q > _MAX_ROOT_DIGITS:
            return inf
        return base_digits * abs(float(exponent))
    if isinstance(node, sympy.exp | sympy.sinh | sympy.cosh | sympy.tanh):
        return max(max_digits, _magnitude(max_digits))
    if isinstance(node, sympy.factorial | sympy.gamma):
        return max(max_digits, max_digits * _magnitude(max_digits))
    if isinstance(node, sympy.binomial):
        upper_digits = sizes[0]
        steps = abs(node.args[1].p) if isinstance(node.args[1], Integer) else inf
        return max(max_digits, min(_magnitude(upper_digits), steps * max(upper_digits, 1.0)))
    if isinstance(node, sympy.Sum | sympy.Product):
        lengths = [upper - lower for _, lower, upper in node.limits]
        return max(max_digits, max_digits * max((int(one) for one in lengths if one.is_Integer), default=1))
    return sum(sizes) if isinstance(node, sympy.Mul) else max_digits + log10(len(sizes) or 1)


def _magnitude(size: float) -> float:
    return 10.0**size if size < 300 else inf


def _digits(number: int) -> float:
    return number.bit_length() * 0.30103


def attempt(function: Callable[..., T], *arguments: Any) -> T | None:
    """Return None if sympy fails, except for lack of memory."""
    try:
        return function(*arguments)
    except MemoryError:  # the pool's limit
        raise
    except Exception:  # noqa: BLE001
        return None
