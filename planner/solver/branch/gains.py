"""Remember how much the bound rose whenever a decision was taken: its pseudo-costs."""

from __future__ import annotations

from statistics import fmean

LEAST = 1e-3  # so that a gain of nothing one way does not hide the gain the other way


class Gains:
    """The rise of the bound for each unit that a decision was moved, by decision and way."""

    def __init__(self) -> None:
        self._sums: dict[tuple[int, int], tuple[float, int]] = {}

    def learn(self, decision: int, way: int, gain: float) -> None:
        """Note that the bound rose by `gain` per unit when `decision` was taken `way`, 0 or 1."""
        total, times = self._sums.get((decision, way), (0.0, 0))
        self._sums[decision, way] = total + gain, times + 1

    def are_known(self, decision: int) -> bool:
        """Return True if both ways of `decision` were tried."""
        return (decision, 0) in self._sums and (decision, 1) in self._sums

    def expected(self, decision: int, value: float) -> float:
        """Return the product of the expected gains of both ways, from `value`."""
        return max(value * self._mean(decision, 0), LEAST) * max((1 - value) * self._mean(decision, 1), LEAST)

    def _mean(self, decision: int, way: int) -> float:
        if (decision, way) not in self._sums:
            return fmean(total / times for total, times in self._sums.values()) if self._sums else 1.0
        total, times = self._sums[decision, way]
        return total / times
