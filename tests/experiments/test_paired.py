"""Statistics of paired differences, against printed tables, integrals, sign flips and simulations."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from megarl_experiments.paired import (
    equivalence_p,
    equivalence_power,
    holm,
    least_seeds,
    paired_t,
    power,
    seeds_needed,
    sign_flip_p,
    smallest_detectable,
)


def sample(mean: float, error: float, n: int) -> list[float]:
    """Return n numbers with this mean and this standard error of the mean."""
    noise = np.arange(n) - (n - 1) / 2
    return [float(x) for x in mean + noise * error * math.sqrt(n) / noise.std(ddof=1)]


class TestPairedT:
    # Two-sided critical values as printed in statistics books: (degrees of freedom, confidence, t).
    TABLE = [
        (1, 0.95, 12.706), (2, 0.95, 4.303), (3, 0.95, 3.182), (4, 0.95, 2.776), (5, 0.95, 2.571),
        (7, 0.95, 2.365), (9, 0.95, 2.262), (30, 0.95, 2.042), (120, 0.95, 1.980), (1, 0.90, 6.314),
        (4, 0.90, 2.132), (1, 0.99, 63.657), (4, 0.99, 4.604), (9, 0.99, 3.250),
    ]  # fmt: skip

    @pytest.mark.parametrize(("df", "share", "t"), TABLE)
    def test_tabulated_quantiles(self, df: int, share: float, t: float) -> None:
        """The interval extends t standard errors to both sides, and touches 0 where p is 1 - share."""
        low, high, p = paired_t(sample(t, 1.0, df + 1), 1 - share)
        assert (low, high) == (pytest.approx(0.0, abs=6e-4), pytest.approx(2 * t, abs=6e-4))
        assert p == pytest.approx(1 - share, abs=2e-4)

    @given(st.integers(1, 60), st.floats(0.01, 30))
    def test_against_the_integral_of_the_density(self, df: int, t: float) -> None:
        constant = math.exp(math.lgamma((df + 1) / 2) - math.lgamma(df / 2)) / math.sqrt(df * math.pi)

        def density(x: float) -> float:
            return constant * (1 + x * x / df) ** (-(df + 1) / 2)

        n = 2000  # Simpson's rule on [0, t], doubled
        inner = sum((4 if i % 2 else 2) * density(i * t / n) for i in range(1, n))
        within = 2 * (density(0) + inner + density(t)) * t / n / 3
        assert paired_t(sample(t, 1.0, df + 1), 0.05)[2] == pytest.approx(1 - within, abs=1e-9)

    def test_differences_that_are_all_the_same(self) -> None:
        assert paired_t([0.1] * 5, 0.05) == (0.1, 0.1, 0.0) and paired_t([0.0] * 5, 0.05) == (0.0, 0.0, 1.0)


class TestHolm:
    def test_as_in_r(self) -> None:
        """p.adjust(c(0.01, 0.04, 0.03, 0.005), "holm") gives 0.03 0.06 0.06 0.02."""
        assert holm([0.01, 0.04, 0.03, 0.005]) == [*map(pytest.approx, (0.03, 0.06, 0.06, 0.02))]
        assert holm([]) == []

    @given(st.lists(st.floats(0, 1), min_size=1, max_size=8), st.data())
    def test_a_smaller_p_never_raises_another(self, ps: list[float], data: st.DataObject) -> None:
        """An unfinished row may therefore count as p = 1; a verdict of `holds` then stays valid."""
        i = data.draw(st.integers(0, len(ps) - 1))
        before = holm([*ps[:i], 1.0, *ps[i + 1 :]])
        assert all(after <= b for after, b in zip(holm(ps), before, strict=True))


class TestSignFlip:
    @given(st.lists(st.integers(-20, 20), min_size=1, max_size=8))
    def test_against_a_loop_over_all_signs(self, differences: list[int]) -> None:
        sums = [
            sum(s * d for s, d in zip(signs, differences, strict=True))
            for signs in itertools.product((-1, 1), repeat=len(differences))
        ]
        expected = sum(abs(total) >= abs(sum(differences)) for total in sums) / len(sums)
        # Tenths have rounded sums: ties must remain ties.
        assert sign_flip_p([d / 10 for d in differences]) == pytest.approx(expected)

    def test_all_of_one_sign(self) -> None:
        assert sign_flip_p([0.1 + i / 100 for i in range(20)]) == 2 / 2**20
        assert sign_flip_p([0.0] * 5) == 1.0

    def test_drawn_signs_agree_with_all_signs(self) -> None:
        rng = random.Random(3)
        differences = [rng.gauss(0.02, 0.05) for _ in range(14)]
        exact = sign_flip_p(differences)
        assert 0.001 < exact < 0.5
        assert sign_flip_p(differences, exact=5) == pytest.approx(exact, abs=4 * math.sqrt(0.25 / 200_000))
        assert sign_flip_p([0.1] * 40) == 1 / 200_001  # never 0


class TestEquivalence:
    def test_by_the_printed_quantile(self) -> None:
        """A 90 % interval that just touches the bound has p = 0.05: t(4) = 2.132."""
        touching = sample(0.01, 0.01, 5)
        assert equivalence_p(touching, 0.01 + 0.02132) == pytest.approx(0.05, abs=1e-4)
        assert equivalence_p([-d for d in touching], 0.01 + 0.02132) == pytest.approx(0.05, abs=1e-4)
        assert equivalence_p(sample(0.05, 0.01, 5), 0.05) == pytest.approx(0.5)
        assert equivalence_p(sample(0.05 + 0.02132, 0.01, 5), 0.05) == pytest.approx(0.95, abs=1e-4)

    def test_runs_that_are_all_the_same(self) -> None:
        assert equivalence_p([0.0] * 5, 0.01) == 0.0 and equivalence_p([0.02] * 5, 0.01) == 1.0


class TestPower:
    # Pairs for a power of 0.8 at a two-sided 0.05 as G*Power prints them, with the exact power.
    GPOWER = [(0.2, 199, 0.8017), (0.5, 34, 0.8078), (0.8, 15, 0.8213)]

    @pytest.mark.parametrize(("effect", "n", "reached"), GPOWER)
    def test_as_gpower(self, effect: float, n: int, reached: float) -> None:
        assert seeds_needed(lambda n: power(n, effect, 0.05), 0.8) == n
        assert power(n, effect, 0.05) == pytest.approx(reached, abs=2e-4)
        assert smallest_detectable(n, 0.05, reached) == pytest.approx(effect, abs=1e-3)

    def test_against_simulated_experiments(self) -> None:
        """20 seeds at a ninth of 0.05, against frequencies in 20,000 simulated experiments."""
        n, alpha, rng = 20, 0.05 / 9, np.random.default_rng(7)
        noise = rng.normal(size=(20_000, n))
        errors = noise.std(axis=1, ddof=1) / math.sqrt(n)
        found = (noise.mean(axis=1) + 0.9) / errors > stats.t.isf(alpha / 2, n - 1)
        assert power(n, 0.9, alpha) == pytest.approx(found.mean(), abs=0.015)
        inside = np.abs(noise.mean(axis=1)) + stats.t.isf(alpha, n - 1) * errors < 0.9
        assert equivalence_power(n, 0.9, alpha) == pytest.approx(inside.mean(), abs=0.015)

    def test_the_permutation_test_has_about_that_power(self) -> None:
        rng = np.random.default_rng(1)
        found = [sign_flip_p(rng.normal(1.2, 1.0, size=11).tolist()) < 0.01 for _ in range(400)]
        assert power(11, 1.2, 0.01) == pytest.approx(sum(found) / 400, abs=0.06)

    def test_few_seeds_find_nothing_whatever_the_effect(self) -> None:
        """With 5 seeds the smallest p over all sign flips is 2 / 32, so nothing is below 0.05."""
        assert [least_seeds(alpha) for alpha in (0.07, 0.05, 0.05 / 9)] == [5, 6, 9]
        assert power(5, 100.0, 0.05) == 0.0 and power(6, 100.0, 0.05) == pytest.approx(1.0, abs=1e-6)
        assert smallest_detectable(5, 0.05, 0.8) == math.inf
        assert seeds_needed(lambda n: power(n, 1e-3, 0.05), 0.8) is None
        assert equivalence_power(1, 1.0, 0.05) == 0.0

    def test_many_seeds_show_equivalence_for_sure(self) -> None:
        """The integral over the measured deviation has a narrow peak, because the deviation hardly varies."""
        assert equivalence_power(2000, 10.0, 0.025) == pytest.approx(1.0, abs=1e-6)
        assert equivalence_power(2000, 0.01, 0.025) == 0.0
