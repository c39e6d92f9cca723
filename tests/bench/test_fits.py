"""Fits against laws that are known, and statistics packages' published results. Run: pytest tests/bench/test_fits.py"""

import math
import random

import pytest
import torch

from memcore.bench.fits import power_law, quadratic

LENGTHS = (512, 1024, 2048, 4096, 8192)
# Anscombe's first data set, whose regression is published: intercept 3.0001, slope 0.5001, standard error of the
# slope 0.1179 (Anscombe, The American Statistician 27, 1973, page 18); eleven points.
ANSCOMBE = (
    (10, 8.04), (8, 6.95), (13, 7.58), (9, 8.81), (11, 8.33), (14, 9.96), (6, 7.24), (4, 4.26), (12, 10.84), (7, 4.82),
    (5, 5.68),
)  # fmt: skip


class TestPowerLaw:
    @pytest.mark.parametrize("exponent", [0.5, 1.0, 2.0])
    def test_an_exact_law_is_found_exactly(self, exponent: float):
        law = power_law([(x, 3 * x**exponent) for x in LENGTHS])
        assert law is not None
        assert law.exponent == pytest.approx(exponent)
        assert law.low == pytest.approx(law.high, abs=1e-6)
        assert law.at(100) == pytest.approx(3 * 100**exponent)

    def test_the_interval_is_that_of_a_published_regression(self):
        law = power_law([(math.exp(x), math.exp(y)) for x, y in ANSCOMBE])
        assert law is not None
        assert law.exponent == pytest.approx(0.5001, abs=1e-4)
        # Student's 97.5% quantile for 9 degrees of freedom is 2.262.
        assert law.high - law.exponent == pytest.approx(2.262 * 0.1179, abs=2e-4)

    def test_the_interval_holds_the_true_exponent_about_19_times_in_20(self):
        noise = random.Random(7)
        held = 0
        for _ in range(400):
            law = power_law([(x, x**1.5 * math.exp(noise.gauss(0, 0.1))) for x in LENGTHS])
            assert law is not None
            held += law.low <= 1.5 <= law.high
        assert 365 <= held <= 395

    @pytest.mark.parametrize("points", [[], [(1, 1), (2, 2)], [(1, 1), (1, 2), (1, 3)], [(1, 0), (2, 1), (3, 2)]])
    def test_too_few_points_give_no_law(self, points: list[tuple[float, float]]):
        assert power_law(points) is None


class TestQuadratic:
    def test_an_exact_law_is_found_exactly(self):
        law = quadratic([(x, 5e6 + 3e4 * x + 20 * x * x) for x in LENGTHS])
        assert law is not None
        assert (law.c0, law.c1, law.c2) == pytest.approx((5e6, 3e4, 20))
        assert law.takeover == 1500
        assert sum(law.shares(4096)) == pytest.approx(100)
        assert law.at(1000) == pytest.approx(5e6 + 3e7 + 2e7)

    def test_it_is_torchs_weighted_least_squares(self):
        noise = random.Random(3)
        points = [(x, (5e6 + 3e4 * x + 20 * x * x) * (1 + noise.gauss(0, 0.02))) for x in LENGTHS]
        law = quadratic(points)
        rows = torch.tensor([[1 / y, x / y, x * x / y] for x, y in points], dtype=torch.float64)
        solved = torch.linalg.lstsq(rows, torch.ones(len(points), 1, dtype=torch.float64), driver="gelsd").solution
        assert law is not None
        assert (law.c0, law.c1, law.c2) == pytest.approx(solved.flatten().tolist(), rel=1e-6)

    def test_a_linear_law_has_no_takeover(self):
        law = quadratic([(x, 7e3 * x) for x in LENGTHS])
        assert law is not None
        assert law.c1 == pytest.approx(7e3)
        assert law.shares(8192)[2] == pytest.approx(0, abs=1e-6)

    def test_no_part_is_negative(self):
        law = quadratic([(x, 7e3 * x - 1e5) for x in LENGTHS])
        assert law is not None
        assert min(law.c0, law.c1, law.c2) >= 0

    def test_three_points_are_too_few(self):
        assert quadratic([(1, 1), (2, 2), (3, 3)]) is None
