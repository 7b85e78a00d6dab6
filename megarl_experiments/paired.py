"""The statistics of paired differences: tests, Holm's correction, equivalence, and the power of n seeds.

Two runs of one seed share the warm start, the data and the order of prompts; what is judged is their
difference, seed by seed. Nothing here knows of runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

EXACT = 20  # seeds up to which all 2^n signs are tried
DRAWS = 200_000  # of signs beyond that: a p of 0.005 is then known to 0.0002


def t_within(t: float, df: int) -> float:
    """Return P(|T| <= t) of Student's t, df a whole number (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan2(t, math.sqrt(df))
    term = math.cos(angle) if df % 2 else 1.0
    total = term if df > 1 else 0.0
    for k in range(3 if df % 2 else 2, df - 1, 2):
        term *= math.cos(angle) ** 2 * (k - 1) / k
        total += term
    return 2 / math.pi * (angle + math.sin(angle) * total) if df % 2 else math.sin(angle) * total


@cache
def t_quantile(share: float, df: int) -> float:
    """Return t with P(|T| <= t) = share, by bisection."""
    low, high = 0.0, 1.0
    while t_within(high, df) < share:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if t_within(middle, df) < share else (low, middle)
    return high


def holm(ps: Sequence[float]) -> list[float]:
    """Return the p-values after Holm's step-down correction: the i-th smallest of m times m - i + 1, never
    less than the one before, at most 1."""
    corrected, least = [0.0] * len(ps), 0.0
    for rank, i in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
        least = corrected[i] = max(least, min(1.0, ps[i] * (len(ps) - rank)))
    return corrected


def sign_flip_p(differences: Sequence[float], exact: int = EXACT, draws: int = DRAWS) -> float:
    """Return the two-sided p of the hypothesis that the differences are symmetric about 0: the share of all
    choices of signs whose sum is at least as far from 0 as the observed one (Fisher 1935).

    All 2^n choices up to `exact` differences; beyond, that many draws with the observed one among them,
    always the same draws (Phipson and Smyth 2010: such a p is never 0 and still valid)."""
    values = np.asarray(differences, dtype=np.float64)
    observed = abs(values.sum()) - 1e-9 * np.abs(values).sum()  # ties stay ties in any order of sums
    if len(values) <= exact:
        sums = values[:1]  # both signs of the first give the same distances
        for value in values[1:]:
            sums = np.concatenate([sums + value, sums - value])
        return float((np.abs(sums) >= observed).mean())
    rng, beyond = np.random.default_rng(0), 1
    for _ in range(draws // 10_000):
        signs = rng.integers(0, 2, (10_000, len(values))) * 2.0 - 1
        beyond += int((np.abs(signs @ values) >= observed).sum())
    return beyond / (draws // 10_000 * 10_000 + 1)


def equivalence_p(mean: float, error: float, df: int, bound: float) -> float:
    """Return the p of |true mean| >= bound by two one-sided t-tests (Schuirmann 1987): the larger of the two,
    which is that of the bound on the mean's side. error: standard error of the mean."""
    room = bound - abs(mean)
    if error == 0:
        return 0.0 if room > 0 else 1.0
    tail = (1 - t_within(abs(room) / error, df)) / 2
    return tail if room > 0 else 1 - tail


def least_seeds(alpha: float) -> int:
    """Return the number of seeds from which a sign-flip test can find anything: its least p is 2 / 2^n."""
    n = 2
    while 2.0 ** (1 - n) >= alpha:
        n += 1
    return n


def power(n: int, effect: float, alpha: float) -> float:
    """Return the chance that n paired differences of mean `effect` (in their standard deviations) are found,
    in the right direction, by a two-sided test at alpha: the noncentral t distribution's tail.

    This is the t-test's power; the sign-flip test's is close to it for normal differences, and 0 below
    `least_seeds`."""
    if n < least_seeds(alpha):
        return 0.0
    critical = t_quantile(1 - alpha, n - 1)
    return _mean_over_spread(n - 1, lambda s: _normal(abs(effect) * math.sqrt(n) - critical * s))


def equivalence_power(n: int, bound: float, alpha: float) -> float:
    """Return the chance that n paired differences of true mean 0 are shown to lie within `bound` (in their
    standard deviations) at alpha."""
    if n < 2:
        return 0.0
    critical = t_quantile(1 - 2 * alpha, n - 1)
    return _mean_over_spread(n - 1, lambda s: max(0.0, 2 * _normal(bound * math.sqrt(n) - critical * s) - 1))


def seeds_needed(chance: Callable[[int], float], wanted: float, most: int = 2000) -> int | None:
    """Return the least n whose `chance` (of n, rising) is at least `wanted`; None where `most` do not do."""
    if chance(most) < wanted:
        return None
    low, high = 1, 2
    while chance(high) < wanted:
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if chance(middle) < wanted else (low, middle)
    return high


@cache
def smallest_found(n: int, alpha: float, wanted: float) -> float:
    """Return the smallest effect, in standard deviations of the differences, that n seeds find with the
    chance `wanted`; infinite where n seeds cannot find any."""
    if n < least_seeds(alpha):
        return math.inf
    low, high = 0.0, 1.0
    while power(n, high, alpha) < wanted:
        high *= 2
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if power(n, middle, alpha) < wanted else (low, middle)
    return high


def _normal(z: float) -> float:
    return 0.5 * math.erfc(-z / math.sqrt(2))


def _mean_over_spread(df: int, value: Callable[[float], float]) -> float:
    """Return the mean of value(s) over s, the measured standard deviation in units of the true one: s^2 df is
    chi-squared with df degrees of freedom. By the trapezoidal rule."""
    reach = 9 / math.sqrt(2 * df)
    grid: NDArray[np.float64] = np.linspace(max(0.0, 1 - reach), 1 + reach, 401)
    constant = math.log(2) + df / 2 * math.log(df / 2) - math.lgamma(df / 2)
    with np.errstate(divide="ignore"):
        logs = np.log(grid) * (df - 1) if df > 1 else np.zeros_like(grid)
    density = np.exp(constant + logs - df / 2 * grid**2)
    values = np.array([value(float(s)) for s in grid])
    return float(np.trapezoid(density * values, grid))
