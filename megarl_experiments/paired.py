"""The statistics of paired differences: tests, Holm's correction, equivalence, and the power of n seeds.

Two runs of one seed share the warm start, the data and the order of prompts; what is judged is their
difference, seed by seed. Nothing here knows of runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

from megarl.config.errors import ConfigError

try:
    from scipy import stats
    from statsmodels.stats.power import TTestPower
except ImportError as error:
    raise ConfigError(f"megarl ablate: {error} (pip install 'megarl[experiments]')") from None

EXACT = 20  # seeds up to which all 2^n signs are tried
DRAWS = 200_000  # of signs beyond that: a p of 0.005 is then known to 0.0002


def paired_t(differences: Sequence[float], level: float) -> tuple[float, float, float]:
    """Return the interval of 1 - level of the mean difference, and the two-sided p of the paired t-test.
    Differences that are all the same have an interval without width."""
    if min(differences) == max(differences):
        return differences[0], differences[0], float(differences[0] == 0)
    test = stats.ttest_1samp(differences, 0.0)
    low, high = test.confidence_interval(1 - level)
    return float(low), float(high), float(test.pvalue)


def holm(ps: Sequence[float]) -> list[float]:
    """Return the p-values after Holm's step-down correction: the i-th smallest of m times m - i + 1, never
    less than the one before, at most 1. By hand, as statsmodels' multipletests comes to the same and collects
    Python's garbage in each call, 0.15 s where torch is loaded."""
    corrected, least = [0.0] * len(ps), 0.0
    for rank, i in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
        least = corrected[i] = max(least, min(1.0, ps[i] * (len(ps) - rank)))
    return corrected


def sign_flip_p(differences: Sequence[float], exact: int = EXACT, draws: int = DRAWS) -> float:
    """Return the two-sided p of the hypothesis that the differences are symmetric about 0: the share of all
    choices of signs whose sum is at least as far from 0 as the observed one (Fisher 1935).

    All 2^n choices up to `exact` differences; beyond, that many draws with the observed one among them,
    always the same draws (Phipson and Smyth 2010: such a p is never 0 and still valid). By hand, as
    scipy.stats.permutation_test comes to the same p in 9 s for 20 differences, and this in 25 ms."""
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


def equivalence_p(differences: Sequence[float], bound: float) -> float:
    """Return the p of |true mean| >= bound by two one-sided t-tests (Schuirmann 1987): the larger of the
    two."""
    if min(differences) == max(differences):
        return 0.0 if abs(differences[0]) < bound else 1.0
    above = stats.ttest_1samp(differences, -bound, alternative="greater").pvalue
    below = stats.ttest_1samp(differences, bound, alternative="less").pvalue
    return float(max(above, below))


def least_seeds(alpha: float) -> int:
    """Return the number of seeds from which a sign-flip test can find anything: its least p is 2 / 2^n."""
    n = 2
    while 2.0 ** (1 - n) >= alpha:
        n += 1
    return n


def power(n: int, effect: float, alpha: float) -> float:
    """Return the chance that n paired differences of mean `effect` (in their standard deviations) are found,
    in the right direction, by a two-sided test at alpha.

    This is the t-test's power; the sign-flip test's is close to it for normal differences, and 0 below
    `least_seeds`."""
    if n < least_seeds(alpha):
        return 0.0
    return float(TTestPower().power(abs(effect), n, alpha / 2, alternative="larger"))


def equivalence_power(n: int, bound: float, alpha: float) -> float:
    """Return the chance that n paired differences of true mean 0 are shown to lie within `bound` (in their
    standard deviations) at alpha: that of the mean, over what the measured standard deviation may come to.
    (statsmodels has this for counts only.)"""
    if n < 2:
        return 0.0
    critical, reach = stats.t.isf(alpha, n - 1), bound * math.sqrt(n)
    spread = stats.chi(n - 1, scale=(n - 1) ** -0.5)
    # Between what it practically never is, or the integral could miss where it nearly always is.
    low, high = spread.ppf(1e-13), min(spread.isf(1e-13), reach / critical)
    if low >= high:
        return 0.0
    return float(spread.expect(lambda s: 2 * stats.norm.cdf(reach - critical * s) - 1, lb=low, ub=high))


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
    return float(TTestPower().solve_power(nobs=n, alpha=alpha / 2, power=wanted, alternative="larger"))
