"""Laws fitted to measured points: exponents with their intervals, and polynomials.

Symbols: x a size, y bytes; y = C x^p, so that log y = log C + p log x. The interval is Student's 95% interval of p.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log, sqrt

# The 97.5% quantile of Student's distribution by degrees of freedom (NIST/SEMATECH e-Handbook of Statistical
# Methods, section 1.3.6.7.2); beyond the table that of the normal distribution.
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
_NORMAL = 1.960

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class PowerLaw:
    """y = factor x^exponent; the exponent lies between `low` and `high` with 95% confidence, if errors are normal."""

    exponent: float
    low: float
    high: float
    factor: float
    num_points: int

    def at(self, x: float) -> float:
        """The law's y."""
        return float(self.factor * x**self.exponent)


def power_law(points: Points) -> PowerLaw | None:
    """The straight line through logarithms, by least squares; None for fewer than three different sizes."""
    if len({x for x, _y in points}) < 3 or any(x <= 0 or y <= 0 for x, y in points):
        return None
    logs = [(log(x), log(y)) for x, y in points]
    mean_x, mean_y = (sum(each) / len(logs) for each in zip(*logs, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _y in logs)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in logs) / spread
    left = sum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in logs)
    freedom = len(logs) - 2
    quantile = _STUDENT[freedom - 1] if freedom <= len(_STUDENT) else _NORMAL
    margin = quantile * sqrt(left / freedom / spread)
    return PowerLaw(
        exponent=slope,
        low=slope - margin,
        high=slope + margin,
        factor=exp(mean_y - slope * mean_x),
        num_points=len(logs),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Quadratic:
    """y = c0 + c1 x + c2 x^2."""

    c0: float
    c1: float
    c2: float

    def at(self, x: float) -> float:
        """The law's y."""
        return self.c0 + self.c1 * x + self.c2 * x * x

    def shares(self, x: float) -> tuple[float, float, float]:
        """How much of y the constant, the linear and the quadratic part are, in percent."""
        parts = (self.c0, self.c1 * x, self.c2 * x * x)
        return (100 * parts[0] / sum(parts), 100 * parts[1] / sum(parts), 100 * parts[2] / sum(parts))

    @property
    def takeover(self) -> int | None:
        """The x from which the quadratic part is larger than the linear one; None where it never is."""
        return round(self.c1 / self.c2) if self.c1 > 0 and self.c2 > 0 else None


def quadratic(points: Points) -> Quadratic | None:
    """Least squares of the relative errors, with no part below zero; None for fewer than four different sizes.

    A part that the points would have negative is left out, and the rest is fitted again.
    """
    if len({x for x, _y in points}) < 4 or any(y <= 0 for _x, y in points):
        return None
    powers = [0, 1, 2]
    while True:
        found = dict(zip(powers, _least_squares(points, powers), strict=True))
        lowest = min(powers, key=lambda power: found[power] * max(x for x, _y in points) ** power)
        if found[lowest] >= 0 or len(powers) == 1:
            return Quadratic(c0=found.get(0, 0.0), c1=found.get(1, 0.0), c2=found.get(2, 0.0))
        powers.remove(lowest)


def _least_squares(points: Points, powers: Sequence[int]) -> list[float]:
    """Coefficients of x^p that make the sum of squared relative errors least: the normal equations."""
    top = max(x for x, _y in points)
    rows = [([(x / top) ** power / y for power in powers], 1.0) for x, y in points]
    size = range(len(powers))
    matrix = [[sum(row[i] * row[j] for row, _one in rows) for j in size] for i in size]
    right = [sum(row[i] * one for row, one in rows) for i in size]
    return [value / top**power for value, power in zip(_solve(matrix, right), powers, strict=True)]


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Gauss's elimination with the largest pivot."""
    size = len(right)
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for column in range(size):
        pivot = max(range(column, size), key=lambda row: abs(rows[row][column]))
        rows[column], rows[pivot] = rows[pivot], rows[column]
        for row in range(size):
            if row != column:
                factor = rows[row][column] / rows[column][column]
                rows[row] = [a - factor * b for a, b in zip(rows[row], rows[column], strict=True)]
    return [rows[index][size] / rows[index][index] for index in range(size)]
