"""Statistics of paired differences: tests, Holm's correction, equivalence, power."""

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
SIGNS = 200_000  # random signs beyond that: standard error 0.0002 at p = 0.005


def paired_t(differences: Sequence[float], level: float) -> tuple[float, float, float]:
    """Return the 1 - level interval (low, high) and two-sided p of the paired t-test."""
    if min(differences) == max(differences):
        return differences[0], differences[0], float(differences[0] == 0)
    test = stats.ttest_1samp(differences, 0.0)
    low, high = test.confidence_interval(1 - level)
    return float(low), float(high), float(test.pvalue)


def holm(ps: Sequence[float]) -> list[float]:
    """Return p-values after Holm's step-down correction.

    statsmodels' multipletests gives the same, but collects Python's garbage in each call."""
    corrected, running_max = [0.0] * len(ps), 0.0
    for rank, i in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
        running_max = corrected[i] = max(running_max, min(1.0, ps[i] * (len(ps) - rank)))
    return corrected


def sign_flip_p(differences: Sequence[float], exact: int = EXACT, samples: int = SIGNS) -> float:
    """Return the two-sided p of a test for symmetry about 0 (Fisher 1935).

    It is the share of sign choices with at least the observed |sum|, of all 2^n up to `exact` differences,
    else of `samples` random ones. Counting the observed choice keeps p valid (Phipson and Smyth 2010).
    scipy.stats.permutation_test takes 300 times as long."""
    values = np.asarray(differences, dtype=np.float64)
    observed_sum = abs(values.sum()) - 1e-9 * np.abs(values).sum()  # ties stay ties in any order of sums
    if len(values) <= exact:
        sums = values[:1]  # both signs of the first give the same distances
        for value in values[1:]:
            sums = np.concatenate([sums + value, sums - value])
        return float((np.abs(sums) >= observed_sum).mean())
    rng, num_extreme = np.random.default_rng(0), 1
    for _ in range(samples // 10_000):
        signs = rng.integers(0, 2, (10_000, len(values))) * 2.0 - 1
        num_extreme += int((np.abs(signs @ values) >= observed_sum).sum())
    return num_extreme / (samples // 10_000 * 10_000 + 1)


def equivalence_p(differences: Sequence[float], bound: float) -> float:
    """Return the p of |true mean| >= bound: the larger of two one-sided t-tests (Schuirmann 1987)."""
    if min(differences) == max(differences):
        return 0.0 if abs(differences[0]) < bound else 1.0
    p_above = stats.ttest_1samp(differences, -bound, alternative="greater").pvalue
    p_below = stats.ttest_1samp(differences, bound, alternative="less").pvalue
    return float(max(p_above, p_below))


def least_seeds(alpha: float) -> int:
    """Return the fewest seeds for a significant sign-flip test, whose smallest p is 2 / 2^n."""
    n = 2
    while 2.0 ** (1 - n) >= alpha:
        n += 1
    return n


def power(n: int, effect: float, alpha: float) -> float:
    """Return the power of a two-sided test at alpha of n paired differences.

    effect: mean in standard deviations. It is the t-test's power, which is close to the sign-flip test's for
    normal differences, and 0 below `least_seeds`."""
    if n < least_seeds(alpha):
        return 0.0
    return float(TTestPower().power(abs(effect), n, alpha / 2, alternative="larger"))


def equivalence_power(n: int, bound: float, alpha: float) -> float:
    """Return the probability of showing equivalence at alpha with n paired differences of true mean 0.

    bound: in standard deviations. statsmodels lacks this function."""
    if n < 2:
        return 0.0
    critical_t, reach = stats.t.isf(alpha, n - 1), bound * math.sqrt(n)
    spread = stats.chi(n - 1, scale=(n - 1) ** -0.5)
    # Without tight limits the quadrature could miss the probability.
    low, high = spread.ppf(1e-13), min(spread.isf(1e-13), reach / critical_t)
    if low >= high:
        return 0.0
    return float(spread.expect(lambda s: 2 * stats.norm.cdf(reach - critical_t * s) - 1, lb=low, ub=high))


def seeds_needed(chance: Callable[[int], float], wanted: float, most: int = 2000) -> int | None:
    """Return the smallest n with chance(n) >= wanted for a rising `chance`; None above `most`."""
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
def smallest_detectable(n: int, alpha: float, wanted: float) -> float:
    """Return the smallest effect, in standard deviations, that n seeds detect with probability `wanted`."""
    if n < least_seeds(alpha):
        return math.inf
    return float(TTestPower().solve_power(nobs=n, alpha=alpha / 2, power=wanted, alternative="larger"))
