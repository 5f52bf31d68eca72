"""Find the rows of a table that no other row matches or beats in every column."""

from __future__ import annotations

import numpy as np

from autoac.planner.solver.arrays import Floats


def not_dominated(numbers: Floats) -> list[int]:
    """Return the indices of rows for which no other row is at most as large in every column.

    Of rows that are equal, return one.
    """
    best: list[int] = []
    kept = np.empty_like(numbers)
    for row in np.lexsort(numbers.T[::-1]).tolist():
        if not (kept[: len(best)] <= numbers[row]).all(axis=1).any():
            kept[len(best)] = numbers[row]
            best.append(row)
    return best
