"""Say what repeated measurements can tell."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import quantiles
from typing import NamedTuple


class Quartiles(NamedTuple):
    """The middle half of some values, and their median."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Quartiles:
        """Return the quartiles of at least one value."""
        return cls(*(quantiles(values, method="inclusive") if len(values) > 1 else [*values] * 3))

    @classmethod
    def of_ratios(cls, values: Sequence[float], others: Sequence[float]) -> Quartiles:
        """Return those of `values`, each as a multiple of the other value of its turn."""
        return cls.of([a / b for a, b in zip(values, others, strict=True)])
